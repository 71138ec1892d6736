"""A process that holds one e-graph: commands as lines of JSON in, answers as lines of JSON out.

egglog cannot be interrupted: an iteration that explodes ends when it ends. So it runs in a process
that may be killed (process.py), which imports nothing but egglog and whose memory is limited.

    {"new": folder}       forget everything; facts are read from files in `folder`
    {"run": [texts]}      run commands, one text after the other; answers {"updated", "matches"} of
                          the last schedule, "rows" of all tables in the end, and the "seconds" of
                          processor time that they took; for a text that is refused, an error and
                          {"at": its number}: those before it have run. With {"seconds": s} more
                          than so many end this process by SIGPROF
    {"tables": [names]}   answers rows: inputs, then output; terms as [sort, number]
    {"unseen": name}      answers the rows of one table that it has not yet been asked for so
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import sys
import time
import types
from typing import Any

# Bytes of address space: an iteration that needs more ends this process instead of the machine.
_MEMORY = 12 * 2**30


def main() -> None:
    """Serve until standard input ends."""
    bindings = _bindings()
    _limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    egraph: Any = None
    seen: set[Any] = set()
    for line in sys.stdin:
        given = json.loads(line)
        try:
            if "new" in given:
                egraph = bindings.EGraph(fact_directory=given["new"])
                seen = set()
                answer: Any = True
            elif "run" in given:
                signal.setitimer(signal.ITIMER_PROF, given.get("seconds", 0.0))
                begun = time.process_time()
                answer = _run(egraph, given["run"])
                answer["seconds"] = time.process_time() - begun
                signal.setitimer(signal.ITIMER_PROF, 0.0)
            elif "unseen" in given:
                answer = _tables(egraph, [given["unseen"]], seen)[given["unseen"]]
            else:
                answer = _tables(egraph, given["tables"])
            told = {"ok": answer}
        except _Refused as e:
            told = {"error": str(e), "at": e.at}
        except Exception as e:
            told = {"error": str(e), "at": 0}
        sys.stdout.write(json.dumps(told, separators=(",", ":")) + "\n")
        sys.stdout.flush()


class _Refused(Exception):
    """egglog refuses the text of a number."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(what)
        self.at = at


def _bindings() -> Any:
    """egglog's own module, without the Python package around it: to import all of that takes
    longer than the rules take on most programs."""
    spec = importlib.util.find_spec("egglog")
    if spec is not None and spec.submodule_search_locations:
        package = types.ModuleType("egglog")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["egglog"] = package
        try:
            return importlib.import_module("egglog.bindings")
        except ImportError:  # it needs its package after all
            del sys.modules["egglog"]
    return importlib.import_module("egglog.bindings")


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    except (ImportError, ValueError, OSError):  # another system, or a lower limit already
        return


def _run(egraph: Any, texts: list[str]) -> dict[str, Any]:
    updated, matches = False, {}
    for at, text in enumerate(texts):
        try:
            outputs = egraph.run_program(*egraph.parse_program(text))
        except Exception as e:
            raise _Refused(str(e), at) from None
        for output in outputs:
            report = getattr(output, "report", None)
            if report is not None:
                updated, matches = bool(report.updated), dict(report.num_matches_per_rule)
    (size,) = egraph.run_program(*egraph.parse_program("(print-size)"))
    rows = sum(count for _, count in size.sizes)
    return {"updated": updated, "matches": matches, "rows": rows}


def _tables(
    egraph: Any, names: list[str], seen: set[Any] | None = None
) -> dict[str, list[list[Any]]]:
    """The rows of tables, without those that are `seen`, which the others are then."""
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
            if not (row.subsumed or (seen and (name, tuple(row.inputs)) in seen))
        ]
        if seen is not None:
            seen.update((name, tuple(row.inputs)) for row in table.rows)
    return out


if __name__ == "__main__":
    main()
