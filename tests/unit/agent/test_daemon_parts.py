"""What the agent sums up, without running it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from support.agent_server import locations_in, process
from traceloom.agent.accelerators import Device
from traceloom.agent.config import Accelerators, Config
from traceloom.agent.daemon import Agent
from traceloom.agent.metrics import Reading


def _device_seconds(agent: Agent) -> float:
    return sum(value for (name, _), value, _ in agent.board.values() if name == "job_device_seconds_total")


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_jumps_gives_jobs_no_device_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    async def live() -> None:
        agent = Agent(Config(accelerators=Accelerators(backends=("simulated",), simulated=1)), locations_in(tmp_path))
        try:
            job = process(11, 1000, "slurm-7", 0)
            agent.board.processes = {job.key: job}
            agent.board.devices = {"GPU-0": Device(uuid="GPU-0", index="0", vendor="nvidia", model="H100")}
            agent.board.put("accelerators", [Reading("gpu_busy_ratio", ("GPU-0",), 0.5)], time.time_ns())
            agent._sum_up()
            real = time.time_ns
            monkeypatch.setattr(time, "time_ns", lambda: real() + jump_s * 10**9)
            before = _device_seconds(agent)
            agent._sum_up()
            assert before <= _device_seconds(agent) < abs(jump_s) / 2
        finally:
            agent.accelerators.close()
            agent.history.close()

    asyncio.run(live())


def test_memory_has_what_collectors_deliver_between_two_ticks(tmp_path: Path) -> None:
    """While a trace runs they deliver ten times a second."""

    async def live() -> None:
        agent = Agent(Config(accelerators=Accelerators(backends=("simulated",), simulated=1)), locations_in(tmp_path))
        try:
            cpu = next(collector for collector in agent.scheduler.collectors if collector.name == "cpu")
            now_ns = time.time_ns()
            for turn in range(5):
                agent.board.put("cpu", [Reading("host_load_ratio", (), turn / 8)], now_ns + turn * 10**8)
                agent._delivered(cpu)
            (points,) = agent.history.recent("host_load_ratio", now_ns, now_ns + 10**9)
            assert list(points.values) == [turn / 8 for turn in range(5)]
        finally:
            agent.accelerators.close()
            agent.history.close()

    asyncio.run(live())
