"""E-graphs: the cheapest choice of nodes without cycles, what is shared paid once.

In: a `ChoiceProblem` of sums. Out: a choice with a bound. `form.py` is what the reductions act on;
`method.py` is the method: greedy choice, then elimination, annealing and mixed-integer programs by
HiGHS (`search.py`).
"""
