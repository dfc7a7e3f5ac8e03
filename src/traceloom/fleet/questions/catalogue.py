"""The catalogue of all questions: parameters, answer tables and how each is computed."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from traceloom.fleet.analyses.anomalies import count_common_findings, find_outliers
from traceloom.fleet.analyses.attribution import (
    ATTRIBUTION_DIMENSIONS as DEVICE_TIME_BY,
    build_attribution_tree,
    divide_device_time,
    match_pattern,
)
from traceloom.fleet.analyses.efficiency import (
    INVESTMENT_DIMENSIONS as SAVINGS_BY,
    METRICS,
    compute_fleet_topline,
    compute_savings,
)
from traceloom.fleet.analyses.kernels import (
    GPU_TIME_DIMENSIONS as GPU_TIME_BY,
    build_kernel_history,
    compute_shape_coverage,
    divide_gpu_time,
    list_top_kernels,
)
from traceloom.fleet.analyses.regressions import find_regressions
from traceloom.fleet.handlers.captures import FleetRoute
from traceloom.fleet.questions import declaration
from traceloom.fleet.questions.declaration import AnswerTable, Question
from traceloom.fleet.store.schema import SCHEMAS
from traceloom.trace.columns.declare import Column

_CAPTURE_TABLES = ("captures", "devices", "jobs", "owners")  # tables that any filter may read
_OF_KERNELS, _OF_USAGE = SCHEMAS["kernels"].columns, SCHEMAS["usage_hour"].columns
_DEVICE_TIME_PREFIX = "device time, milliseconds: "
_UNKNOWN_AMOUNT = "it is known of no device time"
_BY_COLUMN = Column("text", "By", "dimensions, outermost first")
_GPU_TIME_COLUMN = Column("time", "GPU time", "GPU time in captures")
_COUNT_COLUMN = Column("count", "Count", "pieces of GPU work")
_CAPTURES_COLUMN = Column("count", "Captures", "captures that have it")
_JOBS_COLUMN = Column("count", "Jobs", "jobs that have it")
_EXAMPLE_COLUMN = Column(
    "text", "Look at", "a capture to be looked at, of the job that spends most on it"
)
_TOTAL_COLUMN = Column("time", "GPU time", "all GPU time that was looked at")
_FRACTION_COLUMN = Column("share", "Share", "share of all GPU time that was looked at")
_RATIO_COLUMN = Column("number", "Ratio", "its time over the median of its peers")
_Z_COLUMN = Column("number", "z", "robust z of its distance to its peers: 3.5 and more is far")
_OUTLIER_COLUMN = Column("text", "Outlier", "whether it is far, and slower by 5 % at least")

_KERNEL_COLUMNS = {
    "kernel": _OF_KERNELS["kernel"],
    "kind": _OF_KERNELS["kind"],
    "count": _COUNT_COLUMN,
    "total_ns": _GPU_TIME_COLUMN,
    "fraction": _FRACTION_COLUMN,
    "mean_ns": Column("time", "Mean", "mean duration of a piece of work"),
    "cycles": Column(
        "number",
        "Cycles",
        "cycles of the device, where its clock is known",
        "its clock is known nowhere",
    ),
    "cycles_known_ns": Column("time", "Clock known", "the GPU time whose clock is known"),
    "shapes": Column("count", "Shapes", "different shapes of its inputs"),
    "captures": _CAPTURES_COLUMN,
    "jobs": _JOBS_COLUMN,
    "roofline_known_ns": Column("time", "Modelled", "the GPU time of which there is a model"),
    "roofline_ns": Column(
        "time",
        "At the peaks",
        "time that its FLOPs or bytes need at the peaks of the device",
        "there is no model of it",
    ),
    "example": _EXAMPLE_COLUMN,
}
_CHANGE_COLUMNS = {
    "kernel": _OF_KERNELS["kernel"],
    "shapes": _OF_KERNELS["shapes"],
    "device_model": _OF_KERNELS["device_model"],
    "cause": Column("text", "Cause", "what changed with it: code, host, device, shapes, unknown"),
    "evidence": Column(
        "text",
        "Evidence",
        "shown: jobs after it that have the old code or hosts are as before; possible: no job can tell; none",
    ),
    "since_ns": Column("time", "Since", "start of the first job after the change, Unix time"),
    "last_before_ns": Column("time", "Last before", "start of the last job before it, Unix time"),
    "before_ns": Column(
        "time", "Before", "median over jobs of the mean duration of a piece of work"
    ),
    "after_ns": Column("time", "After", "the same after the change"),
    "change": Column("change", "Change", "after over before, less 1"),
    "low": Column("change", "At least", "low end of its 95 % interval"),
    "high": Column("change", "At most", "high end of its 95 % interval"),
    "extra_ns": Column(
        "time",
        "Costs",
        "GPU time that jobs after it spent in captures beyond what it was before; negative: saved",
    ),
    "jobs_before": Column("count", "Jobs before", "jobs before the change"),
    "jobs_after": Column("count", "Jobs after", "jobs after it"),
    "jobs": Column("text", "Jobs", "the jobs that lose most by it"),
    "capture": Column("text", "Capture", "a capture of the job nearest to the median after"),
    "healthy_capture": Column("text", "Healthy", "the same before, to be compared"),
}
_AMOUNT_COLUMNS = {
    "device_ms": Column("count", "Device time, ms", f"{_DEVICE_TIME_PREFIX}all of it"),
    "busy_ms": Column("count", "Busy, ms", f"{_DEVICE_TIME_PREFIX}jobs compute"),
    "idle_ms": Column(
        "count", "Idle, ms", f"{_DEVICE_TIME_PREFIX}a job holds the device, and nothing runs"
    ),
    "unallocated_ms": Column("count", "Free, ms", f"{_DEVICE_TIME_PREFIX}no job holds the device"),
    "unreachable_ms": Column(
        "count", "Unreachable, ms", f"{_DEVICE_TIME_PREFIX}its agent was not heard of"
    ),
    "energy_mj": Column("count", "Energy, mJ", "energy, millijoules", _UNKNOWN_AMOUNT),
    "flops_low": Column("flops", "FLOPs, least", "operations, at least", _UNKNOWN_AMOUNT),
    "flops_high": Column("flops", "FLOPs, most", "operations, at most", _UNKNOWN_AMOUNT),
    "input_bytes": Column("bytes", "Input", "bytes of input that jobs read", _UNKNOWN_AMOUNT),
    "cost": Column(
        "number",
        "Cost",
        "device hours and measured energy at their prices",
        "there is no price of it",
    ),
    "co2_g": Column(
        "number", "CO2, g", "grams of CO2 of the energy that was measured", _UNKNOWN_AMOUNT
    ),
    **{
        f"{name}_known_ms": Column(
            "count", f"{title} known, ms", f"{_DEVICE_TIME_PREFIX}of which the {text} known"
        )
        for name, title, text in (
            ("energy", "Energy", "energy is"),
            ("flops", "FLOPs", "operations are"),
            ("input", "Input", "input is"),
            ("cost", "Cost", "cost is"),
            ("co2", "CO2", "CO2 is"),
        )
    },
}
_METRIC_FORMATS = {
    "device_use": ("share", "Busy"),
    "flop_rate": ("flop_rate", "FLOP/s"),
    "compute_use": ("share", "Of the peak"),
    "power_w": ("number", "Power, W"),
    "roofline_fraction": ("share", "Roofline"),
    "mfu": ("share", "MFU"),
    "reference_hours_per_byte": ("number", "Hours per byte"),
}
_TOPLINE_COLUMNS = {
    "device_hours": Column("number", "Device hours", "hours of devices that jobs held"),
    "flop_rate_high": Column(
        "flop_rate",
        "FLOP/s, most",
        "FLOP/s of a device that is held, at most",
        "they are not measured",
    ),
    **{
        name: Column(*_METRIC_FORMATS[name], meaning, "it is not measured")
        for name, meaning in METRICS.items()
    },
}

_INTERVALS = {"": None, "hour": declaration.HOUR_NS, "day": declaration.DAY_NS}

QUESTIONS = (
    Question(
        "kernels",
        "the kernels that take most of the fleet's GPU time",
        declaration.TopKernelsQuery,
        {"rows": AnswerTable("kernels, most first", _KERNEL_COLUMNS)},
        {"total_ns": _TOTAL_COLUMN},
        ("kernels", *_CAPTURE_TABLES),
        lambda frames, asked: list_top_kernels(
            frames.kernels, frames.captures, asked.sort, asked.skip + asked.top + 1
        ),
    ),
    Question(
        "kernel-history",
        "how long one kernel took in each job, over time",
        declaration.KernelHistoryQuery,
        {
            "rows": AnswerTable(
                "jobs by the time of their first capture, the last 2,000",
                {
                    "start_ns": Column(
                        "time", "At", "start of the first capture of the job, Unix time"
                    ),
                    "job": Column(
                        "text", "Job", "name of the job, or of the capture that is of none"
                    ),
                    "mean_ns": Column(
                        "time", "Mean", "median over its captures of the mean of a piece of work"
                    ),
                    "count": _COUNT_COLUMN,
                    "total_ns": _GPU_TIME_COLUMN,
                    "capture": Column("text", "Capture", "its first capture"),
                    "code": SCHEMAS["captures"].columns["code"],
                    "torch": SCHEMAS["captures"].columns["torch"],
                },
            )
        },
        {"jobs": Column("count", "Jobs", "jobs that ran it")},
        ("kernels", *_CAPTURE_TABLES),
        lambda frames, asked: build_kernel_history(
            frames.kernels, frames.captures, asked.kernel, asked.shapes or None
        ),
        "kernels/history",
    ),
    Question(
        "regressions",
        "the kernels that became slower or faster: since when, by how much, and what changed with them",
        declaration.KernelFilterQuery,
        {
            "changes": AnswerTable(
                "changes, what costs most GPU time first, changes of the mix behind all others",
                _CHANGE_COLUMNS,
                {"jobs": list[str]},
            )
        },
        {
            "series": Column(
                "count", "Series", "kernels, shapes and models of device that were looked at"
            ),
            "short": Column(
                "count", "Short", "those of fewer than ten jobs, of which nothing is said"
            ),
        },
        ("kernels", *_CAPTURE_TABLES),
        lambda frames, _: find_regressions(frames.kernels, frames.captures, frames.devices),
    ),
    Question(
        "characterise",
        "where the fleet's GPU time goes, by kind, bound, kernel, job, version or whose it is",
        declaration.GroupedQuery,
        {
            "rows": AnswerTable(
                "combinations of values, the longest first",
                {
                    "count": _COUNT_COLUMN,
                    "total_ns": _GPU_TIME_COLUMN,
                    "fraction": _FRACTION_COLUMN,
                    "captures": _CAPTURES_COLUMN,
                },
                divided=GPU_TIME_BY,
            )
        },
        {"by": _BY_COLUMN},
        ("kernels", *_CAPTURE_TABLES),
        lambda frames, asked: divide_gpu_time(
            frames.kernels, frames.captures, frames.owned, asked.by.split(",")
        ),
    ),
    Question(
        "coverage",
        "what specialising kernels for the commonest shapes would cover",
        declaration.KernelFilterQuery,
        {
            "rows": AnswerTable(
                "kernels with shapes, the longest first",
                {
                    "number": Column("count", "Number", "its place, from 1 on"),
                    **{
                        name: _OF_KERNELS[name]
                        for name in ("kernel", "op", "shapes", "types", "device_model")
                    },
                    "count": _COUNT_COLUMN,
                    "total_ns": _GPU_TIME_COLUMN,
                    "fraction": _FRACTION_COLUMN,
                    "covered_fraction": Column(
                        "share", "Covered", "share of the GPU time with all before it"
                    ),
                },
            )
        },
        {
            "total_ns": _TOTAL_COLUMN,
            "unshaped_ns": Column("time", "No shapes", "the part without recorded shapes"),
        },
        ("kernels", *_CAPTURE_TABLES),
        lambda frames, asked: compute_shape_coverage(frames.kernels, asked.skip + asked.top + 1),
    ),
    Question(
        "attribution",
        "whose the time of devices was, and what it cost",
        declaration.AttributionQuery,
        {
            "rows": AnswerTable(
                "a tree: each part before its parts, the largest first; all levels have the same sum",
                {
                    "time_ns": Column(
                        "time", "Time", "start of the hour or day, Unix time", "all is in one"
                    ),
                    "values": Column(
                        "text",
                        "Part",
                        "values of the dimensions, outermost first; none for everything",
                    ),
                    **_AMOUNT_COLUMNS,
                },
                {"values": list[str]},
            )
        },
        {
            "by": _BY_COLUMN,
            "currency": Column("text", "Currency", "of the cost", "there are no prices"),
        },
        ("usage_hour", "jobs", "owners"),
        lambda frames, asked: build_attribution_tree(
            divide_device_time(
                frames.usage,
                frames.owned,
                asked.by.split(","),
                frames.prices,
                _INTERVALS[asked.over],
            ),
            asked.top,
        ),
    ),
    Question(
        "topline",
        "what jobs, models, hosts or the whole fleet get out of their devices",
        declaration.ToplineQuery,
        {
            "rows": AnswerTable(
                "the most device time first", _TOPLINE_COLUMNS, divided=DEVICE_TIME_BY
            ),
            "correlations": AnswerTable(
                "how two metrics go together over jobs",
                {
                    "first": Column("text", "First", "a metric"),
                    "second": Column("text", "Second", "another metric"),
                    "jobs": Column("count", "Jobs", "jobs of which both are known"),
                    "correlation": Column(
                        "number", "Correlation", "Spearman's, -1 to 1", "too few jobs, or all alike"
                    ),
                },
            ),
        },
        {
            "by": Column("text", "By", "what a row is of; empty: everything in one row"),
            "reference": Column(
                "text", "Reference", "the device that reference hours are counted in"
            ),
        },
        ("usage_hour", *_CAPTURE_TABLES),
        lambda frames, asked: compute_fleet_topline(
            frames.usage, frames.owned, frames.captures, asked.by
        ),
    ),
    Question(
        "findings",
        "which findings captures have, and how common each is",
        declaration.RuleQuery,
        {
            "rows": AnswerTable(
                "rules, the one of most captures first",
                {
                    "rule": SCHEMAS["findings"].columns["slug"],
                    "findings": Column("count", "Findings", "findings of the rule"),
                    "captures": _CAPTURES_COLUMN,
                    "fraction": Column(
                        "share", "Of captures", "share of all captures that have it"
                    ),
                    "jobs": _JOBS_COLUMN,
                    "saving_fraction": Column(
                        "share", "Of the step", "what fixing it saves, mean", "it saves no time"
                    ),
                    "confidence": Column("share", "Confidence", "how sure the rule is, mean"),
                    "example": Column("text", "Look at", "the capture where it saves most"),
                },
            )
        },
        {"captures": Column("count", "Captures", "captures that were looked at")},
        ("findings", *_CAPTURE_TABLES),
        lambda frames, asked: count_common_findings(
            frames.findings.filter(match_pattern(pl.col("slug"), asked.rule))
            if asked.rule
            else frames.findings,
            frames.captures,
        ),
    ),
    Question(
        "outliers",
        "the hosts and ranks that are slower than their peers",
        declaration.PagedQuery,
        {
            "hosts": AnswerTable(
                "hosts, the slowest first",
                {
                    "host": Column("text", "Host", "name of the host"),
                    "device_model": _OF_KERNELS["device_model"],
                    "ratio": _RATIO_COLUMN,
                    "z": _Z_COLUMN,
                    "outlier": _OUTLIER_COLUMN,
                    "kernels": Column(
                        "count", "Kernels", "kernels and shapes that at least four hosts ran"
                    ),
                    "jobs": Column("count", "Jobs", "jobs that ran there"),
                },
                {"outlier": bool},
            ),
            "ranks": AnswerTable(
                "ranks, the slowest first",
                {
                    "job": Column("text", "Job", "name of the job"),
                    "rank": Column("count", "Rank", "number of the rank"),
                    "host": Column(
                        "text", "Host", "host of its last capture", "no file names its host"
                    ),
                    "ratio": _RATIO_COLUMN,
                    "z": _Z_COLUMN,
                    "outlier": _OUTLIER_COLUMN,
                    "captures": _CAPTURES_COLUMN,
                },
                {"outlier": bool},
            ),
        },
        {},
        ("kernels", *_CAPTURE_TABLES),
        lambda frames, _: find_outliers(frames.kernels, frames.captures, frames.devices),
    ),
    Question(
        "invest",
        "where work on software pays: device time times what fixing findings saves",
        declaration.InvestmentQuery,
        {
            "rows": AnswerTable(
                "combinations of values, the most first",
                {
                    "saved_ms": Column(
                        "number", "Saves, ms", f"{_DEVICE_TIME_PREFIX}what fixing would save"
                    ),
                    "jobs": _JOBS_COLUMN,
                    "confidence": Column(
                        "share", "Confidence", "how sure the rules are, mean by what is saved"
                    ),
                    "example": Column(
                        "text", "Look at", "a capture of the job that would save most"
                    ),
                },
                divided=SAVINGS_BY,
            )
        },
        {
            "by": _BY_COLUMN,
            "held_ms": Column("count", "Held, ms", f"{_DEVICE_TIME_PREFIX}jobs held the device"),
            "analysed_ms": Column(
                "count", "Analysed, ms", f"{_DEVICE_TIME_PREFIX}of jobs that have captures"
            ),
        },
        ("usage_hour", "findings", *_CAPTURE_TABLES),
        lambda frames, asked: compute_savings(
            frames.usage, frames.owned, frames.captures, frames.findings, asked.by.split(",")
        ),
    ),
)
"""All questions, in the order of the documentation."""

QUESTION: Mapping[str, Question] = {question.name: question for question in QUESTIONS}
"""Questions by name."""

ALL_CHANGES_QUERY = declaration.KernelFilterQuery(top=1000)
"""Default query of pages about regressions: its answer is computed once for all readers."""

QUESTION_ROUTES = tuple(
    FleetRoute(
        path=question.path,
        summary=f"{question.summary[0].upper()}{question.summary[1:]}",
        answers=lambda asked, question=question: asked.service.questions.ask(  # type: ignore[misc]
            question, asked.parameters(question.parameters)
        ),
        answer=question.answer,
        parameters=question.parameters,
        refuses=(400, 503),
    )
    for question in QUESTIONS
)
