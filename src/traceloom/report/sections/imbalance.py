"""How evenly work is spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from traceloom import analyze
from traceloom.analyze.across.imbalance import BALANCE_SCHEMA, LOAD_SCHEMA
from traceloom.analyze.across.load import MEASURES
from traceloom.analyze.across.rank_part import RankPart
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import SEVERAL, part_of
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import or_null, record, rows
from traceloom.report.table import Col, Table

_WORDS = {
    "compute_ns": "compute",
    "embedding_ns": "embedding tables",
    "exchanged_bytes": "bytes sent in all-to-alls",
    "tokens": "tokens",
    "memory_bytes": "memory",
}
_WHY = {
    "host": "the file does not name its host",
    "compute_ns": "no GPU work was recorded",
    "embedding_ns": "no kernels of embedding tables ran",
    "exchanged_bytes": "no all-to-all was recorded, or not how much was sent",
    "tokens": "shapes were not recorded, or no `aten::embedding` was called",
    "memory_bytes": "allocations were not recorded",
}


def _build(study: Study[RankPart], absent: Absent) -> Row | None:
    if len(study.results) < 2:
        absent.say("imbalance")
        return None
    balance = analyze.imbalance(list(study.results))
    out = {
        "measures": absent.rows(balance.measures, "imbalance.measures"),
        "ranks": absent.rows(balance.ranks, "imbalance.ranks"),
    }
    if not out["measures"]:
        absent.say("imbalance.measures")
    return out


def _spoken(name: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    if name.endswith("_ns"):
        return units.duration(round(value))
    return units.size(round(value)) if name.endswith("_bytes") else units.number(value)


def _tables(value: Row | None) -> Iterator[Table]:
    if value is None or not value["measures"]:
        return
    shown = [
        {
            **row,
            "word": _WORDS[row["measure"]],
            "mean": _spoken(row["measure"], row["mean"]),
            "max": _spoken(row["measure"], row["max"]),
            "min": _spoken(row["measure"], row["min"]),
        }
        for row in value["measures"]
    ]
    yield Table(
        "imbalance-measures",
        "Balance",
        [
            Col("word", "Of"),
            Col("max_over_mean", "Max ÷ mean", "number", "1 is even"),
            Col("mean", "Mean", hint="per rank and step"),
            Col("max", "Most"),
            Col("max_rank", "on rank", "count"),
            Col("min", "Least", narrow=False),
            Col("min_rank", "on rank", "count", narrow=False),
            Col("worst_max_over_mean", "Worst step", "number", "max ÷ mean there", narrow=False),
            Col("worst_step", "is", "count", narrow=False),
        ],
        shown,
        "imbalance.measures",
    )
    kinds = {"_ns": "time", "_bytes": "bytes"}
    columns = [
        Col(name, _WORDS[name].capitalize(), next((kinds[end] for end in kinds if name.endswith(end)), "number"))
        for name in MEASURES
        if any(row[name] is not None for row in value["ranks"])
    ]
    yield Table(
        "imbalance-ranks", "Load of each rank", [Col("rank", "Rank", "count"), *columns], value["ranks"],
        "imbalance.ranks", "Means over the steps.",
    )  # fmt: skip


def _summary(value: Row | None) -> str | None:
    if value is None or not value["measures"]:
        return None
    worst = max(value["measures"], key=lambda row: row["max_over_mean"])
    ratio = f"max ÷ mean {worst['max_over_mean']:.2f} (rank {worst['max_rank']})"
    return f"the least even is {_WORDS[worst['measure']]}: {ratio}"


SECTION = Section(
    key="imbalance",
    title="Imbalance",
    note="How evenly compute, memory, tokens and exchanged bytes lie on the ranks.",
    measure=part_of,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=or_null(
        record(
            {
                "measures": rows(BALANCE_SCHEMA, nullable={"worst_step"}, what="max, mean and min over the ranks"),
                "ranks": rows(LOAD_SCHEMA, nullable=set(_WHY), what="mean per step of each rank"),
            },
            what="balance of load",
        )
    ),
    reasons={
        "imbalance": SEVERAL,
        "imbalance.measures": "no measure is known of at least two ranks",
        "imbalance.measures[*].worst_step": "the traces mark no steps",
        **{f"imbalance.ranks[*].{name}": why for name, why in _WHY.items()},
    },
)
