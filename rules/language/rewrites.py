"""The rule language: a pattern and its replacement as terms, compiled to egglog and a recipe.

    match: t:add(s:contract(x, w), s:contract(x, v))
    replace: s(x, t(w, v))
    dtype: number
    guard: $x.rank == 2

Terms are described below. Every kernel of the pattern has a signature, called by its label; a
replacement may use it as a kernel (same kernel, same parameters), and all expressions see
`$s.params`, `$s.inputs`, `$s.output`, and `$x`, the type of tensor x. One label twice is one
signature; a label used as a kernel in a pattern asks for equal kernel and parameters on operands of
any type. Signatures of what a replacement builds are computed from the types of its operands.
`match` and `replace` may be lists of the same length: several results that are rewritten together.
`way: both` adds the rule read from right to left, where every parameter is the name of one that the
other side binds. `order: [w, v]` matches only where w comes before v in the program, so that two
tensors that are treated alike are matched once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import Any

from tapestry_egg.errors import RuleError, TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.language.expressions import Expression, Origin
from tapestry_egg.metakernels.language.faults import Fault, Text
from tapestry_egg.metakernels.language.parser import Parser
from tapestry_egg.metakernels.registry import templates
from tapestry_egg.yaml_nodes import YamlNode

from .families import DEFAULTS, default_params, kernels_of, words
from .recipe import MOST_GIVEN, Recipe, Want, checked, read_expressions, read_guard

# Terms: the two sides of a rule as text, `t:add(s:matmul(x, w), s:matmul(x, v))`.
#
# x                       any tensor; the same name is the same tensor
# 0, 1.5, z=0             a scalar constant of this value, in patterns; with a name, replacements
#                         may use it
# matmul(x, w)            a kernel, or a family of kernels (`families.py`), on operands
# s:matmul(x, w)          the same, and its signature is called s
# reduce[max](x)          the one kernel of a family that the bracket selects
# transpose{permutation=$p}(x)   in a pattern: binds $p, or is compared where it is more than a
#                                 new name; in a replacement: the parameters of what is built
# s(x, y)                 in a replacement: kernel and parameters as those of s


_JOINED = re.compile(r"-[a-z]+\b")
_NEGATIVE = re.compile(r"-\d")


@dataclass(frozen=True)
class Tensor:
    """A variable of a rule that stands for any tensor."""

    name: str
    at: int = 0


@dataclass(frozen=True)
class Constant:
    """A scalar of a known value."""

    value: float
    name: str = ""
    at: int = 0


@dataclass(frozen=True)
class Apply:
    """A kernel on operands; `params` are (name, text, offset of the text)."""

    head: str
    operands: tuple[Term, ...]
    label: str = ""
    select: str = ""
    params: tuple[tuple[str, str, int], ...] = ()
    at: int = 0


Term = Tensor | Constant | Apply


@dataclass(frozen=True, slots=True)
class TermText(Text):
    """The text of a term."""

    WHAT = "a term, or a list of terms"

    def term(self) -> Term:
        """The term, parsed. Raises TemplateError with the place of a syntax error."""
        try:
            reader = _Reader(self.text)
            term = reader.term()
            reader.of("end")
        except Fault as fault:
            raise self.fault(fault) from None
        except RecursionError:
            raise self.fault(Fault(0, "nested too deeply")) from None
        return term


def applications(term: Term) -> Iterator[Apply]:
    """Every kernel of a term, operands before those that read them."""
    if isinstance(term, Apply):
        for operand in term.operands:
            yield from applications(operand)
        yield term


def tensors(term: Term) -> Iterator[Tensor]:
    """Every variable of a term, from left to right."""
    if isinstance(term, Tensor):
        yield term
    elif isinstance(term, Apply):
        for operand in term.operands:
            yield from tensors(operand)


class _Reader(Parser):
    """A descent through the text of a term."""

    def name(self) -> str:
        """A word, or several that hyphens join, as in `scatter-add`."""
        name = self.of("word")
        text, end = str(name), name.start_pos + len(name)
        while (joined := _JOINED.match(self.text, end)) is not None:
            text, end = text + joined[0], joined.end()
            self.next()
            self.next()
        return text

    def number(self) -> float | None:
        """The number at hand; None where there is none."""
        begin = self.token.start_pos
        negative = _NEGATIVE.match(self.text, begin) is not None and self.next()
        if self.token.kind not in ("integer", "real"):
            return None
        token = self.next()
        if not isfinite(value := float(token)):
            raise Fault(begin, f"{token:.20} is beyond the numbers of a float64")
        return -value if negative else value

    def term(self) -> Term:
        begin = self.token.start_pos
        if (number := self.number()) is not None:
            return Constant(number, "", begin)
        head, label = self.name(), ""
        if self.take("="):
            if (number := self.number()) is None:
                self.of("integer", "real")
            assert number is not None, "else it was unexpected"
            return Constant(number, head, begin)
        if self.take(":"):
            label, head = head, self.name()
        select = ""
        if self.take("["):
            select = self.name()
            self.want("]")
        params = self.params()
        if not (self.want if label or select or params else self.take)("("):
            return Tensor(head, begin)
        operands: list[Term] = []
        while not self.take(")"):
            if operands:
                self.want(",")
            operands.append(self.term())
        return Apply(head, tuple(operands), label, select, params, begin)

    def params(self) -> tuple[tuple[str, str, int], ...]:
        if not self.take("{"):
            return ()
        out: list[tuple[str, str, int]] = []
        while not self.take("}"):
            if out:
                self.want(",")
            key = self.name()
            self.want("=")
            begin = self.token.start_pos
            self.expression()
            last = self.tokens[self.at - 1]
            out.append((key, self.text[begin : last.start_pos + len(last)], begin))
        return tuple(out)


#: What `dtype:` may say: the kinds of the one dtype that all tensors of the pattern have.
DTYPES: Mapping[str, tuple[str, ...]] = {
    "number": ("float", "complex", "int", "uint"),
    "float": ("float",),
    "real": ("float", "int", "uint"),
    "inexact": ("float", "complex"),
    "any": (),
}


@dataclass(frozen=True)
class Compiled:
    """A rule in one direction, ready for egglog."""

    egg: str
    recipe: Recipe


@dataclass(frozen=True)
class _Side:
    """The terms of one side, with their texts."""

    terms: tuple[Term, ...]
    texts: tuple[TermText, ...]


def compile_rule(entry: Mapping[str, YamlNode], rule: YamlNode) -> tuple[Compiled, ...]:
    """The directions in which the fields of a rule written as terms are read.

    Raises RuleError with file, line, column and a caret below the fault.
    """
    if "replace" not in entry:
        raise rule.error("a rule with `match` needs `replace`")
    way = entry["way"].text() if "way" in entry else "one"
    if way not in ("one", "both"):
        raise entry["way"].error(f"way is {way!r}", "It is one or both.")
    try:
        left, right = _side(entry["match"]), _side(entry["replace"])
        if len(left.terms) != len(right.terms):
            counts = f"{len(left.terms)} patterns, {len(right.terms)} replacements"
            raise entry["replace"].error(counts)
        out = [_Direction(entry, left, right).compiled()]
        if way == "both":
            out.append(_Direction(entry, *_reversed(left, right)).compiled())
    except TemplateError as e:
        raise RuleError(e.what, where=e.where, hint=e.hint) from None
    return tuple(out)


def _side(node: YamlNode) -> _Side:
    nodes = node.items() if node.is_list else [node]
    if not nodes:
        raise node.error(f"expected {TermText.WHAT}")
    texts = tuple(map(TermText.of, nodes))
    return _Side(tuple(text.term() for text in texts), texts)


class _Direction:
    """Compiles one direction: the pattern to atoms, the replacement to actions and wants."""

    def __init__(self, entry: Mapping[str, YamlNode], pattern: _Side, made: _Side) -> None:
        self.entry, self.pattern, self.made = entry, pattern, made
        self.atoms: list[str] = []
        self.given: dict[str, Apply] = {}  # label -> the application that it names
        self.classes: dict[
            Any, str
        ] = {}  # tensor, or application with its label -> egglog variable
        self.guards: list[Expression] = []
        self.let: dict[str, Expression] = {}
        self.wants: dict[str, Want] = {}
        self.text = pattern.texts[0]  # that of the term at hand
        labels = {a.label for side in (pattern, made) for t in side.terms for a in applications(t)}
        self.taken = labels | {v.name for t in pattern.terms for v in tensors(t)}

    def compiled(self) -> Compiled:
        roots = []
        for term, text in zip(self.pattern.terms, self.pattern.texts, strict=True):
            self.text = text
            roots.append(self._match(term))
        if len(self.given) > MOST_GIVEN:
            self.text = self.pattern.texts[0]
            raise self._here(0, f"more than {MOST_GIVEN} kernels in a pattern")
        for name, expression in read_expressions(self.entry, "let").items():
            if name in self.let or name in self.given:
                where = str(expression.origin)
                raise RuleError(f"{name!r} is a name of the pattern too", where=where)
            self.let[name] = expression
        actions = []
        for root, term, text in zip(roots, self.made.terms, self.made.texts, strict=True):
            self.text = text
            actions.append(f"(union {root} {self._make(term)[0]})")
        self._order()
        self._dtypes()
        self.guards += read_guard(self.entry)
        egg = f"(rule ({' '.join(self.atoms)})\n      ({' '.join(actions)}))\n"
        recipe = Recipe(tuple(self.given), tuple(self.guards), self.let, self.wants)
        return Compiled(egg, recipe)

    def _here(self, at: int, what: str, hint: str = "") -> TemplateError:
        return self.text.fault(Fault(at, what, hint))

    def _fresh(self, stem: str) -> str:
        n = 1
        while f"{stem}_{n}" in self.taken:
            n += 1
        self.taken.add(f"{stem}_{n}")
        return f"{stem}_{n}"

    def _parameter(self, text: str, at: int) -> Expression:
        return checked(Expression(text, self.text.origin.inside(self.text.text, at)))

    # The pattern

    def _match(self, term: Term) -> str:
        if not isinstance(term, Apply):
            raise self._here(term.at, "a pattern is a kernel on operands")
        return self._match_apply(term)

    def _match_apply(self, term: Apply) -> str:
        operands = [self._match_operand(o) for o in term.operands]
        model = None if term.select else self.given.get(term.head)
        kind = self._kind(model or term)
        label = term.label or self._fresh("s")
        known = self.given.setdefault(label, term)
        if (known.head, known.select, len(known.operands)) != (
            term.head,
            term.select,
            len(term.operands),
        ):
            raise self._here(term.at, f"{label!r} is the label of another kernel too")
        key = (label, tuple(operands))
        if key in self.classes:
            return self.classes[key]
        out = self.classes[key] = self._fresh("c")
        self.atoms.append(f"(= {out} (Op{len(operands)} {' '.join([label, *operands])}))")
        if known is term:
            self.atoms.append(kind.format(label))
            if model is not None:
                for part in ("kernel", "params"):
                    same = f"${label}.{part} == ${term.head}.{part}"
                    self.guards.append(Expression(same))
            for key_, text, at in term.params:
                self._bind(label, key_, text, at)
        for p, operand in enumerate(term.operands):
            name = getattr(operand, "name", "")
            if name:
                self.let.setdefault(name, Expression(f"${label}.inputs[{p}]"))
        return out

    def _kind(self, term: Apply) -> str:
        """The atom that says which kernels a signature may be of, with a gap for the signature."""
        while not term.select and term.head in self.given:
            term = self.given[term.head]
        kernels = kernels_of(term.head, term.select)
        if kernels is None:
            raise self._unknown(term)
        self._gives_one(term, kernels)
        if len(kernels) == 1:
            return f'(kernel {{}} "{kernels[0]}")'
        return f'(member {{}} "{term.head}")'

    def _match_operand(self, term: Term) -> str:
        if isinstance(term, Apply):
            return self._match_apply(term)
        if isinstance(term, Tensor):
            return self.classes.setdefault(term.name, f"{term.name}_")
        name = term.name or self._fresh("k")
        variable = self.classes.setdefault(name, f"{name}_")
        self.atoms.append(f'(splat {variable} "{term.value!r}")')
        return variable

    def _bind(self, label: str, key: str, text: str, at: int) -> None:
        value = f"get(${label}.params, {key})"
        name = text[1:]
        if text.startswith("$") and name.isidentifier() and name not in self.let:
            if name in self.taken:
                raise self._here(at, f"{text} is the name of a tensor or of a kernel here")
            self.let[name] = Expression(value)
            return
        inner = self._parameter(text, at)
        origin = replace(inner.origin, folded=True)
        self.guards.append(Expression(f"{value} == ({text})", origin))

    def _unknown(self, term: Apply) -> TemplateError:
        at = term.at + (len(term.label) + 1 if term.label else 0)
        word = f"{term.head}[{term.select}]" if term.select else term.head
        near = difflib.get_close_matches(term.head, [*words(), *self.given], 1)
        hint = "A kernel of your own needs its template: add_templates, or --kernels FILE.py."
        if near and near[0] != term.head:
            hint = f"Did you mean {near[0]}?"
        return self._here(at, f"there is no kernel or family {word}", hint)

    def _order(self) -> None:
        """Tensors that must come one after the other in the program: each pair is matched once."""
        if "order" not in self.entry:
            return
        names = self.entry["order"].texts()
        missing = [n for n in names if n not in self.classes]
        if len(names) < 2 or missing:
            raise self.entry["order"].error("`order` lists two or more tensors of the pattern")
        for name in names:
            self.atoms.append(f"(= at_{name} (order {self.classes[name]}))")
        for one, other in pairwise(names):
            self.atoms.append(f"(< at_{one} at_{other})")

    def _dtypes(self) -> None:
        if "dtype" not in self.entry:
            return
        node = self.entry["dtype"]
        word = node.text()
        if word not in DTYPES:
            raise node.error(f"dtype is {word!r}", f"It is one of {', '.join(DTYPES)}.")
        read = [
            f"${label}.{port}.dtype"
            for label, a in self.given.items()
            for port in ("output", *(f"inputs[{p}]" for p in range(len(a.operands))))
        ]
        text = f"equal([{', '.join(read)}])"
        if DTYPES[word]:
            text += f" and kind({read[0]}) in [{', '.join(DTYPES[word])}]"
        self.guards.append(Expression(text, replace(Origin.of(node), folded=True)))

    # The replacement

    def _make(self, term: Term) -> tuple[str, str]:
        """The egglog term that is built, and the expression of its type."""
        if isinstance(term, Constant):
            hint = "Name a constant of the pattern (`z=0`) and use the name."
            raise self._here(term.at, "a replacement cannot make a constant", hint)
        if isinstance(term, Tensor):
            if term.name not in self.classes:
                near = difflib.get_close_matches(
                    term.name, [c for c in self.classes if isinstance(c, str)], 1
                )
                hint = f"Did you mean {near[0]}?" if near else ""
                raise self._here(term.at, f"{term.name!r} is not a tensor of the pattern", hint)
            return self.classes[term.name], f"${term.name}"
        operands = [self._make(o) for o in term.operands]
        params = {k: self._parameter(text, at) for k, text, at in term.params}
        inputs = Expression(f"[{', '.join(t for _, t in operands)}]")
        like = term.head in self.given and not term.select
        kernel = "" if like else self._kernel(term)
        if kernel:
            self._have_values(term, kernel)
        want = Want(inputs, kernel, term.head if like else "", params)
        label = term.label or self._same(want) or self._fresh("n")
        if label in self.given:
            raise self._here(term.at, f"{label!r} is the label of a kernel of the pattern")
        known = self.wants.setdefault(label, want)
        if _spelled(known) != _spelled(want):
            if _spelled(known)[1:] != _spelled(want)[1:]:
                raise self._here(term.at, f"{label!r} is the label of another kernel too")
            # One label is one signature: its operands have the same types wherever it stands.
            self.guards.append(Expression(f"{known.inputs.text} == {want.inputs.text}"))
        text = " ".join([label, *(o for o, _ in operands)])
        return f"(Op{len(operands)} {text})", f"${label}.output"

    def _same(self, want: Want) -> str:
        return next((k for k, w in self.wants.items() if _spelled(w) == _spelled(want)), "")

    def _have_values(self, term: Apply, kernel: str) -> None:
        """Refuse a kernel that is built without parameters that no template of it does without."""
        given = {*DEFAULTS.get(kernel, {}), *(k for k, _, _ in term.params)}
        unset = [t.unset(given) for t in templates().get(kernel, ())]
        if not unset or not all(unset):
            return
        names = min(unset, key=len)
        operands = ", ".join(getattr(o, "name", "") or "..." for o in term.operands)
        shown = f"{term.head}{{{', '.join(f'{n}=...' for n in names)}}}({operands})"
        same = [a for a in self.given.values() if kernel in (kernels_of(a.head, a.select) or ())]
        hint = f"Give them, {shown}"
        if same:
            hint += (
                f", or take those of the pattern's: label it, `s:{same[0].head}(...)`, and write "
                f"`s({operands})`"
            )
        raise self._here(term.at, f"no values for {', '.join(names)} of {kernel}", f"{hint}.")

    def _kernel(self, term: Apply) -> str:
        kernels = kernels_of(term.head, term.select)
        if kernels is None:
            raise self._unknown(term)
        if len(kernels) > 1:
            raise self._here(
                term.at,
                f"{term.head} stands for several kernels",
                "A replacement names one, or uses the label of a kernel of the pattern.",
            )
        self._gives_one(term, kernels)
        return kernels[0]

    def _gives_one(self, term: Apply, kernels: Sequence[str]) -> None:
        """Refuse kernels that always have several results: a term stands for one."""
        for kernel in kernels:
            counts = [sum(o.count is None for o in t.outputs) for t in templates().get(kernel, ())]
            if min(counts, default=1) > 1:
                raise self._here(
                    term.at,
                    f"{kernel} gives {min(counts)} results, and a term stands for one",
                    "Rules rewrite kernels that give one result.",
                )


def _spelled(want: Want) -> Any:
    return (want.inputs.text, want.kernel, want.like, {k: e.text for k, e in want.params.items()})


def _reversed(left: _Side, right: _Side) -> tuple[_Side, _Side]:
    """The sides exchanged: what the replacement made is matched, what was matched is made."""
    heads = {a.label: a for t in left.terms for a in applications(t) if a.label}
    first: dict[str, str] = {}
    labels: dict[Any, str] = {}

    def match(term: Term) -> Term:
        if not isinstance(term, Apply):
            return term
        model = heads.get(term.head)
        operands = tuple(match(o) for o in term.operands)
        if model is None or term.select:
            return replace(term, operands=operands)
        label = labels.setdefault((term.head, operands), f"back_{len(labels) + 1}")
        if term.head in first and first[term.head] != label:
            return Apply(first[term.head], operands, label, "", (), term.at)
        first[term.head] = label
        return Apply(model.head, operands, label, model.select, model.params, term.at)

    def make(term: Term) -> Term:
        if not isinstance(term, Apply):
            return term
        operands = tuple(make(o) for o in term.operands)
        if term.label in first:
            return replace(term, head=first[term.label], select="", params=(), operands=operands)
        if term.head in first and not term.select:
            return replace(term, head=first[term.head], operands=operands)
        return replace(term, operands=operands)

    matched = tuple(match(t) for t in right.terms)
    made = tuple(make(t) for t in left.terms)
    return replace(right, terms=matched), replace(left, terms=made)


def defaults(
    kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]
) -> dict[str, Any]:
    """Parameters of a kernel on operands as JAX has them, those that a rule did not name too."""
    return spelled({**default_params(kernel, inputs[0].dtype if inputs else ""), **params})


def spelled(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with dtypes, enums, primitives and implementations as `tracing/codec.py` has
    them."""
    out = dict(params)
    for key in ("new_dtype", "preferred_element_type", "index_dtype", "dtype"):
        if isinstance(out.get(key), str):
            out[key] = {"$dtype": out[key]}
    for key, enum in _ENUMS.items():
        value = out.get(key)
        if isinstance(value, str):
            out[key] = _member(enum, value)
        elif isinstance(value, list | tuple):
            out[key] = [_member(enum, v) if isinstance(v, str) else v for v in value]
    for key, form in (("impl", "$key_impl"), ("select_prim", "$primitive")):
        if isinstance(out.get(key), str):
            out[key] = {form: out[key]}
    return out


def _member(enum: str, word: str) -> dict[str, Any]:
    name = word.upper()
    return {"$enum": ["DotAlgorithmPreset" if enum == "Precision" and "_" in name else enum, name]}


#: Parameters that are members of enums.
_ENUMS = {
    "accuracy": "AccuracyMode",
    "fft_type": "FftType",
    "mode": "GatherScatterMode",
    "precision": "Precision",
    "rounding_method": "RoundingMethod",
}
