"""The commands of rules: rules lists them, verify tries them, and checks saved files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapestry_egg.columns import columns
from tapestry_egg.errors import RuleError, TapestryError

from .console import Json, Kernels, complain, load_any, print_fields, print_json

if TYPE_CHECKING:
    from tapestry_egg.rules import Rule
    from tapestry_egg.rules.verify.trust import Finding


def rules(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One rule, in full.")] = "",
    book: Annotated[
        list[str] | None,
        typer.Option("--rules", metavar="FILE", help="A rule file of yours; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the rewrite rules, or show one."""
    from tapestry_egg.rules import load_books
    from tapestry_egg.rules.language.book import book_names
    from tapestry_egg.rules.language.receipts import content, receipts

    found = [rule for one in load_books([*book_names(), *(book or ())]) for rule in one.rules]
    if name:
        matching = [rule for rule in found if rule.name == name]
        if not matching:
            raise RuleError(f"no rule {name!r}", hint="`tapestry-egg rules` lists them.")
        fields = {k: v for k, v in asdict(matching[0]).items() if v}
        if said := receipts().get(content(matching[0])):
            fields["verified"] = said
        print_json(fields) if as_json else print_fields(fields)
    elif as_json:
        print_json([asdict(rule) for rule in found])
    else:
        rows = [["rule", "set", "numerics", "law"]]
        rows += [[r.name, r.ruleset, r.numerics, " ".join(r.law.split())] for r in found]
        print(columns(rows))


def verify(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE...]", help="Saved files, rule files; our own rules if none."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also rules that have passed before.")
    ] = False,
    receipts: Annotated[
        bool, typer.Option("--receipts", help="Note in the package that its own rules passed.")
    ] = False,
    kernels: Kernels = None,
    as_json: Json = False,
) -> None:
    """Check saved files, and rules by trying them.

    A rule file is checked rule by rule: both sides are computed on small programs of every kind,
    and a rule that is not true is refused with a counterexample. Laws of single elements are proven
    besides where a solver is installed (the extra `smt`). Without a file, the rules that ship with
    tapestry-egg are checked.
    """
    from tapestry_egg.rules.language.book import book_names
    from tapestry_egg.rules.verify.proofs import solver_installed

    verdicts: list[dict[str, Any]] = []
    said: list[tuple[Rule, str]] = []
    shown = 0
    for file, holds in _verified(files or book_names(), again, said):
        if isinstance(holds, TapestryError):
            verdict = {"file": file, "ok": False, "error": str(holds)}
        else:
            verdict = {"file": file, "ok": True, "holds": holds}
        verdicts.append(verdict)
        if as_json:
            print_json(verdict)
        elif verdict["ok"]:
            print(f"{file}: {verdict['holds']}: ok")
            rows = [[f"  {rule.name}", words] for rule, words in said[shown:] if words]
            if rows and file not in book_names():
                print(columns(rows))
        else:
            complain(str(verdict["error"]))
        shown = len(said)
    if said and not solver_installed() and not as_json:
        print("Nothing is proven: there is no solver (pip install 'tapestry-egg[smt]').")
    if not all(verdict["ok"] for verdict in verdicts):
        raise typer.Exit(1)
    if receipts and not files:
        from tapestry_egg.rules.language.receipts import write_receipts

        write_receipts([(rule, words) for rule, words in said if rule.book in book_names()])


def _verified(
    files: Sequence[str], again: bool, said: list[tuple[Rule, str]]
) -> Iterator[tuple[str, str | TapestryError]]:
    """What every file holds, in words, or what is wrong with it; what is said of each rule is added
    to `said`. Rules are tried all at once."""
    from tapestry_egg.rules import RuleBook, load_book
    from tapestry_egg.rules.language.book import book_names, checked_names, is_shipped
    from tapestry_egg.rules.verify.trust import verified_all

    held: dict[str, str | RuleBook | TapestryError] = {}
    known: dict[str, str] = {}  # names of rules, which are used together with those that ship
    for name in book_names():
        known |= checked_names(load_book(name), known)
    for file in dict.fromkeys(files):
        try:
            rules = Path(file).suffix in (".yaml", ".yml") or file in book_names()
            held[file] = read = load_book(file) if rules else _verify(file)
            if isinstance(read, RuleBook) and not is_shipped(read):
                known |= checked_names(read, known)
        except TapestryError as error:
            held[file] = error
    books = {file: book for file, book in held.items() if isinstance(book, RuleBook)}
    found = iter(verified_all([rule for book in books.values() for rule in book.rules], again))
    for file, what in held.items():
        if isinstance(what, RuleBook):
            mine = [next(found) for _ in what.rules]
            said += [
                (r, "" if v is None else str(v)) for r, v in zip(what.rules, mine, strict=True)
            ]
            yield file, _words(mine)
        else:
            yield file, what


def _verify(file: str) -> str:
    """What a saved file holds, in words. Raises the TapestryError that is wrong with it."""
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.graph.blockgraph import verify_graph

    loaded = load_any(file)
    if isinstance(loaded, Front):
        for plan in loaded.plans:
            verify_graph(plan.graph, where=f"{file}: plan {plan.name}")
        return f"{len(loaded.plans)} plan{'' if len(loaded.plans) == 1 else 's'}"
    verify_graph(loaded.graph, where=file)
    return f"{len(loaded.graph.operations)} operations"


def _words(found: Sequence[Finding]) -> str | RuleError:
    """How many rules a file holds, and on how many programs they were tried; or an error that
    tells of every rule that fails."""
    refused = [error for error in found if isinstance(error, RuleError)]
    if refused:
        return RuleError("\n".join(map(str, refused)))
    tried = [v for v in found if v is not None and not isinstance(v, RuleError)]
    words = f"{len(found)} rule{'' if len(found) == 1 else 's'}"
    if not tried:
        return words
    programs, inputs = (sum(getattr(v, k) for v in tried) for k in ("instances", "cases"))
    proven = sum(bool(v.proven) for v in tried)
    besides = f", {proven} proven besides" if proven else ""
    return (
        f"{words}, {len(tried)} of them tried on {programs} programs with {inputs} inputs{besides}"
    )
