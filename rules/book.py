"""Rule books: YAML files of rules that a person reads, each carrying the egglog text that runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ..errors import RuleError
from .language import compile_rule
from .recipe import Recipe, read_recipe

Numerics = Literal["exact", "reorders", "changes_rounding"]
RULESETS = ("fold", "sharding", "collectives", "algebra", "fusion", "reduction")
#: Rulesets that rewrite the program; they know nothing of meshes.
PROGRAM_RULESETS = ("algebra", "fusion", "reduction")

#: The books that `optimize` uses when nothing else is asked for.
DEFAULT_BOOKS = (
    *("sharding", "collectives", "algebra", "linear", "structure", "reduction", "fusion"),
    "convolution",
)

#: Ends the name of a rule that is read from right to left (`way: both`).
BACK = "-back"

_HERE = Path(__file__).parent
_REQUIRED = ("name", "law", "reason", "numerics")
_OPTIONAL = ("ruleset", "example", "guard", "let", "provenance")
#: What a rule written as terms has besides, and one written as egglog text (`include`: the text of
#: a file beside the rule file).
_TERMS = ("match", "replace", "way", "dtype", "order")
_TEXT = ("egg", "include", "given", "wants")


@dataclass(frozen=True)
class Rule:
    """One named rule, in one direction: the law it states, why it holds, and its egglog text.

    `text` is the rule as its author wrote it: `match` and `replace`, or nothing for egglog text.
    """

    name: str
    law: str
    reason: str
    numerics: Numerics
    egg: str
    ruleset: str
    book: str
    where: str  # file:line
    example: str = ""
    guard: str = ""
    provenance: str = ""
    recipe: Recipe | None = None
    text: str = ""


@dataclass(frozen=True)
class RuleBook:
    """The rules of one file, in the order of the file."""

    name: str
    rules: tuple[Rule, ...]
    path: str

    def without(self, *names: str) -> RuleBook:
        """The same book with the named rules removed, in both directions.

        Raises RuleError when a name is not in the book.
        """
        names = (*names, *(f"{n}{BACK}" for n in names))
        missing = {n for n in names if not n.endswith(BACK)} - {r.name for r in self.rules}
        if missing:
            raise RuleError(
                f"no rule {sorted(missing)[0]!r} in book {self.name!r}", where=self.path
            )
        return RuleBook(self.name, tuple(r for r in self.rules if r.name not in names), self.path)


def schema() -> str:
    """The egglog text that declares every relation the rules speak of."""
    return (_HERE / "schema.egg").read_text(encoding="utf-8")


def book_names() -> tuple[str, ...]:
    """Names of the books that ship with tapestry-egg."""
    return tuple(sorted(p.stem for p in _HERE.glob("*.yaml")))


def load_book(source: str | Path) -> RuleBook:
    """Read a rule book: the name of one that ships with us, or the path of a user's file.

    Raises RuleError with file, line and column when the file is missing or malformed, or when the
    egglog text of a rule does not parse.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        path = _HERE / f"{source}.yaml"
        if not path.exists():
            raise RuleError(
                f"unknown rule book {str(source)!r}",
                hint=f"Known books: {', '.join(book_names())}; or give the path of a .yaml file.",
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RuleError(f"cannot read the rule file: {e}", where=str(path)) from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = getattr(e, "problem", None) or str(e)
        raise RuleError(f"not valid YAML: {problem}", where=where) from None
    return _book(path, root, data)


def load_books(sources: Iterable[str | Path | RuleBook]) -> tuple[RuleBook, ...]:
    """Read several books; rule names must be unique over all of them."""
    books = tuple(s if isinstance(s, RuleBook) else load_book(s) for s in sources)
    seen: dict[str, str] = {}
    for book in books:
        for rule in book.rules:
            if rule.name in seen:
                raise RuleError(
                    f"rule {rule.name!r} is defined twice",
                    where=rule.where,
                    hint=f"The other one is at {seen[rule.name]}; rename one of them.",
                )
            seen[rule.name] = rule.where
    return books


def permitted(books: Iterable[RuleBook], numerics: str) -> tuple[RuleBook, ...]:
    """The books without the rules that `numerics` forbids.

    `reorders` leaves out rules that change rounding, `relaxed` allows all. Raises RuleError for
    any other word.
    """
    if numerics not in ("reorders", "relaxed"):
        raise RuleError(
            f"numerics is {numerics!r}", where="numerics", hint="It is 'reorders' or 'relaxed'."
        )
    if numerics == "relaxed":
        return tuple(books)
    return tuple(
        b.without(*(r.name for r in b.rules if r.numerics == "changes_rounding")) for b in books
    )


def _book(path: Path, root: yaml.Node | None, data: Any) -> RuleBook:
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        raise RuleError("a rule file is a mapping with `rules:`", where=f"{path}:1:1")
    ruleset = data.get("ruleset", "algebra")
    entries = _child(root, "rules")
    if not isinstance(entries, yaml.SequenceNode) or not isinstance(data.get("rules"), list):
        raise RuleError("`rules:` must be a list of rules", where=_at(path, root))
    unknown = set(data) - {"ruleset", "rules"}
    if unknown:
        raise RuleError(f"unknown key {sorted(unknown)[0]!r}", where=_at(path, root))
    rules = [
        rule
        for node, item in zip(entries.value, data["rules"], strict=True)
        for rule in _rules(path, node, item, ruleset)
    ]
    return RuleBook(path.stem, tuple(rules), str(path))


def _rules(path: Path, node: yaml.Node, item: Any, ruleset: str) -> list[Rule]:
    """The rules of one entry: one, or one for each direction."""
    where = _at(path, node)
    if not isinstance(item, dict) or not isinstance(node, yaml.MappingNode):
        raise RuleError("a rule is a mapping", where=where)
    for key in _REQUIRED:
        if not isinstance(item.get(key), str):
            raise RuleError(
                f"a rule needs the text field {key!r}",
                where=where,
                hint=f"Every rule has {', '.join(_REQUIRED)}.",
            )
    forms = [k for k in ("match", "egg", "include") if k in item]
    if len(forms) != 1:
        raise RuleError(
            "a rule needs either `match` and `replace`, or `egg`, or `include`", where=where
        )
    allowed = {*_REQUIRED, *_OPTIONAL, *(_TERMS if forms == ["match"] else _TEXT)}
    for key in item:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), sorted(allowed), 1)
            raise RuleError(
                f"unknown key {key!r}",
                where=_at(path, _child(node, str(key)) or node),
                hint=f"Did you mean {near[0]}?" if near else f"There are {', '.join(allowed)}.",
            )
    if item["numerics"] not in ("exact", "reorders", "changes_rounding"):
        raise RuleError(
            f"numerics is {item['numerics']!r}",
            where=_at(path, _child(node, "numerics") or node),
            hint="It is exact, reorders or changes_rounding.",
        )
    chosen = item.get("ruleset", ruleset)
    if chosen not in RULESETS:
        raise RuleError(
            f"unknown ruleset {chosen!r}",
            where=_at(path, _child(node, "ruleset") or node),
            hint=f"Rulesets are {', '.join(RULESETS)}.",
        )
    if forms == ["match"]:
        text = f"match: {item['match']}\nreplace: {item.get('replace')}"
        found: list[tuple[str, Recipe | None, str]] = [
            (c.egg, c.recipe, text) for c in compile_rule(path, node)
        ]
    else:
        found = [(_egg(path, node, item), read_recipe(path, node), "")]
    return [
        Rule(
            name=item["name"] + (BACK if k else ""),
            law=item["law"],
            reason=item["reason"],
            numerics=item["numerics"],
            egg=egg,
            ruleset=chosen,
            book=path.stem,
            where=where,
            example=str(item.get("example", "")),
            guard=str(item.get("guard", "")),
            provenance=str(item.get("provenance", "")),
            recipe=recipe,
            text=text,
        )
        for k, (egg, recipe, text) in enumerate(found)
    ]


def _egg(path: Path, node: yaml.Node, item: Any) -> str:
    """The egglog text of a rule: its own, or that of the file that it includes."""
    if "egg" in item:
        _check_egg(path, _child(node, "egg"), item["egg"])
        return str(item["egg"])
    file = path.parent / str(item["include"])
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        at = _at(path, _child(node, "include") or node)
        raise RuleError(f"cannot read the egglog file: {e}", where=at) from None
    _check_egg(file, None, text)
    return text


def _check_egg(path: Path, node: yaml.Node | None, text: str) -> None:
    """Refuse unbalanced text and commands other than rules, with the place in the file."""
    for row, at, form in commands(text):
        line, column = _within(node, row, at)
        head = form[1:].split(None, 1)[0].rstrip(")") if len(form) > 1 else ""
        if head not in ("rule", "rewrite", "birewrite", "relation"):
            raise RuleError(
                f"a rule may only declare rules, rewrites and relations, not {head!r}",
                where=f"{path}:{line}:{column}",
            )
        if not form.endswith(")"):
            raise RuleError(
                "unbalanced parentheses in the egglog text",
                where=f"{path}:{line}:{column}",
            )


def _within(node: yaml.Node | None, line: int, column: int) -> tuple[int, int]:
    """Where in its file a place in a text field is; line and column count from 1."""
    if node is None:
        return line, column
    mark = node.start_mark
    if getattr(node, "style", None) not in ("|", ">"):
        return mark.line + line, column if line > 1 else mark.column + 1 + column
    below = (mark.buffer or "").rstrip("\0").splitlines()[mark.line + 1 :]
    filled = next((x for x in below if x.strip()), "")
    return mark.line + 1 + line, len(filled) - len(filled.lstrip()) + column


def commands(text: str) -> list[tuple[int, int, str]]:
    """Top-level forms of an egglog text as (line from 1, column from 1, form)."""
    forms: list[tuple[int, int, str]] = []
    depth, begin, line, column = 0, 0, 1, 0
    at = (1, 1)
    comment = quoted = False
    for i, c in enumerate(text):
        column += 1
        if c == "\n":
            line, column, comment = line + 1, 0, False
        elif comment:
            continue
        elif c == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif c == ";":
            comment = True
        elif c == "(":
            if depth == 0:
                begin, at = i, (line, column)
            depth += 1
        elif c == ")":
            depth -= 1
            if depth == 0:
                forms.append((*at, text[begin : i + 1]))
            elif depth < 0:
                forms.append((line, column, ")("))  # reported as unbalanced
                depth = 0
    if depth > 0:
        forms.append((*at, text[begin:].rstrip().rstrip(")") + " "))
    return forms


def _child(node: yaml.Node, key: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for k, v in node.value:
            if getattr(k, "value", None) == key:
                return v  # type: ignore[no-any-return]
    return None


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
