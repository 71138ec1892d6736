"""Monoids: how the partial results of a reduction that is cut combine into the whole one.

`monoids.yaml` holds them as data; `monoid(name)` gives one, `reduce` folds with it.
"""

from __future__ import annotations

from .definition import Monoid as Monoid
from .definition import add_monoids as add_monoids
from .definition import monoid as monoid
from .definition import monoids as monoids
from .definition import single_monoids as single_monoids
from .formula import MonoidError as MonoidError
