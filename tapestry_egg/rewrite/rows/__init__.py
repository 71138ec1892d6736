"""Rows: how blocks of rows go through operations, and programs that run on other rows than given.

In: a block graph, one dim of it. Out: where each operation has its rows, read from its projections;
the program padded along dims that devices cannot share evenly, windows that slide along them, too.
"""
