"""Monoids: how the partial results of a reduction that is cut combine into the whole one.

A monoid wraps an element into a state, combines states, and unwraps the last one. `monoids.yaml`
holds those that ship, as data, and `definition` reads it: `monoid(name)` gives one, `add_monoids`
takes a file of your own, once `laws` has found that it keeps them. What a state becomes is written
as formulas (`formula`), which `fold` computes on NumPy or JAX arrays. In: names,
or files. Out: `Monoid`. To print one: `monoid("max").law`.
"""

from __future__ import annotations

from .definition import Monoid as Monoid
from .definition import add_monoids as add_monoids
from .definition import monoid as monoid
from .definition import monoids as monoids
from .definition import single_monoids as single_monoids
from .fold import reduce as reduce
from .formula import MonoidError as MonoidError
from .laws import check_laws as check_laws
