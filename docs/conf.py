"""The site that `make docs` builds from these pages and from docstrings; it loads nothing."""

import re
from importlib import metadata
from typing import Any

project = "tapestry-egg"
release = metadata.version("tapestry-egg")
html_title = f"{project} {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_theme_options = {"footer_icons": []}
html_copy_source = False
exclude_patterns = ["rules/*", "templates/*"]

myst_heading_anchors = 3
# Links to what is in the repository and not in the site stay text.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True


def _code(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `code` in them, which may have an ending: `Plan`s."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)(\w?)", _literal, "\n".join(lines))
    lines[:] = text.split("\n")


def _literal(found: re.Match[str]) -> str:
    return f"``{found[1]}``" + (f"\\ {found[2]}" if found[2] else "")


def _books(_app: Any, page: str, source: list[str]) -> None:
    """The list of rules, read from the books that ship, in place of its mark in the rule book."""
    if page == "rule-book":
        source[0] = source[0].replace("<!-- the books -->", _listed_rules())


def _listed_rules() -> str:
    from tapestry_egg.rules.language.book import book_names, load_books

    lines = []
    for book in load_books(book_names()):
        lines += ["", f"### {book.name}", "", "| rule | numerics | law |", "|---|---|---|"]
        for rule in book.rules:
            law = " ".join(rule.law.split()).replace("|", "\\|")
            lines.append(f"| `{rule.name}` | `{rule.numerics}` | `{law}` |")
    return "\n".join(lines)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _code)
    app.connect("source-read", _books)
