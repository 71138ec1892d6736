"""Streams: attention as programs spell it, forward and backward, as kernels that keep no scores.

In: a block graph. Out: the same program, in which fused kernels stand where scores were made,
normalised, and used. What is recognised is what is computed: views, casts, the order of dims and of
factors do not matter.
"""
