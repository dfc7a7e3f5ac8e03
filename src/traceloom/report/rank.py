"""The part of a report document that stands once per rank."""

from __future__ import annotations

from typing import Any

import polars as pl

from traceloom.analyze.device_account import device_account
from traceloom.files import with_addresses
from traceloom.report.absent import Absent
from traceloom.report.measure import Measured

Row = dict[str, Any]


def rank_entry(measured: Measured, absent: Absent, *, cut: bool) -> Row:
    """One entry of `ranks`; `cut` says that only chosen steps are told."""
    trace, meta, gpu, times = measured.trace, measured.trace.meta, measured.gpu, measured.step_times
    start, end = trace.start_ns, trace.end_ns
    if cut and trace.steps.height:
        start, end = int(trace.steps["start_ns"][0]), int(trace.steps["end_ns"][-1])
    causes: dict[int, dict[str, int]] = {}
    for row in measured.idle.totals.to_dicts():
        causes.setdefault(row["device"], {})[row["cause"]] = row["idle_ns"]
    devices = absent.listed(gpu.devices, "ranks[*].devices")
    account = None
    if devices:
        of_gpu = device_account(trace, gpu, measured.idle)
        account = {
            "window": of_gpu.window,
            "devices": absent.rows(of_gpu.devices, "ranks[*].gpu_account.devices"),
            "idle": absent.rows(of_gpu.idle, "ranks[*].gpu_account.idle"),
        }
    else:
        absent.say("ranks[*].gpu_account")
    inside = _by_step(gpu.steps.filter(pl.col("step").is_not_null()), measured.idle.causes, absent)
    outside = _by_step(gpu.steps.filter(pl.col("step").is_null()), measured.idle.causes, absent)
    step_times = None
    if times.count:
        keys = ("count", "median_ns", "min_ns", "max_ns", "spread_fraction", "evidence")
        step_times = {key: absent.value(getattr(times, key), f"ranks[*].step_times.{key}") for key in keys}
    else:
        absent.say("ranks[*].step_times")
    return {
        "rank": absent.value(meta.rank, "ranks[*].rank"),
        "host_name": absent.value(meta.host, "ranks[*].host_name"),
        "world_size": absent.value(meta.world_size, "ranks[*].world_size"),
        "path": with_addresses(meta.path),
        "start_ns": start - absent.epoch_ns,
        "window_ns": end - start,
        "event_count": trace.events.height,
        "devices": [{**device, "idle_causes": causes.get(device["device"], {})} for device in devices],
        "steps": [
            {**step, "devices": inside.get(step["step"], [])} for step in absent.listed(times.steps, "ranks[*].steps")
        ],
        "outside": outside.get(None, []),  # of the devices; with the steps, it adds up to the whole
        "gpu_account": account,
        "idle": absent.rows(measured.idle.totals, "ranks[*].idle"),
        "host": {
            "threads": absent.listed(measured.host.threads, "ranks[*].host.threads"),
            "account": absent.rows(measured.host.account, "ranks[*].host.account"),
        },
        "step_times": step_times,
    }


def _by_step(rows: pl.DataFrame, causes: pl.DataFrame, absent: Absent) -> dict[int | None, list[Row]]:
    """The devices' time inside each step, with its idle causes."""
    named: dict[tuple[Any, Any], dict[str, int]] = {}
    for row in causes.to_dicts():
        named.setdefault((row["step"], row["device"]), {})[row["cause"]] = row["idle_ns"]
    out: dict[int | None, list[Row]] = {}
    entries = absent.rows(rows.drop("step", "start_ns", "duration_ns"), "ranks[*].steps[*].devices")
    for step, row in zip(rows["step"].to_list(), entries, strict=True):
        out.setdefault(step, []).append({**row, "idle_causes": named.get((step, row["device"]), {})})
    return out
