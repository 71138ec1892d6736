"""Wants: what rules ask of Python between iterations, and the egglog text that asks it.

egglog computes no shapes. A rule whose actions build unseen signatures is split in two: where its
body matches, one half adds a `want` row of the signatures it looks at; Python answers such a row by
evaluating the rule's guard and recipe, and loads `granted` and `wanted` facts; the other half then
fires. Every term that a rule builds is recorded as `made`, so that a form can name its rules.

The half that fires matches the body again beside `granted`, which names all signatures. Of bodies
with more than four, egglog 13.2 loses joins then, and the rule fires where it does not match
(egglog 14 does not). So the half that asks keeps the matches of such a body, and the other one
reads those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tapestry_egg.egraphs.run import Facts, Row
from tapestry_egg.errors import RuleError, TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.scopes import Names, Scope
from tapestry_egg.metakernels.signatures.parameters import hashable, plain, readable
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.rules.language.book import Rule, commands
from tapestry_egg.rules.language.families import FAMILIES, families_of
from tapestry_egg.rules.language.recipe import MOST_GIVEN, Want
from tapestry_egg.rules.language.rewrites import defaults, spelled

# Faults of whoever wrote an expression. Any other (an index beyond the end of a list, a division
# that is not exact) only says that the rule does not apply to these signatures.
_AUTHORS = (
    "is not a name here",
    "is not an attribute of",
    "there is no function",
    "are not the types of operands",
    "is defined by itself",
)
#: The constructors of terms in schema.egg: kernels by their number of operands.
OPERATORS = tuple(f"Op{k}" for k in range(6))
#: An egglog form: an atom, or a list of forms.
Form = str | list["Form"]
#: Of bodies with more signatures, egglog 13.2 does not join all atoms with a fact about all of them
#: (measured: 3 % of random bodies of 5 to 8 kernels, none of 7 000 with fewer).
_MOST_JOINED = 4
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


@dataclass(frozen=True)
class Applied:
    """A kernel with its parameters on operands of given types; it has one output."""

    kernel: str
    params: Mapping[str, Any]
    inputs: tuple[TensorType, ...]
    output: TensorType
    remat: int | None  # operations of different recomputed regions never count as equal

    @cached_property
    def key(self) -> Any:
        """What equal entries share, and no others."""
        return (self.kernel, hashable(self.params), self.inputs, self.output, self.remat)

    @cached_property
    def signature(self) -> OperationSignature:
        """Its operation projection signature. Raises TemplateError where no template fits."""
        return registry.signature(self.kernel, self.params, self.inputs, (self.output,))

    @cached_property
    def losses(self) -> Mapping[str, float]:
        """In which ways results may be less precise than their dtype, and by how many bits."""
        return registry.losses(self.kernel, self.params, self.inputs)

    @cached_property
    def promises(self) -> tuple[str, ...]:
        """What it takes for granted of its operands."""
        return registry.promises(self.kernel, self.params, self.inputs)

    @cached_property
    def described(self) -> Mapping[str, Any]:
        """What the expressions of a rule see of it."""
        return _Described(self)


class _Described(Mapping[str, Any]):
    """The attributes of an applied kernel, each computed when it is first asked for."""

    _NAMES = ("kernel", "params", "inputs", "output", "flops")

    def __init__(self, applied: Applied) -> None:
        self._applied = applied
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in ("kernel", "inputs", "output"):
            return getattr(self._applied, name)
        if name not in self._made:
            if name not in self._NAMES:
                raise KeyError(name)
            params = name == "params"
            self._made[name] = (
                readable(self._applied.params) if params else self._applied.signature.whole_flops
            )
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(self._NAMES)

    def __len__(self) -> int:
        return len(self._NAMES)


class Catalogue:
    """The signatures of one program, numbered, those that rules wanted included."""

    def __init__(self) -> None:
        self.entries: list[Applied] = []
        self.reason = ""  # why the last answer was None
        self._numbers: dict[Any, int] = {}

    def number(self, a: Applied) -> int:
        """The number of an entry; equal entries share one."""
        found = self._numbers.get(a.key)
        if found is None:
            found = self._numbers[a.key] = len(self.entries)
            self.entries.append(a)
        return found

    def answer(self, rule: Rule, given: Sequence[int]) -> dict[str, int] | None:
        """Numbers of the signatures that a rule wants for the given ones; None if it must not fire.

        Raises RuleError, with the place in the rule's file, when an expression has a fault.
        """
        recipe = rule.recipe
        assert recipe is not None
        self.reason = ""
        entries = [self.entries[s] for s in given]
        if len({e.remat for e in entries}) > 1:
            return None
        made: dict[str, Applied] = {}
        failed: list[str] = []

        def make(name: str, want: Want) -> Any:
            model = entries[recipe.given.index(want.like)] if want.like else None
            kernel = model.kernel if model else want.kernel
            params = dict(model.params) if model else {}
            params.update({k: plain(value(scope)) for k, value in want.params.items()})
            params = {**_closest(kernel, entries), **params} if model is None else params
            inputs = want.inputs(scope)
            if not isinstance(inputs, tuple) or not all(isinstance(t, TensorType) for t in inputs):
                raise want.inputs.error(f"{inputs!r:.60} are not the types of operands")
            params = defaults(kernel, params, inputs) if model is None else spelled(params)
            if not registry.takes(kernel, params, inputs):
                raise want.inputs.error(f"JAX has no {kernel} of {', '.join(map(str, inputs))}")
            try:
                (output,) = registry.output_types(kernel, params, inputs)
            except TemplateError:
                failed.append(name)  # no template fits these operands: the rule does not apply
                raise
            made[name] = Applied(kernel, params, inputs, output, entries[0].remat)
            return made[name].described

        def computed(name: str, want: Want) -> Any:
            return lambda _: make(name, want)

        let: dict[str, Any] = {f"${k}": v for k, v in recipe.let.items()}
        let.update({f"${k}": computed(k, w) for k, w in recipe.wants.items()})
        scope: Scope = Names(let)
        assert isinstance(scope, Names)
        scope.update({f"${g}": e.described for g, e in zip(recipe.given, entries, strict=True)})
        try:
            if not all(guard(scope) for guard in recipe.guards):
                return None
            for name in recipe.wants:
                scope[f"${name}"]
            failed = list(made)
            for entry in made.values():  # a template may contradict itself on some operands
                _ = entry.signature
        except TemplateError as e:
            self.reason = e.what
            if failed or not any(x in e.what for x in _AUTHORS):
                return None
            raise RuleError(
                f"rule {rule.name!r}: {e.what}", where=e.where or rule.where, hint=e.hint
            ) from None
        return {name: self.number(entry) for name, entry in made.items()}


def _closest(kernel: str, entries: Sequence[Applied]) -> dict[str, Any]:
    """How precise a kernel is to be of which a rule says nothing: as the most precise operation
    that the rule looks at."""
    names = {n for template in registry.templates().get(kernel, ()) for n in template.closeness}
    said = [e for e in entries if any(e.params.get(n) is not None for n in names)]
    if not said:
        return {}
    least = min(said, key=lambda e: sum(e.losses.values()))
    return {n: least.params[n] for n in names if n in least.params}


def splat(array: Any) -> str | None:
    """A scalar constant as rules write it; None for any other constant."""
    value = np.asarray(array)
    number = value.ndim == 0 and (value.dtype.kind in "biuf" or value.dtype.name == "bfloat16")
    return repr(float(value)) if number else None


class Answers:
    """Answers to what rules ask while they run, each question once; the signatures that come of
    them go into the catalogue."""

    def __init__(self, catalogue: Catalogue, rules: Sequence[Rule]) -> None:
        self.catalogue = catalogue
        self._rules = {rule.name: rule for rule in rules}
        self._known = 0  # signatures that the rules know of
        self.answered: set[Row] = set()  # rows of `want` that were

    def news(self) -> Facts:
        """The kernels, with their families, of the signatures that the rules do not know yet."""
        new = list(enumerate(self.catalogue.entries))[self._known :]
        self._known = len(self.catalogue.entries)
        return {
            "kernel": [(s, a.kernel) for s, a in new],
            "member": [(s, f) for s, a in new for f in families_of(a.kernel)],
        }

    def answers(self, wants: Sequence[tuple[Any, ...]]) -> Facts:
        """Facts for the rows of `want` that were not answered before, where they are granted."""
        facts: dict[str, list[Row]] = {}
        for name, *given in sorted(row[: MOST_GIVEN + 1] for row in wants):
            if (name, *given) in self.answered:
                continue
            self.answered.add((name, *given))
            asked = [s for s in given if s >= 0]
            found = self.catalogue.answer(self._rules[name], asked)
            if found is None:
                continue
            facts.setdefault("granted", []).append((name, *given))
            for wanted, number in found.items():
                facts.setdefault("wanted", []).append((name, wanted, *given, number))
        return facts


def rule_forms(rule: Rule) -> list[str]:
    """The egglog commands that stand for a rule of the program's algebra.

    Raises RuleError for a rule whose wants are not bound to signatures in its body.
    """
    out = [text for _, _, text in commands(rule.egg) if text.startswith("(relation")]
    relations = [parse(text) for text in out]
    sorts = {str(form[1]): form[2] for form in relations if len(form) == 3}
    for part, (body, actions) in enumerate(rule_sides(rule)):
        out.extend(_split(rule, part, body, actions, sorts))
    return out


def rule_sides(rule: Rule) -> list[tuple[list[Form], list[Form]]]:
    """(body, actions) of every egglog rule in a rule's text; rewrites are rules that unite their
    two sides.

    Raises RuleError for a text that is none, or uses a relation otherwise than schema.egg says.
    """
    found: list[tuple[list[Form], list[Form]]] = []
    for _, _, text in commands(rule.egg):
        level = deepest = 0
        for c in text:
            level += (c == "(") - (c == ")")
            deepest = max(deepest, level)
        if deepest > _DEEPEST:
            raise RuleError(f"egglog text of more than {_DEEPEST} levels", where=rule.where)
        form = parse(text)
        fault = _fault(form)
        if fault:
            raise RuleError(
                f"the egglog text of rule {rule.name!r} is malformed: {fault}",
                where=rule.where,
                hint="A rule is (rule (ATOM ...) (ACTION ...)), or (rewrite TERM TERM).",
            )
        assert isinstance(form, list)
        head, *rest = form
        if head == "rule":
            found.append((list(rest[0]), list(rest[1])))
        elif head in ("rewrite", "birewrite"):
            when = list(rest[3]) if len(rest) > 3 else []
            sides = [(rest[0], rest[1])] + ([(rest[1], rest[0])] if head == "birewrite" else [])
            found += [([["=", "whole__", a], *when], [["union", "whole__", b]]) for a, b in sides]
    return found


#: Levels of parentheses in a rule.
_DEEPEST = 100
#: Atoms and actions of so many parts, the name among them.
_PARTS = {"kernel": 3, "member": 3, "splat": 3, "let": 3, "union": 3}


def _fault(form: Form) -> str:
    """What is wrong with a command; nothing where it is well-formed."""
    if not isinstance(form, list) or not form:
        return "it is no command"
    head, *rest = form
    if head == "rule" and (len(rest) < 2 or not all(isinstance(f, list) for f in rest[:2])):
        return "a rule has a list of atoms and a list of actions"
    if head in ("rewrite", "birewrite"):
        guarded = len(rest) == 4 and rest[2] == ":when" and isinstance(rest[3], list)
        if len(rest) != 2 and not guarded:
            return f"a {head} has two terms, and may have `:when (ATOM ...)`"
    for part in rest:
        for atom in part if isinstance(part, list) and head != "relation" else ():
            if wrong := _misuse(atom):
                return wrong
    return ""


def _misuse(form: Form) -> str:
    """How an atom, an action or a term in it is none; nothing where it is fine."""
    if not isinstance(form, list):
        return ""
    head = form[0] if form and isinstance(form[0], str) else ""
    text = show(form)
    operator = re.fullmatch(r"Op(\d)", head)
    if operator and len(form) != int(operator[1]) + 2:
        return f"{text:.60} has a signature and {operator[1]} operands"
    if len(form) != _PARTS.get(head, len(form)) or (head == "=" and len(form) < 3):
        return f"{text:.60} has {'two parts or more' if head == '=' else 'two parts'}"
    if head == "member" and str(form[2]).strip('"') not in FAMILIES:
        return f"there is no family {form[2]}"
    if head == "splat":
        try:
            float(str(form[2]).strip('"'))
        except ValueError:
            return f"{form[2]} is not a number"
    return next((wrong for part in form[1:] if (wrong := _misuse(part))), "")


def _split(
    rule: Rule, part: int, body: list[Form], actions: list[Form], relations: Mapping[str, Form]
) -> list[str]:
    record: list[Form] = []
    for action in actions:
        record.extend(_records(rule.name, action))
    actions = [*actions, *record]
    recipe = rule.recipe
    if recipe is None or not any(_mentions(body, g) for g in recipe.given):
        return [show(["rule", body, actions])]
    missing = [g for g in recipe.given if not _mentions(body, g)]
    if missing:
        raise RuleError(
            f"rule {rule.name!r} does not bind {missing[0]!r}, which is in `given`",
            where=rule.where,
        )
    given: list[Form] = [*recipe.given, *("-1",) * (MOST_GIVEN - len(recipe.given))]
    quoted = f'"{rule.name}"'
    used = [name for name in recipe.wants if _mentions(actions, name)]
    asked: list[Form] = [["want", quoted, *given]]
    matched, declared = body, []
    if len(recipe.given) > _MOST_JOINED:
        kept = [v for v in _variables(body) if v in recipe.given or _mentions(actions, v)]
        table = f"matched-{rule.name.encode().hex()}-{part}"
        terms = _terms(body, relations)
        sorts: list[Form] = ["T" if v in terms else "i64" for v in kept]
        declared = [show(["relation", table, sorts])]
        matched = [[table, *kept]]
        asked = [*asked, [table, *kept]]
    guarded: list[Form] = [*matched, ["granted", quoted, *given]]
    guarded += [["=", name, ["wanted", quoted, f'"{name}"', *given]] for name in used]
    return [*declared, show(["rule", body, asked]), show(["rule", guarded, actions])]


def _variables(form: Form) -> list[str]:
    """The variables of atoms, in order."""
    if isinstance(form, str):
        return [] if form[0] == '"' or _NUMBER.fullmatch(form) else [form]
    inner = form[1:] if form and isinstance(form[0], str) else form
    return list(dict.fromkeys(v for part in inner for v in _variables(part)))


def _terms(body: list[Form], relations: Mapping[str, Form]) -> set[str]:
    """The variables of atoms that stand for classes of terms: operands, what they make, what rules
    keep as such in `relations` of their own (by the sorts of their columns), and what equals one.
    """
    found, equal = set[str](), list[set[str]]()
    waiting: list[Form] = list(body)
    while waiting:
        form = waiting.pop()
        if not isinstance(form, list) or not form:
            continue
        head, *parts = form
        names = [v if isinstance(v, str) else "" for v in parts]
        if head in OPERATORS:
            found.update(names[1:])
        elif head == "=":
            made = any(isinstance(p, list) and p[0] in OPERATORS for p in parts)
            (found.update if made else equal.append)({*names} - {""})
        elif isinstance(head, str):
            columns = zip(names, relations.get(head, ()), strict=False)
            found.update(name for name, sort in columns if sort == "T")
        waiting += form
    for _ in equal:  # what equals what equals a term
        found.update(*(names for names in equal if names & found))
    return found


def _records(name: str, form: Form) -> Iterator[Form]:
    """`made` actions for every term that an action builds, and for merging two classes."""
    if not isinstance(form, list):
        return
    if form[0] == "union" and all(isinstance(x, str) for x in form[1:]):
        yield ["made", f'"{name}"', form[1], "-1"]
    if isinstance(form[0], str) and form[0] in OPERATORS:
        yield ["made", f'"{name}"', form, form[1]]
    for part in form[1:]:
        yield from _records(name, part)


def _mentions(form: Form, name: str) -> bool:
    return form == name if isinstance(form, str) else any(_mentions(f, name) for f in form)


def parse(text: str) -> Form:
    """An egglog form as nested lists; strings keep their quotes, comments are dropped."""
    stack: list[list[Form]] = [[]]
    at, n = 0, len(text)
    while at < n:
        c = text[at]
        if c == ";":
            while at < n and text[at] != "\n":
                at += 1
        elif c == "(":
            stack.append([])
            at += 1
        elif c == ")":
            done = stack.pop()
            stack[-1].append(done)
            at += 1
        elif c.isspace():
            at += 1
        else:
            end = at + 1
            if c == '"':
                end = text.index('"', end) + 1
            else:
                while end < n and not text[end].isspace() and text[end] not in '();"':
                    end += 1
            stack[-1].append(text[at:end])
            at = end
    return stack[0][0]


def show(form: Form) -> str:
    """The text of a form."""
    return form if isinstance(form, str) else f"({' '.join(map(show, form))})"
