"""What the reader says about the data of a whole trace that is no damage of the text."""

from __future__ import annotations

import polars as pl

from traceloom.model import category as cat
from traceloom.model.notice import Notice
from traceloom.read.nesting import Nesting

_ABSURD_NS = 86_400 * 10**9  # a day: no event of a recording lasts that long


def remarks(
    events: pl.DataFrame, nesting: Nesting, unknown_categories: dict[str, int], unknown_devices: int
) -> list[Notice]:
    """Notices about crossing spans, orphans, impossible durations and unknown categories."""
    out: list[Notice] = []
    negative, absurd, orphans, work = (
        events.lazy()
        .select(
            (pl.col("duration_ns") < 0).sum().alias("negative"),
            (pl.col("duration_ns") >= _ABSURD_NS).sum().alias("absurd"),
            (pl.col("category").is_in(cat.GPU_WORK) & pl.col("launch").is_null()).sum().alias("orphans"),
            pl.col("category").is_in(cat.GPU_WORK).sum().alias("work"),
        )
        .collect()
        .row(0)
    )
    if not events.height:
        out.append(Notice("no-events", "error", "the trace holds no complete event"))
    if negative:
        text = f"with a negative duration, kept as recorded and counted as 0: {_events(negative)}"
        out.append(Notice("negative-duration", "warning", text, negative))
    if absurd:
        text = f"longer than a day, kept as recorded, so that times that hold them are wrong: {_events(absurd)}"
        out.append(Notice("absurd-duration", "warning", text, absurd))
    if orphans:
        have = "has" if orphans == 1 else "have"
        text = (
            f"{orphans:,} of {work:,} GPU events {have} no launch in the trace "
            "(submitted before the recording began, or the call was not recorded)"
        )
        out.append(Notice("orphan-work", "info", text, orphans))
    clipped = len(nesting.clipped)
    if clipped:
        text = f"crossing another span of their thread, and shortened so that they nest: {_events(clipped)}"
        out.append(Notice("crossing-spans", "info", text, clipped))
    if unknown_categories:
        count = sum(unknown_categories.values())
        names = ", ".join(f"`{name}`" for name in sorted(unknown_categories)[:4])
        text = f"of a category this version does not know ({names}), kept as `other`: {_events(count)}"
        out.append(Notice("unknown-category", "info", text, count))
    if unknown_devices:
        text = f"{unknown_devices:,} memory events are of a device type this version does not know"
        out.append(Notice("unknown-device-type", "info", text, unknown_devices))
    return out


def _events(count: int) -> str:
    return f"{count:,} {'event' if count == 1 else 'events'}"
