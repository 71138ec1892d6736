"""Values that are compared with the greatest or least of themselves: they have to exist once.

A compiler that computes such a value inside both kernels that read it, the one that finds its
maximum and the one that looks for it, may round it in two ways (it fuses a product and a sum into
one operation in one of them). The maximum is then equal to no element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.ids import FlatId

from .flatten import FlatProgram, Instance

_COMPARES = frozenset("eq ne lt le gt ge".split())
#: What gives elements of an array that stand out among all of them.
_SELECTS = frozenset(
    "reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min sort top_k"
    " approx_top_k".split()
)
#: What gives elements of its operands, whichever these are.
_PASSES = frozenset(
    "broadcast_in_dim clamp concatenate copy dynamic_slice dynamic_update_slice expand_dims gather"
    " max min name optimization_barrier pad rev select_n sharding_constraint slice split stack"
    " stop_gradient tile unstack".split()
)


def self_compared(program: FlatProgram) -> frozenset[FlatId]:
    """Floats, computed element by element, that are compared with elements selected of them."""
    instances, types = program.instances, program.types
    compares = [
        x
        for x in instances
        if not x.port
        and x.signature.kernel in _COMPARES
        and all(_is_rounded(types[v].dtype) for v in x.inputs)
        and len({*x.inputs}) > 1
    ]
    if not compares:
        return frozenset()
    maker = {v: x for x in instances for v in x.outputs}
    found: set[FlatId] = set()
    for x in compares:
        (one, one_selected), (other, other_selected) = (_sources(v, maker) for v in x.inputs)
        found |= (one & other_selected) | (other & one_selected)
    return frozenset(v for v in found if v in maker and _goes_by_elements(maker[v]))


def _sources(v: FlatId, maker: Mapping[FlatId, Instance]) -> tuple[set[FlatId], set[FlatId]]:
    """The values that elements of v are elements of, as they were computed; and those of them of
    which they were selected."""
    seen: set[tuple[FlatId, bool]] = set()
    found: tuple[set[FlatId], set[FlatId]] = set(), set()
    stack = [(v, False)]
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        v, selected = at
        x = maker.get(v)
        below = () if x is None else _elements_of(x)
        selects = x is not None and x.signature.kernel in _SELECTS
        stack += [(w, selected or selects) for w in below]
        if not below:
            found[0].add(v)
            if selected:
                found[1].add(v)
    return found


def _elements_of(x: Instance) -> Sequence[FlatId]:
    """The operands of whose elements an operation's results consist; none where it computes."""
    if x.port:
        return ()
    kernel, given = x.signature.kernel, x.signature.input_types
    widens = (
        kernel == "convert_element_type"
        and _is_rounded(given[0].dtype)
        and x.signature.output_types[0].itemsize > given[0].itemsize
    )
    if widens or x.signature.fusion == "view" or kernel in _PASSES | _SELECTS:
        return [v for v, type_ in zip(x.inputs, given, strict=True) if _is_rounded(type_.dtype)]
    return ()


def _goes_by_elements(x: Instance) -> bool:
    return not x.port and x.signature.fusion == "loop" and len(x.outputs) == 1


def _is_rounded(dtype: str) -> bool:
    """Whether numbers of a type are rounded when they are computed."""
    return kind(dtype) in ("float", "complex")
