"""Plain parameters: which JSON stands for a parameter of JAX's, checked without importing JAX.

The forms are those of `codec.py`. What a file says is checked here, when it is read, and what would
end the process later on is refused: compilers give up on a precision that they do not know, and a
range of a few characters can stand for more numbers than there is memory. A graph of one version of
JAX runs in another: it leaves out parameters that only newer ones know where they say nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.arrays import is_dtype

#: Enums and record classes that may occur in parameters -> the modules where JAX keeps them.
ENUMS: dict[str, tuple[str, ...]] = {
    "AccuracyMode": ("jax.lax",),
    "ArrayCopySemantics": ("jaxlib._jax", "jax._src.lib._jax", "jaxlib.xla_client"),
    "DotAlgorithmPreset": ("jax.lax",),
    "EigImplementation": ("jax.lax.linalg", "jax._src.lax.linalg"),
    "EighImplementation": ("jax.lax.linalg", "jax._src.lax.linalg"),
    "FftType": ("jax.lax", "jax._src.lax.fft"),
    "GatherScatterMode": ("jax.lax",),
    "IgammaMode": ("jax._src.lax.special",),
    "MemorySpace": ("jax._src.core",),
    "Precision": ("jax.lax",),
    "RandomAlgorithm": ("jax.lax",),
    "RoundingMethod": ("jax.lax",),
    "SvdAlgorithm": ("jax.lax.linalg", "jax._src.lax.linalg"),
}
RECORDS: dict[str, tuple[str, ...]] = {
    "ConvDimensionNumbers": ("jax.lax",),
    "DotAlgorithm": ("jax.lax",),
    "GatherDimensionNumbers": ("jax.lax",),
    "RaggedDotDimensionNumbers": ("jax.lax",),
    "ScatterDimensionNumbers": ("jax.lax",),
    "Tolerance": ("jax.lax",),
}

#: Levels of lists and dicts in a parameter.
MOST_LEVELS = 100
#: Digits of a whole number.
_MOST_DIGITS = 40


def check_params(params: Mapping[str, Any], where: str) -> None:
    """Check that the parameters of an operation are in plain form, as `check_plain` does, and that
    compilers can read them."""
    check_plain(params, where)
    for name, members in _MEMBERS.items():
        value = params.get(name)
        if value is None:
            continue
        two = name == "precision" and isinstance(value, list) and len(value) == 2
        for one in value if two else [value]:
            if _kind(one) not in (("Precision",) if two else members):
                raise GraphError(f"{value!r:.80} is no {name}", where=f"{where}.{name}")


def finite(value: Any) -> Any:
    """The same in plain form for JSON, which has no number for infinity: encoders write nothing in
    its place, and say nothing of it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return value


def check_plain(value: Any, where: str, level: int = 0) -> None:
    """Check that `value` is in plain form.

    Raises GraphError with `where` extended by the path inside `value`, also for handles, and for
    what lies more than `MOST_LEVELS` deep; `level` is how deep `value` lies.
    """
    if level > MOST_LEVELS:
        raise GraphError(f"more than {MOST_LEVELS} levels of lists and dicts", where=where)
    if isinstance(value, list):
        for i, v in enumerate(value):
            check_plain(v, f"{where}[{i}]", level + 1)
    elif isinstance(value, dict):
        tag = _tag(value, where)
        if tag == "$handle":
            raise GraphError("a file cannot hold objects of another process", where=where)
        if tag == "$jaxpr":
            from .graph_documents import graph_from_document

            graph_from_document(value["$jaxpr"], where=f"{where}.$jaxpr")
            return
        if tag is not None and (check := _TAGS[tag]) is not None and not check(value[tag]):
            raise GraphError(f"{value[tag]!r:.80} is not accepted in parameters", where=where)
        for k, v in value.items():
            check_plain(v, f"{where}.{k}", level + 1)


def _tag(value: Mapping[str, Any], where: str) -> str | None:
    """The tag of a dict; None where it has none. Raises GraphError for one that there is not."""
    tags = [k for k in value if k.startswith("$")]
    if not tags:
        return None
    extra: set[str] | None = {"$class": None, "$jaxpr": {"closed"}}.get(tags[0], set())
    if (
        len(tags) > 1
        or tags[0] not in _TAGS
        or (extra is not None and set(value) != {tags[0], *extra})
    ):
        raise GraphError(f"unknown tag {', '.join(map(repr, value))}", where=where)
    return tags[0]


def _is_enum(form: Any) -> bool:
    return (
        isinstance(form, list)
        and len(form) == 2
        and all(isinstance(x, str) for x in form)
        and form[0] in ENUMS
    )


def _is_whole(form: Any) -> bool:
    return isinstance(form, str) and re.fullmatch(rf"-?[0-9]{{1,{_MOST_DIGITS}}}", form) is not None


def _is_pairs(form: Any) -> bool:
    return isinstance(form, list) and all(isinstance(x, list) and len(x) == 2 for x in form)


def _is_array(form: Any) -> bool:
    return isinstance(form, dict) and form.keys() == {"dtype", "shape", "data"}


def _is_list(form: Any) -> bool:
    return isinstance(form, list)


def _is_dtype_name(form: Any) -> bool:
    return isinstance(form, str) and is_dtype(form)


def _kind(form: Any) -> str:
    """The enum that a form is a member of, or the class of a record; empty for anything else."""
    if isinstance(form, dict) and _is_enum(form.get("$enum")):
        return str(form["$enum"][0])
    return str(form.get("$class", "")) if isinstance(form, dict) else ""


#: What parameters of these names are, where they are not None: compilers end the process at others.
_MEMBERS: dict[str, tuple[str, ...]] = {
    "accuracy": ("AccuracyMode", "Tolerance"),
    "fft_type": ("FftType",),
    "precision": ("Precision", "DotAlgorithmPreset", "DotAlgorithm"),
    "rounding_method": ("RoundingMethod",),
}


#: What stands behind each tag, where that can be told without JAX.
_TAGS: dict[str, Callable[[Any], bool] | None] = {
    "$list": _is_list,
    "$dict": _is_pairs,
    "$frozenset": _is_list,
    "$float": lambda form: form in ("nan", "inf", "-inf"),
    "$int": _is_whole,
    "$complex": lambda form: isinstance(form, list) and len(form) == 2,
    "$dtype": _is_dtype_name,
    "$scalar_type": _is_dtype_name,
    "$array": _is_array,
    "$scalar": _is_array,
    "$enum": _is_enum,
    "$class": lambda form: isinstance(form, str) and form in RECORDS,
    "$primitive": lambda form: isinstance(form, str),
    "$key_impl": lambda form: isinstance(form, str),
    "$tree": None,
    "$jaxpr": None,
    "$handle": None,
}


def handles_in(value: Any) -> list[int]:
    """The handles that a plain value refers to."""
    if isinstance(value, Mapping):
        if "$handle" in value:
            return [value["$handle"]]
        return [h for v in value.values() for h in handles_in(v)]
    if isinstance(value, (list, tuple)):
        return [h for v in value for h in handles_in(v)]
    return []


#: By primitive and parameter: the first JAX that asks for it, and what it says by default.
_SINCE: dict[str, dict[str, tuple[tuple[int, ...], Any]]] = {
    "reduce_max": {"out_sharding": ((0, 11), None)},
    "reduce_min": {"out_sharding": ((0, 11), None)},
    "top_k": {"is_stable": ((0, 11), True)},
}


#: By primitive and parameter: the element of lists that say what None does.
_SAME_AS_NONE = {"slice": {"strides": 1}}


def without_defaults(kernel: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a primitive but for those that say in a newer JAX what older ones do, and
    with None where that says the same."""
    added, alike = _SINCE.get(kernel, {}), _SAME_AS_NONE.get(kernel, {})
    kept = {k: v for k, v in params.items() if k not in added or v != added[k][1]}
    none = [k for k, said in alike.items() if all(x == said for x in kept.get(k) or ())]
    return {**kept, **dict.fromkeys(none)}


def as_this_jax_asks(kernel: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a primitive with all that the running JAX asks for."""
    import jax

    version = tuple(jax.__version_info__)
    added = _SINCE.get(kernel, {}).items()
    return {**{k: said for k, (since, said) in added if version >= since}, **params}


def with_scalars(params: Mapping[str, Any], narrow: str, wide: str) -> dict[str, Any]:
    """Encoded parameters whose computations on scalars of one dtype are of another."""

    def one(value: Any) -> Any:
        if not (isinstance(value, dict) and "$jaxpr" in value):
            return value
        graph = value["$jaxpr"]
        types = [f"{wide}[]" if t == f"{narrow}[]" else t for t in graph["values"]]
        return {**value, "$jaxpr": {**graph, "values": types}}

    return {name: one(value) for name, value in params.items()}
