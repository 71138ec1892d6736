"""Paths by a part of them, and by patterns."""

from __future__ import annotations

import pytest

from tapestry_egg.graph.pytrees import matching, named_by_part

PATHS = ["[0]['layers'][0]['up']", "[0]['layers'][1]['up']", "[0]['embed']", "[0].mu['w']", "key"]


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("embed", ["[0]['embed']"]),
        ("['embed']", ["[0]['embed']"]),
        ("layers", ["[0]['layers']"]),  # all that is below
        ("layers[1]", ["[0]['layers'][1]"]),
        ("layers[1].up", ["[0]['layers'][1]['up']"]),
        ("up", ["[0]['layers'][0]['up']", "[0]['layers'][1]['up']"]),
        ("mu", ["[0].mu"]),
        ("mu.w", ["[0].mu['w']"]),
        ("key", ["key"]),
        ("u", []),  # entries are whole
        ("[1]", []),  # the second argument is none, and no entry of another path
        ("1", []),
        ("", []),
    ],
)
def test_a_part_is_what_no_other_path_has(part: str, found: list[str]) -> None:
    assert named_by_part(part, PATHS) == found


def test_a_pattern_stands_for_entries() -> None:
    assert matching("[0]['layers'][*]['up']", PATHS) == PATHS[:2]
    assert matching("[0]['layers'][0]['up']", PATHS) == []  # no pattern
    assert matching("*['up']", PATHS) == PATHS[:2]
