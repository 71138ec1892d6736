"""Monoids as data: what a reduction keeps of its elements, and how two such states combine.

The file `monoids.yaml` says what every field means and holds those that ship with the package.
Users add files of their own; those are admitted only if their laws hold (`laws.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tapestry_egg.formulas import Formula
from tapestry_egg.yaml_nodes import YamlNode, compose_yaml

from .formula import MonoidError, parse_formula

KINDS = ("bool", "int", "uint", "float", "complex")
_CONSTANTS = frozenset(("lowest", "highest", "bits"))


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an element, a state or a result.

    `dtype` is the name of the part of the element whose dtype it has, or a dtype; an element's
    own parts have none. `trailing` names the dims beyond those of the reduced value.
    """

    name: str
    dtype: str = ""
    trailing: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Monoid:
    """A monoid: `wrap, combine, zero, unwrap` as formulas, and its laws.

    `terms` are names that `combine` may use. `exact` lists the kinds of dtypes on which combining
    is associative to the last bit; on others it is so up to rounding. `collective` combines states
    over a mesh axis for elements of the kinds `collected`; without one they are gathered.
    """

    name: str
    law: str
    element: tuple[Part, ...]
    state: tuple[Part, ...]
    result: tuple[Part, ...]
    wrap: Mapping[str, Formula]
    combine: Mapping[str, Formula]
    zero: Mapping[str, Formula]
    unwrap: Mapping[str, Formula]
    terms: Mapping[str, Formula]
    exact: tuple[str, ...] = ()
    commutative: bool = True
    collective: str = ""
    collected: tuple[str, ...] = ()
    where: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of dtypes of the (first part of the) elements: `bool`, `int`, `float`, ..."""
        return self.element[0].kinds

    @property
    def single(self) -> bool:
        """Whether a state is one tensor like the element, so that a plan can hold it."""
        return (
            len(self.element) == len(self.state) == 1
            and self.state[0].dtype == self.element[0].name
            and not self.state[0].trailing
        )

    def native(self, kind: str) -> str:
        """The one collective that combines states over a mesh axis, or `` if none does.

        `psum`, `pmax` or `pmin`, for elements of the given kind.
        """
        return self.collective if kind in self.collected and self.single else ""


# Published whole, never filled in place: other threads read it meanwhile.
_KNOWN: Mapping[str, Monoid] = {}
_LOCK = threading.RLock()


def monoids() -> Mapping[str, Monoid]:
    """Every monoid known, by name: those that ship with the package, then those added."""
    global _KNOWN
    if not _KNOWN:
        with _LOCK:
            if not _KNOWN:
                shipped = read_monoids(Path(__file__).with_name("monoids.yaml"))
                _KNOWN = {found.name: found for found in shipped}
    return _KNOWN


def monoid(name: str | None) -> Monoid:
    """The monoid called `name`. Raises MonoidError where there is none."""
    found = monoids().get(name or "")
    if found is None:
        raise MonoidError(f"there is no monoid {name!r}", hint=f"Known are {', '.join(monoids())}.")
    return found


def single_monoids() -> tuple[str, ...]:
    """Names of the monoids whose states are single tensors: those that plans may leave pending."""
    return _singles(tuple(monoids()))


@cache
def _singles(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if monoid(name).single)


def add_monoids(path: str | Path) -> tuple[Monoid, ...]:
    """Read a file of your own, in the form of `monoids.yaml`, and make its monoids known.

    Returns them. Raises MonoidError for a malformed file, for a name that is taken, and for a
    monoid that does not keep its laws; nothing is added then.
    """
    from .laws import check_laws

    added = read_monoids(Path(path))
    for new in added:
        if new.name in monoids():
            raise MonoidError(f"there is a monoid {new.name!r} already", where=new.where)
        check_laws(new)
    global _KNOWN
    with _LOCK:
        _KNOWN = {**monoids(), **{new.name: new for new in added}}
        _singles.cache_clear()
    return added


# ---- reading -----------------------------------------------------------------------------------


def read_monoids(path: Path) -> tuple[Monoid, ...]:
    """The monoids of a file, unchecked against their laws.

    Raises MonoidError with `file:line:column` for the first fault in it.
    """
    root = compose_yaml(path, MonoidError)
    if root is None:
        return ()
    return tuple(_monoid(name, node) for name, node in root.mapping().items())


_REQUIRED = ("law", "element", "state", "wrap", "combine", "zero", "unwrap")
_OPTIONAL = ("let", "exact", "commutative", "mesh")
_COLLECTIVES = ("psum", "pmax", "pmin")


def _monoid(name: str, entry: YamlNode) -> Monoid:
    given = entry.fields(f"monoid {name!r}", _REQUIRED, _OPTIONAL)
    element = tuple(_part(n, e, "kinds") for n, e in given["element"].mapping().items())
    state = tuple(_part(n, e, "dtype") for n, e in given["state"].mapping().items())
    if not element or not state:
        raise entry.error(f"monoid {name!r} has no element or no state")
    of = frozenset(p.name for p in element)
    parts = frozenset(p.name for p in state)
    for part in state:
        _check_dtype(part, of, given["state"])
    pairs = frozenset(f"{side}.{p}" for side in "ab" for p in parts)
    trailing = {p.name: p.trailing for p in element}
    kept = {p.name: p.trailing for p in state}
    both = {f"{side}.{n}": t for side in "ab" for n, t in kept.items()}
    let = given.get("let")
    terms = _formulas(let, pairs, chain=True) if let else {}
    wrap = _formulas(given["wrap"], of | _CONSTANTS, parts)
    combine = _formulas(given["combine"], pairs | set(terms), parts)
    zero = _formulas(given["zero"], _CONSTANTS, parts)
    result, unwrap = _unwrap(given["unwrap"], element, state)
    collective, collected = "", element[0].kinds
    if "mesh" in given:
        collective, collected = _collective(given["mesh"], state, collected)
    for formulas, sizes in ((wrap, trailing), (combine, both)):
        for part in state:
            _check_dims(part, formulas[part.name], {**sizes, **_of_terms(terms, sizes)}, entry)
    for part in result:
        _check_dims(part, unwrap[part.name], kept, entry)
    return Monoid(
        name=name,
        law=given["law"].text(),
        element=element,
        state=state,
        result=result,
        wrap=wrap,
        combine=combine,
        zero=zero,
        unwrap=unwrap,
        terms=terms,
        exact=_kinds(given["exact"]) if "exact" in given else (),
        commutative=given["commutative"].flag() if "commutative" in given else True,
        collective=collective,
        collected=collected,
        where=entry.where,
    )


def _part(name: str, entry: YamlNode, needed: str) -> Part:
    given = entry.fields(f"part {name!r}", (needed,), ("shape",))
    trailing = _trailing(given["shape"]) if "shape" in given else ()
    if needed == "kinds":
        return Part(name, "", trailing, _kinds(given["kinds"]))
    return Part(name, given["dtype"].text(), trailing)


def _kinds(entry: YamlNode) -> tuple[str, ...]:
    kinds = entry.texts()
    for kind in kinds:
        if kind not in KINDS:
            raise entry.error(f"{kind!r} is none of {', '.join(KINDS)}")
    return kinds


def _trailing(entry: YamlNode) -> tuple[str, ...]:
    inside = entry.text().strip()
    names = [w.strip() for w in inside.removeprefix("[").removesuffix("]").split(",")]
    if not (inside[:1] == "[" and inside[-1:] == "]" and names[0] == "..."):
        raise entry.error(f"{inside!r} is not a shape such as [..., e]")
    if not all(n.isidentifier() for n in names[1:]):
        raise entry.error(f"{inside!r} has a dim that is not a name")
    return tuple(names[1:])


def _check_dtype(part: Part, element: frozenset[str], entry: YamlNode) -> None:
    from tapestry_egg.graph.arrays import is_dtype

    if part.dtype not in element and not is_dtype(part.dtype):
        raise entry.error(f"{part.dtype!r} is neither a part of the element nor a dtype")


def _formulas(
    entry: YamlNode,
    names: frozenset[str],
    parts: frozenset[str] | None = None,
    *,
    chain: bool = False,
) -> dict[str, Formula]:
    """Formulas by part. With `chain`, each may use the names of those before it."""
    out: dict[str, Formula] = {}
    for name, text in entry.mapping().items():
        if parts is not None and name not in parts:
            raise text.error(f"there is no part {name!r}", f"Parts are {', '.join(sorted(parts))}.")
        formula = parse_formula(text.text(), text.where)
        allowed = names | set(out) if chain else names
        for unknown in sorted(formula.names - allowed):
            raise text.error(
                f"{unknown!r} is not known here", f"Known: {', '.join(sorted(allowed))}."
            )
        out[name] = formula
    for missing in sorted((parts or frozenset()) - set(out)):
        raise entry.error(f"there is no formula for {missing!r}")
    return out


def _unwrap(
    entry: YamlNode, element: tuple[Part, ...], state: tuple[Part, ...]
) -> tuple[tuple[Part, ...], dict[str, Formula]]:
    """The parts of the result and their formulas; `{is, shape, dtype}` where one is not plain.

    A result that only passes a part of the state on has its dtype, others the first element's.
    """
    kept = {p.name: p.dtype for p in state}
    result, formulas = [], {}
    for name, text in entry.mapping().items():
        given = {"is": text}
        if text.is_mapping:
            given = text.fields(f"result {name!r}", ("is",), ("shape", "dtype"))
        made = given["is"]
        formula = parse_formula(made.text(), made.where)
        for unknown in sorted(formula.names - set(kept)):
            raise made.error(f"{unknown!r} is not a part of the state")
        trailing = _trailing(given["shape"]) if "shape" in given else ()
        plain = kept.get(formula.text.strip(), element[0].name)
        part = Part(name, given["dtype"].text() if "dtype" in given else plain, trailing)
        _check_dtype(part, frozenset(p.name for p in element), made)
        result.append(part)
        formulas[name] = formula
    if not result:
        raise entry.error("there is no result")
    return tuple(result), formulas


def _collective(
    entry: YamlNode, state: tuple[Part, ...], kinds: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """`{total: psum(total)}`: the collective, and the kinds of elements that it is for."""
    given = dict(entry.mapping())
    own = given.pop("kinds", None)
    part, known = state[0].name, [f"{name}({state[0].name})" for name in _COLLECTIVES]
    text = given[part].text().replace(" ", "") if [*given] == [part] and len(state) == 1 else ""
    if text not in known:
        hint = f"Write {part}: {' or '.join(known)}."
        raise entry.error("`mesh` is one collective, of a state of one part", hint)
    return text.partition("(")[0], _kinds(own) if own else kinds


def _of_terms(
    terms: Mapping[str, Formula], sizes: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for name, formula in terms.items():
        widest = [out.get(n, sizes.get(n, ())) for n in formula.names]
        out[name] = max(widest, key=len, default=())
    return out


def _check_dims(
    part: Part, formula: Formula, sizes: Mapping[str, tuple[str, ...]], entry: YamlNode
) -> None:
    for name in sorted(formula.names):
        own = sizes.get(name, ())
        if own != part.trailing[: len(own)]:
            raise entry.error(
                f"{name!r} has dims {own} beyond the value's, which {part.name!r} has not",
                hint=formula.text,
            )
