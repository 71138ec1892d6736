"""Views of symbolic tensors as the kernels that make them, and selectors as Python writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tapestry_egg.metakernels.views import View, ViewError

#: A kernel of one operand, its parameters, and the shape that comes out.
Step = tuple[str, Mapping[str, Any], tuple[int, ...]]


def selector_text(selector: Any) -> str:
    """Python's indices, slices, `...` and None in the language of selectors; texts are in it.

    Raises ViewError for an entry that is none of these.
    """
    if isinstance(selector, str):
        return selector
    entries = selector if isinstance(selector, tuple) else (selector,)
    return ", ".join(map(_entry, entries))


def _entry(entry: Any) -> str:
    if entry is Ellipsis:
        return "..."
    if entry is None:
        return "+"
    if isinstance(entry, slice):
        start, stop, step = (
            "" if n is None else str(int(n)) for n in (entry.start, entry.stop, entry.step)
        )
        return f"{start}:{stop}:{step}"
    if isinstance(entry, int) and not isinstance(entry, bool):
        return str(entry)
    raise ViewError(
        f"{entry!r} is no selector", hint="Write an index, a:b:step, `...` or None; or a text."
    )


def steps_of(view: View) -> Iterator[Step]:
    """The kernels that make a view of a tensor, one after the other.

    Raises ViewError for a view of which a dim of the tensor follows several dims, or two the same.
    """
    rows = [[(d, n) for d, n in enumerate(row) if n] for row in view.matrix]
    followed = [row[0][0] for row in rows if row]
    if any(len(row) > 1 for row in rows) or len(set(followed)) < len(followed):
        raise ViewError(f"no kernel gives the view {view}")
    # One step of every dim: a step of -2 is one of 2, and what comes out is turned round.
    first, last, step, turned = [], [], [], []
    for k, (row, begin) in enumerate(zip(rows, view.offset, strict=True)):
        by = row[0][1] if row else 1
        count = view.shape[row[0][0]] if row else 1
        end = begin + by * (count - 1)
        low, high = (min(begin, end), max(begin, end)) if count else (0, -1)
        first.append(low)
        last.append(high + 1)
        step.append(abs(by) if count > 1 else 1)
        turned += [k] if by < 0 and count > 1 else []
    sizes = [len(range(a, b, s)) for a, b, s in zip(first, last, step, strict=True)]
    if (first, last) != ([0] * len(view.base), list(view.base)) or any(s > 1 for s in step):
        strides = step if any(s > 1 for s in step) else None
        params = {"start_indices": first, "limit_indices": last, "strides": strides}
        yield _step("slice", params, sizes)
    if turned:
        yield _step("rev", {"dimensions": turned}, sizes)
    dropped = [k for k, row in enumerate(rows) if not row]
    if dropped:
        yield _step("squeeze", {"dimensions": dropped}, [view.shape[d] for d in followed])
    if followed != sorted(followed):
        order = sorted(range(len(followed)), key=followed.__getitem__)
        sizes = [view.shape[d] for d in sorted(followed)]
        yield _step("transpose", {"permutation": order}, sizes)
    if len(followed) < len(view.shape):
        params = {
            "shape": list(view.shape),
            "broadcast_dimensions": sorted(followed),
            "sharding": None,
        }
        yield _step("broadcast_in_dim", params, view.shape)


def _step(kernel: str, params: Mapping[str, Any], shape: Iterable[int]) -> Step:
    return kernel, params, tuple(shape)
