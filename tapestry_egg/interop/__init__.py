"""What other tools hand over and take: StableHLO and exported functions in, e-graphs out.

In: modules of StableHLO, or files of `jax.export`. Out: functions that are traced as the user's are
(`te.from_stablehlo`, `te.from_export`); e-graphs as JSON (`tapestry-egg show FILE --egraph`).
"""
