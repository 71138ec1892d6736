"""Packages whose public names are loaded on first use."""

from __future__ import annotations

from types import ModuleType


class LazyPackage(ModuleType):
    """A package whose table `_HOMES` says which of its modules holds a public name.

    Where a function has the name of its module, `package.compile` stays the function when the
    module of that name is imported too.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in self.__dict__["_HOMES"] and isinstance(value, ModuleType)):
            super().__setattr__(name, value)
