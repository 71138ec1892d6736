"""The pipeline: what `optimize` does, as a table of passes from a question to a certified front.

`trace` stands before it, `lower` and `run` after it (`runtime`). A pass takes the state and returns
it with what it makes, which is checked before the next one reads it. Progress tells which pass is
at work, the timeline which rules; `Front.stages` holds what the passes made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg.collector import rarely_collected
from tapestry_egg.extract.front.front import Front as Front
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.extract.pins.pins import Pins
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.objectives import OBJECTIVES as OBJECTIVES
from tapestry_egg.machine.objectives import Objective
from tapestry_egg.machine.target import Target
from tapestry_egg.parallel.deadline import interruptible
from tapestry_egg.progress import Phase, Progress, Verb
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, RuleBook

from . import finer, fronts, passes, searches, verify
from .fronts import audit_front
from .settings import Settings
from .state import Network, State, read_question

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.plans.plan import Plan
    from tapestry_egg.tracing.trace import Program


@dataclass(frozen=True)
class Pass:
    """One step: the verb that it is part of, the fields of the state that it makes, and what checks
    them. Without one that is `spare` the front is less good, but a front: an interruption (Ctrl-C)
    ends it, and those after it up to the front, which says so. Any other begins again, once, where
    there is a plan."""

    verb: Verb
    makes: tuple[str, ...]
    run: Callable[[State], State]
    check: Callable[[State], None]
    spare: bool = False

    @property
    def name(self) -> str:
        """What progress calls it."""
        return self.run.__name__


#: From a question to a front. Rules work twice: on the program as a whole (`forms`), where they
#: find others that compute the same, and on the facts of each form on each mesh (`strategies`).
#: The first plan, of the program as given on the default mesh, is there before any other form or
#: mesh is looked at.
PASSES = (
    Pass("trace", ("shapes",), passes.choose_shapes, verify.shapes),
    Pass("saturate", ("forms", "schedules"), passes.take_as_given, verify.forms_and_schedules),
    Pass("extract", ("networks",), passes.begin, verify.networks),
    Pass("extract", ("results",), searches.search_first, verify.results),
    Pass("saturate", ("forms", "schedules"), passes.find_forms, verify.forms_and_schedules, True),
    Pass(
        "saturate",
        ("forms", "schedules"),
        passes.recompute_values,
        verify.forms_and_schedules,
        True,
    ),
    Pass("extract", ("networks",), passes.choose_networks, verify.networks, True),
    Pass("encode", ("encodings",), passes.encode_facts, verify.encodings, True),
    Pass("saturate", ("strategies",), passes.derive_strategies, verify.strategies, True),
    Pass("extract", ("choices",), passes.join_units, verify.choices, True),
    Pass("extract", ("problems",), passes.pose_problems, verify.problems, True),
    Pass("extract", ("networks",), finer.add_meshes, verify.networks, True),
    Pass("extract", ("networks",), passes.add_axes, verify.networks, True),
    Pass("extract", ("results",), searches.search_networks, verify.results, True),
    Pass("extract", ("front",), fronts.merge_front, verify.front),
    Pass("extract", ("front",), fronts.merge_sent, verify.front, True),
    Pass("extract", ("front",), fronts.certify_front, verify.front),
    Pass("extract", ("front",), fronts.tell_origins, verify.front),
    Pass("extract", ("front",), audit_front, verify.front),
)


@rarely_collected()
def optimize(
    graph: Program | BlockGraph,
    target: str | Path | Target,
    objectives: Sequence[str | Objective] = OBJECTIVES,
    *,
    limits: Mapping[str, float | str] | None = None,
    rules: Sequence[str | Path | RuleBook] = (),
    books: Sequence[str | Path | RuleBook] = DEFAULT_BOOKS,
    state: Mapping[str, str] | None = None,
    numerics: str = "reorders",
    mesh_shapes: Sequence[MeshShape] | None = None,
    mesh: Any = None,
    pins: Pins | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    settings: Settings | None = None,
    on_progress: Progress | None = None,
    keep_stages: bool = False,
    price: float | None = None,
    idle: str | None = None,
    resume: str | Path | None = None,
    like: Plan | None = None,
) -> Front:
    """The Pareto front of ways to run a traced program on a target (`"h100:8"`).

    Plans trade `objectives` off against each other: names of `machine/objectives.py`, or an
    `Objective` of your own, by which plans are compared but not searched for. `limits`
    (`{"peak_bytes": "40GiB"}`) exclude plans above them; the usable memory of a device is one,
    unless you give another for `peak_bytes`: what is above it is marked. `rules` adds rule books to
    those of `books`. `state` pairs outputs with the inputs that they become in the next
    call, by path or prefix; donated inputs pair by themselves. `pins` fixes the layouts of inputs
    by path or prefix (`{"[0]['w']": (None, "x")}`, see `extract/pins/pins.py`), and so those of
    the outputs that feed back to them, and of values inside and results (`"%12"`, `"train.py:17"`,
    `"result[1]"`, see `extract/pins/value_pins.py`); `in_shardings` and `out_shardings` do so
    as in `jax.jit`, and the program's own constraints hold inside. Rules that change rounding are
    used only with `numerics="relaxed"`. Every rule is verified before it is used.
    `mesh` (a JAX mesh or a `MeshShape`) is a contract: what crosses the boundary is laid out by its
    axes, and inside plans may divide them. Without it, shardings or constraints that name one mesh
    do. Without any, or with `mesh_shapes`, meshes are the plan's own affair.
    Mesh shapes (default: all of the target's that differ in more than the names of their axes) are
    searched together. An interruption (Ctrl-C) of the search ends it, and
    the front holds what was found until then; its `notes` say so. With `keep_stages` what every
    pass made is kept in `Front.stages`. `price` is in dollars per device and hour, in place of the
    target's own; the objective `dollars` and limits on it need one.
    Plans have all devices of the target, unless `devices` or `dollars` are objectives (or in a
    formula that is one) or limited (`{"devices": 4}`): then those on parts of the machine are
    searched, too, neighbours inside a host first (`machine/topology.py`). What a plan leaves unused
    draws nothing and costs nothing (`idle="free"`), or idle power and the price (`idle="counted"`);
    default: as the target says, which is `free` in files.
    `resume` names a file in which the search is kept (every minute, and in the end). Where it is
    there, the search goes on from it, where gaps are widest: what was found of the same program
    for the same machine is not lost, and the work adds up.
    `like` is a plan of the same program with arrays of other sizes: only its mesh is searched, and
    the form that its rules make, unless nothing there is within the limits.
    Raises TargetError, RuleError (RuleRefused for a rule that is not true), GraphError, and
    ExtractError when no plan meets the limits.
    """
    question = read_question(
        graph,
        target,
        objectives,
        limits=limits,
        books=(*books, *rules) if not isinstance(rules, str) else rules,
        state=state,
        numerics=numerics,
        mesh_shapes=mesh_shapes,
        mesh=mesh,
        pins=pins,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        settings=settings or Settings(),
        tell=on_progress,
        price=price,
        idle=idle,
        resume=resume,
        like=like,
    )
    done, stages = run_passes(State(question), PASSES, keep_stages)
    assert done.front is not None, "the last passes make it"
    return replace(done.front, stages=stages)


def run_passes(
    state: State, table: Sequence[Pass] = PASSES, keep: bool = False
) -> tuple[State, Mapping[str, Stage]]:
    """Run passes one after the other, each followed by its check; with `keep`, what each made.

    Raises what the passes raise, and ExtractError where a check fails.
    """
    stages: dict[str, Stage] = {}
    question = state.question
    checked: set[str] = set()  # names of what passes have made here
    for each in table:
        if each.spare and state.interrupted and state.front is None:
            continue
        while True:
            telling = _Telling(question.tell, each)
            try:
                with interruptible():
                    made = each.run(replace(state, question=replace(question, tell=telling)))
            except KeyboardInterrupt:
                noted = replace(state, notes=(*state.notes, INTERRUPTED))
                if each.spare:
                    made = replace(noted, networks=_searched(state))
                elif state.interrupted or not _has_plan(state):
                    raise
                else:  # a front needs the pass
                    state = noted
                    continue
            break
        before, state = state, replace(made, question=question)
        # What a pass leaves as it was has been checked.
        if not (_same(before, state) and checked.issuperset(each.makes)):
            each.check(state)
            checked.update(each.makes)
        telling.close()
        if keep:
            for name in each.makes:
                verb = stages[name].verb if name in stages else each.verb
                stages[name] = Stage(verb, name, getattr(state, name))
    return state, stages


def _searched(state: State) -> tuple[Network, ...]:
    """The networks that were searched, of which a front can be made."""
    place = {id(schedule): k for k, schedule in enumerate(state.schedules)}
    found = [(place[id(n.schedule)], n) for n in state.networks if n.search is not None]
    return tuple(replace(n, number=k, form=state.forms[k]) for k, n in found)


def _has_plan(state: State) -> bool:
    """Whether a search has found a plan."""
    return any(n.search is not None and n.search.archive.candidates for n in state.networks)


def _same(a: State, b: State) -> bool:
    """Whether a pass has changed nothing, told by the identity of what there is."""
    return all(getattr(a, x.name) is getattr(b, x.name) for x in fields(a))


class _Telling:
    """The progress of one pass: that it begins and ends, and what it says, under its name."""

    def __init__(self, tell: Progress, each: Pass) -> None:
        self._tell, self._pass = tell, each
        self._done = False
        self(Phase(each.verb))

    def __call__(self, phase: Phase) -> None:
        if phase.phase != self._pass.verb:  # what it has others do is no end of its own
            phase = replace(phase, phase=self._pass.verb, fraction=None)
        self._done = phase.done
        self._tell(replace(phase, step=self._pass.name))

    def close(self) -> None:
        if not self._done:
            self(Phase(self._pass.verb, "", 1.0))


# Stages: what each pass made, kept on request and printable.


@dataclass(frozen=True)
class Stage:
    """What a pass made: the verb that it is part of, its name, and its value as the next pass took
    it. `print(front.stages["strategies"])` tells it in words."""

    verb: Verb
    name: str
    value: Any

    def __str__(self) -> str:
        from tapestry_egg.show.stages import stage_text

        return stage_text(self.name, self.value)

    def of(self, tensor: str, entry: int = 0, reader: int = 0, most: int = 8) -> str:
        """What it holds of one tensor, in words: `front.stages["strategies"].of("[0]['up']")`.

        The tensor is named by its path, by an end of that, or by its number in the program that the
        entry is of (`%9`). From `encodings` on a stage has an entry for every form on every mesh
        shape: those of the first form, then those of the second. Strategies and the like are told
        of the operation that reads the tensor first, or of another `reader`; of long lists the
        first `most`. Raises GraphError where there is no such tensor, entry or reader.
        """
        from tapestry_egg.show.stages import Asked, tensor_text

        return tensor_text(self.name, self.value, Asked(tensor, reader, most), entry)
