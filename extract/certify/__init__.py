"""The certificate: a finished plan, walked operation by operation, legal and costed anew.

In: a plan, its schedule, a target. Out: its costs, or the first thing that is wrong. Shares prices
of kernels and lifetimes with the search, but none of its tables of choices. To print what it
counts: `plan.costs_by("kernel")`, `tapestry-egg explain FILE --by line`.
"""
