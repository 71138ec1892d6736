"""Places: one problem of all programs that differ in how some of their places are computed.

In: the ways of every place, and the problem of any one program. Out: `Patched`, whose labellings
are each one of a program of its own.
"""
