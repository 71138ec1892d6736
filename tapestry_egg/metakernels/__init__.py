"""Metakernels: templates that say how an operation's index space projects into its tensors."""

from __future__ import annotations
