"""Worked Loom graphs of the Tapestry project, written out as the JSON that its documents show."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any
from uuid import UUID

N = "http://tensortapestry.org/schemas/loom/2024-01/node_types.jsd#/nodes/"
G = "http://tensortapestry.org/schemas/loom/2024-01/tag_types.jsd#/tags/"
Box = tuple[Sequence[int], Sequence[int]]


def uid(number: int) -> str:
    return str(UUID(int=number))


def box(start: Sequence[int], end: Sequence[int]) -> dict[str, list[int]]:
    return {"start": list(start), "end": list(end)}


def tensor(number: int, label: str, dtype: str, at: Box) -> dict[str, Any]:
    body = {"dtype": dtype, "range": box(*at)}
    return {"id": uid(number), "type": f"{N}Tensor", "label": label, "body": body}


Ports = dict[str, list[tuple[int, Box]]]


def selected(ports: Ports) -> dict[str, Any]:
    """Per name the boxes of tensors that are read or made."""
    return {
        name: [{"tensorId": uid(n), "range": box(*at)} for n, at in own]
        for name, own in ports.items()
    }


def ipf(matrix: list[list[int]], offset: list[int], shape: list[int]) -> dict[str, Any]:
    return {"affineMap": {"projection": matrix, "offset": offset}, "shape": shape}


def operation(
    number: int,
    kernel: str,
    inputs: Ports,
    outputs: Ports,
    index: Box | None = None,
    signature: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
) -> dict[str, Any]:
    body: dict[str, Any] = {"kernel": kernel}
    if params:
        body["params"] = params
    node: dict[str, Any] = {
        "id": uid(number),
        "type": f"{N}Operation",
        "label": kernel,
        "body": {**body, "inputs": selected(inputs), "outputs": selected(outputs)},
    }
    if index is not None:
        node["tags"] = {f"{G}IPFIndex": box(*index)}
        if signature:
            node["tags"][f"{G}IPFSignature"] = signature
    return node


def application(number: int, of: int, inputs: Ports, outputs: Ports, index: Box) -> dict[str, Any]:
    ports = {"inputs": selected(inputs), "outputs": selected(outputs)}
    body = {"operationId": uid(of), **ports}
    node = {"id": uid(number), "type": f"{N}Application", "body": body}
    return {**node, "tags": {f"{G}IPFIndex": box(*index)}}


def graph(number: int, *nodes: dict[str, Any]) -> dict[str, Any]:
    return deepcopy({"id": uid(number), "nodes": list(nodes)})  # what nodes share is apart


EYE = [[1, 0], [0, 1]]
SAME = ipf(EYE, [0, 0], [1, 1])
T0, T1 = ((0, 0), (10, 5)), ((200, 50), (210, 55))


def add_with_mask() -> dict[str, Any]:
    """An addition that a parameter masks, unsharded and without a signature."""
    ins = {"tensors": [(1, T0), (2, T1)], "mask": [(3, T0)]}
    return graph(
        100,
        tensor(1, "t0", "int32", T0),
        tensor(2, "t1", "int32", T1),
        tensor(3, "mask", "bool", T0),
        tensor(4, "z", "int32", T0),
        operation(5, "op:add", ins, {"result": [(4, T0)]}, params={"mask_value": 12}),
    )


def sharded_add() -> dict[str, Any]:
    """X10: t0 [10, 5] plus t1 zr[200:210, 50:55], in two shards of five rows."""
    halves = [((0, 0), (5, 5)), ((5, 0), (10, 5))]
    moved = [((200, 50), (205, 55)), ((205, 50), (210, 55))]
    signature = {
        "inputs": {"tensors": [SAME, ipf(EYE, [200, 50], [1, 1])]},
        "outputs": {"result": [SAME]},
    }
    ins = {"tensors": [(1, T0), (2, T1)]}
    return graph(
        101,
        tensor(1, "t0", "int32", T0),
        tensor(2, "t1", "int32", T1),
        tensor(3, "z", "int32", T0),
        operation(4, "op:add", ins, {"result": [(3, T0)]}, T0, signature),
        *(
            application(5 + k, 4, {"tensors": [(1, a), (2, b)]}, {"result": [(3, a)]}, a)
            for k, (a, b) in enumerate(zip(halves, moved, strict=True))
        ),
    )


def matmul_row_sum() -> dict[str, Any]:
    """X6: a matmul in three column shards, then a sum over its rows in two."""
    a, b, z, s = ((-10, 4), (-7, 8)), ((0, 0), (4, 5)), ((0, 0), (3, 5)), ((0,), (3,))
    product = {
        "inputs": {
            "x": [ipf([[1, 0], [0, 0]], [-10, 4], [1, 4])],
            "y": [ipf([[0, 0], [0, 1]], [0, 0], [4, 1])],
        },
        "outputs": {"z": [SAME]},
    }
    total = {
        "inputs": {"x": [ipf([[1], [0]], [0, 0], [1, 5])]},
        "outputs": {"y": [ipf([[1]], [0], [1])]},
    }
    columns = [(0, 2), (2, 4), (4, 5)]
    rows = [(0, 2), (2, 3)]
    return graph(
        102,
        tensor(1, "A", "float32", a),
        tensor(2, "B", "float32", b),
        tensor(3, "z", "float32", z),
        tensor(4, "s", "float32", s),
        operation(5, "op:matmul", {"x": [(1, a)], "y": [(2, b)]}, {"z": [(3, z)]}, z, product),
        *(
            application(
                10 + k,
                5,
                {"x": [(1, a)], "y": [(2, ((0, lo), (4, hi)))]},
                {"z": [(3, ((0, lo), (3, hi)))]},
                ((0, lo), (3, hi)),
            )
            for k, (lo, hi) in enumerate(columns)
        ),
        operation(6, "op:row_sum", {"x": [(3, z)]}, {"y": [(4, s)]}, s, total, {"axis": 1}),
        *(
            application(
                20 + k,
                6,
                {"x": [(3, ((lo, 0), (hi, 5)))]},
                {"y": [(4, ((lo,), (hi,)))]},
                ((lo,), (hi,)),
            )
            for k, (lo, hi) in enumerate(rows)
        ),
        {"id": uid(30), "type": f"{N}Note", "body": {"message": "from the Loom examples"}},
    )


def linear_relu() -> dict[str, Any]:
    """X7 unsharded: x zr[-40:60, 20:32] through a linear layer of 32 features and a relu."""
    x, w, b, z = ((-40, 20), (60, 32)), ((0, 0), (12, 32)), ((0,), (32,)), ((0, 0), (100, 32))
    linear = {
        "inputs": {
            "x": [ipf([[1, 0], [0, 0]], [-40, 20], [1, 12])],
            "W": [ipf([[0, 0], [0, 1]], [0, 0], [12, 1])],
            "b": [ipf([[0, 1]], [0], [1])],
        },
        "outputs": {"z": [SAME]},
    }
    relu = {"inputs": {"x": [SAME]}, "outputs": {"y": [SAME]}}
    return graph(
        103,
        tensor(1, "x", "float32", x),
        tensor(2, "W", "float32", w),
        tensor(3, "b", "float32", b),
        tensor(4, "Z", "float32", z),
        tensor(5, "Y", "float32", z),
        operation(
            6,
            "op:linear",
            {"x": [(1, x)], "W": [(2, w)], "b": [(3, b)]},
            {"z": [(4, z)]},
            z,
            linear,
        ),
        operation(7, "op:relu", {"x": [(4, z)]}, {"y": [(5, z)]}, z, relu),
    )


def matmul() -> dict[str, Any]:
    """X5 unsharded: J zr[-10:0, 0:5] times K zr[0:5, 0:12]."""
    j, k, whole = ((-10, 0), (0, 5)), ((0, 0), (5, 12)), ((0, 0), (10, 12))
    signature = {
        "inputs": {
            "X": [ipf([[1, 0], [0, 0]], [-10, 0], [1, 5])],
            "Y": [ipf([[0, 0], [0, 1]], [0, 0], [5, 1])],
        },
        "outputs": {"Z": [SAME]},
    }
    return graph(
        104,
        tensor(1, "J", "float32", j),
        tensor(2, "K", "float32", k),
        tensor(3, "L", "float32", whole),
        operation(
            4, "op:matmul", {"X": [(1, j)], "Y": [(2, k)]}, {"Z": [(3, whole)]}, whole, signature
        ),
    )
