"""Sections about differences between ranks: stragglers, load imbalance, pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.across_ranks import (
    BALANCE_SCHEMA,
    LOAD_SCHEMA,
    STAGE_SCHEMA,
    STEP_SCHEMA,
    AcrossRanks,
    across_ranks,
)
from traceloom.analyze.bandwidth import correct_links_by_host
from traceloom.analyze.lateness import (
    CAUSE_LABELS,
    COLLECTIVE_SCHEMA,
    HEAT_SCHEMA,
    HOST_SCHEMA,
    LINK_SCHEMA,
    RANK_SCHEMA,
    REASON_SCHEMA,
)
from traceloom.analyze.matched_collectives import CLOCK_SCHEMA
from traceloom.analyze.rank_summary import LOAD_MEASURES, RankSummary
from traceloom.report.document import (
    Cells,
    Col,
    ListSchema,
    ReportOptions,
    Table,
    UnknownValues,
    build_object_schema,
)
from traceloom.report.figure import draw_heat_map, pick_block_character
from traceloom.report.sections.section import Columns, Measurements, Section, Value, build_table
from traceloom.system import units
from traceloom.trace.frames import build_schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import AcrossRanksValue, ImbalanceValue, PipelineValue


ONE_RANK_REASON = "only one rank is at hand; give the traces of several ranks of one run"
NO_CALLS_REASON = "no communication was recorded"


class RanksSection(Section[RankSummary, Value]):
    """A section about communication or several ranks; all of them share one measurement."""

    def measure(self, trace: Trace, options: ReportOptions) -> RankSummary:
        return analyze.summarize_rank(trace)


def merge_rank_calls(parts: Sequence[RankSummary]) -> pl.DataFrame:
    """Returns the communication of all ranks, with links as reported by their hosts."""
    calls = pl.concat([part.calls for part in parts])
    hosts = {
        part.rank: part.host for part in parts if part.rank is not None and part.host is not None
    }
    links = {
        part.rank: part.link for part in parts if part.rank is not None and part.link is not None
    }
    return correct_links_by_host(calls, hosts, links) if len(hosts) > 1 else calls


_MAX_COLLECTIVES = 100  # collectives: those with the longest waits
_MAX_CELLS = 20_000
_MAX_BLOCKS = 60  # max steps in a row of characters
_COLLECTIVES = pl.Schema(
    {name: kind for name, kind in COLLECTIVE_SCHEMA.items() if name != "met_ns"}
)
_UNMATCHED = build_schema("rank kind group count")
_NO_LAUNCH_REASON = "the launch of the last one is not recorded"


class AcrossRanksSection(RanksSection["AcrossRanksValue"]):
    key, title = "across_ranks", "Across ranks"
    note = "Who arrived last at collectives, why, and how long the others waited."
    what = "the ranks of a job against each other"
    missing = ONE_RANK_REASON
    parts = {
        "ranks": ListSchema(RANK_SCHEMA, "waits of and for each rank", ranked=False),
        "hosts": ListSchema(HOST_SCHEMA, "the same, added over the ranks of a host", ranked=False),
        "reasons": ListSchema(
            REASON_SCHEMA, "by rank and cause at the ends of the chains", ranked=False
        ),
        "collectives": ListSchema(
            _COLLECTIVES,
            f"the {_MAX_COLLECTIVES} with the longest waits",
            {"launch_skew_ns": _NO_LAUNCH_REASON, "arrival_wait_ns": _NO_LAUNCH_REASON},
            (
                "kind",
                "group",
                "group_size",
                "whole",
                "sequence",
                "size_bytes",
                "step",
                "transfer_gb_per_s",
                "evidence",
            ),
            ranked=False,
        ),
        "chains": ListSchema(
            LINK_SCHEMA,
            "causes link by link, for the longest waits",
            {"detail": "the cause has no parts with names, or they are no longer than elsewhere"},
            ("cause", "follows"),
            ranked=False,
        ),
        "heat": ListSchema(HEAT_SCHEMA, "steps × ranks", nullable=("step",), ranked=False),
        "clocks": ListSchema(
            CLOCK_SCHEMA, "how clocks were corrected", nullable=("residual_ns",), ranked=False
        ),
        "unmatched": ListSchema(
            _UNMATCHED, "calls without a partner", nullable=("kind", "group"), ranked=False
        ),
    }
    others = {
        "sentence": {"type": "string"},
        "collective_count": {"type": "integer"},
        "collective_ns": {"type": "integer"},
        "wait_ns": {"type": "integer"},
        "notices": {
            "description": "what did not match, and what the result cannot see",
            "type": "array",
            "items": build_object_schema(
                {
                    "slug": {"type": "string"},
                    "severity": {"type": "string"},
                    "count": {"type": "integer"},
                    "message": {"type": "string"},
                    "rank": {"type": ["integer", "null"]},
                    "where": {"type": "string"},
                }
            ),
        },
    }
    unknown = {
        "collectives": "no collective could be joined over ranks",
        "notices[*].rank": "the notice is about the whole run",
    }

    def build(
        self, measurements: Measurements[RankSummary], unknowns: UnknownValues
    ) -> AcrossRanksValue | None:
        if len(set(measurements.part.process_numbers)) < 2:
            unknowns.explain("across_ranks")
            return None
        comparison = across_ranks(measurements.results)
        if not comparison.collectives.height:
            unknowns.explain("across_ranks.collectives")
        worst = comparison.collectives.sort("wait_ns", "instance", descending=[True, False]).head(
            _MAX_COLLECTIVES
        )
        frames = {
            "ranks": comparison.ranks,
            "hosts": comparison.hosts,
            "reasons": comparison.reasons.head(_MAX_COLLECTIVES),
            "collectives": worst.select(list(_COLLECTIVES)),
            "chains": comparison.chains,
            "heat": comparison.heat.head(_MAX_CELLS),
            "clocks": comparison.clocks,
            "unmatched": comparison.unmatched,
        }
        for notice in comparison.notices:
            unknowns.value(notice.rank, "across_ranks.notices[*].rank")
        return {
            "sentence": _describe_waiting(comparison),
            "collective_count": comparison.collectives.height,
            "collective_ns": comparison.collective_ns,
            "wait_ns": comparison.wait_ns,
            "notices": [notice.to_dict() for notice in comparison.notices],
            **self.lists(frames, unknowns),
        }

    def tables(self, value: AcrossRanksValue) -> Iterator[Table]:
        if value["collectives"]:
            # the ranks with a figure of their steps in characters
            cells = {
                (row["step"], row["rank"]): row["root_ns"]
                for row in value["heat"]
                if row["step"] is not None
            }
            steps = sorted({step for step, _ in cells})[:_MAX_BLOCKS]
            max_value = max(cells.values(), default=0)
            ranks = [
                {
                    **row,
                    "steps": "".join(
                        pick_block_character(cells.get((step, row["rank"]), 0), max_value)
                        for step in steps
                    )
                    or None,
                }
                for row in sorted(value["ranks"], key=lambda row: -row["root_ns"])
            ]
            blame = [
                "root_ns",
                "blame_ns",
                "wait_ns",
                "last_count",
                "+collective_count",
                "+alone_ns",
            ]
            in_steps = Col("steps", "Steps", hint="each step, darker = waited longer because of it")
            yield build_table(
                "across_ranks.ranks", "Ranks", ["rank", *blame, "+host", in_steps], ranks
            )
            if 1 < len(value["hosts"]) < len(value["ranks"]):
                yield build_table("across_ranks.hosts", "Hosts", ["host", *blame], value["hosts"])
            reasons = [{**row, "word": CAUSE_LABELS[row["cause"]]} for row in value["reasons"]]
            columns: Columns = [
                "rank",
                "waited_ns",
                "collective_count",
                "+max_late_ns",
                Col("word", "Cause", "name"),
            ]
            yield build_table("across_ranks.reasons", "Why ranks were late", columns, reasons)
            chains = []
            for row in value["chains"]:
                description = "smaller parts together"
                if row["cause"] is not None:
                    follows = (
                        f" (collective {row['follows']})" if row["follows"] is not None else ""
                    )
                    description = (
                        CAUSE_LABELS[row["cause"]]
                        + follows
                        + (f": {row['detail']}" if row["detail"] else "")
                    )
                chains.append({**row, "description": description})
            columns = [
                "chain",
                "link",
                "rank",
                "late_ns",
                "ns",
                Col("description", "What took longer there", "name"),
            ]
            note = (
                "For the longest waits: what the last rank did longer than the others since they last stood together; "
                "the parts of a link add up to how late it was."
            )
            yield build_table("across_ranks.chains", "Chains of causes", columns, chains, note)
            columns = [
                "instance",
                "+step",
                "kind",
                "+group",
                "+size_bytes",
                "+recorded",
                "start_skew_ns",
                "wait_ns",
                "+launch_skew_ns",
                "+arrival_wait_ns",
                "transfer_ns",
                "last_rank",
                "late_ns",
                "+unexplained_ns",
                "root_rank",
                "+root_cause",
            ]
            yield build_table(
                "across_ranks.collectives", "Longest waits", columns, value["collectives"]
            )
            columns = ["host", "ranks", "offset_ns", "drift", "residual_ns", "meetings"]
            yield build_table("across_ranks.clocks", "Clocks", columns, value["clocks"])
        if value["unmatched"]:
            columns = ["rank", "kind", "group", "count"]
            yield build_table("across_ranks.unmatched", "Not joined", columns, value["unmatched"])
        if value["notices"]:
            yield build_table(
                "across_ranks.notices",
                "What to know",
                ["slug", "count", "message"],
                value["notices"],
            )

    def summary(self, value: AcrossRanksValue) -> str | None:
        if not (value["collectives"] or value["unmatched"]):
            return None
        text: str = value["sentence"]
        return text[0].lower() + text[1:].rstrip(".")

    def picture(self, value: AcrossRanksValue) -> str:
        in_steps = {
            (row["rank"], step): row for row in value["heat"] if (step := row["step"]) is not None
        }
        cells = {cell: float(row["root_ns"]) for cell, row in in_steps.items()}
        hover_texts = {
            (
                rank,
                step,
            ): f"rank {rank}, step {step}: others waited {units.format_duration(row['root_ns'])} because of it, "
            f"it waited {units.format_duration(row['wait_ns'])}"
            for (rank, step), row in in_steps.items()
        }
        ranks, steps = (
            sorted({rank for rank, _ in in_steps}),
            sorted({step for _, step in in_steps}),
        )
        picture = draw_heat_map(cells, ranks, steps, hover_texts, titles=("rank", "step"))
        return (
            f'<p class="quiet">How long others waited because of a rank, by step</p>{picture}'
            if picture
            else ""
        )


def _describe_waiting(comparison: AcrossRanks) -> str:
    if not comparison.collectives.height:
        unmatched_count = int(comparison.unmatched["count"].sum())
        calls = (
            f": {units.format_count(unmatched_count)} calls found no partner on another recorded rank"
            if unmatched_count
            else ""
        )
        return f"No collective could be joined over ranks{calls}."
    share = units.format_share(comparison.wait_ns, comparison.collective_ns)
    text = f"{share} of {units.format_duration(comparison.collective_ns)} in joined collectives is waiting for other ranks"
    clauses = []
    if ordered := int(comparison.collectives["schedule_ns"].sum()):
        clauses.append(
            f"{units.format_share(ordered, comparison.wait_ns)} of the waiting is the order of the pipeline"
        )
    if slowest := comparison.slowest:
        share = units.format_share(slowest.waited_ns, comparison.wait_ns)
        clauses.append(
            f"{share} of the waiting goes back to rank {slowest.rank}, mostly because of: {CAUSE_LABELS[slowest.cause]}"
        )
    return f"{'; '.join([text, *clauses])}."


SECTION = AcrossRanksSection()

_MEASURE_LABELS = {
    "compute_ns": "compute",
    "embedding_ns": "embedding tables",
    "exchanged_bytes": "bytes sent in all-to-alls",
    "tokens": "tokens",
    "memory_bytes": "memory",
}


class ImbalanceSection(RanksSection["ImbalanceValue"]):
    key, title = "imbalance", "Imbalance"
    note = "How evenly compute, memory, tokens and exchanged bytes lie on the ranks."
    what = "balance of load"
    missing = ONE_RANK_REASON
    parts = {
        "measures": ListSchema(
            BALANCE_SCHEMA,
            "max, mean and min over the ranks",
            nullable=("worst_step",),
            empty="no measure is known of at least two ranks",
            ranked=False,
        ),
        "ranks": ListSchema(
            LOAD_SCHEMA,
            "mean per step of each rank",
            nullable=("host", *_MEASURE_LABELS),
            ranked=False,
        ),
    }

    def build(
        self, measurements: Measurements[RankSummary], unknowns: UnknownValues
    ) -> ImbalanceValue | None:
        if len(set(measurements.part.process_numbers)) < 2:
            unknowns.explain("imbalance")
            return None
        balance = analyze.imbalance(list(measurements.results))
        return self.lists({"measures": balance.measures, "ranks": balance.ranks}, unknowns)

    def tables(self, value: ImbalanceValue) -> Iterator[Table]:
        if not value["measures"]:
            return
        rows = []
        for row in value["measures"]:
            measure = row["measure"]
            write = (
                units.format_duration
                if measure.endswith("_ns")
                else units.format_size
                if measure.endswith("_bytes")
                else None
            )
            figures = {
                name: "unknown"
                if figure is None
                else write(round(figure))
                if write
                else units.format_number(figure)
                for name, figure in (
                    ("mean", row["mean"]),
                    ("max", row["max"]),
                    ("min", row["min"]),
                )
            }
            rows.append({**row, **figures, "word": _MEASURE_LABELS[measure]})
        columns: Columns = [
            Col("word", "Of"),
            "max_over_mean",
            Col("mean", "Mean", hint="per rank and step"),
            Col("max", "Max"),
            "max_rank",
            Col("min", "Min", narrow=False),
            "+min_rank",
            "+worst_max_over_mean",
            "+worst_step",
        ]
        yield build_table("imbalance.measures", "Balance", columns, rows)
        ranks: Sequence[Cells] = value["ranks"]
        measured = [name for name in LOAD_MEASURES if any(row[name] is not None for row in ranks)]
        yield build_table(
            "imbalance.ranks",
            "Load of each rank",
            ["rank", *measured],
            ranks,
            "Means over the steps.",
        )

    def summary(self, value: ImbalanceValue) -> str | None:
        if not value["measures"]:
            return None
        worst = max(value["measures"], key=lambda row: row["max_over_mean"])
        ratio = f"max ÷ mean {worst['max_over_mean']:.2f} (rank {worst['max_rank']})"
        return f"the least even is {_MEASURE_LABELS[worst['measure']]}: {ratio}"


IMBALANCE_SECTION = ImbalanceSection()

_MAX_PIPELINE_STEPS = 2000
_NO_PIPELINE_REASON = "no ranks that send to each other with known peers were recorded"


class PipelineSection(RanksSection["PipelineValue"]):
    key, title = "pipeline", "Pipeline"
    note = "Stages by who sends to whom, and the time in which they had nothing to compute."
    what = "pipelines"
    parts = {
        "stages": ListSchema(
            STAGE_SCHEMA,
            "ranks of pipelines, with their bubbles",
            empty=_NO_PIPELINE_REASON,
            ranked=False,
        ),
        "steps": ListSchema(
            STEP_SCHEMA,
            "bubbles of each step and rank",
            nullable=("step",),
            empty=_NO_PIPELINE_REASON,
            ranked=False,
        ),
    }

    def build(
        self, measurements: Measurements[RankSummary], unknowns: UnknownValues
    ) -> PipelineValue:
        if len(set(measurements.part.process_numbers)) < 2:
            return self.lists(
                {"stages": STAGE_SCHEMA.to_frame(), "steps": STEP_SCHEMA.to_frame()}, unknowns
            )
        pipelines = across_ranks(measurements.results).pipeline
        return self.lists(
            {"stages": pipelines.stages, "steps": pipelines.steps.head(_MAX_PIPELINE_STEPS)},
            unknowns,
        )

    def tables(self, value: PipelineValue) -> Iterator[Table]:
        if value["stages"]:
            columns = [
                "rank",
                "pipeline",
                "stage",
                "bubble_fraction",
                "mean_bubble_ns",
                "+min_bubble_ns",
                "+max_bubble_ns",
                "mean_compute_ns",
                "mean_window_ns",
            ]
            yield build_table("pipeline.stages", "Stages", columns, value["stages"])
            columns = [
                "step",
                "rank",
                "stage",
                "bubble_ns",
                "warm_up_ns",
                "steady_ns",
                "drain_ns",
                "in_pairs_ns",
                "+compute_ns",
                "+other_ns",
                "+window_ns",
            ]
            yield build_table("pipeline.steps", "Bubbles by step", columns, value["steps"])

    def summary(self, value: PipelineValue) -> str | None:
        stages = value["stages"]
        if not stages:
            return None
        bubble = sum(row["mean_bubble_ns"] for row in stages)
        window = sum(row["mean_window_ns"] for row in stages)
        worst = max(stages, key=lambda row: row["bubble_fraction"])
        pipelines = units.format_quantity(len({row["pipeline"] for row in stages}), "pipeline")
        share = units.format_share(worst["mean_bubble_ns"], worst["mean_window_ns"])
        depth = max(row["stage_count"] for row in stages)
        return (
            f"{pipelines} of {depth} stages; {units.format_share(bubble, window)} of their time is bubbles, "
            f"most on rank {worst['rank']} (stage {worst['stage']}, {share})"
        )


PIPELINE_SECTION = PipelineSection()
