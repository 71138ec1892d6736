"""Tables of target files: YAML read key by key, so that what is wrong is told with its position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast

from tapestry_egg.machine.tables.files import TableFile, packaged_table, users_table
from tapestry_egg.yaml_nodes import YamlNode, suggestion

Record = TypeVar("Record")


class Table:
    """A YAML mapping read key by key. Raises TargetError with the place of whatever is wrong."""

    def __init__(self, node: YamlNode) -> None:
        self.node, self._entries = node, node.entries()
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, key: str) -> YamlNode:
        self._read.add(key)
        if key not in self._entries:
            raise self.node.error(f"{key!r} is missing in {self.node.name}")
        return self._entries[key][1]

    def fill(self, other: Table, but: str) -> None:
        """Take the keys of another table that this one lacks, but one."""
        self._entries = {k: v for k, v in other._entries.items() if k != but} | self._entries
        self._read.add("like")

    def finish(self) -> None:
        """Refuse keys that nobody asked for: most are misspelt."""
        for key, (node, _) in self._entries.items():
            if key not in self._read:
                hint = suggestion(key, sorted(self._read))
                raise node.error(f"unknown key {key!r} in {self.node.name}", hint)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        zero: bool = False,
        whole: bool = False,
        most: float = inf,
    ) -> float:
        """The number under a key, as `YamlNode.number` reads it; the default where it lacks."""
        if default is not None and key not in self:
            return default
        return self[key].number(zero=zero, whole=whole, most=most)

    def flag(self, key: str) -> bool:
        """Whether a key says `true`."""
        return key in self and self[key].flag()

    def file(self, key: str, folder: Path | None) -> TableFile | None:
        """The table that a key names, if there is one: beside the file, else of the package."""
        if key not in self:
            return None
        name = self[key].text()
        if folder is not None and (folder / name).is_file():
            return users_table(name, (folder / name).read_bytes())
        found = packaged_table(name)
        if found is None:
            raise self[key].error(
                f"there is no table {name!r:.80}",
                hint="It is the name of a file beside this one, or of one in the package.",
            )
        return found

    def record(self, kind: type[Record]) -> Record:
        """The record whose fields are the keys of this table; those with defaults may lack."""
        found: dict[str, Any] = {}
        for field in fields(cast(Any, kind)):
            if field.name in self or field.default is MISSING:
                node, whole = self[field.name], str(field.type).startswith("int")
                if str(field.type).startswith("tuple"):
                    found[field.name] = node.texts()
                else:
                    value = node.number(whole=whole)
                    found[field.name] = int(value) if whole else value
        self.finish()
        return kind(**found)

    def given(self, key: str, kind: type[Record]) -> Record | None:
        """The record under a key, if there is one."""
        return self.table(key).record(kind) if key in self else None

    def table(self, key: str) -> Table:
        """The table under a key."""
        return Table(self[key])

    def tables(self, key: str) -> Iterable[Table]:
        """The tables of the list under a key."""
        return map(Table, self[key].items())
