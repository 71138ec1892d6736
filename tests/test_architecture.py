"""The tree: folders in the order in which a program meets them, and imports one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"

#: Methods of results that hand on to a later stage, as users expect them there: (from, to). They
#: import when they are called, and nothing else in their folders does.
DOORS = {
    ("tapestry_egg.plans.plan", "tapestry_egg.show.text"),  # Plan.explain
    ("tapestry_egg.plans.plan", "tapestry_egg.extract.certify.cost_parts"),  # costs_by, peak, ...
    ("tapestry_egg.plans.plan", "tapestry_egg.extract.certify.certificate"),  # Plan.lanes
    ("tapestry_egg.plans.plan", "tapestry_egg.why.tensor"),  # Plan.tensor
    ("tapestry_egg.plans.plan", "tapestry_egg.why.collective"),  # Plan.collective
    ("tapestry_egg.plans.plan", "tapestry_egg.why.line"),  # Plan.line
    ("tapestry_egg.plans.plan", "tapestry_egg.why.difference"),  # Plan.difference
    ("tapestry_egg.plans.plan", "tapestry_egg.why.why_not"),  # Plan.why_not
    ("tapestry_egg.plans.plan", "tapestry_egg.extract.pins.pins"),  # the types of its arguments
    ("tapestry_egg.plans.plan", "tapestry_egg.pipeline.settings"),
    ("tapestry_egg.extract.front.front", "tapestry_egg.why.why_not"),  # Front.why_not
    ("tapestry_egg.extract.front.front", "tapestry_egg.why.recipes"),  # Front.recipes
    ("tapestry_egg.extract.front.front", "tapestry_egg.pipeline.settings"),
    ("tapestry_egg.extract.front.front", "tapestry_egg.report.report"),  # Front.report
    ("tapestry_egg.extract.front.front", "tapestry_egg.report.runs"),
    ("tapestry_egg.extract.front.front", "tapestry_egg.show.plot"),  # Front.plot
    ("tapestry_egg.extract.front.front", "tapestry_egg.show.chart"),  # the same, in notebooks
    ("tapestry_egg.extract.front.front", "tapestry_egg.files.files"),  # Front.save
    ("tapestry_egg.extract.front.front", "tapestry_egg.runtime.emitted"),  # Front.best
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its full name."""
    found = {}
    for top in ("tapestry_egg", "extract", "rules", "runtime"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] in [("tapestry_egg", d) for d in ("extract", "rules", "runtime")]:
                continue
            parts = parts if top == "tapestry_egg" else ("tapestry_egg", *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def folder(module: str) -> str:
    """The folder that a module stands in, below the package: `extract/search`, `.` for the root."""
    inside = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    return inside.removeprefix("tapestry_egg").lstrip(".").replace(".", "/") or "."


@cache
def tree(path: Path) -> ast.Module:
    """A file, parsed."""
    return ast.parse(path.read_text("utf-8"))


@cache
def imports(module: str) -> tuple[tuple[str, int, bool], ...]:
    """What a module of the package imports of it: (module, line, at the top of the file)."""
    return tuple(_imports(module))


def _imports(module: str) -> Iterator[tuple[str, int, bool]]:
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node, lazy in _statements(tree(path).body):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            full = ".".join([*above, node.module or ""]).rstrip(".") if node.level else node.module
            for alias in node.names:
                name = f"{full}.{alias.name}"
                names.append(name if name in modules() else str(full))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name in modules():
                yield name, node.lineno, not lazy


def _statements(body: Sequence[ast.AST], lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All statements, and whether they run only when something is called, or never."""
    for node in body:
        yield node, lazy
        inner = (
            lazy
            or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        )
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if isinstance(own := getattr(node, name, None), list):
                yield from _statements(own, inner)


def order() -> list[str]:
    """The folders as the page lists them, each below all that it may import."""
    found = re.findall(r"^\| `([\w/.]+)` \|", PAGE.read_text("utf-8"), re.M)
    return [name.rstrip("/") or "." for name in found]


def test_the_page_lists_every_folder_once() -> None:
    assert sorted(order()) == sorted({folder(m) for m in modules()})


def test_imports_go_one_way() -> None:
    rank = {name: k for k, name in enumerate(order())}
    upward = []
    for module in modules():
        if module in ("tapestry_egg", "tapestry_egg.__main__"):  # the public face
            continue
        for other, line, _ in imports(module):
            if other == "tapestry_egg" or (module, other) in DOORS:
                continue
            if rank[folder(other)] > rank[folder(module)]:
                upward.append(f"{modules()[module].relative_to(ROOT)}:{line} imports {other}")
    assert not upward, "\n".join(upward)


def test_the_ledger_shares_nothing_with_what_it_checks() -> None:
    """It imports errors and units; of plans and layouts it reads what they say of themselves."""
    own = [m for m in modules() if folder(m) == "runtime/ledger"]
    assert own
    used = {other for m in own for other, _, top in imports(m) if folder(other) != "runtime/ledger"}
    typed = {o for m in own for o, _, top in imports(m) if top and folder(o) != "runtime/ledger"}
    assert typed == {"tapestry_egg.errors", "tapestry_egg.quantities"}
    assert used == typed | {"tapestry_egg.graph.layout", "tapestry_egg.plans.plan"}


def test_only_the_command_line_imports_plugins() -> None:
    """Tables name them for everybody else, who loads them when a file of theirs is met."""
    plugins = {"loom", "interop", "symbolic"}
    edges = {"cli", *plugins}
    core = [m for m in modules() if m != "tapestry_egg" and folder(m).split("/")[0] not in edges]
    found = [(m, o) for m in core for o, *_ in imports(m) if folder(o).split("/")[0] in plugins]
    assert not found


@pytest.mark.parametrize(("module", "other"), sorted(DOORS))
def test_doors_open_when_they_are_called(module: str, other: str) -> None:
    assert {top for name, _, top in imports(module) if name == other} == {False}


def test_imports_across_folders_are_absolute() -> None:
    wrong = []
    for path in modules().values():
        for node, _ in _statements(tree(path).body):
            if isinstance(node, ast.ImportFrom) and node.level:
                inner = (node.module or "").count(".") > 0 and path.name != "__init__.py"
                if node.level > 1 or inner:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(m for m, p in modules().items() if p.name == "__init__.py"))
def test_every_folder_says_what_it_is(name: str) -> None:
    said = ast.get_docstring(tree(modules()[name])) or ""
    assert said.partition("\n")[0].endswith("."), "a sentence"
    if name != "tapestry_egg":  # the public face
        assert re.search(r"\bIn: \S", said) and re.search(r"\bOut: \S", said), "in and out"


def test_modules_inside_a_folder_do_not_import_in_circles() -> None:
    ways = {m: {o for o, _, top in imports(m) if top and o != m} for m in modules()}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in ways[module]:
                if modules()[other].name != "__init__.py":
                    walk(other, (*path, module))
            done.add(module)

    for module in modules():
        walk(module, ())


def test_the_page_tells_of_the_passes_as_the_table_has_them() -> None:
    from tapestry_egg.pipeline.pipeline import PASSES

    table = [
        (
            p.verb,
            ", ".join(f"`{made}`" for made in p.makes),
            p.run.__name__,
            p.run.__module__.rpartition(".")[2] + ".py",
        )
        for p in PASSES
    ]
    told = re.findall(
        r"^\| (\w+) \| (`[^|]*`) \| `(\w+)` \| `(\w+\.py)` \|", PAGE.read_text("utf-8"), re.M
    )
    assert told == table


def _texts() -> Iterator[tuple[Path, str]]:
    """The pages of docs, and the docstrings and comments of modules."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        yield page, page.read_text("utf-8")
    for path in modules().values():
        yield path, path.read_text("utf-8")


def test_files_that_are_named_are_there() -> None:
    tops = ("tapestry_egg", "extract", "rules", "runtime", "docs", "models", "tests", "benchmarks")
    homes = (*(ROOT / d for d in tops if d not in ("extract", "rules", "runtime")), ROOT)
    every = {p.name for d in tops for p in (ROOT / d).rglob("*.*")}
    missing = []
    for path, text in _texts():
        for name in re.findall(r"`((?:\w+/)*[a-z_]+\.(?:py|yaml|egg))`", text):
            near = [path.parent / name, *(home / name for home in homes)]
            if path.suffix == ".md" and name in every:  # a table names the folder once
                continue
            # Files of users, in examples.
            if name not in ("mine.yaml", "json.py") and not any(p.exists() for p in near):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)
