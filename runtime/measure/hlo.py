"""What XLA made of a program: collectives, memory and flops of a compiled executable."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np

from tapestry_egg.plans.collectives import wire_bytes

from .hlo_text import Computation, Instruction, Module, parse, split
from .trip_counts import Scope, is_one_round, trips

#: XLA's opcodes and our words for them.
KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
    "send": "send",
}


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of an executable. Bytes are per device and per execution.

    `count` multiplies loops out. `widened_bytes` of the payload are more than the program asked
    for: 16-bit values are carried out in 32 bits, as XLA's CPU compiler does with reductions, and
    with all else of bfloat16.
    """

    kind: str
    group: int
    payload_bytes: int
    wire_bytes: float
    count: int
    name: str = ""
    op_name: str = ""
    source: str = ""
    widened_bytes: int = 0


@dataclass(frozen=True)
class HloStats:
    """Collectives, memory and flops of one executable, per device.

    `peak_bytes` is arguments + outputs - aliases + temporaries. `reported_peak_bytes` is what XLA
    itself says, which is wrong on CPU and includes on-chip memory on TPU; None where it says
    nothing. `flops` counts loops by their trips. `warnings` says what could not be told. `tiled`
    says that arrays lie in tiles, as TPUs have them.
    """

    collectives: tuple[CompiledCollective, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    flops: float
    reported_peak_bytes: int | None = None
    warnings: tuple[str, ...] = ()
    tiled: bool = False

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def wire_bytes(self) -> float:
        return sum(c.wire_bytes * c.count for c in self.collectives)

    def by_kind(self) -> dict[tuple[str, int], int]:
        """Total payload bytes per (kind, group size)."""
        total: dict[tuple[str, int], int] = {}
        for c in self.collectives:
            key = (c.kind, c.group)
            total[key] = total.get(key, 0) + c.payload_bytes * c.count
        return total

    def __str__(self) -> str:
        rows = [
            f"{c.kind:<15} ×{c.group:<4} {c.payload_bytes:>14,} B  {c.count:>5} times  "
            f"{c.source or c.op_name}"
            for c in self.collectives
        ]
        rows.append(
            f"peak {self.peak_bytes:,} B = arguments {self.argument_bytes:,} + outputs "
            f"{self.output_bytes:,} - aliased {self.alias_bytes:,} + temporaries "
            f"{self.temp_bytes:,};  wire {self.wire_bytes:,.0f} B;  {self.flops:,.0f} flops"
        )
        return "\n".join([*rows, *self.warnings])


class Executable(Protocol):
    """What `jax.stages.Compiled` has of the things needed here."""

    def as_text(self) -> str | None: ...
    def memory_analysis(self) -> Any: ...
    def cost_analysis(self) -> Any: ...


def hlo_stats(compiled: Executable) -> HloStats:
    """Collectives, memory and flops of an executable, `jax.jit(f).lower(...).compile()`.

    Works on what XLA prints for CPU, GPU and TPU. XLA's own flop count takes every loop body once;
    the dots and convolutions of the other trips are added here, and where XLA gives no count (GPU)
    dots and convolutions are all that is counted. Raises PlanError where the text is no module.
    """
    text = compiled.as_text() or ""
    work = _work(parse(text))
    cost = compiled.cost_analysis()
    if isinstance(cost, list):
        cost = cost[0] if cost else None
    flops = work.flops
    if cost and cost.get("flops", -1) >= 0:
        flops = cost["flops"] + work.flops - work.flops_once
    memory = compiled.memory_analysis()

    def size(name: str) -> int:
        return int(getattr(memory, f"{name}_size_in_bytes", 0) or 0)

    peak = getattr(memory, "peak_memory_in_bytes", None)
    return HloStats(
        collectives=work.collectives,
        argument_bytes=size("argument"),
        output_bytes=size("output"),
        alias_bytes=size("alias"),
        temp_bytes=size("temp"),
        flops=flops,
        reported_peak_bytes=None if peak is None else int(peak),
        warnings=work.warnings,
        tiled=re.search(r"\{[\d,]*:T\(", text) is not None,
    )


def collectives_in(text: str) -> tuple[CompiledCollective, ...]:
    """The collectives of an HLO text: loops multiplied out, of a conditional the dearest branch."""
    return _work(parse(text)).collectives


# Walking an executable


@dataclass(frozen=True)
class _Work:
    collectives: tuple[CompiledCollective, ...] = ()
    flops: float = 0.0
    flops_once: float = 0.0  # every loop body taken once, as XLA's own analysis does
    warnings: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()  # names for "the same collective again"; aligned, "" is unique

    @property
    def wire(self) -> float:
        return sum(c.wire_bytes * c.count for c in self.collectives)

    def __add__(self, other: _Work) -> _Work:
        fresh = [
            (c, r)
            for c, r in zip(other.collectives, other.repeats, strict=True)
            if not (r and r in self.repeats)
        ]
        return _Work(
            self.collectives + tuple(c for c, _ in fresh),
            self.flops + other.flops,
            self.flops_once + other.flops_once,
            self.warnings + tuple(w for w in other.warnings if w not in self.warnings),
            self.repeats + tuple(r for _, r in fresh),
        )

    def times(self, trips: int) -> _Work:
        return replace(
            self,
            collectives=tuple(replace(c, count=c.count * trips) for c in self.collectives),
            flops=self.flops * trips,
        )


def _work(module: Module) -> _Work:
    busy = _busy(module)
    return _walk(Scope(module, module.computations[module.entry]), busy)


def _busy(module: Module) -> frozenset[str]:
    """Computations that hold something to be counted, at any depth."""
    found: dict[str, bool] = {}

    def visit(name: str) -> bool:
        if name not in found:
            found[name] = False
            computation = module.computations.get(name)
            for i in computation.instructions if computation else ():
                called = i.called
                if i.opcode == "while":
                    called += tuple(i.attributes[k].lstrip("%") for k in ("body", "condition"))
                if _kind(i) or i.opcode in FLOPS or any([visit(c) for c in called]):
                    found[name] = True
        return found[name]

    visit(module.entry)
    return frozenset(name for name, counts in found.items() if counts)


def _walk(scope: Scope, busy: frozenset[str]) -> _Work:
    total = _Work()
    for i in scope.computation.instructions:
        if _kind(i):
            total += _collective(scope, i)
        elif i.opcode in FLOPS:
            flops = FLOPS[i.opcode](scope.computation, i)
            total += _Work(flops=flops, flops_once=flops)
        elif i.opcode == "while":
            body, condition = (i.attributes[k].lstrip("%") for k in ("body", "condition"))
            if body not in busy and condition not in busy:
                continue
            work, test = (
                _walk(scope.call(c, i.operands, loop=True), busy) for c in (body, condition)
            )
            times = trips(scope, i)
            if times is None:
                total += work.times(1) + test.times(1)
                why = "planned as one" if is_one_round(i) else "unknown"
                total += _Work(
                    warnings=(f"{i.name}: trips {why}, taken once ({_place(scope, i)})",)
                )
            else:
                total += work.times(times) + test.times(times + 1)
        elif i.opcode == "conditional":
            operands = i.operands[1:]
            branches = [
                _walk(scope.call(c, (o,)), busy)
                for c, o in zip(i.called, operands, strict=False)
                if c in busy
            ]
            if branches:
                total += max(branches, key=lambda w: (w.wire, w.flops))
        elif i.opcode not in ("async-update", "async-done"):
            for c in i.called:
                if c in busy:
                    work = _walk(scope.call(c, i.operands), busy)
                    if i.opcode == "fusion" and "all-reduce-scatter" in i.name + c:
                        work = _as_reduce_scatter(work)  # how TPU spells a reduce-scatter
                    total += work
    return total


def _place(scope: Scope, i: Instruction) -> str:
    return scope.module.source(i) or i.op_name or scope.computation.name


# Collectives


def _kind(i: Instruction) -> str | None:
    return KINDS.get(i.opcode.removesuffix("-start"))


def _collective(scope: Scope, i: Instruction) -> _Work:
    kind = _kind(i)
    assert kind is not None
    table = scope.computation.by_name
    entering = sum(table[o].nbytes for o in i.operands if o in table)
    group = _group(i, scope.module.devices)
    if kind == "permute" and "slice_sizes" in i.attributes:
        entering = table[i.operands[0]].nbytes  # the others are a buffer and offsets into both
    if kind == "send":
        payload, group = table[i.operands[0]].nbytes, 2
    else:
        payload = entering * group if kind == "all_gather" else entering
    channel = i.attributes.get("channel_id", "")
    # TPU repeats an asynchronous collective in the fusions that start, continue and finish it; a
    # loop that stands between is one that continues it. Chains are numbered through the module.
    chain = re.search(r'chain_id="?(\d+)', i.rest)
    found = CompiledCollective(
        kind=kind,
        group=group,
        payload_bytes=payload,
        wire_bytes=wire_bytes(kind, payload, group),
        count=1,
        name=i.name,
        op_name=i.op_name,
        source=scope.module.source(i),
        widened_bytes=int(payload * _share_widened(scope, i) / 2),
    )
    return _Work((found,), repeats=(f"{kind} {channel} {chain.group(1)}" if chain else "",))


# Where a compiler has no collective of bfloat16, it converts on its own account, before and after.

_SAME = ("copy", "bitcast", "get-tuple-element")
_MOVES = ("broadcast", "concatenate", "reshape", "slice", "transpose")
_NARROW = ("bf16", "f16")
_ADDS = {"reduce": 0, "scatter": -1}  # and which operand is added up


def _share_widened(scope: Scope, i: Instruction) -> float:
    """The share of a collective's payload that is of 16-bit values in 32 bits, as XLA says that it
    promoted it, or as these are converted by what no operation of the program stands for, before
    and after. It may be several in one, of which others are of 32 bits."""
    module, own = scope.module, scope.computation
    sizes = {k: own.by_name[o].nbytes for k, o in enumerate(i.operands) if o in own.by_name}
    promoted = i.attributes.get("to_apply", "").endswith("_promoted")
    several = len(i.arrays) == len(i.operands) > 1
    narrow = [
        k
        for k in sizes
        if _was_narrow(module, own, i.operands[k], anyone=promoted)
        or (several and _is_narrowed(module, own, i.name, k, anyone=False))
    ]
    if promoted:
        narrow = narrow or [*sizes]
    elif several:
        narrow = [k for k in narrow if _is_narrowed(module, own, i.name, k)]
    elif not _is_narrowed(module, own, i.name):
        narrow = []
    return sum(sizes[k] for k in narrow) / max(sum(sizes.values()), 1)


def _was_narrow(
    module: Module,
    computation: Computation,
    name: str,
    *,
    anyone: bool = False,
    calls: tuple[tuple[Computation, Instruction], ...] = (),
) -> bool:
    """Whether a value is converted from 16 bits, by what no operation of the program stands for or
    by `anyone`, and moved at most since then. `calls` are the fusions that it is looked for in."""
    i = computation.by_name[name]

    def before(operand: str) -> bool:
        return _was_narrow(module, computation, operand, anyone=anyone, calls=calls)

    if i.opcode == "convert":
        own = anyone or not i.op_name
        return own and computation.by_name[i.operands[0]].arrays[0].dtype in _NARROW
    if i.opcode == "select":  # what one device has, beside zeros elsewhere
        chosen = [o for o in i.operands[1:] if not _is_constant(computation, o)]
        return bool(chosen) and all([before(o) for o in chosen])
    if i.opcode in _ADDS:  # the compiler's own wider one, of what it converted
        return _was_narrow(module, computation, i.operands[_ADDS[i.opcode]], calls=calls)
    if i.opcode == "fusion":
        return _root_was_narrow(module, computation, i, -1, anyone, calls)
    if i.opcode == "parameter" and calls:
        outer, call = calls[-1]
        operand = call.operands[int(i.argument)]
        return _was_narrow(module, outer, operand, anyone=anyone, calls=calls[:-1])
    if i.opcode == "get-tuple-element":
        made, index = computation.by_name[i.operands[0]], int(i.attributes["index"])
        inside = made.opcode == "fusion"
        return inside and _root_was_narrow(module, computation, made, index, anyone, calls)
    return i.opcode in (*_SAME, *_MOVES) and all([before(o) for o in i.operands])


def _is_constant(computation: Computation, name: str) -> bool:
    """Whether a value is a constant, broadcast perhaps."""
    i = computation.by_name[name]
    i = computation.by_name[i.operands[0]] if i.opcode == "broadcast" else i
    return i.opcode == "constant"


def _root_was_narrow(
    module: Module,
    computation: Computation,
    fusion: Instruction,
    index: int,
    anyone: bool,
    calls: tuple[tuple[Computation, Instruction], ...],
) -> bool:
    """The same of what a fusion makes, of a tuple of that number."""
    inner = module.computations[fusion.called[0]]
    root = inner.root.name if index < 0 else inner.root.operands[index]
    return _was_narrow(module, inner, root, anyone=anyone, calls=(*calls, (computation, fusion)))


def _is_narrowed(
    module: Module, computation: Computation, name: str, index: int = -1, *, anyone: bool = True
) -> bool:
    """Whether a value, or that at an index of a tuple, is made 16 bits by all that read it, by
    `anyone` or by what no conversion of the program stands for."""
    readers = [i for i in computation.instructions if name in i.operands]
    if index >= 0:
        readers = [i for i in readers if int(i.attributes.get("index", index)) == index]
    for i in readers:
        if i.opcode == "fusion":
            inner = module.computations[i.called[0]]
            places = [p for p, o in enumerate(i.operands) if o == name]
            parameters = [
                x.name
                for x in inner.instructions
                if x.opcode == "parameter" and int(x.argument) in places
            ]
            if not all([_is_narrowed(module, inner, x, anyone=anyone) for x in parameters]):
                return False
        elif i.opcode in _SAME or i.opcode in ("slice", "transpose"):
            if not _is_narrowed(module, computation, i.name, anyone=anyone):
                return False
        elif i.opcode != "convert" or i.arrays[0].dtype not in _NARROW:
            return False
        elif not anyone and i.op_name.endswith("convert_element_type"):
            return False
    return bool(readers)


def _as_reduce_scatter(work: _Work) -> _Work:
    return replace(
        work,
        collectives=tuple(
            replace(
                c,
                kind="reduce_scatter",
                wire_bytes=wire_bytes("reduce_scatter", c.payload_bytes, c.group),
            )
            if c.kind == "all_reduce"
            else c
            for c in work.collectives
        ),
    )


def _group(i: Instruction, devices: int) -> int:
    """How many devices take part together in a collective."""
    if pairs := i.attributes.get("source_target_pairs"):
        return _largest_cycle(pairs)
    text = i.attributes.get("replica_groups", "")
    if iota := re.match(r"\[(\d+),(\d+)\]", text):  # [groups,size]<=[2,4]T(1,0)
        return int(iota.group(2))
    if "mesh[" in text:  # mesh['a'=2,'b'=4], device_ids=(...) {'a', 'b':(1)2}
        named = re.search(r"mesh\[([^\]]*)\]", text)
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named.group(1))) if named else {}
        inside = re.search(r"\{([^{}]*)\}\s*$", text)
        group = 1
        for axis in split(inside.group(1)) if inside else ():
            part = re.fullmatch(r"'([^']+)'(?::\(\d+\)(\d+))?", axis)
            if part:
                group *= int(part.group(2) or sizes[part.group(1)])
        return group
    groups = re.findall(r"\{([\d,\s]+)\}", text)
    return max((len(g.split(",")) for g in groups), default=devices)


def _largest_cycle(pairs: str) -> int:
    """Devices in the largest set that the pairs `{{0,1},{1,0}}` connect."""
    import networkx as nx

    sent = nx.Graph(re.findall(r"\{(\d+),(\d+)\}", pairs))
    return max(map(len, nx.connected_components(sent)), default=1)


# Flops of the products and convolutions in an HLO text.


def _dot_flops(computation: Computation, i: Instruction) -> float:
    left = computation.by_name[i.operands[0]].arrays[0].shape
    return 2.0 * i.arrays[0].size * prod(left[d] for d in _dims(i, "lhs_contracting_dims"))


def _convolution_flops(computation: Computation, i: Instruction) -> float:
    """2 × outputs × taps that hit the operand, not padding nor the holes of a dilation."""
    operand, kernel = (computation.by_name[o].arrays[0].shape for o in i.operands[:2])
    labels = re.match(r"(\w+)_(\w+)->(\w+)", i.attributes["dim_labels"])
    assert labels is not None
    lhs, rhs, out = labels.groups()
    taps = 1
    window = _window(i)
    spatial = [c for c in out if c.isdigit()]
    for c in spatial:
        w = int(c)
        taps *= _taps(
            operand[lhs.index(c)],
            i.arrays[0].shape[out.index(c)],
            {key: values[w] for key, values in window.items()},
        )
    outputs = prod(n for n, c in zip(i.arrays[0].shape, out, strict=True) if not c.isdigit())
    return 2.0 * outputs * taps * kernel[rhs.index("i")]


def _taps(n: int, outputs: int, window: dict[str, tuple[int, int]]) -> int:
    """Pairs (output position, window position) of one dim that read one of its n elements."""

    def at(key: str, default: int) -> int:
        return window.get(key, (default, default))[0]

    start = np.arange(outputs) * at("stride", 1) - at("pad", 0)
    reads = start[:, None] + np.arange(at("size", 1)) * at("rhs_dilate", 1)
    hole = at("lhs_dilate", 1)
    return int(((reads >= 0) & (reads <= (n - 1) * hole) & (reads % hole == 0)).sum())


def _window(i: Instruction) -> dict[str, list[tuple[int, int]]]:
    """`{size=3x3 pad=1_1x1_1}` as numbers per dim; everything but padding is given twice."""
    found: dict[str, list[tuple[int, int]]] = {}
    for key, text in re.findall(r"(\w+)=([\dx_\-]+)", i.attributes.get("window", "")):
        entries = [part.split("_") for part in text.split("x")]
        found[key] = [(int(e[0]), int(e[-1])) for e in entries]
    return found


def _custom_call_flops(computation: Computation, i: Instruction) -> float:
    """Matrix products and convolutions that were handed to a library."""
    target = i.attributes.get("custom_call_target", "").strip('"')
    shapes = [a.shape for o in i.operands for a in computation.by_name[o].arrays[:1]]
    if "gemm" in target or "matmul" in target:
        dims = re.search(r'"?lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)', i.rest)
        at = [int(d) for d in re.findall(r"\d+", dims.group(1))] if dims else [-1]
        return 2.0 * i.arrays[0].size * prod(shapes[0][d] for d in at)
    labels = re.match(r"(\w+)_(\w+)->(\w+)", i.attributes.get("dim_labels", ""))
    if "conv" in target.lower() and labels:
        # The activations on the output side, and the kernel, by what the call computes.
        result = i.arrays[0].shape
        outputs, kernel = result, shapes[1]
        if "BackwardInput" in target:
            outputs = shapes[0]
        elif "BackwardFilter" in target:
            outputs, kernel = shapes[1], result
        return 2.0 * prod(outputs) * prod(kernel) / kernel[labels.group(2).index("o")]
    return 0.0


def _dims(i: Instruction, key: str) -> Iterator[int]:
    return (int(d) for d in re.findall(r"\d+", i.attributes.get(key, "")))


#: Opcode -> the flops of one such instruction.
FLOPS: dict[str, Callable[[Computation, Instruction], float]] = {
    "dot": _dot_flops,
    "convolution": _convolution_flops,
    "custom-call": _custom_call_flops,
}
