"""Builds the rows that the fleet stores for a capture, from the same analyses as its report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from traceloom import __version__, analyze
from traceloom.analyze.idle import CAUSES
from traceloom.analyze.kernel_efficiency import classify_bounds
from traceloom.analyze.kernels import KEYS, collect_shaped_work
from traceloom.findings import find_linkable
from traceloom.fleet.store.schema import SCHEMAS, get_utc_day
from traceloom.report.run import SectionErrors
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

MAX_KERNELS = 10_000
"""Max kernel rows of a rank; the smallest beyond it are merged into one row."""

OTHERS_LABEL = "(others)"
"""Kernel name of the merged row."""

_MAX_TEXT_CHARS = 2_000  # max characters of a name or of shapes
_DEVICE_TIME_COLUMNS = (
    "compute_ns",
    "communication_ns",
    "memory_ns",
    "exposed_communication_ns",
    "exposed_memory_ns",
)


@dataclass(frozen=True, slots=True)
class CaptureOrigin:
    """Origin of a capture.

    Attributes:
        capture: Name of the capture.
        received_ns: When the service received it, Unix time; replaces the capture's own time if
            that is not a wall-clock time.
        request, job, code: The request it fulfils, its job, the version of its program; None if
            unknown.
    """

    capture: str
    received_ns: int
    request: str | None = None
    job: str | None = None
    code: str | None = None


def build_capture_rows(session: Session, origin: CaptureOrigin) -> dict[str, pl.DataFrame]:
    """Builds the rows of a capture by table: captures, devices, kernels, findings.

    Sums agree with the report: window, busy and idle time and their parts per device, and GPU work
    over all kernels. An analysis that fails due to a defect is left out, and the notices include
    `section-failed`.

    Args:
        session: Checked traces of the capture.
        origin: Origin of the capture.
    """
    start_times = [
        trace.start_ns
        for trace in session.traces
        if trace.meta.clock == "unix" and trace.events.height
    ]
    start_ns = min(start_times, default=origin.received_ns)
    try:
        day = get_utc_day(start_ns)
    except (ValueError, OverflowError):  # a corrupt clock
        start_ns = origin.received_ns
        day = get_utc_day(start_ns)
    faults = SectionErrors(None)
    samples = session.telemetry.filter(pl.col("metric") == "gpu_clock_hertz")
    samples = samples.filter(pl.col("labels").str.json_path_match("$.domain") == "sm")
    hertz = {
        host: value
        for host, value in samples.group_by("host").agg(pl.col("value").mean()).iter_rows()
        if host is not None and np.isfinite(value) and value > 0
    }
    tables: dict[str, list[pl.DataFrame]] = {name: [] for name in ("devices", "kernels")}
    shares: dict[str, list[float]] = {"mfu": [], "roofline_fraction": []}
    for trace in session.traces:
        for name, build_rows in (
            ("devices", partial(_build_device_rows, trace)),
            ("kernels", partial(_build_kernel_rows, trace, hertz)),
        ):
            if (part := faults.guard(name, build_rows)) is not None:
                tables[name].append(part)
        roofline = faults.guard("roofline", partial(analyze.roofline, trace))
        for quantity, mean in (
            () if roofline is None else roofline.spread.select("quantity", "mean").iter_rows()
        ):
            if quantity in shares:
                shares[quantity].append(mean)
    found = faults.guard("findings", partial(find_linkable, session))
    ranked = None if found is None or isinstance(found, str) else found[1]
    answer = faults.guard("answer", partial(analyze.answer, session))
    names = {name for frame in tables["devices"] for name in frame["device_model"]}
    hosts = {trace.meta.host for trace in session.traces} - {None}
    torch = [
        _get_torch_version(trace.meta.capture) or trace.meta.versions.get("torch")
        for trace in session.traces
    ]
    notices = (*session.all_notices(), *faults.notices())
    head = {
        "request": origin.request,
        "job": origin.job,
        "start_ns": start_ns,
        "window_ns": max((t.end_ns for t in session.traces if t.events.height), default=0)
        - session.epoch_ns,
        "ranks": len(set(session.process_numbers)),
        "hosts": len(hosts) or None,
        "device_model": names.pop() if len(names) == 1 else None,
        "torch": next(filter(None, [*torch, _get_torch_version(session.capture)]), None),
        "code": origin.code,
        "step_ns": None if answer is None else answer.step_ns,
        **{name: float(np.mean(values)) if values else None for name, values in shares.items()},
        "notices": list(dict.fromkeys(notice.slug for notice in notices)),
        "version": __version__,
    }
    ranked_findings = () if ranked is None else (*ranked.time, *ranked.memory)
    frames = {
        "captures": pl.DataFrame([head], schema_overrides={"notices": pl.List(pl.String)}),
        **{name: pl.concat(parts) if parts else pl.DataFrame() for name, parts in tables.items()},
        "findings": pl.DataFrame(
            [
                {
                    "slug": finding.slug,
                    "saving_ns": finding.saving_ns,
                    "saving_fraction": finding.saving_fraction,
                    "confidence": finding.confidence,
                    "rank": next(
                        (
                            evidence.rank
                            for evidence in finding.evidence
                            if evidence.rank is not None
                        ),
                        None,
                    ),
                }
                for finding in ranked_findings
            ],
            infer_schema_length=None,
        ),
    }
    capture_key = {"day": pl.lit(day), "capture": pl.lit(origin.capture)}
    return {
        name: SCHEMAS[name].complete(frame.with_columns(**capture_key))
        if frame.height
        else SCHEMAS[name].empty()
        for name, frame in frames.items()
    }


def _build_device_rows(trace: Trace) -> pl.DataFrame:
    """Builds one row per device of a rank; idle causes that do not occur are 0."""
    times = analyze.gpu_time(trace).devices
    totals = analyze.idle(trace).totals
    idle_ns = {
        (device, cause): ns
        for device, cause, ns in totals.select("device", "cause", "idle_ns").iter_rows()
    }
    causes = {
        f"idle_{cause}_ns": pl.Series(
            [idle_ns.get((device, cause), 0) for device in times["device"]], dtype=pl.Int64
        )
        for cause in CAUSES
    }
    return times.select(
        "device", "window_ns", "busy_ns", "idle_ns", *_DEVICE_TIME_COLUMNS, device_model="name"
    ).with_columns(
        rank=pl.lit(trace.rank, pl.Int64), host=pl.lit(trace.meta.host, pl.String), **causes
    )


def _build_kernel_rows(trace: Trace, hertz: dict[str, float]) -> pl.DataFrame:
    """Builds rows of GPU work by device, operator, shapes, types, kernel, kind and bound."""
    names = trace.devices.select("device", device_model="name").unique("device")
    texts = ("kernel", "op", "shapes", "types")
    bound = classify_bounds(trace).select("event", "device", "roofline_ns", "bound")
    work = (
        collect_shaped_work([trace])
        .join(bound, on="event", how="left", maintain_order="left")
        .join(names, on="device", how="left", nulls_equal=True)
        .with_columns(
            *(pl.col(text).str.slice(0, _MAX_TEXT_CHARS) for text in texts),
            pl.col("kind", "bound").cast(pl.String),
        )
    )
    keys = ["device_model", "bound", *KEYS]
    summed = _merge_rows(work.with_columns(count=1, min_ns="ns", max_ns="ns", total_ns="ns"), keys)
    if summed.height > MAX_KERNELS:
        summed = summed.sort("total_ns", *keys, descending=[True, *(False for _ in keys)])
        remaining = summed[MAX_KERNELS - 1 :].with_columns(
            *(pl.lit(None, pl.String).alias(name) for name in ("op", "shapes", "types")),
            kernel=pl.lit(OTHERS_LABEL),
            kind=pl.lit("other"),
            bound=pl.lit("unknown"),
        )
        summed = pl.concat([summed[: MAX_KERNELS - 1], _merge_rows(remaining, keys)])
    clock = hertz.get(trace.meta.host or "")
    return summed.with_columns(
        rank=pl.lit(trace.rank, pl.Int64), clock_hz=pl.lit(clock, pl.Float64)
    )


def _merge_rows(frame: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Merges rows with the same keys; the roofline time is null if that of a part is."""
    roofline = pl.when(pl.col("roofline_ns").is_not_null().all()).then(pl.col("roofline_ns").sum())
    return frame.group_by(keys).agg(
        pl.col("count", "total_ns").sum(),
        pl.col("min_ns").min(),
        pl.col("max_ns").max(),
        roofline.alias("roofline_ns"),
    )


def _get_torch_version(document: object) -> str | None:
    versions = document.get("versions") if isinstance(document, dict) else None
    version = versions.get("torch") if isinstance(versions, dict) else None
    return version[:100] if isinstance(version, str) else None
