"""Families of kernels, against what the templates of their kernels say."""

from __future__ import annotations

import pytest

from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.template import Template
from tapestry_egg.rules.language.families import MAP, MAP2, words

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
