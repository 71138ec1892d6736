"""Cost function networks: every class chooses one node, pairs of choices cost, memory is limited.

In: a `ChoiceProblem`. Out: a `Choice` with its bound, or a front. `solver.solve` takes a choice
problem whose classes all choose, and no choice needs another. Classes that determine each other
become one (`network/alignment.py`), and there is a first answer (`opening.py`); exact reductions
(`network/reductions.py`) leave a smaller network (`network/network.py`); message passing at prices
of memory (`network/messages.py`) bounds it and says where to begin; minimisation over forests
(`network/forest.py`) improves plans, within the limits where `trades.py` takes only what fits;
large networks are searched in cores (`cores.py`), the rows that the bound hardly excludes; what is
small is closed by branch and bound (`branch.py`) or mixed-integer programming
(`network/program.py`). What memory is needed at least is told by `network/reach.py`. Fronts of cost
against memory (`tradeoff.py`) search one network at many limits (`sweep.py`); what is known of all
of them is kept together (`network/known.py`).
"""
