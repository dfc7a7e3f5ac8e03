"""What every collective moved, how fast, and how much of it held compute up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.collective.bandwidth import against_peak
from traceloom.analyze.collective.collectives import CALL_SCHEMA
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import NO_CALLS, calls_of, part_of
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import record, rows
from traceloom.report.table import Col, Table

_LONGEST = 100
_KEYS = ("where", "kind", "backend", "group_size", "size_bytes")
SUMMARY = pl.Schema(
    {
        **{key: CALL_SCHEMA[key] for key in _KEYS},
        "rank_count": pl.Int64(),
        "group_count": pl.Int64(),
        "count": pl.Int64(),
        "total_ns": pl.Int64(),
        "min_ns": pl.Int64(),
        "median_ns": pl.Int64(),
        "max_ns": pl.Int64(),
        "exposed_ns": pl.Int64(),
        "blocking_ns": pl.Int64(),
        "algorithm_byte_rate": pl.Float64(),
        "bus_byte_rate": pl.Float64(),
        "best_bus_byte_rate": pl.Float64(),
        "link": pl.String(),
        "link_fraction": pl.Float64(),
        "mean_step_ns": pl.Float64(),
        "min_step_ns": pl.Int64(),
        "max_step_ns": pl.Int64(),
    }
)
_SHOWN = (
    "rank", "where", "device", "stream", "step", "phase", "start_ns", "duration_ns", "kind", "backend", "name", "group",
    "group_size", "sequence", "peer", "element_type", "in_bytes", "out_bytes", "size_bytes", "bus_gb_per_s", "link",
    "link_fraction", "algorithm", "protocol", "name_certain", "channels", "exposed_ns", "blocking_ns",
)  # fmt: skip
CALLS = pl.Schema({name: CALL_SCHEMA[name] for name in _SHOWN})
_GB = 1e9


def _build(study: Study[RankPart], absent: Absent) -> Row:
    calls = calls_of(study.results)
    if study.options.link_peak is not None:
        calls = against_peak(calls, study.options.link_peak)
    out = {
        "summary": absent.rows(_summed(calls, study.results), "collectives.summary"),
        "calls": absent.rows(
            calls.sort("duration_ns", "start_ns", descending=[True, False]).head(_LONGEST).select(list(CALLS)),
            "collectives.calls",
        ),
        "call_count": calls.height,
    }
    if not calls.height:
        absent.say("collectives")
    return out


def _summed(calls: pl.DataFrame, parts: Sequence[RankPart]) -> pl.DataFrame:
    """One row per place, kind, back end, group size and message size, over all ranks; per whole step of a rank."""
    duration = pl.col("duration_ns")
    sums = calls.group_by(_KEYS, maintain_order=True).agg(
        pl.col("rank").n_unique().alias("rank_count"),
        pl.struct("group", pl.col("members").cast(pl.List(pl.String)).list.join(",")).n_unique().alias("group_count"),
        pl.len().alias("count"),
        duration.sum().alias("total_ns"),
        duration.min().alias("min_ns"),
        duration.median().cast(pl.Int64).alias("median_ns"),
        duration.max().alias("max_ns"),
        _known_sum("exposed_ns"),
        _known_sum("blocking_ns"),
        (pl.col("algorithm_gb_per_s").median() * _GB).alias("algorithm_byte_rate"),
        (pl.col("bus_gb_per_s").median() * _GB).alias("bus_byte_rate"),
        (pl.col("bus_gb_per_s").max() * _GB).alias("best_bus_byte_rate"),
        pl.col("link").drop_nulls().first(),
        pl.col("link_fraction").median(),
    )
    whole_steps = pl.concat(
        [part.steps.filter("complete").select("step", rank=pl.lit(part.rank, pl.Int32)) for part in parts]
    )
    inside = calls.join(whole_steps, on=["step", "rank"], how="semi", nulls_equal=True)
    # mean, least and most are of the time of one rank in one whole step
    each = inside.group_by(*_KEYS, "rank", "step").agg(pl.col("duration_ns").sum().alias("ns"))
    spread = each.group_by(_KEYS).agg(
        pl.col("ns").mean().alias("mean_step_ns"),
        pl.col("ns").min().alias("min_step_ns"),
        pl.col("ns").max().alias("max_step_ns"),
    )
    joined = sums.join(spread, on=list(_KEYS), how="left", nulls_equal=True, maintain_order="left")
    ordered = joined.select(list(SUMMARY)).cast(dict(SUMMARY))  # type: ignore[arg-type]
    return ordered.sort("total_ns", "kind", "size_bytes", descending=[True, False, False], nulls_last=True)


def _known_sum(column: str) -> pl.Expr:
    return pl.when(pl.col(column).is_not_null().all()).then(pl.col(column).sum()).alias(column)


def _tables(value: Row) -> Iterator[Table]:
    if not value["summary"]:
        return
    yield Table(
        "collectives-summary",
        "Collectives by kind and size",
        [
            Col("kind", "Kind"),
            Col("size_bytes", "Message", "bytes", "the size that bandwidth is defined on"),
            Col("group_size", "Ranks", "count", "of the group", narrow=False),
            Col("count", "Count", "count"),
            Col("total_ns", "Total", "time", "over all recorded ranks, waiting for others included"),
            Col("exposed_ns", "Exposed", "time", "no compute runs beside it"),
            Col("blocking_ns", "Blocking", "time", "the next compute was submitted and waited for it"),
            Col("median_ns", "Median", "time", narrow=False),
            Col("min_ns", "Least", "time", narrow=False),
            Col("max_ns", "Most", "time", narrow=False),
            Col("mean_step_ns", "Per step", "time", "of one rank in one whole step, mean", narrow=False),
            Col("bus_byte_rate", "Bus bandwidth", "byte_rate", "median; 1 GB = 10⁹ bytes; waiting included"),
            Col("best_bus_byte_rate", "Best", "byte_rate", narrow=False),
            Col("link_fraction", "Of link", "share", "of the link's peak in one direction", narrow=False),
            Col("link", "Link", narrow=False),
            Col("backend", "Back end", narrow=False),
            Col("where", "Where", narrow=False),
        ],
        value["summary"],
        "collectives.summary",
        "Bandwidth is of the whole duration: where ranks wait for each other it is less than what the link gave.",
    )
    yield Table(
        "collectives-calls",
        "Longest calls",
        [
            Col("rank", "Rank", "count"),
            Col("step", "Step", "count"),
            Col("kind", "Kind"),
            Col("size_bytes", "Message", "bytes"),
            Col("duration_ns", "Duration", "time"),
            Col("exposed_ns", "Exposed", "time"),
            Col("blocking_ns", "Blocking", "time"),
            Col("phase", "Phase", narrow=False),
            Col("group", "Group", narrow=False),
            Col("group_size", "Ranks", "count", narrow=False),
            Col("algorithm", "Algorithm", hint="by the kernel's name", narrow=False),
            Col("protocol", "Protocol", hint="by the kernel's name; NCCL's kernels serve others too", narrow=False),
            Col("channels", "Channels", "count", "thread blocks of the kernel", narrow=False),
            Col("name", "Name", "name"),
        ],
        value["calls"],
        "collectives.calls",
    )


def _summary(value: Row) -> str | None:
    by_kind = value["summary"]
    if not by_kind:
        return None
    total = sum(row["total_ns"] for row in by_kind)
    top = by_kind[0]
    size = f" of {units.size(top['size_bytes'])}" if top["size_bytes"] else ""
    text = f"{units.count(value['call_count'])} calls, {units.duration(total)} over all ranks"
    device = [row for row in by_kind if row["exposed_ns"] is not None]
    if device:
        exposed = sum(row["exposed_ns"] for row in device)
        text += f", {units.share(exposed, sum(row['total_ns'] for row in device))} of it exposed"
    return f"{text}; most in {top['kind'] or 'unknown'}{size} ({units.duration(top['total_ns'])})"


_UNKNOWN = {
    "kind": "neither arguments nor name of the kernel tell what it does",
    "backend": "the name does not tell it",
    "rank": "the file does not say its rank",
    "group": "the recording does not say which group communicates",
    "group_size": "the recording does not say how many ranks communicate",
    "sequence": "the recording does not number its collectives",
    "element_type": "the recording does not say the element type",
    "in_bytes": "the recording does not say how much goes in",
    "out_bytes": "the recording does not say how much comes out",
    "size_bytes": "the recording does not say how much is sent",
    "bus_gb_per_s": "size or group is not known, or the call only submits",
    "bus_byte_rate": "size or group is not known, or the call only submits",
    "best_bus_byte_rate": "size or group is not known, or the call only submits",
    "algorithm_byte_rate": "the size is not known, or the call only submits",
    "link": "the group may leave its host, or the device's link is not known",
    "link_fraction": "the link or the bandwidth is not known",
    "algorithm": "the name of the kernel does not tell it",
    "protocol": "the name of the kernel does not tell it",
    "name_certain": "the name of the kernel tells neither algorithm nor protocol",
    "channels": "only kernels of NCCL and RCCL have them, and the file must still be there and below 256 MiB",
    "exposed_ns": "only communication on a device can be hidden behind its computing",
    "blocking_ns": "only communication on a device has it, where the launch of the next compute is recorded",
    "device": "it runs on the host",
    "stream": "it runs on the host",
    "step": "null is the time outside all steps",
    "phase": "nothing around it says forward, backward or optimizer",
    "peer": "only messages and rooted collectives have one, where it is recorded",
    "mean_step_ns": "it occurs in no whole step",
    "min_step_ns": "it occurs in no whole step",
    "max_step_ns": "it occurs in no whole step",
}

SECTION = Section(
    key="collectives",
    title="Collectives",
    note="What each moved and how fast, and how much of it compute had to wait for.",
    measure=part_of,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=record(
        {
            "summary": rows(SUMMARY, nullable=set(_UNKNOWN), what="over all ranks; the largest total first"),
            "calls": rows(CALLS, nullable=set(_UNKNOWN), what=f"the {_LONGEST} longest single calls"),
            "call_count": {"type": "integer"},
        },
        what="communication by kind and size, and the longest calls",
    ),
    reasons={
        "collectives": NO_CALLS,
        **{f"collectives.{part}[*].{name}": why for part in ("summary", "calls") for name, why in _UNKNOWN.items()},
    },
)
