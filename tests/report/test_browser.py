"""The report's page in a real browser: a Chromium of the distribution, where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import tapestry_egg as te
from models import mlp

BROWSER = next((p for n in ("chromium", "google-chrome") if (p := shutil.which(n))), None)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium (on Debian: apt install chromium)"),
]

#: What a user does, and what is then there; run once the page is ready.
PROBE = """
<script>
  const found = { errors: window.failed, ready: document.body.classList.contains("ready") };
  const dots = [...document.querySelectorAll("circle.dot")];
  found.dots = dots.length;
  found.scrolls = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  found.background = getComputedStyle(document.body).backgroundColor;
  found.ink = getComputedStyle(document.body).color;
  found.walked = [];
  let at = document.querySelector('[data-plan="0"]');
  at.focus();
  for (let k = 0; k < dots.length; k++) {
    at.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
    at = document.activeElement;
    found.walked.push(at.getAttribute("data-plan"));
    found.said = document.getElementById("said").textContent;
  }
  at.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  const press = (key) => {
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  };
  const open = () => [...document.querySelectorAll("svg.zoom [data-page]")]
    .filter((p) => p.getBoundingClientRect().width > 0).map((p) => p.dataset.page);
  setTimeout(() => {
    const doors = document.querySelectorAll("svg.zoom [data-page='page-1'] [data-opens]");
    found.opened = [open()];
    doors[0].dispatchEvent(new MouseEvent("click", { bubbles: true }));
    found.opened.push(open());
    press("Escape");
    found.opened.push(open());
    found.back = document.activeElement === doors[0];
    press("ArrowDown");
    found.next = document.activeElement === doors[1];
    press("Enter");
    found.opened.push(open());
    window.dispatchEvent(new Event("resize"));
    found.opened.push(open());
    found.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
    found.shown = document.getElementById("shown").textContent;
    found.drawn = document.querySelectorAll("#plan svg rect").length;
    found.difference = document.getElementById("difference").textContent;
    const probe = document.createElement("pre");
    probe.id = "probe";
    probe.textContent = JSON.stringify(found);
    document.body.append(probe);
  }, 1000);
</script>
"""


@pytest.fixture(scope="module")
def front() -> te.Front:
    step, args = mlp.example()
    return te.optimize(te.trace(step, *args), "h100:8", settings=te.Settings(work=1, workers=1))


def seen(front: te.Front, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """What the page has become after a user's walk, in a window so wide."""
    assert BROWSER is not None
    text = front.report(folder / "page.html").read_text("utf-8")
    watch = "<script>window.failed = []; onerror = (m) => { window.failed.push(m); };</script>"
    text = text.replace("<head>", f"<head>{watch}").replace("</body>", f"{PROBE}</body>")
    (folder / "page.html").write_text(text, "utf-8")
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},1200",
            *("--virtual-time-budget=5000", "--dump-dom", (folder / "page.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    (found,) = re.findall(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    told: dict[str, Any] = json.loads(unescape(found))
    return told


def light(colour: str) -> float:
    """How light a colour `rgb(r, g, b)` is, 0 to 255."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (500, False)])
def test_the_page_works_in_a_browser(
    front: te.Front, tmp_path: Path, width: int, dark: bool
) -> None:
    found = seen(front, tmp_path, width, dark)
    assert found["errors"] == [] and found["ready"] and found["dots"] == len(front)
    assert sorted(map(int, found["walked"])) == list(range(len(front)))
    assert not found["scrolls"], "only tables scroll sideways"
    assert (light(found["background"]) < 80 < 160 < light(found["ink"])) == dark
    assert found["shown"].startswith("p0 on "), "Enter chooses where the walk ended"
    first, inner, again, other, resized = found["opened"]
    assert resized == other, "a window of another size closes nothing"
    assert first == again == ["page-1"] and len(inner) == len(other) == 1, "one picture at a time"
    assert len({*first, *inner, *other}) == 3, "boxes open, by mouse and keyboard"
    assert found["back"] and found["next"] and not found["wide"]
    assert found["drawn"] > 0 and "time per step" in found["difference"]
