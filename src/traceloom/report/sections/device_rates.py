"""Sections about how fast the device works: the roofline of kernels, and copies.

of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.copies import KIND_SCHEMA, OP_SCHEMA
from traceloom.analyze.kernel_efficiency import (
    OP_SCHEMA as KERNEL_EFFICIENCY_OP_SCHEMA,
    SERIES_SCHEMA,
)
from traceloom.analyze.roofline import DEVICES, OPERATORS, SPREAD, UNMODELLED, Roofline, merge_ranks
from traceloom.analyze.steps import build_spread_schema
from traceloom.analyze.utilisation import STEPS
from traceloom.report.document import (
    Col,
    ListSchema,
    ReportOptions,
    Table,
    UnknownValues,
    format_yes_no,
)
from traceloom.report.figure import draw_roofline
from traceloom.report.sections.launches import read_graph_capture
from traceloom.report.sections.section import Columns, Frames, Measurements, Section, build_table
from traceloom.system import units
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CopiesValue, CountersValue, RooflineValue


_MAX_OPS = 50  # of each rank
_PER_STEP_SCHEMA = build_schema(
    "device kind", build_spread_schema("call_count", "copied_bytes", "total_ns")
)
_NO_COPIES_REASON = "no copies or fills were recorded"
_NO_BYTES_REASON = "the recording does not say how much is copied"
_NO_RATE_REASON = "no such copy has both a size and a duration"
_NOT_PINNED = {
    "pageable": "the recording does not say whether the host's memory is pinned",
    "bytes": _NO_BYTES_REASON,
}


class CopiesSection(Section[Frames, "CopiesValue"]):
    key, title = "copies", "Copies"
    note = "How much is copied and filled, in which direction, how fast and for whom."
    what = "copies and fills of GPU memory"
    parts = {
        "kinds": ListSchema(
            KIND_SCHEMA,
            "copies and fills by device, direction and kinds of memory",
            {
                "source_memory": "a fill has no source, or the recording does not say which memory it is",
                "target_memory": "the recording does not say which memory it is",
                **_NOT_PINNED,
                **dict.fromkeys(
                    ("bytes_per_s", "min_bytes_per_s", "max_bytes_per_s"), _NO_RATE_REASON
                ),
            },
            ("device",),
            _NO_COPIES_REASON,
        ),
        "operators": ListSchema(
            OP_SCHEMA,
            "copies and fills by the operator that launched them",
            _NOT_PINNED,
            ("op",),
            _NO_COPIES_REASON,
        ),
        "per_step": ListSchema(
            _PER_STEP_SCHEMA,
            "copies and fills of a usual step, by direction",
            {f"{how}_copied_bytes": _NO_BYTES_REASON for how in ("mean", "min", "max")},
            ("device",),
            "the trace holds no whole step with copies",
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        copies = analyze.copies(trace)
        per_step = copies.per_step.pipe(cast_to_schema, _PER_STEP_SCHEMA)
        return {"kinds": copies.kinds, "operators": copies.ops.head(_MAX_OPS), "per_step": per_step}

    def build(self, measurements: Measurements[Frames], unknowns: UnknownValues) -> CopiesValue:
        return self.lists(measurements.frames(self.parts), unknowns)

    def tables(self, value: CopiesValue) -> Iterator[Table]:
        kinds = value["kinds"]
        if not kinds:
            return
        columns = [
            "?rank",
            "?device",
            "kind",
            "+source_memory",
            "+target_memory",
            "+pageable",
            "bytes",
            "count",
            "total_ns",
            "bytes_per_s",
            "+min_bytes_per_s",
            "+max_bytes_per_s",
            "+instant_count",
        ]
        rows = [{**row, "pageable": format_yes_no(row["pageable"])} for row in kinds]
        yield build_table("copies.kinds", "Copies by direction", columns, rows)
        columns = ["?rank", "kind", "bytes", "count", "total_ns", "op"]
        yield build_table(
            "copies.operators", "Copies by operator", columns, value["operators"], among=kinds
        )
        if value["per_step"]:
            columns = [
                "?rank",
                "?device",
                "kind",
                "mean_call_count",
                "mean_copied_bytes",
                "mean_total_ns",
                "min_total_ns",
                "max_total_ns",
            ]
            yield build_table(
                "copies.per_step", "Copies of a usual step", columns, value["per_step"], among=kinds
            )

    def summary(self, value: CopiesValue) -> str | None:
        rows = [row for row in value["kinds"] if row["kind"] != "fill"]
        if not rows:
            return None
        sizes = [size for row in rows if (size := row["bytes"]) is not None]
        amount = f"{units.format_size(sum(sizes))} in " if sizes else ""
        count = sum(row["count"] for row in rows)
        pageable = sum(row["count"] for row in rows if row["pageable"])
        pageable_note = (
            f", {units.format_count(pageable)} of them from or to pageable memory"
            if pageable
            else ""
        )
        time = units.format_duration(sum(row["total_ns"] for row in rows))
        return f"{amount}{units.format_count(count)} {'copy' if count == 1 else 'copies'} took {time}{pageable_note}"


COPIES_SECTION = CopiesSection()

_MAX_COPY_ROWS = 200  # series, and operators, of each rank
_RANGES = build_schema("range_count launch_count unpaired absent")


class CountersSection(Section[Frames, "CountersValue"]):
    key, title = "counters", "Counters"
    note = (
        "Hardware counters in the recording: over time, and of single kernels with their operators."
    )
    what = "hardware counters that the recording holds"
    parts = {
        "series": ListSchema(
            SERIES_SCHEMA,
            "counters sampled over time",
            {"source": "the file does not say whose counter it is"},
            empty="no counters over time were recorded",
        ),
        "operators": ListSchema(
            KERNEL_EFFICIENCY_OP_SCHEMA,
            "counters of single kernels, added up by operator",
            nullable=("op",),
            empty="no counters of kernels were recorded, or they cannot be joined to launches",
        ),
        "ranges": ListSchema(
            _RANGES,
            "how many kernels have counters, and whether they have launches",
            {
                "unpaired": "null where every kernel with counters has its launch",
                "absent": "null where the counters could be read",
            },
            empty="no counters of kernels were recorded",
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        counters = analyze.counters(trace)
        row = (counters.range_count, counters.launch_count, counters.unpaired, counters.absent)
        return {
            "series": counters.series.head(_MAX_COPY_ROWS),
            "operators": counters.operators.head(_MAX_COPY_ROWS),
            "ranges": pl.DataFrame(
                [row] if counters.range_count else [], schema=_RANGES, orient="row"
            ),
        }

    def build(self, measurements: Measurements[Frames], unknowns: UnknownValues) -> CountersValue:
        return self.lists(measurements.frames(self.parts), unknowns)

    def tables(self, value: CountersValue) -> Iterator[Table]:
        if value["series"]:
            columns = ["?rank", "+source", "samples", "min", "mean", "max", "counter"]
            yield build_table("counters.series", "Counters over time", columns, value["series"])
        if value["operators"]:
            columns = ["?rank", "op", "ranges", "value", "counter"]
            yield build_table(
                "counters.operators",
                "Counters of kernels, by operator",
                columns,
                value["operators"],
                "The k-th measured kernel belongs to the k-th launch.",
            )

    def summary(self, value: CountersValue) -> str | None:
        clauses = []
        if value["series"]:
            clauses.append(f"{units.format_count(len(value['series']))} recorded over time")
        ranges = sum(row["range_count"] for row in value["ranges"])
        if ranges:
            clauses.append(f"counters of {units.format_quantity(ranges, 'kernel')}")
        if any(row["unpaired"] for row in value["ranges"]):
            clauses.append("not as many as launches, so that their operators are unknown")
        return ", ".join(clauses) or None


COUNTERS_SECTION = CountersSection()

_MAX_ROWS = 400  # operators of all ranks together, the longest of each rank
_MIN_RANK_ROWS = 10
_MIN_PLACED_SHARE = 0.5
# Characters of recorded shapes and types; those of an optimizer's lists fill pages.
_MAX_TEXT_CHARS = 300
_NO_PEAK_REASON = "the peaks of the device are not known (give them with --peak or --device)"
_UNKNOWN_REASONS = {
    "total_ns": "the work of the device is not recorded",
    "fraction": "the work of the device is not recorded",
    "flop_rate": "no time is recorded",
    "byte_rate": "no time is recorded",
    "peak_flop_rate": _NO_PEAK_REASON,
    "peak_byte_rate": _NO_PEAK_REASON,
    "roofline_ns": _NO_PEAK_REASON,
    "roofline_fraction": _NO_PEAK_REASON,
    "bound": _NO_PEAK_REASON,
}
_STEP_REASONS = {
    **dict.fromkeys(
        ("flops", "bytes", "hardware_flops"), "no operator in it has a model and recorded shapes"
    ),
    "modelled_fraction": "no GPU work was recorded in it",
    "placed_fraction": "no GPU work was recorded in it",
    "model_flops": "not counted, or repeated forward work cannot be determined; see `reason`",
    "roofline_ns": "no work of it lies on a roofline: no models, or no peaks",
    "rest_ns": "no work of it lies on a roofline: no models, or no peaks",
    "roofline_fraction": "no work of it lies on a roofline: no models, or no peaks",
    "mfu": "see `reason`",
    "hfu": "see `reason`",
}


class RooflineSection(Section[Roofline, "RooflineValue"]):
    key, title = "roofline", "Roofline"
    note = "How close operators and steps come to what the device could do."
    what = "FLOPs and bytes of operators against the peaks of the device; MFU and HFU"
    parts = {
        "operators": ListSchema(
            OPERATORS,
            "modelled operators by shapes, longest first",
            _UNKNOWN_REASONS,
            ("intensity",),
            "no operator with a model and with recorded shapes launched GPU work",
        ),
        "steps": ListSchema(
            STEPS,
            "FLOPs, roofline, MFU and HFU of each step",
            _STEP_REASONS,
            ("reason",),
            "the trace marks no steps",
        ),
        "whole": ListSchema(
            STEPS,
            "the same from the first to the last GPU work",
            {**_STEP_REASONS, "step": "it is about all steps"},
            ("reason",),
            "no trace was read",
        ),
        "spread": ListSchema(
            SPREAD,
            "per quantity mean, min and max over the whole steps",
            empty="the trace holds no whole step",
        ),
        "unmodelled": ListSchema(
            UNMODELLED,
            "GPU work, without any operators, that no model covers, and why",
            empty="nothing is without a model",
        ),
        "devices": ListSchema(
            DEVICES,
            "the peaks used, or why there are none",
            {"peak": _NO_PEAK_REASON},
            ("name", "reason"),
            "no GPU work was recorded",
        ),
    }
    others = {"timed_on": {"type": "string"}}

    def measure(self, trace: Trace, options: ReportOptions) -> Roofline:
        return analyze.roofline(trace, options.peak, read_graph_capture(options))

    def build(self, measurements: Measurements[Roofline], unknowns: UnknownValues) -> RooflineValue:
        max_rows = max(_MIN_RANK_ROWS, _MAX_ROWS // max(len(measurements.results), 1))
        # recorded texts of operators are cut to a readable length
        text = [
            pl.when(pl.col(name).str.len_chars() > _MAX_TEXT_CHARS)
            .then(pl.concat_str(pl.col(name).str.slice(0, _MAX_TEXT_CHARS), pl.lit("…")))
            .otherwise(name)
            .alias(name)
            for name in ("shapes", "types")
        ]
        merged = merge_ranks(
            [
                replace(
                    result,
                    operators=result.operators.head(max_rows).with_columns(text),
                    unmodelled=result.unmodelled.head(max_rows),
                )
                for result in measurements.results
            ]
        )
        frames = {name: getattr(merged, name) for name in self.parts}
        for name, time in (("operators", "total_ns"), ("unmodelled", "total_ns")):
            frames[name] = frames[name].sort(
                time, descending=True, nulls_last=True, maintain_order=True
            )
        return {**self.lists(frames, unknowns), "timed_on": merged.timed_on}

    def tables(self, value: RooflineValue) -> Iterator[Table]:
        several = ["rank"] if len({row["rank"] for row in value["whole"]}) > 1 else []
        steps = value["steps"] or value["whole"]
        if steps:
            reasons = sorted({row["reason"] for row in steps if row["reason"]})
            note = f"MFU or HFU are missing: {'; '.join(reasons)}." if reasons else ""
            columns: Columns = [
                "duration_ns",
                "roofline_fraction",
                "mfu",
                "hfu",
                "modelled_fraction",
                "flops",
                "+bytes",
                "+reason",
            ]
            if value["steps"]:
                yield build_table(
                    "roofline.steps", "Steps", [*several, "step", *columns], steps, note
                )
            else:
                yield build_table(
                    "roofline.whole", "Whole recording", [*several, *columns], steps, note
                )
        # one row per rank, with mean, min and max of every quantity
        rank_entries: dict[int | None, dict[str, float | None]] = {}
        for row in value["spread"]:
            entry = rank_entries.setdefault(row["rank"], {"rank": row["rank"], "step_count": 0})
            entry["step_count"] = max(entry["step_count"] or 0, row["step_count"])
            quantity = row["quantity"]
            entry |= {
                f"mean_{quantity}": row["mean"],
                f"min_{quantity}": row["min"],
                f"max_{quantity}": row["max"],
            }
        if any((entry["step_count"] or 0) > 1 for entry in rank_entries.values()):
            columns = [
                *several,
                "step_count",
                Col("mean_duration_ns", "Time", "time", "mean"),
                *(
                    Col(
                        f"{statistic}_{key}",
                        f"{title}{title_suffix}",
                        "share",
                        hint,
                        narrow=statistic == "mean",
                    )
                    for key, title in (
                        ("roofline_fraction", "Of roofline"),
                        ("mfu", "MFU"),
                        ("hfu", "HFU"),
                    )
                    for statistic, title_suffix, hint in (
                        ("mean", "", "mean"),
                        ("min", ", least", "in the lowest step"),
                        ("max", ", most", "in the highest step"),
                    )
                ),
                Col("mean_flops", "FLOPs", "flops", "mean"),
            ]
            yield build_table(
                "roofline.spread",
                "Usual step",
                columns,
                list(rank_entries.values()),
                "Over the whole steps of each rank.",
                key="roofline-usual",
            )
        on_gpu = any(row["gpu_ns"] for row in value["whole"])
        time = Col("total_ns", "GPU time" if on_gpu else "Host time", "time")
        if value["operators"]:
            columns = [
                *several,
                time,
                "roofline_fraction",
                "bound",
                "flop_rate",
                "+byte_rate",
                "+intensity",
                "+flops",
                "+bytes",
                "count",
                Col(
                    "type",
                    "Type",
                    "text",
                    "element type whose peak is used; assumed where the name of the kernel does not say",
                ),
                "+shapes",
                "name",
            ]
            rows = [
                {
                    **row,
                    "type": f"{row['arithmetic']}{' (assumed)' if row['evidence'] == 'assumed' else ''}",
                }
                for row in value["operators"]
            ]
            yield build_table("roofline.operators", "Operators", columns, rows)
        if value["unmodelled"]:
            columns = [*several, time, "fraction", "count", "reason", "name"]
            yield build_table("roofline.unmodelled", "Not modelled", columns, value["unmodelled"])
        if any(row["reason"] for row in value["devices"]):
            columns = [*several, "device", "peak", "reason", "name"]
            yield build_table("roofline.devices", "Devices", columns, value["devices"])

    def summary(self, value: RooflineValue) -> str | None:
        rows = (
            [row for row in value["steps"] if row["complete"]] or value["steps"] or value["whole"]
        )
        modelled = [row for row in rows if row["flops"] is not None]
        flops = [row["flops"] or 0 for row in modelled]
        if not any(flops):
            return None
        covered = sum(row["modelled_ns"] for row in rows)
        gpu = sum(row["gpu_ns"] for row in rows)
        scope = "step" if value["steps"] else "recording"
        scope += " of a rank" if len({row["rank"] for row in rows}) > 1 else ""
        text = f"{units.format_flops(sum(flops) / len(flops))} per {scope}"
        # Work that is mostly not modelled counts as measured, because its efficiency is unknown.
        placed = sum(row["gpu_ns"] * (row["placed_fraction"] or 0) for row in rows)
        for name, values in (
            ("of the roofline", [row["roofline_fraction"] for row in modelled]),
            ("MFU", [row["mfu"] for row in modelled]),
        ):
            fractions = [fraction for fraction in values if fraction is not None]
            if fractions and placed >= _MIN_PLACED_SHARE * gpu:
                text += f", {units.format_share(sum(fractions) / len(fractions), 1)} {name}"
        if gpu:
            return f"{text}; models cover {units.format_share(covered, gpu)} of the GPU work"
        rest = sum(row["fraction"] for row in value["unmodelled"]) / max(len(value["whole"]), 1)
        return (
            f"{text}; models cover {units.format_share(1 - min(rest, 1), 1)} of the operators' time"
        )

    def picture(self, value: RooflineValue) -> str:
        return draw_roofline(value["operators"])


SECTION = RooflineSection()
