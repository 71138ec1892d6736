"""E-graphs: the cheapest choice of nodes without cycles, what is shared paid once.

In: a `ChoiceProblem` of sums. Out: a choice with a bound. `form.py` is what the reductions act on;
`node_front.py` are the methods of the table in `extract/gym/extraction.py`: elimination, mixed-
integer programs by HiGHS, annealing, greedy choice.
"""
