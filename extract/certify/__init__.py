"""The certificate: a finished plan, walked operation by operation, legal and costed from scratch.

In: a plan, its schedule, a target. Out: its costs, or the first thing that is wrong. Shares no code
with the search and what it searches. To print what it counts: `plan.costs_by("kernel")`,
`tapestry-egg explain FILE --by line`.
"""
