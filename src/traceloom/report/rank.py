"""The part of a report document that stands once per rank."""

from __future__ import annotations

from typing import Any

import polars as pl

from traceloom.analyze.device_account import device_account
from traceloom.report.absent import Absent
from traceloom.report.measure import Measured

Row = dict[str, Any]


def rank_entry(measured: Measured, absent: Absent, *, cut: bool) -> Row:
    """One entry of `ranks`; `cut` says that only chosen steps are told."""
    trace, meta = measured.trace, measured.trace.meta
    steps = trace.steps
    start, end = trace.start_ns, trace.end_ns
    if cut and steps.height:
        start, end = int(steps["start_ns"][0]), int(steps["end_ns"][-1])
    outside_steps = measured.gpu.steps.filter(pl.col("step").is_null())
    return {
        "rank": absent.value(meta.rank, "ranks[*].rank"),
        "host_name": absent.value(meta.host, "ranks[*].host_name"),
        "world_size": absent.value(meta.world_size, "ranks[*].world_size"),
        "path": meta.path,
        "start_ns": start - absent.epoch_ns,
        "window_ns": end - start,
        "event_count": trace.events.height,
        "devices": _devices(measured, absent),
        "steps": _steps(measured, absent),
        # Of the devices; with the steps, it adds up to the whole.
        "outside": _by_step(outside_steps, measured.idle.causes, absent).get(None, []),
        "gpu_account": _gpu_account(measured, absent),
        "idle": absent.rows(measured.idle.totals, "ranks[*].idle"),
        "host": _host(measured, absent),
        "step_times": _step_times(measured, absent),
    }


def _devices(measured: Measured, absent: Absent) -> list[Row]:
    devices = absent.rows(measured.gpu.devices, "ranks[*].devices")
    if not devices:
        absent.say("ranks[*].devices")
    causes: dict[int, dict[str, int]] = {}
    for row in measured.idle.totals.to_dicts():
        causes.setdefault(row["device"], {})[row["cause"]] = row["idle_ns"]
    return [{**device, "idle_causes": causes.get(device["device"], {})} for device in devices]


def _steps(measured: Measured, absent: Absent) -> list[Row]:
    """The steps with their times, each with the devices' time inside it."""
    steps = absent.rows(measured.step_times.steps, "ranks[*].steps")
    if not steps:
        absent.say("ranks[*].steps")
    inside = _by_step(measured.gpu.steps.filter(pl.col("step").is_not_null()), measured.idle.causes, absent)
    return [{**step, "devices": inside.get(step["step"], [])} for step in steps]


def _by_step(rows: pl.DataFrame, causes: pl.DataFrame, absent: Absent) -> dict[int | None, list[Row]]:
    named: dict[tuple[Any, Any], dict[str, int]] = {}
    for row in causes.to_dicts():
        named.setdefault((row["step"], row["device"]), {})[row["cause"]] = row["idle_ns"]
    out: dict[int | None, list[Row]] = {}
    entries = absent.rows(rows.drop("step", "start_ns", "duration_ns"), "ranks[*].steps[*].devices")
    for step, row in zip(rows["step"].to_list(), entries, strict=True):
        out.setdefault(step, []).append({**row, "idle_causes": named.get((step, row["device"]), {})})
    return out


def _gpu_account(measured: Measured, absent: Absent) -> Row | None:
    if not measured.gpu.devices.height:
        absent.say("ranks[*].gpu_account")
        return None
    account = device_account(measured.trace, measured.gpu, measured.idle)
    return {
        "window": account.window,
        "devices": absent.rows(account.devices, "ranks[*].gpu_account.devices"),
        "idle": absent.rows(account.idle, "ranks[*].gpu_account.idle"),
    }


def _host(measured: Measured, absent: Absent) -> Row:
    threads = absent.rows(measured.host.threads, "ranks[*].host.threads")
    if not threads:
        absent.say("ranks[*].host.threads")
    return {"threads": threads, "account": absent.rows(measured.host.account, "ranks[*].host.account")}


def _step_times(measured: Measured, absent: Absent) -> Row | None:
    times = measured.step_times
    if not times.count:
        absent.say("ranks[*].step_times")
        return None
    keys = ("count", "median_ns", "min_ns", "max_ns", "spread_fraction", "evidence")
    return {key: absent.value(getattr(times, key), f"ranks[*].step_times.{key}") for key in keys}
