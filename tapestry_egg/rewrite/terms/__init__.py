"""Terms: a program as the classes of equal values that rules find, and programs built of them.

In: a block graph, rules. Out: for every class the ways to compute it, which rules made them, and
a block graph again for any choice among them. Between iterations Python answers what rules want.
"""
