"""AND-OR choice problems with acyclic answers: e-graphs.

In: a `ChoiceProblem`. Out: a `Choice` with its bound. `egraph/form.py` is what the reductions act
on; `methods.py` are the methods of the table in `extract/gym/methods.py`: tree elimination,
mixed-integer programs by HiGHS and CP-SAT, annealing, greedy.
"""
