"""State: which outputs become which inputs in the next call, by the user's word or by donation."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError
from tapestry_egg.schedule.flatten import feedback_pairs


def _graph(donate: tuple[int, ...] = ()) -> te.BlockGraph:
    def fn(params, moments, x):
        new = {k: p - moments[k] * x.sum() for k, p in params.items()}
        return x.mean(), new, {k: m * 2 for k, m in moments.items()}

    w = {"a": jnp.ones((4, 2)), "b": jnp.ones(3)}
    return te.trace(fn, w, dict(w), jnp.ones(5), donate_argnums=donate).graph


def test_a_prefix_pairs_all_that_is_below_it() -> None:
    graph = _graph()
    assert feedback_pairs(graph) == {}
    both = feedback_pairs(graph, {"[1]": "[0]", "[2]['b']": "[1]['b']"})
    names = {graph.output_names[j]: graph.input_names[i] for j, i in both.items()}
    assert names == {
        "[1]['a']": "[0]['a']",
        "[1]['b']": "[0]['b']",
        "[2]['b']": "[1]['b']",
    }


def test_what_the_user_says_goes_before_donation() -> None:
    graph = _graph(donate=(1,))  # output [1]['a'] has the path and type of donated input [1]['a']
    assert {graph.output_names[j] for j in feedback_pairs(graph)} == {"[1]['a']", "[1]['b']"}
    said = feedback_pairs(graph, {"[2]": "[1]"})
    assert {graph.output_names[j] for j in said} == {"[2]['a']", "[2]['b']"}
    assert len(set(said.values())) == len(said)


def test_donated_arguments_become_results_elsewhere_of_the_same_path() -> None:
    """As XLA pairs them, which gives each the buffer of the one argument that it may have."""

    def decode(params, cache, token):
        keys = cache["keys"] + params["w"] * token
        return {"keys": keys, "values": cache["values"] * 2.0}, keys.sum()

    w = jnp.ones((4, 2))
    given = ({"w": w}, {"keys": w, "values": w}, jnp.ones(()))
    program = te.trace(decode, *given, donate_argnums=1)
    graph = program.graph
    pairs = feedback_pairs(graph)
    names = {graph.output_names[j]: graph.input_names[i] for j, i in pairs.items()}
    assert names == {"[0]['keys']": "[1]['keys']", "[0]['values']": "[1]['values']"}
    text = jax.jit(decode, donate_argnums=1).lower(*given).compile().as_text()
    header = text[: text.index("\n")]
    aliased = dict(re.findall(r"\{(\d+)\}: \((\d+), \{\}", header))
    assert {int(j): int(i) for j, i in aliased.items()} == pairs


def test_a_path_that_two_results_end_with_tells_of_no_pair() -> None:
    def twice(x, y, z, w):
        return x.sum(), {"a": w["a"] * y}, {"a": w["a"] - z}

    x, w = jnp.ones(3), {"a": jnp.ones(3)}
    program = te.trace(twice, x, x, x, w, donate_argnums=3)
    assert feedback_pairs(program.graph) == {}
    program = te.trace(lambda ws, x: [w * x for w in ws], [x, x], 2.0, donate_argnums=0)
    assert feedback_pairs(program.graph) == {0: 0, 1: 1}  # the first argument alone is the result


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"[1]['c']": "[0]['a']"}, r"no output lies at \"\[1\]\['c'\]\"[^$]*\[1\]\['a'\]"),
        ({"[1]": "[0]['a']"}, "no input lies at"),
        ({"[1]['a']": "[0]['q']"}, r"no input lies at [^$]*\[0\]\['a'\]"),
        ({"[01]": "[0]"}, "no output lies at"),
        ({"[1]['a']": "[0]['b']"}, r"output \[1\]\['a'\] is f32\[4, 2\], input .* is f32\[3\]"),
        ({"[1]['a']": "[0]['a']", "[2]['a']": "[0]['a']"}, "two outputs become input"),
    ],
)
def test_wrong_paths_are_refused_with_those_that_exist(state: dict[str, str], words: str) -> None:
    with pytest.raises(ExtractError, match=words) as caught:
        feedback_pairs(_graph(), state)
    assert caught.value.where.startswith("state[")
