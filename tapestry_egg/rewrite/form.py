"""Form: another program that computes the same, and what was left out when such were looked for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.plans.plan import RuleStep

#: A form must save this share of the program's seconds on one device. With 0 the fronts of three
#: models on h100:8 (while_loop, convnet, moe) have the same fastest plans, and took 7 to 40 % more
#: time of the processor.
LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Left:
    """What was left out when forms of a program were looked for; `omissions.of_forms` says it in
    words. Those of several programs add up."""

    forms: int = 0  # that were found beside those that are searched
    views: int = 0  # forms that differ in views alone from one that is searched, or counted
    slight: int = 0  # forms that were found, and save less than `least_gain`
    unseen: bool = False  # whether there are choices among the rules' terms that were not looked at
    untried: int = 0  # kinds of change that looked worth a trial and were given none
    regions: int = 0  # regions that were left as they are written, as they take too little
    repeated: int = 0  # operations of which the rules saw another copy only, as layers are equal
    wide: int = 0  # operations of more operands than rules see
    softmaxes: int = 0  # of which not all was read
    stacked: int = 0  # chains of products alike, all made of stacks
    slower: int = 0  # the same that are not, because a device takes longer then
    unstacked: int = 0  # the same that looked too little worth, or that JAX cannot make at once
    loops: int = 0  # loops over stacks that are too long to be written out
    counts: int = 0  # numbers of micro-batches
    twice: int = 0  # the same, of programs that compute values twice
    again: int = 0  # more programs that compute values twice, which were not split
    states: int = 0  # dims of the program's state that were not tried as its batch
    whole: str = ""  # the operation that needs the whole batch, where micro-batches save too little
    unsplit: bool = False  # whether no micro-batches were looked for, as memory is not short

    def __add__(self, other: Left) -> Left:
        def both(a: Any, b: Any) -> Any:
            return a or b if isinstance(a, bool | str) else a + b

        return Left(*[both(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)])


@dataclass(frozen=True)
class Form:
    """An equal program: its graph, the rules that made it from the one given, whether the rules had
    nothing more to say when it was chosen, the steps that lead to it, and the timeline of the rules
    on the program and its regions. `left` is told of the first form, which is the one given."""

    graph: BlockGraph
    rules: tuple[str, ...] = ()
    saturated: bool = True
    steps: tuple[RuleStep, ...] = ()
    timeline: tuple[Tick, ...] = field(default=(), compare=False)
    slower: bool = False  # takes longer than the one given, on one device, and holds less memory
    extra: bool = False  # searched for what it may take on a mesh, not for its time on one device
    by_clock: bool = False  # whether time ended an iteration of the rules
    left: Left = Left()

    def then(
        self, graph: BlockGraph, step: RuleStep, slower: bool = False, extra: bool = False
    ) -> Form:
        """What one more step makes of this form."""
        rules, steps = tuple(sorted({*self.rules, *step.rules})), (*self.steps, step)
        return Form(graph, rules, self.saturated, steps, slower=slower, extra=extra)

    def behind(self, step: RuleStep) -> Form:
        """This form of what a step makes, as a form of what was there before the step."""
        rules = tuple(sorted({*self.rules, *step.rules}))
        return replace(self, rules=rules, steps=(step, *self.steps))
