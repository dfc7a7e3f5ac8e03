"""The hosts of the made fleet: they say how they are as agents do, by the jobs that ran when its weeks ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from traceloom import __version__
from traceloom.agent.uplink.messages import ClockOffset, Heartbeat, HostDevice, HostProcess
from traceloom.store.schemas import BUSY, MINUTE_MS
from traceloom.store.tables import Tables

if TYPE_CHECKING:
    from traceloom.collect.service import Service

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
