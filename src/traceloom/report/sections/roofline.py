"""The section about FLOPs and bytes of operators relative to the peaks of the device; MFU and HFU
of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.roofline import DEVICES, OPERATORS, SPREAD, UNMODELLED, Roofline, merge_ranks
from traceloom.analyze.utilisation import STEPS
from traceloom.report.document import Col, ListSchema, ReportOptions, Table, UnknownValues
from traceloom.report.figure import draw_roofline
from traceloom.report.sections.launches import read_graph_capture
from traceloom.report.sections.section import Columns, Measurements, Section, build_table
from traceloom.system import units
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import RooflineValue

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
