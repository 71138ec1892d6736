"""The timeline of saturation: which rules fired when, how the e-graph grew, and where time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tapestry_egg.printable import printable

# Rules of one iteration that a table names, those that matched most.
_NAMED = 4


@dataclass(frozen=True)
class Tick:
    """One iteration of a ruleset: rows afterwards, seconds that it took, and how often each rule
    matched, by the rules' own names, in their order. `subject` is what was saturated: `algebra`
    (the program), or one of its forms on a mesh shape. Seconds differ from run to run: a file of a
    front does not hold them (zero)."""

    ruleset: str
    rows: int
    seconds: float = field(default=0.0, compare=False)
    matches: dict[str, int] = field(default_factory=dict)
    subject: str = ""


def timeline_rows(timeline: Sequence[Tick]) -> list[tuple[str, str, str, str, str, str]]:
    """What was saturated, its iteration, the ruleset, rows, seconds, and rules with their matches;
    one row for each iteration in which some rule matched."""
    out = []
    number: dict[tuple[str, str], int] = {}
    for tick in timeline:
        key = (tick.subject, tick.ruleset)
        number[key] = number.get(key, 0) + 1
        if not tick.matches:
            continue
        often = sorted(tick.matches.items(), key=lambda item: (-item[1], item[0]))
        words = [f"{name} {count}" for name, count in often[:_NAMED]]
        if len(often) > _NAMED:
            rest = often[_NAMED:]
            words.append(f"{len(rest)} more rules {sum(count for _, count in rest)}")
        out.append(
            (
                tick.subject,
                tick.ruleset,
                str(number[key]),
                f"{tick.rows:,}".replace(",", " "),
                f"{tick.seconds:.3f}" if tick.seconds else "",
                ", ".join(words),
            )
        )
    return out


#: The titles of the columns of `timeline_rows`.
TITLES = ("saturated", "ruleset", "iteration", "rows", "seconds", "rules and their matches")


def timeline_text(timeline: Sequence[Tick]) -> str:
    """The timeline as a table of plain text."""
    table = [TITLES, *timeline_rows(timeline)]
    widths = [max(len(row[k]) for row in table) for k in range(len(TITLES))]
    numbers = (2, 3, 4)
    lines = []
    for row in table:
        cells = [
            cell.rjust(widths[k]) if k in numbers else cell.ljust(widths[k])
            for k, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return printable("\n".join(lines))
