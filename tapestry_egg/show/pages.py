"""Programs and plans as pages of pictures: a click on a box opens what is inside it.

A program is drawn by its own functions and layers, each of these by operations and tensors, and a
loop by its body. A plan is drawn by kernels: tensors have the colours of their layouts, and an
arrow along which devices send says which collectives, over which axes, and how much one device
sends in one run. An operation in shards is a box for each, with the ranges that it reads and writes
on its arrows.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from tapestry_egg.columns import short_paths
from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.groups import grouped
from tapestry_egg.graph.layout import Layout
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.metakernels.views import View, folded_views
from tapestry_egg.plans.fetch import group_of, produced_layouts
from tapestry_egg.plans.plan import BodyPlan, Plan
from tapestry_egg.plans.planned import Moved, moved_by
from tapestry_egg.quantities import BYTES
from tapestry_egg.reference.executor import Covers
from tapestry_egg.zspace import ZRange

from .layout import ranks
from .picture import Item, Kind, Link, Page, Picture

#: (operation, region) pairs that lead to a graph of a program.
Path = tuple[tuple[int, int], ...]

#: More boxes than this are drawn in about so many groups; of more shards, some are drawn.
MOST_BOXES, MOST_KERNELS, MOST_GROUPS, MOST_SHARDS = 60, 24, 20, 16
_LETTERS = 42  # of a name
_FEW = 12  # tensors or collectives that a tooltip names

#: A colour for what every device holds whole.
WHOLE = "#e5e7eb"


def graph_pages(
    graph: BlockGraph, covers: Covers | None = None, operations: range | None = None
) -> tuple[Page, ...]:
    """The pages of a program, or of its operations with numbers in `operations`; that of the whole
    first.

    Operations in `covers` are drawn in the shards that its boxes make, at most MOST_SHARDS one by
    one; those of a region have paths (operation, region, operation). Raises GraphError for a range
    or cover outside the graph.
    """
    count = len(graph.operations)
    chosen = range(count) if operations is None else operations
    if chosen.step != 1 or not 0 <= chosen.start <= chosen.stop <= count:
        raise GraphError(
            f"operations {chosen.start}:{chosen.stop} are not among 0:{count}", where=graph.name
        )
    made = _Pages(covers or {})
    _Graph(made, graph, ()).page(chosen, graph.name, "")
    if unknown := set(made.covers) - made.met:
        raise GraphError(
            f"no operation at {min(unknown)} is drawn, so it has no shards", where=graph.name
        )
    return made.in_order()


def plan_pages(plan: Plan) -> tuple[Page, ...]:
    """The pages of a plan, that of the whole program first.

    Raises PlanError where the plan does not fit its graph.
    """
    made = _PlanPages({}, plan=plan)
    body = _Body(made, plan.body, ())
    body.page(range(len(body.graph.operations)), f"plan {plan.name} of {plan.graph.name}", "")
    return made.in_order()


@dataclass
class _Pages:
    """What the graphs of one program share."""

    covers: Covers
    found: list[Page] = field(default_factory=list)
    met: set[tuple[int, ...]] = field(default_factory=set)  # operations that are drawn
    numbers: int = 0

    def name(self) -> str:
        self.numbers += 1
        return f"page-{self.numbers}"

    def in_order(self) -> tuple[Page, ...]:
        # A page is finished after those that its boxes open.
        return tuple(sorted(self.found, key=lambda page: page.parent != ""))


class _End(NamedTuple):
    """An arrow between a box and a tensor, which the box `reads` or writes."""

    value: int
    reads: bool
    label: str = ""
    title: str = ""
    sends: bool = False


class _Graph:
    """The pages of one graph of a program."""

    most = MOST_BOXES

    def __init__(self, pages: _Pages, graph: BlockGraph, path: Path) -> None:
        self.pages, self.graph, self.path = pages, graph, path
        self.maker, self.readers = graph.producers(), graph.readers()

    @cached_property
    def files(self) -> Mapping[str, str]:
        """What the files of the graph are called here."""
        return short_paths({op.source.file for op in self.graph.operations})

    @cached_property
    def views(self) -> Mapping[int, tuple[int, View]]:
        """Values that need no box because they are views that are only read: (base, view) each."""
        shown = {*self.graph.outputs}
        shown |= {v for op in self.graph.operations if op.regions for v in op.inputs}
        shown |= {v for v, k in self.maker.items() if (*self._flat(), k) in self.pages.covers}
        return {w: found for w, found in folded_views(self.graph).items() if w not in shown}

    # What differs between a program and a plan

    def kernels(self, numbers: Sequence[int]) -> list[list[int]]:
        """Operations by the box that stands for them."""
        made = [(k, self.graph.operations[k].outputs) for k in numbers]
        found = [[k] for k, out in made if not out or any(v not in self.views for v in out)]
        return found or [[k] for k in numbers]

    def boxes(
        self, numbers: Sequence[int], title: str, page: str
    ) -> Iterator[tuple[Item, list[_End]]]:
        """The box of an operation, or those of its shards, each with its arrows."""
        (k,) = numbers
        op, path = self.graph.operations[k], (*self._flat(), k)
        self.pages.met.add(path)
        if op.regions:
            ends = [_End(v, True) for v in dict.fromkeys(op.inputs) if not self._is_number(v)]
            ends += [_End(v, False) for v in op.outputs]
            yield self._operation(numbers, title, page), ends
            return
        cover = self.pages.covers.get(path, ())
        if len(cover) < 2:
            whole = ZRange.from_shape(self._signature(op).extents)
            yield self._operation(numbers, title, page), self._ranges(op, whole, False)
            return
        shown = list(cover) if len(cover) <= MOST_SHARDS else list(cover[: MOST_SHARDS - 1])
        rest = cover[len(shown) :]
        lines = [(op.kernel, _range(box)) for box in shown]
        if rest:
            shown.append(ZRange.bounding(rest))
            lines.append((f"{len(rest)} more", f"within {_range(shown[-1])}"))
        for n, (box, words) in enumerate(zip(shown, lines, strict=True)):
            said = f"{self._place([k])}, {words[1]}"
            yield Item(f"{page}-k{k}-{n}", "shard", words, said), self._ranges(op, box, True)

    def tensor(self, id: str, v: int, layout: Layout | None = None) -> Item:
        """The box of a tensor."""
        lines = (_short(self._called(v)), str(self.graph.values[v]))
        kind: Kind = "constant" if v in self.graph.constants else "tensor"
        return Item(id, kind, lines, self.said(v))

    def said(self, v: int) -> str:
        """A tensor in words."""
        type_ = self.graph.values[v]
        return f"{self._called(v)} {type_}, {BYTES.format(type_.nbytes)}"

    def how(self, k: int) -> str:
        """The second line of an operation: its index space in short, `m 8, n 32, k 16 sum`."""
        dims = self._signature(self.graph.operations[k]).index
        parts = [f"{d.name} {d.size}" + (f" {d.monoid}" if d.monoid else "") for d in dims[:6]]
        return ", ".join(parts) + (", …" if len(dims) > 6 else "")

    def moved(self, k: int, v: int | None) -> list[Moved]:
        """What is sent for a reader of a value; for None, of what one device computes for all."""
        return []

    def inner(self, k: int, r: int) -> _Graph:
        """A region of an operation."""
        return _Graph(self.pages, self.graph.operations[k].regions[r], (*self.path, (k, r)))

    def other_layouts(self, chosen: set[int]) -> Iterator[tuple[int, int]]:
        """Outputs (place, value) that leave in another layout than they are made in."""
        return iter(())

    def fill(self, v: int) -> str:
        """The colour of a tensor, other than that of its kind."""
        return ""

    def legend(self, items: Sequence[Item]) -> tuple[tuple[str, str], ...]:
        """What colours mean."""
        return ()

    def suffix(self) -> str:
        """What stands below a page's title behind the count of its boxes."""
        return ""

    # Pages

    def page(self, numbers: range, title: str, parent: str) -> str:
        """Draw operations in groups if they are many, else one by one; returns the page's name."""
        kernels = self.kernels(numbers)
        if len(kernels) > self.most:
            groups = grouped(self.graph, numbers, MOST_GROUPS)
            if len(groups) > 1:
                return self._groups(groups, title, parent)
        return self._kernels(kernels, title, parent, numbers)

    def _groups(self, groups: Sequence[tuple[str, list[int]]], title: str, parent: str) -> str:
        id = self.pages.name()
        items: dict[str, Item] = {}
        home: dict[int, str] = {}
        for n, (scope, numbers) in enumerate(groups):
            box = f"{id}-{n}"
            words = f"operations {numbers[0]} to {numbers[-1]}"
            head = _short(scope) or words
            home.update(dict.fromkeys(numbers, box))
            inner = self.page(range(numbers[0], numbers[-1] + 1), f"{head}, {title}", id)
            lines = [head, _count(len(self.kernels(numbers)), self._unit())]
            moved = [m for k in numbers for m in self.moved_for(k)]
            if moved:
                size = BYTES.format(sum(m.planned.wire_bytes * m.planned.count for m in moved))
                lines.append(f"{_count(len(moved), 'collective')}, {size}")
            items[box] = Item(box, "group", tuple(lines), f"{scope}: {words}", opens=inner)
        between: dict[tuple[str, str], list[tuple[int, list[Moved]]]] = {}
        leaving = set(self.graph.outputs)
        for k, box in home.items():
            for v in dict.fromkeys(self.graph.operations[k].inputs):
                source = home.get(self.maker.get(v, -1), "")
                if source != box and not self._is_number(v):
                    between.setdefault((source, box), []).append((v, self.moved(k, v)))
            for v in self.graph.operations[k].outputs:
                if v in leaving or any(r not in home for r in self.readers[v]):
                    moved = self.moved(len(self.graph.operations), v) if v in leaving else []
                    between.setdefault((box, ""), []).append((v, moved))
        links = []
        for (source, target), reads in between.items():
            values = list(dict.fromkeys(v for v, _ in reads))
            outer = "" in (source, target)
            begin, end = source or f"{target}-enters", target or f"{source}-leaves"
            if outer:
                bundle = end if source else begin
                items[bundle] = self._bundle(bundle, values)
            moved = [m for _, some in reads for m in some]
            label = _label(moved)
            if not label and not outer:
                one = str(self.graph.values[values[0]])
                label = one if len(values) == 1 else f"{len(values)} tensors"
            words = _told(moved) or self._list(values)
            links.append(Link(begin, end, label, words, bool(moved)))
        return self._done(id, parent, title, items, links, _count(len(groups), "part"))

    def _bundle(self, id: str, values: Sequence[int]) -> Item:
        """A box for tensors that enter or leave a group."""
        if len(values) == 1:
            return self.tensor(id, values[0])
        size = BYTES.format(sum(self.graph.values[v].nbytes for v in values))
        lines = (f"{len(values)} tensors", size)
        fills = Counter(map(self.fill, values)).most_common()
        if len(fills) == 1:
            return Item(id, "tensor", lines, self._list(values), fill=fills[0][0])
        bands = tuple((colour, n / len(values)) for colour, n in fills)
        return Item(id, "tensor", lines, self._list(values), fill="#ffffff", bands=bands)

    def _kernels(
        self, kernels: Sequence[list[int]], title: str, parent: str, numbers: Sequence[int]
    ) -> str:
        """A page of kernels, or of single operations, with the tensors between them."""
        id = self.pages.name()
        items: dict[str, Item] = {}
        links: list[Link] = []

        def tensor(v: int) -> str:
            name = f"{id}-v{v}"
            items.setdefault(name, self.tensor(name, v))
            return name

        graph = self.graph
        if len(numbers) == len(graph.operations):
            for v in (*graph.inputs, *graph.outputs):
                tensor(v)  # those that no operation reads or makes are drawn too
        for one in kernels:
            for item, ends in self.boxes(one, title, id):
                items[item.id] = item
                for end in ends:
                    box = tensor(end.value)
                    a, b = (box, item.id) if end.reads else (item.id, box)
                    links.append(Link(a, b, end.label, end.title, end.sends))
        for j, v in self.other_layouts({k for one in kernels for k in one}):
            items[f"{id}-out{j}"] = self.tensor(f"{id}-out{j}", v, self._output(j))
            moved = self.moved(len(graph.operations), v)
            said = _label(moved), _told(moved), bool(moved)
            links.append(Link(tensor(v), f"{id}-out{j}", *said))
        what = "kernel" if any(len(one) > 1 for one in kernels) else "operation"
        links = list(dict.fromkeys(links))
        said_below = _count(len(kernels), what)
        if not parent and len(numbers) < len(graph.operations):
            said_below += f" of {len(graph.operations)}"
        return self._done(id, parent, title, items, links, said_below)

    def _output(self, j: int) -> Layout | None:
        return None

    def moved_for(self, k: int) -> Sequence[Moved]:
        """All that is sent for an operation."""
        return ()

    def _operation(self, numbers: Sequence[int], title: str, page: str) -> Item:
        """The box of a kernel."""
        ops = [self.graph.operations[k] for k in numbers]
        main = max(numbers, key=self._size)
        counted = Counter(op.kernel for op in ops)
        names = [name if n == 1 else f"{name} ×{n}" for name, n in counted.items()]
        head = " + ".join(names[:3]) + (" + …" if len(names) > 3 else "")
        kind: Kind = "kernel" if len(ops) > 1 else "region" if ops[0].regions else "operation"
        opens = ""
        if len(ops) > 1:
            single = [[k] for k in numbers]
            opens = self._kernels(single, f"{head}, {title}", page, numbers)
        elif ops[0].regions:
            opens = self._regions(numbers[0], title, page)
        how = "opens" if ops[0].regions and len(ops) == 1 else self.how(main)
        lines = (head, how) if how else (head,)
        return Item(f"{page}-k{numbers[0]}", kind, lines, self._place(numbers), opens=opens)

    def _place(self, numbers: Sequence[int]) -> str:
        """Which operations are in a box, and where the largest is written."""
        kernels = " + ".join(self.graph.operations[k].kernel for k in numbers)
        source = self.graph.operations[max(numbers, key=self._size)].source
        where = f", {self.files[source.file]}:{source.line}" if source.file else ""
        several = "s" if len(numbers) > 1 else ""
        return f"operation{several} {', '.join(map(str, numbers))}: {kernels}{where}"

    def _regions(self, k: int, title: str, page: str) -> str:
        """The pages of a loop's body, or of the branches of a choice."""
        op = self.graph.operations[k]
        regions = [self.inner(k, r) for r in range(len(op.regions))]
        every = [range(len(r.graph.operations)) for r in regions]
        if op.is_scan:
            head = f"body of scan, {op.params.get('length', '?')} rounds, {title}"
            return regions[0].page(every[0], head, page)
        id = self.pages.name()
        items = {}
        for r, region in enumerate(regions):
            words = ("condition", "body")[r] if op.is_while else f"branch {r}"
            inner = region.page(every[r], f"{words} of {op.kernel}, {title}", id)
            lines = (words, _count(len(every[r]), "operation"))
            items[f"{id}-{r}"] = Item(f"{id}-{r}", "region", lines, words, opens=inner)
        said = _count(len(regions), "graph")
        return self._done(id, page, f"{op.kernel}, {title}", items, (), said)

    def _done(
        self,
        id: str,
        parent: str,
        title: str,
        items: Mapping[str, Item],
        links: Sequence[Link],
        said: str,
    ) -> str:
        head, _, inside = title.partition(", ")
        said += self.suffix() + (f", in {inside}" if inside else "")
        boxes = tuple(items.values())
        drawn = Picture(head, boxes, tuple(links), said, self.legend(boxes))
        self.pages.found.append(Page(id, parent, drawn))
        return id

    # Arrows with ranges

    def _ranges(self, op: Operation, box: ZRange, always: bool) -> list[_End]:
        """Arrows between a box and its tensors, with the ranges that it reads and writes: those
        that are not all of a tensor, or `always`."""
        signature, graph, ends = self._signature(op), self.graph, []
        for p, v in enumerate(op.inputs):
            base, view = self.views.get(v, (v, None))
            if self._is_number(base):
                continue  # a number in every second operation says little
            read = signature.operand_box(p, box)
            label = _range_label(read, graph.values[v], always)
            title = f"reads {read} of operand {p}, {graph.values[v]}"
            if view is not None:
                how = f"as {list(view.shape)} by {view.show()}"
                label = f"{_range(view.projection().image(read))} {how}" if always else how
                title += f", which is %{base} {how}"
            ends.append(_End(base, True, label, title))
        cut = [
            dim.monoid
            for d, dim in enumerate(signature.index)
            if dim.role == "reduce" and box.shape[d] != dim.size
        ]
        for q, w in enumerate(op.outputs):
            made = signature.outputs[q].image(box)
            label = _range_label(made, graph.values[w], always)
            title = f"writes {made} of output {q}, {graph.values[w]}"
            if cut:
                label += f" +{', '.join(sorted({str(m) for m in cut if m}))}"
                title += ", a partial value"
            ends.append(_End(w, False, label, title))
        return ends

    # Words

    def _unit(self) -> str:
        return "operation"

    def _flat(self) -> tuple[int, ...]:
        return tuple(n for pair in self.path for n in pair)

    def _list(self, values: Sequence[int]) -> str:
        return ", ".join(map(self.said, values[:_FEW])) + (", …" if len(values) > _FEW else "")

    def _size(self, k: int) -> int:
        op = self.graph.operations[k]
        return prod(self._signature(op).extents) if not op.regions else 0

    def _signature(self, op: Operation) -> OperationSignature:
        return signature_of(self.graph, op)

    def _called(self, v: int) -> str:
        """The name of a value in the program, else its number; a scalar constant's own value."""
        graph = self.graph
        if self._is_number(v):
            return str(graph.constants[v])
        if v in graph.inputs and graph.input_names:
            return graph.input_names[graph.inputs.index(v)] or f"%{v}"
        if v in graph.outputs and graph.output_names:
            alone = "output" if len(graph.outputs) == 1 else f"%{v}"
            return graph.output_names[graph.outputs.index(v)] or alone
        return f"%{v}"

    def _is_number(self, v: int) -> bool:
        return v in self.graph.constants and self.graph.values[v].rank == 0


@dataclass
class _PlanPages(_Pages):
    """The same of a plan, with a colour for every layout."""

    plan: Plan = field(kw_only=True)
    colours: dict[str, str] = field(default_factory=dict)

    @cached_property
    def sent(self) -> dict[tuple[Path, int], list[Moved]]:
        """Collectives by the graph and the reader that they are for."""
        out: dict[tuple[Path, int], list[Moved]] = {}
        for moved in moved_by(self.plan):
            out.setdefault((moved.path, moved.reader), []).append(moved)
        return out

    def colour(self, layout: Layout) -> str:
        """The colour of a layout, another for each, and one for all that cut nothing."""
        if not layout.axes:
            return WHOLE
        shown = layout.show(self.plan.mesh)
        if shown not in self.colours:
            number = len(self.colours)
            hue = (0.58 + 0.618034 * number) % 1.0  # the golden section: far apart
            channels = colorsys.hls_to_rgb(hue, 0.82 if number % 2 else 0.72, 0.75)
            self.colours[shown] = "#" + "".join(f"{round(255 * c):02x}" for c in channels)
        return self.colours[shown]


class _Body(_Graph):
    """The pages of one graph of a plan."""

    pages: _PlanPages
    most = MOST_KERNELS

    def __init__(self, pages: _PlanPages, body: BodyPlan, path: Path) -> None:
        super().__init__(pages, body.graph, path)
        self.body, self.mesh = body, pages.plan.mesh
        self.layouts = produced_layouts(body)

    def kernels(self, numbers: Sequence[int]) -> list[list[int]]:
        """Operations by the kernel that they run in; one by one where others come between the
        operations of a kernel."""
        by: dict[int, list[int]] = {}
        for k in numbers:
            group = group_of(self.body, k)
            by.setdefault(group if group >= 0 else -1 - k, []).append(k)
        found = list(by.values())
        home = {k: n for n, some in enumerate(found) for k in some}
        ends = {
            (home[self.maker[v]], home[k])
            for k in numbers
            for v in self.graph.operations[k].inputs
            if self.maker.get(v) in home and home[self.maker[v]] != home[k]
        }
        try:
            ranks(len(found), sorted(ends))
        except ValueError:
            return [[k] for k in numbers]
        return found

    def boxes(
        self, numbers: Sequence[int], title: str, page: str
    ) -> Iterator[tuple[Item, list[_End]]]:
        """The box of a kernel, with an arrow for each tensor."""
        sent: dict[tuple[int, bool], list[Moved]] = {}
        own = {v for k in numbers for v in self.graph.operations[k].outputs}
        for k in numbers:
            op = self.graph.operations[k]
            for v in dict.fromkeys(op.inputs):
                if v not in own and not self._is_number(v):
                    sent.setdefault((v, True), []).extend(self.moved(k, v))
            for v in op.outputs:
                if v in self.graph.outputs or set(self.readers[v]) - set(numbers):
                    sent.setdefault((v, False), []).extend(self.moved(k, None))
        ends = [_End(*end, _label(m), _told(m), bool(m)) for end, m in sent.items()]
        yield self._operation(numbers, title, page), ends

    def tensor(self, id: str, v: int, layout: Layout | None = None) -> Item:
        layout = layout or self.layouts[v]
        lines = (_short(self._called(v)), str(self.graph.values[v]), layout.show(self.mesh))
        kind: Kind = "constant" if v in self.graph.constants else "tensor"
        return Item(id, kind, lines, self.said(v), fill=self.pages.colour(layout))

    def said(self, v: int) -> str:
        layout, type_ = self.layouts[v], self.graph.values[v]
        size = BYTES.format(layout.block(type_, self.mesh).nbytes)
        return f"{self._called(v)} {type_} {layout.show(self.mesh)}, {size} a device"

    def how(self, k: int) -> str:
        """How an operation is sharded: `m over x, k over y`, by its dims and the axes."""
        names = [d.name for d in self._signature(self.graph.operations[k]).index]
        words = [
            f"{name} over {'·'.join(self.mesh.names[a] for a in axes)}"
            for name, axes in zip(names, self.body.strategies[k].cuts, strict=False)
            if axes
        ]
        return ", ".join(words) or "replicated"

    def moved(self, k: int, v: int | None) -> list[Moved]:
        found = []
        for m in self.moved_for(k):
            of = m.fetch.value if m.fetch else None
            if m.exchange is not None:
                of = self.graph.operations[k].inputs[m.exchange.operand]
            if of == v:
                found.append(m)
        return found

    def moved_for(self, k: int) -> Sequence[Moved]:
        return self.pages.sent.get((self.path, k), ())

    def inner(self, k: int, r: int) -> _Graph:
        return _Body(self.pages, self.body.strategies[k].bodies[r], (*self.path, (k, r)))

    def other_layouts(self, chosen: set[int]) -> Iterator[tuple[int, int]]:
        for j, v in enumerate(self.graph.outputs):
            if self.maker.get(v, -1) in chosen and self.body.outputs[j] != self.layouts[v]:
                yield j, v

    def _output(self, j: int) -> Layout | None:
        return self.body.outputs[j]

    def fill(self, v: int) -> str:
        return self.pages.colour(self.layouts[v])

    def legend(self, items: Sequence[Item]) -> tuple[tuple[str, str], ...]:
        used = {item.fill for item in items} | {c for item in items for c, _ in item.bands}
        known = {WHOLE: "replicated"} | {c: n for n, c in self.pages.colours.items()}
        return tuple((colour, words) for colour, words in known.items() if colour in used)

    def suffix(self) -> str:
        return f", mesh {self.mesh}"

    def _unit(self) -> str:
        return "kernel"


def signature_of(graph: BlockGraph, op: Operation) -> OperationSignature:
    """What an operation's template says of it."""
    types = [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs]
    return registry.signature(op.kernel, op.params, *types, len(op.regions))


def _label(moved: Sequence[Moved]) -> str:
    """`all_gather x 4 MiB`, with what one device sends in one run."""
    if not moved:
        return ""
    kinds = list(dict.fromkeys(f"{m.planned.kind} {'·'.join(m.planned.axes)}" for m in moved))
    size = BYTES.format(sum(m.planned.wire_bytes for m in moved))
    return f"{', '.join(kinds)} {size}" if len(kinds) < 3 else f"{len(moved)} collectives {size}"


def _told(moved: Sequence[Moved]) -> str:
    lines = []
    for m in moved[:_FEW]:
        c = m.planned
        times = f", {c.count} times" if c.count != 1 else ""
        sizes = f"{BYTES.format(c.payload_bytes)}, {BYTES.format(c.wire_bytes)} sent"
        lines.append(f"{c.kind} of {c.value} over {', '.join(c.axes)}: {sizes}{times}")
    return "; ".join(lines)


def _range(box: ZRange) -> str:
    return str(box).removeprefix("zr")


def _range_label(box: ZRange, tensor: TensorType, always: bool) -> str:
    return _range(box) if always or box != ZRange.from_shape(tensor.shape) else ""


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _short(text: str) -> str:
    return text if len(text) <= _LETTERS else "…" + text[1 - _LETTERS :]
