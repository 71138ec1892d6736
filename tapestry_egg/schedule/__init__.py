"""The schedule: which operations run as one kernel, in which order, and what lives how long.

In: a block graph. Out: `FlatProgram`, the graph with its loops as one list of operations, and
`Schedule`, its units in order. To print one: `front.stages["schedules"]`.
"""
