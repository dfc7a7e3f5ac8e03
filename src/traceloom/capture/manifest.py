"""`capture.json`: what was recorded. Each process writes its own part, then all parts are merged.

The format is described in docs/reference/capture-json.md.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import traceloom
from traceloom.capture.steps import Mark, StepLog
from traceloom.capture.writing import NOTES, write_json

FORMAT = "traceloom-capture"
VERSION = 1
STAGE = "profiled"  # as Chakra tells graphs apart: executed on a platform; not the model as written, nor as compiled
NAME = "capture.json"
_PART = re.compile(r"(rank\d+(-pid\d+)?|pid\d+)\.capture\.json")
_OURS = re.compile(
    r"capture\.json|(rank\d+(-pid\d+)?|pid\d+)\."
    r"(capture\.json|steps\.json\.gz|collectives\.json\.gz|memory\.pickle|oom\.json|(graph\.)?kineto\.json(\.gz)?|host\.json(\.gz)?)"
)


def parts(directory: Path) -> list[Path]:
    """The parts of a capture, by rank."""
    found = [path for path in directory.iterdir() if _PART.fullmatch(path.name)]
    return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def merge(directory: Path, run: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write `capture.json` from all parts that are there; any process may do it at any time.

    Args:
        directory: The capture.
        run: What is known of the whole run; None keeps what the file says already.

    Returns:
        What was written.

    Raises:
        OSError: It could not be written.
    """
    while True:
        before = parts(directory)
        if run is None:
            run = _run_of(directory / NAME)
        capture = {
            "format": FORMAT,
            "version": VERSION,
            "traceloom": traceloom.__version__,
            "stage": STAGE,
            "run": run,
            "ranks": [json.loads(path.read_text(encoding="utf-8")) for path in before],
        }
        write_json(directory / NAME, capture)
        # A part that came in while we wrote may have been merged by its process before our older view replaced it.
        if parts(directory) == before:
            return capture


def _run_of(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return run if isinstance(run, dict) else {}


def remove(directory: Path) -> None:
    """Delete the files of an earlier capture, and only those.

    Raises:
        OSError: One of them cannot be deleted.
    """
    for path in directory.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    clear_notes(directory)


def clear_notes(directory: Path) -> None:
    """Delete claims and diagnoses."""
    notes = directory / NOTES
    if notes.is_dir():
        for path in notes.iterdir():
            path.unlink()
        notes.rmdir()


def overhead(log: StepLog, graph_ns: int | None, warm_up: int) -> dict[str, Any]:
    """What recording cost: the median recorded step against the median unrecorded one after the warm-up.

    Unknown figures are null: a run may end before any unrecorded step.
    """
    plain = log.durations(Mark.PLAIN, skip=warm_up)
    recorded = log.durations(Mark.RECORDED)
    plain_ns = int(statistics.median(plain)) if plain else None
    recorded_ns = int(statistics.median(recorded)) if recorded else None
    return {
        "unrecorded_steps": len(plain),
        "unrecorded_median_ns": plain_ns,
        "recorded_steps": len(recorded),
        "recorded_median_ns": recorded_ns,
        "ratio": round(recorded_ns / plain_ns, 4) if plain_ns and recorded_ns else None,
        "graph_step_ns": graph_ns,
        "graph_step_ratio": round(graph_ns / plain_ns, 4) if plain_ns and graph_ns else None,
    }
