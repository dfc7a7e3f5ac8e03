"""Builds `findings` and `findings_ground` of the document: what to fix first.

They need a graph of all ranks, which takes as long as the rest of the report of a large job. For
such a job they are computed in a separate process, in parallel with the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import polars as pl

from traceloom.report.document import ReportOptions, UnknownValues
from traceloom.report.sections import FINDINGS, NOT_REQUESTED_REASON
from traceloom.system import process
from traceloom.system.processes import WorkerProcess, count_cores, create_shared_directory
from traceloom.system.text import encode_json
from traceloom.system.units import format_duration
from traceloom.trace import storage
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session
from traceloom.trace.storage import MappedFiles

if TYPE_CHECKING:
    from traceloom.report.documents.report import FindingRow, FindingsGroundValue

_NO_FRAMES_REASON = (
    "Python frames were not recorded there, and its threads not seen often enough (record with "
    "--stacks, or with_stack=True)"
)
_SAMPLES = "samples.arrow"
MIN_PROCESS_EVENTS = 1_000_000  # below, another process costs more than it saves


Findings: TypeAlias = "tuple[list[FindingRow], FindingsGroundValue | None]"


@contextmanager
def start_findings(
    session: Session, options: ReportOptions, epoch_ns: int, *, separate_process: bool
) -> Iterator[Callable[[UnknownValues], Findings]]:
    """Starts computing the findings of a large job in a separate process, where possible.

    Args:
        session: The run.
        options: The options of the user.
        epoch_ns: Time zero of the document.
        separate_process: Whether a process may be used; models that a script has registered are not
            available there.

    Yields:
        A function with the result of `build_findings`: from that process, or computed here where
        there is none or it fails.
    """
    build_locally = partial(build_findings, session, options)
    large = len(session.traces) > 1 and session.event_count >= MIN_PROCESS_EVENTS
    if not (separate_process and large and options.wants(FINDINGS) and count_cores() > 1):
        yield build_locally
        return
    with create_shared_directory() as directory, ExitStack() as until_done:
        job = {
            "folder": str(directory),
            "ranks": len(session.traces),
            "name": session.name,
            "capture": session.capture,
            "notices": [asdict(notice) for notice in session.notices],
            "only": options.only,
            "peak": options.peak,
            "epoch_ns": epoch_ns,
        }
        try:
            session.samples.write_ipc(directory / _SAMPLES)
            for number, trace in enumerate(session.traces):
                (directory / str(number)).mkdir()
                storage.save(trace, directory / str(number), permanent=False)
            # An error in that process recurs here, where it is reported.
            with process.defer_signals():
                worker = WorkerProcess(__name__, threads=count_cores() // 2, quiet=True)
                until_done.callback(worker.ended)
                until_done.callback(worker.kill)
                until_done.enter_context(process.clean_up_on_exit(worker.kill))
        except OSError:  # not enough space for the traces, or no process available
            yield build_locally
            return
        worker.send(job)

        def received(absent: UnknownValues) -> Findings:
            for answer in worker.answers():
                for reason in answer["absent"]:
                    absent.explain(reason["path"], reason["reason"])
                return answer["findings"], answer["ground"]
            return build_locally(absent)

        yield received


def main() -> None:
    """Computes the findings of the traces in a folder, and prints them."""
    job = json.loads(sys.stdin.readline())
    directory, files = Path(job["folder"]), MappedFiles()
    traces = tuple(
        files.kept(storage.load_trace(directory / str(rank), permanent=False))
        for rank in range(job["ranks"])
    )
    session = Session(
        traces,
        job["name"],
        job["capture"],
        tuple(Notice(**notice) for notice in job["notices"]),
        samples=pl.read_ipc(directory / _SAMPLES),
    )
    absent = UnknownValues(job["epoch_ns"])
    rows, basis = build_findings(session, ReportOptions(only=job["only"], peak=job["peak"]), absent)
    sys.stdout.buffer.write(
        encode_json({"findings": rows, "ground": basis, "absent": absent.to_list()})
    )


def build_findings(session: Session, options: ReportOptions, absent: UnknownValues) -> Findings:
    """Returns `findings` and `findings_ground` of the document; empty where `--only`
    excludes them.
    """
    if not options.wants(FINDINGS):
        return _skip_findings(NOT_REQUESTED_REASON, absent)
    from traceloom.findings import find_linkable  # loaded when needed

    found = find_linkable(session, options.peak)
    if isinstance(found, str):
        return _skip_findings(found, absent)
    context, ranked = found
    rows: list[Any] = [finding.to_dict() | {"list": "time"} for finding in ranked.time]
    rows += [finding.to_dict() | {"list": "memory"} for finding in ranked.memory]
    # What ends the run comes before what makes it slow.
    rows.sort(key=lambda row: (row["list"], row["severity"]) != ("memory", "high"))
    for row in rows:
        for key in (
            "saving_ns",
            "saving_fraction",
            "alone_ns",
            "saving_low_ns",
            "saving_high_ns",
            "saving_bytes",
            "risk",
        ):
            absent.value(row[key], f"findings[*].{key}")
        for evidence in row["evidence"]:
            if evidence["start_ns"] is not None:
                evidence["start_ns"] -= absent.epoch_ns
            for key in ("rank", "start_ns", "duration_ns", "lane", "total_ns"):
                absent.value(evidence[key], f"findings[*].evidence[*].{key}")
        absent.value(row["host_ns"], "findings[*].host_ns")
        for frame in row["frames"]:
            for key in ("file", "line", "inside", "inside_ns", "rank"):
                absent.value(frame[key], f"findings[*].frames[*].{key}")
        if not row["frames"]:
            absent.explain("findings[*].frames", None if context.stacks else _NO_FRAMES_REASON)
    if not rows:
        absent.explain("findings")
    # describe the base of the savings
    law = context.law
    length = format_duration(context.unrecorded_step_ns)
    if context.unrecorded_step_ns < context.step_ns:
        length += f" ({format_duration(context.step_ns)} as recorded)"
    counted = max((finding.step_count for finding in ranked.time), default=1)
    if counted > 1:
        basis = f"per {context.unit} of {length}, the middle one of {counted}"
    elif context.step is None:
        basis = f"of the window of {length}"
    else:
        start = "its first start on any rank" if context.rank_count > 1 else "its start"
        if context.step_ns < context.whole_ns:  # the device was still at earlier steps
            start = "the end of earlier work"
        basis = (
            f"of {context.unit} {context.step}, {length} from {start} to the end of its last work"
        )
    return rows, {
        "step": absent.value(context.step, "findings_ground.step"),
        "unit": context.unit,
        "basis": basis,
        "whole_ns": context.unrecorded_step_ns,
        "law": law.sentence,
        "holds": law.holds,
        "exact_error_ns": law.exact_error_ns,
        "honest_error": law.honest_error,
        "point_error": law.point_error,
        "residual_share": law.residual_share,
        "limit": absent.value(ranked.limit or None, "findings_ground.limit"),
        "stacks": context.stacks,
        "host_ratio": absent.value(context.host_ratio, "findings_ground.host_ratio"),
        "abstentions": [
            {"slug": abstention.slug, "reason": abstention.reason}
            for abstention in ranked.abstentions
        ],
    }


def _skip_findings(reason: str, absent: UnknownValues) -> tuple[list[FindingRow], None]:
    absent.explain("findings", reason)
    absent.explain("findings_ground", reason)
    return [], None
