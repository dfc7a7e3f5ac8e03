"""What the allocator had given out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.report import curve
from traceloom.report.absent import Absent
from traceloom.report.measure import Measured
from traceloom.report.names import allocator, rank_name
from traceloom.report.sections.section import CoreSection, Study
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import CurveRow, MemoryValue


class MemorySection(CoreSection):
    """What the allocator had given out."""

    key, title = "memory", "Memory"
    note = "What the allocator had given out."
    path = "memory.devices"

    def build(self, study: Study[Measured], absent: Absent) -> MemoryValue:
        """Peaks by device, and the curve of each as columns."""
        curves: list[CurveRow] = []
        for rank in study.results:
            for values in rank.memory.curve.partition_by("device_type", "device"):
                if values["reserved_bytes"].null_count():
                    absent.say("memory.curve[*].reserved_bytes[*]")
                curves.append(
                    {
                        "rank": absent.value(rank.trace.rank, "memory.curve[*].rank"),
                        "device_type": values["device_type"][0],
                        "device": values["device"][0],
                        "time_ns": (values["time_ns"] - absent.epoch_ns).to_list(),
                        "allocated_bytes": values["allocated_bytes"].to_list(),
                        "reserved_bytes": values["reserved_bytes"].to_list(),
                    }
                )
        return {
            "devices": absent.listed(study.concat(lambda rank: rank.memory.devices), "memory.devices"),
            "curve": curves,
        }

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Peaks of every device of every rank."""
        part, ranks = document.get("memory") or {}, document["ranks"]
        devices = part.get("devices") or []
        if not devices:
            return
        names = {rank["rank"]: rank_name(rank, k) for k, rank in enumerate(ranks)}
        curves = {(c["rank"], c["device_type"], c["device"]): c["allocated_bytes"] for c in part["curve"]}
        rows = [
            {
                **row,
                "rank": names.get(row["rank"], "–"),
                "where": allocator(row),
                "over_time": [value or 0 for value in curves.get((row["rank"], row["device_type"], row["device"]), [])],
            }
            for row in devices
        ]
        counted = any(row.get("evidence") == "running-sum" for row in devices)
        columns = [
            *((Col("rank", "Rank"),) if len(ranks) > 1 else ()),
            Col("where", "Device"),
            Col("peak_bytes", "Peak", "bytes", "most allocated at once"),
            Col("peak_time_ns", "At", "time", "after the start of the recording", narrow=False),
            Col("start_bytes", "At start", "bytes", narrow=False),
            Col("end_bytes", "At end", "bytes"),
            Col("allocation_count", "Allocations", "count"),
            Col("free_count", "Frees", "count", narrow=False),
            Col("over_time", "Over time", "spark"),
        ]
        note = "of the CPU: more than at the start of the recording" if counted else ""
        yield Table("memory-table", "Memory", columns, rows, "memory.devices", note)

    def picture(self, document: ReportDocument) -> str:
        """The curves; the script shows those of the chosen rank."""
        ranks = [rank["rank"] for rank in document["ranks"]]
        curves = []
        for of_device in (document.get("memory") or {}).get("curve") or []:
            if of_device["time_ns"]:
                position = ranks.index(of_device["rank"]) if of_device["rank"] in ranks else 0
                only = "" if len(ranks) == 1 else f' data-of-rank="{position}"'
                curves.append(f"<div{only}>{curve.figure(of_device)}</div>")
        return "".join(curves)


SECTION = MemorySection()
