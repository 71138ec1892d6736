"""The block graph: operations on numbered values, their types, layouts on a mesh, and pytrees.

In: nothing of the package's but its errors. Out: `BlockGraph`, `TensorType`, `Layout`, `MeshShape`,
the records that every later stage reads. To print one: `tapestry-egg show FILE`, or
`show.text.graph_text(graph)`.
"""
