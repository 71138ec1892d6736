"""A front as the data of its report's page: what is alike in several plans is there once."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapestry_egg.columns import WIDEST, lines_of, short_paths, starred
from tapestry_egg.extract.certify.certificate import ground_of
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.verdict import Certificate
from tapestry_egg.extract.front.front import Front
from tapestry_egg.machine.objectives import COSTS, PEAK_BYTES
from tapestry_egg.plans.plan import Plan
from tapestry_egg.printable import printable
from tapestry_egg.rules import load_books
from tapestry_egg.show.account import Account, sent_by_line
from tapestry_egg.show.pages import plan_pages
from tapestry_egg.show.picture import Page
from tapestry_egg.show.picture_svg import DrawnPage, drawn_page, pages_svg
from tapestry_egg.show.text import plan_text

from .runs import Run

#: Parts of a step that one bar of the page, and one point of its memory curve, may be short of.
_BINS = 240


class Interned:
    """Texts by number, each kept once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        text = printable(text)
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


@dataclass
class _Page:
    """What plans of one front share."""

    front: Front
    texts: Interned = field(default_factory=Interned)
    grounds: dict[int, Ground] = field(default_factory=dict)
    laws: dict[str, str] = field(default_factory=dict)


def page_data(
    front: Front, runs: Mapping[str, Run] | None = None, baselines: Sequence[Plan] = ()
) -> dict[str, Any]:
    """All that the page shows, as plain data; amounts are in base units, texts by number in
    `texts`; of plans that ran, by name, how; `kind` says what is no plan of the front."""
    page = _Page(front)
    plans = [*front.every, *baselines]
    kinds = ["as given" if p is front.original else "" for p in front.every]
    kinds += ["baseline"] * len(baselines)
    page.laws = _laws(plans)
    ran = {name: run.data() for name, run in (runs or {}).items()}
    return {
        "objectives": [[o.name, o.title, o.quantity.base] for o in COSTS],
        "usable": front.usable_bytes,
        "peak": [o.name for o in COSTS].index(PEAK_BYTES.name),
        "plans": [
            _plan(page, p) | {"drawn": drawn, "run": ran.get(p.name), "kind": kind}
            for p, drawn, kind in zip(plans, packed(plans), kinds, strict=True)
        ],
        "texts": page.texts.texts,
    }


def _plan(page: _Page, plan: Plan) -> dict[str, Any]:
    text = page.texts
    account = None
    if plan.origin is not None:
        ground = page.grounds.setdefault(id(plan.graph), ground_of(plan))
        account = Account(plan, ground=ground)
    data: dict[str, Any] = {
        "name": printable(plan.name),
        "mesh": printable(str(plan.mesh)),
        "axes": [[printable(n), s] for n, s in zip(plan.mesh.names, plan.mesh.sizes, strict=True)],
        "costs": [o.value(plan) for o in COSTS],
        "bound": plan.bound,
        "gap": plan.gap_shown,
        "fits": page.front.fits(plan),
        "text": [text(line) for line in _lines(plan, account)],
        "inputs": _inputs(page, plan),
        "moves": _moves(page, plan),
        "rules": [
            [text(str(step)), *(text(f"{r}: {page.laws[r]}") for r in step.rules if r in page.laws)]
            for step in plan.steps
        ],
        "parts": [],
    }
    if account is not None:
        data |= _counted(page, account)
    return data


def _lines(plan: Plan, account: Account | None) -> list[str]:
    """What `explain` says of a plan, in lines of one width wherever the page is written."""
    with lines_of(WIDEST):
        return plan_text(plan, account=account).split("\n")


def _inputs(page: _Page, plan: Plan) -> list[list[Any]]:
    """Arguments: path, type, shape, and per dim the numbers of the axes that cut it; of those alike
    but for numbers in their path the first, with their count."""
    graph = plan.graph
    names = graph.input_names or [f"%{v}" for v in graph.inputs]
    found: dict[tuple[Any, ...], list[Any]] = {}
    for v, name, layout in zip(graph.inputs, names, plan.in_shardings, strict=True):
        tensor = graph.values[v]
        key = (starred(name), tensor.shape, tensor.dtype, layout)
        if key in found:
            found[key][-1] += 1
        else:
            row = [page.texts(name), page.texts(str(tensor)), tensor.shape, layout.dims, 1]
            found[key] = row
    return list(found.values())


def _moves(page: _Page, plan: Plan) -> list[list[float]]:
    """Collectives of one kind, axes, tensor type and line: (what, times, bytes sent)."""
    paths = short_paths({c.source.rpartition(":")[0] for c in plan.collectives} - {""})
    found: dict[int, list[float]] = {}
    for (kind, axes, type_, line), (runs, sent) in sent_by_line(plan, paths).items():
        what = f"{kind}({axes}) of {type_}{f' at {line}' if line else ''}"
        found[page.texts(what)] = [runs, sent]
    return [[k, *row] for k, row in found.items()]


def _counted(page: _Page, account: Account) -> dict[str, Any]:
    """Kernels and copies by name, what runs when, and the bytes alive."""
    walk, found = account.walk, account.found
    sums: dict[int, list[float]] = {}
    for p in (*account.kernels, *account.copies):
        if p.seconds > 0.0:
            row = sums.setdefault(page.texts(p.name), [0.0] * 4)
            for k, x in enumerate((p.seconds, p.hbm_bytes, p.wire_bytes, p.joules)):
                row[k] += x
    streams, step = walk.ground.streams, found.step
    bars: dict[str, list[tuple[float, float, str]]] = {}
    for lane in streams.lanes(step):
        bars.setdefault(lane.stream, []).append((lane.start, lane.end, lane.name))
    begins = streams.at(step, [begin for _, begin, _ in step.runs])
    curve = [
        (at, max(found.profile[2 * u : 2 * u + 2]))
        for (u, _, _), at in zip(step.runs, begins, strict=True)
    ]
    return {
        "parts": [[k, *(_round(x) for x in row)] for k, row in sums.items()],
        "lanes": [
            [
                stream,
                [[_round(a), _round(b), page.texts(name)] for a, b, name in _merged(some, found)],
            ]
            for stream, some in bars.items()
        ],
        "memory": [[_round(at), int(amount)] for at, amount in _coarse(curve, found.seconds)],
        "holds": [[kind, amount] for kind, amount in account.peak.by_kind().items()],
    }


def _round(amount: float) -> float:
    """Four digits, as more are not seen."""
    return float(f"{amount:.4g}")


def _merged(
    bars: Sequence[tuple[float, float, str]], found: Certificate
) -> Iterable[tuple[float, float, str]]:
    """Bars of which neighbours that no eye tells apart are one: `14 kernels, add and others`."""
    least = found.seconds / _BINS
    group: list[tuple[float, float, str]] = []

    def whole() -> tuple[float, float, str]:
        longest = max(group, key=lambda b: b[1] - b[0])[2]
        name = longest if len(group) == 1 else f"{longest} and {len(group) - 1} others"
        return group[0][0], group[-1][1], name

    for bar in bars:
        close = group and bar[0] - group[-1][1] < least / 4
        if group and not (close and bar[1] - group[0][0] < least):
            yield whole()
            group = []
        group.append(bar)
    if group:
        yield whole()


def _coarse(curve: Sequence[tuple[float, float]], seconds: float) -> Iterable[tuple[float, float]]:
    """The curve with one point, the highest, in every bin."""
    bins: dict[int, tuple[float, float]] = {}
    for at, amount in curve:
        k = int(at / seconds * _BINS) if seconds else 0
        if k not in bins or amount > bins[k][1]:
            bins[k] = (at, amount)
    return bins.values()


def _laws(plans: Sequence[Plan]) -> dict[str, str]:
    """The laws of the rules that plans took, where their books are at hand."""
    from tapestry_egg.errors import TapestryError
    from tapestry_egg.rules.language.book import book_names

    wanted = {rule for p in plans for rule in p.rules}
    if not wanted:
        return {}
    own = {book for p in plans if p.origin for book in p.origin.books}
    try:
        books = load_books([*book_names(), *sorted(own)])
    except TapestryError:  # a book of the user's own may have moved since
        books = load_books(book_names())
    found = {rule.name: " ".join(rule.law.split()) for book in books for rule in book.rules}
    return {name: law for name, law in found.items() if name in wanted and law}


# Pictures of plans, packed for a page: as many of what boxes open as there is room for.


#: Characters that the pictures of all plans of a page may take, packed.
ROOM = 600_000


def packed(plans: Sequence[Plan]) -> list[tuple[str, int]]:
    """Per plan its pictures, an SVG deflated and in base64, and how many were left out.

    The picture of the whole program is always there, and then what its boxes open, and so on, while
    the plan's share of `ROOM` lasts.
    """
    return [_packed(plan, ROOM // max(1, len(plans))) for plan in plans]


def _packed(plan: Plan, room: int) -> tuple[str, int]:
    pages = _by_depth(plan_pages(plan))
    by = {page.id: page for page in pages}
    kept: dict[str, DrawnPage] = {}
    size = 0
    for page in pages:
        if page.parent and page.parent not in kept:
            continue
        one = drawn_page(page, by)
        more = len(zlib.compress(one.text.encode(), 9)) * 4 // 3
        if not kept or size + more <= room:
            kept[page.id] = one
            size += more
        if size > 0.9 * room:
            break
    text = b64encode(zlib.compress(pages_svg([*kept.values()]).encode(), 9)).decode()
    return text, len(pages) - len(kept)


def _by_depth(pages: Sequence[Page]) -> list[Page]:
    """The pages such that each comes after the one that opens it, and shallow ones come first."""
    depth: dict[str, int] = {"": -1}
    parents = {page.id: page.parent for page in pages}

    def of(id: str) -> int:
        if id not in depth:
            depth[id] = of(parents[id]) + 1
        return depth[id]

    return sorted(pages, key=lambda page: of(page.id))
