"""The names that we take from JAX and egglog, held against the sources of other versions of them.

    pip download --no-deps --python-version 3.13 --only-binary=:all: -d out/wheels jax egglog
    python -m benchmarks.library_names out/wheels

Every `import` of theirs, and every attribute of a module of theirs that is written as such
(`jax.tree.map`), is looked for in the wheels, by their sources alone: nothing of them is run or
installed, but this Python must be new enough to read them. What is guarded in our code by a `try`
around the import may be absent; it is listed all the same. Exit code 1 if a name that is not
guarded is missing.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("tapestry_egg", "extract", "rules", "runtime")
LIBRARIES = ("jax", "egglog")


@dataclass(frozen=True, slots=True, order=True)
class Taken:
    """A name, where it is taken, and whether its absence is provided for."""

    name: str
    place: str
    guarded: bool


class Wheel:
    """The modules of a wheel, and the names that their sources define."""

    def __init__(self, path: Path) -> None:
        self.sources: dict[str, bytes] = {}
        with zipfile.ZipFile(path) as file:
            for name in file.namelist():
                stem, _, ending = name.rpartition(".")
                if ending in ("py", "pyi"):
                    module = stem.replace("/", ".").removesuffix(".__init__")
                    self.sources.setdefault(module, file.read(name))
        self._names: dict[str, set[str] | None] = {}

    def has(self, name: str, depth: int = 0) -> bool:
        """Whether a dotted name is a module, or is defined in one; what is behind a class, or a
        name that a module takes from elsewhere, is believed."""
        if name in self.sources:
            return True
        module, _, own = name.rpartition(".")
        if module in self.sources:
            names = self.names(module)
            return names is None or own in names
        # Behind a name: of a module that another one takes in, or of a class.
        if depth > 4 or not module:
            return False
        alias = self.alias(module)
        return self.has(f"{alias}.{own}", depth + 1) if alias else self.has(module, depth + 1)

    def alias(self, name: str) -> str:
        """The module that a name of a module stands for, "" where it is none."""
        module, _, own = name.rpartition(".")
        for node in ast.walk(ast.parse(self.sources.get(module, b""))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for a in node.names:
                    if (a.asname or a.name) == own and f"{node.module}.{a.name}" in self.sources:
                        return f"{node.module}.{a.name}"
            if isinstance(node, ast.Import):
                for a in node.names:
                    if a.asname == own and a.name in self.sources:
                        return a.name
        return ""

    def names(self, module: str) -> set[str] | None:
        """The names that a module defines; None where it takes all of another's."""
        if module not in self._names:
            found: set[str] | None = set()
            for node in ast.walk(ast.parse(self.sources[module])):
                if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
                    found = None
                    break
                assert found is not None
                found |= set(_defined(node))
            self._names[module] = found
        return self._names[module]


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for a in node.names:
            yield a.asname or a.name.partition(".")[0]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Dict):  # tables of names for `__getattr__`
        for key in node.keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


def taken(path: Path) -> Iterator[Taken]:
    """What one of our files takes from the libraries."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.Try) and n.handlers]
    spans = [(t.body[0].lineno, t.body[-1].end_lineno or 0) for t in guards]
    bound: dict[str, str] = {}

    def made(name: str, line: int) -> Taken:
        guarded = any(a <= line <= b for a, b in spans)
        return Taken(name, f"{path.relative_to(ROOT)}:{line}", guarded)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            for a in node.args:
                if isinstance(a, ast.Constant) and str(a.value).partition(".")[0] in LIBRARIES:
                    yield made(str(a.value), node.lineno)
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.partition(".")[0] in LIBRARIES:
                    bound[a.asname or a.name.partition(".")[0]] = (
                        a.name if a.asname else a.name.partition(".")[0]
                    )
                    yield made(a.name, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.partition(".")[0] in LIBRARIES:
                for a in node.names:
                    bound[a.asname or a.name] = f"{node.module}.{a.name}"
                    yield made(f"{node.module}.{a.name}", node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            parts = [node.attr]
            inner: ast.expr = node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in bound:
                yield made(".".join((bound[inner.id], *reversed(parts))), node.lineno)


def main(folder: str) -> int:
    """Print what is absent from the wheels of a folder; 1 where something not guarded is."""
    wheels = [
        (p, Wheel(p)) for p in sorted(Path(folder).glob("*.whl")) if p.name.startswith(LIBRARIES)
    ]
    files = [p for f in FOLDERS for p in sorted((ROOT / f).rglob("*.py")) if not p.is_symlink()]
    every = sorted({t for p in files for t in taken(p)})
    failed = 0
    for library in LIBRARIES:
        own = [w for p, w in wheels if p.name.split("-")[0] == library]
        if not own:
            continue
        names = [t for t in every if t.name.partition(".")[0] == library]
        absent = [t for t in names if not own[0].has(t.name)]
        version = next(p.name for p, w in wheels if w is own[0])
        print(f"{version}: {len({t.name for t in names})} names, {len(absent)} places without")
        for t in absent:
            print(f"  {t.name}  {t.place}{'  (guarded)' if t.guarded else ''}")
            failed += not t.guarded
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
