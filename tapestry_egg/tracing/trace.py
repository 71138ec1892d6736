"""Tracing: a JAX function and its arguments become a program, a block graph with its pytrees."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tapestry_egg.errors import TraceError, UnplannedError
from tapestry_egg.graph.blockgraph import BlockGraph, Source, TensorType, given_up
from tapestry_egg.graph.pytrees import (
    LEAF,
    build,
    difference,
    encode_treedef,
    is_transparent,
    known_of,
    opaque_arguments,
)

from .call_signature import Call, Signature, read_signature
from .constraints import without_pins
from .fused_attention import available
from .library_jits import Answer, LibraryJit, answer_of, library_jit

# So many operations may be removed without a word.
_FEW = 10


@dataclass(frozen=True, eq=False, repr=False)  # hashed by identity, so that jax.jit takes it
class Program:
    """A block graph together with the pytrees that the user's function takes and returns.

    `in_tree` is the structure of `(args, kwargs)` without the static arguments, `out_tree` that of
    the result, both in the plain form of `graph/pytrees.py`. `static` holds the static arguments
    that the graph was made with: (position or name, value); they are not stored in files.
    """

    graph: BlockGraph
    in_tree: Any
    out_tree: Any
    static: tuple[tuple[int | str, Hashable], ...] = ()
    # The exact structures, with static data of the user's classes; known only where traced.
    in_treedef: Any = None
    out_treedef: Any = None
    # Where `nnx.jit` or `eqx.filter_jit` was traced: what calls the program, with arrays between.
    library: LibraryJit | None = None
    # Results that are arguments of the next call, whether donated or not: name -> name.
    state: Mapping[str, str] = field(default_factory=dict)
    # Meshes with devices, and devices, that the function itself names; known only where traced.
    places: tuple[Any, ...] = ()
    # The names of positional parameters, "" for those that have none in a call.
    parameters: tuple[str, ...] = ()
    # Of each result the layout in its type, on a mesh with Explicit axes; None for any other.
    out_specs: tuple[Any, ...] = ()

    def called_as(self, traced: Program) -> Program:
        """This program of a file, called as the same program that was traced here: with its static
        arguments, the user's classes, and the modules of a library. Raises TraceError for
        another."""
        for what in ("in_tree", "out_tree"):
            if where := difference(getattr(self, what), getattr(traced, what)):
                raise TraceError(
                    f"{traced.name or 'it'} is not what {self.name or 'the plan'} was made for: "
                    f"{what}: {where}",
                    where="program",
                    hint="Trace the same function with the same types of arguments.",
                )
        if not _computes_the_same(self.graph, traced.graph):
            raise TraceError(
                f"{traced.name or 'it'} computes something else than {self.name or 'the plan'}",
                where="program",
                hint="Trace the function as it was when the plan was made, or optimize it again.",
            )
        return replace(traced, graph=self.graph)

    @staticmethod
    def of(graph: BlockGraph) -> Program:
        """The program that takes the graph's inputs as positional arguments, returns a tuple."""
        args: dict[str, Any] = {"tuple": [LEAF] * len(graph.inputs)}
        return Program(
            graph, {"tuple": [args, {"dict": []}]}, {"tuple": [LEAF] * len(graph.outputs)}
        )

    def __repr__(self) -> str:
        inputs, outputs = len(self.graph.inputs), len(self.graph.outputs)
        count = len(self.graph.operations)
        return f"Program({self.name}: {inputs} inputs, {count} operations, {outputs} outputs)"

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def input_types(self) -> tuple[TensorType, ...]:
        return tuple(self.graph.values[v] for v in self.graph.inputs)

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        return tuple(self.graph.values[v] for v in self.graph.outputs)

    def flatten(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The graph's inputs, from arguments as the user's function takes them.

        Static arguments may be given as they were when tracing. Raises TraceError where the
        structure is not the one that was traced.
        """
        return self.leaves(*self.dynamic(args, kwargs))

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """`flatten` of arguments without the static ones."""
        import jax

        leaves, treedef = jax.tree.flatten((args, kwargs))
        if self.in_treedef is not None and treedef == self.in_treedef:
            return leaves
        own = self.in_tree if self.in_treedef is None else encode_treedef(self.in_treedef)
        where = difference(own, encode_treedef(treedef))
        if not where and self.in_treedef is not None:
            where = "the static data of a class in them differ"
        if where:
            raise TraceError(
                f"the arguments do not fit {self.name or 'the program'}: {where}",
                hint="Call it with the structure it was traced with, or trace it again."
                if self.in_treedef is not None
                else "Call it with the structure it was traced with. A plan of nnx.jit or "
                "eqx.filter_jit that was loaded takes modules if the function is traced again: "
                "te.compile(plan, program=te.trace(...)).",
            )
        return leaves

    def arguments(self, said: Iterable[Any]) -> Any:
        """(args, kwargs) without static arguments, with what is said of the graph's inputs.

        Raises TraceError where a class of the user's refuses what is no array.
        """
        import jax

        if self.in_treedef is None:
            return build(self.in_tree, iter(said), {})
        with _refusals("arguments"):
            return jax.tree.unflatten(self.in_treedef, said)

    def results(self, said: Iterable[Any]) -> Any:
        """The pytree of the result, with what is said of the graph's outputs; raises as well."""
        with _refusals("results"):
            return self.unflatten(said)

    def unflatten(self, outputs: Iterable[Any], given: Any = None) -> Any:
        """The user's result, from the graph's outputs.

        `given` is the structure of any pytree that contains the user's classes, such as the
        arguments of the call: a program that was loaded from a file finds namedtuples and other
        nodes in it.
        """
        import jax

        if self.out_treedef is not None:
            return jax.tree.unflatten(self.out_treedef, outputs)
        return build(self.out_tree, iter(outputs), known_of(given) if given else {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program as it was traced, on this process's default device."""
        return self.called(self._run, args, kwargs)

    def called(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`run` of arguments as the program takes them, or of what the library whose function was
        traced makes of the user's."""
        import jax

        if self.library is not None and jax.tree.structure((args, kwargs)) != self.in_treedef:
            return self.library.calling(run)(*args, **kwargs)
        return run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        from .emit import emit

        run = self.__dict__.get("_emitted")
        if run is None:
            run = emit(self.graph)
            object.__setattr__(self, "_emitted", run)
        import jax

        leaves = self.flatten(*args, **kwargs)
        return self.unflatten(run(*leaves), jax.tree.structure((args, kwargs)))

    def dynamic(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments without the static ones; these must be the traced ones. Others may be given by
        name or by position, whichever they were traced by."""
        args, kwargs = self._in_place(args, kwargs)
        if not self.static:
            return args, kwargs
        positions = {k: v for k, v in self.static if isinstance(k, int)}
        named = {k: v for k, v in self.static if isinstance(k, str)}
        given: list[tuple[int | str, Any, Any]]
        given = [(i, args[i], v) for i, v in positions.items() if i < len(args)]
        given += [(k, kwargs[k], v) for k, v in named.items() if k in kwargs]
        for at, value, traced in given:
            if value is not traced and value != traced:
                raise TraceError(
                    f"static argument {at!r} is {value!r}, the program was traced with {traced!r}",
                    hint="Trace the function again with this value.",
                )
        return (
            tuple(a for i, a in enumerate(args) if i not in positions),
            {k: v for k, v in kwargs.items() if k not in named},
        )

    def _in_place(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position or by name as they were traced."""
        count, named = self._traced_by
        if len(args) == count and kwargs.keys() == named:
            return args, kwargs
        given, rest = list(args[:count]), dict(kwargs)
        for name in self.parameters[len(args) : count]:
            if name in rest:
                given.append(rest.pop(name))
        rest.update(zip(self.parameters[count:], args[count:], strict=False))
        whole = len(given) + len(rest) == len(args) + len(kwargs)
        if whole and len(given) == count and rest.keys() == named:
            return tuple(given), rest
        return args, kwargs  # which fit in no way, or have no static ones

    @cached_property
    def _traced_by(self) -> tuple[int, frozenset[str]]:
        """How many arguments were traced by position, and the names of the others."""
        args, kwargs = self.in_tree["tuple"]
        named = [at for at, _ in self.static if isinstance(at, str)]
        count = len(args["tuple"]) + len(self.static) - len(named)
        return count, frozenset((*(k for k, _ in kwargs["dict"]), *named))


def trace(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    name: str | None = None,
    **kwargs: Any,
) -> Program:
    """The block graph of `fn(*args, **kwargs)`, with the pytrees to call it by.

    Arguments are arrays, `jax.ShapeDtypeStruct`s or Python scalars, in any pytree; nothing is
    computed. A function that is already jitted keeps its own static arguments, and its donated ones
    unless some are given here; of `nnx.jit` and `eqx.filter_jit` the updated modules are results of
    the program. A `Program` without arguments is its own. Warns if most operations were removed, or
    if donated arrays have no result to become. Raises TraceError for an argument that JAX does not
    accept, naming it, and UnplannedError, one of those, for what no plan keeps; an exception of
    `fn` itself passes through.
    """
    from .arguments import check_function

    if isinstance(fn, Program) and not args and not kwargs:
        return fn
    check_function(fn, "trace")
    words: dict[str, Any] = {
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    library = library_jit(fn, words)
    if library is None:
        program = trace_signature(read_signature(fn, **words), args, kwargs, name, warns=4)
    else:

        def inside(jitted: Any) -> Callable[..., Any]:
            def answer(*args: Any, **kwargs: Any) -> Any:
                told = name, library, 4
                raise Answer(trace_signature(read_signature(jitted), args, kwargs, *told))

            return answer

        program = replace(answer_of(library.around(inside), args, kwargs), library=library)
    _warn_of_waste(program)
    return program


def _warn_of_dead(jaxpr: Any, name: str, frames: int) -> None:
    """Warn if most operations of a trace were removed, so many frames above."""
    from .needless import count, without_dead_code

    total = count(jaxpr)
    dead = total - count(without_dead_code(jaxpr, [None] * len(jaxpr.constvars))[0])
    if dead >= _FEW and dead > total / 2:
        warnings.warn(
            f"{name}: {dead} of {total} operations were removed, because nothing that it returns "
            f"depends on them. Return what it updates; nnx.jit and eqx.filter_jit do that, so "
            f"give their functions as they are.",
            stacklevel=frames,
        )


def _warn_of_waste(program: Program) -> None:
    """Warn if donated arrays have no result of their type."""
    graph = program.graph
    wasted = [
        f"{name} {graph.values[v]}"
        for name, v, donated, is_taken in zip(
            graph.input_names, graph.inputs, graph.donated, given_up(graph), strict=True
        )
        if donated and not is_taken and graph.values[v].size
    ]
    if wasted:
        warnings.warn(
            f"{program.name}: {len(wasted)} of {sum(graph.donated)} donated arrays, the first of "
            f"them {wasted[0]}, come back in no result of their shape and dtype. Return the "
            f"updated state, or do not donate it.",
            stacklevel=3,
        )


@contextmanager
def _refusals(of: str) -> Iterator[None]:
    """Errors of the user's constructors, told as what they are."""
    try:
        yield
    except Exception as e:  # whatever they raise
        raise TraceError(
            f"a class in them takes nothing but arrays ({type(e).__name__}: {_brief(str(e))})",
            where=of,
            hint="Ask for what is flat: in_shardings, out_shardings, specs().",
        ) from e


_TRACING = ContextVar("tracing", default=False)


def tracing() -> bool:
    """Whether a program is being traced here, to be planned as a whole."""
    return _TRACING.get()


def trace_signature(
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None = None,
    library: LibraryJit | None = None,
    warns: int = 0,
) -> Program:
    """`trace` of a function whose static and donated arguments are known.

    `library` is the one that calls the function, which knows its state, and names for it. If most
    of what the function computes is not returned, it warns, `warns` frames above (0: not at all).
    """
    import jax

    call = signature.split(args, kwargs)
    static = {at for at, _ in call.static}
    positions = [i for i in range(len(args)) if i not in static]
    within = _TRACING.set(True)
    try:
        with available():
            traced = _traced(signature, args, kwargs, call)
    except (TypeError, ValueError, OverflowError) as e:
        _check_arguments(call, positions, e)
        raise
    finally:
        _TRACING.reset(within)
    called = name or getattr(traced, "fun_name", None) or getattr(signature.fn, "__name__", None)
    if warns:
        _warn_of_dead(traced.jaxpr.jaxpr, called or "program", warns)
    leaves, tree = jax.tree_util.tree_flatten_with_path((call.args, call.kwargs))
    donated = signature.donated(args, kwargs)
    name = called or "program"
    program = _program(traced, leaves, tree, donated, positions, call.static, name)
    program = replace(program, parameters=_parameters(signature.fn))
    if library is None:
        return program
    program = _renamed(program, library, (args, kwargs))
    return replace(program, state=library.becomes(program.graph))


def _renamed(program: Program, library: LibraryJit, given: tuple[Any, dict[str, Any]]) -> Program:
    """The program with better names, where there are some, of what it was `given` and of its
    results."""
    graph, names = program.graph, library.names
    before, after = {**names(given[0]), **names(given[1])}, {}
    with suppress(Exception):  # whatever the user's class raises for what is no array
        after = dict(names(program.unflatten(range(len(graph.outputs)))))
    graph = replace(
        graph,
        input_names=tuple(before.get(n, n) for n in graph.input_names),
        output_names=tuple(after.get(n, n) for n in graph.output_names),
    )
    if before and is_transparent(program.in_tree):
        in_tree = opaque_arguments(program.in_tree, library.name)
        return replace(program, graph=graph, in_tree=in_tree)
    return replace(program, graph=graph)


def _parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of positional parameters; "" for those that a call cannot name."""
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return ()
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple("" if p.kind is p.POSITIONAL_ONLY else p.name for p in positional)


def _computes_the_same(one: BlockGraph, other: BlockGraph) -> bool:
    """Whether two graphs are the same but for pins of values inside, and where their operations
    come from."""
    return _without_sources(without_pins(one)) == _without_sources(without_pins(other))


def _without_sources(graph: BlockGraph) -> BlockGraph:
    operations = [
        replace(
            op,
            source=Source(),
            scope="",
            places=None,
            regions=tuple(map(_without_sources, op.regions)),
        )
        for op in graph.operations
    ]
    return replace(graph, operations=tuple(operations))


def _traced(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
    """JAX's trace. Where the layouts in types do not tell how a result lies, and JAX asks for
    `out_sharding=`, arguments are traced without theirs: the plan lays results out."""
    import jax

    try:
        return signature.jitted.trace(*args, **kwargs)
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":  # JAX has no public name for it
            raise
        leaves, tree = jax.tree.flatten((call.args, call.kwargs))

        def flat(*arrays: Any) -> Any:
            given, named = call.whole(*jax.tree.unflatten(tree, arrays))
            return signature.jitted(*given, **named)

        flat.__name__ = flat.__qualname__ = getattr(signature.fn, "__name__", "program")
        try:
            return jax.jit(flat).trace(*map(without_layout, leaves))
        except Exception:
            raise error from None


def without_layout(leaf: Any) -> Any:
    """An argument as JAX sees it where no axes of a mesh are Explicit: without a layout in its
    type."""
    import jax

    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    if not getattr(mesh, "explicit_axes", ()):
        return leaf
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)


def _program(
    traced: Any,
    leaves: Sequence[tuple[tuple[Any, ...], Any]],
    in_tree: Any,
    donated: Sequence[bool],
    positions: Sequence[int],
    static: tuple[tuple[int | str, Any], ...],
    name: str,
) -> Program:
    """The program of a trace, of which `leaves` are the arguments with their paths.

    JAX's own account of them (`args_info`) is not asked for: it puts them into pytrees of the
    user's, whose classes may refuse what is no array.
    """
    from .jaxprs import block_graph

    if traced.jaxpr.in_avals and any(hasattr(a, "inner_aval") for a in traced.jaxpr.in_avals):
        raise UnplannedError(
            "an argument is a mutable reference", hint="Pass its value and return the new value."
        )
    if len(leaves) != len(traced.jaxpr.in_avals):
        raise TraceError(
            "the function closes over a value of another trace that is not finished",
            hint="Pass it as an argument instead.",
        )
    places: dict[Any, None] = {}
    graph = replace(
        block_graph(traced.jaxpr.jaxpr, traced.jaxpr.consts, name, places=places),
        input_names=tuple(_input_name(path, positions) for path, _ in leaves),
        output_names=_paths(traced.out_tree, traced.jaxpr.out_avals),
        donated=tuple(donated),
    )
    out_tree = traced.out_tree
    return Program(
        graph,
        encode_treedef(in_tree),
        encode_treedef(out_tree),
        static,
        in_tree,
        out_tree,
        places=tuple(places),
        out_specs=tuple(map(_typed_spec, traced.jaxpr.out_avals)),
    )


def _typed_spec(aval: Any) -> Any:
    sharding: Any = getattr(aval, "sharding", None)
    return sharding.spec if getattr(getattr(sharding, "mesh", None), "explicit_axes", ()) else None


def _paths(tree: Any, avals: Sequence[Any]) -> tuple[str, ...]:
    """The path of every leaf; its number where these cannot be told.

    Only an object of the user's class tells them, so one is made of tracers. JAX makes results of
    arrays alone, so a class that refuses tracers is no fault.
    """
    import jax

    found: list[str] = []

    def see(*leaves: Any) -> tuple[()]:
        paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, leaves))
        found.extend(jax.tree_util.keystr(path) for path, _ in paths)
        return ()

    try:
        jax.eval_shape(see, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    except Exception:  # whatever the user's class raises
        return tuple(f"[{j}]" for j in range(len(avals)))
    return tuple(found)


def _input_name(path: tuple[Any, ...], positions: Sequence[int]) -> str:
    """`[0]['w']` for what is at ['w'] in argument 0, `['mask']` for a keyword argument."""
    from jax.tree_util import keystr

    inside = keystr(path[1:])
    if path[0].idx == 1:
        return inside
    return f"[{positions[path[1].idx]}]{keystr(path[2:])}"


def _check_arguments(call: Call, positions: Sequence[int], cause: Exception) -> None:
    """Raise TraceError for the first argument that JAX does not accept, if there is one."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path((call.args, call.kwargs))
    for path, leaf in leaves:
        try:
            jax.jit(lambda x: x).trace(leaf)
        except (TypeError, ValueError, OverflowError) as e:
            why = "" if isinstance(e, TypeError) else f": {str(e).splitlines()[0]}"
            raise TraceError(
                f"{type(leaf).__name__} {_brief(leaf)} is not an array{why}",
                where=f"argument {_input_name(path, positions)}",
                hint="Pass arrays, jax.ShapeDtypeStructs or numbers; put others in static_argnums.",
            ) from cause


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
