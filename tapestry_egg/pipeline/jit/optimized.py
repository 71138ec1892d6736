"""A function that runs by plan: one plan for every combination of argument types."""

from __future__ import annotations

import functools
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

from tapestry_egg.collector import rarely_collected
from tapestry_egg.errors import TraceError, UnplannedError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime.compiled import Answer, count_miss, dispatcher
from tapestry_egg.tracing.call_signature import (
    Jitted,
    Signature,
    argument_shardings,
    on_meshes,
    read_signature,
    result_shardings,
)
from tapestry_egg.tracing.constraints import (
    check_layout_kept,
    check_memory_kept,
    common_mesh,
    constraints,
    contract_of,
    entered_mesh,
    with_devices,
)

from .planning import (
    Request,
    best_plan,
    compile_best,
    devices_of,
    named_mesh,
    needs_all,
    place,
    plan_program,
    whole_front,
)

if TYPE_CHECKING:
    import jax

    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.runtime.compiled import CompiledPlan
    from tapestry_egg.tracing.library_jits import LibraryJit
    from tapestry_egg.tracing.trace import Program


@dataclass(eq=False, slots=True)
class _Planned:
    """What is known for one combination of argument types."""

    program: Program
    front: Front  # for the request alone
    request: Request
    whole: Front | None = None  # with all its points
    compiled: CompiledPlan | None = None


@dataclass(frozen=True, eq=False, slots=True)
class _AsWritten:
    """Why a combination of argument types is not planned; `told` where something is lost by it."""

    why: UnplannedError
    told: bool = True


# The devices that arguments are committed to; None where none is.
_Devices = frozenset[Any] | None


# Types of which as many are known as JAX knows of one function; the oldest are forgotten first.
_MOST = 8192

# Frames from a warning of `trace_signature` up to the user's call.
_USERS_FRAME = 8

# Traced arguments by position, and by name; static ones as a part of a key.
_Split = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]


class Optimized(Jitted):
    """A function that is planned per argument types; `front(*args)` and `plan(*args)` show how.

    What else a function of `jax.jit` has, it has too: `trace`, `lower` and `eval_shape` with
    arguments or their `jax.ShapeDtypeStruct`s, `clear_cache`, `__wrapped__`; `jax.export` takes it.
    """

    def __init__(
        self, signature: Signature, request: Request, library: LibraryJit | None = None
    ) -> None:
        """`library` is the one whose function calls this one."""
        functools.update_wrapper(self, signature.fn, updated=())
        noted = getattr(signature.fn, "__dict__", {})
        vars(self).update({k: v for k, v in noted.items() if not hasattr(type(self), k)})
        self.signature = signature
        self._has_static = bool(signature.static_argnums or signature.static_argnames)
        self._request = request
        self._library = library
        # By the types as they come, and by what JAX makes of them: a number is an array of no dims,
        # and where an array lies is no part of its type. The first only saves asking.
        self._known: dict[Any, _Planned | _AsWritten] = {}
        self._planned: dict[Any, _Planned | _AsWritten] = {}
        self._planning = threading.RLock()
        self._warned = False
        self._runs_now, self._context, self._flatten = _of_jax()
        self._call = self._dispatcher()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen plan for these argument types, planning it first if it is new."""
        return self._call(*args, **kwargs)

    def _dispatcher(self) -> Callable[..., Any]:
        """Calls of types that were seen before; it knows this function but does not keep it."""
        known = weakref.ref(self)
        signature = self.signature

        def asked(*args: Any, **kwargs: Any) -> Answer:
            return known()._ask(args, kwargs)  # type: ignore[union-attr]  # it is being called

        return dispatcher(
            getattr(signature.fn, "__name__", "te.jit"),
            asked,
            signature.written,
            signature.static_argnums,
            signature.static_argnames,
        )

    def _ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Run the plan for arguments that are of new types, or do not lie as planned."""
        if not self._runs_now():  # JAX is differentiating or batching
            return self._transformed(*args, **kwargs), None, False
        found = self._lookup(args, kwargs)
        written = self.signature.written
        if isinstance(found, _AsWritten):
            if found.told:
                name = getattr(self.signature.fn, "__name__", "the function")
                self._warn(f"{name} of te.jit runs as it is written, not planned: {found.why}", 4)
            with as_set():
                answer: Answer = written._cache_miss(*args, **kwargs)
            return answer
        count_miss()
        given, named, _ = self._split(args, kwargs)
        compiled = found.compiled or self._compile(found)
        try:
            return compiled.ask(given, named)
        except FloatingPointError:  # JAX, which looks for it, says where it comes from
            if not any(found.program.graph.donated):
                written(*args, **kwargs)
            raise

    def _warn(self, words: str, stacklevel: int) -> None:
        """Say that there is no plan, once for all calls."""
        if not self._warned:
            self._warned = True
            warnings.warn(words, stacklevel=stacklevel + 1)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the instance is the first argument."""
        return self if instance is None else Bound(self, instance)

    def __repr__(self) -> str:
        return f"<te.jit of {self.signature.fn!r}>"

    def front(self, *args: Any, **kwargs: Any) -> Front:
        """The Pareto front for arguments of these types (arrays or `jax.ShapeDtypeStruct`)."""
        found = self._found(args, kwargs)
        with self._planning:
            if found.whole is None:
                known = needs_all(found.request)
                found.whole = found.front if known else whole_front(found.program, found.request)
        return found.whole

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan that a call with arguments of these types runs. Raises UnplannedError where such
        a call runs the function as it is written."""
        found = self._found(args, kwargs)
        return found.compiled.plan if found.compiled else best_plan(found.front, found.request)

    def compiled(self, *args: Any, **kwargs: Any) -> CompiledPlan:
        """The plan on its devices: its shardings, and its executable."""
        found = self._found(args, kwargs)
        return found.compiled or self._compile(found)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The plan as a jaxpr, one `shard_map`, in the function's own signature; the function's own
        where it runs as it is written."""
        found = self._lookup(args, kwargs)
        if isinstance(found, _AsWritten):
            traced: jax.stages.Traced = self.signature.written.trace(*args, **kwargs)
            return traced
        return (found.compiled or self._compile(found)).trace()

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The plan as StableHLO; its `.compile()` is called without the static arguments."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result. Plans nothing."""
        return self.signature.written.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget all plans and executables."""
        with self._planning:
            self._known.clear()
            self._planned.clear()
            self._call = self._dispatcher()
        self.signature.jitted.clear_cache()

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Split:
        """The traced arguments by position and by name, and the static ones as a key."""
        if not self._has_static:
            return args, kwargs, ()
        call = self.signature.split(args, kwargs)
        static = tuple([(at, type(value), value) for at, value in call.static])
        return call.args, call.kwargs, static

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Planned:
        """`_lookup` of what is planned. Raises UnplannedError for what is not."""
        found = self._lookup(args, kwargs)
        if isinstance(found, _AsWritten):
            raise found.why
        return found

    def _lookup(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Planned | _AsWritten:
        """What is known for these arguments, planned now if they are of new types."""
        given, named, static = self._split(args, kwargs)
        leaves, tree = self._flatten((given, named))
        rest = (tree, static, self._context())
        key = (*rest, *map(_as_it_comes, leaves))
        try:
            found = self._known.get(key)
        except TypeError:  # JAX says which static value cannot be hashed
            self.signature.jitted.trace(*args, **kwargs)
            raise
        if found is None:
            with self._planning, rarely_collected():
                types = tuple(map(_as_jax_sees_it, leaves))
                anywhere = tuple(t if isinstance(t, type) else (*t[:3], None) for t in types)
                devices = self._devices(leaves)
                found = self._planned.get((*rest, devices, types)) or self._planned.get(
                    (*rest, devices, anywhere)
                )
                if found is None:
                    found = self._plan(leaves, args, kwargs)
                    # What it returns comes back on its devices, and whatever lies nowhere with it.
                    for also in (devices, *self._devices_of(found)):
                        _keep(self._planned, (*rest, also, types), found)
                _keep(self._known, key, found)
        return found

    def _devices(self, leaves: list[Any]) -> _Devices:
        """The devices that the arguments bind a call to. Where the user has named a mesh none does:
        arguments are moved there."""
        if self._request.mesh is not None:
            return None
        found = {devices for x in leaves if (devices := _committed(x)) is not None}
        if len(found) > 1:
            return frozenset(found)  # JAX refuses it
        return next(iter(found), None)

    def _devices_of(self, found: _Planned | _AsWritten) -> tuple[_Devices, ...]:
        """Devices that arguments may be bound to for the same plan; None among them if arguments
        that are bound to none would be planned for these, too."""
        if self._request.mesh is not None or isinstance(found, _AsWritten):
            return ()
        asked = found.request
        own, unbound = (
            frozenset(devices_of(place(request)))
            for request in (asked, replace(asked, committed=()))
        )
        return (own, None) if own == unbound else (own,)

    def _plan(
        self, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Planned | _AsWritten:
        from tapestry_egg.tracing.trace import trace_signature

        signature, request = self.signature, self._request
        given, named, _ = self._split(args, kwargs)
        try:
            check_mesh_set()
            for leaf in leaves:
                check_memory_kept(getattr(leaf, "sharding", None), "an argument")
            program = trace_signature(
                signature,
                args,
                kwargs,
                library=self._library,
                warns=0 if self._planned else _USERS_FRAME,  # once
            )
            request = replace(
                request,
                state={**program.state, **(request.state or {})} or None,
                in_shardings=argument_shardings(signature.in_shardings, given, named),
                out_shardings=result_shardings(signature.out_shardings, program.out_treedef),
                committed=on_meshes(leaves),
                compiler_options=signature.compiler_options,
            )
            if request.mesh is None:
                call = self._jax_call(program, request, leaves, args, kwargs)
                if call is not None:
                    check_planned(call)
                    request = replace(request, inside=call.shardings)
                asked = signature.in_shardings, signature.out_shardings, request.pins or None
                if not program.graph.operations and asked == (None, None, None):
                    return _AsWritten(UnplannedError("it computes nothing"), told=False)
            for sharding in request.committed:
                check_layout_kept(sharding, "an argument")
            check_constraints(program, named_mesh(request))
            check_types(program, devices_of(place(request))[0].platform)
        except UnplannedError as e:
            return _AsWritten(e)
        except TraceError:
            if request.mesh is None:
                read_call(signature.written, args, kwargs)  # JAX says it in its own words
            raise
        like = None if needs_all(request) else self._like(program)
        return _Planned(program, plan_program(program, request, like), request)

    def _like(self, program: Program) -> Plan | None:
        """The plan that was made first for the same operations on arrays of other sizes; none
        where memory was short for it, as all of a front is searched then."""
        form = _without_sizes(program.graph)
        for found in self._planned.values():
            if isinstance(found, _Planned) and _without_sizes(found.program.graph) == form:
                alone = any(each.kind == "fastest" for each in found.front.notes)
                return best_plan(found.front, found.request) if alone else None
        return None

    def _jax_call(
        self,
        program: Program,
        request: Request,
        leaves: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> JaxCall | None:
        """How `jax.jit` would run the call; None where it does not say."""
        said = [s for s in (*request.in_shardings, *request.out_shardings) if s is not None]
        placed = [x for x in leaves if getattr(x, "sharding", None) is not None]
        lying = [x.sharding for x in placed if getattr(x, "committed", True)]
        checked = self.signature.placed or (lying and request.in_shardings)  # by JAX
        plain = None if checked else plain_call(program, [*said, *lying])
        return plain or read_call(self.signature.written, args, kwargs)

    def _compile(self, found: _Planned) -> CompiledPlan:
        with self._planning:
            if found.compiled is None:
                found.compiled = compile_best(found.front, found.request)
        return found.compiled

    def _transformed(self, *args: Any, **kwargs: Any) -> Any:
        """The original function: inside a trace of JAX's, or with `jit` disabled."""
        import jax

        from tapestry_egg.tracing.trace import tracing

        disabled = jax.config.values.get("jax_disable_jit", False)
        if not disabled and not tracing():
            name = getattr(self.signature.fn, "__name__", "the function")
            self._warn(
                f"{name} of te.jit is called under grad, vmap, jit or another transformation: the "
                f"original runs there, without a plan. Give the whole step to te.jit instead.",
                5,
            )
        written, mesh = self.signature.written, entered_mesh()
        if mesh is not None:
            written = self.signature.on(mesh)
        return written(*args, **kwargs)


def _without_sizes(graph: BlockGraph) -> tuple[Any, ...]:
    """What a graph computes of what, whatever the sizes of its arrays are."""
    regions = [tuple(map(_without_sizes, op.regions)) for op in graph.operations]
    operations = [
        (op.kernel, op.inputs, op.outputs, inner)
        for op, inner in zip(graph.operations, regions, strict=True)
    ]
    types = [(t.rank, t.dtype) for t in graph.values]
    return tuple(operations), tuple(types), graph.inputs, graph.outputs


@functools.cache
def _of_jax() -> tuple[
    Callable[[], bool], Callable[[], Any], Callable[[Any], tuple[list[Any], Any]]
]:
    """What every call asks of JAX: whether it runs now and is not traced, all of the configuration
    that a trace depends on (x64, precision, the mesh), and pytrees. Looked up once: a call has
    microseconds."""
    import jax
    import jax.extend  # some of it adds to the configuration, which stays as it is from here on

    core, config = jax._src.core, jax._src.config  # type: ignore[attr-defined]
    clean, disabled = core.trace_state_clean, config.disable_jit

    def runs_now() -> bool:
        return bool(clean()) and not disabled.value

    return runs_now, config.trace_context, jax.tree.flatten


class Bound(Jitted):
    """An optimised function as a method of one instance, with all that the function has."""

    def __init__(self, function: Any, instance: Any) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__func__, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def signature(self) -> Signature:  # type: ignore[override]
        """That of the function without the instance."""
        return read_signature(MethodType(self.__func__.signature.written, self.__self__))

    def __getattr__(self, name: str) -> Any:
        if name not in ("front", "plan", "compiled", "trace", "lower", "eval_shape"):
            return getattr(self.__func__, name)
        method: Callable[..., Any] = getattr(self.__func__, name)
        return functools.partial(method, self.__self__)


def _keep(known: dict[Any, _Planned | _AsWritten], key: Any, found: _Planned | _AsWritten) -> None:
    """Note what is known, and forget the oldest where it is too much."""
    while len(known) >= _MOST:
        del known[next(iter(known))]
    known[key] = found


def _committed(leaf: Any) -> _Devices:
    """The devices that an array, described or real, is committed to; None where it is free."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        return None
    try:
        devices = frozenset(sharding.device_set)
    except ValueError:  # a mesh that is only described
        return None
    # What names no axes is no place that a plan has.
    named = len(devices) == 1 or hasattr(sharding, "spec")
    return devices if named else frozenset((*devices, type(sharding)))


def _as_it_comes(leaf: Any) -> Any:
    """JAX's type of an array, and where it lies; shape and dtype of NumPy's; any other's class."""
    try:
        return leaf.aval, _committed(leaf)
    except AttributeError:
        pass
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
    return type(leaf)


def _as_jax_sees_it(leaf: Any) -> Any:
    """Shape, dtype, weakness, and the layout where that is part of the type."""
    import jax

    try:
        seen = jax.typeof(leaf)
    except TypeError:
        seen = leaf
    if not hasattr(seen, "dtype") or not hasattr(seen, "shape"):
        return type(leaf)  # a token, and what is no array
    mesh = getattr(getattr(seen, "sharding", None), "mesh", None)
    typed = bool(getattr(mesh, "explicit_axes", ()))
    dtype = jax.dtypes.canonicalize_dtype(seen.dtype, allow_extended_dtype=True)
    weak = bool(getattr(seen, "weak_type", False))
    return (tuple(seen.shape), dtype, weak, seen.sharding if typed else None)


# What `jax.jit` makes of a call: on which devices it would run it, and which layouts it is told.
#
# Where all that is said names the devices of one mesh, these are the ones. Otherwise JAX itself is
# asked, by lowering the function as it is written. So a call that `jax.jit` refuses is refused in
# the same words, and what arguments, shardings and constraints say of devices is heard.


@dataclass(frozen=True, slots=True)
class JaxCall:
    """A call as `jax.jit` would run it.

    `devices` are in JAX's order; `bound` says whether the user chose them. `shardings` are all that
    arguments, results and the program itself name. `ordered` says whether the order of an array's
    dims in memory is asked for.
    """

    devices: tuple[Any, ...]
    bound: bool
    shardings: tuple[Any, ...]
    ordered: bool


def plain_call(program: Program, shardings: Sequence[Any]) -> JaxCall | None:
    """A call of which it is plain where `jax.jit` runs it: `shardings` and the program name one
    mesh's devices, or nothing does. None where JAX is to be asked.

    `shardings` are those given and those of arguments that are committed.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    meshes = dict.fromkeys(program.places)
    for sharding in shardings:
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            return None
        meshes[sharding.mesh] = None
    for mesh in (jax.sharding.get_mesh(), entered_mesh()):
        meshes.update(with_devices(mesh))
    if not all(isinstance(mesh, Mesh) for mesh in meshes):
        return None
    places = {tuple(mesh.devices.flat) for mesh in meshes}
    if len(places) > 1 or jax.config.values.get("jax_default_device") is not None:
        return None
    if not places:
        return JaxCall((), False, (), False)
    (devices,) = places
    named = (*shardings, *(NamedSharding(mesh, PartitionSpec()) for mesh in program.places))
    return JaxCall(devices, True, named, False) if len(devices) > 1 else None


@contextmanager
def as_set() -> Iterator[None]:
    """Where `with mesh:` counts as `jax.set_mesh(mesh)`."""
    import jax

    mesh = entered_mesh() if jax.sharding.get_mesh().empty else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        yield


def read_call(written: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JaxCall | None:
    """How `jax.jit` would run `written`; None where this version of JAX does not say, or where a
    plan can give types or a mesh that JAX asks for.

    Raises what `jax.jit` raises for such a call, and UnplannedError where its only mesh has no
    devices.
    """
    import jax

    try:
        with as_set(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plan has its own donations and constants
            lowering: Any = written.trace(*args, **kwargs).lower()._lowering
    except Exception as e:
        if type(e).__name__ == "ShardingTypeError" or "requires a non-empty mesh" in str(e):
            return None
        if "only AbstractMesh exists" in str(e):
            raise UnplannedError(
                "its arguments are on an abstract mesh, which has no devices",
                hint="To plan it, pass mesh=, or shardings of a mesh with devices.",
            ) from None
        raise
    try:
        told = lowering.compile_args
        devices = tuple(lowering._device_list)
        shardings = (*told["in_shardings"], *told["out_shardings"], *told["intermediate_shardings"])
        layouts = (*told["in_layouts"], *told["out_layouts"])
        bound = bool(told["committed"]) or jax.config.values.get("jax_default_device") is not None
    except (AttributeError, KeyError, TypeError):
        return None
    ordered = any(hasattr(x, "major_to_minor") for x in layouts)
    return JaxCall(devices, bound, shardings, ordered)


def check_mesh_set() -> None:
    """Raise UnplannedError where the mesh that is set has no devices."""
    import jax

    if jax.sharding.get_mesh().empty and not jax.sharding.get_abstract_mesh().empty:
        raise UnplannedError(
            "the mesh that is set is abstract, and has no devices",
            hint="Set one with devices (jax.set_mesh), or pass mesh=.",
        )


def check_planned(call: JaxCall) -> None:
    """Raise UnplannedError for a call that says what no plan keeps."""
    import jax

    if call.bound and len(call.devices) == 1 < jax.device_count():
        raise UnplannedError(
            f"it is bound to one device, {call.devices[0]}, by its arguments or shardings",
            hint="To plan it, pass mesh=, or arguments that are not committed to a device.",
        )
    if call.ordered:
        raise UnplannedError(
            "a Layout of array dims in memory is asked for, which no plan keeps",
            hint="Give shardings without a Layout.",
        )
    for sharding in call.shardings:
        # What JAX has not been told is replicated, by a sharding without names.
        named = len(call.devices) > 1 and not getattr(sharding, "is_fully_replicated", False)
        (check_layout_kept if named else check_memory_kept)(sharding, "")


def check_types(program: Program, platform: str) -> None:
    """Raise UnplannedError for arguments that JAX's compiled functions do not take: on CPUs, whose
    arrays hold a byte for each of their elements, those of fewer bits."""
    narrow = [t for t in program.input_types if _NARROW.fullmatch(t.dtype)]
    if platform == "cpu" and narrow:
        raise UnplannedError(
            f"an argument is {narrow[0]}, which JAX does not pass to compiled functions on CPUs",
            hint="Pass wider numbers, and narrow them inside.",
        )


#: Dtypes of less than a byte.
_NARROW = re.compile(r"u?int[24]|float4.*")


def check_constraints(program: Program, mesh: Any) -> None:
    """Raise UnplannedError where a constraint inside is about another mesh than the plan's, which
    is `mesh`, or if that is None the one that all constraints name."""
    found = list(constraints(program.graph))
    contract = common_mesh([c.mesh for *_, c in found]) if mesh is None else contract_of(mesh)
    for graph, op, constraint in found:
        shape = graph.values[op.inputs[0]].shape
        plain = None if contract is None else contract.meshes(1)[0]
        if plain is None or constraint.wanted(shape, plain, contract) is None:
            other = "others" if contract is None else str(contract)
            raise UnplannedError(
                f"a constraint {constraint} is about the mesh {constraint.mesh}, beside {other}",
                where=str(op.source) if op.source.file else "",
                hint="Give shardings of one mesh.",
            )
