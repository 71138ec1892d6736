"""Rows: how blocks of rows go through operations, and programs with more of them than were given.

In: a block graph, one dim of it. Out: where each operation has its rows, read from its projections;
and the program padded along dims that devices cannot share evenly.
"""
