"""Primitives that have no template on purpose, and the reason for each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml


@cache
def opaque_reasons() -> Mapping[str, str]:
    """Primitive's name -> why it has no template; from `opaque.yaml` beside this module."""
    text = Path(__file__).with_name("opaque.yaml").read_text("utf-8")
    return {name: str(e["reason"]) for e in yaml.safe_load(text) for name in e["primitives"]}
