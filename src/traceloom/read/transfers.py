"""The frames of what only some events say of themselves: copies, kernels, synchronisations, inputs, Python frames."""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from traceloom.array_types import Array
from traceloom.model.arrays import Texts, nullable, plain
from traceloom.model.copies import copy_kind, memory_kinds
from traceloom.model.schema import SCHEMAS
from traceloom.read.columns import FILLING


def copy_frame(columns: dict[str, Array], texts: Texts, events: pl.DataFrame) -> pl.DataFrame:
    """The `copies` frame: copies and fills in time order."""
    if not len(columns["event"]):
        return pl.DataFrame(schema=SCHEMAS["copies"])
    frame = pl.DataFrame(
        {
            "event": plain(columns["event"], pl.UInt32),
            "bytes": nullable(columns["bytes"]),
            "copy_kind": texts.column(columns["copy_kind"]),
            "rocm_kind": texts.column(columns["kind"]),
            "source": texts.column(columns["source_kind"]),
            "target": texts.column(columns["target_kind"]),
        }
    ).sort("event")
    called = events[["name", "category"]][frame["event"]]
    keys = frame.select("copy_kind", "rocm_kind", "source", "target").with_columns(
        called["name"], fill=called["category"] == "fill"
    )
    different = keys.unique(maintain_order=True)
    rows: list[tuple[str, str | None, str | None]] = []
    for name, argument, rocm, source, target, fill in different.select(
        "name", "copy_kind", "rocm_kind", "source", "target", "fill"
    ).rows():
        if fill:
            in_brackets = re.search(r"\((\w+)\)", name)
            filled = in_brackets.group(1).lower() if in_brackets else None
            rows.append(("fill", None, memory_kinds(name, None, target)[1] or filled))
            continue
        kind = copy_kind(name, argument)
        if kind == "unknown" and rocm:
            kind = copy_kind(rocm)
        rows.append((kind, *memory_kinds(name, source, target)))
    described = different.with_columns(
        pl.DataFrame(rows, schema=["copied", "source_memory", "target_memory"], orient="row").cast(pl.String)
    )
    joined = keys.join(described, on=keys.columns, how="left", nulls_equal=True, maintain_order="left")
    return frame.select(
        "event", joined["copied"].alias("kind"), "bytes", joined["source_memory"], joined["target_memory"]
    ).cast(SCHEMAS["copies"])


def kernel_frame(columns: dict[str, Array]) -> pl.DataFrame:
    """The `kernels` frame: how each kernel fills the device, in time order."""
    order = np.argsort(columns["event"], kind="stable")
    figures = {name: plain(columns[name][order], pl.Float64).fill_nan(None) for name in FILLING}
    return pl.DataFrame({"event": plain(columns["event"][order], pl.UInt32), **figures}, schema=SCHEMAS["kernels"])


def tensor_frame(columns: dict[str, Array], texts: Texts) -> pl.DataFrame:
    """The `tensors` frame: inputs of ops, as lists of JSON text."""
    order = np.argsort(columns["event"], kind="stable")
    lists = {name: texts.column(values[order]) for name, values in columns.items() if name != "event"}
    return pl.DataFrame({"event": plain(columns["event"][order], pl.UInt32), **lists}, schema=SCHEMAS["tensors"])


def python_frame(columns: dict[str, Array]) -> pl.DataFrame:
    """The `python` frame: ids of Python frames and modules."""
    order = np.argsort(columns["event"], kind="stable")
    values = {name: nullable(column[order]) for name, column in columns.items() if name != "event"}
    return pl.DataFrame({"event": plain(columns["event"][order], pl.UInt32), **values}, schema=SCHEMAS["python"])


def sync_frame(columns: dict[str, Array], texts: Texts, events: pl.DataFrame) -> pl.DataFrame:
    """The `syncs` frame: what was waited for (or recorded), in time order."""
    if not len(columns["event"]):
        return pl.DataFrame(schema=SCHEMAS["syncs"])
    frame = pl.DataFrame(
        {
            "event": plain(columns["event"], pl.UInt32),
            "kind": texts.column(columns["kind"]),
            "awaited_stream": nullable(columns["awaited_stream"]),
            "record_correlation": nullable(columns["record_correlation"]),
            "event_id": nullable(columns["event_id"]),
        }
    ).sort("event")
    about = events[["name", "stream"]][frame["event"]]
    return frame.select(
        "event",
        pl.col("kind").fill_null(about["name"]),
        about["stream"],
        # 2^32 - 1 is CUPTI's way to say "none"; -1 is Cuspy's.
        *(
            pl.when((pl.col(name) >= 0) & (pl.col(name) != 2**32 - 1)).then(pl.col(name)).alias(name)
            for name in ("awaited_stream", "record_correlation", "event_id")
        ),
    ).cast(SCHEMAS["syncs"])
