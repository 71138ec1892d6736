"""Fingerprints: digests of programs, plans and options, the same in every process.

Where a program stands in its file does not matter, and neither do addresses: objects of a process
(callbacks, meshes) count by what they say of themselves.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import _lru_cache_wrapper as _Cached
from functools import cache, cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import TapestryError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.plan import BodyPlan, Plan
from tapestry_egg.rules.language.book import RuleBook
from tapestry_egg.rules.language.receipts import content
from tapestry_egg.rules.verify.trust import cache_folder
from tapestry_egg.tracing.codec import HANDLES
from tapestry_egg.tracing.plain import handles_in

if TYPE_CHECKING:
    from tapestry_egg.tracing.trace import Program

_PACKAGE = Path(__file__).parents[1]
#: What the package is made of; other files in its folders change no plan.
_SUFFIXES = frozenset((".py", ".yaml", ".csv", ".egg"))


def program_parts(program: Program) -> dict[str, str]:
    """Digests of a program's parts: what it takes and returns, its constants, its operations."""
    graph = program.graph
    types = [(t.dtype, t.shape, t.weak) for t in graph.values]
    return {
        "arguments": _digest(
            [program.in_tree, [types[v] for v in graph.inputs], graph.input_names, graph.donated]
        ),
        "results": _digest(
            [program.out_tree, [types[v] for v in graph.outputs], graph.output_names]
        ),
        "constants": _digest([_array(a) for a in graph.constants.values()]),
        "operations": _graph_digest(graph),
    }


def program_fingerprint(program: Program) -> str:
    """A digest of all that a program says to the machine."""
    return _digest([program.name, program_parts(program)])


def plan_fingerprint(plan: Plan) -> str:
    """A digest of what a plan runs: its program, its mesh, and how every operation lies on it."""
    graphs: dict[int, str] = {}
    return _digest([plan.mesh, _body_form(plan.body, graphs)])


def options_form(value: Any) -> Any:
    """An option of `optimize` as plain data: equal data for what asks for the same.

    Rule books and files of rules count by what their rules say, other objects by their fields or
    their own words.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, np.generic):
        return options_form(value.item())
    if isinstance(value, RuleBook):
        return [content(rule) for rule in value.rules]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: options_form(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): options_form(v) for k, v in sorted(value.items(), key=lambda x: str(x[0]))}
    if isinstance(value, AbstractSet):
        return sorted((options_form(v) for v in value), key=repr)
    if isinstance(value, Sequence):
        return [options_form(v) for v in value]
    return _words(value)


def options_digest(value: Any) -> str:
    """A digest of an option's plain form."""
    return _digest(options_form(value))


@cache
def code_digest() -> str:
    """A digest of this package's own code, rules, templates and targets."""
    found = hashlib.sha256()
    for path in sorted(_files(_PACKAGE)):
        found.update(str(path.relative_to(_PACKAGE)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


#: Packages whose versions change plans.
_PACKAGES = ("egglog", "jax", "jaxlib", "numpy", "scipy")


@cache
def installed() -> dict[str, str]:
    """The versions of the packages that plans depend on, of those that are there."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """The package's own files; its folders may be links (rules, extract, runtime)."""
    for path in folder.iterdir():
        if path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix in _SUFFIXES:
            yield path


# ---- graphs ------------------------------------------------------------------------------------


def _graph_digest(graph: BlockGraph) -> str:
    """A digest of a graph without the lines that it comes from."""
    remats: dict[int, int] = {}  # numbers of checkpoints, by first occurrence
    operations = [
        (
            op.kernel,
            op.inputs,
            op.outputs,
            _params(op.params),
            [_graph_digest(region) for region in op.regions],
            op.scope,
            None if op.remat is None else remats.setdefault(op.remat, len(remats)),
            op.effectful,
        )
        for op in graph.operations
    ]
    return _digest(
        [
            graph.name,
            [(t.dtype, t.shape, t.weak) for t in graph.values],
            operations,
            graph.inputs,
            graph.outputs,
            [(v, _array(a)) for v, a in sorted(graph.constants.items())],
            graph.input_names,
            graph.output_names,
            graph.donated,
        ]
    )


def _params(params: Mapping[str, Any]) -> Any:
    """Parameters, with the words of an object in place of its number in this process."""
    return _spelled(params) if handles_in(params) else params


def _spelled(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "$handle" in value:
            return {"$handle": _words(HANDLES.get(value["$handle"]))}
        return {k: _spelled(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(v) for v in value]
    return value


def _words(value: object) -> str:
    """What an object says of itself, without addresses; the devices of a mesh by their numbers."""
    try:
        text = re.sub(r"\b0x[0-9a-fA-F]+", "0x", repr(value))
    except Exception:
        text = ""
    try:
        devices = getattr(getattr(value, "mesh", value), "devices", None)
    except ValueError:  # an abstract mesh has none
        devices = None
    if isinstance(devices, np.ndarray):
        text += f" {devices.shape} {[getattr(d, 'id', None) for d in devices.flat]}"
    code = getattr(value, "__code__", None)
    if code is not None:
        text += hashlib.sha256(code.co_code).hexdigest()[:16]
    return f"{type(value).__module__}.{type(value).__qualname__} {text}"


def _array(array: Any) -> tuple[Any, ...]:
    array = np.asarray(array)
    return (str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest())


def _body_form(body: BodyPlan, graphs: dict[int, str]) -> list[Any]:
    if id(body.graph) not in graphs:
        graphs[id(body.graph)] = _graph_digest(body.graph)
    return [
        graphs[id(body.graph)],
        body.inputs,
        body.outputs,
        [
            (s.cuts, s.needs, s.gives, [_body_form(inner, graphs) for inner in s.bodies])
            for s in body.strategies
        ],
        sorted(body.kept.items()) if body.kept else [],
        [(v, a, b, steps) for (v, a, b), steps in body.copies.items()],
        body.groups,
        body.merged,
    ]


_ENCODER = msgspec.json.Encoder(enc_hook=repr, order="deterministic")


def _digest(value: Any) -> str:
    return hashlib.sha256(_ENCODER.encode(value)).hexdigest()[:32]


# Receipts: files whose plans this installation has certified before, by their content.
#
# A receipt is an empty file in the cache folder, named by a digest of what was certified and of all
# that certifies: the package's code and the versions beside it. It is kept when a file of plans has
# been certified, or is written with plans that were. Whoever can write to that folder can change
# the package's rules and caches as well. A process whose functions were replaced while it ran, or
# differ from the package's files, keeps none.
#
#     TAPESTRY_EGG_RECEIPTS   `off`, or a folder (default: `certified` in the cache folder)


#: Where receipts are kept, or that they are not; words for not.
PLACE, OFF = "TAPESTRY_EGG_RECEIPTS", frozenset(("off", "0", "no", "false"))
#: Receipts that are kept: those used longest ago go first.
_MOST = 4096


def is_certified(data: bytes) -> bool:
    """Whether a file of this content was certified before."""
    path = _path(data)
    if path is None:
        return False
    try:
        os.utime(path)  # used now: it goes last
    except OSError:
        return False
    return True


def keep(data: bytes, plans: Sequence[Plan]) -> None:
    """Remember that the plans in a file of this content are certified. What depends on rule books
    or templates of the user's, which may change, is not remembered."""
    path = _path(data)
    own = any(p.origin is None or p.origin.books for p in plans)
    if path is None or own or registry.added() or not _is_as_written():
        return
    with suppress(TapestryError, OSError):  # a folder that cannot be written costs time only
        write_atomic(path, b"")
        kept = sorted((e.stat().st_mtime_ns, e.path) for e in os.scandir(path.parent))
        for _, old in kept[:-_MOST]:
            os.unlink(old)


def _path(data: bytes) -> Path | None:
    place = os.environ.get(PLACE, "")
    if place.lower() in OFF:
        return None
    found = hashlib.sha256(_judges())
    found.update(data)
    folder = Path(place) if place else cache_folder() / "certified"
    return folder / found.hexdigest()[:40]


@cache
def _judges() -> bytes:
    return repr((code_digest(), sorted(installed().items()))).encode()


def _is_as_written() -> bool:
    """Whether the functions of the package in this process are those of its files."""
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("tapestry_egg")]
    known: set[CodeType] = set()
    for module in modules:
        if module.__spec__ is not None:
            known |= _written(module.__spec__)
    return all(code in known for module in modules for code in _running(module))


_WRITTEN: dict[str, frozenset[CodeType]] = {}


def _written(spec: ModuleSpec) -> frozenset[CodeType]:
    """The code in the file of a module, read once."""
    if spec.name not in _WRITTEN:
        read = getattr(spec.loader, "get_code", lambda _: None)
        _WRITTEN[spec.name] = frozenset(_codes(read(spec.name)))
    return _WRITTEN[spec.name]


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    if code is not None:
        yield code
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _codes(inner)


def _running(module: ModuleType) -> Iterator[CodeType]:
    """The code of the functions and methods that a module holds, but of generated ones and those of
    other packages."""
    for value in list(vars(module).values()):
        own = isinstance(value, type) and value.__module__ == module.__name__
        for one in (value, *(vars(value).values() if own else ())):
            function = _function(one)
            if function is not None and not _is_others(function):
                yield function.__code__


def _function(value: Any) -> FunctionType | None:
    """The function in a method, a property or a wrapper."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, staticmethod | classmethod | FunctionType | _Cached):
        value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, FunctionType) else None


def _is_others(function: FunctionType) -> bool:
    file, root = function.__code__.co_filename, function.__module__.partition(".")[0]
    installed = "site-packages" in Path(file).parts and root != "tapestry_egg"
    return file == "<string>" or installed or root in sys.stdlib_module_names
