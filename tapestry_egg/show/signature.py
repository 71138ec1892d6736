"""Operation projection signatures for people and as data: index space, projections, splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tapestry_egg.columns import columns
from tapestry_egg.metakernels.signatures.splits import (
    Access,
    Blocks,
    Gathered,
    Near,
    Partial,
    Split,
    split,
)
from tapestry_egg.zspace import Projection, ZRange

if TYPE_CHECKING:
    from tapestry_egg.metakernels.language.template import Template
    from tapestry_egg.metakernels.signatures.signature import IndexDim, OperationSignature

Names = tuple[tuple[str, ...], tuple[str, ...]]


def port_names(template: Template, inputs: int, outputs: int) -> Names:
    """The name of every operand and output; those of `name...` are numbered."""
    sides = (
        ([(o.name, o.many, o.optional) for o in template.inputs], inputs),
        ([(o.name, o.count is not None, False) for o in template.outputs], outputs),
    )
    found = []
    for declared, count in sides:
        own: list[str] = []
        for name, many, optional in declared:
            width = count - len(declared) + 1 if many or optional else 1
            own += [f"{name}[{k}]" for k in range(width)] if many else [name] * width
        found.append(tuple(own))
    return found[0], found[1]


def signature_text(signature: OperationSignature, names: Names, parts: Sequence[int] = (2,)) -> str:
    """The signature, and what cutting each index dim alone into `parts` does."""
    dims = [d.name for d in signature.index]
    blocks = [_calls(signature, names), _index_table(signature)]
    for name, tensor, projection in _ports(signature, names):
        lines = [f"{name}: {tensor} at {projection.show(dims)}", projection.augmented()]
        blocks.append("\n".join([*lines, *_neighbours(projection, dims)]))
    blocks += [_split_table(signature, names, n) for n in parts]
    return "\n\n".join(block for block in blocks if block)


def signature_data(
    signature: OperationSignature, names: Names, parts: Sequence[int] = (2,)
) -> dict[str, Any]:
    """The same as plain data."""
    ports = [
        {"name": name, "type": str(tensor), **projection.to_json()}
        for name, tensor, projection in _ports(signature, names)
    ]
    return {
        "kernel": signature.kernel,
        "index": [
            {"name": d.name, "size": d.size, "role": d.role, "monoid": d.monoid}
            for d in signature.index
        ],
        "inputs": ports[: len(signature.inputs)],
        "outputs": ports[len(signature.inputs) :],
        "splits": [
            {"dim": dim.name, "parts": n, "legal": found.legal, "refusal": found.refusal}
            | {"ports": dict(_effects(found, d, names))}
            | {"read_again": dict(zip(names[0], _read_again(signature, d, n), strict=True))}
            for n in parts
            for d, dim in enumerate(signature.index)
            for found in (split(signature, {d: (n,)}),)
        ],
    }


def _ports(signature: OperationSignature, names: Names) -> list[tuple[str, Any, Any]]:
    types = (*signature.input_types, *signature.output_types)
    return list(
        zip((*names[0], *names[1]), types, (*signature.inputs, *signature.outputs), strict=True)
    )


def _calls(signature: OperationSignature, names: Names) -> str:
    sides = (
        (names[0], signature.input_types),
        (names[1], signature.output_types),
    )
    left, right = (
        ", ".join(f"{name}: {t}" for name, t in zip(own, types, strict=True))
        for own, types in sides
    )
    return f"{signature.kernel}({left}) -> {right}"


def _index_table(signature: OperationSignature) -> str:
    if not signature.index:
        return "The index space is one point."
    rows = [["index", "size", "role"]]
    rows += [[d.name, str(d.size), _role(d)] for d in signature.index]
    return columns(rows, right=[1])


def _role(dim: IndexDim) -> str:
    return f"{dim.role}({dim.monoid})" if dim.monoid else dim.role


def _neighbours(projection: Projection, dims: Sequence[str]) -> list[str]:
    """What the boxes of neighbouring index points have in common, where windows make them overlap,
    or leave out between them."""
    lines = []
    for d, dim in enumerate(dims):
        shared, skipped = projection.marginal_overlap(d), projection.marginal_waste(d)
        for k in projection.reaches(d):
            if shared[k]:
                lines.append(
                    f"{dim}: neighbours share {shared[k]} of {projection.shape[k]} cells of dim {k}"
                )
            if skipped[k]:
                cells = "cell" if skipped[k] == 1 else "cells"
                lines.append(f"{dim}: {skipped[k]} {cells} of dim {k} skipped between neighbours")
    return lines


def _read_again(signature: OperationSignature, d: int, parts: int) -> tuple[int, ...]:
    """By operand, the cells that are read more than once when index dim `d` is cut into `parts`;
    padding counts."""
    index = ZRange.from_shape(signature.extents)
    shards = index.blocks(d, parts)
    return tuple(p.replication_cost(shards, index) for p in signature.inputs)


def _split_table(signature: OperationSignature, names: Names, parts: int) -> str:
    if not signature.index:
        return ""
    rows = [[f"in {parts} parts", *names[0], *names[1], "read again"]]
    refused = []
    for d, dim in enumerate(signature.index):
        found = split(signature, {d: (parts,)})
        if found.legal:
            effects = [effect for _, effect in _effects(found, d, names)]
            rows.append([dim.name, *effects, f"{sum(_read_again(signature, d, parts)):,}"])
        else:
            refused.append(f"{dim.name}: not legal, {found.refusal}")
    return "\n".join([*([columns(rows)] if len(rows) > 1 else [rows[0][0]]), *refused])


def _effects(found: Split, d: int, names: Names) -> list[tuple[str, str]]:
    if not found.legal:
        return []
    both = [*zip(names[0], found.inputs, strict=True), *zip(names[1], found.outputs, strict=True)]
    return [(name, _effect(accesses, d)) for name, accesses in both]


def _effect(accesses: Mapping[int, Access], d: int) -> str:
    access = accesses.get(d)
    if isinstance(access, Partial):
        return f"partial ({access.monoid})"
    if isinstance(access, Gathered):
        return "gathered"
    if not isinstance(access, Blocks | Near):
        return "whole"
    margins = [
        f"{'' if n > 0 else '-'}{abs(n)} {where}"
        for n, where in ((access.lo, "before"), (access.hi, "after"))
        if n
    ]
    some = " at most" if isinstance(access, Near) else ""
    return f"dim {access.dim}{' + ' + ', '.join(margins) if margins else ''}{some}"
