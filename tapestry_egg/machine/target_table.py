"""Tables of target files: YAML read key by key, so that what is wrong is told with its position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from tapestry_egg.errors import TargetError
from tapestry_egg.machine.tables.files import TableFile, packaged_table, users_table

Record = TypeVar("Record")


class Table:
    """A YAML mapping read key by key, so that whatever is wrong is reported with its position.

    Scalars are taken as text and converted here: YAML's own typing reads 80e9 as a string.
    """

    def __init__(self, node: yaml.Node, file: str, what: str) -> None:
        self._file, self._what, self._node = file, what, node
        if not isinstance(node, yaml.MappingNode):
            raise self.error(f"{what} is not a table of `key: value`")
        self._values: dict[str, yaml.Node] = {}
        self._keys: dict[str, yaml.Node] = {}
        self._read: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.error(f"a key of {what} is not a word", key)
            if key.value in self._values:
                raise self.error(f"{key.value!r} occurs twice in {what}", key)
            self._values[key.value], self._keys[key.value] = value, key

    def error(self, what: str, node: yaml.Node | None = None, hint: str = "") -> TargetError:
        mark = (node or self._node).start_mark
        return TargetError(what, where=_at(self._file, mark), hint=hint)

    def keys(self) -> tuple[str, ...]:
        return tuple(self._values)

    def finish(self) -> None:
        """Refuse keys that nobody asked for: most are misspelt."""
        for key, node in self._keys.items():
            if key not in self._read:
                known = ", ".join(sorted(self._read))
                raise self.error(f"{self._what} has no key {key!r}", node, f"It has {known}.")

    def _get(self, key: str) -> yaml.Node:
        self._read.add(key)
        if key not in self._values:
            raise self.error(f"{key!r} is missing in {self._what}")
        return self._values[key]

    def _scalar(self, key: str, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
            raise self.error(f"{key!r} is not a single value", node)
        return str(node.value)

    def _list(self, key: str) -> list[yaml.Node]:
        node = self._get(key)
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(f"{key!r} is not a list", node)
        return list(node.value)

    def text(self, key: str) -> str:
        return self._scalar(key, self._get(key))

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self._scalar(key, node) for node in self._list(key))

    def number(
        self, key: str, *, zero: bool = False, whole: bool = False, most: float = inf
    ) -> float:
        """A positive (with `zero`, non-negative) finite number no greater than `most`."""
        return self._number(key, self._get(key), zero=zero, whole=whole, most=most)

    def integers(self, key: str) -> tuple[int, ...]:
        return tuple(
            int(self._number(key, n, zero=False, whole=True, most=inf)) for n in self._list(key)
        )

    def _number(self, key: str, node: yaml.Node, *, zero: bool, whole: bool, most: float) -> float:
        text = self._scalar(key, node)
        try:
            value = float(text)
        except ValueError:
            raise self.error(f"{key!r} is not a number: {text!r}", node) from None
        if not isfinite(value) or value < 0 or (value == 0 and not zero) or value > most:
            allowed = ("at least 0" if zero else "above 0") + (
                f" and at most {most:g}" if isfinite(most) else ""
            )
            raise self.error(f"{key!r} is {text}, it must be {allowed}", node)
        if whole and value != int(value):
            raise self.error(f"{key!r} is {text}, it must be a whole number", node)
        return value

    def flag(self, key: str) -> bool:
        text = self.text(key)
        if text not in ("true", "false"):
            raise self.error(f"{key!r} is {text!r}, it must be true or false", self._get(key))
        return text == "true"

    def file(self, key: str, folder: Path | None) -> TableFile | None:
        """The table that a key names, if there is one: beside the file, else of the package."""
        if key not in self.keys():
            return None
        name = self.text(key)
        if folder is not None and (folder / name).is_file():
            return users_table(name, (folder / name).read_bytes())
        found = packaged_table(name)
        if found is None:
            raise self.error(
                f"there is no table {name!r:.80}",
                self._values[key],
                hint="It is the name of a file beside this one, or of one in the package.",
            )
        return found

    def record(self, kind: type[Record]) -> Record:
        """The record whose fields are the keys of this table; those with defaults may lack."""
        found: dict[str, Any] = {}
        for field in fields(cast(Any, kind)):
            if field.name in self._values or field.default is MISSING:
                found[field.name] = self._of_type(field.name, str(field.type))
        self.finish()
        return kind(**found)

    def given(self, key: str, kind: type[Record]) -> Record | None:
        """The record under a key, if there is one."""
        return self.table(key).record(kind) if key in self._values else None

    def _of_type(self, key: str, kind: str) -> Any:
        if kind.startswith("int"):
            return int(self.number(key, whole=True))
        return self.texts(key) if kind.startswith("tuple") else self.number(key)

    def table(self, key: str) -> Table:
        return Table(self._get(key), self._file, key)

    def tables(self, key: str) -> Iterable[Table]:
        for k, node in enumerate(self._list(key)):
            yield Table(node, self._file, f"{key}[{k}]")


def _at(file: str, mark: yaml.Mark | None) -> str:
    return f"{file}:{mark.line + 1}:{mark.column + 1}" if mark is not None else file
