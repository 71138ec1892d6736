"""Which arguments of a function are static, donated or laid out by the user, as `jax.jit` reads it.

Numbers and names are inferred from each other by `inspect.signature`. What a function that is
already jitted says of itself is kept, also through `functools.partial` and bound methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from tapestry_egg.errors import GraphError, TraceError, UnplannedError
from tapestry_egg.graph.pytrees import along_prefix

from .constraints import check_layout_kept


@dataclass(frozen=True, eq=False)
class Signature:
    """A function with the words of `jax.jit` about its arguments.

    `written` is `jax.jit` of the function with all of them, `jitted` with those about static and
    donated arguments alone: shardings are for the plan, and where the function is traced no mesh
    need be active. Negative numbers of static arguments count from the end of the positional
    arguments of a call. `in_shardings` and `out_shardings` are prefixes of the pytrees of
    positional arguments and results, None where nothing is said.
    """

    fn: Callable[..., Any]
    jitted: Any
    written: Any
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    in_shardings: Any = None
    out_shardings: Any = None
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    placed: bool = False

    def on(self, mesh: Any) -> Any:
        """`written` where bare `PartitionSpec`s are about a mesh."""
        import jax

        if self.in_shardings is None and self.out_shardings is None:
            return self.written
        return jax.jit(
            getattr(self.fn, "__wrapped__", self.fn) if _info(self.fn) else self.fn,
            **_jit_words(
                (self.static_argnums, self.static_argnames),
                (self.donate_argnums, self.donate_argnames),
            ),
            in_shardings=on_mesh(self.in_shardings, mesh),
            out_shardings=on_mesh(self.out_shardings, mesh),
        )

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments of a call, apart by what is traced and what is static."""
        if not self.static_argnums and not self.static_argnames:
            return Call(args, kwargs)
        count = len(args)
        fixed = {i % count for i in self.static_argnums if -count <= i < count}
        names = [k for k in kwargs if k in self.static_argnames]
        return Call(
            tuple(a for i, a in enumerate(args) if i not in fixed),
            {k: v for k, v in kwargs.items() if k not in names},
            (*((i, args[i]) for i in sorted(fixed)), *((k, kwargs[k]) for k in sorted(names))),
        )

    def donated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, ...]:
        """Whether each array of a call is donated, static arguments left out."""
        import jax

        fixed = {at for at, _ in self.split(args, kwargs).static}
        # JAX takes negative numbers and donates nothing for them.
        parts = [(i in self.donate_argnums, a) for i, a in enumerate(args) if i not in fixed]
        parts += [(k in self.donate_argnames, kwargs[k]) for k in sorted(kwargs) if k not in fixed]
        return tuple(flag for flag, part in parts for _ in jax.tree.leaves(part))


class Jitted:
    """What `te.jit` makes of a function: something with a signature."""

    signature: Signature


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """The traced arguments of one call, and its static ones: (position or name, value)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: tuple[tuple[int | str, Any], ...] = ()

    def whole(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Traced arguments with the static ones back in their places."""
        every = list(args)
        for at, value in self.static:  # positions come in order
            if isinstance(at, int):
                every.insert(at, value)
        return tuple(every), kwargs | {k: v for k, v in self.static if isinstance(k, str)}


def read_signature(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    **more: Any,
) -> Signature:
    """The words given, completed by JAX's inference and by what `fn` says of itself.

    Static arguments are those given here and those that `fn` has itself; of donation and shardings
    `fn`'s own words count where none are given here. `more` are others of `jax.jit`'s words.
    Raises TypeError or ValueError as `jax.jit` does, for words that do not fit `fn` or each other,
    TraceError for an object with arrays in it, which cannot be told from others.
    """
    import jax

    try:
        hash(fn)
    except TypeError as e:
        raise TraceError(
            f"{type(fn).__name__} cannot be traced as a function: {e}",
            hint="Its arrays are arguments: jit it by its library (eqx.filter_jit, nnx.jit), and "
            "give that.",
        ) from None
    more = {word: value for word, value in more.items() if value}
    anew = bool(more) or in_shardings is not None or out_shardings is not None
    own = _own_words(fn)
    if own is not None and not isinstance(fn, MethodType | functools.partial):
        fn = own.fn
    static = _resolved(fn, "static", static_argnums, static_argnames)
    donate = _resolved(fn, "donate", donate_argnums, donate_argnames)
    if own is not None:
        static = (_union(own.static_argnums, static[0]), _union(own.static_argnames, static[1]))
        if donate == ((), ()):
            donate = (own.donate_argnums, own.donate_argnames)
        in_shardings = own.in_shardings if in_shardings is None else in_shardings
        out_shardings = own.out_shardings if out_shardings is None else out_shardings
        if own.compiler_options:
            more.setdefault("compiler_options", own.compiler_options)
    same = own is not None and (*static, *donate) == (
        own.static_argnums,
        own.static_argnames,
        own.donate_argnums,
        own.donate_argnames,
    )
    words = _jit_words(static, donate)
    places = {"in_shardings": in_shardings, "out_shardings": out_shardings}
    said = {word: value for word, value in places.items() if value is not None}
    # With more static arguments than it has itself, an inner `jit` would not take them.
    inner = fn if _info(fn) is None else getattr(fn, "__wrapped__", fn)
    is_jitted = same and _info(fn) is not None  # with just these words
    bare = own is None or (own.in_shardings is None and own.out_shardings is None)
    jitted: Any = fn if is_jitted and bare else jax.jit(inner, **words)
    written: Any = fn if is_jitted and not anew else jitted
    if (anew or not is_jitted) and (said or more):
        written = jax.jit(inner, **words, **said, **more)
    return Signature(
        fn,
        jitted,
        written,
        *static,
        *donate,
        in_shardings,
        out_shardings,
        more.get("compiler_options", {}),
        bool(own and own.placed) or "device" in more or "backend" in more,
    )


def _jit_words(
    static: tuple[tuple[int, ...], tuple[str, ...]], donate: tuple[tuple[int, ...], tuple[str, ...]]
) -> dict[str, Any]:
    """What `jax.jit` is told so that it infers nothing: both numbers and names, or neither."""
    words: dict[str, Any] = {}
    for kind, (numbers, names) in (("static", static), ("donate", donate)):
        if numbers or names:
            words |= {f"{kind}_argnums": numbers, f"{kind}_argnames": names}
    return words


def _resolved(
    fn: Callable[..., Any],
    kind: str,
    numbers: int | Sequence[int] | None,
    names: str | Iterable[str] | None,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Numbers and names, each inferred from the other by JAX where only one is given."""
    import jax

    names = names if names is None or isinstance(names, str) else tuple(names)
    if numbers is None and names is None:
        return (), ()
    words: dict[str, Any] = {f"{kind}_argnums": numbers, f"{kind}_argnames": names}
    info = getattr(jax.jit(fn, **words), "_jit_info", None)
    if info is None:  # another version of JAX: as given
        numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers or ())
        return numbers, (names,) if isinstance(names, str) else names or ()
    return getattr(info, f"{kind}_argnums"), getattr(info, f"{kind}_argnames")


def _info(fn: Any) -> Any:
    """What a jitted function was told; None of a function around one, such as its gradient, to
    which `functools.wraps` has copied what was noted there."""
    return getattr(fn, "_jit_info", None) if type(fn) is _jitted_type() else None


@functools.cache
def _jitted_type() -> type:
    import jax

    return type(jax.jit(lambda: None))


def _own_words(fn: Any) -> Signature | None:
    """What a jitted function says of its arguments, seen through partial application."""
    if isinstance(fn, Jitted):
        return fn.signature
    if isinstance(fn, MethodType):
        return _behind(fn, _own_words(fn.__func__), 1, frozenset())
    if isinstance(fn, functools.partial):
        return _behind(fn, _own_words(fn.func), len(fn.args), frozenset(fn.keywords))
    info = _info(fn)
    if info is None:
        return None
    return Signature(
        fn,
        fn,
        fn,
        tuple(info.static_argnums),
        tuple(info.static_argnames),
        tuple(info.donate_argnums),
        tuple(info.donate_argnames),
        _shardings(info, "in"),
        _shardings(info, "out"),
        dict(getattr(info, "compiler_options_kvs", ())),
        bool(getattr(info, "device", None) or getattr(info, "backend", None)),
    )


def _behind(
    fn: Callable[..., Any], own: Signature | None, bound: int, named: frozenset[str]
) -> Signature | None:
    """The words about the arguments that are left when the first `bound` and `named` are given."""
    if own is None:
        return None
    room = _positional(fn)

    def numbers(given: tuple[int, ...]) -> tuple[int, ...]:
        shifted = (i - bound if i >= 0 else i for i in given if i < 0 or i >= bound)
        return tuple(i for i in shifted if -room <= i < room)

    def names(given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(n for n in given if n not in named and _takes(fn, n))

    inside = own.in_shardings
    return Signature(
        fn,
        fn,
        fn,
        numbers(own.static_argnums),
        names(own.static_argnames),
        numbers(own.donate_argnums),
        names(own.donate_argnames),
        inside[bound:] if isinstance(inside, tuple) else inside,
        own.out_shardings,
        own.compiler_options,
        own.placed,
    )


def _positional(fn: Callable[..., Any]) -> int:
    """How many positional arguments a function takes."""
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1 << 30
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _takes(fn: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(fn).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _shardings(info: Any, side: str) -> Any:
    """The prefix of shardings that an inner `jax.jit` was given; None where it was given none."""
    import jax

    leaves = getattr(info, f"{side}_shardings_leaves", ())
    if not any(isinstance(x, jax.sharding.Sharding | jax.sharding.PartitionSpec) for x in leaves):
        return None
    known = (jax.sharding.Sharding, jax.sharding.PartitionSpec)
    return jax.tree.unflatten(
        getattr(info, f"{side}_shardings_treedef"),
        [x if isinstance(x, known) else None for x in leaves],
    )


def argument_shardings(
    prefix: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """What `in_shardings` says of every array of a call, as `jax.jit` reads it.

    An entry is a sharding, a `PartitionSpec`, or None where nothing is said; empty where the prefix
    is None. Raises TraceError where it does not fit the arguments, or some come by keyword.
    """
    if prefix is None:
        return ()
    import jax

    if kwargs:
        raise TraceError(
            f"they speak of positional arguments, {next(iter(kwargs))!r} is passed by keyword",
            where="in_shardings",
            hint="Pass it by position, or use pins=, which go by path.",
        )
    tree = jax.tree.structure(args)
    return result_shardings(tuple(prefix) if isinstance(prefix, list) else prefix, tree, "in")


def result_shardings(prefix: Any, tree: Any, side: str = "out") -> tuple[Any, ...]:
    """The same for any structure."""
    if prefix is None:
        return ()
    try:
        found = along_prefix(prefix, tree)
    except GraphError as e:
        raise TraceError(
            e.what,
            where=f"{side}_shardings",
            hint="Give one sharding per argument or result, or a pytree of them for its parts.",
        ) from None
    for entry in found:
        check_layout_kept(getattr(entry, "sharding", entry), f"{side}_shardings")
        if hasattr(getattr(entry, "layout", None), "major_to_minor"):
            raise UnplannedError(
                "a Layout of array dims in memory is asked for, which no plan keeps",
                where=f"{side}_shardings",
                hint="Give shardings without a Layout.",
            )
    return tuple(getattr(entry, "sharding", entry) for entry in found)


def on_mesh(prefix: Any, mesh: Any) -> Any:
    """Shardings with a mesh in the place of bare `PartitionSpec`s, as `jax.jit` wants them."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if not isinstance(mesh, Mesh):
        return prefix

    def placed(x: Any) -> Any:
        return NamedSharding(mesh, x) if isinstance(x, PartitionSpec) else x

    return jax.tree.map(placed, prefix, is_leaf=lambda x: isinstance(x, PartitionSpec))


def on_meshes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Where each array was put on a mesh by its `NamedSharding`, else None; empty where none was.

    Arrays that JAX placed by itself are free to move, as under `jax.jit`.
    """
    import jax

    def lies(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return None
        if not isinstance(sharding.mesh, jax.sharding.Mesh) and not any(sharding.spec):
            return None  # the type of a shape on an Explicit mesh, that nobody has put there
        return sharding if getattr(x, "committed", True) else None

    found = tuple(map(lies, leaves))
    return found if any(s is not None for s in found) else ()


def _union(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*first, *second)))
