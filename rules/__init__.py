"""Rewrite rules as data: files of named rules, each with its law, reason and numerics class.

In: files of rules. Out: `RuleBook`. `books/` holds what ships, `language/` reads them, `verify/`
tries every rule before it is used. To print them: `tapestry-egg rules`, `tapestry-egg verify FILE`.
"""

from __future__ import annotations

if __name__ != "tapestry_egg.rules":
    raise ImportError("rules/ is the package tapestry_egg.rules; import it by that name")

from tapestry_egg.rules.language.book import DEFAULT_BOOKS as DEFAULT_BOOKS
from tapestry_egg.rules.language.book import Rule as Rule
from tapestry_egg.rules.language.book import RuleBook as RuleBook
from tapestry_egg.rules.language.book import load_book as load_book
from tapestry_egg.rules.language.book import load_books as load_books
