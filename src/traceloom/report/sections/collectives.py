"""What every collective moved, how fast, and how much of it held compute up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.collective.bandwidth import against_peak
from traceloom.analyze.collective.calls import WhereType
from traceloom.analyze.collective.collectives import CALL_SCHEMA
from traceloom.model import units
from traceloom.model.frames import as_declared, schema
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import NO_CALLS, RanksSection, calls_of
from traceloom.report.sections.section import Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CollectivesValue

_LONGEST = 100
_KEYS = ("where", "kind", "backend", "group_size", "size_bytes")
_SUMMARY = schema(
    *_KEYS,
    "rank_count group_count count total_ns min_ns median_ns max_ns exposed_ns blocking_ns algorithm_byte_rate",
    "bus_byte_rate best_bus_byte_rate link link_fraction mean_step_ns min_step_ns max_step_ns",
    {"where": WhereType},
)
_SHOWN = (
    "rank", "where", "device", "stream", "step", "phase", "start_ns", "duration_ns", "kind", "backend", "name", "group",
    "group_size", "sequence", "peer", "element_type", "in_bytes", "out_bytes", "size_bytes", "bus_gb_per_s", "link",
    "link_fraction", "algorithm", "protocol", "name_certain", "channels", "exposed_ns", "blocking_ns",
)  # fmt: skip
_CALLS = pl.Schema({name: CALL_SCHEMA[name] for name in _SHOWN})
_GB = 1e9
_NO_BANDWIDTH = "size or group is not known, or the call only submits"
_UNKNOWN = {
    "link": "the group may leave its host, or the device's link is not known",
    "link_fraction": "the link or the bandwidth is not known",
    "exposed_ns": "only communication on a device can overlap its compute",
    "blocking_ns": "only communication on a device has it, where the launch of the next compute is recorded",
}


class CollectivesSection(RanksSection["CollectivesValue"]):
    """Communication by kind and size, and the longest calls."""

    key, title = "collectives", "Collectives"
    note = "What each moved and how fast, and how much of it compute had to wait for."
    what = "communication by kind and size, and the longest calls"
    parts = {
        "summary": Part(
            _SUMMARY,
            "over all ranks; the largest total first",
            {
                **_UNKNOWN,
                "bus_byte_rate": _NO_BANDWIDTH,
                "best_bus_byte_rate": _NO_BANDWIDTH,
                "algorithm_byte_rate": "the size is not known, or the call only submits",
            },
            ("kind", "backend", "group_size", "size_bytes", "mean_step_ns", "min_step_ns", "max_step_ns"),
            ranked=False,
        ),
        "calls": Part(
            _CALLS,
            f"the {_LONGEST} longest single calls",
            {
                **_UNKNOWN,
                "bus_gb_per_s": _NO_BANDWIDTH,
                "name_certain": "the name of the kernel says neither algorithm nor protocol",
                "channels": "only kernels of NCCL and RCCL have them, and the file must still be there and below "
                "256 MiB",
                "phase": "no enclosing event says forward, backward or optimizer",
                "peer": "only messages and rooted collectives have one, where it is recorded",
            },
            ("rank", "device", "stream", "step", "kind", "backend", "group", "group_size", "sequence", "element_type",
             "in_bytes", "out_bytes", "size_bytes", "algorithm", "protocol"),
            ranked=False,
        ),
    }  # fmt: skip
    others = {"call_count": {"type": "integer"}}
    unknown = {"": NO_CALLS}

    def build(self, study: Study[RankPart], absent: Absent) -> CollectivesValue:
        calls = calls_of(study.results)
        if study.options.link_peak is not None:
            calls = against_peak(calls, study.options.link_peak)
        # One row per place, kind, back end, group size and message size, over all ranks.
        duration = pl.col("duration_ns")
        members = pl.col("members").cast(pl.List(pl.String)).list.join(",")
        sums = calls.group_by(_KEYS, maintain_order=True).agg(
            pl.col("rank").n_unique().alias("rank_count"),
            pl.struct("group", members).n_unique().alias("group_count"),
            pl.len().alias("count"),
            duration.sum().alias("total_ns"),
            duration.min().alias("min_ns"),
            duration.median().cast(pl.Int64).alias("median_ns"),
            duration.max().alias("max_ns"),
            *(
                pl.when(pl.col(name).is_not_null().all()).then(pl.col(name).sum()).alias(name)
                for name in ("exposed_ns", "blocking_ns")
            ),
            (pl.col("algorithm_gb_per_s").median() * _GB).alias("algorithm_byte_rate"),
            (pl.col("bus_gb_per_s").median() * _GB).alias("bus_byte_rate"),
            (pl.col("bus_gb_per_s").max() * _GB).alias("best_bus_byte_rate"),
            pl.col("link").drop_nulls().first(),
            pl.col("link_fraction").median(),
        )
        # mean, least and most are of the time of one rank in one whole step
        whole_steps = pl.concat(
            [part.steps.filter("complete").select("step", rank=pl.lit(part.rank, pl.Int32)) for part in study.results]
        )
        inside = calls.join(whole_steps, on=["step", "rank"], how="semi", nulls_equal=True)
        each = inside.group_by(*_KEYS, "rank", "step").agg(pl.col("duration_ns").sum().alias("ns"))
        spread = each.group_by(_KEYS).agg(
            pl.col("ns").mean().alias("mean_step_ns"),
            pl.col("ns").min().alias("min_step_ns"),
            pl.col("ns").max().alias("max_step_ns"),
        )
        joined = sums.join(spread, on=list(_KEYS), how="left", nulls_equal=True, maintain_order="left")
        summary = joined.pipe(as_declared, _SUMMARY)
        summary = summary.sort("total_ns", "kind", "size_bytes", descending=[True, False, False], nulls_last=True)
        longest = calls.sort("duration_ns", "start_ns", descending=[True, False]).head(_LONGEST).select(list(_CALLS))
        if not calls.height:
            absent.say("collectives")
        return {**self.lists({"summary": summary, "calls": longest}, absent), "call_count": calls.height}

    def tables(self, value: CollectivesValue) -> Iterator[Table]:
        if not value["summary"]:
            return
        columns = ["kind", "size_bytes", "+group_size", "count", "total_ns", "exposed_ns", "blocking_ns", "+median_ns",
                   "+min_ns", "+max_ns", "+mean_step_ns", "bus_byte_rate", "+best_bus_byte_rate", "+link_fraction",
                   "+link", "+backend", "+where"]  # fmt: skip
        note = "Bandwidth is of the whole duration: where ranks wait for each other it is less than what the link gave."
        yield table("collectives.summary", "Collectives by kind and size", columns, value["summary"], note)
        columns = ["rank", "step", "kind", "size_bytes", "duration_ns", "exposed_ns", "blocking_ns", "+phase", "+group",
                   "+group_size", "+algorithm", "+protocol", "+channels", "name"]  # fmt: skip
        yield table("collectives.calls", "Longest calls", columns, value["calls"])

    def summary(self, value: CollectivesValue) -> str | None:
        by_kind = value["summary"]
        if not by_kind:
            return None
        total = sum(row["total_ns"] for row in by_kind)
        top = by_kind[0]
        size = f" of {units.size(top['size_bytes'])}" if top["size_bytes"] else ""
        text = f"{units.counted(value['call_count'], 'call')}, {units.duration(total)} over all ranks"
        device = [(ns, row["total_ns"]) for row in by_kind if (ns := row["exposed_ns"]) is not None]
        if device:
            exposed, of_device = (sum(times) for times in zip(*device, strict=True))
            text += f", {units.share(exposed, of_device)} of it exposed"
        return f"{text}; most in {top['kind'] or 'unknown'}{size} ({units.duration(top['total_ns'])})"


SECTION = CollectivesSection()
