"""Tables as files, frames of all ranks, and what a session shows in a notebook."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl
import pytest

import traceloom
from support.jobs import Recipe, training_job
from traceloom import analyze
from traceloom.cli import main
from traceloom.report import build
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session


def run(directory: Path) -> list[str]:
    """Two ranks, written as files."""
    paths = []
    for rank in (0, 1):
        made = TraceBuilder(rank=rank, world_size=2)
        for step in range(3):
            start = 1000 * step
            made.mark(step, start).op("aten::mm", start, 500).launch(
                "cudaLaunchKernel", start + 10, 5, correlation=step
            )
            made.kernel("gemm", start + 100, 400 + rank, correlation=step)
        paths.append(str(made.write(directory / f"rank{rank}.json")))
    return paths


def test_a_table_is_written_as_the_document_has_it(tmp_path: Path) -> None:
    paths = run(tmp_path)
    csv, parquet = tmp_path / "kernels.csv", tmp_path / "operators.parquet"
    assert main(["report", *paths, "--no-cache", "-q", "-o", str(csv), "-o", str(parquet)]) == 0
    document = build(traceloom.load(*paths, cache=False))
    assert pl.read_csv(csv).to_dicts() == document["kernels"]
    assert pl.read_parquet(parquet)["self_ns"].to_list() == [
        row["self_ns"] for row in document["operators"]
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_directory_holds_all_tables(ending: str, tmp_path: Path) -> None:
    out = tmp_path / "tables"
    arguments = ["report", *run(tmp_path), "--no-cache", "-q", "-o", f"{out}/", "--format", ending]
    assert main(arguments) == 0
    names = {path.name for path in out.iterdir()}
    assert {f"kernels.{ending}", f"operators.{ending}", f"launches-totals.{ending}"} <= names
    assert main(arguments) == 3  # it is there
    assert main([*arguments, "--force"]) == 0
    (out / "mine.txt").write_text("kept")
    assert main([*arguments, "--force"]) == 3  # it holds other things
    assert (out / "mine.txt").read_text() == "kept"


def test_a_table_that_is_not_there_is_an_error_that_names_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *run(tmp_path), "--no-cache", "-o", str(tmp_path / "kernel.csv")]) == 2
    error = capsys.readouterr().err
    assert "the report has no table `kernel`" in error
    assert "did you mean `kernels`?" in error
    assert not (tmp_path / "kernel.csv").exists()


def test_frames_of_a_session_are_those_of_its_ranks(tmp_path: Path) -> None:
    session = traceloom.load(*run(tmp_path), cache=False)
    kernels = session.kernels
    assert kernels.columns[0] == "rank"
    assert kernels.select("rank", "total_ns").rows() == [(0, 1_200_000), (1, 1_203_000)]
    for rank, trace in enumerate(session.traces):
        of_rank = pl.col("rank") == rank
        assert (
            session.operators.filter(of_rank)
            .drop("rank")
            .equals(analyze.operators(trace).operators)
        )
        assert session.steps.filter(of_rank).height == 2
    assert session.collectives.height == 0
    with pytest.raises(AttributeError, match=r"session.traces\[0\].events"):
        _ = session.events


def test_what_if_takes_a_session_and_words() -> None:
    job = training_job(Recipe(ranks=1, steps=3, seed=1)).run()
    session = Session(tuple(made.build() for made in job.traces()), "job")
    answer = traceloom.whatif(session, "kernels * 0.5")
    assert answer.saved_ns > 0
    assert json.loads(json.dumps(answer.to_dict())) == answer.to_dict()
    assert answer.to_dict() == traceloom.whatif(session, ["kernels * 0.5"]).to_dict()


def test_a_real_notebook_shows_one_page_and_a_short_text(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        f"import traceloom\nsession = traceloom.load(*{run(tmp_path)!r}, cache=False)\nsession",
        "traceloom.show(session)",
        "from traceloom import analyze\nanalyze.kernels(session.traces[0])",
        "session.kernels",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=120)
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable
    client.execute()
    for cell in notebook.cells:
        (output,) = cell.outputs
        assert {"text/plain", "text/html"} <= set(output["data"]), cell.source
    session, report, kernels, _ = (cell.outputs[0]["data"] for cell in notebook.cells)
    assert "<Session" in session["text/plain"]
    assert "rank1.json" in session["text/html"]
    assert len(report["text/plain"].splitlines()) <= 30
    assert "What to fix first" in report["text/plain"]
    assert "GPU 0 is" in report["text/html"] or "GPUs are" in report["text/html"]
    assert "<table" in kernels["text/html"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "begins"), [("kernels.PARQUET", b"PAR1"), ("kernels.Csv", b"name,")]
)
def test_an_ending_in_capitals_is_the_same_format(name: str, begins: bytes, tmp_path: Path) -> None:
    assert main(["report", *run(tmp_path), "--no-cache", "-q", "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(begins)
