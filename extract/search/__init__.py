"""The search: labellings of a problem that no other dominates, and proven bounds on all others.

In: a `Problem`, an `Effort`, limits. Out: an `Archive` of candidates and cuts: message passing
bounds the problem with memory priced, variable elimination solves it, integer programs close what
is left. In the order in which a search comes to them: `worker`, `search`, `approaching`,
`settling`, `messages`, `elimination`, `balance`, `descent`, `exact`, `archive`. To print what it
finds: `front.stages["results"]`.
"""
