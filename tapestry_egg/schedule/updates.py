"""Whose update a value is: the leaf of the state of which it becomes the next value.

A value is an update of a leaf of the state where it becomes the leaf's next value through
operations on elements, views and loops that keep all of its elements. A gradient becomes the next
value of its weight so, and of its moments; it is the weight's, since it is made of the old weight
and of none of the moments. What is summed to a norm on the way belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping

from tapestry_egg.graph.ids import FlatId

from .flatten import FlatProgram

# Ports of loops and branches, through which values pass whole or one step's part at a time.
_THROUGH = ("invariant", "stream", "stack", "carry", "branch")


def updates(program: FlatProgram) -> Mapping[FlatId, int]:
    """Value -> the input of the program whose next value it is on the way to, where it is one."""
    graph, values = program.bodies[0].graph, program.bodies[0].values
    maker = {v: instance for instance in program.instances for v in instance.outputs}
    reached: dict[FlatId, set[int]] = {}
    for j, i in program.feedback.items():
        todo, seen = [values[graph.outputs[j]]], set[FlatId]()
        while todo:
            v = todo.pop()
            made = maker.get(v)
            if v in seen or made is None or made.port in ("state", "input", "constant"):
                continue
            seen.add(v)
            reached.setdefault(v, set()).add(i)
            if made.port in _THROUGH:
                todo += made.inputs
            elif not made.port and made.signature.fusion in ("view", "loop"):
                todo += [w for w in made.inputs if _elements(program, w) == _elements(program, v)]
    made_of = _made_of(program)
    ends = {values[graph.outputs[j]]: i for j, i in program.feedback.items()}
    found: dict[FlatId, int] = {}
    for v, leaves in reached.items():
        own = [i for i in leaves if made_of.get(v, 0) >> i & 1] if len(leaves) > 1 else [*leaves]
        if v in ends:
            found[v] = ends[v]
        elif len(own) == 1:
            found[v] = own[0]
    return found


def _elements(program: FlatProgram, v: FlatId) -> int:
    return program.types[v].size


def _made_of(program: FlatProgram) -> Mapping[FlatId, int]:
    """Value -> the inputs of the program that it is made of, a bit for each."""
    graph, values = program.bodies[0].graph, program.bodies[0].values
    bits = {values[v]: 1 << i for i, v in enumerate(graph.inputs)}
    changed = True
    while changed:  # loops carry what they have made into their next run
        changed = False
        for instance in program.instances:
            if instance.port in ("state", "input"):
                continue
            of = 0
            for v in instance.inputs:
                of |= bits.get(v, 0)
            for v in instance.outputs:
                if of | bits.get(v, 0) != bits.get(v, 0):
                    bits[v] = of | bits.get(v, 0)
                    changed = True
    return bits
