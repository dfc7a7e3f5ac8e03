"""The steps of every rank, and what the devices or the main thread did in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from traceloom.model import units
from traceloom.report.accounts import main_account
from traceloom.report.names import rank_name
from traceloom.report.parts import DEVICE, PHASES, named
from traceloom.report.sections.breakdown import share_columns, shares
from traceloom.report.sections.section import CoreSection
from traceloom.report.table import Bar, Cells, Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import RankRow


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
