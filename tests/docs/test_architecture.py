"""The architecture page names all rooms, and its walks are those that scripts/walk.py takes: short, or with reasons."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "concepts" / "architecture.md"
NEEDS = {"column": (), "request": ("uvicorn", "psutil"), "question": ("deltalake", "htpy")}
LIMITS = {"column": 15, "request": 15, "question": 12}


def modules(text: str) -> list[str]:
    return re.findall(r"^ +\d+ ([a-z_.]+)", text, re.MULTILINE)


def test_the_page_has_a_row_for_each_room() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    rooms = {path.parent.name for path in (ROOT / "src" / "traceloom").glob("*/__init__.py")}
    assert (len(rows), set(rows)) == (len(rooms), rooms)


def test_the_glossary_stays_short() -> None:
    terms = re.findall(
        r"^\| \*\*(.+?)\*\*",
        PAGE.with_name("glossary.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert 30 <= len(terms) == len(set(terms)) <= 60


@pytest.mark.parametrize(
    "name",
    [
        name if name == "request" else pytest.param(name, marks=pytest.mark.thorough)
        for name in NEEDS
    ],
)
def test_a_walk_is_the_one_in_the_page(name: str) -> None:
    if name != "column" and sys.platform != "linux":
        pytest.skip("the agent and the service are Linux's")
    if missing := [module for module in NEEDS[name] if find_spec(module) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "walk.py", name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    title, found = done.stdout.splitlines()[0], modules(done.stdout)
    assert title.endswith(f": {len(found)} modules")
    assert len(found) <= LIMITS[name] or f"More than {LIMITS[name]}: " in done.stdout
    page = PAGE.read_text(encoding="utf-8")
    [written] = [
        block
        for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL)
        if block.startswith(title)
    ]
    assert modules(written) == found


def test_a_station_that_does_not_exist_is_an_error() -> None:
    code = "import walk; walk.find_code('analyze.kernels:no_such_function')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT / "scripts",
    )
    assert done.returncode == 1
    assert "no_such_function" in done.stderr
