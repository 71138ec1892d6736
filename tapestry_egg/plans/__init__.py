"""Plans: how every operation of a graph runs on a mesh, and what that moves.

In: layouts and strategies. Out: `Plan`, the elementary changes of layout, the copies that readers
fetch, and the collectives with their bytes. To print one: `plan.explain()`.
"""
