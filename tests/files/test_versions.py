"""Files of every kind that earlier revisions wrote: read by this one, or refused with the reason.

`versions/` holds one file for each kind and version, as it was written then. A new version of a
format adds a file here and keeps those that are there.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import GraphError, PlanError
from tapestry_egg.files.files import VERSIONS, load
from tapestry_egg.files.problem_file import VERSION, read

FOLDER = Path(__file__).parent / "versions"
FILES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The program that the files are of."""

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    value, g = jax.value_and_grad(lambda w: jnp.mean(jax.lax.scan(body, x, w)[0] ** 2))(w)
    return w - 0.1 * g, value


def document(name: str) -> Any:
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))


def test_every_kind_of_file_has_one_of_its_present_version() -> None:
    now = {f"{kind}-{version}" for kind, version in (*VERSIONS.items(), ("problem", VERSION))}
    assert now <= set(FILES)
    for name in FILES:
        kind, _, version = name.partition("-")
        told = document(name)
        assert (told["tapestry_egg"], told["version"]) == (kind, int(version))


@pytest.mark.slow
def test_a_graph_is_the_program_that_it_was() -> None:
    program = load(FOLDER / "graph-1.json.gz")
    assert isinstance(program, te.Program)
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(3, 16, 16)).astype("f"), rng.normal(size=(32, 16)).astype("f")
    for got, want in zip(program(w, x), step(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert program.graph.donated == (True, False)


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith(("plan", "front"))])
def test_plans_are_read_and_certified_or_refused_for_their_costs(name: str) -> None:
    found = load(FOLDER / f"{name}.json.gz", certify=False)
    plans = list(found.plans) if isinstance(found, te.Front) else [found]
    said = document(name)
    told = said["plans"] if isinstance(found, te.Front) else [said]
    assert [p.name for p in plans if isinstance(p, te.Plan)] == [t["name"] for t in told]
    try:
        load(FOLDER / f"{name}.json.gz")
    except PlanError as error:  # costs that another revision counts otherwise
        assert "costs" in str(error) and "ptimize" in str(error)


def test_a_problem_is_read() -> None:
    problem = read(document("problem-1"))
    assert problem.variables and problem.times


@pytest.mark.parametrize("kind", VERSIONS)
@pytest.mark.parametrize("by", [-1, 1])
def test_other_versions_are_refused_with_what_to_do(kind: str, by: int, tmp_path: Path) -> None:
    other = {**document(f"{kind}-{VERSIONS[kind]}"), "version": VERSIONS[kind] + by}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    with pytest.raises(GraphError, match=rf"\$\.version: file version {VERSIONS[kind] + by}"):
        load(path)
