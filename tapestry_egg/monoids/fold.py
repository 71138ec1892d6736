"""Computing with monoids: wrap, combine, zero, unwrap, folds and trees of folds, on any arrays.

Every function takes `xp`, the module whose arrays it computes on: `numpy` (the default) or
`jax.numpy`. A state is a dict from the names of its parts to arrays; its leading dims are those
of the reduced value, all parts alike, and a part's trailing dims follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from tapestry_egg.formulas import Arithmetic, Formula

from .definition import Monoid, Part
from .formula import MonoidError, arithmetic

State = dict[str, Any]


def wrap(monoid: Monoid, *element: Any, xp: ModuleType = np) -> State:
    """The state of one element per place: arrays of the element's parts -> state.

    Raises MonoidError where the number, the dtypes or the shapes of the parts do not fit.
    """
    parts = _element(monoid, element, xp)
    outer, sizes = _outer(monoid, parts)
    dtypes = {name: x.dtype for name, x in parts.items()}
    out = {}
    for part in monoid.state:
        dtype = _dtype(part, dtypes)
        constants = _Constants(dtype)
        made = _evaluate(
            monoid.wrap[part.name],
            part,
            parts,
            {},
            _trailing(monoid.element),
            arithmetic(xp),
            constants,
        )
        out[part.name] = _shaped(made, (*outer, *(sizes[t] for t in part.trailing)), dtype, xp)
    return out


def combine(monoid: Monoid, a: State, b: State, xp: ModuleType = np) -> State:
    """a • b, place by place; states that broadcast are broadcast."""
    values = {f"{side}.{name}": x for side, s in (("a", a), ("b", b)) for name, x in s.items()}
    ranks = {f"{side}.{p.name}": p.trailing for side in "ab" for p in monoid.state}
    ops = arithmetic(xp)
    return {
        part.name: _as(
            _evaluate(monoid.combine[part.name], part, values, monoid.terms, ranks, ops),
            a[part.name].dtype,
            xp,
        )
        for part in monoid.state
    }


def zero(
    monoid: Monoid,
    dtypes: Mapping[str, Any] | Any,
    shape: Sequence[int] = (),
    sizes: Mapping[str, int] | None = None,
    xp: ModuleType = np,
) -> State:
    """The neutral state of the given shape.

    `dtypes` maps the parts of the element to their dtypes; a single dtype is that of all of them.
    `sizes` gives the extents of trailing dims.
    """
    if not isinstance(dtypes, Mapping):
        dtypes = {p.name: dtypes for p in monoid.element}
    out = {}
    for part in monoid.state:
        dtype = _dtype(part, dtypes)
        made = monoid.zero[part.name](_Constants(dtype), arithmetic(np))
        whole = (*shape, *((sizes or {})[t] for t in part.trailing))
        out[part.name] = xp.full(whole, np.asarray(made).astype(dtype), dtype)
    return out


def unwrap(monoid: Monoid, state: State, xp: ModuleType = np) -> dict[str, Any]:
    """The result of a state, by the names under `unwrap`."""
    ops, ranks = arithmetic(xp), _trailing(monoid.state)
    dtypes: dict[str, Any] = {}
    for part in monoid.state:
        dtypes.setdefault(part.dtype, state[part.name].dtype)
    out = {}
    with np.errstate(all="ignore"):
        for part in monoid.result:
            made = _evaluate(monoid.unwrap[part.name], part, state, {}, ranks, ops)
            out[part.name] = _as(made, _dtype(part, dtypes), xp)
    return out


def fold(monoid: Monoid, state: State, axis: int = 0, xp: ModuleType = np) -> State:
    """The states along a leading dim as one, combined in their order; the dim is gone.

    Halves are combined pairwise, about log2 n combinations of ever smaller arrays. The fold of no
    states is the zero.
    """
    leading = {p.name: np.ndim(state[p.name]) - len(p.trailing) for p in monoid.state}
    rank = min(leading.values())
    if not -rank <= axis < rank:
        raise MonoidError(f"states of rank {rank} have no dim {axis} to fold")
    at = (slice(None),) * (axis % rank)
    n = next(iter(state.values())).shape[axis % rank]
    if n == 0:
        return _zero_like(monoid, state, axis % rank, xp)
    while n > 1:
        even = {k: x[(*at, slice(0, n - 1, 2))] for k, x in state.items()}
        odd = {k: x[(*at, slice(1, n, 2))] for k, x in state.items()}
        made = combine(monoid, even, odd, xp)
        if n % 2:
            last = {k: x[(*at, slice(n - 1, n))] for k, x in state.items()}
            made = {k: xp.concatenate([x, last[k]], axis=len(at)) for k, x in made.items()}
        state, n = made, -(-n // 2)
    return {k: x[(*at, 0)] for k, x in state.items()}


def reduce(monoid: Monoid, *element: Any, axis: int = 0, xp: ModuleType = np) -> dict[str, Any]:
    """unwrap(fold(wrap(elements))) along a leading dim."""
    return unwrap(monoid, fold(monoid, wrap(monoid, *element, xp=xp), axis, xp), xp)


# ---- evaluation --------------------------------------------------------------------------------


class _Constants:
    """`lowest`, `highest` and `bits` of one dtype."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    def __call__(self, name: str) -> Any:
        return np.asarray(self._python(name)).astype(self.dtype)

    def _python(self, name: str) -> Any:
        if self.dtype == np.bool_:
            return name != "lowest"
        if self.dtype.kind in "iu" or _is_narrow_int(self.dtype):
            limits = ml_dtypes.iinfo(self.dtype)
            if name == "bits":
                return limits.max if int(limits.min) == 0 else -1
            return limits.min if name == "lowest" else limits.max
        if name == "bits":
            raise MonoidError(f"`bits` of {self.dtype}, which has no bitwise arithmetic")
        end = np.asarray(-np.inf if name == "lowest" else np.inf).astype(self.dtype)
        if np.isinf(end.astype(np.float64)):
            return end
        ends = ml_dtypes.finfo(self.dtype)  # a float without infinities
        return ends.min if name == "lowest" else ends.max


def _is_narrow_int(dtype: np.dtype[Any]) -> bool:
    return dtype.name.startswith(("int", "uint"))


def _evaluate(
    formula: Formula,
    part: Part,
    values: Mapping[str, Any],
    terms: Mapping[str, Formula],
    trailing: Mapping[str, tuple[str, ...]],
    ops: Arithmetic,
    constants: Callable[[str], Any] | None = None,
) -> Any:
    """The formula of `part`, with every name spread over the trailing dims that it lacks."""

    def value(name: str) -> Any:
        if name in values:
            missing = len(part.trailing) - len(trailing[name])
            x = values[name]
            return x.reshape(*x.shape, *(1,) * missing) if missing > 0 else x
        if name in terms:
            if name not in known:
                known[name] = terms[name](value, ops)
            return known[name]
        assert constants is not None
        return constants(name)

    known: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        return formula(value, ops)


def _trailing(parts: Sequence[Part]) -> dict[str, tuple[str, ...]]:
    return {p.name: p.trailing for p in parts}


def _element(monoid: Monoid, arrays: Sequence[Any], xp: ModuleType) -> dict[str, Any]:
    if len(arrays) != len(monoid.element):
        names = ", ".join(p.name for p in monoid.element)
        raise MonoidError(f"{monoid.name} takes {names}, {len(arrays)} arrays are given")
    from tapestry_egg.graph.arrays import kind

    out = {}
    for part, given in zip(monoid.element, arrays, strict=True):
        x = xp.asarray(given)
        if kind(x.dtype.name) not in part.kinds:
            raise MonoidError(
                f"{monoid.name} does not take {part.name} of dtype {x.dtype}",
                hint=f"It takes {', '.join(part.kinds)}.",
            )
        out[part.name] = x
    return out


def _outer(monoid: Monoid, parts: Mapping[str, Any]) -> tuple[tuple[int, ...], dict[str, int]]:
    """Leading dims of the elements, and the extents of their trailing dims."""
    sizes: dict[str, int] = {}
    outer: tuple[int, ...] = ()
    for part in monoid.element:
        shape = tuple(parts[part.name].shape)
        cut = len(shape) - len(part.trailing)
        if cut < 0:
            raise MonoidError(f"{part.name} of {monoid.name} lacks dims {part.trailing}")
        for name, n in zip(part.trailing, shape[cut:], strict=True):
            if sizes.setdefault(name, n) != n:
                raise MonoidError(f"dim {name!r} of {monoid.name} is both {sizes[name]} and {n}")
        try:
            outer = np.broadcast_shapes(outer, shape[:cut])
        except ValueError:
            raise MonoidError(
                f"the parts of {monoid.name} have shapes {outer} and {shape[:cut]}"
            ) from None
    return outer, sizes


def _dtype(part: Part, dtypes: Mapping[str, Any]) -> Any:
    if part.dtype in dtypes:
        return np.dtype(dtypes[part.dtype])
    return np.dtype(getattr(ml_dtypes, part.dtype, part.dtype))


def _as(x: Any, dtype: Any, xp: ModuleType) -> Any:
    return xp.asarray(x).astype(dtype)


def _shaped(x: Any, shape: tuple[int, ...], dtype: Any, xp: ModuleType) -> Any:
    return xp.broadcast_to(_as(x, dtype, xp), shape)


def _zero_like(monoid: Monoid, state: State, axis: int, xp: ModuleType) -> State:
    """The zero of the shape that `state` has without dim `axis`."""
    out = {}
    for part in monoid.state:
        x = state[part.name]
        made = monoid.zero[part.name](_Constants(x.dtype), arithmetic(np))
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        out[part.name] = xp.full(shape, np.asarray(made).astype(x.dtype), x.dtype)
    return out
