"""Shape patterns: `[$batch..., $shape=($height, $width), $features[$i], 1]` matched against shapes.

    $n            one dim                    $n...         any number of dims, once per pattern
    3             a dim of just that extent  +$n           the same, one dim at least
    $_, $_...     any dims, unbound          $n...[:$k]    just $k dims ($k is an expression)
    $g=($a, $b)   a group: its dims bind $a and $b, all of them together bind $g; groups nest
    $n[$i]        for the tensors of a list: $n is the list of what each of them has there, and $i
                  how many there are; `$g[$i]=(...)` is the same for a group

Parentheses and brackets mean the same in a group, and the `$` of a name may be left out
(`[*batch, a=[x, +k]]`, where `*batch` is `$batch...`). A name stands for one value: in all places
of a pattern, all tensors of a list and all patterns matched together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from .closures import Compiled, Node, compile_text
from .faults import Fault, Mismatch, Text
from .parser import parse
from .scopes import Scope

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Axis:
    """One entry of a pattern; `name` is "" where nothing is bound.

    `extent` is that of an `exactly` entry, `count` gives the number of dims of a `counted` one,
    `members` are those of a group and `index` is `$i` in `$name[$i]`.
    """

    kind: Literal["dim", "rest", "some", "counted", "exactly", "group"]
    name: str
    at: int
    extent: int = 0
    count: Compiled | None = None
    members: tuple[Axis, ...] = ()
    index: str = ""

    def walk(self) -> Iterator[Axis]:
        yield self
        for member in self.members:
            yield from member.walk()


@dataclass(frozen=True, slots=True)
class Span:
    """The dims `start` to `stop` of a shape that a name stands for. `single` names bind an extent,
    the others a list of them."""

    name: str
    start: int
    stop: int
    single: bool
    index: str = ""

    def value(self, shape: Shape) -> Any:
        return shape[self.start] if self.single else tuple(shape[self.start : self.stop])


@dataclass(frozen=True, slots=True)
class Pattern(Text):
    """A text that shapes are matched against; see the module's docstring."""

    WHAT = "a pattern"

    def axes(self) -> tuple[Axis, ...]:
        """The entries. Raises TemplateError with the place of a fault in the text."""
        try:
            return _pattern(self.text)
        except Fault as fault:
            raise self.fault(fault) from None

    def names(self) -> tuple[str, ...]:
        """Every name that a match binds, in the order of the text."""
        found: dict[str, None] = {}
        for top in self.axes():
            for axis in top.walk():
                found.update((n, None) for n in (axis.name, axis.index) if n)
        return tuple(found)

    def spans(self, shape: Shape, scope: Scope | None = None) -> tuple[Span, ...]:
        """Which dims of `shape` each name stands for, in the order of the text.

        `scope` is where the counts of `$n...[:count]` are evaluated. Raises Mismatch where the
        shape does not fit, and TemplateError for a count that is none.
        """
        axes = self.axes()
        try:
            widths = _widths(axes, {} if scope is None else scope)
        except Fault as fault:
            raise self.fault(fault) from None
        fixed = sum(w for w in widths.values() if w is not None)
        open_ = [axis for top in axes for axis in top.walk() if widths.get(id(axis), 0) is None]
        spare = len(shape) - fixed
        least = sum(axis.kind == "some" for axis in open_)
        if spare < least or (not open_ and spare):
            want = f"{fixed + least} dims{' or more' if open_ else ''}"
            raise Mismatch(f"{_shown(shape)} has rank {len(shape)}, the pattern {self.text} {want}")
        found: list[Span] = []
        self._walk(axes, 0, shape, {k: spare if w is None else w for k, w in widths.items()}, found)
        return tuple(found)

    def _walk(
        self,
        axes: Sequence[Axis],
        at: int,
        shape: Shape,
        widths: Mapping[int, int],
        found: list[Span],
    ) -> int:
        for axis in axes:
            start = at
            if axis.kind == "group":
                place = len(found)
                at = self._walk(axis.members, at, shape, widths, found)
                found.insert(place, Span(axis.name, start, at, False, axis.index))
                continue
            at += widths[id(axis)]
            if axis.kind == "exactly" and shape[start] != axis.extent:
                raise Mismatch(
                    f"dim {start} of {_shown(shape)} is {shape[start]}, "
                    f"the pattern {self.text} has {axis.extent} there"
                )
            if axis.name:
                found.append(Span(axis.name, start, at, axis.kind == "dim", axis.index))
        return at

    def match(self, shape: Shape, names: dict[str, Any]) -> bool:
        """Bind this pattern's names into `names`; False when the shape does not fit, or when a
        name would have two values."""
        try:
            bind([(self, [shape])], names)
        except Mismatch:
            return False
        return True


def bind(
    lists: Iterable[tuple[Pattern, Sequence[Shape]]],
    names: dict[str, Any],
    scope: Scope | None = None,
) -> list[list[tuple[Span, ...]]]:
    """Match every list of shapes against its pattern, and bind the names into `names`.

    Returns the spans, per list and shape. Raises Mismatch where a shape does not fit, or a name
    would stand for two values; TemplateError for a count that is none.
    """
    out = []
    for pattern, shapes in lists:
        each: dict[str, list[Any]] = {}
        own = []
        for shape in shapes:
            spans = pattern.spans(shape, scope)
            own.append(spans)
            for span in spans:
                value = span.value(shape)
                if span.index:
                    each.setdefault(span.name, []).append(value)
                else:
                    _bind(names, span.name, value, f"{_shown(shape)} as {pattern.text}")
        for axis in (axis for top in pattern.axes() for axis in top.walk()):
            if axis.index:
                told = f"{len(shapes)} tensors as {pattern.text}"
                _bind(names, axis.index, len(shapes), told)
                if axis.name:
                    _bind(names, axis.name, tuple(each.get(axis.name, ())), told)
        out.append(own)
    return out


def _bind(names: dict[str, Any], name: str, value: Any, by: str) -> None:
    if names.setdefault(name, value) != value:
        raise Mismatch(f"{name} is {_said(value)} in {by}, and {_said(names[name])} before")


def _said(value: Any) -> str:
    return _shown(value) if isinstance(value, tuple) else str(value)


def _shown(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _widths(axes: Sequence[Axis], scope: Scope) -> dict[int, int | None]:
    """Dims that each entry without members takes; None for what takes all that is left."""
    out: dict[int, int | None] = {}
    for axis in (axis for top in axes for axis in top.walk()):
        if axis.kind in ("dim", "exactly"):
            out[id(axis)] = 1
        elif axis.kind in ("rest", "some"):
            out[id(axis)] = None
        elif axis.count is not None:
            n = axis.count(scope)
            if type(n) is not int or n < 0:
                raise Fault(axis.at, f"{n!r} is not a number of dims")
            out[id(axis)] = n
    return out


# Parsing


@cache
def _pattern(text: str) -> tuple[Axis, ...]:
    axes = _axes(parse(text, "pattern").children[0])
    entries = [axis for top in axes for axis in top.walk()]
    open_ = [axis for axis in entries if axis.kind in ("rest", "some")]
    if len(open_) > 1:
        raise Fault(open_[1].at, "a pattern can have only one `...`", "`$n...[:2]` is two dims.")
    kinds: dict[str, tuple[str, str]] = {}
    for axis in entries:
        if not axis.name:
            continue
        kind = (axis.kind, axis.index)
        if kinds.setdefault(axis.name, kind) != kind:
            raise Fault(axis.at, f"{axis.name} stands for two things in one pattern")
    for axis in entries:
        if axis.index in kinds:
            raise Fault(axis.at, f"{axis.index} is an index here and a dim elsewhere")
    groups = [axis.name for axis in entries if axis.kind == "group" and axis.name]
    for axis in entries:
        if axis.kind == "group" and groups.count(axis.name) > 1:
            raise Fault(axis.at, f"{axis.name} is a group twice")
    return axes


def _axes(tree: Node) -> tuple[Axis, ...]:
    return () if tree is None else tuple(map(_axis, tree.children))


def _axis(tree: Node) -> Axis:
    what, head = str(tree.data), tree.children[0]
    at = head.start_pos
    if what == "exactly":
        if len(head) > 18:
            raise Fault(at, f"a number of {len(head)} digits")
        return Axis("exactly", "", at, extent=int(head))
    name = _named(head)
    if what in ("dim", "rest", "some"):
        return Axis(what, name, at)  # type: ignore[arg-type]
    if what == "counted":
        return Axis("counted", name, at, count=compile_text(tree.children[2]))
    if what == "indexed":
        return Axis("dim", name, at, index=_named(tree.children[1]))
    index = _named(tree.children[1]) if what == "group_each" else ""
    return Axis("group", name, at, members=_axes(tree.children[-1]), index=index)


def _named(token: Any) -> str:
    """The name with its `$`; "" for the `_` that binds nothing."""
    name = f"${str(token).removeprefix('$')}"
    if name.startswith("$."):
        raise Fault(token.start_pos, f"{name} belongs to the language: a pattern cannot bind it")
    return "" if name == "$_" else name
