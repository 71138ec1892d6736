"""egglog's e-graph as the stages use it: text in small pieces, facts as TSV, tables out.

The e-graph lives in a process of its own (worker.py). One iteration may need any amount of
time and memory; when it needs more than it is given, the process is killed, and another one is
brought to where the last iteration ended.
"""

from __future__ import annotations

import atexit
import json
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapestry_egg.errors import RuleError
from tapestry_egg.parallel.serving import Child
from tapestry_egg.rules.language.book import Rule, commands

from .timeline import Tick

# A process that gets no processor is given up after so many times what it may take, and no sooner
# than after so many seconds.
_FAR, _LEAST = 20.0, 120.0


@dataclass(frozen=True)
class Budget:
    """How far saturation may go: the limit reached first ends it, and what is there stays.

    An iteration of the program's algebra that leaves more than twice as many `rows` is taken back.
    `seconds` are of egglog's processor time, whatever else the machine does. They are there for an
    iteration that explodes: where they end one, the front's notes say so. `choice` are units of
    `Work` for all choices among what the rules of a program's algebra found: when they are spent,
    the best program tried until then is taken.
    """

    iterations: int = 40
    rows: int = 4_000_000
    seconds: float = 60.0
    choice: float = 4.0


class Exhausted(Exception):
    """An iteration needed more than it was given; the e-graph is as it was before."""


class EGraph:
    """egglog's e-graph; a context manager, so that its process serves the next one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.matches: dict[str, int] = {}
        self.timeline: list[Tick] = []
        self.seconds = 0.0  # of egglog's processor time
        self.by_clock = False  # whether time has ended an iteration
        self._done: list[dict[str, Any]] = [{"new": str(folder)}]
        self._files: dict[str, int] = {}
        self._rows = 0
        # Commands that the process has not been told of yet, and the rules that they are of.
        self._waiting: list[tuple[str, Rule | None]] = []
        self._worker = _idle_one() or _Worker()
        try:
            self._worker.ask(self._done[0])
        except _Gone:  # it has died since it was last used
            self._worker = _Worker()
            self._worker.ask(self._done[0])

    def __enter__(self) -> EGraph:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, RuleError):
            _idle.append(self._worker)
        else:
            self._worker.kill()

    def run(self, text: str) -> dict[str, Any]:
        """Run egglog commands. Raises Refused with what egglog says against them."""
        self._flush()
        command = {"run": [text]}
        answer: dict[str, Any] = self._worker.ask(command)
        self._done.append(command)
        return answer

    def declare(self, text: str) -> None:
        """Run the commands of a text before what comes next."""
        # One command at a time: parsing is quadratic in the length of the text.
        self._waiting += [(form, None) for _, _, form in commands(text)]

    def add_rule(self, rule: Rule, forms: Sequence[str]) -> None:
        """Declare a rule by the egglog forms that stand for it, before what comes next.

        That raises RuleError, with the rule's place in its file, when egglog refuses one.
        """
        for i, form in enumerate(forms):
            if not form.startswith("(relation"):
                form = f'{form[:-1]} :ruleset {rule.ruleset} :name "{rule.name}#{i}")'
            self._waiting.append((form, rule))

    def _flush(self) -> None:
        """Tell the process what has been waiting, all at once."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        command = {"run": [form for form, _ in waiting]}
        try:
            self._rows = int(self._worker.ask(command)["rows"])
        except Refused as e:
            _, rule = waiting[e.at]
            if rule is None:
                raise
            raise RuleError(
                f"rule {rule.name!r} is refused by egglog: {e}",
                where=rule.where,
                hint="The relations that rules may use are declared in rules/language/schema.egg.",
            ) from None
        self._done.append(command)

    def load(self, name: str, rows: Sequence[tuple[int | str, ...]]) -> None:
        if not rows:
            return
        # A file of its own for each time, so that all can be read again.
        k = self._files[name] = self._files.get(name, -1) + 1
        path = self.folder / f"{name}-{k}.tsv"
        path.write_text("".join("\t".join(map(str, r)) + "\n" for r in rows), encoding="utf-8")
        self._waiting.append((f'(input {name} "{path.name}")', None))

    def step(self, ruleset: str, seconds: float = float("inf"), rows: float = float("inf")) -> bool:
        """Run one iteration of a ruleset; whether it changed anything.

        Raises Exhausted when it takes more than `seconds` of processor time or more memory than
        there is, or leaves more than so many `rows`.
        """
        if seconds <= 0.0:
            self.by_clock = True
            raise Exhausted
        self._flush()
        begin = time.perf_counter()
        command = {"run": [f"(run {ruleset} 1)"]}
        bounded = command if seconds == float("inf") else {**command, "seconds": max(seconds, 1e-3)}
        try:
            answer = self._worker.ask(bounded, max(_FAR * seconds, _LEAST))
        except _Gone as gone:
            self.by_clock |= gone.by_clock
            self._again()
            raise Exhausted from None
        if answer["rows"] > rows:
            self._again()
            raise Exhausted
        self._done.append(command)
        self._rows = int(answer["rows"])
        self.seconds += answer["seconds"]
        matches: dict[str, int] = {}
        for name, count in answer["matches"].items():
            rule = name.split("#")[0]
            if count:
                matches[rule] = matches.get(rule, 0) + count
        for rule, count in matches.items():
            self.matches[rule] = self.matches.get(rule, 0) + count
        spent = time.perf_counter() - begin
        # egglog tells them in an order of its own, another one in every process.
        self.timeline.append(Tick(ruleset, self.rows(), spent, dict(sorted(matches.items()))))
        return bool(answer["updated"])

    def holds(self, facts: str) -> bool:
        """Whether facts hold, as egglog's `check` has them."""
        self._flush()
        try:
            self._worker.ask({"run": [f"(check {facts})"]})
        except Refused:
            return False
        return True

    def rows(self) -> int:
        """Rows of all tables."""
        self._flush()
        return self._rows

    def tables(self, names: Sequence[str]) -> dict[str, list[tuple[Any, ...]]]:
        """Rows of the named tables: inputs, then output; numbers and strings as themselves, terms
        as opaque class tokens."""
        self._flush()
        found = self._worker.ask({"tables": list(names)})
        return {name: _as_tuples(rows) for name, rows in found.items()}

    def unseen(self, name: str) -> list[tuple[Any, ...]]:
        """The rows of a table of numbers and strings that have come since it was last asked for
        so; all of them once more after an exhausted step."""
        self._flush()
        return [tuple(row) for row in self._worker.ask({"unseen": name})]

    def _again(self) -> None:
        """A new process, brought to where the last completed command left the old one."""
        self._worker.kill()
        self._worker = _Worker()
        for command in self._done:
            self._worker.ask(command)


def _as_tuples(rows: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Rows of a table, whose columns hold terms, as [sort, number], or no terms at all."""
    columns: list[Iterable[Any]] = [
        map(tuple, column) if isinstance(column[0], list) else column
        for column in zip(*rows, strict=True)
    ]
    return list(zip(*columns, strict=True))


class Refused(ValueError):
    """What egglog says against the command of a number, of several."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(what)
        self.at = at


class _Gone(Exception):
    """The process does not answer, or not in time: then the clock is to blame."""

    def __init__(self, by_clock: bool = False) -> None:
        super().__init__()
        self.by_clock = by_clock


class _Worker:
    """A process that holds an e-graph."""

    def __init__(self) -> None:
        self.child = Child("tapestry_egg.egraphs.worker:main")

    def ask(self, command: dict[str, Any], seconds: float = float("inf")) -> Any:
        """What the process answers. Raises Refused for what egglog refuses, _Gone when there is
        no answer within `seconds`."""
        child = self.child
        try:
            child.to.write(json.dumps(command).encode() + b"\n")
            child.to.flush()
        except OSError:
            raise _Gone from None
        answers = child.lines(seconds)
        if not answers:
            raise _Gone(by_clock=child.open or child.process.wait() == -signal.SIGPROF)
        (told,) = answers
        if "error" in told:
            raise Refused(told["error"], told["at"])
        return told["ok"]

    def kill(self) -> None:
        self.child.kill()


#: Processes that wait for work.
_idle: list[_Worker] = []


def _idle_one() -> _Worker | None:
    """A process that waits, for one thread only."""
    try:
        return _idle.pop()
    except IndexError:
        return None


@atexit.register
def _end() -> None:
    while worker := _idle_one():
        worker.kill()
