"""Serves the demo: a running service whose synthetic hosts send heartbeats."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import polars as pl

from traceloom import __version__
from traceloom.agent.fleet_link.protocol import ClockOffset, Heartbeat, HostDevice, HostProcess
from traceloom.errors import OutputError, UsageError
from traceloom.fleet.demo.data import build_recipe, fill_demo
from traceloom.fleet.service.service import FleetService
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.schema import BUSY, MINUTE_MS
from traceloom.fleet.store.tables import Tables
from traceloom.system import process
from traceloom.system.files import is_address

MARKER_FILE = "traceloom-demo"
"""Marker file of a demo's store; its content states whether it was filled completely."""

_COMPLETE_MARKER = "full\n"


class DemoDirectory(NamedTuple):
    """The directory of a demo's store. `full`: it had been filled before."""

    path: Path
    full: bool

    def filled(self) -> None:
        (self.path / MARKER_FILE).write_text(_COMPLETE_MARKER, encoding="ascii")


@contextmanager
def open_demo_directory(store: str) -> Iterator[DemoDirectory]:
    """Yields the directory of the demo's store; a temporary one is removed at the end.

    Args:
        store: A directory that is empty, does not exist yet, or is a demo's own; "" for a temporary
            one.

    Raises:
        UsageError: `wrong-usage`: it is a URL.
        OutputError: `cannot-write`: it cannot be created, holds something else, or an incomplete
            demo.
    """
    if not store:
        with (
            tempfile.TemporaryDirectory(
                prefix="traceloom-demo-", ignore_cleanup_errors=True
            ) as temporary,
            process.clean_up_on_exit(lambda: shutil.rmtree(temporary, ignore_errors=True)),
        ):
            yield DemoDirectory(Path(temporary), full=False)
        return
    if is_address(store):
        raise UsageError("a demo is kept in a directory", slug="wrong-usage", where=store[:80])
    yield _prepare_directory(Path(store).absolute())


def _prepare_directory(path: Path) -> DemoDirectory:
    marker = path / MARKER_FILE
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if marker.is_file():
            if marker.read_text(encoding="ascii", errors="replace") == _COMPLETE_MARKER:
                return DemoDirectory(path, full=True)
            reason, hint = (
                "a demo was not filled to the end here",
                "remove the directory, and start again",
            )
        elif any(path.iterdir()):
            reason, hint = (
                "the directory holds other things; no demo is put among them",
                "name an empty one, or none",
            )
        else:
            marker.touch()
            return DemoDirectory(path, full=False)
    except OSError as error:
        reason = f"a demo cannot be kept there: {(error.strerror or str(error)).lower()}"
        raise OutputError(
            reason, slug="cannot-write", where=str(path), hint="name another directory"
        ) from error
    raise OutputError(reason, slug="cannot-write", where=str(path), hint=hint)


HEARTBEAT_INTERVAL_S = 10.0
_REGISTRY_POLL_S = 0.1
_DEVICE_MEMORY_BYTES = 80e9
_COLLECTOR_ERRORS: Mapping[str, dict[str, str]] = {
    "host04": {"dcgm": "there is no libdcgm.so.4 on this host"}
}
"""Host -> errors of its agent's collectors."""


def build_last_heartbeats(tables: Tables) -> dict[str, Heartbeat]:
    """Builds a heartbeat per host: its devices and their users in the last minute of the tables."""
    last = tables.scan("usage_minute").filter(
        pl.col("time_ns") == pl.col("time_ns").max(), pl.col("state") != "unreachable"
    )
    # The latest row per job: a demo served before also has rows from heartbeats.
    last_jobs = (
        tables.scan("jobs")
        .sort("valid_from_ns")
        .group_by("job")
        .agg(pl.col("scheduler", "user", "framework").last())
    )
    steps = tables.scan("captures").group_by("job").agg(pl.col("step_ns").last())
    return {
        str(host): _build_heartbeat(str(host), host_index, host_rows)
        for host_index, ((host,), host_rows) in enumerate(
            last.join(last_jobs, on="job", how="left")
            .join(steps, on="job", how="left")
            .sort("host", "device", "job")
            .collect()
            .group_by("host", maintain_order=True)
        )
    }


def _build_heartbeat(host: str, host_index: int, rows: pl.DataFrame) -> Heartbeat:
    devices: list[HostDevice] = []
    processes: list[HostProcess] = []
    for index, ((uuid,), device_rows) in enumerate(rows.group_by("device", maintain_order=True)):
        busy_ratio = sum(device_rows.filter(pl.col("state") == BUSY)["device_ms"]) / MINUTE_MS
        memory_used_ratio = 0.7 if device_rows["job"].drop_nulls().len() else 0.0
        values = {
            "gpu_busy_ratio": busy_ratio,
            "gpu_power_watts": 60 + 340 * busy_ratio,
            "gpu_memory_limit_bytes": _DEVICE_MEMORY_BYTES,
            "gpu_memory_used_bytes": memory_used_ratio * _DEVICE_MEMORY_BYTES,
        }
        model = device_rows["device_model"].drop_nulls().first()
        devices.append(
            HostDevice(uuid=str(uuid), index=str(index), model=str(model or ""), values=values)
        )
        jobs = device_rows.drop_nulls("job").unique("job", maintain_order=True)
        for job in jobs.iter_rows(named=True):
            pid = 1000 + 10 * host_index + len(processes)
            processes.append(
                HostProcess(
                    key=f"{pid}@{job['time_ns']}",
                    pid=pid,
                    uid=1000,
                    job=job["job"],
                    job_name=job["job"],
                    scheduler=job["scheduler"] or "",
                    rank=index,
                    world_size=rows["device"].n_unique(),
                    user=job["user"] or "",
                    framework=job["framework"] or "",
                    devices=(str(uuid),),
                    steps_per_second=None
                    if job["step_ns"] is None
                    else round(1e9 / job["step_ns"], 2),
                )
            )
    return Heartbeat(
        sent_ns=0,
        boot_id="demo",
        version=__version__,
        devices=devices,
        processes=processes,
        clock=ClockOffset(
            offset_ns=(host_index - 3) * 40_000,
            error_ns=90_000 + 10_000 * host_index,
            round_trips=8,
        ),
        collector_errors=_COLLECTOR_ERRORS.get(host, {}),
    )


async def send_heartbeats(service: FleetService, hosts: Mapping[str, Heartbeat]) -> None:
    """Sends heartbeats of hosts repeatedly while the service talks to hosts, until cancelled."""
    from msgspec.structs import replace

    while True:
        registry = service.hosts
        for host, heartbeat in () if registry is None else hosts.items():
            assert registry is not None
            await registry.heartbeat(host, replace(heartbeat, sent_ns=time.time_ns()))
        await asyncio.sleep(_REGISTRY_POLL_S if registry is None else HEARTBEAT_INTERVAL_S)


DEMO_TOKEN_NAME = "demo"  # noqa: S105  (its name)


class DemoFleet:
    """A synthetic fleet that is served.

    Attributes:
        directory: Directory of its store.
        token: Admin token; "" before the store is filled.
    """

    def __init__(self, directory: DemoDirectory) -> None:
        self.directory = directory
        self.token = ""

    @classmethod
    @contextmanager
    def open_store(cls, store: str, state: str) -> Iterator[DemoFleet]:
        """Yields a demo in a directory of `open_demo_directory`.

        Raises:
            UsageError: `wrong-usage`: a separate state was given.
        """
        if state:
            raise UsageError(
                "a demo keeps its state in its store", slug="wrong-usage", hint="leave --state out"
            )
        with open_demo_directory(store) as directory:
            yield cls(directory)

    def fill(
        self,
        state: ServiceState,
        objects: ObjectStore,
        tables: Tables,
        progress: Callable[[str], object],
    ) -> None:
        """Fills the store unless it is full, and creates a token.

        `progress` is called with a description of the next step. The token of this user's own
        service is left alone.
        """
        if not self.directory.full:
            now_ns = time.time_ns()
            fill_demo(state, objects, tables, build_recipe(now_ns), now_ns, progress=progress)
            self.directory.filled()
        state.revoke_token(DEMO_TOKEN_NAME)
        self.token = state.add_token(DEMO_TOKEN_NAME, "admin")

    @asynccontextmanager
    async def hosts(self, service: FleetService) -> AsyncIterator[None]:
        heartbeat_task = asyncio.create_task(
            send_heartbeats(
                service, await asyncio.to_thread(build_last_heartbeats, service.tables)
            ),
            name="hosts of the demo",
        )
        try:
            yield
        finally:
            heartbeat_task.cancel()
            await asyncio.gather(heartbeat_task, return_exceptions=True)
