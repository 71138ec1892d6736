"""Saturate: run the rules over the facts in egglog, and read back what they derived."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tapestry_egg.egraphs import run
from tapestry_egg.egraphs.process import Budget as Budget
from tapestry_egg.egraphs.run import Round
from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.graph.layout import Layout
from tapestry_egg.rules.language.book import RuleBook, commands

from .encode import Encoding, all_facts


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One derived way to run an operation: axis lists over index dims, and the ports' layouts."""

    cuts: tuple[tuple[int, ...], ...]  # per index dim: mesh axes, major to minor
    passes: tuple[tuple[int, tuple[int, ...]], ...]  # (passage group, axes)
    layouts: tuple[Layout, ...]  # operands, then outputs


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """One derived elementary change of layout."""

    source: Layout
    target: Layout
    kind: str
    axes: tuple[int, ...]
    dim: int  # tensor dim, or -1
    other: int  # second tensor dim (all-to-all), monoid number (reductions), or -1


@dataclass(frozen=True)
class Saturated:
    """What the rules derived: strategies per signature, and changes of layout. `rows`, `matches`
    and the timeline are of what was derived here, and not taken from another form. It has only
    `some` strategies where others were left out afterwards."""

    encoding: Encoding
    strategies: tuple[tuple[StrategyRow, ...], ...]
    changes: tuple[ChangeRow, ...]
    saturated: bool
    iterations: int
    rows: int
    seconds: float
    matches: dict[str, int] = field(default_factory=dict)
    timeline: tuple[Tick, ...] = ()
    by_clock: bool = False  # whether time ended it before another budget did
    some: bool = False


_ORDER = ("fold", "sharding", "collectives")
_TABLES = (
    "strategy",
    "layout",
    "change",
    "Whole",
    "Cut",
    "Beside",
    "Digits",
    "Points",
    "Below",
    "Pass",
)


def saturate(
    encoding: Encoding,
    books: Sequence[RuleBook],
    budget: Budget | None = None,
    before: Sequence[Saturated] = (),
) -> Saturated:
    """Load the facts, run every ruleset to its fixpoint or the budget, export the derivations.

    What was derived `before` to the fixpoint, by the same books, is taken from there: no rule reads
    facts of two signatures, so that what follows from one is the same in every program of the same
    layouts. Raises RuleError, with the rule's place in its file, when egglog refuses a rule.
    """
    budget = budget or Budget()
    begin = time.perf_counter()
    like = [s for s in before if s.saturated and s.encoding.algebra == encoding.algebra]
    known = {
        signature: rows
        for s in like
        for signature, rows in zip(s.encoding.signatures, s.strategies, strict=True)
    }
    new = [s for s in encoding.signatures if s not in known]
    if like and len(new) < len(encoding.signatures):
        own = None
        if new:
            facts = all_facts(encoding.algebra, new)
            own = saturate(replace(encoding, signatures=tuple(new), facts=facts), books, budget)
            known.update(zip(new, own.strategies, strict=True))
        return Saturated(
            encoding=encoding,
            strategies=tuple(known[s] for s in encoding.signatures),
            changes=like[0].changes,
            saturated=own is None or own.saturated,
            iterations=0 if own is None else own.iterations,
            rows=0 if own is None else own.rows,
            seconds=time.perf_counter() - begin,
            matches={} if own is None else own.matches,
            timeline=() if own is None else own.timeline,
            by_clock=own is not None and own.by_clock,
        )
    rules = [
        (rule, [form for _, _, form in commands(rule.egg)])
        for book in books
        for rule in book.rules
        if rule.ruleset in _ORDER
    ]
    found = run.saturate(rules, encoding.facts, [Round((r,)) for r in _ORDER], _TABLES, budget)
    return Saturated(
        encoding=encoding,
        strategies=_strategies(encoding, found.tables, found.saturated),
        changes=_changes(encoding, found.tables),
        saturated=found.saturated,
        iterations=found.iterations,
        rows=found.rows,
        seconds=time.perf_counter() - begin,
        matches=found.matches,
        timeline=found.timeline,
        by_clock=found.by_clock,
    )


def _strategies(
    encoding: Encoding, tables: dict[str, list[tuple[Any, ...]]], finished: bool
) -> tuple[tuple[StrategyRow, ...], ...]:
    """Complete strategies per signature: those for which every port has a layout."""
    lists = encoding.algebra.axis_lists
    layouts = encoding.algebra.layouts
    built: dict[Any, tuple[dict[int, tuple[int, ...]], tuple[tuple[int, tuple[int, ...]], ...]]]
    built = {row[-1]: ({}, ()) for row in tables["Whole"]}
    parts = {row[-1]: ("cut", row[:-1]) for row in tables["Cut"]}
    parts |= {row[-1]: ("cut", row[:-1]) for row in tables["Beside"]}
    below = {row[-1]: row[:-1] for row in tables["Points"]}
    below |= {row[-1]: row[:-1] for row in tables["Below"]}
    parts |= {row[-1]: ("digits", row[:-1]) for row in tables["Digits"]}
    parts |= {row[-1]: ("pass", row[:-1]) for row in tables["Pass"]}

    def digits(token: Any) -> dict[int, tuple[int, ...]]:
        *above, number, which = below[token]
        return {**(digits(above[0]) if above else {}), number: lists[which]}

    def build(token: Any) -> Any:
        if token not in built:
            kind, (inner, *rest) = parts[token]
            cuts, passes = build(inner)
            if kind == "digits":
                built[token] = ({**cuts, **digits(rest[0])}, passes)
            elif kind == "cut":
                built[token] = ({**cuts, rest[0]: lists[rest[1]]}, passes)
            else:
                built[token] = (cuts, (*passes, (rest[0], lists[rest[1]])))
        return built[token]

    at: dict[tuple[int, Any], dict[int, int]] = {}
    for s, p, token, layout in tables["layout"]:
        at.setdefault((s, token), {})[p] = layout
    out: list[dict[StrategyRow, None]] = [{} for _ in encoding.signatures]
    for s, token, _, _, *_ in tables["strategy"]:
        signature = encoding.signatures[s]
        ports = len(signature.inputs) + len(signature.outputs)
        found = at.get((s, token), {})
        if len(found) != ports:
            continue
        cuts, passes = build(token)
        row = StrategyRow(
            tuple(cuts.get(d, ()) for d in range(len(signature.index))),
            passes,
            tuple(layouts[found[p]] for p in range(ports)),
        )
        out[s][row] = None
    for s, signature in enumerate(encoding.signatures):
        if not out[s] and not finished:  # a budget ended it first: it runs everywhere, uncut
            types = (*signature.input_types, *signature.output_types)
            whole = tuple(Layout.replicated(t.rank) for t in types)
            out[s][StrategyRow(tuple(() for _ in signature.index), (), whole)] = None
    order = encoding.algebra.number
    return tuple(
        tuple(sorted(rows, key=lambda r: ([order[x] for x in r.layouts], r.cuts, r.passes)))
        for rows in out
    )


def _changes(encoding: Encoding, tables: dict[str, list[tuple[Any, ...]]]) -> tuple[ChangeRow, ...]:
    layouts, lists = encoding.algebra.layouts, encoding.algebra.axis_lists
    rows = sorted(r[:6] for r in tables["change"])
    return tuple(
        ChangeRow(layouts[a], layouts[b], kind, lists[which], k, k2)
        for a, b, kind, which, k, k2 in rows
    )
