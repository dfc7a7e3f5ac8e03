"""Builds and runs the service: its ASGI application with authentication and rate limits, leadership, metrics, health checks and the listener.

Only the leading service talks to hosts.

The others lack the metrics that come from hosts.
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
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Endpoint

from traceloom.agent.metrics import Reading
from traceloom.errors import OutputError, TraceloomError
from traceloom.fleet import api as forms
from traceloom.fleet.handlers.admin import RULE_ROUTES, TRIGGER_ROUTES, WEBHOOK_ROUTES
from traceloom.fleet.handlers.captures import (
    COMPACTION_ROUTES,
    COMPARE_ROUTES,
    FLEET_ROUTES,
    FleetRequestContext,
    FleetRoute,
    get_bearer,
    has_role,
    name_client,
)
from traceloom.fleet.handlers.hosts import (
    AGENTS_PATH,
    HOST_ROUTES,
    REQUEST_ROUTES,
    STATEMENT_ROUTES,
)
from traceloom.fleet.handlers.now import LIVE_ROUTES, WATCH_ROUTES, LiveQueries
from traceloom.fleet.questions.answering import QueryService
from traceloom.fleet.questions.catalogue import QUESTION_ROUTES
from traceloom.fleet.service.committer import WriterProcess
from traceloom.fleet.service.pipeline import CapturePipeline
from traceloom.fleet.service.requests import HostRegistry, RequestCompletion
from traceloom.fleet.service.tasks import Engine
from traceloom.fleet.service.webhooks import WebhookAddressPolicy, WebhookDispatcher
from traceloom.fleet.store.captures import Role, ServiceState, TokenRecord
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.schema import SCHEMAS
from traceloom.fleet.store.tables import Tables
from traceloom.fleet.triggers import FleetTriggerEngine
from traceloom.server.access import ConnectionLimiter, RateLimiter, RefusalCounter, find_tcp_peer
from traceloom.server.problem import (
    DOCUMENT_PATH,
    HttpError,
    build_error_response,
    build_exception_handlers,
    other_api_version,
)
from traceloom.server.routing import build_openapi_document
from traceloom.server.settings import Access, Tcp
from traceloom.system import files
from traceloom.system.text import hide_paths

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from traceloom.server.access import Caller


ROUTES = (
    *FLEET_ROUTES,
    *COMPARE_ROUTES,
    *REQUEST_ROUTES,
    *WATCH_ROUTES,
    *HOST_ROUTES,
    *STATEMENT_ROUTES,
    *TRIGGER_ROUTES,
    *WEBHOOK_ROUTES,
    *QUESTION_ROUTES,
    *RULE_ROUTES,
    *LIVE_ROUTES,
    *COMPACTION_ROUTES,
)
_PUBLIC_PATHS = {"/healthz", "/readyz"}
ANONYMOUS_TOKEN = TokenRecord(name="", role="viewer", created_ns=0, expires_ns=0, revoked_ns=0)
RETRY_HINT = "come again later, or less often"


class FleetAuthenticationMiddleware:
    """Middleware that identifies the client by its token and limits its request rate."""

    def __init__(self, app: ASGIApp, service: FleetService) -> None:
        self.app, self.service = app, service
        self.rates = RateLimiter(service.limits.requests_per_second, hint=RETRY_HINT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request and counts it."""
        code = 500

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            scope["state"]["token"] = await self._token(scope, Headers(scope=scope))
            await self.app(scope, receive, counted)
        except HttpError as refusal:
            await build_error_response(refusal)(scope, receive, counted)
        except TraceloomError as error:
            await build_error_response(convert_to_unavailable(error))(scope, receive, counted)
        finally:
            self.service.requests.labels(scope["state"].get("route", "other"), code).inc()

    async def _token(self, scope: Scope, headers: Headers) -> TokenRecord:
        if scope["path"] in _PUBLIC_PATHS:  # who watches it is not limited by what others do
            return ANONYMOUS_TOKEN
        address = name_client(scope)
        if version_error := other_api_version(scope["path"], "the service"):
            self.rates.take(address)
            raise version_error
        # Hosts show their own credential, which their routes check.
        if scope["path"].startswith(AGENTS_PATH):
            host = scope["path"].removeprefix(AGENTS_PATH).partition("/")[0]
            if registry := self.service.hosts:  # else the service that leads counts it
                is_host = registry.is_host(host, get_bearer(headers))
                self.rates.take(f"host {host}" if is_host else address)
            return ANONYMOUS_TOKEN
        secret = get_bearer(headers)
        token = await asyncio.to_thread(self.service.state.token, secret) if secret else None
        if token is None:
            self.rates.take(address)
            raise HttpError(
                401,
                "this token is none of ours, has expired or was revoked"
                if secret
                else "a token is needed",
                slug="unknown-token",
                hint="commands take it from --token-file or TRACELOOM_TOKEN, programs send "
                "`Authorization: Bearer TOKEN`; `traceloom fleet token add` makes one",
            )
        self.rates.take(f"token {token.name}")
        return token


def convert_to_unavailable(error: TraceloomError) -> HttpError:
    """Returns the 503 response for an error of the state or a store, without details for the
    client.
    """
    return HttpError(
        503,
        hide_paths(error.message),
        slug=error.slug,
        hint="its administrator sees more",
        retry_s=5,
    )


async def call_route(route: FleetRoute, context: FleetRequestContext) -> msgspec.Struct | Response:
    """Returns a route's response if the client may call it.

    The audit log names the action as in `context.request.state.what`.

    Raises:
        HttpError: `not-allowed` for a token with another role, `no-such-route` for names that no
            database can store.
    """
    if any("\0" in str(name) for name in context.request.path_params.values()):
        raise HttpError(404, "nothing has a name with a NUL", slug="no-such-route")
    await check_role(context, route.role)
    try:
        answer = route.answers(context)
        return await answer if isinstance(answer, Awaitable) else answer
    except HttpError:
        raise
    except TraceloomError as error:
        raise convert_to_unavailable(error) from error


async def check_role(context: FleetRequestContext, role: Role | None) -> None:
    """Refuses a client whose token lacks a role, and records that in the audit log.

    Raises:
        HttpError: `not-allowed`.
    """
    if role is not None and not has_role(context.token, role):
        what = context.request.state.what
        route = getattr(context.request.state, "route", what)
        if times := context.service.refusals.count(context.token.name, route):
            details = {"times": str(times)} if times > 1 else {}
            note = context.service.state.note
            await asyncio.to_thread(note, context.token.name, what, "not-allowed", details)
        raise HttpError(
            403,
            f"this needs the role {role}, and the token has {context.token.role}",
            slug="not-allowed",
        )


def build_fleet_app(service: FleetService) -> ASGIApp:
    def endpoint(route: FleetRoute) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            request.state.route, request.state.what = (
                route.path,
                f"{route.method} {request.scope['path']}",
            )
            answer = await call_route(route, FleetRequestContext(service, request))
            return (
                answer
                if isinstance(answer, Response)
                else Response(msgspec.json.encode(answer), media_type="application/json")
            )

        return respond

    described = msgspec.json.encode(
        build_openapi_document(
            ROUTES, "Traceloom fleet", "Captures of whole jobs, analysed by themselves."
        )
    )

    async def openapi(_request: Request) -> Response:
        return Response(described, media_type="application/json")

    paths = [DOCUMENT_PATH, *(route.path for route in ROUTES)]
    app = Starlette(
        routes=[
            Endpoint(DOCUMENT_PATH, openapi),
            *(Endpoint(route.path, endpoint(route), methods=[route.method]) for route in ROUTES),
        ],
        exception_handlers=build_exception_handlers(paths, "the service"),
    )
    app.router.redirect_slashes = False  # API clients do not expect redirects
    return FleetAuthenticationMiddleware(app, service)


_NS_PER_S = 1e9


class FleetMetric(msgspec.Struct, frozen=True):
    """A metric of the service. `name` is complete except for the `_total` of a counter."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


_DECLARED_METRICS = (
    FleetMetric(
        "traceloom_fleet_leads",
        "gauge",
        "1 on the service that talks to hosts and commits rows, else 0.",
    ),
    FleetMetric(
        "traceloom_fleet_tasks", "gauge", "Analyses of captures by how far they are.", ("state",)
    ),
    FleetMetric(
        "traceloom_fleet_requests",
        "counter",
        "Requests over HTTP by route and status code.",
        ("route", "code"),
    ),
    FleetMetric(
        "traceloom_fleet_store_bytes",
        "gauge",
        "Space of the disk of the store, free and used. An object store does not say.",
        ("state",),
    ),
    FleetMetric(
        "traceloom_fleet_usage_waiting", "gauge", "Minutes of hosts that are not in the tables yet."
    ),
    FleetMetric(
        "traceloom_fleet_commit_delay_seconds",
        "gauge",
        "Time since the service that leads last put rows into the tables, or had none to put.",
    ),
    FleetMetric(
        "traceloom_fleet_memory_bytes",
        "gauge",
        "Resident memory of the service, without its workers.",
    ),
    FleetMetric(
        "traceloom_fleet_cpu_seconds",
        "counter",
        "Processor time of the service, without its workers that still run.",
    ),
    FleetMetric(
        "traceloom_fleet_hosts",
        "gauge",
        "Hosts by whether they were heard in the last minute.",
        ("state",),
    ),
    FleetMetric(
        "traceloom_fleet_host_up",
        "gauge",
        "1 where it was heard in the last minute, else 0.",
        ("host",),
    ),
    FleetMetric(
        "traceloom_fleet_host_clock_offset_seconds",
        "gauge",
        "How far the service's clock is ahead of the host's.",
        ("host",),
    ),
    FleetMetric(
        "traceloom_fleet_devices",
        "gauge",
        "Devices of hosts that are there, by whether they can be read.",
        ("state",),
    ),
    FleetMetric("traceloom_fleet_jobs", "gauge", "Jobs that run on hosts that are there."),
    FleetMetric(
        "traceloom_fleet_traces",
        "gauge",
        "Requests for traces that are open, and the last ones that ended, by state.",
        ("state",),
    ),
    FleetMetric(
        "traceloom_fleet_usage_refused_rows",
        "counter",
        "Rows of hosts that cannot be: beyond the limits, of minutes that have not been or are long past, or of devices with more than 60 s in one.",
        ("host",),
    ),
)
FLEET_METRICS = {metric.name: metric for metric in _DECLARED_METRICS}


class FleetMetricsCollector:
    """A collector for the Prometheus client library."""

    def __init__(self, service: FleetService) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics except those of HTTP requests, which the server counts."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        families = {
            name: kinds[metric.kind](name, metric.help, labels=metric.labels)
            for name, metric in FLEET_METRICS.items()
        }
        for name, labels, value in self._read_metrics():
            families[name].add_metric(labels, value)
        yield from (family for family in families.values() if family.samples)

    def _read_metrics(self) -> Iterator[Reading]:
        service = self.service
        yield Reading("traceloom_fleet_leads", (), float(service.pipeline.leads))
        yield Reading("traceloom_fleet_commit_delay_seconds", (), service.pipeline.commit_delay_s)
        for task_state, tasks in service.state.counts().items():
            yield Reading("traceloom_fleet_tasks", (task_state,), tasks)
        yield Reading("traceloom_fleet_usage_waiting", (), service.state.waiting_minutes())
        if service.objects.directory is not None:
            space = shutil.disk_usage(service.objects.directory)
            yield Reading("traceloom_fleet_store_bytes", ("free",), space.free)
            yield Reading("traceloom_fleet_store_bytes", ("used",), space.used)
        used = resource.getrusage(resource.RUSAGE_SELF)
        yield Reading("traceloom_fleet_cpu_seconds", (), used.ru_utime + used.ru_stime)
        statm = Path("/proc/self/statm")
        if statm.exists():  # only Linux states the resident memory
            resident = int(statm.read_text().split()[1]) * resource.getpagesize()
            yield Reading("traceloom_fleet_memory_bytes", (), resident)
        if (registry := service.hosts) is None:
            return
        # The event loop may change these concurrently, so they are copied first.
        hosts_up, members = registry.fresh(), sorted(registry.members)
        up = sum(host in hosts_up for host in members)
        yield Reading("traceloom_fleet_hosts", ("here",), up)
        yield Reading("traceloom_fleet_hosts", ("lost",), len(members) - up)
        devices, jobs = Counter({"well": 0, "stale": 0}), set()
        for host in members:
            yield Reading("traceloom_fleet_host_up", (host,), float(host in hosts_up))
            # Also where it is 0: Prometheus misses the increase of a counter that starts at 1.
            yield Reading(
                "traceloom_fleet_usage_refused_rows", (host,), registry.refused_rows.get(host, 0)
            )
        for host, host_state in hosts_up.items():
            heartbeat = host_state.heartbeat
            if heartbeat.clock is not None:
                yield Reading(
                    "traceloom_fleet_host_clock_offset_seconds",
                    (host,),
                    heartbeat.clock.offset_ns / _NS_PER_S,
                )
            devices.update("stale" if device.stale else "well" for device in heartbeat.devices)
            jobs |= {process.job for process in heartbeat.processes if process.job}
        for state, count in devices.items():
            yield Reading("traceloom_fleet_devices", (state,), count)
        yield Reading("traceloom_fleet_jobs", (), len(jobs))
        for request_state, requests in Counter(
            request.state for request in list(registry.requests.values())
        ).items():
            yield Reading("traceloom_fleet_traces", (request_state,), requests)


DEFAULT_ADDRESS = "127.0.0.1:9466"
_POLL_INTERVAL_S = 0.2
_LATE_COMMIT_S = 300.0

_log = logging.getLogger(__name__)


class ServiceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for clients.

    `seconds`: for a request, or each megabyte of it, and to read the response.
    """

    files: int = 20_000
    file_bytes: int = 16 << 30
    capture_bytes: int = 256 << 30
    requests_per_second: float = 200.0
    connections: int = 8192  # one address may use half of them: a thousand agents have three each
    seconds: float = 30.0


class FleetService:
    """The service behind the routes. Its methods block.

    Args:
        state: Holds tasks, tokens and the audit log.
        objects: Holds files.
        tables: Holds rows.
        engine: Runs analyses.
        limits: Limits for clients.
        lease_s, commit_s: As of `CapturePipeline`.
        incoming_directory: Directory for files from hosts until they are merged.
        webhook_policy: Addresses webhooks may use; None: public ones.
        writer: As of `CapturePipeline`.
    """

    def __init__(
        self,
        state: ServiceState,
        objects: ObjectStore,
        tables: Tables,
        engine: Engine,
        limits: ServiceLimits | None = None,
        *,
        lease_s: float,
        commit_s: float,
        incoming_directory: Path,
        webhook_policy: WebhookAddressPolicy | None = None,
        writer: WriterProcess | None = None,
    ) -> None:
        from prometheus_client import CollectorRegistry, Counter

        self.state: ServiceState = state
        self.objects, self.tables = objects, tables
        self.limits = limits or ServiceLimits()
        self.pipeline = CapturePipeline(
            state, objects, tables, engine, lease_s=lease_s, commit_s=commit_s, writer=writer
        )
        self.questions = QueryService(tables, state)
        self.live_queries = LiveQueries(tables)
        self.refusals = RefusalCounter()
        self.render_lock = asyncio.Lock()  # one report at a time
        # Stores are slow with many files, and threads are few.
        self.upload_slots = asyncio.Semaphore(2)
        self.hosts: HostRegistry | None = None  # set while this service leads
        self.incoming = incoming_directory
        self._request_completion: RequestCompletion | None = None
        self.webhook_policy = webhook_policy or WebhookAddressPolicy()
        self.triggers: FleetTriggerEngine | None = None  # set together with `hosts`
        self._webhook_task: asyncio.Task[None] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        answered = FLEET_METRICS["traceloom_fleet_requests"]
        self.requests = Counter(
            answered.name, answered.help, answered.labels, registry=self._registry
        )
        self._registry.register(FleetMetricsCollector(self))

    async def run_host_registry(self) -> None:
        """Talks to hosts while this service leads, until cancelled."""
        try:
            while True:
                term = self.pipeline.term if self.pipeline.leads else ""
                if self.hosts is not None and self.hosts.term != term:
                    await self._stop_host_registry()
                if term and self.hosts is None:
                    try:
                        self.incoming.mkdir(parents=True, exist_ok=True)
                        registry = HostRegistry(self.state, self.incoming, term)
                        self._request_completion = RequestCompletion(registry, self.pipeline)
                        registry.on_stitching = self._request_completion.take
                        await registry.start()
                        self.hosts = registry
                        self.triggers = FleetTriggerEngine(registry, self.tables)
                        await self.triggers.start()
                        sender = WebhookDispatcher(self.state, self.webhook_policy)
                        self._webhook_task = asyncio.create_task(
                            sender.run_forever(), name="webhooks"
                        )
                    except (TraceloomError, OSError) as error:  # of the state, or of the directory
                        _log.warning("hosts cannot be talked to: %s", error)
                        await self._stop_host_registry()
                await asyncio.sleep(_POLL_INTERVAL_S)
        finally:
            await self._stop_host_registry()

    async def _stop_host_registry(self) -> None:
        registry, self.hosts = self.hosts, None
        completion, self._request_completion = self._request_completion, None
        webhook_task, self._webhook_task = self._webhook_task, None
        trigger_engine, self.triggers = self.triggers, None
        if trigger_engine is not None:
            await trigger_engine.close()
        if webhook_task is not None:
            await _cancel_task(webhook_task)
        if registry is not None:
            await registry.close()
        if completion is not None:
            await completion.close()

    def check(self) -> forms.FleetCheckResponse:
        counts = self.state.counts()
        checks = [
            forms.FleetCheck(name="state", works=True, text=self.state.where),
            self._run_check("files", self.objects.url, self._check_object_store),
            *(
                self._check_tables()
                or [forms.FleetCheck(name="tables", works=True, text=self.tables.url)]
            ),
            self._run_check("engine", "", self.pipeline.engine.check),
        ]
        if (delay_s := self.pipeline.commit_delay_s) > _LATE_COMMIT_S:
            text = f"no rows could be committed for {delay_s / 60:.0f} min: {self.pipeline.commit_error}"
            checks.append(forms.FleetCheck(name="commits", works=False, text=text))
        for task in self.state.quarantined(10):
            text = f"{task.capture} by {task.version}: {task.error}"
            help_text = "once its cause is gone: traceloom fleet backfill --again"
            checks.append(
                forms.FleetCheck(name="quarantine", works=False, text=text, help=help_text)
            )
        return forms.FleetCheckResponse(checks=checks, tasks=counts)

    def _check_tables(self) -> list[forms.FleetCheck]:
        checks = [
            self._run_check(f"table {name}", "table", partial(self.tables.version, name))
            for name in SCHEMAS
        ]
        return [check for check in checks if not check.works]

    def _run_check(
        self, name: str, location: str, action: Callable[[], object]
    ) -> forms.FleetCheck:
        try:
            answer = action()
        except TraceloomError as error:
            return forms.FleetCheck(name=name, works=False, text=str(error), help=error.hint)
        return forms.FleetCheck(name=name, works=True, text=location or str(answer))

    def _check_object_store(self) -> None:
        name = f"checks/{secrets.token_hex(8)}"
        self.objects.put(name, b"x")
        self.objects.delete(name)

    def render_metrics(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class FleetListener:
    """The listener of the service.

    The client is identified by a token in each request; the connection only gives its address.
    """

    hint = "`traceloom serve` waits 30 s for a request, or each megabyte of it"

    def __init__(self, limits: ServiceLimits) -> None:
        self.connections = ConnectionLimiter(Access(connections=limits.connections))
        self.seconds = limits.seconds

    def peer(self, transport: asyncio.BaseTransport) -> Caller:
        return find_tcp_peer(transport.get_extra_info("socket"))

    def identify(
        self, _transport: asyncio.BaseTransport, peer: Caller
    ) -> Callable[[Headers], Caller]:
        """Returns the peer for every request: the application authenticates by token."""
        return lambda _headers: peer


async def serve(
    service: FleetService,
    tcp: Tcp,
    on_ready: Callable[[str], None],
    app: ASGIApp | None = None,
    *,
    url: str = "",
) -> None:
    """Serves and analyses until a signal.

    Args:
        service: The service.
        tcp: Address to listen on.
        on_ready: Called with the address once everything listens.
        app: ASGI application; None: the routes alone.
        url: At which other services of the state reach this one; "": where it listens.

    Raises:
        InputError: `tcp-without-tls`, `tls-unusable`, `wrong-config`.
        OutputError: `socket-unusable`: the address is not available.
    """
    from traceloom.fleet.service.forwarding import LeaderForwarding
    from traceloom.server.listener import (
        build_server_state,
        build_tls_context,
        build_uvicorn_config,
        listen,
    )

    tls, _ = build_tls_context(tcp, asks=True)
    forwarding = LeaderForwarding(app or build_fleet_app(service), service, tcp.certificate)
    config = build_uvicorn_config(forwarding, service.limits.seconds)
    connections, listener = build_server_state(tls), FleetListener(service.limits)
    loop, stop_event = asyncio.get_running_loop(), asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop_event.set)
    async with AsyncExitStack() as stack:
        try:
            server = await listen(listener, config, connections, tls, tcp.address)
        except OSError as error:
            raise OutputError(
                f"the service cannot listen there: {(error.strerror or str(error)).lower()}",
                slug="socket-unusable",
                where=tcp.address,
                hint="another may run there; --address takes another one",
            ) from error
        stack.callback(server.close)
        bound_host, bound_port = server.sockets[0].getsockname()[:2]
        scheme, at_any = "https" if tls else "http", bound_host in {"0.0.0.0", "::"}  # noqa: S104
        bound_url = (
            f"{scheme}://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"
        )
        service.pipeline.url = url or (
            f"{scheme}://{socket.gethostname()}:{bound_port}" if at_any else bound_url
        )
        service.pipeline.start()
        stack.push_async_callback(asyncio.to_thread, service.pipeline.stop)
        stack.callback(service.questions.close)
        host_task = asyncio.create_task(service.run_host_registry(), name="hosts")
        stack.push_async_callback(_cancel_task, host_task)
        on_ready(bound_url)
        await stop_event.wait()
        for connection in list(connections.connections):
            connection.shutdown()
        if connections.tasks:
            await asyncio.wait(connections.tasks, timeout=1.0)


async def _cancel_task(task: asyncio.Task[None]) -> None:
    """Cancels a task, and waits until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def ensure_local_token(state: ServiceState, path: Path) -> None:
    """Ensures an admin token in a file that only this user can read, for commands on this host.

    Raises:
        OutputError: `cannot-write`.
    """
    with suppress(FileNotFoundError):
        secret = path.read_text(encoding="ascii", errors="replace").strip()
        if secret and state.token(secret):
            return
    # Services of other hosts, and others of this one, may share the state.
    name = f"local{path.name.removeprefix('fleet-token')}@{socket.gethostname()}"
    state.revoke_token(name)
    secret = state.add_token(name, "admin")
    files.write(path, lambda file: file.write(secret.encode() + b"\n"), force=True, private=True)
