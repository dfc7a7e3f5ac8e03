"""No verb writes over anything that it reads, `--force` or not, named by the user or found beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from traceloom.cli import VERBS, build_parser, list_actions, main
from traceloom.testing import TraceBuilder

UNIX_NS = 1_700_000_000 * 10**9


def trace(rank: int) -> TraceBuilder:
    made = TraceBuilder(rank=rank, world_size=2, base_ns=UNIX_NS, process=10 + rank)
    for step in range(4):
        made.step(step, step * 100, 90).op("aten::mm", step * 100 + 10, 50)
        made.launch("cudaLaunchKernel", step * 100 + 20, 5, correlation=step + 1)
        made.kernel("gemm", step * 100 + 30, 40, correlation=step + 1)
    return made


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    for name in ("traces", "run"):
        (folder / name).mkdir()
    for rank in range(2):
        trace(rank).write(folder / "traces" / f"rank{rank}.json")
    trace(0).write(folder / "run" / "rank0.kineto.json")
    entry = {"rank": 0, "world_size": 1, "name": "rank0", "window": {"file": "rank0.kineto.json"}}
    document = {"format": "traceloom-capture", "version": 1, "ranks": [entry]}
    (folder / "run" / "capture.json").write_text(json.dumps(document))
    for name in ("rank0.capture.json", "rank0.host.json", "rank0.graph.kineto.json"):
        (folder / "run" / name).write_text("{}")
    trace(0).write(folder / "one.json")
    trace(0).write(folder / "other.json")
    (folder / "rules.json").write_text("[]")
    (folder / "policy.json").write_text("")
    assert (
        main(["generate", "pipeline", "--ranks", "2", "-o", str(folder / "workload"), "--quiet"])
        == 0
    )
    assert main(["convert", str(folder / "workload"), str(folder / "job.graph"), "--quiet"]) == 0
    store = str(folder / "baselines")
    assert (
        main(
            [
                "baseline",
                "save",
                "main",
                str(folder / "one.json"),
                "--store",
                store,
                "--no-cache",
                "--quiet",
            ]
        )
        == 0
    )
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


FASTER = ["--set", "kernels * 0.5"]
WRITES_OVER_ITS_INPUT = [
    ["report", "one.json", "-o", "one.json"],
    ["report", "one.json", "-o", "traces/../one.json"],
    ["report", "one.json", "-o", "new.html", "-o", "one.json"],
    ["report", "traces", "-o", "traces/rank1.json"],
    ["report", "traces", "--rank", "0", "-o", "traces/rank1.json"],
    ["report", "run", "-o", "run/capture.json"],
    ["report", "run", "-o", "run/rank0.capture.json"],
    ["report", "run", "-o", "run/rank0.host.json"],
    ["report", "run/capture.json", "-o", "run/rank0.kineto.json"],
    ["report", "one.json", "--graph-capture", "other.json", "-o", "other.json"],
    ["report", "one.json", "--graph-capture", "run", "-o", "run/rank0.graph.kineto.json"],
    ["report", "one.json", "--rules", "rules.json", "-o", "rules.json"],
    ["memory", "one.json", "-o", "one.json"],
    ["memory", "run", "-o", "run/capture.json"],
    ["memory", "traces", "-o", "traces/rank0.json"],
    ["diff", "one.json", "other.json", "-o", "other.json"],
    ["diff", "one.json", "other.json", "-o", "one.json"],
    ["diff", "run", "one.json", "-o", "run/capture.json"],
    [
        "diff",
        "one.json",
        "one.json",
        "--new",
        "other.json",
        "--fail-if",
        "step_time > 3%",
        "-o",
        "other.json",
    ],
    ["whatif", "one.json", *FASTER, "-o", "one.json"],
    ["whatif", "run", *FASTER, "-o", "run/capture.json"],
    ["whatif", "traces", *FASTER, "-o", "traces/rank1.json"],
    ["simulate", "one.json", "-o", "one.json"],
    ["calibrate", "one.json", "-o", "one.json"],
    ["baseline", "compare", "main", "one.json", "--store", "baselines", "-o", "one.json"],
    ["baseline", "compare", "main", "run", "--store", "baselines", "-o", "run/capture.json"],
    ["link", "traces", "-o", "traces"],
    ["link", "traces/rank0.json", "traces/rank1.json", "-o", "traces"],
    ["link", "run", "-o", "run"],
    ["convert", "job.graph", "job.graph"],
    ["convert", "workload", "workload"],
    ["convert", "workload/workload.0.et", "workload"],
    ["convert", "workload/workload.0.et", "workload/workload.0.et"],
    ["anonymize", "traces", "-o", "traces"],
    ["anonymize", "traces", "-o", "new", "--map", "traces/rank1.json"],
    ["anonymize", "run", "-o", "new", "--map", "run/capture.json"],
    ["anonymize", "one.json", "-o", "new", "--policy", "policy.json", "--map", "policy.json"],
    ["anonymize", "one.json", "-o", "new.json", "--key", "key.json", "--map", "key.json"],
    ["anonymize", "one.json", "-o", "one.json"],
    ["show", "job.graph", "-o", "linked.html"],
    ["replay", "job.graph", "-o", "job.graph"],
]


@pytest.mark.sampled(29)
@pytest.mark.parametrize("force", [["--force"], []], ids=["by force", "unasked"])
@pytest.mark.parametrize("arguments", WRITES_OVER_ITS_INPUT, ids=" ".join)
def test_no_verb_writes_over_what_it_reads(
    arguments: list[str],
    force: list[str],
    originals: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(originals, folder)
    (folder / "linked.html").hardlink_to(folder / "job.graph")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    code = main([*arguments, *force])
    said = capsys.readouterr().err
    # Unasked, what lies there already is reason enough.
    assert code in ((2,) if force else (2, 3)), said
    assert ("is an input too" in said or "where the inputs are" in said) or (
        not force and "file-exists" in said
    ), said
    left = content(folder)
    left.pop("key.json", None)  # made before
    left.pop("new.html", None)
    left.pop("linked.html")
    assert left == content(originals)


def test_every_verb_with_an_output_and_an_input_is_among_them() -> None:
    writing = set()
    for verb in VERBS:
        destinations = {action.dest for action in list_actions(build_parser([verb]))}
        if "output" in destinations and destinations & {"input", "inputs", "runs", "base"}:
            writing.add(verb)
    assert writing == {arguments[0] for arguments in WRITES_OVER_ITS_INPUT}


def test_what_was_written_beside_the_inputs_is_written_again_by_force(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(originals, folder)
    monkeypatch.chdir(folder)
    for arguments in (
        ["report", ".", "-o", "report.json", "-o", "traces/all.json", "--no-cache"],
        ["report", "traces", "-o", "traces/report.json", "--no-cache"],
        ["memory", "run", "-o", "run/memory.json", "--no-cache"],
        ["link", "traces", "-o", "traces/job.graph", "--no-cache"],
        ["link", "run", "-o", "run/workload", "--no-cache"],
        ["convert", "workload", "workload/job.graph"],
    ):
        assert main([*arguments, "--quiet"]) == 0
        assert main([*arguments, "--quiet", "--force"]) == 0, arguments


def test_a_file_is_written_once(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, out = str(originals / "one.json"), str(tmp_path / "out.json")
    for verb in (["memory", one], ["whatif", one, *FASTER], ["diff", one, one], ["report", one]):
        assert main([*verb, "-o", out, "-o", f"{tmp_path}/./out.json"]) == 2
        assert "named twice" in capsys.readouterr().err
    assert main(["anonymize", one, "-o", out, "--map", out]) == 2
    assert not any(tmp_path.iterdir())
