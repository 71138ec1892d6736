"""Compile a plan: one jitted `shard_map` that is called like the user's own function."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from tapestry_egg.collector import rarely_collected
from tapestry_egg.errors import PlanError, TargetError
from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, TensorType, given_up
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.devices import in_network_order
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.compiler_options import (
    BARRIERS_ON_CPUS,
    GPUS,
    OWN_REDUCTIONS_ON_CPUS,
    passed_options,
)
from tapestry_egg.plans.plan import AUDITED, Plan
from tapestry_egg.plans.specs import partition_spec, spec_of
from tapestry_egg.runtime.ledger.check import check, check_boundary
from tapestry_egg.runtime.ledger.equations import jaxprs
from tapestry_egg.runtime.lower.host_calls import Caller, calls
from tapestry_egg.tracing.arguments import check_devices, check_graph, check_plan
from tapestry_egg.tracing.constraints import active_mesh, contract_of
from tapestry_egg.tracing.settings import plain_settings

from .emitted import audit, compute_constants, mapped, platform_of

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding

    from tapestry_egg.tracing.trace import Program


# Dispatch: calls like one that was seen before go to its executable without Python, as JAX's own.
#
# What `jax.jit` has before its Python code is taken here for plans: JAX looks a call up by
# structure, types, layouts and static arguments, under all settings that a trace depends on. What
# it has not seen, and what no executable takes as it is, is asked for in Python.


#: The result of a call, what JAX needs to make calls like it (None: they come to Python, too), and
#: whether the next one is to be asked about again.
Answer = tuple[Any, Any, bool]


def dispatcher(
    name: str,
    ask: Callable[..., Answer],
    disabled: Callable[..., Any],
    static_argnums: Iterable[int] = (),
    static_argnames: Iterable[str] = (),
) -> Callable[..., Any]:
    """A function that calls what `ask` answered to the first call of a kind.

    Static arguments are told apart by type and value, and are no arguments of what is called.
    `disabled` is called instead where `jit` is disabled.
    """
    make = _maker()
    if make is None:
        return lambda *args, **kwargs: ask(*args, **kwargs)[0]
    function: Callable[..., Any]
    function = make(name, disabled, ask, list(static_argnums), list(static_argnames))
    return function


class Callee:
    """An executable as `dispatcher` calls it."""

    def __init__(self, executable: jax.stages.Compiled) -> None:
        self._executable = executable
        self._answers: Any = None
        if _maker() is not None:
            inside: Any = executable
            # None where every call has something to do in Python: callbacks, tokens.
            made = inside._executable.create_cpp_call(inside._params)
            self._answers = getattr(made, "_cache_miss", None)

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Run it, once, on arguments that it takes as they are.

        Raises FloatingPointError where JAX looks for NaNs or infinities (`jax_debug_nans`) and
        finds one in the results.
        """
        try:
            if self._answers is None:
                return self._executable(*args, **kwargs), None, False
            answer: Answer = self._answers(*args, **kwargs)
            return answer
        except Exception as e:
            if type(e).__name__ != "InternalFloatingPointError":
                raise
            name, found = e.args  # which JAX's own functions translate, too
            raise FloatingPointError(f"invalid value ({found}) in a result of {name}") from None


def count_miss() -> None:
    """Count a call that came to Python where JAX counts those of its own functions."""
    _counter()("jit_cpp_cache_miss")


@cache
def _counter() -> Callable[[str], object]:
    import jax

    inside: Any = jax._src.util  # type: ignore[attr-defined]
    counter: Callable[[str], object] = getattr(inside, "test_event", lambda name: None)
    return counter


@cache
def _maker() -> Callable[..., Any] | None:
    """JAX's constructor of such functions; None where this version of JAX has none like it."""
    import jax

    try:
        inside: Any = jax._src  # type: ignore[attr-defined]
        pxla, pjit = inside.interpreters.pxla, inside.lib._jax.pjit
        keys, registry = pxla.JitGlobalCppCacheKeys, inside.tree_util.dispatch_registry
        place = pxla.cc_shard_arg

        def make(name: str, disabled: Any, ask: Any, numbers: list[int], names: list[str]) -> Any:
            made = pjit(name, disabled, ask, numbers, names, keys(), registry, place)
            made._fun = disabled  # what JAX calls to say where a NaN that it found comes from
            return made

        probe = make("probe", lambda: 1, lambda: (2, None, False), [], [])
        return make if probe() == 2 and hasattr(probe, "_cache_miss") else None
    except (AttributeError, TypeError):
        return None


# The arguments of a compiled plan: of its types, in its layouts, given up where donated.


def checked(x: Any, type_: TensorType, name: str) -> Any:
    """An argument of the type that the plan was made for.

    Raises PlanError for another shape or dtype.
    """
    import jax
    import numpy as np

    from tapestry_egg.graph.arrays import decode_dtype, dtype_name

    if not hasattr(x, "dtype"):
        x = np.asarray(x, None if isinstance(x, list) else decode_dtype(type_.dtype))
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    given = TensorType(tuple(x.shape), dtype_name(dtype))
    if (given.shape, given.dtype) != (type_.shape, type_.dtype):
        raise PlanError(
            f"is {given}, the plan was made for {type_}",
            where=name,
            hint="Trace and optimize again for other shapes.",
        )
    return x


def unique(arrays: Sequence[Any], given_up: Sequence[bool], names: Sequence[str]) -> None:
    """Raises PlanError, with nothing moved yet, where an array that is given up to a call is
    another argument of it, too. Arrays of NumPy's are copied, and may be."""
    import jax

    first: dict[int, int] = {}
    for k, x in enumerate(arrays if any(given_up) else ()):
        j = first.setdefault(id(x), k) if isinstance(x, jax.Array) else k
        if j < k and (given_up[j] or given_up[k]):
            raise PlanError(
                f"is donated and the same array as {names[k if given_up[j] else j]}: the same "
                "buffer is not donated twice, nor read beside",
                where=names[j if given_up[j] else k],
                hint="Donate an array once, and give a copy (x.copy()) in the other place.",
            )


@dataclass(slots=True)
class Moves:
    """Arguments that lie on a mesh and are moved: one that is moved a second time is told of, once
    for all. Once is no matter: a checkpoint is restored as it was saved."""

    told: bool = False
    _before: set[int] = field(default_factory=set)

    def count(self, given: Sequence[Any], placed: Sequence[Any], names: Sequence[str]) -> None:
        """Warns of arrays that are moved again."""
        if self.told:
            return
        now = {k for k, (x, y) in enumerate(zip(given, placed, strict=True)) if _moved(x, y)}
        again = sorted(now & self._before)
        self._before |= now
        if again:
            self.told = True
            more = f" and {len(again) - 3} more" if len(again) > 3 else ""
            warnings.warn(
                f"{', '.join(names[k] for k in again[:3])}{more} lie on a mesh in other layouts "
                f"than the plan's and are moved at every call. Put them where the plan has them "
                f"(input_shardings of compiled(...)); or call clear_cache(), and the next call "
                f"plans for where they lie, unless in_shardings or pins say otherwise.",
                stacklevel=6,
            )


def _moved(given: Any, placed: Any) -> bool:
    """Whether an array that the user put on several devices has been copied to others."""
    import jax

    if given is placed or not isinstance(given, jax.Array) or not given.committed:
        return False
    lies = given.sharding
    return len(lies.device_set) > 1 and not lies.is_equivalent_to(placed.sharding, given.ndim)


def taken_as_it_is(x: Any, sharding: jax.sharding.Sharding) -> bool:
    """Whether JAX puts an argument in place itself: numbers and arrays of NumPy's, and arrays that
    lie so already or that nobody has put anywhere."""
    import jax
    import numpy as np

    if isinstance(x, jax.Array):
        return not x.committed or x.sharding.is_equivalent_to(sharding, x.ndim)
    return type(x) in (bool, int, float, complex) or isinstance(x, np.ndarray | np.generic)


def placed_as(x: Any, sharding: jax.sharding.Sharding, donated: bool) -> Any:
    """The same array if it lies so, else a copy that does; a donated one is given up for it."""
    import jax
    import numpy as np

    if isinstance(x, jax.Array):
        lies = x.sharding
        # On axes of type Explicit an array has its layout in its type.
        typed = bool(getattr(getattr(lies, "mesh", None), "explicit_axes", ()))
        if lies == sharding or (not typed and lies.is_equivalent_to(sharding, x.ndim)):
            return x
        if sharding.is_fully_addressable and _cut_on_host(x, sharding):
            placed = jax.device_put(np.asarray(x), sharding)
        elif sharding.is_fully_addressable or not x.is_fully_addressable:
            placed = jax.device_put(x, sharding, donate=donated)
            same = lies.is_equivalent_to(sharding, x.ndim)
            if same or lies.device_set != sharding.device_set:
                return placed  # some of their blocks are the very same
        else:
            placed = spread(x, sharding)
        if donated and not x.is_deleted():
            x.delete()
        return placed
    return jax.device_put(x, sharding) if sharding.is_fully_addressable else spread(x, sharding)


def spread(x: Any, sharding: Any) -> jax.Array:
    """What every process holds for itself, the same on each, as one array over all of them.

    Every process gives its own blocks, and nothing is sent.
    """
    import jax
    import numpy as np

    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = spread(jax.random.key_data(x), sharding)  # the last dim is not cut
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])


def _cut_on_host(x: jax.Array, sharding: jax.sharding.Sharding) -> bool:
    """Whether an array is better cut by NumPy: one that lies whole on a CPU device.

    JAX would compile a program that slices it for every shape, which takes longer than many a
    program that it is for.
    """
    import jax

    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or sharding.is_fully_replicated:
        return False
    devices = x.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def donated_arguments(
    tree: Any, donated: Sequence[bool]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The numbers and names of the donated arguments, from the structure of (args, kwargs).

    Raises PlanError for an argument that is donated in part: JAX has no way to say it.
    """
    positional, named = tree.children()
    keys = named.node_data()[1] if named.node_data() else ()
    rest = list(donated)
    found: list[int | str] = []
    for at, child in [*enumerate(positional.children()), *zip(keys, named.children(), strict=True)]:
        flags, rest = rest[: child.num_leaves], rest[child.num_leaves :]
        if any(flags) and not all(flags):
            raise PlanError(
                f"{sum(flags)} of the {len(flags)} arrays in it are donated",
                where=f"argument {at!r}",
                hint="Donate the whole argument or none of it.",
            )
        if any(flags):
            found.append(at)
    return tuple(i for i in found if isinstance(i, int)), tuple(
        k for k in found if isinstance(k, str)
    )


def compile(
    plan: Plan,
    mesh: Mesh | Sequence[jax.Device] | None = None,
    program: Program | BlockGraph | None = None,
) -> CompiledPlan:
    """The function of a plan, on the devices of `mesh`.

    `mesh` supplies the devices (default: the mesh that is set by `jax.set_mesh`, else
    `jax.devices()`): those of a list take their places by where they are in the machine, those of a
    JAX mesh lie on the plan's mesh row-major as on that one, so plans of several shapes run on one
    mesh, of whichever axis types. A mesh is of as many devices as the plan's. Where the plan's axes
    are those of the mesh or divide them, what the plan returns is on that very mesh, under its
    names. A mesh of `jax.experimental.topologies`
    compiles without the hardware.

    The result takes and returns the pytrees of the traced function, or flat arguments and a tuple
    where the plan's graph was not traced. Arguments may be on the host or on devices in any layout.
    A plan from a file does not know static arguments, nor the modules of `nnx.jit` and
    `eqx.filter_jit`: `program` is the function traced again (`te.trace`), whose arguments it takes.
    Raises TargetError for too few devices, or a mesh of another size, PlanError where the plan does
    not fit its graph.
    """
    check_plan(plan, "compile")
    check_devices(mesh)
    if program is not None:
        plan = replace(plan, program=_called_as(plan, program))
    if mesh is None:
        mesh = active_mesh()
    for what, layouts, values in (
        ("input", plan.in_shardings, plan.graph.inputs),
        ("output", plan.out_shardings, plan.graph.outputs),
    ):
        for i, (layout, v) in enumerate(zip(layouts, values, strict=True)):
            type_ = plan.graph.values[v]
            if layout.partial or not layout.divides(type_.shape, plan.mesh):
                raise PlanError(
                    f"{what} {i}, {type_}, cannot cross the program's boundary as "
                    f"{layout.show(plan.mesh)}",
                    where=plan.name,
                    hint="At the boundary nothing is partial, and blocks are equal.",
                )
    size = getattr(mesh, "size", None) if hasattr(mesh, "axis_names") else None
    if size not in (None, plan.mesh.devices):
        raise TargetError(
            f"the plan is for {plan.mesh.devices} devices ({plan.mesh}), the mesh has {size}",
            where="mesh",
            hint="Plan for this mesh (te.optimize(..., mesh=mesh)), or give devices: "
            f"mesh.devices.flat[:{plan.mesh.devices}].",
        )
    own = boundary_mesh(plan, mesh)
    if own is not None and plan.mesh.size.items() <= dict(own.shape).items():
        return CompiledPlan(plan, own, own)  # the plan's axes are the mesh's, no finer
    return CompiledPlan(plan, jax_mesh(plan.mesh, mesh, plan.target), own)


def _called_as(plan: Plan, program: Program | BlockGraph) -> Program:
    from tapestry_egg.tracing.trace import Program

    check_graph(program, "compile")
    traced = program if isinstance(program, Program) else Program.of(program)
    return (plan.program or Program.of(plan.graph)).called_as(traced)


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """A plan on a mesh of devices: call it, or `trace()`, `lower()` and `compile()` it as in JAX.

    `in_shardings` and `out_shardings` are flat, in the order of the graph's inputs and outputs, on
    the mesh `boundary` of the user's where it expresses them, else on the plan's own;
    `input_shardings` and `output_shardings` are the same in the pytrees of the user's function.
    """

    plan: Plan
    mesh: Mesh
    boundary: Mesh | None = None
    #: Options of XLA's besides those that the plan counts on.
    more_options: Mapping[str, int | bool | str] | None = None
    # Executables by the structure of their arguments: one, unless the program came from a file,
    # where nodes of any class of the user's may stand for those that were traced.
    _executables: dict[Any, jax.stages.Compiled] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # Their jaxprs, by structure and whether the options of the plan are given.
    _traces: dict[Any, jax.stages.Traced] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # Digests of the modules that they were compiled from, where several processes compare them.
    _modules: dict[Any, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Whether the executable for a structure takes flat arrays.
    _flat: dict[Any, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Those that have run: where the mesh is of several processes, they have met over it.
    _running: dict[Any, Callee] = field(default_factory=dict, init=False, repr=False, compare=False)

    # What is moved at every call is told of.
    moves: Moves = field(default_factory=Moves, init=False, repr=False, compare=False)

    @cached_property
    def program(self) -> Program:
        """What knows the pytrees of the user's function."""
        from tapestry_egg.tracing.trace import Program

        return self.plan.program or Program.of(self.plan.graph)

    @cached_property
    def in_shardings(self) -> tuple[NamedSharding, ...]:
        return tuple(self._sharding(layout) for layout in self.plan.in_shardings)

    @cached_property
    def out_shardings(self) -> tuple[NamedSharding, ...]:
        made = [self._sharding(layout) for layout in self.plan.out_shardings]
        return tuple(map(self._as_typed, made, range(len(made))))

    @property
    def input_shardings(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The shardings of the arguments, static ones left out: (positional, by keyword).

        For `jax.jit(init, out_shardings=...)`, `jax.device_put` and the restoring of checkpoints.
        """
        shardings: tuple[tuple[Any, ...], dict[str, Any]]
        shardings = self.program.arguments(self.in_shardings)
        return shardings

    @property
    def output_shardings(self) -> Any:
        """The shardings of the result."""
        return self.program.results(self.out_shardings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan. Raises TraceError for another structure of arguments than was traced,
        PlanError for an array of another shape or dtype."""
        return self.program.called(self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.program.dynamic(args, kwargs)
        return self._call(*args, **kwargs)

    @cached_property
    def _call(self) -> Callable[..., Any]:
        """Calls without the static arguments; those like one before do not come to `ask`."""
        known = weakref.ref(self)  # no circle: executables go with their plan

        def asked(*args: Any, **kwargs: Any) -> Answer:
            return known().ask(args, kwargs)  # type: ignore[union-attr]  # it is being called

        return dispatcher(self.plan.name, asked, lambda *args, **kwargs: asked(*args, **kwargs)[0])

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Run the plan on its arguments without the static ones, and say how calls like this go.

        Only what the executable does not take as it is is moved. It is called once: what it raises
        is raised, since what has effects, or was given its arguments, cannot run again.
        """
        import jax

        tree = jax.tree.structure((args, kwargs))
        leaves = self.program.leaves(args, kwargs)
        graph = self.plan.graph
        types = [graph.values[v] for v in graph.inputs]
        names = graph.input_names or [f"argument {i}" for i in range(len(leaves))]
        arrays = [checked(x, t, n) for x, t, n in zip(leaves, types, names, strict=True)]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):  # inside the user's own jit
            return self.program.unflatten(self._mapped(*arrays), tree), None, False
        unique(leaves, self._taken, names)
        callee, first = self._running.get(tree), False
        if callee is None:
            callee, first = Callee(self._start(tree, arrays)), True
            self._running[tree] = callee
        placed, as_they_are = [], not self._spread
        with jax.set_mesh(self.mesh):  # another mesh may be active
            entering = zip(leaves, arrays, self._entering, self._taken, strict=True)
            for x, array, sharding, given_up in entering:
                as_it_is = not self._spread and taken_as_it_is(x, sharding)
                as_they_are = as_they_are and as_it_is
                if first and isinstance(x, jax.Array) and not x.committed:
                    as_it_is = False  # to cut it, JAX would compile a program
                placed.append(x if as_it_is else placed_as(array, sharding, given_up))
        self.moves.count(leaves, placed, names)
        moved = any(a is not b for a, b in zip(placed, leaves, strict=True))
        if self._is_flat(tree):
            outputs, _, _ = callee.ask(tuple(placed), {})
            return self.program.unflatten(self._named(outputs), tree), None, False
        if moved:
            args, kwargs = jax.tree.unflatten(tree, placed)
        result, fast, _ = callee.ask(args, kwargs)
        if self._leaving is not self.out_shardings:
            leaves, back = jax.tree.flatten(result)
            return jax.tree.unflatten(back, self._named(leaves)), None, False
        again = moved and not as_they_are
        return result, None if again else fast, first and again

    def _named(self, outputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The outputs on the user's mesh, where the executable itself cannot give them so: the same
        pieces under other names."""
        import jax

        if self._leaving is self.out_shardings:
            return outputs
        placed: list[jax.Array] = jax.device_put(list(outputs), list(self.out_shardings))
        return placed

    def _is_flat(self, tree: Any) -> bool:
        """Whether the executable takes and gives flat arrays, as the user's classes refuse what
        stands for arrays where it is made: types of arguments, shardings of results."""
        import jax

        if tree not in self._flat:
            leaving = self._leaving
            try:
                made = (
                    *((tree.unflatten(said), said) for said in (self._types, self._entering)),
                    (self.program.unflatten(leaving, tree), leaving),
                )
                # A class may also take what is said of an array and hold something else.
                self._flat[tree] = any(
                    any(a is not b for a, b in zip(jax.tree.leaves(whole), said, strict=True))
                    for whole, said in made
                )
            except Exception:  # whatever a constructor raises
                self._flat[tree] = True
        return self._flat[tree]

    @cached_property
    def _types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of the arguments, with how they enter."""
        import jax

        types = [self.plan.graph.values[v] for v in self.plan.graph.inputs]
        return tuple(
            jax.ShapeDtypeStruct(
                t.shape, decode_dtype(t.dtype), sharding=sharding, weak_type=t.weak
            )
            for t, sharding in zip(types, self._entering, strict=True)
        )

    def trace(self) -> jax.stages.Traced:
        """The plan as a jaxpr, in the signature of the user's function without static arguments."""
        return self._trace(self._tree)

    def lower(self) -> jax.stages.Lowered:
        """The plan as StableHLO, with nothing run."""
        return self.trace().lower()

    def compile(self) -> jax.stages.Compiled:
        """The executable, for `hlo_stats`, `compare`, JAX's own analyses, and calls with arguments
        that lie as planned."""
        return self._build(self._tree)

    @rarely_collected()
    def _build(self, tree: Any) -> jax.stages.Compiled:
        """The executable for a structure of arguments."""
        if tree not in self._executables:
            lowered = self._trace(tree).lower()
            if self._spread:
                from tapestry_egg.runtime.processes.rendezvous import module_digest

                self._modules[tree] = module_digest(lowered)
            self._executables[tree] = self._with_options(lowered, tree)
        return self._executables[tree]

    def _with_options(self, lowered: jax.stages.Lowered, tree: Any) -> jax.stages.Compiled:
        """The executable by the options of the plan; without them where the compiler has not got
        them (any more), which is told."""
        import jax

        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as e:
            unknown = "No such compile option" in str(e)
            if not unknown or any(o in str(e) for o in self.more_options or ()):
                raise
            warnings.warn(
                f"{self.plan.name}: the compiler does not know an option that the plan counts on, "
                f"and compiles without: {e}",
                stacklevel=2,
            )
        return self._trace(tree, with_options=False).lower().compile()

    def _start(self, tree: Any, arrays: Sequence[Any]) -> jax.stages.Compiled:
        """The executable before its first run."""
        if not self._spread:
            return self._build(tree)
        from tapestry_egg.runtime.processes.rendezvous import meet

        def build() -> tuple[jax.stages.Compiled, str]:
            return self._build(tree), self._modules[tree]

        return meet(self.plan, self.mesh, arrays, build)

    @cached_property
    def _taken(self) -> tuple[bool, ...]:
        """Which arguments are given up where they are moved."""
        return given_up(self.plan.graph)

    @cached_property
    def _spread(self) -> bool:
        """Whether other processes own some of the devices."""
        import jax

        me = jax.process_index()
        return any(d.process_index != me for d in self.mesh.devices.flat)

    @cached_property
    def _tree(self) -> Any:
        """The structure of (args, kwargs) as traced; stand-ins for classes that a file named."""
        import jax

        if self.program.in_treedef is not None:
            return self.program.in_treedef
        return jax.tree.structure(self.program.arguments(range(len(self.in_shardings))))

    def _options(self, with_options: bool) -> dict[str, Any] | None:
        """What XLA is told; what every version has been told, without the others."""
        if not with_options:
            return dict(BARRIERS_ON_CPUS) if self._platform == "cpu" else None
        return {**passed_options(self.plan, self._platform), **(self.more_options or {})} or None

    def _trace(self, tree: Any, with_options: bool = True) -> jax.stages.Traced:
        key = tree, with_options
        if key not in self._traces:
            self._traces[key] = self._traced(tree, with_options)
        return self._traces[key]

    def _traced(self, tree: Any, with_options: bool) -> jax.stages.Traced:
        import jax

        graph = self.plan.graph
        args: tuple[Any, ...] = self._types
        kwargs: dict[str, Any] = {}
        numbers: tuple[int, ...] = tuple(i for i, d in enumerate(graph.donated) if d)
        keywords: tuple[str, ...] = ()
        leaving: Any = self._leaving
        flat = self._is_flat(tree)
        if not flat:
            args, kwargs = tree.unflatten(self._types)
            numbers, keywords = donated_arguments(tree, graph.donated)
            leaving = self.program.unflatten(self._leaving, tree)

        def step(*args: Any, **kwargs: Any) -> Any:
            outputs = self._mapped(*jax.tree.leaves((args, kwargs)))
            return outputs if flat else self.program.unflatten(outputs, tree)

        step.__name__ = step.__qualname__ = re.sub(r"\W", "_", graph.name) or "step"
        compute_constants(graph)  # on a device that is there: the mesh may only be described

        def trace(options: dict[str, Any] | None) -> jax.stages.Traced:
            jitted = jax.jit(
                step,
                out_shardings=leaving,
                donate_argnums=numbers or None,
                donate_argnames=keywords or None,
                keep_unused=True,  # they are resident anyway, and arguments keep their numbers
                compiler_options=options,
            )
            with plain_settings(graph), jax.set_mesh(self.mesh):
                return jitted.trace(*args, **kwargs)

        options = self._options(with_options)
        traced = trace(options)
        if with_options and self._platform == "cpu" and _reduces_beside_one(traced.jaxpr):
            traced = trace({**OWN_REDUCTIONS_ON_CPUS, **(options or {})})
        self._audit(traced)
        return traced

    def _audit(self, traced: jax.stages.Traced) -> None:
        """Check the plan by what is to be compiled; for devices of another kind than those that it
        promises for, by what would be, and of this what crosses the boundary."""
        import jax

        if self.plan.origin is None:
            return
        donated: list[bool] | None
        donated = [x.donated for x in jax.tree.leaves(traced.args_info)]
        if getattr(jax.config, "jax_debug_nans", False):
            donated = None  # JAX donates nothing then, to run what fails again
        known = platform_of(self.plan)
        if known == self._platform or {known, self._platform} <= set(GPUS):
            if self.plan not in AUDITED:
                check(self.plan, traced.jaxpr, donated)
                AUDITED.add(self.plan)
        else:
            audit(self.plan)
        check_boundary(self.plan, traced.jaxpr, donated)

    @cached_property
    def _mapped(self) -> Any:
        """The plan as one `shard_map` of flat arguments and results."""
        return mapped(self.plan, self.mesh, self._platform, caller_of(self.mesh))

    @property
    def _platform(self) -> str:
        platform: str = self.mesh.devices.flat[0].platform
        return platform

    # What the executable itself takes and gives. Where the plan divides the user's axes, it may not
    # name these as well if they are Explicit, or if it calls into Python: JAX then wants one mesh.

    @cached_property
    def _entering(self) -> tuple[NamedSharding, ...]:
        return self._inside(self.plan.in_shardings, self.in_shardings)

    @cached_property
    def _leaving(self) -> tuple[NamedSharding, ...]:
        return self._inside(self.plan.out_shardings, self.out_shardings)

    def _inside(
        self, layouts: Sequence[Layout], outside: tuple[NamedSharding, ...]
    ) -> tuple[NamedSharding, ...]:
        from jax.sharding import AxisType, NamedSharding

        own = self.boundary
        if own is None or own is self.mesh:
            return outside
        if set(own.axis_types) == {AxisType.Auto} and not calls(self.plan.graph):
            return outside
        return tuple(NamedSharding(self.mesh, partition_spec(x, self.plan.mesh)) for x in layouts)

    def _as_typed(self, sharding: NamedSharding, j: int) -> NamedSharding:
        """The sharding of an output in the words of its type, where these mean the same: they may
        name axes of size 1."""
        from jax.sharding import NamedSharding

        specs, own = self.program.out_specs, self.boundary
        if not specs or specs[j] is None or own is None or not own.explicit_axes:
            return sharding
        if any(a not in own.axis_names for a in _axes(specs[j])):
            return sharding
        rank = self.plan.graph.values[self.plan.graph.outputs[j]].rank
        typed = NamedSharding(own, specs[j])
        return typed if typed.is_equivalent_to(sharding, rank) else sharding

    def _sharding(self, layout: Layout) -> NamedSharding:
        from jax.sharding import NamedSharding

        if self.boundary is None:
            return NamedSharding(self.mesh, partition_spec(layout, self.plan.mesh))
        dims = contract_of(self.boundary).express(layout, self.plan.mesh)
        assert dims is not None, "checked where the boundary was taken"
        typed = bool(self.boundary.explicit_axes)
        return NamedSharding(self.boundary, spec_of(dims, typed))


def _axes(spec: Any) -> list[str]:
    """The axes that a `PartitionSpec` without partial sums names."""
    entries = (e if isinstance(e, tuple) else (e,) for e in spec)
    return [a for names in entries for a in names if isinstance(a, str)]


# JAX's meshes for plans: which device has which place, and who acts for all of them.


def jax_mesh(
    shape: MeshShape, mesh: Mesh | Sequence[jax.Device] | None = None, target: str = ""
) -> Mesh:
    """A JAX mesh of the plan's shape over the first devices of `mesh`, row-major in its order.

    Devices that no JAX mesh has in an order come in that of the network of `target` (`v5e:4x4`); a
    plan on a part of it has the first of those.
    Raises TargetError where there are too few.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh as JaxMesh

    if mesh is None:
        devices = list(jax.devices())
    else:
        devices = list(np.asarray(getattr(mesh, "devices", mesh), dtype=object).flat)
    if len(devices) < shape.devices:
        raise TargetError(
            f"the plan needs {shape.devices} devices ({shape}), there are {len(devices)}",
            hint="To run on virtual CPU devices, set JAX_PLATFORMS=cpu and "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shape.devices} before JAX starts.",
        )
    if not isinstance(mesh, JaxMesh):
        counts = target.rpartition(":")[2].partition("@")[0].split("x")
        known = tuple(int(n) for n in counts) if all(n.isdigit() for n in counts) else ()
        # A plan on a part of the machine takes the first of all its devices.
        whole = prod(known) if known else 0
        if not shape.devices <= whole <= len(devices):
            whole, known = shape.devices, (shape.devices,)
        devices = in_network_order(devices[:whole], known)
    devices = devices[: shape.devices]
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return jax.sharding.Mesh(grid.reshape(shape.sizes), shape.names)


def boundary_mesh(plan: Plan, mesh: Any) -> Mesh | None:
    """The JAX mesh itself where its axes express every layout at the plan's boundary."""
    from jax.sharding import Mesh

    if not isinstance(mesh, Mesh) or not all(isinstance(n, str) for n in mesh.axis_names):
        return None
    contract = contract_of(mesh)
    layouts = (*plan.in_shardings, *plan.out_shardings)
    if contract.blocks(plan.mesh) is None:
        return None
    if any(contract.express(layout, plan.mesh) is None for layout in layouts):
        return None
    return mesh


def caller_of(mesh: Mesh) -> Caller:
    """Who runs what has effects: the first device of process 0; the first of each reports."""
    owners = [d.process_index for d in mesh.devices.flat]
    first = {owner: owners.index(owner) for owner in sorted(set(owners))}
    return Caller(first[min(owners)], tuple(first.values()))


def _reduces_beside_one(jaxpr: Any) -> bool:
    """Whether something with a dim of one element, which stays, is reduced, as templates say."""
    left = [getattr(jaxpr, "jaxpr", jaxpr)]
    for found in left:
        for equation in found.eqns:
            entries = registry.templates().get(equation.primitive.name, ())
            reduces = any(t.fusion == "reduce" for t in entries)
            if reduces and any(1 in v.aval.shape for v in equation.outvars):
                return True
            left += jaxprs(equation)
    return False
