"""Signatures: what a template says of one operation on operands of given shapes.

In: shapes, dtypes and parameters. Out: `OperationSignature`: an index space with roles, a
projection for every operand and result, and which cuts of it are legal (`splits.py`). To print one:
`tapestry-egg kernels NAME --shape 8,16`.
"""
