"""The methods of extraction in one table, and the choice among them.

A method is a function of (problem, standing, deadline, seed) that offers choices and bounds to a
`Standing` until it has proven its answer or the deadline (`time.perf_counter`) has come. What a
method is optimal for is what it proves when it ends in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import inf

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.choices.choices import ChoiceProblem, Extraction
from tapestry_egg.extract.gym.choices.standing import Standing
from tapestry_egg.parallel.deadline import TimeUp, ends_at


@dataclass(frozen=True)
class Method:
    """One way to answer a choice problem: a function of a module, which is loaded on use."""

    name: str
    optimal_for: str
    module: str
    function: str
    unfit: Callable[[ChoiceProblem], str]  # why it cannot take a problem; empty where it can


def _beyond_and_or(problem: ChoiceProblem) -> str:
    if len(problem.pairs) or problem.usage:
        return "pairs and limits are beyond it"
    return ""


def _no_network(problem: ChoiceProblem) -> str:
    if not problem.all_active or problem.children.size or problem.provides.size:
        return "choices need others"
    return ""


def _needs_order(problem: ChoiceProblem) -> str:
    return _beyond_and_or(problem) or ("" if problem.acyclic else "cycles must be forbidden")


_DAG = "dag.methods"

#: In the order in which the automatic choice asks.
METHODS = (
    Method("and-or", "DAG cost", _DAG, "automatic", _beyond_and_or),
    Method("network", "costs of pairs under limits, where small", "solver", "run", _no_network),
    Method("elimination", "DAG cost at a small treewidth", _DAG, "elimination", _needs_order),
    Method("milp", "DAG cost", _DAG, "milp", _beyond_and_or),
    Method("cp-sat", "DAG cost (needs ortools)", _DAG, "cp_sat", _beyond_and_or),
    Method("greedy-dag", "nothing; fast", _DAG, "greedy", _beyond_and_or),
    Method("bottom-up", "tree cost, of costs above zero", _DAG, "tree", _needs_order),
)


def extract(
    problem: ChoiceProblem,
    seconds: float = 60.0,
    seed: int = 0,
    method: str = "auto",
    told: Callable[[Standing], None] | None = None,
    gap: float = 0.0,
    patience: float = inf,
) -> Extraction:
    """The best choice found for a problem's first objective within `seconds`, with a bound.

    The search ends earlier where the choice is within the share `gap` of its bound, and after
    `patience` seconds without a better choice or bound (both where it runs in a main thread).
    `told` is called with every better choice or bound. An interruption (Ctrl-C) ends the search and
    keeps what was found. Raises ExtractError for an unknown method, or one that is unfit.
    """
    standing = Standing(problem.verify(), told or (lambda standing: None))
    deadline = standing.started + seconds
    chosen = choose(problem, method)
    try:
        run = getattr(import_module(f".{chosen.module}", __package__), chosen.function)
        over = (lambda: bool(standing.enough(gap, patience))) if gap or patience < inf else None
        with ends_at(deadline, over):
            run(problem, standing, deadline, seed)
        if not standing.proven and time.perf_counter() >= deadline:
            raise TimeUp  # which the method saw itself, before it was interrupted
    except TimeUp:
        standing.notes.append(standing.enough(gap, patience) or "time was up")
    except KeyboardInterrupt:
        standing.notes.append("interrupted")
    return standing.extraction()


def choose(problem: ChoiceProblem, method: str = "auto") -> Method:
    """The method of a name, or for `auto` the first that fits.

    Raises ExtractError where there is none.
    """
    reasons = []
    for m in METHODS:
        if method in ("auto", m.name):
            reason = m.unfit(problem)
            if not reason:
                return m
            reasons.append(f"{m.name}: {reason}")
    names = ", ".join(m.name for m in METHODS)
    raise ExtractError(
        f"no method {method!r} for this problem" if reasons else f"unknown method {method!r}",
        where=f"choice problem {problem.name}",
        hint="; ".join(reasons) or f"Methods are auto, {names}.",
    )
