"""How the fleet is now, and what its tables say of one host, job or capture."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import polars as pl

from traceloom.agent.uplink.messages import HostProcess
from traceloom.collect.hosts import HostNow
from traceloom.collect.recent_answers import RecentAnswers
from traceloom.fleet.owners import periods
from traceloom.fleet.regressions import MIX, regressions
from traceloom.fleet.topline import METRICS, topline
from traceloom.store.schemas import day_of
from traceloom.store.tables import Tables

DeviceState = Literal["busy", "idle-allocated", "unallocated", "unreachable"]
"""As in the tables of usage, but of this moment."""

_TOPLINE_S = 60.0  # that it is kept: it is of a whole day
_SLOWER_DAYS = 30
_USAGE_S = 15.0  # the same of device time, which comes by minutes
_MOST_KEPT = 256  # answers of a sort
_MINUTE_NS, _HOUR_NS = 60 * 10**9, 3600 * 10**9
_MOST_ROWS = 10_000
BUSY = "gpu_busy_ratio"


class DeviceNow(msgspec.Struct, frozen=True, kw_only=True):
    """A device: what it is in, for which jobs, and what was measured last, by metric. `stale`: why it is silent."""

    host: str
    device: str
    index: str
    model: str
    state: DeviceState
    jobs: list[str]
    values: dict[str, float]
    stale: str = ""


class FleetFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of a capture, as in the table of that name. null: it saves no time, or is about no single rank."""

    capture: str
    slug: str
    saving_ns: int | None
    saving_fraction: float | None
    confidence: float | None
    rank: int | None


class CaptureFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A capture as it was analysed last; the table of captures says what each is. null: not known."""

    start_ns: int
    window_ns: int
    ranks: int
    hosts: int | None
    device_model: str | None
    torch: str | None
    code: str | None
    step_ns: int | None
    mfu: float | None
    roofline_fraction: float | None
    notices: list[str] | None
    version: str


class MeasuredBeside(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent of a host measured in the minutes of a capture: device time of its job by state, and energy.

    `energy_mj`: null where no device measures it.
    """

    host: str
    devices: int
    busy_ms: int
    idle_ms: int
    energy_mj: int | None
    flops_low: float | None


class UsageOfTime(msgspec.Struct, frozen=True, kw_only=True):
    """Device time of a minute or hour in a state, of a job or of none; `energy_mj`: null where nothing measures it."""

    time_ns: int
    job: str | None
    state: DeviceState
    device_ms: int
    energy_mj: int | None


class ToplineOfDay(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet got out of its devices in the last 24 hours; null: not measured. As `traceloom.fleet.topline`."""

    device_hours: float | None
    device_use: float | None
    flop_rate: float | None
    flop_rate_high: float | None
    compute_use: float | None
    power_w: float | None
    roofline_fraction: float | None
    mfu: float | None


class Watching:
    """Asks the tables what pages show; its methods block.

    Args:
        tables: Of the fleet.
        clock: Unix time in ns.
    """

    def __init__(self, tables: Tables, clock: Callable[[], int] = time.time_ns) -> None:
        self.tables, self.clock = tables, clock
        self._toplines = RecentAnswers[ToplineOfDay](1)
        self._usage = RecentAnswers[list[UsageOfTime]](_MOST_KEPT)
        self._findings = RecentAnswers[list[FleetFinding]](_MOST_KEPT)

    def topline(self) -> ToplineOfDay:
        """The topline of the last 24 hours, at most a minute old."""
        return self._toplines.get("", self._topline, seconds=_TOPLINE_S)

    def findings(self, captures: Sequence[str]) -> list[FleetFinding]:
        """Findings of captures, by name; what saves most first."""
        rows = self.tables.scan("findings").filter(pl.col("capture").is_in(captures)).select(
            "capture", "slug", "saving_ns", "saving_fraction", "confidence", "rank"
        )  # fmt: skip
        ranked = rows.sort("saving_fraction", descending=True, nulls_last=True).head(_MOST_ROWS).collect()
        return msgspec.convert(ranked.to_dicts(), list[FleetFinding])

    def facts(self, capture: str) -> CaptureFacts | None:
        """A capture as it was analysed last; None where it is not in the tables."""
        rows = self.tables.scan("captures").filter(pl.col("capture") == capture).collect().to_dicts()
        return msgspec.convert(rows[-1], CaptureFacts) if rows else None

    def beside(self, job: str, start_ns: int, end_ns: int) -> list[MeasuredBeside]:
        """What agents measured of a job in the minutes from `start_ns` to `end_ns`, by host."""
        rows = self.tables.scan("usage_minute", day_of(start_ns), day_of(end_ns)).filter(
            pl.col("job") == job, pl.col("time_ns") > start_ns - _MINUTE_NS, pl.col("time_ns") < end_ns
        )
        time_in = {
            state: pl.col("device_ms").filter(pl.col("state") == state).sum() for state in ("busy", "idle-allocated")
        }
        summed = rows.group_by("host").agg(
            devices=pl.col("device").n_unique(), busy_ms=time_in["busy"], idle_ms=time_in["idle-allocated"],
            energy_mj=_sum_if_any("energy_mj"), flops_low=_sum_if_any("flops_low"),
        )  # fmt: skip
        return msgspec.convert(summed.sort("host").collect().to_dicts(), list[MeasuredBeside])

    def usage(self, *, host: str = "", job: str = "", hours: float) -> list[UsageOfTime]:
        """Device time of a host or job, by minutes up to six hours, else by hours; 15 s old at most, the last first."""
        return self._usage.get((host, job, hours), lambda: self._used(host, job, hours), seconds=_USAGE_S)

    def findings_of_job(self, job: str, captures: Callable[[], Sequence[str]]) -> list[FleetFinding]:
        """Findings of the captures of a job, at most 15 s old."""
        return self._findings.get(job, lambda: self.findings(captures()), seconds=_USAGE_S)

    def _used(self, host: str, job: str, hours: float) -> list[UsageOfTime]:
        until = self.clock()
        since = until - int(hours * _HOUR_NS)
        rows = self.tables.scan("usage_minute" if hours <= 6 else "usage_hour", first=day_of(since))
        rows = rows.filter(pl.col("time_ns") >= since - (_MINUTE_NS if hours <= 6 else _HOUR_NS))
        for name, value in (("host", host), ("job", job)):
            if value:
                rows = rows.filter(pl.col(name) == value)
        summed = rows.group_by("time_ns", "job", "state").agg(pl.col("device_ms").sum(), _sum_if_any("energy_mj"))
        last = summed.sort("time_ns", "state", "job", descending=[True, False, False]).head(_MOST_ROWS).collect()
        return msgspec.convert(last.to_dicts(), list[UsageOfTime])

    def _topline(self) -> ToplineOfDay:
        since = self.clock() - 24 * _HOUR_NS
        first = day_of(since)
        usage = self.tables.scan("usage_hour", first=first).filter(pl.col("time_ns") > since - _HOUR_NS)
        captures = self.tables.scan("captures", first=first).filter(pl.col("start_ns") > since)
        [row] = topline(usage, periods(self.tables.scan("jobs"), self.tables.scan("owners")), captures).rows.to_dicts()
        names = ("device_hours", "flop_rate_high", *METRICS)
        return msgspec.convert({name: row[name] for name in names}, ToplineOfDay)


def slower_kernels(tables: Tables, now_ns: int) -> pl.DataFrame:
    """Kernels that became slower in the last 30 days, as of `Regressions`; where a mix changed, nothing did."""
    first = day_of(now_ns - _SLOWER_DAYS * 24 * _HOUR_NS)
    changes = regressions(*(tables.scan(name, first) for name in ("kernels", "captures", "devices"))).slower
    return changes.filter(~pl.col("cause").is_in(MIX))


def devices_now(now: Mapping[str, HostNow], fresh: Mapping[str, HostNow]) -> list[DeviceNow]:
    """All devices, by host; those of hosts that are silent are unreachable."""
    devices = []
    for host in sorted(now):
        jobs: dict[str, set[str]] = defaultdict(set)
        for process in now[host].heartbeat.processes:
            for uuid in process.devices:
                if process.job:
                    jobs[uuid].add(process.job)
        for device in now[host].heartbeat.devices:
            held = sorted(jobs[device.uuid])
            state: DeviceState
            if host not in fresh or device.stale:
                state = "unreachable"
            elif not held:
                state = "unallocated"
            else:
                state = "busy" if device.values.get(BUSY, 1.0) > 0 else "idle-allocated"
            devices.append(
                DeviceNow(
                    host=host, device=device.uuid, index=device.index, model=device.model, jobs=held,
                    state=state, values=device.values, stale=device.stale,
                )
            )  # fmt: skip
    return devices


def counted_states(devices: list[DeviceNow]) -> dict[DeviceState, int]:
    """State -> how many are in it."""
    return dict(Counter(device.state for device in devices))


def processes_of(now: Mapping[str, HostNow], job: str) -> list[tuple[str, HostProcess]]:
    """Host and process of all that belong to a job, by rank."""
    members = [(host, process) for host, of in now.items() for process in of.heartbeat.processes if process.job == job]
    return sorted(members, key=lambda member: (member[1].rank is None, member[1].rank or 0, member[0], member[1].pid))


def _sum_if_any(name: str) -> pl.Expr:
    return pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)
