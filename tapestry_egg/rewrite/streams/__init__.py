"""Streams: attention without scores, and programs part after part along the rows of a batch.

In: a block graph. Out: the same program, in which fused kernels stand where scores were made,
normalised, and used, forward and backward, or a loop over blocks of rows. What is recognised is
what is computed: views, casts, the order of dims and of factors do not matter.
"""
