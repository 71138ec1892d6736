"""What `te.jit` asks for, and the one place where it asks."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.extract.front.notes import INTERRUPTED, note
from tapestry_egg.extract.pins.shardings import Leaves, said
from tapestry_egg.files.plan_cache import PlanCache, chosen_cache, plain_options, plan_key
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.devices import memory_limit, network_shape
from tapestry_egg.machine.mesh_contract import Dims, MeshContract
from tapestry_egg.machine.objectives import DEVICES
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.pipeline.settings import DANGER, Settings
from tapestry_egg.plans.plan import Plan
from tapestry_egg.quantities import BYTES
from tapestry_egg.runtime.compiled import CompiledPlan, compile
from tapestry_egg.schedule.flatten import is_below
from tapestry_egg.tracing.constraints import active_mesh, contract_of, spec_dims

if TYPE_CHECKING:
    import jax

    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.extract.pins.pins import Pins
    from tapestry_egg.machine.target import Target
    from tapestry_egg.plans.plan import Plan
    from tapestry_egg.progress import Progress
    from tapestry_egg.rules.language.book import RuleBook
    from tapestry_egg.runtime.compiled import CompiledPlan
    from tapestry_egg.tracing.trace import Program

# Operations of programs whose fastest plan is found here: with so few it takes less time than to
# start processes that share the search (0.3 to 0.5 s of a processor for 430 to 700 operations;
# what a process imports takes 0.3 s, and 0.4 s more where it solves integer programs).
_ALONE = 800
# Bytes of a device's memory below which a difference is none.
_GRAIN = 256 << 20

# How devices call themselves -> the target file that describes them.
_KINDS = (
    ("h100", "h100"),
    ("h200", "h200"),
    ("b200", "b200"),
    ("a100", "a100"),
    ("v6", "v6e"),
    ("v5p", "v5p"),
    ("v5 lite", "v5e"),
    ("v5e", "v5e"),
    ("v5", "v5p"),
    ("v4", "v4"),
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that decides which plan a program gets, besides the program.

    `mesh` supplies the devices (None: all), `target` their description (None: from the devices'
    kind). `in_shardings` and `out_shardings` have one entry per input and output of the program:
    a `jax.sharding.Sharding`, a `PartitionSpec`, or None where the plan is free; empty where the
    user said nothing at all. `committed` is where the arguments of the first call lay: the
    `NamedSharding` of those that were put on a mesh, None for the others; empty where none was.
    With `arguments="free"` that is no pin. `inside` are the shardings that the program itself
    names. `compiler_options` are XLA's, besides those that a plan counts on. `cache` is where
    fronts are kept (None: as the environment says, see `files/plan_cache.py`; False: nowhere).
    """

    mesh: Any = None
    target: str | Path | Target | None = None
    minimize: str = "seconds"
    limits: Mapping[str, float | str] = field(default_factory=dict)
    rules: tuple[str | Path | RuleBook, ...] = ()
    state: Mapping[str, str] | None = None
    numerics: str = "reorders"
    pins: Pins = field(default_factory=dict)
    in_shardings: tuple[Any, ...] = ()
    out_shardings: tuple[Any, ...] = ()
    committed: tuple[Any, ...] = ()
    inside: tuple[Any, ...] = ()
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    arguments: str = "pinned"
    cache: bool | str | Path | None = None
    settings: Settings | None = None
    on_progress: Progress | None = None


def plan_program(program: Program, request: Request, like: Plan | None = None) -> Front:
    """The front of a program under a request. Raises what `optimize` raises.

    Unless the request says how hard to work, only its own point of the front is looked for where
    that is the fastest plan: the rest of a front takes longer than to compile a program. Where no
    plan leaves the arguments where they lie, they are free, and a warning says so. `like` is a plan
    of the same program for arrays of other sizes: that point is looked for on its mesh, by its
    rules.
    """

    def quick(request: Request) -> Front:
        light = Settings(front=False, workers=1 if program.graph.size <= _ALONE else None)
        front = _optimized(program, request, ("seconds", *_limited(request)), light, like)
        limit = front.limits(request.limits).get("peak_bytes", math.inf)
        if best_plan(front, request).costs.peak_bytes <= DANGER * limit:
            return front
        # The compiled module may need more than that, and another plan be wanted.
        return _whole(program, request)

    if needs_all(request):
        return whole_front(program, request)
    return _once(program, request, "plan", quick, like)


def needs_all(request: Request) -> bool:
    """Whether `plan_program` gives all points of the front: it is told how hard to work, or what
    it wants is not the fastest plan."""
    return request.settings is not None or request.minimize != "seconds"


def whole_front(program: Program, request: Request) -> Front:
    """All points of the front of a program under a request, as `plan_program` otherwise."""
    return _once(program, request, "front", lambda request: _whole(program, request))


def _once(
    program: Program,
    request: Request,
    wanted: str,
    plan: Callable[[Request], Front],
    like: Plan | None = None,
) -> Front:
    """The front of a request, planned where it is not kept: by one process for all."""
    asking, pins = _pinned(program, request)
    front = plan_once(
        asking,
        machine_of(request),
        {
            "wanted": wanted,
            "minimize": request.minimize,
            "limits": request.limits,
            "rules": request.rules,
            "state": request.state,
            "numerics": request.numerics,
            "mesh": mesh_shape(named_mesh(request)),
            "pins": pins,
            "in_shardings": request.in_shardings,
            "out_shardings": request.out_shardings,
            "committed": request.committed,
            "arguments": request.arguments,
            "settings": request.settings,
            "like": None if like is None else (like.mesh, like.rules),
        },
        lambda: _where_they_lie(program, request, plan),
        devices=devices_of(place(request)),
        cache=request.cache,
    )
    for each in front.notes:
        if each.kind == "moved":
            warnings.warn(str(each), stacklevel=4)
    return front


def _pinned(program: Program, request: Request) -> tuple[Program, Any]:
    """The program that asks itself for what is pinned inside it, as its plans have it, and the
    other pins, read: what is at a line is known of this program alone."""
    if not request.pins:
        return program, {}
    from tapestry_egg.extract.pins.value_pins import constrained, split_pins

    split = split_pins(program.graph, request.pins)
    asking = replace(program, graph=constrained(program.graph, split.inside))
    return asking, (split.inputs, [(p.position, p.dims) for p in split.results])


def _where_they_lie(program: Program, request: Request, plan: Callable[[Request], Front]) -> Front:
    """The front of a request, or the one for free arguments. What takes long is told of."""
    from tapestry_egg.progress import Alarm

    with Alarm(program.graph.name, request.on_progress) as alarm:
        return _freely(program, replace(request, on_progress=alarm), plan)


def _freely(program: Program, request: Request, plan: Callable[[Request], Front]) -> Front:
    try:
        return plan(request)
    except (ExtractError, TargetError) as e:
        if not request.committed or request.arguments == "free":
            raise
        free = plan(_moving(request))
        return replace(free, notes=(*free.notes, note("moved", name=program.name, why=e.what)))


def _moving(request: Request) -> Request:
    """The request for plans that move the arguments: what is heard from these binds no plan."""
    inside = tuple(s for s in request.inside if s not in request.committed)
    return replace(request, arguments="free", inside=inside)


def _whole(program: Program, request: Request) -> Front:
    from tapestry_egg.pipeline.pipeline import OBJECTIVES

    objectives = (*OBJECTIVES, request.minimize, *_limited(request))
    return _optimized(program, request, objectives, request.settings or Settings())


def _limited(request: Request) -> tuple[str, ...]:
    """The objectives that are limited, but for the number of devices: all plans keep that."""
    return tuple(k for k in request.limits if k != DEVICES.name)


def _optimized(
    program: Program,
    request: Request,
    objectives: Sequence[str],
    settings: Settings,
    like: Plan | None = None,
) -> Front:
    from tapestry_egg.pipeline.pipeline import optimize

    inputs, outputs = pinned_leaves(program, request)
    mesh = named_mesh(request)
    # Results on an Explicit mesh whose axes a plan divides are renamed at every call: not for the
    # little that a first call has time to find there.
    alone = not settings.front and mesh is not None and bool(mesh.explicit_axes)
    shapes = contract_of(mesh).meshes(settings.first_axes) if alone else ()
    asked = partial(
        optimize,
        program,
        machine_of(request),
        tuple(dict.fromkeys(objectives)),
        limits=request.limits,
        rules=request.rules,
        state=request.state,
        numerics=request.numerics,
        mesh=mesh_shape(mesh),
        pins=request.pins,
        in_shardings=inputs,
        out_shardings=outputs,
        settings=settings,
        on_progress=request.on_progress,
        like=like,
    )
    if len(shapes) < 2:
        return asked()
    try:
        front = asked(mesh_shapes=shapes[:1])
    except ExtractError:  # nothing fits on it undivided
        return asked()
    return replace(front, notes=(*front.notes, note("named-mesh", mesh=str(shapes[0]))))


def best_plan(front: Front, request: Request) -> Plan:
    """The plan of a front that a request wants."""
    return front.best(request.minimize, request.limits)


def compile_best(front: Front, request: Request) -> CompiledPlan:
    """That plan on the request's devices."""
    moves = any(each.kind == "moved" for each in front.notes)
    if moves:
        request = _moving(request)
    limit = front.limits(request.limits).get("peak_bytes")
    plans = front.ranked(request.minimize, request.limits)
    run = compile_within(plans, place(request), limit, request.compiler_options)
    # Where the user has asked for it, or was told already.
    run.moves.told = moves or request.arguments == "free"
    return run


def machine_of(request: Request) -> Target:
    """The target that a request plans for, with the memory that its devices say they have.

    Raises TargetError where no file describes it.
    """
    if isinstance(request.target, Target):
        return request.target
    if request.target is not None:
        return load_target(request.target)
    devices = devices_of(place(request))
    shape = "x".join(map(str, network_shape(devices)))
    machine = load_target(f"{target_name(devices[0])}:{shape}")
    limit = memory_limit(devices)
    if limit is None:
        return machine
    # What is free differs by little from start to start: such plans are found again in the cache.
    return replace(machine, hbm_bytes=max(limit - limit % _GRAIN, limit // 2))


def place(request: Request) -> Any:
    """What supplies the devices: the mesh that the request names, else what was given."""
    mesh = named_mesh(request)
    return request.mesh if mesh is None else mesh


def target_name(device: Any) -> str:
    """The name of the target file for a JAX device.

    Raises TargetError when none fits.
    """
    if device.platform == "cpu":
        return "cpu"
    kind = str(device.device_kind).lower()
    for part, name in _KINDS:
        if part in kind:
            return name
    raise TargetError(
        f"no target describes devices of kind {device.device_kind!r}",
        where="mesh",
        hint="Pass target=, the name of one that ships with tapestry-egg or a file of your own.",
    )


def devices_of(mesh: Any | Sequence[Any] | None) -> list[Any]:
    """The devices that a mesh, or a list, supplies; all where it is None."""
    import jax

    if mesh is None:
        return list(jax.devices())
    given = getattr(mesh, "devices", mesh)
    return list(given.flat) if hasattr(given, "flat") else list(given)


# Footprints: what a compiled plan needs of a device's memory, and which plan fits in the end.
#
# Peaks follow a model of the compiler, and the compiled module may need more. Where a plan's peak
# comes near the limit, the module is asked before it runs.


# So many plans are compiled at most.
_TRIES = 4


def needed_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Bytes of one device that an executable needs; None where JAX does not say."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return int(
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


def compile_within(
    plans: Sequence[Plan],
    mesh: Any,
    limit: float | None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> CompiledPlan:
    """The first of the plans, best first, whose compiled module needs no more bytes than the limit.
    XLA is given the `options` besides those of the plan.

    Plans far below the limit are not asked. A plan that needs more is left for the next one that,
    if it exceeded its peak as much, would fit; after a few tries the one that needs the least is
    taken. Either way a warning says so, once.
    """

    def made_of(plan: Plan) -> CompiledPlan:
        made = compile(plan, mesh)
        return replace(made, more_options=options) if options else made

    best = made_of(plans[0])
    if limit is None or plans[0].costs.peak_bytes <= DANGER * limit:
        return best
    tried: list[tuple[int, CompiledPlan]] = []
    left = list(plans)
    while left and len(tried) < _TRIES:
        plan = left.pop(0)
        made = made_of(plan) if tried else best
        needed = needed_bytes(made.compile())
        if needed is None:
            return made
        tried.append((needed, made))
        if needed <= limit:
            break
        # What exceeds its peak by as much as this one did does not fit either.
        ratio = needed / max(plan.costs.peak_bytes, 1)
        fitting = [p for p in left if p.costs.peak_bytes * ratio <= limit]
        smaller = [p for p in left if p.costs.peak_bytes < plan.costs.peak_bytes]
        left = fitting or sorted(smaller, key=lambda p: p.costs.peak_bytes)[:1]
    needed, chosen = next(((n, c) for n, c in tried if n <= limit), min(tried, key=lambda t: t[0]))
    if len(tried) > 1 or needed > limit:
        warnings.warn(_told(tried[0], (needed, chosen), limit, len(tried)), stacklevel=4)
    return chosen


def _told(
    first: tuple[int, CompiledPlan], chosen: tuple[int, CompiledPlan], limit: float, tries: int
) -> str:
    def amount(n: float) -> str:
        return BYTES.format(n)

    plan = first[1].plan
    words = (
        f"plan {plan.name} of {plan.graph.name} was to need {amount(plan.costs.peak_bytes)} per "
        f"device, compiled it needs {amount(first[0])}, above the limit of {amount(limit)}: "
    )
    if chosen[0] <= limit:
        return words + f"plan {chosen[1].plan.name} runs, which needs {amount(chosen[0])}"
    return words + (
        f"of {tries} plans compiled none fits, and plan {chosen[1].plan.name} runs, which needs "
        f"the least, {amount(chosen[0])}"
    )


# A front, planned once: taken from the cache where it is kept, by one process for all.


def plan_once(
    program: Program,
    target: Target,
    asked: Mapping[str, Any],
    plan: Callable[[], Front],
    *,
    devices: Sequence[Any] = (),
    cache: bool | str | Path | None = None,
) -> Front:
    """The front of a program that `plan` gives, or gave before to the same question.

    `asked` is everything else that decides it. What the cache holds is not planned again. Where
    `devices` belong to several processes, all of them must call this; the first of them plans, and
    all return its front, certified by each as one from a file is. Raises what `plan` raises, on
    every process, and PeerError where the processes do not ask for the same.
    """
    from tapestry_egg.runtime.processes.distributed import peers_of

    kept = chosen_cache(cache)
    peers = peers_of(devices) if devices else None
    if peers is None:
        return _found_or_planned(program, target, asked, plan, kept)

    from tapestry_egg.files.admission import admit_front
    from tapestry_egg.files.plan_message import packed, unpacked
    from tapestry_egg.runtime.processes.rendezvous import environment

    def made() -> bytes:
        return packed(_found_or_planned(program, target, asked, plan, kept), program)

    doing = f"plan {program.name}"
    with peers.together():
        statement = {**environment(devices), **_statement(program, target, asked)}
        peers.agree(doing, statement)
        found = unpacked(peers.handed(doing, made), program)  # the first, too: all have the same
    admit_front(found, f"{doing}: $", asked.get("rules", ()))
    return found


def _found_or_planned(
    program: Program,
    target: Target,
    asked: Mapping[str, Any],
    plan: Callable[[], Front],
    cache: PlanCache | None,
) -> Front:
    """The front from the cache, else planned now and kept there."""
    if cache is None:
        return plan()
    for known in ({**asked, "like": None}, asked):  # what was planned in full comes first
        key = plan_key(program, target, known)
        found = cache.get(key, program, asked.get("rules", ()))
        if found is not None:
            return found
        if not asked.get("like"):
            break
    front = plan()
    if INTERRUPTED not in front.notes:
        cache.put(key, front, program)
    return front


def _statement(program: Program, target: Target, asked: Mapping[str, Any]) -> dict[str, str]:
    """What this process is about to plan, in words that differ where plans could."""
    from tapestry_egg.files.fingerprint import options_form, program_parts

    graph = program.graph
    parts = program_parts(program)
    types = ", ".join(str(t) for t in program.input_types)
    said = {
        "arguments": f"{_short(types)} ({parts['arguments'][:12]})",
        "results": parts["results"][:12],
        "operations": f"{len(graph.operations)} ({parts['operations'][:12]})",
        "constants": f"{len(graph.constants)} ({parts['constants'][:12]})",
        # How much memory is free differs a little between devices; the first process's counts.
        "target": f"{target.spec} ({_digest(options_form(replace(target, hbm_bytes=0)))})",
    }
    for name, form in plain_options(asked).items():
        text = json.dumps(form, sort_keys=True)
        said[name] = text if len(text) <= 200 else f"{_short(text)} ({_digest(form)})"
    return said


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _digest(form: Any) -> str:
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:12]


# Places: the mesh that a request of `te.jit` is about, and the layouts that it pins.
#
# The mesh is the one given, else that of the shardings given, else the one on which arguments were
# put, else that of constraints inside, else the one that is set (`jax.set_mesh`), as under
# `jax.jit`. All are contracts; a list of devices, or nothing, is none.


def named_mesh(request: Request) -> Any:
    """The JAX mesh whose axes a request speaks of; None where it leaves the mesh to the plan."""
    import jax

    if isinstance(request.mesh, jax.sharding.Mesh):
        return request.mesh
    own = None if request.mesh is None else set(_flat(request.mesh))
    said = (*request.in_shardings, *request.out_shardings, *_committed(request), *request.inside)
    for sharding in said:
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh) and (own is None or set(mesh.devices.flat) == own):
            return mesh
    found = active_mesh()
    if found is not None and (own is None or set(found.devices.flat) == own):
        return found
    return None


def pinned_leaves(program: Program, request: Request) -> tuple[Leaves, Leaves]:
    """The layouts that the shardings of a request pin, of inputs and of outputs.

    Where an argument lies counts where nothing else is said of it. Warns of places that the axes of
    the request's mesh cannot express.
    """
    mesh = named_mesh(request)
    graph = program.graph
    inputs = _dims(request.in_shardings, program, mesh, len(graph.inputs), output=False)
    outputs = _dims(request.out_shardings, program, mesh, len(graph.outputs), output=True)
    lost = []
    for i, sharding in enumerate(_committed(request)):
        name = graph.input_names[i] if graph.input_names else f"[{i}]"
        if sharding is None or inputs[i] is not None or mesh is None:
            continue
        if any(is_below(path, name) for path in request.pins):
            continue
        inputs[i] = _on(mesh, sharding, graph.values[graph.inputs[i]].rank)
        if inputs[i] is None:
            lost.append(name)
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        warnings.warn(
            f"{', '.join(lost[:3])}{more} lie on another mesh in a way that {contract_of(mesh)} "
            f"cannot express: they are moved at every call",
            stacklevel=2,
        )
    return Leaves(tuple(inputs)), Leaves(tuple(outputs))


def mesh_shape(mesh: Any) -> MeshShape | None:
    """The axes of a JAX mesh, as plain data."""
    if mesh is None:
        return None
    contract = contract_of(mesh)
    return MeshShape(contract.names, contract.sizes)


def _committed(request: Request) -> tuple[Any, ...]:
    """Where arguments lie on several devices; nothing where they are free."""
    if request.arguments == "free":
        return ()
    return tuple(
        s if s is not None and getattr(s.mesh, "size", 1) > 1 else None for s in request.committed
    )


def _dims(
    shardings: Sequence[Any], program: Program, mesh: Any, count: int, output: bool
) -> list[Any]:
    from tapestry_egg.extract.pins.shardings import sharding_pins

    found: list[Dims | None] = [None] * count
    leaves = [(i, said(s)) for i, s in enumerate(shardings)]
    for pin in sharding_pins(program, leaves, output):
        sharding = shardings[pin.position]
        own = getattr(sharding, "mesh", None)
        if own is not None and mesh is not None and contract_of(own) != contract_of(mesh):
            expressed = _on(mesh, sharding, len(pin.shape))
            if expressed is None:
                from tapestry_egg.errors import ExtractError

                raise ExtractError(
                    f"{sharding} is about another mesh than {contract_of(mesh)}",
                    where=pin.where,
                    hint="Give shardings of one mesh.",
                )
            found[pin.position] = expressed
        else:
            found[pin.position] = tuple(d or () for d in pin.dims)
    return found


def _on(mesh: Any, sharding: Any, rank: int) -> Dims | None:
    """A place in the axes of a mesh; None where they cannot express it, or where the devices of the
    two meshes are others or in another order."""
    contract, own = contract_of(mesh), contract_of(sharding.mesh)
    dims = tuple(d or () for d in spec_dims(sharding.spec, rank))
    if own == contract and _same_devices(mesh, sharding.mesh):
        return dims
    shape = MeshShape(own.names, own.sizes)
    if not _same_devices(mesh, sharding.mesh) or contract.blocks(shape) is None:
        return None
    axes = [MeshContract(shape.names, shape.sizes).resolve(d, shape) for d in dims]
    if any(a is None for a in axes):
        return None
    return contract.express(Layout(tuple(a or () for a in axes)), shape)


def _same_devices(one: Any, other: Any) -> bool:
    """Whether two meshes have their devices in one order; an abstract mesh has any."""
    from jax.sharding import Mesh

    if not (isinstance(one, Mesh) and isinstance(other, Mesh)):
        return True
    return list(one.devices.flat) == list(other.devices.flat)


def _flat(mesh: Any) -> list[Any]:
    given = getattr(mesh, "devices", mesh)
    return list(given.flat) if hasattr(given, "flat") else list(given)
