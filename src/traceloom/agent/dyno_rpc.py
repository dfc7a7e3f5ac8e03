"""dynolog's RPC, for scripts that speak it: TCP, a length of four bytes and JSON each way, one request per connection.

It knows no authentication; so it is off unless an address is configured. Unlike dynolog's own, a client that sends
nothing holds up nobody. Frames and answers: dynolog's `rpc/SimpleJsonServer` and its client `dyno`, version 0.6.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import struct
from pathlib import Path
from typing import Any, Protocol

import msgspec

from traceloom.agent.requests.model import Wanted
from traceloom.errors import OutputError, TraceloomError, UsageError

VERSION = "0.6.0"  # of the dynolog whose answers these are
_LENGTH = struct.Struct("=i")
_MOST_BYTES = 1 << 20
_CLIENTS = 64
_TRUE = frozenset({"y", "yes", "t", "true", "1"})  # as libkineto reads them


class DynoTrace(msgspec.Struct, frozen=True):
    """`setKinetOnDemandRequest`, as `dyno gputrace` sends it."""

    config: str
    pids: list[int]
    job_id: int = 0
    process_limit: int = 1000


class DynoTraced(msgspec.Struct, frozen=True, rename="camel"):
    """The answer to it, in dynolog's order."""

    processes_matched: list[int] = []
    event_profilers_triggered: list[int] = []
    activity_profilers_triggered: list[int] = []
    event_profilers_busy: int = 0
    activity_profilers_busy: int = 0


class DynoAgent(Protocol):
    """Who answers: has the hardware counters, and takes requests for traces."""

    async def pause(self, seconds: float) -> list[str]:
        """Let go of them for so long; the back ends that did."""

    async def resume(self) -> bool:
        """Take them again; whether any had been let go."""

    async def trace_as_dynolog(self, request: DynoTrace, uid: int) -> DynoTraced:
        """Trace the processes that match and that a user may trace."""


class DynoRpc:
    """The server.

    Args:
        agent: Who answers.
        host: Where to listen.
        port: Likewise; 0 takes any.
        limit_s: How long a client may take for its request.
    """

    def __init__(self, agent: DynoAgent, host: str, port: int, limit_s: float = 10.0) -> None:
        self._agent = agent
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
            user = tcp_user(writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
            answer = await asyncio.wait_for(self._answer(reader, user), self._limit_s)
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

    async def _answer(self, reader: asyncio.StreamReader, user: int | None) -> dict[str, Any] | None:
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
                return {"status": bool(await self._agent.pause(float(seconds)))}
            case "dcgmProfResume":
                return {"status": await self._agent.resume()}
            case "setKinetOnDemandRequest":
                try:
                    trace = msgspec.convert(request, DynoTrace)
                except msgspec.ValidationError:
                    return {"status": "failed"}
                if user is None:
                    return {"status": "failed with exception = it is not known whose request this is"}
                try:
                    return dict(msgspec.to_builtins(await self._agent.trace_as_dynolog(trace, user)))
                except TraceloomError as error:
                    return {"status": f"failed with exception = {error}"}
        return None


def wanted_of(config: str, pids: tuple[int, ...], now_ns: int) -> Wanted:
    """What the text of a configuration asks for, of these processes.

    Only what is understood is taken over, as typed values: where the file goes, and whatever else libkineto would
    obey, is not the client's to say.

    Raises:
        UsageError: `unsafe-value`: a line is no `KEY=VALUE`, or a value is not what its key takes.
    """
    values = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in config.splitlines())):
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or "=" in value:
            raise UsageError(f"`{line}` is no KEY=VALUE", slug="unsafe-value")
        values[key] = value
    try:
        steps = int(values.get("ACTIVITIES_ITERATIONS", "-1"))
        by_steps = steps > 0 and int(values.get("PROFILE_START_ITERATION_ROUNDUP", "0") or 0) >= 0
        seconds = int(values.get("ACTIVITIES_DURATION_MSECS", "500")) / 1000
        at_ns = int(values.get("PROFILE_START_TIME", "0")) * 1_000_000
    except ValueError as error:
        raise UsageError(f"a number of the configuration is none: {error}", slug="unsafe-value") from error
    chosen = {
        "shapes": "PROFILE_REPORT_INPUT_SHAPES", "stacks": "PROFILE_WITH_STACK", "flops": "PROFILE_WITH_FLOPS",
        "modules": "PROFILE_WITH_MODULES",
    }  # fmt: skip
    flags = {name: values.get(key, "").lower() in _TRUE for name, key in chosen.items()}
    try:
        return msgspec.convert(
            {
                "pids": pids, "steps": steps if by_steps else None, "duration_s": None if by_steps else seconds,
                "at_ns": at_ns if at_ns > now_ns else 0, **flags,
            },
            Wanted,
        )  # fmt: skip
    except msgspec.ValidationError as error:
        raise UsageError(f"the configuration asks for what cannot be: {error}", slug="unsafe-value") from error


def tcp_user(peer: tuple[Any, ...], own: tuple[Any, ...], proc: str = "/proc") -> int | None:
    """Whose a connection from this very host is, as the kernel says; None for any other.

    Args:
        peer: Address and port of the other end.
        own: Of this end.
        proc: Where the kernel's `/proc` is.
    """
    try:
        ends = [(ipaddress.ip_address(str(end[0]).partition("%")[0]), int(end[1])) for end in (peer, own)]
    except ValueError:
        return None
    # As the kernel prints them: words of four bytes in the order of this host.
    words = (struct.unpack(f"={len(address.packed) // 4}I", address.packed) for address, _ in ends)
    texts = ("".join(f"{word:08X}" for word in each) for each in words)
    pair = " ".join(f"{text}:{port:04X}" for text, (_, port) in zip(texts, ends, strict=True))
    with contextlib.suppress(OSError):
        table = Path(proc, "net", "tcp" if ends[0][0].version == 4 else "tcp6").read_text(encoding="ascii")
        _, match, fields = table.partition(f" {pair} ")  # a host may have many thousand connections
        if match:
            return int(fields.split()[4])
    return None
