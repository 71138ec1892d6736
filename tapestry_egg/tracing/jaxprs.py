"""From jaxprs to block graphs: calls inlined, control flow nested, dead operations dropped."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import index as as_int
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError, TraceError, UnplannedError
from tapestry_egg.graph.arrays import decode_dtype, dtype_name, register_key_impl
from tapestry_egg.graph.blockgraph import (
    COND,
    SCAN,
    WHILE,
    BlockGraph,
    Operation,
    Source,
    TensorType,
    itemsize,
    numbered,
    reached,
)
from tapestry_egg.graph.sources import is_library, source_of
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.decided import (
    Decided,
    all_in_one_part,
    decided,
    may_be_an_operand,
    may_be_settled,
)
from tapestry_egg.metakernels.registry import facts_of

from . import needless
from .codec import encode_params, primitive, register_primitive
from .constraints import KERNEL as CONSTRAINT
from .constraints import check_layout_kept, constraint_of, one_device, with_devices
from .control_flow import as_scan, opened, rounds, solver, with_counts
from .counted import with_stacks
from .fused_attention import missing_results, recognized
from .known_places import KnownPlaces
from .settings import DRAWS, check_settings_kept, partitionable, settings_of
from .shard_maps import over_dims_only, over_whole_arrays

#: Calls that disappear into their caller, and the parameter that holds the called jaxpr. The
#: derivative rules of custom_jvp and custom_vjp calls have been used up when a program is traced.
INLINED = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "eval_jaxpr": ("call_jaxpr",),
    "core_closed_call": ("call_jaxpr",),
    "call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("fun_jaxpr", "call_jaxpr"),
    "custom_vmap_call": ("call",),
    "composite": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "remat": ("jaxpr",),
}
_REMAT = frozenset(("remat2", "checkpoint", "remat"))

#: Control flow: the parameters that hold the nested jaxprs, in the order of `Operation.regions`.
REGIONS = {
    SCAN: ("jaxpr",),
    WHILE: ("cond_jaxpr", "body_jaxpr"),
    COND: ("branches",),
}

#: Collectives that are reductions where all their axes are dims.
_OVER_DIMS = {"pmax": "reduce_max", "pmin": "reduce_min"}

#: Identities on global values that ask for a placement, and the parameter that says which. Those
#: that name the axes of a mesh stay, as constraints of the plan.
_PLACEMENT = {
    "sharding_constraint": "sharding",
    "reshard": "dst_sharding",
    "mesh_cast": "",
}

#: Parameters by which Explicit mode asks for a placement of a result.
_PLACEMENT_PARAMS = frozenset(("sharding", "out_sharding"))


#: Effects that a plan keeps: calls into Python, each once and, where asked for, in order.
_EFFECTS = frozenset(
    ("CallbackEffect", "DebugEffect", "IOEffect", "OrderedDebugEffect", "OrderedIOEffect")
)

#: Primitives inside primitives: a solver of a solver of a solver.
_MOST_EXPANSIONS = 16


@dataclass(frozen=True)
class _Context:
    """What an inlined call hands down to the operations inside it."""

    scope: str = ""
    remat: int | None = None
    source: Source | None = None  # set where the callee's own lines are not the user's
    expanded: int = 0  # how deep in primitives that are made of others


@dataclass
class _Flattener:
    """Builds one graph; ids are handed out on the way and made dense at the end."""

    remats: Iterator[int]
    sources: bool = True
    places: dict[Any, None] = field(default_factory=dict)  # meshes and devices that it names
    values: list[TensorType] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    constants: dict[int, np.ndarray] = field(default_factory=dict)
    scalars: dict[tuple[TensorType, bytes], int] = field(default_factory=dict)
    arrays: dict[tuple[int, bool], int] = field(default_factory=dict)
    alive: list[object] = field(default_factory=list)  # keeps the ids that `arrays` uses

    def __post_init__(self) -> None:
        self.makers: dict[int, Operation] = {}
        self.known = needless.Known(self.values, self.constants, self.makers)

    def append(self, op: Operation) -> None:
        self.operations.append(op)
        self.makers.update(dict.fromkeys(op.outputs, op))

    def new(self, type_: TensorType) -> int:
        self.values.append(type_)
        return len(self.values) - 1

    def graph(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        name: str,
        context: _Context,
        whole: bool = False,
    ) -> BlockGraph:
        """The graph of a jaxpr; of a `whole` program, whose results lie as their types say."""
        jaxpr, consts = needless.without_dead_code(jaxpr, consts)
        inputs = [self.new(tensor_type(v.aval)) for v in jaxpr.invars]
        outputs = self.inline(jaxpr, consts, inputs, context)
        if whole:
            made = zip(outputs, jaxpr.outvars, strict=True)
            outputs = [self.typed_result(v, atom.aval, context) for v, atom in made]
        return self.finish(name, inputs, outputs)

    def typed_result(self, v: int, aval: Any, context: _Context) -> int:
        """A result under the constraint of its type, which names the axes of an Explicit mesh."""
        sharding = getattr(aval, "sharding", None)
        if not getattr(getattr(sharding, "mesh", None), "explicit_axes", ()):
            return v
        return self.constrained(v, sharding, True, context)

    def inline(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int], context: _Context
    ) -> list[int]:
        """Append the operations of `jaxpr` applied to `inputs`; returns its outputs' ids."""
        env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for v, const in zip(jaxpr.constvars, consts, strict=True):
            env[v] = self.constant(const, v.aval)

        def read(atom: Any) -> int:
            return self.constant(atom.val, atom.aval) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            results = self.equation(eqn, [read(v) for v in eqn.invars], context)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, inputs: list[int], context: _Context) -> Sequence[int]:
        here = self.located(eqn, context)
        self.check_planned(eqn, here)
        for read in (self.called, self.placement, self.spelled, self.expanded):
            if (made := read(eqn, inputs, here)) is not None:
                return made
        return self.operation(eqn, inputs, context, here)

    def check_planned(self, eqn: Any, here: _Context) -> None:
        """Raise UnplannedError for an equation of which no plan keeps what it says."""
        where = str(here.source or "")
        check_settings_kept(eqn, where)
        facts = facts_of(eqn.primitive.name)
        if not facts.planned:
            raise UnplannedError(
                f"no plan keeps {eqn.primitive.name}: {facts.reason[0].lower()}{facts.reason[1:]}",
                where=where,
                hint="Leave it out of what is planned, or call the function under jax.jit.",
            )
        inside = eqn.primitive.name in (*INLINED, *REGIONS, "shard_map")  # they are asked there
        unknown = [e for e in eqn.effects if type(e).__name__ not in _EFFECTS]
        if unknown and not inside:
            raise UnplannedError(
                f"{eqn.primitive.name} has the effect {unknown[0]!r:.80}, which no plan keeps",
                where=where,
                hint="Leave it out of what is planned, or call the function under jax.jit.",
            )

    def called(self, eqn: Any, inputs: list[int], here: _Context) -> Sequence[int] | None:
        """The results of an equation that calls a jaxpr."""
        kernel = eqn.primitive.name
        if kernel in INLINED:
            callee = next((eqn.params[p] for p in INLINED[kernel] if p in eqn.params), None)
            if callee is not None:
                return self.call(eqn, callee, inputs, here)
        if kernel == COND:
            branch = needless.branch_taken(eqn.params, inputs, self.known)
            if branch is not None:
                return self.inline(*opened(branch), inputs[1:], here)
        if kernel == "custom_linear_solve":
            callee, used = solver(eqn.params, inputs)
            return self.inline(*opened(callee), used, here)
        return self.mapped(eqn, inputs, here) if kernel == "shard_map" else None

    def placement(self, eqn: Any, inputs: list[int], here: _Context) -> Sequence[int] | None:
        """The results of an equation that says where values lie."""
        kernel = eqn.primitive.name
        if kernel in _PLACEMENT and len(inputs) == len(eqn.outvars):
            return self.placed(eqn, inputs, here)
        if kernel == "device_put":
            asked = eqn.params.get("devices", ())
            if len(asked) != len(inputs):
                return inputs
            return [self.constrained(v, s, False, here) for v, s in zip(inputs, asked, strict=True)]
        return None

    def spelled(self, eqn: Any, inputs: list[int], here: _Context) -> Sequence[int] | None:
        """The results of an equation that has another spelling here, or changes nothing."""
        kernel = eqn.primitive.name
        if kernel in _OVER_DIMS and over_dims_only(eqn.params):
            axes = [int(a) for a in eqn.params["axes"]]
            return [self.reduced(_OVER_DIMS[kernel], axes, v, here) for v in inputs]
        said = self.decided(eqn, inputs) if may_be_settled(kernel) else None
        if said is not None:
            made = tensor_type(eqn.outvars[0].aval)
            if (number := said.settled(made.dtype)) is not None:
                return self.filled(number, made, here)
        if kernel == "tie":
            return inputs[1:]  # the other operand is for the scheduler of a backward pass
        attention = recognized(kernel, eqn.params, [self.values[v] for v in inputs])
        if attention is not None:
            ours, params, read = attention
            types = [self.typed(v.aval, kernel, here) for v in eqn.outvars]
            types += missing_results(types, ours)
            results = self.applied(ours, [inputs[p] for p in read], types, params, here)
            return results[: len(eqn.outvars)]
        if kernel == "empty2":
            return [self.zeros(self.typed(eqn.outvars[0].aval, kernel, here))]
        return None

    def expanded(self, eqn: Any, inputs: list[int], here: _Context) -> Sequence[int] | None:
        """The results of an equation without a template, by what it says that it is made of."""
        kernel = eqn.primitive.name
        known = kernel in registry.templates() or kernel in REGIONS
        drawn_otherwise = kernel in DRAWS and not partitionable(eqn)
        if known and not drawn_otherwise:
            return None
        if registry.calls_python(kernel) or here.expanded >= _MOST_EXPANSIONS:
            return None
        made_of = expansion(eqn, constants_among(inputs, self.constants))
        if made_of is None and drawn_otherwise:
            raise UnplannedError(
                f"{kernel} without jax_threefry_partitionable cannot be planned",
                where=str(here.source or ""),
                hint="Set jax_threefry_partitionable, or call the function under jax.jit.",
            )
        if made_of is None:
            return None
        inner = replace(here, scope=_joined(here.scope, kernel), expanded=here.expanded + 1)
        return self.inline(made_of.jaxpr, made_of.consts, inputs, inner)

    def operation(
        self, eqn: Any, inputs: list[int], context: _Context, here: _Context
    ) -> Sequence[int]:
        """The results of an equation that is one operation."""
        kernel = kernel_of(eqn)
        if kernel == WHILE and opened(eqn.params["cond_jaxpr"])[0].outvars[0].aval.shape:
            inputs = [*inputs[: eqn.params["cond_nconsts"]], *inputs]
            eqn = with_one_verdict(eqn)
        types = [self.typed(v.aval, kernel, here) for v in eqn.outvars]
        if not eqn.effects and needless.is_constant(types):
            return [self.zeros(t) for t in types]
        if inputs and all_in_one_part(kernel, self.values[inputs[0]], types):
            return [inputs[0] if t.size else self.zeros(t) for t in types]
        said = self.decided(eqn, inputs) if may_be_an_operand(kernel) else None
        if said is not None and len(types) == 1:
            same = said.same_as()
            if same is not None and self.values[inputs[same]] == types[0]:
                return [inputs[same]]
            inputs = [inputs[p] for p in said.needed()]
        regions = tuple(self.regions(eqn, replace(context, scope=here.scope)))
        stands = list(range(len(types)))
        if kernel == SCAN:
            body, stands = needless.stacked_once(regions[0], types, int(eqn.params["num_carry"]))
            regions = (body,)
        outputs = tuple(self.new(types[stands.index(q)]) for q in sorted({*stands}))
        op = Operation(
            kernel=kernel,
            inputs=tuple(inputs),
            outputs=outputs,
            params=self.params(eqn, kernel),
            regions=regions,
            source=here.source or Source(),
            scope=here.scope,
            remat=here.remat,
            effectful=bool(eqn.effects),
        )
        length = rounds(op, self.constants) if kernel == WHILE else None
        self.append(op if length is None else as_scan(op, length))
        wanted = eqn.params.get("out_sharding")
        # What JAX derives for gradients is not the user's word.
        if wanted is not None and "transpose(" not in str(eqn.source_info.name_stack):
            # Of several results each has its own in its type.
            alone = len(outputs) == 1
            asked = [wanted if alone else v.aval.sharding for v in eqn.outvars]
            return [self.constrained(v, s, True, here) for v, s in zip(outputs, asked, strict=True)]
        return [outputs[q] for q in stands]

    def decided(self, eqn: Any, inputs: Sequence[int]) -> Decided | None:
        """What the template of an equation says that constants decide."""
        kernel, operands = kernel_of(eqn), needless.known_operands(inputs, self.known)
        return decided(kernel, self.params(eqn, kernel), operands)

    def applied(
        self,
        kernel: str,
        inputs: Sequence[int],
        types: Sequence[TensorType],
        params: Mapping[str, Any],
        here: _Context,
    ) -> Sequence[int]:
        """The outputs of an operation that no equation spells."""
        outputs = tuple(self.new(t) for t in types)
        source = here.source or Source()
        op = Operation(kernel, tuple(inputs), outputs, params, (), source, here.scope, here.remat)
        self.append(op)
        return outputs

    def placed(self, eqn: Any, inputs: list[int], here: _Context) -> list[int]:
        """What is asked for of a value by its place, as an operation where that says anything."""
        sharding = eqn.params.get(_PLACEMENT[eqn.primitive.name])
        explicit = eqn.primitive.name == "reshard"
        return [self.constrained(v, sharding, explicit, here) for v in inputs]

    def constrained(self, v: int, sharding: Any, explicit: bool, here: _Context) -> int:
        """The value under the constraint that a sharding makes of it."""
        if (device := one_device(sharding)) is not None:
            self.places[device] = None
            return v
        check_layout_kept(sharding, str(here.source or ""))
        self.places.update(with_devices(getattr(sharding, "mesh", None)))
        asked = constraint_of(sharding, self.values[v].rank, explicit)
        if asked is None:
            return v
        return self.applied(CONSTRAINT, (v,), (self.values[v],), asked.params(), here)[0]

    def call(self, eqn: Any, callee: Any, inputs: Sequence[int], here: _Context) -> Sequence[int]:
        kernel = eqn.primitive.name
        name = eqn.params.get("name")
        wrapper = f"{kernel}({name})" if kernel in ("jit", "pjit", "composite") and name else ""
        inner = replace(here, scope=_joined(here.scope, wrapper))
        jaxpr, consts = opened(callee)
        if "in_shardings" in eqn.params:
            asked = zip(inputs, eqn.params["in_shardings"], strict=True)
            inputs = [self.constrained(v, sharding, False, here) for v, sharding in asked]
            made = self.inline(jaxpr, consts, inputs, self.inside(jaxpr, inner))
            wanted = zip(made, eqn.params["out_shardings"], strict=True)
            return [self.constrained(v, sharding, False, here) for v, sharding in wanted]
        if kernel in _REMAT:
            inner = replace(inner, scope=_joined(here.scope, "checkpoint"))
            # JAX puts a barrier before the recomputation only, and only where asked to.
            fence = eqn.params.get("prevent_cse", True)
            fence = any(fence) if isinstance(fence, tuple) else fence
            if fence and eqn.params.get("differentiated", True):
                inner = replace(inner, remat=next(self.remats))
        return self.inline(jaxpr, consts, inputs, self.inside(jaxpr, inner))

    def inside(self, jaxpr: Any, context: _Context) -> _Context:
        """What a call hands down: lines of the caller where the callee is a library's own, whose
        traces are cached with the lines of the first caller."""
        return context if is_library(jaxpr) else replace(context, source=None)

    def mapped(self, eqn: Any, inputs: Sequence[int], here: _Context) -> Sequence[int]:
        """The outputs of a function that the user has divided among devices."""
        try:
            whole = over_whole_arrays(eqn)
        except UnplannedError:
            raise
        except Exception as e:
            raise UnplannedError(
                f"a shard_map cannot be planned: {(str(e) or type(e).__name__).splitlines()[0]}",
                where=str(here.source) if here.source else "",
                hint="Its collectives must be those that vmap maps; or leave it out of what is "
                "planned, and call it under jax.jit.",
            ) from e
        self.places.update(with_devices(eqn.params["mesh"]))
        inner = replace(here, scope=_joined(here.scope, "shard_map"))
        return self.inline(whole.jaxpr, whole.consts, inputs, inner)

    def reduced(self, kernel: str, axes: list[int], v: int, here: _Context) -> int:
        """A reduction of one value over some of its dims."""
        type_ = self.values[v]
        shape = tuple(n for d, n in enumerate(type_.shape) if d not in axes)
        made = TensorType(shape, type_.dtype, type_.weak)
        return self.applied(kernel, (v,), (made,), {"axes": axes, "out_sharding": None}, here)[0]

    def located(self, eqn: Any, context: _Context) -> _Context:
        if not self.sources:
            return context
        scope = _joined(context.scope, str(eqn.source_info.name_stack))
        return replace(context, scope=scope, source=context.source or source_of(eqn.source_info))

    def params(self, eqn: Any, kernel: str) -> Mapping[str, Any]:
        register_primitive(eqn.primitive)
        kept = {k: v for k, v in eqn.params.items() if k not in REGIONS.get(kernel, ())}
        for name in _PLACEMENT_PARAMS & kept.keys():
            kept[name] = None
        if kernel == SCAN:
            kept = with_counts(kept)
        return encode_params(kept, kernel=kernel)

    def regions(self, eqn: Any, context: _Context) -> Iterator[BlockGraph]:
        kernel = eqn.primitive.name
        for parameter in REGIONS.get(kernel, ()):
            nested = eqn.params[parameter]
            branches = nested if isinstance(nested, tuple) else (nested,)
            for i, branch in enumerate(branches):
                name = f"{kernel}.{parameter}"
                name = f"{name}[{i}]" if isinstance(nested, tuple) else name
                # A loop's barrier stands before the loop: nothing inside carries its number.
                inner = _Flattener(self.remats, self.sources, self.places)
                yield inner.graph(*opened(branch), name, replace(context, remat=None))

    def typed(self, aval: Any, kernel: str, here: _Context) -> TensorType:
        try:
            return tensor_type(aval)
        except TraceError as e:
            where = f"{here.source} ({kernel})" if here.source else kernel
            raise type(e)(e.what, where=where, hint=e.hint) from None

    # ---- constants -----------------------------------------------------------------------------

    def constant(self, value: Any, aval: Any) -> int:
        type_ = tensor_type(aval)
        if type_.dtype.startswith("key<"):
            return self.keys(value, type_)
        known = self.arrays.get((id(value), type_.weak))
        if known is not None:
            return known
        try:
            array = np.asarray(value, dtype=aval.dtype)
        except Exception as e:
            raise TraceError(
                f"the function closes over a value that is not known while tracing ({type_})",
                hint="Pass it as an argument instead.",
            ) from e
        if type_.rank == 0:
            slot = (type_, array.tobytes())
            if slot not in self.scalars:
                self.scalars[slot] = self.new(type_)
                self.constants[self.scalars[slot]] = array.reshape(())
            return self.scalars[slot]
        number = self.arrays[id(value), type_.weak] = self.new(type_)
        self.constants[number] = array
        self.alive.append(value)
        return number

    def filled(self, number: Any, type_: TensorType, here: _Context) -> Sequence[int]:
        """A value that is one number over and over."""
        if not type_.size:
            return [self.zeros(type_)]
        scalar = TensorType((), type_.dtype, type_.weak)
        array = np.asarray(number).astype(decode_dtype(type_.dtype))
        v = self.scalars.setdefault((scalar, array.tobytes()), len(self.values))
        if v == len(self.values):
            self.constants[self.new(scalar)] = array
        params = {"shape": list(type_.shape), "broadcast_dimensions": [], "sharding": None}
        return self.applied("broadcast_in_dim", (v,), (type_,), params, here) if type_.rank else [v]

    def zeros(self, type_: TensorType) -> int:
        """A constant of zeros."""
        number = self.new(type_)
        self.constants[number] = np.zeros(type_.shape, decode_dtype(type_.dtype))
        return number

    def keys(self, value: Any, type_: TensorType) -> int:
        """A constant of random keys: its words, and the operation that makes keys of them."""
        import jax

        known = self.arrays.get((id(value), False))
        if known is not None:
            return known
        impl = value.dtype._impl
        register_key_impl(impl)
        words = np.asarray(jax.random.key_data(value))
        raw = self.new(TensorType(words.shape, words.dtype.name))
        self.constants[raw] = words
        number = self.arrays[id(value), False] = self.new(type_)
        self.alive.append(value)
        wrap = primitive("random_wrap")
        self.operations.append(
            Operation(wrap.name, (raw,), (number,), encode_params({"impl": impl}, kernel=wrap.name))
        )
        return number

    # ---- the finished graph --------------------------------------------------------------------

    def finish(self, name: str, inputs: Sequence[int], outputs: Sequence[int]) -> BlockGraph:
        """Keep what reaches an output or has an effect, equal operations once, parts at once."""
        live, _ = reached(self.operations, outputs)
        places = KnownPlaces(self.values, self.constants, self.known)
        placed, outputs = places.replaced(live, outputs)
        placed, outputs = with_stacks(placed, outputs, self.values, self.constants, self.known)
        live, _ = reached(needless.parts_at_once(placed, self.values), outputs)
        operations, outputs = needless.made_once(live, self.values, outputs, self.constants)
        kept, _ = reached(needless.without_unread(operations, self.values, outputs), outputs)
        whole = BlockGraph(name, tuple(self.values), kept, (), (), self.constants)
        return numbered(whole, inputs, outputs)


def block_graph(
    jaxpr: Any,
    consts: Sequence[Any] = (),
    name: str = "",
    *,
    sources: bool = True,
    places: dict[Any, None] | None = None,
) -> BlockGraph:
    """The block graph of a jaxpr applied to `consts`.

    With `sources=False` operations carry neither source nor scope. `places` is given the meshes
    with devices, and the devices, that the program names. Raises TraceError for dims of unknown
    size, and UnplannedError, one of those, for what no plan keeps.
    """
    found = {} if places is None else places
    flattener = _Flattener(itertools.count(), sources, found)
    return flattener.graph(jaxpr, consts, name, _Context(), whole=True)


def tensor_type(aval: Any) -> TensorType:
    """Shape, dtype and weak type of a JAX abstract value; its sharding is left out."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype") or hasattr(aval, "inner_aval"):
        raise UnplannedError(
            f"{aval} is not a tensor",
            hint="Mutable references and tokens are not planned; return new values instead.",
        )
    try:
        return _tensor_type(aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False)))
    except TypeError:
        raise TraceError(
            f"{aval} has a dim of unknown size", hint="Trace with known shapes."
        ) from None


@cache
def _tensor_type(shape: tuple[Any, ...], dtype: Any, weak: bool) -> TensorType:
    """One object for all tensors alike. Raises TypeError where a dim has no size, UnplannedError
    for a dtype whose elements are of a library's own."""
    made = TensorType(tuple(map(as_int, shape)), dtype_name(dtype), weak)
    try:
        itemsize(made.dtype)
    except GraphError as e:
        raise UnplannedError(e.what, hint="Give its parts as arrays of their own.") from None
    return made


def _joined(*scopes: str) -> str:
    return "/".join(s for s in scopes if s)


# Primitives without a template, and loops of many verdicts, traced again as what they are made of.
#
# Libraries define primitives of their own, to say how they are differentiated or batched. When a
# program is traced these rules have been used up, and what is left to run is the Python function
# that JAX itself traces when it lowers the primitive, or the one that evaluates it eagerly.


_LOG = logging.getLogger(__name__)


def kernel_of(eqn: Any) -> str:
    """The name of the operation that an equation is."""
    name = str(eqn.primitive.name)
    for kernel, (spelled, parameter) in registry.spelled().items():
        if spelled == name and eqn.params.get(parameter):
            return kernel
    return name


def expansion(eqn: Any, known: Mapping[int, Any]) -> Any | None:
    """The closed jaxpr of what an equation's primitive is made of; None where nothing says it.

    It takes the equation's operands, except that `known` (operand number -> value) may be used in
    their place where the function asks for values.
    """
    for function in _functions(eqn):
        for given in ({}, known) if known else ({},):
            traced = _traced(eqn, function, given)
            if traced is not None:
                return traced
    _LOG.info("%s has no template and is not made of others: it stays whole", eqn.primitive.name)
    return None


def _traced(eqn: Any, function: Callable[..., Any], known: Mapping[int, Any]) -> Any | None:
    import jax

    avals = [v.aval for v in eqn.invars]

    def call(*operands: Any) -> Any:
        values = [known.get(p, x) for p, x in enumerate(operands)]
        out = function(*values, **eqn.params)
        return list(out) if eqn.primitive.multiple_results else [out]

    try:
        with settings_of(eqn):
            closed = jax.make_jaxpr(call)(*avals)
    except Exception as e:  # the function is not meant to be traced, or not with these operands
        _LOG.info("%s cannot be traced: %s", eqn.primitive.name, e)
        return None
    made = [(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
    wanted = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    itself = [e.primitive for e in closed.jaxpr.eqns] == [eqn.primitive]
    return None if made != wanted or itself else closed


def _functions(eqn: Any) -> Iterator[Callable[..., Any]]:
    """The Python functions that a primitive is made of, as JAX lowers it and as it runs it."""
    primitive = eqn.primitive
    if primitive.name in DRAWS:
        yield functools.partial(_drawn, primitive.name)
    is_high = getattr(primitive, "is_high", None)  # made of others by a method of its own
    if callable(is_high) and is_high(*(v.aval for v in eqn.invars), **eqn.params):
        yield primitive.to_lojax
    lowered = _lowered(primitive)
    if lowered is not None:
        yield lowered
    run = inspect.unwrap(getattr(primitive, "impl", None) or primitive.bind)
    inner = run
    while isinstance(inner, functools.partial):
        inner = inner.func
    module = getattr(inner, "__module__", None) or ""
    if inspect.isfunction(inner) and not module.startswith("jax._src"):
        yield run  # JAX's own compile the primitive itself, and do nothing for the other ones


def _drawn(kernel: str, keys: Any, **params: Any) -> Any:
    """Random bits, or new keys, by the generator of the keys itself."""
    import jax

    impl = keys.dtype._impl  # JAX has no public name for it

    def one(key: Any) -> Any:
        if kernel == "random_bits":
            return impl.random_bits(key, params["bit_width"], params["shape"])
        return impl.split(key, params["shape"])

    for _ in range(keys.ndim):
        one = jax.vmap(one)
    made = one(jax.random.key_data(keys))
    if kernel == "random_bits":
        return made
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(keys))


def _lowered(primitive: Any) -> Callable[..., Any] | None:
    """The function that JAX's lowering of a primitive traces, where it is one of `lower_fun`."""
    try:
        from jax._src.interpreters import mlir

        rule = mlir._lowerings[primitive].rule
        inside = inspect.getclosurevars(rule).nonlocals
    except (ImportError, AttributeError, KeyError, TypeError):
        return None
    found = inside.get("fun")
    made_so = getattr(rule, "__name__", "") == "f_lowered" and "multiple_results" in inside
    return found if made_so and callable(found) else None


def with_one_verdict(eqn: Any) -> Any:
    """A loop over many examples (a `while` under vmap, each with a condition of its own) as a loop
    that runs while any of them does, whose body leaves those that are done as they are.

    That is what JAX makes of it too, further down. The new body also reads the constants of the
    condition, before its own.
    """
    import jax
    from jax import lax
    from jax.extend.core import jaxpr_as_fun

    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, body = (jaxpr_as_fun(eqn.params[p]) for p in ("cond_jaxpr", "body_jaxpr"))

    def any_of(*values: Any) -> Any:
        (verdicts,) = test(*values)
        return lax.reduce_or(verdicts, tuple(range(verdicts.ndim)))

    def step(*values: Any) -> list[Any]:
        carry = values[tests + bodies :]
        (verdicts,) = test(*values[:tests], *carry)
        leading = tuple(range(verdicts.ndim))
        return [
            lax.select(lax.broadcast_in_dim(verdicts, new.shape, leading), new, old)
            for new, old in zip(body(*values[tests:]), carry, strict=True)
        ]

    avals = [v.aval for v in eqn.invars]
    params = {
        "cond_jaxpr": jax.make_jaxpr(any_of)(*avals[:tests], *avals[tests + bodies :]),
        "body_jaxpr": jax.make_jaxpr(step)(*avals),
        "body_nconsts": tests + bodies,
    }
    return eqn.replace(params={**eqn.params, **params})


def constants_among(operands: Sequence[int], constants: Mapping[int, Any]) -> dict[int, Any]:
    """Operand number -> value, of the operands that are constants."""
    return {p: constants[v] for p, v in enumerate(operands) if v in constants}
