"""`traceloom diff`: what it shows, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.pages import words
from traceloom.analyze import compare
from traceloom.cli import main
from traceloom.model import Session
from traceloom.report.comparison import build, markdown, page, terminal
from traceloom.testing import TraceBuilder

EVIL = "</script><b>kernel|`x`\x1b[31m"


def trace(
    kernel_us: float = 20, *, kernel: str = "gemm", device: str = "NVIDIA H100 80GB HBM3", **kwargs: Any
) -> TraceBuilder:
    builder = TraceBuilder(device_name=device, **kwargs)
    for step in range(3):
        at = 100.0 * step
        builder.step(step, at, 100).op("aten::mm", at + 5, 20, shapes=[[4, 4]])
        builder.launch("cudaLaunchKernel", at + 8, 4, correlation=step + 1)
        builder.kernel(kernel, at + 15, kernel_us, correlation=step + 1)
    return builder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return str(trace().write(tmp_path / "base.json")), str(trace(35).write(tmp_path / "new.json"))


def document(new: TraceBuilder | None = None) -> dict[str, Any]:
    base, other = Session((trace().build(),), "base"), Session(((new or trace(35)).build(),), "new")
    return build(compare(base, other), base, other)


def test_it_tells_what_changed_and_ends_well(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *pair, "--no-cache"]) == 0
    out = capsys.readouterr().out
    assert "The step takes 100 µs instead of 100 µs" in out
    assert "slower" in out
    assert "aten::mm" in out
    assert out.rstrip().endswith("-o diff.html")


def test_a_slower_run_is_no_failure(pair: tuple[str, str]) -> None:
    """A verdict that fails needs a statistical gate; a difference alone is an answer."""
    assert main(["diff", *pair, "--quiet", "--json"]) == 0


def test_json_is_the_whole_comparison(pair: tuple[str, str], capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["diff", *pair, "--json", "--quiet"]) == 0
    told = json.loads(capsysbinary.readouterr().out)
    assert (told["format"], told["version"]) == ("traceloom-diff", 1)
    for column in ("base_ns", "new_ns", "difference_ns"):
        assert sum(row[column] for row in told["breakdown"]) == told[column]
    assert [row["difference_ns"] for row in told["kernels"] if row["status"] == "slower"] == [15_000]
    assert told["base"]["inputs"][0]["path"] == pair[0]


@pytest.mark.parametrize(
    ("name", "begins"), [("d.html", b"<!doctype html>"), ("d.md", b"### Traceloom"), ("d.json", b"{")]
)
def test_files_are_written_by_their_ending_and_never_overwritten(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, begins: bytes
) -> None:
    out = tmp_path / name
    assert main(["diff", *pair, "-o", str(out)]) == 0
    assert out.read_bytes().startswith(begins)
    assert f"Wrote {out}" in capsys.readouterr().out
    assert main(["diff", *pair, "-o", str(out)]) == 3
    assert main(["diff", *pair, "-o", str(out), "--force"]) == 0


def test_wrong_calls_are_refused(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", pair[0]]) == 2
    assert main(["diff", *pair, "-o", str(tmp_path / "d.xyz")]) == 2
    assert "unknown-format" in capsys.readouterr().err
    assert main(["diff", pair[0], str(tmp_path / "missing.json")]) == 3
    assert main(["diff", *pair, "--top", "0"]) == 2
    empty = TraceBuilder().write(tmp_path / "empty.json")
    assert main(["diff", pair[0], str(empty)]) == 2
    assert "nothing-to-compare" in capsys.readouterr().err


def test_two_runs_in_one_side_are_refused(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "both"
    folder.mkdir()
    trace(world_size=2, rank=0, base_ns=10**15, host="a").write(folder / "a.json")
    trace(world_size=4, rank=0, base_ns=10**18, host="b").write(folder / "b.json")
    assert main(["diff", pair[0], str(folder)]) == 2
    assert "a side of a comparison is one" in capsys.readouterr().err


def test_conditions_stand_before_any_verdict() -> None:
    told = document(trace(35, device="AMD Instinct MI300X", generation="rocm"))
    lines = [line.plain for line in terminal.render(told, 10, 100)]
    text = "\n".join(lines)
    assert text.index("The conditions differ") < text.index("The step takes")
    assert text.index("Conditions that differ") < text.index("Where the difference lies")
    assert markdown.render(told).index("conditions differ") < markdown.render(told).index("The step takes")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_terminal(width: int) -> None:
    told = document(trace(35, kernel="x" * 300, device="AMD Instinct MI300X", generation="rocm"))
    lines = [line.plain for line in terminal.render(told, 10, width)]
    assert all(len(line) <= width for line in lines)
    assert any("the step" in line for line in lines)


def test_names_are_text_in_every_view() -> None:
    told = document(trace(kernel=EVIL))
    shown = page.render(told)
    assert "</script><b>" not in shown
    assert "</script><b>kernel" in words(shown)
    assert "\x1b" not in markdown.render(told)
    assert not any("\x1b" in line.plain for line in terminal.render(told, 10, 100))


def test_the_page_asks_nothing_of_the_network_and_holds_every_table() -> None:
    shown = page.render(document(trace(35, device="AMD Instinct MI300X", generation="rocm")))
    assert "http://" not in shown.replace("http://www.w3.org/2000/svg", "")
    for identity in ("diff-conditions", "diff-parts", "diff-kernels", "diff-operators", "diff-inputs"):
        assert f'id="{identity}"' in shown
