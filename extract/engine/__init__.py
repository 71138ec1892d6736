"""The engine: choice problems searched and bounded, by compiled loops over flat arrays.

In: `Problem`s, one for every form of a program on every mesh. Out: an `Archive` of each, its best
labellings and bounds on all others. In the order in which a problem meets them: `network` (its
arrays), `sweeps` (bounds at prices), `elimination` and `moves` (labellings), `core` (the rows that
matter), `mixtures` (prices), `branch` (proofs of what is small), `search` (one network), `race`
(all of them).

Public choice problems of one limit are searched by `within`, for as long as there is time, which
moves whole `trees` of variables at once.
"""
