"""`traceloom report` from the outside, on small traces written by hand."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import traceloom
from support.hand_job import hand_rank
from traceloom.cli import main
from traceloom.report import ReportOptions, build
from traceloom.report.views import terminal
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

HOSTILE = "\x1b[31mevil[/red]\x07 [bold]<script>alert(1)</script> | `x`"


def _trace(rank: int = 0, *, name: str = "gemm", world_size: int = 2) -> TraceBuilder:
    builder = TraceBuilder(rank=rank, world_size=world_size)
    for number in range(3):
        start = 1000.0 * number
        builder.step(number, start, 1000).op("aten::mm", start + 10, 500, shapes=[[8, 8], [8, 8]])
        builder.launch("cudaLaunchKernel", start + 20, 10, correlation=number + 1)
        builder.kernel(name, start + 50, 400 + number, correlation=number + 1)
    return builder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return _trace().write(tmp_path / "trace.json")


def _report(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["report", *map(str, arguments), "--no-cache"]) == 0
    return capsys.readouterr().out


def test_the_default_report_is_short_and_computes_nothing_else(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ReportOptions] = []

    def build_short(session: Session, options: ReportOptions, **more: bool) -> dict[str, Any]:
        asked.append(options)
        return build(session, options, **more)

    monkeypatch.setattr("traceloom.report.build", build_short)
    lines = _report(capsys, trace).splitlines()
    assert asked[0].only == ("core", "findings")
    assert lines[2].startswith(" Rank 0, 3 steps of 1.00 ms: GPU 0 is idle")
    order = [
        next(i for i, line in enumerate(lines) if line.startswith(head))
        for head in (" █ compute", "What to fix first", " Steps", "More", "Next: ")
    ]
    assert order == sorted(order)
    assert len(lines) <= 30
    assert "3 whole steps; median 1.00 ms" in "\n".join(lines)


def test_the_full_report_has_the_answer_first_then_bars_steps_and_tables(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _report(capsys, trace, "--full").splitlines()
    assert lines[2].startswith(" Rank 0, 3 steps of 1.00 ms: GPU 0 is idle")
    order = [
        next(i for i, line in enumerate(lines) if line.startswith(head))
        for head in (
            "GPU time",
            "Main thread by",
            "Steps",
            "Why the GPU was idle",
            "GPU work",
            "Operators",
        )
    ]
    assert order == sorted(order)
    assert lines[-1] == f"Next: traceloom report {trace} -o report.html"


def test_json_is_the_object_that_the_library_gives(
    trace: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["report", str(trace), "--no-cache", "--json"]) == 0
    printed = json.loads(capsysbinary.readouterr().out)
    assert printed == json.loads(json.dumps(build(traceloom.load(trace, cache=False))))


def test_steps_and_ranks_can_be_chosen(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    paths = [str(_trace(rank).write(tmp_path / f"rank{rank}.json")) for rank in (0, 1)]
    assert main(["report", *paths, "--no-cache", "--json", "--rank", "1", "--steps", "1..3"]) == 0
    document = json.loads(capsysbinary.readouterr().out)
    (rank,) = document["ranks"]
    assert rank["rank"] == 1
    assert [step["step"] for step in rank["steps"]] == [1, 2]
    assert document["kernels"][0]["count"] == 2
    assert document["kernels"][0]["total_ns"] == 803_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "7"], "traceloom: rank 7 is not in this run; it has 0"),
        (["--steps", "7"], "traceloom: step 7 is not in this run; it has 0 to 2"),
        (["--steps", "7..9"], "traceloom: steps 7 to 8 are not in this run; it has 0 to 2"),
    ],
)
def test_what_is_not_there_cannot_be_chosen(
    arguments: list[str], said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(trace), "--no-cache", *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[0] == said


def test_tables_are_sorted_and_cut_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = _trace().kernel("b_short", 3000, 1).kernel("a_long", 3010, 900)
    path = builder.write(tmp_path / "trace.json")
    out = _report(capsys, path, "--sort", "name", "--top", "2").splitlines()
    start = next(i for i, line in enumerate(out) if line.startswith("GPU work"))
    table = out[start + 2 : out.index("", start)]
    assert [line.split()[-1] for line in table] == ["a_long", "b_short"]


def test_operators_are_counted_apart_by_shape_on_demand(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "aten::mm [[8,8],[8,8]]" in _report(capsys, trace, "--by-shape")
    operators = _report(capsys, trace, "--full").partition("\nOperators")[2].partition("\n\n")[0]
    assert "aten::mm" in operators
    assert "[[8,8]" not in operators


def test_a_written_file_ends_the_report_with_what_was_written(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.md"
    assert _report(capsys, trace, "-o", out).splitlines() == [
        f"Wrote {out} ({out.stat().st_size} B); paste it into a pull request."
        if out.stat().st_size < 1000
        else f"Wrote {out} ({out.stat().st_size / 1000:.2f} kB); paste it into a pull request."
    ]
    assert main(["report", str(trace), "--no-cache", "-o", str(out)]) == 3
    assert "exists already" in capsys.readouterr().err
    assert _report(capsys, trace, "-o", out, "--force", "--quiet") == ""


def test_an_input_is_never_overwritten(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = trace.read_bytes()
    assert main(["report", str(trace), "--force", "-o", str(trace.parent / "." / trace.name)]) == 2
    assert "is an input too" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_writing_a_file_alone_loads_no_terminal_code(trace: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from traceloom.cli import main\n"
        f"main(['report', {str(trace)!r}, '--no-cache', '-o', {str(tmp_path / 'o.json')!r}])\n"
        "print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_names_of_strangers_cannot_steer_the_terminal_or_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _trace(name=HOSTILE).op(HOSTILE, 2600, 100).write(tmp_path / "trace.json")
    shown = _report(capsys, path, "--full")
    assert not {letter for letter in shown if ord(letter) < 32} - {"\n"}
    assert r"\x1b[31mevil[/red]\x07 [bold]" in shown
    out = tmp_path / "out.md"
    _report(capsys, path, "-o", out)
    row = next(line for line in out.read_text(encoding="utf-8").splitlines() if "evil" in line)
    assert row.startswith(
        r"| `` \x1b[31mevil[/red]\x07 [bold]<script>alert(1)</script> \| `x` `` |"
    )


def _shown(document: dict[str, Any], stream: io.TextIOWrapper) -> str:
    terminal.show(document, ReportOptions(full=True), stream)
    stream.flush()
    return stream.buffer.getvalue().decode(stream.encoding)  # type: ignore[attr-defined]


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_that_want_them(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = build(traceloom.load(trace, cache=False))
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[38;5" in _shown(document, _Terminal(io.BytesIO(), encoding="utf-8"))
    assert "\x1b" not in _shown(document, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[38;5" not in _shown(document, _Terminal(io.BytesIO(), encoding="utf-8"))


def test_an_output_without_unicode_gets_ascii(trace: Path) -> None:
    document = build(traceloom.load(trace, cache=False))
    shown = _shown(document, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert "# Compute" in shown
    assert "?" not in shown.replace("rank ?", "")


def test_several_runs_are_summed_up_with_the_command_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for rank in (0, 1):
            _trace(rank).write(tmp_path / name / f"rank{rank}.json")
    shown = _report(capsys, tmp_path)
    assert "2 runs; choose one" in shown
    commands = [
        line.strip() for line in shown.splitlines() if line.startswith(" traceloom report ")
    ]
    assert commands == [f"traceloom report {tmp_path / name}" for name in ("one", "two")]
    assert main(["report", str(tmp_path), "--no-cache", "-o", str(tmp_path / "x.html")]) == 2
    error = capsys.readouterr().err
    assert "hold 2 runs" in error
    assert commands[0] in error


def test_a_refused_input_beside_good_ones_is_said_and_exits_with_4(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("no trace at all", encoding="utf-8")
    assert main(["report", str(trace), str(tmp_path / "bad.json"), "--no-cache"]) == 4
    said = capsys.readouterr()
    assert "compute" in said.out
    assert said.err.startswith("traceloom: refused: ")
    assert "bad.json" in said.err


def test_a_trace_can_come_from_standard_input(trace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "traceloom", "report", "-", "--no-cache", "--json"],
        input=trace.read_bytes(),
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["kernels"][0]["name"] == "gemm"


def test_a_report_shows_itself_in_a_notebook_and_at_a_prompt(tmp_path: Path) -> None:
    path = _trace(name=HOSTILE).write(tmp_path / "trace.json")
    shown = traceloom.show(traceloom.load(path, cache=False))
    page = shown._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert repr(shown).splitlines()[2].startswith(" Rank 0, 3 steps")
    assert shown.to_dict()["format"] == "traceloom-report"


def test_thousands_of_files_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(1_001):
        (tmp_path / f"rank{number}.json").write_text("not read")
    assert main(["report", str(tmp_path)]) == 2
    assert "1,001 traces; at most 1,000 are read together" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--rank", "3"]) == 3, (
        "the choice of ranks is what the message advises"
    )


def test_a_run_named_in_other_ways_has_the_same_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder, its files in any order, packed or not, read again from the cache; and one of its ranks."""
    (tmp_path / "run").mkdir()
    for rank in range(2):
        hand_rank(rank).write(tmp_path / "run" / f"rank{rank}.json")
        hand_rank(rank).write(tmp_path / f"packed{rank}.json.gz")
    run, packed = (
        str(tmp_path / "run"),
        [str(tmp_path / f"packed{rank}.json.gz") for rank in (1, 0)],
    )

    def report_of(*words: str) -> dict[str, Any]:
        assert main(["report", *words, "--json", "--only", "core,launches,copies"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        for named in (document, *document["inputs"], *document["ranks"]):
            for key in ("name", "path", "notices"):
                named.pop(key, None)
        return document

    whole = report_of(run)
    assert report_of(run) == whole
    assert report_of(run, "--no-cache") == whole
    assert report_of(*packed) == whole
    assert report_of(run, "--rank", "1,0") == whole
    assert report_of(run, "--rank", "1") == report_of(f"{run}/rank1.json")
