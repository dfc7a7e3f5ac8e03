"""Rules of the user's from files, and what the command line makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traceloom.analyze import flops, load_rules
from traceloom.cli import main
from traceloom.errors import InputError, UsageError
from traceloom.testing import TraceBuilder

MODEL = """
from traceloom.analyze import flops

@flops.register("my::scale")
def scale(call):
    x = call.tensor(0)
    return flops.Work(flops=x.numel, bytes=2 * x.bytes, dtype=x.dtype)
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    flops.remove("my::scale")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    builder = TraceBuilder().op("my::scale", 0, 20, shapes=[[10, 10]], types=["float"])
    builder.launch("cudaLaunchKernel", 5, 3, correlation=1).kernel(
        "ring_step", 10, 30, correlation=1
    )
    return Path(builder.write(tmp_path / "trace.json"))


def report(capsys: pytest.CaptureFixture[str], *given: str | Path) -> tuple[int, dict[str, Any]]:
    code = main(["report", *map(str, given), "--json", "--no-cache", "--only", "roofline,kinds"])
    said = capsys.readouterr().out
    return code, json.loads(said) if code == 0 else {}


def test_the_command_line_takes_models_and_kinds_from_files(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, kinds = tmp_path / "models.py", tmp_path / "kinds.json"
    models.write_text(MODEL)
    kinds.write_text('[{"rule": "ours", "kind": "attention", "pattern": "^ring_"}]')
    _, before = report(capsys, trace)
    code, after = report(capsys, trace, "--rules", models, "--rules", kinds)
    assert code == 0
    assert before["roofline"]["operators"] == []
    assert [
        (row["name"], row["flops"], row["bytes"]) for row in after["roofline"]["operators"]
    ] == [("my::scale", 100, 800)]
    assert [row["kind"] for row in before["kinds"]["kinds"]] == ["other"]
    assert [row["kind"] for row in after["kinds"]["kinds"]] == ["attention"]
    assert [row["rule"] for row in after["kinds"]["rules"]] == ["ours"]


def test_a_program_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text("import json\n\nraise SystemExit('no')\n")
    with pytest.raises(InputError, match=r"SystemExit: no .*models\.py, line 3") as refused:
        load_rules([path])
    assert refused.value.slug == "rules-failed"
    with pytest.raises(InputError, match="cannot be loaded"):
        load_rules([tmp_path / "gone.py"])
    path.write_text("def broken(:\n")
    with pytest.raises(InputError, match="SyntaxError"):
        load_rules([path])


def test_other_files_are_no_rules(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither \.py nor \.json"):
        load_rules([tmp_path / "rules.toml"])
    (tmp_path / "rules.json").write_text('{"rule": "ours"}')
    with pytest.raises(InputError, match="JSON list"):
        load_rules([tmp_path / "rules.json"])
