"""Equivalence: whether a form of a program computes what the program computes.

Both are read as terms. An operation of the form on equal operands that the program has too is equal
without more ado, in whatever order and however often it stands there. What is left are operations
that rules made: each group of them is held, on its own, against what it takes the place of. The
rules that the plan names run on that piece of the program, until the group is among what they make
of it. Nothing of the search is used, and nothing that a file says is believed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.ids import ClassId
from tapestry_egg.metakernels.signatures.parameters import exact, exact_of
from tapestry_egg.rewrite.terms.explore import makes, relevant
from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule

# Pieces: new operations of a form, held against the little part of a program that they replace.
#
# Rules run on that part alone, until what is new is among what they make of it.


#: What a value is: a number shared by equal values. Those of the program come first.
Class = ClassId


@dataclass(frozen=True)
class New:
    """An operation of the form that the program does not have, on classes."""

    op: Operation
    operands: tuple[Class, ...]
    inputs: tuple[TensorType, ...]
    output: TensorType
    number: int  # its place in the form, for messages


@dataclass(frozen=True)
class Piece:
    """A small graph, values of it by class, and new operations that must be equal to some of it."""

    graph: BlockGraph
    at: Mapping[Class, int]
    new: tuple[tuple[Class, New], ...]
    pairs: tuple[tuple[Class, Class], ...]

    def key(self) -> Any:
        """Equal for pieces that differ in names alone, as those of equal layers do."""
        from .derivation import digest

        number = {c: k for k, (c, _) in enumerate(self.new)}

        def name(c: Class) -> Any:
            return ("new", number[c]) if c in number else self.at.get(c)

        said = [
            (n.op.kernel, exact(n.op.params), [name(d) for d in n.operands], n.inputs, n.output)
            for _, n in self.new
        ]
        return digest(self.graph), repr((said, [(name(b), name(v)) for b, v in self.pairs]))


def piece_of(
    given: BlockGraph,
    class_of: Mapping[int, Class],
    value_of: Mapping[Class, int],
    taken: Sequence[int],
    wanted: Sequence[int],
) -> tuple[BlockGraph, dict[Class, int]]:
    """Operations `taken` of a program as a graph of their own, and where in it each class is."""

    def same(v: int) -> int:
        return value_of[class_of[v]]

    operations = [given.operations[k] for k in taken]
    made = {op.outputs[0] for op in operations}
    read = {same(v) for op in operations for v in op.inputs} | {same(v) for v in wanted} | made
    number = {v: k for k, v in enumerate(sorted(read))}
    graph = BlockGraph(
        name="piece",
        values=tuple([given.values[v] for v in number]),
        operations=tuple(
            [
                replace(
                    op,
                    inputs=tuple([number[same(v)] for v in op.inputs]),
                    outputs=(number[op.outputs[0]],),
                    remat=None,
                    scope="",
                )
                for op in operations
            ]
        ),
        inputs=tuple([k for v, k in number.items() if v not in made and v not in given.constants]),
        outputs=tuple([number[same(v)] for v in wanted]),
        constants={number[v]: given.constants[v] for v in read if v in given.constants},
    )
    return graph, {class_of[v]: k for v, k in number.items()}


#: What was proven in this process, by the piece and the rules.
_PROVEN: dict[Any, bool] = {}


def proven(piece: Piece, rules: Sequence[Rule]) -> bool:
    """Whether rules that run on the piece alone make the new operations, and find them equal to
    what they stand for. Rules may promise more on the left than on the right, so what is new is
    no input of theirs."""
    rules = relevant(piece.graph, rules)
    key = _question(piece, rules)
    if key not in _PROVEN:
        made = [
            (c, Applied(n.op.kernel, n.op.params, n.inputs, n.output, None), n.operands)
            for c, n in piece.new
        ]
        _PROVEN[key] = makes(piece.graph, piece.at, made, piece.pairs, rules)
    return _PROVEN[key]


def is_known(piece: Piece, rules: Sequence[Rule]) -> bool:
    """Whether this process has proven a piece by these rules: of another form, or in a region of
    the program whose forms were found before."""
    return _PROVEN.get(_question(piece, relevant(piece.graph, rules)), False)


def _question(piece: Piece, rules: Sequence[Rule]) -> Any:
    """What an answer in `_PROVEN` depends on."""
    return piece.key(), tuple([(r.name, r.egg) for r in rules])


# Operations of the program around a group that its rules may look at: first few, then more. A loss
# under an embedding that is also the last product's operand needs some 80.
_NEAR = (48, 96, 400)
# Passes over a form; each takes in what the last has found to stand for a value of the program.
_MOST_PASSES = 50


def check_equivalent(
    given: BlockGraph, form: BlockGraph, named: Collection[str], rules: Callable[[], Sequence[Rule]]
) -> None:
    """Check that `form` computes what `given` does, by the named rules or, where those do not
    reach, by all of `rules`, which are asked for only where something is new.

    Raises PlanError, with the form's operation, where it does not follow.
    """
    _check_boundary(given, form)
    _Matching(given, form, frozenset(named), rules).check()


def _check_boundary(given: BlockGraph, form: BlockGraph) -> None:
    """What enters and leaves must be the same."""
    for what, mine, theirs in (
        ("name", given.name, form.name),
        ("inputs", _types(given, given.inputs), _types(form, form.inputs)),
        ("outputs", _types(given, given.outputs), _types(form, form.outputs)),
        ("input_names", given.input_names, form.input_names),
        ("output_names", given.output_names, form.output_names),
        ("donated", given.donated, form.donated),
    ):
        if mine != theirs:
            raise PlanError(
                "is not that of the program" if what == "name" else "are not those of the program",
                where=what,
            )


def _types(graph: BlockGraph, values: Sequence[int]) -> tuple[TensorType, ...]:
    return tuple([graph.values[v] for v in values])


@dataclass
class _Table:
    """Classes by what makes them: equal operations on equal operands share one."""

    classes: dict[Any, Class] = field(default_factory=dict)
    count: int = 0

    def fresh(self) -> Class:
        self.count += 1
        return Class(self.count - 1)

    def of(self, key: Any) -> Class:
        found = self.classes.get(key)
        if found is None:
            found = self.classes[key] = self.fresh()
        return found


class _Matching:
    """A form held against the program that it was made of."""

    def __init__(
        self,
        given: BlockGraph,
        form: BlockGraph,
        named: frozenset[str],
        rules: Callable[[], Sequence[Rule]],
    ) -> None:
        self.given, self.form, self.named, self.rules = given, form, named, rules
        self.table = _Table()
        self.class_of: dict[int, Class] = {}  # value of the program
        self.value_of: dict[Class, int] = {}  # the first value of each class
        self.effects: dict[Any, list[tuple[Class, ...]]] = {}
        self.maker = given.producers()
        self.region_keys: dict[tuple[int, int], str] = {}
        self._read_given()
        # Values of the form with those of the program that they must be equal to, all of them; and
        # for each the first, which it is taken for.
        self.claims: dict[tuple[int, int], None] = {}
        self.stands: dict[int, int] = {}
        self.new: dict[Class, New] = {}
        self.form_class: dict[int, Class] = {}

    @cached_property
    def known(self) -> tuple[list[Rule], list[Rule]]:
        """The named rules with those that unite nothing, and all; the former only if some are."""
        known = [r for r in self.rules() if r.ruleset in PROGRAM_RULESETS]
        named = [r for r in known if r.name in self.named]
        # Rules that unite nothing derive facts (an order, say) that others ask for.
        derive = [r for r in known if r.name not in self.named and "(union" not in r.egg]
        return ([*named, *derive] if named else []), known

    # The program

    def _read_given(self) -> None:
        graph = self.given
        for k, v in enumerate(graph.inputs):
            self._define(v, self.table.of(("in", k)))
        for v, array in _constants(graph):
            self._define(v, self.table.of(_content(array, graph.values[v])))
        for _, op in _operations(graph):
            key = self._key(op, tuple([self.class_of[v] for v in op.inputs]), graph)
            if op.effectful:
                classes = tuple([self.table.fresh() for _ in op.outputs])
                self.effects.setdefault(key, []).append(classes)
            else:
                classes = tuple([self.table.of((key, q)) for q in range(len(op.outputs))])
            for v, c in zip(op.outputs, classes, strict=True):
                self._define(v, c)
        self.own = self.table.count

    def _define(self, v: int, c: Class) -> None:
        self.class_of[v] = c
        self.value_of.setdefault(c, v)

    def _key(
        self,
        op: Operation,
        operands: tuple[Class, ...],
        graph: BlockGraph,
        regions: tuple[str, ...] | None = None,
    ) -> Any:
        """What makes an operation. Numbers of recomputed regions only keep a compiler from merging
        what is computed twice."""
        from .derivation import digest

        if regions is None:
            regions = tuple([digest(r) for r in op.regions])
        return (
            op.kernel,
            exact_of(op),
            operands,
            _types(graph, op.outputs),
            regions,
            op.effectful,
        )

    # The form

    def check(self) -> None:
        for _ in range(_MOST_PASSES):
            if not self._pass():
                break
        self._check_effects()
        todo = [(b, v) for b, v in self.claims if self.raw[b] != self.class_of[v]]
        for group in self._groups(todo):
            _Proof(self, group).find()

    def _claim(self, b: int, v: int) -> None:
        self.claims[b, v] = None
        self.stands.setdefault(b, v)

    def _pass(self) -> bool:
        """Give every value of the form its class; whether something new stands for another."""
        form, before = self.form, len(self.claims)
        self.raw: dict[int, Class] = {}
        self.form_class, self.new = {}, {}
        made = _Table(count=self.own)  # classes that the program does not have
        equal: dict[Class, Class] = {}  # .. and what they must be equal to
        left = {key: list(classes) for key, classes in self.effects.items()}
        self.unmatched: list[tuple[int, Operation]] = []

        def define(b: int, c: Class) -> None:
            self.raw[b] = c
            if b in self.stands and c >= self.own:
                equal.setdefault(c, self.class_of[self.stands[b]])
            self.form_class[b] = equal.get(c, c)

        for k, v in enumerate(form.inputs):
            define(v, self.table.of(("in", k)))
        for v, array in _constants(form):
            key = _content(array, form.values[v])
            known = self.table.classes.get(key)
            define(v, made.of(key) if known is None else known)
        for number, op in _operations(form):
            operands = tuple([self.form_class[v] for v in op.inputs])
            model = self._model(op)
            regions = self._regions(op, model)
            key = self._key(op, operands, form, regions)
            outputs = self._lookup(op, key, left)
            if outputs is None and model is not None and self._alike(op, model, regions):
                for b, v in zip(op.inputs, model.inputs, strict=True):
                    if self.form_class[b] != self.class_of[v]:
                        self._claim(b, v)
                meant = tuple([self.class_of[v] for v in model.inputs])
                outputs = self._lookup(op, self._key(op, meant, form, regions), left)
            if outputs is None:
                if op.effectful:
                    self.unmatched.append((number, op))
                outputs = tuple([made.of((key, q)) for q in range(len(op.outputs))])
                if len(op.outputs) == 1:
                    types = _types(form, op.inputs), form.values[op.outputs[0]]
                    self.new.setdefault(outputs[0], New(op, operands, *types, number))
            for b, c in zip(op.outputs, outputs, strict=True):
                define(b, c)
        for b, v in zip(form.outputs, self.given.outputs, strict=True):
            if self.form_class[b] != self.class_of[v]:
                self._claim(b, v)
        self.left = left
        return len(self.claims) > before

    def _lookup(
        self, op: Operation, key: Any, left: dict[Any, list[tuple[Class, ...]]]
    ) -> tuple[Class, ...] | None:
        """The classes of the program's operation of that key, if it has one."""
        if op.effectful:
            return left[key].pop(0) if left.get(key) else None
        found = [self.table.classes.get((key, q)) for q in range(len(op.outputs))]
        return None if None in found else tuple([c for c in found if c is not None])

    def _model(self, op: Operation) -> Operation | None:
        """The program's operation in whose place an operation of the form stands: forms keep the
        numbers of values. Only a hint: what follows from it is checked."""
        places = {self.maker.get(v, -1) for v in op.outputs}
        if len(places) != 1 or -1 in places:
            return None
        model = self.given.operations[places.pop()]
        return model if model.outputs == op.outputs else None

    def _alike(self, op: Operation, model: Operation, regions: tuple[str, ...]) -> bool:
        none: tuple[Class, ...] = ()
        return len(op.inputs) == len(model.inputs) and self._key(
            op, none, self.form, regions
        ) == self._key(model, none, self.given)

    def _regions(self, op: Operation, model: Operation | None) -> tuple[str, ...]:
        """Keys of an operation's regions: those of the program's, where they are equal to them."""
        from .derivation import digest

        keys = []
        for r, region in enumerate(op.regions):
            at = (op.outputs[0] if op.outputs else -1, r)
            if at not in self.region_keys:
                key = digest(region)
                if model is not None and r < len(model.regions):
                    theirs = digest(model.regions[r])
                    if theirs != key:
                        try:
                            _check_boundary(model.regions[r], region)
                            _Matching(model.regions[r], region, self.named, self.rules).check()
                        except PlanError as e:
                            raise PlanError(
                                e.what, where=f"{_place(op)} / region {r} / {e.where}", hint=e.hint
                            ) from None
                        key = theirs
                self.region_keys[at] = key
            keys.append(self.region_keys[at])
        return tuple(keys)

    def _check_effects(self) -> None:
        if self.unmatched:
            number, op = self.unmatched[0]
            raise PlanError(
                "has an effect that the program does not have",
                where=f"operation {number} ({op.kernel})",
            )
        if any(self.left.values()):
            missing = next(key for key, rest in self.left.items() if rest)
            raise PlanError(
                f"an effect of the program is missing: {missing[0]}", where="operations"
            )

    # What rules made

    def _groups(self, todo: Sequence[tuple[int, int]]) -> Iterator[_Group]:
        """What stands for something else, together with what shares a new operation with it."""
        groups: list[_Group] = []
        for b, v in todo:
            new = self._new_below(self.raw[b])
            mine = _Group([(self.raw[b], self.class_of[v])], dict.fromkeys(new))
            rest = []
            for other in groups:
                if other.new.keys().isdisjoint(mine.new):
                    rest.append(other)
                else:
                    mine = _Group([*other.pairs, *mine.pairs], {**other.new, **mine.new})
            groups = [*rest, mine]
        for group in groups:
            group.pairs = list(dict.fromkeys(group.pairs))
            yield group

    def _new_below(self, c: Class) -> list[Class]:
        """The new operations that a class is made of, each after those that it reads."""
        order: list[Class] = []
        seen: set[Class] = set()
        stack = [(c, False)]
        while stack:
            at, leaving = stack.pop()
            if leaving:
                order.append(at)
            elif at >= self.own and at not in seen:
                seen.add(at)
                stack.append((at, True))
                if at in self.new:
                    stack += [(d, False) for d in self.new[at].operands]
        return order

    def place(self, c: Class) -> str:
        """Where a new class is made, for messages."""
        if c in self.new:
            return f"operation {self.new[c].number} ({self.new[c].op.kernel})"
        value = self.value_of.get(c)
        made = self.maker.get(-1 if value is None else value)
        return _place(self.given.operations[made]) if made is not None else f"value {value}"


@dataclass
class _Group:
    """Classes of a form with those of the program that they stand for, and the new operations that
    they are made of, each after those that it reads."""

    pairs: list[tuple[Class, Class]]
    new: dict[Class, None]


class _Proof:
    """One group of new operations, held against the piece of the program that it replaces."""

    def __init__(self, matching: _Matching, group: _Group) -> None:
        self.m, self.group = matching, group
        reads = [d for c in group.new if c in matching.new for d in matching.new[c].operands]
        reads += [b for b, _ in group.pairs]
        self.leaves = dict.fromkeys(c for c in reads if c < matching.own)

    def find(self) -> None:
        m = self.m
        lost = [c for c in self.group.new if c not in m.new]
        named, known = ([], []) if lost else m.known
        if named and all(self._fits(b, v) for b, v in self.group.pairs):
            few, more, many = _NEAR
            if is_known(self._piece(few, True), known):
                return
            # All rules on little are tried before a few rules on more: names that a form has may
            # lack a rule that made it, and then these fail on everything, the longest last.
            for rules, most, stop in (
                (named, few, True),
                (known, few, True),
                (named, few, False),
                (known, few, False),
                (named, more, False),
                (known, more, False),
                (named, many, False),
            ):
                if proven(self._piece(most, stop), rules):
                    return
        b, v = self.group.pairs[0]
        by = ", ".join(sorted(m.named)) or "none"
        raise PlanError(
            f"does not follow from the program, where {m.place(v)} stands (rules: {by})",
            where=m.place((lost or [b])[0]),
        )

    def _fits(self, b: Class, v: Class) -> bool:
        made = self.m.new.get(b)
        value = self.m.given.values[self.m.value_of[v]]
        own = made.output if made else self.m.given.values[self.m.value_of[b]]
        return own == value

    def _piece(self, most: int, stop: bool) -> Piece:
        """The piece of the program from what the group reads to what it stands for; with `stop`
        nothing from before what it reads. At most so many operations."""
        m = self.m
        ends = {m.value_of[c] for c in self.leaves} if stop else set()
        wanted = [m.value_of[v] for _, v in self.group.pairs]
        wanted += [m.value_of[c] for c in self.leaves]
        taken: dict[int, None] = {}
        ring = [m.value_of[v] for _, v in self.group.pairs]
        if not stop:
            ring = wanted
        seen = set[int]()
        while ring and len(taken) < most:
            near: list[int] = []
            for u in ring:
                v = m.value_of[m.class_of[u]]
                k = m.maker.get(v)
                if v in seen or v in ends or k is None or k in taken:
                    continue
                seen.add(v)
                op = m.given.operations[k]
                if not (op.effectful or op.regions or len(op.outputs) != 1) and len(taken) < most:
                    taken[k] = None
                    near += op.inputs
            ring = near
        graph, at = piece_of(m.given, m.class_of, m.value_of, sorted(taken), wanted)
        new = tuple([(c, m.new[c]) for c in self.group.new])
        return Piece(graph, at, new, tuple(self.group.pairs))


def _operations(form: BlockGraph) -> Iterator[tuple[int, Operation]]:
    """All operations of a graph with their numbers; those that run before it does come first."""
    if form.prepared is not None:
        yield from ((-1 - k, op) for k, op in enumerate(form.prepared.operations))
    yield from enumerate(form.operations)


def _constants(form: BlockGraph) -> Iterator[tuple[int, np.ndarray]]:
    """The constants that a graph is given, not those that its prepared operations compute."""
    if form.prepared is None:
        yield from form.constants.items()
        return
    made = {v for op in form.prepared.operations for v in op.outputs}
    yield from form.prepared.constants.items()
    read = set(form.prepared.constants)
    yield from ((v, form.constants[v]) for v in form.constants if v not in made and v not in read)


def _content(array: np.ndarray, type_: TensorType) -> Any:
    """A key of a constant: its type and its bytes."""
    array = np.asarray(array)
    return ("constant", type_, hashlib.sha256(array.tobytes()).hexdigest())


def _place(op: Operation) -> str:
    return f"{op.kernel} ({op.source})" if op.source.file else op.kernel
