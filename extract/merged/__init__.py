"""Merged collectives: which copies of a plan can be one, and what it holds when they are.

In: a legal plan's copies, their seconds and what they hold. Out: ways to merge them within limits.
"""
