"""JAX's primitive parameters as plain data, and back.

The plain form is JSON: numbers, strings, lists and dicts with string keys. A list stands for a
tuple, because JAX's parameters are tuples almost everywhere; so does a range, its numbers one by
one, as dims are told by. What JSON cannot say is a dict with
one key that starts with `$`:

    {"$list": [..]}                          a true list
    {"$dict": [[key, value], ..]}            a dict whose keys are not plain names
    {"$frozenset": [..]}                     a frozenset, sorted by its plain form
    {"$float": "nan"}  {"$int": "1e.."}      a float or an int that JSON cannot carry
    {"$complex": [re, im]}
    {"$dtype": "float32"}                    a dtype object; {"$scalar_type": ..} the class
    {"$array": {dtype, shape, data}}         an array, little-endian base64; {"$scalar": ..} 0-d
    {"$enum": ["GatherScatterMode", "CLIP"]}
    {"$class": "GatherDimensionNumbers", field: value, ..}
    {"$primitive": "ge"}                     a JAX primitive
    {"$key_impl": "threefry2x32"}            an implementation of random keys
    {"$tree": ..}                            a pytree structure (see `graph/pytrees.py`)
    {"$jaxpr": {..}, "closed": true}         a computation on scalars, as a graph document
    {"$handle": 3}                           an object of this process (a callback, a mesh)

Decoding accepts only the classes that `plain.py` lists, and never executes anything found in a
file.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError, TraceError
from tapestry_egg.graph.arrays import (
    decode_array,
    decode_dtype,
    dtype_name,
    encode_array,
    key_impl,
    register_key_impl,
)
from tapestry_egg.metakernels import registry

from .plain import ENUMS, RECORDS, as_this_jax_asks, without_defaults

_TOLERANCE_FIELDS = ("atol", "rtol", "ulps")  # a plain class in JAX, without declared fields

#: Primitives whose jaxpr parameters are computations on scalars, stored as graphs.
_SCATTERS = tuple(f"scatter{s}{kind}" for s in "-_" for kind in "add sub mul min max".split())
SCALAR_COMPUTATIONS = {
    *("reduce", "reduce_window", "select_and_scatter", "scatter", "scatter_apply"),
    *_SCATTERS,
}


class Handles:
    """Objects of this process that parameters refer to by number."""

    def __init__(self) -> None:
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()

    def put(self, value: object) -> int:
        """The number of `value`; the same object always gets the same number."""
        with self._lock:
            number = self._numbers.get(id(value))
            if number is None:
                number = self._numbers[id(value)] = len(self._objects)
                self._objects.append(value)
            return number

    def get(self, number: object) -> object:
        """The object of that number. Raises GraphError when this process has none."""
        if not isinstance(number, int) or not 0 <= number < len(self._objects):
            raise GraphError(
                f"handle {number!r} belongs to another process",
                hint="Trace the function again in this process.",
            )
        return self._objects[number]


#: The handles of every graph traced in this process.
HANDLES = Handles()


@dataclass
class _Encoder:
    kernel: str = ""

    def encode(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return self._enum(value)
        if value is None or isinstance(value, str):
            return value if value is None else str(value)
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        if isinstance(value, (int, np.integer)):
            number = int(value)
            return number if -(2**63) <= number < 2**63 else {"$int": str(number)}
        if isinstance(value, np.generic):
            return {"$scalar": encode_array(np.asarray(value))}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, complex):
            return {"$complex": [self.encode(value.real), self.encode(value.imag)]}
        if isinstance(value, range):
            return list(value)
        if isinstance(value, (tuple, list, dict, frozenset)):
            return self._container(value)
        name = type(value).__name__
        if name in RECORDS and type(value) is _class(name):
            return self._record(value)
        if (dtype := _dtype_form(value)) is not None:
            return dtype
        return self._object(value)

    def _enum(self, value: Enum) -> Any:
        name = type(value).__name__
        if name in ENUMS and type(value) is _class(name):
            return {"$enum": [name, value.name]}
        return _handle(value)

    def _container(self, value: Any) -> Any:
        name = type(value).__name__
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            if name in RECORDS and type(value) is _class(name):
                return self._record(value)
            return self._object(value)
        if isinstance(value, tuple):
            return [self.encode(v) for v in value]
        if isinstance(value, list):
            return {"$list": [self.encode(v) for v in value]}
        if isinstance(value, frozenset):
            return {"$frozenset": sorted((self.encode(v) for v in value), key=repr)}
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: self.encode(v) for k, v in value.items()}
        return {"$dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}

    def _record(self, value: Any) -> Any:
        plain = {k: self.encode(getattr(value, k)) for k in _fields(type(value))}
        return {"$class": type(value).__name__, **plain}

    def _object(self, value: Any) -> Any:
        from jax.extend import core

        if isinstance(value, core.Primitive):
            register_primitive(value)
            return {"$primitive": value.name}
        if (impl := _key_impl_name(value)) is not None:
            return {"$key_impl": impl}
        if _is_jaxpr(value) and self.kernel in SCALAR_COMPUTATIONS:
            try:
                return self._jaxpr(value)
            except (GraphError, TraceError):
                pass  # it calls back into this process
        if type(value).__name__ == "PyTreeDef":
            from tapestry_egg.graph.pytrees import encode_treedef, is_standard

            plain = encode_treedef(value)
            if is_standard(plain):
                return {"$tree": plain}
        if isinstance(value, np.ndarray) or (hasattr(value, "addressable_data")):
            try:
                return {"$array": encode_array(np.asarray(value))}
            except (TypeError, ValueError, GraphError):
                pass  # a key array, a tracer, or spread over several hosts
        return _handle(value)

    def _jaxpr(self, value: Any) -> Any:
        from .graph_documents import graph_document
        from .jaxprs import block_graph

        closed = hasattr(value, "consts")
        inner = getattr(value, "jaxpr", value)
        consts = tuple(value.consts) if closed else ()
        graph = block_graph(inner, consts, self.kernel, sources=False)
        return {"$jaxpr": graph_document(graph), "closed": closed}


def _handle(value: object) -> dict[str, int]:
    return {"$handle": HANDLES.put(value)}


def encode_params(params: Mapping[str, Any], kernel: str = "") -> dict[str, Any]:
    """Plain form of a primitive's parameters.

    `kernel` is the primitive's name: it decides whether a jaxpr among the parameters is a
    computation on scalars that can be stored. What is not plain goes to the handles of
    this process.
    """
    encoder = _Encoder(kernel)
    dropped = _derived(kernel)
    kept = without_defaults(kernel, params)
    return {k: encoder.encode(v) for k, v in kept.items() if k not in dropped}


def decode_params(params: Mapping[str, Any], kernel: str = "") -> dict[str, Any]:
    """What JAX wants in place of the plain `params`.

    Raises GraphError for a tag, class or member that is not accepted, and for a handle of another
    process.
    """
    decoded = as_this_jax_asks(kernel, {k: decode(v) for k, v in params.items()})
    for name, derive in _derived(kernel).items():
        decoded[name] = derive(decoded)
    return decoded


def _derived(kernel: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Parameters that only repeat another one, and how they follow from the others."""
    if kernel != "reduce":
        return {}

    def computation(params: dict[str, Any]) -> Any:
        from jax.extend import core

        return core.jaxpr_as_fun(params["jaxpr"])

    return {"computation": computation}


def decode(value: Any) -> Any:
    """What JAX wants in place of one plain value."""
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    tag = next((k for k in value if k.startswith("$")), None)
    if tag is None:
        return {k: decode(v) for k, v in value.items()}
    if tag not in _DECODERS:
        raise GraphError(f"unknown tag {tag!r} in parameters")
    try:
        return _DECODERS[tag](value)
    except GraphError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as e:
        raise GraphError(f"{tag} in parameters is malformed: {e}") from e


def _decode_record(value: dict[str, Any]) -> Any:
    name = value["$class"]
    cls = _class(name) if isinstance(name, str) and name in RECORDS else None
    if cls is None:
        raise GraphError(f"class {name!r} is not accepted in parameters")
    given = {k: decode(v) for k, v in value.items() if k != "$class"}
    if set(given) - set(_fields(cls)):
        raise GraphError(f"{name} has no fields {sorted(set(given) - set(_fields(cls)))}")
    return cls(**given)


def _decode_enum(value: dict[str, Any]) -> Any:
    name, member = value["$enum"]
    cls = _class(name) if isinstance(name, str) and name in ENUMS else None
    found = getattr(cls, "__members__", {}).get(member) if cls is not None else None
    if found is None:
        raise GraphError(f"{name}.{member} is not accepted in parameters")
    return found


def _decode_dict(value: dict[str, Any]) -> Any:
    return {decode(k): decode(v) for k, v in value["$dict"]}


def _decode_jaxpr(value: dict[str, Any]) -> Any:
    from .emit import closed_jaxpr
    from .graph_documents import graph_from_document

    closed = closed_jaxpr(graph_from_document(value["$jaxpr"]))
    if value["closed"]:
        return closed
    if closed.consts:
        raise GraphError("an open computation on scalars cannot have array constants")
    return closed.jaxpr


def _decode_tree(value: dict[str, Any]) -> Any:
    from tapestry_egg.graph.pytrees import decode_treedef

    return decode_treedef(value["$tree"])


def _decode_float(value: dict[str, Any]) -> float:
    if value["$float"] not in ("nan", "inf", "-inf"):
        raise GraphError(f"{value['$float']!r} is not a float")
    return float(value["$float"])


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "$list": lambda v: [decode(x) for x in v["$list"]],
    "$dict": _decode_dict,
    "$frozenset": lambda v: frozenset(decode(x) for x in v["$frozenset"]),
    "$float": _decode_float,
    "$int": lambda v: int(v["$int"]),
    "$complex": lambda v: complex(*(decode(x) for x in v["$complex"])),
    "$dtype": lambda v: decode_dtype(v["$dtype"]),
    "$scalar_type": lambda v: decode_dtype(v["$scalar_type"]).type,
    "$array": lambda v: decode_array(v["$array"]),
    "$scalar": lambda v: decode_array(v["$scalar"])[()],
    "$enum": _decode_enum,
    "$class": _decode_record,
    "$primitive": lambda v: primitive(v["$primitive"]),
    "$key_impl": lambda v: key_impl(v["$key_impl"]),
    "$tree": _decode_tree,
    "$jaxpr": _decode_jaxpr,
    "$handle": lambda v: HANDLES.get(v["$handle"]),
}


@cache
def _class(name: str) -> type | None:
    for module in (*ENUMS.get(name, ()), *RECORDS.get(name, ())):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if isinstance(found, type):
            return found
    return None


def _fields(cls: type) -> Sequence[str]:
    if is_dataclass(cls):
        return [f.name for f in fields(cls)]
    return getattr(cls, "_fields", _TOLERANCE_FIELDS)


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns") and hasattr(value, "effects")


def _dtype_form(value: Any) -> Any:
    """Plain form of a dtype or of a dtype's scalar class, None for anything else."""
    if isinstance(value, np.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, type):
        if type(value).__name__ == "_ScalarMeta":  # jnp.float32 is no class of NumPy's
            value = np.dtype(value.dtype).type  # type: ignore[attr-defined]
        try:
            if issubclass(value, np.generic):
                return {"$scalar_type": np.dtype(value).name}
        except TypeError:
            return None
    if str(value).startswith("key<") and hasattr(value, "_impl"):
        register_key_impl(value._impl)
        return {"$dtype": str(value)}
    return None


def _key_impl_name(value: object) -> str | None:
    if type(value).__name__ != "PRNGImpl":
        return None
    register_key_impl(value)
    return str(value.name)  # type: ignore[attr-defined]


_PRIMITIVES: dict[str, Any] = {}
#: Where JAX defines primitives, searched in this order for a name that no trace has met.
_PRIMITIVE_MODULES = (
    "jax.extend.core.primitives",
    "jax._src.lax.lax",
    "jax._src.lax.slicing",
    "jax._src.lax.control_flow",
    "jax._src.lax.windowed_reductions",
    "jax._src.lax.special",
    "jax._src.lax.linalg",
    "jax._src.lax.fft",
    "jax._src.lax.convolution",
    "jax._src.lax.parallel",
    "jax._src.lax.ann",
    "jax._src.random.prng",
    "jax._src.random.core",
    "jax._src.prng",
    "jax._src.random",
    "jax._src.debugging",
    "jax._src.ad_checkpoint",
    "jax._src.ad_util",
    "jax._src.interpreters.ad",
    "tapestry_egg.runtime.lower.kernels.streaming",
    "tapestry_egg.runtime.lower.kernels.rings",
    "tapestry_egg.runtime.lower.kernels.attention",
    "tapestry_egg.runtime.lower.precision",
)


def register_primitive(primitive: Any, replacing: type | None = None) -> None:
    """Make a primitive findable by its name, in place of one of the type `replacing`.

    Raises GraphError when another primitive of that name is in use in this process.
    """
    if replacing is not None:
        known = _PRIMITIVES.get(primitive.name) or _jax_primitives().get(primitive.name)
        if isinstance(known, replacing):
            del _PRIMITIVES[primitive.name]
        elif known is not None:
            _PRIMITIVES.setdefault(primitive.name, known)
    if _PRIMITIVES.setdefault(primitive.name, primitive) is not primitive:
        raise GraphError(
            f"two primitives are called {primitive.name!r}",
            hint="Kernels are known by name: give your own primitive another one.",
        )


@cache
def _jax_primitives() -> dict[str, Any]:
    from jax.extend import core

    found: dict[str, Any] = {}
    loaded = sorted(
        name for name in list(sys.modules) if name.startswith(("jax._src.", "jax.experimental."))
    )
    for name in (*_PRIMITIVE_MODULES, *loaded):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # another version of JAX
        for attribute, value in vars(module).items():
            if attribute.endswith("_p") and isinstance(value, core.Primitive):
                found.setdefault(value.name, value)
    return found


class _Placed:
    """Stands for JAX's primitive where a plan has done what it asks for, or there is no mesh."""

    name = "sharding_constraint"
    multiple_results = False

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        return params

    def bind(self, x: Any, **_: Any) -> Any:
        return x


_PLACED = _Placed()


def primitive(name: object) -> Any:
    """The JAX primitive called `name`: one met by a trace in this process, or one of JAX's own.

    Raises GraphError when there is none.
    """
    if name == "sharding_constraint":
        return _PLACED
    name = registry.spelled().get(name, (name,))[0] if isinstance(name, str) else name
    found = _PRIMITIVES.get(name) if isinstance(name, str) else None
    if found is None and isinstance(name, str):
        found = _jax_primitives().get(name)
    if found is None:
        raise GraphError(
            f"JAX has no primitive {name!r}",
            hint="The graph may come from another version of JAX; trace the function again.",
        )
    return found
