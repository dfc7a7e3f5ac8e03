"""Generated weeks of a fleet: jobs with their owners, captures and device use, and the ground
truth.

The rows have the columns of the fleet's tables (docs/reference/fleet-tables.md). Everything planted
is known apart from the rows: kernels that change on a day and why, device time of every job to the
millisecond, hosts that are slow or unreachable. Only durations are random, from job to job and from
capture to capture.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from itertools import pairwise

import numpy as np
import polars as pl

_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
_DEVICES = 4  # per host; a job uses all of them
_LOST_HOST = (
    1,
    5 * _HOUR_MS + 17 * _MINUTE_MS + 13_250,
    6 * _HOUR_MS + 2 * _MINUTE_MS + 40_125,
)  # host, from, until
_SHARED_DEVICE = (
    0,
    3,
)  # host and device on which a second process runs in the first hour of each job
_WATTS = {"busy": 400, "idle-allocated": 120, "unallocated": 60}
_FLOPS_PER_MS = 300_000_000_000

_KERNELS = (
    (
        "embedding_bag_forward_{}",
        "embedding",
        "memory",
        "aten::embedding_bag",
        "[[{0}, 128], [4096]]",
        90_000,
        8,
    ),
    (
        "sm90_gemm_bf16_{}",
        "gemm",
        "compute",
        "aten::mm",
        "[[16384, {0}], [{0}, 16384]]",
        400_000,
        12,
    ),
    (
        "flash_fwd_{}",
        "attention",
        "compute",
        "aten::scaled_dot_product_attention",
        "[[{0}, 1, 1024, 64], [{0}, 1, 1024, 64], [{0}, 1, 1024, 64], [], [], []]",
        250_000,
        6,
    ),
    (
        "vectorized_elementwise_{}",
        "elementwise",
        "memory",
        "aten::add",
        "[[16384, {0}], [16384, {0}]]",
        30_000,
        40,
    ),
    ("softmax_warp_{}", "softmax", "latency", "aten::softmax", "[[512, {0}]]", 6_000, 20),
)
"""Name, kind, bound, operator, shapes, mean duration in ns, pieces in a capture; the name is filled
with its number.
"""


@dataclass(frozen=True, slots=True)
class Team:
    """A team that runs equal jobs, one after the other, on hosts of its own.

    Attributes:
        model: What their jobs train; names of jobs and kernels begin with it.
        division, product, user, framework: Owner of the jobs; "": unknown.
        hosts: Number of hosts.
        busy: Share of a job's device time in which it computes; the rest it holds the device idle.
        kernels: Number of kernels of their program.
    """

    model: str
    division: str
    product: str
    user: str
    framework: str
    hosts: int = 2
    busy: float = 0.75
    kernels: int = 20


@dataclass(frozen=True, slots=True)
class KernelChange:
    """A kernel whose duration changes on a day.

    Attributes:
        model: The team's model.
        kernel: Number of the kernel in the program.
        day: First day of the change, counted from 0.
        factor: Ratio of the durations; for `shapes` ratio of the work of larger shapes.
        cause: `code`: a new version of the program; `host`: jobs run on new, slower hosts;
            `shapes`: each piece takes as long as before, but more of them have the larger shapes;
            `""`: nothing that is recorded.
    """

    model: str
    kernel: int
    day: int
    factor: float
    cause: str


TEAMS = (
    Team("recommender", "ads", "feed", "ana", "torch 2.9", kernels=40),
    Team("assistant", "ads", "chat", "bo", "torch 2.13", busy=0.9, kernels=40),
    # Holds its devices idle.
    Team("vision", "research", "", "chen", "torch 2.13", busy=0.05, kernels=40),
    Team("speech", "", "", "", "jax 0.7", hosts=1, kernels=40),  # of unknown owner
)
CHANGES = (
    KernelChange("recommender", 0, 9, 10.0, "code"),
    KernelChange("assistant", 1, 12, 1.3, ""),
    KernelChange("recommender", 5, 9, 0.5, "code"),
    KernelChange("assistant", 6, 7, 8.0, "shapes"),
)


@dataclass(frozen=True)
class WeeksRecipe:
    """Parameters of the generated weeks.

    Attributes:
        start: The first day.
        days: Number of days.
        teams: The teams that run jobs.
        changes: The planted changes of kernels.
        slow_host: Position of a host on which all kernels take `slow_factor` times as long; None:
            no host.
        slow_factor: See `slow_host`.
        scatter: Standard deviation of the logarithm of durations from job to job; half of it from
            capture to capture.
        captures: Number of captures per job.
        usage_days: Number of days, from the first on, with use of devices.
        seed: Seed of the random numbers.
    """

    start: date = date(2026, 10, 5)
    days: int = 21
    teams: Sequence[Team] = TEAMS
    changes: Sequence[KernelChange] = CHANGES
    slow_host: int | None = None
    slow_factor: float = 1.4
    scatter: float = 0.04
    captures: int = 2
    usage_days: int = 2
    seed: int = 1


@dataclass
class Weeks:
    """Generated rows, and the ground truth.

    Attributes:
        recipe: The parameters.
        tables: Rows by table: captures, devices, kernels, findings, jobs.
        observed: Device use as agents observed it: rows of `usage_minute` with exact `device_ms`,
            neither rounded to whole milliseconds nor with the time in which a device's agent was
            unreachable.
        held_ms: Job -> device milliseconds that it held, in the days of usage.
        busy_ms: Job -> device milliseconds in which it computed.
        free_ms: Device milliseconds that no job held, in the days of usage.
        lost_ms: Device milliseconds in which the agent was unreachable.
    """

    recipe: WeeksRecipe
    tables: dict[str, pl.DataFrame] = field(default_factory=dict)
    observed: pl.DataFrame = field(default_factory=pl.DataFrame)
    held_ms: dict[str, float] = field(default_factory=dict)
    busy_ms: dict[str, float] = field(default_factory=dict)
    free_ms: int = 0
    lost_ms: int = 0

    def kernel(self, change: KernelChange) -> str:
        """Returns the name of the kernel that changes."""
        return f"{change.model}_{_KERNELS[change.kernel % len(_KERNELS)][0].format(change.kernel)}"

    @property
    def hosts(self) -> list[str]:
        """Returns the names of all hosts, by position."""
        later_hosts = sum(change.cause == "host" for change in self.recipe.changes)
        count = sum(team.hosts for team in self.recipe.teams) + later_hosts
        return [f"host{index:02}" for index in range(count)]


@dataclass(frozen=True, slots=True)
class _GeneratedJob:
    name: str
    team: Team
    host: int
    start_ms: int  # after the first midnight
    end_ms: int


@dataclass(frozen=True, slots=True)
class _DevicePiece:
    """An interval of a device's time in which nothing changes."""

    host: int
    device: int
    start_ms: int
    end_ms: int
    shares: dict[str, float]  # job -> its share of the device's computation
    busy: float


def build_weeks(recipe: WeeksRecipe | None = None) -> Weeks:
    """Generate weeks; equal recipes give equal weeks."""
    weeks = Weeks(recipe or WeeksRecipe())
    chance = np.random.default_rng(weeks.recipe.seed)
    jobs = _create_jobs(weeks.recipe, chance)
    _fill_tables(weeks, jobs, chance)
    _fill_usage(weeks, jobs)
    return weeks


def _create_jobs(recipe: WeeksRecipe, chance: np.random.Generator) -> list[_GeneratedJob]:
    """Jobs of 2 to 9 hours, one after the other on each host, with pauses; the last may end after
    the last day.
    """
    jobs, first = [], 0
    next_host = sum(team.hosts for team in recipe.teams)
    for team in recipe.teams:
        moves = [
            change
            for change in recipe.changes
            if change.model == team.model and change.cause == "host"
        ]
        hosts = [(first + offset, 0, recipe.days) for offset in range(team.hosts)]
        for change in moves:
            hosts = [(host, start_day, min(end, change.day)) for host, start_day, end in hosts]
            hosts.append((next_host, change.day, recipe.days))
            next_host += 1
        for host, start_day, end in hosts:
            now = start_day * _DAY_MS + int(chance.integers(_HOUR_MS))
            while now < end * _DAY_MS:
                duration_ms = int(chance.integers(2 * _HOUR_MS, 9 * _HOUR_MS))
                jobs.append(
                    _GeneratedJob(
                        f"{team.model}-{host}-{now // _MINUTE_MS}",
                        team,
                        host,
                        now,
                        now + duration_ms,
                    )
                )
                now += duration_ms + int(chance.integers(2 * _HOUR_MS))
        first += team.hosts
    return jobs


def _fill_tables(weeks: Weeks, jobs: list[_GeneratedJob], chance: np.random.Generator) -> None:
    recipe = weeks.recipe
    midnight = int(datetime(*recipe.start.timetuple()[:3], tzinfo=timezone.utc).timestamp()) * 1000
    captures, devices, kernels, owners, findings = [], [], [], [], []
    for job in jobs:
        team = job.team
        changes = [
            c for c in recipe.changes if c.model == team.model and job.start_ms >= c.day * _DAY_MS
        ]
        code = f"commit{sum(change.cause == 'code' for change in changes)}"
        job_factors = np.exp(chance.normal(0, recipe.scatter, team.kernels))
        owners.append(
            {
                "day": recipe.start + timedelta(milliseconds=job.start_ms),
                "job": job.name,
                "scheduler": "slurm",
                "user": team.user or None,
                "model": team.model,
                "product": team.product or None,
                "division": team.division or None,
                "application": "training",
                "framework": team.framework,
                "labels": json.dumps({"team": team.model}),
                "valid_from_ns": (midnight + job.start_ms) * 1_000_000,
                "valid_to_ns": None,
            }
        )
        for number in range(recipe.captures):
            at_ms = job.start_ms + (number + 1) * (job.end_ms - job.start_ms) // (
                recipe.captures + 1
            )
            capture_columns = {
                "day": recipe.start + timedelta(milliseconds=at_ms),
                "capture": f"{job.name}.{number}",
            }
            slow = recipe.slow_factor if job.host == recipe.slow_host else 1.0
            busy = 0
            for kernel_index in range(team.kernels):
                name, kind, bound, op, shapes, mean, count = _KERNELS[kernel_index % len(_KERNELS)]
                kernel_changes = [change for change in changes if change.kernel == kernel_index]
                factor = (
                    float(np.prod([c.factor for c in kernel_changes if c.cause != "shapes"])) * slow
                )
                large = np.prod(
                    [change.factor for change in kernel_changes if change.cause == "shapes"]
                )
                for size, share, work_factor in ((512, 1.0, 1.0), (2048, 0.25 * large, 3.0)):
                    call_ns = (
                        mean
                        * factor
                        * work_factor
                        * job_factors[kernel_index]
                        * np.exp(chance.normal(0, recipe.scatter / 2))
                    )
                    call_count = max(round(count * share), 1)
                    total = round(call_ns * call_count)
                    busy += total
                    kernels.append(
                        {
                            **capture_columns,
                            "rank": 0,
                            "device_model": "NVIDIA H100 80GB HBM3",
                            "kernel": f"{team.model}_{name.format(kernel_index)}",
                            "kind": kind,
                            "bound": bound,
                            "op": op,
                            "shapes": shapes.format(size),
                            "types": '["bfloat16"]',
                            "count": call_count,
                            "total_ns": total,
                            "min_ns": round(0.9 * call_ns),
                            "max_ns": round(1.2 * call_ns),
                            "roofline_ns": round(0.4 * mean * work_factor * call_count)
                            if bound != "latency"
                            else None,
                            "clock_hz": 1.5e9,
                        }
                    )
            window = round(busy / 0.8)
            captures.append(
                {
                    **capture_columns,
                    "job": job.name,
                    "start_ns": (midnight + at_ms) * 1_000_000,
                    "window_ns": window,
                    "ranks": 1,
                    "hosts": 1,
                    "device_model": "NVIDIA H100 80GB HBM3",
                    "torch": team.framework.partition(" ")[2],
                    "code": code,
                    "step_ns": window // 4,
                    "mfu": 0.4 / slow,
                    "roofline_fraction": 0.5 / slow,
                    "notices": [],
                    "version": "made",
                }
            )
            devices.append(
                {
                    **capture_columns,
                    "rank": 0,
                    "host": weeks.hosts[job.host],
                    "device": 0,
                    "device_model": "NVIDIA H100 80GB HBM3",
                    "window_ns": window,
                    "busy_ns": busy,
                    "idle_ns": window - busy,
                    "idle_host_python_ns": window - busy,
                    "compute_ns": busy,
                    "communication_ns": 0,
                    "memory_ns": 0,
                    "exposed_communication_ns": 0,
                    "exposed_memory_ns": 0,
                }
            )
            rule, saving = (
                ("python-bound", 0.5) if team.busy < 0.5 else ("exposed-communication", 0.1)
            )
            findings.append(
                {
                    **capture_columns,
                    "slug": rule,
                    "saving_ns": round(window // 4 * saving),
                    "saving_fraction": saving,
                    "confidence": 0.8,
                    "rank": 0,
                }
            )
    lists = {
        "captures": captures,
        "devices": devices,
        "kernels": kernels,
        "findings": findings,
        "jobs": owners,
    }
    weeks.tables = {
        name: pl.DataFrame(rows, infer_schema_length=None) for name, rows in lists.items()
    }


def _fill_usage(weeks: Weeks, jobs: list[_GeneratedJob]) -> None:
    """Split each device's time into intervals without changes, then into minutes."""
    until = weeks.recipe.usage_days * _DAY_MS
    lost_host, lost_from, lost_until = _LOST_HOST
    device_pieces: list[_DevicePiece] = []
    for host in range(len(weeks.hosts)):
        host_jobs = sorted((job for job in jobs if job.host == host), key=lambda job: job.start_ms)
        for device in range(_DEVICES):
            second = (
                {job.name: job.start_ms + _HOUR_MS for job in host_jobs}
                if (host, device) == _SHARED_DEVICE
                else {}
            )
            marks = {
                0,
                until,
                *(t for job in host_jobs for t in (job.start_ms, job.end_ms)),
                *second.values(),
            }
            marks |= {lost_from, lost_until} if host == lost_host else set()
            for start, end in pairwise(sorted(mark for mark in marks if mark <= until)):
                if host == lost_host and lost_from <= start < lost_until:
                    weeks.lost_ms += end - start
                    continue
                job = next((job for job in host_jobs if job.start_ms <= start < job.end_ms), None)
                if job is None:
                    weeks.free_ms += end - start
                    device_pieces.append(_DevicePiece(host, device, start, end, {}, 0.0))
                    continue
                shares = {job.name: 1.0}
                if start < second.get(job.name, 0):
                    shares = {job.name: 2 / 3, f"{job.name}-notebook": 1 / 3}
                device_pieces.append(_DevicePiece(host, device, start, end, shares, job.team.busy))
                for name, share in shares.items():
                    busy = (end - start) * job.team.busy
                    held_ms = busy * share + (end - start - busy) / len(shares)
                    weeks.held_ms[name] = weeks.held_ms.get(name, 0) + held_ms
                    weeks.busy_ms[name] = weeks.busy_ms.get(name, 0) + busy * share
    weeks.observed = (
        pl.concat([_build_usage_minutes(weeks, device_piece) for device_piece in device_pieces])
        if device_pieces
        else pl.DataFrame()
    )


def _build_usage_minutes(weeks: Weeks, device_piece: _DevicePiece) -> pl.DataFrame:
    """Returns the rows by minute that an agent records of an interval of a device's time."""
    minute = (
        np.arange(device_piece.start_ms // _MINUTE_MS, -(-device_piece.end_ms // _MINUTE_MS))
        * _MINUTE_MS
    )
    ms = np.minimum(minute + _MINUTE_MS, device_piece.end_ms) - np.maximum(
        minute, device_piece.start_ms
    )
    midnight = (
        int(datetime(*weeks.recipe.start.timetuple()[:3], tzinfo=timezone.utc).timestamp()) * 1000
    )
    parts: list[tuple[str | None, str, float]] = [(None, "unallocated", 1.0)]
    if device_piece.shares:
        parts = [
            (job, "busy", device_piece.busy * share) for job, share in device_piece.shares.items()
        ]
        parts += [
            (job, "idle-allocated", (1 - device_piece.busy) / len(device_piece.shares))
            for job in device_piece.shares
        ]
    frames = []
    for job, state, share in parts:
        share_ms = ms * share
        computes = state == "busy"
        frames.append(
            pl.DataFrame(
                {
                    "time_ns": (midnight + minute) * 1_000_000,
                    "host": [weeks.hosts[device_piece.host]] * ms.size,
                    "device": [f"GPU-{device_piece.host}-{device_piece.device}"] * ms.size,
                    "device_model": ["NVIDIA H100 80GB HBM3"] * ms.size,
                    "job": pl.Series([job] * ms.size, dtype=pl.String),
                    "state": [state] * ms.size,
                    "device_ms": share_ms,
                    "busy_ms": share_ms
                    if computes
                    else pl.Series([None] * ms.size, dtype=pl.Float64),
                    "energy_mj": share_ms * _WATTS[state],
                    "flops_low": share_ms * (_FLOPS_PER_MS if computes else 0),
                    "flops_high": share_ms * (2 * _FLOPS_PER_MS if computes else 0),
                    "input_bytes": share_ms * 1_000
                    if computes
                    else pl.Series([None] * ms.size, dtype=pl.Float64),
                }
            )
        )
    return pl.concat(frames)
