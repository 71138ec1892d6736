"""Verification: whether a rule is true, tried before it is used, and proven where a solver can.

In: a rule. Out: a verdict with the number of cases, or a counterexample with its inputs. To print
one: `tapestry-egg verify FILE`.
"""
