"""Pytree structures as plain data, so that a stored program can be called like the original.

    "*"                                            a leaf
    null                                           None, an empty subtree
    {"tuple": [..]}  {"list": [..]}
    {"dict": [[key, ..], ..]}                      keys sorted, as JAX flattens them
    {"ordered": [[key, ..], ..]}                   an OrderedDict
    {"namedtuple": "pkg.mod:Name", "fields": [..], "items": [..]}
    {"node": "pkg.mod:Name", "items": [..]}        any other registered class: its leaves only

Nothing is imported because a file names it: a class is used when the call's own arguments contain
it, a namedtuple also when its module is already loaded. Otherwise a fresh namedtuple of the same
name, or for other classes a plain tuple of the children, stands in.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from tapestry_egg.errors import GraphError

LEAF = "*"
_SEQUENCES = ("tuple", "list")
_MAPPINGS = ("dict", "ordered")


def encode_treedef(treedef: Any) -> Any:
    """Plain form of a JAX `PyTreeDef`."""
    data = treedef.node_data()
    if data is None:
        return LEAF
    cls, aux = data
    items = [encode_treedef(child) for child in treedef.children()]
    if cls is type(None):
        return None
    if cls in (tuple, list):
        return {cls.__name__: items}
    if cls in (dict, OrderedDict) and all(type(k) in (str, int, bool) for k in aux):
        kind = "dict" if cls is dict else "ordered"
        return {kind: [[k, item] for k, item in zip(aux, items, strict=True)]}
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return {"namedtuple": _qualified(cls), "fields": list(cls._fields), "items": items}
    return {"node": _qualified(cls), "items": items}


def is_standard(plain: Any) -> bool:
    """Whether the structure has only containers that need no class of the user's."""
    if plain is None or plain == LEAF:
        return True
    kind = _container(plain)
    return kind in (*_SEQUENCES, *_MAPPINGS) and all(is_standard(c) for _, c in _children(plain))


def is_transparent(plain: Any) -> bool:
    """Whether `leaf_paths` gives every path as JAX does: classes of the user's name their own."""
    if plain is None or plain == LEAF:
        return True
    return _container(plain) != "node" and all(is_transparent(c) for _, c in _children(plain))


def decode_treedef(plain: Any) -> Any:
    """The JAX `PyTreeDef` of a standard structure."""
    import jax

    check_tree(plain, "tree")
    return jax.tree.structure(build(plain, iter(range(leaf_count(plain))), {}))


def leaf_count(plain: Any) -> int:
    """Number of leaves."""
    if plain is None:
        return 0
    if plain == LEAF:
        return 1
    return sum(leaf_count(child) for _, child in _children(plain))


def leaf_paths(plain: Any, prefix: str = "") -> list[str]:
    """Path of every leaf, as JAX prints them: `[0]['w']`, `.mu`."""
    if plain is None:
        return []
    if plain == LEAF:
        return [prefix]
    return [path for step, child in _children(plain) for path in leaf_paths(child, prefix + step)]


def opaque_arguments(plain: Any, name: str) -> Any:
    """The structure of (args, kwargs) with every positional argument inside a class of that name:
    its leaves then have names of their own."""
    args, kwargs = plain["tuple"]
    return {"tuple": [{"tuple": [{"node": name, "items": [a]} for a in args["tuple"]]}, kwargs]}


def difference(expected: Any, given: Any, path: str = "") -> str:
    """Where two structures first differ, in words; empty when they are equal."""
    if expected == given:
        return ""
    if not isinstance(expected, dict) or not isinstance(given, dict):
        return f"at {path or 'the top'}: expected {_kind(expected)}, given {_kind(given)}"
    if _kind(expected) != _kind(given):
        return f"at {path or 'the top'}: expected {_kind(expected)}, given {_kind(given)}"
    ours, theirs = list(_children(expected)), list(_children(given))
    if [s for s, _ in ours] != [s for s, _ in theirs]:
        names = ", ".join(s for s, _ in ours), ", ".join(s for s, _ in theirs)
        return f"at {path or 'the top'}: expected entries {names[0]}; given {names[1]}"
    for (step, a), (_, b) in zip(ours, theirs, strict=True):
        if found := difference(a, b, path + step):
            return found
    return ""


def build(plain: Any, leaves: Iterator[Any], known: Mapping[str, Any]) -> Any:
    """The Python object of that structure with `leaves` filled in.

    `known` gives the user's classes that may occur; see `known_of`.
    """
    if plain is None:
        return None
    if plain == LEAF:
        return next(leaves)
    kind = _container(plain)
    if kind == "node" and (treedef := known.get(repr(plain))) is not None:
        return treedef.unflatten([next(leaves) for _ in range(treedef.num_leaves)])
    items = [build(child, leaves, known) for _, child in _children(plain)]
    if kind == "list":
        return items
    if kind in _MAPPINGS:
        pairs = zip([k for k, _ in plain[kind]], items, strict=True)
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    if kind == "namedtuple":
        return _namedtuple(plain, known)(*items)
    return tuple(items)


def along_prefix(prefix: Any, treedef: Any) -> list[Any]:
    """The entry of a prefix that stands for each leaf of a structure; entries are whatever is no
    container, None and `PartitionSpec`s.

    Structures are compared, and no pytree is made: the user's classes may refuse what is no array.
    Raises GraphError where the structure has no such prefix.
    """
    import jax

    def entry(x: Any) -> bool:
        kinds = jax.sharding.PartitionSpec, jax.sharding.Sharding
        return x is None or isinstance(x, kinds) or jax.tree_util.all_leaves([x])

    given, structure = jax.tree.flatten(prefix, is_leaf=entry)
    entries = iter(given)
    found: list[Any] = []

    def spread(part: Any, whole: Any, path: str) -> None:
        if part.node_data() is None:
            found.extend([next(entries)] * whole.num_leaves)
            return
        if unlike := _unlike(part, whole):
            raise GraphError(f"the structure does not fit at {path or 'the top'}: {unlike}")
        for i, (a, b) in enumerate(zip(part.children(), whole.children(), strict=True)):
            spread(a, b, f"{path}[{i}]")

    spread(structure, treedef, "")
    return found


def _unlike(part: Any, whole: Any) -> str:
    """In words, how the outermost containers of two structures differ; empty where they do not."""
    cls, own = part.node_data()
    if whole.node_data() is None:
        return f"{cls.__name__} given for an array"
    other, data = whole.node_data()
    if cls is not other:
        return f"{cls.__name__} given for {other.__name__}"
    sizes = len(part.children()), len(whole.children())
    if sizes[0] != sizes[1]:
        return f"{cls.__name__} of {sizes[0]} given for one of {sizes[1]}"
    return "" if own == data else f"{cls.__name__} with {own!r} given for one with {data!r}"


def known_of(treedef: Any) -> dict[str, Any]:
    """The user's classes in a JAX `PyTreeDef`, for `build`.

    Namedtuple classes by qualified name; other nodes, which keep static data in their structure,
    as the whole `PyTreeDef` by its plain form.
    """
    data = treedef.node_data()
    found: dict[str, Any] = {}
    for child in treedef.children():
        found.update(known_of(child))
    if data is not None:
        plain = encode_treedef(treedef)
        if isinstance(plain, dict) and "namedtuple" in plain:
            found[plain["namedtuple"]] = data[0]
        elif isinstance(plain, dict) and "node" in plain:
            found.setdefault(repr(plain), treedef)
    return found


#: Containers within containers: more than any program has, few enough to walk recursively.
MOST_LEVELS = 100


def check_tree(plain: Any, where: str, level: int = 0) -> None:
    """Check that `plain` is a structure, and not more than `MOST_LEVELS` deep.

    `level` is how deep it lies itself. Raises GraphError with the path inside it.
    """
    if plain is None or plain == LEAF:
        return
    if level > MOST_LEVELS:
        raise GraphError(f"more than {MOST_LEVELS} containers within containers", where=where)
    if not isinstance(plain, dict) or not plain:
        raise GraphError("a structure must be null, '*' or one container", where=where)
    kind = next((k for k in (*_SEQUENCES, *_MAPPINGS, "namedtuple", "node") if k in plain), None)
    allowed = {
        "namedtuple": {"namedtuple", "fields", "items"},
        "node": {"node", "items"},
    }.get(kind or "", {kind})
    if kind is None or set(plain) != allowed:
        raise GraphError(f"unknown container {', '.join(map(repr, plain))}", where=where)
    items = plain["items"] if kind in ("namedtuple", "node") else plain[kind]
    if not isinstance(items, list):
        raise GraphError("the children of a container must be a list", where=f"{where}.{kind}")
    if kind in _MAPPINGS:
        for i, pair in enumerate(items):
            if (
                not isinstance(pair, list)
                or len(pair) != 2
                or type(pair[0]) not in (str, int, bool)
            ):
                raise GraphError("expected [key, structure]", where=f"{where}.{kind}[{i}]")
        if len({repr(k) for k, _ in items}) != len(items):
            raise GraphError("a key occurs twice", where=f"{where}.{kind}")
        items = [child for _, child in items]
    if kind in ("namedtuple", "node") and not isinstance(plain[kind], str):
        raise GraphError("expected the class's name", where=f"{where}.{kind}")
    if kind == "namedtuple":
        names = plain["fields"]
        if (
            not isinstance(names, list)
            or len(names) != len(items)
            or len({str(n) for n in names}) != len(names)
            or not all(isinstance(n, str) and _is_field(n) for n in names)
        ):
            raise GraphError("expected one field name per child", where=f"{where}.fields")
    for i, child in enumerate(items):
        check_tree(child, f"{where}.{kind}[{i}]", level + 1)


def _is_field(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")


def _namedtuple(plain: Mapping[str, Any], classes: Mapping[str, Any]) -> Any:
    qualified, names = plain["namedtuple"], tuple(plain["fields"])
    module, _, name = qualified.partition(":")
    known: Any = classes.get(qualified)
    if known is None:
        known = sys.modules.get(module)
        for part in name.split("."):
            known = vars(known).get(part) if hasattr(known, "__dict__") else None
    if isinstance(known, type) and issubclass(known, tuple):
        if getattr(known, "_fields", None) == names:
            return known
    return _stand_in(qualified, names)


@cache
def _stand_in(qualified: str, fields: tuple[str, ...]) -> Any:
    """The namedtuple that stands for one that is not loaded: one class, as JAX compares them."""
    last = qualified.rpartition(":")[2].rpartition(".")[2]
    return namedtuple(last if _is_field(last) else "Record", fields)


def _children(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kind = _container(plain)
    if kind in _SEQUENCES:
        yield from ((f"[{i}]", child) for i, child in enumerate(plain[kind]))
    elif kind in _MAPPINGS:
        yield from ((f"[{k!r}]", child) for k, child in plain[kind])
    elif kind == "namedtuple":
        yield from ((f".{f}", c) for f, c in zip(plain["fields"], plain["items"], strict=True))
    else:
        yield from ((f"[{i}]", child) for i, child in enumerate(plain["items"]))


def _container(plain: Mapping[str, Any]) -> str:
    return next(k for k in (*_SEQUENCES, *_MAPPINGS, "namedtuple", "node") if k in plain)


def _kind(plain: Any) -> str:
    if plain is None:
        return "None"
    if plain == LEAF:
        return "an array"
    kind = _container(plain)
    return str(plain[kind]) if kind in ("namedtuple", "node") else f"a {kind}"


def _qualified(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


# Paths of a program's arguments and results by less than the whole of them.
#
# `[0]['layers'][1]['up']` is a path; `up`, `layers[1]` and `['layers'][1]['up']` are parts of it
# that name it, or all that is below it, where no other path has them; `[0]['layers'][*]['up']` is a
# pattern of all such paths.


_ENTRY = re.compile(r"\[([^\]]*)\]|\.?([^.\[\]]+)")


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern with `*` fits, in their order."""
    literal = re.sub(r"\[(?!\*\])", "[[]", pattern).replace("[*]", "[[]*]")
    return [path for path in paths if "*" in pattern and fnmatchcase(path, literal)]


def named_by_part(part: str, paths: Sequence[str]) -> list[str]:
    """The paths, or what they have in common above them, whose last entries are `part`: several
    where it is no name of one thing. A part begins with a name, not with a number."""
    wanted = [word for word, _ in _entries(part)]
    if not wanted or wanted[0].isdecimal():
        return []
    found: dict[str, None] = {}
    for path in paths:
        entries = _entries(path)
        words = [word for word, _ in entries]
        for k in range(len(words) - len(wanted) + 1):
            if words[k : k + len(wanted)] == wanted:
                found[path[: entries[k + len(wanted) - 1][1]]] = None
    return list(found)


def _entries(path: str) -> list[tuple[str, int]]:
    """The entries of a path as bare words, each with where it ends in the path."""
    path = path.strip().replace('"', "'")
    return [((m[1] or m[2] or "").strip("'"), m.end()) for m in _ENTRY.finditer(path)]
