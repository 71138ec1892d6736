"""JAX's own tests with `jax.jit` replaced by `te.jit`: what differs, and whether that is intended.

    python -m benchmarks.jax_tests ~/src/jax                     # a checkout of the installed JAX
    python -m benchmarks.jax_tests ~/src/jax pjit_test           # some of the files
    python -m benchmarks.jax_tests ~/src/jax -k ArrayPjitTest    # some of the tests
    python -m benchmarks.jax_tests ~/src/jax --json out.json     # runs only what it does not hold

The checkout is only read, and nothing is fetched. Every file runs twice, each time in a process of
its own with eight virtual CPU devices: once as it is, once with `jax.jit` replaced before the file
is imported. A test that ends its process, or takes longer than `--limit` seconds, counts as failed,
and the next one gets a new process.

A test that passes as it is and not with `te.jit` is a difference. `jax_tests.yaml` lists the
intended ones by category, each category with its reason. A difference that is not listed, or one of
numbers, makes this command exit with 1. So does a listed test that passes: the list is out of date.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.metadata
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import traceback
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILES = ("pjit_test", "shard_map_test", "memories_test", "api_test", "shard_alike_test")
INTENDED = Path(__file__).with_suffix(".yaml")
DEVICES = 8
LIMIT = 120.0

_PLAIN, _REPLACED = "jax.jit", "te.jit"
#: How assertions of JAX's and NumPy's about the elements of arrays begin.
_NUMBERS = re.compile(r"Mismatched elements|Not equal to tolerance|Arrays are not equal")


@dataclass(frozen=True)
class Outcome:
    """What became of one test. `words` is the last line of its exception."""

    test: str
    result: str  # passed, skipped, failed
    seconds: float
    words: str = ""
    numbers: bool = False  # an assertion about the elements of an array failed
    trace: str = ""  # the end of the traceback


@dataclass(frozen=True)
class Category:
    """Intended differences: why, and for which tests (`file.Class.test`, with wildcards)."""

    name: str
    reason: str
    tests: tuple[str, ...]

    def holds(self, test: str) -> bool:
        return any(fnmatch.fnmatchcase(test, pattern) for pattern in self.tests)


def intended(path: Path = INTENDED) -> tuple[Category, ...]:
    """The categories of intended differences."""
    import yaml

    said = yaml.safe_load(path.read_text())
    return tuple(Category(c["name"], c["reason"], tuple(c["tests"])) for c in said)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the files named (default: all); 1 if a difference is not intended, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of JAX at the installed version")
    parser.add_argument("files", nargs="*", default=FILES, help="files of its tests/")
    parser.add_argument("-k", default="", help="only tests whose name contains this")
    parser.add_argument("--json", type=Path, help="write the outcomes here, and resume from it")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one test")
    parser.add_argument("--child", nargs=2, metavar=("MODE", "PIPE"), help="internal")
    given = parser.parse_args(arguments)
    if given.child:
        return _child(given.checkout, given.files[0], given.child[0], int(given.child[1]))
    _check_version(given.checkout)
    known = _read(given.json)
    for file in given.files:
        for mode in (_PLAIN, _REPLACED):
            have = known.setdefault(mode, {})
            for outcome in _outcomes(given.checkout, file, mode, given.k, given.limit, have):
                have[outcome.test] = outcome
                _write(given.json, known)
    wanted = tuple(f"{file}." for file in given.files)
    plain, replaced = (
        {t: o for t, o in known[mode].items() if t.startswith(wanted) and given.k in t}
        for mode in (_PLAIN, _REPLACED)
    )
    return report(plain, replaced, intended())


def report(
    plain: Mapping[str, Outcome], replaced: Mapping[str, Outcome], categories: Sequence[Category]
) -> int:
    """Print what differs; 1 if something does that is not intended, else 0."""
    passing = [t for t, o in plain.items() if o.result == "passed"]
    classes = Counter(t.rpartition(".")[0] for t in passing)
    same = Counter(t.rpartition(".")[0] for t in passing if replaced[t].result == "passed")
    print(f"{'class':44}{'passes':>8}{'with te.jit':>13}")
    for name, count in classes.items():
        print(f"{name:44}{count:8}{same[name]:13}")
    different = [replaced[t] for t in passing if replaced[t].result != "passed"]
    faults = 0
    for category in categories:
        found = [o for o in different if category.holds(o.test)]
        if found:
            print(f"\n{category.name}: {len(found)} intended. {' '.join(category.reason.split())}")
    for o in different:
        is_intended = any(c.holds(o.test) for c in categories)
        if o.numbers or not is_intended:
            faults += 1
            print(f"\n{'NUMBERS' if o.numbers else 'NOT INTENDED'} {o.test}\n    {o.words}")
    for t in passing:
        if replaced[t].result == "passed" and any(c.holds(t) for c in categories):
            faults += 1
            print(f"\nPASSES, but is listed as an intended difference: {t}")
    print(f"\n{len(passing)} tests, {len(different)} differ, {faults} not as intended")
    return 1 if faults else 0


def _check_version(checkout: Path) -> None:
    """Refuse a checkout of another version: its tests are about another JAX."""
    installed = importlib.metadata.version("jax")
    path = checkout / "jax" / "version.py"
    found = re.search(r'^_version = "(.+)"', path.read_text(), re.M) if path.exists() else None
    if found and found[1] != installed:
        sys.exit(f"error: {checkout} is JAX {found[1]}, installed is {installed}")


def _outcomes(
    checkout: Path, file: str, mode: str, part: str, limit: float, have: Mapping[str, Outcome]
) -> Iterator[Outcome]:
    """The outcomes of a file's tests that are not known yet, in order."""
    worker = _Worker(checkout, file, mode)
    left = [t for t in worker.tests if part in t and t not in have]
    for test in left:
        if not worker.alive:
            worker = _Worker(checkout, file, mode)
        outcome = worker.run(test, limit)
        print(f"{mode} {outcome.test} {outcome.result} {outcome.seconds:.1f} s", file=sys.stderr)
        yield outcome
    worker.stop()


class _Worker:
    """A process that has imported a file of tests, and runs those that it is asked for."""

    def __init__(self, checkout: Path, file: str, mode: str) -> None:
        reads, writes = os.pipe()  # tests print on the other streams
        module = [sys.executable, "-m", "benchmarks.jax_tests"]
        command = [*module, str(checkout), file, "--child", mode, str(writes)]
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        environment = {
            "JAX_PLATFORMS": "cpu",
            "TAPESTRY_EGG_PLAN_CACHE": "off",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
            pass_fds=(writes,),
        )
        os.close(writes)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, args=(reads,), daemon=True).start()
        first = self._lines.get()
        if not first:
            raise RuntimeError(f"{file} cannot be imported: {' '.join(command)}")
        self.tests: list[str] = json.loads(first)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, test: str, limit: float) -> Outcome:
        assert self._process.stdin is not None
        began = time.monotonic()
        self._process.stdin.write(test + "\n")
        self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            line, words = "", f"no outcome in {limit:g} s"
        else:
            words = "the process ended"
        if line:
            return Outcome(**json.loads(line))
        self.stop()
        return Outcome(test, "failed", time.monotonic() - began, words)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listen(self, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")


def _child(checkout: Path, file: str, mode: str, pipe: int) -> int:
    """Import a file of tests, tell their names, and run those whose names come in."""
    if mode == _REPLACED:
        _replace()
    sys.path.insert(0, str(checkout / "tests"))
    module = importlib.import_module(file)
    from jax._src import test_util

    suite = test_util.JaxTestLoader().loadTestsFromModule(module)
    tests = {f"{file}.{type(t).__name__}.{t._testMethodName}": t for t in _flat(suite)}
    with os.fdopen(pipe, "w", buffering=1) as told:
        print(json.dumps(list(tests)), file=told)
        for line in sys.stdin:
            print(json.dumps(asdict(_run(line.strip(), tests[line.strip()]))), file=told)
    return 0


def _replace() -> None:
    """`te.jit` in the place of `jax.jit` for all but JAX itself and this package; `pjit`, its older
    name, likewise."""
    import jax
    import jax.experimental.pjit
    from jax._src import pjit as home

    import tapestry_egg as te

    own = jax.jit

    def jit(*args: Any, **words: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        return (own if caller in ("jax", "tapestry_egg") else te.jit)(*args, **words)

    def pjit(fun: Any, in_shardings: Any = None, out_shardings: Any = None, **words: Any) -> Any:
        return te.jit(fun, in_shardings=in_shardings, out_shardings=out_shardings, **words)

    jax.jit = jit
    jax.experimental.pjit.pjit = home.pjit = pjit


def _flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for part in suite:
        if isinstance(part, unittest.TestSuite):
            yield from _flat(part)
        else:
            yield part


def _run(name: str, test: unittest.TestCase) -> Outcome:
    result = unittest.TestResult()
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            test.run(result)
        except BaseException:  # what leaves a runner is a fault of the test's
            result.errors.append((test, traceback.format_exc()))
    seconds = time.monotonic() - began
    faults = [text for _, text in (*result.failures, *result.errors)]
    if faults:
        lines = faults[0].strip().splitlines()
        raised = [
            line for line in lines if re.match(r"[\w.]+(Error|Exception|Warning|Interrupt)?:", line)
        ]
        words = (raised or lines)[-1]
        numbers = bool(_NUMBERS.search(faults[0]))
        return Outcome(name, "failed", seconds, words[:400], numbers, faults[0][-3000:])
    if result.skipped:
        return Outcome(name, "skipped", seconds, result.skipped[0][1][:200])
    return Outcome(name, "passed", seconds)


def _read(path: Path | None) -> dict[str, dict[str, Outcome]]:
    if path is None or not path.exists():
        return {}
    said = json.loads(path.read_text())
    return {m: {t: Outcome(**o) for t, o in found.items()} for m, found in said.items()}


def _write(path: Path | None, known: Mapping[str, Mapping[str, Outcome]]) -> None:
    if path is not None:
        form = {m: {t: asdict(o) for t, o in found.items()} for m, found in known.items()}
        path.write_text(json.dumps(form, indent=1))


if __name__ == "__main__":
    sys.exit(main())
