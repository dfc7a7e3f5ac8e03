"""dynolog's RPC, for scripts that speak it: TCP, a length of four bytes and JSON each way, one request per connection.

It knows no authentication; so it is off unless an address is configured. Unlike dynolog's own, a client that sends
nothing holds up nobody. Frames and answers: dynolog's `rpc/SimpleJsonServer` and its client `dyno`, version 0.6.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from typing import Any, Protocol

from traceloom.errors import OutputError

LOG = logging.getLogger("traceloom.agent")
VERSION = "0.6.0"  # of the dynolog whose answers these are
_LENGTH = struct.Struct("=i")
_MOST_BYTES = 1 << 20
_CLIENTS = 64


class Counters(Protocol):
    """Who has the hardware counters."""

    async def pause(self, seconds: float) -> list[str]:
        """Let go of them for so long; the back ends that did."""

    async def resume(self) -> bool:
        """Take them again; whether any had been let go."""


class DynoRpc:
    """The server.

    Args:
        counters: The agent.
        host: Where to listen.
        port: Likewise; 0 takes any.
        limit_s: How long a client may take for its request.
    """

    def __init__(self, counters: Counters, host: str, port: int, limit_s: float = 10.0) -> None:
        self._counters = counters
        self._address = host, port
        self._limit_s = limit_s
        self._clients = 0
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen.

        Raises:
            OutputError: `socket-unusable`.
        """
        try:
            self._server = await asyncio.start_server(self._serve, *self._address)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            text = f"dynolog's RPC cannot listen: {reason}"
            raise OutputError(text, slug="socket-unusable", where=str(self._address[1])) from error

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._clients >= _CLIENTS:
            writer.transport.abort()
            return
        self._clients += 1
        try:
            answer = await asyncio.wait_for(self._answer(reader), self._limit_s)
            if answer is not None:
                body = json.dumps(answer, separators=(",", ":")).encode()
                writer.write(_LENGTH.pack(len(body)) + body)
                await asyncio.wait_for(writer.drain(), self._limit_s)
        except (asyncio.TimeoutError, TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # it went, or took too long: dynolog's clients expect no answer then
        finally:
            self._clients -= 1
            writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """The answer to one request; None for what dynolog answers by closing the connection."""
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if not 0 < length <= _MOST_BYTES:
            return None
        try:
            request = json.loads(await reader.readexactly(length))
        except (ValueError, RecursionError):
            return None
        if not isinstance(request, dict):
            return None
        match request.get("fn"):
            case "getStatus":
                return {"status": 1}
            case "getVersion":
                return {"version": VERSION}
            case "dcgmProfPause":
                seconds = request.get("duration_s", 300)
                if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 86_400:
                    return {"status": False}
                return {"status": bool(await self._counters.pause(float(seconds)))}
            case "dcgmProfResume":
                return {"status": await self._counters.resume()}
            case "setKinetOnDemandRequest":
                LOG.warning("dynolog's RPC: this agent takes no traces on demand")
                return {"status": "failed"}
        return None
