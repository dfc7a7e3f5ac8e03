"""The demo as a running service with talking hosts."""

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
from traceloom.fleet.demo.data import fill, recipe
from traceloom.fleet.service.service import Service
from traceloom.fleet.store.captures import State
from traceloom.fleet.store.objects import Objects
from traceloom.fleet.store.schema import BUSY, MINUTE_MS
from traceloom.fleet.store.tables import Tables
from traceloom.system import process
from traceloom.system.files import is_address

MARK = "traceloom-demo"
"""The file that says that a store is a demo's, and whether it was filled to the end."""

_FULL = "full\n"


class DemoDirectory(NamedTuple):
    """The directory of a demo's store. `full`: it was filled before."""

    path: Path
    full: bool

    def filled(self) -> None:
        """It was filled to the end."""
        (self.path / MARK).write_text(_FULL, encoding="ascii")


@contextmanager
def demo_directory(store: str) -> Iterator[DemoDirectory]:
    """Where the demo keeps its store; a temporary directory is removed at the end.

    Args:
        store: A directory that is empty, not there yet, or a demo's own; "" for a temporary one.

    Raises:
        UsageError: `wrong-usage`: it is an address.
        OutputError: `cannot-write`: it cannot be made, holds something else, or a demo that was not filled to the end.
    """
    if not store:
        with (
            tempfile.TemporaryDirectory(prefix="traceloom-demo-", ignore_cleanup_errors=True) as temporary,
            process.clean_up_on_exit(lambda: shutil.rmtree(temporary, ignore_errors=True)),
        ):
            yield DemoDirectory(Path(temporary), full=False)
        return
    if is_address(store):
        raise UsageError("a demo is kept in a directory", slug="wrong-usage", where=store[:80])
    yield _prepared(Path(store).absolute())


def _prepared(path: Path) -> DemoDirectory:
    mark = path / MARK
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mark.is_file():
            if mark.read_text(encoding="ascii", errors="replace") == _FULL:
                return DemoDirectory(path, full=True)
            reason, hint = "a demo was not filled to the end here", "remove the directory, and start again"
        elif any(path.iterdir()):
            reason, hint = "the directory holds other things; no demo is put among them", "name an empty one, or none"
        else:
            mark.touch()
            return DemoDirectory(path, full=False)
    except OSError as error:
        reason = f"a demo cannot be kept there: {(error.strerror or str(error)).lower()}"
        raise OutputError(reason, slug="cannot-write", where=str(path), hint="name another directory") from error
    raise OutputError(reason, slug="cannot-write", where=str(path), hint=hint)


EVERY_S = 10.0
_LOOK_S = 0.1
_MEMORY_BYTES = 80e9
_TROUBLE: Mapping[str, dict[str, str]] = {"host04": {"dcgm": "there is no libdcgm.so.4 on this host"}}
"""Host -> what its agent cannot do."""


def hosts_at_the_end(tables: Tables) -> dict[str, Heartbeat]:
    """Host -> what it says: its devices as they were in the last minute that the tables have, and who used them."""
    usage = tables.scan("usage_minute")
    last = usage.filter(pl.col("time_ns") == pl.col("time_ns").max(), pl.col("state") != "unreachable")
    # what a job was last: a demo that was served before has its hosts' statements beside its own
    about = tables.scan("jobs").sort("valid_from_ns").group_by("job").agg(
        pl.col("scheduler", "user", "framework").last()
    )  # fmt: skip
    steps = tables.scan("captures").group_by("job").agg(pl.col("step_ns").last())
    rows = last.join(about, on="job", how="left").join(steps, on="job", how="left").sort("host", "device", "job")
    return {
        str(host): _heartbeat(str(host), at, of_host)
        for at, ((host,), of_host) in enumerate(rows.collect().group_by("host", maintain_order=True))
    }


def _heartbeat(host: str, at: int, rows: pl.DataFrame) -> Heartbeat:
    devices: list[HostDevice] = []
    processes: list[HostProcess] = []
    for index, ((uuid,), of_device) in enumerate(rows.group_by("device", maintain_order=True)):
        busy = sum(of_device.filter(pl.col("state") == BUSY)["device_ms"]) / MINUTE_MS
        used = 0.7 if of_device["job"].drop_nulls().len() else 0.0
        values = {
            "gpu_busy_ratio": busy, "gpu_power_watts": 60 + 340 * busy, "gpu_memory_limit_bytes": _MEMORY_BYTES,
            "gpu_memory_used_bytes": used * _MEMORY_BYTES,
        }  # fmt: skip
        model = of_device["device_model"].drop_nulls().first()
        devices.append(HostDevice(uuid=str(uuid), index=str(index), model=str(model or ""), values=values))
        jobs = of_device.drop_nulls("job").unique("job", maintain_order=True)
        for job in jobs.iter_rows(named=True):
            pid = 1000 + 10 * at + len(processes)
            processes.append(
                HostProcess(
                    key=f"{pid}@{job['time_ns']}", pid=pid, uid=1000, job=job["job"], job_name=job["job"],
                    scheduler=job["scheduler"] or "", rank=index, world_size=rows["device"].n_unique(),
                    user=job["user"] or "", framework=job["framework"] or "", devices=(str(uuid),),
                    steps_per_second=None if job["step_ns"] is None else round(1e9 / job["step_ns"], 2),
                )
            )  # fmt: skip
    return Heartbeat(
        sent_ns=0, boot_id="demo", version=__version__, devices=devices, processes=processes,
        clock=ClockOffset(offset_ns=(at - 3) * 40_000, error_ns=90_000 + 10_000 * at, round_trips=8),
        trouble=_TROUBLE.get(host, {}),
    )  # fmt: skip


async def speak(service: Service, hosts: Mapping[str, Heartbeat]) -> None:
    """Have hosts say how they are, over and over, while the service talks to hosts; until it is cancelled."""
    from msgspec.structs import replace

    while True:
        desk = service.hosts
        for host, heartbeat in () if desk is None else hosts.items():
            assert desk is not None
            await desk.heartbeat(host, replace(heartbeat, sent_ns=time.time_ns()))
        await asyncio.sleep(_LOOK_S if desk is None else EVERY_S)


TOKEN = "demo"  # noqa: S105  (its name)


class Demo:
    """A made fleet that is served.

    Attributes:
        directory: Where its store is.
        token: What opens all of it; "" before it is filled.
    """

    def __init__(self, directory: DemoDirectory) -> None:
        self.directory = directory
        self.token = ""

    @classmethod
    @contextmanager
    def in_directory(cls, store: str, state: str) -> Iterator[Demo]:
        """Have a directory for it, as `demo_directory`.

        Raises:
            UsageError: `wrong-usage`: a state of its own is asked for, too.
        """
        if state:
            raise UsageError("a demo keeps its state in its store", slug="wrong-usage", hint="leave --state out")
        with demo_directory(store) as directory:
            yield cls(directory)

    def fill(self, state: State, objects: Objects, tables: Tables, progress: Callable[[str], object]) -> None:
        """Fill its store, unless it is full, and make a token; progress is called with what is done next.

        The token of this user's own service is left alone.
        """
        if not self.directory.full:
            now_ns = time.time_ns()
            fill(state, objects, tables, recipe(now_ns), now_ns, progress=progress)
            self.directory.filled()
        state.revoke_token(TOKEN)
        self.token = state.add_token(TOKEN, "admin")

    @asynccontextmanager
    async def hosts(self, service: Service) -> AsyncIterator[None]:
        """Let its hosts say how they are, while the service runs."""
        speaking = asyncio.create_task(
            speak(service, await asyncio.to_thread(hosts_at_the_end, service.tables)), name="hosts of the demo"
        )
        try:
            yield
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
