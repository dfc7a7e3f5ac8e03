"""Pictures of the documentation: every one is made by the script, and shown somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
DRAWN_BY_HAND = {"architecture.svg"}


def test_every_picture_is_made_by_the_script_and_shown() -> None:
    script = (ROOT / "scripts" / "pictures.py").read_text(encoding="utf-8")
    terminals, pages = (
        script.partition(name)[2].partition("\n}")[0] for name in ("TERMINALS = {", "PAGES = {")
    )
    made = {f"{name}.svg" for name in re.findall(r'^    "([a-z-]+)"', terminals, re.MULTILINE)}
    made |= {f"{name}.png" for name in re.findall(r'^    "([a-z-]+)"', pages, re.MULTILINE)}
    assert made == {path.name for path in IMAGES.iterdir()} - DRAWN_BY_HAND
    shown = {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"images/([\w.-]+)", page.read_text())
    }
    assert made - shown == set()


def test_no_picture_fetches_anything() -> None:
    for path in IMAGES.glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:href|src)=\"http|url\(.?http|@import", text), path


def test_pages_of_views_have_a_picture() -> None:
    pages = [
        "index",
        "tutorials/first-report",
        "tutorials/three-questions",
        "tutorials/one-gpu",
        "tutorials/many-ranks",
        "tutorials/memory",
        "tutorials/ci",
        "how-to/report",
        "how-to/html-report",
        "how-to/compare",
        "how-to/gate",
        "how-to/what-if",
        "how-to/memory",
        "how-to/findings",
        "how-to/link",
        "how-to/workloads",
        "concepts/timeline",
        "symptoms/gpu-idle",
        "symptoms/nccl-slow",
        "symptoms/late-rank",
        "symptoms/out-of-memory",
        "symptoms/slower-since",
    ]
    assert [
        page
        for page in pages
        if "images/" not in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    ] == []
