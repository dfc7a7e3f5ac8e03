"""dynolog's RPC, byte for byte; what is no request is dropped and holds up nobody."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from traceloom.agent.dyno_rpc import DynoRpc, DynoTrace, DynoTraced, tcp_user, wanted_of
from traceloom.agent.requests.model import Wanted
from traceloom.errors import UsageError


class Counters:
    def __init__(self) -> None:
        self.calls: list[object] = []

    async def pause(self, seconds: float) -> list[str]:
        self.calls.append(seconds)
        return ["nvml"]

    async def resume(self) -> bool:
        self.calls.append("resume")
        return True

    async def trace_as_dynolog(self, request: DynoTrace, uid: int) -> DynoTraced:
        self.calls.append((request, uid))
        return DynoTraced(processes_matched=[9, 8], activity_profilers_triggered=[9], activity_profilers_busy=1)


def _frame(body: bytes) -> bytes:
    return struct.pack("<i", len(body)) + body


async def _ask(port: int, sent: bytes, *, end: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        if end:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def _with_server(
    work: Callable[[int], Awaitable[object]], counters: Counters | None = None, limit_s: float = 30.0
) -> object:
    async def live() -> object:
        server = DynoRpc(counters or Counters(), "127.0.0.1", 0, limit_s)
        await server.start()
        try:
            return await work(server.port)
        finally:
            await server.close()

    return asyncio.run(live())


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        ({"fn": "getStatus"}, b'{"status":1}'),
        ({"fn": "getVersion"}, b'{"version":"0.6.0"}'),
        ({"fn": "dcgmProfPause", "duration_s": 30}, b'{"status":true}'),
        ({"fn": "dcgmProfPause"}, b'{"status":true}'),
        ({"fn": "dcgmProfPause", "duration_s": -1}, b'{"status":false}'),
        ({"fn": "dcgmProfPause", "duration_s": "x"}, b'{"status":false}'),
        ({"fn": "dcgmProfResume"}, b'{"status":true}'),
        ({"fn": "setKinetOnDemandRequest", "config": "A=1", "job_id": 0}, b'{"status":"failed"}'),
        ({"fn": "setKinetOnDemandRequest", "pids": [0], "job_id": 0}, b'{"status":"failed"}'),
        (
            {"fn": "setKinetOnDemandRequest", "config": "A=1", "pids": [0], "job_id": 0, "process_limit": 3},
            b'{"processesMatched":[9,8],"eventProfilersTriggered":[],"activityProfilersTriggered":[9],"eventProfilersBusy":0,"activityProfilersBusy":1}',
        ),
        ({"fn": "unknown"}, None),
        ({}, None),
        ([], None),
    ],
)
def test_answers_are_those_of_dynolog(request_: object, answer: bytes | None) -> None:
    received = _with_server(lambda port: _ask(port, _frame(json.dumps(request_).encode())))
    assert received == (b"" if answer is None else struct.pack("<i", len(answer)) + answer)


def test_pause_says_for_how_long() -> None:
    counters = Counters()
    _with_server(lambda port: _ask(port, _frame(b'{"fn": "dcgmProfPause", "duration_s": 30}')), counters)
    assert counters.calls == [30.0]


def test_who_sends_nothing_holds_up_nobody_and_is_dropped() -> None:
    async def work(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        assert await _ask(port, _frame(b'{"fn":"getStatus"}')) == _frame(b'{"status":1}')
        for reader, writer in silent:
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()

    _with_server(work, limit_s=0.5)


def test_a_thousand_malformed_frames(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(18)
    planted = [
        b"", b"\0", struct.pack("<i", -1) + b"x", struct.pack("<i", 0), struct.pack("<i", 2**31 - 1) + b"{}",
        _frame(b"{"), _frame(b"\xff\xfe"), _frame(b"[" * 50_000), _frame(b'{"fn": 3}'), _frame(b"null"), _frame(b'{"fn":'),
        struct.pack("<i", 100) + b"short",
    ]  # fmt: skip

    async def work(port: int) -> None:
        for batch in range(20):
            frames = [
                rng.choice(planted) if rng.random() < 0.5 else rng.randbytes(rng.randrange(40)) for _ in range(50)
            ]
            received = await asyncio.gather(*(_ask(port, frame, end=True) for frame in frames))
            assert set(received) == {b""}, batch
        assert await _ask(port, _frame(b'{"fn":"getStatus"}')) == _frame(b'{"status":1}')

    _with_server(work)
    assert not caplog.records


# As `dyno gputrace` 0.6.0 sends them: by duration, and by iterations with shapes and stacks.
BY_TIME = """PROFILE_START_TIME=0
ACTIVITIES_LOG_FILE=/tmp/trace.json
ACTIVITIES_DURATION_MSECS=700
PROFILE_REPORT_INPUT_SHAPES=false
PROFILE_PROFILE_MEMORY=true
PROFILE_MEMORY=true
PROFILE_MEMORY_DURATION_MSECS=700
PROFILE_WITH_STACK=false
PROFILE_WITH_FLOPS=false
PROFILE_WITH_MODULES=false"""
BY_STEPS = """PROFILE_START_ITERATION=0
PROFILE_START_ITERATION_ROUNDUP=1
ACTIVITIES_ITERATIONS=5
ACTIVITIES_LOG_FILE=/tmp/trace.json
PROFILE_REPORT_INPUT_SHAPES=true
PROFILE_WITH_STACK=true"""


def test_configurations_of_dyno_become_typed_requests() -> None:
    by_time = wanted_of(BY_TIME, (7, 8), 1)
    assert by_time == Wanted(pids=(7, 8), duration_s=0.7)
    assert wanted_of(BY_STEPS, (7,), 1) == Wanted(pids=(7,), steps=5, shapes=True, stacks=True)
    at = wanted_of("PROFILE_START_TIME=5000\nACTIVITIES_DURATION_MSECS=10", (7,), 4_000_000_000)
    assert at.at_ns == 5_000_000_000


@pytest.mark.parametrize(
    "config",
    [
        "A",
        "A=b=c",
        "ACTIVITIES_DURATION_MSECS=soon",
        "ACTIVITIES_DURATION_MSECS=0",
        "ACTIVITIES_DURATION_MSECS=-4",
        "PROFILE_START_TIME=x",
    ],
)
def test_configurations_that_could_break_a_process_are_refused(config: str) -> None:
    with pytest.raises(UsageError) as refusal:
        wanted_of(config, (7,), 1)
    assert refusal.value.slug == "unsafe-value"


def test_the_kernel_says_whose_a_connection_of_this_host_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, peer = server.accept()
        with connection:
            assert tcp_user(peer, connection.getsockname()) == os.geteuid()
            assert client.getsockname() == peer
            assert tcp_user((peer[0], 1), connection.getsockname()) is None
            assert tcp_user(("203.0.113.9", 5), connection.getsockname()) is None
