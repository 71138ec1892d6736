"""One application of a reference kernel: local boxes, where they lie, and readable parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.zspace import ZRange

Array = NDArray[Any]

#: A Threefry key on the host: its two 32-bit words.
KEY = np.dtype([("words", np.uint32, 2)])


@dataclass(frozen=True, eq=False)
class Call:
    """What a reference implementation is given.

    `operands[p]` is the box `inputs[p]` of operand p, with what lies outside the operand filled in,
    and output q is the box `outputs[q]`; both are images of the index box `box`, in global
    coordinates. `params` are the operation's own, `local` the same with what differs on local
    boxes; both are readable (tuples, names).
    """

    kernel: str
    params: Mapping[str, Any]
    local: Mapping[str, Any]
    signature: OperationSignature
    operands: tuple[Array, ...]
    box: ZRange
    inputs: tuple[ZRange, ...]
    outputs: tuple[ZRange, ...]

    def on(self, operands: tuple[Array, ...]) -> Call:
        """The same call on other operands of these boxes."""
        made = Call.__new__(Call)
        made.__dict__.update(self.__dict__, operands=operands)
        return made

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Global types of the operands."""
        return self.signature.input_types

    def dtype(self, q: int = 0) -> np.dtype[Any]:
        """NumPy's dtype of output q."""
        return numpy_dtype(self.signature.output_types[q].dtype)

    def shape(self, q: int = 0) -> tuple[int, ...]:
        """Local shape of output q."""
        return self.outputs[q].shape

    @property
    def first(self) -> bool:
        """Whether this is the first block along every reduce dim."""
        dims = zip(self.signature.index, self.box.start, strict=True)
        return all(start == 0 for d, start in dims if d.role == "reduce")


Reference = Callable[[Call], Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name, ml_dtypes' included; `KEY` for random keys."""
    if name == "key<fry>":
        return KEY
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        own: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return own


def wide(x: Array) -> Array:
    """The same values in the widest dtype of their kind, in which references compute."""
    if x.dtype.kind in "biu":
        return x
    own = np.complex128 if x.dtype.kind == "c" else np.float64
    return x if x.dtype == own and x.flags.c_contiguous else x.astype(own)


def zero(monoid: str, dtype: np.dtype[Any]) -> Any:
    """The neutral element of a monoid over numbers or flags; `max` of integers has the least one.

    Raises KeyError for a monoid whose values are not single numbers.
    """
    if monoid == "logaddexp":
        return -np.inf
    if monoid in ("max", "min") and dtype.kind != "b":
        if dtype.kind in "iu":
            ends = np.iinfo(dtype)
            return ends.min if monoid == "max" else ends.max
        least = -np.inf if monoid == "max" else np.inf
        if not np.isinf(np.asarray(least).astype(dtype)):
            import ml_dtypes

            return ml_dtypes.finfo(dtype).min if monoid == "max" else ml_dtypes.finfo(dtype).max
        return least
    return {"sum": 0, "prod": 1, "and": True, "or": False, "max": False, "min": True}[monoid]
