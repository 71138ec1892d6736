"""The package as it is listed, linked, installed and imported."""

from __future__ import annotations

import ast
import fnmatch
import importlib.metadata
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
LINKED = ("extract", "rules", "runtime")


def directory_of(package: str) -> Path:
    """Where a listed package stands, following the longest mapped prefix."""
    mapping: dict[str, str] = SETUPTOOLS["package-dir"]
    prefix = max((p for p in mapping if f"{package}.".startswith(f"{p}.")), key=len)
    return ROOT.joinpath(mapping[prefix], *package[len(prefix) :].split(".")[1:])


def packages_on_disk() -> set[str]:
    found = set()
    for top, name in [
        ("tapestry_egg", "tapestry_egg"),
        *((d, f"tapestry_egg.{d}") for d in LINKED),
    ]:
        for folder, inner, files in os.walk(ROOT / top, followlinks=False):
            inner[:] = [d for d in inner if not (Path(folder) / d).is_symlink()]
            if "__init__.py" in files:
                parts = Path(folder).relative_to(ROOT / top).parts
                found.add(".".join([name, *parts]))
    return found


def python(*arguments: str, **kwargs: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **kwargs},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_listed_packages_are_the_directories_with_an_init() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()


def test_every_listed_package_has_its_own_directory() -> None:
    folders = [directory_of(package) for package in SETUPTOOLS["packages"]]
    assert len({folder.resolve() for folder in folders}) == len(folders)
    assert all((folder / "__init__.py").is_file() for folder in folders)


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_to_the_mapped_directories(name: str) -> None:
    link = ROOT / "tapestry_egg" / name
    if link.is_file():
        pytest.skip("this checkout has no symbolic links")
    assert os.readlink(link) == f"../{name}"
    assert os.path.samefile(link, directory_of(f"tapestry_egg.{name}"))


@pytest.mark.parametrize("name", LINKED)
def test_bare_names_are_refused(name: str) -> None:
    result = python("-c", f"import {name}")
    assert result.returncode == 1
    assert f"ImportError: {name}/ is the package tapestry_egg.{name}" in result.stderr


@pytest.mark.parametrize(
    "doing",
    [
        "import tapestry_egg, tapestry_egg.cli.app",
        "from tapestry_egg.cli.app import app; app(args=['--help'], standalone_mode=False)",
        "from tapestry_egg.cli.app import app; app(args=['targets'], standalone_mode=False)",
        "from tapestry_egg.cli.app import app; app(args=['rules'], standalone_mode=False)",
    ],
)
def test_importing_and_help_load_no_heavy_packages(doing: str) -> None:
    names = {"jax", "jaxlib", "egglog", "sympy", "matplotlib", "scipy", "numba", "llvmlite"}
    heavy = f"{names} & set(sys.modules)"
    result = python("-c", f"import sys; {doing}; sys.exit(str({heavy} or '') or 0)")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_first_call_loads_neither_parsers_nor_what_verifies() -> None:
    """Each costs a small program a tenth of its first call or more."""
    doing = (
        "import numpy, tapestry_egg as te; te.jit(lambda x: x @ x + 1, cache=False)(numpy.eye(8))"
    )
    verifies = ("rules.verify.verdicts", "rules.verify.proofs", "files.admission")
    homes = (*verifies, "rewrite.equivalence", "runtime.measure.hlo", "show.text")
    heavy = {*(f"tapestry_egg.{home}" for home in homes)}
    check = f"import sys; {doing}; sys.exit(str({heavy} & set(sys.modules) or '') or 0)"
    result = python("-c", check)
    assert result.returncode == 0, result.stderr


def test_every_public_name_resolves() -> None:
    import tapestry_egg

    for name in tapestry_egg.__all__:
        assert callable(getattr(tapestry_egg, name)), name


def test_no_public_name_is_a_module_of_its_package_too() -> None:
    """Importing the module would put it in the place of the function."""
    import tapestry_egg
    from tapestry_egg import runtime

    for package in (tapestry_egg, runtime):
        modules = {m.name for m in pkgutil.iter_modules(package.__path__)}
        assert len(modules) > 3 and not modules & set(package._HOMES)


def test_an_unknown_name_says_which_there_are() -> None:
    import tapestry_egg

    with pytest.raises(AttributeError, match=r"no 'optimise'; it has .*optimize"):
        _ = tapestry_egg.optimise


def data_files(folder: Path) -> list[Path]:
    """Everything below a package's directory that is neither Python nor in another package."""
    found = []
    for at, inner, files in os.walk(folder):
        inner[:] = [
            d
            for d in inner
            if d != "__pycache__"
            and not (Path(at) / d).is_symlink()
            and not (Path(at) / d / "__init__.py").exists()
        ]
        found += [Path(at) / f for f in files if not f.endswith((".py", ".pyc"))]
    return found


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_every_data_file_is_shipped(package: str) -> None:
    folder = directory_of(package)
    patterns = SETUPTOOLS["package-data"].get(package, [])
    for path in data_files(folder):
        if path.is_symlink() or path.name in LINKED:
            continue
        name = path.relative_to(folder).as_posix()
        assert any(fnmatch.fnmatch(name, p) for p in patterns), f"{package}: {name}"


def canonical(requirement: str) -> str:
    """The distribution that a requirement names: `dask[distributed]>=2025.1` is `dask`."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def imported_names() -> dict[str, Path]:
    """Top-level modules that the package imports, each with one file that does."""
    names: dict[str, Path] = {}
    for package in SETUPTOOLS["packages"]:
        for path in directory_of(package).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    modules = [node.module]
                else:
                    continue
                names.update((module.split(".")[0], path) for module in modules)
    return names


@pytest.mark.slow
def test_every_import_is_declared() -> None:
    project = PYPROJECT["project"]
    extras = [r for extra in project["optional-dependencies"].values() for r in extra]
    declared = {canonical(r) for r in [*project["dependencies"], *extras]}
    spelled = {"yaml": "pyyaml", "ml_dtypes": "ml-dtypes", "z3": "z3-solver"}
    own = {"tapestry_egg"}
    # jax and jaxlib are one release; where the model programs stand is the demo's own business.
    together = {"jaxlib": "jax"}
    for name, path in imported_names().items():
        if name in sys.stdlib_module_names or name in own or name == "models":
            continue
        distribution = together.get(name) or spelled.get(name) or canonical(name)
        assert distribution in declared, f"{path}: {name}"


def test_the_lock_pins_everything_and_names_no_index() -> None:
    lock = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
    lines = [line for line in lock.splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[a-z0-9._-]+==\S+( ;.*)?$", line) for line in lines)
    pinned = {canonical(line) for line in lines}
    groups = PYPROJECT["dependency-groups"]["dev"]
    wanted = {canonical(r) for r in [*PYPROJECT["project"]["dependencies"], *groups]}
    assert wanted <= pinned


@pytest.mark.slow
def test_a_wheel_holds_every_file_and_no_bare_package(tmp_path: Path) -> None:
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is older than the build needs")
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"
    ignored = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if ignored.returncode:
        pytest.skip("not a git checkout")
    for name in ignored.stdout.split("\n"):
        if name and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (source / name).symlink_to(os.readlink(ROOT / name))
            else:
                (source / name).write_bytes((ROOT / name).read_bytes())
    result = python(*build, "--wheel-dir", str(tmp_path), str(source))
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = set()
    for package in SETUPTOOLS["packages"]:
        folder, prefix = directory_of(package), package.replace(".", "/")
        expected |= {f"{prefix}/{path.name}" for path in folder.glob("*.py")}
        expected |= {
            f"{prefix}/{path.relative_to(folder).as_posix()}"
            for path in data_files(folder)
            if not path.is_symlink()
        }
    assert inside == expected
