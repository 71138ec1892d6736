"""egglog's e-graph, in a process of its own: rules and facts in, tables out, with budgets.

In: egglog text and rows of integers. Out: rows of integers, and a timeline of what fired when
(`tapestry-egg front FILE --timeline`).
"""
