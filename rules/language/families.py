"""Families: words of the rule language that stand for several kernels, or for one of JAX's names.

A rule says `map` where any function of one element will do, and `reduce[max]` where JAX says
`reduce_max`; so one rule serves every spelling of a product or a reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapestry_egg.metakernels.registry import templates

#: Functions of one element.
MAP = tuple(
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj copy cos cosh "
    "digamma erf erf_inv erfc exp exp2 expm1 floor imag is_finite lgamma log log1p logistic name "
    "neg not population_count real round rsqrt sign sin sinh sqrt square stop_gradient tan tanh "
    "convert_element_type integer_pow reduce_precision".split()
)
#: Functions of two elements that stand at the same place.
MAP2 = tuple(
    "add add_any and atan2 complex div eq ge gt le lt max min mul ne nextafter or pow rem sub xor "
    "shift_left shift_right_arithmetic shift_right_logical".split()
)
_REDUCE = {
    "sum": "reduce_sum",
    "prod": "reduce_prod",
    "max": "reduce_max",
    "min": "reduce_min",
    "and": "reduce_and",
    "or": "reduce_or",
}
_WINDOW = {
    "sum": "reduce_window_sum",
    "max": "reduce_window_max",
    "min": "reduce_window_min",
}
_SCAN = {"sum": "cumsum", "prod": "cumprod", "max": "cummax", "min": "cummin"}

#: Word -> the kernels that it stands for. A word that is not here is a kernel's own name.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "matmul": ("dot_general",),
    "conv": ("conv_general_dilated",),
    "contract": ("dot_general", "conv_general_dilated"),
    "plus": ("add", "add_any"),
    "additive": ("add", "add_any", "sub"),
    "concat": ("concatenate",),
    "broadcast": ("broadcast_in_dim",),
    "convert": ("convert_element_type",),
    "select": ("select_n",),
    "map": MAP,
    "map2": MAP2,
    "reduce": tuple(_REDUCE.values()),
    "window": tuple(_WINDOW.values()),
    "scan": tuple(_SCAN.values()),
    "view": ("transpose", "reshape", "squeeze", "rev", "slice", "broadcast_in_dim"),
}
#: Word -> what its bracket may say -> kernel.
SELECTED: Mapping[str, Mapping[str, str]] = {
    "reduce": _REDUCE,
    "window": _WINDOW,
    "scan": _SCAN,
    "map": {k: k for k in MAP},
    "map2": {k: k for k in MAP2},
}
#: Families of several kernels: egglog is told which kernels are of which.
WIDE = tuple(name for name, kernels in FAMILIES.items() if len(kernels) > 1)

_UNVOUCHED = {
    **{"indices_are_sorted": False, "unique_indices": False},
    "mode": {"$enum": ["GatherScatterMode", "FILL_OR_DROP"]},
}
# How each scatter combines an update with the element that it meets. JAX asks for it as a
# computation on two scalars, and overwrites the element without one.
_COMBINES = {f"scatter-{name}": name for name in ("add", "sub", "mul", "max", "min")}
#: Parameters that JAX's kernels have and that a replacement need not name, as plain data.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "reshape": {"dimensions": None, "sharding": None},
    "broadcast_in_dim": {"sharding": None},
    "slice": {"strides": None},
    "iota": {"sharding": None},
    "mul": {"out_dtype": None},
    "dot_general": {"precision": None, "preferred_element_type": None, "out_sharding": None},
    "reduce_sum": {"out_sharding": None},
    "convert_element_type": {"weak_type": False, "sharding": None},
    "conv_general_dilated": {
        **{"precision": None, "preferred_element_type": None, "out_sharding": None},
        **{"feature_group_count": 1, "batch_group_count": 1},
    },
    "gather": {**_UNVOUCHED, "fill_value": None},
    **{
        k: {**_UNVOUCHED, "update_jaxpr": None, "update_consts": []}
        for k in ("scatter", *_COMBINES)
    },
    "sort": {"is_stable": True, "num_keys": 1},
    **{
        k: {"accuracy": None}
        for k in "cbrt cos exp exp2 expm1 log log1p logistic rsqrt sin sqrt tan tanh".split()
    },
}


def default_params(kernel: str, dtype: str) -> Mapping[str, Any]:
    """What a kernel has of `DEFAULTS` if its first operand has this dtype."""
    given = DEFAULTS.get(kernel, {})
    if kernel not in _COMBINES:
        return given
    combined = {"kernel": _COMBINES[kernel], "inputs": [0, 1], "outputs": [2]}
    computation = {
        **{"name": kernel, "values": [f"{dtype}[]"] * 3},
        **{"inputs": [0, 1], "outputs": [2], "operations": [combined]},
    }
    return {**given, "update_jaxpr": {"$jaxpr": computation, "closed": False}}


def families_of(kernel: str) -> tuple[str, ...]:
    """The wide families that a kernel belongs to."""
    return tuple(name for name in WIDE if kernel in FAMILIES[name])


def kernels_of(word: str, select: str = "") -> tuple[str, ...] | None:
    """The kernels that a word of a rule stands for; None for a word that is unknown."""
    if select:
        kernel = SELECTED.get(word, {}).get(select)
        return None if kernel is None else (kernel,)
    if word in FAMILIES:
        return FAMILIES[word]
    return (word,) if word in templates() else None


def words() -> tuple[str, ...]:
    """Every word that may stand for a kernel."""
    return (*FAMILIES, *templates())
