"""The examples of rules: small programs as text, one operation a line."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tapestry_egg.errors import RuleError
from tapestry_egg.graph.arrays import is_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.metakernels import registry
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.yaml_nodes import plain_yaml

#     x: float32[8, 512]
#     w: float32[512, 16]
#     a = dot_general(x, w) {dimension_numbers: [[[1], [0]], [[], []]], precision: null}
#     b = a(w, x)
#
# A line with `:` is an input, and one with `:` and `=` a scalar constant (`z: float32 = 0`).
# `{...}` holds the parameters in the plain form of `tracing/codec.py`; the name of an earlier
# operation in place of a kernel's takes kernel and parameters from there. Lines that are indented
# continue the one before. Values that nothing reads are the outputs.


_INPUT = re.compile(r"(\w+)\s*:\s*(\w+)\[([\d,\s]*)\]\s*$")
_CONSTANT = re.compile(r"(\w+)\s*:\s*(\w+)\s*=\s*(\S+)\s*$")
_OPERATION = re.compile(r"(\w+)\s*=\s*([\w-]+)\(([\w,\s]*)\)\s*(\{.*\})?\s*$", re.DOTALL)


def example_graph(text: str, where: str = "example") -> BlockGraph:
    """The program that an example's text describes.

    Raises RuleError that quotes the line at fault.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if line[:1].isspace() and lines:
            lines[-1] += "\n" + line
        elif line.strip():
            lines.append(line)
    values: list[TensorType] = []
    numbers: dict[str, int] = {}
    operations: dict[str, Operation] = {}
    inputs: list[int] = []
    constants: dict[int, np.ndarray[Any, Any]] = {}

    def add(name: str, tensor: TensorType, line: str) -> int:
        if not is_dtype(tensor.dtype):
            raise RuleError(f"{tensor.dtype!r} is not a dtype: {line}", where=where)
        if name in numbers:
            raise RuleError(f"{name!r} is defined twice in the example: {line}", where=where)
        numbers[name] = len(values)
        values.append(tensor)
        return numbers[name]

    for line in lines:
        if found := _INPUT.match(line):
            shape = tuple(int(n) for n in found[3].split(",") if n.strip())
            inputs.append(add(found[1], TensorType(shape, found[2]), line))
        elif found := _CONSTANT.match(line):
            number = add(found[1], TensorType((), found[2]), line)
            constants[number] = _scalar(found[2], found[3], f"{where}: {line}")
        elif found := _OPERATION.match(line):
            reads = [n.strip() for n in found[3].split(",") if n.strip()]
            missing = [n for n in reads if n not in numbers]
            if missing:
                raise RuleError(f"{missing[0]!r} is not defined before: {line}", where=where)
            operands = tuple(numbers[n] for n in reads)
            model = operations.get(found[2])
            kernel = model.kernel if model else found[2]
            params = dict(model.params) if model else {}
            if found[4]:
                params.update(plain_yaml(found[4], RuleError, f"{where}: {line.splitlines()[0]}"))
            signature = registry.signature(kernel, params, [values[v] for v in operands])
            out = add(found[1], signature.output_types[0], line)
            operations[found[1]] = Operation(kernel, operands, (out,), params)
        else:
            raise RuleError(f"neither an input nor an operation: {line}", where=where)
    read = {v for op in operations.values() for v in op.inputs}
    names = {v: name for name, v in numbers.items()}
    given = {*inputs, *constants}
    outputs = tuple(v for v in range(len(values)) if v not in read and v not in given)
    graph = BlockGraph(
        name="example",
        values=tuple(values),
        operations=tuple(operations.values()),
        inputs=tuple(inputs),
        outputs=outputs,
        input_names=tuple(names[v] for v in inputs),
        output_names=tuple(names[v] for v in outputs),
        constants=constants,
    )
    verify_graph(graph)
    return graph


def _scalar(dtype: str, text: str, where: str) -> np.ndarray[Any, Any]:
    """A constant. Raises RuleError where the text is no number that the dtype has."""
    try:
        value = np.asarray(float(text))
        with np.errstate(all="ignore"):
            return value.astype(numpy_dtype(dtype))
    except (ValueError, TypeError) as e:
        raise RuleError(f"{text!r:.40} is no {dtype}: {e}", where=where) from None
