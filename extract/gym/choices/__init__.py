"""Choice problems: classes, nodes and costs, answers to them, and what checks an answer.

In: arrays. Out: `ChoiceProblem`, `Choice`, `ChoiceFront`, the records that methods share.
"""
