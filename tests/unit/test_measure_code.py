"""The gauge of the code (scripts/measure_code.py) counts what no layout changes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_code.py"


@pytest.fixture(scope="module")
def gauge() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_code", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def counts_of(gauge: ModuleType, sources: dict[str, str]) -> dict[str, int]:
    """Count the room `room` of a package whose modules have these sources."""
    files = {
        "traceloom/__init__.py": "",
        **{f"traceloom/{name}.py": text for name, text in sources.items()},
    }
    return gauge.Tree([gauge.read_module(*item) for item in files.items()]).count()["room"]


DENSE = '''"""About."""
from a import b, c
def keep(x): return [y for y in x if y] if x else b(c) or f"{x!r} and {len(x)}"  # fmt: skip
'''
WIDE = '''"""About."""

from a import (
    b,
    c,
)


# What it does.
def keep(x):
    return [y for y in x if y] if x else b(c) or f"{x!r} and {len(x)}"
'''


def test_statements_do_not_depend_on_layout(gauge: ModuleType) -> None:
    dense, wide = (counts_of(gauge, {"room/one": source}) for source in (DENSE, WIDE))
    assert dense["statements"] == wide["statements"] == 4
    assert (dense["docstrings"], dense["imports"], dense["functions"], dense["modules"]) == (
        1,
        1,
        1,
        1,
    )
    assert (dense["fmt: skip"], wide["fmt: skip"]) == (1, 0)


def test_tokens_are_names_operators_and_numbers(gauge: ModuleType) -> None:
    assert counts_of(gauge, {"room/one": "x = 1  # nothing else\n"})["tokens"] == 3
    assert counts_of(gauge, {"room/one": "x = f'{y} and {z + 1}'\n"})["tokens"] == 2
    assert counts_of(gauge, {"room/one": "if x:\n    y(\n        1\n    )\n"})["tokens"] == 3 + 4


def test_long_lines_are_counted_beside(gauge: ModuleType) -> None:
    counts = counts_of(gauge, {"room/one": f"x = 1\n{'y' * 97} = 1\n{'y' * 96} = 1\n"})
    assert (counts["long lines"], counts["lines"]) == (1, 3)


def test_a_generated_module_counts_as_a_module_alone(gauge: ModuleType) -> None:
    assert counts_of(gauge, {"room/one_pb2": "x = 1\nclass Y: pass\n"})["modules"] == 1
    assert counts_of(gauge, {"room/one_pb2": "x = 1\nclass Y: pass\n"})["statements"] == 0


def test_value_types_are_known_through_the_bases_of_the_project(gauge: ModuleType) -> None:
    counts = counts_of(
        gauge,
        {
            "room/__init__": "from traceloom.base.heads import Head\n",
            "room/one": (
                "import enum\nfrom dataclasses import dataclass as value\nfrom typing import Generic, NamedTuple, TypedDict\n"
                "from traceloom import room\nfrom traceloom.room import Head\nfrom ..base import heads as h\n"
                "class A(Head): pass\nclass B(h.Head, frozen=True): pass\nclass C(room.Head): pass\n"
                "@value(frozen=True)\nclass D: pass\nclass E(D): pass\n"
                "class F(NamedTuple):\n    class Inner(TypedDict): pass\n"
                "G = TypedDict('G', {'from': int})\n"
                "class H(enum.IntEnum): pass\nclass I(Generic[int]): pass\nclass Exists(Exception): pass\n"
            ),
            "base/heads": "import msgspec\nclass Head(msgspec.Struct, frozen=True): pass\n",
        },
    )
    kinds = {
        name: counts[name]
        for name in ("Struct", "dataclass", "NamedTuple", "TypedDict", "Enum", "classes")
    }
    assert kinds == {
        "Struct": 3,
        "dataclass": 2,
        "NamedTuple": 1,
        "TypedDict": 2,
        "Enum": 1,
        "classes": 11,
    }


def test_an_importer_is_who_uses_a_module_and_not_the_package_that_exports_it(
    gauge: ModuleType,
) -> None:
    sources = {
        "room/__init__": "from traceloom.room.one import work as work\n",
        "room/one": "def work(): pass\n",
        "room/two": "def draw():\n    from traceloom.room import work\n",
    }
    assert counts_of(gauge, sources)["1 importer"] == 1
    assert (
        counts_of(gauge, {**sources, "other/three": "from ..room.one import work\n"})["1 importer"]
        == 0
    )
    assert (
        counts_of(gauge, {**sources, "room/three": "import traceloom.room.two\n"})["1 importer"]
        == 2
    )


def test_functions_begin_with_verbs_where_their_names_are_free(gauge: ModuleType) -> None:
    counts = counts_of(
        gauge,
        {
            "room/__init__": "from traceloom.system.lazy_import import lazy\nlazy(__name__, {'gpu_time': '.one'})\n",
            "room/one": (
                "import logging\nfrom functools import cached_property\nfrom typing import Protocol, override\n"
                "from traceloom.room.two import Base\n"
                "def gpu_time(): pass\n"  # exported
                "def _read_it():\n    def row(): pass\n"  # a verb; none
                "def count_of(): pass\n"  # a noun
                "async def spread(): pass\n"  # a noun as well
                "class A(Base[int], logging.Handler):\n"
                "    def __init__(self): pass\n"
                "    def rows(self): pass\n"  # of the base
                "    def emit(self, record): pass\n"  # of the standard library
                "    @property\n    def size(self): pass\n"
                "    @cached_property\n    def length(self): pass\n"
                "    @override\n    def width(self): pass\n"
                "    def write(self): pass\n"  # a verb
                "    def text(self): pass\n"  # none
            ),
            "room/two": "class Root:\n    def rows(self): pass\nclass Base(Root): pass\n",  # the first to call it so
        },
    )
    assert (counts["functions"], counts["free names"], counts["verbs"]) == (14, 7, 2)


def test_a_revision_is_read_without_a_checkout(gauge: ModuleType, tmp_path: Path) -> None:
    module = tmp_path / "src" / "traceloom" / "room" / "one.py"
    module.parent.mkdir(parents=True)

    def git(*arguments: str) -> None:
        identity = [
            "-c",
            "user.name=n",
            "-c",
            "user.email=n@example.org",
            "-c",
            "commit.gpgsign=false",
        ]
        subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True
        )

    git("init")
    module.write_text("x = 1\ny = 2\n", encoding="utf-8")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "before")
    module.write_text("x = 1\n", encoding="utf-8")
    now, before = gauge.measure(gauge.read_files(tmp_path), gauge.read_revision(tmp_path, "before"))
    assert (now["room"]["statements"], before["room"]["statements"]) == (1, 2)
    table = gauge.write_table(now, before, "before").splitlines()
    assert table[1].split()[:4] == ["room", "1", "0", "1"]
    assert table[2].split()[0] == "-1"
    assert table[5].split()[:2] == ["difference", "-1"]
    with pytest.raises(SystemExit, match="git cannot read nowhere"):
        gauge.read_revision(tmp_path, "nowhere")
