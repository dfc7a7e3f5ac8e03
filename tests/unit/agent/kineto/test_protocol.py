"""libkineto's datagrams: every well-formed one is read as it was packed, everything else is refused."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, strategies as st

from traceloom.agent.kineto import (
    Hello,
    MalformedDatagramError,
    Poll,
    TraceConfiguration,
    decode,
    encode_configuration_reply,
    encode_instances_reply,
)
from traceloom.errors import UsageError

# As stock PyTorch 2.13 sent it: mask 3, six processes, SLURM_JOB_ID 4242.
REAL = (
    struct.pack("=Q", 40)
    + b"req".ljust(32, b"\0")
    + struct.pack("=iiq6i", 3, 6, 4242, 900, 800, 700, 600, 500, 400)
)
INT = st.integers(-(2**31), 2**31 - 1)


def packed(kind: bytes, payload: bytes) -> bytes:
    return len(payload).to_bytes(8, "little") + kind.ljust(32, b"\0") + payload


def test_a_poll_of_stock_pytorch() -> None:
    poll = decode(REAL)
    assert poll == Poll(3, 4242, (900, 800, 700, 600, 500, 400))
    assert isinstance(poll, Poll)
    assert not poll.busy


@given(mask=INT, job=st.integers(-(2**63), 2**63 - 1), pids=st.lists(INT, min_size=1, max_size=64))
def test_polls_are_read_as_they_were_packed(mask: int, job: int, pids: list[int]) -> None:
    poll = decode(packed(b"req", struct.pack(f"<iiq{len(pids)}i", mask, len(pids), job, *pids)))
    assert poll == Poll(mask, job, tuple(pids))
    assert isinstance(poll, Poll)
    assert poll.busy == (mask % 4 < 2)


@given(device=INT, pid=INT, job=st.integers(-(2**63), 2**63 - 1))
def test_hellos_are_read_as_they_were_packed(device: int, pid: int, job: int) -> None:
    assert decode(packed(b"ctxt", struct.pack("<iiq", device, pid, job))) == Hello(device, pid, job)


def test_ten_thousand_malformed_datagrams_are_refused_or_mean_what_they_say() -> None:
    chance = random.Random(5)
    refused = 0
    for number in range(10_000):
        frame = bytearray(REAL)
        match number % 4:
            case 0:
                frame = frame[: chance.randrange(len(frame))]
            case 1:
                frame += chance.randbytes(chance.randrange(1, 4000))
            case 2:
                frame = bytearray(chance.randbytes(chance.randrange(200)))
            case _:
                for _ in range(chance.randrange(1, 5)):
                    frame[chance.randrange(8, len(frame))] ^= 1 << chance.randrange(8)
        try:
            message = decode(bytes(frame))
        except MalformedDatagramError:
            refused += 1
        else:  # only a flipped bit of a number leaves a datagram that is one
            assert number % 4 == 3
            assert isinstance(message, Poll)
            assert len(message.pids) == 6
    assert refused > 7500


@given(st.text(st.characters(max_codepoint=127), max_size=500))
def test_replies_say_how_long_they_are(text: str) -> None:
    reply = encode_configuration_reply(text)
    assert int.from_bytes(reply[:8], "little") == len(text) == len(reply) - 40
    assert (reply[8:40].rstrip(b"\0"), reply[40:].decode()) == (b"req", text)
    assert encode_instances_reply(7) == packed(b"ctxt", (7).to_bytes(4, "little"))


def _configuration(**changes: object) -> TraceConfiguration:
    values = {
        "path": "/var/lib/t/1.trace",
        "trace_id": "tl-1",
        "group_id": "tl",
        "duration_ms": 500,
    } | changes
    return TraceConfiguration(**values)  # type: ignore[arg-type]


def test_a_configuration_is_lines_of_one_key_and_one_value() -> None:
    lines = _configuration(start_ms=1700000000000, shapes=True).text().splitlines()
    assert lines == [
        "ACTIVITIES_LOG_FILE=/var/lib/t/1.trace",
        "REQUEST_TRACE_ID=tl-1",
        "REQUEST_GROUP_TRACE_ID=tl",
        "ACTIVITIES_WARMUP_PERIOD_SECS=0",
        "ACTIVITIES_DURATION_MSECS=500",
        "PROFILE_START_TIME=1700000000000",
        "PROFILE_REPORT_INPUT_SHAPES=true",
    ]
    steps = _configuration(duration_ms=0, steps=3, round_up=50, start_step=120).text()
    assert "PROFILE_START_ITERATION=120\n" in steps
    assert "ACTIVITIES_ITERATIONS=3\n" in steps
    assert "PROFILE_START_ITERATION_ROUNDUP=50\n" in steps
    assert "PROFILE_MEMORY" not in steps


@pytest.mark.parametrize(
    "value",
    [
        "/a=b",
        "/a b",
        "/a#b",
        "/a\nPROFILE_MEMORY=true",
        "/a\r",
        "/a\0",
        "/a/../b",
        "/a\u00e9",
        "/a\\b",
        "rel/ative",
        "",
        "/a\n",
    ],
)
def test_values_that_could_break_it_are_refused(value: str) -> None:
    for field in ("path", "trace_id", "group_id"):
        with pytest.raises(UsageError) as refusal:
            _configuration(**{field: value}).text()
        assert refusal.value.slug == "unsafe-value"


@given(path=st.text(max_size=30), trace_id=st.text(max_size=30))
def test_whatever_is_accepted_has_one_equals_sign_a_line(path: str, trace_id: str) -> None:
    try:
        text = _configuration(path=f"/{path}", trace_id=trace_id).text()
    except UsageError:
        return
    assert all(
        line.count("=") == 1 and line.isprintable() and "#" not in line
        for line in text.split("\n")[:-1]
    )
    assert len(text.split("\n")) == 6


@pytest.mark.parametrize(
    "changes", [{"steps": 3}, {"duration_ms": 0}, {"duration_ms": -1}, {"start_ms": -5}]
)
def test_a_trace_has_a_duration_or_steps(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        _configuration(**changes).text()
