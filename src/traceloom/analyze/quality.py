"""Can the capture be trusted, and what can it not tell?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.analyze.quality_effects import EFFECTS
from traceloom.analyze.quality_events import EVENT_CHECKS
from traceloom.analyze.quality_gpu import GPU_CHECKS
from traceloom.analyze.quality_run import RUN_CHECKS
from traceloom.analyze.verdict import Check
from traceloom.model import Notice, Trace
from traceloom.model.notice import worst_first
from traceloom.model.result import Result

CHECKS = pl.Schema(
    {
        "check": pl.String(),
        "affected_count": pl.Int64(),
        "total_count": pl.Int64(),
        "severity": pl.Enum(["ok", "info", "warning", "error"]),
        "message": pl.String(),
        "affects": pl.List(pl.String()),
    }
)


@dataclass(frozen=True)
class Quality(Result):
    """What was checked about a capture, and what the user must know of it.

    Attributes:
        notices: One for each check that found something and that the reader has not said (`trace.notices`), the worst
            first.
        checks: Every check that applies to this trace, with how many of how many events it found; severity `ok` where
            it found none. A check that cannot be made here (no GPU work, no collectives) has no row. `affects` says
            which parts of the report are weaker for what it found, and how; empty where it found nothing.
    """

    notices: tuple[Notice, ...]
    checks: pl.DataFrame


def quality(trace: Trace) -> Quality:
    """Check the capture. The checks and their limits: docs/concepts/capture-quality.md."""
    made = (rule(trace) for rule in (*GPU_CHECKS, *EVENT_CHECKS, *RUN_CHECKS))
    done: list[Check] = [check for check in made if check is not None]
    rows = [
        {
            "check": check.slug,
            "affected_count": check.affected,
            "total_count": check.total,
            "severity": check.severity if check.affected else "ok",
            "message": check.message if check.affected else "",
            "affects": [f"{part}: {how}" for part, how in EFFECTS[check.slug].items()] if check.affected else [],
        }
        for check in done
    ]
    reported = {notice.slug for notice in trace.notices}
    notices = tuple(
        Notice(check.slug, check.severity, check.message, count=check.affected, rank=trace.rank)
        for check in done
        if check.affected and check.slug not in reported
    )
    return Quality(worst_first(notices), pl.DataFrame(rows, schema=CHECKS))
