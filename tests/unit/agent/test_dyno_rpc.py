"""dynolog's RPC, byte for byte; what is no request is dropped and holds up nobody."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Awaitable, Callable

import pytest

from traceloom.agent.dyno_rpc import DynoRpc


class Counters:
    def __init__(self) -> None:
        self.calls: list[object] = []

    async def pause(self, seconds: float) -> list[str]:
        self.calls.append(seconds)
        return ["nvml"]

    async def resume(self) -> bool:
        self.calls.append("resume")
        return True


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
        ({"fn": "setKinetOnDemandRequest", "config": "A=1", "pids": [0], "job_id": 0}, b'{"status":"failed"}'),
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


def test_ten_thousand_malformed_frames(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(18)
    planted = [
        b"", b"\0", struct.pack("<i", -1) + b"x", struct.pack("<i", 0), struct.pack("<i", 2**31 - 1) + b"{}",
        _frame(b"{"), _frame(b"\xff\xfe"), _frame(b"[" * 50_000), _frame(b'{"fn": 3}'), _frame(b"null"), _frame(b'{"fn":'),
        struct.pack("<i", 100) + b"short",
    ]  # fmt: skip

    async def work(port: int) -> None:
        for batch in range(200):
            frames = [
                rng.choice(planted) if rng.random() < 0.5 else rng.randbytes(rng.randrange(40)) for _ in range(50)
            ]
            received = await asyncio.gather(*(_ask(port, frame, end=True) for frame in frames))
            assert set(received) == {b""}, batch
        assert await _ask(port, _frame(b'{"fn":"getStatus"}')) == _frame(b'{"status":1}')

    _with_server(work)
    assert not caplog.records
