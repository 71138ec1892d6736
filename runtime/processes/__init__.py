"""Jobs of several processes: that all run the same, and that nobody waits for one who is gone.

In: devices of `jax.distributed`. Out: an agreement before the first collective, or a PeerError that
names the process.
"""
