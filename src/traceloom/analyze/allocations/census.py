"""The censuses that `traceloom record --memory` takes: who owned the storages alive when it began and when it ended."""

from __future__ import annotations

from typing import Any

import polars as pl

from traceloom.model import Trace
from traceloom.model.frames import schema

CENSUS = schema("address bytes device_type device owner name", {"address": pl.UInt64})


KEPT = "kept for backward by "
"""How the name of an activation begins: a node of a graph has saved it for its backward pass."""


def census(trace: Trace) -> pl.DataFrame:
    """The live storages at the start, `CENSUS`; no rows where nobody counted, or what stands there is no census."""
    return frame((trace.meta.capture or {}).get("live_storages_at_start"))


def last_census(trace: Trace) -> pl.DataFrame:
    """The live storages when the recording ended, `CENSUS`; no rows where nobody counted."""
    return frame((trace.meta.capture or {}).get("live_storages_at_end"))


def frame(columns: Any) -> pl.DataFrame:
    """The columns of a census as a frame; what is malformed is left out.

    Rows without an address (many small storages added up) are kept; else each address of a device comes once.
    """
    if not isinstance(columns, dict):
        return CENSUS.to_frame()
    lists = [columns.get(name) for name in CENSUS]
    if not all(isinstance(values, list) for values in lists) or len({len(values) for values in lists if values}) > 1:
        return CENSUS.to_frame()
    try:
        rows = pl.DataFrame(dict(zip(CENSUS, lists, strict=True)), schema=CENSUS, strict=False)
    except (pl.exceptions.PolarsError, OverflowError, TypeError):
        return CENSUS.to_frame()
    once = (pl.col("address") == 0) | pl.struct("address", "device_type", "device").is_first_distinct()
    return rows.drop_nulls().filter(pl.col("bytes") > 0).filter(once)
