"""What a prompt and a notebook show of results: a line, a table, a picture; no page of data."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.extract.front.front import Front


@pytest.fixture(scope="module")
def front() -> Front:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w))

    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    graph = te.trace(loss, shape, shape, name="loss")
    return te.optimize(graph, "cpu:2", settings=te.Settings(work=0.3, workers=1))


def test_results_are_a_line_at_the_prompt(front: Front) -> None:
    plan = front.plans[0]
    assert repr(plan).startswith(f"Plan(p0 of loss on cpu:2, mesh {plan.mesh}: ")
    assert repr(plan.graph) == "BlockGraph(loss: 3 operations, 2 inputs, 1 outputs)"
    assert repr(front).startswith("Front(loss on cpu:2: ")
    for shown in (repr(plan), repr(plan.graph), repr(front), str(plan), f"{[plan]}"):
        assert len(shown) <= 120 and "\n" not in shown


def test_a_front_of_one_plan_or_none_has_no_range(front: Front) -> None:
    one = replace(front, plans=front.plans[:1])
    assert "1 plan, " in repr(one) and " to " not in repr(one)
    assert repr(replace(front, plans=())) == "Front(loss on cpu:2: 0 plans)"


def test_notebooks_show_the_picture_above_the_table(front: Front) -> None:
    shown = front._repr_mimebundle_()
    assert shown["text/plain"] == str(front)
    page = ET.fromstring(f"<body>{shown['text/html']}</body>")
    assert page.find("div/{http://www.w3.org/2000/svg}svg") is not None
    assert page.findtext("pre") == str(front)
    empty = replace(front, plans=())
    assert "<svg" not in empty._repr_mimebundle_()["text/html"]
