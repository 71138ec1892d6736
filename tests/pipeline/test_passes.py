"""The table of passes: what progress says of it, and how what the passes made is printed."""

from __future__ import annotations

from itertools import groupby

import jax
import jax.numpy as jnp

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline.pipeline import PASSES
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.progress import VERBS, Phase

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def test_progress_tells_every_pass_by_its_name() -> None:
    heard: list[Phase] = []
    te.optimize(
        te.trace(lambda x: jnp.tanh(x @ x), X),
        "h100:4",
        mesh_shapes=[MeshShape(("x",), (4,))],
        settings=Settings(work=0.5, workers=1),
        on_progress=heard.append,
    )
    told = [list(phases) for _, phases in groupby(heard, key=lambda p: p.step)]
    assert [phases[0].step for phases in told] == [each.name for each in PASSES]
    for each, phases in zip(PASSES, told, strict=True):
        assert {p.phase for p in phases} == {each.verb}
        assert not phases[0].done and phases[-1].done
        assert len({p.key for p in phases}) == 1
    verbs = [verb for verb, _ in groupby(p.phase for p in heard)]
    assert set(verbs) <= set(VERBS)
    assert str(heard[-1]) == "extract tell_origins"
