"""FLOPs and bytes of operators against the peaks of the device; MFU and HFU of steps."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from traceloom import analyze
from traceloom.analyze.roofline import DEVICES, OPERATORS, SPREAD, UNMODELLED, Roofline, joined
from traceloom.analyze.utilisation import STEPS
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.capture_of_graphs import capture_of_graphs
from traceloom.report.sections.roofline_picture import picture
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import ranked, record
from traceloom.report.table import Col, Table

_ROWS = 400  # operators of all ranks together, the longest of each
_LEAST_ROWS = 10
_WORTH_SAYING = 0.5
_LONGEST = 300  # characters of recorded shapes and types; lists of an optimizer fill pages
_PARTS = ("operators", "steps", "whole", "spread", "unmodelled", "devices")
_NO_PEAK = "the peaks of the device are not known (give them with --peak or --device)"
_NOT_TOLD = {
    "total_ns": "the work of the device is not recorded",
    "fraction": "the work of the device is not recorded",
    "intensity": "no bytes are moved",
    "flop_rate": "no time is recorded",
    "byte_rate": "no time is recorded",
    "peak_flop_rate": _NO_PEAK,
    "peak_byte_rate": _NO_PEAK,
    "roofline_ns": _NO_PEAK,
    "roofline_fraction": _NO_PEAK,
    "bound": _NO_PEAK,
}
_OF_STEPS = {
    **dict.fromkeys(("flops", "bytes", "hardware_flops"), "no operator in it has a model and recorded shapes"),
    "modelled_fraction": "no GPU work was recorded in it",
    "placed_fraction": "no GPU work was recorded in it",
    "model_flops": "not counted, or repeated forward work cannot be told; see `reason`",
    "roofline_ns": "no work of it lies on a roofline: no models, or no peaks",
    "rest_ns": "no work of it lies on a roofline: no models, or no peaks",
    "roofline_fraction": "no work of it lies on a roofline: no models, or no peaks",
    "mfu": "see `reason`",
    "hfu": "see `reason`",
    "reason": "nothing is missing",
}


def _measure(trace: Trace, options: ReportOptions) -> Roofline:
    return analyze.roofline(trace, options.peak, capture_of_graphs(options))


def _build(study: Study[Roofline], absent: Absent) -> Row:
    most = max(_LEAST_ROWS, _ROWS // max(len(study.results), 1))
    of_all = joined([_cut(result, most) for result in study.results])
    frames = {name: getattr(of_all, name) for name in _PARTS}
    for name, time in (("operators", "total_ns"), ("unmodelled", "gpu_ns")):
        frames[name] = frames[name].sort(time, descending=True, nulls_last=True, maintain_order=True)
    out = {name: absent.rows(frame, f"roofline.{name}") for name, frame in frames.items()}
    for name in _PARTS:
        if not out[name]:
            absent.say(f"roofline.{name}")
    return {**out, "timed_on": of_all.timed_on}


def _cut(result: Roofline, most: int) -> Roofline:
    """The operators with the most time; what is recorded of them cut to a length that people read."""
    text = [
        pl.when(pl.col(name).str.len_chars() > _LONGEST)
        .then(pl.concat_str(pl.col(name).str.slice(0, _LONGEST), pl.lit("…")))
        .otherwise(name)
        .alias(name)
        for name in ("shapes", "types")
    ]
    frames = {name: getattr(result, name) for name in _PARTS}
    frames["operators"] = frames["operators"].head(most).with_columns(text)
    frames["unmodelled"] = frames["unmodelled"].head(most)
    return Roofline(**frames, timed_on=result.timed_on)


def _tables(value: Row) -> Iterator[Table]:
    several = len({row["rank"] for row in value["whole"]}) > 1
    rank = [Col("rank", "Rank", "count")] if several else []
    if value["steps"]:
        yield Table("roofline-steps", "Steps", [*rank, Col("step", "Step", "count"), *_STEP], value["steps"],
                    "roofline.steps", _said(value["steps"]))  # fmt: skip
    elif value["whole"]:
        yield Table("roofline-whole", "Whole recording", [*rank, *_STEP], value["whole"], "roofline.whole",
                    _said(value["whole"]))  # fmt: skip
    usual = _usual(value["spread"])
    if any(row["step_count"] > 1 for row in usual):
        yield Table("roofline-usual", "Usual step", [*rank, *_USUAL], usual, "roofline.spread",
                    "Over the whole steps of each rank.")  # fmt: skip
    if value["operators"]:
        columns = [*rank, *_operator_columns(value["timed_on"])]
        rows = [
            {**row, "type": f"{row['arithmetic']}{' (assumed)' if row['evidence'] == 'assumed' else ''}"}
            for row in value["operators"]
        ]
        yield Table("roofline-operators", "Operators", columns, rows, "roofline.operators")
    if value["unmodelled"]:
        yield Table("roofline-unmodelled", "Not modelled", [*rank, *_UNMODELLED], value["unmodelled"],
                    "roofline.unmodelled")  # fmt: skip
    if any(row["reason"] for row in value["devices"]):
        yield Table("roofline-devices", "Devices", [*rank, *_DEVICES], value["devices"], "roofline.devices")


_STEP = (
    Col("duration_ns", "Time", "time"),
    Col(
        "roofline_fraction",
        "Of roofline",
        "share",
        "time at the peaks, with unmodelled work as measured, over the step",
    ),
    Col("mfu", "MFU", "share", "matrix FLOPs of the model, without repeated ones, at their peaks, over the step"),
    Col("hfu", "HFU", "share", "matrix FLOPs with repeated ones, at their peaks, over the step"),
    Col("modelled_fraction", "Modelled", "share", "share of the GPU work with a model of its operator"),
    Col("flops", "FLOPs", "flops", "of all modelled work"),
    Col("bytes", "Bytes", "bytes", "least memory traffic of all modelled work", narrow=False),
    Col("reason", "Why not told", "text", narrow=False),
)
_USUAL = (
    Col("step_count", "Steps", "count"),
    Col("mean_duration_ns", "Time", "time", "mean"),
    *(
        Col(f"{how}_{key}", f"{title}{more}", "share", hint, narrow=how == "mean")
        for key, title in (("roofline_fraction", "Of roofline"), ("mfu", "MFU"), ("hfu", "HFU"))
        for how, more, hint in (("mean", "", "mean"), ("min", ", least", "in the lowest step"),
                                ("max", ", most", "in the highest step"))
    ),
    Col("mean_flops", "FLOPs", "flops", "mean"),
)  # fmt: skip
_UNMODELLED = (
    Col("gpu_ns", "GPU time", "time"),
    Col("count", "Count", "count", "pieces of GPU work"),
    Col("reason", "Why", "text"),
    Col("name", "Operator or kernel", "name"),
)
_DEVICES = (
    Col("device", "GPU", "count"),
    Col("peak", "Peaks of", "text"),
    Col("reason", "Why not known", "text"),
    Col("name", "Name", "name"),
)


def _usual(spread: list[Row]) -> list[Row]:
    """One row per rank, with mean, least and most of every quantity."""
    ranks: dict[int | None, Row] = {}
    for row in spread:
        entry = ranks.setdefault(row["rank"], {"rank": row["rank"], "step_count": 0})
        entry["step_count"] = max(entry["step_count"], row["step_count"])
        entry |= {f"{how}_{row['quantity']}": row[how] for how in ("mean", "min", "max")}
    return list(ranks.values())


def _operator_columns(timed_on: str) -> list[Col]:
    return [
        Col("total_ns", "Host time" if timed_on == "host" else "GPU time", "time"),
        Col("roofline_fraction", "Of roofline", "share", "time at the peaks over measured time"),
        Col("bound", "Bound by", "text"),
        Col("flop_rate", "FLOP/s", "flop_rate", "achieved"),
        Col("byte_rate", "B/s", "byte_rate", "achieved, of the least traffic", narrow=False),
        Col("intensity", "FLOP/B", "number", "FLOPs per byte of the least traffic", narrow=False),
        Col("flops", "FLOPs", "flops", narrow=False),
        Col("bytes", "Bytes", "bytes", "least traffic: every operand once", narrow=False),
        Col("count", "Calls", "count"),
        Col("type", "Type", "text", "element type whose peak is used; assumed where the kernel's name does not tell"),
        Col("shapes", "Shapes", "name", narrow=False),
        Col("name", "Operator", "name"),
    ]


def _said(rows: list[Row]) -> str:
    reasons = sorted({row["reason"] for row in rows if row["reason"]})
    return f"MFU or HFU are missing: {'; '.join(reasons)}." if reasons else ""


def _summary(value: Row) -> str | None:
    rows = value["steps"] or value["whole"]
    modelled = [row for row in rows if row["flops"]]
    if not modelled:
        return None
    covered = sum(row["modelled_ns"] for row in modelled)
    gpu = sum(row["gpu_ns"] for row in modelled)
    scope = "step" if value["steps"] else "recording"
    scope += " of a rank" if len({row["rank"] for row in modelled}) > 1 else ""
    text = f"{units.flops(sum(row['flops'] for row in modelled) / len(modelled))} per {scope}"
    # work that is mostly not modelled counts as measured: nobody knows how good it is
    placed = sum(row["gpu_ns"] * (row["placed_fraction"] or 0) for row in modelled)
    for key, name in (("roofline_fraction", "of the roofline"), ("mfu", "MFU")):
        fractions = [row[key] for row in modelled if row[key] is not None]
        if fractions and placed >= _WORTH_SAYING * gpu:
            text += f", {units.share(sum(fractions) / len(fractions), 1)} {name}"
    return f"{text}; models cover {units.share(covered, gpu)} of the GPU work" if gpu else text


SECTION = Section(
    key="roofline",
    title="Roofline",
    note="How close operators and steps come to what the device could do.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    picture=lambda value: picture(value["operators"]),
    schema=record(
        {
            "operators": ranked(OPERATORS, nullable=set(_NOT_TOLD), what="modelled operators by shapes, longest first"),
            "steps": ranked(STEPS, nullable={*_OF_STEPS}, what="FLOPs, roofline, MFU and HFU of each step"),
            "whole": ranked(STEPS, nullable={*_OF_STEPS, "step"}, what="the same from the first to the last GPU work"),
            "spread": ranked(SPREAD, what="per quantity mean, min and max over the whole steps"),
            "unmodelled": ranked(UNMODELLED, what="GPU work without a model, and why"),
            "devices": ranked(
                DEVICES, nullable={"name", "peak", "reason"}, what="the peaks used, or why there are none"
            ),
            "timed_on": {"type": "string", "description": "what times are of: gpu, host, or nothing"},
        },
        what="FLOPs and bytes of operators against the peaks of the device; MFU and HFU",
    ),
    reasons={
        "roofline.operators": "no operator with a model and with recorded shapes launched GPU work",
        "roofline.steps": "the trace marks no steps",
        "roofline.whole": "no trace was read",
        "roofline.spread": "the trace holds no whole step",
        "roofline.unmodelled": "no GPU work is without a model",
        "roofline.devices": "no GPU work was recorded",
        **{f"roofline.operators[*].{key}": why for key, why in _NOT_TOLD.items()},
        **{f"roofline.{part}[*].{key}": why for part in ("steps", "whole") for key, why in _OF_STEPS.items()},
        "roofline.whole[*].step": "it is about all steps",
        "roofline.devices[*].name": "the file does not name the device",
        "roofline.devices[*].peak": _NO_PEAK,
        "roofline.devices[*].reason": "the peaks are known",
        **{f"roofline.{name}[*].rank": "the file does not say its rank" for name in _PARTS},
    },
)
