"""`traceloom diff`: what it shows, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.pages import words
from traceloom.analyze import compare
from traceloom.cli import main
from traceloom.report import comparison
from traceloom.report.comparison import build, build_tables
from traceloom.report.document import ReportOptions
from traceloom.report.views import markdown
from traceloom.report.views.terminal import render_declared_table
from traceloom.report.views.terminal_table import draw_signed_bar
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

EVIL = "</script><b>kernel|`x`\x1b[31m"


def trace(
    kernel_us: float = 20,
    *,
    kernel: str = "gemm",
    device: str = "NVIDIA H100 80GB HBM3",
    **kwargs: Any,
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


def test_it_tells_what_changed_and_ends_well(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *pair, "--no-cache"]) == 0
    out = capsys.readouterr().out
    assert "The step takes 100 µs instead of 100 µs" in out
    assert "slower" in out
    assert "aten::mm" in out
    assert out.rstrip().endswith("-o diff.html")


def test_a_slower_run_is_no_failure(pair: tuple[str, str]) -> None:
    """A verdict that fails needs a statistical gate; a difference alone is an answer."""
    assert main(["diff", *pair, "--quiet", "--json"]) == 0


def test_json_is_the_whole_comparison(
    pair: tuple[str, str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["diff", *pair, "--json", "--quiet"]) == 0
    told = json.loads(capsysbinary.readouterr().out)
    assert (told["format"], told["version"]) == ("traceloom-diff", 1)
    for column in ("base_ns", "new_ns", "difference_ns"):
        assert sum(row[column] for row in told["breakdown"]) == told[column]
    assert [row["difference_ns"] for row in told["kernels"] if row["status"] == "slower"] == [
        15_000
    ]
    assert told["base"]["inputs"][0]["path"] == pair[0]


@pytest.mark.parametrize(
    ("name", "begins"),
    [("d.html", b"<!doctype html>"), ("d.md", b"### Traceloom"), ("d.json", b"{")],
)
def test_files_are_written_by_their_ending_and_never_overwritten(
    pair: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    begins: bytes,
) -> None:
    out = tmp_path / name
    assert main(["diff", *pair, "-o", str(out)]) == 0
    assert out.read_bytes().startswith(begins)
    assert f"Wrote {out}" in capsys.readouterr().out
    assert main(["diff", *pair, "-o", str(out)]) == 3
    assert main(["diff", *pair, "-o", str(out), "--force"]) == 0


def test_wrong_calls_are_refused(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    lines = [line.plain for line in comparison.render_terminal(told, 10, 100)]
    text = "\n".join(lines)
    assert text.index("The conditions differ") < text.index("The step takes")
    assert text.index("Conditions that differ") < text.index("Where the difference lies")
    assert markdown.render_comparison_markdown(told).index(
        "conditions differ"
    ) < markdown.render_comparison_markdown(told).index("The step takes")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_terminal(width: int) -> None:
    told = document(trace(35, kernel="x" * 300, device="AMD Instinct MI300X", generation="rocm"))
    lines = [line.plain for line in comparison.render_terminal(told, 10, width)]
    assert all(len(line) <= width for line in lines)
    assert any("the step" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_table_leaves_out_what_is_compared(width: int) -> None:
    """Both sides and what changed stand on a terminal of any width, uncut; names are cut before."""
    long = "AMD Instinct MI300X VF, of a vendor with a long name"
    told = document(trace(35, kernel="x" * 300, device=long, generation="rocm"))
    every = list(build_tables(told))
    assert [table.key for table in every] == [
        "diff-conditions",
        "diff-parts",
        "diff-kernels",
        "diff-operators",
    ]
    for table in every:
        lines = [line.plain for line in render_declared_table(table, ReportOptions(top=50), width)]
        assert max(map(len, lines)) <= width
        heading = next(line for line in lines if "Base" in line)
        assert all(word in heading for word in ("Base", "New"))
        assert table.key == "diff-conditions" or "Difference" in heading
        assert width < 80 or table.key == "diff-conditions" or "Change  Of step" in heading
        assert width < 100 or table.key == "diff-conditions" or "faster │ slower" in heading
        shown = "".join(" ".join(lines).split())
        for row in table.rows if table.key == "diff-conditions" else ():
            assert all(word in shown for side in ("base", "new") for word in row[side].split())


def test_a_change_is_of_the_row_and_of_the_step() -> None:
    told = document(trace(35))
    assert told["change"] == 0
    rows = {row["part"]: row for row in told["breakdown"]}
    assert rows["compute"]["change"] == pytest.approx(35 / 20 - 1, abs=0.02)
    assert rows["compute"]["of_step"] == pytest.approx(0.15, abs=0.01)
    assert sum(row["of_step"] for row in told["breakdown"]) == pytest.approx(told["change"])
    assert [row["duration_change"] for row in told["operators"]] == [0.75, None]
    text = markdown.render_comparison_markdown(told)
    assert "| +75.0 % | +15.0 % |" in text


def test_a_bar_from_the_middle_says_which_side_it_is_of_without_colour() -> None:
    bars = [draw_signed_bar(value, 100, 15).plain for value in (100, -50, 0, 1, -1)]
    assert bars == [
        "       │███████",
        "   ████│       ",
        "       │       ",
        "       │▏      ",
        "      ▕│       ",
    ]


def test_the_call_tree_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told = document(trace(35))
    tree = told["tree"]
    assert (tree[0]["parent"], tree[0]["base_duration_ns"], tree[0]["new_duration_ns"]) == (
        None,
        20_000,
        35_000,
    )
    assert [row["name"] for row in tree] == [
        "(all)",
        "main thread",
        "aten::mm",
        "(outside operators)",
    ]
    assert tree[0]["base_host_ns"] == told["base_ns"]
    assert "smaller boxes" not in comparison.call_tree(tree)
    monkeypatch.setattr(comparison, "_MAX_BOXES", 2)
    assert "2 smaller boxes are counted to those above them" in comparison.call_tree(tree)


def test_names_are_text_in_every_view() -> None:
    told = document(trace(kernel=EVIL))
    shown = comparison.render(told)
    assert "</script><b>" not in shown
    assert "</script><b>kernel" in words(shown)
    assert "\x1b" not in markdown.render_comparison_markdown(told)
    assert not any("\x1b" in line.plain for line in comparison.render_terminal(told, 10, 100))


def test_the_page_asks_nothing_of_the_network_and_holds_every_table() -> None:
    shown = comparison.render(document(trace(35, device="AMD Instinct MI300X", generation="rocm")))
    assert "http://" not in shown.replace("http://www.w3.org/2000/svg", "")
    for identity in (
        "diff-conditions",
        "diff-parts",
        "diff-kernels",
        "diff-operators",
        "diff-inputs",
        "diff-tree-section",
    ):
        assert f'id="{identity}"' in shown
