"""The account of a plan: one walk through it, what that counted, and the names of what is in it.

`explain`, the questions of `why`, the report and the lanes are all read from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from tapestry_egg.columns import short_paths
from tapestry_egg.extract.certify.certificate import walked
from tapestry_egg.extract.certify.cost_parts import parts_of, peak_of
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Move, Walk
from tapestry_egg.graph.blockgraph import Operation
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.plans.peak import Peak
from tapestry_egg.plans.plan import Change, Plan
from tapestry_egg.plans.planned import Moved, moved_by
from tapestry_egg.schedule.flatten import FlatProgram

#: How layouts are written, below every answer that has some.
LEGEND = (
    "layouts: per dim the mesh axes that shard it, major to minor; . not sharded; +sum(x): partial "
    "sums over x, not added up yet"
)


class Account:
    """The account of a plan that knows its machine; `ground` is what plans of one schedule share.

    Raises ExtractError for a plan that does not.
    """

    def __init__(self, plan: Plan, what: str = "why", ground: Ground | None = None) -> None:
        self.plan, self.mesh = plan, plan.mesh
        if ground is None:
            self.walk, self.found = walked(plan, what)
        else:
            self.walk = Walk(plan, ground)
            self.found = self.walk.certificate()
        self.schedule, self.program = self.walk.schedule, self.walk.program
        self.kernels, self.copies = parts_of(self.walk, self.found)
        bodies = self.program.bodies
        self._inner = {(int(b.parent), b.operation, b.region): k for k, b in enumerate(bodies)}
        self.unit_of = {
            (int(self.program.instances[i].body), self.program.instances[i].operation): u
            for u, unit in enumerate(self.schedule.units)
            for i in unit.members
            if self.program.instances[i].operation >= 0
        }
        self._instance = {
            (int(x.body), x.operation): i
            for i, x in enumerate(self.program.instances)
            if x.operation >= 0 and not x.port
        }

    @cached_property
    def moved(self) -> tuple[Moved, ...]:
        """The plan's collectives in their order, each with where it is."""
        return moved_by(self.plan)

    @cached_property
    def peak(self) -> Peak:
        """What is in memory when most is."""
        return peak_of(self.walk, self.found)

    @cached_property
    def updates(self) -> Mapping[FlatId, int]:
        """Value -> the argument whose next value it is on the way to, where it is one."""
        return updates(self.program)

    @cached_property
    def paths(self) -> Mapping[str, str]:
        """Files of the program by what they are called here."""
        every = {o.source.file for b in self.program.bodies for o in b.graph.operations}
        return short_paths(every)

    # Names

    def body_at(self, path: Sequence[tuple[int, int]]) -> int:
        """The number of the graph that (operation, region) pairs lead to."""
        body = 0
        for operation, region in path:
            body = self._inner[body, operation, region]
        return body

    def inside(self, body: int) -> str:
        """What stands before the names in a graph of the nest: `40/`, `40:1/` for a second region,
        nothing for the program itself."""
        one = self.program.bodies[body]
        if one.parent < 0:
            return ""
        region = f":{one.region}" if one.region else ""
        return f"{self.inside(one.parent)}{one.operation}{region}/"

    def value(self, v: int) -> str:
        """What a value is called: `[0]['w']`, `%12`, `40/%12` in the loop of operation 40."""
        body = self.walk.body_of[v]
        local = self.walk.local[v]
        graph = self.program.bodies[body].graph
        if body == 0 and local in graph.inputs and graph.input_names:
            return graph.input_names[graph.inputs.index(local)] or f"%{local}"
        return f"{self.inside(body)}%{local}"

    def operation(self, body: int, k: int) -> Operation | None:
        """An operation; None past the last, which is where what leaves the graph is read."""
        operations = self.program.bodies[body].graph.operations
        return operations[k] if 0 <= k < len(operations) else None

    def signature(self, body: int, k: int) -> OperationSignature | None:
        """What an operation's template says of it; None for one with regions, and past the last."""
        i = self._instance.get((body, k))
        return None if i is None else self.program.instances[i].signature

    def called(self, body: int, k: int) -> str:
        """What an operation is called: `dot_general #12`, `dot_general #40/3` in a loop."""
        op = self.operation(body, k)
        if op is None:
            one = self.program.bodies[body]
            parent = self.operation(int(one.parent), one.operation) if one.parent >= 0 else None
            return f"what leaves the {parent.kernel}" if parent else "the outputs"
        return f"{op.kernel} #{self.inside(body)}{k}"

    def line(self, body: int, k: int, short: bool = True) -> str:
        """`gpt2.py:118`, empty where it is not known."""
        op = self.operation(body, k)
        if op is None or not op.source.file:
            return ""
        return f"{self.paths[op.source.file] if short else op.source.file}:{op.source.line}"

    def near(self, source: str) -> str:
        """`FILE:LINE` of the program as it is written here."""
        file, _, number = source.rpartition(":")
        return f"{self.paths.get(file, file)}:{number}" if source else ""

    def unit(self, u: int) -> str:
        """What a kernel is called: by the operation that it ends in, or the port that it is."""
        root = self.program.instances[self.schedule.units[u].root]
        return root.port or self.called(int(root.body), root.operation)

    def show(self, layout: Layout) -> str:
        """A layout as text."""
        return layout.show(self.mesh)

    def changes(self, steps: Iterable[Change]) -> str:
        """`all_gather(x) then slice(y)`."""
        names = self.mesh.names
        said = (f"{s.kind}({','.join(names[a] for a in s.axes)})" for s in steps)
        return " then ".join(said) or "nothing"

    def steps(self, move: Move) -> tuple[Change, ...]:
        """The elementary changes that a copy is made by."""
        b = self.walk.body_of[move.value]
        return self.walk.bodies[b].copies[self.walk.local[move.value], move.have, move.need]

    # Times

    @cached_property
    def moments(self) -> tuple[float, ...]:
        """When every tick of the schedule begins, in seconds; two ticks for every unit, and the end
        of the step."""
        step, streams = self.found.step, self.walk.ground.streams
        begins = [begin for _, begin, _ in step.runs for _ in range(2)]
        return tuple(streams.at(step, [*begins, *[step.runs[-1][2] if step.runs else 0.0] * 3]))

    def seconds(self, begin: int, end: int) -> tuple[float, float]:
        """From tick `begin` up to before tick `end`, in seconds of the step."""
        last = len(self.moments) - 1
        # The odd tick is the kernel's run, which ends where the next unit begins.
        return self.moments[min(begin, last)], self.moments[min(end + end % 2, last)]

    @cached_property
    def peak_tick(self) -> int:
        """The tick at which most is in memory."""
        profile = self.found.profile
        return max(range(len(profile)), key=lambda t: profile[t]) if profile else 0


def sent_by_line(
    plan: Plan, paths: Mapping[str, str]
) -> dict[tuple[str, str, str, str], tuple[float, float]]:
    """Runs in a step, and bytes that one device sends in all of them, of collectives of one kind,
    axes, tensor type and line; files are called by `paths`."""
    found: dict[tuple[str, str, str, str], tuple[float, float]] = {}
    for c in plan.collectives:
        file, _, number = c.source.rpartition(":")
        line = f"{paths.get(file, file)}:{number}" if c.source else ""
        key = (c.kind, ",".join(c.axes), c.value.partition(" ")[2], line)
        runs, sent = found.get(key, (0.0, 0.0))
        found[key] = runs + c.count, sent + c.wire_bytes * c.count
    return found


# Whose update a value is: the leaf of the state of which it becomes the next value.
#
# A value is an update of a leaf of the state where it becomes the leaf's next value through
# operations on elements, views and loops that keep all of its elements. A gradient becomes the next
# value of its weight so, and of its moments; it is the weight's, since it is made of the old weight
# and of none of the moments. What is summed to a norm on the way belongs to nobody.


# Ports of loops and branches, through which values pass whole or one step's part at a time.
_THROUGH = ("invariant", "stream", "stack", "carry", "branch")


def updates(program: FlatProgram) -> Mapping[FlatId, int]:
    """Value -> the input of the program whose next value it is on the way to, where it is one."""
    graph, values = program.bodies[0].graph, program.bodies[0].values
    maker = {v: instance for instance in program.instances for v in instance.outputs}
    reached: dict[FlatId, set[int]] = {}
    for j, i in program.feedback.items():
        todo, seen = [values[graph.outputs[j]]], set[FlatId]()
        while todo:
            v = todo.pop()
            made = maker.get(v)
            if v in seen or made is None or made.port in ("state", "input", "constant"):
                continue
            seen.add(v)
            reached.setdefault(v, set()).add(i)
            if made.port in _THROUGH:
                todo += made.inputs
            elif not made.port and made.signature.fusion in ("view", "loop"):
                whole, sizes = program.types[v].size, [program.types[w].size for w in made.inputs]
                joined = sum(sizes) == whole  # of parts, such as those of all rounds
                todo += [w for w, n in zip(made.inputs, sizes, strict=True) if joined or n == whole]
    made_of = inputs_of(program)
    ends = {values[graph.outputs[j]]: i for j, i in program.feedback.items()}
    found: dict[FlatId, int] = {}
    for v, leaves in reached.items():
        own = [i for i in leaves if made_of.get(v, 0) >> i & 1] if len(leaves) > 1 else [*leaves]
        if v in ends:
            found[v] = ends[v]
        elif len(own) == 1:
            found[v] = own[0]
    return found


def inputs_of(program: FlatProgram) -> Mapping[FlatId, int]:
    """Value -> the inputs of the program that it is made of, a bit for each."""
    graph, values = program.bodies[0].graph, program.bodies[0].values
    bits = {values[v]: 1 << i for i, v in enumerate(graph.inputs)}
    changed = True
    while changed:  # loops carry what they have made into their next run
        changed = False
        for instance in program.instances:
            if instance.port in ("state", "input"):
                continue
            of = 0
            for v in instance.inputs:
                of |= bits.get(v, 0)
            for v in instance.outputs:
                if of | bits.get(v, 0) != bits.get(v, 0):
                    bits[v] = of | bits.get(v, 0)
                    changed = True
    return bits
