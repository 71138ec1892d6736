"""Packing: about how fast a labelling is once its collectives are merged, within limits on memory.

Nothing is merged here: copies of a kind are bytes, which go in collectives as large as the memory
that is free at half of all times lets them be, and in no fewer than wait for each other. What comes
of it says which labellings are worth a closer look.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry_egg.extract.certify.merging import copied_apart
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.mergeable import Mergeable, copies_of, in_turn
from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.extract.search.archive import Candidate
from tapestry_egg.machine.costs import collective_seconds


def packed(
    assembled: PlanProblem, candidate: Candidate, mergeable: Mergeable, limits: Sequence[float]
) -> Floats:
    """[limits]: about the seconds that a labelling takes, merged; infinite below its own peak."""
    choices = assembled.choices
    mesh, target = choices.mesh, choices.target
    times = assembled.problem.times // len(assembled.counts)
    profile = assembled.problem.evaluate(candidate.rows)[2][:times]
    room = np.maximum(0.0, np.array(limits) - float(np.median(profile)))
    found = np.where(candidate.peak <= np.array(limits) * (1.0 + 1e-9), candidate.seconds, np.inf)
    for kind, own in copies_of(assembled, candidate.rows, mergeable).items():
        name, axes, *_ = kind
        whole = mesh.parts(axes) if name == "all_gather" else 1
        sizes = np.array([c.bytes for c in own])
        fullest = np.clip(room / whole, sizes.max(), mergeable.most(kind))
        count = np.ceil(sizes.sum() / np.maximum(fullest, 1.0))
        count = np.maximum(count, in_turn(own, mergeable))
        each = sizes.sum() / count
        seconds = count * np.asarray(collective_seconds(name, each, axes, mesh, target))
        seconds += [n * copied_apart(kind, x, target) for n, x in zip(count, each, strict=True)]
        found -= np.maximum(0.0, sum(c.seconds for c in own) - seconds)
    return found
