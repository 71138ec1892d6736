"""Single-field changes to saved documents, as someone would make them who wants to be believed.

Every kind of field, `$.plans[].body.strategies[].cuts[][]`, is as likely to be changed as any
other, however often it stands there.
"""

from __future__ import annotations

import base64
import copy
import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

#: Words that mean something where others like them do.
_WORDS = [
    ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "to_partial"),
    ("sum", "max", "min", "prod"),
    ("seconds", "peak_bytes", "joules", "flops", "wire_bytes"),
    ("add", "sub", "mul", "div", "max", "min", "sin", "cos", "tanh", "exp", "log", "neg"),
    ("float32", "int32", "bfloat16", "float64", "bool"),
    ("x", "y", "z"),
    ("scan", "while", "cond"),
    ("tuple", "list", "dict"),
]

#: A place in a document: keys and indices from the outside.
Path = tuple[str | int, ...]


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place in a document."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield (*at, key)
            yield from paths(value[key], (*at, key))


def kind(path: Path) -> str:
    """The kind of field at a place: numbers of entries and of values left out."""
    return ".".join("[]" if isinstance(k, int) or k.isdigit() else k for k in path)


def get(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document


def changes(document: Any, seed: int, count: int) -> Iterator[tuple[Path, str, Any]]:
    """So many changes of one field each: its place, what was done, and the changed document. No
    kind of field comes a second time before all others have come."""
    rng = random.Random(seed)
    by_kind: dict[str, list[Path]] = {}
    for path in paths(document):
        if path[0] not in ("tapestry_egg", "version", "digests"):
            by_kind.setdefault(kind(path), []).append(path)
    kinds = sorted(by_kind)
    rng.shuffle(kinds)
    made = 0
    for each in itertools.cycle(kinds):
        if made == count:
            return
        path = rng.choice(by_kind[each])
        changed = copy.deepcopy(document)
        holder, key = get(changed, path[:-1]), path[-1]
        said = _change(holder, key, rng)
        if said and changed != document:
            made += 1
            yield path, said, changed


def _change(holder: Any, key: Any, rng: random.Random) -> str:
    """Change one entry; what was done."""
    value = holder[key]
    if isinstance(holder, list) and rng.random() < 0.15 and len(holder) > 1:
        return _shuffled(holder, key, rng)
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = value + rng.choice((-1, 1, 1, 2, 10, -value))
    elif isinstance(value, float):
        holder[key] = rng.choice((value * 1.001, value * (1 - 1e-6), value + 1, -value, 0.0))
    elif isinstance(value, str):
        holder[key] = _other_word(value, rng)
    elif value is None:
        holder[key] = rng.choice((0, 1, "x", [], True))
    elif isinstance(value, list) and len(value) > 1:
        return _shuffled(value, rng.randrange(len(value)), rng)
    elif isinstance(value, list):
        holder[key] = value * 2 if rng.random() < 0.5 else []
    elif rng.random() < 0.5 and value:
        name = rng.choice(list(value))
        del value[name]
        return f"{name} removed"
    elif len(value) > 1:
        a, b = rng.sample(list(value), 2)
        value[a], value[b] = value[b], value[a]
        return f"{a} and {b} swapped"
    else:
        return ""
    return f"{value!r:.60} -> {holder[key]!r:.60}"


def _shuffled(entries: list[Any], k: int, rng: random.Random) -> str:
    match rng.randrange(4):
        case 0:
            del entries[k]
            return f"entry {k} removed"
        case 1:
            entries.insert(k, copy.deepcopy(entries[k]))
            return f"entry {k} twice"
        case 2:
            other = rng.randrange(len(entries))
            entries[k] = copy.deepcopy(entries[other])
            return f"entry {k} replaced by entry {other}"
        case _:
            other = rng.randrange(len(entries))
            entries[k], entries[other] = entries[other], entries[k]
            return f"entries {k} and {other} swapped"


def _other_word(value: str, rng: random.Random) -> str:
    for words in rng.sample(_WORDS, len(_WORDS)):
        if value in words:
            return rng.choice([w for w in words if w != value])
    if found := re.fullmatch(r"(\w+)(\[[0-9,]*\])(~?)", value):  # a tensor type
        dtype, shape, weak = found.groups()
        return rng.choice(
            (
                f"{dtype}{shape}{'' if weak else '~'}",
                f"{_other_word(dtype, rng)}{shape}{weak}",
                f"{dtype}{shape[:-1]}{',1' if len(shape) > 2 else '1'}]{weak}",
            )
        )
    if len(value) % 4 == 0 and len(value) >= 8 and re.fullmatch(r"[A-Za-z0-9+/]+=*", value):
        data = bytearray(base64.b64decode(value))
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return base64.b64encode(bytes(data)).decode()
    if value and rng.random() < 0.5:
        k = rng.randrange(len(value))
        return value[:k] + rng.choice("abcxyz019_'") + value[k + 1 :]
    return rng.choice(("", "x", value + "x", value[::-1]))
