"""egglog's e-graph as the stages use it: text in small pieces, facts as TSV, tables out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import RuleError
from .rules.book import Rule, commands


@dataclass(frozen=True)
class Budget:
    """How far saturation may go: the limit reached first ends it, and what is there stays."""

    iterations: int = 40
    rows: int = 4_000_000
    seconds: float = 60.0


class EGraph:
    """egglog's e-graph through its bindings."""

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

    def add_rule(self, rule: Rule, forms: Sequence[str]) -> None:
        """Declare a rule by the egglog forms that stand for it.

        Raises RuleError, with the rule's place in its file, when egglog refuses one.
        """
        for i, form in enumerate(forms):
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
            if not self.step(ruleset):
                return True, i
            if self.rows() > budget.rows or time.perf_counter() - begin > budget.seconds:
                return False, i + 1
        return False, budget.iterations

    def step(self, ruleset: str) -> bool:
        """Run one iteration of a ruleset; whether it changed anything."""
        (output,) = self.run(f"(run {ruleset} 1)")
        for name, count in output.report.num_matches_per_rule.items():
            rule = name.split("#")[0]
            self.matches[rule] = self.matches.get(rule, 0) + count
        return bool(output.report.updated)

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
