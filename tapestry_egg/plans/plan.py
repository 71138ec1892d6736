"""The plan: one complete, executable way to run a block graph on a mesh."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, TIME

if TYPE_CHECKING:
    from tapestry_egg.extract.pins.pins import Pins
    from tapestry_egg.machine.target import Target
    from tapestry_egg.pipeline.settings import Settings
    from tapestry_egg.tracing.trace import Program
    from tapestry_egg.why.collective import CollectiveReason
    from tapestry_egg.why.difference import Difference
    from tapestry_egg.why.line import LineCosts
    from tapestry_egg.why.tensor import TensorWay
    from tapestry_egg.why.why_not import WhyNot

    from .cost_table import CostTable
    from .peak import Peak
    from .utilization import Utilization


#: Rules of this name and a number split a program's batch over time, in so many micro-batches.
MICRO_BATCHES = "micro-batches-"


def parts_of_batch(rule: str) -> int | None:
    """How many micro-batches a rule of that name makes; None if it is another rule."""
    number = rule.removeprefix(MICRO_BATCHES)
    return int(number) if rule.startswith(MICRO_BATCHES) and number.isdecimal() else None


#: Rules of this name and a number pad dims so that so many devices can share them.
EVEN_PARTS = "even-parts-"
#: Rules of this name and a number give shifts as many rows as so many devices can share.
SHIFTS = "shifts-"
#: Rules of this name and a number look up single rows of what so many devices can share.
ROWS = "rows-"


def devices_of(rule: str, kind: str) -> int | None:
    """The number of devices for which a rule of a kind, as `EVEN_PARTS` is one, changes a program;
    None if it is another rule."""
    number = rule.removeprefix(kind)
    return int(number) if rule.startswith(kind) and number.isdecimal() else None


def is_split(rule: str) -> bool:
    """Whether a rule splits the batch over time, or makes dims such that devices can share them."""
    return devices_of(rule, EVEN_PARTS) is not None or parts_of_batch(rule) is not None


def gap_text(gap: float, proven: bool) -> str:
    """A gap as tables have it: `2.34%`, `~2.34%` if it is not proven, `-` without bound."""
    return f"{'' if proven else '~'}{gap:.2%}" if math.isfinite(gap) else "-"


@dataclass(frozen=True, slots=True)
class Change:
    """One elementary change of layout over one or more mesh axes.

    kind            meaning for the tensor's local block
    `all_gather`    dim `dim` loses its minor-most cut `axes`
    `all_reduce`    partial over `axes` becomes replicated
    `reduce_scatter` partial over `axes` becomes a minor-most cut of `dim`
    `all_to_all`    minor-most cut `axes` moves from `dim` to minor-most of `to_dim`
    `slice`         replicated over `axes` becomes a minor-most cut of `dim` (no communication); if
                    several dims are cut, they are cut by `dims` afterwards
    `to_partial`    replicated over `axes` becomes partial: the value on shard 0, the monoid's zero
                    elsewhere (no communication)
    `permute`       blocks of the same size are cut by `dims` afterwards: the device at place j
                    along `axes` sends its block to the one at place j along
                    `permuted_to(axes, dims)`. With `pieces`, `dim` is cut into so many times fewer
                    blocks and `to_dim` into as many more, by a permute for each piece of a block
    """

    kind: str
    axes: tuple[int, ...]
    dim: int | None = None
    to_dim: int | None = None
    monoid: str | None = None
    dims: tuple[tuple[int, ...], ...] | None = None
    pieces: int | None = None


#: What a change of each kind says besides its axes.
CHANGE_FIELDS: Mapping[str, tuple[frozenset[str], ...]] = {
    "all_gather": (frozenset({"dim"}),),
    "all_reduce": (frozenset({"monoid"}),),
    "reduce_scatter": (frozenset({"dim", "monoid"}),),
    "all_to_all": (frozenset({"dim", "to_dim"}),),
    "slice": (frozenset({"dim"}), frozenset({"dims"})),
    "to_partial": (frozenset({"monoid"}),),
    "permute": (frozenset({"dims"}), frozenset({"dims", "dim", "to_dim", "pieces"})),
}


#: Copies of several values that one collective makes: each value's number, the layout made, and the
#: how manieth copy of the value to it this is in the body, from 0 on.
Merged = tuple[tuple[int, Layout, int], ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy that is made once, at the first reader, and serves readers up to operation `until`."""

    layout: Layout
    until: int  # operation index in the same body


@dataclass(frozen=True)
class Strategy:
    """How one operation runs: which mesh axes cut which index dim, and the layouts that follow.

    `cuts[d]` lists the mesh axes over index dim d, major to minor. `needs[p]` is the layout in
    which operand p is read, `gives[q]` the layout in which output q is produced. A region operation
    has one `BodyPlan` per nested graph instead of cuts.
    """

    cuts: tuple[tuple[int, ...], ...]
    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    bodies: tuple[BodyPlan, ...] = ()


@dataclass(frozen=True)
class BodyPlan:
    """Layouts and strategies of one graph (the program, or the body of a region).

    `inputs[i]` and `constants[v]` are the layouts in which values enter, `outputs[j]` those in
    which they leave; `strategies[k]` belongs to `graph.operations[k]`. A reader that needs a value
    in another layout than the produced one takes it from `kept[value]` when that has the layout
    and the reader is not after `until`, otherwise it makes a copy of its own. `copies` says, for
    every (value type, source layout, target layout) that occurs, by which changes a copy is made.
    `groups[k]` numbers the unit that `operations[k]` runs in, -1 for none: operations of one
    unit share the copies that the first of them makes. Without `groups` each is on its own.
    `merged` lists copies (value, layout, the how manieth of these: from 0 on) that are made by one
    collective, when the values of all of them are there and before any is read; only the program's
    own body has some.
    """

    graph: BlockGraph
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    strategies: tuple[Strategy, ...]
    kept: Mapping[int, Kept] = field(default_factory=dict)
    copies: Mapping[tuple[int, Layout, Layout], tuple[Change, ...]] = field(default_factory=dict)
    groups: tuple[int, ...] = ()
    merged: tuple[Merged, ...] = ()


@dataclass(frozen=True)
class PlannedCollective:
    """One line of `plan.collectives`: what moves, over which axes, how often. Lines of one number
    `merged` (from 1 on; 0 is none) are one collective of all their bytes."""

    kind: str
    axes: tuple[str, ...]
    group: int  # devices that take part together
    payload_bytes: int  # per device: bytes entering the collective (all-gather: bytes leaving it)
    wire_bytes: float  # per device, bandwidth-optimal algorithm
    count: int  # loops multiplied out
    value: str = ""
    reader: str = ""
    source: str = ""  # file:line of the user's program
    merged: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """When a device does something in one step: a bar of a picture of the plan.

    `stream` is `compute` or `links`; times are in seconds from the step's begin. What a loop's body
    does `count` times is one bar as long as all of them together. `hidden` seconds of a collective
    run beside kernels. `body` numbers the graph of the nest, 0 the program.
    """

    stream: str
    name: str
    start: float
    end: float
    hidden: float = 0.0
    body: int = 0
    count: float = 1.0
    source: str = ""  # file:line of the user's program


@dataclass(frozen=True)
class Costs:
    """Predicted costs of one step: of one device of the mesh, but joules and dollars of all.

    `serial_seconds` are the sum of all kernels and collectives, what a step would take if nothing
    ran beside anything. `dollars` is 0 where the target has no price.
    """

    seconds: float
    peak_bytes: int
    joules: float
    wire_bytes: float = 0.0
    flops: float = 0.0
    dollars: float = 0.0
    serial_seconds: float = 0.0


_COSTS = frozenset(f.name for f in fields(Costs))


@dataclass(frozen=True)
class RuleStep:
    """One step: the rules that it takes (one, as a rule), what is computed another way and how, and
    a digest of the program afterwards. `region` leads to the loop or branch where it is taken:
    (operation, region) pairs. `values` are all values of the program as given that the step
    computes another way; `numbers` say what a recomputation computes twice
    (`second_instances.Recomputation`)."""

    rules: tuple[str, ...]
    value: str
    made: str
    digest: str
    source: str = ""
    region: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    numbers: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        at = f"  # {self.source}" if self.source else ""
        return f"{' + '.join(self.rules)}: {self.value} by {self.made}{at}"


@dataclass(frozen=True)
class Origin:
    """What a plan was made for, so that it can be certified again: the machine, the outputs that
    feed back as (output, input), and rule books of the user's own, by path."""

    machine: Target
    feedback: tuple[tuple[int, int], ...] = ()
    books: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Plan:
    """One point of the front. `body` says how; `costs` what it is predicted to cost; `bound` the
    least `seconds` that any plan of what was searched can have within this plan's other costs; with
    `merged_too`, however collectives of it are merged."""

    name: str
    mesh: MeshShape
    target: str
    body: BodyPlan
    costs: Costs
    bound: float = 0.0
    collectives: tuple[PlannedCollective, ...] = ()
    rules: tuple[str, ...] = ()
    steps: tuple[RuleStep, ...] = ()  # from the program as given to `graph`
    # What the plan's function takes and returns in the user's pytrees, where it was traced.
    program: Program | None = field(default=None, compare=False, repr=False)
    origin: Origin | None = field(default=None, compare=False, repr=False)
    merged_too: bool = False

    def __hash__(self) -> int:
        return hash((self.name, self.mesh, self.costs))

    @property
    def micro_batches(self) -> int:
        """In how many parts, one after another, the plan runs the batch; 1 where it runs whole."""
        return max([1, *(n for n in map(parts_of_batch, self.rules) if n is not None)])

    def lanes(self) -> tuple[Lane, ...]:
        """What every device does when in one step: kernels, and collectives beside them.

        Raises ExtractError for a plan of which it is not told what machine it was made for.
        """
        from tapestry_egg.extract.certify.certificate import lanes

        return lanes(self)

    def __repr__(self) -> str:
        """One line: whose plan, and what it costs. `explain` tells the rest."""
        costs = self.costs
        return printable(
            f"Plan({self.name} of {self.graph.name} on {self.target}, mesh {self.mesh}: "
            f"{TIME.format(costs.seconds)}, {BYTES.format(costs.peak_bytes)})"
        )

    def memory_curve(self) -> tuple[tuple[float, int], ...]:
        """The bytes alive on a device, from each of so many seconds of a step on.

        Raises ExtractError for a plan of which it is not told what machine it was made for.
        """
        from tapestry_egg.extract.certify.certificate import memory_curve

        return memory_curve(self)

    def costs_by(self, key: str = "kernel") -> CostTable:
        """Where a step's costs come from: a table by `kernel`, `collective`, `layer` or `line`.

        Print it, iterate over its rows, or take `data()` as JSON. A layer is the entry of the
        arguments whose weights were read last. Raises ExtractError for another key, and for a plan
        of which it is not told what machine it was made for.
        """
        from tapestry_egg.extract.certify.cost_parts import cost_parts

        from .cost_table import cost_table

        return cost_table(cost_parts(self), key, f"plan {self.name}")

    def peak(self) -> Peak:
        """What is in memory when most is: the arrays of one device, by falling bytes.

        Raises ExtractError for a plan of which it is not told what machine it was made for.
        """
        from tapestry_egg.extract.certify.cost_parts import peak

        return peak(self)

    def utilization(self) -> Utilization:
        """How well the plan uses its machine: the share of the peak flops, memory against what is
        usable, and bytes sent by level of the network.

        Raises ExtractError for a plan of which it is not told what machine it was made for.
        """
        from tapestry_egg.extract.certify.cost_parts import utilization

        return utilization(self)

    def tensor(self, name: str) -> TensorWay:
        """The way of one tensor: where it is made, how it lies, its copies, who reads it where, and
        the bytes that hold it from when to when.

        `name` is a path of the arguments (`[0]['w']`; with `*` many that are told as one), or a
        number as plans print it: `%12`, `40/%12` in a loop. Raises PlanError for another name, and
        ExtractError for a plan of which it is not told what machine it was made for.
        """
        from tapestry_egg.why.tensor import tensor_way

        return tensor_way(self, name)

    def collective(self, number: int) -> CollectiveReason:
        """Why `collectives[number]` is there: of which value, from which layout to which, who wants
        it, what it takes, and beside which kernels it runs.

        Raises PlanError for a number that is none, and ExtractError for a plan of which it is not
        told what machine it was made for.
        """
        from tapestry_egg.why.collective import collective_reason

        return collective_reason(self, number)

    def line(self, place: str | int) -> LineCosts:
        """All that one line of the program costs: `plan.line("model.py:12")`, or `plan.line(12)`
        where no other file has operations in a line of that number.

        Raises PlanError where no operation comes from there, and ExtractError for a plan of which
        it is not told what machine it was made for.
        """
        from tapestry_egg.why.line import line_costs

        return line_costs(self, place)

    def difference(self, other: Plan) -> Difference:
        """From this plan to another of the same program: tensors that lie otherwise, collectives
        that come and go, seconds, bytes and joules part by part.

        Raises ExtractError for plans of which it is not told what machine they were made for.
        """
        from tapestry_egg.why.difference import difference

        return difference(self, other)

    def why_not(self, pins: Pins, *, settings: Settings | None = None) -> WhyNot:
        """Why tensors do not lie so: the plan with these `pins` (as of `optimize`: arguments by
        path, others as `%12`, `FILE:LINE` or `result[0]`), searched for on the same mesh in the
        same form of the program, and what makes it dearer; or why there is none.

        `settings` say how hard to search (default: ten units of work). Raises ExtractError for a
        name that no tensor has, and for a plan of which it is not told what machine it was made
        for.
        """
        from tapestry_egg.why.why_not import why_not

        return why_not(self, pins, settings=settings)

    @classmethod
    def with_late_body(cls, read: Callable[[], BodyPlan], **others: Any) -> Plan:
        """A plan with these other fields, whose body is read when it is first asked for."""
        plan = cls(body=None, **others)  # type: ignore[arg-type]
        del plan.__dict__["body"]
        plan.__dict__["_read_body"] = read
        return plan

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "body" and "_read_body" in self.__dict__:
                body = self.__dict__.pop("_read_body")()
                self.__dict__["body"] = body
                return body
            costs = f"; its costs have: plan.costs.{name}" if name in _COSTS else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{costs}",
                name=name,
                obj=self,
            )

    def __getstate__(self) -> dict[str, Any]:
        assert self.body, "read by now"
        return dict(self.__dict__)

    def explain(self, everything: bool = False) -> str:
        """The plan in words: what each mesh axis does, the layouts of tensors, and every collective
        with its reason. Equal layers are told once, but for `everything`."""
        from tapestry_egg.show.text import plan_text

        return plan_text(self, everything)

    @property
    def graph(self) -> BlockGraph:
        return self.body.graph

    @property
    def in_shardings(self) -> tuple[Layout, ...]:
        return self.body.inputs

    @property
    def out_shardings(self) -> tuple[Layout, ...]:
        return self.body.outputs

    @property
    def input_specs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`PartitionSpec`s of the arguments over the axes of `mesh`, in the user's pytrees without
        static arguments: (positional, by keyword)."""
        from tapestry_egg.tracing.trace import Program

        from .specs import partition_spec

        specs = [partition_spec(layout, self.mesh) for layout in self.in_shardings]
        found: tuple[tuple[Any, ...], dict[str, Any]]
        found = (self.program or Program.of(self.graph)).arguments(specs)
        return found

    @property
    def output_specs(self) -> Any:
        """`PartitionSpec`s of the result, in its pytree."""
        from tapestry_egg.tracing.trace import Program

        from .specs import partition_spec

        specs = [partition_spec(layout, self.mesh) for layout in self.out_shardings]
        return (self.program or Program.of(self.graph)).results(specs)

    def specs(self) -> dict[str, Any]:
        """The layouts of arguments and results as plain data: the `mesh` with its axes, and below
        `inputs` and `outputs`, by path, what the entries of a `PartitionSpec` are."""
        from .specs import plain_spec

        graph = self.graph
        sides = {
            "inputs": (graph.inputs, graph.input_names, self.in_shardings),
            "outputs": (graph.outputs, graph.output_names, self.out_shardings),
        }
        found: dict[str, Any] = {"mesh": dict(zip(self.mesh.names, self.mesh.sizes, strict=True))}
        for side, (values, names, layouts) in sides.items():
            called = names or [f"%{v}" for v in values]
            specs = (plain_spec(layout, self.mesh) for layout in layouts)
            found[side] = dict(zip(called, specs, strict=True))
        return found

    @property
    def compiler_options(self) -> dict[str, int | bool]:
        """The options that XLA compiles the plan with on its target (`te.compile` passes them):
        what it merges, and whether it hides collectives behind kernels."""
        from .compiler_options import compiler_options

        return compiler_options(self)

    @property
    def gap(self) -> float:
        """How far `seconds` may be above the best possible: seconds / bound - 1."""
        return self.costs.seconds / self.bound - 1.0 if self.bound > 0 else float("inf")

    @property
    def is_proven(self) -> bool:
        """Whether `bound` is proven.

        Where collectives are merged, which is done after the search, it is if it holds however
        that is done: but not where collectives run beside kernels.
        """
        return self.bound > 0 and (self.merged_too or not self.body.merged)

    @property
    def gap_shown(self) -> str:
        """The gap as tables have it: `2.34%`, `~2.34%` if it is not proven, `-` without bound."""
        return gap_text(self.gap, self.is_proven)


# Plans that have passed a check in this process, so that none is checked twice.


class Passed:
    """A set of plans as objects: a plan is frozen, and one that is changed is another object."""

    def __init__(self) -> None:
        self._plans: dict[int, weakref.ref[Plan]] = {}

    def add(self, plan: Plan) -> None:
        # Those that are gone are dropped here: what a weak reference calls would swallow Ctrl-C.
        for gone in [k for k, known in [*self._plans.items()] if known() is None]:
            self._plans.pop(gone, None)
        self._plans[id(plan)] = weakref.ref(plan)

    def __contains__(self, plan: Plan) -> bool:
        known = self._plans.get(id(plan))
        return known is not None and known() is plan


#: By the certificate, by the ledger.
CERTIFIED, AUDITED = Passed(), Passed()
