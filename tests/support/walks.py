"""What scripts/walk.py follows through the package: a report, a trace request and a question, in this process."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
import os
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock


def run_report(folder: Path) -> None:
    """`traceloom report trace.json -o page.html`."""
    from traceloom.cli import main
    from traceloom.testing import TraceBuilder

    trace = TraceBuilder(device_name="NVIDIA H100 80GB HBM3").step(0, start_us=0, duration_us=100)
    trace.launch("cudaLaunchKernel", start_us=2, duration_us=3, correlation=7)
    trace.kernel("gemm", start_us=20, duration_us=50, stream=7, correlation=7).write(
        folder / "trace.json"
    )
    words = [
        "report",
        str(folder / "trace.json"),
        "-o",
        str(folder / "page.html"),
        "--no-cache",
        "--quiet",
    ]
    assert main(words) == 0
    assert "mean_ns" in (folder / "page.html").read_text(encoding="utf-8")


class LocalWorker:
    """Runs a task of the agent in this process instead of one of its own, so that its frames are seen."""

    def __init__(self, *_: object, **__: object) -> None:
        self.job: dict[str, Any] = {}

    def send(self, job: dict[str, Any]) -> None:
        self.job = job

    def read_answer(self, *_limits: object) -> dict[str, Any]:
        from traceloom.agent.worker import TASKS

        module, _, name = TASKS[self.job["task"]].partition(":")
        with mock.patch("resource.setrlimit"):  # a task limits the memory of its process
            return {
                "result": getattr(importlib.import_module(module), name)(**self.job["arguments"])
            }

    def kill(self) -> None:
        pass

    def ended(self) -> None:
        pass


def run_request(folder: Path) -> None:
    """`traceloom trace --pid PID --steps 3 -o run`, to an agent and a profiler in threads of this process."""
    from support.kineto_clients import KinetoClient, write_trace
    from traceloom.agent.config import load, resolve_paths
    from traceloom.agent.daemon import Agent
    from traceloom.cli import main

    places = ("socket", "history", "audit", "kineto", "requests", "traces")
    config = "[paths]\n" + "".join(f'{name} = "{folder}/{name}"\n' for name in places)
    (folder / "agent.toml").write_text(config, encoding="utf-8")
    settings = load(folder / "agent.toml")
    listens, polled, ended = threading.Event(), threading.Event(), threading.Event()
    agents: list[tuple[Agent, asyncio.AbstractEventLoop]] = []

    async def live() -> None:
        agent = Agent(settings, resolve_paths(settings))
        agents.append((agent, asyncio.get_running_loop()))
        await agent.run(listens.set)

    def poll() -> None:
        client, mask = KinetoClient(folder / "kineto" / str(os.geteuid())), 3
        while not ended.wait(0.05):
            client.poll(mask)
            mask = 3
            text = client.answer(10)
            polled.set()
            if text:
                write_trace(dict(line.split("=") for line in text.splitlines()))
                mask = 1  # busy once, as a profiler is that has begun
        client.close()

    threads = [threading.Thread(target=lambda: asyncio.run(live())), threading.Thread(target=poll)]
    threads[0].start()
    assert listens.wait(60), "the agent does not listen"
    threads[1].start()
    assert polled.wait(60), "the agent does not answer the profiler"
    try:
        words = [
            "trace",
            "--config",
            str(folder / "agent.toml"),
            "--pid",
            str(os.getpid()),
            "--steps",
            "3",
            "--quiet",
        ]
        with mock.patch("traceloom.agent.worker.WorkerProcess", LocalWorker):
            assert main([*words, "-o", str(folder / "run")]) == 0
    finally:
        ended.set()
        threads[1].join()
        agents[0][1].call_soon_threadsafe(agents[0][0].stop)
        threads[0].join()
    [written] = (folder / "run").glob("*.kineto.json.gz")
    assert json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]


def run_question(folder: Path) -> None:
    """The page of the fleet's kernels, from tables with two made days."""
    from support.answering import fill
    from traceloom.fleet.portal.app import build_portal
    from traceloom.fleet.service.executors import create_engine
    from traceloom.fleet.service.service import FleetService
    from traceloom.fleet.store.captures import ServiceState
    from traceloom.fleet.store.objects import ObjectStore
    from traceloom.fleet.store.tables import Tables
    from traceloom.testing.fleet_weeks import WeeksRecipe, build_weeks

    start = datetime.now(timezone.utc).date() - timedelta(days=3)
    weeks = build_weeks(WeeksRecipe(start=start, days=2, changes=(), captures=1))
    state, tables = ServiceState(str(folder / "state.db")), Tables(str(folder / "store"))
    tables.create()
    fill(tables, weeks)
    engine = create_engine("processes", 1)
    store = ObjectStore(str(folder / "store"))
    service = FleetService(
        state,
        store,
        tables,
        engine,
        lease_s=3600,
        commit_s=5,
        incoming_directory=folder / "incoming",
    )
    cookie = "traceloom=" + state.open_session(state.add_token("reader", "viewer"), 600)
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/kernels",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"fleet"), (b"cookie", cookie.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("fleet", 80),
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def browse() -> None:
        app = build_portal(service)
        while not sent or sent[0]["status"] == 202:  # the answer is still being worked out
            sent.clear()
            await app(dict(scope), receive, send)  # type: ignore[arg-type]

    try:
        asyncio.run(browse())
    finally:
        service.questions.close()
        engine.close()
        state.close()
    text = b"".join(message.get("body", b"") for message in sent).decode()
    assert sent[0]["status"] == 200, text
    assert any(name in text for name in weeks.tables["kernels"]["kernel"].unique())
