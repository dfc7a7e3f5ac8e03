"""What many hosts cost the fleet's service: simulated agents over HTTP, with the messages of real
ones.

Each has two connections, as an agent has: a heartbeat every 10 s (8 devices, 8 ranks, a minute of
usage once a minute), and a question for work that waits for 30 s. The service is a process of its
own, on SQLite; what is measured is its processor time, with that of the process that writes its
tables, the memory of both, and how long all hosts take to hear of a request for a trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from traceloom.agent.fleet_link.protocol import (
    ArmedProcess,
    ClockOffset,
    Heartbeat,
    HostDevice,
    HostProcess,
    HostReport,
    UsageRow,
    WorkResponse,
)
from traceloom.cli.upload import FleetClient
from traceloom.errors import TraceloomError
from traceloom.fleet.store.captures import ServiceState

DEVICES, BEAT_S, POLL_S = 8, 10.0, 30
CLOCK = ClockOffset(offset_ns=1_000_000, error_ns=300_000, round_trips=16)
JOB, MODEL = "slurm-4242", "NVIDIA H100 80GB HBM3"


class Exchange:
    """A connection to the service: one question at a time."""

    def __init__(self, port: int, credential: str) -> None:
        self.port, self.credential = port, credential
        self.stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of the answer."""
        if self.stream is None:
            self.stream = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.stream
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: fleet\r\nAuthorization: Bearer {self.credential}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        answer = await reader.readexactly(int(length[1]) if length else 0)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path}: {head[:40]!r} {answer[:200]!r}")
        return answer


class Agent:
    """A host with 8 devices and 8 ranks of the one job."""

    def __init__(self, port: int, number: int, heard: Callable[[str], None]) -> None:
        self.name, self.number, self.heard = f"node{number:04}", number, heard
        self.beats, self.polls = (
            Exchange(port, f"secret{number}"),
            Exchange(port, f"secret{number}"),
        )
        self.reports = Exchange(port, f"secret{number}")
        self.told = 0

    async def beat_for_ever(self) -> None:
        await asyncio.sleep(random.uniform(0, BEAT_S))
        while True:
            minute = time.time_ns() // 60_000_000_000 - 1
            usage = self._usage(minute) if minute > self.told else []
            self.told = minute
            body = msgspec.json.encode(self._heartbeat(usage))
            await self.beats.ask("POST", f"/api/v1/agents/{self.name}/heartbeat", body)
            await asyncio.sleep(BEAT_S)

    async def poll_for_ever(self) -> None:
        version = ""
        await asyncio.sleep(random.uniform(0, 5.0))
        while True:
            path = f"/api/v1/agents/{self.name}/work?version={version}&wait={POLL_S}"
            answer = msgspec.json.decode(await self.polls.ask("GET", path), type=WorkResponse)
            if answer.work and answer.version != version:
                [work] = answer.work
                self.heard(work.step)
                if work.step == "arm":
                    report = msgspec.json.encode(
                        HostReport(state="armed", processes=self._armed(), clock=CLOCK)
                    )
                    path = f"/api/v1/agents/{self.name}/requests/{work.request}"
                    await self.reports.ask("POST", path, report)
            version = answer.version

    def _armed(self) -> list[ArmedProcess]:
        return [
            ArmedProcess(
                key=f"{1000 + at}@77",
                pid=1000 + at,
                job=JOB,
                rank=self.number * DEVICES + at,
                steps_per_second=2.5,
            )
            for at in range(DEVICES)
        ]

    def _usage(self, minute: int) -> list[UsageRow]:
        return [
            UsageRow(
                minute=minute,
                device=self._device(at),
                device_model=MODEL,
                job=JOB,
                state=state,
                device_ms=30_000,
                busy_ms=30_000 if state == "busy" else 0,
                energy_mj=20_000_000,
            )
            for at in range(DEVICES)
            for state in ("busy", "idle-allocated")
        ]

    def _device(self, at: int) -> str:
        return f"GPU-{self.number:08x}-1234-5678-9abc-{at:012x}"

    def _heartbeat(self, usage: list[UsageRow]) -> Heartbeat:
        values = {
            "gpu_busy_ratio": 0.93,
            "gpu_power_watts": 612.5,
            "gpu_memory_used_bytes": 6.1e10,
            "gpu_up": 1.0,
        }
        return Heartbeat(
            sent_ns=time.time_ns(),
            boot_id="8d4f5a5e-31d4-4d0e-9ad5-1d6c3b6c4a4e",
            version="0.2.0",
            usage=usage,
            clock=CLOCK,
            devices=[
                HostDevice(uuid=self._device(at), index=str(at), model=MODEL, values=values)
                for at in range(DEVICES)
            ],
            processes=[
                HostProcess(
                    key=f"{1000 + at}@77",
                    pid=1000 + at,
                    uid=1000,
                    job=JOB,
                    job_name="train",
                    scheduler="slurm",
                    rank=self.number * DEVICES + at,
                    world_size=8000,
                    user="ada",
                    framework="pytorch",
                    devices=(self._device(at),),
                    steps_per_second=2.5,
                    polls=True,
                )
                for at in range(DEVICES)
            ],
        )


def cpu_s(pid: int) -> float:
    """Of a process, those that it started and that run, and those that it started and that have
    ended.
    """
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += (
                times.user
                + times.system
                + (times.children_user + times.children_system if process.pid == pid else 0)
            )
    return total


def memory_mb(pid: int) -> float:
    return int(psutil.Process(pid).memory_info().rss) / 1e6


class Writers:
    """The processes that write tables: the most memory of one, and the share of the time in which
    there is one.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.most, self.looks, self.seen = pid, 0.0, 0, 0

    @property
    def share(self) -> float:
        return self.seen / max(self.looks, 1)

    async def look_for_ever(self) -> None:
        while True:
            children = psutil.Process(self.pid).children()
            self.looks, self.seen = self.looks + 1, self.seen + bool(children)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.most = max(self.most, memory_mb(child.pid))
            await asyncio.sleep(0.1)


async def measured(
    port: int, pid: int, client: FleetClient, agents: int, seconds: float
) -> dict[str, float]:
    """What the service costs, and how long hosts take to hear of a request, and then of its common
    instant.
    """
    heard: dict[str, list[float]] = {"arm": [], "start": []}
    all_begin = asyncio.Event()

    def hears(step: str) -> None:
        heard[step].append(time.monotonic())
        if len(heard["start"]) == agents:
            all_begin.set()

    hosts = [Agent(port, number, hears) for number in range(agents)]
    tasks = [
        asyncio.create_task(loop)
        for host in hosts
        for loop in (host.beat_for_ever(), host.poll_for_ever())
    ]
    await asyncio.wait(
        tasks, timeout=1.5 * BEAT_S, return_when=asyncio.FIRST_EXCEPTION
    )  # all have come
    writers = Writers(pid)
    looking = asyncio.create_task(writers.look_for_ever())
    before, began = cpu_s(pid), time.monotonic()
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
    share = (cpu_s(pid) - before) / (time.monotonic() - began)
    memory = memory_mb(pid)
    wanted = {"job": JOB, "steps": 3}
    before, began = cpu_s(pid), time.monotonic()
    await asyncio.to_thread(client.post, "requests", {"spec": wanted})
    with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
        await asyncio.wait_for(all_begin.wait(), 60)
    times = {
        step: max(times) - began if len(times) == agents else float("inf")
        for step, times in heard.items()
    }
    result = {
        "share": share,
        "memory": memory,
        "woken": times["arm"],
        "started": times["start"],
        "request_cpu": cpu_s(pid) - before,
        "memory_then": memory_mb(pid),
        "writer": writers.most,
        "writer_share": writers.share,
    }
    for task in (looking, *tasks):
        task.cancel()
    await asyncio.gather(looking, *tasks, return_exceptions=True)
    return result


def agents_of_fleet(folder: Path, agents: int, seconds: float) -> dict[str, float]:
    """Run the service and so many agents for a while; what it cost."""
    state = ServiceState(str(folder / "store" / "state.db"))
    for number in range(agents):
        state.put_host(f"node{number:04}", f"secret{number}")
    state.close()
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "serve",
        "--store",
        str(folder / "store"),
        "--address",
        "127.0.0.1:0",
    ]
    log = folder / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment) as service,
    ):
        try:
            while not (match := re.search(r"answers at \S+:(\d+),", log.read_text())):
                time.sleep(0.1)
                if service.poll() is not None:
                    raise RuntimeError(log.read_text())
            port = int(match[1])
            client = FleetClient(
                f"http://127.0.0.1:{port}",
                (folder / "traceloom" / f"fleet-token-{port}").read_text().strip(),
            )
            while True:
                try:
                    client.get("hosts")
                    break
                except TraceloomError:  # it does not lead yet
                    time.sleep(0.2)
            return asyncio.run(measured(port, service.pid, client, agents, seconds))
        finally:
            service.terminate()
            sys.stderr.write(log.read_text()[-2000:])
