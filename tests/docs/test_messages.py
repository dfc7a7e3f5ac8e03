"""Every slug in the code has its entry in docs/reference/messages.md, and no entry is stale."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import traceloom

SOURCE = Path(traceloom.__file__).parent
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "messages.md"
SPEAKERS = {"Notice", "print_once", "_DamageKind"}  # their first argument is the slug
_SPEAKS = re.compile("slug|" + "|".join(SPEAKERS))
_SPOKEN = re.compile(r"\[([a-z]+(?:-[a-z]+)+)\]")  # a line of the start-up hook ends with it
SLUG = re.compile(r"^[a-z][a-z0-9]*(-[a-z0-9]+)+$|^[a-z]+$")


def _text(node: ast.expr | None) -> list[str]:
    """Slugs in an expression: a text, or the branches of a choice; an f-string stands for a family `broken-*`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return _text(node.body) + _text(node.orelse)
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        return [f"{node.values[0].value}*"]
    return []


@cache
def slugs_in_code() -> dict[str, str]:
    """Slug -> where it is used."""
    found: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        text, in_process = path.read_text(encoding="utf-8"), path.parent.name in ("capture", "hook")
        if not in_process and not _SPEAKS.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if in_process and isinstance(node, ast.Constant):
                found.update(
                    {
                        s: f"{path.relative_to(SOURCE)}:{node.lineno}"
                        for s in _SPOKEN.findall(str(node.value))
                    }
                )
            if isinstance(node, ast.Dict):
                values = [
                    v for k, v in zip(node.keys, node.values, strict=True) if _text(k) == ["slug"]
                ]
                found.update(
                    {
                        s: f"{path.relative_to(SOURCE)}:{node.lineno}"
                        for v in values
                        for s in _text(v)
                    }
                )
            if isinstance(node, ast.FunctionDef) and node.name == "_why_nothing":
                pairs = [n for n in ast.walk(node) if isinstance(n, ast.Tuple) and len(n.elts) == 2]
                found.update(
                    {
                        s: f"{path.relative_to(SOURCE)}:{n.lineno}"
                        for n in pairs
                        for s in _text(n.elts[0])
                    }
                )
            if isinstance(node, ast.Assign) and isinstance(
                node.targets[0], ast.Tuple
            ):  # what a request waits for
                names = [getattr(target, "id", "") for target in node.targets[0].elts]
                if names == ["reason", "detail"] and isinstance(node.value, ast.Tuple):
                    found.update(
                        {
                            s: f"{path.relative_to(SOURCE)}:{node.lineno}"
                            for s in _text(node.value.elts[0])
                        }
                    )
            if not isinstance(node, ast.Call):
                continue
            name = (
                node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            )
            slugs = [
                s for k in node.keywords if (k.arg or "").endswith("slug") for s in _text(k.value)
            ]
            if node.args and (name in SPEAKERS or (in_process and name == "note")):
                slugs += _text(node.args[0])
            if name in {"report", "tell"} and len(node.args) > 1:  # a state, then why
                slugs += _text(node.args[1])
            for slug in slugs:
                found[slug] = f"{path.relative_to(SOURCE)}:{node.lineno}"
    return found


def slugs_in_page() -> set[str]:
    return {
        line[4:].strip().strip("`")
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("### ")
    }


def test_every_slug_is_documented() -> None:
    page = slugs_in_page()
    missing = {slug: place for slug, place in slugs_in_code().items() if slug not in page}
    assert not missing


def test_no_documented_slug_is_stale() -> None:
    assert slugs_in_page() <= set(slugs_in_code())


def test_slugs_are_kebab_case() -> None:
    assert [
        slug for slug in slugs_in_code() if not SLUG.match(slug.removesuffix("*").rstrip("-"))
    ] == []
