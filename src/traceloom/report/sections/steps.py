"""Sections about steps, the typical step and slow steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from traceloom import analyze
from traceloom.analyze.across_ranks import DIFFERENCE_SCHEMA, MIN_STEPS, SLOW_STEP_SCHEMA
from traceloom.analyze.kernels import KERNELS, OPERATORS_PER_STEP, WorkPerStep, work_per_step
from traceloom.analyze.rank_summary import RankSummary
from traceloom.report.document import (
    Bar,
    Cells,
    Col,
    ListSchema,
    ReportOptions,
    Table,
    UnknownValues,
)
from traceloom.report.labels import (
    DEVICE_TIMES,
    PHASES,
    build_time_parts,
    fit_name,
    format_rank_name,
    get_main_thread_account,
    get_step_length,
    is_device_paced,
)
from traceloom.report.sections.device_time import build_share_columns, compute_shares
from traceloom.report.sections.ranks import RanksSection
from traceloom.report.sections.section import (
    CoreSection,
    Measurements,
    Section,
    build_table,
    format_rank_suffix,
)
from traceloom.system import units
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import RankRow
    from traceloom.report.documents.sections import PerStepValue, SlowStepsValue


class StepsSection(CoreSection):
    key, title = "steps", "Steps"
    shows_only = True
    note = "One row per step; the longest step fills the width."
    path = "ranks[*].steps"

    def summary(self, document: ReportDocument) -> str | None:
        """Describes the number and duration of steps, and the ranks with the shortest and the
        longest.
        """
        windows = Counter(rank["process_number"] for rank in document["ranks"])
        if len(windows) == 1 and windows[0] > 1:
            return _describe_windows(document["ranks"])
        times = [
            (rank["step_times"], format_rank_name(rank, k))
            for k, rank in enumerate(document["ranks"])
            if rank["step_times"]
        ]
        times = [
            (rank_times, name) for rank_times, name in times if rank_times["median_ns"] is not None
        ]
        if not times:
            return None
        (fastest, fast), (slowest, slow) = (
            choose(times, key=lambda of: of[0]["median_ns"]) for choose in (min, max)
        )
        counts = sorted({rank_times["count"] for rank_times, _ in times})
        count_range = "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        number = f"{count_range} whole step{'' if counts == [1] else 's'}"
        if len(times) > 1:
            median = f"{number} of each of {len(times)} ranks; median {units.format_duration(fastest['median_ns'])}"
            return (
                median
                if fastest["median_ns"] == slowest["median_ns"]
                else f"{median} ({fast}) to {units.format_duration(slowest['median_ns'])} ({slow})"
            )
        if counts == [1]:
            return f"{number}, {units.format_duration(fastest['median_ns'])}"
        between = f"{units.format_duration(fastest['min_ns'])} to {units.format_duration(fastest['max_ns'])}"
        return f"{number}; median {units.format_duration(fastest['median_ns'])}, {between}"

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Yields, for several ranks, a row for each; then the steps of every rank."""
        ranks = document["ranks"]
        several = len(ranks) > 1
        if several and any(rank["steps"] for rank in ranks):
            # A process may have been recorded in several windows.
            word = "rank" if len({rank["process_number"] for rank in ranks}) > 1 else "window"
            yield Table(
                "steps-by-rank",
                f"Steps by {word}",
                [
                    Col("rank", word.capitalize()),
                    Col("steps", "Steps", "count"),
                    Col("median_ns", "Median", "time", "of the whole steps", scale="step"),
                    Col("min_ns", "Shortest", "time", scale="step"),
                    Col("max_ns", "Longest", "time", scale="step"),
                    *(
                        (Col("each", "Each", "spark"),)
                        if any(len(rank["steps"]) > 1 for rank in ranks)
                        else ()
                    ),
                ],
                [
                    {
                        "rank": format_rank_name(rank, k),
                        "steps": len(rank["steps"]),
                        **(rank["step_times"] or {}),
                        "each": [get_step_length(rank, step) for step in rank["steps"]],
                    }
                    for k, rank in enumerate(ranks)
                    if rank["steps"]
                ],
                unknown=dict.fromkeys(
                    ("median_ns", "min_ns", "max_ns"), "no whole step was recorded"
                ),
            )
        for position, rank in enumerate(ranks):
            if rank["steps"]:
                yield _build_rank_table(rank, position, several=several)


def _describe_windows(windows: Sequence[RankRow]) -> str | None:
    lengths = [
        get_step_length(window, step)
        for window in windows
        for step in window["steps"]
        if step["complete"]
    ]
    if not lengths:
        return None
    length = units.format_duration(int(median(lengths)))
    return f"{len(lengths)} whole steps in {len(windows)} windows; median {length}"


def _build_rank_table(rank: RankRow, position: int, *, several: bool) -> Table:
    """Builds a bar per step; the longest step fills the column."""
    longest = max(get_step_length(rank, step) for step in rank["steps"])
    ahead = is_device_paced(rank)
    gpu = any(step.get("devices") for step in rank["steps"])
    times, note = rank["step_times"], ""
    if times is not None:
        note = f"median {units.format_duration(times['median_ns'])}"
        if times["count"] > 1:
            note += f", {units.format_duration(times['min_ns'])} to {units.format_duration(times['max_ns'])}"
    rows = []
    for step in rank["steps"]:
        if gpu:
            # the times of all devices together; before its first and after its last work a device
            # is idle
            devices: Sequence[Cells] = step["devices"]
            sums = {
                part.key: sum(times.get(part.key) or 0 for times in devices)
                for part in DEVICE_TIMES
            }
            edges = sum(
                (d.get("edge_idle_before_ns") or 0) + (d.get("edge_idle_after_ns") or 0)
                for d in devices
            )
            sums["idle_ns"] += edges
            total_ns = sum(device.get("window_ns") or 0 for device in devices) + edges
            count = max(len(step["devices"]), 1)
            parts = (
                [
                    (label, colour, ns // count)
                    for label, colour, ns in build_time_parts(DEVICE_TIMES, sums)
                ]
                if total_ns
                else []
            )
            share_cells = {
                **compute_shares(DEVICE_TIMES, sums, total_ns),
                "lag": step.get("lag_ns"),
                "launches": step.get("launch_count"),
            }
            total_ns = total_ns // count
        else:
            step_rows = [
                row for row in get_main_thread_account(rank) if row["step"] == step["step"]
            ]
            sums = {
                p.key: sum(row["ns"] for row in step_rows if row["phase"] == p.key) for p in PHASES
            }
            parts, share_cells, total_ns = build_time_parts(PHASES, sums), {}, step["duration_ns"]
        rows.append(
            {
                "step": step["step"],
                "bar": Bar(parts, total_ns or get_step_length(rank, step), longest),
                "duration": get_step_length(rank, step),
                "host": step["duration_ns"],
                "whole": "yes" if step.get("complete", True) else "no",
                "range": f"{step['start_ns']}-{step['start_ns'] + step['duration_ns']}",
                **share_cells,
            }
        )
    lag = Col("lag", "Lag", "time", "from the end of the step to the end of its last GPU work")
    launches = Col("launches", "Launches", "count", "calls that submitted GPU work", narrow=False)
    cut = any(row["whole"] == "no" for row in rows)
    return Table(
        f"steps-{position}",
        f"Steps of {format_rank_name(rank, position)}" if several else "Steps",
        [
            Col("step", "Step", "count"),
            Col(
                "duration",
                "Duration",
                "time",
                "from the end of the last GPU work of the step before to that of this one"
                if ahead
                else "from the start of the step to the start of the next",
            ),
            *([Col("host", "Host", "time", "on the host, which runs ahead")] if ahead else ()),
            *(build_share_columns(DEVICE_TIMES, narrow=False) if gpu else ()),
            *((lag, launches) if gpu else ()),
            Col("whole", "Whole", "text", "no: the recording cuts the step off", narrow=cut),
            Col("bar", "Time on the GPU" if gpu else "Main thread by phase", "bar"),
        ],
        rows,
        "ranks[*].steps",
        note,
        {
            "lag": "the step launched no GPU work",
            **dict.fromkeys((part.group for part in DEVICE_TIMES), "no GPU work in this step"),
        },
        position,
        brief=not several,
    )


SECTION = StepsSection()

_MAX_NAME_WIDTH = 48
_UNKNOWN_REASONS = {"rank": "the trace does not say"}
_NO_STEPS_REASON = "the trace holds no whole step with such work"


class PerStepSection(Section[WorkPerStep, "PerStepValue"]):
    key, title = "per_step", "Per step"
    note = "Kernels and operators of a usual step, and how far steps lie apart."
    what = "work of a usual step, with its spread over the whole steps"
    parts = {
        "kernels": ListSchema(
            KERNELS,
            "GPU work by name and rank, per whole step; the largest mean first",
            _UNKNOWN_REASONS,
            empty=_NO_STEPS_REASON,
        ),
        "operators": ListSchema(
            OPERATORS_PER_STEP,
            "self time of operators on the host, per whole step",
            _UNKNOWN_REASONS,
            empty=_NO_STEPS_REASON,
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> WorkPerStep:
        return work_per_step(trace)

    def build(
        self, measurements: Measurements[WorkPerStep], unknowns: UnknownValues
    ) -> PerStepValue:
        return self.lists(measurements.frames(self.parts), unknowns)

    def tables(self, value: PerStepValue) -> Iterator[Table]:
        tables: list[tuple[str, str, Sequence[Cells]]] = [
            ("kernels", "total_ns", value["kernels"]),
            ("operators", "self_ns", value["operators"]),
        ]
        for name, time, rows in tables:
            if rows:
                columns = [
                    "?rank",
                    f"mean_{time}",
                    f"+min_{time}",
                    f"max_{time}",
                    "mean_call_count",
                    "+step_count",
                    "name",
                ]
                yield build_table(f"per_step.{name}", name.capitalize(), columns, rows)

    def summary(self, value: PerStepValue) -> str | None:
        rows: Sequence[Cells] = value["kernels"] or value["operators"]
        if not rows:
            return None
        time = "total_ns" if value["kernels"] else "self_ns"
        top = max(rows, key=lambda row: float(row[f"mean_{time}"]))
        low, high = top[f"min_{time}"], top[f"max_{time}"]
        spread = (
            ""
            if low == high
            else f" ({units.format_duration(low)} to {units.format_duration(high)})"
        )
        mean = units.format_duration(round(top[f"mean_{time}"]))
        return f"the largest is {fit_name(top['name'], _MAX_NAME_WIDTH)}{format_rank_suffix(top, rows)}: {mean} per step{spread}"


PER_STEP_SECTION = PerStepSection()

_MAX_DIFFERENCES = 200


class SlowStepsSection(RanksSection["SlowStepsValue"]):
    key, title = "slow_steps", "Slow steps"
    note = "Steps beyond the spread of the others, and what was different in them."
    what = "slow steps"
    parts = {
        "steps": ListSchema(
            SLOW_STEP_SCHEMA,
            "every step that all ranks hold completely",
            {"limit_ns": f"fewer than {MIN_STEPS} whole steps say nothing about what is usual"},
            ("median_ns", "over_ns"),
            "the traces hold no whole step",
            ranked=False,
        ),
        "differences": ListSchema(
            DIFFERENCE_SCHEMA,
            "the account of slow steps against the usual one",
            empty="no step is slow",
            ranked=False,
        ),
    }

    def build(
        self, measurements: Measurements[RankSummary], unknowns: UnknownValues
    ) -> SlowStepsValue:
        slow_steps = analyze.slow_steps(list(measurements.results))
        return self.lists(
            {
                "steps": slow_steps.steps,
                "differences": slow_steps.differences.head(_MAX_DIFFERENCES),
            },
            unknowns,
        )

    def tables(self, value: SlowStepsValue) -> Iterator[Table]:
        slow = [row for row in value["steps"] if row["slow"]]
        if slow:
            columns = ["step", "duration_ns", "over_ns", "median_ns", "limit_ns", "rank"]
            yield build_table("slow_steps.steps", "Slow steps", columns, slow)
            columns = ["step", "rank", "more_ns", "ns", "usual_ns", "class"]
            yield build_table(
                "slow_steps.differences", "What was different", columns, value["differences"]
            )

    def summary(self, value: SlowStepsValue) -> str | None:
        slow = [row for row in value["steps"] if row["slow"]]
        if not slow:
            return None
        worst = max(slow, key=lambda row: row["over_ns"] or 0)
        differences = [row for row in value["differences"] if row["step"] == worst["step"]]
        because = ""
        if differences:
            top = differences[0]
            rank_suffix = f" of rank {top['rank']}" if worst["rank_count"] > 1 else ""
            because = f", mostly {top['class'].replace('_', ' ')}{rank_suffix} (+{units.format_duration(top['more_ns'])})"
        return (
            f"{units.format_count(len(slow))} of {units.format_count(len(value['steps']))} steps; step {worst['step']} takes "
            f"{units.format_duration(worst['over_ns'])} longer than the median{because}"
        )


SLOW_STEPS_SECTION = SlowStepsSection()
