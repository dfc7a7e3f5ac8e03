"""How evenly work is spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from traceloom import analyze
from traceloom.analyze.across.imbalance import BALANCE_SCHEMA, LOAD_SCHEMA
from traceloom.analyze.across.load import MEASURES
from traceloom.analyze.across.rank_part import RankPart
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import SEVERAL, RanksSection
from traceloom.report.sections.section import Columns, Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Cells, Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import ImbalanceValue

_WORDS = {
    "compute_ns": "compute",
    "embedding_ns": "embedding tables",
    "exchanged_bytes": "bytes sent in all-to-alls",
    "tokens": "tokens",
    "memory_bytes": "memory",
}


class ImbalanceSection(RanksSection["ImbalanceValue"]):
    """Balance of load over the ranks."""

    key, title = "imbalance", "Imbalance"
    note = "How evenly compute, memory, tokens and exchanged bytes lie on the ranks."
    what = "balance of load"
    missing = SEVERAL
    parts = {
        "measures": Part(
            BALANCE_SCHEMA,
            "max, mean and min over the ranks",
            nullable=("worst_step",),
            empty="no measure is known of at least two ranks",
            ranked=False,
        ),
        "ranks": Part(LOAD_SCHEMA, "mean per step of each rank", nullable=("host", *_WORDS), ranked=False),
    }

    def build(self, study: Study[RankPart], absent: Absent) -> ImbalanceValue | None:
        if len(study.results) < 2:
            absent.say("imbalance")
            return None
        balance = analyze.imbalance(list(study.results))
        return self.lists({"measures": balance.measures, "ranks": balance.ranks}, absent)

    def tables(self, value: ImbalanceValue) -> Iterator[Table]:
        if not value["measures"]:
            return
        rows = []
        for row in value["measures"]:
            measure = row["measure"]
            write = units.duration if measure.endswith("_ns") else units.size if measure.endswith("_bytes") else None
            figures = {
                name: "unknown" if figure is None else write(round(figure)) if write else units.number(figure)
                for name, figure in (("mean", row["mean"]), ("max", row["max"]), ("min", row["min"]))
            }
            rows.append({**row, **figures, "word": _WORDS[measure]})
        columns: Columns = [Col("word", "Of"), "max_over_mean", Col("mean", "Mean", hint="per rank and step"),
                   Col("max", "Max"), "max_rank", Col("min", "Min", narrow=False), "+min_rank",
                   "+worst_max_over_mean", "+worst_step"]  # fmt: skip
        yield table("imbalance.measures", "Balance", columns, rows)
        ranks: Sequence[Cells] = value["ranks"]
        measured = [name for name in MEASURES if any(row[name] is not None for row in ranks)]
        yield table("imbalance.ranks", "Load of each rank", ["rank", *measured], ranks, "Means over the steps.")

    def summary(self, value: ImbalanceValue) -> str | None:
        if not value["measures"]:
            return None
        worst = max(value["measures"], key=lambda row: row["max_over_mean"])
        ratio = f"max ÷ mean {worst['max_over_mean']:.2f} (rank {worst['max_rank']})"
        return f"the least even is {_WORDS[worst['measure']]}: {ratio}"


SECTION = ImbalanceSection()
