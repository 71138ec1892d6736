"""Sharding: facts of one form on one mesh, and the strategies that the rules derive from them.

In: a schedule and a mesh shape. Out: `Saturated`: for every signature its ways to run, each with a
layout for every operand and result, and the elementary changes of layout. To print them:
`front.stages["strategies"]`.
"""
