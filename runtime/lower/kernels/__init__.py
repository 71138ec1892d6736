"""Kernels: how one operation runs on the blocks of its operands that a device has.

In: an operation, its strategy, local blocks. Out: local blocks of its results, by the kernel's own
primitive, or said otherwise to a compiler that takes it best, or only, so.
"""
