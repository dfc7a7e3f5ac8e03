"""Builds the document of `traceloom report`: head, ranks, answer, requested sections, errors of
sections.

All views (terminal, page, Markdown) are drawn from it. Its keys are described in
docs/reference/report-json.md and docs/reference/report.schema.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import polars as pl

from traceloom import __version__, analyze
from traceloom.analyze.quality import list_affected
from traceloom.errors import InvariantError, TraceloomError
from traceloom.report.document import ReportOptions, UnknownValues
from traceloom.report.findings import start_findings
from traceloom.report.sections import (
    EXTRA_KEYS,
    FAILED_REASON,
    FINDINGS,
    NOT_REQUESTED_REASON,
    collect_reasons,
    load_core_sections,
    load_section,
    select_sections,
)
from traceloom.report.sections.section import Measurements, RankMeasurements, measure
from traceloom.system.files import restore_addresses
from traceloom.trace.batch import cut_session_to_steps, enable_batching
from traceloom.trace.frames import to_rows
from traceloom.trace.notice import Notice, sort_by_severity
from traceloom.trace.session import Session

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.head import ReportHead
    from traceloom.report.documents.report import (
        AbsentRow,
        DeviceRow,
        DeviceTimeRow,
        GpuAccountRow,
        InputRow,
        NoticeRow,
        RankRow,
        RunRow,
        StepRow,
        StepTimesRow,
    )


T = TypeVar("T")


class SectionErrors:
    """Errors of sections while a report is built.

    Args:
        requested: Sections requested by name: their failure is a failure of the report.
    """

    def __init__(self, requested: tuple[str, ...] | None) -> None:
        self._named = requested or ()
        self._found: dict[str, Exception] = {}

    def guard(self, key: str, work: Callable[[], T]) -> T | None:
        """Runs the work of a section; None where it fails, or has failed already.

        Raises:
            TraceloomError: An error about the input.
            Exception: Any failure of a section that was requested by name.
        """
        if key in self._found:
            return None
        try:
            return work()
        except Exception as error:
            internal = isinstance(error, InvariantError) or not isinstance(error, TraceloomError)
            if key in self._named or not internal:
                raise
            self._found[key] = error
            return None

    def failed(self, key: str) -> bool:
        return key in self._found

    def explain(self, key: str, absent: UnknownValues, *paths: str) -> None:
        """Explains why a section is missing: under its key, or under the given paths."""
        error = self._found[key]
        for path in paths or (key,):
            absent.explain(path, f"{FAILED_REASON}: {type(error).__name__}: {error}")

    def notices(self) -> tuple[Notice, ...]:
        return tuple(
            Notice(
                "section-failed",
                "warning",
                f"{key} could not be worked out, by a fault of Traceloom ({type(error).__name__}: {error}); everything "
                f"else holds; `--only {key} --debug` shows where",
            )
            for key, error in self._found.items()
        )


FORMAT = "traceloom-report"
VERSION = 1


def build(
    session: Session, options: ReportOptions | None = None, *, separate_process: bool = False
) -> ReportDocument:
    """Builds the document of one run.

    Times are integer nanoseconds; every `start_ns` and `time_ns` is relative to `epoch_ns`. Unknown
    values are null and explained in `absent`.

    Args:
        session: The run.
        options: Which ranks and steps, and how operators are counted. `top` and `sort` do not
            change the document.
        separate_process: Whether the findings of a large job may be computed in a separate process,
            in which models that a script has registered are not available.

    Raises:
        UsageError: slugs `no-such-rank`, `no-such-step`, `no-such-section`.
    """
    options = options or ReportOptions()
    chosen_sections = select_sections(options.only)
    complete_session = selected(session, replace(options, steps=None))
    part = selected(session, options)
    processes = [session.process_of(trace) for trace in complete_session.traces]
    absent = UnknownValues(part.epoch_ns, collect_reasons(chosen_sections))
    faults = SectionErrors(options.only)
    with (
        start_findings(
            complete_session, options, part.epoch_ns, separate_process=separate_process
        ) as findings_of,
        enable_batching(complete_session.traces),
        enable_batching(part.traces),
    ):
        # Process one rank completely before the next: intermediate results that several sections
        # share are computed once and then released, so that a run of many ranks needs the memory of
        # one, or of several small ones that are processed together.
        ranks: list[RankMeasurements] = []
        results: dict[str, list[Any]] = {
            chosen_section.key: [] for chosen_section in chosen_sections
        }
        for trace, visible_trace in zip(complete_session.traces, part.traces, strict=True):
            ranks.append(measure(trace, options.steps, by_shape=options.by_shape))
            for section in chosen_sections:
                results[section.key].append(
                    faults.guard(section.key, partial(section.measure, visible_trace, options))
                )
        # The chosen sections; null if not requested or failed.
        measurements: Measurements[Any] = Measurements(complete_session, part, options, ())
        sections: dict[str, Any] = {}
        for key in EXTRA_KEYS:
            if key not in results:
                absent.explain(key, NOT_REQUESTED_REASON)
                sections[key] = None
                continue
            build_one = partial(
                load_section(key).build, replace(measurements, results=results.pop(key)), absent
            )
            sections[key] = faults.guard(key, build_one)
            if faults.failed(key):
                faults.explain(key, absent)
        findings, context = faults.guard(FINDINGS, partial(findings_of, absent)) or ([], None)
    core_study = Measurements(complete_session, part, options, ranks)
    core_values = {
        section.key: section.build(core_study, absent)
        for section in load_core_sections()
        if not section.shows_only
    }
    if faults.failed(FINDINGS):
        faults.explain(FINDINGS, absent, "findings", "findings_ground")
    rank_notices = tuple(n.of_rank(m.trace.rank) for m in ranks for n in m.notices)
    notices = complete_session.all_notices() + rank_notices + faults.notices()
    answer = analyze.answer(part, [m.facts for m in ranks])
    if answer.step_ns is None:
        absent.explain("answer.step_ns")
    return {
        **_build_head(session.name, part.epoch_ns),
        "answer": {
            "sentence": answer.sentence,
            "step_ns": answer.step_ns,
            "whole_ns": answer.whole_ns,
            "parts": to_rows(answer.parts),
        },
        "inputs": _build_input_rows((complete_session,), absent),
        "notices": _build_notice_rows(notices, absent),
        "capture": absent.value(session.capture, "capture"),
        "ranks": [
            build_rank_entry(m, absent, process, cut=options.steps is not None)
            for m, process in zip(ranks, processes, strict=True)
        ],
        **cast("ReportDocument", core_values | sections),
        "findings": findings,
        "findings_ground": context,
        "runs": [],
        "absent": absent.to_list(),
    }


def selected(session: Session, options: ReportOptions) -> Session:
    rank_session = session if options.ranks is None else session.of_ranks(options.ranks)
    return (
        rank_session if options.steps is None else cut_session_to_steps(rank_session, options.steps)
    )


def build_runs(sessions: Sequence[Session], name: str, commands: list[str]) -> ReportDocument:
    """Builds the summary document of several runs: a row each in `runs`, with the command that
    reports it alone.
    """
    absent = UnknownValues(0)
    notices = tuple(n for session in sessions for n in session.notices)
    runs: list[RunRow] = []
    for session, command in zip(sessions, commands, strict=True):
        spans = [(t.start_ns, t.end_ns) for t in session.traces if t.events.height]
        window = max(end for _, end in spans) - min(start for start, _ in spans) if spans else None
        runs.append(
            {
                "name": session.name,
                "ranks": len(session.traces),
                "world_size": absent.value(session.world_size, "runs[*].world_size"),
                "window_ns": absent.value(window, "runs[*].window_ns"),
                "steps": max((t.steps.height for t in session.traces), default=0),
                "events": session.event_count,
                "sentence": analyze.answer(session).sentence,
                "command": command,
            }
        )
    unknown: list[AbsentRow] = [
        {"path": path, "reason": "several runs are summed up; report one of them to see it"}
        for path in sorted(["answer.step_ns", *_CORE_PATHS, *EXTRA_KEYS])
    ]
    return {
        **_build_head(name, 0),
        "answer": {
            "sentence": f"{len(sessions)} runs; choose one to see where its time goes.",
            "step_ns": None,
            "whole_ns": 0,
            "parts": [],
        },
        "inputs": _build_input_rows(sessions, absent),
        "notices": _build_notice_rows(notices, absent),
        "capture": None,
        "ranks": [],
        "kernels": [],
        "operators": [],
        "modules": [],
        "communication": {"collectives": [], "ranks": []},
        "memory": {"devices": [], "curve": []},
        "data_loading": None,
        **cast("ReportDocument", dict.fromkeys(EXTRA_KEYS)),
        "findings": [],
        "findings_ground": None,
        "runs": runs,
        "absent": unknown + absent.to_list(),
    }


_CORE_PATHS = (
    "capture",
    "communication",
    "data_loading",
    "findings",
    "findings_ground",
    "kernels",
    "memory",
    "modules",
    "operators",
    "ranks",
)


def _build_head(name: str, epoch_ns: int) -> ReportHead:
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": name,
        "epoch_ns": str(epoch_ns),
    }


def _build_input_rows(sessions: Sequence[Session], absent: UnknownValues) -> list[InputRow]:
    return [
        {
            "path": restore_addresses(trace.meta.path),
            "kind": trace.meta.kind,
            "rank": absent.value(trace.meta.rank, "inputs[*].rank"),
            "world_size": absent.value(trace.meta.world_size, "inputs[*].world_size"),
            "host": absent.value(trace.meta.host, "inputs[*].host"),
            "events": trace.events.height,
            "versions": dict(trace.meta.versions),
            "settings": dict(trace.meta.settings),
        }
        for session in sessions
        for trace in session.traces
    ]


def _build_notice_rows(notices: tuple[Notice, ...], absent: UnknownValues) -> list[NoticeRow]:
    # Readers and analyses may add the same notice; it is listed once per rank and place.
    distinct = tuple({(n.slug, n.rank, n.where, n.message): n for n in notices}.values())
    if any(notice.rank is None for notice in distinct):
        absent.explain("notices[*].rank")
    return [
        {**notice.to_dict(), "affects": list_affected(notice.slug)}
        for notice in sort_by_severity(distinct)
    ]


def build_rank_entry(
    measured: RankMeasurements, absent: UnknownValues, process: int, *, cut: bool
) -> RankRow:
    """Returns one entry of `ranks`; `cut` means that only selected steps are included."""
    trace, meta, gpu, times = measured.trace, measured.trace.meta, measured.gpu, measured.step_times
    start, end = trace.start_ns, trace.end_ns
    if cut and trace.steps.height:
        start, end = int(trace.steps["start_ns"][0]), int(trace.steps["end_ns"][-1])
    causes: dict[int, dict[str, int]] = {}
    for row in measured.idle.totals.to_dicts():
        causes.setdefault(row["device"], {})[row["cause"]] = row["idle_ns"]
    devices: list[DeviceRow] = absent.convert_list(gpu.devices, "ranks[*].devices")
    steps: list[StepRow] = absent.convert_list(times.steps, "ranks[*].steps")
    account: GpuAccountRow | None = None
    if devices:
        gpu_account = measured.facts.account
        account = {
            "window": gpu_account.window,
            "devices": absent.rows(gpu_account.devices, "ranks[*].gpu_account.devices"),
            "idle": absent.rows(gpu_account.idle, "ranks[*].gpu_account.idle"),
        }
    else:
        absent.explain("ranks[*].gpu_account")
    in_steps = _split_by_step(
        gpu.steps.filter(pl.col("step").is_not_null()), measured.idle.causes, absent
    )
    outside_steps = _split_by_step(
        gpu.steps.filter(pl.col("step").is_null()), measured.idle.causes, absent
    )
    step_times: StepTimesRow | None = None
    if times.count:
        step_times = {
            "clock": times.clock,
            "count": times.count,
            "median_ns": absent.value(times.median_ns, "ranks[*].step_times.median_ns"),
            "min_ns": absent.value(times.min_ns, "ranks[*].step_times.min_ns"),
            "max_ns": absent.value(times.max_ns, "ranks[*].step_times.max_ns"),
            "spread_fraction": absent.value(
                times.spread_fraction, "ranks[*].step_times.spread_fraction"
            ),
            "evidence": absent.value(times.evidence, "ranks[*].step_times.evidence"),
        }
    else:
        absent.explain("ranks[*].step_times")
    return {
        "rank": absent.value(meta.rank, "ranks[*].rank"),
        "process_number": process,
        "host_name": absent.value(meta.host, "ranks[*].host_name"),
        "world_size": absent.value(meta.world_size, "ranks[*].world_size"),
        "path": restore_addresses(meta.path),
        "start_ns": start - absent.epoch_ns,
        "window_ns": end - start,
        "event_count": trace.events.height,
        "devices": [
            {**device, "idle_causes": causes.get(device["device"], {})} for device in devices
        ],
        "steps": [{**step, "devices": in_steps.get(step["step"], [])} for step in steps],
        "outside": outside_steps.get(
            None, []
        ),  # of the devices; together with the steps it adds up to the whole
        "gpu_account": account,
        "idle": absent.rows(measured.idle.totals, "ranks[*].idle"),
        "host": {
            "threads": absent.convert_list(measured.host.threads, "ranks[*].host.threads"),
            "account": absent.rows(measured.host.account, "ranks[*].host.account"),
        },
        "step_times": step_times,
    }


def _split_by_step(
    rows: pl.DataFrame, causes: pl.DataFrame, absent: UnknownValues
) -> dict[int | None, list[DeviceTimeRow]]:
    """Returns the devices' time inside each step, with its idle causes."""
    cause_times: dict[tuple[Any, Any], dict[str, int]] = {}
    for row in causes.to_dicts():
        cause_times.setdefault((row["step"], row["device"]), {})[row["cause"]] = row["idle_ns"]
    out: dict[int | None, list[DeviceTimeRow]] = {}
    entries: list[DeviceTimeRow] = absent.rows(
        rows.drop("step", "start_ns", "duration_ns"), "ranks[*].steps[*].devices"
    )
    for step, entry in zip(rows["step"].to_list(), entries, strict=True):
        out.setdefault(step, []).append(
            {**entry, "idle_causes": cause_times.get((step, entry["device"]), {})}
        )
    return out
