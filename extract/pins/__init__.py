"""Pins: layouts of inputs, outputs and values inside that the user fixes.

In: the user's words, as paths, numbers, lines or JAX's shardings. Out: `Pin`s, constraints of the
program, and of the rows of its inputs and outputs those that fit.
"""
