"""Reference kernels: NumPy only, on boxes of the operands, at their global places.

Every kernel that has a template has a reference, which shares no code with the JAX lowering. It is
what plans are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.registry import facts_of, localize
from tapestry_egg.metakernels.signatures.parameters import readable
from tapestry_egg.metakernels.signatures.signature import AROUND, OperationSignature
from tapestry_egg.zspace import ZRange

from .algebra import ALGEBRA
from .call import Array, Call, Reference, numpy_dtype, zero
from .elementwise import ELEMENTWISE
from .indexing import INDEXING, scatter
from .linalg import LINALG
from .movement import MOVEMENT
from .random import RANDOM
from .streaming import STREAMING


def _reduce(call: Call) -> tuple[Array, ...]:
    """Several arrays reduced by the computation on scalars that the operation carries: element by
    element along the reduced dims, for all kept places at once.

    XLA takes what they start from for identities, and a single element for its own sum."""
    many = len(call.operands) // 2
    xs, starts = call.operands[:many], call.operands[many:]
    state = [np.full(call.shape(q), x) for q, x in enumerate(starts)]
    axes = call.params["dimensions"]
    rows = [np.moveaxis(x, axes, range(len(axes))) for x in xs]
    places = [*np.ndindex(*rows[0].shape[: len(axes)])]
    if len(places) == 1:
        return tuple(x[places[0]] for x in rows)
    for at in places:
        state = _computed(call.params["jaxpr"]["$jaxpr"], [*state, *[x[at] for x in rows]])
    return tuple(state)


def _scatter_apply(call: Call) -> Array | tuple[Array, ...]:
    """What a computation on scalars makes of elements at places, as often as there are updates."""

    def combine(out: Array, at: Any, updates: Array) -> None:
        for k, update in enumerate(updates):
            place = tuple([numbers[k] for numbers in at])
            (out[place],) = _computed(
                call.params["update_jaxpr"]["$jaxpr"], [np.asarray(out[place]), update]
            )

    return scatter(combine)(call)


def _computed(computation: Mapping[str, Any], operands: Sequence[Array]) -> list[Array]:
    """What a computation on scalars, as a document, gives of every element of some arrays."""
    shape = operands[0].shape
    dtypes = [str(t).partition("[")[0] for t in computation["values"]]
    known = dict(zip(computation["inputs"], operands, strict=True))
    for v, number in computation.get("constants", {}).items():
        known[int(v)] = np.full(shape, number, numpy_dtype(dtypes[int(v)]))
    for op in computation["operations"]:
        read, made = (
            tuple([TensorType(shape, dtypes[v]) for v in op[side]])
            for side in ("inputs", "outputs")
        )
        params = op.get("params", {})
        signature = registry.signature(op["kernel"], params, read, made)
        results = reference(op["kernel"], params, signature, [known[v] for v in op["inputs"]])
        known.update(zip(op["outputs"], results, strict=True))
    return [known[v] for v in computation["outputs"]]


#: Kernel name -> its implementation.
REFERENCES: Mapping[str, Reference] = {
    "reduce": _reduce,
    "scatter_apply": _scatter_apply,
    **ELEMENTWISE,
    **MOVEMENT,
    **ALGEBRA,
    **INDEXING,
    **LINALG,
    **RANDOM,
    **STREAMING,
}

#: Those of users' kernels.
_OWN: dict[str, Reference] = {}


def add_reference(kernel: str, function: Reference) -> None:
    """Give a kernel of one's own its NumPy implementation, which rules about it are tried with."""
    _OWN[kernel] = function


def reference(
    kernel: str,
    params: Mapping[str, Any],
    sig: OperationSignature,
    operands: Sequence[Array],
    box: ZRange | None = None,
) -> tuple[Array, ...]:
    """Run `kernel` on the index box `box` (the whole index space when None).

    `operands[p]` is exactly the box `sig.operand_box(p, box)` of operand p. Returns, per output,
    the box `sig.outputs[q].image(box)`: a partial value when `box` is a block of a reduce dim.
    Raises TemplateError for a kernel without a reference, and for operands of other shapes.
    """
    implementation = _implementation(kernel)
    whole = ZRange.from_shape(sig.extents) if box is None else box
    outputs = tuple(p.image(whole) for p in sig.outputs)
    for p, x in enumerate(operands):
        at = sig.operand_box(p, whole)
        if np.shape(x) != at.shape:
            raise TemplateError(f"operand {p} of {kernel} has shape {np.shape(x)}, not {at.shape}")
    filled = [_filled(sig, p, operands, whole) for p in range(len(operands))]
    inputs = tuple(at for _, at in filled)
    shapes = [b.shape for b in inputs], [b.shape for b in outputs]
    call = Call(
        kernel=kernel,
        params={k: readable(v) for k, v in params.items()},
        local={k: readable(v) for k, v in localize(kernel, params, sig, *shapes).items()},
        signature=sig,
        operands=tuple(x for x, _ in filled),
        box=whole,
        inputs=inputs,
        outputs=outputs,
    )
    return _results(implementation, call)


def prepared(
    kernel: str, params: Mapping[str, Any], sig: OperationSignature
) -> Callable[[Sequence[Array]], tuple[Array, ...]]:
    """`reference` on the whole of every operand, ready to be run many times.

    Raises TemplateError for a kernel without a reference.
    """
    implementation = _implementation(kernel)
    index = ZRange.from_shape(sig.extents)
    inputs = [ZRange.from_shape(t.shape) for t in sig.input_types]
    outputs = [ZRange.from_shape(t.shape) for t in sig.output_types]
    ports = range(len(inputs))
    if all(t.size == 0 for t in sig.output_types):
        made = tuple(np.zeros(t.shape, numpy_dtype(t.dtype)) for t in sig.output_types)
        return lambda operands: made
    # Where there is no index there is no box of an operand that it reads, but there is a result.
    read = inputs if index.is_empty else [sig.operand_box(p, index) for p in ports]
    filled = [] if index.is_empty else [p for p in ports if sig.beyond(p) not in (None, AROUND)]
    wider = {p: _margins(sig, p, index) for p in filled}
    plain = {k: readable(v) for k, v in params.items()}
    boxes = [_wider(read[p], wider[p]) if p in wider else read[p] for p in ports]
    shapes = [b.shape for b in boxes], [b.shape for b in outputs]
    local = plain if index.is_empty else localize(kernel, params, sig, *shapes)
    call = Call(
        kernel=kernel,
        params=plain,
        local={k: readable(v) for k, v in local.items()},
        signature=sig,
        operands=(),
        box=index,
        inputs=tuple(boxes),
        outputs=tuple(outputs),
    )
    cut = [x.slices for x in read]
    whole = not wider and read == inputs

    def run(operands: Sequence[Array]) -> tuple[Array, ...]:
        parts = operands
        if not whole:
            parts = [
                _padded(x[at], sig.beyond(p), wider[p], operands) if p in wider else x[at]
                for p, (x, at) in enumerate(zip(operands, cut, strict=True))
            ]
        return _results(implementation, call.on(tuple(parts)))

    return run


def _implementation(kernel: str) -> Reference:
    found = _OWN.get(kernel) or REFERENCES.get(kernel)
    if found is None:
        raise TemplateError(f"there is no reference for {kernel}", hint=facts_of(kernel).reason)
    return found


def _results(implementation: Reference, call: Call) -> tuple[Array, ...]:
    with np.errstate(all="ignore"):
        made = implementation(call)
        values = made if isinstance(made, list | tuple) else (made,)
        return tuple(np.asarray(v).astype(call.dtype(q), copy=False) for q, v in enumerate(values))


_Margins = Sequence[tuple[int, int]]


def _margins(sig: OperationSignature, p: int, box: ZRange) -> _Margins:
    return tuple((int(a), int(b)) for a, b in sig.margins(p, box))


def _wider(box: ZRange, margins: _Margins) -> ZRange:
    return ZRange(
        tuple(s - a for s, (a, _) in zip(box.start, margins, strict=True)),
        tuple(e + b for e, (_, b) in zip(box.end, margins, strict=True)),
    )


def _padded(x: Array, beyond: Any, margins: _Margins, operands: Sequence[Array]) -> Array:
    value = operands[beyond] if isinstance(beyond, int) else zero(beyond, x.dtype)
    return np.pad(x, margins, constant_values=value) if any(map(any, margins)) else x


def _around(sig: OperationSignature, p: int, x: Array, box: ZRange) -> tuple[Array, ZRange]:
    """Operand p, whose ends meet, as the index box reads it, but along dims of which the kernel
    takes its part itself."""
    at, image, margins = sig.operand_box(p, box), sig.inputs[p].image(box), sig.margins(p, box)
    start, end = list(at.start), list(at.end)
    for k, (n, edges) in enumerate(zip(sig.input_types[p].shape, margins, strict=True)):
        if any(edges):
            start[k], end[k] = image.start[k], image.end[k]
            x = np.take(x, np.arange(start[k], end[k]) % n - at.start[k], axis=k)
    return x, ZRange(tuple(start), tuple(end))


def _filled(
    sig: OperationSignature, p: int, operands: Sequence[Array], box: ZRange
) -> tuple[Array, ZRange]:
    """Operand p with what lies outside it filled in where the index box reaches there."""
    x, at, beyond = np.asarray(operands[p]), sig.operand_box(p, box), sig.beyond(p)
    if beyond is None:
        return x, at
    if beyond == AROUND:
        return _around(sig, p, x, box)
    margins = _margins(sig, p, box)
    return _padded(x, beyond, margins, operands), _wider(at, margins)
