"""The problem: what is left to choose, as arrays of seconds, joules and bytes over time.

In: strategies, and the user's pins. Out: `UnitChoices`, the rows of every unit, and `PlanProblem`,
one variable for each and a table for each pair that meets. To print them:
`front.stages["problems"]`.
"""
