"""What was recorded on a GPU runs there again: streams, a CUDA graph, compiled kernels, one rank's collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from traceloom.formats import load  # noqa: E402
from traceloom.graph import link_session  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
ROOT = Path(__file__).resolve().parents[4]
GPT = ["examples/train_gpt.py", "--layers", "2", "--width", "256", "--heads", "4", "--steps", "8"]


def traceloom(*arguments: str | Path) -> str:
    """Run the command line; what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "traceloom", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def recorded(directory: Path, *program: str, steps: str = "3..5") -> Path:
    """A capture of a program."""
    traceloom("record", "--graph", "--steps", steps, "-o", directory, "--", *program)
    return directory


def replayed(capture: Path, *more: str) -> Any:
    """The answer of a replay."""
    return json.loads(traceloom("replay", capture, "--json", "--max-time", "5", *more))


def test_streams_run_as_they_were_recorded(tmp_path: Path) -> None:
    capture = recorded(
        tmp_path / "streams", sys.executable, "tests/support/gpu_program.py", steps="1..4"
    )
    waits = link_session(load(str(capture))).edges.filter(kind="wait")
    assert waits.height >= 2, "one stream waits for the other, and the other way round"
    answer = replayed(capture)
    assert {row["outcome"] for row in answer["coverage"]} == {"run"}
    assert answer["device"] == "cuda"


def test_the_gpu_does_the_same_work_again(tmp_path: Path) -> None:
    capture = recorded(tmp_path / "run", "torchrun", "--standalone", "--nproc-per-node", "1", *GPT)
    answer = replayed(capture)
    (whole,) = answer["whole"]
    assert whole["gpu_ratio"] == pytest.approx(1, abs=0.15)
    assert {row["outcome"] for row in answer["coverage"]} == {"run"}, (
        "of the one rank's collectives, too"
    )
    assert all(row["gpu_ratio"] is not None for row in answer["ops"] if row["name"] == "aten::mm")


def test_compiled_kernels_run_from_their_sources(tmp_path: Path) -> None:
    capture = recorded(tmp_path / "compiled", sys.executable, *GPT, "--compile")
    assert any(row["reason"] == "not-trusted" for row in replayed(capture)["coverage"])
    assert {row["outcome"] for row in replayed(capture, "--trust")["coverage"]} == {"run"}
