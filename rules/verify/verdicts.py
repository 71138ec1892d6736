"""Verify: a rule is tried on small programs before it is trusted.

Programs that the pattern matches and the guard admits are drawn (instances.py): every kind of
shapes with every dtype, every kernel of a family, many parameters. Their inputs hold values of
every family (values.py). Both sides are computed by the NumPy references and must agree:

* in type: every result has the shape and dtype of what it stands for;
* as a law: modulo a prime where both sides are sums, products and quotients (evaluate.py), and in
  float64; integers and flags always exactly, in their own dtype, as they wrap;
* in its numerics class, in the dtype that the program has (compare.py).

Laws of single elements over integers and reals are also proven where a solver is installed
(proofs.py); what it refutes is refused only with an example that evaluation confirms. A rule that
fails is refused with the smallest program found, its inputs and both results. Verdicts depend on
counts only, never on time or on the rule's name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import thread_time

import numpy as np

from tapestry_egg.errors import RuleError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule

from .choice import Unlike
from .compare import (
    differs_by_rounding,
    differs_exactly,
    differs_over_the_reals,
    loses_numbers,
    roomy,
    sums,
    widest,
)
from .evaluate import Array, NoReference, Numbers, Program, Ready, has_field
from .facts import refuse_facts
from .instances import Drawn, Instance, instances
from .laws import Side, sides
from .proofs import Prover
from .values import EXTREME, FINITE, MASKS, MODERATE, ROUNDED, Landmarks, landmarks, mixtures

#: Programs that each rule is tried on, how many that match are looked at to find as many that are
#: unlike each other, and how many draws may be made.
WANTED = 48
MATCHES = 200
TRIES = 6000
# Further programs that are tried after a failure, for a smaller one.
_SHRINK = 25
# So many programs are tried with every family of values, further ones with half of them.
_ALL = 10
# Mixtures of families that each program is tried on, beside every family alone; of masks, in the
# first programs.
_MIXED = 4
_PAIRED = 10
# Families whose products and exponentials narrow floats do not hold.
_LARGE = ("tens", "high", "low")
_SMALL = ("tiny", "scales")


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
        self,
        what: str,
        *,
        where: str = "",
        hint: str = "",
        counterexample: Counterexample | None = None,
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
    """How a rule was found sound: on how many programs and inputs, by which numbers.

    `proven` says over which numbers its law is proven besides: `reals`, and dtypes of integers.
    """

    rule: str
    instances: int
    numbers: tuple[str, ...]
    seconds: float
    kernels: tuple[str, ...] = field(default=())
    cases: int = 0
    proven: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        tried = f"on {self.instances} programs with {self.cases} inputs"
        whole = [p for p in self.proven if p != "reals"]
        over = ["ℝ"] * ("reals" in self.proven) + [f"ℤ ({', '.join(whole)})"] * bool(whole)
        if not over:
            return f"tested {tried}"
        return f"proven over {' and '.join(over)}, tested over floats {tried}"


def verify_rule(rule: Rule, seed: int = 0, wanted: int = WANTED) -> Verdict | None:
    """Try one rule on about `wanted` programs; None for a rule that rewrites nothing.

    Raises RuleRefused for a rule that is not true, that never applies, whose kernels have no
    reference, or whose effect nothing can check; RuleError for a fault in one of its expressions.
    """
    refuse_facts(rule, RuleRefused)
    if rule.ruleset not in PROGRAM_RULESETS:
        return None
    laws = sides(rule)
    if not laws:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, about overflow and lost imaginary parts
        return _verify(rule, laws, seed, wanted)


def _verify(rule: Rule, laws: tuple[Side, ...], seed: int, wanted: int) -> Verdict:
    begin = thread_time()
    count = cases = 0
    numbers: dict[str, None] = {}
    kernels: set[str] = set()
    marks = landmarks(rule)
    prover = Prover()
    for law in laws:
        drawn = Drawn()
        sound = 0
        unlike = Unlike(wanted, marks)
        found = instances(rule, law, seed, TRIES, drawn, marks, unlike)
        for number, instance in enumerate(islice(found, MATCHES)):
            problem, used, tried = _try(rule, instance, marks, seed, number)
            refuting = None if problem is not None else prover.refutation(instance)
            if refuting is not None:
                problem = _confirmed(rule, instance, refuting)
            if problem is not None:
                smaller = _smallest(rule, law, marks, seed, instance, problem)
                raise RuleRefused(
                    f"rule {rule.name!r} is refused: {_FAILS[smaller.numbers]}",
                    where=rule.where,
                    counterexample=smaller,
                )
            cases += tried
            if used:
                numbers.update(dict.fromkeys(used))
                kernels |= {a.kernel for a in instance.applied.values()}
                sound += 1
        if not sound:
            raise _never(rule, drawn)
        count += sound
    spent = thread_time() - begin
    return Verdict(
        rule.name,
        count,
        tuple(sorted(numbers)),
        spent,
        tuple(sorted(kernels)),
        cases,
        prover.told(),
    )


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


#: Why a kernel without one of its parameters is no operation.
_UNSET = re.compile(r"\$(?P<name>\w+) is not a name here")


def _never(rule: Rule, drawn: Drawn) -> RuleRefused:
    reasons = sorted(drawn.refused, key=lambda r: -drawn.refused[r])
    why = f"; mostly: {reasons[0]}" if reasons else "; its pattern matched none"
    hint = "Give it an `example:` that it applies to, of kernels that have a reference."
    if reasons and (unset := _UNSET.fullmatch(reasons[0])):
        name = unset["name"]
        why = f": a kernel of its replacement has no value for {name}"
        hint = (
            f"Give it, KERNEL{{{name}=...}}(x), or take that of the pattern's: label it, "
            "`s:KERNEL(...)`, and write `s(x)`."
        )
    return RuleRefused(
        f"rule {rule.name!r} cannot be checked: it applies to none of {drawn.tried} programs{why}",
        where=rule.where,
        hint=hint,
        counterexample=None,
    )


def _smallest(
    rule: Rule,
    law: Side,
    marks: Landmarks,
    seed: int,
    instance: Instance,
    problem: Counterexample,
) -> Counterexample:
    """The failure on the smallest of some further programs."""
    size = instance.size
    for number, other in enumerate(instances(rule, law, seed + 1, TRIES // 16, Drawn(), marks)):
        if other.size < size and other.size:
            found, *_ = _try(rule, other, marks, seed, number)
            if found is not None:
                size, problem = other.size, found
        if number >= _SHRINK:
            break
    return problem


# One program


def _try(
    rule: Rule, instance: Instance, marks: Landmarks, seed: int, number: int
) -> tuple[Counterexample | None, tuple[str, ...], int]:
    """What is wrong on one program, by which numbers it was judged, on how many inputs."""
    for root, made in instance.side.unions:
        old, new = instance.types[root], instance.types[made]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            return _counterexample(instance, {}, str(old), str(new), "type"), (), 0
    used: dict[str, None] = {}
    rng = np.random.default_rng((seed, number))
    cases = 0
    try:
        programs = _Programs(instance)
        for numbers, families in _plan(rule, instance, number):
            program = programs.over(numbers)
            if program is None:
                continue
            values = program.inputs(families, rng, marks)
            found, judged = _compare(rule, instance, programs, values, numbers)
            if found is not None:
                return found, (), cases
            cases += 1
            if judged:
                used[numbers] = None
    except NoReference:
        return None, (), cases
    return None, tuple(used), cases


class _Programs:
    """A program over every kind of numbers that its kernels have a meaning over."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.made: dict[Numbers, Program | None] = {}
        self._ready: Ready = {}

    def over(self, numbers: Numbers) -> Program | None:
        """The program over these numbers; None where nothing can tell them, as the bits of a
        float32 are no float64's."""
        if numbers not in self.made:
            try:
                self.made[numbers] = Program(self.instance, numbers, self._ready)
            except NoReference:
                self.made[numbers] = None
        return self.made[numbers]


def _confirmed(rule: Rule, instance: Instance, values: dict[str, Array]) -> Counterexample | None:
    """What is wrong on values that a solver found, if evaluation finds so too."""
    real = any(v.dtype.kind not in "biu" for v in values.values())
    try:
        numbers: Numbers = "wide" if real else "actual"
        programs = _Programs(instance)
        program = programs.over(numbers)
        if program is None:
            return None
        held = {n: program.widened(n, v) for n, v in values.items()}
        return _compare(rule, instance, programs, held, numbers)[0]
    except NoReference:
        return None


def _plan(rule: Rule, instance: Instance, number: int) -> Iterator[tuple[Numbers, Sequence[str]]]:
    """The numbers and the families, one for each input, that a program is tried with."""
    drawn = [n for n in instance.inputs if n not in instance.side.constants]
    count = len(drawn)
    dtypes = {t.dtype for a in instance.applied.values() for t in (*a.inputs, a.output)}
    summed = instance.summed
    # Of nothing at all a quotient's divisor is not asked.
    fixed = summed if instance.has_empty and rule.numerics != "exact" else frozenset[str]()

    def every(families: Sequence[str], *more: Sequence[str]) -> Iterator[Sequence[str]]:
        for chosen in (*walked(families), *(c for m in more for c in mixed(m))):
            yield tuple("unit" if n in fixed else f for n, f in zip(drawn, chosen, strict=True))

    def walked(families: Sequence[str]) -> Iterator[Sequence[str]]:
        # The first programs meet every family, later ones every other.
        some = families if number < _ALL else families[number % 2 :: 2]
        for family in some if count else some[:1]:
            yield (family,) * count
        yield from mixed(families)

    def mixed(families: Sequence[str]) -> Iterator[Sequence[str]]:
        return iter(mixtures(families, count, number, _MIXED) if families else ())

    def masking(families: Sequence[str]) -> Iterator[Sequence[str]]:
        # Masks are added or chosen. What a contraction sums, or a scale of a whole tensor, that is
        # no number leaves none; nor does an infinity under an exponential, unless it is a negative.
        other = {"infinite": "below", "above": "below"} if instance.grows else {}
        for chosen in every(families, masks):
            yield tuple(
                "normal" if n in summed and f in MASKS else other.get(f, f)
                for n, f in zip(drawn, chosen, strict=True)
            )

    if not instance.rounds:
        yield from (("actual", f) for f in every(EXTREME))
        return
    if has_field(instance):
        yield from (("field", ("normal",) * count) for _ in range(2))
    yield from (("wide", f) for f in every(FINITE if rule.numerics != "exact" else MODERATE))
    # Of nothing, an infinite factor makes NaN where its place was empty: no mask is meant so.
    masks = () if instance.has_empty else MASKS
    if rule.numerics == "exact":
        # What sums of the ends of a dtype leave is a matter of their order, of which no law speaks.
        families = FINITE if sums(instance) else EXTREME
        yield from (("actual", f) for f in every((*families, *masks), masks))
        # What is no number in one input, beside numbers and others in another: of every pair.
        pairs = mixtures(("normal", *masks), count, number, _PAIRED if number < _ALL else _MIXED)
        whole = {n for n in drawn if kind(instance.inputs[n].dtype) in ("int", "uint")}
        for chosen in pairs if masks else ():  # integers may be places: these are within bounds
            yield (
                "actual",
                ["unit" if n in whole else f for n, f in zip(drawn, chosen, strict=True)],
            )
        return
    if masks:
        yield from (("wide", f) for f in masking(("normal", "ties", *masks)))
    # What is meant is computed in 64 bits: there it is not known of what underflows in as many.
    unknown = {*(() if roomy(dtypes) else _LARGE), *(_SMALL if widest(instance) else ())}
    moderate = [f for f in ROUNDED if f not in unknown]
    yield from (("actual", f) for f in every(moderate))


def _compare(
    rule: Rule,
    instance: Instance,
    programs: _Programs,
    values: dict[str, Array],
    numbers: Numbers,
) -> tuple[Counterexample | None, bool]:
    program = programs.over(numbers)
    assert program is not None
    at = program.evaluate(values)
    truth: dict[str, Array] = {}
    rounds = instance.rounds and rule.numerics != "exact"
    wide = program
    given = values
    if numbers == "actual" and rounds:
        found = programs.over("truth")
        if found is None:
            return None, False
        wide = found
        given = {n: wide.widened(n, v) for n, v in values.items()}
        truth = wide.evaluate(given, pattern_only=True)
    judged = False
    for root, made in instance.side.unions:
        left, right = at[root], at[made]
        if numbers == "wide":
            wrong, told = differs_over_the_reals(rule, program, values, at, root, made)
        elif numbers == "field" or not rounds:
            wrong, told = differs_exactly(instance, left, right, numbers != "field")
        elif rule.numerics == "changes_rounding":
            wrong, told = loses_numbers(instance, at, truth, root, made), False
        else:
            wrong, told = differs_by_rounding(instance, at, truth, root, made, wide, given)
        judged |= told
        if wrong:
            held = numbers if left.dtype.kind in "fcV" or numbers == "field" else "integer"
            texts = [_shown(left), _shown(right)]
            if texts[0] == texts[1]:
                texts = [_shown(left, 17), _shown(right, 17)]
            return _counterexample(instance, values, texts[0], texts[1], held), False
    return None, judged


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
