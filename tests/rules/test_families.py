"""Families of kernels, against what the templates of their kernels say."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.template import Template
from tapestry_egg.rules.language.families import DEFAULTS, MAP, MAP2, words
from tapestry_egg.rules.language.rewrites import defaults
from tapestry_egg.tracing.emit import emit

#: Functions of elements that rules do not speak of: a constraint and a rounding are asked for by
#: plans, and stay where they are; of the others no law is known.
APART = {
    MAP: {"sharding_constraint", "round_operand", "copy_p", "log2"},
    MAP2: {
        *("eq_to", "le_to", "lt_to", "mulhi", "random_fold_in"),
        *("igamma", "igammac", "polygamma", "zeta"),
    },
}


def goes_by_elements(template: Template, shape: str) -> bool:
    """Whether the result has this shape, and each element is made of those at its own place."""
    given = (template.index, template.project, template.roles, template.reduce)
    elsewhere = (template.outside, template.placed, len(template.outputs) > 1)
    odd = [o for o in template.inputs if o.many or o.optional or o.pattern]
    (out, *_) = template.outputs
    text = getattr(out.shape, "text", "")
    moves = template.fusion not in ("loop", "view")
    return not (any(given) or any(elsewhere) or odd or moves) and text == shape


@pytest.mark.parametrize(
    ("family", "operands", "shape"),
    [(MAP, 1, "$x.shape"), (MAP2, 2, "broadcast($x.shape, $y.shape)")],
    ids=["map", "map2"],
)
def test_a_family_has_the_functions_of_elements_that_templates_have(
    family: tuple[str, ...], operands: int, shape: str
) -> None:
    found = {
        kernel
        for kernel, templates in registry.templates().items()
        if all(len(t.inputs) == operands and goes_by_elements(t, shape) for t in templates)
    }
    assert found - APART[family] == set(family)


def test_every_kernel_that_a_word_stands_for_has_a_template() -> None:
    from tapestry_egg.rules.language.families import FAMILIES

    assert len(set(words())) == len(FAMILIES.keys() | registry.templates().keys())
    assert {k for kernels in FAMILIES.values() for k in kernels} <= registry.templates().keys()


COMBINES = {
    "scatter": lambda old, new: new,
    "scatter-add": np.add,
    "scatter-sub": np.subtract,
    "scatter-mul": np.multiply,
    "scatter-max": np.maximum,
    "scatter-min": np.minimum,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("kernel", [k for k in DEFAULTS if k.startswith("scatter")])
def test_a_scatter_that_a_rule_makes_combines_as_its_name_says(kernel: str, dtype: str) -> None:
    """What JAX computes with the parameters that a rule need not name, and what NumPy does."""
    types = TensorType((4,), dtype), TensorType((3, 1), "int32"), TensorType((3,), dtype)
    numbers = {
        "$class": "ScatterDimensionNumbers",
        **{"update_window_dims": [], "inserted_window_dims": [0]},
        **{"scatter_dims_to_operand_dims": [0], "operand_batching_dims": []},
        "scatter_indices_batching_dims": [],
    }
    params = defaults(kernel, {"dimension_numbers": numbers}, types)
    operation = Operation(kernel, (0, 1, 2), (3,), params)
    graph = BlockGraph(kernel, (*types, types[0]), (operation,), (0, 1, 2), (3,))
    elements, places, updates = [5, 6, 7, 8], [1, 1, 3], [2, 3, 4]
    x, u = (np.asarray(a).astype(decode_dtype(dtype)) for a in (elements, updates))
    (made,) = jax.jit(emit(graph))(x, np.int32(places)[:, None], u)
    for place, update in zip(places, updates, strict=True):
        elements[place] = COMBINES[kernel](elements[place], update)
    np.testing.assert_array_equal(np.asarray(made, np.float64), elements)
