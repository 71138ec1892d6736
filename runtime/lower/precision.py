"""Rounding of a contraction's operand to what a target's matrix units read.

A primitive of its own: it is the planner's, not the user's, and only where the compiler would round
as well is it carried out. Elsewhere an operand stays as it is, and so do the numbers.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

#: Platforms whose compilers round the operands of contractions at default precision.
ROUNDING = ("tpu",)


def _rounded(x: jax.Array, *, new_dtype: Any) -> jax.Array:
    return x.astype(new_dtype)


def _typed(x: Any, *, new_dtype: Any) -> Any:
    return x.update(dtype=jax.numpy.dtype(new_dtype), weak_type=False)


round_operand_p = Primitive("round_operand")
round_operand_p.def_impl(_rounded)
round_operand_p.def_abstract_eval(_typed)
mlir.register_lowering(round_operand_p, mlir.lower_fun(_rounded, multiple_results=False))
