"""tensat_laws.md: every law of TENSAT and TASO in it follows from the rules named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, book_names, load_books

DOCUMENT = Path(__file__).with_name("tensat_laws.md")
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+ \|", line)
]
RULES = {
    r.name: r for b in load_books(book_names()) for r in b.rules if r.ruleset in PROGRAM_RULESETS
}
_TOKEN = re.compile(r"\s*(·s|[a-z]+\(|[A-Za-z]+|[()\[\],+∘·]|\d)")
DOT = {
    "dimension_numbers": [[[1], [0]], [[], []]],
    "precision": None,
    "preferred_element_type": {"$dtype": "float32"},
    "out_sharding": None,
}


class Law:
    """The two sides of a law, built as one program; tensors have rank 4 where anything convolves
    or pools, else 2, and all extents are 4 (3 in space)."""

    def __init__(self, text: str) -> None:
        spatial = "conv(" in text or "pool" in text or "enlarge" in text
        self.shape = (4, 4, 3, 3) if spatial else (4, 4)
        self.values: list[TensorType] = []
        self.operations: list[Operation] = []
        self.names: dict[str, int] = {}
        self.constants: dict[int, np.ndarray[Any, Any]] = {}
        self.memo: dict[Any, int] = {}
        self.text = text
        self.small = set(re.findall(r"enlarge\((\w)", text))
        self.pairs = [tuple(map(self.side, one.split(" = "))) for one in text.split("; ")]

    def side(self, text: str) -> int:
        self.tokens = [t for t in _TOKEN.findall(text)] + [""]
        out = self.sum()
        assert self.tokens == [""], (self.text, self.tokens)
        return out

    def sum(self) -> int:
        left = self.factor()
        while self.tokens[0] in ("+", "∘", "·", "·s"):
            sign = self.tokens.pop(0)
            if sign == "·s":
                shape, self.shape = self.shape, ()
                left = self.op("mul", {"out_dtype": None}, left, self.factor())
                self.shape = shape
            elif sign == "·" and self.tokens[0] == "Imatmul":
                left = self.op("dot_general", DOT, left, self.identity())
            elif sign == "∘" and self.tokens[0] == "Iewmul":
                self.tokens.pop(0)
                left = self.op("mul", {"out_dtype": None}, left, self.constant(1.0))
            else:
                right = self.factor()
                kernel = {"+": "add", "∘": "mul", "·": "dot_general"}[sign]
                params = {"mul": {"out_dtype": None}, "dot_general": DOT}.get(kernel, {})
                left = self.op(kernel, params, left, right)
        return left

    def factor(self) -> int:
        token = self.tokens.pop(0)
        if token == "(":
            out = self.sum()
            assert self.tokens.pop(0) == ")"
            return out
        if token == "[":
            left = self.sum()
            assert self.tokens.pop(0) == ","
            right = self.sum()
            assert self.tokens.pop(0) == "]"
            dim = int(self.tokens.pop(0)) if self.tokens[0].isdigit() else 1
            return self.op("concatenate", {"dimension": dim}, left, right)
        if token.endswith("("):
            operands = []
            while self.tokens[0] != ")":
                operands.append(self.sum())
                if self.tokens[0] == ",":
                    self.tokens.pop(0)
            self.tokens.pop(0)
            return self.function(token[:-1], operands)
        return self.named(token, (4, 4, 1, 1) if token in self.small else self.shape)

    def function(self, name: str, operands: list[int]) -> int:
        x = operands[0]
        if name == "relu":
            return self.op("max", {}, x, self.constant(0.0))
        if name == "transpose":
            return self.op("transpose", {"permutation": [1, 0]}, x)
        if name in ("first", "last"):
            shape = list(self.values[x].shape)
            # What was joined: the dim that is twice as long.
            dim = next(d for d, n in enumerate(shape) if n == 8)
            start, limit = [0] * len(shape), list(shape)
            start[dim], limit[dim] = (0, 4) if name == "first" else (4, 8)
            params = {"start_indices": start, "limit_indices": limit, "strides": None}
            return self.op("slice", params, x)
        if name == "enlarge":
            iota = {"dtype": {"$dtype": "float32"}, "shape": [1], "dimension": 0, "sharding": None}
            zero = self.op("squeeze", {"dimensions": [0]}, self.op("iota", iota))
            config = [[0, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 0]]
            return self.op("pad", {"padding_config": config}, x, zero)
        if name.startswith("pool"):
            kind = "max" if name == "poolmax" else "sum"
            params = {"window_dimensions": [1, 1, 2, 2], "window_strides": [1] * 4}
            params |= {"padding": [[0, 0]] * 4, "base_dilation": [1] * 4}
            out = self.op(
                f"reduce_window_{kind}", {**params, "window_dilation": [1] * 4}, operands[-1]
            )
            if kind == "max":
                return out
            return self.op("mul", {"out_dtype": None}, out, self.constant(0.25))
        assert name == "conv", name
        spec = [0, 1, 2, 3]
        reach = self.values[operands[1]].shape[2]
        groups = self.values[x].shape[1] // self.values[operands[1]].shape[1]
        params = {
            "window_strides": [1, 1],
            "padding": [[(reach - 1) // 2] * 2] * 2,
            "lhs_dilation": [1, 1],
            "rhs_dilation": [1, 1],
            "dimension_numbers": {
                "$class": "ConvDimensionNumbers",
                **dict.fromkeys(("lhs_spec", "rhs_spec", "out_spec"), spec),
            },
            "feature_group_count": groups,
            "batch_group_count": 1,
            "precision": None,
            "preferred_element_type": None,
            "out_sharding": None,
        }
        return self.op("conv_general_dilated", params, *operands)

    def identity(self) -> int:
        self.tokens.pop(0)
        rows, columns = (
            self.op(
                "iota",
                {"dtype": {"$dtype": "int32"}, "shape": [4, 4], "dimension": d, "sharding": None},
            )
            for d in (0, 1)
        )
        params = {"new_dtype": {"$dtype": "float32"}, "weak_type": False, "sharding": None}
        return self.op("convert_element_type", params, self.op("eq", {}, rows, columns))

    def named(self, name: str, shape: tuple[int, ...]) -> int:
        if name not in self.names:
            self.names[name] = self.value(TensorType(shape, "float32"))
        return self.names[name]

    def constant(self, value: float) -> int:
        if str(value) not in self.names:
            number = self.names[str(value)] = self.value(TensorType((), "float32"))
            self.constants[number] = np.asarray(value, np.float32)
        return self.names[str(value)]

    def value(self, tensor: TensorType) -> int:
        self.values.append(tensor)
        return len(self.values) - 1

    def op(self, kernel: str, params: Any, *operands: int) -> int:
        key = (kernel, repr(params), operands)
        if key not in self.memo:
            types = [self.values[v] for v in operands]
            out = self.value(registry.signature(kernel, params, types).output_types[0])
            self.operations.append(Operation(kernel, operands, (out,), params))
            self.memo[key] = out
        return self.memo[key]

    def graph(self) -> BlockGraph:
        inputs = tuple(v for v in self.names.values() if v not in self.constants)
        outputs = tuple(v for pair in self.pairs for v in pair)
        operations, values = tuple(self.operations), tuple(self.values)
        graph = BlockGraph("law", values, operations, inputs, outputs, constants=self.constants)
        verify_graph(graph)
        return graph


def test_the_table_is_whole() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    refused = [row for row in ROWS if row[3].startswith("not applicable")]
    assert len(ROWS) >= 150 and len(refused) <= 0.05 * len(ROWS)


@pytest.mark.slow
def test_every_law_follows_from_the_rules_that_are_named() -> None:
    always = [r for r in RULES.values() if "(union" not in r.egg]
    for number, _, text, said in ROWS:
        if said.startswith("not applicable"):
            continue
        law = Law(text)
        if said == "the same operations here":
            assert all(a == b for a, b in law.pairs), (number, text)
            continue
        used = [RULES[name] for name in re.findall(r"`([\w-]+)`", said)]
        found = explore(law.graph(), [*always, *used], Budget(16, 40_000, 20.0)).terms.class_of
        assert all(found[a] == found[b] for a, b in law.pairs), (number, text, said)
        fewer = explore(law.graph(), always, Budget(16, 40_000, 20.0)).terms.class_of
        assert any(fewer[a] != fewer[b] for a, b in law.pairs), (number, text)
