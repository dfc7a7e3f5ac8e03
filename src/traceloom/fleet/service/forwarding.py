"""Hands requests that only the leading service can answer on to it, so that every service of a state
answers everything.

A route says that it needs the leader when it is called. What has been read of the request by then
is sent again, the rest follows as it comes. The term of the leader, which only services of the same
state know, proves to it that a request was handed on, and for whom.
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
from contextvars import ContextVar
from typing import TYPE_CHECKING

import h11
from starlette.datastructures import Headers

from traceloom.errors import InputError
from traceloom.system.service_address import ServiceAddress

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from traceloom.fleet.service.service import FleetService

_HEADER = b"x-traceloom-handed-on"
_NOT_SENT = frozenset({b"connection", b"keep-alive", _HEADER})
_MAX_REPLAYED_BYTES = 4 << 20
_CONNECT_S = 2.0
_ANSWER_S = 90.0  # longer than any route waits
_PAGE_S = 10.0  # longer than a page waits
_READ_BYTES = 1 << 16

_needed: ContextVar[list[bool]] = ContextVar("needed")


def note_leader_needed() -> None:
    """Notes that the current request needs the service that leads."""
    _needed.get([]).append(True)


class LeaderForwarding:
    """Middleware that hands requests on to the leader.

    Args:
        app: Answers what needs no leader.
        service: This service.
        certificate: PEM file of certificates that are trusted besides those of the system: a
            service trusts its own, which others may share.
    """

    def __init__(self, app: ASGIApp, service: FleetService, certificate: str = "") -> None:
        self.app, self.service = app, service
        self._tls = ssl.create_default_context()
        if certificate:
            self._tls.load_verify_locations(certificate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request here, and hands it on if that shows that it needs the leader."""
        term, _, client = Headers(scope=scope).get(_HEADER.decode(), "").partition(" ")
        if term:
            if hmac.compare_digest(term.encode(), self.service.pipeline.term.encode()):
                scope["client"], scope["state"]["identify"] = (client, 0), None
            await self.app(scope, receive, send)
            return
        needed: list[bool] = []
        received: list[Message] = []
        refusal: list[Message] = []
        has_begun = False

        async def record() -> Message:
            message = await receive()
            received.append(message)
            if sum(len(part.get("body", b"")) for part in received) > _MAX_REPLAYED_BYTES:
                received.clear()
                _needed.set([])  # too long to be sent again
            return message

        async def hold(message: Message) -> None:
            nonlocal has_begun
            if needed and not has_begun:
                refusal.append(message)
                return
            has_begun = True
            await send(message)

        _needed.set(needed)
        await self.app(scope, record, hold)
        if refusal and not await self._hand_on(scope, received, receive, send):
            for message in refusal:
                await send(message)

    async def _hand_on(
        self, scope: Scope, received: list[Message], receive: Receive, send: Send
    ) -> bool:
        """Sends the answer of the leader; returns False if it gives none."""
        leader = await asyncio.to_thread(self.service.state.leader)
        if leader is None:
            return False
        term, url = leader
        try:
            address = ServiceAddress.of(url)
            tls = self._tls if address.tls else None
            opening = asyncio.open_connection(address.host, address.port, ssl=tls)
            reader, writer = await asyncio.wait_for(opening, _CONNECT_S)
        except (InputError, OSError, asyncio.TimeoutError):
            return False
        connection = h11.Connection(h11.CLIENT)
        path, query = scope.get("raw_path") or scope["path"].encode(), scope["query_string"]
        client = (scope["client"] or ("",))[0]
        has_host = any(name == b"host" for name, _ in scope["headers"])  # HTTP/1.0 need not
        request = h11.Request(
            method=scope["method"],
            target=path + (b"?" + query if query else b""),
            headers=[
                *(pair for pair in scope["headers"] if pair[0] not in _NOT_SENT),
                *([] if has_host else [(b"host", address.host.encode())]),
                (b"connection", b"close"),
                (_HEADER, f"{term} {client}".encode()),
            ],
        )
        is_page = scope["method"] == "GET" and not scope["path"].startswith("/api/")
        wait_s: float | None = _PAGE_S if is_page else _ANSWER_S
        has_begun, gone = False, None
        try:
            writer.write(connection.send(request))
            more = True
            while more:
                message = received.pop(0) if received else await receive()
                if message["type"] != "http.request":  # the client has gone
                    return True
                writer.write(connection.send(h11.Data(message.get("body", b""))) or b"")
                await writer.drain()
                more = message.get("more_body", False)
            writer.write(connection.send(h11.EndOfMessage()) or b"")
            gone = asyncio.ensure_future(receive())
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    reading = asyncio.ensure_future(reader.read(_READ_BYTES))
                    either = {reading, gone}
                    await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                    if not reading.done():
                        reading.cancel()
                        return has_begun or gone.done()
                    connection.receive_data(reading.result())
                elif isinstance(event, h11.Response):
                    has_begun, wait_s = True, None
                    headers = [
                        pair
                        for pair in event.headers
                        if pair[0] not in {*_NOT_SENT, b"transfer-encoding"}
                    ]
                    start = {"status": event.status_code, "headers": headers}
                    await send({"type": "http.response.start", **start})
                elif isinstance(event, h11.Data):
                    body = {"body": bytes(event.data), "more_body": True}
                    await send({"type": "http.response.body", **body})
                elif isinstance(event, h11.EndOfMessage):
                    await send({"type": "http.response.body", "body": b""})
                    return True
        except (OSError, h11.ProtocolError):
            return has_begun  # the connection is closed, and who reads a stream comes again
        finally:
            if gone is not None:
                gone.cancel()
            writer.close()
