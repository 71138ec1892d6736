"""Measured times of products and collectives, as files, and what they say of other shapes.

In: tables of comma-separated values, named by target files. Out: seconds of products of matrices
and of collectives. To see how well they hold: `tapestry-egg targets NAME:SHAPE`.
"""
