"""Fills: values that hold one number everywhere, which any device writes in any layout by itself.

No collective makes a copy of one. XLA writes the number anew where a gather of a fill would stand,
and a plan that had the gather would promise bytes that nothing sends.
"""

from __future__ import annotations

from tapestry_egg.schedule.flatten import FlatProgram

#: Kernels that give what they are given, in another shape or dtype.
_SPREADING = frozenset(
    {"broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze"}
)


def fills(program: FlatProgram) -> frozenset[int]:
    """The flat values that are made of one constant number alone."""
    found: set[int] = set()
    for instance in program.instances:
        if instance.port == "constant":
            found.update(v for v in instance.outputs if program.types[v].size == 1)
        elif not instance.port and instance.signature.kernel in _SPREADING:
            if found.issuperset(instance.inputs):
                found.update(instance.outputs)
    return frozenset(v for v in found if program.types[v].size > 1)
