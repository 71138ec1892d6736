"""A program written in kernels, without JAX: a linear layer and a relu, planned, drawn and run.

python examples/linear_relu.py
tapestry-egg optimize examples/linear_relu.py --target h100:4 -o out
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import tapestry_egg as te
from tapestry_egg.show.drawing import draw, parse_cover

TEMPLATES = Path(__file__).parents[1] / "docs" / "templates" / "tapestry.yaml"

linear = te.kernel("linear", TEMPLATES, run=lambda x, A, b: x @ A + b)
relu = te.kernel("relu", TEMPLATES, run=lambda x: jnp.maximum(x, 0))


def program() -> te.Program:
    x, w, b = te.tensor("x", (100, 12)), te.tensor("W", (12, 32)), te.tensor("b", (32,))
    return te.program(relu(linear(x, w, b)), name="linear.relu")


def example() -> tuple[te.Program, tuple[()]]:
    return program(), ()


def main(folder: str = ".") -> None:
    made = program()
    covers = ("0:batch=2,out=2", "1:shape0=2,shape1=2")
    shards = dict(parse_cover(made.graph, cover) for cover in covers)
    print(draw(made.graph, str(Path(folder) / "linear.relu.4x.svg"), shards))
    square = [te.MeshShape(("x", "y"), (2, 2))]
    front = te.optimize(made, "h100:4", pins={"result": ("x", "y")}, mesh_shapes=square)
    print(front.best().explain())
    x, w, b = np.ones((100, 12), "f"), np.ones((12, 32), "f"), -np.ones(32, "f")
    np.testing.assert_allclose(made(x, w, b), np.full((100, 32), 11.0))


if __name__ == "__main__":
    main(*sys.argv[1:])
