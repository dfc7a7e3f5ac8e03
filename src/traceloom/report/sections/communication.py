"""Collectives by kind and group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom.analyze.communication import KEYS
from traceloom.report.absent import Absent
from traceloom.report.measure import Measured
from traceloom.report.sections.section import CoreSection, Study, covering, several
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import CommunicationValue


class CommunicationSection(CoreSection):
    """Collectives by kind and group."""

    key, title = "communication", "Communication"
    note = "Collectives by kind and group."
    path = "communication.collectives"

    def build(self, study: Study[Measured], absent: Absent) -> CommunicationValue:
        """Collectives by kind, group, type and place, and what they cost every rank."""
        optional = pl.col("bytes", "exposed_ns")
        collectives = (
            pl.concat([rank.communication.collectives for rank in study.results])
            .group_by(*KEYS, maintain_order=True)
            .agg(
                pl.col("count", "total_ns").sum(),
                pl.col("min_ns").min(),
                pl.col("max_ns").max(),
                pl.when(optional.is_not_null().any()).then(optional.sum()),
                ranks=pl.len(),
            )
            .with_columns(mean_ns=pl.col("total_ns") // pl.col("count"))
            .sort("total_ns", descending=True, maintain_order=True)
        )
        return {
            "collectives": absent.listed(collectives, "communication.collectives"),
            "ranks": [
                {
                    "rank": absent.value(rank.trace.rank, "communication.ranks[*].rank"),
                    "devices": absent.rows(rank.communication.devices, "communication.ranks[*].devices"),
                }
                for rank in study.results
            ],
        }

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """On devices, where there are any, before the calls of the host."""
        collectives = (document.get("communication") or {}).get("collectives") or []
        rows = sorted(collectives, key=lambda row: row["where"] != "device")
        on_device = [row for row in rows if row["where"] == "device"]
        columns = [
            Col("kind", "Collective"),
            Col("where", "Where", "text", "on a device, or a host operation", narrow=False),
            Col("group", "Group", "text", "as recorded", narrow=False),
            Col("group_size", "Ranks of it", "count"),
            Col("element_type", "Type", narrow=False),
            Col("count", "Count", "count"),
            Col("bytes", "Bytes", "bytes", "sum over all calls and ranks"),
            Col("total_ns", "Total", "time", "sum over all ranks; waiting for other ranks is part of it"),
            Col("mean_ns", "Mean", "time", scale="one"),
            Col("max_ns", "Longest", "time", narrow=False, scale="one"),
            Col("exposed_ns", "Exposed", "time", "time not overlapped by compute"),
            *several(document, Col("ranks", "Ranks", "count", "ranks that ran it", narrow=False)),
        ]
        if rows:
            # The host's calls of what runs on a device only say how long it took to launch.
            note = covering(on_device or rows, "total_ns", "on devices" if on_device else "on the host")
            yield Table("collective-table", "Communication", columns, rows, "communication.collectives", note)


SECTION = CommunicationSection()
