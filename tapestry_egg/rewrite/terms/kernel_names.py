"""Kernel names: what a program computes, views left out.

A name says which kernel makes a value of which names, so that two programs with the same names have
the same kernels. A kernel that takes some dims whole, as a transform does, is named by them too:
transforms of one dim and then of another are other kernels than in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from tapestry_egg.metakernels.signatures.signature import OperationSignature


def name_of(*parts: bytes) -> bytes:
    """A short name for what some bytes say."""
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(b"%d " % len(part))
        made.update(part)
    return made.digest()


def said_of(kernel: str, signature: OperationSignature, dtypes: Sequence[object], n: int) -> bytes:
    """What a name says of a kernel with `n` regions and results of some dtypes."""
    extents = sorted((d.role, d.size) for d in signature.index)
    return repr((kernel, extents, list(dtypes), n)).encode()


class Name(NamedTuple):
    """What makes a value of what, and what each of its dims is called, if that is asked for."""

    key: bytes
    dims: tuple[str, ...] = ()


class _Dims(NamedTuple):
    """How a signature's dims follow from those of its operands: per index dim the (operand, dim)
    pairs that it reaches, per dim of each output the index dims that reach it, and the (operand,
    dim) pairs that the kernel takes whole."""

    read: tuple[tuple[tuple[int, int], ...], ...]
    made: tuple[tuple[tuple[int, ...], ...], ...]
    whole: tuple[tuple[int, int], ...]


def takes_whole(signature: OperationSignature) -> bool:
    """Whether a kernel goes along some dims as a whole, each in its own way."""
    return any(d.role in ("whole", "scan") and d.size > 1 for d in signature.index)


def named(
    said: bytes, signature: OperationSignature, operands: Sequence[Name], place: int, dims: bool
) -> Name:
    """The name of an operation's result at `place`; a view has that of its operand. With `dims`,
    the dims have names too, and kernels are named by those that they take whole."""
    view = signature.fusion == "view" and len(operands) == 1
    if not dims:
        keys = [x.key for x in operands]
        return operands[0] if view else Name(_at(name_of(said, *sorted(keys)), place))
    own = _dims_of(signature)
    called = [
        min([operands[p].dims[d] for p, d in reads if operands[p].dims], default=f"i{e}")
        for e, reads in enumerate(own.read)
    ]
    made = tuple([_joined([called[e] for e in along]) for along in own.made[place]])
    if view:
        return Name(operands[0].key, made)
    keys = [x.key for x in operands]
    if takes_whole(signature):
        for p, x in enumerate(operands):
            whole = sorted([x.dims[d] for q, d in own.whole if q == p and x.dims])
            keys[p] = name_of(x.key, *[w.encode() for w in whole])
    return Name(_at(name_of(said, *sorted(keys)), place), made)


def given_name(key: bytes, rank: int, dims: bool) -> Name:
    """The name of what a program is given."""
    return Name(key, tuple([f"{key.hex()}.{d}" for d in range(rank)]) if dims else ())


def _joined(dims: Sequence[str]) -> str:
    """The name of a dim that some index dims make up."""
    return dims[0] if len(dims) == 1 else name_of(*[d.encode() for d in dims]).hex()


def _at(made: bytes, place: int) -> bytes:
    return name_of(made, b"%d" % place) if place else made


def _dims_of(signature: OperationSignature) -> _Dims:
    """The dims of a signature, which remembers them."""
    known: _Dims | None = signature.__dict__.get("_named_dims")
    if known is None:
        along = [
            [tuple([e for e, a in enumerate(row) if a]) for row in p.matrix]
            for p in (*signature.inputs, *signature.outputs)
        ]
        count = len(signature.inputs)
        read = tuple(
            tuple([(p, d) for p in range(count) for d, x in enumerate(along[p]) if e in x])
            for e in range(len(signature.index))
        )
        roles = [d.role for d in signature.index]
        whole = tuple(
            (p, d)
            for p in range(count)
            for d, x in enumerate(along[p])
            if signature.input_types[p].shape[d] > 1
            and all(roles[e] in ("whole", "scan") for e in x)
        )
        known = _Dims(read, tuple(map(tuple, along[count:])), whole)
        signature.__dict__["_named_dims"] = known
    return known
