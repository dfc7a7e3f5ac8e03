"""Copies and fills: how much, in which direction, how fast, for whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from traceloom import analyze
from traceloom.analyze.copies import KIND_SCHEMA, OP_SCHEMA
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import ranked, record
from traceloom.report.table import Col, Table

_OPS = 50  # of each rank
_RATES = ("bytes_per_s", "min_bytes_per_s", "max_bytes_per_s")
USUAL = pl.Schema(
    {
        "device": pl.Int32(),
        "kind": pl.String(),
        **{
            f"{how}_{what}": pl.Float64() if how == "mean" else pl.Int64()
            for what in ("call_count", "copied_bytes", "total_ns")
            for how in ("mean", "min", "max")
        },
        "step_count": pl.Int64(),
    }
)


@dataclass(frozen=True)
class Measured:
    """What is kept of one rank."""

    kinds: pl.DataFrame
    ops: pl.DataFrame
    usual: pl.DataFrame


def _measure(trace: Trace, _options: ReportOptions) -> Measured:
    copies = analyze.copies(trace)
    return Measured(copies.kinds, copies.ops.head(_OPS), copies.per_step.select(list(USUAL)).cast(USUAL))


def _build(study: Study[Measured], absent: Absent) -> Row:
    out = {
        "kinds": absent.rows(study.concat(lambda measured: measured.kinds), "copies.kinds"),
        "operators": absent.rows(study.concat(lambda measured: measured.ops), "copies.operators"),
        "per_step": absent.rows(study.concat(lambda measured: measured.usual), "copies.per_step"),
    }
    for name, rows in out.items():
        if not rows:
            absent.say(f"copies.{name}")
    return out


def _tables(value: Row) -> Iterator[Table]:
    rows = value["kinds"]
    if not rows:
        return
    ranks = [Col("rank", "Rank", "count")] if len({row["rank"] for row in rows}) > 1 else []
    devices = [Col("device", "GPU", "count")] if len({row["device"] for row in rows}) > 1 else []
    yield Table(
        "copies-kinds",
        "Copies by direction",
        [
            *ranks,
            *devices,
            Col("kind", "Direction"),
            Col("source_memory", "From", narrow=False),
            Col("target_memory", "To", narrow=False),
            Col(
                "pageable",
                "Pageable",
                hint="whether pageable memory of the host takes part: such copies are staged",
                narrow=False,
            ),
            Col("bytes", "Bytes", "bytes"),
            Col("count", "Count", "count"),
            Col("total_ns", "Time", "time"),
            Col(
                "bytes_per_s",
                "Bandwidth",
                "byte_rate",
                "bytes over summed time of the timed copies; 1 GB is 10^9 bytes",
            ),
            Col("min_bytes_per_s", "Slowest", "byte_rate", narrow=False),
            Col("max_bytes_per_s", "Fastest", "byte_rate", narrow=False),
            Col("instant_count", "Too short", "count", "copies of duration 0, in no bandwidth", narrow=False),
        ],
        [{**row, "pageable": {True: "yes", False: "no"}.get(row["pageable"])} for row in rows],
        "copies.kinds",
    )
    yield Table(
        "copies-operators",
        "Copies by operator",
        [
            *ranks,
            Col("kind", "Direction"),
            Col("bytes", "Bytes", "bytes"),
            Col("count", "Count", "count"),
            Col("total_ns", "Time", "time"),
            Col("op", "Operator", "name"),
        ],
        value["operators"],
        "copies.operators",
    )
    if value["per_step"]:
        yield Table(
            "copies-per-step",
            "Copies of a usual step",
            [
                *ranks,
                *devices,
                Col("kind", "Direction"),
                Col("mean_call_count", "Copies", "number", "mean over the whole steps"),
                Col("mean_copied_bytes", "Bytes", "bytes"),
                Col("mean_total_ns", "Time", "time"),
                Col("min_total_ns", "Least", "time"),
                Col("max_total_ns", "Most", "time"),
            ],
            value["per_step"],
            "copies.per_step",
        )


def _summary(value: Row) -> str | None:
    rows = [row for row in value["kinds"] if row["kind"] != "fill"]
    if not rows:
        return None
    sized = [row for row in rows if row["bytes"] is not None]
    amount = f"{units.size(sum(row['bytes'] for row in sized))} in " if sized else ""
    count = sum(row["count"] for row in rows)
    pageable = sum(row["count"] for row in rows if row["pageable"])
    held = f", {units.count(pageable)} of them from or to pageable memory" if pageable else ""
    time = units.duration(sum(row["total_ns"] for row in rows))
    return f"{amount}{units.count(count)} {'copy' if count == 1 else 'copies'} took {time}{held}"


SECTION = Section(
    key="copies",
    title="Copies",
    note="How much is copied and filled, in which direction, how fast and for whom.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=record(
        {
            "kinds": ranked(
                KIND_SCHEMA,
                nullable={"device", "source_memory", "target_memory", "pageable", "bytes", *_RATES},
                what="copies and fills by device, direction and kinds of memory",
            ),
            "operators": ranked(
                OP_SCHEMA,
                nullable={"op", "pageable", "bytes"},
                what="copies and fills by the operator that launched them",
            ),
            "per_step": ranked(
                USUAL,
                nullable={"device", *(f"{how}_copied_bytes" for how in ("mean", "min", "max"))},
                what="copies and fills of a usual step, by direction",
            ),
        },
        what="copies and fills of GPU memory",
    ),
    reasons={
        "copies.kinds": "no copies or fills were recorded",
        "copies.operators": "no copies or fills were recorded",
        "copies.per_step": "the trace holds no whole step with copies",
        "copies.kinds[*].device": "the file does not number the device",
        "copies.kinds[*].source_memory": "a fill has no source, or the recording does not say which memory it is",
        "copies.kinds[*].target_memory": "the recording does not say which memory it is",
        "copies.kinds[*].pageable": "the recording does not say whether the host's memory is pinned",
        "copies.operators[*].pageable": "the recording does not say whether the host's memory is pinned",
        "copies.operators[*].op": "no operator is recorded around the launch",
        **{
            f"copies.{name}[*].bytes": "the recording does not say how much is copied"
            for name in ("kinds", "operators")
        },
        **{f"copies.kinds[*].{name}": "no such copy has both a size and a duration" for name in _RATES},
        **{
            f"copies.per_step[*].{how}_copied_bytes": "the recording does not say how much is copied"
            for how in ("mean", "min", "max")
        },
        **{f"copies.{name}[*].rank": "the file does not say its rank" for name in ("kinds", "operators", "per_step")},
    },
)
