"""Pictures of plans that open from the program to the kernel.

In: a plan. Out: pictures, each of what a box of the one before holds, and one SVG of them all.
"""
