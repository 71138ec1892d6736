"""Proofs: laws of single elements, decided by an SMT solver where one is installed.

A program whose operations all work element by element is one formula over the elements at one
place. Over integers it is a formula of bit-vectors of the dtype's own width, wrapping as they do;
over floats it is one of real numbers, as far as the pattern has a value: functions that are no
polynomials are functions of which nothing is known. What is proven holds for every value, and every
shape; what is refuted gives values that evaluation must confirm before they count. Effort is
counted in the solver's own steps, so that verdicts are the same everywhere.

The solver is z3 (`pip install tapestry-egg[smt]`). Without it rules are tried, and nothing is
proven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from tapestry_egg.graph.arrays import kind
from tapestry_egg.metakernels.signatures.parameters import hashable, readable
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.rewrite.terms.requests import Applied

from .evaluate import Array, elementwise
from .instances import Instance
from .laws import Node

#: The solver's steps for one formula.
_STEPS = 400_000
_SAME = ("copy", "copy_p", "name", "stop_gradient", "optimization_barrier")


class _Unsaid(Exception):
    """An operation that has no formula."""


@cache
def solver_installed() -> bool:
    """Whether there is a solver."""
    return find_spec("z3") is not None


class Prover:
    """Proves a law dtype by dtype; remembers which programs differ in their shapes only."""

    def __init__(self) -> None:
        self.proven: dict[str, bool] = {}
        self._known: set[Any] = set()

    def refutation(self, instance: Instance) -> dict[str, Array] | None:
        """Values on which a program's two sides may differ; None where there are none, where the
        solver does not know, and where no formula says the program."""
        word = _word(instance)
        if not solver_installed() or not elementwise(instance):
            self.proven[word] = False
            return None
        key = tuple(
            (n, a.kernel, a.key[1], tuple((t.dtype, t.rank > 0) for t in a.inputs))
            for n, a in instance.applied.items()
        )
        if key in self._known:
            return None
        self._known.add(key)
        try:
            holds, values = _decided(instance)
        except _Unsaid:
            holds, values = False, None
        self.proven[word] = self.proven.get(word, True) and holds
        return values

    def told(self) -> tuple[str, ...]:
        """The numbers over which every program seen is proven: dtypes of integers, `reals`."""
        return tuple(sorted(w for w, holds in self.proven.items() if holds and w))


def _word(instance: Instance) -> str:
    """The numbers that a program is over."""
    dtypes = {t.dtype for a in instance.applied.values() for t in (*a.inputs, a.output)}
    if any(kind(d) == "complex" for d in dtypes):
        return "complex"
    if any(kind(d) == "float" for d in dtypes):
        return "reals"
    return " and ".join(sorted(d for d in dtypes if kind(d) != "bool")) or "bool"


def _decided(instance: Instance) -> tuple[bool, dict[str, Array] | None]:
    import z3

    side = instance.side
    at: dict[str, Any] = {}
    for name, t in instance.inputs.items():
        if name in side.constants:
            at[name] = _constant(side.constants[name], t.dtype)
        else:
            at[name] = z3.Const(f"in {name}", _sort(t.dtype))
    domain: list[Any] = []
    for nodes, where in ((side.nodes, domain), (side.built, [])):
        for node in nodes:
            at[node.name] = _formula(node, instance.applied[node.signature], at, where)
    solver = z3.Solver()
    solver.set("rlimit", _STEPS)
    solver.add(*domain)
    solver.add(z3.Or(*(at[root] != at[made] for root, made in side.unions)))
    answer = solver.check()
    if answer == z3.unsat:
        return True, None
    if answer != z3.sat:
        return False, None
    model = solver.model()
    values: dict[str, Array] = {}
    for name, t in instance.inputs.items():
        if name in side.constants:
            value: Any = side.constants[name]
        else:
            value = _number(model.eval(at[name], model_completion=True), t.dtype)
        values[name] = np.full(t.shape, value).astype(numpy_dtype(t.dtype))
    return False, values


def _sort(dtype: str) -> Any:
    import z3

    what = kind(dtype)
    if what == "bool":
        return z3.BoolSort()
    if what in ("int", "uint"):
        return z3.BitVecSort(8 * numpy_dtype(dtype).itemsize)
    if what == "float":
        return z3.RealSort()
    raise _Unsaid(dtype)


def _constant(value: float, dtype: str) -> Any:
    import z3

    sort = _sort(dtype)
    if kind(dtype) == "bool":
        return z3.BoolVal(bool(value))
    if kind(dtype) == "float":
        if not np.isfinite(value):
            raise _Unsaid("an infinity")
        held = float(np.asarray(value).astype(numpy_dtype(dtype)).astype(np.float64))
        return z3.RealVal("{}/{}".format(*held.as_integer_ratio()))
    return z3.BitVecVal(int(value), sort)


def _number(value: Any, dtype: str) -> Any:
    what = kind(dtype)
    if what == "bool":
        return bool(value)
    if what == "int":
        return value.as_signed_long()
    if what == "uint":
        return value.as_long()
    if hasattr(value, "as_fraction"):
        return float(value.as_fraction())
    return float(value.approx(20).as_fraction())


def _formula(node: Node, entry: Applied, at: Mapping[str, Any], domain: list[Any]) -> Any:
    """What an operation gives at one place. The conditions under which it has a value are added to
    `domain`."""
    import z3

    kernel, params = entry.kernel, {k: readable(v) for k, v in entry.params.items()}
    x = [at[o] for o in node.operands]
    dtype = entry.inputs[0].dtype if entry.inputs else ""
    what = kind(dtype) if dtype else ""
    if kernel in _SAME:
        return x[0]
    if kernel == "select_n":
        return _select(x, entry.inputs[0].dtype)
    if kernel == "convert_element_type":
        return _convert(x[0], dtype, entry.output.dtype)
    if what == "bool":
        made = _flags(kernel, x)
    elif what in ("int", "uint"):
        made = _words(kernel, x, params, what == "int")
    elif what == "float":
        made = _reals(kernel, x, params, domain)
    else:
        raise _Unsaid(dtype)
    if made is not None:
        return made
    if what != "float" or kind(entry.output.dtype) != "float":
        raise _Unsaid(kernel)
    # A function of which nothing is known.
    name = f"{kernel} {hashable(entry.params)}"
    return z3.Function(name, *(z3.RealSort() for _ in x), z3.RealSort())(*x)


def _select(x: Sequence[Any], dtype: str) -> Any:
    import z3

    which, *cases = x
    if len(cases) == 1:
        return cases[0]
    if kind(dtype) != "bool" or len(cases) != 2:
        raise _Unsaid("a choice of many")
    return z3.If(which, cases[1], cases[0])


def _convert(x: Any, old: str, new: str) -> Any:
    import z3

    a, b = kind(old), kind(new)
    if (a, b) == ("float", "float") or old == new:
        return x
    if a == "bool" and b in ("int", "uint"):
        width = 8 * numpy_dtype(new).itemsize
        return z3.If(x, z3.BitVecVal(1, width), z3.BitVecVal(0, width))
    if a == "bool" and b == "float":
        return z3.If(x, z3.RealVal(1), z3.RealVal(0))
    if b == "bool":
        return x != 0
    if a in ("int", "uint") and b in ("int", "uint"):
        more = 8 * (numpy_dtype(new).itemsize - numpy_dtype(old).itemsize)
        if more <= 0:
            return z3.Extract(8 * numpy_dtype(new).itemsize - 1, 0, x)
        return z3.SignExt(more, x) if a == "int" else z3.ZeroExt(more, x)
    raise _Unsaid("a conversion that rounds")


def _flags(kernel: str, x: Sequence[Any]) -> Any:
    import z3

    if kernel == "not":
        return z3.Not(x[0])
    made = {
        "and": lambda a, b: z3.And(a, b),
        "or": lambda a, b: z3.Or(a, b),
        "max": lambda a, b: z3.Or(a, b),
        "min": lambda a, b: z3.And(a, b),
        "xor": lambda a, b: z3.Xor(a, b),
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
    }.get(kernel)
    return made(*x) if made else None


def _common(kernel: str, x: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Operations that look alike over all numbers."""
    a = x[0]
    if kernel in ("add", "add_any"):
        return a + x[1]
    if kernel in ("sub", "mul"):
        return a - x[1] if kernel == "sub" else a * x[1]
    if kernel == "neg":
        return -a
    if kernel == "square":
        return a * a
    if kernel == "integer_pow" and 1 <= params["y"] <= 4:
        out = a
        for _ in range(params["y"] - 1):
            out = out * a
        return out
    if kernel in ("eq", "ne"):
        return a == x[1] if kernel == "eq" else a != x[1]
    return None


def _words(kernel: str, x: Sequence[Any], params: Mapping[str, Any], signed: bool) -> Any:
    import z3

    made = _common(kernel, x, params)
    if made is not None:
        return made
    a = x[0]
    b = x[1] if len(x) > 1 else None
    less = (lambda p, q: p < q) if signed else z3.ULT
    zero, one = z3.BitVecVal(0, a.size()), z3.BitVecVal(1, a.size())
    if kernel == "not":
        return ~a
    if kernel == "abs":
        return z3.If(a < 0, -a, a) if signed else a
    if kernel == "sign":
        return z3.If(a == 0, zero, z3.If(a < 0, -one, one) if signed else one)
    if kernel == "clamp":
        low = z3.If(less(x[1], x[0]), x[0], x[1])
        return z3.If(less(x[2], low), x[2], low)
    if b is None or a.size() != b.size():
        return None
    if kernel in ("and", "or", "xor"):
        return {"and": a & b, "or": a | b, "xor": a ^ b}[kernel]
    if kernel in ("max", "min"):
        return z3.If(less(a, b) if kernel == "max" else less(b, a), b, a)
    if kernel in ("lt", "ge"):
        return less(a, b) if kernel == "lt" else z3.Not(less(a, b))
    if kernel in ("gt", "le"):
        return less(b, a) if kernel == "gt" else z3.Not(less(b, a))
    far = z3.Or(b < 0, b >= a.size()) if signed else z3.UGE(b, z3.BitVecVal(a.size(), a.size()))
    if kernel == "shift_left":
        return z3.If(far, zero, a << b)
    if kernel == "shift_right_logical":
        return z3.If(far, zero, z3.LShR(a, b))
    if kernel == "shift_right_arithmetic":
        return z3.If(far, z3.If(a < 0, -one, zero), a >> b)
    if kernel == "div":
        return z3.If(b == 0, -one, a / b if signed else z3.UDiv(a, b))
    if kernel == "rem":
        return z3.If(b == 0, a, z3.SRem(a, b) if signed else z3.URem(a, b))
    return None


def _reals(kernel: str, x: Sequence[Any], params: Mapping[str, Any], domain: list[Any]) -> Any:
    import z3

    made = _common(kernel, x, params)
    if made is not None:
        return made
    a = x[0]
    if kernel == "abs":
        return z3.If(a < 0, -a, a)
    if kernel == "sign":
        return z3.If(a == 0, z3.RealVal(0), z3.If(a < 0, z3.RealVal(-1), z3.RealVal(1)))
    if kernel == "floor":
        return z3.ToReal(z3.ToInt(a))
    if kernel == "ceil":
        return -z3.ToReal(z3.ToInt(-a))
    if kernel == "is_finite":
        return z3.BoolVal(True)
    if kernel == "clamp":
        low = z3.If(x[1] < x[0], x[0], x[1])
        return z3.If(x[2] < low, x[2], low)
    if len(x) != 2:
        return None
    b = x[1]
    if kernel == "div":
        domain.append(b != 0)
        return a / b
    made = {
        "max": lambda: z3.If(a < b, b, a),
        "min": lambda: z3.If(b < a, b, a),
        "lt": lambda: a < b,
        "le": lambda: a <= b,
        "gt": lambda: a > b,
        "ge": lambda: a >= b,
    }.get(kernel)
    return made() if made else None
