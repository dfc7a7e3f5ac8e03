"""A service in this process that answers over HTTP, and whose tables hold made weeks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import uvicorn

from support.waiting import until
from traceloom.cli.upload import FleetClient
from traceloom.fleet.service.executors import create_engine
from traceloom.fleet.service.requests import HostRegistry
from traceloom.fleet.service.service import FleetService, ServiceLimits, build_fleet_app
from traceloom.fleet.store.captures import Role, ServiceState
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.schema import SCHEMAS, compute_usage_hours, compute_usage_minutes
from traceloom.fleet.store.tables import Tables
from traceloom.fleet.triggers import FleetTriggerEngine
from traceloom.testing.fleet_weeks import Weeks


def fill(tables: Tables, weeks: Weeks) -> None:
    """Put made weeks into tables, as the service does."""
    rows = {name: SCHEMAS[name].complete(frame) for name, frame in weeks.tables.items()}
    if weeks.observed.height:
        every = weeks.observed.select("host", "device", "device_model").unique()
        of_minutes = compute_usage_minutes(
            weeks.observed, every.join(weeks.observed.select("time_ns").unique(), how="cross")
        )
        rows |= {"usage_minute": of_minutes, "usage_hour": compute_usage_hours(of_minutes)}
    tables.commit("made", 1, rows)


class AnsweringService:
    """A service, its address, and who asks it."""

    def __init__(self, service: FleetService, url: str) -> None:
        self.service, self.url = service, url
        self.admin = self.client("admin")

    def client(self, role: Role, name: str = "") -> FleetClient:
        """Somebody with a role."""
        return FleetClient(self.url, self.token(role, name))

    def token(self, role: Role, name: str = "") -> str:
        """A new token of a role; called as the role, unless it has another name."""
        return self.service.state.add_token(name or role, role)


@contextmanager
def answering(
    folder: Path, weeks: Weeks | None = None, limits: ServiceLimits | None = None, state: str = ""
) -> Iterator[AnsweringService]:
    """A service that answers, with a SQLite of its own or another `state`; nothing is analysed."""
    records, tables = ServiceState(state or str(folder / "state.db")), Tables(str(folder / "store"))
    tables.create()
    if weeks is not None:
        fill(tables, weeks)
    engine = create_engine("processes", 1)
    service = FleetService(
        records,
        ObjectStore(str(folder / "store")),
        tables,
        engine,
        limits,
        lease_s=3600,
        commit_s=5,
        incoming_directory=folder / "from-hosts",
    )
    service.pipeline.lead()
    service.hosts = HostRegistry(records, folder / "from-hosts", service.pipeline.term)
    service.triggers = FleetTriggerEngine(service.hosts, tables)
    server = uvicorn.Server(uvicorn.Config(build_fleet_app(service), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, name="answering")
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield AnsweringService(service, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join()
        service.questions.close()
        engine.close()
        records.close()


DAYS = {"since": date(2026, 10, 5).isoformat(), "until": date(2026, 10, 28).isoformat()}
"""The made weeks, whose last jobs end after them."""
