"""Copies, fills and synchronisations: their kinds from the names and arguments of all vendors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model.arrays import Texts, nullable, plain
from traceloom.model.schema import SCHEMAS
from traceloom.read.columns import FILLING

Array = NDArray[Any]

_ARROW = re.compile(r"\((.+?)\s*->\s*(.+?)\)")
_SHORT = re.compile(r"\b([HDPM])(?:to|2)([HDPM])\b", re.IGNORECASE)
_LONG = re.compile(r"(host|device|peer|memory)_?to_?(host|device|peer|memory)", re.IGNORECASE)
_LETTER = {"h": "H", "d": "D", "p": "P", "m": "H"}  # XPU calls the host's side "memory"
_CUPTI_KINDS = {"1": "HtoD", "2": "DtoH", "8": "DtoD", "9": "HtoH", "10": "PtoP"}
_CUPTI_MEMORY = {"1": "pageable", "2": "pinned", "3": "device", "4": "array", "5": "managed"}


def copy_kind(name: str, argument: str | None = None) -> str:
    """HtoD, DtoH, DtoD, PtoP, HtoH, `fill` or `unknown`, from the event's name or its `copy kind` argument.

    Example:
        >>> copy_kind("Memcpy DtoH (Device -> Pinned)"), copy_kind("Memcpy", "8")
        ('DtoH', 'DtoD')
    """
    for text in (argument or "", name):
        if text in _CUPTI_KINDS:
            return _CUPTI_KINDS[text]
        match = _SHORT.search(text) or _LONG.search(text)
        if match:
            return f"{_LETTER[match.group(1)[0].lower()]}to{_LETTER[match.group(2)[0].lower()]}"
    if re.search(r"memset|fill", name, re.IGNORECASE):
        return "fill"
    return "DtoD" if "__amd_rocclr_copyBuffer" in name else "unknown"


def memory_kinds(name: str, source: str | None = None, target: str | None = None) -> tuple[str | None, str | None]:
    """The kinds of memory a copy reads and writes: pageable, pinned, device ...; None where it is not said."""
    arrow = _ARROW.search(name)
    if arrow:
        return arrow.group(1).lower(), arrow.group(2).lower()
    return _memory(source), _memory(target)


def _memory(argument: str | None) -> str | None:
    if argument is None:
        return None
    return _CUPTI_MEMORY.get(argument, argument.lower() if not argument.isdigit() else None)


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
    rows = [
        _describe(*row) for row in different.select("name", "copy_kind", "rocm_kind", "source", "target", "fill").rows()
    ]
    described = different.with_columns(
        pl.DataFrame(rows, schema=["copied", "source_memory", "target_memory"], orient="row").cast(pl.String)
    )
    joined = keys.join(described, on=keys.columns, how="left", nulls_equal=True, maintain_order="left")
    return frame.select(
        "event", joined["copied"].alias("kind"), "bytes", joined["source_memory"], joined["target_memory"]
    ).cast(SCHEMAS["copies"])


def _describe(  # noqa: PLR0917  (the columns that tell)
    name: str, argument: str | None, rocm: str | None, source: str | None, target: str | None, fill: bool
) -> tuple[str, str | None, str | None]:
    if fill:
        in_brackets = re.search(r"\((\w+)\)", name)
        filled = in_brackets.group(1).lower() if in_brackets else None
        return ("fill", None, memory_kinds(name, None, target)[1] or filled)
    kind = copy_kind(name, argument)
    if kind == "unknown" and rocm:
        kind = copy_kind(rocm)
    return (kind, *memory_kinds(name, source, target))


def kernel_frame(columns: dict[str, Array]) -> pl.DataFrame:
    """The `kernels` frame: how each kernel fills the device, in time order."""
    order = np.argsort(columns["event"], kind="stable")
    figures = {name: plain(columns[name][order], pl.Float64).fill_nan(None) for name in FILLING}
    return pl.DataFrame({"event": plain(columns["event"][order], pl.UInt32), **figures}, schema=SCHEMAS["kernels"])


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
