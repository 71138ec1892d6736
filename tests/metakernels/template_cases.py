"""All cases: importing this module registers those of every family."""

from __future__ import annotations

from tests.metakernels import (
    cases_contraction,
    cases_elementwise,
    cases_indexing,
    cases_linalg,
    cases_movement,
    cases_random,
    cases_reduction,
    cases_streaming,
)
from tests.metakernels.cases import CASES, FAMILY, Case, Draw, drawn

__all__ = [
    "CASES",
    "FAMILY",
    "Case",
    "Draw",
    "cases_contraction",
    "cases_elementwise",
    "cases_indexing",
    "cases_linalg",
    "cases_movement",
    "cases_random",
    "cases_reduction",
    "cases_streaming",
    "drawn",
]
