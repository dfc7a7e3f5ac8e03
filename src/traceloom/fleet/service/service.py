"""Builds and runs the service; leadership; its own metrics.

What hosts say is known by the service that leads alone; the others do not have those series.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from traceloom.agent.metrics import Reading
from traceloom.errors import OutputError, TraceloomError
from traceloom.fleet import api as forms
from traceloom.fleet.handlers.now import Watching
from traceloom.fleet.questions.answering import QuestionDesk
from traceloom.fleet.service.committer import WriterProcess
from traceloom.fleet.service.pipeline import CapturePipeline
from traceloom.fleet.service.requests import HostDesk, Joining
from traceloom.fleet.service.tasks import Engine
from traceloom.fleet.service.webhooks import WebhookSender, WebhookTargets
from traceloom.fleet.store.captures import State
from traceloom.fleet.store.objects import Objects
from traceloom.fleet.store.tables import Tables
from traceloom.fleet.triggers import FleetTriggers
from traceloom.server.access import Connections
from traceloom.server.settings import Access, Tcp, host_and_port
from traceloom.system import files

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp

    from traceloom.server.access import Peer


_NS = 1e9


class FleetMetric(msgspec.Struct, frozen=True):
    """A metric of the service. `name` is whole, but for the `_total` of a counter."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


_DECLARED = (
    FleetMetric("traceloom_fleet_leads", "gauge", "1 on the service that talks to hosts and commits rows, else 0."),
    FleetMetric("traceloom_fleet_tasks", "gauge", "Analyses of captures by how far they are.", ("state",)),
    FleetMetric(
        "traceloom_fleet_requests", "counter", "Requests over HTTP by route and status code.", ("route", "code")
    ),
    FleetMetric(
        "traceloom_fleet_store_bytes", "gauge",
        "Space of the disk of the store, free and used. An object store does not say.", ("state",),
    ),
    FleetMetric("traceloom_fleet_usage_waiting", "gauge", "Minutes of hosts that are not in the tables yet."),
    FleetMetric("traceloom_fleet_memory_bytes", "gauge", "Resident memory of the service, without its workers."),
    FleetMetric(
        "traceloom_fleet_cpu_seconds", "counter", "Processor time of the service, without its workers that still run."
    ),
    FleetMetric("traceloom_fleet_hosts", "gauge", "Hosts by whether they were heard in the last minute.", ("state",)),
    FleetMetric("traceloom_fleet_host_up", "gauge", "1 where it was heard in the last minute, else 0.", ("host",)),
    FleetMetric(
        "traceloom_fleet_host_clock_offset_seconds", "gauge", "How far the service's clock is ahead of the host's.",
        ("host",),
    ),
    FleetMetric(
        "traceloom_fleet_devices", "gauge", "Devices of hosts that are there, by whether they can be read.", ("state",)
    ),
    FleetMetric("traceloom_fleet_jobs", "gauge", "Jobs that run on hosts that are there."),
    FleetMetric(
        "traceloom_fleet_traces", "gauge", "Requests for traces that are open, and the last ones that ended, by state.",
        ("state",),
    ),
    FleetMetric(
        "traceloom_fleet_usage_refused_rows", "counter",
        "Rows of usage that cannot be: of minutes that have not been, or of devices with more than 60 s in one.",
        ("host",),
    ),
)  # fmt: skip
FLEET_METRICS = {metric.name: metric for metric in _DECLARED}


class FleetSeries:
    """What Prometheus gets of a service, as its client library asks for it."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        """All series but those of requests over HTTP, which are counted where they are answered."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        families = {
            name: kinds[metric.kind](name, metric.help, labels=metric.labels) for name, metric in FLEET_METRICS.items()
        }
        for name, labels, value in self._readings():
            families[name].add_metric(labels, value)
        yield from (family for family in families.values() if family.samples)

    def _readings(self) -> Iterator[Reading]:
        service = self.service
        yield Reading("traceloom_fleet_leads", (), float(service.pipeline.leads))
        for of_task, tasks in service.state.counts().items():
            yield Reading("traceloom_fleet_tasks", (of_task,), tasks)
        yield Reading("traceloom_fleet_usage_waiting", (), service.state.waiting_minutes())
        if service.objects.directory is not None:
            space = shutil.disk_usage(service.objects.directory)
            yield Reading("traceloom_fleet_store_bytes", ("free",), space.free)
            yield Reading("traceloom_fleet_store_bytes", ("used",), space.used)
        used = resource.getrusage(resource.RUSAGE_SELF)
        yield Reading("traceloom_fleet_cpu_seconds", (), used.ru_utime + used.ru_stime)
        statm = Path("/proc/self/statm")
        if statm.exists():  # Linux alone says what is resident now
            resident = int(statm.read_text().split()[1]) * resource.getpagesize()
            yield Reading("traceloom_fleet_memory_bytes", (), resident)
        if (desk := service.hosts) is None:
            return
        # The loop goes on meanwhile: what it changes is copied first.
        fresh, members = desk.fresh(), sorted(desk.members)
        up = sum(host in fresh for host in members)
        yield Reading("traceloom_fleet_hosts", ("here",), up)
        yield Reading("traceloom_fleet_hosts", ("lost",), len(members) - up)
        devices, jobs = Counter({"well": 0, "stale": 0}), set()
        for host in members:
            yield Reading("traceloom_fleet_host_up", (host,), float(host in fresh))
            # Also where there is none: of a counter that begins at 1, Prometheus does not see the first.
            yield Reading("traceloom_fleet_usage_refused_rows", (host,), desk.refused_rows.get(host, 0))
        for host, now in fresh.items():
            beat = now.heartbeat
            if beat.clock is not None:
                yield Reading("traceloom_fleet_host_clock_offset_seconds", (host,), beat.clock.offset_ns / _NS)
            devices.update("stale" if device.stale else "well" for device in beat.devices)
            jobs |= {process.job for process in beat.processes if process.job}
        for state, count in devices.items():
            yield Reading("traceloom_fleet_devices", (state,), count)
        yield Reading("traceloom_fleet_jobs", (), len(jobs))
        for of_request, requests in Counter(request.state for request in list(desk.requests.values())).items():
            yield Reading("traceloom_fleet_traces", (of_request,), requests)


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
        from traceloom.server.access import Peer

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

    from traceloom.fleet.service.app import build_fleet_app
    from traceloom.server.listener import DeadlineProtocol, http_config, tcp_security

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
