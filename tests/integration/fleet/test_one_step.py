"""Two ranks of stock PyTorch that say how many steps they made: their traces begin with one and the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's"),
]
for package in ("torch", "sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet`, or PyTorch, is not installed")

from support.running_agent import Running  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.formats import load  # noqa: E402

JOB = f"one-step-{os.getpid()}"
# The ranks begin apart and go on apart: nothing but the number of the step joins them.
RANK = """
import os, sys, time
from pathlib import Path
import torch
from traceloom.server.client import AgentClient
torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
client = AgentClient(Path(sys.argv[1]), 30)
time.sleep(0.2 * int(os.environ["RANK"]))
for number in range(1, 1_000_000):
    begun = time.monotonic()
    with torch.profiler.record_function(f"work {number}"):
        weight.sum().backward()
    optimizer.step()
    time.sleep(0.1)
    client.post("steps", {"steps": [time.monotonic() - begun], "total": number})
"""


def test_traces_begin_with_one_step(tmp_path: Path) -> None:
    service = RunningService(tmp_path)
    ranks: list[subprocess.Popen[bytes]] = []
    agent = None
    try:
        (tmp_path / "agent").mkdir()
        token = service.run("fleet", "token", "enrol").strip()
        agent = Running(
            tmp_path / "agent",
            f'[fleet]\nserver = "{service.url}"\nheartbeat = 0.5\n',
            environment={"TRACELOOM_FLEET_TOKEN": token},
        )
        variables = agent.client.get("environment")["variables"]
        for rank in range(2):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "TRACELOOM_JOB": JOB,
            }
            command = [sys.executable, "-c", RANK, str(agent.socket)]
            ranks.append(subprocess.Popen(command, env={**os.environ, **variables, **place}))

        def ready() -> bool:
            jobs = [job for job in service.client().get("jobs")["jobs"] if job["job"] == JOB]
            return (
                bool(jobs) and jobs[0]["traceable"] == 2 and jobs[0]["steps_per_second"] is not None
            )

        until(ready)
        words = [
            "trace",
            "--job",
            JOB,
            "--steps",
            "3",
            "-o",
            str(tmp_path / "run"),
            "--json",
        ]
        request = json.loads(service.run(*words))
        assert (request["state"], request["start_detail"]) == ("done", "")
        session = load(tmp_path / "run", cache=False)
        first = []
        for trace in session.traces:
            names = [name for name in trace.events["name"].to_list() if name.startswith("work ")]
            first.append(min(int(name.split()[1]) for name in names))
        assert len(first) == 2
        assert first[0] == first[1]
        assert 0 <= first[0] - request["start_step"] <= 2
    finally:
        for process in ranks:
            process.kill()
            process.wait(60)
        if agent is not None:
            agent.end()
        assert service.end() == 0
