"""YAML files as nodes that know their place: composed, never constructed, and bounded in depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .errors import TapestryError

#: Levels of lists and mappings. libyaml recurses in C, before 0.2.6 without a limit of its own.
_DEEPEST = 50
#: What libyaml says past 1000 levels, which it reads ahead before it tells of the first.
_PAST_ITS_OWN = "exceeded maximum nesting depth"
_LARGEST = 4 << 20  # bytes of a file that people write


def compose_yaml(path: Path, error: type[TapestryError]) -> Any:
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
        value = yaml.SafeLoader("").construct_document(root)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as e:
        raise error(f"not YAML: {' '.join(str(e).split())}", where=name) from None
    if not isinstance(value, dict):
        raise error("not a mapping", where=name)
    return value


def compose_yaml_text(text: str, error: type[TapestryError], name: str) -> Any:
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
        return yaml.compose(text, Loader=loader)
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
