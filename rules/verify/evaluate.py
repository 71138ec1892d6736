"""Evaluate: both sides of a rule on numbers, by the NumPy references.

Three kinds of numbers, all of them over the same shapes:

    field    integers modulo a prime: additions, products and divisions are exact, so that equal
             polynomials are equal and unequal ones differ at random points except with a
             probability of about degree / prime (Schwartz 1980, Zippel 1979)
    wide     the widest floats there are, so that what remains of an error is far below any law's
    actual   the dtypes that the program has, rounding where it does
    truth    as wide, but rounding where the program converts: what it means to compute
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.reference.kernels import prepared
from tapestry_egg.reference.promises import breaks, can_check, keeping
from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.rules.language.families import MAP, MAP2

from .facts import is_polynomial
from .instances import Instance
from .laws import Node
from .values import Landmarks, drawn, near

Array = NDArray[Any]
# How often inputs keep what the pattern takes for granted of them.
_KEPT = 0.7
Numbers = Literal["field", "wide", "actual", "truth"]
#: What a kernel's result, out of its operands, is turned into before others read it.
Disturb = Callable[[Applied, Sequence[Array], Array], Array]

#: Products of two residues, and sums of 500 of them, fit in 64 bits.
PRIME = 134_217_689
_LONGEST_SUM = 500
_ELEMENTWISE = frozenset((*MAP, *MAP2, "select_n", "clamp", "copy_p", "optimization_barrier"))


#: A kernel on whole operands; and those of an instance, by signature and numbers.
Run = Callable[[Sequence[Array]], tuple[Array, ...]]
Ready = dict[tuple[str, str], Run]


class NoReference(Exception):
    """A kernel whose numbers nothing can tell."""


class NoValue(Exception):
    """An operation of a replacement that has no value where the pattern has one, or that makes a
    `promise` which does not hold."""

    def __init__(self, why: str, promise: bool = False) -> None:
        super().__init__(why)
        self.promise = promise


def has_field(instance: Instance) -> bool:
    """Whether both sides consist of sums, products and quotients of numbers, and of moves, and no
    sum is longer than fits."""
    types = [t for a in instance.applied.values() for t in (*a.inputs, a.output)]
    if any(n > _LONGEST_SUM for t in types for n in t.shape):
        return False
    return all(
        is_polynomial(a.signature)
        and all(
            kind(t.dtype) in ("float", "complex")
            for t in (*a.inputs, a.output)
            if t.rank or t.dtype != "int32"
        )
        and (a.signature.means != "power" or 0 <= a.params.get("y", 2) <= 2)
        for a in instance.applied.values()
    ) and all(v == int(v) for v in instance.side.constants.values())


def elementwise(instance: Instance) -> bool:
    """Whether every element of a result depends on the elements at its place alone, operands that
    are stretched included."""
    return all(a.kernel in _ELEMENTWISE for a in instance.applied.values())


def one_shape(instance: Instance) -> bool:
    """Whether all tensors that are no scalars have one shape."""
    types = [t for a in instance.applied.values() for t in (*a.inputs, a.output)]
    return len({t.shape for t in types if t.rank}) <= 1


@dataclass(frozen=True)
class Step:
    """One operation, ready to be run many times."""

    node: Node
    run: Callable[[Sequence[Array]], Array]


class Program:
    """Both sides of an instance over one kind of numbers.

    Raises NoReference for a kernel without a NumPy reference.
    """

    def __init__(self, instance: Instance, numbers: Numbers, ready: Ready | None = None) -> None:
        self.instance, self.numbers = instance, numbers
        self._ready: Ready = {} if ready is None else ready
        self.pattern = [self._step(node) for node in instance.side.nodes]
        self.replacement = [self._step(node) for node in instance.side.built]

    def _step(self, node: Node) -> Step:
        entry = self.instance.applied[node.signature]
        if self.numbers == "field" and entry.signature.means == "quotient":
            return Step(node, _quotient)
        # What is meant is computed in the widest floats, too.
        key = (node.signature, "wide" if self.numbers == "truth" else self.numbers)
        if key not in self._ready:
            self._ready[key] = self._prepared(entry)
        run = self._ready[key]
        field = self.numbers == "field"
        asked = self.instance.applied[node.signature].output.dtype
        narrow = None
        if self.numbers == "truth" and entry.signature.means == "conversion":
            narrow = numpy_dtype(asked)

        def one(operands: Sequence[Array]) -> Array:
            out = run(operands)[0]
            if narrow is not None:
                return out.astype(narrow).astype(out.dtype)
            return np.asarray(out % PRIME) if field and out.dtype == np.int64 else out

        return Step(node, one)

    def _prepared(self, asked: Applied) -> Run:
        try:
            entry, signature = _in(asked, self.numbers)
            run = prepared(entry.kernel, entry.params, signature)
        except TemplateError as e:
            raise NoReference(f"{asked.kernel}: {e}") from None
        if entry.output.shape != asked.output.shape:
            raise NoReference(f"{entry.kernel} has another shape in {self.numbers} numbers")
        return run

    def evaluate(
        self,
        values: Mapping[str, Array],
        disturb: Disturb | None = None,
        pattern_only: bool = False,
    ) -> dict[str, Array]:
        """Every tensor of both sides by name.

        Raises NoReference for an odd case that NumPy has no word for.
        """
        at: dict[str, Array] = dict(values)
        for step in self.pattern if pattern_only else (*self.pattern, *self.replacement):
            operands, out = self._run(step, at)
            if disturb is not None:
                out = disturb(self.instance.applied[step.node.signature], operands, out)
            at[step.node.name] = out
        return at

    def judged(self, values: Mapping[str, Array]) -> dict[str, Array] | None:
        """The same; None where what the pattern takes for granted does not hold.

        Raises NoValue where the replacement has no value, or takes for granted what does not hold.
        """
        at: dict[str, Array] = dict(values)
        for step in self.pattern:
            if self._broken(step.node, at):
                return None
            at[step.node.name] = self._run(step, at)[1]
        for step in self.replacement:
            kernel = self.instance.applied[step.node.signature].kernel
            if promise := self._broken(step.node, at):
                raise NoValue(f"`{promise}` of {kernel} does not hold", promise=True)
            try:
                at[step.node.name] = self._run(step, at)[1]
            except NoReference as none:
                if self.numbers == "actual":
                    raise NoValue(str(none)) from None
                raise
        return at

    def _broken(self, node: Node, at: Mapping[str, Array]) -> str:
        """A promise of an operation that does not hold; nothing where all do."""
        entry = self.instance.applied[node.signature]
        operands = [at[o] for o in node.operands]
        for promise in entry.promises:
            if can_check(promise) and breaks(promise, entry.params, entry.inputs, operands):
                return promise
        return ""

    def after(self, at: Mapping[str, Array], moved: str, value: Array, end: str) -> Array:
        """What tensor `end` is where tensor `moved` has another value than it has in `at`, which
        holds every tensor by name. What does not read it is not computed again."""
        there = {**at, moved: value}
        follows = {moved}
        for step in (*self.pattern, *self.replacement):
            node = step.node
            if node.name != moved and not follows.isdisjoint(node.operands):
                follows.add(node.name)
                there[node.name] = self._run(step, there)[1]
            if node.name == end:
                break
        return there[end]

    def _run(self, step: Step, at: Mapping[str, Array]) -> tuple[Sequence[Array], Array]:
        operands = [at[o] for o in step.node.operands]
        try:
            return operands, step.run(operands)
        except (TypeError, ValueError, LookupError, NotImplementedError, TemplateError) as e:
            kernel = self.instance.applied[step.node.signature].kernel
            why = f"it has no value for {e}" if isinstance(e, KeyError) else str(e)
            raise NoReference(f"{kernel}: {why}") from None

    def widened(self, name: str, value: Array) -> Array:
        """An input in the dtype that it has in these numbers."""
        dtype = _dtype(self.instance.inputs[name].dtype, self.numbers)
        return np.asarray(value).astype(numpy_dtype(dtype))

    def inputs(
        self,
        families: Sequence[str],
        rng: np.random.Generator,
        marks: Landmarks,
    ) -> dict[str, Array]:
        """Values of the inputs, each out of the family that stands at its place."""
        out: dict[str, Array] = {}
        constants = self.instance.side.constants
        kept = self._kept(rng)
        drawn_ones = [n for n in self.instance.inputs if n not in constants]
        of = dict(zip(drawn_ones, families, strict=True))
        for name, t in self.instance.inputs.items():
            dtype = _dtype(t.dtype, self.numbers)
            if name in constants:
                value = constants[name]
                if self.numbers == "field":
                    value = int(value) % PRIME
                out[name] = _constant(value, t, dtype)
            elif self.numbers == "field" and kind(t.dtype) in ("float", "complex"):
                out[name] = rng.integers(1, PRIME, t.shape, dtype=np.int64)
            elif name in kept:
                out[name] = kept[name]
            else:
                out[name] = drawn(t, of[name], rng, marks, dtype)
                others = [out[n] for n in drawn_ones if n in out and n != name]
                like = [x for x in others if (x.shape, x.dtype) == (t.shape, out[name].dtype)]
                if of[name] == "near" and kind(t.dtype) == "float" and like:
                    out[name] = near(rng, like[-1])
        return out

    def _kept(self, rng: np.random.Generator) -> dict[str, Array]:
        """Inputs that keep promises of the pattern, more often than not."""
        found: dict[str, Array] = {}
        for node in self.instance.side.nodes:
            entry = self.instance.applied[node.signature]
            known = [p for p in entry.promises if can_check(p)]
            if known and rng.random() < _KEPT:
                made = keeping(known, entry.params, entry.inputs, rng)
                if made is not None:
                    found[node.operands[made[0]]] = made[1]
        return found


def _constant(value: float, t: TensorType, dtype: str) -> Array:
    """A constant as its own dtype holds it."""
    held = np.full(t.shape, value)
    if dtype not in ("int64",):
        held = held.astype(numpy_dtype(t.dtype))
    return np.asarray(held.astype(numpy_dtype(dtype)))


def _quotient(operands: Sequence[Array]) -> Array:
    inverse = np.array(
        [pow(int(v), PRIME - 2, PRIME) for v in operands[1].reshape(-1)], np.int64
    ).reshape(operands[1].shape)
    return np.asarray(operands[0] * inverse % PRIME)


def _in(entry: Applied, numbers: Numbers) -> tuple[Applied, OperationSignature]:
    """The same kernel on the dtypes that the numbers have, and its signature."""
    if numbers == "actual":
        return entry, entry.signature
    inputs = tuple(as_numbers(t, numbers) for t in entry.inputs)
    params = {k: _param(v, numbers) for k, v in entry.params.items()}
    if registry.has_local(entry.kernel):
        signature = registry.signature(entry.kernel, params, inputs)
    else:
        # Where a kernel reads and writes depends on no dtype, so only the types are told anew.
        outputs = registry.output_types(entry.kernel, params, inputs)
        if outputs[0].shape != entry.output.shape:
            raise TemplateError(f"another shape in {numbers} numbers")
        signature = replace(entry.signature, input_types=inputs, output_types=outputs)
    output = signature.output_types[0]
    return replace(entry, params=params, inputs=inputs, output=output), signature


def as_numbers(t: TensorType, numbers: Numbers) -> TensorType:
    """The type in which a tensor is computed."""
    return TensorType(t.shape, _dtype(t.dtype, numbers))


def _dtype(name: str, numbers: Numbers) -> str:
    what = kind(name)
    if numbers == "actual" or what not in ("float", "complex"):
        return name
    if numbers == "field":
        return "int64"
    return "float64" if what == "float" else "complex128"


def _param(value: Any, numbers: Numbers) -> Any:
    if isinstance(value, Mapping) and "$dtype" in value:
        return {"$dtype": _dtype(value["$dtype"], numbers)}
    return value
