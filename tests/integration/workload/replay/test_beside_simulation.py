"""A run of two ranks over gloo is replayed beside its simulation on a machine that was made of its own transfers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import traceloom
from traceloom.cli import main
from traceloom.workload.replay.comparison import simulate_steps
from traceloom.workload.replay.planning import make_plan

pytest.importorskip("torch")

# The comparison itself is worked out in tests/unit/workload/replay/test_simulated.py.
pytestmark = [pytest.mark.torch, pytest.mark.thorough]
SOURCE = Path(traceloom.__file__).parents[1]
PROGRAM = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    str(SOURCE.parent / "examples" / "train_gpt.py"),
    "--device",
    "cpu",
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--context",
    "32",
    "--workers",
    "0",
    "--steps",
    "9",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run"
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "record",
        "--graph",
        "--steps",
        "3..6",
        "-o",
        str(path),
        "--",
        sys.executable,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [*command, *PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return path


def test_both_ranks_are_held_against_their_simulation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = tmp_path / "machine.toml"
    assert main(["calibrate", str(run), "-o", str(machine), "-q"]) == 0
    capsys.readouterr()

    command = ["replay", str(run), "--machine", str(machine), "--iterations", "2", "--json", "-q"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["not_simulated"] is None
    assert {row["outcome"] for row in document["coverage"]} == {"run"}, "all ops are on both sides"
    whole, beside = (
        {row["rank"]: row for row in document[name]} for name in ("whole", "simulated")
    )
    assert list(beside) == [0, 1]
    with_gaps = simulate_steps([run], make_plan(run), machine, with_gaps=True).ranks
    of_step = dict(with_gaps.select("rank", "simulated_ns").iter_rows())
    for rank, row in beside.items():
        assert row["replayed_ns"] == whole[rank]["replayed_ns"]
        assert row["step_count"] == whole[rank]["step_count"]
        assert row["difference"] == pytest.approx(row["simulated_ns"] / row["replayed_ns"] - 1)
        assert 0 < row["simulated_ns"] < of_step[rank], "Python takes no time at the pace fast"
        assert whole[rank]["recorded_ns"] / 3 < of_step[rank] < whole[rank]["recorded_ns"] * 3
