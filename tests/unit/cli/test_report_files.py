"""All files of a report at once, for every choice of ranks, steps and sections: each holds its laws, all say the same."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.fuzzing.trying import captured
from support.pages import Elements, of_markdown, tables
from support.reports import check_perfetto, check_report
from support.sessions import busy_step
from traceloom.cli import main
from traceloom.report.sections import EXTRA_KEYS
from traceloom.testing import TraceBuilder

CHOICES = {
    "all": [],
    "one rank": ["--rank", "1"],
    "one step": ["--steps", "1"],
    "some steps of a rank": ["--steps", "1..3", "--rank", "0"],
    "by shape": ["--by-shape"],
    "some sections": ["--only", "copies,per_step"],
    "the core": ["--only", "core"],
}
NAMES = (
    "r.json",
    "r.md",
    "r.html",
    "r.perfetto.json",
    "r.perfetto.json.gz",
    "r.speedscope.json",
    "kernels.csv",
    "operators.parquet",
    "tables/",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the traces of two ranks of three steps."""
    home = tmp_path_factory.mktemp("run")
    for rank in (0, 1):
        made = TraceBuilder(rank=rank, world_size=2)
        for step in range(3):
            busy_step(made, step, 1000 * step, name=f"r{rank}.").allocation(
                1000 * step + 20, 4096, address=step + 1
            )
        made.write(home / f"rank{rank}.json.gz")
    return home


def written(source: Path, home: Path, *choices: str) -> Path:
    asked = [word for name in NAMES for word in ("-o", f"{home}/{name}")]
    with captured() as (out, err):
        assert main(["report", str(source), *choices, *asked, "-q"]) == 0, err.getvalue()
    assert (out.getvalue(), err.getvalue()) == (b"", b"")
    return home


@pytest.fixture(scope="module", params=CHOICES)
def files(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any]]:
    home = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRACELOOM_CACHE_DIR", str(home / "cache"))
        written(source, home, *CHOICES[request.param])
    return request.param, home, json.loads((home / "r.json").read_bytes())


Files = tuple[str, Path, dict[str, Any]]


@pytest.mark.sampled(2)
def test_the_document_holds_its_laws_and_is_about_what_was_chosen(files: Files) -> None:
    choice, _, document = files
    check_report(document)
    ranks = {"one rank": [1], "some steps of a rank": [0]}.get(choice, [0, 1])
    steps = {"one step": [1], "some steps of a rank": [1, 2]}.get(choice, [0, 1, 2])
    assert [rank["rank"] for rank in document["ranks"]] == ranks
    assert all([step["step"] for step in rank["steps"]] == steps for rank in document["ranks"])
    omitted = {
        entry["path"] for entry in document["absent"] if entry["reason"].startswith("not asked for")
    }
    assert omitted & set(EXTRA_KEYS) == {
        "some sections": set(EXTRA_KEYS) - {"copies", "per_step"},
        "the core": set(EXTRA_KEYS),
    }.get(choice, set())
    gemm = [row for row in document["kernels"] if row["name"].endswith("gemm")]
    assert [row["name"] for row in sorted(gemm, key=lambda row: str(row["name"]))] == [
        f"r{rank}.gemm" for rank in ranks
    ]
    assert all(row["total_ns"] == sum(200_000 + 1000 * step for step in steps) for row in gemm)


@pytest.mark.sampled(1)
def test_the_trace_for_perfetto_is_of_the_same_events(files: Files) -> None:
    _, home, document = files
    raw = (home / "r.perfetto.json").read_bytes()
    slices = check_perfetto(raw, document)
    assert gzip.decompress((home / "r.perfetto.json.gz").read_bytes()) == raw
    kernels = [row for rows in slices.values() for row in rows if row["cat"] == "kernel"]
    assert len(kernels) == sum(
        row["count"] for row in document["kernels"] if row["category"] != "memory"
    )


def test_tables_are_those_of_the_document(files: Files) -> None:
    _, home, document = files
    assert pl.read_csv(home / "kernels.csv").to_dicts() == document["kernels"]
    operators = pl.read_parquet(home / "operators.parquet")
    for name in operators.columns:
        assert operators[name].to_list() == [row[name] for row in document["operators"]], name
    inside = {path.stem: path for path in (home / "tables").iterdir()}
    assert {path.suffix for path in inside.values()} == {".csv"}
    assert inside["kernels"].read_bytes() == (home / "kernels.csv").read_bytes()
    assert ("copies-kinds" in inside) == bool(document["copies"])
    assert ("kinds-kinds" in inside) == bool(document["kinds"])


def test_the_page_shows_the_sections_that_were_made(files: Files) -> None:
    _, home, document = files
    page = (home / "r.html").read_text(encoding="utf-8")
    assert document["answer"]["sentence"] in Elements(page).shown.replace("\u202f%", " %")
    shown = tables(page, by="key")
    assert [row["total_ns"] for row in kernels_of(shown)] == [
        row["total_ns"] for row in document["kernels"]
    ]
    for key in EXTRA_KEYS:
        anchor = f'id="{key.replace("_", "-")}"'
        asked_for = not any(
            e["path"] == key and e["reason"].startswith("not asked") for e in document["absent"]
        )
        assert (anchor in page) == asked_for, key


def kernels_of(shown: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table of all GPU work."""
    return next(
        rows for rows in shown.values() if rows and {"total_ns", "category"} <= set(rows[0])
    )


def test_markdown_and_profiles_are_of_the_same_run(files: Files) -> None:
    _, home, document = files
    text = (home / "r.md").read_text(encoding="utf-8")
    assert document["answer"]["sentence"] in of_markdown(text).shown
    profile = json.loads((home / "r.speedscope.json").read_bytes())
    gpu = sum(one["endValue"] for one in profile["profiles"] if one["type"] == "sampled")
    assert gpu == sum(row["total_ns"] for row in document["kernels"])


def without_what_is_of_the_moment(path: Path) -> bytes:
    """A file without the time that the page says it took."""
    raw = path.read_bytes()
    if path.suffix == ".html":
        head, mark, tail = raw.partition(b"page made in ")
        return head + mark + tail.partition(b" s")[2]
    return raw


@pytest.mark.thorough
def test_files_that_come_from_the_kept_document_are_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time, nothing is read or worked out that the first time kept."""
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    homes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        homes.append(written(source, tmp_path / name))
    for path in sorted(homes[0].rglob("*")):
        if path.is_file():
            other = homes[1] / path.relative_to(homes[0])
            assert without_what_is_of_the_moment(path) == without_what_is_of_the_moment(other), (
                path.name
            )
