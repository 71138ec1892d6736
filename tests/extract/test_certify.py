"""What the certificate refuses of one operation: layouts that do not follow from its cuts."""

from __future__ import annotations

import pytest

from tapestry_egg.extract.certify.legality import Illegal, check_strategy
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.metakernels.signatures.signature import IndexDim, OperationSignature
from tapestry_egg.plans.plan import Strategy
from tapestry_egg.zspace import Projection

MESH = MeshShape(("x",), (2,))
ROWS, VECTOR = TensorType((4, 8), "float32"), TensorType((4,), "float32")
#: Sums of rows, each begun at a starting value.
SUMS = OperationSignature(
    "sums",
    (IndexDim("m", 4, "map"), IndexDim("k", 8, "reduce", "sum")),
    (Projection(((1, 0), (0, 1)), (0, 0), (1, 1)), Projection(((1, 0),), (0,), (1,))),
    (Projection(((1, 0),), (0,), (1,)),),
    (ROWS, VECTOR),
    (VECTOR,),
    initial=(1,),
)
WHOLE, CUT = Layout(((),)), Layout(((0,),))


def partial(monoid: str) -> Layout:
    return Layout(((),), (0,), monoid)


def check(cuts: tuple[tuple[int, ...], ...], rows: Layout, start: Layout, out: Layout) -> None:
    check_strategy(SUMS, Strategy(cuts, (rows, start), (out,)), MESH)


def test_what_follows_from_the_cuts_is_legal() -> None:
    check(((), ()), Layout(((), ())), WHOLE, WHOLE)
    check(((0,), ()), Layout(((0,), ())), CUT, CUT)
    check(((), (0,)), Layout(((), (0,))), partial("sum"), partial("sum"))


@pytest.mark.parametrize(
    ("start", "out", "said"),
    [
        (partial("max"), partial("sum"), "starting value is partial under another monoid"),
        (WHOLE, partial("sum"), "operands"),
        (partial("sum"), partial("max"), "outputs are partial"),
        (partial("sum"), WHOLE, "outputs are partial"),
    ],
)
def test_partial_sums_begin_and_end_under_their_own_monoid(
    start: Layout, out: Layout, said: str
) -> None:
    with pytest.raises(Illegal, match=said):
        check(((), (0,)), Layout(((), (0,))), start, out)


@pytest.mark.parametrize(
    ("rows", "start", "out", "said"),
    [
        (Layout(((), ())), WHOLE, WHOLE, "output 0: devices do not make the blocks"),
        (Layout(((), (0,))), CUT, CUT, "operand 0: devices read outside"),
    ],
)
def test_devices_make_their_blocks_and_read_what_they_have(
    rows: Layout, start: Layout, out: Layout, said: str
) -> None:
    with pytest.raises(Illegal, match=said):
        check(((0,), ()), rows, start, out)
