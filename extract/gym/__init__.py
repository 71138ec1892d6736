"""Extraction on its own: e-graphs and strategy problems that others publish, and saved problems.

In: files (`formats/`), or problems of this package. Out: an answer or a front, certified. Nothing
that plans programs imports it. `choices.py` is the problem, `check.py` what checks an answer,
`extraction.py` the best answer so far, `fronts.py` what fronts share.
"""
