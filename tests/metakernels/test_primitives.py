"""Every primitive of JAX is understood, or listed with the reason why not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.registry import opaque_primitives
from tapestry_egg.tracing.jaxprs import INLINED, REGIONS
from tapestry_egg.tracing.trace import trace

#: Tracing leaves nothing of these where they do nothing: placements, and solvers' own functions.
DISSOLVED = {"device_put", "custom_linear_solve", "reshard", "mesh_cast"}
#: Functions of newer JAX that are made of others, and traced as these.
MADE_OF_OTHERS = {"one_minus_square", "polynomial"}

#: What real programs are made of: transformers, convolutional networks, mixtures of experts, with
#: their gradients and optimizers, in Flax, Equinox and plain JAX.
IN_PROGRAMS = """
    mul add broadcast_in_dim div reshape reduce_sum dot_general transpose integer_pow select_n jit
    add_any sub eq sqrt max convert_element_type neg square lt iota rsqrt gather reduce_max
    stop_gradient exp conv_general_dilated ge psum tanh scatter-add squeeze sin and gt random_bits
    shift_right_logical or bitcast_convert_type custom_jvp_call ragged_dot_general slice
    random_fold_in cos log pow rev cumsum logistic sort scan remat2 is_finite sign abs
    reduce_window_max select_and_scatter_add top_k argmax scatter reduce_precision custom_vjp_call
    while cond debug_print fft cholesky
""".split()


def understood() -> set[str]:
    return set(registry.templates()) | set(INLINED) | set(REGIONS) | DISSOLVED | MADE_OF_OTHERS


def test_what_real_programs_are_made_of_is_understood() -> None:
    assert set(IN_PROGRAMS) - understood() == {"debug_print"}


def test_every_public_primitive_has_a_template_or_a_reason() -> None:
    public = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    assert len(public) > 150
    assert public - understood() - set(opaque_primitives()) == set()


def test_no_primitive_is_both_and_every_reason_is_a_sentence() -> None:
    assert set(opaque_primitives()) & understood() == set()
    assert all(each.reason.endswith(".") for each in opaque_primitives().values())


@pytest.mark.parametrize("name", sorted(MADE_OF_OTHERS))
def test_what_is_made_of_others_is_traced_as_these(name: str) -> None:
    function = getattr(lax, name, None)
    if function is None:
        pytest.skip(f"this JAX has no {name}")
    rest = ((2.0, -1.0, 0.5),) if name == "polynomial" else ()
    program = trace(lambda x: function(x, *rest), jnp.arange(8.0))
    assert {op.kernel for op in program.graph.operations} <= {"add", "sub", "mul"}
    x = np.linspace(-2.0, 2.0, 8, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(program)(x), jax.jit(function)(x, *rest))
