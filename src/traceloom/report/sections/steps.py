"""Steps, usual step, slow steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from traceloom import analyze
from traceloom.analyze.across_ranks import DIFFERENCE_SCHEMA, LEAST_STEPS, SLOW_STEP_SCHEMA
from traceloom.analyze.kernels import KERNELS, OPERATORS_PER_STEP, WorkPerStep, work_per_step
from traceloom.analyze.rank_summary import RankPart
from traceloom.report.document import Bar, Cells, Col, Part, ReportOptions, Table, UnknownValues
from traceloom.report.labels import DEVICE, PHASES, main_account, named, rank_name, short
from traceloom.report.sections.device_time import share_columns, shares
from traceloom.report.sections.ranks import RanksSection
from traceloom.report.sections.section import CoreSection, Measurements, Section, of_rank_suffix, table
from traceloom.system import units
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import RankRow
    from traceloom.report.documents.sections import PerStepValue, SlowStepsValue


class StepsSection(CoreSection):
    """The steps of every rank, and what the devices or the main thread did in each."""

    key, title = "steps", "Steps"
    shows_only = True
    note = "One row per step; the longest step fills the width."
    path = "ranks[*].steps"

    def summary(self, document: ReportDocument) -> str | None:
        """How many steps, how long, and which rank's are the shortest and the longest."""
        times = [
            (rank["step_times"], rank_name(rank, k)) for k, rank in enumerate(document["ranks"]) if rank["step_times"]
        ]
        times = [(each, name) for each, name in times if each["median_ns"] is not None]
        if not times:
            return None
        (least, fast), (most, slow) = (choose(times, key=lambda of: of[0]["median_ns"]) for choose in (min, max))
        counts = sorted({each["count"] for each, _ in times})
        whole = "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        number = f"{whole} whole step{'' if counts == [1] else 's'}"
        if len(times) > 1:
            median = f"{number} of each of {len(times)} ranks; median {units.duration(least['median_ns'])}"
            if least["median_ns"] == most["median_ns"]:
                return median
            return f"{median} ({fast}) to {units.duration(most['median_ns'])} ({slow})"
        if counts == [1]:
            return f"{number}, {units.duration(least['median_ns'])}"
        between = f"{units.duration(least['min_ns'])} to {units.duration(least['max_ns'])}"
        return f"{number}; median {units.duration(least['median_ns'])}, {between}"

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Of several ranks: a line for each; then the steps of every rank."""
        ranks = document["ranks"]
        several = len(ranks) > 1
        if several and any(rank["steps"] for rank in ranks):
            yield Table(
                "steps-by-rank",
                "Steps by rank",
                [
                    Col("rank", "Rank"),
                    Col("steps", "Steps", "count"),
                    Col("median_ns", "Median", "time", "of the whole steps", scale="step"),
                    Col("min_ns", "Shortest", "time", scale="step"),
                    Col("max_ns", "Longest", "time", scale="step"),
                    *((Col("each", "Each", "spark"),) if any(len(rank["steps"]) > 1 for rank in ranks) else ()),
                ],
                [
                    {
                        "rank": rank_name(rank, k),
                        "steps": len(rank["steps"]),
                        **(rank["step_times"] or {}),
                        "each": [step["duration_ns"] for step in rank["steps"]],
                    }
                    for k, rank in enumerate(ranks)
                    if rank["steps"]
                ],
                unknown=dict.fromkeys(("median_ns", "min_ns", "max_ns"), "no whole step was recorded"),
            )
        for position, rank in enumerate(ranks):
            if rank["steps"]:
                yield _of_rank(rank, position, several=several)


def _of_rank(rank: RankRow, position: int, *, several: bool) -> Table:
    """A bar per step, the longest step as long as the column."""
    longest = max(step["duration_ns"] for step in rank["steps"])
    gpu = any(step.get("devices") for step in rank["steps"])
    times, note = rank["step_times"], ""
    if times is not None:
        note = f"median {units.duration(times['median_ns'])}"
        if times["count"] > 1:
            note += f", {units.duration(times['min_ns'])} to {units.duration(times['max_ns'])}"
    rows = []
    for step in rank["steps"]:
        if gpu:
            # the times of all devices together; before its first and after its last work a device is idle
            devices: Sequence[Cells] = step["devices"]
            sums = {part.key: sum(times.get(part.key) or 0 for times in devices) for part in DEVICE}
            edges = sum((d.get("edge_idle_before_ns") or 0) + (d.get("edge_idle_after_ns") or 0) for d in devices)
            sums["idle_ns"] += edges
            whole = sum(device.get("window_ns") or 0 for device in devices) + edges
            count = max(len(step["devices"]), 1)
            parts = [(label, colour, ns // count) for label, colour, ns in named(DEVICE, sums)] if whole else []
            seen = {**shares(DEVICE, sums, whole), "lag": step.get("lag_ns"), "launches": step.get("launch_count")}
            whole = whole // count
        else:
            inside = [row for row in main_account(rank) if row["step"] == step["step"]]
            sums = {p.key: sum(row["ns"] for row in inside if row["phase"] == p.key) for p in PHASES}
            parts, seen, whole = named(PHASES, sums), {}, step["duration_ns"]
        rows.append(
            {
                "step": step["step"],
                "bar": Bar(parts, whole or step["duration_ns"], longest),
                "duration": step["duration_ns"],
                "whole": "yes" if step.get("complete", True) else "no",
                "range": f"{step['start_ns']}-{step['start_ns'] + step['duration_ns']}",
                **seen,
            }
        )
    lag = Col("lag", "Lag", "time", "from the end of the step to the end of its last GPU work")
    launches = Col("launches", "Launches", "count", "calls that submitted GPU work", narrow=False)
    cut = any(row["whole"] == "no" for row in rows)
    return Table(
        f"steps-{position}",
        f"Steps of {rank_name(rank, position)}" if several else "Steps",
        [
            Col("step", "Step", "count"),
            Col("duration", "Duration", "time", "from the start of the step to the start of the next"),
            *(share_columns(DEVICE, narrow=False) if gpu else ()),
            *((lag, launches) if gpu else ()),
            Col("whole", "Whole", "text", "no: the recording cuts the step off", narrow=cut),
            Col("bar", "Time on the GPU" if gpu else "Main thread by phase", "bar"),
        ],
        rows,
        "ranks[*].steps",
        note,
        {
            "lag": "the step launched no GPU work",
            **dict.fromkeys((part.group for part in DEVICE), "no GPU work in this step"),
        },
        position,
        brief=not several,
    )


SECTION = StepsSection()

_NAME = 48
_NOT_SAID = {"rank": "the trace does not say"}
_WHY = "the trace holds no whole step with such work"


class PerStepSection(Section[WorkPerStep, "PerStepValue"]):
    """Work of a usual step."""

    key, title = "per_step", "Per step"
    note = "Kernels and operators of a usual step, and how far steps lie apart."
    what = "work of a usual step, with its spread over the whole steps"
    parts = {
        "kernels": Part(
            KERNELS, "GPU work by name and rank, per whole step; the largest mean first", _NOT_SAID, empty=_WHY
        ),
        "operators": Part(
            OPERATORS_PER_STEP, "self time of operators on the host, per whole step", _NOT_SAID, empty=_WHY
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> WorkPerStep:
        return work_per_step(trace)

    def build(self, study: Measurements[WorkPerStep], absent: UnknownValues) -> PerStepValue:
        return self.lists(study.frames(self.parts), absent)

    def tables(self, value: PerStepValue) -> Iterator[Table]:
        tables: list[tuple[str, str, Sequence[Cells]]] = [
            ("kernels", "total_ns", value["kernels"]),
            ("operators", "self_ns", value["operators"]),
        ]
        for name, time, rows in tables:
            if rows:
                columns = ["?rank", f"mean_{time}", f"+min_{time}", f"max_{time}", "mean_call_count", "+step_count",
                           "name"]  # fmt: skip
                yield table(f"per_step.{name}", name.capitalize(), columns, rows)

    def summary(self, value: PerStepValue) -> str | None:
        rows: Sequence[Cells] = value["kernels"] or value["operators"]
        if not rows:
            return None
        time = "total_ns" if value["kernels"] else "self_ns"
        top = max(rows, key=lambda row: float(row[f"mean_{time}"]))
        low, high = top[f"min_{time}"], top[f"max_{time}"]
        spread = "" if low == high else f" ({units.duration(low)} to {units.duration(high)})"
        mean = units.duration(round(top[f"mean_{time}"]))
        return f"the largest is {short(top['name'], _NAME)}{of_rank_suffix(top, rows)}: {mean} per step{spread}"


PER_STEP_SECTION = PerStepSection()

_MOST = 200


class SlowStepsSection(RanksSection["SlowStepsValue"]):
    """Slow steps, and their account against the usual one."""

    key, title = "slow_steps", "Slow steps"
    note = "Steps beyond the spread of the others, and what was different in them."
    what = "slow steps"
    parts = {
        "steps": Part(
            SLOW_STEP_SCHEMA,
            "every step that all ranks hold completely",
            {"limit_ns": f"fewer than {LEAST_STEPS} whole steps say nothing about what is usual"},
            ("median_ns", "over_ns"),
            "the traces hold no whole step",
            ranked=False,
        ),
        "differences": Part(
            DIFFERENCE_SCHEMA, "the account of slow steps against the usual one", empty="no step is slow", ranked=False
        ),
    }

    def build(self, study: Measurements[RankPart], absent: UnknownValues) -> SlowStepsValue:
        slow_steps = analyze.slow_steps(list(study.results))
        return self.lists({"steps": slow_steps.steps, "differences": slow_steps.differences.head(_MOST)}, absent)

    def tables(self, value: SlowStepsValue) -> Iterator[Table]:
        slow = [row for row in value["steps"] if row["slow"]]
        if slow:
            columns = ["step", "duration_ns", "over_ns", "median_ns", "limit_ns", "rank"]
            yield table("slow_steps.steps", "Slow steps", columns, slow)
            columns = ["step", "rank", "more_ns", "ns", "usual_ns", "class"]
            yield table("slow_steps.differences", "What was different", columns, value["differences"])

    def summary(self, value: SlowStepsValue) -> str | None:
        slow = [row for row in value["steps"] if row["slow"]]
        if not slow:
            return None
        worst = max(slow, key=lambda row: row["over_ns"] or 0)
        differences = [row for row in value["differences"] if row["step"] == worst["step"]]
        because = ""
        if differences:
            top = differences[0]
            of = f" of rank {top['rank']}" if worst["rank_count"] > 1 else ""
            because = f", mostly {top['class'].replace('_', ' ')}{of} (+{units.duration(top['more_ns'])})"
        return (
            f"{units.count(len(slow))} of {units.count(len(value['steps']))} steps; step {worst['step']} takes "
            f"{units.duration(worst['over_ns'])} longer than the median{because}"
        )


SLOW_STEPS_SECTION = SlowStepsSection()
