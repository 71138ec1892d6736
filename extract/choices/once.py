"""Once: values that are made the first time they are wanted, by what they are made from; and the
rows and copies that the forms of a program have in common on one mesh.

Forms differ in a few operations, and all others of theirs run in the same ways at the same costs.
What is known of a mesh is kept by the layout algebra that its numbers index.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import TensorType
    from tapestry_egg.graph.layout_algebra import LayoutAlgebra
    from tapestry_egg.metakernels.signatures.signature import OperationSignature
    from tapestry_egg.shard.strategies import Saturated

    from .copies import CopyTable
    from .joiner import UnitRows

T = TypeVar("T")


class Plain(tuple[Any, ...]):
    """A tuple of plain numbers, or of such tuples: as it is, it stands for itself in a key."""


# What stands for itself in a key; anything else is named by its identity.
_PLAIN = frozenset((int, float, bool, str, type(None), Plain))


class Once:
    """Values by key, each made at its first use; arrays and tables in a key stand for themselves.

    The identity of an array is its name, not its content: whoever asks with the same array gets the
    same array back, and so all that follows from equal layers is made once, and is recognised as
    equal by identity again (`extract/engine/network.py`). To compare contents would be to read
    every table. A key holds on to its objects: an identity is a name only as long as its
    object is alive.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Any, Any]] = {}
        self._equal: dict[Hashable, NDArray[Any]] = {}
        self._some: dict[int, tuple[NDArray[Any], bool]] = {}

    def __call__(self, make: Callable[[], T], *key: Any) -> T:
        name = _name(key)
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = make(), key
        return found[0]

    def some(self, array: NDArray[Any]) -> bool:
        """Whether there is anything in an array that was made once."""
        found = self._some.get(id(array))
        if found is None:  # the array beside the answer, as its identity is the key
            found = self._some[id(array)] = array, bool(array.any())
        return found[1]

    def same(self, array: NDArray[Any]) -> NDArray[Any]:
        """The first array met that equals this one, so that equal arrays are one in keys."""
        return self._equal.setdefault((array.dtype.str, array.shape, array.tobytes()), array)


def _name(parts: tuple[Any, ...]) -> Hashable:
    """Plain parts as they are, tuples by their parts, other objects by their (negated) identity."""
    return tuple(
        [k if type(k) in _PLAIN else _name(k) if type(k) is tuple else ~id(k) for k in parts]
    )


@dataclass
class OnMesh:
    """What was joined and tabulated on one mesh: the rows of units by their structure, in which
    signatures have the `numbers` of this table; which of them have more rows than are here; copies
    by tensor type, those of fills apart."""

    rows: dict[tuple[object, ...], UnitRows] = field(default_factory=dict)
    cut: set[tuple[object, ...]] = field(default_factory=set)
    copies: dict[TensorType, CopyTable] = field(default_factory=dict)
    of_fills: dict[TensorType, CopyTable] = field(default_factory=dict)
    numbers: dict[OperationSignature, int] = field(default_factory=dict)

    def numbered(self, signatures: Sequence[OperationSignature]) -> list[int]:
        """The numbers of signatures here."""
        return [self.numbers.setdefault(s, len(self.numbers)) for s in signatures]


class JoinedUnits:
    """What was joined for one target and one contract, mesh by mesh, while this object lives; and
    what schedules are like on all meshes, `once` for each."""

    def __init__(self) -> None:
        self.once = Once()
        self._known: dict[LayoutAlgebra, OnMesh] = {}

    def on_mesh(self, saturated: Saturated) -> OnMesh:
        """What is known where the rules came to their end, and all is there that they derived: then
        equal signatures have equal strategies. Nothing otherwise."""
        if not saturated.saturated or saturated.some:
            return OnMesh()
        return self._known.setdefault(saturated.encoding.algebra, OnMesh())
