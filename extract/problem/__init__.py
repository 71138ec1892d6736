"""The problem: what is left to choose, as arrays of seconds, joules and bytes over time.

In: `UnitChoices`, the rows of every unit. Out: `PlanProblem`, one variable for each and a table for
each pair that meets. To print them: `front.stages["problems"]`.
"""
