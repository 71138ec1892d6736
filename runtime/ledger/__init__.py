"""The ledger: what a plan promised, recounted from the program that will run.

In: the jaxpr of the emitted `shard_map` and the plan's promised numbers. Out: bytes on the wire by
kind and mesh axes, layouts at the boundary, bytes in memory, or the first of them that the plan
promised wrongly. Shares no code with the search, the cost model and the certificate.
"""
