"""The documentation keeps its promises: links lead somewhere, commands exist, versions agree."""

from __future__ import annotations

import re
from pathlib import Path

import traceloom

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_links_to_files_lead_to_files() -> None:
    broken = [
        (str(page.relative_to(ROOT)), target)
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target
        and not target.startswith("mailto:")
        and not (page.parent / target).exists()
    ]
    assert broken == []


def test_commands_named_in_the_docs_exist() -> None:
    from traceloom.cli import VERBS

    command = re.compile(r"^\s*(?:\$ )?traceloom ([a-z]+)\b", re.MULTILINE)
    unknown = [
        (str(page.relative_to(ROOT)), verb)
        for page in PAGES
        for verb in command.findall(page.read_text(encoding="utf-8"))
        if verb not in VERBS
    ]
    assert unknown == []


def test_make_targets_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(
        re.findall(
            r"(?:^|`)make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    ):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_changelog_begins_with_the_version_of_the_package_or_the_next_one() -> None:
    assert f'version = "{traceloom.__version__}"' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+(?:\.\d+)+)( \(unreleased\))?$", text, re.MULTILINE)
    assert newest is not None
    described, installed = (
        tuple(map(int, version.split("."))) for version in (newest[1], traceloom.__version__)
    )
    assert described > installed if newest[2] else described == installed
