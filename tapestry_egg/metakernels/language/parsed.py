"""Trees made ahead of the texts of all templates and rule books that ship with tapestry-egg.

`parsed.json` holds them; `python -m tapestry_egg.rules.language.parse_ahead` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from tapestry_egg.syntax_trees import KeptTrees

_HERE = Path(__file__).parent

#: The trees of shipped texts of the template language.
KEPT = KeptTrees(_HERE / "template.lark", _HERE / "parsed.json")
