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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from time import thread_time
from typing import Any

import numpy as np

from tapestry_egg.errors import RuleError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import readable
from tapestry_egg.reference.promises import can_check
from tapestry_egg.rewrite.terms.requests import OPERATORS, Form, rule_sides
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule, schema
from tapestry_egg.rules.language.receipts import content, receipts

from .compare import (
    differs_by_rounding,
    differs_exactly,
    differs_over_the_reals,
    discrete,
    loses_numbers,
    roomy,
    sums,
    widest,
)
from .evaluate import PRIME, Array, NoReference, NoValue, Numbers, Program, Ready, has_field
from .instances import Drawn, Instance, instances
from .laws import Node, Side, sides
from .proofs import Prover
from .unlike import Unlike
from .values import EXTREME, FINITE, MASKS, MODERATE, ROUNDED, Landmarks, landmarks, mixtures

#: Programs that each rule is tried on, how many that match are looked at to find as many that are
#: unlike each other, and how many draws may be made.
WANTED = 48
MATCHES = 200
TRIES = 6000
# Further programs that are tried after a failure, for a smaller one.
_SHRINK = 25
# Numbers that counterexamples are simplified to, and how often that is tried, element by element
# where an input has as few as this.
_SIMPLE = (0, 1, 2, 3, -1, 0.5)
_SIMPLER = 100
_FEW_ELEMENTS = 16
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
    inputs, and what either side gives (types, where these differ).

    `numbers` is the kind of arithmetic, `arithmetic` says which in words.
    """

    program: str
    inputs: dict[str, str]
    pattern: str
    replacement: str
    numbers: str
    arithmetic: str = ""

    def __str__(self) -> str:
        values = ", ".join(f"{name} = {value}" for name, value in self.inputs.items())
        checked = f"Checked in {self.arithmetic}: {values or 'this program'} gives"
        if self.numbers in _STATIC:
            checked = "It gives"
        return "\n".join(
            [
                "Smallest program found:",
                *(f"  {line}" for line in self.program.splitlines()),
                f"{checked} left {self.pattern}, right {self.replacement}.",
            ]
        )


#: What is told of a program before any value is drawn.
_STATIC = ("type", "loss", "promise", "none")


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
            problem, used, tried = _try(rule, instance, marks, seed, number, drawn)
            refuting = None if problem is not None else prover.refutation(instance)
            if refuting is not None:
                problem = _confirmed(rule, instance, refuting)
            if problem is not None:
                smaller = _smallest(rule, law, marks, seed, instance, problem)
                what, hint = _FAILS[smaller.numbers]
                raise RuleRefused(
                    f"rule {rule.name!r} is refused: {what}",
                    where=rule.where,
                    hint=hint,
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


_NARROW = "Correct the replacement, or add a `guard:` that excludes this program."
_CLASS = "Give it another `numerics:` class, or a `guard:` that excludes this program."
_FAILS = {
    "type": ("its two sides have different types", _NARROW),
    "loss": (
        "its replacement is less precise than its pattern",
        "Take the parameter from the pattern, or declare `numerics: changes_rounding`.",
    ),
    "promise": (
        "its replacement makes a promise that its pattern does not make",
        "Take the parameter from the pattern, or leave it out.",
    ),
    "none": ("its replacement has no value where its pattern has one", _NARROW),
    "field": ("its two sides differ", _NARROW),
    "wide": ("its two sides differ", _NARROW),
    "actual": ("its two sides round differently than its numerics class allows", _CLASS),
    "integer": ("its two sides differ", _NARROW),
}


#: Why a kernel without one of its parameters is no operation.
_UNSET = re.compile(r"\$(?P<name>\w+) is not a name here")


def _never(rule: Rule, drawn: Drawn) -> RuleRefused:
    """The error about a rule that no program could be tried on."""
    if drawn.illegal is not None:
        instance, why = drawn.illegal
        what, hint = _FAILS["none"]
        if unset := _UNSET.fullmatch(why):
            name = unset["name"]
            what = f"a kernel of its replacement has no value for {name}"
            hint = (
                f"Give a value, KERNEL{{{name}=...}}(x), or take that of the pattern: label its "
                "kernel, `s:KERNEL(...)`, and write `s(x)`."
            )
        return RuleRefused(
            f"rule {rule.name!r} is refused: {what}",
            where=rule.where,
            hint=hint,
            counterexample=_counterexample(instance, {}, "a value", f"nothing: {why}", "none"),
        )
    reasons = sorted(drawn.refused, key=lambda r: -drawn.refused[r])
    why = reasons[0] if reasons else "no program drawn matches its pattern"
    return RuleRefused(
        f"rule {rule.name!r} cannot be checked: {why} ({drawn.tried} programs drawn)",
        where=rule.where,
        hint="Add an `example:`: a program that the rule applies to, of kernels with a reference.",
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
            found, *_ = _try(rule, other, marks, seed, number, Drawn())
            if found is not None:
                size, problem = other.size, found
        if number >= _SHRINK:
            break
    return problem


# One program


def _try(
    rule: Rule, instance: Instance, marks: Landmarks, seed: int, number: int, drawn: Drawn
) -> tuple[Counterexample | None, tuple[str, ...], int]:
    """What is wrong on one program, by which numbers it was judged, on how many inputs.

    Why it cannot be judged is noted in `drawn`.
    """
    wrong = _told_apart(rule, instance)
    if wrong is not None:
        left, right, what = wrong
        return _counterexample(instance, {}, left, right, what), (), 0
    used: dict[str, None] = {}
    rng = np.random.default_rng((seed, number))
    cases = 0
    programs = _Programs(instance)
    for numbers, families in _plan(rule, instance, number):
        program = programs.over(numbers)
        if program is None:
            if numbers == "actual":
                drawn.refuse(programs.missing)
            continue
        try:
            values = program.inputs(families, rng, marks)
            found, judged = _compare(rule, instance, programs, values, numbers)
        except NoReference as none:
            drawn.refuse(str(none))
            continue
        if found is not None:
            return _simplest(rule, instance, programs, values, numbers, found), (), cases
        cases += 1
        if judged:
            used[numbers] = None
    return None, tuple(used), cases


def _told_apart(rule: Rule, instance: Instance) -> tuple[str, str, str] | None:
    """What is wrong before any value is drawn: with what either side gives, and its kind."""
    for root, made in instance.side.unions:
        old, new = instance.types[root], instance.types[made]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            return str(old), str(new), "type"
    for node in instance.side.built:
        entry = instance.applied[node.signature]
        if not registry.valid(entry.kernel, entry.params, entry.inputs):
            return "a value", f"none: JAX has no such {entry.kernel}", "none"
        for promise in entry.promises:
            if not can_check(promise) and not _promised(instance, node, promise):
                return "no promise", f"{entry.kernel} with the promise `{promise}`", "promise"
    if rule.numerics == "changes_rounding":
        return None
    return _less_precise(instance)


def _promised(instance: Instance, node: Node, promise: str) -> bool:
    """Whether an operation of the pattern makes the same promise of the same operands."""
    kernel = instance.applied[node.signature].kernel
    return any(
        other.operands == node.operands
        and instance.applied[other.signature].kernel == kernel
        and promise in instance.applied[other.signature].promises
        for other in instance.side.nodes
    )


def _less_precise(instance: Instance) -> tuple[str, str, str] | None:
    """An input that a replacement reads with fewer bits than the pattern does, which may read it as
    coarsely as whatever it is multiplied with."""
    less = _lost(instance, instance.side.nodes, shared=True)
    for (name, way), more in _lost(instance, instance.side.built).items():
        known = less.get((name, way), 0.0)
        if more > known:
            old, new = (f"{_word(name)} at a loss of {n:g} bits ({way})" for n in (known, more))
            return old, new, "loss"
    return None


def _lost(
    instance: Instance, nodes: Sequence[Node], shared: bool = False
) -> dict[tuple[str, str], float]:
    """Of every input, and every way to lose precision, the most bits that are lost behind it; with
    `shared` also by what it meets there, unless it is only added to that."""
    reached: dict[str, set[str]] = {n: {n} for n in instance.inputs}
    inside: dict[str, dict[str, float]] = {}
    found: dict[tuple[str, str], float] = {}
    for node in nodes:
        entry = instance.applied[node.signature]
        reached[node.name] = {n for o in node.operands for n in reached.get(o, {o})}
        lost = inside[node.name] = dict(entry.losses)
        for operand in node.operands:
            for way, bits in inside.get(operand, {}).items():
                lost[way] = max(lost.get(way, bits), bits)
        added = any(len(p.inputs) > 1 for p in entry.signature.passages)
        for way, bits in (lost if shared and not added else entry.losses).items():
            for name in reached[node.name]:
                found[name, way] = max(found.get((name, way), bits), bits)
    return found


class _Programs:
    """A program over every kind of numbers that its kernels have a meaning over."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.made: dict[Numbers, Program | None] = {}
        self.missing = ""  # why there is no program over the dtypes that the program has
        self._ready: Ready = {}

    def over(self, numbers: Numbers) -> Program | None:
        """The program over these numbers; None where nothing can tell them, as the bits of a
        float32 are no float64's."""
        if numbers not in self.made:
            try:
                self.made[numbers] = Program(self.instance, numbers, self._ready)
            except NoReference as none:
                self.made[numbers] = None
                self.missing = str(none) if numbers == "actual" else self.missing
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

    own = {**dict.fromkeys(fixed, "unit"), **dict.fromkeys(instance.solved, "dominant")}

    def every(families: Sequence[str], *more: Sequence[str]) -> Iterator[Sequence[str]]:
        for chosen in (*walked(families), *(c for m in more for c in mixed(m))):
            yield tuple(own.get(n, f) for n, f in zip(drawn, chosen, strict=True))

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
    try:
        at = program.judged(values)
    except NoValue as none:
        pattern = program.evaluate(values, pattern_only=True)
        left = pattern[instance.side.unions[0][0]]
        kind_ = "promise" if none.promise else "none"
        return _counterexample(instance, values, _shown(left), f"nothing: {none}", kind_), False
    if at is None:
        return None, False
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
            held = "integer" if discrete(left) and numbers != "field" else numbers
            if numbers == "field":  # residues beside zero
                left, right = (np.where(x > PRIME // 2, x - PRIME, x) for x in (left, right))
            texts = [_shown(left), _shown(right)]
            if texts[0] == texts[1]:
                texts = [_shown(left, 17), _shown(right, 17)]
            over = {"field": f"arithmetic modulo {PRIME}", "wide": str(left.dtype)}
            name = over.get(numbers, instance.types[root].dtype)
            return _counterexample(instance, values, texts[0], texts[1], held, name), False
    return None, judged


# Telling it


def _simplest(
    rule: Rule,
    instance: Instance,
    programs: _Programs,
    values: Mapping[str, Array],
    numbers: Numbers,
    found: Counterexample,
) -> Counterexample:
    """The same failure with simpler numbers: whole inputs first, then element by element."""
    best, left = dict(values), _SIMPLER

    def fails(name: str, at: Any, number: float) -> bool:
        nonlocal found, left
        left -= 1
        other = np.array(best[name])
        other[at] = number
        try:
            problem, _ = _compare(rule, instance, programs, {**best, name: other}, numbers)
        except NoReference:
            return False
        if problem is None or problem.numbers != found.numbers:
            return False
        best[name], found = other, problem
        return True

    for name, x in values.items():
        if name in instance.side.constants or x.dtype.names:
            continue
        simple = [c for c in _SIMPLE if _exact(c, x.dtype) and (c >= 0 or numbers != "field")]
        parts: list[Any] = [...]
        if 1 < x.size <= _FEW_ELEMENTS:
            parts += np.ndindex(x.shape)
        for at in parts:
            for number in simple:
                if left <= 0 or (best[name][at] == number).all() or fails(name, at, number):
                    break
    return found


def _exact(number: float, dtype: np.dtype[Any]) -> bool:
    """Whether a dtype has this number."""
    held = np.asarray(number).astype(dtype)
    return bool(held.astype(np.complex128) == number)


def _counterexample(
    instance: Instance,
    values: Mapping[str, Array],
    left: str,
    right: str,
    numbers: str,
    arithmetic: str = "",
) -> Counterexample:
    lines = [f"{_word(name)}: {t.dtype}{list(t.shape)}" for name, t in instance.inputs.items()]
    lines += [f"left:  {line}" for line in _written(instance, instance.side.nodes)]
    lines += [f"right: {line}" for line in _written(instance, instance.side.built)]
    ends = ", ".join(f"{_word(a)} becomes {_word(b)}" for a, b in instance.side.unions)
    return Counterexample(
        "\n".join([*lines, ends]),
        {_word(n): _shown(v) for n, v in values.items()},
        left,
        right,
        numbers,
        arithmetic,
    )


def _written(instance: Instance, nodes: Sequence[Node]) -> Iterator[str]:
    for node in nodes:
        entry = instance.applied[node.signature]
        params = {k: readable(v) for k, v in entry.params.items() if v is not None}
        shown = f" {params}" if params else ""
        yield f"{_word(node.name)} = {entry.kernel}({', '.join(map(_word, node.operands))}){shown}"


def _word(name: str) -> str:
    return name.replace(" ", "").removesuffix("_")


def _shown(x: Array, digits: int = 6) -> str:
    values = np.asarray(x)
    if digits > 6 and values.dtype.kind == "f":
        values = values.astype(np.float64)
    text = np.array2string(values, precision=digits, threshold=40, separator=", ")
    return " ".join(text.split())


# Facts: what a rule may do besides uniting what is equal.
#
# Verification tries what a rule unites. A rule that asserts facts (a tensor is the constant 0, a
# layout becomes another for nothing) changes what other rules believe, which nothing here can try;
# so it is refused. Facts that can only keep rules from firing are allowed, and facts of relations
# that a book declares for itself: the laws of rules that ask for them are tried without.


#: An order among values: bodies that ask for it fire less often, and that is all.
_HARMLESS = ("order", "following")


def refuse_facts(rule: Rule, refusal: type[RuleError]) -> None:
    """Raise `refusal` for a rule whose effect verification cannot see."""
    if rule.ruleset not in PROGRAM_RULESETS:
        if content(rule) not in receipts():
            raise refusal(
                f"rule {rule.name!r} is refused: it asserts facts about layouts ({rule.ruleset}), "
                "which no program can be tried on",
                where=rule.where,
                hint=f"Rules of one's own rewrite programs: {', '.join(PROGRAM_RULESETS)}.",
            )
        return
    for body, actions in rule_sides(rule):
        bound = _names(body)
        for action in actions:
            told = _asserted(action, bound)
            if told:
                raise refusal(
                    f"rule {rule.name!r} is refused: {told}, which no program can be tried on",
                    where=rule.where,
                    hint="A rule's actions are `union`s of what is equal, and `let`s.",
                )


def _asserted(action: Form, bound: set[str]) -> str:
    """What an action asserts that no evaluation can see; nothing for one that is in order.

    Names that it defines are added to those that are `bound`.
    """
    if not isinstance(action, list) or not action:
        return f"it does {action!r:.40}"
    head, *rest = action
    if head == "union" and len(rest) == 2:
        wrong = [f for f in rest if not _term(f, bound)]
        return f"it unites with {_form_text(wrong[0])}" if wrong else ""
    if head == "let" and len(rest) == 2 and isinstance(rest[0], str):
        bound.add(rest[0])
        return "" if _term(rest[1], bound) else f"it makes {_form_text(rest[1])}"
    if head == "set" and len(rest) == 2 and isinstance(rest[0], list):
        head = rest[0][0]
    if isinstance(head, str) and head in OPERATORS:
        return "" if _term(action, bound) else f"it makes {_form_text(action)}"
    if isinstance(head, str) and (head in _HARMLESS or head not in _declared() | _COMMANDS):
        return ""
    return f"it asserts {_form_text(action)}"


_COMMANDS = {"delete", "subsume", "panic", "extract", "let", "union", "set"}


@cache
def _declared() -> frozenset[str]:
    """Every relation, function and constructor of the schema."""
    named = re.findall(r"\((?:relation|function|constructor)\s+([^\s()]+)", schema())
    made = re.findall(r"^\s+\((\w+)", schema(), re.MULTILINE)
    return frozenset([*named, *made, *re.findall(r"\((Op\d|Leaf)\b", schema())])


def _term(form: Form, bound: set[str]) -> bool:
    """Whether a form is a tensor that the body binds, or operations on such."""
    if isinstance(form, str):
        return form in bound
    if not form or form[0] not in OPERATORS or len(form) < 2 or not isinstance(form[1], str):
        return False
    return all(_term(f, bound) for f in form[2:])


def _names(form: Form) -> set[str]:
    if isinstance(form, str):
        return {form}
    return {name for part in form for name in _names(part)}


def _form_text(form: Form) -> str:
    text = form if isinstance(form, str) else f"({' '.join(map(_form_text, form))})"
    return text if len(text) <= 60 else text[:57] + "..."
