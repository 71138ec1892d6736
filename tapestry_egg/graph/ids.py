"""Numbers of things, told apart by type: a stage hands on whole numbers, and each counts its own.

At run time they are plain integers. Records that cross from one stage to the next say which they
hold; what stays inside a function may call them `int`. Rows, and all else that fills arrays, are
told apart by the comments beside the arrays.
"""

from __future__ import annotations

from typing import NewType

#: A value of a flat program: those of all its bodies.
FlatId = NewType("FlatId", int)
#: A body of a flat program: the program itself, or the graph of a region.
BodyId = NewType("BodyId", int)
#: An instance of a flat program: an operation or a port.
InstanceId = NewType("InstanceId", int)
#: A unit of a schedule.
UnitId = NewType("UnitId", int)
#: A signature of an encoding.
SignatureId = NewType("SignatureId", int)
#: A class of equal values in the e-graph of the program's rules.
ClassId = NewType("ClassId", int)
#: A layout of a mesh's algebra.
LayoutId = NewType("LayoutId", int)
