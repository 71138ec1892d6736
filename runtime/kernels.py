"""How a kernel runs on one device's block of its index space.

The operands of a kernel are exactly the image boxes of the block, and its shape parameters are
those of the block, so binding the JAX primitive is all that most kernels need. The table below
holds the others: those whose result depends on where the block lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..blockgraph import Operation, TensorType
from ..layout import MeshShape
from ..metakernels.signature import OperationSignature
from ..plan import Strategy
from .block import IndexBlock

if TYPE_CHECKING:
    import jax

    Arrays = Sequence[jax.Array]


@dataclass(frozen=True)
class Call:
    """One kernel on one device's block: `params` are the local ones, as JAX wants them."""

    kernel: str
    params: Mapping[str, Any]
    operands: tuple[jax.Array, ...]
    block: IndexBlock

    @property
    def signature(self) -> OperationSignature:
        return self.block.signature

    def bind(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        """The JAX primitive on `operands`, with some parameters replaced; always a list."""
        from ..codec import primitive

        kernel = primitive(self.kernel)
        bound = kernel.get_bind_params({**self.params, **params})
        functions, bound = bound if isinstance(bound, tuple) else ((), bound)
        out = kernel.bind(*functions, *operands, **bound)
        return list(out) if kernel.multiple_results else [out]

    def output_offset(self, k: int, q: int = 0) -> Any:
        """Where the block of output q begins in its dim k: a traced s32[], or an integer."""
        return self.block.start(self.signature.outputs[q], k)

    def operand_offset(self, p: int, k: int) -> Any:
        """Where the image of operand p begins in its dim k."""
        return self.block.start(self.signature.inputs[p], k)

    def is_part(self, p: int, k: int) -> bool:
        """Whether the operand's image in dim k is less than the whole dim."""
        return self.operands[p].shape[k] != self.signature.input_types[p].shape[k]


def run_kernel(
    op: Operation,
    inputs: tuple[TensorType, ...],
    outputs: tuple[TensorType, ...],
    strategy: Strategy,
    operands: Arrays,
    mesh: MeshShape,
    where: str,
) -> list[jax.Array]:
    """The local outputs of an operation, from this device's blocks of its operands.

    `inputs` and `outputs` are the types of the whole tensors, `operands` are in the layouts of
    `strategy.needs`. Raises PlanError where an operand's block does not hold what the index block
    reads.
    """
    from ..codec import decode_params
    from ..metakernels import registry

    signature = registry.signature(op.kernel, op.params, inputs, outputs)
    block = IndexBlock(signature, strategy.cuts, mesh)
    if block.is_whole:
        params = decode_params(op.params, kernel=op.kernel)
        call = Call(op.kernel, params, tuple(operands), block)
        if op.effectful and not op.outputs and mesh.devices > 1:
            return _on_first_device(call)
        return call.bind(*operands)
    images = tuple(
        block.image(x, p, layout, where)
        for p, (x, layout) in enumerate(zip(operands, strategy.needs, strict=True))
    )
    local = registry.localize(
        op.kernel,
        op.params,
        signature,
        [x.shape for x in images],
        [p.footprint(block.extents) for p in signature.outputs],
    )
    call = Call(op.kernel, decode_params(local, kernel=op.kernel), images, block)
    lowering = LOWERINGS.get(op.kernel)
    return list(lowering(call)) if lowering else call.bind(*images)


def _on_first_device(call: Call) -> list[jax.Array]:
    """Something that is run for its effect only, such as a print, is run once."""
    from jax import lax

    mesh = call.block.mesh
    first = all_of(lax.axis_index(name) == 0 for name in mesh.names)
    lax.cond(first, lambda: call.bind(*call.operands) and None, lambda: None)
    return []
