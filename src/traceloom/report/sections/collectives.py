"""Sections about communication: collectives, process groups, traffic between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.bandwidth import set_peak
from traceloom.analyze.collectives import CALL_SCHEMA, KEYS, WhereType
from traceloom.analyze.groups import ALL_TO_ALL_SCHEMA, GROUP_SCHEMA, MATRIX_SCHEMA
from traceloom.analyze.rank_summary import RankSummary
from traceloom.report.document import Col, ListSchema, Table, UnknownValues
from traceloom.report.figure import draw_heat_map
from traceloom.report.sections.ranks import NO_CALLS_REASON, RanksSection, merge_rank_calls
from traceloom.report.sections.section import (
    Columns,
    CoreSection,
    Measurements,
    RankMeasurements,
    build_table,
    format_sum,
    select_rank_column,
)
from traceloom.system import units
from traceloom.trace.frames import build_schema, cast_to_schema

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import CommunicationValue
    from traceloom.report.documents.sections import CollectivesValue, GroupsRow, RankMatrixValue


_MAX_CALLS = 100
_KEYS = ("where", "kind", "backend", "group_size", "size_bytes")
_SUMMARY = build_schema(
    *_KEYS,
    "rank_count group_count count total_ns min_ns median_ns max_ns exposed_ns blocking_ns algorithm_byte_rate",
    "bus_byte_rate best_bus_byte_rate link link_fraction mean_step_ns min_step_ns max_step_ns",
    {"where": WhereType},
)
_CALL_COLUMNS = (
    "rank",
    "where",
    "device",
    "stream",
    "step",
    "phase",
    "start_ns",
    "duration_ns",
    "kind",
    "backend",
    "name",
    "group",
    "group_size",
    "sequence",
    "peer",
    "element_type",
    "in_bytes",
    "out_bytes",
    "size_bytes",
    "bus_gb_per_s",
    "link",
    "link_fraction",
    "algorithm",
    "protocol",
    "name_certain",
    "channels",
    "exposed_ns",
    "blocking_ns",
)
_CALLS = pl.Schema({name: CALL_SCHEMA[name] for name in _CALL_COLUMNS})
_GB = 1e9
_NO_BANDWIDTH = "size or group is not known, or the call only submits"
_UNKNOWN_REASONS = {
    "link": "the group may leave its host, or the device's link is not known",
    "link_fraction": "the link or the bandwidth is not known",
    "exposed_ns": "only communication on a device can overlap its compute",
    "blocking_ns": "only communication on a device has it, where the launch of the next compute is recorded",
}


class CollectivesSection(RanksSection["CollectivesValue"]):
    key, title = "collectives", "Collectives"
    note = "What each moved and how fast, and how much of it compute had to wait for."
    what = "communication by kind and size, and the longest calls"
    parts = {
        "summary": ListSchema(
            _SUMMARY,
            "over all ranks; the largest total first",
            {
                **_UNKNOWN_REASONS,
                "bus_byte_rate": _NO_BANDWIDTH,
                "best_bus_byte_rate": _NO_BANDWIDTH,
                "algorithm_byte_rate": "the size is not known, or the call only submits",
            },
            (
                "kind",
                "backend",
                "group_size",
                "size_bytes",
                "mean_step_ns",
                "min_step_ns",
                "max_step_ns",
            ),
            ranked=False,
        ),
        "calls": ListSchema(
            _CALLS,
            f"the {_MAX_CALLS} longest single calls",
            {
                **_UNKNOWN_REASONS,
                "bus_gb_per_s": _NO_BANDWIDTH,
                "name_certain": "the name of the kernel says neither algorithm nor protocol",
                "channels": "only kernels of NCCL and RCCL have them, and the file must still be there and below "
                "256 MiB",
                "phase": "no enclosing event says forward, backward or optimizer",
                "peer": "only messages and rooted collectives have one, where it is recorded",
            },
            (
                "rank",
                "device",
                "stream",
                "step",
                "kind",
                "backend",
                "group",
                "group_size",
                "sequence",
                "element_type",
                "in_bytes",
                "out_bytes",
                "size_bytes",
                "algorithm",
                "protocol",
            ),
            ranked=False,
        ),
    }
    others = {"call_count": {"type": "integer"}}
    unknown = {"": NO_CALLS_REASON}

    def build(
        self, measurements: Measurements[RankSummary], unknowns: UnknownValues
    ) -> CollectivesValue:
        calls = merge_rank_calls(measurements.results)
        if measurements.options.link_peak is not None:
            calls = set_peak(calls, measurements.options.link_peak)
        # One row per place, kind, backend, group size and message size, over all ranks.
        duration = pl.col("duration_ns")
        sums = calls.group_by(_KEYS, maintain_order=True).agg(
            pl.col("rank").n_unique().alias("rank_count"),
            pl.struct("group", pl.col("members").cast(pl.List(pl.String)).list.join(","))
            .n_unique()
            .alias("group_count"),
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
        # mean, min and max refer to the time of one rank in one whole step
        complete_steps = pl.concat(
            [
                part.steps.filter("complete").select("step", rank=pl.lit(part.rank, pl.Int32))
                for part in measurements.results
            ]
        )
        step_calls = calls.join(complete_steps, on=["step", "rank"], how="semi", nulls_equal=True)
        step_totals = step_calls.group_by(*_KEYS, "rank", "step").agg(
            pl.col("duration_ns").sum().alias("ns")
        )
        spread = step_totals.group_by(_KEYS).agg(
            pl.col("ns").mean().alias("mean_step_ns"),
            pl.col("ns").min().alias("min_step_ns"),
            pl.col("ns").max().alias("max_step_ns"),
        )
        summary = sums.join(
            spread, on=list(_KEYS), how="left", nulls_equal=True, maintain_order="left"
        ).pipe(cast_to_schema, _SUMMARY)
        summary = summary.sort(
            "total_ns", "kind", "size_bytes", descending=[True, False, False], nulls_last=True
        )
        longest = (
            calls.sort("duration_ns", "start_ns", descending=[True, False])
            .head(_MAX_CALLS)
            .select(list(_CALLS))
        )
        if not calls.height:
            unknowns.explain("collectives")
        return {
            **self.lists({"summary": summary, "calls": longest}, unknowns),
            "call_count": calls.height,
        }

    def tables(self, value: CollectivesValue) -> Iterator[Table]:
        if not value["summary"]:
            return
        columns = [
            "kind",
            "size_bytes",
            "+group_size",
            "count",
            "total_ns",
            "exposed_ns",
            "blocking_ns",
            "+median_ns",
            "+min_ns",
            "+max_ns",
            "+mean_step_ns",
            "bus_byte_rate",
            "+best_bus_byte_rate",
            "+link_fraction",
            "+link",
            "+backend",
            "+where",
        ]
        note = "Bandwidth is of the whole duration: where ranks wait for each other it is less than what the link gave."
        yield build_table(
            "collectives.summary", "Collectives by kind and size", columns, value["summary"], note
        )
        columns = [
            "rank",
            "step",
            "kind",
            "size_bytes",
            "duration_ns",
            "exposed_ns",
            "blocking_ns",
            "+phase",
            "+group",
            "+group_size",
            "+algorithm",
            "+protocol",
            "+channels",
            "name",
        ]
        yield build_table("collectives.calls", "Longest calls", columns, value["calls"])

    def summary(self, value: CollectivesValue) -> str | None:
        kind_rows = value["summary"]
        if not kind_rows:
            return None
        total = sum(row["total_ns"] for row in kind_rows)
        top = kind_rows[0]
        size = f" of {units.format_size(top['size_bytes'])}" if top["size_bytes"] else ""
        text = f"{units.format_quantity(value['call_count'], 'call')}, {units.format_duration(total)} over all ranks"
        device = [
            (ns, row["total_ns"]) for row in kind_rows if (ns := row["exposed_ns"]) is not None
        ]
        if device:
            exposed, device_ns = (sum(times) for times in zip(*device, strict=True))
            text += f", {units.format_share(exposed, device_ns)} of it exposed"
        return f"{text}; most in {top['kind'] or 'unknown'}{size} ({units.format_duration(top['total_ns'])})"


SECTION = CollectivesSection()


class CommunicationSection(CoreSection):
    key, title = "communication", "Communication"
    note = "Collectives by kind and group."
    path = "communication.collectives"

    def build(
        self, measurements: Measurements[RankMeasurements], unknowns: UnknownValues
    ) -> CommunicationValue:
        """Returns collectives by kind, group, type and place, and their cost for every rank."""
        optional = pl.col("bytes", "exposed_ns")
        collectives = (
            pl.concat([rank.communication.collectives for rank in measurements.results])
            .group_by(*KEYS, maintain_order=True)
            .agg(
                pl.col("count", "total_ns").sum(),
                pl.col("min_ns").min(),
                pl.col("max_ns").max(),
                pl.when(optional.is_not_null().any()).then(optional.sum()),
                ranks=pl.len(),
            )
            .with_columns(mean_ns=pl.col("total_ns") // pl.col("count"))
            .sort("total_ns", descending=True, maintain_order=True)
        )
        return {
            "collectives": unknowns.convert_list(collectives, "communication.collectives"),
            "ranks": [
                {
                    "rank": unknowns.value(rank.trace.rank, "communication.ranks[*].rank"),
                    "devices": unknowns.rows(
                        rank.communication.devices, "communication.ranks[*].devices"
                    ),
                }
                for rank in measurements.results
            ],
        }

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Yields the tables of devices, if any, before the calls of the host."""
        rows = sorted(
            (document.get("communication") or {}).get("collectives") or [],
            key=lambda row: row["where"] != "device",
        )
        on_device = [row for row in rows if row["where"] == "device"]
        columns = [
            Col("kind", "Collective"),
            Col("where", "Where", "text", "on a device, or a host operation", narrow=False),
            Col("group", "Group", "text", "as recorded", narrow=False),
            Col("group_size", "Ranks of it", "count"),
            Col("element_type", "Type", narrow=False),
            Col("count", "Count", "count"),
            Col("bytes", "Bytes", "bytes", "sum over all calls and ranks"),
            Col(
                "total_ns",
                "Total",
                "time",
                "sum over all ranks; waiting for other ranks is part of it",
            ),
            Col("mean_ns", "Mean", "time", scale="one"),
            Col("max_ns", "Longest", "time", narrow=False, scale="one"),
            Col("exposed_ns", "Exposed", "time", "time not overlapped by compute"),
            *select_rank_column(
                document, Col("ranks", "Ranks", "count", "ranks that ran it", narrow=False)
            ),
        ]
        if rows:
            # The host's calls of device work only show how long the launch took.
            yield Table(
                "collective-table",
                "Communication",
                columns,
                rows,
                "communication.collectives",
                format_sum(
                    on_device or rows, "total_ns", "on devices" if on_device else "on the host"
                ),
            )


COMMUNICATION_SECTION = CommunicationSection()

_MAX_GROUPS = 200
_GROUPS = ListSchema(
    GROUP_SCHEMA,
    "process groups; longest first, unused ones last",
    {
        "backend": "the recording does not say it",
        "members": "the recording does not list the members, or cuts the list",
        "stride": "the members are not evenly spaced, or are not known",
        "kinds": "nothing was called in the window",
        "bytes": "nothing was called, or the size of a call is not known",
        "total_ns": "nothing was called in the window",
        "exposed_ns": "nothing was called, or only on the host",
    },
    ("group", "description", "group_size"),
    NO_CALLS_REASON,
    ranked=False,
)


class GroupsSection(RanksSection["list[GroupsRow]"]):
    key, title = "groups", "Groups"
    note = "Which ranks communicate with each other, and what for."
    schema = _GROUPS.schema()
    reasons = _GROUPS.reasons("groups")

    def build(
        self, measurements: Measurements[RankSummary], unknowns: UnknownValues
    ) -> list[GroupsRow]:
        groups = analyze.groups(
            merge_rank_calls(measurements.results),
            pl.concat([part.groups for part in measurements.results]),
            measurements.session.world_size,
        ).groups
        if not groups.height:
            unknowns.explain("groups")
        return unknowns.rows(groups.head(_MAX_GROUPS), "groups")

    def tables(self, value: list[GroupsRow]) -> Iterator[Table]:
        if not value:
            return
        rows = []
        for row in value:
            members, member_label = row["members"], None
            if (
                members
                and len(members) > 2
                and all(after - before == 1 for before, after in pairwise(members))
            ):
                member_label = f"{members[0]}–{members[-1]}"
            elif members is not None:
                member_label = ", ".join(map(str, members[:6])) + (
                    ", …" if len(members) > 6 else ""
                )
            rows.append({**row, "who": member_label})
        columns: Columns = [
            "group",
            "role",
            "group_size",
            Col("who", "Members"),
            "count",
            "total_ns",
            "+exposed_ns",
            "+bytes",
            "+recorded_ranks",
            "+description",
            Col("evidence", "Evidence", "name", "how the role is known"),
        ]
        yield build_table("groups", "Process groups", columns, rows, key="groups-groups")

    def summary(self, value: list[GroupsRow]) -> str | None:
        used = [row for row in value if row["count"]]
        if not used:
            return None
        role_counts = ", ".join(
            f"{units.format_count(number)} {role}"
            for role, number in Counter(row["role"] for row in used).most_common()
        )
        return f"{units.format_count(len(used))} {'group' if len(used) == 1 else 'groups'} in use: {role_counts}"


GROUPS_SECTION = GroupsSection()

_MAX_CELLS = 4096  # cells; larger jobs keep those with most bytes


class RankMatrixSection(RanksSection["RankMatrixValue"]):
    key, title = "rank_matrix", "Rank × rank"
    note = "Who sends how much to whom, and how even exchanges are."
    what = "communication by sender and receiver"
    parts = {
        "cells": ListSchema(
            MATRIX_SCHEMA,
            "bytes and time from rank to rank",
            empty="no communication was recorded of which ranks and bytes are known",
            ranked=False,
        ),
        "exchanges": ListSchema(
            ALL_TO_ALL_SCHEMA,
            "all-to-alls of each rank",
            nullable=("group", "rank", "sent_bytes", "received_bytes", "peer_max_over_mean"),
            empty="no all-to-all was recorded",
            ranked=False,
        ),
    }
    others = {"omitted_cell_count": {"type": "integer"}}

    def build(
        self, measurements: Measurements[RankSummary], unknowns: UnknownValues
    ) -> RankMatrixValue:
        calls = merge_rank_calls(measurements.results)
        cells = analyze.matrix(calls)
        largest = cells.sort("bytes", "source", "target", descending=[True, False, False]).head(
            _MAX_CELLS
        )
        retained = largest.sort("source", "target")
        lists = self.lists({"cells": retained, "exchanges": analyze.exchanges(calls)}, unknowns)
        return {**lists, "omitted_cell_count": cells.height - retained.height}

    def tables(self, value: RankMatrixValue) -> Iterator[Table]:
        if value["cells"]:
            columns = ["source", "target", "bytes", "exact_bytes", "duration_ns", "count"]
            rows = sorted(value["cells"], key=lambda row: -row["bytes"])
            note = "The way of a collective through the ranks is not recorded: what a rank sends in it is shared evenly."
            yield build_table("rank_matrix.cells", "From rank to rank", columns, rows, note)
        if value["exchanges"]:
            columns = [
                "rank",
                "+group",
                "count",
                "sent_bytes",
                "received_bytes",
                "peer_max_over_mean",
            ]
            yield build_table("rank_matrix.exchanges", "All-to-alls", columns, value["exchanges"])

    def summary(self, value: RankMatrixValue) -> str | None:
        cells = value["cells"]
        if not cells:
            return None
        top = max(cells, key=lambda row: row["bytes"])
        exact, total_bytes = (
            sum(row["exact_bytes"] for row in cells),
            sum(row["bytes"] for row in cells),
        )
        return (
            f"most goes from rank {top['source']} to rank {top['target']} ({units.format_size(top['bytes'])}); "
            f"{units.format_share(exact, total_bytes)} of all bytes is recorded, the rest shared evenly"
        )

    def picture(self, value: RankMatrixValue) -> str:
        cells = value["cells"]
        ranks = sorted({row[end] for row in cells for end in ("source", "target")})
        if len(ranks) < 3 or value["omitted_cell_count"]:
            return ""
        hover_texts = {
            (
                row["source"],
                row["target"],
            ): f"rank {row['source']} → rank {row['target']}: {units.format_size(row['bytes'])}, "
            f"{units.format_duration(row['duration_ns'])}, {units.format_quantity(row['count'], 'call')}"
            for row in cells
        }
        numbers = {(row["source"], row["target"]): float(row["bytes"]) for row in cells}
        return draw_heat_map(numbers, ranks, ranks, hover_texts, titles=("from rank", "to rank"))


RANK_MATRIX_SECTION = RankMatrixSection()
