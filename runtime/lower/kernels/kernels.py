"""How a kernel runs on one device's block of its index space.

The operands of a kernel are exactly the image boxes of the block, and its shape parameters are
those of the block, so binding the JAX primitive is all that most kernels need. The table below
holds the others: those whose result depends on where the block lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry_egg.errors import PlanError, TemplateError
from tapestry_egg.graph.blockgraph import Operation, TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.plans.collectives import block_number, zero
from tapestry_egg.plans.compiler_options import GPUS
from tapestry_egg.plans.plan import Strategy

from .block import IndexBlock
from .margins import Margined
from .spellings import SPELLINGS
from .states import JOINED, after_others

if TYPE_CHECKING:
    import jax

    Arrays = Sequence[jax.Array]


@dataclass(frozen=True)
class Call:
    """One kernel on one device's block.

    `params` are the local ones, as JAX wants them; `whole` are the operation's own, in plain form.
    """

    kernel: str
    params: Mapping[str, Any]
    whole: Mapping[str, Any]
    operands: tuple[jax.Array, ...]
    block: IndexBlock
    platform: str = ""  # compiled for, by JAX's name

    @property
    def signature(self) -> OperationSignature:
        return self.block.signature

    def bind(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        """The JAX primitive on `operands`, with some parameters replaced; always a list."""
        from tapestry_egg.tracing.codec import primitive

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
    platform: str = "",
    wider: Mapping[int, Margined] | None = None,
) -> list[jax.Array]:
    """The local outputs of an operation, from this device's blocks of its operands.

    `inputs` and `outputs` are the types of the whole tensors, `operands` are in the layouts of
    `strategy.needs`; compiled for `platform` (JAX's name). Of operands that lack rows of
    neighbours, `wider` has the blocks with these. Raises PlanError where an operand's block does
    not hold what the index block reads.
    """
    from tapestry_egg.metakernels import registry

    signature = registry.signature_of(op, inputs, outputs)
    block = IndexBlock(signature, strategy.cuts, mesh)
    return _run(op, block, operands, strategy.needs, where, platform, wider or {})


def _run(
    op: Operation,
    block: IndexBlock,
    operands: Arrays,
    layouts: Sequence[Layout],
    where: str,
    platform: str,
    wider: Mapping[int, Margined],
) -> list[jax.Array]:
    from tapestry_egg.tracing.codec import decode_params

    if block.is_whole:
        params = decode_params(op.params, kernel=op.kernel)
        call = Call(op.kernel, params, op.params, tuple(operands), block, platform)
        # Places are brought inside also where nothing is cut: what is read may be cut further on.
        return (LOWERINGS.get(op.kernel, _bound) if call.signature.read_at else _bound)(call)
    images = tuple(
        block.image(operands, p, layout, where, wider.get(p)) for p, layout in enumerate(layouts)
    )
    local = _local_params(op, block, images) if not block.is_sparse else None
    if local is None:
        larger = block.uncut_where_gathered(layouts)
        if larger != block:
            return block.crop(larger, _run(op, larger, operands, layouts, where, platform, wider))
        dense = block.without_gaps(images) if block.is_sparse else None
        local = _local_params(op, block, dense) if dense else None
        if dense is None or local is None:
            raise PlanError(
                f"the kernel cannot run on the blocks that {block.cuts} cut its index space into",
                where=where,
                hint="The metakernel's template should declare the dim `whole`.",
            )
        images = dense
    params = decode_params(local, kernel=op.kernel)
    call = Call(op.kernel, params, op.params, images, block, platform)
    lowering = LOWERINGS.get(op.kernel) or JOINED.get(op.kernel)
    return after_others(call, list(lowering(call)) if lowering else _bound(call))


def _bound(call: Call) -> list[jax.Array]:
    """A kernel on its operands as they are, as the compiler of its platform takes it best."""
    spelled = SPELLINGS.get("gpu" if call.platform in GPUS else call.platform, {}).get(call.kernel)
    return spelled(call) if spelled else call.bind(*call.operands)


def _local_params(
    op: Operation, block: IndexBlock, images: tuple[jax.Array, ...]
) -> Mapping[str, Any] | None:
    """The parameters for a block; None where the kernel cannot run on boxes of these shapes."""
    from tapestry_egg.metakernels import registry

    try:
        return registry.localize(
            op.kernel,
            op.params,
            block.signature,
            [x.shape for x in images],
            [p.footprint(block.extents) for p in block.signature.outputs],
        )
    except TemplateError:
        return None


# Kernels whose result depends on where the block lies


def _iota(call: Call) -> list[jax.Array]:
    import jax.numpy as jnp

    (counted,) = call.bind()
    return [counted + jnp.asarray(call.output_offset(call.params["dimension"]), counted.dtype)]


def _concatenate(call: Call) -> list[jax.Array]:
    """On a part of the joined dim, every operand fills the whole part: choose by the place."""
    import jax.numpy as jnp
    from jax import lax

    d = call.params["dimension"]
    lengths = [t.shape[d] for t in call.signature.input_types]
    size = call.signature.outputs[0].footprint(call.block.extents)[d]
    if size == sum(lengths):
        return call.bind(*call.operands)
    out = call.operands[0]
    place = lax.broadcasted_iota(jnp.int32, out.shape, d)
    place = place + jnp.asarray(call.output_offset(d), jnp.int32)
    for k, x in enumerate(call.operands[1:], 1):
        out = jnp.where(place >= sum(lengths[:k]), x, out)
    return [out]


def _counters(call: Call, shape: Sequence[int], first: int) -> tuple[jax.Array, jax.Array]:
    """High and low words u32[local shape] of the row-major numbers that the elements of the output
    dims from `first` on have in an array of the whole shape."""
    import jax.numpy as jnp
    from jax import lax

    local = call.params["shape"]
    high = low = jnp.zeros(local, jnp.uint32)
    stride = 1
    for k in reversed(range(len(shape))):
        at = lax.broadcasted_iota(jnp.uint32, local, k)
        at = at + jnp.asarray(call.output_offset(first + k), jnp.uint32)
        part = at * jnp.uint32(stride % 2**32)
        low = low + part
        if stride * shape[k] > 2**32:  # carry into the high word
            high = high + at * jnp.uint32(stride >> 32) + (low < part).astype(jnp.uint32)
            high = high + lax.mulhi(at, jnp.full_like(at, stride % 2**32))
        stride *= shape[k]
    return high, low


def _iota_words(call: Call) -> list[jax.Array]:
    return list(_counters(call, call.whole["shape"], 0))


def _hashed(call: Call) -> tuple[jax.Array, jax.Array]:
    """The two words of the Threefry hash of every element's number in the whole array, under each
    of the keys: a shard computes its own."""
    import jax
    import jax.numpy as jnp

    from tapestry_egg.tracing.codec import primitive

    (keys,) = call.operands
    words = jax.random.key_data(keys)
    high, low = _counters(call, call.whole["shape"], keys.ndim)
    shape = (*keys.shape, *call.params["shape"])
    spread = tuple(range(keys.ndim, len(shape)))
    pair = [jnp.expand_dims(words[..., k], spread) for k in (0, 1)]
    first, second = primitive("threefry2x32").bind(
        *(jnp.broadcast_to(x, shape) for x in (*pair, high, low))
    )
    return first, second


def _random_bits(call: Call) -> list[jax.Array]:
    import jax.numpy as jnp

    hashed = _hashed(call)
    width = call.params["bit_width"]
    if width == 64:
        high, low = (x.astype(jnp.uint64) for x in hashed)
        return [(high << 32) | low]
    return [(hashed[0] ^ hashed[1]).astype(f"uint{width}")]


def _random_split(call: Call) -> list[jax.Array]:
    import jax
    import jax.numpy as jnp

    words = jnp.stack(_hashed(call), -1)
    return [jax.random.wrap_key_data(words, impl=jax.random.key_impl(call.operands[0]))]


def _dynamic_slice(call: Call) -> list[jax.Array]:
    """The start is clamped as for the whole slice; then this device's part begins further on.

    Also where nothing is cut: XLA makes one slice of two, such as this and a copy of a block of it,
    and clamps the first one's start only as far as a slice of the second one's size goes.
    """
    import jax.numpy as jnp

    operand, *starts = call.operands
    length, sizes = call.signature.input_types[0].shape, call.whole["slice_sizes"]
    here = None  # of a dim that is cut one device has the element; the others give zero
    for k, (n, size) in enumerate(zip(length, sizes, strict=True)):
        first = jnp.clip(signed(starts[k]), 0, n - size)
        if size != n and call.is_part(0, k):
            first = first - jnp.asarray(call.operand_offset(0, k), first.dtype)
            own = (first >= 0) & (first < operand.shape[k])
            here = own if here is None else here & own
        elif size != n:  # else the operand's block is the part
            first = first + jnp.asarray(call.output_offset(k), first.dtype)
        starts[k] = first
    found = call.bind(operand, *(signed(s).astype(jnp.int32) for s in starts))
    if here is None:
        return found
    monoid = next(d.monoid for d in call.signature.index if d.role == "reduce")
    return [jnp.where(here, x, zero(monoid, x.dtype)) for x in found]


def _dynamic_update_slice(call: Call) -> list[jax.Array]:
    """Of a part of the operand only those elements are written among which the update may be, so
    that compilers can write them where the operand is; what the update does not reach stays."""
    import jax.numpy as jnp
    from jax import lax

    operand, update, *starts = call.operands
    length, sent, *_ = (t.shape for t in call.signature.input_types)
    window, rows = list(update.shape), {}  # rows of the update in the window, per dim
    for k, (n, m) in enumerate(zip(length, sent, strict=True)):
        starts[k] = jnp.clip(signed(starts[k]), 0, n - m).astype(jnp.int32)
        if not call.is_part(0, k) or m == n:
            continue
        first = starts[k] - jnp.asarray(call.output_offset(k), jnp.int32)
        window[k] = w = min(m, operand.shape[k])
        starts[k] = jnp.clip(first, 0, operand.shape[k] - w)
        row = jnp.clip(starts[k] - first, -w, m)  # of the update, that the window begins with
        around = [(w, w, 0) if d == k else (0, 0, 0) for d in range(operand.ndim)]
        wide = lax.pad(update, np.zeros((), update.dtype), around)
        update = lax.dynamic_slice_in_dim(wide, row + w, w, k)
        rows[k] = row + jnp.arange(w, dtype=jnp.int32)
    if rows:
        now, inside = lax.dynamic_slice(operand, starts, window), jnp.bool_(True)
        for k, at in rows.items():
            held = (at >= 0) & (at < sent[k])
            inside = inside & lax.broadcast_in_dim(held, window, (k,))
        update = jnp.where(inside, update, now)
    return call.bind(operand, update, *starts)


def _select_and_scatter_add(call: Call) -> list[jax.Array]:
    """The windows that reach into this device's tiles reach out of them too: cut that off."""
    from jax import lax

    (out,) = _bound(call)
    tiles, read = call.signature.outputs[0], call.signature.inputs[1]
    sizes = tiles.footprint(call.block.extents)
    starts = [
        t - s if n != m else 0
        for t, s, n, m in zip(tiles.offset, read.offset, sizes, out.shape, strict=True)
    ]
    ends = [s + n for s, n in zip(starts, sizes, strict=True)]
    return [lax.slice(out, starts, ends)]


def _gather(call: Call) -> list[jax.Array]:
    """Rows that another device holds count zero, so that the partial results add up.

    An index outside the whole tensor is clamped where the mode says so; where the mode fills, the
    device with the first rows gives the fill value.
    """
    import jax.numpy as jnp
    from jax.lax import GatherScatterMode

    operand, indices = call.operands
    numbers = call.params["dimension_numbers"]
    length = call.signature.input_types[0].shape
    rows = {
        t: k
        for t, k in enumerate(numbers.start_index_map)
        if call.is_part(0, k) and call.whole["slice_sizes"][k] != length[k]
    }
    places, mode = _places(indices), call.params["mode"]
    one = prod(indices.shape[:-1]) == 1
    if one and mode == GatherScatterMode.CLIP:  # XLA makes it a slice: see `_dynamic_slice`
        for t, k in enumerate(numbers.start_index_map):
            places[t] = jnp.clip(places[t], 0, length[k] - call.whole["slice_sizes"][k])
        indices = jnp.stack(places, -1)
    if not rows:
        return call.bind(operand, indices)
    fills = mode == GatherScatterMode.FILL_OR_DROP
    here, outside, first = _localize(call, places, rows, clamp=not fills)
    for t, k in rows.items():
        places[t] = jnp.clip(places[t], 0, operand.shape[k] - 1)
    (found,) = call.bind(
        operand, jnp.stack(places, -1), indices_are_sorted=False, unique_indices=False
    )
    batch = [d for d in range(found.ndim) if d not in numbers.offset_dims]
    others = tuple(d for d in range(found.ndim) if d not in batch)
    monoid = next(d.monoid for d in call.signature.index if d.role == "reduce")
    elsewhere = zero(monoid, found.dtype)
    if fills:
        fill = jnp.asarray(call.params["fill_value"], found.dtype)
        elsewhere = jnp.where(jnp.expand_dims(outside & first, others), fill, elsewhere)
    return [jnp.where(jnp.expand_dims(here, others), found, elsewhere)]


def _scatter(call: Call) -> list[jax.Array]:
    """Updates aimed at rows of another device are dropped; that device applies them."""
    import jax.numpy as jnp
    from jax.lax import GatherScatterMode

    operand, indices, updates = call.operands
    numbers = call.params["dimension_numbers"]
    targets = numbers.scatter_dims_to_operand_dims
    length, _, sent = (t.shape for t in call.signature.input_types)
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    own = [k for k in range(operand.ndim) if k not in taken]
    window = [1] * operand.ndim
    for k, d in zip(own, numbers.update_window_dims, strict=True):
        window[k] = sent[d]
    rows = {t: k for t, k in enumerate(targets) if call.is_part(0, k) and window[k] != length[k]}
    if not rows:
        return call.bind(operand, indices, updates)
    places = _places(indices)
    clamp = call.params["mode"] == GatherScatterMode.CLIP
    if clamp:  # the other dims here, since the mode must now drop what is outside
        for t, k in enumerate(targets):
            if t not in rows:
                places[t] = jnp.clip(places[t], 0, length[k] - window[k])
    here, _, _ = _localize(call, places, rows, clamp=clamp)
    if prod(indices.shape[:-1]) == 1:
        for t, k in enumerate(targets):
            if t not in rows:
                here = here & (places[t] >= 0) & (places[t] <= length[k] - window[k])
        sizes = [n if w == m else w for n, w, m in zip(operand.shape, window, length, strict=True)]
        return [_one_update(call, dict(zip(targets, places, strict=True)), here, sizes)]
    return call.bind(
        operand,
        jnp.stack(places, -1),
        updates,
        indices_are_sorted=False,
        unique_indices=False,
        mode=GatherScatterMode.FILL_OR_DROP,
    )


def _one_update(
    call: Call, places: Mapping[int, jax.Array], here: jax.Array, sizes: Sequence[int]
) -> jax.Array:
    """A scatter's operand with its only update made at `places` (by dim), if it is `here`.

    XLA makes the same of a single update, but reads what it leaves as it is where the update would
    have been: of an operand that is cut out of an array, beyond the block, and writes that into it.
    """
    import jax.numpy as jnp
    from jax import lax
    from jax.lax import GatherScatterMode

    operand, indices, updates = call.operands
    starts = [jnp.int32(0) for _ in sizes]
    for k, place in places.items():
        starts[k] = jnp.clip(place.reshape(()), 0, operand.shape[k] - sizes[k]).astype(jnp.int32)
    now = lax.dynamic_slice(operand, starts, sizes)
    (made,) = call.bind(
        now,
        jnp.zeros_like(indices),
        updates,
        indices_are_sorted=False,
        unique_indices=False,
        mode=GatherScatterMode.FILL_OR_DROP,
    )
    left = jnp.where(here.reshape(()), made, now)
    return lax.dynamic_update_slice(operand, left, starts)


def _places(indices: jax.Array) -> list[jax.Array]:
    """The columns of index vectors s32[..., depth], wide enough to subtract offsets from."""
    indices = signed(indices)
    return [indices[..., t] for t in range(indices.shape[-1])]


def signed(indices: jax.Array) -> jax.Array:
    """The same places as signed integers of at least 32 bits; those beyond any array end there."""
    import jax.numpy as jnp

    if indices.dtype.itemsize < 4:
        return indices.astype(jnp.int32)
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        return jnp.minimum(indices, 2**31 - 1).astype(jnp.int32)
    return indices


def _localize(
    call: Call, places: list[jax.Array], rows: Mapping[int, int], *, clamp: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Make the columns `rows` (column -> dim of operand 0) count from this device's first row.

    Returns flags: which index vectors point into this device's rows, which point outside the whole
    tensor, and whether this device has the first rows.
    """
    import jax.numpy as jnp

    operand, length = call.operands[0], call.signature.input_types[0].shape
    here, outside, first = jnp.bool_(True), jnp.bool_(False), jnp.bool_(True)
    for t, k in rows.items():
        if clamp:
            places[t] = jnp.clip(places[t], 0, length[k] - 1)
        outside = outside | (places[t] < 0) | (places[t] >= length[k])
        offset = jnp.asarray(call.operand_offset(0, k), places[t].dtype)
        places[t] = places[t] - offset
        here = here & (places[t] >= 0) & (places[t] < operand.shape[k])
        first = first & (offset == 0)
    return here, outside, first


def _fused_attention(call: Call) -> list[jax.Array]:
    """Rows of a causal mask see the keys up to their own place among all rows."""
    (rows,) = (d for d, n in enumerate(call.signature.outputs[0].matrix[1]) if n)
    if not (call.params["causal"] and call.block.is_cut(rows)):
        return _bound(call)
    from .attention import in_rows

    number = block_number(call.block.cuts[rows], call.block.mesh)
    count = call.block.mesh.parts(call.block.cuts[rows])
    return in_rows(call.bind, call.operands, number, count, call.params["window"])


#: Kernel -> its lowering on a part of its index space. All others just bind their primitive.
LOWERINGS: Mapping[str, Callable[[Call], list[jax.Array]]] = {
    "iota": _iota,
    "iota_2x32_shape": _iota_words,
    "random_bits": _random_bits,
    "random_split": _random_split,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "select_and_scatter_add": _select_and_scatter_add,
    "gather": _gather,
    "flash_attention": _fused_attention,
    "flash_attention_backward": _fused_attention,
    **dict.fromkeys(
        (
            *("scatter", "scatter_apply"),
            *(f"scatter-{kind}" for kind in ("add", "sub", "mul", "min", "max")),
            *(f"scatter_{kind}" for kind in ("add", "sub", "mul", "min", "max")),
        ),
        _scatter,
    ),
}
