"""`hlo_stats` on programs whose collectives are known, and on texts of other compilers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tapestry_egg.errors import PlanError
from tapestry_egg.runtime.measure.hlo import collectives_in, hlo_stats, wire_bytes
from tapestry_egg.runtime.measure.hlo_text import arrays, parse

MESH = ("x", "y")


def compiled(f: Callable[..., Any], specs: Any, out: Any, *shapes: Any, **options: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), MESH)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(*s) if isinstance(s[0], tuple) else s for s in shapes]
    return jax.jit(mapped, **options).lower(*arguments).compile()


F32 = np.float32


def test_every_kind_with_its_payload() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:  # x: f32[8, 16], w: f32[16, 4] on each device
        a = lax.all_gather(x, "x", axis=0, tiled=True)  # f32[16, 16] leave
        b = lax.psum(a @ w, "y")  # f32[16, 4] enter
        c = lax.psum_scatter(a, MESH, scatter_dimension=0, tiled=True)  # f32[16, 16] enter
        d = lax.all_to_all(x, "y", 0, 1, tiled=True)  # f32[8, 16] enter
        e = lax.ppermute(x, "y", [(i, (i + 1) % 4) for i in range(4)])
        return b, c, d, e

    out = P(), P(MESH), P("x", "y"), P("x", "y")
    stats = hlo_stats(compiled(f, (P("x", "y"), P("y")), out, ((16, 64), F32), ((64, 4), F32)))
    assert stats.by_kind() == {
        ("all_gather", 2): 16 * 16 * 4,
        ("all_reduce", 4): 16 * 4 * 4,
        ("reduce_scatter", 8): 16 * 16 * 4,
        ("all_to_all", 4): 8 * 16 * 4,
        ("permute", 4): 8 * 16 * 4,
    }
    wires = {c.kind: c.wire_bytes for c in stats.collectives}
    assert wires == {
        "all_gather": 512,
        "all_reduce": 2 * 256 * 3 / 4,
        "reduce_scatter": 1024 * 7 / 8,
        "all_to_all": 512 * 3 / 4,
        "permute": 512,
    }
    assert all("test_hlo.py:" in c.source for c in stats.collectives)
    assert stats.flops >= 2 * 16 * 16 * 4
    assert stats.argument_bytes == 8 * 16 * 4 + 16 * 4 * 4
    text = str(stats)
    assert "reduce_scatter" in text and "1,024 B" in text and "peak" in text


def test_loops_multiply_and_flops_with_them() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        def outer(c: jax.Array, _: None) -> Any:
            def inner(c: jax.Array, _: None) -> Any:
                return lax.psum(jnp.tanh(c @ w), "y"), None

            return lax.scan(inner, c, None, length=3)[0], None

        return lax.scan(outer, x, None, length=5)[0]

    stats = hlo_stats(compiled(f, (P("x"), P()), P("x"), ((32, 8), F32), ((8, 8), F32)))
    (c,) = stats.collectives
    assert (c.kind, c.group, c.payload_bytes, c.count) == ("all_reduce", 4, 16 * 8 * 4, 15)
    once = 2 * 16 * 8 * 8
    assert 15 * once <= stats.flops < 16 * once
    assert stats.warnings == ()


def test_a_loop_of_unknown_length_counts_once_and_says_so() -> None:
    def f(x: jax.Array) -> jax.Array:
        def more(s: Any) -> jax.Array:
            return (s[0] < 100) & (s[1].sum() > 1)

        return lax.while_loop(more, lambda s: (s[0] + 1, lax.pmax(s[1], "y") / 2), (0, x))[1]

    stats = hlo_stats(compiled(f, (P("x"),), P("x"), ((8, 8), F32)))
    assert [c.count for c in stats.collectives] == [1]
    assert len(stats.warnings) == 1 and "trips unknown" in stats.warnings[0]


def test_what_a_loop_sends_to_know_whether_it_goes_on_counts_with_it() -> None:
    def f(x: jax.Array) -> jax.Array:
        def more(s: Any) -> jax.Array:
            return lax.pmax(s.max(), MESH) > 1

        return lax.while_loop(more, lambda s: s / 2, x)

    stats = hlo_stats(compiled(f, (P("x"),), P("x"), ((8, 8), F32)))
    assert stats.by_kind() == {("all_reduce", 8): 4}
    assert len(stats.warnings) == 1 and "trips unknown" in stats.warnings[0]


def test_a_conditional_counts_its_dearest_branch() -> None:
    def f(x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.switch(
            n,
            [
                lambda x: lax.psum(x, "x"),
                lambda x: lax.psum(lax.psum(x, "y") * x, "y"),
                lambda x: x * 2,
            ],
            x,
        )

    stats = hlo_stats(compiled(f, (P("x"), P()), P("x"), ((8, 8), F32), ((), np.int32)))
    assert stats.by_kind() == {("all_reduce", 4): 2 * 4 * 8 * 4}


def test_sixteen_bit_reductions_that_the_cpu_widens_are_marked() -> None:
    stats = hlo_stats(compiled(lambda x: lax.psum(x, "y"), (P(),), P(), ((8,), jnp.bfloat16)))
    (c,) = stats.collectives
    assert (c.widened_bytes, c.payload_bytes) == (8 * 2, 8 * 4)


def test_of_several_reductions_in_one_those_that_the_cpu_widens_are_counted() -> None:
    def f(x: jax.Array, y: jax.Array) -> Any:
        return lax.psum(x, "y"), lax.psum(y, "y")

    given = (P(), P()), (P(), P()), ((8,), jnp.bfloat16), ((6,), F32)
    (c,) = hlo_stats(compiled(f, *given)).collectives
    assert (c.widened_bytes, c.payload_bytes) == (8 * 2, (8 + 6) * 4)


@pytest.mark.parametrize(
    "added",
    [
        lambda x: lax.reduce(x, jnp.zeros((), x.dtype), lax.add, (0,)),
        lambda x: jnp.zeros(8, x.dtype).at[lax.iota("int32", 16) % 3].add(x[:, 0]),
        # What one device has, as rows of a table that is cut.
        lambda x: jnp.where(lax.axis_index("x") == 0, x[0], 0),
    ],
)
def test_so_are_those_of_sums_that_it_widens_and_joins_to_others(added: Any) -> None:
    """It names such an all-reduce by the first of them, which it has not widened."""

    def f(x: jax.Array, y: jax.Array) -> Any:
        return lax.psum(y, "y"), lax.psum(added(x), "y")

    given = (P(), P()), (P(), P()), ((16, 8), jnp.bfloat16), ((6,), F32)
    (c,) = hlo_stats(compiled(f, *given)).collectives
    assert (c.widened_bytes, c.payload_bytes) == (8 * 2, (8 + 6) * 4)


@pytest.mark.parametrize("beside", [jnp.bfloat16, F32])
def test_so_are_those_that_it_computed_in_32_bits_and_rounds_behind_the_sum(beside: Any) -> None:
    """The gradient of a window of each channel alone, of which nothing is 16 bits before."""

    def f(x: jax.Array, w: jax.Array) -> Any:
        def window(w: jax.Array) -> jax.Array:
            dims = ("NWC", "WIO", "NWC")
            return lax.conv_general_dilated(
                x, w, (1,), [(3, 0)], (1,), (3,), dims, feature_group_count=8
            )

        y, gradient = jax.vjp(window, w)
        return lax.psum(x[0].astype(beside), "y"), lax.psum(gradient(y)[0], "y")

    given = (P(), P()), (P(), P()), ((1, 16, 8), jnp.bfloat16), ((2, 1, 8), jnp.bfloat16)
    (c,) = hlo_stats(compiled(f, *given)).collectives
    narrow = 2 * 8 + (16 * 8 if beside == jnp.bfloat16 else 0)
    assert (c.widened_bytes, c.payload_bytes) == (narrow * 2, (16 * 8 + 2 * 8) * 4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, F32])
def test_sixteen_bit_values_that_the_cpu_sends_in_32_bits_are_marked(dtype: Any) -> None:
    """Gathered, exchanged, passed on: halved where marked, payloads are those that were asked for.
    What the program itself converts stays what it is."""

    def f(x: jax.Array) -> Any:  # [8, 16] on each device
        a = lax.all_gather(jnp.tanh(x), "x", axis=0, tiled=True)
        b = lax.all_to_all(x, "y", 0, 1, tiled=True)
        c = lax.ppermute(x, "y", [(i, (i + 1) % 4) for i in range(4)])
        d = lax.all_gather(x.astype(F32), MESH, axis=0, tiled=True)
        return a + 1, b + 1, c + 1, d + 1

    out = (P(None, "y"), P("x", "y"), P("x", "y"), P())
    stats = hlo_stats(compiled(f, (P("x", "y"),), out, ((16, 64), dtype)))
    size = np.dtype(dtype).itemsize
    asked = {
        ("all_gather", 2): 2 * 8 * 16 * size,
        ("all_to_all", 4): 8 * 16 * size,
        ("permute", 4): 8 * 16 * size,
        ("all_gather", 8): 8 * 8 * 16 * 4,
    }
    found = {(c.kind, c.group): c.payload_bytes - c.widened_bytes for c in stats.collectives}
    assert found == asked
    assert any(c.widened_bytes for c in stats.collectives) == (dtype == jnp.bfloat16)


def test_so_are_those_that_are_sent_twice_or_broadcast() -> None:
    def f(x: jax.Array) -> Any:  # [8, 16] on each device
        a = lax.all_gather(lax.all_to_all(x, "y", 0, 1, tiled=True), "x", axis=0, tiled=True)
        b = lax.all_to_all(jnp.broadcast_to(x[0], (64, 16)), MESH, 0, 1, tiled=True)
        return a, b

    given = (P("x", "y"),), (P("y"), P(None, MESH)), ((16, 64), jnp.bfloat16)
    found = hlo_stats(compiled(f, *given)).collectives
    assert {(c.kind, c.group): c.payload_bytes - c.widened_bytes for c in found} == {
        ("all_to_all", 4): 8 * 16 * 2,
        ("all_gather", 2): 4 * 64 * 2,
        ("all_to_all", 8): 64 * 16 * 2,
    }


def test_donated_arguments_are_aliased() -> None:
    stats = hlo_stats(
        compiled(lambda x: x + 1, (P("x"),), P("x"), ((8, 8), F32), donate_argnums=(0,))
    )
    assert stats.alias_bytes == stats.argument_bytes == stats.output_bytes == 4 * 8 * 4
    assert stats.peak_bytes == 4 * 8 * 4 + stats.temp_bytes


def test_wire_bytes_of_a_group_of_one_is_nothing() -> None:
    assert wire_bytes("all_reduce", 100, 1) == 0
    assert wire_bytes("all_gather", 100, 4) == 75


# Texts as other compilers print them


def module(body: str, computations: str = "", partitions: int = 8) -> str:
    return (
        f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n{computations}\n"
        f"ENTRY %main (p: f32[64]) -> f32[64] {{\n  %p = f32[64]{{0}} parameter(0)\n{body}\n}}\n"
    )


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2),
        ("[4,2]<=[8]", 2),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("{}", 8),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0', 'axis_1'}", 8),
        ("mesh['axis_0'=8], device_ids=([2,4]T(1,0)) {'axis_0':(2)2}", 2),
    ],
)
def test_group_sizes(groups: str, size: int) -> None:
    line = (
        "  ROOT %r = f32[64]{0} all-reduce(%p), channel_id=1, "
        f"replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    )
    assert [c.group for c in collectives_in(module(line))] == [size]


def found(text: str) -> list[tuple[str, int, int, int]]:
    return [(c.kind, c.group, c.payload_bytes, c.count) for c in collectives_in(text)]


def test_asynchronous_pairs_count_once() -> None:
    text = module(
        """\
  %s = (f32[64]{0}, f32[256]{0}) all-gather-start(f32[64]{0} %p), replica_groups={{0,1,2,3}}
  %d = f32[256]{0} all-gather-done(%s)
  %t = ((f32[256]{0}), f32[64]{0}) reduce-scatter-start(%d), replica_groups={{0,1,2,3}}
  %u = f32[64]{0} reduce-scatter-done(%t)
  %v = ((f32[64]{0}), f32[64]{0}) async-start(%u), calls=%wrapped
  ROOT %w = f32[64]{0} async-done(%v), calls=%wrapped""",
        """\
%wrapped (q: f32[64]) -> f32[64] {
  %q = f32[64]{0} parameter(0)
  ROOT %a = f32[64]{0} all-to-all(%q), replica_groups={{0,1},{2,3}}, dimensions={0}
}
""",
    )
    assert found(text) == [
        ("all_gather", 4, 1024, 1),
        ("reduce_scatter", 4, 1024, 1),
        ("all_to_all", 2, 256, 1),
    ]


def test_a_permute_of_several_arrays_adds_them_and_one_in_place_counts_its_first() -> None:
    """As XLA for GPUs combines permutes, and as XLA for TPUs writes slices into a buffer."""
    pairs = "source_target_pairs={{0,1},{1,0}}"
    text = module(
        f"""\
  %c = bf16[64]{{0}} convert(%p)
  %i = s32[] constant(0)
  %s = ((f32[64]{{0}}, bf16[64]{{0}}), (f32[64]{{0}}, bf16[64]{{0}})) \
collective-permute-start(%p, %c), {pairs}
  %d = (f32[64]{{0}}, bf16[64]{{0}}) collective-permute-done(%s)
  ROOT %r = f32[64]{{0}} collective-permute(%p, %p, %i, %i), {pairs}, slice_sizes={{{{64}}}}"""
    )
    assert found(text) == [("permute", 2, 384, 1), ("permute", 2, 256, 1)]


def test_combined_collectives_add_their_operands() -> None:
    line = (
        "  %r = (f32[64]{0:T(128)S(1)}, /*index=1*/bf16[64]{0}) "
        "all-reduce(f32[64]{0:T(128)S(1)} %p, bf16[64]{0} %c), replica_groups={{0,1}}, "
        'metadata={op_name="jit(f)/(x, y)" source_file="a, b.py" source_line=7}'
    )
    text = module(f"  %c = bf16[64]{{0}} convert(%p)\n{line}")
    (c,) = collectives_in(text)
    assert (c.payload_bytes, c.op_name, c.source) == (384, "jit(f)/(x, y)", "a, b.py:7")


def test_a_fused_all_reduce_and_slice_is_a_reduce_scatter() -> None:
    text = module(
        "  ROOT %f = f32[16]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1",
        """\
%all-reduce-scatter.1 (q: f32[64]) -> f32[16] {
  %q = f32[64]{0} parameter(0)
  %r = f32[64]{0} all-reduce(%q), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %s = f32[16]{0} dynamic-slice(%r), dynamic_slice_sizes={16}
}
""",
    )
    (c,) = collectives_in(text)
    assert (c.kind, c.payload_bytes, c.wire_bytes) == ("reduce_scatter", 256, 192)


#: What an asynchronous all-gather is made of on TPUs: one of its parts.
PART = """\
%part{n} (q: f32[64]) -> f32[128] {{
  %q = f32[64]{{0}} parameter(0)
  ROOT %g = f32[128]{{0}} all-gather(%q), channel_id=3, replica_groups={{{{0,1}}}}, \
frontend_attributes={{chain_id="{chain}"}}
}}
"""


def test_the_clones_of_an_asynchronous_fusion_count_once() -> None:
    lines = "\n".join(f"  %f{n} = f32[128]{{0}} fusion(%p), calls=%part{n}" for n in range(3))
    text = module(lines, "".join(PART.format(n=n, chain=5) for n in range(3)))
    assert found(text) == [("all_gather", 2, 512, 1)]


def test_a_loop_that_continues_an_asynchronous_collective_adds_none() -> None:
    """As libtpu hides an all-gather behind a while loop: every round of it holds a part."""
    inside = "\n".join(f"  %h{n} = f32[128]{{0}} fusion(%x), calls=%part{n}" for n in (1, 3))
    loop = LOOP.format(step=1, direction="LT").replace("  ROOT %out", f"{inside}\n  ROOT %out")
    start = "  %f0 = f32[128]{0} fusion(%p), calls=%part0\n"
    done = "\n  %f2 = f32[128]{0} fusion(%p), calls=%part2"
    body = start + CALL.format(start=0, bound=6).replace("ROOT ", "") + done
    parts = "".join(PART.format(n=n, chain=5 if n < 3 else 6) for n in range(4))
    assert sorted(found(module(body, parts + loop))) == [
        ("all_gather", 2, 512, 1),
        ("all_gather", 2, 512, 6),  # of a chain of its own in every round
        ("all_reduce", 2, 256, 6),
    ]


LOOP = """\
%body (t: (s32[], f32[64], s32[])) -> (s32[], f32[64], s32[]) {{
  %t = (s32[], f32[64]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[64]{{0}} get-tuple-element(%t), index=1
  %n = s32[] get-tuple-element(%t), index=2
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %r = f32[64]{{0}} all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %out = (s32[], f32[64]{{0}}, s32[]) tuple(%next, %r, %n)
}}
%less (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction={direction}
}}
%condition (t: (s32[], f32[64], s32[])) -> pred[] {{
  %t = (s32[], f32[64]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] get-tuple-element(%t), index=2
  ROOT %f = pred[] fusion(%i, %n), kind=kLoop, calls=%less
}}
"""
CALL = """\
  %start = s32[]{{:T(128)}} constant({start})
  %from = s32[]{{:T(128)}} copy(%start)
  %bound = s32[] constant({bound})
  %init = (s32[], f32[64]{{0}}, s32[]) tuple(%from, %p, %bound)
  ROOT %w = (s32[], f32[64]{{0}}, s32[]) while(%init), condition=%condition, body=%body"""


@pytest.mark.parametrize(
    ("start", "bound", "step", "direction", "trips"),
    [
        (0, 6, 1, "LT", 6),
        (2, 9, 3, "LT", 3),
        (0, 6, 1, "LE", 7),
        (9, 0, -1, "GT", 9),
        (8, 0, -2, "GE", 5),
        (0, 8, 2, "NE", 4),
        (5, 3, 1, "LT", 0),
    ],
)
def test_trips_are_worked_out_where_they_are_not_annotated(
    start: int, bound: int, step: int, direction: str, trips: int
) -> None:
    text = module(
        CALL.format(start=start, bound=bound), LOOP.format(step=step, direction=direction)
    )
    assert [c.count for c in collectives_in(text)] == [trips]


def test_an_annotation_of_trips_is_believed() -> None:
    call = CALL.format(start=0, bound=6) + ', backend_config={"known_trip_count":{"n":"41"}}'
    text = module(call, LOOP.format(step=1, direction="LT"))
    assert [c.count for c in collectives_in(text)] == [41]


def flops(body: str, computations: str = "") -> float:
    stats = hlo_stats(
        SimpleNamespace(
            as_text=lambda: module(body, computations),
            cost_analysis=lambda: None,
            memory_analysis=lambda: None,
        )
    )
    return stats.flops


def test_flops_of_products_from_the_text() -> None:
    assert (
        flops(
            """\
  %a = f32[2,8,16]{2,1,0} reshape(%p)
  %b = f32[2,16,4]{2,1,0} reshape(%p)
  ROOT %d = f32[2,8,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, \
rhs_batch_dims={0}, rhs_contracting_dims={1}"""
        )
        == 2 * 2 * 8 * 16 * 4
    )
    assert (
        flops(
            """\
  %a = bf16[8,16]{1,0} reshape(%p)
  %b = bf16[16,4]{1,0} reshape(%p)
  ROOT %g = (bf16[8,4]{1,0}, s8[1024]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}"""
        )
        == 2 * 8 * 16 * 4
    )


@pytest.mark.parametrize(
    ("strides", "padding", "lhs_dilation", "rhs_dilation", "groups"),
    [
        ((1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), 1),
        ((2, 1), ((1, 1), (2, 0)), (1, 1), (1, 1), 1),
        ((1, 1), ((1, 1), (1, 1)), (2, 2), (1, 1), 1),
        ((1, 2), ((0, 0), (2, 2)), (1, 1), (2, 2), 2),
    ],
)
def test_flops_of_convolutions_are_those_of_their_valid_taps(
    strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any, groups: int
) -> None:
    def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, k, strides, padding, lhs_dilation, rhs_dilation, feature_group_count=groups
        )

    x, k = np.ones((2, 4, 9, 10), F32), np.ones((6, 4 // groups, 3, 2), F32)
    done = jax.jit(convolve).lower(x, k).compile()
    # Ones give at each output the number of taps that it saw.
    taps = float(np.asarray(convolve(x, k)).sum())
    text = SimpleNamespace(
        as_text=done.as_text, cost_analysis=lambda: None, memory_analysis=lambda: None
    )
    assert hlo_stats(text).flops == 2 * taps


def test_types_and_their_bytes() -> None:
    sizes = {
        "f32[8,64]{1,0:T(8,128)S(1)}": 8 * 64 * 4,
        "(bf16[3]{0}, /*index=1*/(s32[], pred[5]{0}))": 6 + 4 + 5,
        "s4[7]{0:E(4)}": 4,
        "f32[<=8,2]{1,0}": 64,
        "token[]": 0,
    }
    for text, nbytes in sizes.items():
        assert sum(a.nbytes for a in arrays(text)) == nbytes, text


def test_constants_over_several_lines_and_strings_with_brackets() -> None:
    text = module(
        """\
  %c = s32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 }
  })
  ROOT %r = f32[64]{0} add(%p, %p), \
metadata={op_name="a) = b({" source_file="x.py" source_line=3}"""
    )
    parsed = parse(text)
    main = parsed.computations["main"]
    assert [i.opcode for i in main.instructions] == ["parameter", "constant", "add"]
    assert main.root.op_name == "a) = b({" and parsed.source(main.root) == "x.py:3"
    assert (parsed.name, parsed.devices) == ("m", 8)


def test_a_text_that_is_no_module_is_refused() -> None:
    with pytest.raises(PlanError, match="no entry computation"):
        collectives_in("HloModule nothing")


# How texts of modules are read.


def test_a_module_whose_attributes_hold_an_equal_sign_is_read_from_its_first_computation() -> None:
    """As meshes are told there. What follows it was read as more of the module's own line."""
    text = (
        'HloModule jit_f, frontend_attributes={xla.sdy.meshes={mesh = #sdy.mesh<["x"=1]>}}\n\n'
        "ENTRY %main (x: f32[4]) -> f32[4] {\n"
        "  %x = f32[4]{0} parameter(0)\n"
        "  ROOT %y = f32[4]{0} negate(%x)\n"
        "}\n"
    )
    assert [i.opcode for i in parse(text).computations["main"].instructions] == [
        "parameter",
        "negate",
    ]
