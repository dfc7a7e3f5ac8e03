"""Who sends how much to whom."""

from __future__ import annotations

from collections.abc import Iterator

from traceloom import analyze
from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.collective.matrix import EXCHANGE_SCHEMA, MATRIX_SCHEMA
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.heat_map import heat_map
from traceloom.report.sections.of_ranks import calls_of, part_of
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import record, rows
from traceloom.report.table import Col, Table

_MOST = 4096  # cells; of larger jobs those with most bytes
_NONE = "no communication was recorded of which ranks and bytes are known"
_EVEN = {
    "group": "the recording does not say which group communicates",
    "rank": "the file does not say its rank",
    "sent_bytes": "the recording does not say how much goes in",
    "received_bytes": "the recording does not say how much comes out",
    "peer_max_over_mean": "the recording has no split sizes",
}


def _build(study: Study[RankPart], absent: Absent) -> Row:
    calls = calls_of(study.results)
    cells = analyze.matrix(calls)
    kept = cells.sort("bytes", "source", "target", descending=[True, False, False]).head(_MOST).sort("source", "target")
    out = {
        "cells": absent.rows(kept, "rank_matrix.cells"),
        "exchanges": absent.rows(analyze.exchanges(calls), "rank_matrix.exchanges"),
        "omitted_cell_count": cells.height - kept.height,
    }
    for name in ("cells", "exchanges"):
        if not out[name]:
            absent.say(f"rank_matrix.{name}")
    return out


def _tables(value: Row) -> Iterator[Table]:
    if value["cells"]:
        yield Table(
            "rank-matrix-cells",
            "From rank to rank",
            [
                Col("source", "From", "count"),
                Col("target", "To", "count"),
                Col("bytes", "Bytes", "bytes"),
                Col("exact_bytes", "Recorded", "bytes", "the part that messages and all-to-all splits say exactly"),
                Col("duration_ns", "Time", "time", "of calls of the sender, shared like bytes; waiting included"),
                Col("count", "Calls", "count"),
            ],
            sorted(value["cells"], key=lambda row: -row["bytes"]),
            "rank_matrix.cells",
            "The way of a collective through the ranks is not recorded: what a rank sends in it is shared evenly.",
        )
    if value["exchanges"]:
        yield Table(
            "rank-matrix-exchanges",
            "All-to-alls",
            [
                Col("rank", "Rank", "count"),
                Col("group", "Group", narrow=False),
                Col("count", "Calls", "count"),
                Col("sent_bytes", "Sent", "bytes"),
                Col("received_bytes", "Received", "bytes"),
                Col("peer_max_over_mean", "Max ÷ mean", "number", "of the bytes to each peer; 1 is even"),
            ],
            value["exchanges"],
            "rank_matrix.exchanges",
        )


def _summary(value: Row) -> str | None:
    cells = value["cells"]
    if not cells:
        return None
    top = max(cells, key=lambda row: row["bytes"])
    exact, whole = sum(row["exact_bytes"] for row in cells), sum(row["bytes"] for row in cells)
    return (
        f"most goes from rank {top['source']} to rank {top['target']} ({units.size(top['bytes'])}); "
        f"{units.share(exact, whole)} of all bytes is recorded, the rest shared evenly"
    )


def _picture(value: Row) -> str:
    cells = value["cells"]
    ranks = sorted({row[end] for row in cells for end in ("source", "target")})
    if len(ranks) < 3 or value["omitted_cell_count"]:
        return ""
    hover_texts = {
        (row["source"], row["target"]): f"rank {row['source']} → rank {row['target']}: {units.size(row['bytes'])}, "
        f"{units.duration(row['duration_ns'])}, {units.count(row['count'])} calls"
        for row in cells
    }
    numbers = {(row["source"], row["target"]): float(row["bytes"]) for row in cells}
    return heat_map(numbers, ranks, ranks, hover_texts, titles=("from rank", "to rank"))


SECTION = Section(
    key="rank_matrix",
    title="Rank × rank",
    note="Who sends how much to whom, and how even exchanges are.",
    measure=part_of,
    build=_build,
    tables=_tables,
    summary=_summary,
    picture=_picture,
    schema=record(
        {
            "cells": rows(MATRIX_SCHEMA, what="bytes and time from rank to rank"),
            "exchanges": rows(EXCHANGE_SCHEMA, nullable=set(_EVEN), what="all-to-alls of each rank"),
            "omitted_cell_count": {"type": "integer"},
        },
        what="communication by sender and receiver",
    ),
    reasons={
        "rank_matrix.cells": _NONE,
        "rank_matrix.exchanges": "no all-to-all was recorded",
        **{f"rank_matrix.exchanges[*].{name}": why for name, why in _EVEN.items()},
    },
)
