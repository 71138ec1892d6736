"""Whether two runs of a program give the same up to rounding; CPU seconds of a tree of processes.

What rounding explains: the program is run again with every number of its inputs moved by at most
one unit in the last place, of the narrowest numbers that the program has. A result may differ by as
much as these do, with a margin, and by some roundings of its greatest magnitude.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# How much farther than a run on moved inputs a result may be, and how many roundings besides.
_MARGIN, _ROUNDINGS = 16.0, 64.0


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


def allowance(a: Any, moved: Sequence[Any]) -> Any:
    """How far from an array a result may be: as far as inputs that are moved by a rounding take it,
    with some margin, and some roundings of its greatest magnitude."""
    import jax
    import numpy as np

    apart = _MARGIN * max(distance(a, m) for m in moved)
    if a.dtype.kind not in "fcV" or a.size == 0:
        return np.float64(apart)
    finite = np.abs(_wide(a)[np.isfinite(_wide(a))])
    eps = float(jax.numpy.finfo(a.dtype).eps)
    return np.float64(apart + _ROUNDINGS * eps * float(finite.max(initial=0.0)))


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
