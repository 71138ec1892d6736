"""A plan as pictures: the program by the user's own functions and layers, each of these by kernels
and tensors, each kernel by operations.

Tensors have the colours of their layouts. An arrow along which devices send says by which
collectives, over which axes, and how much one device sends in one run.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from tapestry_egg.graph.blockgraph import Operation
from tapestry_egg.graph.groups import grouped
from tapestry_egg.graph.layout import Layout
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.plans.fetch import group_of, produced_layouts
from tapestry_egg.plans.plan import BodyPlan, Plan
from tapestry_egg.plans.planned import Moved, moved_by
from tapestry_egg.quantities import BYTES
from tapestry_egg.show.layered_drawing import ranks
from tapestry_egg.show.picture import Item, Kind, Link, Picture

#: Of more kernels than this a picture has groups, about so many; names are no longer than that.
MOST_KERNELS, MOST_GROUPS, MOST_LETTERS = 24, 16, 40

#: A colour for what every device holds whole.
WHOLE = "#e5e7eb"


@dataclass(frozen=True)
class Page:
    """A picture by name, and that of the page with the box that opens it; the first has none."""

    id: str
    parent: str
    picture: Picture


def plan_pages(plan: Plan) -> tuple[Page, ...]:
    """The pictures of a plan, that of the whole program first.

    Raises PlanError where the plan does not fit its graph.
    """
    pages = _Pages(plan)
    pages.body(plan.body, (), f"plan {plan.name} of {plan.graph.name}", "")
    # A page is finished after those that its boxes open.
    return tuple(sorted(pages.found, key=lambda page: page.parent != ""))


@dataclass
class _Pages:
    plan: Plan
    found: list[Page] = field(default_factory=list)
    colours: dict[str, str] = field(default_factory=dict)
    numbers: int = 0

    @cached_property
    def sent(self) -> dict[tuple[tuple[tuple[int, int], ...], int], list[Moved]]:
        """Collectives by the graph and the reader that they are for."""
        out: dict[tuple[tuple[tuple[int, int], ...], int], list[Moved]] = {}
        for moved in moved_by(self.plan):
            out.setdefault((moved.path, moved.reader), []).append(moved)
        return out

    def name(self) -> str:
        self.numbers += 1
        return f"page-{self.numbers}"

    def body(
        self, body: BodyPlan, path: tuple[tuple[int, int], ...], title: str, parent: str
    ) -> str:
        """The pages of a graph; the name of the first."""
        return _Body(self, body, path).page(range(len(body.graph.operations)), title, parent)

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


class _Body:
    """The pages of one graph of a plan."""

    def __init__(self, pages: _Pages, body: BodyPlan, path: tuple[tuple[int, int], ...]) -> None:
        self.pages, self.plan, self.path = pages, body, path
        self.graph, self.mesh = body.graph, pages.plan.mesh
        self.layouts = produced_layouts(body)
        self.maker, self.readers = self.graph.producers(), self.graph.readers()

    def page(self, numbers: range, title: str, parent: str) -> str:
        """Draw operations in groups if they are many, else in kernels; returns the page's name."""
        kernels = self._kernels(numbers)
        if len(kernels) > MOST_KERNELS:
            groups = grouped(self.graph, numbers, set(), MOST_GROUPS)
            if len(groups) > 1:
                return self._groups(groups, title, parent)
        return self._boxes(kernels, title, parent)

    def _kernels(self, numbers: Sequence[int]) -> list[list[int]]:
        """Operations by the kernel that they run in; each part of a kernel on its own where others
        come between its operations."""
        by: dict[int, list[int]] = {}
        for k in numbers:
            group = group_of(self.plan, k)
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

    # Groups

    def _groups(self, groups: Sequence[tuple[str, list[int]]], title: str, parent: str) -> str:
        id = self.pages.name()
        items: dict[str, Item] = {}
        home: dict[int, str] = {}
        for n, (scope, numbers) in enumerate(groups):
            box = f"{id}-{n}"
            head = _short(scope) or f"operations {numbers[0]}-{numbers[-1]}"
            home.update(dict.fromkeys(numbers, box))
            inner = self.page(range(numbers[0], numbers[-1] + 1), f"{head}, {title}", id)
            moved = [m for k in numbers for m in self.pages.sent.get((self.path, k), ())]
            lines = [head, _count(len(self._kernels(numbers)), "kernel")]
            lines += [_sum(moved)] if moved else []
            words = f"{scope}: operations {numbers[0]} to {numbers[-1]}"
            items[box] = Item(box, "group", tuple(lines), words, opens=inner)
        between: dict[tuple[str, str], list[tuple[int, list[Moved]]]] = {}
        for k, box in home.items():
            for v in dict.fromkeys(self.graph.operations[k].inputs):
                source = home.get(self.maker.get(v, -1), "")
                if source != box and not self._is_number(v):
                    between.setdefault((source, box), []).append((v, self._moved(k, v)))
            for v in self.graph.operations[k].outputs:
                if v in self.graph.outputs or any(r not in home for r in self.readers[v]):
                    between.setdefault((box, ""), []).append((v, []))
        for v in dict.fromkeys(self.graph.outputs):
            if (box := home.get(self.maker.get(v, -1), "")) and (box, "") in between:
                moved = self._moved(len(self.graph.operations), v)
                between[box, ""].append((v, moved))
        links = []
        for (source, target), reads in between.items():
            values = list(dict.fromkeys(v for v, _ in reads))
            ends = [source, target]
            for side in (0, 1):
                if not ends[side]:
                    ends[side] = f"{ends[1 - side]}-{'enters' if side == 0 else 'leaves'}"
                    items[ends[side]] = self._bundle(ends[side], values)
            moved = [m for _, some in reads for m in some]
            alone = len(values) == 1 and "" not in (source, target)
            label = _label(moved)
            if not label and "" not in (source, target):
                label = str(self.graph.values[values[0]]) if alone else f"{len(values)} tensors"
            words = _told(moved) or ", ".join(self._said(v) for v in values[:12])
            links.append(Link(ends[0], ends[1], label, words, sends=bool(moved)))
        return self._done(id, parent, title, items, links, _count(len(groups), "part"))

    def _bundle(self, id: str, values: Sequence[int]) -> Item:
        """A box for tensors that enter or leave a group."""
        if len(values) == 1:
            return self._tensor(id, values[0])
        size = BYTES.format(sum(self.graph.values[v].nbytes for v in values))
        fills = Counter(self.pages.colour(self.layouts[v]) for v in values).most_common()
        words = ", ".join(self._said(v) for v in values[:12]) + (", …" if len(values) > 12 else "")
        lines = (f"{len(values)} tensors", size)
        if len(fills) == 1:
            return Item(id, "tensor", lines, words, fill=fills[0][0])
        bands = tuple((colour, n / len(values)) for colour, n in fills)
        return Item(id, "tensor", lines, words, fill="#ffffff", bands=bands)

    # Kernels and operations

    def _boxes(self, boxes: Sequence[list[int]], title: str, parent: str) -> str:
        """A page of kernels, or of single operations, with the tensors between them."""
        id = self.pages.name()
        items: dict[str, Item] = {}
        links: dict[tuple[str, str], list[Moved]] = {}
        chosen = {k for numbers in boxes for k in numbers}

        def tensor(v: int) -> str:
            name = f"{id}-v{v}"
            items.setdefault(name, self._tensor(name, v))
            return name

        for numbers in boxes:
            box = f"{id}-k{numbers[0]}"
            items[box] = self._box(box, numbers, title, id)
            own = {v for k in numbers for v in self.graph.operations[k].outputs}
            for k in numbers:
                op = self.graph.operations[k]
                for v in dict.fromkeys(op.inputs):
                    if v not in own and not self._is_number(v):
                        links.setdefault((tensor(v), box), []).extend(self._moved(k, v))
                for v in op.outputs:
                    if v in self.graph.outputs or set(self.readers[v]) - set(numbers):
                        links.setdefault((box, tensor(v)), []).extend(self._moved(k, None))
        end = len(self.graph.operations)
        for j, v in enumerate(self.graph.outputs):
            if self.maker.get(v, -1) in chosen and self.plan.outputs[j] != self.layouts[v]:
                name = f"{id}-out{j}"
                items[name] = self._tensor(name, v, self.plan.outputs[j])
                links[tensor(v), name] = self._moved(end, v)
        arrows = [
            Link(a, b, _label(moved), _told(moved), sends=bool(moved))
            for (a, b), moved in links.items()
        ]
        fused = any(len(numbers) > 1 for numbers in boxes)
        said = _count(len(boxes), "kernel" if fused else "operation")
        return self._done(id, parent, title, items, arrows, said)

    def _box(self, id: str, numbers: Sequence[int], title: str, page: str) -> Item:
        ops = [self.graph.operations[k] for k in numbers]
        main = max(numbers, key=self._size)
        counted = Counter(op.kernel for op in ops)
        names = [name if n == 1 else f"{name} ×{n}" for name, n in counted.items()]
        head = " + ".join(names[:3]) + (" + …" if len(names) > 3 else "")
        words = f"operation{'s' if len(ops) > 1 else ''} {', '.join(map(str, numbers))}: " + (
            " + ".join(op.kernel for op in ops)
        )
        source = self.graph.operations[main].source
        words += f", {source}" if source.file else ""
        kind: Kind = "kernel" if len(ops) > 1 else "region" if ops[0].regions else "operation"
        opens = ""
        if len(ops) > 1:
            opens = self._boxes([[k] for k in numbers], f"{head}, {title}", page)
        elif ops[0].regions:
            opens = self._regions(numbers[0], title, page)
        return Item(id, kind, (head, self._cuts(main)), words, opens=opens)

    def _regions(self, k: int, title: str, page: str) -> str:
        """The pages of a loop's body, or of the branches of a choice."""
        op, bodies = self.graph.operations[k], self.plan.strategies[k].bodies
        if op.kernel == "scan":
            title = f"body of scan, {op.params.get('length', '?')} rounds, {title}"
            return self.pages.body(bodies[0], (*self.path, (k, 0)), title, page)
        id = self.pages.name()
        items = {}
        for r, body in enumerate(bodies):
            words = ("condition", "body")[r] if op.kernel == "while" else f"branch {r}"
            inner = self.pages.body(body, (*self.path, (k, r)), f"{words} of {op.kernel}", id)
            count = _count(len(body.graph.operations), "operation")
            items[f"{id}-{r}"] = Item(f"{id}-{r}", "region", (words, count), words, opens=inner)
        said = _count(len(bodies), "graph")
        return self._done(id, page, f"{op.kernel}, {title}", items, [], said)

    def _size(self, k: int) -> int:
        op = self.graph.operations[k]
        return prod(self._extents(op)) if not op.regions else 0

    def _extents(self, op: Operation) -> tuple[int, ...]:
        return tuple(d.size for d in self._signature(op).index)

    def _signature(self, op: Operation) -> OperationSignature:
        types = (
            [self.graph.values[v] for v in op.inputs],
            [self.graph.values[v] for v in op.outputs],
        )
        return registry.signature(op.kernel, op.params, *types, len(op.regions))

    def _cuts(self, k: int) -> str:
        """How an operation is cut: `m x, k y`, by its dims and the axes."""
        op, cuts = self.graph.operations[k], self.plan.strategies[k].cuts
        if op.regions:
            return "opens"
        names = [d.name for d in self._signature(op).index]
        words = [
            f"{name} over {'·'.join(self.mesh.names[a] for a in axes)}"
            for name, axes in zip(names, cuts, strict=False)
            if axes
        ]
        return ", ".join(words) or "whole on every device"

    # Tensors and what is sent

    def _tensor(self, id: str, v: int, layout: Layout | None = None) -> Item:
        layout = layout or self.layouts[v]
        lines = (_short(self._called(v)), str(self.graph.values[v]), layout.show(self.mesh))
        kind: Kind = "constant" if v in self.graph.constants else "tensor"
        return Item(id, kind, lines, self._said(v), fill=self.pages.colour(layout))

    def _said(self, v: int) -> str:
        layout = self.layouts[v]
        local = prod(layout.local_shape(self.graph.values[v].shape, self.mesh))
        size = BYTES.format(local * self.graph.values[v].itemsize)
        type_ = self.graph.values[v]
        return f"{self._called(v)} {type_} {layout.show(self.mesh)}, {size} a device"

    def _called(self, v: int) -> str:
        graph = self.graph
        for values, names in (
            (graph.inputs, graph.input_names),
            (graph.outputs, graph.output_names),
        ):
            if v in values and names:
                return names[values.index(v)] or f"%{v}"
        return f"%{v}"

    def _is_number(self, v: int) -> bool:
        return v in self.graph.constants and self.graph.values[v].rank == 0

    def _moved(self, k: int, v: int | None) -> list[Moved]:
        """What is sent for a reader of a value; for None, of what one device computes for all."""
        found = []
        for m in self.pages.sent.get((self.path, k), ()):
            of = m.fetch.value if m.fetch else None
            if m.exchange is not None:
                of = self.graph.operations[k].inputs[m.exchange.operand]
            if of == v:
                found.append(m)
        return found

    def _done(
        self,
        id: str,
        parent: str,
        title: str,
        items: dict[str, Item],
        links: Sequence[Link],
        said: str,
    ) -> str:
        used = {item.fill for item in items.values()}
        used |= {colour for item in items.values() for colour, _ in item.bands}
        known = {WHOLE: "whole on every device"} | {c: n for n, c in self.pages.colours.items()}
        legend = tuple((colour, words) for colour, words in known.items() if colour in used)
        head, _, inside = title.partition(", ")
        said = f"{said}, mesh {self.mesh}" + (f", in {inside}" if inside else "")
        drawn = Picture(head, tuple(items.values()), tuple(links), (), said, legend)
        self.pages.found.append(Page(id, parent, drawn))
        return id


def _label(moved: Sequence[Moved]) -> str:
    """`all_gather x 4 MiB`, with what one device sends in one run."""
    if not moved:
        return ""
    kinds = list(dict.fromkeys(f"{m.planned.kind} {'·'.join(m.planned.axes)}" for m in moved))
    size = BYTES.format(sum(m.planned.wire_bytes for m in moved))
    return f"{', '.join(kinds)} {size}" if len(kinds) < 3 else f"{len(moved)} collectives {size}"


def _told(moved: Sequence[Moved]) -> str:
    lines = []
    for m in moved[:12]:
        c = m.planned
        times = f", {c.count} times" if c.count != 1 else ""
        sizes = f"{BYTES.format(c.payload_bytes)}, {BYTES.format(c.wire_bytes)} sent"
        lines.append(f"{c.kind} of {c.value} over {', '.join(c.axes)}: {sizes}{times}")
    return "; ".join(lines)


def _sum(moved: Sequence[Moved]) -> str:
    size = BYTES.format(sum(m.planned.wire_bytes * m.planned.count for m in moved))
    return f"{_count(len(moved), 'collective')}, {size}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _short(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else "…" + text[1 - MOST_LETTERS :]
