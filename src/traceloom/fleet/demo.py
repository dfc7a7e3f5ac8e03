"""The demonstration of the fleet: weeks of made data, and a service that serves them.

Every capture has a file, so that its report and comparisons work. Analysing all of them would take
minutes, so rows of a capture have the generated durations, and everything else (kinds, bounds,
findings) comes from the analysed first capture of its team with the same program.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import secrets
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import polars as pl

from traceloom import __version__
from traceloom.agent.fleet_link.protocol import ClockOffset, Heartbeat, HostDevice, HostProcess
from traceloom.agent.traces.requests import TraceSpec, TriggerCause
from traceloom.agent.triggers.store import LastFiring, LastRefusal, RuleCounts
from traceloom.errors import OutputError, UsageError
from traceloom.fleet.service.capture_rows import CaptureOrigin, build_capture_rows
from traceloom.fleet.service.pipeline import get_capture_directory
from traceloom.fleet.service.request_plan import FleetRequest, FleetState, HostStatus
from traceloom.fleet.service.service import FleetService
from traceloom.fleet.store.captures import CaptureFile, CaptureRecord, ServiceState
from traceloom.fleet.store.database import LEADER
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.rules import EVENTS
from traceloom.fleet.store.schema import (
    BUSY,
    MINUTE_MS,
    SCHEMAS,
    compute_usage_hours,
    compute_usage_minutes,
)
from traceloom.fleet.store.tables import Tables
from traceloom.formats import load
from traceloom.system import process
from traceloom.system.files import is_address
from traceloom.testing import TraceBuilder
from traceloom.testing.fleet_weeks import KernelChange, Team, Weeks, WeeksRecipe, build_weeks

STEPS = 4
WAIT_FRAMES: Mapping[str, str] = {
    "recommender": "torch/utils/data/dataloader.py(733): __next__",
    "assistant": "assistant/train.py(97): clip_and_log",
    "vision": "vision/augment.py(41): rotate_on_host",
    "speech": "speech/train.py(120): save_checkpoint",
}
"""Model -> Python frame that runs at the end of a step, while the device is idle."""

_LAUNCH_US = 15.0  # between operators: the host is ahead of the device nearly all the time


class DemoRecording(NamedTuple):
    """A trace file.

    Attributes:
        text: Its content.
        window_ns: From its first to its last event.
        step_ns: Median of its steps.
        device_window_ns: From the first to the last GPU work.
    """

    text: str
    window_ns: int
    step_ns: int
    device_window_ns: int


def build_recording(
    rows: Iterable[Mapping[str, Any]],
    *,
    model: str,
    busy: float,
    host: str,
    process: int,
    start_ns: int,
) -> DemoRecording:
    """Builds a trace of identical steps that run the GPU work of a capture, row by row in turn.

    Args:
        rows: Rows of `kernels` of one capture.
        model: Model that the program trains, a key of `WAIT_FRAMES`.
        busy: Share of a step in which the device computes.
        host: Host it ran on.
        process: Process id.
        start_ns: Start, Unix time.
    """
    builder = TraceBuilder(host=host, process=process, base_ns=start_ns)
    work: list[list[tuple[Mapping[str, Any], int]]] = [[] for _ in range(STEPS)]
    for index, row in enumerate(rows):
        for number in range(row["count"]):
            # Rounded to whole nanoseconds with the same sum: the first pieces are longer by one.
            ns = row["total_ns"] // row["count"] + (number < row["total_ns"] % row["count"])
            work[(index + number) % STEPS].append((row, ns))
    correlation, start_us, device_us, lengths = 0, 0.0, 0.0, []
    first_us = None
    for step, kernel_runs in enumerate(work):
        step_us = round(sum(ns for _, ns in kernel_runs) / busy / 1000 + 100, 3)
        builder.step(step, start_us, step_us)
        builder.python(
            f"{model}/train.py(41): step", start_us + 1, step_us - 2, python_id=2 * step + 1
        )
        host_us = start_us + 5
        for row, ns in kernel_runs:
            shapes = json.loads(row["shapes"])
            correlation += 1
            types = ["c10::BFloat16" if shape else "Scalar" for shape in shapes]
            scalars: dict[str, Any] = {
                "Concrete Inputs": ["" if shape else "False" for shape in shapes]
            }
            builder.op(row["op"], host_us, 12, shapes=shapes, types=types, **scalars)
            builder.launch("cudaLaunchKernel", host_us + 3, 6, correlation=correlation, flow=False)
            begin_us = round(max(device_us, host_us + 10), 3)
            builder.kernel(row["kernel"], begin_us, ns / 1000, correlation=correlation)
            first_us = begin_us if first_us is None else first_us
            device_us = begin_us + ns / 1000
            host_us += _LAUNCH_US
        waits_us = max(device_us - host_us, 0) + 5
        correlation += 1
        builder.op("aten::item", host_us, waits_us)
        builder.launch(
            "cudaStreamSynchronize", host_us + 1, waits_us - 2, correlation=correlation, flow=False
        )
        rest_us = host_us + waits_us + 5
        builder.python(
            WAIT_FRAMES[model],
            rest_us,
            start_us + step_us - rest_us - 5,
            python_id=2 * step + 2,
            parent_id=2 * step + 1,
        )
        start_us += step_us
        lengths.append(step_us)
    middle = sorted(lengths)[(STEPS - 1) // 2 : STEPS // 2 + 1]
    return DemoRecording(
        builder.text(),
        round(start_us * 1000),
        round(sum(middle) / len(middle) * 1000),
        round((device_us - (first_us or 0.0)) * 1000),
    )


DAYS = 10
SLOW_HOST = 2
SILENT_HOST = "host99"
"""A host that is enrolled, but has never sent a heartbeat."""

TRACE_FILE = "rank0.json.gz"
# Its devices are idle.
TEAMS = (
    Team("recommender", "ads", "feed", "ana", "torch 2.9", hosts=4, kernels=10),
    Team("assistant", "ads", "chat", "bo", "torch 2.13", hosts=2, busy=0.9, kernels=10),
    Team("vision", "research", "", "chen", "torch 2.13", hosts=1, busy=0.05, kernels=10),
    Team("speech", "", "", "", "torch 2.13", hosts=1, kernels=10),  # without owners
)
OWNERS_TOML = """\
[[rule]]
match = {model = "vision"}
set = {product = "segmentation"}
"""
PRICES_TOML = """\
currency = "EUR"
per_kwh = 0.30
co2_g_per_kwh = 350

[device_hour]
"NVIDIA H100 80GB HBM3" = 2.60
"""
TRIGGERS_TOML = """\
[[triggers]]
name = "daily-share"
on = "cadence"
share = 0.2                     # of the jobs, each day

[[triggers]]
name = "idle-devices"
on = "usage"
busy_below = 0.3
target = "slowest-and-median"

[[triggers]]
name = "slower"
on = "regression"
by = 0.1
shapes = true

[budget]
traces_per_day = 20
"""
WEBHOOK_URL = "https://chat.example/traceloom"
"""A URL that nobody owns: names below `example` do not resolve."""

_MINUTE_NS = 60 * 10**9
_HOUR_NS = 60 * _MINUTE_NS
_DAY_NS = 24 * _HOUR_NS
_ARRIVAL_DELAY_NS = 20 * 10**9  # from the end of a capture to its arrival
_LATEST_NS = _ARRIVAL_DELAY_NS + 5 * 10**9  # no window is longer than the rest
_LEASE_OWNER = "demo"
_TABLES = ("captures", "devices", "kernels", "findings")
_DEMO_REQUESTS: tuple[tuple[str, FleetState, str, str, str], ...] = (
    ("recommender", "done", "", "", ""),
    ("assistant", "partial", "missing", "{host}: its files did not come in time", ""),
    ("vision", "failed", "no-host", "{host}: it did not say in time that it is ready", ""),
    ("recommender", "cancelled", "cancelled", "it was cancelled", ""),
    ("recommender", "done", "", "", "slower"),
)
"""Trace requests that have ended, newest first: model, state, reason, detail, and the rule that
made it.
"""


def build_recipe(now_ns: int, days: int = DAYS) -> WeeksRecipe:
    """Returns the recipe of the demo, whose weeks end at a Unix time."""
    start = datetime.fromtimestamp(now_ns / 1e9, timezone.utc).date() - timedelta(days=days - 1)
    changes = (
        KernelChange("recommender", 0, days // 2 + 1, 10.0, "code"),
        KernelChange("assistant", 1, days // 2, 1.3, ""),
        KernelChange("recommender", 5, days // 2 + 1, 0.5, "code"),
        KernelChange("assistant", 6, days // 2 - 1, 8.0, "shapes"),
    )
    return WeeksRecipe(
        start, days, TEAMS, changes, slow_host=SLOW_HOST, captures=1, usage_days=days
    )


def fill_demo(
    state: ServiceState,
    objects: ObjectStore,
    tables: Tables,
    weeks_recipe: WeeksRecipe,
    now_ns: int,
    *,
    progress: Callable[[str], object] = lambda _: None,
) -> None:
    """Fills an empty store.

    Args:
        state: State of the store.
        objects: Files of the same store.
        tables: Tables of the same store, already created.
        weeks_recipe: Of `build_recipe`.
        now_ns: When the weeks end, Unix time.
        progress: Called with a description of the next step.
    """
    progress("weeks of eight hosts are made")
    weeks = build_weeks(weeks_recipe)
    jobs = weeks.tables["jobs"].filter(pl.col("valid_from_ns") < now_ns)
    captures = (
        weeks.tables["captures"].filter(pl.col("start_ns") + _LATEST_NS < now_ns).sort("start_ns")
    )
    requests = _build_requests(captures, now_ns)

    progress(f"{captures.height} captures are written")
    writing = _CaptureWriter(
        state, objects, weeks, {request.capture: request.id for request in requests}
    )
    for capture in captures.iter_rows(named=True):
        writing.add(capture)

    progress("tables are filled")
    capture_tables = {
        name: SCHEMAS[name].complete(frame)
        for name, frame in (*writing.tables().items(), ("jobs", jobs))
    }
    term = secrets.token_hex(8)
    state.lead(LEADER, term, 600)  # there is no other leader: the store was empty
    batch = state.open_batch(captures.height, term)
    assert batch is not None, "there are captures"
    tables.commit(f"captures {state.identity}", batch.number, capture_tables)
    state.close_batch(batch.number, term)
    usage = compute_usage_minutes(weeks.observed.filter(pl.col("time_ns") + _MINUTE_NS <= now_ns))
    tables.commit(
        f"usage {state.identity}",
        1,
        {"usage_minute": usage, "usage_hour": compute_usage_hours(usage)},
    )

    state.put_document("owners", "operator", OWNERS_TOML)
    state.put_document("prices", "operator", PRICES_TOML)
    state.set_trigger_rules(TRIGGERS_TOML)
    state.put_trigger_documents({}, _build_rule_counts(requests, captures, now_ns))
    state.add_webhook("chat", WEBHOOK_URL, EVENTS)
    for host in (*weeks.hosts, SILENT_HOST):
        state.put_host(host, secrets.token_urlsafe(32))
    for request in requests:
        state.put_request(
            request.id, request.asked_ns, msgspec.json.encode(request).decode(), term, ended=True
        )
    state.resign(term)


def _build_requests(captures: pl.DataFrame, now_ns: int) -> list[FleetRequest]:
    """Builds ended requests; those with a capture have one of the latest of their team."""
    requests = []
    for index, (model, state, reason, text, rule) in enumerate(_DEMO_REQUESTS):
        capture = captures.filter(pl.col("job").str.starts_with(f"{model}-")).row(
            -1 - index, named=True
        )
        gave = state in {"done", "partial"}
        requested_ns = capture["start_ns"] - 15 * 10**9 if gave else now_ns - (index + 1) * _HOUR_NS
        host = f"host{int(capture['job'].split('-')[1]):02}"
        detail = text.format(host=host)
        requester = f"trigger {rule}" if rule else "operator"
        progress = HostStatus(
            state="uploaded" if gave else "failed",
            since_ns=requested_ns,
            reason=reason,
            detail=detail,
        )
        requests.append(
            FleetRequest(
                id=f"{index:016x}",
                who=requester,
                asked_ns=requested_ns,
                spec=TraceSpec(job=capture["job"], steps=STEPS),
                hosts={host: progress},
                state=state,
                since_ns=requested_ns + 40 * 10**9,
                reason=reason,
                detail=detail,
                start_ns=capture["start_ns"] if gave else 0,
                capture=capture["capture"] if gave else "",
                trigger=TriggerCause(
                    rule=rule, target=capture["job"], what="a kernel takes 10.0× as long"
                )
                if rule
                else None,
            )
        )
    return requests


def _build_rule_counts(
    requests: list[FleetRequest], captures: pl.DataFrame, now_ns: int
) -> dict[str, str]:
    """Builds the counts of rules, as documents: one rule made requests, one was refused."""
    counts: dict[str, RuleCounts] = {}
    for request in requests:
        if (cause := request.trigger) is not None:
            rule_counts = counts.setdefault(cause.rule, RuleCounts())
            rule_counts.fired += 1
            rule_counts.last = LastFiring(
                at_ns=request.asked_ns,
                request=request.id,
                target=cause.target,
                what=cause.what,
                uid=-1,
            )
    job = captures.filter(pl.col("job").str.starts_with("vision-")).row(-1, named=True)["job"]
    refused = LastRefusal(
        at_ns=now_ns - _HOUR_NS,
        target=job,
        what="it computed in 5 % of its device time in the last 15 min",
        uid=-1,
        reason="cooldown",
        detail="it was traced of late: not for 1200 s",
    )
    counts["idle-devices"] = RuleCounts(
        refusals={"cooldown": 12, "budget-share": 2}, last_refusal=refused
    )
    return {rule: msgspec.json.encode(rule_counts).decode() for rule, rule_counts in counts.items()}


class _CaptureWriter:
    """Writes captures, and collects their rows."""

    def __init__(
        self, state: ServiceState, objects: ObjectStore, weeks: Weeks, requests: Mapping[str, str]
    ) -> None:
        self._state, self._objects, self._requests = state, objects, requests
        self._changes = weeks.recipe.changes
        self._teams = {team.model: team for team in TEAMS}
        self._began = dict(weeks.tables["jobs"].select("job", "valid_from_ns").iter_rows())
        self._hosts = dict(weeks.tables["devices"].select("capture", "host").iter_rows())
        self._work: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in weeks.tables["kernels"].iter_rows(named=True):
            self._work[row["capture"]].append(row)
        midnight = datetime.combine(weeks.recipe.start, datetime.min.time(), timezone.utc)
        self._start_ns = int(midnight.timestamp()) * 10**9
        self._analysed: dict[tuple[str, int], dict[str, pl.DataFrame]] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in _TABLES}

    def add(self, capture: dict[str, Any]) -> None:
        """Writes the file of a capture, and computes its rows."""
        name, job, start_ns = capture["capture"], capture["job"], capture["start_ns"]
        model = job.partition("-")[0]
        recording = build_recording(
            self._work[name],
            model=model,
            busy=self._teams[model].busy,
            host=self._hosts[name],
            process=int(job.rpartition("-")[2]),
            start_ns=start_ns,
        )
        content = gzip.compress(recording.text.encode(), 6, mtime=0)
        self._keep(name, job, start_ns + recording.window_ns + _ARRIVAL_DELAY_NS, content)
        day = (self._began[job] - self._start_ns) // _DAY_NS
        program = (
            model,
            sum(change.model == model and day >= change.day for change in self._changes),
        )
        if program not in self._analysed:
            self._analysed[program] = _analyse_file(content, start_ns)
        for table, rows_of in self._as_made(capture, recording, self._analysed[program]).items():
            self._rows[table] += rows_of

    def tables(self) -> dict[str, pl.DataFrame]:
        return {
            name: pl.DataFrame(rows_of, infer_schema_length=None)
            for name, rows_of in self._rows.items()
        }

    def _keep(self, name: str, job: str, received_ns: int, content: bytes) -> None:
        """Stores an arrived capture, whose analysis waits for its commit."""
        record = CaptureRecord(
            id=name,
            day=datetime.fromtimestamp(received_ns / 1e9, timezone.utc).date().isoformat(),
            job=job,
            uploader="operator",
            received_ns=received_ns,
            complete=False,
            bytes=len(content),
            files=(CaptureFile(TRACE_FILE, len(content), hashlib.sha256(content).hexdigest()),),
        )
        self._state.add_capture(record)
        self._objects.put(f"{get_capture_directory(record)}/{TRACE_FILE}", content)
        self._state.complete_capture(name, __version__)
        task = self._state.claim(_LEASE_OWNER, 600)
        assert task is not None, "it was just added"
        self._state.advance(task.id, _LEASE_OWNER, "analysed")

    def _as_made(
        self, capture: dict[str, Any], recording: DemoRecording, analysed: dict[str, pl.DataFrame]
    ) -> dict[str, list[dict[str, Any]]]:
        """Builds the rows of a capture: generated durations, everything else from the analysed
        capture.
        """
        capture_key = {"day": capture["day"], "capture": capture["capture"]}
        work = self._work[capture["capture"]]
        busy_ns = sum(row["total_ns"] for row in work)
        idle_ns = recording.device_window_ns - busy_ns
        device = (
            analysed["devices"].row(0, named=True)
            | capture_key
            | {"host": self._hosts[capture["capture"]]}
        )
        causes = sorted(
            (name for name in device if name.startswith("idle_") and name != "idle_ns"),
            key=device.__getitem__,
        )
        device |= {
            "window_ns": recording.device_window_ns,
            "busy_ns": busy_ns,
            "compute_ns": busy_ns,
            "idle_ns": idle_ns,
        }
        device[causes[-1]] = idle_ns - sum(device[cause] for cause in causes[:-1])
        analysed_rows = {
            _get_part_key(row): row for row in analysed["kernels"].iter_rows(named=True)
        }
        kernels = []
        for row in work:
            analysed_row, each_ns = (
                analysed_rows[_get_part_key(row)],
                row["total_ns"] // row["count"],
            )
            roofline_ns = analysed_row["roofline_ns"]
            kernels.append(
                analysed_row
                | capture_key
                | {
                    "count": row["count"],
                    "total_ns": row["total_ns"],
                    "min_ns": each_ns,
                    "max_ns": each_ns + (row["total_ns"] % row["count"] > 0),
                    "clock_hz": None,
                    "roofline_ns": None
                    if roofline_ns is None
                    else roofline_ns * row["count"] // analysed_row["count"],
                }
            )
        # work without a cost model counts as if it ran at the peaks
        at_the_peaks = sum(
            row["total_ns"] if row["roofline_ns"] is None else row["roofline_ns"] for row in kernels
        )
        like = analysed["captures"].row(0, named=True)
        longer = recording.step_ns / like["step_ns"]
        capture_row = capture | {
            "request": self._requests.get(capture["capture"]),
            "window_ns": recording.window_ns,
            "step_ns": recording.step_ns,
            "mfu": like["mfu"] / longer,
            "roofline_fraction": at_the_peaks / recording.window_ns,
            "notices": like["notices"],
            "version": __version__,
        }
        return {
            "captures": [capture_row],
            "devices": [device],
            "kernels": kernels,
            "findings": [
                finding
                | capture_key
                | {"saving_ns": round((finding["saving_fraction"] or 0.0) * recording.step_ns)}
                for finding in analysed["findings"].iter_rows(named=True)
            ],
        }


def _analyse_file(content: bytes, start_ns: int) -> dict[str, pl.DataFrame]:
    """Returns the rows of a file by the service's analysis."""
    with tempfile.TemporaryDirectory(prefix="traceloom-") as directory:
        (Path(directory) / TRACE_FILE).write_bytes(content)
        return build_capture_rows(load(directory, cache=False), CaptureOrigin("analysed", start_ns))


def _get_part_key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["kernel"], json.dumps(json.loads(row["shapes"]))


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
