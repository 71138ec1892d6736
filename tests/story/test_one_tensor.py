"""docs/architecture.md follows one weight through the pipeline, in the printouts of the stages."""

from __future__ import annotations

import re

import pytest

import tapestry_egg as te
from tests.story.one_tensor import BLOCKS, PAGE, Story, blocks_of, example


@pytest.fixture(scope="module")
def story() -> Story:
    return Story.told()


def test_the_page_has_a_block_for_every_stage() -> None:
    assert list(blocks_of(PAGE.read_text("utf-8"))) == list(BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_the_page_says_what_the_stage_prints(name: str, story: Story) -> None:
    """Write it anew where this fails: `python -m tests.story.one_tensor --write`."""
    assert blocks_of(PAGE.read_text("utf-8"))[name].rstrip("\n") == BLOCKS[name](story)


@pytest.mark.slow
def test_the_page_says_how_its_blocks_are_printed(story: Story) -> None:
    page = PAGE.read_text("utf-8")
    (call,) = re.findall(r"^`(of\(.*\))`", page, re.M)
    names = {"front": story.front, "of": story.front.stages["strategies"].of}
    assert eval(call, names) == blocks_of(page)["strategies"].rstrip("\n")


@pytest.mark.slow
def test_readme_shows_the_front_as_it_is_printed() -> None:
    front = te.optimize(example(donate_argnums=0), "h100:8")
    assert f"```text\n{front}\n```" in (PAGE.parents[1] / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_every_plan_of_the_story_moves_what_it_promised(story: Story) -> None:
    assert all("planned 0 " not in line for line in story.run().splitlines())
