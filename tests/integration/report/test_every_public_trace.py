"""`traceloom report` on every public trace: a report that holds its laws, or one clear sentence."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.public_traces import DATA
from traceloom.cli import main
from traceloom.report import ReportOptions
from traceloom.report.views.terminal import render as terminal

FOLDERS = ("kineto", "multirank", "diff", "critical_path", "damaged_metadata")
FILES = (
    sorted(p for folder in FOLDERS for p in (DATA / folder).glob("*.gz")) if DATA.is_dir() else []
)
TRACES = [path for path in FILES if ".host." not in path.name]
OTHERS = [path for path in FILES if ".host." in path.name]
Check = Callable[..., Any]

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not FILES, reason="the public traces (../shared/data) are not here"),
]


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name.removesuffix('.json.gz')}"


# One of each kind of device, format and program; the others are the like.
USUAL = re.compile(
    r"a100_cupti_counters|cpu_only_gloo_rank34|h100_bert_small|mi210_gpu_only|mi250_minitoy|mi300_sglang|mtia_inference"
    r"|triton_example|dlrm_rank0|event_sync_multi_stream|simple_add|legacy_categories|rank_non_gpu"
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "path",
    [
        path if USUAL.match(path.name) else pytest.param(path, marks=pytest.mark.thorough)
        for path in TRACES
    ],
    ids=_name,
)
def test_a_trace_gives_a_report_in_every_format(
    path: Path,
    tmp_path: Path,
    check_document: Check,
    check_perfetto: Check,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("report.json", "report.md", "report.perfetto.json.gz", "report.html")
    asked = [part for name in names for part in ("-o", str(tmp_path / name))]
    assert main(["report", str(path), "--no-cache", *asked]) == 0
    said = capsys.readouterr()
    assert [line.split()[1] for line in said.out.splitlines()] == [
        str(tmp_path / name) for name in names
    ]
    assert said.err == ""
    document = json.loads((tmp_path / "report.json").read_bytes())
    check_document(document)
    assert (tmp_path / "report.md").read_text(encoding="utf-8").count("\n") <= 60
    check_perfetto(gzip.decompress((tmp_path / "report.perfetto.json.gz").read_bytes()), document)
    assert [
        line.plain
        for line in terminal(document, ReportOptions(full=True), 80)
        if line.cell_len > 80
    ] == []
    brief = list(terminal(document, ReportOptions(), 80))
    assert len(brief) <= 28  # two more lines say what to do next
    assert all(line.cell_len <= 80 for line in brief)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "://" not in re.sub(r"http://www\.w3\.org/\S+", "", page.partition("<body")[0])


@pytest.mark.parametrize("path", [p for p in TRACES if p.stem.startswith("alexnet")], ids=_name)
def test_a_trace_is_shown_on_eighty_columns(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(path), "--no-cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[:-1] if len(line) > 80] == []
    assert lines[-1].startswith("Next: traceloom report ")
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("path", OTHERS, ids=_name)
def test_a_file_that_is_no_trace_is_refused_with_a_sentence(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(path), "--no-cache"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    first, *rest = said.err.splitlines()
    assert first.startswith("traceloom: ")
    assert rest[-1].startswith("see traceloom explain ")
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    "folder",
    [
        folder
        if folder in {"multirank", "critical_path"}
        else pytest.param(folder, marks=pytest.mark.thorough)
        for folder in FOLDERS
    ],
)
def test_a_folder_of_several_runs_is_summed_up(
    folder: str, check_document: Check, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["report", str(DATA / folder), "--no-cache", "--json", "--quiet"]) == 0
    document = json.loads(capsysbinary.readouterr().out)
    check_document(document)
    traces = [path for path in TRACES if path.parent.name == folder]
    assert sum(run["ranks"] for run in document["runs"]) == len(traces)
    assert all(run["command"].startswith("traceloom report ") for run in document["runs"])


def test_the_eight_ranks_of_one_run_are_one_report(
    check_document: Check, check_perfetto: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(path) for path in sorted((DATA / "multirank").glob("dlrm_rank*.kineto.json.gz"))]
    out, traced = tmp_path / "dlrm.json", tmp_path / "dlrm.perfetto.json"
    assert main(["report", *paths, "--no-cache", "-o", str(out), "-o", str(traced)]) == 0
    document = json.loads(out.read_bytes())
    check_document(document)
    assert [rank["rank"] for rank in document["ranks"]] == list(range(8))
    all_reduce = next(k for k in document["kernels"] if "AllReduce" in k["name"])
    assert (all_reduce["ranks"], all_reduce["count"], all_reduce["category"]) == (
        8,
        24,
        "communication",
    )
    assert (
        sum(k["total_ns"] for k in document["kernels"] if k["category"] == "communication")
        == 48_542_000
    )
    slices = check_perfetto(traced.read_bytes(), document)
    assert {row["pid"] for row in slices["steps"]} == set(range(1, 9))


@pytest.mark.parametrize(
    "name", ["a100_ddp_nccl", pytest.param("v100_ns_resolution", marks=pytest.mark.thorough)]
)
def test_steps_have_the_same_figures_alone_and_in_the_whole_report(
    name: str, check_document: Check, tmp_path: Path
) -> None:
    path = str(DATA / "kineto" / f"{name}.json.gz")
    assert main(["report", path, "--no-cache", "-o", str(tmp_path / "all.json")]) == 0
    whole = json.loads((tmp_path / "all.json").read_bytes())["ranks"][0]
    step = whole["steps"][1]["step"]
    assert (
        main(
            [
                "report",
                path,
                "--no-cache",
                "--steps",
                f"{step}..{step + 1}",
                "-o",
                str(tmp_path / "one.json"),
            ]
        )
        == 0
    )
    document = json.loads((tmp_path / "one.json").read_bytes())
    check_document(document)
    (step,) = document["ranks"][0]["steps"]
    # What ran on the device before the chosen step is not known of the part.
    unlike = {"start_ns": 0, "device_period_ns": None}
    assert step | unlike == whole["steps"][1] | unlike
    assert document["answer"]["whole_ns"] == whole["steps"][1]["duration_ns"]
