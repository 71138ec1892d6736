"""Rewriting: other programs that compute the same, found by rules before any mesh is known.

In: a block graph, books of rules, a target. Out: `Form`s: graphs, with the rules that led to each
and the steps to replay; among them forms that compute values again to hold less memory. To print
them: `front.stages["forms"]`.
"""
