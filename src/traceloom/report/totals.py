"""The parts of a report document that are summed over the ranks."""

from __future__ import annotations

from typing import Any

import polars as pl

from traceloom.analyze.communication import KEYS
from traceloom.report.absent import Absent
from traceloom.report.measure import Measured

Row = dict[str, Any]


def kernels(ranks: list[Measured], absent: Absent) -> list[Row]:
    """GPU work by name, the longest first; `ranks` is the number of ranks that ran it."""
    summed = (
        pl.concat([m.kernels.kernels for m in ranks])
        .group_by("name", "category", "rule", "kind", maintain_order=True)
        .agg(pl.col("count", "total_ns").sum(), pl.col("min_ns").min(), pl.col("max_ns").max(), ranks=pl.len())
    )
    return _listed(_with_shares(summed, "total_ns"), "kernels", absent)


def operators(ranks: list[Measured], absent: Absent) -> list[Row]:
    """Operators by name (and shapes), the longest self time first."""
    frames = pl.concat([m.operators.operators for m in ranks])
    device = pl.col("device_ns", "self_device_ns", "kernel_count")
    summed = frames.group_by("name", "shapes", maintain_order=True).agg(
        pl.col("count", "self_ns", "total_ns").sum(),
        pl.when(device.is_not_null().any()).then(device.sum()),
        ranks=pl.len(),
    )
    return _listed(_with_shares(summed, "self_ns"), "operators", absent)


def _with_shares(frame: pl.DataFrame, by: str) -> pl.DataFrame:
    whole = frame[by].sum()
    share = pl.col(by) / whole if whole else pl.lit(0.0)
    return frame.with_columns(mean_ns=pl.col("total_ns") // pl.col("count"), fraction=share).sort(
        by, "name", descending=[True, False], maintain_order=True
    )


def _listed(frame: pl.DataFrame, path: str, absent: Absent) -> list[Row]:
    if not frame.height:
        absent.say(path)
    return absent.rows(frame, path)


def modules(ranks: list[Measured], absent: Absent) -> list[Row]:
    """The module trees, one after the other; `rank` says whose it is."""
    out: list[Row] = []
    for m in ranks:
        out += absent.rows(_of(m, m.modules.tree), "modules")
    if not out:
        absent.say("modules")
    return out


def communication(ranks: list[Measured], absent: Absent) -> Row:
    """Collectives by kind, group, type and place, and what they cost every rank."""
    frames = pl.concat([m.communication.collectives for m in ranks])
    optional = pl.col("bytes", "exposed_ns")
    collectives = (
        frames.group_by(*KEYS, maintain_order=True)
        .agg(
            pl.col("count", "total_ns").sum(),
            pl.col("min_ns").min(),
            pl.col("max_ns").max(),
            pl.when(optional.is_not_null().any()).then(optional.sum()),
            ranks=pl.len(),
        )
        .with_columns(mean_ns=pl.col("total_ns") // pl.col("count"))
        .sort("total_ns", descending=True, maintain_order=True)
    )
    return {
        "collectives": _listed(collectives, "communication.collectives", absent),
        "ranks": [
            {
                "rank": absent.value(m.trace.rank, "communication.ranks[*].rank"),
                "devices": absent.rows(m.communication.devices, "communication.ranks[*].devices"),
            }
            for m in ranks
        ],
    }


def memory(ranks: list[Measured], absent: Absent) -> Row:
    """Peaks by device, and the curve of each as columns."""
    devices: list[Row] = []
    curves: list[Row] = []
    for m in ranks:
        devices += absent.rows(_of(m, m.memory.devices), "memory.devices")
        for (kind, device), curve in m.memory.curve.group_by("device_type", "device", maintain_order=True):
            if curve["reserved_bytes"].null_count():
                absent.say("memory.curve[*].reserved_bytes[*]")
            curves.append(
                {
                    "rank": absent.value(m.trace.rank, "memory.curve[*].rank"),
                    "device_type": kind,
                    "device": device,
                    "time_ns": (curve["time_ns"] - absent.epoch_ns).to_list(),
                    "allocated_bytes": curve["allocated_bytes"].to_list(),
                    "reserved_bytes": curve["reserved_bytes"].to_list(),
                }
            )
    if not devices:
        absent.say("memory.devices")
    return {"devices": devices, "curve": curves}


def data_loading(ranks: list[Measured], absent: Absent) -> Row | None:
    """Waits for the data loader; null where no rank has a loader."""
    with_loader = [m for m in ranks if m.data_loading.waits.height]
    if not with_loader:
        absent.say("data_loading")
        return None
    waits: list[Row] = []
    steps: list[Row] = []
    spent: list[Row] = []
    for m in with_loader:
        waits += absent.rows(_of(m, m.data_loading.waits.drop("event")), "data_loading.waits")
        steps += absent.rows(_of(m, m.data_loading.steps), "data_loading.steps")
        spent += absent.rows(_of(m, m.data_loading.spent), "data_loading.spent")
    total = sum(m.data_loading.total_ns or 0 for m in with_loader)
    return {"total_ns": total, "waits": waits, "steps": steps, "spent": spent}


def _of(measured: Measured, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with the rank in front."""
    return frame.select(pl.lit(measured.trace.rank, dtype=pl.Int64).alias("rank"), pl.all())
