"""A process that holds one e-graph: commands as lines of JSON in, answers as lines of JSON out.

egglog cannot be interrupted: an iteration that explodes ends when it ends. So it runs in a process
that may be killed (egraph.py), which imports nothing but egglog and whose memory is limited.

    {"new": folder}       forget everything; facts are read from files in `folder`
    {"run": text}         run commands; answers {"updated", "matches"} of the last schedule
    {"rows": true}        answers the rows of all tables
    {"tables": [names]}   answers rows: inputs, then output; terms as [sort, number]
"""

from __future__ import annotations

import json
import sys
from typing import Any

# Bytes of address space: an iteration that needs more ends this process instead of the machine.
_MEMORY = 12 * 2**30


def main() -> None:
    """Serve until standard input ends."""
    from egglog import bindings

    _limit_memory()
    egraph: Any = None
    for line in sys.stdin:
        given = json.loads(line)
        try:
            if "new" in given:
                egraph = bindings.EGraph(fact_directory=given["new"])
                answer: Any = True
            elif "run" in given:
                answer = _run(egraph, given["run"])
            elif "rows" in given:
                (size,) = egraph.run_program(*egraph.parse_program("(print-size)"))
                answer = sum(count for _, count in size.sizes)
            else:
                answer = _tables(egraph, given["tables"])
            told = {"ok": answer}
        except Exception as e:
            told = {"error": str(e)}
        sys.stdout.write(json.dumps(told, separators=(",", ":")) + "\n")
        sys.stdout.flush()


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    except (ImportError, ValueError, OSError):  # another system, or a lower limit already
        return


def _run(egraph: Any, text: str) -> dict[str, Any]:
    updated, matches = False, {}
    for output in egraph.run_program(*egraph.parse_program(text)):
        report = getattr(output, "report", None)
        if report is not None:
            updated, matches = bool(report.updated), dict(report.num_matches_per_rule)
    return {"updated": updated, "matches": matches}


def _tables(egraph: Any, names: list[str]) -> dict[str, list[list[Any]]]:
    frozen = egraph.freeze().functions
    memo: dict[tuple[str, Any], Any] = {}
    classes: dict[tuple[str, Any], int] = {}

    def read(sort: str, value: Any) -> Any:
        key = (sort, value)
        if key not in memo:
            if sort == "i64":
                memo[key] = egraph.value_to_i64(value)
            elif sort == "String":
                memo[key] = egraph.value_to_string(value)
            else:
                memo[key] = [sort, classes.setdefault(key, len(classes))]
        return memo[key]

    out = {}
    for name in names:
        table = frozen[name]
        sorts = table.input_sorts
        out[name] = [
            [
                *(read(s, v) for s, v in zip(sorts, row.inputs, strict=True)),
                read(table.output_sort, row.output),
            ]
            for row in table.rows
            if not row.subsumed
        ]
    return out


if __name__ == "__main__":
    main()
