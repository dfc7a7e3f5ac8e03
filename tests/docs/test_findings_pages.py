"""Every rule of the findings has a page with its four parts, and every page a rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceloom.findings import RULES

PAGES = Path(__file__).resolve().parents[2] / "docs" / "findings"
PARTS = ("What it means", "Evidence", "How to fix it", "When it is wrong")
SLUGS = sorted(rule.slug for rule in RULES)


@pytest.mark.parametrize("slug", SLUGS)
def test_each_rule_has_a_page_with_its_four_parts_and_a_snippet(slug: str) -> None:
    text = (PAGES / f"{slug}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {slug}: ")
    assert [part for part in PARTS if f"\n## {part}\n" not in text] == []
    parts = text.split("\n## ")[1:]
    assert all(len(part.split("\n", 1)[1].split()) >= 5 for part in parts), (
        "a part says next to nothing"
    )
    assert "```" in parts[PARTS.index("How to fix it")]
    assert "Evaluated change: " in text


def test_there_are_no_pages_without_a_rule_and_all_are_listed() -> None:
    assert (
        sorted(page.stem for page in PAGES.glob("*.md") if page.stem not in ("index", "truth"))
        == SLUGS
    )
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    assert [slug for slug in SLUGS if f"]({slug}.md)" not in index] == []


def test_slugs_are_unique() -> None:
    assert len(set(SLUGS)) == len(SLUGS)
