"""Pairs of equal programs: one mathematics written in two ways, which may not differ in seconds.

A program is a list of `Step`s. Each applies a piece (a softmax, a shift, a product, ...) to what
earlier steps made. A `Writing` says how it becomes text: which of a piece's equal spellings each
step takes, which values are written again for every reader, in what order independent steps stand,
and whether all matrices are transposed. The texts are complete: what a failure prints can be run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings

# Each piece with its result and operands, and below it its equal spellings. `x` and `y` are square
# matrices, `v` and `u` vectors, `i` are integers from 0 to n - 1; `d` is a dim (0 or 1), `e` the
# other one, `n` the extent of all dims. The transpose of a piece is the piece along the other dim;
# of a `turned` piece its operands change places, too.
_PIECES = """
relu: m x
    jnp.maximum(x, 0)
    jnp.where(x > 0, x, 0)
    jax.nn.relu(x)
silu: m x
    x * jax.nn.sigmoid(x)
    jax.nn.silu(x)
    x / (1 + jnp.exp(-x))
square: m x
    x * x
    x**2
    lax.integer_pow(x, 2)
halved: m x
    x / 2
    x * 0.5
    x * jnp.full((n, n), 0.5)
less: m x y
    x - y
    x + (-y)
    -(y - x)
choice: m x y
    jnp.where(x > y, x, -y)
    lax.select(x > y, x, -y)
    jnp.where(~(x > y), -y, x)
    jnp.select([x > y], [x], -y)
transpose: m x
    x.T
    jnp.moveaxis(x, 0, 1)
    jnp.einsum("ij->ji", x)
    jax.vmap(lambda r: r, 1)(x)
scaled: m x v
    x * jnp.expand_dims(v, d)
    x * v[on(d, None)]
    x * lax.broadcast_in_dim(v, (n, n), (e,))
    x * jnp.reshape(v, along(d, 1, n))
    jax.vmap(jnp.multiply, (d, None), d)(x, v)
    jnp.einsum(subscripts(d, "di,i->di"), x, v)
outer: m v u turned
    v[:, None] * u[None]
    jnp.outer(v, u)
    jnp.einsum("i,j->ij", v, u)
    jax.vmap(lambda a: a * u)(v)
    v[:, None] @ u[None]
distance: m v u turned
    (v[:, None] - u[None]) ** 2
    jnp.square(jnp.subtract.outer(v, u))
    jax.vmap(lambda a: jax.vmap(lambda b: (a - b) ** 2)(u))(v)
lower: m x
    jnp.where(place(n, d) >= place(n, e), x, 0)
    jnp.where(place(n, d) < place(n, e), 0, x)
    x * (place(n, d) >= place(n, e))
diagonal: v x
    jnp.diagonal(x)
    x[jnp.arange(n), jnp.arange(n)]
    jnp.einsum("ii->i", x)
    jnp.sum(x * jnp.eye(n), d)
sum: v x
    x.sum(d)
    x.T.sum(e)
    jax.vmap(jnp.sum, e)(x)
    jnp.einsum(subscripts(d, "di->i"), x)
    lax.reduce(x, 0.0, lax.add, (d,))
    jnp.ones(n) @ jnp.moveaxis(x, d, 0)
mean: v x
    x.mean(d)
    x.sum(d) / n
    (x / n).sum(d)
    x.sum(d) * (1 / n)
weighted: v x v
    (x * v[on(d, None)]).sum(d)
    jnp.einsum(subscripts(d, "di,i->i"), x, v)
    x.sum(d) * v
largest: v x
    x.max(d)
    -(-x).min(d)
    lax.top_k(jnp.moveaxis(x, d, 1), 1)[0][:, 0]
    jax.vmap(jnp.max, e)(x)
argmax: v x
    jnp.argmax(x, d) * 1.0
    jnp.argmin(-x, d) * 1.0
    lax.top_k(jnp.moveaxis(x, d, 1), 1)[1][:, 0] * 1.0
    jnp.min(jnp.where(x == x.max(d, keepdims=True), place(n, d), n), d) * 1.0
logsumexp: v x
    jax.nn.logsumexp(x, d)
    jnp.log(jnp.exp(x - largest(x, d)).sum(d)) + largest(x, d).squeeze(d)
    jax.vmap(jax.nn.logsumexp, e)(x)
variance: v x
    x.var(d)
    ((x - x.mean(d, keepdims=True)) ** 2).mean(d)
    jnp.mean(jnp.square(x - jnp.expand_dims(x.mean(d), d)), d)
length: v x
    jnp.sqrt((x * x).sum(d) + 1)
    jnp.sqrt(jnp.einsum(subscripts(d, "di,di->i"), x, x) + 1)
    jax.vmap(lambda r: jnp.sqrt(r @ r + 1), e)(x)
softmax: m x
    jax.nn.softmax(x, d)
    jnp.exp(jax.nn.log_softmax(x, d))
    jnp.exp(x - jax.nn.logsumexp(x, d, keepdims=True))
    over(jnp.exp(x - largest(x, d)), d)
    jax.vmap(jax.nn.softmax, e, e)(x)
centred: m x
    x - x.mean(d, keepdims=True)
    x - jnp.expand_dims(x.sum(d) / n, d)
    jax.vmap(lambda r: r - r.mean(), e, e)(x)
rms: m x
    x * lax.rsqrt((x * x).mean(d, keepdims=True) + 1e-3)
    x / jnp.sqrt((x**2).mean(d, keepdims=True) + 1e-3)
    x * ((x**2).sum(d, keepdims=True) / n + 1e-3) ** -0.5
layernorm: m x
    (x - x.mean(d, keepdims=True)) * lax.rsqrt(x.var(d, keepdims=True) + 1e-5)
    (x - x.mean(d, keepdims=True)) / jnp.sqrt(x.var(d, keepdims=True) + 1e-5)
    jax.vmap(lambda r: (r - r.mean()) * lax.rsqrt(r.var() + 1e-5), e, e)(x)
roll: m x
    jnp.roll(x, 1, d)
    jnp.concatenate([x[on(d, np.s_[-1:])], x[on(d, np.s_[:-1])]], d)
    jnp.pad(x, along(d, (1, 0), (0, 0)), "wrap")[on(d, np.s_[:n])]
    jnp.take(x, (jnp.arange(n) - 1) % n, d)
shift: m x
    lax.pad(x, 0.0, along(d, (1, -1, 0), (0, 0, 0)))
    jnp.pad(x[on(d, np.s_[:-1])], along(d, (1, 0), (0, 0)))
    jnp.zeros((n, n)).at[on(d, np.s_[1:])].set(x[on(d, np.s_[:-1])])
    jnp.roll(x, 1, d).at[on(d, 0)].set(0)
    jnp.where(place(n, d) == 0, 0, jnp.roll(x, 1, d))
    jnp.concatenate([jnp.zeros(along(d, 1, n)), x[on(d, np.s_[:-1])]], d)
steps: m x
    jnp.diff(x, axis=d, prepend=0)
    x - lax.pad(x, 0.0, along(d, (1, -1, 0), (0, 0, 0)))
    x.at[on(d, np.s_[1:])].add(-x[on(d, np.s_[:-1])])
three: m x
    jnp.roll(x, 1, d) + x + jnp.roll(x, -1, d)
    jnp.sum(jnp.stack([jnp.roll(x, k, d) for k in (1, 0, -1)]), 0)
    sum(jnp.pad(x, along(d, (1, 1), (0, 0)), "wrap")[on(d, np.s_[k : n + k])] for k in range(3))
written: m x y
    x.at[on(d, np.s_[1:-1])].set(y[on(d, np.s_[1:-1])])
    lax.dynamic_update_slice(x, y[on(d, np.s_[1:-1])], along(d, 1, 0))
    jnp.concatenate([x[on(d, np.s_[:1])], y[on(d, np.s_[1:-1])], x[on(d, np.s_[-1:])]], d)
    jnp.where((place(n, d) > 0) & (place(n, d) < n - 1), y, x)
rotated: m x
    jnp.concatenate([-x[on(d, np.s_[n // 2 :])], x[on(d, np.s_[: n // 2])]], d)
    (lambda p, q: jnp.concatenate([-q, p], d))(*jnp.split(x, 2, d))
gated: v x
    (x[on(d, np.s_[: n // 2])] * jax.nn.sigmoid(x[on(d, np.s_[n // 2 :])])).sum(d)
    jax.nn.glu(x, d).sum(d)
    (lambda p, q: p * jax.nn.sigmoid(q))(*jnp.split(x, 2, d)).sum(d)
flipped: m x
    jnp.flip(x, d)
    x[on(d, np.s_[::-1])]
    jnp.take(x, jnp.arange(n)[::-1], d)
lookup: m x i
    jnp.take(x, i, d)
    x[on(d, i)]
    jax.vmap(lambda k: x[on(d, k)], 0, d)(i)
    jax.vmap(lambda k: lax.dynamic_index_in_dim(x, k, d, False), 0, d)(i)
    jnp.moveaxis(jax.nn.one_hot(i, n) @ jnp.moveaxis(x, d, 0), 0, d)
    jnp.einsum(subscripts(d, "di,kd->ki", "id,kd->ik"), x, jax.nn.one_hot(i, n))
picked: v x i
    jnp.take_along_axis(x, jnp.expand_dims(i, d), d).squeeze(d)
    jnp.sum(x * jax.nn.one_hot(i, n, axis=d), d)
    jnp.sum(jnp.where(place(n, d) == jnp.expand_dims(i, d), x, 0), d)
    jax.vmap(lambda r, k: r[k], (e, 0))(x, i)
    x[along(d, i, jnp.arange(n))]
entropy: v x i
    -jnp.take_along_axis(jax.nn.log_softmax(x, d), jnp.expand_dims(i, d), d).squeeze(d)
    -jnp.sum(jax.nn.log_softmax(x, d) * jax.nn.one_hot(i, n, axis=d), d)
    -jnp.sum(jnp.where(place(n, d) == jnp.expand_dims(i, d), jax.nn.log_softmax(x, d), 0), d)
    jax.nn.logsumexp(x, d) - jnp.take_along_axis(x, jnp.expand_dims(i, d), d).squeeze(d)
scattered: m x i
    jnp.zeros((n, n)).at[on(d, i)].add(x)
    jnp.moveaxis(jax.ops.segment_sum(jnp.moveaxis(x, d, 0), i, n), 0, d)
    jnp.moveaxis(jax.nn.one_hot(i, n).T @ jnp.moveaxis(x, d, 0), 0, d)
    jnp.einsum(subscripts(d, "di,dk->ki", "id,dk->ik"), x, jax.nn.one_hot(i, n))
product: m x y turned
    x @ y
    jnp.einsum("ij,jk->ik", x, y)
    (y.T @ x.T).T
    jnp.tensordot(x, y, 1)
    jax.vmap(lambda r: r @ y)(x)
    jax.vmap(lambda c: x @ c, 1, 1)(y)
gram: m x y turned
    lax.dot_general(x, y, (((e,), (e,)), ((), ())))
    jnp.einsum(subscripts(d, "di,ki->dk", "id,ik->dk"), x, y)
    jnp.moveaxis(x, d, 0) @ jnp.moveaxis(y, d, 1)
applied: v x v
    jnp.tensordot(x, v, (e, 0))
    (x * v[on(d, None)]).sum(e)
    jax.vmap(lambda r: r @ v, d)(x)
cumulated: m x
    jnp.cumsum(x, d)
    lax.associative_scan(jnp.add, x, axis=d)
    jnp.flip(lax.cumsum(jnp.flip(x, d), d, reverse=True), d)
    added_up(x, d)
filtered: m x v
    x * v[on(d, None)] + lax.pad(x, 0.0, along(d, (1, -1, 0), (0, 0, 0))) * jnp.sin(v)[on(d, None)]
    depthwise(x, jnp.stack([jnp.sin(v), v]), d)
fourier: m x
    jnp.fft.fftn(x).real
    jnp.fft.fft(jnp.fft.fft(x, axis=0), axis=1).real
    jnp.fft.fft(jnp.fft.fft(x, axis=1), axis=0).real
rounds: m x
    lax.fori_loop(0, 3, lambda k, x: jnp.sin(x + k), x)
    lax.scan(lambda x, k: (jnp.sin(x + k), None), x, jnp.arange(3))[0]
    lax.scan(lambda c, _: ((jnp.sin(c[0] + c[1]), c[1] + 1), None), (x, 0.0), length=3)[0][0]
"""


@dataclass(frozen=True)
class Piece:
    """What a piece makes and reads ("m": a matrix, "v": a vector, "i": integers), and its texts."""

    makes: str
    operands: tuple[str, ...]
    turned: bool
    spellings: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple("m" if o in "xy" else "v" if o in "vu" else "i" for o in self.operands)


def _pieces() -> dict[str, Piece]:
    found = {}
    for name, head, body in re.findall(r"^(.+): (.+)\n((?:    .+\n)+)", _PIECES, re.M):
        makes, *operands = head.split()
        turned = operands[-1] == "turned"
        reads = tuple(operands[: len(operands) - turned])
        found[name] = Piece(makes, reads, turned, tuple(body.strip().split("\n    ")))
    return found


PIECES: Mapping[str, Piece] = _pieces()
#: The arguments of every program, and what they are.
ARGUMENTS = {"a": "m", "b": "m", "c": "v", "i": "i"}


@dataclass(frozen=True)
class Step:
    """A piece along dim `d` of what is read: arguments by name, results of steps by number."""

    piece: str
    reads: tuple[str | int, ...]
    d: int = 0


@dataclass(frozen=True)
class Writing:
    """How a program is written: the spelling of each step (as often as there are steps), steps
    whose results every reader writes again, which of the steps that can come next comes next, and
    whether all matrices are transposed."""

    spellings: tuple[int, ...]
    again: frozenset[int] = frozenset()
    order: tuple[int, ...] = ()
    transposed: bool = False


# What texts may use beside JAX.
def on(d: int, s: Any) -> tuple[Any, ...]:
    """The index `s` along dim `d`: `x[on(1, i)]` is `x[:, i]`."""
    return (slice(None),) * d + (s,)


def along(d: int, this: Any, other: Any) -> tuple[Any, Any]:
    """What is said of dim `d` and of the other dim, in their order."""
    return (this, other) if d == 0 else (other, this)


def place(n: int, d: int) -> Any:
    """The number of the row (d = 0) or column of each element of a matrix."""
    return lax.broadcasted_iota(jnp.int32, (n, n), d)


def over(x: Any, d: int) -> Any:
    """`x` divided by its sums along `d`."""
    return x / x.sum(d, keepdims=True)


def largest(x: Any, d: int) -> Any:
    """The largest elements along `d`, as constants."""
    return lax.stop_gradient(x.max(d, keepdims=True))


def added_up(x: Any, d: int) -> Any:
    """The sums along `d` up to each place, by a loop."""
    sums = lax.scan(lambda s, r: (s + r,) * 2, jnp.zeros(x.shape[1 - d]), jnp.moveaxis(x, d, 0))[1]
    return jnp.moveaxis(sums, 0, d)


def depthwise(x: Any, taps: Any, d: int) -> Any:
    """Each line of `x` along `d` convolved with taps of its own; the last tap is of the place."""
    w = taps[:, None] if d == 0 else taps.T[:, None]
    names = ("NWC", "WIO", "NWC") if d == 0 else ("NCW", "OIW", "NCW")
    padding, groups = [(len(taps) - 1, 0)], x.shape[1 - d]
    return lax.conv_general_dilated(
        x[None], w, (1,), padding, dimension_numbers=names, feature_group_count=groups
    )[0]


def subscripts(d: int, first: str, other: str = "") -> str:
    """Subscripts of an einsum; along dim 1 the others, or the same with all pairs turned."""
    return first if d == 0 else other or re.sub(r"(\w)(\w)", r"\2\1", first)


@dataclass(frozen=True)
class Case:
    """Steps, whether the gradient of the sum of their results' sines is meant, and along which dim
    devices share the matrices that come in (None: as each plan likes)."""

    steps: tuple[Step, ...]
    gradient: bool = False
    cut: int | None = None

    def text(self, how: Writing) -> str:
        """The program as Python. Its results are what no step reads, in the order of the steps."""
        used: dict[str, str] = {}

        def value(r: str | int) -> str:
            if isinstance(r, str):
                return r
            return call(r) if r in how.again else f"t{r}"

        def call(k: int) -> str:
            step, piece = self.steps[k], PIECES[self.steps[k].piece]
            reads, d = step.reads, step.d
            if how.transposed:
                reads, d = (reads[::-1] if piece.turned else reads), 1 - d
            which = how.spellings[k] % len(piece.spellings)
            name = f"{step.piece}{which}"
            used[name] = f"{', '.join(piece.operands)}, d, e, n: {piece.spellings[which]}"
            return f"{name}({', '.join(map(value, reads))}, {d}, {1 - d}, n)"

        read = {r for s in self.steps for r in s.reads}
        body = [
            f"    t{k} = {call(k)}"
            for k in self._ordered(how.order)
            if k not in read or k not in how.again
        ]
        results = [f"t{k}" for k in range(len(self.steps)) if k not in read]
        lines = [f"{name} = lambda {code}" for name, code in used.items()]
        lines += [f"def program({', '.join(ARGUMENTS)}):", "    n = len(a)", *body]
        lines += [f"    return {', '.join(results)},"]
        if self.gradient:
            lines += [
                "forward = program",
                "loss = lambda *given: sum(jnp.sum(jnp.sin(t)) for t in forward(*given))",
                "program = jax.grad(loss, (0, 1, 2))",
            ]
        return "\n".join(lines)

    def _ordered(self, order: tuple[int, ...]) -> list[int]:
        """The steps, each after those that it reads."""
        done: list[int] = []
        while len(done) < len(self.steps):
            ready = [
                k
                for k, s in enumerate(self.steps)
                if k not in done and all(r in done for r in s.reads if isinstance(r, int))
            ]
            done.append(ready[order[len(done)] % len(ready) if len(done) < len(order) else 0])
        return done

    def function(self, how: Writing) -> Callable[..., Any]:
        names: dict[str, Any] = dict(globals())
        exec(self.text(how), names)
        return names["program"]


#: Extents of what is planned (starting a kernel takes less than 5 % of a pass), and what is run.
LARGE, SMALL = 16384, 16
MESH = MeshShape(("x",), (8,))
SETTINGS = Settings(work=1.0)


def traced(case: Case, how: Writing) -> BlockGraph:
    """A case as it is written so, with large arrays."""
    shapes = {"m": (LARGE, LARGE), "v": (LARGE,), "i": (LARGE,)}
    types = [
        jax.ShapeDtypeStruct(shapes[o], jnp.int32 if o == "i" else jnp.float32)
        for o in ARGUMENTS.values()
    ]
    return te.trace(case.function(how), *types).graph


def microseconds(graph: BlockGraph, cut: int | None) -> float:
    """What the fastest plan takes on eight devices that share matrices that come in along `cut`."""
    lie = () if cut is None else (along(cut, "x", None),)
    pins = {f"[{k}]": p for p in lie for k, o in enumerate(ARGUMENTS.values()) if o == "m"}
    words: dict[str, Any] = {"mesh": MESH, "pins": pins, "settings": SETTINGS}
    return 1e6 * te.optimize(graph, "h100:8", ("seconds",), **words).best("seconds").costs.seconds


def planned(case: Case, how: Writing) -> float:
    """The microseconds of a case as it is written so."""
    turned = how.transposed and case.cut is not None
    return microseconds(traced(case, how), 1 - (case.cut or 0) if turned else case.cut)


def equal(case: Case, *ways: Writing) -> None:
    """What `jax.jit` computes of the case in float64 is the same in all writings."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, SMALL, SMALL))
    rest = rng.normal(size=SMALL), rng.integers(0, SMALL, SMALL)
    given = [(a.T, b.T, *rest) if w.transposed else (a, b, *rest) for w in ways]
    functions = [case.function(w) for w in ways]
    with jax.enable_x64(True):
        made = jax.jit(lambda *all: [f(*x) for f, x in zip(functions, all, strict=True)])(*given)
    for w, results in zip(ways, made, strict=True):
        for x, y in zip(results, made[0], strict=True):
            x, y = (z.T if how.transposed else z for z, how in ((x, w), (y, ways[0])))
            np.testing.assert_allclose(x, y, 1e-8, 1e-8, err_msg=case.text(w))


def check(case: Case, one: Writing, other: Writing) -> None:
    """Equal numbers, and plans of which neither takes 5 % longer than the other."""
    both = "\n\n".join(f"# {w}\n{case.text(w)}" for w in (one, other))
    equal(case, one, other)
    agree(*(planned(case, w) for w in (one, other)), f"dims shared: {case.cut}\n{both}")


def agree(one: float, other: float, said: str) -> None:
    """Of neither plan may the microseconds be 5 % above those of the other."""
    assert max(one, other) <= 1.05 * min(one, other), f"{one:.1f} and {other:.1f} us, {said}"
