"""What one client may cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.types import Message

from traceloom.agent.fleet_link.protocol import Enrolment
from traceloom.server.access import Caller, ConnectionLimiter, RateLimiter, read_limited_body
from traceloom.server.problem import HttpError
from traceloom.server.routing import decode_body
from traceloom.server.settings import Access

ANNA, BERT, ROOT = (
    Caller(name="anna", uid=1, sees="own"),
    Caller(name="bert", uid=2, sees="own"),
    Caller(name="root", uid=0, sees="all"),
)


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_peer_has_what_two_seconds_bring_and_then_so_much_a_second() -> None:
    clock = Seconds()
    rates = RateLimiter(5, clock)
    for _ in range(10):
        rates.take("anna")
    with pytest.raises(HttpError) as raised:
        rates.take("anna")
    assert (raised.value.status, raised.value.retry_s) == (429, 1)
    rates.take("bert")
    clock.now = 0.2
    rates.take("anna")
    with pytest.raises(HttpError):
        rates.take("anna")
    clock.now = 1000
    for _ in range(10):
        rates.take("anna")
    with pytest.raises(HttpError):
        rates.take("anna")


def test_a_slow_rate_says_how_long_to_wait() -> None:
    rates = RateLimiter(0.1, Seconds())
    rates.take("anna")
    with pytest.raises(HttpError) as raised:
        rates.take("anna")
    assert raised.value.retry_s == 10


def test_who_comes_again_when_told_is_let_in() -> None:
    clock = Seconds()
    rates = RateLimiter(0.4, clock)
    rates.take("anna")
    clock.now = 1.0
    with pytest.raises(HttpError) as raised:
        rates.take("anna")
    clock.now += raised.value.retry_s
    rates.take("anna")


def test_many_peers_cost_no_memory() -> None:
    clock = Seconds()
    rates = RateLimiter(1, clock)
    for number in range(10_000):
        rates.take(f"10.0.{number}")
    assert len(rates.buckets) == 4096


def test_a_peer_has_half_of_the_connections_and_root_is_not_counted() -> None:
    connections = ConnectionLimiter(Access(connections=4))
    for _ in range(2):
        connections.enter(ANNA)
    with pytest.raises(HttpError) as raised:
        connections.enter(ANNA)
    assert (raised.value.status, raised.value.slug) == (503, "too-many-connections")
    for _ in range(2):
        connections.enter(BERT)
    with pytest.raises(HttpError):
        connections.enter(Caller(name="cleo", uid=3, sees="own"))
    connections.enter(ROOT)
    connections.leave(ROOT)
    connections.leave(ANNA)
    connections.enter(Caller(name="cleo", uid=3, sees="own"))
    connections.leave(ANNA)
    assert set(connections.open_by_peer) == {"bert", "cleo"}


async def _chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("declared", ["", "5", "many"])
def test_a_body_within_its_limit(declared: str) -> None:
    assert asyncio.run(read_limited_body(_chunks(b"he", b"llo"), declared, 5)) == b"hello"


@pytest.mark.parametrize(
    ("parts", "declared"), [((b"hello", b"!"), ""), ((b"he",), "6"), ((b"hello!",), "2")]
)
def test_a_body_beyond_it(parts: tuple[bytes, ...], declared: str) -> None:
    with pytest.raises(HttpError) as raised:
        asyncio.run(read_limited_body(_chunks(*parts), declared, 5))
    assert (raised.value.status, raised.value.slug) == (413, "too-large")


@pytest.mark.parametrize(
    "more",
    [b'"\\ud800"', b'"\xff"', b"[" * 5000 + b"]" * 5000, b'{"a":' * 5000 + b"1" + b"}" * 5000],
    ids=["half a letter", "no text", "lists", "objects"],
)
@pytest.mark.parametrize("field", [b"token", b"of_a_newer_host"])
def test_no_body_of_a_stranger_is_a_defect(field: bytes, more: bytes) -> None:
    """The service takes fields that it does not have, as newer hosts may send them."""
    body = b'{"host": "node1", "token": "once", "%b": %b}' % (field, more)

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    request = Request({"type": "http", "headers": [], "query_string": b""}, receive)
    taken, refused = None, (0, "")
    try:
        taken = asyncio.run(decode_body(request, Enrolment, 1 << 20))
    except HttpError as error:
        refused = error.status, error.slug
    if taken is None:
        assert refused == (400, "wrong-request")
    else:
        assert (field, taken) == (b"of_a_newer_host", Enrolment(token="once", host="node1"))
