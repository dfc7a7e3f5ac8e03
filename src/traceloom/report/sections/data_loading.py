"""Waits of the main thread for the next batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.measure import Measured
from traceloom.report.names import rank_name
from traceloom.report.sections.section import CoreSection, Study
from traceloom.report.table import Col, Table, yes_or_no

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import DataLoadingValue

_MAKERS = {"main_thread": "the main thread makes the batches itself", "workers": "workers make the batches"}
_LOADING_PARTS = {
    "fetch": "fetching from the data set",
    "collate": "collating",
    "pin_memory": "pinning memory",
    "workers": "waiting for workers",
    "operators": "operators",
}


class DataLoadingSection(CoreSection):
    """Waits of the main thread for the next batch."""

    key, title = "data_loading", "Data loading"
    anchor = "loading"
    note = "Waits for the next batch."

    def build(self, study: Study[Measured], absent: Absent) -> DataLoadingValue | None:
        """Waits for the data loader; null where no rank has a loader."""
        with_loader = [rank.data_loading.waits.height > 0 for rank in study.results]
        if not any(with_loader):
            absent.say("data_loading")
            return None
        return {
            "total_ns": sum(rank.data_loading.total_ns or 0 for rank in study.results),
            "waits": absent.rows(
                study.concat(lambda rank: rank.data_loading.waits.drop("event"), with_loader), "data_loading.waits"
            ),
            "steps": absent.rows(study.concat(lambda rank: rank.data_loading.steps, with_loader), "data_loading.steps"),
            "spent": absent.rows(study.concat(lambda rank: rank.data_loading.spent, with_loader), "data_loading.spent"),
        }

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """The waits by step."""
        loading = document.get("data_loading")
        if not loading or not loading["steps"]:
            return
        names = {rank["rank"]: rank_name(rank, k) for k, rank in enumerate(document["ranks"])}
        columns = [
            *((Col("rank", "Rank"),) if len(names) > 1 else ()),
            Col("step", "Step", "count"),
            Col("wait_ns", "Wait", "time", "time in the data loader's next batch"),
            Col("fraction", "Of the step", "share"),
            Col("gpu_idle_ns", "GPU idle", "time", "part of the wait in which no device had any work"),
            Col(
                "holds", "Holds up", "text", "at least 5 % of the step, and the GPU had no work in at least half of it"
            ),
        ]
        rows = [
            {**row, "rank": names.get(row["rank"], "–"), "holds": yes_or_no(row.get("bottleneck"))}
            for row in loading["steps"]
        ]
        yield Table("loading-table", "Loader waits by step", columns, rows, "data_loading.steps", brief=False)

    def summary(self, document: ReportDocument) -> str | None:
        """How long the main threads waited, who makes the batches, what the time goes to, whether the GPU waits too."""
        loading = document.get("data_loading")
        if not loading:
            return None
        total, waits = loading["total_ns"], loading["waits"]
        # of the ranks that have a loader: of the time of the answer, their steps; without steps, of their windows
        loaders = {wait["rank"] for wait in waits}
        ranks = [rank for rank in document["ranks"] if rank["rank"] in loaders]
        length = sum(step["duration_ns"] for rank in ranks for step in rank["steps"])
        waited = sum(row["wait_ns"] or 0 for row in loading["steps"]) if length else total
        whole = length or sum(rank["window_ns"] for rank in ranks)
        longest = max(wait["duration_ns"] for wait in waits)
        batches = f"{units.count(len(waits))} batch{'es' if len(waits) > 1 else ''}"
        if len(ranks) < len(document["ranks"]):
            batches += f" of rank {ranks[0]['rank']}" if len(ranks) == 1 else f" of {len(ranks)} ranks"
        sentence = (
            f"{units.duration(waited)} waited for data in {batches} "
            f"({units.share(waited, whole)} of {'the steps' if length else 'the time'}); "
            f"the longest wait took {units.duration(longest)}."
        )
        makers = {maker for wait in waits if (maker := wait.get("maker")) is not None}
        clauses = [_MAKERS[maker] for maker in sorted(makers)]
        parts: dict[str, int] = {}
        for row in loading.get("spent") or []:
            parts[row["part"]] = parts.get(row["part"], 0) + row["ns"]
        part, ns = max(parts.items(), key=lambda item: item[1], default=("other", 0))
        if part != "other" and 2 * ns > total:
            clauses.append(f"{units.share(ns, total)} of the waits is {_LOADING_PARTS[part]}")
        steps = [held for row in loading["steps"] if (held := row.get("bottleneck")) is not None]
        slow = sum(steps)
        if slow:
            clauses.append(f"it holds up {slow} of {len(steps)} {'step' if len(steps) == 1 else 'steps'}")
        more = "; ".join(clauses)
        return f"{sentence} {more[0].upper()}{more[1:]}." if more else sentence


SECTION = DataLoadingSection()
