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

    def of(self, tensor: str, entry: int = 0, reader: int = 0, most: int = 8) -> str:
        """What it holds of one tensor, in words: `front.stages["strategies"].of("[0]['up']")`.

        The tensor is named by its path, by an end of that, or by its number in the program that the
        entry is of (`%9`). From `encodings` on a stage has an entry for every form on every mesh
        shape: those of the first form, then those of the second. Strategies and the like are told
        of the operation that reads the tensor first, or of another `reader`; of long lists the
        first `most`. Raises GraphError where there is no such tensor, entry or reader.
        """
        from tapestry_egg.show.stages import Asked, tensor_text

        return tensor_text(self.name, self.value, Asked(tensor, reader, most), entry)
