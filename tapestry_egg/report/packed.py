"""Pictures of plans, packed for a page: as many of what boxes open as there is room for."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Sequence

from tapestry_egg.plans.plan import Plan
from tapestry_egg.show.pages import plan_pages
from tapestry_egg.show.picture import Page
from tapestry_egg.show.picture_svg import DrawnPage, drawn_page, pages_svg

#: Characters that the pictures of all plans of a page may take, packed.
ROOM = 600_000


def packed(plans: Sequence[Plan]) -> list[tuple[str, int]]:
    """Per plan its pictures, an SVG deflated and in base64, and how many were left out.

    The picture of the whole program is always there, and then what its boxes open, and so on, while
    the plan's share of `ROOM` lasts.
    """
    return [_packed(plan, ROOM // max(1, len(plans))) for plan in plans]


def _packed(plan: Plan, room: int) -> tuple[str, int]:
    pages = _by_depth(plan_pages(plan))
    by = {page.id: page for page in pages}
    kept: dict[str, DrawnPage] = {}
    size = 0
    for page in pages:
        if page.parent and page.parent not in kept:
            continue
        one = drawn_page(page, by)
        more = len(zlib.compress(one.text.encode(), 9)) * 4 // 3
        if not kept or size + more <= room:
            kept[page.id] = one
            size += more
        if size > 0.9 * room:
            break
    text = b64encode(zlib.compress(pages_svg([*kept.values()]).encode(), 9)).decode()
    return text, len(pages) - len(kept)


def _by_depth(pages: Sequence[Page]) -> list[Page]:
    """The pages such that each comes after the one that opens it, and shallow ones come first."""
    depth: dict[str, int] = {"": -1}
    parents = {page.id: page.parent for page in pages}

    def of(id: str) -> int:
        if id not in depth:
            depth[id] = of(parents[id]) + 1
        return depth[id]

    return sorted(pages, key=lambda page: of(page.id))
