"""Who sends how much to whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom import analyze
from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.collective.matrix import EXCHANGE_SCHEMA, MATRIX_SCHEMA
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.heat_map import heat_map
from traceloom.report.sections.of_ranks import RanksSection, calls_of
from traceloom.report.sections.section import Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import RankMatrixValue

_MOST = 4096  # cells; of larger jobs those with most bytes


class RankMatrixSection(RanksSection["RankMatrixValue"]):
    """Communication by sender and receiver."""

    key, title = "rank_matrix", "Rank × rank"
    note = "Who sends how much to whom, and how even exchanges are."
    what = "communication by sender and receiver"
    parts = {
        "cells": Part(
            MATRIX_SCHEMA,
            "bytes and time from rank to rank",
            empty="no communication was recorded of which ranks and bytes are known",
            ranked=False,
        ),
        "exchanges": Part(
            EXCHANGE_SCHEMA,
            "all-to-alls of each rank",
            nullable=("group", "rank", "sent_bytes", "received_bytes", "peer_max_over_mean"),
            empty="no all-to-all was recorded",
            ranked=False,
        ),
    }
    others = {"omitted_cell_count": {"type": "integer"}}

    def build(self, study: Study[RankPart], absent: Absent) -> RankMatrixValue:
        calls = calls_of(study.results)
        cells = analyze.matrix(calls)
        largest = cells.sort("bytes", "source", "target", descending=[True, False, False]).head(_MOST)
        kept = largest.sort("source", "target")
        lists = self.lists({"cells": kept, "exchanges": analyze.exchanges(calls)}, absent)
        return {**lists, "omitted_cell_count": cells.height - kept.height}

    def tables(self, value: RankMatrixValue) -> Iterator[Table]:
        if value["cells"]:
            columns = ["source", "target", "bytes", "exact_bytes", "duration_ns", "count"]
            rows = sorted(value["cells"], key=lambda row: -row["bytes"])
            note = (
                "The way of a collective through the ranks is not recorded: what a rank sends in it is shared evenly."
            )
            yield table("rank_matrix.cells", "From rank to rank", columns, rows, note)
        if value["exchanges"]:
            columns = ["rank", "+group", "count", "sent_bytes", "received_bytes", "peer_max_over_mean"]
            yield table("rank_matrix.exchanges", "All-to-alls", columns, value["exchanges"])

    def summary(self, value: RankMatrixValue) -> str | None:
        cells = value["cells"]
        if not cells:
            return None
        top = max(cells, key=lambda row: row["bytes"])
        exact, whole = sum(row["exact_bytes"] for row in cells), sum(row["bytes"] for row in cells)
        return (
            f"most goes from rank {top['source']} to rank {top['target']} ({units.size(top['bytes'])}); "
            f"{units.share(exact, whole)} of all bytes is recorded, the rest shared evenly"
        )

    def picture(self, value: RankMatrixValue) -> str:
        cells = value["cells"]
        ranks = sorted({row[end] for row in cells for end in ("source", "target")})
        if len(ranks) < 3 or value["omitted_cell_count"]:
            return ""
        hover_texts = {
            (row["source"], row["target"]): f"rank {row['source']} → rank {row['target']}: {units.size(row['bytes'])}, "
            f"{units.duration(row['duration_ns'])}, {units.counted(row['count'], 'call')}"
            for row in cells
        }
        numbers = {(row["source"], row["target"]): float(row["bytes"]) for row in cells}
        return heat_map(numbers, ranks, ranks, hover_texts, titles=("from rank", "to rank"))


SECTION = RankMatrixSection()
