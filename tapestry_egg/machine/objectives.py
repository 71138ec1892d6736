"""Objectives: what a plan may be better in."""

from __future__ import annotations

#: What plans can be compared by.
KNOWN_OBJECTIVES = ("seconds", "peak_bytes", "joules", "wire_bytes", "flops", "devices")
