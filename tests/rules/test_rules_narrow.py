"""Rules do not fire beside their law: programs one guard away from those that a rule is for.

Operators are allowed to broadcast as NumPy's do, from the last dim; rows that lie along the first
dim of a square are then columns.
"""

from __future__ import annotations

import pytest

from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.rules.verify.examples import example_graph
from tests.rewrite.equal_forms import forced

RULES = {r.name: r for b in load_books(("streaming", "loss")) for r in b.rules}

PRODUCT = """\
x: float32[4, 3]
w: float32[3, 4]
g: float32[4]
z: float32[4]
v: float32[4, 5]
s = dot_general(x, w) {dimension_numbers: [[[1], [0]], [[], []]], precision: null,
  preferred_element_type: {$dtype: float32}, out_sharding: null}
u = broadcast_in_dim(z) {shape: [4, 1], broadcast_dimensions: [0], sharding: null}
b = sub(s, u)
e = exp(b) {accuracy: null}
h = broadcast_in_dim(g) {shape: [4, 4], broadcast_dimensions: [0], sharding: null}
m = mul(h, e) {out_dtype: null}
d = dot_general(m, v) {dimension_numbers: [[[%d], [0]], [[], []]], precision: null,
  preferred_element_type: {$dtype: float32}, out_sharding: null}
"""
SHIFTED = """\
s: float32[3, 3]
z: float32[3]
i: int32[3, 1, 1]
u = broadcast_in_dim(z) {shape: [3, 1], broadcast_dimensions: [0], sharding: null}
t = sub(s, u)
g = gather(t, i) {dimension_numbers: {$class: GatherDimensionNumbers, offset_dims: [],
    collapsed_slice_dims: [1], start_index_map: [1], operand_batching_dims: [0],
    start_indices_batching_dims: [0]}, slice_sizes: [1, 1], indices_are_sorted: false,
  unique_indices: false, mode: {$enum: [GatherScatterMode, CLIP]}, fill_value: null}
"""
SIGN = """\
x: float32[2, 3]
y: float32[2]
z: float32[2]
k: float32 = 0
e = exp(x) {accuracy: null}
r = reduce_sum(e) {axes: [1], out_sharding: null}
c = ge(r, k)
d = div(y, r)
s = select_n(c, z, d)
u = select_n(c, d, z)
n = neg(u)
t = add_any(s, n)
"""
#: Rule, a program that it is for, what is changed in it, and what stands there then.
NEARLY = [
    (
        "softmax-by-name",
        """\
s: float32[3, 3]
m: float32[3, 1]
b = sub(s, m)
e = exp(b) {accuracy: null}
r = reduce_sum(e) {axes: [1], out_sharding: null}
z = broadcast_in_dim(r) {shape: [3, 1], broadcast_dimensions: [0], sharding: null}
p = div(e, z)
""",
        "{shape: [3, 1]",
        "{shape: [3]",
    ),
    (
        "softmax-by-name-in-16-bits",
        """\
s: bfloat16[3, 3]
m: bfloat16[3, 1]
b = sub(s, m)
e = exp(b) {accuracy: null}
w = convert_element_type(e) {new_dtype: {$dtype: float32}, weak_type: false, sharding: null}
r = reduce_sum(w) {axes: [1], out_sharding: null}
z = broadcast_in_dim(r) {shape: [3, 1], broadcast_dimensions: [0], sharding: null}
n = convert_element_type(z) {new_dtype: {$dtype: bfloat16}, weak_type: false, sharding: null}
p = div(e, n)
""",
        "{shape: [3, 1]",
        "{shape: [3]",
    ),
    (
        "log-of-sum-by-name",
        """\
s: float32[3, 3]
m: float32[3]
z = broadcast_in_dim(m) {shape: [3, 1], broadcast_dimensions: [0], sharding: null}
b = sub(s, z)
e = exp(b) {accuracy: null}
r = reduce_sum(e) {axes: [1], out_sharding: null}
l = log(r) {accuracy: null}
q = add(l, m)
""",
        "{shape: [3, 1]",
        "{shape: [3]",
    ),
    (
        "log-softmax-by-name",
        """\
s: float32[3, 3]
m: float32[3, 1]
b = sub(s, m)
e = exp(b) {accuracy: null}
r = reduce_sum(e) {axes: [1], out_sharding: null}
z = broadcast_in_dim(r) {shape: [3, 1], broadcast_dimensions: [0], sharding: null}
l = log(z) {accuracy: null}
t = sub(b, l)
""",
        "{shape: [3, 1]",
        "{shape: [3]",
    ),
    ("weights-times-values", PRODUCT % 1, "{shape: [4, 1]", "{shape: [4]"),
    ("weights-times-rows", PRODUCT % 0, "{shape: [4, 1]", "{shape: [4]"),
    ("entry-of-shifted", SHIFTED, "{shape: [3, 1]", "{shape: [3]"),
    ("sign-of-sum-of-exponentials", SIGN, "d = div(y, r)", "d = div(r, y)"),
]


@pytest.mark.parametrize(("rule", "text", "part", "other"), NEARLY, ids=[n[0] for n in NEARLY])
def test_rules_fire_on_their_law_and_not_beside_it(
    rule: str, text: str, part: str, other: str
) -> None:
    assert part in text
    graph = example_graph(text)
    assert forced(graph, explore(graph, [RULES[rule]]), rule), "not a program that the rule is for"
    graph = example_graph(text.replace(part, other))
    assert not forced(graph, explore(graph, [RULES[rule]]), rule)
