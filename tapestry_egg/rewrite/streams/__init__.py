"""Streams: programs part after part, along the rows of a batch or of a large product.

In: a block graph. Out: the same program, with a loop over blocks of rows in it; and all changes of
programs by their names, fused attention among them (`streamed.py`).
"""
