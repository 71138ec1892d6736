"""Names for dims, and ranges and projections written with them: an aid for people only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .projection import Projection
from .zrange import ZRange, ZSpaceError

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class DimensionMap:
    """Distinct names of dims, in order; each a letter, then letters, digits and underscores.

    Nothing is computed from names: a dim is its position. Raises ZSpaceError for a name that is
    malformed or occurs twice.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        names = tuple(self.names)
        for name in names:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ZSpaceError(
                    f"{name!r} does not name a dim", hint="A letter, then letters, digits, _."
                )
        if len(set(names)) != len(names):
            raise ZSpaceError(f"the names {', '.join(names)} are not distinct")
        object.__setattr__(self, "names", names)

    @staticmethod
    def numbered(rank: int, letter: str = "i") -> DimensionMap:
        """`i0, i1, ..`: names for dims that have none."""
        return DimensionMap(tuple(f"{letter}{d}" for d in range(rank)))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, dim: int) -> str:
        return self.names[dim]

    def index(self, name: str) -> int:
        """The position of a name. Raises ZSpaceError where there is none."""
        if name not in self.names:
            raise ZSpaceError(f"no dim is called {name!r}", hint=f"There are {self}.")
        return self.names.index(name)

    def order(self, names: Sequence[str]) -> tuple[int, ...]:
        """The positions of all the names in another order, as `ZRange.permute` takes them.

        Raises ZSpaceError unless `names` are exactly these names.
        """
        found = tuple(self.index(name) for name in names)
        if sorted(found) != list(range(len(self))):
            raise ZSpaceError(f"{', '.join(names)} are not the names {self}, each once")
        return found

    def permute(self, names: Sequence[str]) -> DimensionMap:
        """The same names in another order."""
        self.order(names)
        return DimensionMap(tuple(names))

    def show_range(self, box: ZRange, letter: str = "i") -> str:
        """A range with its names, `i[x=0:3, y=0:4]`. Raises ZSpaceError where the ranks differ."""
        self._fits(box.rank, str(box))
        sides = zip(self.names, box.start, box.end, strict=True)
        return f"{letter}[{', '.join(f'{n}={s}:{e}' for n, s, e in sides)}]"

    def show_projection(
        self, projection: Projection, tensor: DimensionMap, letter: str = "p"
    ) -> str:
        """A projection of the dims named here to those of `tensor`, `p[a=x+4:+3, b=x+2z+5:+2]`.

        After each name of a tensor dim stands where the box starts, and its extent unless that is
        1. Raises ZSpaceError where the ranks differ.
        """
        self._fits(projection.index_rank, str(projection))
        tensor._fits(projection.tensor_rank, str(projection))
        sides = zip(tensor.names, projection.entries(self.names), strict=True)
        return f"{letter}[{', '.join(f'{n}={entry}' for n, entry in sides)}]"

    def __str__(self) -> str:
        return f"[{', '.join(self.names)}]"

    def _fits(self, rank: int, what: str) -> None:
        if rank != len(self):
            raise ZSpaceError(f"{len(self)} names {self} for {what}, of rank {rank}")
