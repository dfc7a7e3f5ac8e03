"""Two runs against each other: what `traceloom diff` knows, as one JSON object; every view is drawn from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom import __version__
from traceloom.analyze import Comparison
from traceloom.files import with_addresses
from traceloom.model import Session
from traceloom.model.frames import rows

if TYPE_CHECKING:
    from traceloom.report.documents.comparison import ComparedInputRow, ComparedRunValue, ComparisonDocument

__all__ = ["build"]
FORMAT = "traceloom-diff"
VERSION = 1


def build(comparison: Comparison, base: Session, new: Session) -> ComparisonDocument:
    """The document.

    Times are integer nanoseconds per step; `base_kernel`, `new_kernel`, shapes and ranks are null where that side does
    not have or say them.

    Args:
        comparison: The comparison.
        base: What it was.
        new: What it is now.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "base": _run(base),
        "new": _run(new),
        "sentence": comparison.sentence,
        "comparable": comparison.comparable,
        "account": comparison.account,
        "base_ns": comparison.base_ns,
        "new_ns": comparison.new_ns,
        "difference_ns": comparison.difference_ns,
        "change": comparison.change,
        "conditions": rows(comparison.conditions),
        "breakdown": rows(comparison.breakdown),
        "kernels": rows(comparison.kernels),
        "operators": rows(comparison.operators),
        "tree": rows(comparison.tree),
        "steps": rows(comparison.steps),
    }


def _run(run: Session) -> ComparedRunValue:
    inputs: list[ComparedInputRow] = [
        {
            "path": with_addresses(trace.meta.path),
            "rank": trace.rank,
            "world_size": trace.meta.world_size,
            "events": trace.events.height,
        }
        for trace in run.traces
    ]
    return {"name": run.name, "inputs": inputs, "notices": [notice.to_dict() for notice in run.all_notices()]}
