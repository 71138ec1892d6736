"""Choices: the ways in which every unit can run, and the copies between layouts.

In: strategies. Out: `UnitChoices`, the rows of every unit, and tables of copies. To print them:
`front.stages["choices"]`.
"""
