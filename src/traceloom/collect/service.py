"""The service: one process that takes captures over HTTP, has them analysed and answers."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from traceloom import files
from traceloom.agent.config import Access, Tcp, host_and_port
from traceloom.agent.http.limits import Connections
from traceloom.collect import answers as forms
from traceloom.collect.engine import Engine
from traceloom.collect.hosts import HostDesk
from traceloom.collect.joining import Joining
from traceloom.collect.metrics import FLEET_METRICS, FleetSeries
from traceloom.collect.pipeline import CapturePipeline
from traceloom.collect.questions.desk import QuestionDesk
from traceloom.collect.table_writer import WriterProcess
from traceloom.collect.telling import WebhookSender, WebhookTargets
from traceloom.collect.triggers import FleetTriggers
from traceloom.collect.watching import Watching
from traceloom.errors import OutputError, TraceloomError
from traceloom.store.objects import Objects
from traceloom.store.state import State
from traceloom.store.tables import Tables

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp

    from traceloom.agent.http.peers import Peer

ADDRESS = "127.0.0.1:9466"
_LOOK_S = 0.2

_log = logging.getLogger(__name__)


class ServiceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may cost. `seconds`: for a request, or each megabyte of it, and to take the answer."""

    files: int = 20_000
    file_bytes: int = 16 << 30
    capture_bytes: int = 256 << 30
    requests_per_second: float = 200.0
    connections: int = 8192  # one address may have half of them: a thousand agents have three each
    seconds: float = 30.0


class Service:
    """What the routes ask. Its methods block.

    Args:
        state: Where tasks, tokens and the audit are.
        objects: Where files are.
        tables: Where rows are.
        engine: What analyses.
        limits: What clients may cost.
        lease_s, commit_s: As of `Pipeline`.
        incoming: Directory for what hosts send, until it is joined.
        webhook_targets: Where webhooks may lead; None: to public addresses.
        writer: As of `CapturePipeline`.
    """

    def __init__(
        self, state: State, objects: Objects, tables: Tables, engine: Engine, limits: ServiceLimits | None = None,
        *, lease_s: float, commit_s: float, incoming: Path, webhook_targets: WebhookTargets | None = None,
        writer: WriterProcess | None = None,
    ) -> None:  # fmt: skip
        from prometheus_client import CollectorRegistry, Counter

        self.state: State = state
        self.objects, self.tables = objects, tables
        self.limits = limits or ServiceLimits()
        self.pipeline = CapturePipeline(
            state, objects, tables, engine, lease_s=lease_s, commit_s=commit_s, writer=writer
        )  # fmt: skip
        self.questions = QuestionDesk(tables, state)
        self.watching = Watching(tables)
        self.rendering = asyncio.Lock()  # one report at a time
        self.hosts: HostDesk | None = None  # while this service leads
        self.incoming = incoming
        self._joining: Joining | None = None
        self.webhook_targets = webhook_targets or WebhookTargets()
        self.triggers: FleetTriggers | None = None  # beside `hosts`
        self._telling: asyncio.Task[None] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        answered = FLEET_METRICS["traceloom_fleet_requests"]
        self.requests = Counter(answered.name, answered.help, answered.labels, registry=self._registry)
        self._registry.register(FleetSeries(self))

    async def talk_to_hosts(self) -> None:
        """Talk to hosts while this service leads, until it is cancelled."""
        try:
            while True:
                term = self.pipeline.term if self.pipeline.leads else ""
                if self.hosts is not None and self.hosts.term != term:
                    await self._leave_hosts()
                if term and self.hosts is None:
                    try:
                        self.incoming.mkdir(parents=True, exist_ok=True)
                        desk = HostDesk(self.state, self.incoming, term)
                        self._joining = Joining(desk, self.pipeline)
                        desk.on_stitching = self._joining.take
                        await desk.start()
                        self.hosts = desk
                        self.triggers = FleetTriggers(desk, self.tables)
                        await self.triggers.start()
                        sender = WebhookSender(self.state, self.webhook_targets)
                        self._telling = asyncio.create_task(sender.send_for_ever(), name="webhooks")
                    except (TraceloomError, OSError) as error:  # of the state, or of the directory
                        _log.warning("hosts cannot be talked to: %s", error)
                        await self._leave_hosts()
                await asyncio.sleep(_LOOK_S)
        finally:
            await self._leave_hosts()

    async def _leave_hosts(self) -> None:
        desk, self.hosts = self.hosts, None
        joining, self._joining = self._joining, None
        telling, self._telling = self._telling, None
        triggers, self.triggers = self.triggers, None
        if triggers is not None:
            await triggers.close()
        if telling is not None:
            await _ended(telling)
        if desk is not None:
            await desk.close()
        if joining is not None:
            await joining.close()

    def check(self) -> forms.FleetCheckAnswer:
        """Try what the service stands on."""
        counts = self.state.counts()
        checks = [
            forms.FleetCheck(name="state", works=True, text=self.state.where),
            self._tried("files", self.objects.url, self._write),
            self._tried("tables", self.tables.url, lambda: self.tables.scan("captures")),
            self._tried("engine", "", self.pipeline.engine.check),
        ]
        for task in self.state.quarantined(10):
            text = f"{task.capture} by {task.version}: {task.error}"
            help_text = "once its cause is gone: traceloom fleet backfill --again"
            checks.append(forms.FleetCheck(name="quarantine", works=False, text=text, help=help_text))
        return forms.FleetCheckAnswer(checks=checks, tasks=counts)

    def _tried(self, name: str, where: str, attempt: Callable[[], object]) -> forms.FleetCheck:
        try:
            answer = attempt()
        except TraceloomError as error:
            return forms.FleetCheck(name=name, works=False, text=str(error), help=error.hint)
        return forms.FleetCheck(name=name, works=True, text=where or str(answer))

    def _write(self) -> None:
        name = f"checks/{secrets.token_hex(8)}"
        self.objects.put(name, b"x")
        self.objects.delete(name)

    def metrics(self) -> bytes:
        """All series, as text for Prometheus."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class ServiceDoor:
    """The listener of the service: a token in each request says who asks, the connection only where from."""

    hint = "`traceloom serve` waits 30 s for a request, or each megabyte of it"

    def __init__(self, limits: ServiceLimits) -> None:
        self.connections = Connections(Access(connections=limits.connections))
        self.seconds = limits.seconds

    def peer(self, transport: asyncio.BaseTransport) -> Peer:
        """Who connects, as far as an address tells."""
        from traceloom.agent.http.peers import Peer

        return Peer(name=f"tcp {transport.get_extra_info('peername')[0]}", sees="host")

    def identify(self, _transport: asyncio.BaseTransport, peer: Peer) -> Callable[[Headers], Peer]:
        """The same for each request: the application asks for its token."""
        return lambda _headers: peer


async def serve(service: Service, tcp: Tcp, ready: Callable[[str], None], app: ASGIApp | None = None) -> None:
    """Answer and analyse until a signal; `ready` is called with the address when everything listens.

    Args:
        service: What answers.
        tcp: Where.
        ready: Told the address.
        app: What answers over HTTP; None: the routes alone.

    Raises:
        InputError: `tcp-without-tls`, `tls-unusable`, `wrong-config`.
        OutputError: `socket-unusable`: the address cannot be had.
    """
    from uvicorn.server import ServerState

    from traceloom.agent.http.server import DeadlineProtocol, http_config, tcp_security
    from traceloom.collect.app import build_fleet_app

    tls, _ = tcp_security(tcp, asks=True)
    host, port = host_and_port(tcp.address)
    config = http_config(app or build_fleet_app(service), service.limits.seconds)
    connections, door = ServerState(), ServiceDoor(service.limits)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with AsyncExitStack() as stack:
        try:
            server = await loop.create_server(
                lambda: DeadlineProtocol(door, config=config, server_state=connections, app_state={}),
                host, port, ssl=tls, backlog=256, ssl_handshake_timeout=service.limits.seconds if tls else None,
            )  # fmt: skip
        except OSError as error:
            raise OutputError(
                f"the service cannot listen there: {(error.strerror or str(error)).lower()}", slug="socket-unusable",
                where=tcp.address, hint="another may run there; --address takes another one",
            ) from error  # fmt: skip
        stack.callback(server.close)
        service.pipeline.start()
        stack.push_async_callback(asyncio.to_thread, service.pipeline.stop)
        stack.callback(service.questions.close)
        talking = asyncio.create_task(service.talk_to_hosts(), name="hosts")
        stack.push_async_callback(_ended, talking)
        at, bound = server.sockets[0].getsockname()[:2]
        ready(f"{'https' if tls else 'http'}://{f'[{at}]' if ':' in at else at}:{bound}")
        await ended.wait()
        for connection in list(connections.connections):
            connection.shutdown()
        if connections.tasks:
            await asyncio.wait(connections.tasks, timeout=1.0)


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def keep_local_token(state: State, path: Path) -> None:
    """Have a token of an admin in a file that only this user reads, so that commands of this host need no other.

    Raises:
        OutputError: `cannot-write`.
    """
    with suppress(FileNotFoundError):
        secret = path.read_text(encoding="ascii", errors="replace").strip()
        if secret and state.token(secret):
            return
    name = f"local@{socket.gethostname()}"  # services on other hosts may share the state, and have one each
    state.revoke_token(name)
    secret = state.add_token(name, "admin")
    files.write(path, lambda file: file.write(secret.encode() + b"\n"), force=True, private=True)
