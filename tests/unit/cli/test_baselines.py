"""Baselines: kept whole, read back, refused where they are not one; and the verbs that use them."""

from __future__ import annotations

import builtins
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import traceloom
from traceloom.analyze import gate, gate_summary
from traceloom.analyze.gate_summary import decode
from traceloom.cli import main
from traceloom.errors import InputError, OutputError, UsageError
from traceloom.report import baseline_store
from traceloom.testing import TraceBuilder

LIMIT = ["--fail-if", "step_time > 3%"]


def trace(
    kernel_us: float, run: int, *, kernel: str = "sm90_gemm", device: str = "NVIDIA H100"
) -> TraceBuilder:
    """Twelve steps, whose kernel takes a little longer in some runs than in others."""
    builder = TraceBuilder(device_name=device, base_ns=10**15 + run * 10**16, host=f"host{run}")
    at = 0.0
    for step in range(12):
        long = kernel_us + 0.1 * ((step * 7 + run) % 5)
        builder.step(step, at, 80 + long).op("aten::mm", at + 5, 20, shapes=[[4, 4]])
        builder.launch("cudaLaunchKernel", at + 8, 4, correlation=step + 1)
        builder.kernel(kernel, at + 15, long, correlation=step + 1)
        at += 80 + long
    return builder


def runs(folder: Path, kernel_us: float, many: int, first: int = 0, **kwargs: Any) -> str:
    for run in range(first, first + many):
        (folder / f"run{run}").mkdir(parents=True)
        trace(kernel_us, run, **kwargs).write(folder / f"run{run}" / "trace.json")
    return str(folder)


@pytest.fixture
def base(tmp_path: Path) -> str:
    return runs(tmp_path / "base", 20, 3)


@pytest.fixture
def slow(tmp_path: Path) -> str:
    return runs(tmp_path / "slow", 30, 3, 10)


def summaries(path: str) -> list[gate_summary.RunSummary]:
    return [gate_summary.summarise(run) for run in traceloom.load_runs(path, cache=False)]


def test_a_run_is_measured_step_by_step(base: str) -> None:
    found = summaries(base)[0]
    assert len(found.steps) == len(found.scalars["step_time"]) == 12
    assert found.wall_ns is None
    assert found.scalars["launches"] == [1.0] * 12
    kernel = found.tables["kernel"]["sm90_gemm"]
    assert (
        found.scalars["gpu_time"]
        == kernel
        == found.tables["op_gpu"]["aten::mm"]
        == found.tables["kind"]["gemm"]
    )
    whole = [idle + busy for idle, busy in zip(found.scalars["idle"], kernel, strict=True)]
    assert whole == found.scalars["step_time"]
    assert (found.program.operator, found.program.count) == (["aten::mm"], [1.0])


def test_several_runs_a_side_are_judged_and_the_exit_code_says_so(
    base: str, slow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", base, slow, "--no-cache", *LIMIT, "--fail-if", "launches > 0"]) == 5
    told = capsys.readouterr()
    assert "Failed: step_time > 3%" in told.out
    assert "(3 runs)" in told.out
    assert "sm90_gemm in aten::mm" in told.out
    assert "#check-failed" in told.err
    assert main(["diff", slow, base, "--no-cache", "--quiet", *LIMIT]) == 0
    assert "Passed" in capsys.readouterr().out


def test_runs_can_be_added_one_by_one(
    base: str, slow: str, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    more = ["--base", f"{base}/run1", "--new", f"{slow}/run11"]
    assert main(["diff", f"{base}/run0", f"{slow}/run10", *more, *LIMIT, "--json", "--quiet"]) == 5
    told = json.loads(capsysbinary.readouterr().out)
    assert (told["format"], told["version"], told["verdict"], told["passed"]) == (
        "traceloom-verdict",
        1,
        "fail",
        False,
    )
    assert [len(told[side]["runs"]) for side in ("base", "new")] == [2, 2]
    check = told["checks"][0]
    assert (check["sample"], check["source"]) == ("runs", "recorded steps")
    assert check["low"] < check["change"] < check["high"]
    assert check["change"] == pytest.approx(0.1, abs=0.002)
    assert told["comparison"]["format"] == "traceloom-diff"
    assert (
        sum(row["difference_ns"] for row in told["causes"]) == told["comparison"]["difference_ns"]
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "begins"), [("c.html", b"<!doctype html>"), ("c.md", b"### Trace"), ("c.json", b"{")]
)
def test_the_verdict_is_written_by_the_ending_even_where_it_fails(
    base: str, slow: str, tmp_path: Path, name: str, begins: bytes
) -> None:
    out = tmp_path / name
    assert main(["diff", base, slow, *LIMIT, "-o", str(out), "--quiet"]) == 5
    content = out.read_bytes()
    assert content.startswith(begins)
    assert b"step_time" in content
    assert main(["diff", base, slow, *LIMIT, "-o", str(out), "--quiet"]) == 3


def test_names_are_text_in_every_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "</script><b>kernel|`x`\x1b[31m"
    one, two = runs(tmp_path / "a", 20, 1, kernel=evil), runs(tmp_path / "b", 30, 1, 5, kernel=evil)
    page, text = tmp_path / "c.html", tmp_path / "c.md"
    assert main(["diff", one, two, *LIMIT, "-o", str(page), "-o", str(text), "--quiet"]) == 5
    assert main(["diff", one, two, *LIMIT, "--quiet"]) == 5
    assert "</script><b>" not in page.read_text(encoding="utf-8")
    assert "\x1b" not in text.read_text(encoding="utf-8") + capsys.readouterr().out


def test_inconclusive_passes_unless_strict(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = runs(tmp_path / "other", 20, 3, 20, device="NVIDIA A100")
    assert main(["diff", base, other, *LIMIT, "--quiet"]) == 0
    assert "not comparable: other device" in capsys.readouterr().out
    assert main(["diff", base, other, *LIMIT, "--quiet", "--strict"]) == 5
    assert "#check-inconclusive" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [["--fail-if", "step_time"], ["--strict"], ["--base", "x"], ["--fail-if", "kernel:zzz > 1%"]],
)
def test_wrong_calls_are_refused(base: str, slow: str, wrong: list[str]) -> None:
    assert main(["diff", f"{base}/run0", f"{slow}/run10", *wrong, "--quiet"]) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "where", ["folder", "memory://traceloom-tests/baselines", "file://{}/remote"]
)
def test_a_baseline_is_saved_listed_and_compared(
    base: str, slow: str, tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--store", str(tmp_path / where) if where == "folder" else where.format(tmp_path)]
    if where.startswith("memory"):
        import fsspec

        fsspec.filesystem("memory").store.clear()
    assert main(["baseline", "list", *at]) == 0
    assert "There is no baseline" in capsys.readouterr().out
    assert main(["baseline", "save", "main", base, *at]) == 0
    assert "(3 runs)" in capsys.readouterr().out
    assert main(["baseline", "save", "main", slow, *at]) == 3
    assert main(["baseline", "list", *at, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["baselines"]
    assert [(row["name"], row["runs"], row["steps"]) for row in told] == [("main", 3, 36)]
    assert main(["baseline", "list", *at]) == 0
    assert "main" in capsys.readouterr().out
    assert main(["baseline", "compare", "main", slow, *at, *LIMIT]) == 5
    assert "sm90_gemm" in capsys.readouterr().out
    assert main(["baseline", "compare", "main", base, *at]) == 0
    assert main(["baseline", "save", "main", slow, *at, "--force", "--quiet"]) == 0
    assert main(["baseline", "compare", "main", slow, *at, *LIMIT, "--quiet"]) == 0
    assert main(["baseline", "compare", "other", slow, *at]) == 2
    assert "it has main" in capsys.readouterr().err


def test_a_baseline_and_the_traces_give_the_same_numbers(
    base: str, slow: str, tmp_path: Path
) -> None:
    place = baseline_store.BaselineStore(str(tmp_path))
    place.save("main", summaries(base), 0, force=False)
    conditions = [gate.parse("step_time > 3%")]
    direct = gate.judge(summaries(base), summaries(slow), conditions)
    kept = gate.judge(place.load("main").runs, summaries(slow), conditions)
    assert kept.to_dict() == direct.to_dict()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a" * 101, "x\n", "C:\\x", "ä"])
def test_names_stay_in_the_store(tmp_path: Path, base: str, name: str) -> None:
    place = baseline_store.BaselineStore(str(tmp_path / "store"))
    for act in (lambda: place.load(name), lambda: place.save(name, summaries(base), 0, force=True)):
        with pytest.raises(UsageError) as error:
            act()
        assert error.value.slug == "bad-baseline-name"
    assert not (tmp_path / "store").exists()


def test_a_write_that_fails_leaves_the_old_one(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    place = baseline_store.BaselineStore("memory://traceloom-tests/fails")
    kept = summaries(base)
    place.save("main", kept, 1, force=True)

    def broken(*_: object, **__: object) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "mv", broken)
    with pytest.raises(OutputError, match="the network is gone"):
        place.save("main", kept[:1], 2, force=True)
    assert len(place.load("main").runs) == 3
    assert place.names() == ["main"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not gzip",
        gzip.compress(b"{}"),
        gzip.compress(b"[1]"),
        gzip.compress(b'{"format": "traceloom-baseline", "version": 1, "runs": []}'),
        gzip.compress(b"[" * 100_000),
    ],
    ids=["empty", "no gzip", "nothing in it", "a list", "no runs", "nested deeply"],
)
def test_what_is_no_baseline_is_refused(data: bytes) -> None:
    with pytest.raises(InputError) as error:
        decode(data, "here")
    assert error.value.slug == "damaged-baseline"


@pytest.mark.parametrize("more", ["", ', "version": 0', ', "version": 2', ', "version": "1"'])
def test_a_baseline_of_another_version_is_refused(more: str) -> None:
    with pytest.raises(InputError) as error:
        decode(gzip.compress(f'{{"format": "traceloom-baseline"{more}}}'.encode()), "here")
    assert error.value.slug == "other-version"


def test_a_cut_baseline_is_refused_and_the_others_are_listed(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--store", str(tmp_path / "store")]
    for name in ("one", "two"):
        assert main(["baseline", "save", name, base, *at, "--quiet"]) == 0
    file = tmp_path / "store" / "one.baseline.json.gz"
    file.write_bytes(file.read_bytes()[:-30])
    capsys.readouterr()
    assert main(["baseline", "list", *at]) == 4
    assert "two" in capsys.readouterr().out
    assert main(["baseline", "compare", "one", base, *at]) == 3


def test_a_url_without_fsspec_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "fsspec":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "fsspec.core", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match="cannot be opened") as error:
        baseline_store.BaselineStore("s3://user:secret@bucket/x")
    assert "secret" not in str(error.value)
    assert "traceloom[remote]" in error.value.hint


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        baseline_store.BaselineStore("nothing://bucket")
    assert error.value.slug == "no-fsspec"


@pytest.mark.parametrize(
    "wrong",
    [["save"], ["save", "x"], ["compare", "x"], ["list", "x"], ["save", "x", "y", "--strict"]],
)
def test_wrong_calls_of_the_verb_are_refused(wrong: list[str]) -> None:
    assert main(["baseline", *wrong]) == 2


CHANGES: list[tuple[tuple[str | int, ...], Any]] = [
    (("saved_unix_s",), 2**70),
    (("saved_unix_s",), -1),
    (("saved_unix_s",), 10**17),
    (("saved_unix_s",), None),
    (("runs",), []),
    (("runs", 0, "scalars"), {}),
    (("runs", 0, "scalars", "step_time"), []),
    (("runs", 0, "scalars", "step_time", 0), 1e308),
    (("runs", 0, "scalars", "idle", 0), -(2**70)),
    (("runs", 0, "scalars", "launches"), "x"),
    (("runs", 0, "steps"), []),
    (("runs", 0, "steps", 0), 2**70),
    (("runs", 0, "wall_ns"), [1e300]),
    (("runs", 0, "tables"), {"kernel": {"x": [1.0]}}),
    (("runs", 0, "began_unix_ns"), 2**90),
    (("runs", 0, "program", "count"), []),
    (("runs", 0, "program", "count", 0), 1e30),
    (("runs", 0, "stated"), [3]),
    (("version",), 2**70),
    (("version",), 0),
    (("format",), "x"),
    (("name",), 3),
]
"""What makes a baseline none, each at its place."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("place", "value"), CHANGES, ids=lambda part: str(part)[:60])
def test_a_baseline_that_holds_what_cannot_be_is_refused_and_no_defect(
    place: tuple[str | int, ...], value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, kept = str(trace(20, 0).write(tmp_path / "trace.json")), str(tmp_path / "kept")
    assert main(["baseline", "save", "main", source, "--store", kept, "--quiet", "--no-cache"]) == 0
    file = tmp_path / "kept" / "main.baseline.json.gz"
    document = json.loads(gzip.decompress(file.read_bytes()))
    inside = document
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    file.write_bytes(gzip.compress(json.dumps(document).encode()))
    capsys.readouterr()
    assert main(["baseline", "list", "--store", kept]) == 4
    refused = ("this is no baseline, or it is damaged", "the baseline has format version")
    assert capsys.readouterr().err.startswith(tuple(f"traceloom: {words}" for words in refused))
    with pytest.raises(InputError) as caught:
        baseline_store.BaselineStore(kept).load("main")
    assert caught.value.slug == ("other-version" if place == ("version",) else "damaged-baseline")
