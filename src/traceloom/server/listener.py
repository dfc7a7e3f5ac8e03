"""HTTP listeners on a unix socket and, if configured, on TCP: uvicorn's protocol in the agent's own
loop.

uvicorn's server is not used: it installs signal handlers and wakes up ten times a second. Its
protocol does not limit how long a client may take, so each connection has a deadline here: the
client has `access.seconds` to send a whole request, and to read a whole response.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import ipaddress
import math
import os
import socket
import ssl
import stat
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h11
import msgspec
from uvicorn.config import Config as UvicornConfig
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from traceloom.errors import InputError, OutputError
from traceloom.server.access import (
    Caller,
    ConnectionLimiter,
    authenticate_tcp_caller,
    find_tcp_peer,
    identify_unix_caller,
)
from traceloom.server.problem import HttpError, Problem, ProblemResponse
from traceloom.server.settings import Access, Tcp, host_and_port
from traceloom.system.files import find_foreign_part

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp

_REASON_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 503: b"Service Unavailable"}
_HEADER_BYTES = 16_384
_BACKLOG = 256
_CHUNK_BYTES = 1 << 20


class Listener(Protocol):
    """State shared by the connections of one listener.

    Attributes:
        connections: Limiter shared by all listeners.
        seconds: Time for a client to send a request, or each megabyte of it, and to read the
            response.
        hint: The setting that changes it.
    """

    connections: ConnectionLimiter
    seconds: float
    hint: str

    def peer(self, transport: asyncio.BaseTransport) -> Caller:
        """Returns the caller as known from the connection alone."""

    def identify(
        self, transport: asyncio.BaseTransport, peer: Caller
    ) -> Callable[[Headers], object]:
        """Returns a function that identifies the caller from the headers of a request."""


class AgentListener:
    """A listener of the agent. `loopback` is None for the unix socket."""

    hint = "`access.seconds` of agent.toml"

    def __init__(
        self, tcp: Tcp, access: Access, connections: ConnectionLimiter, *, loopback: bool | None
    ) -> None:
        self.tcp, self.access, self.connections, self.loopback = tcp, access, connections, loopback
        self.seconds = access.seconds

    def peer(self, transport: asyncio.BaseTransport) -> Caller:
        """Returns the caller as known from the connection alone: over TCP only its address, until a
        request shows a token.
        """
        if self.loopback is None:
            return identify_unix_caller(transport.get_extra_info("socket"), self.access.group)
        return find_tcp_peer(transport.get_extra_info("socket"))

    def identify(
        self, transport: asyncio.BaseTransport, peer: Caller
    ) -> Callable[[Headers], Caller]:
        if self.loopback is None:
            return lambda _headers: peer
        certificate = transport.get_extra_info("peercert") or {}
        names = dict(pair for part in certificate.get("subject", ()) for pair in part)
        certified = names.get("commonName", "unnamed") if certificate else ""
        return functools.partial(self._tcp, peer.name, certified)

    def _tcp(self, name: str, certified: str, headers: Headers) -> Caller:
        peer = authenticate_tcp_caller(
            name,
            headers.get("authorization", ""),
            self.tcp.tokens,
            loopback=bool(self.loopback),
            certified=certified,
        )
        # DNS rebinding: a web page in a browser on this host could point its own name here and read
        # what needs no token.
        if peer.sees == "host" and not is_local_name(headers.get("host", "")):
            raise HttpError(
                403, "that is not its name", slug="wrong-host", hint="use 127.0.0.1 or localhost"
            )
        return peer


def is_local_name(host: str) -> bool:
    """Whether a `Host` header is an IP address or `localhost`."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost"
    return True


class TimeoutHttpProtocol(H11Protocol):
    """uvicorn's HTTP connection with the caller in the state of each request, a deadline, and
    errors as JSON.
    """

    def __init__(self, door: Listener, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.door = door
        self.peer: Caller | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.received = 0  # bytes since the deadline was reset

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and start the deadline of its first request."""
        super().connection_made(transport)
        try:
            peer = self.door.peer(transport)
            self.door.connections.enter(peer)
        except HttpError as refusal:
            self.refuse(refusal)
        except OSError:  # it has gone already
            transport.abort()
        else:
            self.peer = peer
            self.app_state = {"identify": self.door.identify(transport, peer)}
        self.wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.go_on()
        if self.peer is not None:
            self.door.connections.leave(self.peer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request; the deadline ends when the request is complete."""
        super().data_received(data)
        self.received += len(data)
        if not self.is_clients_turn():
            self.go_on()
        elif self.received >= _CHUNK_BYTES:  # each chunk of a large request has its own deadline
            self.received = 0
            self.go_on()
            self.wait()

    def on_response_complete(self) -> None:
        """Start the deadline for the client to read the response and to send the next request."""
        super().on_response_complete()
        if not self.flow.write_paused:
            self.go_on()
        if self.is_clients_turn() or self.transport.is_closing():
            self.wait()

    def pause_writing(self) -> None:
        """Start the deadline for a client that reads more slowly than the response is written."""
        super().pause_writing()
        self.go_on()
        self.wait()

    def resume_writing(self) -> None:
        """Cancel the deadline: the client has read most of the response."""
        super().resume_writing()
        if not self.is_clients_turn():
            self.go_on()

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP with a JSON error, as every other error."""
        self.refuse(HttpError(400, msg.rstrip("."), slug="wrong-request"))

    def is_clients_turn(self) -> bool:
        """Whether the server waits for the client: for a request, the rest of it, or for the client
        to read a response.
        """
        return self.flow.write_paused or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def wait(self) -> None:
        """Start the client's deadline if it does not run yet."""
        if self.deadline is None:
            self.deadline = self.loop.call_later(self.door.seconds, self.give_up)

    def go_on(self) -> None:
        """Cancel the client's deadline."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def give_up(self) -> None:
        """Handle an expired deadline: a client that sends slowly gets an error, one that does not
        read is disconnected.
        """
        began = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if (
            self.transport.is_closing()
            or self.transport.get_write_buffer_size()
            or not self.is_clients_turn()
        ):
            self.transport.abort()
        elif began:
            self.refuse(
                HttpError(408, "the request came too slowly", slug="too-slow", hint=self.door.hint)
            )
        else:
            self.transport.close()

    def refuse(self, refusal: HttpError) -> None:
        """Send an error without the application, and close the connection."""
        body = msgspec.json.encode(
            ProblemResponse(
                error=Problem(slug=refusal.slug, message=refusal.message, hint=refusal.hint)
            )
        )
        retry = b"Retry-After: %d\r\n" % refusal.retry_s if refusal.retry_s else b""
        self.transport.write(
            b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%sConnection: close\r\n\r\n%s"
            % (refusal.status, _REASON_PHRASES[refusal.status], len(body), retry, body)
        )
        self.transport.close()


class CountedTls(SSLProtocol):
    """A TLS connection that is counted before its handshake: memory for it is taken at once, and a
    client need not send anything.
    """

    def __init__(
        self, sockets: ConnectionLimiter, app: TimeoutHttpProtocol, tls: ssl.SSLContext
    ) -> None:
        super().__init__(
            app.loop,
            app,
            tls,
            None,  # type: ignore[arg-type]  # nobody waits for it
            server_side=True,
            ssl_handshake_timeout=math.ceil(app.door.seconds),
        )
        self.sockets, self.door = sockets, app.door
        self.peer: Caller | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, unless there are too many connections."""
        try:
            peer = self.door.peer(transport)
            self.sockets.enter(peer)
        except (HttpError, OSError):
            transport.close()
        else:
            self.peer = peer
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.peer is not None:
            self.sockets.leave(self.peer)
        super().connection_lost(exc)


async def listen(
    door: Listener, config: UvicornConfig, state: ServerState, tls: ssl.SSLContext | None, at: str
) -> asyncio.Server:
    """Listen on an address (`HOST:PORT`).

    Raises:
        OSError: It is not available.
    """
    host, port = host_and_port(at)
    sockets = ConnectionLimiter(Access(connections=door.connections.max_connections))

    def connect() -> asyncio.BaseProtocol:
        app = TimeoutHttpProtocol(door, config=config, server_state=state, app_state={})
        return app if tls is None else CountedTls(sockets, app, tls)

    return await asyncio.get_running_loop().create_server(connect, host, port, backlog=_BACKLOG)


class OpenListeners:
    """The open listeners of an agent."""

    def __init__(self, state: ServerState, socket_path: Path, lock: int) -> None:
        self.state, self.socket_path, self.lock = state, socket_path, lock
        self.servers: list[asyncio.Server] = []
        self.tcp_address: tuple[str, int] | None = None

    async def close(self) -> None:
        """Accept no more connections, wait up to a second for responses in progress, and remove the
        socket.
        """
        for server in self.servers:
            server.close()
        with contextlib.suppress(FileNotFoundError):
            self.socket_path.unlink()
        for connection in list(self.state.connections):
            connection.shutdown()
        if self.state.tasks:
            await asyncio.wait(self.state.tasks, timeout=1.0)
        for connection in list(self.state.connections):
            connection.transport.abort()
        os.close(self.lock)


async def serve(app: ASGIApp, tcp: Tcp, access: Access, path: Path) -> OpenListeners:
    """Listen on the unix socket, and on TCP if configured, until `close`.

    Raises:
        InputError: `tcp-without-tls`, `tcp-without-tokens`, `tls-unusable`, `wrong-config`.
        OutputError: `agent-runs`: another agent has the socket; `socket-unusable`.
    """
    tls, loopback = build_tls_context(tcp) if tcp.address else (None, True)
    state = build_server_state(tls)
    connections = ConnectionLimiter(access)
    uvicorn_config = build_uvicorn_config(app, access.seconds)
    listener, lock = bind_unix_socket(path)
    listeners = OpenListeners(state, path, lock)
    loop = asyncio.get_running_loop()
    unix_listener = AgentListener(tcp, access, connections, loopback=None)
    listeners.servers.append(
        await loop.create_unix_server(
            lambda: TimeoutHttpProtocol(
                unix_listener, config=uvicorn_config, server_state=state, app_state={}
            ),
            sock=listener,
            backlog=_BACKLOG,
        )
    )
    if tcp.address:
        tcp_listener = AgentListener(tcp, access, connections, loopback=loopback)
        try:
            server = await listen(tcp_listener, uvicorn_config, state, tls, tcp.address)
        except OSError as error:
            await listeners.close()
            raise _make_socket_error(tcp.address, error) from error
        listeners.servers.append(server)
        listeners.tcp_address = server.sockets[0].getsockname()[:2]
    return listeners


def build_server_state(tls: ssl.SSLContext | None) -> ServerState:
    """Returns the state of a listener; over TLS it tells browsers to come by TLS alone from then
    on.
    """
    state = ServerState()
    if tls is not None:
        state.default_headers = [(b"strict-transport-security", b"max-age=31536000")]
    return state


def build_uvicorn_config(app: ASGIApp, seconds: float) -> UvicornConfig:
    """Returns the configuration of uvicorn's protocol: no signals, no logs, no proxy headers; for
    `seconds` see `Listener`.
    """
    return UvicornConfig(
        app,
        http="h11",
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(seconds) + 1,
        h11_max_incomplete_event_size=_HEADER_BYTES,
    )


def build_tls_context(tcp: Tcp, *, asks: bool = False) -> tuple[ssl.SSLContext | None, bool]:
    """Returns the TLS context of the TCP listener, if it has a certificate, and whether it listens
    on loopback only.

    Args:
        tcp: Its configuration.
        asks: Whether the application requires a token of everybody, so that none need be
            configured.

    Raises:
        InputError: Remote clients could connect without TLS (`tcp-without-tls`) or without
            identification (`tcp-without-tokens`); `tls-unusable`: the certificate or key cannot be
            used.
    """
    host, port = host_and_port(tcp.address)
    try:
        addresses = {
            str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        }
    except OSError as error:
        raise InputError(
            f"`{host}` is no address of this host", slug="wrong-config", where="tcp.address"
        ) from error
    loopback = all(
        ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses
    )
    wrong = [
        token.name
        for token in tcp.tokens
        if len(token.sha256) != 64 or token.may not in ("read", "all")
    ]
    if wrong:
        raise InputError(
            f"the token `{wrong[0]}` needs the 64 hexadecimal digits of its SHA-256, and `may` of `read` or `all`",
            slug="wrong-config",
            where="tcp.tokens",
        )
    if not tcp.certificate:
        if not loopback:
            raise InputError(
                "beyond this host nothing listens without TLS",
                slug="tcp-without-tls",
                where=tcp.address,
                hint="listen on 127.0.0.1, or set "
                + ("--certificate and --key" if asks else "`tcp.certificate` and `tcp.key`"),
            )
        return None, loopback
    if not (loopback or tcp.tokens or tcp.client_ca or asks):
        raise InputError(
            "beyond this host the agent answers only who says who it is",
            slug="tcp-without-tokens",
            where=tcp.address,
            hint="set `tcp.tokens` or `tcp.client_ca`",
        )
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tcp.client_ca or None)
        context.load_cert_chain(tcp.certificate, tcp.key or None)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"TLS cannot be set up: {(error.strerror or str(error)).lower()}",
            slug="tls-unusable",
            where=", ".join(filter(None, (tcp.certificate, tcp.key, tcp.client_ca))),
            hint="they must be readable PEM files that belong together",
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tcp.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context, loopback


def bind_unix_socket(path: Path) -> tuple[socket.socket, int]:
    """Returns a bound unix socket that everybody may connect to, and the lock that shows that its
    agent runs.

    The socket of a dead agent is replaced: the kernel has released its lock.

    Raises:
        OutputError: `agent-runs`: another agent has it; `socket-unusable`: it cannot be created
            there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if reason := find_foreign_part(path.parent):
            raise PermissionError(errno.EPERM, reason)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        listener.close()
        raise _make_socket_error(path, error) from error
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        listener.close()
        os.close(lock)
        raise OutputError(
            "an agent runs there",
            slug="agent-runs",
            where=str(path),
            hint="`traceloom agent status` shows it; another needs a `paths.root` of its own in agent.toml",
        ) from error
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise FileExistsError(errno.EEXIST, "something else is there")
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen()  # early clients are queued until the agent is ready
    except OSError as error:
        listener.close()
        os.close(lock)
        raise _make_socket_error(path, error) from error
    return listener, lock


def _make_socket_error(path: Path | str, error: OSError) -> OutputError:
    return OutputError(
        f"the agent cannot listen there: {(error.strerror or str(error)).lower()}",
        slug="socket-unusable",
        where=str(path),
        hint="`paths.socket` or `tcp.address` of agent.toml",
    )
