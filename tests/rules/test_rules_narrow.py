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
WEIGHTS = """\
s: float32[3, 3]
m: float32[3, 1]
b = sub(s, m)
e = exp(b) {accuracy: null}
"""
SUM = """\
r = reduce_sum(%s) {axes: [1], out_sharding: null}
z = broadcast_in_dim(r) {shape: [3, 1], broadcast_dimensions: [0], sharding: null}
"""
CONVERT = (
    "%s = convert_element_type(%s) {new_dtype: {$dtype: %s}, weak_type: false, sharding: null}\n"
)
LOG_OF_SUM = """\
s: float32[3, 3]
m: float32[3]
z = broadcast_in_dim(m) {shape: [3, 1], broadcast_dimensions: [0], sharding: null}
b = sub(s, z)
e = exp(b) {accuracy: null}
r = reduce_sum(e) {axes: [1], out_sharding: null}
l = log(r) {accuracy: null}
q = add(l, m)
"""
IN_16_BITS = (
    WEIGHTS.replace("float32", "bfloat16")
    + CONVERT % ("w", "e", "float32")
    + SUM % "w"
    + CONVERT % ("n", "z", "bfloat16")
)
LOG = "l = log(z) {accuracy: null}\nt = sub(b, l)\n"
COLUMN = ("{shape: [3, 1]", "{shape: [3]")
#: Rule, a program that it is for, what is changed in it, and what stands there then.
NEARLY = [
    ("softmax-by-name", f"{WEIGHTS}{SUM % 'e'}p = div(e, z)\n", *COLUMN),
    ("softmax-by-name-in-16-bits", f"{IN_16_BITS}p = div(e, n)\n", *COLUMN),
    ("log-of-sum-by-name", LOG_OF_SUM, *COLUMN),
    ("log-softmax-by-name", f"{WEIGHTS}{SUM % 'e'}{LOG}", *COLUMN),
    ("weights-times-values", PRODUCT % 1, "{shape: [4, 1]", "{shape: [4]"),
    ("weights-times-rows", PRODUCT % 0, "{shape: [4, 1]", "{shape: [4]"),
    ("entry-of-shifted", SHIFTED, *COLUMN),
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
