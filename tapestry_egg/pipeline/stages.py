"""Stages: what each pass made, kept on request and printable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapestry_egg.progress import Verb


@dataclass(frozen=True)
class Stage:
    """What a pass made: the verb that it is part of, its name, and its value as the next pass took
    it. `print(front.stages["strategies"])` tells it in words."""

    verb: Verb
    name: str
    value: Any

    def __str__(self) -> str:
        from tapestry_egg.show.stages import stage_text

        return stage_text(self.name, self.value)
