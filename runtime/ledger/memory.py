"""Bytes in memory on a device while the emitted program runs, by plain liveness.

A value is in memory from the step that makes it to the last step that reads it. Views take none.
What is computed element by element, or only moves elements, or is one number but for a part that is
written into it, is computed by the kernels that read it, unless

* a product, a collective, a loop or an optimization barrier reads it, or it is a result, or
* several kernels read it, and computing it in each would read more than storing it once.

Arguments are in memory from first to last. A result takes the place of a donated argument of its
type once that is read no more; any other result has a place from the first step on, in which
smaller arrays are put before. A result that is an argument or another result, or a view of one, is
a copy, unless it is the donated argument whose place it has. A kernel that works element by
element, an all-reduce, an update and a loop write over an operand that nothing reads later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from .equations import REGIONS, Program, Region, Step

#: How much of what may be computed by its readers is computed by them.
Fused = Literal["all", "some", "none"]
_BARRIER = "optimization_barrier"
_VIEWS = frozenset("reshape transpose squeeze expand_dims random_wrap random_unwrap copy".split())
#: What moves elements, or makes them of nothing.
_MOVES = frozenset(
    "broadcast_in_dim concatenate dynamic_slice gather iota pad rev slice split empty axis_index "
    "select_n clamp".split()
)
#: What makes each result of several elements: few of them, where the result is read.
_REDUCTIONS = frozenset(f"reduce_{monoid}" for monoid in "sum prod max min and or xor".split())
_FEW = 16
#: What makes several results element by element.
_SEVERAL = frozenset(("threefry2x32",))
#: What a library makes on GPUs, with its workspace beside the result.
PRODUCTS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot_general"))
#: What may give an array of its operands' shape, but not element by element.
_WHOLE = PRODUCTS | frozenset(
    "sort cumsum cumprod cummax cummin cumlogsumexp fft cholesky triangular_solve reduce_window "
    "reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add "
    "householder_product".split()
)
#: What writes into its first operand, and what can leave a result where an operand was.
_UPDATES = frozenset(
    "dynamic_update_slice scatter scatter-add scatter-mul scatter-min scatter-max".split()
)
_IN_PLACE = _UPDATES | {"psum", "pmax", "pmin"}


@dataclass(slots=True)
class Array:
    """An array in memory from step `begin` on, until before step `end`."""

    bytes: int
    begin: int
    end: int


def held(
    program: Program,
    region: Region,
    donated: Sequence[bool],
    reserves: bool = True,
    library: float = 0,
    fused: Fused = "some",
) -> int:
    """The most bytes that a device holds at a step; `donated` says it of every input.

    Unless the compiler `reserves` places for results, they are held from when they are made.
    Products whose results have `library` bytes or more are a library's: it reads arrays, and
    leaves its workspace beside the result, over which nothing is written. Others compute what they
    read that is made element by element of one array, of floats of 32 bits or less. If `all` is
    fused, as compilers may, nothing is stored because several kernels read it. Branches and
    products with a vector then compute what they read, and reductions of few elements are made
    where they are read. If `none` is, every value has an array of its own, which shares no place,
    and so has what such a product sums.
    """
    own = Held(program, region, library, fused)
    places, left = places_of(own, donated), set(region.inputs)
    for v in region.outputs:
        if v < 0:
            continue
        old = places.get(v)
        if own.root[v] in left:
            own.copy(v, old)
        elif old is not None:
            own.renew(v, old)
        left.add(own.root[v])
    if reserves:
        own.reserve(alone=fused == "none")
    return sum(program.bytes[v] for v in region.inputs) + own.most()


def places_of(own: Held, donated: Sequence[bool]) -> dict[int, int]:
    """Results of a program, and the donated inputs in whose places they are in the end."""
    region, types = own.region, own.program.types
    places: dict[object, list[int]] = defaultdict(list)
    for v, gone in zip(region.inputs, donated, strict=True):
        if gone:
            places[types[v]].append(v)
    results = dict.fromkeys(v for v in region.outputs if v >= 0)
    return {v: places[types[v]].pop(0) for v in results if places[types[v]]}


def is_opaque(program: Program, region: Region) -> bool:
    """Whether a region has a kernel of which it is not known what it holds beside its results."""
    own = Held(program, region, 0, "none")
    return any(
        any(is_opaque(program, inner) for inner in step.inner)
        if step.inner
        else not (step.sent or step.name in _WHOLE or own.computes_operands(step))
        for step in region.steps
        if not hands_on(step)
    )


class Held:
    """What one region holds beside its inputs."""

    def __init__(self, program: Program, region: Region, library: float, mode: Fused) -> None:
        self.program, self.region, self.library, self.mode = program, region, library, mode
        self.end = len(region.steps)
        self.root = self._roots()
        self.filled = {v for s in region.steps if self._is_filled(s) for v in s.makes}
        self.results = {self.root[v] for v in region.outputs if v >= 0}
        self.products = {v for s in region.steps if self._is_library_s(s) for v in s.makes}
        steps = () if mode == "none" else region.steps
        self.fused = {v for s in steps if self.is_fused(s) for v in s.makes}
        self.fused -= self._read_whole() | self.results
        self.fused -= self._read_by_many() if mode == "some" else set()
        self.of: dict[int, frozenset[int]] = {}  # value -> the arrays that it is computed of
        self.last: dict[int, int] = {}  # array -> the step that reads it last
        self.arrays: dict[int, Array] = {}
        self.over: dict[int, int] = {}  # array -> the one that it was written over
        self._find_arrays()

    # What is stored

    def _roots(self) -> dict[int, int]:
        """Value -> what it is a view of, or itself; barriers hand on what they are given."""
        found = {v: v for v in self.region.inputs}
        for step in self.region.steps:
            for read, made in zip(step.reads, step.makes, strict=False):
                if hands_on(step) and read >= 0:
                    found[made] = found.get(read, read)
            for made in step.makes:
                found.setdefault(made, made)
        return found

    def reads(self, step: Step) -> Iterable[int]:
        return (self.root.get(v, v) for v in step.reads if v >= 0)

    def is_fused(self, step: Step) -> bool:
        """Whether the kernels that read what a step makes can compute it themselves."""
        if step.name == "dynamic_update_slice" and step.reads[0] in self.filled:
            return True
        if step.sent or step.inner or step.name in _WHOLE | _UPDATES | {_BARRIER}:
            return False
        if step.name in _MOVES or (self.mode == "all" and self._reduces_few(step)):
            return True
        if len(step.makes) != 1 and step.name not in _SEVERAL:
            return False
        shape = self.program.types[step.makes[0]][0]
        return all(_spreads(self.program.types[v][0], shape) for v in step.reads if v >= 0)

    def _is_filled(self, step: Step) -> bool:
        """Whether every element of what a step makes is one number."""
        given = [self.program.types[v][0] for v in step.reads if v >= 0]
        return step.name == "broadcast_in_dim" and not any(given)

    def computes_operands(self, step: Step) -> bool:
        """Whether a step's kernel can compute what the step reads."""
        reduces = step.name.startswith("reduce") and not step.sent
        named = step.name in _UPDATES | _VIEWS | {"argmax", "argmin", "cumsum"}
        may = self.mode == "all" and (step.name == "cond" or self._summed_by_vector(step) > 0)
        return reduces or named or may or self.is_fused(step)

    def _read_whole(self) -> set[int]:
        """What some step reads as an array."""
        steps = [s for s in self.region.steps if not self.computes_operands(s)]
        fused = [s for s in self.region.steps if self.is_fused(s)]
        inside = {s.makes[0] for s in fused if self._is_of_one(s) or self._is_one_of_stack(s)}
        return {
            v
            for step in steps
            for v in self.reads(step)
            if v not in inside or not self._computes_arrays(step)
        }

    def _reduces_few(self, step: Step) -> bool:
        """Whether each result of a step reduces fewer elements than compilers put into a kernel."""
        if step.name not in _REDUCTIONS:
            return False
        read, made = (prod(self.program.types[v][0]) for v in (step.reads[0], step.makes[0]))
        return read < _FEW * made

    def _is_library_s(self, step: Step) -> bool:
        """Whether a step is a product that a library makes, as it does all convolutions."""
        large = any(self.program.bytes[v] >= self.library for v in step.makes)
        return step.name == "conv_general_dilated" or (step.name in PRODUCTS and large)

    def _computes_arrays(self, step: Step) -> bool:
        """Whether a step is a product whose kernel may compute arrays that it reads."""
        types = [self.program.types[v][1] for v in step.reads if v >= 0]
        narrow = all("float" in t and t != "float64" for t in types)
        return step.name in PRODUCTS and narrow and not self._is_library_s(step)

    def _is_of_one(self, step: Step) -> bool:
        """Whether a step reads one array of as many elements as it makes, besides scalars."""
        shapes = [self.program.types[v][0] for v in step.reads if v >= 0]
        return [x for x in shapes if x] == [self.program.types[step.makes[0]][0]]

    def _is_one_of_stack(self, step: Step) -> bool:
        """Whether a step takes one array of a stack, at a place that is known."""
        if step.name != "slice":
            return False
        (stack, _), (one, _) = (self.program.types[v] for v in (step.reads[0], step.makes[0]))
        return one == (1, *stack[1:])

    def _read_by_many(self) -> set[int]:
        """What several kernels read, if they would read more to compute it than to load it."""
        found: set[int] = set()
        kernels: dict[int, set[int]] = defaultdict(set)
        for t, step in reversed(list(enumerate(self.region.steps))):
            if hands_on(step):
                continue
            own: set[int] = set()
            for v in step.makes:
                again = len(kernels[v]) - 1 if v in self.fused and step.name not in _MOVES else 0
                read = sum(self.program.bytes[r] for r in self.reads(step))
                if again > 0 and again * read > (again + 2) * self.program.bytes[v]:
                    found.add(v)
                own |= kernels[v] if v in self.fused and v not in found else {t}
            for v in self.reads(step):
                kernels[v] |= own
        return found

    # When it is in memory

    def _made_of(self, v: int) -> frozenset[int]:
        root = self.root.get(v, v)
        return self.of.get(root, frozenset((root,)))

    def _find_arrays(self) -> None:
        steps = [(t, s) for t, s in enumerate(self.region.steps) if not hands_on(s)]
        for t, step in steps:
            made_of = frozenset[int]().union(*(self._made_of(v) for v in self.reads(step)))
            fused = all(v in self.fused for v in step.makes)
            self.of.update((v, made_of if fused else frozenset((v,))) for v in step.makes)
            if not fused:
                self.last.update(dict.fromkeys(made_of, t))
        for v in self.results:
            self.last.update(dict.fromkeys(self._made_of(v), self.end))
        for t, step in steps:
            for v in step.makes:
                if step.name == "cond" and v not in self.last:
                    continue  # nothing reads it: it is not made
                if v not in self.fused and self.program.bytes[v]:
                    end = self.last.get(v, t) + 1
                    self.arrays[v] = Array(self.program.bytes[v], t, end)
            if self.writes_over(step):
                self._write_over(step, t)
            stored = self._summed_by_vector(step) if self.mode == "none" else 0
            if beside := self._unordered(step) + stored:
                self.arrays[-1 - t] = Array(beside, t, t + 1)

    def writes_over(self, step: Step) -> bool:
        carries = step.name in REGIONS
        if self.mode == "none":
            return carries
        return carries or step.name in _IN_PLACE or self.is_fused(step)

    def _write_over(self, step: Step, t: int) -> None:
        """Put results of a step where an operand was that it reads last."""
        over = [w for v in self.reads(step) for w in self._made_of(v)]
        if step.name not in _IN_PLACE and step.name not in REGIONS:
            over = [w for w in over if w not in self.products]
        for v in step.makes:
            for w in over if v in self.arrays else ():
                old = self.arrays.get(w)
                if old and w != v and (old.end, old.bytes) == (t + 1, self.arrays[v].bytes):
                    old.end = t
                    self.over[v] = w
                    break

    def _unordered(self, step: Step) -> int:
        """Bytes of a result as a gather along another dim than the first leaves it, its blocks one
        after another."""
        along = step.params["all_gather_dimension"] if step.name == "all_gather" else 0
        if not along or self.results.isdisjoint(self.root[v] for v in step.makes):
            return 0
        return sum(self.program.bytes[v] for v in step.makes)

    def _summed_by_vector(self, step: Step) -> int:
        """Bytes of what a product with a vector sums: compilers multiply elements there, and add
        them up. 0 for what is no such product."""
        if step.name != "dot_general":
            return 0
        types = [self.program.types[v] if v >= 0 else ((), "") for v in step.reads]
        contracted, batch = step.params["dimension_numbers"]
        sizes = [
            [prod(shape[d] for d in dims) for dims in (own, together)]
            for (shape, _), own, together in zip(types, contracted, batch, strict=True)
        ]
        if all(prod(shape) > prod(size) for (shape, _), size in zip(types, sizes, strict=True)):
            return 0
        return sizes[0][0] * sum(self.program.bytes[v] for v in step.makes)

    # Results

    def renew(self, v: int, old: int) -> None:
        """Result v, and what it is written over, is put in the place of input `old` once nothing
        reads that."""
        last, chain = self.last.get(old, -1), [self.root[v]]
        while chain[-1] in self.over:
            chain.append(self.over[chain[-1]])
        for one in (self.arrays[w] for w in chain if w in self.arrays):
            over = last == one.begin and self.writes_over(self.region.steps[last])
            one.end = min(one.end, max(one.begin, last + (not over)))

    def copy(self, v: int, old: int | None) -> None:
        """Result v is in memory as something else already: it is an array of its own, or one beside
        input `old` whose place it has in the end, if it is not that as it was."""
        if v == old or (old is not None and self.mode == "all"):
            return
        key = -1 - self.end - len(self.arrays)
        self.arrays[key] = Array(self.program.bytes[v], self.end, self.end + 1)
        if old is None:
            self.results.add(key)

    def reserve(self, alone: bool = False) -> None:
        """Give results that are there in the end places from the first step on, and, unless they
        are `alone` there, put into these what is no larger: from the largest array on each takes
        the smallest place that is free."""
        places = []
        for one in (self.arrays[v] for v in self.results if v in self.arrays):
            if one.end > self.end:
                places.append((one, [(one.begin, one.end)]))
                one.begin = 0
        places.sort(key=lambda place: place[0].bytes)
        results = {id(one) for one, _ in places}
        for v, one in sorted(self.arrays.items(), key=lambda item: -item[1].bytes):
            for place, taken in () if alone or id(one) in results else places:
                free = all(one.end <= a or one.begin >= b for a, b in taken)
                if free and place.bytes >= one.bytes:
                    taken.append((one.begin, one.end))
                    del self.arrays[v]
                    break

    def most(self) -> int:
        """The most bytes of arrays at a step, with those inside of it."""
        return max(self.profile(), default=0)

    def profile(self) -> list[int]:
        """The bytes of arrays at each step and in the end, with those inside of the step."""
        change = [0] * (self.end + 2)
        for one in self.arrays.values():
            change[one.begin] += one.bytes
            change[one.end] -= one.bytes
        now, found = 0, []
        for t in range(self.end + 1):
            now += change[t]
            inner = self.region.steps[t].inner if t < self.end else []
            inside = (self._inside(self.region.steps[t], region) for region in inner)
            found.append(now + max(inside, default=0))
        return found

    def _inside(self, step: Step, region: Region) -> int:
        """What a round of a loop or a branch holds beside what is around it. Next carries take the
        place of the last ones, results of branches their own outside."""
        own = Held(self.program, region, self.library, self.mode)
        for v, old in self.carried(step, region).items():
            own.renew(v, old)
        for v in region.outputs if step.name == "cond" else ():
            own.arrays.pop(own.root.get(v, v), None)
        return own.most()

    def carried(self, step: Step, region: Region) -> dict[int, int]:
        """What a round of a loop leaves as a carry, and the input in whose place that is."""
        if step.name == "cond":
            return {}
        first = step.params["num_consts"] if step.name == "scan" else 0
        count = step.params["num_carry"] if step.name == "scan" else len(region.outputs)
        if step.name == "while":
            first = len(region.inputs) - count
        carries = zip(region.outputs, region.inputs[first : first + count], strict=False)
        return {v: old for v, old in carries if v >= 0}


def hands_on(step: Step) -> bool:
    """Whether what a step makes is what it reads."""
    return step.name == _BARRIER or step.name in _VIEWS


def _spreads(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether elements of an operand are read where results are, or along dims of one."""
    return not shape or (
        len(shape) == len(to) and all(n in (1, m) for n, m in zip(shape, to, strict=True))
    )
