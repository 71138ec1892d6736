"""Questions asked of a finished plan, answered from a recount of it.

In: plans of a front. Out: one record per answer, as text (`print`), as plain data (`data()`): the
way of a tensor, the reason of a collective, what a line costs, why not another layout, the
difference of two plans. They are methods of plans and fronts, and options of `explain`.
"""
