"""Programs whose kernels have other names, and templates of these names that say the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry

SHIPPED = Path(registry.__file__).with_name("templates")


def add_under_other_names(kernels: Iterable[str], folder: Path) -> None:
    """Add the shipped entries of kernels once more, as a user's own of kernels `my_*`."""
    wanted, entries = set(kernels), []
    for path in sorted(SHIPPED.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text("utf-8")):
            own = [k for k in entry["kernels"] if k in wanted]
            if own:
                entries.append(_renamed({**entry, "kernels": own}, own))
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(entries, sort_keys=False, width=10_000), "utf-8")
    registry.add_templates(path)


def _renamed(part: Any, kernels: list[str]) -> Any:
    """A part of an entry, in which kernels are called otherwise."""
    if isinstance(part, dict):
        return {key: _renamed(value, kernels) for key, value in part.items()}
    if isinstance(part, list):
        return [_renamed(value, kernels) for value in part]
    if part in kernels:
        return f"my_{part}"
    for kernel in kernels if isinstance(part, str) else ():
        part = part.replace(f"'{kernel}'", f"'my_{kernel}'")
    return part


def under_other_names(graph: BlockGraph, kernels: Iterable[str]) -> BlockGraph:
    """The graph with kernels `my_*` in the place of some."""
    names = {k: f"my_{k}" for k in kernels}

    def of(inner: BlockGraph) -> BlockGraph:
        operations = [
            replace(op, kernel=names.get(op.kernel, op.kernel), regions=tuple(map(of, op.regions)))
            for op in inner.operations
        ]
        return replace(inner, operations=tuple(operations))

    return of(graph)
