"""Which cases of a long list run in which tier of the tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def tiers(cases: Iterable[Any], usual: int = 1, fast: int = 0) -> list[Any]:
    """Every `fast`-th case runs in all tiers, every `usual`-th from `make test` on, and all of
    them in `make test-all`."""

    def marks(k: int) -> Any:
        if fast and k % fast == 0:
            return ()
        return pytest.mark.slow if k % usual == 0 else pytest.mark.long

    return [pytest.param(case, marks=marks(k)) for k, case in enumerate(cases)]
