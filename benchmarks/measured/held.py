"""What PyTorch's allocator keeps of a device beyond what is in use, in nanotron's train steps.

The runs' peaks are those that `torch.cuda.max_memory_reserved` gives after three steps (nanotron's
log; the statistics of what is in use are reset within a step). So a step's requests are made here
one by one, as nanotron at 67c5ebb6 makes them (models/llama.py, parallel/tensor_parallel, optim),
of an allocator that works as PyTorch's does. A block that a collective has read is free only when
the device is done with it, and the host runs ahead of the device by up to 1024 launches (the length
of a queue of CUDA): so several whole streams a layer are kept where devices are the slower.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from . import nanotron
from .allocator import Allocator, Block, OutOfMemory
from .rows import Run

#: Bytes that PyTorch reports an H100 to have, less an estimate of what CUDA and NCCL take of them.
CAPACITY = 79.1 * 2**30 - 1.5e9
#: Launches that a queue takes before the host waits.
QUEUE = 1024
#: Steps until memory is logged, and micro-batches of each that are replayed: the others are alike.
STEPS, MICRO_BATCHES = 3, 3

Blocks = dict[str, Block]


def reserved_bytes(run: Run, host_seconds: float) -> float:
    """Bytes reserved beyond the most in use, where the host takes so long to dispatch a step;
    infinite where memory does not suffice."""
    try:
        launches = _Steps(run, 0.0).replay(1, 1)
        steps = _Steps(run, host_seconds / run.micro_batches / launches)
        steps.replay(STEPS, min(MICRO_BATCHES, run.micro_batches))
    except OutOfMemory:
        return float("inf")
    return float(max(0, steps.memory.reserved - steps.memory.most_in_use))


@dataclass
class _Sizes:
    """Bytes on one device, in bfloat16: the stream whole and cut, hidden values, logits."""

    stream: int
    shard: int
    hidden: int
    logits: int
    rows: int  # tokens of a micro-batch


class _Steps:
    """Train steps on a device: its memory, and the times at which host and device are."""

    def __init__(self, run: Run, launch: float) -> None:
        from tapestry_egg.graph.layout import MeshShape
        from tapestry_egg.machine.costs import collective_seconds
        from tapestry_egg.machine.target import load_target

        target, m, t = load_target(run.target), run.model, run.tensor
        self.run, self.launch_seconds, self.cut = run, launch, t > 1
        rows = run.micro_batch * m.sequence
        stream = 2 * rows * m.width
        self.size = _Sizes(
            stream, stream // t, 2 * rows * m.hidden // t, 2 * rows * m.vocabulary // t, rows
        )
        self.flops, self.bytes = target.rate("bfloat16", True), target.hbm_bytes_per_second
        mesh = MeshShape(("d", "t"), (run.data, t))
        self.ring = float(collective_seconds("all_gather", stream / t, (1,), mesh, target))
        self.memory = Allocator(CAPACITY)
        self.host = self.device = 0.0
        self.queue: deque[float] = deque()
        self.launched = 0
        self.buffers: Blocks = {}  # that all gathers share (parallel/utils.py, MemoryBuffer)

    def work(self, *, moved: float = 0.0, flops: float = 0.0, launches: int = 1) -> None:
        """Launch kernels that take so long together."""
        seconds = (moved / self.bytes + flops / self.flops) / launches
        for _ in range(launches):
            self._launch(seconds)

    def send(self) -> None:
        """Gather or scatter the stream."""
        if self.cut:
            self._launch(self.ring)

    def _launch(self, seconds: float) -> None:
        self.launched += 1
        self.host += self.launch_seconds
        if len(self.queue) == QUEUE:
            self.host = max(self.host, self.queue.popleft())
        self.device = max(self.device, self.host) + seconds
        self.queue.append(self.device)

    def new(self, nbytes: float) -> Block:
        return self.memory.take(nbytes, self.host)

    def drop(self, *blocks: Block) -> None:
        for block in blocks:
            self.memory.give(block)

    def drop_sent(self, *blocks: Block) -> None:
        """Give back what a collective has read or written."""
        for block in blocks:
            self.memory.give(block, self.device)

    def replay(self, steps: int, micro_batches: int) -> int:
        """Launches of all steps. Raises OutOfMemory."""
        run = self.run
        arrays = nanotron.arrays(run.model, run.tensor)
        whole = sum(arrays)
        own = [-(-n // run.data) if run.zero else n for n in arrays]
        for n in arrays:
            self.new(2 * n)
        self.new(4 * whole)  # gradients
        self.new(4 * sum(own))  # master weights
        if run.data > 1 and not run.zero:
            for n in nanotron.buckets(run.model, run.tensor):
                self.new(n)
        for step in range(steps):
            for _ in range(micro_batches):
                self._micro_batch(arrays)
            if step == 0:  # when the optimizer makes its moments
                for n in own:
                    self.new(4 * n)
                    self.new(4 * n)
            self.work(moved=20.0 * sum(own), launches=len(arrays))
            if run.zero and run.data > 1:
                parts = [self.new(2 * whole // run.data) for _ in range(run.data + 1)]
                flat = self.new(2 * whole)
                self.work(moved=8.0 * whole, launches=run.data)
                self.drop_sent(*parts, flat)
            self.host = max(self.host, self.device)  # to log a step the host waits
        return self.launched

    def _micro_batch(self, arrays: tuple[int, ...]) -> None:
        size, m, t = self.size, self.run.model, self.run.tensor
        tokens = [self.new(8 * size.rows) for _ in range(3)]
        x = self.new(size.stream)
        self.work(moved=size.stream)
        if self.cut:
            masked, x = x, self.new(size.stream)
            self.work(moved=2 * size.stream)
            self.drop(masked)
            x = self._scattered(x)
        saved = []
        for _ in range(m.layers):
            kept, x = self._forward(x)
            saved.append(kept)
        normed, variance = self.new(size.shard), self.new(4 * size.rows // t)
        self.work(moved=2 * size.shard)
        gradients: list[Block] = []
        g = self._loss(normed, gradients)
        g = self._normed_gradient(g, gradients, normed, variance, x)
        for kept in reversed(saved):
            g = self._backward(kept, g, gradients)
        if self.cut:
            gathered, more = self.new(size.stream), self.new(size.stream)
            self.send()
            self.work(moved=2 * size.stream)
            self.drop(g)
            self.drop_sent(gathered)
            g = more
        embedding = self.new(2 * arrays[0])
        self.work(moved=4 * arrays[0], launches=3)
        self.drop(g)
        if m.tied:
            self.drop(embedding)  # it was added to what the logits gave
        else:
            gradients.append(embedding)
        self.work(moved=6.0 * sum(arrays), launches=len(arrays))
        self.drop(*gradients, *tokens)

    def _scattered(self, partial: Block) -> Block:
        """The sum of what every device has of the stream, cut."""
        if not self.cut:
            return partial
        out = self.new(self.size.shard)
        self.send()
        self.drop_sent(partial)
        return out

    def _columns(self, nbytes: int) -> Block:
        """Gather the stream and multiply it, for a result of so many bytes."""
        if self.cut and "stream" not in self.buffers:
            self.buffers["stream"] = self.new(self.size.stream)
        out = self.new(nbytes)
        self.send()
        self.work(flops=float(nbytes) * self.run.model.width, launches=3 if self.cut else 1)
        return out

    def _forward(self, x: Block) -> tuple[Blocks, Block]:
        """A layer: what the backward pass reads of it, and its result."""
        size, m, t = self.size, self.run.model, self.run.tensor
        s, f, scores = size.shard, size.hidden, 4 * size.rows * m.heads // t
        kept = {"x": x, "norm1": self.new(s), "variance1": self.new(4 * size.rows // t)}
        self.work(moved=2 * s)
        made = self._columns(3 * s)
        turned = self.new(3 * s)
        self.work(moved=6 * s, launches=3)
        both = self.new(2 * s)
        self.work(moved=4 * s)
        kept["kv"] = self.new(2 * s)
        self.work(moved=4 * s, launches=2)
        self.drop(both)
        kept["q"] = self.new(s)
        self.work(moved=4 * s, launches=4)
        self.drop(turned)
        kept["mixed"], kept["scores"] = self.new(s), self.new(scores)
        self.work(flops=1.0 * s * m.sequence, launches=8)
        copied = [self.new(s)] if self.run.micro_batch > 1 else []
        out = self.new(size.stream)
        self.work(flops=1.0 * s * m.width)
        self.drop(*copied)
        out = self._scattered(out)
        self.drop(made)
        kept["middle"] = self.new(s)
        self.work(moved=3 * s)
        self.drop(out)
        kept["norm2"], kept["variance2"] = self.new(s), self.new(4 * size.rows // t)
        self.work(moved=2 * s)
        kept["merged"] = self._columns(2 * f)
        kept["activated"] = self.new(f)
        self.work(moved=2 * f, launches=2)
        kept["gated"] = self.new(f)
        self.work(moved=3 * f)
        out = self.new(size.stream)
        self.work(flops=1.0 * f * m.width)
        out = self._scattered(out)
        result = self.new(s)
        self.work(moved=3 * s)
        self.drop(out)
        return kept, result

    def _loss(self, normed: Block, gradients: list[Block]) -> Block:
        """Logits and their loss; the gradient of what is multiplied for them."""
        size = self.size
        logits = self._columns(size.logits)
        wide = self.new(2 * size.logits)
        self.work(moved=3 * size.logits)
        self.drop(logits)
        greatest = self.new(4 * size.rows)
        softmax = self.new(2 * size.logits)
        self.work(moved=6 * size.logits, launches=2)
        places = [self.new(8 * size.rows) for _ in range(5)]
        self.work(moved=8 * size.logits, launches=24)
        self.drop(wide, greatest)
        self.work(moved=4 * size.logits, launches=3)
        g = self.new(size.logits)
        self.work(moved=3 * size.logits)
        self.drop(softmax, *places)
        weights = nanotron.arrays(self.run.model, self.run.tensor)[0]
        return self._columns_gradient(g, size.logits, weights, gradients)

    def _columns_gradient(
        self, g: Block, nbytes: int, weights: int, gradients: list[Block]
    ) -> Block:
        out = self.new(self.size.stream)
        flops = float(nbytes) * self.run.model.width
        self.work(flops=flops)
        self.send()
        summed = self.new(self.size.shard) if self.cut else out
        self.send()
        gradients.append(self.new(2 * weights))
        self.work(flops=flops)
        self.drop(g)
        if self.cut:
            self.drop_sent(out)
        return summed

    def _rows_gradient(self, nbytes: int, weights: int, gradients: list[Block]) -> Block:
        if self.cut and "gradient" not in self.buffers:
            self.buffers["gradient"] = self.new(self.size.stream)
        self.send()
        out = self.new(nbytes)
        flops = float(nbytes) * self.run.model.width
        self.work(flops=flops, launches=3 if self.cut else 1)
        gradients.append(self.new(2 * weights))
        self.work(flops=flops)
        return out

    def _normed_gradient(self, g: Block, gradients: list[Block], *kept: Block) -> Block:
        """Through a norm, whose weights' gradient is added up over blocks of its kernel."""
        width = self.run.model.width
        out, parts = self.new(self.size.shard), self.new(4 * 132 * width)
        gradients.append(self.new(2 * width))
        self.work(moved=4 * self.size.shard, launches=3)
        self.drop(g, parts, *kept)
        return out

    def _added(self, one: Block, other: Block, kept: Block) -> Block:
        out = self.new(self.size.shard)
        self.work(moved=3 * self.size.shard)
        self.drop(one, other, kept)
        return out

    def _backward(self, kept: Blocks, g: Block, gradients: list[Block]) -> Block:
        """The gradient of a layer's operand, from that of its result."""
        size, m, t = self.size, self.run.model, self.run.tensor
        s, f = size.shard, size.hidden
        qkv, wo, up, down = nanotron.arrays(m, t)[1:5]
        gated = self._rows_gradient(f, down, gradients)
        self.drop(kept["gated"])
        activated, gate = self.new(f), self.new(f)
        self.work(moved=6 * f, launches=2)
        self.drop(gated, kept["activated"])
        other = self.new(f)
        self.work(moved=3 * f)
        self.drop(activated)
        merged = self.new(2 * f)
        self.work(moved=4 * f, launches=2)
        self.drop(other, gate, kept["merged"])
        inner = self._columns_gradient(merged, 2 * f, up, gradients)
        self.drop(kept["norm2"])
        inner = self._normed_gradient(inner, gradients, kept["variance2"])
        g = self._added(inner, g, kept["middle"])
        mixed = self._rows_gradient(s, wo, gradients)
        if self.run.micro_batch > 1:
            turned = self.new(s)
            self.work(moved=2 * s)
            self.drop(mixed)
            mixed = turned
        parts = [self.new(s) for _ in range(3)]
        rows, wide = self.new(4 * size.rows * m.heads // t), self.new(2 * s)
        self.work(flops=2.5 * s * m.sequence, launches=6)
        self.drop(rows, wide, mixed, *(kept[k] for k in ("mixed", "scores", "q", "kv")))
        both = self.new(2 * s)
        self.work(moved=4 * s)
        self.drop(*parts[1:])
        copied, turned = self.new(s), self.new(s)
        self.work(moved=4 * s, launches=4)
        self.drop(parts[0], copied)
        stacked = self.new(3 * s)
        self.work(moved=6 * s)
        self.drop(turned, both)
        made = self.new(3 * s)
        self.work(moved=6 * s)
        self.drop(stacked)
        inner = self._columns_gradient(made, 3 * s, qkv, gradients)
        self.drop(kept["norm1"])
        inner = self._normed_gradient(inner, gradients, kept["variance1"])
        return self._added(inner, g, kept["x"])
