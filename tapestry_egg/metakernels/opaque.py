"""Primitives that have no template on purpose: the reason for each, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from tapestry_egg.metakernels.signatures.signature import Elements


@dataclass(frozen=True, slots=True)
class Opaque:
    """What `opaque.yaml` says of a primitive; its first lines say what the fields mean."""

    reason: str
    calls: bool = False
    once: bool = False
    draws: bool = False
    planned: bool = True
    elements: Elements = "computed"

    @property
    def runs_once(self) -> bool:
        """Whether one device runs it for all."""
        return self.calls or self.once


#: What is known of a primitive that the file does not name.
_UNKNOWN = Opaque("")


@cache
def opaque_primitives() -> Mapping[str, Opaque]:
    """What is known of each primitive that has no template on purpose, by name."""
    text = Path(__file__).with_name("opaque.yaml").read_text("utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    facts = [(e.pop("primitives"), Opaque(**e)) for e in yaml.load(text, loader)]
    return {name: each for names, each in facts for name in names}


def facts_of(kernel: str) -> Opaque:
    """What is known of a kernel without a template."""
    return opaque_primitives().get(kernel, _UNKNOWN)
