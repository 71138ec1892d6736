"""The network of a choice problem with pairwise costs: its form, exact reductions, and bounds.

In: a `ChoiceProblem` of strategies. Out: `Network`, smaller where that is exact, and what message
passing and the weights of memory prove of it.
"""
