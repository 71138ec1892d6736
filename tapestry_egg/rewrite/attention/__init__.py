"""Attention without scores: softmaxes of scores, recognised, and their derivatives, as kernels.

In: a block graph. Out: the same program, in which such kernels stand where scores were made,
normalised, and used. What is recognised is what is computed: views, casts, the order of dims and of
factors do not matter.
"""
