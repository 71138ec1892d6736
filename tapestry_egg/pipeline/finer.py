"""Finer meshes: the forms of a large program that are searched on meshes of more axes.

Each axis of a mesh makes tables some twenty times as large. So all forms are searched on meshes of
the fewest axes first. Those with plans there that a front would show go on to the first mesh of one
axis more, and those with such plans on that mesh to the other ones. What is left is noted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tapestry_egg.extract.engine.archive import shown
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.parallel.deadline import interruptible

from . import omissions, passes, searches
from .state import Network, State

# Forms whose least peak is within this factor of the least known may hold less on finer meshes.
_NEAR = 1.01

#: A form by its place, and a number of devices.
_Form = tuple[int, int]


def add_meshes(state: State) -> State:
    """Networks of the forms that are worth it on the meshes that were left for later. An
    interruption leaves those that have a plan by then."""
    known = {n.mesh for n in state.networks}
    later = [s for s in state.shapes if s not in known]
    if not later:
        return state
    every = [(f, s) for f in range(len(state.forms)) for s in later]
    if not any(n.search for n in state.networks):  # nothing is known of any form
        return passes.with_networks(state, every)
    state = searches.with_searches(state)
    left: list[Network] = []
    try:
        with interruptible():
            searches.search_ends(state)
            vain = _vain(state, 0)
            for axes in sorted({len(s.sizes) for s in later}):
                for meshes in _first_and_others([s for s in later if len(s.sizes) == axes]):
                    some = [x for x in every if x[1] in meshes]
                    worth = [(f, s) for f, s in some if (f, s.devices) not in vain]
                    left += [passes.network(state, *x) for x in some if x not in worth]
                    state = searches.with_searches(passes.with_networks(state, worth))
                    searches.search_ends(state)
                    vain |= _vain(state, axes)
    except KeyboardInterrupt:
        state = state.saying(INTERRUPTED)
        found = [n for n in state.networks if n.search and n.search.archive.candidates]
        return replace(state, networks=tuple(found))
    place = {s: k for k, s in enumerate(state.shapes)}
    order = sorted(state.networks, key=lambda n: (n.number, place[n.mesh]))
    state = replace(state, networks=tuple(order), left=tuple(left))
    return state.saying(*omissions.of_finer(left))


def _first_and_others(meshes: list[MeshShape]) -> tuple[list[MeshShape], list[MeshShape]]:
    """The first mesh of every number of devices, and all others."""
    first = [*{s.devices: s for s in reversed(meshes)}.values()]
    return first, [s for s in meshes if s not in first]


def _vain(state: State, axes: int) -> set[_Form]:
    """The forms that were searched on meshes of so many axes or more and have no plan on these that
    a front would show, with the number of devices."""
    searched: set[_Form] = set()
    worth: set[_Form] = set()
    for devices in {n.mesh.devices for n in state.networks}:
        own = [(n, n.search) for n in state.networks if n.search and n.mesh.devices == devices]
        searched |= {(n.number, devices) for n, _ in own if len(n.mesh.sizes) >= axes}
        plans = [(n, c.costs) for n, s in own for c in s.archive.candidates]
        costs = np.array([costs for _, costs in plans]).reshape(-1, 3)
        lean = np.flatnonzero(costs[:, 1] <= costs[:, 1].min(initial=np.inf) * _NEAR)
        best = [plans[k][0] for k in (*shown(costs), *lean.tolist())]
        worth |= {(n.number, devices) for n in best if len(n.mesh.sizes) >= axes}
    return searched - worth
