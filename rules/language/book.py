"""Rule books: YAML files of rules that a person reads, each carrying the egglog text that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

from tapestry_egg.errors import RuleError
from tapestry_egg.yaml_nodes import YamlNode, compose_yaml_text, read_yaml_text

from .recipe import Recipe, read_recipe
from .rewrites import compile_rule

Numerics = Literal["exact", "reorders", "changes_rounding"]
RULESETS = ("fold", "sharding", "collectives", "algebra", "fusion", "reduction")
#: Rulesets that rewrite the program; they know nothing of meshes.
PROGRAM_RULESETS = ("algebra", "fusion", "reduction")

#: The books that `optimize` uses when nothing else is asked for.
DEFAULT_BOOKS = (
    *("sharding", "collectives", "algebra", "linear", "structure", "reduction", "fusion"),
    *("convolution", "streaming", "loss", "lookups"),
)

#: Ends the name of a rule that is read from right to left (`way: both`).
BACK = "-back"

#: Where the books are that ship with tapestry-egg.
BOOKS = Path(__file__).parents[1] / "books"
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
    return Path(__file__).with_name("schema.egg").read_text(encoding="utf-8")


def book_names() -> tuple[str, ...]:
    """Names of the books that ship with tapestry-egg."""
    return tuple(sorted(p.stem for p in BOOKS.glob("*.yaml")))


def is_shipped(book: RuleBook) -> bool:
    """Whether a book came with tapestry-egg."""
    return Path(book.path).resolve().parent == BOOKS.resolve()


def load_book(source: str | Path) -> RuleBook:
    """Read a rule book: the name of one that ships with us, or the path of a user's file.

    Raises RuleError with file, line and column when the file is missing or malformed, or when the
    egglog text of a rule does not parse.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        path = BOOKS / f"{source}.yaml"
        if not path.exists():
            raise RuleError(
                f"unknown rule book {str(source)!r}",
                hint=f"Known books: {', '.join(book_names())}; or give the path of a .yaml file.",
            )
        return _shipped(path, path.stat().st_mtime_ns)
    return _read(path)


@cache
def _shipped(path: Path, _: int) -> RuleBook:
    """A book that ships with us, as it was when it was last changed."""
    return _read(path)


def _read(path: Path) -> RuleBook:
    text = read_yaml_text(path, RuleError, str(path))
    return _book(path, text, compose_yaml_text(text, RuleError, str(path)))


def load_books(sources: Iterable[str | Path | RuleBook]) -> tuple[RuleBook, ...]:
    """Read several books; rule names must be unique over all of them."""
    books = tuple(s if isinstance(s, RuleBook) else load_book(s) for s in sources)
    known: dict[str, str] = {}
    for book in books:
        known |= checked_names(book, known)
    return books


def checked_names(book: RuleBook, known: Mapping[str, str]) -> dict[str, str]:
    """The names of a book's rules, and where each is. Raises RuleError for one that the book has
    twice, or that is `known`."""
    own: dict[str, str] = {}
    for rule in book.rules:
        other = own.get(rule.name) or known.get(rule.name)
        if other is not None:
            raise RuleError(
                f"rule {rule.name!r} is defined twice",
                where=rule.where,
                hint=f"The other one is at {other}; rename one of them.",
            )
        own[rule.name] = rule.where
    return own


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


def _book(path: Path, text: str, root: YamlNode | None) -> RuleBook:
    if root is None:
        raise RuleError("a rule file is a mapping with `rules:`", where=f"{path}:1:1")
    entry = root.fields("a rule file", ("rules",), ("ruleset",))
    ruleset = entry["ruleset"].text() if "ruleset" in entry else "algebra"
    nodes = entry["rules"].items()
    rules = [r for node in nodes for r in _rules(path, text, node, ruleset)]
    return RuleBook(path.stem, tuple(rules), str(path))


def _rules(path: Path, text: str, node: YamlNode, ruleset: str) -> list[Rule]:
    """The rules of one entry: one, or one for each direction."""
    names = node.entries("a rule")
    forms = [k for k in ("match", "egg", "include") if k in names]
    own = {"match": _TERMS, "egg": _TEXT, "include": _TEXT}
    kinds = [own[form] for form in forms] if len(forms) == 1 else [_TERMS, _TEXT]
    entry = node.fields("a rule", _REQUIRED, (*_OPTIONAL, *(key for kind in kinds for key in kind)))
    item = {
        key: entry[key].text() if key in entry else ""
        for key in (*_REQUIRED, "ruleset", "example", "provenance")
    }
    if empty := [key for key in _REQUIRED if not item[key]]:
        raise entry[empty[0]].error(f"{empty[0]!r} is empty")
    if len(forms) != 1:
        raise node.error("a rule needs either `match` and `replace`, or `egg`, or `include`")
    if item["numerics"] not in ("exact", "reorders", "changes_rounding"):
        raise entry["numerics"].error(
            f"numerics is {item['numerics']!r}", "It is exact, reorders or changes_rounding."
        )
    chosen = item["ruleset"] or ruleset
    if chosen not in RULESETS:
        raise entry.get("ruleset", node).error(
            f"unknown ruleset {chosen!r}", f"Rulesets are {', '.join(RULESETS)}."
        )
    if forms == ["match"]:
        sides = "\n".join(f"{k}: {_shown(entry.get(k))}" for k in ("match", "replace"))
        found: list[tuple[str, Recipe | None, str]] = [
            (c.egg, c.recipe, sides) for c in compile_rule(entry, node)
        ]
    else:
        found = [(_egg(path, text, entry), read_recipe(entry, node), "")]
    return [
        Rule(
            name=item["name"] + (BACK if k else ""),
            law=item["law"],
            reason=item["reason"],
            numerics=cast(Numerics, item["numerics"]),
            egg=egg,
            ruleset=chosen,
            book=path.stem,
            where=node.where,
            example=item["example"],
            guard=_shown(entry.get("guard")),
            provenance=item["provenance"],
            recipe=recipe,
            text=sides,
        )
        for k, (egg, recipe, sides) in enumerate(found)
    ]


def _egg(path: Path, text: str, entry: Mapping[str, YamlNode]) -> str:
    """The egglog text of a rule: its own, or that of the file that it includes."""
    if "egg" in entry:
        egg = entry["egg"].text()
        _check_egg(path, egg, lambda row, at: _within(text, entry["egg"], row, at))
        return egg
    name, folder = entry["include"].text(), path.parent.resolve()
    try:
        file = path.parent / name
        # Links are followed first: nothing outside the book's folder is read.
        if Path(name).is_absolute() or not file.resolve().is_relative_to(folder):
            raise entry["include"].error(
                f"{name!r} is not in the folder of the rule file",
                "Included files stand beside the rule file, or below it.",
            )
        egg = read_yaml_text(file, RuleError, name) if file.is_file() else file.read_text("utf-8")
    except (OSError, ValueError) as e:  # no such file, not UTF-8, not the name of a file
        raise entry["include"].error(f"cannot read the egglog file: {e}") from None
    _check_egg(file, egg, lambda row, at: (row, at))
    return egg


def _check_egg(path: Path, egg: str, place: Callable[[int, int], tuple[int, int]]) -> None:
    """Refuse unbalanced text and commands other than rules, with the place in the file."""
    for row, at, form in commands(egg):
        line, column = place(row, at)
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


def _within(text: str, node: YamlNode, line: int, column: int) -> tuple[int, int]:
    """Where in its file a place in a text field is; line and column count from 1."""
    mark = node.raw.start_mark
    if getattr(node.raw, "style", None) not in ("|", ">"):
        return mark.line + line, column if line > 1 else mark.column + 1 + column
    below = text.splitlines()[mark.line + 1 :]
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


def _shown(node: YamlNode | None) -> str:
    """A text, or the texts of a list, as people read them."""
    if node is None or node.is_mapping:
        return ""
    return f"[{', '.join(map(_shown, node.items()))}]" if node.is_list else node.text()
