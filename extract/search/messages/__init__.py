"""Message passing: a bound on a problem at given prices, and what every row takes at least there.

In: a `Problem`, prices of seconds, bytes and joules. Out: a `Cut`, reduced costs. In the order in
which a problem comes to them: `pricing`, `batches`, `leaves`, `folding`, `sweeps`, `dual`.
"""
