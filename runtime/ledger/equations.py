"""The emitted program as plain records: steps with numbered values, calls inlined, loops nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tapestry_egg.errors import PlanError

#: Collectives of JAX -> the kind that plans have for them.
KINDS: Mapping[str, str] = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
}
#: Regions that run apart from what stands around them.
REGIONS = ("scan", "while", "cond")
#: Equations whose function is computed as if it stood in their place.
_CALLS = frozenset(
    "jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call".split()
)


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective on a device: the larger of its two sides, in bytes, and over which axes."""

    kind: str
    axes: tuple[str, ...]
    payload: int

    def wire(self, sizes: Mapping[str, int]) -> float:
        """Bytes that a device sends if the group's links share the work evenly."""
        group = prod(sizes[a] for a in self.axes)
        if self.kind == "permute":
            return float(self.payload)
        return (2 if self.kind == "all_reduce" else 1) * self.payload * (group - 1) / group


@dataclass(slots=True)
class Step:
    """One equation. `reads` and `makes` are numbers of values, -1 for a literal."""

    name: str
    reads: list[int]
    makes: list[int]
    params: Mapping[str, Any]
    inner: list[Region] = field(default_factory=list)
    sent: Sent | None = None


@dataclass(slots=True)
class Region:
    """The steps of a program, of a loop's body or of a branch, in their order."""

    inputs: list[int]
    outputs: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass
class Program:
    """What every device of a mesh with these axes runs, and each value's bytes and type on it."""

    axes: Mapping[str, int]  # name -> size
    bytes: list[int] = field(default_factory=list)
    types: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def read(self, jaxpr: Any) -> Region:
        """A jaxpr as a region of this program. Raises PlanError for an unknown collective."""
        known = {v: self._value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
        region = Region([known[v] for v in jaxpr.invars])
        self._steps(jaxpr, known, region)
        region.outputs = [_number(v, known) for v in jaxpr.outvars]
        return region

    def _value(self, aval: Any) -> int:
        shape = tuple(getattr(aval, "shape", ()))
        size = getattr(getattr(aval, "dtype", None), "itemsize", 0)
        self.bytes.append(prod(shape) * size)
        self.types.append((shape, str(getattr(aval, "dtype", ""))))
        return len(self.bytes) - 1

    def _steps(self, jaxpr: Any, known: dict[Any, int], region: Region) -> None:
        for equation in jaxpr.eqns:
            name, inner = equation.primitive.name, list(jaxprs(equation))
            reads = [_number(v, known) for v in equation.invars]
            if name in _CALLS and inner:
                (called, *_) = inner
                own = dict(zip(called.invars, reads, strict=True))
                own |= {v: self._value(v.aval) for v in called.constvars}
                self._steps(called, own, region)
                made = [_number(v, own) for v in called.outvars]
                known |= zip(equation.outvars, made, strict=True)
                continue
            for v in equation.outvars:
                known[v] = self._value(v.aval)
            makes = [known[v] for v in equation.outvars]
            step = Step(name, reads, makes, equation.params)
            step.inner = [self.read(j) for j in inner] if name in REGIONS else []
            step.sent = self._sent(equation, step)
            region.steps.append(step)

    def _sent(self, equation: Any, step: Step) -> Sent | None:
        """What a step sends; dims of arrays, which sums may go over as well, are no mesh axes."""
        over = {getattr(effect, "name", None) for effect in equation.effects}
        given = _names(step.params.get("axis_name", ()))
        given += _names(step.params.get("axes", ())) if step.name in KINDS else ()
        over.update(given)
        if over.isdisjoint(self.axes) or step.inner or step.name == "axis_index":
            return None
        if step.name not in KINDS:
            raise PlanError(f"{step.name} is no collective that plans have")
        axes = tuple(a for a in given if a in self.axes)
        if step.params.get("axis_index_groups") is not None:
            raise PlanError(f"{step.name} over a part of the devices along {', '.join(axes)}")
        larger = step.makes if step.name == "all_gather" else step.reads
        return Sent(KINDS[step.name], axes, sum(self.bytes[v] for v in larger if v >= 0))


def _names(axes: Any) -> tuple[Any, ...]:
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def all_sent(region: Region, sizes: Mapping[str, int], times: int = 1) -> list[tuple[Sent, int]]:
    """Every collective of a region and how often it runs: in a scan as often as that has steps, in
    a while loop once, in a conditional those of the branch that sends most."""
    found: list[tuple[Sent, int]] = []
    for step in region.steps:
        if step.sent:
            found.append((step.sent, times))
        rounds = times * (step.params["length"] if step.name == "scan" else 1)
        inner = [all_sent(r, sizes, rounds) for r in step.inner]
        if step.name == "cond":
            inner = [max(inner, key=lambda sent: _wire(sent, sizes))]
        found += [sent for one in inner for sent in one]
    return found


def _wire(sent: Sequence[tuple[Sent, int]], sizes: Mapping[str, int]) -> float:
    return sum(one.wire(sizes) * times for one, times in sent)


def _number(variable: Any, known: Mapping[Any, int]) -> int:
    return -1 if hasattr(variable, "val") else known[variable]
