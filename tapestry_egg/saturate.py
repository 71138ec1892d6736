"""Saturate: run the rules over the facts in egglog, and read back what they derived."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .encode import Encoding
from .errors import RuleError
from .layout import Layout
from .rules.book import RuleBook, commands, schema


@dataclass(frozen=True)
class Budget:
    """How far saturation may go; whichever limit is reached first ends it, keeping what is there."""

    iterations: int = 40
    rows: int = 4_000_000
    seconds: float = 60.0


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
    """What the rules derived: strategies per signature, changes of layout, classes of values."""

    encoding: Encoding
    strategies: tuple[tuple[StrategyRow, ...], ...]
    changes: tuple[ChangeRow, ...]
    class_of: tuple[int, ...]  # flat value -> class
    saturated: bool
    iterations: int
    rows: int
    seconds: float
    matches: dict[str, int] = field(default_factory=dict)


_LOAD_NODES = """
(ruleset load)
(rule ((leaf v)) ((union (N v) (Leaf v))) :ruleset load)
(rule ((node0 v s)) ((union (N v) (Op0 s))) :ruleset load)
(rule ((node1 v s a)) ((union (N v) (Op1 s (N a)))) :ruleset load)
(rule ((node2 v s a b)) ((union (N v) (Op2 s (N a) (N b)))) :ruleset load)
(rule ((node3 v s a b c)) ((union (N v) (Op3 s (N a) (N b) (N c)))) :ruleset load)
(rule ((node4 v s a b c d)) ((union (N v) (Op4 s (N a) (N b) (N c) (N d)))) :ruleset load)
"""
_ORDER = ("fold", "algebra", "fusion", "reduction", "sharding", "collectives")


def saturate(
    encoding: Encoding, books: Sequence[RuleBook], budget: Budget | None = None
) -> Saturated:
    """Load the facts, run every ruleset to its fixpoint or the budget, export the derivations.

    Raises RuleError, with the rule's place in its file, when egglog refuses a rule.
    """
    budget = budget or Budget()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tapestry-egg-") as folder:
        egraph = _EGraph(Path(folder))
        egraph.declare(schema())
        egraph.declare(_LOAD_NODES)
        for book in books:
            egraph.add_book(book)
        for name, rows in encoding.facts.items():
            egraph.load(name, rows)
        finished = egraph.fixpoint("load", budget, begin)
        done = 0
        for ruleset in _ORDER:
            stopped, ran = egraph.fixpoint(ruleset, budget, begin)
            finished = (finished[0] and stopped, 0)
            done += ran
        tables = egraph.tables(("strategy", "layout", "change", "Whole", "Cut", "Pass", "N"))
        return Saturated(
            encoding=encoding,
            strategies=_strategies(encoding, tables),
            changes=_changes(encoding, tables),
            class_of=_classes(encoding, tables),
            saturated=finished[0],
            iterations=done,
            rows=egraph.rows(),
            seconds=time.perf_counter() - begin,
            matches=egraph.matches,
        )


class _EGraph:
    """egglog's e-graph through its bindings: text in small pieces, facts as TSV, frozen tables out."""

    def __init__(self, folder: Path) -> None:
        from egglog import bindings

        self.folder = folder
        self.egraph = bindings.EGraph(fact_directory=str(folder))
        self.matches: dict[str, int] = {}

    def run(self, text: str) -> list[Any]:
        return list(self.egraph.run_program(*self.egraph.parse_program(text)))

    def declare(self, text: str) -> None:
        # One command at a time: parsing is quadratic in the length of the text.
        for _, _, form in commands(text):
            self.run(form)

    def add_book(self, book: RuleBook) -> None:
        for rule in book.rules:
            for i, (_, _, form) in enumerate(commands(rule.egg)):
                if not form.startswith("(relation"):
                    form = f'{form[:-1]} :ruleset {rule.ruleset} :name "{rule.name}#{i}")'
                try:
                    self.run(form)
                except Exception as e:
                    raise RuleError(
                        f"rule {rule.name!r} is refused by egglog: {e}",
                        where=rule.where,
                        hint="The relations that rules may use are declared in rules/schema.egg.",
                    ) from None

    def load(self, name: str, rows: Sequence[tuple[int | str, ...]]) -> None:
        if not rows:
            return
        path = self.folder / f"{name}.tsv"
        path.write_text("".join("\t".join(map(str, r)) + "\n" for r in rows), encoding="utf-8")
        self.run(f'(input {name} "{name}.tsv")')

    def fixpoint(self, ruleset: str, budget: Budget, begin: float) -> tuple[bool, int]:
        """Run one ruleset, an iteration at a time, until nothing changes or the budget is spent."""
        for i in range(budget.iterations):
            (output,) = self.run(f"(run {ruleset} 1)")
            report = output.report
            for name, count in report.num_matches_per_rule.items():
                rule = name.split("#")[0]
                self.matches[rule] = self.matches.get(rule, 0) + count
            if not report.updated:
                return True, i
            if self.rows() > budget.rows or time.perf_counter() - begin > budget.seconds:
                return False, i + 1
        return False, budget.iterations

    def rows(self) -> int:
        return sum(count for _, count in self.run("(print-size)")[0].sizes)

    def tables(self, names: Sequence[str]) -> dict[str, list[tuple[Any, ...]]]:
        """Rows of the named tables: inputs, then output; numbers and strings as themselves, terms
        as opaque class tokens."""
        frozen = self.egraph.freeze().functions
        memo: dict[tuple[str, Any], Any] = {}

        def read(sort: str, value: Any) -> Any:
            key = (sort, value)
            if key not in memo:
                if sort == "i64":
                    memo[key] = self.egraph.value_to_i64(value)
                elif sort == "String":
                    memo[key] = self.egraph.value_to_string(value)
                else:
                    memo[key] = key
            return memo[key]

        out: dict[str, list[tuple[Any, ...]]] = {}
        for name in names:
            table = frozen[name]
            sorts = table.input_sorts
            out[name] = [
                (
                    *(read(s, v) for s, v in zip(sorts, row.inputs, strict=True)),
                    read(table.output_sort, row.output),
                )
                for row in table.rows
                if not row.subsumed
            ]
        return out


def _strategies(
    encoding: Encoding, tables: dict[str, list[tuple[Any, ...]]]
) -> tuple[tuple[StrategyRow, ...], ...]:
    """Complete strategies per signature: those for which every port has a layout."""
    lists = encoding.algebra.axis_lists
    layouts = encoding.algebra.layouts
    built: dict[Any, tuple[dict[int, tuple[int, ...]], tuple[tuple[int, tuple[int, ...]], ...]]]
    built = {row[-1]: ({}, ()) for row in tables["Whole"]}
    parts = {row[-1]: ("cut", row[:-1]) for row in tables["Cut"]}
    parts |= {row[-1]: ("pass", row[:-1]) for row in tables["Pass"]}

    def build(token: Any) -> Any:
        if token not in built:
            kind, (inner, number, which) = parts[token]
            cuts, passes = build(inner)
            if kind == "cut":
                built[token] = ({**cuts, number: lists[which]}, passes)
            else:
                built[token] = (cuts, (*passes, (number, lists[which])))
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


def _classes(encoding: Encoding, tables: dict[str, list[tuple[Any, ...]]]) -> tuple[int, ...]:
    """Class number of every flat value; values in one class are equal."""
    token = {row[0]: row[-1] for row in tables["N"]}
    numbers: dict[Any, int] = {}
    return tuple(
        numbers.setdefault(token.get(v, ("alone", v)), len(numbers))
        for v in range(len(encoding.program.types))
    )
