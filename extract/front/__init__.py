"""The front: plans of all forms and meshes that no other dominates, each with its bound.

In: the archives of the searches. Out: `Front`. To print one: `print(front)`, `tapestry-egg front
FILE`.
"""
