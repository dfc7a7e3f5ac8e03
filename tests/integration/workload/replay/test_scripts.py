"""A script of two ranks under torchrun: every kind of collective, over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.plans import PlanBuilder, groups
from traceloom.workload.replay.plan import ReplayPlan
from traceloom.workload.replay.script import write_script


@pytest.mark.thorough
@pytest.mark.torch
def test_collectives_of_a_script_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ranks = {}
    for rank in (0, 1):
        build = PlanBuilder(rank)
        x, y, wide, wider = (build.tensor(n, external=True) for n in (4, 4, 8, 8))
        number = build.collective("all_reduce", [x], [x], asynchronous=True)
        build.collective("all_gather", [x], [wide])
        build.collective("all_gather", [x], [y, build.tensor(4, external=True)])
        build.collective("reduce_scatter", [wide], [y])
        build.collective("broadcast", [y], [y], peer=1)
        build.collective("reduce", [y], [y], peer=0)
        build.collective("all_to_all", [wide], [wider])
        build.collective("all_to_all", [wide], [wider], splits_in=[4, 4], splits_out=[4, 4])
        build.collective("gather", [x], [wide] if rank == 0 else [], peer=0)
        build.collective("scatter", [wide] if rank == 0 else [], [y], peer=0)
        if rank == 0:
            build.wait(build.collective("send", [x], [], peer=1, asynchronous=True))
        else:
            build.collective("recv", [], [x], peer=0)
        build.collective("all_reduce", [x], [x], group="both")
        build.collective("barrier", [], [])
        build.wait(number)
        ranks[rank] = build.build()
    path = tmp_path / "replay.py"
    path.write_text(
        write_script(ReplayPlan(ranks, groups(2, both=[0, 1]), world_size=2)), encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(path),
    ]
    done = subprocess.run(
        [*command, "--runs", "2"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0: median of 2" in done.stdout
    assert "rank 1: median of 2" in done.stdout
    alone = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert alone.returncode == 1
    assert "run it with: torchrun --nproc-per-node 2 replay.py" in alone.stderr
