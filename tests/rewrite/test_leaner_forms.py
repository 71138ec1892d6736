"""Which of the forms that hold less memory are searched, of several that rules find."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import load_target
from tapestry_egg.rewrite import fused_forms
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.streams.streamed import RULE as STREAMED
from tapestry_egg.tracing.trace import trace

#: Seconds and bytes of programs on one device, by their names.
COSTS = {
    "given": (1.0, 9.0),
    "lean": (2.0, 5.0),
    "slower": (3.0, 5.0),
    "larger": (2.0, 6.0),
    "equal": (2.0, 5.0),
    "leanest": (4.0, 4.0),
    "quick": (1.5, 7.0),
}


@pytest.mark.parametrize(
    ("forms", "left"),
    [
        (["lean", "slower"], ["lean"]),
        (["larger", "lean"], ["lean"]),
        (["quick", "lean", "leanest"], ["quick", "lean", "leanest"]),
        (["lean", "equal"], ["lean", "equal"]),
        (["slower"], ["slower"]),
        (["slower streamed", "lean"], ["slower streamed", "lean"]),
        (["lean streamed", "slower"], ["lean streamed"]),
    ],
)
def test_a_form_that_another_beats_in_seconds_and_memory_is_not_searched(
    forms: list[str], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one of streams, which may be a kernel of its own, and the program as given."""
    graph = trace(lambda x: jnp.sin(x), jnp.ones(4)).graph

    def costs(of: BlockGraph) -> tuple[float, float]:
        return COSTS[of.name.split()[0]]

    monkeypatch.setattr(fused_forms, "program_seconds", lambda of, _: costs(of)[0])
    monkeypatch.setattr(fused_forms, "peak_alone", lambda of, _: costs(of)[1])
    found = [
        Form(replace(graph, name=n), (STREAMED,) if "streamed" in n else ("other",), slower=True)
        for n in forms
    ]
    searched = fused_forms._undominated(
        [Form(replace(graph, name="given")), *found], (), load_target("h100:1")
    )
    assert [f.graph.name for f in searched] == ["given", *left]
