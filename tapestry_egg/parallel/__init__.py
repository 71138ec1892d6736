"""Calls of functions on plain data: in processes of this machine, or on a cluster; and deadlines.

In: a function's name and its arguments. Out: results in order, or the interruption that ended them.
"""
