"""The kinds of parallelism that a plan is made of, in the words of the field, told from layouts.

Every mesh axis is judged by the products with weights: those of whose two operands one comes from
the state alone (weights) and the other from data. What such a product's cut dims belong to says
what the axis does: to the data only, *data* parallel (*sequence* parallel where the inputs are cut
along another dim than their first); to the weights, *tensor* parallel; to both and the output,
*expert* parallel. Names in the program play no part.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from tapestry_egg.columns import starred
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.groups import layers
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout
from tapestry_egg.plans.plan import BodyPlan, Plan, parts_of_batch
from tapestry_egg.rewrite.recomputation.second_places import count_twice
from tapestry_egg.schedule.flatten import FlatProgram, Instance, flatten

from .account import inputs_of

#: Shares below this are not worth a word, and above its complement all there is.
_FEW = 0.1
# An argument and the path to one of its leaves.
_ARGUMENT = re.compile(r"^(\[\d+\]|\w+).*$")


@dataclass(frozen=True)
class AxisUse:
    """What one mesh axis does, in shares of the flops of products with weights, or of bytes."""

    name: str
    size: int
    levels: tuple[str, ...]  # of the machine's network, innermost first
    data: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    inputs_first: float = 0.0  # share of the data's bytes that is cut along its first dim
    inputs_other: float = 0.0  # and along another
    weights_cut: float = 0.0  # share of the weights' bytes
    others_cut: float | None = None  # of what else is state; None where there is none
    gathered: float = 0.0  # share of tensor parallel products whose data is gathered for them
    early: float = 0.0  # share of data parallel ones whose weights are gathered before their loop
    stacks: float = 0.0  # and of those that read one slice of a stack that is gathered whole

    def __str__(self) -> str:
        where = " and ".join(self.levels)
        over = f"over {self.name} ({self.size}{f' on {where}' if where else ''})"
        kinds = [
            (self.data, self._of_data()),
            (self.tensor, self._of_tensors()),
            (self.expert, "expert parallel"),
        ]
        found = sorted((k for k in kinds if k[0] >= _FEW), reverse=True)
        whole = 1.0 - self.data - self.tensor - self.expert
        if not found:
            words = "products not sharded"
        elif len(found) == 1 and whole < _FEW:
            words = found[0][1]
        else:
            words = ", ".join(f"{word} for {share:.0%}" for share, word in found)
            words += f", {whole:.0%} of the products not sharded" if whole >= _FEW else ""
        zero = f", {self._of_state()}" if self.data >= _FEW else ""
        return f"{words} {over}{zero}"

    def _of_data(self) -> str:
        return "sequence parallel" if self.inputs_other > self.inputs_first else "data parallel"

    def _of_tensors(self) -> str:
        return "tensor + sequence parallel" if self.gathered > 1 - _FEW else "tensor parallel"

    def _of_state(self) -> str:
        """How much of the state is cut besides, in the words of ZeRO (Rajbhandari et al., 2020)."""
        w, o = self.weights_cut, self.others_cut
        if w < _FEW and (o is None or o < _FEW):
            return "state on every device"
        if w > 1 - _FEW and (o is None or o > 1 - _FEW):
            every = (
                (self.early, ", weights gathered before their loop"),
                (self.stacks, ", stacks of weights gathered whole"),
            )
            return "ZeRO-3" + "".join(words for share, words in every if share >= _FEW)
        if w < _FEW and o is not None and o > 1 - _FEW:
            return "ZeRO-1"
        rest = "" if o is None else f" and {o:.0%} of the other state"
        return f"{w:.0%} of the weights{rest} cut"


def axis_uses(plan: Plan) -> tuple[AxisUse, ...]:
    """What every mesh axis of more than one device does, major to minor."""
    pairs = plan.origin.feedback if plan.origin else ()
    program = flatten(plan.graph, dict(pairs))
    sources, nest = _Sources(program, {i for _, i in pairs}), _nest(program, plan.body)
    given = _given(program, nest)
    tallies = {a: _Tally() for a, n in enumerate(plan.mesh.sizes) if n > 1}
    for instance in program.instances:
        product = sources.product(instance)
        if product is not None:
            cuts = nest[instance.body].strategies[instance.operation].cuts
            reached = [given[v] for v in sources.seen_through(instance.inputs[product])]
            kept, brought = sources.weights_of(instance, product)
            for a, tally in tallies.items():
                tally.count(instance, cuts, product, a, any(a in x.axes for x in reached))
                if brought is not None and a in given[kept].axes and a not in given[brought].axes:
                    tally.early(instance, cuts, product, a)
    return tuple(_use(plan, a, tally, sources) for a, tally in tallies.items())


def summary(plan: Plan) -> str:
    """The plan in one sentence, as an expert would say it: axes, what is computed twice, rules.

    `data parallel over x (16 on network), ZeRO-1; tensor + sequence parallel over y (4 on nvlink)`
    """
    parts = [str(use) for use in axis_uses(plan)] or ["one device"]
    values = sum(count_twice(s.numbers) for s in plan.steps if s.numbers)
    if values:
        where = layers_again(plan.graph)
        parts.append(f"{values} value{'' if values == 1 else 's'} computed twice{where}")
    every = [rule for s in plan.steps if not s.numbers for rule in s.rules]
    if plan.micro_batches > 1:
        parts.append(f"micro-batches: {plan.micro_batches}")
    rules = Counter(rule for rule in every if parts_of_batch(rule) is None)
    if rules:
        parts.append(
            "by " + ", ".join(f"{r} ({n} times)" if n > 1 else r for r, n in rules.items())
        )
    return "; ".join(parts)


def layers_again(graph: BlockGraph) -> str:
    """`, in 2 of 32 layers`, of the layers whose values are computed a second time; empty where the
    arguments tell of no equal ones."""
    every = layers(graph)
    again = [x for x, op in zip(every, graph.operations, strict=True) if x and op.remat is not None]
    kinds = Counter(map(starred, again)).most_common(1)
    alike = {x for x in every if kinds and starred(x) == kinds[0][0]}
    return f", in {len(alike & {*again})} of {len(alike)} layers" if len(alike) > 1 else ""


class _Tally:
    """Flops of products with weights, by what a mesh axis cuts of them."""

    def __init__(self) -> None:
        self.flops: defaultdict[str, float] = defaultdict(float)

    def count(
        self,
        instance: Instance,
        cuts: Sequence[Sequence[int]],
        data: int,
        axis: int,
        lay_cut: bool,
    ) -> None:
        """Count a product of weights with operand `data`; made in parts before, if it `lay_cut`."""
        flops = instance.weight * instance.signature.whole_flops
        kind = self._kind(instance, cuts, data, axis)
        if kind == "columns":  # these read all of the data
            self.flops["gathered"] += flops if lay_cut else 0.0
            self.flops["columns"] += flops
            kind = "tensor"
        self.flops[kind] += flops

    def early(
        self, instance: Instance, cuts: Sequence[Sequence[int]], data: int, axis: int
    ) -> None:
        """Count a product whose weights were gathered over the axis before its loop, or with the
        whole stack."""
        if self._kind(instance, cuts, data, axis) == "data":
            self.flops["early" if instance.body else "stacks"] += (
                instance.weight * instance.signature.whole_flops
            )

    @staticmethod
    def _kind(instance: Instance, cuts: Sequence[Sequence[int]], data: int, axis: int) -> str:
        """What a product is cut along by an axis: of the data, of the weights, of both."""
        dims = instance.signature.gemm
        assert dims is not None
        cut = {d for d, axes in enumerate(cuts) if axis in axes}
        mine, theirs = (dims.m, dims.n) if data == dims.lhs else (dims.n, dims.m)
        of = (("data", mine), ("expert", dims.batch), ("columns", theirs), ("tensor", dims.k))
        return next((kind for kind, own in of if cut & set(own)), "whole")

    def share(self, kind: str) -> float:
        """The share of the flops that is of one kind."""
        total = sum(self.flops[k] for k in ("data", "expert", "tensor", "whole"))
        return self.flops[kind] / total if total else 0.0

    @property
    def gathered(self) -> float:
        columns = self.flops["columns"]
        return self.flops["gathered"] / columns if columns else 0.0


class _Sources:
    """Which values come from the state alone, and from which inputs; which from data.

    State is what feeds back. Where nothing does, it is those inputs that a product reads with
    nothing else mixed in, beside an operand of other inputs; of two such, the one whose argument
    has more leaves, as parameters mostly are a tree, else the second operand, as in x·w. The other
    of two is data, also where a gradient multiplies it with something mixed.
    """

    def __init__(self, program: FlatProgram, state: set[int]) -> None:
        self.program = program
        self.inputs = program.bodies[0].graph.inputs
        self.maker = {v: instance for instance in program.instances for v in instance.outputs}
        made_of = inputs_of(program)
        self.of = [_numbers(made_of.get(FlatId(v), 0)) for v in range(len(program.types))]
        self.state = frozenset(state) or frozenset(self._guessed())
        self.data = [bool(of - self.state) for of in self.of]
        read = [self.product(instance) for instance in program.instances]
        self.weights = frozenset(
            i
            for instance, p in zip(program.instances, read, strict=True)
            if p is not None
            for i in self._other(instance, p)
        )

    def product(self, instance: Instance) -> int | None:
        """The operand of a product with weights that is not the weights; None for all else."""
        dims = instance.signature.gemm
        if instance.port or dims is None:
            return None
        data = [self.data[instance.inputs[p]] for p in (dims.lhs, dims.rhs)]
        state = [bool(self.of[instance.inputs[p]]) for p in (dims.lhs, dims.rhs)]
        if data[0] == data[1] or not all(state):
            return None
        return dims.lhs if data[0] else dims.rhs

    def seen_through(self, v: FlatId) -> Iterator[FlatId]:
        """A value and those that it is a view of."""
        yield v
        while (maker := self.maker.get(v)) is not None and maker.signature.fusion == "view":
            if not maker.inputs or maker.port in ("carry", "state"):
                return
            v = maker.inputs[0]
            yield v

    def weights_of(self, instance: Instance, p: int) -> tuple[FlatId, FlatId | None]:
        """The input of the program that the weights of a product are computed from, by elements
        and views alone, and what of it the outermost loop around the product is given, or is one
        slice of a stack, if any."""
        dims = instance.signature.gemm
        assert dims is not None
        v, brought = instance.inputs[dims.rhs if p == dims.lhs else dims.lhs], None
        while (maker := self.maker.get(v)) is not None and maker.port not in ("carry", "state"):
            if maker.signature.fusion not in ("view", "loop"):
                break
            inner = [w for w in maker.inputs if self.of[w]]
            if len(inner) != 1:
                break
            taken, rows = self.program.types[v].size, self.program.types[inner[0]].shape[:1]
            one_of_stack = rows > (1,) and taken * rows[0] == self.program.types[inner[0]].size
            if maker.port in ("stream", "invariant") or one_of_stack:
                brought = v
            v = inner[0]
        return v, brought

    def _other(self, instance: Instance, p: int) -> frozenset[int]:
        dims = instance.signature.gemm
        assert dims is not None
        return self.of[instance.inputs[dims.rhs if p == dims.lhs else dims.lhs]]

    def _guessed(self) -> set[int]:
        names = self.program.bodies[0].graph.input_names or ("",) * len(self.inputs)
        heads = [_ARGUMENT.sub(r"\1", name) or str(i) for i, name in enumerate(names)]
        leaves = Counter(heads)
        chosen: set[int] = set()
        others: set[int] = set()  # what was multiplied with what was chosen of two
        for instance in self.program.instances:
            dims = instance.signature.gemm
            if instance.port or dims is None:
                continue
            one, two = (self.of[instance.inputs[p]] for p in (dims.lhs, dims.rhs))
            alone = [next(iter(of)) for of in (one, two) if len(of) == 1]
            if one != two and alone:
                best = max(reversed(alone), key=lambda i: leaves[heads[i]])
                chosen.add(best)
                others.update(i for i in alone if i != best)
        return chosen - others or chosen


@cache
def _numbers(bits: int) -> frozenset[int]:
    """The places of the bits that are set."""
    return frozenset(i for i in range(bits.bit_length()) if bits >> i & 1)


def _use(plan: Plan, a: int, tally: _Tally, sources: _Sources) -> AxisUse:
    graph = plan.graph
    sizes = [graph.values[v].nbytes for v in graph.inputs]

    def cut(among: Sequence[int], first: bool | None = None) -> float:
        total = sum(sizes[i] for i in among)
        some = sum(sizes[i] for i in among if _cuts(plan.body.inputs[i], a, first))
        return some / total if total else 0.0

    data = [i for i in range(len(sizes)) if i not in sources.state]
    others = sorted(sources.state - sources.weights)
    spans = plan.origin.machine.spans(plan.mesh, (a,)) if plan.origin else ()
    return AxisUse(
        plan.mesh.names[a],
        plan.mesh.sizes[a],
        tuple(span.level for span in spans),
        tally.share("data"),
        tally.share("tensor"),
        tally.share("expert"),
        cut(data, True),
        cut(data, False),
        cut(sorted(sources.weights)),
        cut(others) if others else None,
        tally.gathered,
        tally.share("early") / tally.share("data") if tally.share("data") else 0.0,
        tally.share("stacks") / tally.share("data") if tally.share("data") else 0.0,
    )


def _cuts(layout: Layout, axis: int, first: bool | None) -> bool:
    """Whether an axis cuts the first dim, another one, or (None) any."""
    if first is None:
        return any(axis in axes for axes in layout.dims)
    dims = layout.dims[:1] if first else layout.dims[1:]
    return any(axis in axes for axes in dims)


def _nest(program: FlatProgram, body: BodyPlan) -> list[BodyPlan]:
    """The plan of every body of the program."""
    nest: list[BodyPlan] = []
    for one in program.bodies:
        outer = nest[one.parent].strategies[one.operation].bodies if one.parent >= 0 else (body,)
        nest.append(outer[one.region if one.parent >= 0 else 0])
    return nest


def _given(program: FlatProgram, nest: Sequence[BodyPlan]) -> dict[FlatId, Layout]:
    """The layout in which every value is produced, or enters its body."""
    given: dict[FlatId, Layout] = {}
    for one, plan in zip(program.bodies, nest, strict=True):
        graph, values = one.graph, one.values
        given |= {values[v]: x for v, x in zip(graph.inputs, plan.inputs, strict=True)}
        given |= {values[v]: Layout.replicated(graph.values[v].rank) for v in graph.constants}
        for operation, strategy in zip(graph.operations, plan.strategies, strict=True):
            made = zip(operation.outputs, strategy.gives, strict=True)
            given |= {values[v]: x for v, x in made}
    return given
