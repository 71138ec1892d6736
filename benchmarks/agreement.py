"""Whether two runs of a program give the same up to rounding; CPU seconds of a tree of processes.

What rounding explains: the program is run again with every number of its inputs moved by at most
one unit in the last place, of the narrowest numbers that the program has. A result may differ by as
much as these do, with a margin, and by some roundings of its greatest magnitude. Below the normal
numbers of a dtype these are as large as for its least normal number.

It is run with its arguments on several devices, too, where XLA adds in another order. Adam's first
step divides a gradient by its own size: that of one that is nothing but rounding has its sign,
which stays the same as long as sums are made in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# How much farther than a run on moved inputs a result may be, and how many roundings besides.
_MARGIN, _ROUNDINGS = 16.0, 64.0
# Devices that arguments are on, for two runs on moved inputs each.
_SPREAD = (1, 1, 2, 2, 8, 8)


def distance(a: Any, b: Any) -> float:
    """The greatest difference of two arrays; infinite where only one is not finite. Of whole
    numbers and flags: the share that differs."""
    import numpy as np

    if a.size == 0:
        return 0.0
    if a.dtype.kind not in "fcV":
        return float(np.mean(a != b))
    a, b = _wide(a), _wide(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(a - b))
    return float(np.max(np.nan_to_num(off, nan=np.inf, posinf=np.inf)))


def difference(
    expected: Mapping[str, Any], found: Mapping[str, Any], allowed: Mapping[str, Any]
) -> str:
    """How results differ by more than is allowed; nothing if they do not."""
    for key, a in expected.items():
        if key not in found:
            return f"{key} is missing"
        b = found[key]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{key} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
        off, most = distance(a, b), float(allowed[key])
        if not off <= most:
            return f"{key} {a.dtype}{list(a.shape)} is off by {off:.3g}, rounding gives {most:.3g}"
    return "" if len(found) == len(expected) else "more"


def _wide(a: Any) -> Any:
    import numpy as np

    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def allowances(
    function: Callable[..., Any],
    args: Any,
    host: Any,
    expected: Mapping[str, Any],
    least: float = 0,
) -> dict[str, Any]:
    """How far each result may be from what a function gives for arguments, `expected`. `host` are
    the arguments' numbers, `least` as for `nudged`."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    moved = [
        leaves_of(function(*_spread(nudged(args, host, rng, least), count)))
        for count in _SPREAD
        if count <= jax.device_count() and (count == 1 or _draws_anywhere(args))
    ]
    return {k: allowance(a, [m[k] for m in moved]) for k, a in expected.items()}


def _spread(args: Any, count: int) -> Any:
    """Arguments on so many devices, each array along its first dim that these divide."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:count]), ("all",))

    def put(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        dims = [d for d, n in enumerate(x.shape) if n and n % count == 0][:1]
        spec = PartitionSpec(*("all" if d in dims else None for d in range(x.ndim)))
        return jax.device_put(x, NamedSharding(mesh, spec))

    return args if count == 1 else jax.tree.map(put, args)


def _draws_anywhere(args: Any) -> bool:
    """Whether random numbers are the same on all devices, as those of XLA's generator are not."""
    import jax

    keys = (x.dtype for x in jax.tree.leaves(args) if hasattr(x, "dtype"))
    drawn = [str(t) for t in keys if jax.dtypes.issubdtype(t, jax.dtypes.prng_key)]
    return not any("rbg" in t for t in (*drawn, jax.config.jax_default_prng_impl))


def allowance(a: Any, moved: Sequence[Any]) -> Any:
    """How far from an array a result may be: as far as inputs that are moved by a rounding take it,
    with some margin, and some roundings of its greatest magnitude."""
    import jax
    import numpy as np

    apart = _MARGIN * max(distance(a, m) for m in moved)
    if a.dtype.kind not in "fcV" or a.size == 0:
        return np.float64(apart)
    finite = np.abs(_wide(a)[np.isfinite(_wide(a))])
    known = jax.numpy.finfo(a.dtype)
    greatest = float(finite.max(initial=float(known.smallest_normal)))
    return np.float64(apart + _ROUNDINGS * float(known.eps) * greatest)


def plain(x: Any) -> Any:
    """An array; of random keys, their data."""
    import jax

    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x


def leaves_of(tree: Any) -> dict[str, Any]:
    """The leaves of a result by their paths."""
    import jax
    import numpy as np

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        f"{k} result{jax.tree_util.keystr(path)}": np.asarray(plain(x))
        for k, (path, x) in enumerate(leaves)
    }


def coarsest(function: Any, args: Any) -> float:
    """The greatest unit in the last place, relative to 1, of the floats that a function makes."""
    import jax
    from jax.extend.core import subjaxprs

    waiting, found = [jax.make_jaxpr(function)(*args).jaxpr], {0.0}
    while waiting:
        jaxpr = waiting.pop()
        waiting += subjaxprs(jaxpr)
        made = [v.aval.dtype for e in jaxpr.eqns for v in e.outvars if hasattr(v.aval, "dtype")]
        floats = (t for t in made if jax.dtypes.issubdtype(t, jax.numpy.inexact))
        found.update(float(jax.numpy.finfo(t).eps) for t in floats)
    return max(found)


def nudged(args: Any, host: Any, rng: Any, least: float = 0.0) -> Any:
    """Arguments whose floats are moved by at most a unit in the last place, or that of `least`."""
    import jax
    import numpy as np

    def move(x: Any, kept: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(kept, impl=jax.random.key_impl(x))
        kept = np.asarray(kept)
        if not jax.dtypes.issubdtype(kept.dtype, np.inexact):
            return jax.numpy.asarray(kept)
        eps = max(least, float(jax.numpy.finfo(kept.dtype).eps))
        noise = 1.0 + eps * rng.uniform(-1.0, 1.0, kept.shape)
        return jax.numpy.asarray((_wide(kept) * noise).astype(kept.dtype))

    return jax.tree.map(move, args, host)


def cpu_seconds() -> float:
    """CPU seconds of this process and of all that it started, ended or not."""
    own = os.times()
    spent = own.user + own.system + own.children_user + own.children_system
    return spent + sum(_process(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(x) for x in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _process(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
