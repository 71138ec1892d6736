"""E-graphs as arrays: their form, exact reductions, and methods that walk them.

In: a `ChoiceProblem` of e-nodes. Out: a smaller form with the same best answer, and answers by
greedy choice, annealing and tree decomposition.
"""
