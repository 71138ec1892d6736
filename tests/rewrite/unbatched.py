"""A kernel of a user's own: element by element, as its template says, and without `jax.vmap`."""

from __future__ import annotations

from pathlib import Path

from jax.extend.core import Primitive
from jax.interpreters import mlir

from tapestry_egg.metakernels import registry

DOUBLED = Primitive("doubled")
DOUBLED.def_abstract_eval(lambda x: x)
mlir.register_lowering(DOUBLED, mlir.lower_fun(lambda x: 2.0 * x, multiple_results=False))


def add_doubled(folder: Path) -> None:
    """Make its template known, from a file in a folder."""
    template = folder / "doubled.yaml"
    template.write_text(
        "doubled:\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: $x.dtype}\n  fusion: loop\n"
        "  flops: 1\n",
        "utf-8",
    )
    registry.add_templates(template)
