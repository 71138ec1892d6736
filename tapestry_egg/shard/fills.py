"""Fills: values that hold one number everywhere, which any device writes in any layout by itself.

No collective makes a copy of one. XLA writes the number anew where a gather of a fill would stand,
and a plan that had the gather would promise bytes that nothing sends.
"""

from __future__ import annotations

from tapestry_egg.schedule.flatten import FlatProgram, Instance


def fills(program: FlatProgram) -> frozenset[int]:
    """The flat values that are made of single numbers alone, as far as a compiler sees it: not
    through products, nor out of loops and branches. What a constraint gives a layout has that."""
    single = {v for v, type_ in enumerate(program.types) if type_.size == 1}
    found: set[int] = set()
    for instance in program.instances:
        if _keeps(instance) and all(v in single or v in found for v in instance.inputs):
            found.update(instance.outputs)
    return frozenset(found - single)


def _keeps(instance: Instance) -> bool:
    """Whether what an instance makes of fills are fills, and XLA makes them so."""
    if instance.port:
        return instance.port in ("invariant", "stream")
    signature = instance.signature
    visible = signature.fusion != "kernel" and signature.means != "layout"
    return visible and signature.keeps_fills
