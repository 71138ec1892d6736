"""Drawings of block graphs: the logical graph, and the sharded one with ranges on its arrows.

Tensors are boxes, operations rounded ones. An arrow says which box of the tensor is read or written
where that is not the whole tensor, and always where the operation is drawn in shards. Chains of
views are one arrow that says how the tensor is read. Large graphs are drawn in groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.groups import grouped
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.metakernels.views import View, folded_views
from tapestry_egg.quantities import BYTES
from tapestry_egg.zspace import ZRange

from .picture import Cluster, Item, Link, Picture, to_dot
from .picture_svg import Renderer, picture_svg

if TYPE_CHECKING:
    from tapestry_egg.plans.plan import Plan

#: Path of an operation -> boxes of its index space, as the reference executor takes them.
Covers = Mapping[tuple[int, ...], Sequence[ZRange]]

#: More operations than this are drawn in about so many groups; of more shards, some are drawn.
MOST_OPERATIONS, MOST_GROUPS, MOST_SHARDS = 60, 24, 16


def draw(
    graph: BlockGraph,
    path: str | Path,
    covers: Covers | None = None,
    operations: range | None = None,
    *,
    renderer: Renderer = "auto",
) -> Path:
    """Draw a graph into a file: `.svg`, or `.dot` for the text that Graphviz reads.

    Returns the path. See `graph_picture` for the rest.
    """
    from tapestry_egg.atomic import write_atomic

    dot = is_dot(path)
    picture = graph_picture(graph, covers, operations)
    text = to_dot(picture).source if dot else picture_svg(picture, renderer)
    write_atomic(Path(path), text.encode())
    return Path(path)


def is_dot(path: str | Path) -> bool:
    """Whether a picture of that name is text for Graphviz, and not SVG. Raises GraphError for
    endings of other formats."""
    ending = Path(path).suffix.lower()
    if ending not in ("", ".svg", ".dot", ".gv"):
        raise GraphError(
            f"a graph cannot be drawn as {ending}",
            where=str(path),
            hint="Call the file .svg, or .dot for Graphviz: `dot -Tpng graph.dot -o graph.png`.",
        )
    return ending in (".dot", ".gv")


def graph_picture(
    graph: BlockGraph, covers: Covers | None = None, operations: range | None = None
) -> Picture:
    """The picture of a graph, or of the operations with numbers in `operations`.

    Operations in `covers` are drawn in the shards that its boxes make, at most MOST_SHARDS one by
    one; those of a region have paths (operation, region, operation). More than MOST_OPERATIONS are
    drawn in groups (`graph/groups.py`), unless they are in `covers`. Raises GraphError for a range
    or cover outside the graph.
    """
    count = len(graph.operations)
    chosen = range(count) if operations is None else operations
    if operations is not None and (
        chosen.step != 1 or not 0 <= chosen.start <= chosen.stop <= count
    ):
        raise GraphError(
            f"operations {chosen.start}:{chosen.stop} are not among 0:{count}", where=graph.name
        )
    wanted = {} if covers is None else {k: v for k, v in covers.items() if len(v) > 1}
    drawing = _Drawing(graph, wanted)
    drawing.body(chosen)
    unknown = set(covers or ()) - drawing.met
    if unknown:
        raise GraphError(
            f"no operation at {min(unknown)} is drawn, so it has no shards", where=graph.name
        )
    part = "" if operations is None else f", those from {chosen.start} to {chosen.stop - 1} drawn"
    return Picture(
        title=graph.name,
        subtitle=f"{count} operation{'' if count == 1 else 's'}{part}",
        items=tuple(drawing.items.values()),
        links=tuple(drawing.links),
        clusters=tuple(drawing.clusters),
    )


def plan_covers(plan: Plan) -> dict[tuple[int, ...], tuple[ZRange, ...]]:
    """The blocks that a plan cuts each operation of its graph into, one per part of the mesh.

    Operations of regions are left out.
    """
    out: dict[tuple[int, ...], tuple[ZRange, ...]] = {}
    for i, (op, strategy) in enumerate(
        zip(plan.body.graph.operations, plan.body.strategies, strict=True)
    ):
        if op.regions or not any(strategy.cuts):
            continue
        boxes = [ZRange.from_shape(_signature(plan.body.graph, op).extents)]
        for d, axes in enumerate(strategy.cuts):
            if axes:
                boxes = [b for box in boxes for b in box.blocks(d, plan.mesh.parts(axes))]
        out[i,] = tuple(boxes)
    return out


def parse_cover(graph: BlockGraph, text: str) -> tuple[tuple[int, ...], tuple[ZRange, ...]]:
    """A cover as people write it: `3:m=2,k=4` cuts operation 3 into 2 by 4 equal parts.

    Dims have the names of the operation's template. Raises GraphError where there is no such
    operation or dim.
    """
    number, _, rest = text.partition(":")
    if not number.isdigit() or int(number) >= len(graph.operations):
        raise GraphError(
            f"{text!r} begins with no operation",
            where=graph.name,
            hint="Write NUMBER:DIM=PARTS,...; `tapestry-egg show` lists the operations from 0.",
        )
    op = graph.operations[int(number)]
    signature = _signature(graph, op)
    names = [d.name for d in signature.index]
    counts = [1] * len(names)
    for entry in filter(None, (e.strip() for e in rest.split(","))):
        name, _, parts = entry.partition("=")
        if name not in names or not parts.isdigit() or int(parts) < 1:
            raise GraphError(
                f"{entry!r} cuts no index dim of {op.kernel}",
                where=f"{graph.name}, operation {number}",
                hint=f"Its dims are {', '.join(names) or 'none'}; write DIM=PARTS.",
            )
        counts[names.index(name)] *= int(parts)
    boxes = ZRange.from_shape(signature.extents).sections(counts)
    return (int(number),), tuple(box for box in boxes if not box.is_empty)


def _signature(graph: BlockGraph, op: Operation) -> OperationSignature:
    types = [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs]
    return registry.signature(op.kernel, op.params, *types, len(op.regions))


# ---- building ----------------------------------------------------------------------------------


@dataclass
class _Drawing:
    """Items and links of one graph; those of regions are drawn by inner drawings into the same."""

    graph: BlockGraph
    covers: Covers
    path: tuple[int, ...] = ()
    cluster: str = ""
    items: dict[str, Item] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)
    met: set[tuple[int, ...]] = field(default_factory=set)

    def name(self, kind: str, *numbers: int) -> str:
        return "-".join([kind, *map(str, (*self.path, *numbers))])

    def body(self, chosen: range) -> None:
        """Draw the operations with these numbers, in groups if they are many."""
        covered = {p[len(self.path)] for p in self.covers if p[: len(self.path)] == self.path}
        if len(chosen) > MOST_OPERATIONS:
            self._groups(chosen, covered)
        else:
            if len(chosen) == len(self.graph.operations):
                for v in (*self.graph.inputs, *self.graph.outputs):
                    self._tensor(v)  # those that no operation reads or makes are drawn too
            views = self._views(chosen, covered)
            for i in chosen:
                made = self.graph.operations[i].outputs
                if not made or any(v not in views for v in made):
                    self._operation(i, views)
        self.links = list(dict.fromkeys(self.links))

    def _views(self, chosen: range, covered: set[int]) -> dict[int, tuple[int, View]]:
        """Values that need no box, being views that are only read: value -> (base, view)."""
        maker = self.graph.producers()
        shown = set(self.graph.outputs)
        shown.update(v for op in self.graph.operations if op.regions for v in op.inputs)
        return {
            w: found
            for w, found in folded_views(self.graph).items()
            if w not in shown and maker[w] in chosen and maker[w] not in covered
        }

    def _tensor(self, v: int) -> str:
        id = self.name("value", v)
        if id not in self.items:
            type_ = self.graph.values[v]
            graph = self.graph
            constant = v in graph.constants
            own = self._called(v)
            roles = [
                word
                for word, values in (("input", graph.inputs), ("output", graph.outputs))
                if v in values
            ]
            title = f"{own}: {type_}, {type_.nbytes} bytes" + "".join(f", {r}" for r in roles)
            lines = (own, str(type_))
            kind: Literal["constant", "tensor"] = "constant" if constant else "tensor"
            self.items[id] = Item(id, kind, lines, title, self.cluster)
        return id

    def _called(self, v: int) -> str:
        """The name of a value in the program, else its number; a scalar constant's own value."""
        graph = self.graph
        if self._scalar_constant(v):
            return str(graph.constants[v])
        if v in graph.inputs and graph.input_names:
            return graph.input_names[graph.inputs.index(v)] or f"%{v}"
        if v in graph.outputs and graph.output_names:
            alone = "output" if len(graph.outputs) == 1 else f"%{v}"
            return graph.output_names[graph.outputs.index(v)] or alone
        return f"%{v}"

    def _groups(self, chosen: range, covered: set[int]) -> None:
        """Operations in groups, with arrows from group to group.

        What enters a group from outside is one box at every group that reads it, and so is what
        leaves; only what a covered operation reads or makes has a box of its own.
        """
        graph = self.graph
        home: dict[int, str] = {}  # operation -> the box that stands for it
        for scope, numbers in grouped(graph, chosen, covered, MOST_GROUPS):
            if numbers[0] in covered:
                self._operation(numbers[0], {})
                continue
            item = self._group(scope, numbers)
            self.items[item.id] = item
            home.update(dict.fromkeys(numbers, item.id))
        maker, readers, leaving = graph.producers(), graph.readers(), set(graph.outputs)
        entering: dict[str, list[int]] = {}
        leaving_of: dict[str, list[int]] = {}
        between: dict[tuple[str, str], list[int]] = {}
        for v in range(len(graph.values)):
            ends = [i for i in (maker.get(v, -1), *readers[v]) if i in chosen]
            if not ends or self._scalar_constant(v):
                continue
            source = home.get(maker.get(v, -1), "")
            targets = tuple(dict.fromkeys(home[i] for i in readers[v] if i in home))
            if any(i in covered for i in ends):
                if source:
                    self.links.append(Link(source, self._tensor(v)))
                self.links.extend(Link(self._tensor(v), t) for t in targets)
                continue
            for target in targets:
                if not source:
                    entering.setdefault(target, []).append(v)
                elif target != source:
                    between.setdefault((source, target), []).append(v)
            if source and (v in leaving or any(i not in chosen for i in readers[v])):
                leaving_of.setdefault(source, []).append(v)
        for target, values in entering.items():
            self.links.append(Link(self._bundle(target, values, "enter"), target))
        for source, values in leaving_of.items():
            self.links.append(Link(source, self._bundle(source, values, "leave")))
        for (source, target), values in between.items():
            title = ", ".join(f"%{v} {graph.values[v]}" for v in values)
            label = str(graph.values[values[0]]) if len(values) == 1 else f"{len(values)} tensors"
            self.links.append(Link(source, target, label, title))

    def _bundle(self, group: str, values: Sequence[int], verb: str) -> str:
        """A box for the tensors that enter or leave a group of operations."""
        id = f"{group}-{verb}s"
        types = [self.graph.values[v] for v in values]
        size = BYTES.format(sum(t.nbytes for t in types))
        title = ", ".join(f"{self._called(v)} {t}" for v, t in zip(values, types, strict=True))
        one = (self._called(values[0]), str(types[0]))
        lines = one if len(values) == 1 else (f"{len(values)} tensors", size)
        self.items[id] = Item(id, "tensor", lines, f"{verb}: {title}", self.cluster)
        return id

    def _group(self, scope: str, numbers: Sequence[int]) -> Item:
        ops = [self.graph.operations[i] for i in numbers]
        kernels = Counter(op.kernel for op in ops)
        most = [f"{k} ×{n}" if n > 1 else k for k, n in kernels.most_common(3)]
        if len(kernels) > 3:
            most.append("…")
        head = _short(scope) if scope else f"operations {numbers[0]}-{numbers[-1]}"
        count = f"{len(ops)} operation{'' if len(ops) == 1 else 's'}"
        title = f"{scope}: operations {numbers[0]} to {numbers[-1]}"
        if scope:
            count += f", {numbers[0]}-{numbers[-1]}"
        lines = (head, count, ", ".join(most))
        return Item(self.name("group", numbers[0]), "group", lines, title, self.cluster)

    def _scalar_constant(self, v: int) -> bool:
        return v in self.graph.constants and self.graph.values[v].rank == 0

    def _operation(self, i: int, views: Mapping[int, tuple[int, View]]) -> None:
        op, path = self.graph.operations[i], (*self.path, i)
        self.met.add(path)
        if op.regions:
            self._region(i, op, path)
            return
        signature = _signature(self.graph, op)
        cover = self.covers.get(path)
        place = f", {op.source}" if op.source.file else ""
        title = f"operation {i}: {op.kernel}{place}"
        if cover is None:
            id = self.name("operation", i)
            index = _dims(signature)
            lines = (op.kernel, index) if index else (op.kernel,)
            self.items[id] = Item(id, "operation", lines, title, self.cluster)
            self._ends(id, op, signature, ZRange.from_shape(signature.extents), views, False)
            return
        frame = self.name("shards", i)
        self.clusters.append(Cluster(frame, f"{op.kernel} {_dims(signature)}", self.cluster))
        shown = list(cover) if len(cover) <= MOST_SHARDS else list(cover[: MOST_SHARDS - 1])
        for k, box in enumerate(shown):
            id = self.name("shard", i, k)
            lines = (op.kernel, _range(box))
            self.items[id] = Item(id, "shard", lines, f"{title}, {box}", frame)
            self._ends(id, op, signature, box, views, True)
        rest = list(cover[len(shown) :])
        if rest:
            id, box = self.name("shard", i, len(shown)), ZRange.bounding(rest)
            lines = (f"{len(rest)} more", f"within {_range(box)}")
            self.items[id] = Item(id, "shard", lines, f"{title}, {len(rest)} more shards", frame)
            self._ends(id, op, signature, box, views, True)

    def _ends(
        self,
        id: str,
        op: Operation,
        signature: OperationSignature,
        box: ZRange,
        views: Mapping[int, tuple[int, View]],
        always: bool,
    ) -> None:
        """Arrows between an operation or shard and its tensors, with the boxes of its index box."""
        for p, v in enumerate(op.inputs):
            read = signature.operand_box(p, box)
            label = _label(read, self.graph.values[v], always)
            title = f"reads {read} of operand {p}, {self.graph.values[v]}"
            if self._scalar_constant(views[v][0] if v in views else v):
                continue  # a number in every second operation says little
            if v in views:
                base, view = views[v]
                how = f"as {list(view.shape)} by {view.show()}"
                of = view.projection().image(read)
                label = f"{_range(of)} {how}" if always else how
                title += f", which is %{base} {how}"
                v = base
            self.links.append(Link(self._tensor(v), id, label, title))
        monoids = {d.monoid for d in signature.index if d.role == "reduce" and d.monoid}
        for q, w in enumerate(op.outputs):
            made = signature.outputs[q].image(box)
            label = _label(made, self.graph.values[w], always)
            title = f"writes {made} of output {q}, {self.graph.values[w]}"
            cut = [
                d
                for d, dim in enumerate(signature.index)
                if dim.role == "reduce" and box.shape[d] != dim.size
            ]
            if cut:
                label += f" +{', '.join(sorted(map(str, monoids)))}"
                title += ", a partial value"
            self.links.append(Link(id, self._tensor(w), label, title))

    def _region(self, i: int, op: Operation, path: tuple[int, ...]) -> None:
        """A frame with the nested graphs; operands lead to their inputs, their outputs to ours."""
        frame = self.name("region", i)
        words = {"scan": f"scan, {op.params.get('length', '?')} steps"}.get(op.kernel, op.kernel)
        self.clusters.append(Cluster(frame, words, self.cluster))
        if op.kernel == "cond":
            choice = self.name("operation", i)
            title = f"operation {i}: runs the branch of this number"
            self.items[choice] = Item(choice, "region", ("branch",), title, frame)
            self.links.append(Link(self._tensor(op.inputs[0]), choice))
        for r, (inner, begin) in enumerate(zip(op.regions, _operands_of(op), strict=True)):
            home = frame
            if len(op.regions) > 1:
                home = f"{frame}-{r}"
                part = {"while": ("condition", "body")}.get(op.kernel)
                self.clusters.append(Cluster(home, part[r] if part else f"branch {r}", frame))
            nested = _Drawing(
                inner,
                self.covers,
                (*path, r),
                home,
                self.items,
                self.links,
                self.clusters,
                self.met,
            )
            nested.body(range(len(inner.operations)))
            self.links = nested.links
            for outer, v in zip(begin, inner.inputs, strict=True):
                target = nested.name("value", v)
                if target in self.items and not self._scalar_constant(outer):
                    link = Link(self._tensor(outer), target, "", f"enters {words}", True)
                    self.links.append(link)
            if op.kernel == "while" and r == 0:
                continue
            for outer, v in zip(op.outputs, inner.outputs, strict=True):
                source = nested._tensor(v)
                link = Link(source, self._tensor(outer), "", f"leaves {words}", True)
                self.links.append(link)


def _operands_of(op: Operation) -> list[Sequence[int]]:
    """Per region, the operands that are its inputs, in order."""
    if op.kernel == "while":
        n, m = op.params["cond_nconsts"], op.params["body_nconsts"]
        carry = op.inputs[n + m :]
        return [(*op.inputs[:n], *carry), (*op.inputs[n : n + m], *carry)]
    if op.kernel == "cond":
        return [op.inputs[1:]] * len(op.regions)
    return [op.inputs] * len(op.regions)


def _dims(signature: OperationSignature) -> str:
    """The index space in short: `m 8, n 32, k 16 sum`."""
    parts = [
        f"{d.name} {d.size}" + (f" {d.monoid}" if d.monoid else "") for d in signature.index[:6]
    ]
    return ", ".join(parts) + (", …" if len(signature.index) > 6 else "")


def _range(box: ZRange) -> str:
    return str(box).removeprefix("zr")


def _label(box: ZRange, tensor: TensorType, always: bool) -> str:
    if box == ZRange.from_shape(tensor.shape) and not always:
        return ""
    return _range(box)


def _short(text: str, most: int = 42) -> str:
    return text if len(text) <= most else "…" + text[-most + 1 :]
