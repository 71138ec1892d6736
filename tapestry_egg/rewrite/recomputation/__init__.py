"""Recomputation: values that are computed a second time, so that less is held meanwhile.

In: a program, or its units. Out: the same program with second instances of some operations, and
which values are worth one, by the bytes that they hold and the seconds that they take.
"""
