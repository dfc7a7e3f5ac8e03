"""GPU work by name."""

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
    from traceloom.report.documents.report import KernelRow


class KernelsSection(CoreSection):
    """GPU work by name."""

    key, title = "kernels", "Kernels"
    note = "GPU work by name, summed over ranks."
    in_markdown = True

    def build(self, study: Study[Measured], absent: Absent) -> list[KernelRow]:
        """GPU work by name, the longest first; `ranks` is the number of ranks that ran it."""
        summed = (
            pl.concat([rank.kernels.kernels for rank in study.results])
            .group_by("name", "category", "rule", "kind", maintain_order=True)
            .agg(pl.col("count", "total_ns").sum(), pl.col("min_ns").min(), pl.col("max_ns").max(), ranks=pl.len())
        )
        return absent.listed(with_shares(summed, "total_ns"), "kernels")

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """All names."""
        columns = [
            Col("name", "Name", "name"),
            Col("category", "Category", "text", "communication by a table of rules, memory: copies and fills"),
            Col("total_ns", "Total", "time", "sum of the durations over all ranks"),
            Col("fraction", "Share", "share", "of the sum of all GPU work; what overlaps counts twice"),
            Col("count", "Count", "count"),
            Col("mean_ns", "Mean", "time", scale="one"),
            Col("min_ns", "Shortest", "time", narrow=False, scale="one"),
            Col("max_ns", "Longest", "time", narrow=False, scale="one"),
            *several(document, Col("ranks", "Ranks", "count", "ranks that ran it", narrow=False)),
        ]
        rows = document.get("kernels") or []
        if rows:
            note = covering(rows, "total_ns", "of kernels, copies and fills")
            yield Table("kernel-table", "GPU work", columns, rows, "kernels", note)


SECTION = KernelsSection()
