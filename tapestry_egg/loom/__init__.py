"""Loom: block graphs in the JSON form of the Tapestry project, checked against dialects.

In: block graphs, or files. Out: `LoomGraph`, or block graphs. `to_loom` and `from_loom` lead from
and to our own block graphs, `write_loom` makes files, and `te.load` reads them. `EXPRESSIONS` and
`APPLICATIONS` are the dialects, `sharded` makes shards from signatures. To print one: `tapestry-egg
show g.json --loom`.
"""

from __future__ import annotations

from .constraints import LoomError as LoomError
from .constraints import ValidationIssue as ValidationIssue
from .dialects import APPLICATIONS as APPLICATIONS
from .dialects import EXPRESSIONS as EXPRESSIONS
from .dialects import Dialect as Dialect
from .nodes import LoomGraph as LoomGraph
from .nodes import Node as Node
from .nodes import loom_from_json as loom_from_json
from .nodes import loom_text as loom_text
from .nodes import loom_to_json as loom_to_json
from .nodes import write_loom as write_loom
from .read import from_loom as from_loom
from .read import program_from_loom as program_from_loom
from .write import sharded as sharded
from .write import to_loom as to_loom
