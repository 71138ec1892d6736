"""From a program and a machine to a front: a table of passes, and what they are asked for.

In: what `tracing` made, and a target. Out: a `Front`, certified. `optimize` runs the passes of
`pipeline.py` from top to bottom. To print what each made: `optimize(..., keep_stages=True).stages`.
"""

from tapestry_egg.machine.objectives import OBJECTIVES as OBJECTIVES

from .pipeline import Front as Front
from .pipeline import optimize as optimize
from .settings import Settings as Settings
