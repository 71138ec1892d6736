"""Control flow: scans as JAX's versions hold them, loops that are scans without saying so, and
conditionals that platforms decide.

Up to JAX 0.10 a scan's parameters say how many operands are constants and how many are carried in
numbers, `num_consts` and `num_carry`; from 0.11 on the trees `ft_in` (constants, carries, slices)
and `ft_out` do. Block graphs have the numbers.

A `while` is a scan where its counter says how often it runs: a carried integer that begins at a
constant and changes by a constant in every round, of which the condition compares the one with
another constant. JAX makes a scan of a `fori_loop` of known bounds itself; of a loop that is
written out, or whose bounds come as arrays, XLA finds the rounds only in its compiled module, where
a plan would have counted one.

Of a conditional that differs by platform (`jax.lax.platform_dependent`) JAX lowers the branches of
the platforms that it lowers for, and no other: a kernel that is written for GPUs stands in a
program that runs on CPUs, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import COND, SCAN, WHILE, BlockGraph, Operation
from tapestry_egg.metakernels import registry

_TREES = ("ft_in", "ft_out")

#: How JAX calls the platforms that plans run on.
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def with_counts(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a scan with `num_consts` and `num_carry`, whichever JAX made them."""
    if "ft_in" not in params:
        return dict(params)
    consts, carry, _ = params["ft_in"].unpack()
    kept = {k: v for k, v in params.items() if k not in _TREES}
    return {**kept, "num_consts": len(consts.vals), "num_carry": len(carry.vals)}


def binds_counts() -> bool:
    """Whether JAX's own scan takes the numbers; if not, `scanned` calls its public face."""
    import jax

    return tuple(jax.__version_info__) < (0, 11)


def scanned(params: Mapping[str, Any], body: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of a scan with counts; `body` takes constants, carries and slices, flat."""
    from jax import lax

    n = int(params["num_consts"])
    m = n + int(params["num_carry"])

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = list(body(*operands[:n], *carry, *slices))
        return out[: m - n], out[m - n :]

    given = {k: params[k] for k in ("length", "reverse", "unroll")}
    final, stacked = lax.scan(step, list(operands[n:m]), list(operands[m:]), **given)
    return [*final, *stacked]


def rounds(op: Operation, constants: Mapping[int, Any]) -> int | None:
    """How often a loop runs; None where its counter does not say. `constants` are the values that
    are known where it stands."""
    test, body = op.regions
    n, m = int(op.params["cond_nconsts"]), int(op.params["body_nconsts"])
    verdict = test.constants.get(test.outputs[0])
    if verdict is not None and not verdict.any():
        return 0
    if len(test.operations) != 1:
        return None
    (asked,) = test.operations
    if registry.meaning(asked.kernel) != "comparison" or asked.outputs != test.outputs:
        return None
    first = [constants.get(v) for v in op.inputs[n + m :]]

    def same(value: int) -> int | None:
        """What a value of the condition is in every round."""
        if value in test.constants:
            return _integer(test.constants[value])
        k = test.inputs.index(value)
        if k < n:
            return _integer(constants.get(op.inputs[k]))
        kept = body.outputs[k - n] == body.inputs[m + k - n]
        return _integer(first[k - n]) if kept else None

    for place in (0, 1):
        counter, bound = asked.inputs[place], asked.inputs[1 - place]
        if counter not in test.inputs[n:]:
            continue
        k = test.inputs.index(counter) - n
        step = _step(body, m + k, k, op.inputs[n:], constants)
        start, end = _integer(first[k]), same(bound)
        if step is None or start is None or end is None:
            continue
        dtype = np.dtype(test.values[counter].dtype)
        found = _count(asked, test, place, start, step, end)
        if found is not None and np.iinfo(dtype).min <= start + found * step <= np.iinfo(dtype).max:
            return found
    return None


def as_scan(op: Operation, length: int) -> Operation:
    """The loop of so many rounds, without its condition."""
    n, m = int(op.params["cond_nconsts"]), int(op.params["body_nconsts"])
    return Operation(
        SCAN,
        op.inputs[n:],
        op.outputs,
        {
            "reverse": False,
            "length": length,
            "num_consts": m,
            "num_carry": len(op.outputs),
            "unroll": 1,
        },
        op.regions[1:],
        op.source,
        op.scope,
        op.remat,
        op.effectful,
    )


def _step(
    body: BlockGraph, place: int, k: int, given: Sequence[int], constants: Mapping[int, Any]
) -> int | None:
    """By how much the body changes its input at a place on the way to output k."""
    made = next((op for op in body.operations if body.outputs[k] in op.outputs), None)
    if made is None or registry.meaning(made.kernel) not in ("sum", "difference"):
        return None
    value, by = made.inputs
    if value != body.inputs[place]:
        if registry.meaning(made.kernel) == "difference":
            return None
        value, by = by, value
    if value != body.inputs[place]:
        return None
    known: Any = body.constants.get(by)
    if known is None and by in body.inputs:
        at = body.inputs.index(by)
        fixed = at < len(given) - len(body.outputs)  # a constant of the loop's own
        known = constants.get(given[at]) if fixed else None
    step = _integer(known)
    less = registry.meaning(made.kernel) == "difference"
    return None if step is None else -step if less else step


def _integer(value: Any) -> int | None:
    """An integer scalar as a number."""
    if value is None:
        return None
    array = np.asarray(value)
    return int(array) if array.shape == () and array.dtype.kind in "iu" else None


def _count(
    asked: Operation, test: BlockGraph, place: int, start: int, step: int, end: int
) -> int | None:
    """How many of start, start + step, .. pass a comparison with the end before the first that does
    not, the counter being its operand `place`: one says the same of all numbers on one side of the
    end."""
    from tapestry_egg.reference.kernels import reference

    signature = registry.signature_of(
        asked, *(tuple([test.values[v] for v in side]) for side in (asked.inputs, asked.outputs))
    )

    def passes(rounds: int) -> bool:
        sign = int(np.sign(start + rounds * step - end))
        sides = (1 + sign, 1) if place == 0 else (1, 1 + sign)
        given = [np.asarray(x, t.dtype) for x, t in zip(sides, signature.input_types, strict=True)]
        return bool(reference(asked.kernel, asked.params, signature, given)[0])

    met = (end - start) // step if step else 0
    return next((n for n in (0, met, met + 1) if n >= 0 and not passes(n)), None)


def branch_everywhere(params: Mapping[str, Any]) -> Any | None:
    """The branch of a conditional that runs on every platform that plans run on, as those of
    `jnp.diagonal` do but inside of Pallas; None where platforms differ, or a value decides."""
    of = params.get("branches_platforms")
    if of is None:
        return None
    default = len(of) - 1 if of[-1] is None else None
    taken = {
        next((i for i, names in enumerate(of) if names and name in names), default)
        for name in _PLATFORMS
    }
    (one,) = taken if len(taken) == 1 else (None,)
    return None if one is None else params["branches"][one]


def switched(
    params: Mapping[str, Any], branches: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> Any:
    """What a conditional gives: of the branch that its first operand chooses, or the platform."""
    from jax import lax

    of = params.get("branches_platforms")
    if of is None:
        return lax.switch(operands[0], branches, *operands[1:])
    named = {name: f for names, f in zip(of, branches, strict=True) for name in names or ()}
    default = branches[-1] if of[-1] is None else None
    return lax.platform_dependent(*operands[1:], default=default, **named)


# Jaxprs evaluated equation by equation, by whoever has another meaning for some of them.


#: The results of a jaxpr, open or closed, for some arguments.
Run = Callable[[Any, Sequence[Any]], Sequence[Any]]


def opened(callee: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants, for closed and open jaxprs of every version."""
    return getattr(callee, "jaxpr", callee), tuple(getattr(callee, "consts", ()))


def evaluated(
    callee: Any,
    arguments: Sequence[Any],
    applied: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any] = lambda value, aval: value,
) -> list[Any]:
    """The results of a jaxpr, where `applied` gives those of an equation, and `constant` the value
    of a constant from its own and its type."""
    jaxpr, consts = opened(callee)
    env: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
    for v, value in zip(jaxpr.constvars, consts, strict=True):
        env[v] = constant(value, v.aval)

    def read(atom: Any) -> Any:
        return constant(atom.val, atom.aval) if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, applied(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def bound(primitive: Any, params: Mapping[str, Any], xs: Sequence[Any]) -> list[Any]:
    """The results of a primitive with parameters as a jaxpr holds them."""
    given = primitive.get_bind_params(dict(params))
    functions, given = given if isinstance(given, tuple) else ((), given)
    made = primitive.bind(*functions, *xs, **given)
    return list(made) if primitive.multiple_results else [made]


def controlled(kernel: str, params: Mapping[str, Any], xs: Sequence[Any], run: Run) -> Any:
    """The results of a scan, loop or conditional whose jaxprs `run` evaluates; None for others."""
    if kernel == SCAN:
        return scanned(with_counts(params), lambda *ys: run(params["jaxpr"], ys), xs)
    if kernel == COND:
        branches = [lambda *ys, b=branch: list(run(b, ys)) for branch in params["branches"]]
        return switched(params, branches, xs)
    return _looped(params, xs, run) if kernel == WHILE else None


def _looped(params: Mapping[str, Any], xs: Sequence[Any], run: Run) -> Any:
    """A loop; of many examples, each with a verdict of its own, those that are done keep what they
    carry."""
    import jax.numpy as jnp
    from jax import lax

    n = params["cond_nconsts"]
    m = n + params["body_nconsts"]
    several = opened(params["cond_jaxpr"])[0].outvars[0].aval.shape

    def verdict(carry: Sequence[Any]) -> Any:
        return run(params["cond_jaxpr"], [*xs[:n], *carry])[0]

    def step(carry: Sequence[Any]) -> list[Any]:
        made = list(run(params["body_jaxpr"], [*xs[n:m], *carry]))
        if not several:
            return made
        goes = verdict(carry)
        rows = [goes.reshape(goes.shape + (1,) * (x.ndim - goes.ndim)) for x in made]
        return [jnp.where(r, x, old) for r, x, old in zip(rows, made, carry, strict=True)]

    goes_on = (lambda carry: jnp.any(verdict(carry))) if several else verdict
    return lax.while_loop(goes_on, step, list(xs[m:]))


def solver(params: Mapping[str, Any], xs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The jaxpr that solves a `custom_linear_solve`, which is all that is left to compute, and what
    it takes: its own constants and the right-hand sides."""
    lengths = params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    return params["jaxprs"].solve, [*xs[start : start + lengths.solve], *xs[sum(lengths) :]]
