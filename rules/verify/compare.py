"""Compare: what two sides of a rule may differ by, as its numerics class says.

Integers and flags never differ, in no class. Where the pattern gives NaN, that element of the
replacement may be anything, unless the class is `exact`; no other may. Beyond that:

`exact`             in the program's dtype all numbers are equal, infinities included (zeros of
                    either sign are equal), and NaN stays NaN;
`reorders`          over the reals the sides are equal: in float64 to 1e-9 of what occurs at an
                    element. In the program's dtype the replacement is off the truth by at most four
                    times what the pattern is off by, and a few roundings of the dtype in which the
                    pattern computes, beside what occurs; and at each element no farther than some
                    roundings of the pattern and its inputs would move it (rounding.py). A number
                    stays a number, an infinity no number: what a program masks away (an infinity or
                    a NaN that is not selected) stays away;
`changes_rounding`  over the reals the sides are equal, and in the program's dtype a number stays a
                    number where nothing in the pattern is large. What is masked away stays away;
                    elsewhere infinities and NaN passed in may give anything.

Nor is a pole of the pattern NaN in the replacement, unless numbers are summed on the way, nor, in a
rule that reorders, an infinity out of an infinity where a function of one element makes that NaN.

Differences over the reals are forgiven where the law's own rounding in float64 explains them: where
results move as far when what is computed on the way is shaken by a few units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np

from tapestry_egg.graph.arrays import kind
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.rules.language.book import Rule

from .evaluate import Array, Program, elementwise, one_shape
from .facts import is_polynomial, is_rational, is_still, is_sum, linear_in
from .instances import Instance
from .laws import Node

#: Relative difference of a law's two sides in float64, above what its few roundings make.
_LAW = 1e-9
#: Roundings of the dtype in which a pattern computes that an operation may be off by.
_ROUNDINGS = 8.0
#: How much worse than the pattern a replacement may round.
_WORSE = 4.0
#: Up to here nothing overflows in float64 that is not meant to.
_GENTLE = 8.0
_SHAKEN = 2.0**-50
_SHAKES = 3
# What underflowed, or nearly, has no digits left.
_SUBNORMAL = 1e-300
#: Binary orders of magnitude that float64 has on either side of 1, but for some.
_POWERS = 1000


def differs_over_the_reals(
    rule: Rule,
    program: Program,
    values: Mapping[str, Array],
    at: Mapping[str, Array],
    root: str,
    made: str,
) -> tuple[bool, bool]:
    """Whether two results in float64 differ more than a law may, and whether they tell anything."""
    left, right = at[root], at[made]
    if discrete(left):
        wrong = left != right
        if wrong.any() and _real(program.instance):
            wrong &= ~_shaky(program, values, root, made, np.ones(left.shape))
        return bool(wrong.any()), bool(left.size)
    nan, whole = np.isnan(left), np.isfinite(left)
    finite = all(np.isfinite(v).all() for v in values.values() if v.dtype.kind in "fc")
    gentle = all(
        float(np.abs(v).max(initial=0)) <= _GENTLE for v in values.values() if v.dtype.kind in "fc"
    )
    scale = _scale(program.instance, at, left)
    with np.errstate(all="ignore"):
        apart = np.abs(left - right)
        close = (left == right) | (apart <= _LAW * scale)
        number = np.isfinite(right)
    wrong = whole & ~close
    if finite and not gentle:
        wrong &= number  # an overflow of float64 is none of the law's
    pole = ~whole & ~nan
    if finite:
        if gentle:  # a pole, for nothing overflows of what is gentle
            wrong |= pole & number
            if (pole & np.isnan(right)).any() and not sums(program.instance):
                wrong |= pole & _no_number(program, values, made)
    elif rule.numerics == "exact":
        wrong |= pole & ~(left == right)
    else:
        wrong |= pole & number
        if rule.numerics == "reorders" and (pole & np.isnan(right)).any():
            wrong |= pole & _outside(program.instance, at, made)
    if finite and wrong.any() and _leaves_the_range(program.instance, at):
        return False, False
    if wrong.any() and not finite and rule.numerics == "changes_rounding":
        wrong &= _masked(program, values, root, left)
    if wrong.any():
        wrong &= ~_shaky(program, values, root, made, np.where(number & whole, apart, np.inf))
    return bool(wrong.any()), bool((~nan).any())


def _leaves_the_range(instance: Instance, at: Mapping[str, Array]) -> bool:
    """Whether a product of many factors may be 0 or infinite on its way to a number that is
    neither: in float64 e⁻³⁰⁰·e⁻³⁰⁰·e⁻³⁰⁰ is, whatever follows. It then tells nothing of a law."""
    for node in (*instance.side.nodes, *instance.side.built):
        own = instance.applied[node.signature].signature
        factors = [d for d, dim in enumerate(own.index) if dim.monoid == "prod"]
        if own.scattered or not factors:
            continue
        rows = enumerate(own.inputs[0].matrix)
        axes = [k for k, row in rows if any(row[d] for d in factors)]
        size = np.abs(at[node.operands[0]])
        with np.errstate(all="ignore"):
            powers = np.where(np.isfinite(size) & (size > 0), np.log2(size), 0.0)
        for side in (np.maximum(powers, 0.0), np.maximum(-powers, 0.0)):
            if (side.sum(axis=tuple(axes)) > _POWERS).any():
                return True
    return False


def differs_exactly(
    instance: Instance, left: Array, right: Array, keeps_nan: bool
) -> tuple[bool, bool]:
    """Whether results in a program's dtype are unequal, and whether they tell anything.

    The references sum in 64 bits, in an order that no law speaks of: sums of 64 bits, and complex
    products, which are such sums, may differ in their last digits. `keeps_nan`: what is no number
    in the one is none in the other.
    """
    if discrete(left):
        return not np.array_equal(left, right), bool(left.size)
    a, b = _wide(left), _wide(right)
    nan = np.isnan(a)
    same = (nan & (np.isnan(b) | (not keeps_nan))) | (a == b)
    if not same.all() and left.dtype.itemsize == 8 * (1 + (left.dtype.kind == "c")):
        if sums(instance):
            with np.errstate(all="ignore"):
                same |= np.abs(a - b) <= _ROUNDINGS * np.finfo(np.float64).eps * _most(a)
    return not bool(same.all()), bool((~nan).any())


def differs_by_rounding(
    instance: Instance,
    at: Mapping[str, Array],
    meant: Mapping[str, Array],
    root: str,
    made: str,
    wide: Program,
    values: Mapping[str, Array],
) -> tuple[bool, bool]:
    """Whether a replacement rounds much worse than its pattern does; `meant` is what the pattern
    computes on the same values in float64, rounding only where it converts."""
    left, right = at[root], at[made]
    if discrete(left):
        return not np.array_equal(left, right), bool(left.size)
    a, b, truth = _wide(left), _wide(right), meant[root]
    most: float | Array
    own: float | Array
    told = np.isfinite(a) & np.isfinite(truth)
    if not told.any():
        return False, False
    if loses_numbers(instance, at, meant, root, made):
        return True, True
    told &= np.isfinite(b)
    if not told.any():
        return False, False
    terms = 1
    steps = len(instance.side.nodes) + len(instance.side.built)
    longest = max(map(_terms, instance.applied.values()), default=1)
    alone = elementwise(instance) and one_shape(instance)
    if alone and not _only_sums(instance):
        # Functions of one element lose no digits of it: an error counts beside what the pattern
        # itself computes there, and the terms of its sums.
        most = _scale(instance, {n: x for n, x in meant.items() if n in _computed(instance)}, left)
        with np.errstate(all="ignore"):
            part = np.where(told & (most > 0), np.abs(a - truth) / most, 0.0)
        own = float(part[np.isfinite(part)].max(initial=0.0)) * most
        longest = 1
    else:
        # Of a sum some signs are drawn: of the worst ones it hears the root of its terms.
        terms = steps + math.ceil(min(longest, 64) ** 0.5)
        most = max((_most(x) for x in at.values()), default=0.0)
        own = float(np.abs(a - truth)[told].max())
    allowed = _WORSE * own + _ROUNDINGS * (steps + min(longest, 64)) * _rounding(instance) * most
    # The last rounding of all is the result's own.
    last = _epsilon(instance.types[root].dtype) * np.abs(truth)
    last = last + _ROUNDINGS * _least(instance)
    shared = _shared_narrowings(instance)
    narrow = max(map(_epsilon, shared), default=0.0) * most + last
    with np.errstate(all="ignore"):
        off = np.abs(b - truth)
        late = widest(instance)  # what is meant is off itself, as the pattern is
        if not late and (off > allowed + narrow)[told].any():
            return True, True
        # Beside the greatest number all is well. That says little of small products, and of
        # differences: there it counts how far the pattern's own roundings move each element.
        u = _rounding(instance)
        open_ = told & (off > _ROUNDINGS * u * np.abs(truth) + last)
        nodes = instance.side.nodes
        for node in nodes:  # where a step of the pattern overflows, nothing is known
            whole = np.isfinite(_wide(at[node.name]))
            open_ &= whole if alone and whole.shape == open_.shape else whole.all()
        if not open_.any():
            return False, True
        by = {n.name: _rounding_of(instance.applied[n.signature], u, shared) for n in nodes}
        far = moved(wide, values, root, made, u, _least(instance), alone, by)
        worse = np.where(told & (far > 0), np.abs(a - truth) / far, 0.0)
        own = _WORSE * float(worse[np.isfinite(worse)].max(initial=0.0))
        times = max(own, _ROUNDINGS * terms)
        allowed = times * far + _WORSE * np.abs(a - truth)
        return bool((off > allowed + last)[open_].any()), True


def loses_numbers(
    instance: Instance,
    at: Mapping[str, Array],
    meant: Mapping[str, Array],
    root: str,
    made: str,
) -> bool:
    """Whether a replacement gives no number where nothing in the pattern is large: where all that
    it computes is below the cube root of the greatest number."""
    left, right = at[root], at[made]
    if discrete(left):
        return False
    lost = np.isfinite(left) & np.isfinite(meant[root]) & ~np.isfinite(right)
    large = _top(instance) ** (1 / 3)
    return bool(lost.any() and (lost & (_scale(instance, meant, left) < large)).any())


def _computed(instance: Instance) -> set[str]:
    """What a pattern computes, and the inputs that it adds or multiplies; constants are neither."""
    nodes = instance.side.nodes
    own = {n.name: instance.applied[n.signature].signature for n in nodes}
    summed = {o for n in nodes if is_polynomial(own[n.name]) for o in n.operands}
    return (own.keys() | summed) - set(instance.side.constants)


def _least(instance: Instance) -> float:
    """The step between the smallest numbers of the dtypes that occur."""
    dtypes = [t.dtype for a in instance.applied.values() for t in (*a.inputs, a.output)]
    return max(_limits(d)[2] for d in dtypes if kind(d) in ("float", "complex"))


def _only_sums(instance: Instance) -> bool:
    """Whether all that is computed are sums, products and quotients, in some order."""
    every = [a.signature for a in instance.applied.values()]
    return all(is_still(s) or is_polynomial(s) for s in every)


def _scale(instance: Instance, at: Mapping[str, Array], like: Array) -> Array:
    """The greatest magnitude that occurs, at each element where elements do not meet."""
    if not (elementwise(instance) and one_shape(instance)):
        return np.full(like.shape, max(map(_most, at.values()), default=0.0))
    out = np.zeros(like.shape)
    for x in at.values():
        if x.dtype.kind in "fc":
            size = np.abs(x)
            out = np.maximum(out, np.where(np.isfinite(size), size, 0.0))
    return out


def discrete(x: Array) -> bool:
    """Whether elements are integers, flags or keys, which are equal or not."""
    return x.dtype.kind in "biu" or x.dtype.names is not None


def _most(x: Array) -> float:
    if discrete(x) or not x.size:
        return 0.0
    size = np.abs(x if x.dtype.itemsize >= 4 else _wide(x))
    most = float(size.max())
    if not math.isfinite(most):
        finite = size[np.isfinite(size)]
        most = float(finite.max()) if finite.size else 0.0
    return most


def _wide(x: Array) -> Array:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _real(instance: Instance) -> bool:
    """Whether numbers that round occur on the way."""
    return any(kind(a.output.dtype) in ("float", "complex") for a in instance.applied.values())


def _shaky(
    program: Program, values: Mapping[str, Array], root: str, made: str, apart: Array
) -> Array:
    """Where a difference is explained by rounding on the way."""
    rng = np.random.default_rng(0)

    def shake(entry: Applied, operands: Sequence[Array], x: Array) -> Array:
        if x.dtype.kind not in "fc" or is_still(entry.signature):
            return x
        with np.errstate(all="ignore"):
            by = np.where(np.abs(x) < _SUBNORMAL, 0.5, _SHAKEN)
            shaken = x * (1 + by * rng.choice((-1.0, 1.0), x.shape))
            return np.where(_surely_exact(entry.signature, operands, x), x, shaken)

    first = program.evaluate(values)
    moved = np.zeros(apart.shape)
    for _ in range(_SHAKES):
        other = program.evaluate(values, shake)
        for name in (root, made):
            a, b = first[name], other[name]
            with np.errstate(all="ignore"):
                far = (a != b).astype(float) if discrete(a) else np.abs(a - b)
            far = np.where(np.isnan(far), np.where(np.isnan(a) == np.isnan(b), 0.0, np.inf), far)
            moved = np.maximum(moved, far)
    return np.asarray((moved > 0) & (apart <= 16 * moved))


def _surely_exact(own: OperationSignature, operands: Sequence[Array], x: Array) -> Array:
    """Where a result has not been rounded: short numbers out of short ones; of functions that are
    no sums or products, only at 0 and 1."""
    exact = _short(x)
    for operand in operands:
        if operand.dtype.kind not in "fc":
            continue
        fine = _short(operand) if is_rational(own) else np.isin(operand, (0.0, 1.0, -1.0))
        if operand.shape != x.shape:
            fine = np.asarray(fine.all())
        exact &= fine
    return exact


def _short(x: Array) -> Array:
    """Numbers of few digits, of which sums and products are exact."""
    return np.asarray((np.abs(x) < 2.0**20) & (x * 2.0**12 == np.round(x * 2.0**12)))


def _masked(program: Program, values: Mapping[str, Array], root: str, left: Array) -> Array:
    """Where a result is the same whatever number stands for what is none."""
    same = np.ones(left.shape, bool)
    for other in (-3.0, 0.5, 7.0):
        numbers = {
            n: np.where(np.isfinite(v), v, other).astype(v.dtype) if v.dtype.kind in "fc" else v
            for n, v in values.items()
        }
        same &= program.evaluate(numbers, pattern_only=True)[root] == left
    return same


def _outside(instance: Instance, at: Mapping[str, Array], made: str) -> Array:
    """Where a result of a program of single elements is no number because a function of one element
    has no value, as the square root of an infinity below has none."""
    out = np.zeros(at[made].shape, bool)
    if elementwise(instance) and one_shape(instance):
        for node in instance.side.built:
            operands = [at[o] for o in node.operands]
            if len(operands) == 1 and all(x.dtype.kind in "fc" for x in (at[node.name], *operands)):
                out = out | (np.isnan(at[node.name]) & ~np.isnan(operands[0]))
    return out & np.isnan(at[made])


def _no_number(program: Program, values: Mapping[str, Array], made: str) -> Array:
    """Where a result is no number, whatever the sign of the zeros that are given."""
    plus = {n: v + 0.0 if v.dtype.kind in "fc" else v for n, v in values.items()}
    return np.asarray(np.isnan(program.evaluate(plus)[made]))


def _rounding(instance: Instance) -> float:
    """The coarsest rounding of the operations in which a pattern computes."""
    side = instance.side
    every = [instance.applied[node.signature] for node in side.nodes]
    found = [a.output.dtype for a in every if not is_still(a.signature)]
    ends = [instance.types[root].dtype for root, _ in side.unions]
    real = [d for d in found if kind(d) in ("float", "complex")] or [
        d for d in ends if kind(d) in ("float", "complex")
    ]
    return max(map(_epsilon, real), default=0.0)


def _shared_narrowings(instance: Instance) -> frozenset[str]:
    """The dtypes that both sides convert to: near their ties either side may fall elsewhere."""

    def made(nodes: Iterable[Node]) -> set[str]:
        entries = [instance.applied[n.signature] for n in nodes]
        return {e.output.dtype for e in entries if _converts(e)}

    side = instance.side
    return frozenset(made(side.nodes) & made(side.built))


def _converts(entry: Applied) -> bool:
    return entry.signature.means == "conversion" or "mantissa_bits" in entry.params


def _rounding_of(entry: Applied, usual: float, shared: frozenset[str]) -> float:
    """How much an operation of the pattern rounds."""
    if _converts(entry) and entry.output.dtype in shared:
        digits = entry.params.get("mantissa_bits")
        return _epsilon(entry.output.dtype) if digits is None else 2.0**-digits
    return 0.0 if is_still(entry.signature) else usual


def _terms(entry: Applied) -> int:
    """Of how many terms, at most, an element of the result is a sum."""
    own = entry.signature
    if own.multiplies and own.gemm is not None:
        return own.gemm.shape(own.extents)[3]
    return max((t.size for t in entry.inputs), default=1) if is_sum(own) else 1


def _top(instance: Instance) -> float:
    dtypes = [t.dtype for a in instance.applied.values() for t in (*a.inputs, a.output)]
    return min(_limits(d)[1] for d in dtypes if kind(d) in ("float", "complex"))


def _epsilon(dtype: str) -> float:
    return _limits(dtype)[0] if kind(dtype) in ("float", "complex") else 0.0


@cache
def _limits(dtype: str) -> tuple[float, float, float]:
    import ml_dtypes

    found = ml_dtypes.finfo(numpy_dtype(dtype))
    return float(found.eps), float(found.max), float(found.smallest_subnormal)


def roomy(dtypes: Iterable[str]) -> bool:
    """Whether the floats among some dtypes reach far: tens may be multiplied and exponentiated."""
    return all(_limits(d)[1] > 1e30 for d in dtypes if kind(d) in ("float", "complex"))


def sums(instance: Instance) -> bool:
    """Whether many numbers are summed or multiplied on the way, in some order."""
    return any(is_sum(a.signature) for a in instance.applied.values())


def widest(instance: Instance) -> bool:
    """Whether no dtype can tell what is meant by numbers of these."""
    dtypes = {t.dtype for a in instance.applied.values() for t in (*a.inputs, a.output)}
    return not {"float64", "complex128"}.isdisjoint(dtypes)


# Rounding: how far off the truth a result may be at each of its elements.
#
# A pattern's own roundings, and roundings of what it is given, move its result; how far, term by
# term, is a running error analysis (Higham 2002, "Accuracy and Stability of Numerical Algorithms",
# chapter 3). Here each term is measured instead of derived: one tensor at a time is moved by a few
# roundings, and the pattern is computed on from there in 64 bits. What a replacement computes may
# be as far off as these terms together: it then is what the pattern makes of inputs that are off by
# roundings. Terms of the replacement count for nothing, or else the digits that it loses would
# excuse themselves: 1 - logistic(x) has no digits left of logistic(-x) where x is large, and few
# are lost of x*y + x*z beside x*(y + z), whose terms are as large where y is near to -z.
#
# Factors in another order underflow in another place. A product, sum or quotient of the replacement
# may do so where nothing but sums, products and numerators follows: what then is lost stays small.


#: Draws for what is summed. They are normal: of a few signs alone some sums hear nothing.
_DRAWS = 4


def moved(
    program: Program,
    values: Mapping[str, Array],
    root: str,
    made: str,
    rounding: float,
    least: float,
    alone: bool,
    own: Mapping[str, float],
) -> Array:
    """How far roundings move each element of the result `root` of a pattern, `program` being both
    sides in 64 bits.

    `rounding` is that of inputs, relative, `least` the step between numbers that underflow;
    `alone`: no element of a result depends on several of an operand; `own`: the roundings of the
    pattern's operations, by the names of their results.
    """
    instance = program.instance
    first = program.evaluate(values)
    total = np.zeros(first[root].shape)
    constants = instance.side.constants
    for name, value in values.items():
        if name not in constants and value.dtype.kind in "fc":
            total += _furthest(program, first, name, root, rounding, 0.0, alone)
    for node in instance.side.nodes:
        by = own.get(node.name, 0.0)
        if by and first[node.name].dtype.kind in "fc":
            as_one = instance.applied[node.signature].signature.rounds_as_one
            whole = by * _most(first[node.name]) if as_one else least
            total += _furthest(program, first, node.name, root, by, whole, alone)
    for name in _lost(instance, made):
        if first[name].dtype.kind in "fc":
            total += _furthest(program, first, name, made, 0.0, least, alone)
    return total


def _furthest(
    program: Program,
    first: Mapping[str, Array],
    name: str,
    end: str,
    rounding: float,
    least: float,
    alone: bool,
) -> Array:
    """How far one end moves as one tensor does, up or down."""
    shape = first[name].shape
    ways: list[Array | complex] = [1.0, -1.0]
    if not alone:
        ways += _apart(shape)
    if first[name].dtype.kind == "c":  # either part is rounded by itself
        ways += [complex(1, -1), complex(-1, 1)]
    far = np.zeros(first[end].shape)
    for by in ways:
        with np.errstate(all="ignore"):
            there = program.after(first, name, _moved(first[name], rounding, least, by), end)
            far = np.fmax(far, np.abs(there - first[end]))
    return far


@lru_cache(maxsize=64)
def _apart(shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Ways in which the elements of a tensor move, each by its own; the same for all of a shape."""
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=shape) for _ in range(_DRAWS))


def _moved(x: Array, rounding: float, least: float, by: Array | complex) -> Array:
    """A tensor moved by roundings; either part of complex numbers by its own where `by` is such."""
    if isinstance(by, complex):
        return np.asarray(x + rounding * (x.real * by.real + 1j * x.imag * by.imag) + least * by)
    return np.asarray(x * (1 + rounding * by) + least * by)


def _lost(instance: Instance, made: str) -> Sequence[str]:
    """Tensors of a replacement that may underflow as nothing that follows makes more of it."""
    built = {n.name for n in instance.side.built}
    fine: dict[str, bool] = {}
    for node in reversed(instance.side.built):
        own = instance.applied[node.signature].signature
        here = node.name == made or fine.get(node.name, False)
        fine[node.name] = here and (is_polynomial(own) or own.contracts)
        linear = linear_in(own) if fine[node.name] else ()
        for place, operand in enumerate(node.operands):
            if operand in built:
                fine[operand] = fine.get(operand, True) and place in linear
    return [n for n, good in fine.items() if good]
