"""Seconds that are no sum: collectives beside kernels, and several that are one.

In: when each is issued and needed; which wait for which, and what waits. Out: what a step takes,
and prices at which no step takes less than it is said to.
"""
