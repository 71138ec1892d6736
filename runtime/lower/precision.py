"""Rounding of a contraction's operand to what a target's matrix units read.

A primitive of its own: it is the planner's, not the user's, and only where the compiler would round
as well is it carried out. Elsewhere an operand stays as it is, and so do the numbers.
"""

from __future__ import annotations

from tapestry_egg.runtime.lower.kernels.streaming import new_primitive

#: Platforms whose compilers round the operands of contractions at default precision.
ROUNDING = ("tpu",)

round_operand_p = new_primitive("round_operand", lambda x, *, new_dtype: x.astype(new_dtype))
