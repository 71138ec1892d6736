"""Programs written in kernels, without JAX: symbolic execution of metakernel templates.

In: templates, types. Out: a `Program`, printed as a traced one: `print(program.graph)`. `te.tensor`
makes symbolic tensors, `te.kernel` what they are given to, `te.program` the program of those that
come out: a block graph, which is checked, drawn, saved, optimised and run as a traced one is.
"""

from __future__ import annotations
