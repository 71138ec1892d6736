"""Shardings as JAX takes them: `in_shardings` and `out_shardings`, pytree prefixes as pins.

Leaves are `PartitionSpec`s, `NamedSharding`s or None, which leaves the layout to the plan. A leaf
stands for all of the arguments or results below it, as in `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapestry_egg.errors import ExtractError, GraphError
from tapestry_egg.graph.pytrees import along_prefix, build, leaf_count
from tapestry_egg.machine.mesh_contract import Dims, MeshContract
from tapestry_egg.tracing.constraints import contract_of, is_spec, spec_dims
from tapestry_egg.tracing.trace import Program

from .pins import Pin

Leaf = tuple[int, Any]  # position among the flat inputs or outputs, sharding


@dataclass(frozen=True, slots=True)
class Leaves:
    """What shardings say, as plain data: per input or output the axes of every dim, None where
    nothing is said."""

    dims: tuple[Dims | None, ...] = ()


def input_shardings(program: Program, shardings: Any) -> list[Leaf]:
    """The shardings of a program's inputs, of a prefix of its positional arguments.

    Raises ExtractError for another structure than the arguments'.
    """
    if shardings is None:
        return []
    if isinstance(shardings, Leaves):
        return _plain(shardings)
    if isinstance(shardings, list):
        shardings = tuple(shardings)
    prefix = (shardings, None) if isinstance(shardings, tuple) else (shardings, shardings)
    return _leaves("in_shardings", prefix, _structure(program.in_treedef, program.in_tree))


def output_shardings(program: Program, shardings: Any) -> list[Leaf]:
    """The shardings of a program's outputs, of a prefix of what it returns.

    Raises ExtractError for another structure than the result's.
    """
    if shardings is None:
        return []
    if isinstance(shardings, Leaves):
        return _plain(shardings)
    structure = _structure(program.out_treedef, program.out_tree)
    return _leaves("out_shardings", shardings, structure)


def sharding_pins(program: Program, leaves: Sequence[Leaf], output: bool = False) -> list[Pin]:
    """Pins of inputs or outputs by their shardings; those that say nothing make none.

    Raises ExtractError for a sharding that names no mesh axes, or has more dims than its value.
    """
    graph = program.graph
    ids, names = (
        (graph.outputs, graph.output_names) if output else (graph.inputs, graph.input_names)
    )
    word = "out_shardings" if output else "in_shardings"
    found = []
    for position, sharding in leaves:
        if sharding is None:
            continue
        name = names[position] if names else f"[{position}]"
        where, tensor = f"{word} of {name or 'the result'}", graph.values[ids[position]]
        spec = getattr(sharding, "spec", sharding)
        if not is_spec(spec):
            raise ExtractError(
                f"{type(sharding).__name__} names no mesh axes",
                where=where,
                hint="Give a NamedSharding or a PartitionSpec, or None to leave it to the plan.",
            )
        dims = spec_dims(spec, tensor.rank)
        if len(dims) > tensor.rank:
            raise ExtractError(
                f"it is {tensor}, the sharding has {len(dims)} dims",
                where=where,
                hint=f"Give at most {tensor.rank}.",
            )
        found.append(Pin(position, name, where, tensor.shape, dims, output))
    return found


def meshes_of(leaves: Sequence[Leaf]) -> list[MeshContract]:
    """The meshes that shardings name."""
    meshes = [getattr(sharding, "mesh", None) for _, sharding in leaves]
    return [contract_of(m) for m in meshes if m is not None and not m.empty]


def _plain(leaves: Leaves) -> list[Leaf]:
    from jax.sharding import PartitionSpec

    return [(i, PartitionSpec(*d)) for i, d in enumerate(leaves.dims) if d is not None]


def _structure(treedef: Any, plain: Any) -> Any:
    """The structure as traced, or of plain containers in place of classes that a file names."""
    if treedef is not None:
        return treedef
    import jax

    return jax.tree.structure(build(plain, iter(range(leaf_count(plain))), {}))


def _leaves(word: str, prefix: Any, structure: Any) -> list[Leaf]:
    try:
        entries = along_prefix(prefix, structure)
    except GraphError as e:
        raise ExtractError(
            e.what,
            where=word,
            hint="It is a prefix of the structure of the "
            + ("arguments." if word == "in_shardings" else "result."),
        ) from None
    # A Format has the sharding beside the memory layout, which is XLA's affair.
    return [(i, said(getattr(x, "sharding", x))) for i, x in enumerate(entries)]


def said(sharding: Any) -> Any:
    """None for what leaves the choice open: None, and JAX's words for unspecified and auto."""
    return None if type(sharding).__name__ in ("UnspecifiedValue", "AUTO") else sharding
