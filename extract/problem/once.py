"""Once: values that are made the first time they are wanted, by what they are made from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from numpy.typing import NDArray

T = TypeVar("T")


# What stands for itself in a key; anything else is named by its identity.
_PLAIN = frozenset((int, float, bool, str, type(None)))


class Once:
    """Values by key, each made at its first use; arrays and tables in a key stand for themselves.

    The identity of an array is its name, not its content: whoever asks with the same array gets the
    same array back, and so all that follows from equal layers is made once, and is recognised as
    equal by identity again (`extract/search/pricing.py`). To compare contents would be to read
    every table. A key holds on to its objects: an identity is a name only as long as its object is
    alive.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Any, Any]] = {}
        self._equal: dict[Hashable, NDArray[Any]] = {}

    def __call__(self, make: Callable[[], T], *key: Any) -> T:
        name = _name(key)
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = make(), key
        return found[0]

    def same(self, array: NDArray[Any]) -> NDArray[Any]:
        """The first array met that equals this one, so that equal arrays are one in keys."""
        return self._equal.setdefault((array.dtype.str, array.shape, array.tobytes()), array)


def _name(parts: tuple[Any, ...]) -> Hashable:
    """Plain parts as they are, tuples by their parts, other objects by their (negated) identity."""
    return tuple(
        [k if type(k) in _PLAIN else _name(k) if type(k) is tuple else ~id(k) for k in parts]
    )
