"""Verify: a rule is tried on random small programs before it is trusted.

Programs that the pattern matches and the guard admits are drawn (instances.py), both sides are
computed by the NumPy references, and must agree:

* in type: every result has the shape and dtype of what it stands for;
* as a law: modulo a prime where both sides are sums, products and quotients (evaluate.py),
  otherwise in float64 up to 1e-9 of the greatest magnitude that occurs; integers and flags always
  exactly, in their own dtype, as they wrap;
* in its numerics class: `exact` rules give equal numbers in the program's dtype, infinities
  included (zeros of either sign are equal); `reorders` stays within a few roundings of the
  result's dtype; `changes_rounding` need not.

Where the pattern gives NaN a rule may give anything. A rule that fails is
refused with the smallest program found, its inputs and both results.
"""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RuleError
from .book import PROGRAM_RULESETS, Rule
from .evaluate import Array, NoReference, Numbers, evaluate, has_field, random_values
from .instances import Drawn, Instance, Side, instances, sides

#: Programs that each rule is tried on, how many that match are looked at to find as many that are
#: unlike each other, how many draws may fail to match, and seconds for all.
WANTED = 40
MATCHES = 240
TRIES = 8000
SECONDS = 1.0
# Programs that differ in sizes and dtypes only are tried so often.
_ALIKE = 4
# A rule that few programs fit is given more time to be tried on so many.
_FEW = 6
# Further programs that are tried after a failure, for a smaller one.
_SHRINK = 25
_LAW = 1e-9
# Roundings of the result's dtype that an operation may be off by.
_ROUNDINGS = 8.0


@dataclass(frozen=True)
class Counterexample:
    """Where the two sides of a rule differ: a program in the form of `example:`, the values of its
    inputs, and what either side gives (types, where these differ)."""

    program: str
    inputs: dict[str, str]
    pattern: str
    replacement: str
    numbers: str

    def __str__(self) -> str:
        lines = [*self.program.splitlines()]
        lines += [f"with {name} = {value}" for name, value in self.inputs.items()]
        lines += [
            f"the pattern gives     {self.pattern}",
            f"the replacement gives {self.replacement}",
        ]
        return "\n".join(lines)


class RuleRefused(RuleError):
    """A rule is not true, or cannot be checked; `counterexample` shows where it fails."""

    def __init__(
        self, what: str, *, where: str = "", hint: str = "", counterexample: Counterexample | None
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.counterexample = counterexample

    def __str__(self) -> str:
        shown = super().__str__()
        if self.counterexample is None:
            return shown
        return "\n  ".join([shown, *str(self.counterexample).splitlines()])


@dataclass(frozen=True)
class Verdict:
    """How a rule was found sound: on how many programs, by which numbers."""

    rule: str
    instances: int
    numbers: tuple[str, ...]
    seconds: float
    kernels: tuple[str, ...] = field(default=())


def verify_rule(rule: Rule, seed: int = 0, wanted: int = WANTED) -> Verdict | None:
    """Try one rule on at most `wanted` programs; None for a rule that rewrites nothing, such as
    those of layouts.

    Raises RuleRefused for a rule that is not true, that never applies, or whose kernels have no
    reference; RuleError for a fault in one of its expressions.
    """
    if rule.ruleset not in PROGRAM_RULESETS:
        return None
    laws = sides(rule)
    if not laws:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, about overflow and lost imaginary parts
        return _verify(rule, laws, seed, wanted)


def _verify(rule: Rule, laws: tuple[Side, ...], seed: int, wanted: int) -> Verdict:
    begin = time.thread_time()
    count = 0
    numbers: dict[str, None] = {}
    kernels: set[str] = set()
    for law in laws:
        # A seed of its own makes a rule's verdict independent of the rules before it.
        rng = random.Random(f"{seed} {rule.name}")
        drawn = Drawn()
        sound = 0
        alike: Counter[Any] = Counter()
        for matched, instance in enumerate(instances(rule, law, rng, TRIES, drawn)):
            shape, dtypes = instance.structure
            alike.update((shape, (shape, dtypes)))
            if matched >= min(MATCHES, 4 * wanted):
                break
            if alike[shape] > _ALIKE or alike[shape, dtypes] > 1:
                continue
            problem, used = _try(rule, instance, rng)
            if problem is not None:
                smaller = _smallest(rule, law, rng, instance, problem)
                raise RuleRefused(
                    f"rule {rule.name!r} is refused: {_FAILS[smaller.numbers]}",
                    where=rule.where,
                    counterexample=smaller,
                )
            if used:
                numbers.update(dict.fromkeys(used))
                kernels |= {a.kernel for a in instance.applied.values()}
                sound += 1
            spent = time.thread_time() - begin
            if sound >= wanted or spent > SECONDS * (1 if sound >= _FEW else 4) * len(laws):
                break
        if not sound:
            raise _never(rule, drawn)
        count += sound
    spent = time.thread_time() - begin
    return Verdict(rule.name, count, tuple(numbers), spent, tuple(sorted(kernels)))


_FAILS = {
    "type": "the two sides have different types",
    "field": "the two sides differ",
    "wide": "the two sides differ",
    "actual": "the two sides round differently than its numerics class says",
    "integer": "the two sides differ",
}


def verify_rules(rules: Iterable[Rule], seed: int = 0) -> list[Verdict]:
    """Try several rules. Raises what `verify_rule` raises for the first that fails."""
    return [v for rule in rules if (v := verify_rule(rule, seed)) is not None]


def _never(rule: Rule, drawn: Drawn) -> RuleRefused:
    reasons = sorted(drawn.refused, key=lambda r: -drawn.refused[r])
    why = f"; mostly: {reasons[0]}" if reasons else "; its pattern matched none"
    return RuleRefused(
        f"rule {rule.name!r} cannot be checked: it applies to none of {drawn.tried} programs{why}",
        where=rule.where,
        hint="Give it an `example:` that it applies to, of kernels that have a reference.",
        counterexample=None,
    )


def _smallest(
    rule: Rule, law: Side, rng: random.Random, instance: Instance, problem: Counterexample
) -> Counterexample:
    """The failure on the smallest of some further programs."""
    size = instance.size
    seen = 0
    for other in instances(rule, law, rng, TRIES // 16, Drawn()):
        seen += 1
        if other.size < size:
            found, _ = _try(rule, other, rng)
            if found is not None:
                size, problem = other.size, found
        if seen >= _SHRINK:
            break
    return problem


# One program


def _try(
    rule: Rule, instance: Instance, rng: random.Random
) -> tuple[Counterexample | None, tuple[str, ...]]:
    """What is wrong on one program, and by which numbers it was judged."""
    for root, made in instance.side.unions:
        old, new = instance.types[root], instance.types[made]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            return _counterexample(instance, {}, str(old), str(new), "type"), ()
    used: list[str] = []
    source = np.random.default_rng(rng.getrandbits(32))
    try:
        for numbers, style in _plan(rule, instance):
            values = random_values(instance, numbers, source, style)
            found, judged = _compare(rule, instance, values, numbers)
            if found is not None:
                return found, ()
            if judged:
                used.append("field" if numbers == "field" else numbers)
    except NoReference:
        return None, ()
    return None, tuple(used)


def _plan(rule: Rule, instance: Instance) -> list[tuple[Numbers, str]]:
    floats = any(
        t.dtype.startswith(("float", "bfloat", "complex"))
        for a in instance.applied.values()
        for t in (*a.inputs, a.output)
    )
    if not floats:
        return [("actual", "normal"), ("actual", "unit")]
    law: list[tuple[Numbers, str]] = (
        [("field", "normal"), ("field", "normal")]
        if has_field(instance)
        else [("wide", "normal"), ("wide", "unit")]
    )
    if rule.numerics == "exact":
        return [*law, ("actual", "normal"), ("actual", "special")]
    if rule.numerics == "reorders":
        return [*law, ("actual", "normal"), ("actual", "unit")]
    return law


def _compare(
    rule: Rule, instance: Instance, values: dict[str, Array], numbers: Numbers
) -> tuple[Counterexample | None, bool]:
    at, most = evaluate(instance, values, numbers)
    judged = False
    for root, made in instance.side.unions:
        left, right = at[root], at[made]
        wrong, told = _differ(rule, instance, left, right, most, numbers)
        judged |= told
        if wrong:
            kind = numbers if left.dtype.kind in "fcV" or numbers == "field" else "integer"
            texts = [_shown(left), _shown(right)]
            if texts[0] == texts[1]:
                texts = [_shown(left, 17), _shown(right, 17)]
            return _counterexample(instance, values, texts[0], texts[1], kind), False
    return None, judged


def _differ(
    rule: Rule, instance: Instance, left: Array, right: Array, most: float, numbers: Numbers
) -> tuple[bool, bool]:
    """Whether two results differ more than they may, and whether they tell anything."""
    if numbers == "field" or left.dtype.kind in "biu":
        return not np.array_equal(left, right), True
    a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (left, right))
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    if numbers == "actual" and rule.numerics == "exact":
        same = nan_a | (a == b)
        return not bool(same.all()), bool((~nan_a).any())
    told = ~nan_a if numbers == "wide" else np.isfinite(a) & np.isfinite(b)
    if not told.any():
        return False, a.size == 0
    if numbers == "wide":
        allowed = _LAW * (1.0 + most)
        with np.errstate(all="ignore"):
            close = (a == b) | (np.abs(a - b) <= allowed)
        return bool((told & (nan_b | ~close)).any()), True
    steps = len(instance.side.nodes) + len(instance.side.built)
    longest = max(
        (max(a.inputs, key=lambda t: t.size).size for a in instance.applied.values() if a.inputs),
        default=1,
    )
    allowed = _ROUNDINGS * (steps + min(longest, 64)) * _epsilon(left) * most
    with np.errstate(all="ignore"):
        return bool((told & (np.abs(a - b) > allowed)).any()), True


def _epsilon(x: NDArray[Any]) -> float:
    import ml_dtypes

    try:
        return float(np.finfo(x.dtype).eps)
    except ValueError:
        return float(ml_dtypes.finfo(x.dtype).eps)


# Telling it


def _counterexample(
    instance: Instance, values: dict[str, Array], left: str, right: str, numbers: str
) -> Counterexample:
    lines = [f"{_word(name)}: {t.dtype}{list(t.shape)}" for name, t in instance.inputs.items()]
    for title, nodes in (("", instance.side.nodes), ("becomes", instance.side.built)):
        if title:
            ends = {b: a for a, b in instance.side.unions}
            lines.append(", ".join(f"{_word(a)} becomes {_word(b)}" for b, a in ends.items()))
        for node in nodes:
            entry = instance.applied[node.signature]
            params = {k: v for k, v in entry.params.items() if v is not None}
            operands = ", ".join(map(_word, node.operands))
            text = f"{_word(node.name)} = {entry.kernel}({operands})"
            lines.append(f"{text} {params}" if params else text)
    return Counterexample(
        "\n".join(lines),
        {_word(n): _shown(v) for n, v in values.items()},
        left,
        right,
        numbers,
    )


def _word(name: str) -> str:
    return name.replace(" ", "").removesuffix("_")


def _shown(x: Array, digits: int = 6) -> str:
    values = np.asarray(x)
    if digits > 6 and values.dtype.kind == "f":
        values = values.astype(np.float64)
    text = np.array2string(values, precision=digits, threshold=40, separator=", ")
    return " ".join(text.split())
