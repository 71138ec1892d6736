"""Loom: block graphs in the JSON form of the Tapestry project, checked against dialects.

`read_loom` and `write_loom` are the files, `EXPRESSIONS` and `APPLICATIONS` the dialects, `sharded`
makes shards from signatures, `to_loom` and `from_loom` lead from and to our own block graphs.
"""

from __future__ import annotations

from .convert import from_loom as from_loom
from .convert import to_loom as to_loom
from .dialects import APPLICATIONS as APPLICATIONS
from .dialects import EXPRESSIONS as EXPRESSIONS
from .dialects import Dialect as Dialect
from .issues import LoomError as LoomError
from .issues import ValidationIssue as ValidationIssue
from .nodes import LoomGraph as LoomGraph
from .nodes import Node as Node
from .nodes import loom_from_json as loom_from_json
from .nodes import loom_to_json as loom_to_json
from .nodes import read_loom as read_loom
from .nodes import write_loom as write_loom
from .sharding import sharded as sharded
