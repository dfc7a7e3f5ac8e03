"""Framework operators by host time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom.report.absent import Absent
from traceloom.report.measure import Measured
from traceloom.report.sections.section import CoreSection, Study, covering, several, with_shares
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import OperatorRow

_ON_DEVICE = (
    Col("self_device_ns", "GPU, self", "time", "GPU work launched directly by the operator", narrow=False, scale="gpu"),
    Col("device_ns", "GPU", "time", "GPU work launched in the operator or in those it calls", scale="gpu"),
    Col("kernel_count", "Kernels", "count", "launched in the operator or in those it calls", narrow=False),
)


class OperatorsSection(CoreSection):
    """Framework operators by host time."""

    key, title = "operators", "Operators"
    note = "Framework operators by host time."
    in_markdown = True

    def build(self, study: Study[Measured], absent: Absent) -> list[OperatorRow]:
        """Operators by name (and shapes), the longest self time first."""
        frames = pl.concat([rank.operators.operators for rank in study.results])
        device = pl.col("device_ns", "self_device_ns", "kernel_count")
        summed = frames.group_by("name", "shapes", maintain_order=True).agg(
            pl.col("count", "self_ns", "total_ns").sum(),
            pl.when(device.is_not_null().any()).then(device.sum()),
            ranks=pl.len(),
        )
        return absent.listed(with_shares(summed, "self_ns"), "operators")

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """All names; with their input shapes where these are counted apart, with GPU time where there is a GPU."""
        rows = document.get("operators") or []
        if not rows:
            return
        device = any(row.get("device_ns") is not None for row in rows)
        shapes = any(row.get("shapes") is not None for row in rows)
        inside = "host time inside the operator but outside the operators it calls"
        called = "host time with the operators it calls; recursion counts more than once"
        columns = [
            Col("name", "Name", "name"),
            *((Col("shapes", "Shapes of inputs", "name"),) if shapes else ()),
            Col("self_ns", "Self", "time", inside, scale="host"),
            Col("fraction", "Share", "share", "of the self time of all operators"),
            Col("total_ns", "Total", "time", called, scale="host"),
            Col("count", "Count", "count"),
            Col("mean_ns", "Mean", "time", "total by count", narrow=False),
            *(_ON_DEVICE if device else ()),
            *several(document, Col("ranks", "Ranks", "count", "ranks that ran it", narrow=False)),
        ]
        note = covering(rows, "self_ns", "of host time")
        yield Table("operator-table", "Operators", columns, rows, "operators", note)


SECTION = OperatorsSection()
