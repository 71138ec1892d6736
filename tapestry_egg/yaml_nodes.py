"""YAML files as nodes that know their place: composed, never constructed, and bounded in depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import Any

import yaml

from .errors import TapestryError

#: Levels of lists and mappings. libyaml recurses in C, before 0.2.6 without a limit of its own.
_DEEPEST = 50
#: What libyaml says past 1000 levels, which it reads ahead before it tells of the first.
_PAST_ITS_OWN = "exceeded maximum nesting depth"
_LARGEST = 4 << 20  # bytes of a file that people write


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A node of a YAML file by the `name` of its key. Every fault in it is an `error_type` with
    `file:line:column`; a message says what was expected, `what`, or else names the key.

    Scalars are texts as they are written: YAML's own typing reads 80e9 as a string.
    """

    raw: Any
    file: str
    error_type: type[TapestryError]
    name: str = "the file"

    @property
    def where(self) -> str:
        """`file:line:column`."""
        mark = self.raw.start_mark
        return f"{self.file}:{mark.line + 1}:{mark.column + 1}"

    def error(self, what: str, hint: str = "") -> TapestryError:
        """An error at the node."""
        return self.error_type(what, where=self.where, hint=hint)

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.raw, yaml.MappingNode)

    @property
    def is_list(self) -> bool:
        return isinstance(self.raw, yaml.SequenceNode)

    @property
    def is_null(self) -> bool:
        """Whether nothing is written there."""
        return bool(self.raw.tag == "tag:yaml.org,2002:null")

    def entries(self, what: str = "") -> dict[str, tuple[YamlNode, YamlNode]]:
        """The key and value nodes of a mapping by name; a name may occur once."""
        if not self.is_mapping:
            raise self.error(
                f"expected {what}, a mapping" if what else f"{self.name!r} is not a mapping"
            )
        found: dict[str, tuple[YamlNode, YamlNode]] = {}
        for raw_key, raw_value in self.raw.value:
            key = self._child(raw_key, self.name)
            name = key.text("a name")
            if name in found:
                raise key.error(f"{name!r} is given twice")
            found[name] = key, self._child(raw_value, name)
        return found

    def mapping(self, what: str = "") -> dict[str, YamlNode]:
        """The values of a mapping by name."""
        return {name: value for name, (_, value) in self.entries(what).items()}

    def fields(
        self, what: str, required: Sequence[str] = (), optional: Sequence[str] = ()
    ) -> dict[str, YamlNode]:
        """The values of a mapping that has no others than those of the names given."""
        known = (*required, *optional)
        entries = self.entries(what)
        for name, (key, _) in entries.items():
            if name not in known:
                raise key.error(f"unknown key {name!r} in {what}", suggestion(name, known))
        for name in required:
            if name not in entries:
                raise self.error(f"{name!r} is missing in {what}")
        return {name: value for name, (_, value) in entries.items()}

    def items(self, what: str = "") -> list[YamlNode]:
        """The nodes of a list."""
        if not self.is_list:
            raise self.error(f"expected {what}" if what else f"{self.name!r} is not a list")
        return [self._child(raw, f"{self.name}[{k}]") for k, raw in enumerate(self.raw.value)]

    def text(self, what: str = "") -> str:
        """A scalar as it is written."""
        if not isinstance(self.raw, yaml.ScalarNode):
            said = f"expected {what}" if what else f"{self.name!r} is not a text"
            raise self.error(said, "Quote a text that starts with `[` or `{`.")
        return str(self.raw.value)

    def texts(self) -> tuple[str, ...]:
        """The scalars of a list, as they are written."""
        return tuple(node.text() for node in self.items())

    def flag(self) -> bool:
        """`true` or `false`."""
        if (text := self.text()) not in ("true", "false"):
            raise self.error(f"{self.name!r} is {text!r:.40}, it must be true or false")
        return text == "true"

    def number(self, *, zero: bool = False, whole: bool = False, most: float = inf) -> float:
        """A positive (with `zero`, non-negative) finite number no greater than `most`."""
        text = self.text()
        try:
            value = float(text)
        except ValueError:
            raise self.error(f"{self.name!r} is not a number: {text!r:.40}") from None
        if not isfinite(value) or value < 0 or (value == 0 and not zero) or value > most:
            allowed = ("at least 0" if zero else "above 0") + (
                f" and at most {most:g}" if isfinite(most) else ""
            )
            raise self.error(f"{self.name!r} is {text:.40}, it must be {allowed}")
        if whole and value != int(value):
            raise self.error(f"{self.name!r} is {text:.40}, it must be a whole number")
        return value

    def _child(self, raw: Any, name: str) -> YamlNode:
        return YamlNode(raw, self.file, self.error_type, name)


def suggestion(name: str, known: Sequence[str]) -> str:
    """The hint for a name that is not among those known."""
    near = get_close_matches(name, known, 1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"There are {', '.join(known)}." if known else "There are none."


def compose_yaml(path: Path, error: type[TapestryError]) -> YamlNode | None:
    """The root node of a YAML file, None for an empty one.

    Nothing is constructed, so tags and aliases have no effect beyond the node that they stand at.
    Raises `error` with `file:line:column` for a file that cannot be read or is not YAML; the file
    is called there as it is called in its folder.
    """
    return compose_yaml_text(read_yaml_text(path, error), error, path.name)


def read_yaml_text(path: Path, error: type[TapestryError], name: str = "") -> str:
    """The text of a file that people write. Raises `error` as `compose_yaml` does."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise error(f"cannot be read: {e.strerror}", where=str(path)) from e
    if len(data) > _LARGEST:
        raise error(f"has {len(data)} bytes, at most {_LARGEST} are read", where=str(path))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise error(f"not UTF-8: {e.reason}", where=f"{name or path.name}:{line}") from None


def plain_yaml(text: str, error: type[TapestryError], name: str) -> dict[str, Any]:
    """A mapping of YAML as plain data, of the types that JSON has. Raises `error` as `compose_yaml`
    does, and for anything else than a mapping."""
    root = compose_yaml_text(text, error, name)
    try:
        value = yaml.SafeLoader("").construct_document(root.raw if root else None)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as e:
        raise error(f"not YAML: {' '.join(str(e).split())}", where=name) from None
    if not isinstance(value, dict):
        raise error("not a mapping", where=name)
    return value


def compose_yaml_text(text: str, error: type[TapestryError], name: str) -> YamlNode | None:
    """The root node of a YAML text, None for an empty one. Raises `error` as `compose_yaml`."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    too_deep = f"more than {_DEEPEST} levels of lists and mappings"
    try:
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                mark: Any = event.start_mark
                at = f"{name}:{mark.line + 1}:{mark.column + 1}"
                raise error(too_deep, where=at)
        root = yaml.compose(text, Loader=loader)
        return None if root is None else YamlNode(root, name, error)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        if e.problem == _PAST_ITS_OWN:
            raise error(too_deep, where=f"{name}{place}") from None
        raise error(
            f"not YAML: {e.problem or e.context}",
            where=f"{name}{place}",
            hint="Texts that start with `[`, `{`, `@` or contain `: ` must be quoted.",
        ) from None
    except (yaml.YAMLError, ValueError) as e:
        what = " ".join(str(e).split())
        raise error(f"not YAML: {what}", where=name) from None
