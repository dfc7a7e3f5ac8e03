"""All questions, with their view (columns, headline, key numbers, next step)."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from traceloom.fleet.analyses.anomalies import common_findings, outliers
from traceloom.fleet.analyses.attribution import BY as DEVICE_TIME_BY
from traceloom.fleet.analyses.attribution import attribution, fits, tree
from traceloom.fleet.analyses.efficiency import BY as SAVINGS_BY
from traceloom.fleet.analyses.efficiency import METRICS, invest, topline
from traceloom.fleet.analyses.kernels import BY as GPU_TIME_BY
from traceloom.fleet.analyses.kernels import coverage, gpu_time_by, kernel_history, top_kernels
from traceloom.fleet.analyses.regressions import regressions
from traceloom.fleet.handlers.captures import FleetRoute
from traceloom.fleet.questions import declaration
from traceloom.fleet.questions.declaration import AnswerTable, Question
from traceloom.fleet.store.schema import SCHEMAS
from traceloom.trace.frames import Column

_CAPTURES = ("captures", "devices", "jobs", "owners")  # what filters may ask, too
_OF_KERNELS, _OF_USAGE = SCHEMAS["kernels"].columns, SCHEMAS["usage_hour"].columns
_MS = "device time, milliseconds: "
_NEVER = "it is known of no device time"
_BY = Column("text", "By", "dimensions, outermost first")
_GPU_NS = Column("time", "GPU time", "GPU time in captures")
_COUNT = Column("count", "Count", "pieces of GPU work")
_CAPTURES_OF = Column("count", "Captures", "captures that have it")
_JOBS_OF = Column("count", "Jobs", "jobs that have it")
_EXAMPLE = Column("text", "Look at", "a capture to be looked at, of the job that spends most on it")
_TOTAL = Column("time", "GPU time", "all GPU time that was looked at")
_FRACTION = Column("share", "Share", "share of all GPU time that was looked at")
_RATIO = Column("number", "Ratio", "its time over the median of its peers")
_Z = Column("number", "z", "robust z of its distance to its peers: 3.5 and more is far")
_OUTLIER = Column("text", "Outlier", "whether it is far, and slower by 5 % at least")
_ROOFLINE = Column(
    "share", "Roofline", "share of the roofline that steps reach, mean over captures", "no capture says it"
)

_KERNELS = {
    "kernel": _OF_KERNELS["kernel"],
    "kind": _OF_KERNELS["kind"],
    "count": _COUNT,
    "total_ns": _GPU_NS,
    "fraction": _FRACTION,
    "mean_ns": Column("time", "Mean", "mean duration of a piece of work"),
    "cycles": Column(
        "number", "Cycles", "cycles of the device, where its clock is known", "its clock is known nowhere"
    ),
    "cycles_known_ns": Column("time", "Clock known", "the GPU time whose clock is known"),
    "shapes": Column("count", "Shapes", "different shapes of its inputs"),
    "captures": _CAPTURES_OF,
    "jobs": _JOBS_OF,
    "roofline_known_ns": Column("time", "Modelled", "the GPU time of which there is a model"),
    "roofline_ns": Column(
        "time",
        "At the peaks",
        "time that its FLOPs or bytes need at the peaks of the device",
        "there is no model of it",
    ),
    "example": _EXAMPLE,
}
_CHANGES = {
    "kernel": _OF_KERNELS["kernel"],
    "shapes": _OF_KERNELS["shapes"],
    "device_model": _OF_KERNELS["device_model"],
    "cause": Column("text", "Cause", "what changed with it: code, host, device, shapes, unknown"),
    "evidence": Column(
        "text", "Evidence",
        "shown: jobs after it that have the old code or hosts are as before; possible: no job can tell; none",
    ),
    "since_ns": Column("time", "Since", "start of the first job after the change, Unix time"),
    "last_before_ns": Column("time", "Last before", "start of the last job before it, Unix time"),
    "before_ns": Column("time", "Before", "median over jobs of the mean duration of a piece of work"),
    "after_ns": Column("time", "After", "the same after the change"),
    "change": Column("change", "Change", "after over before, less 1"),
    "low": Column("change", "At least", "low end of its 95 % interval"),
    "high": Column("change", "At most", "high end of its 95 % interval"),
    "extra_ns": Column(
        "time", "Costs", "GPU time that jobs after it spent in captures beyond what it was before; negative: saved"
    ),
    "jobs_before": Column("count", "Jobs before", "jobs before the change"),
    "jobs_after": Column("count", "Jobs after", "jobs after it"),
    "jobs": Column("text", "Jobs", "the jobs that lose most by it"),
    "capture": Column("text", "Capture", "a capture of the job nearest to the median after"),
    "healthy_capture": Column("text", "Healthy", "the same before, to be compared"),
}  # fmt: skip
_AMOUNTS = {
    "device_ms": Column("count", "Device time, ms", f"{_MS}all of it"),
    "busy_ms": Column("count", "Busy, ms", f"{_MS}jobs compute"),
    "idle_ms": Column("count", "Idle, ms", f"{_MS}a job holds the device, and nothing runs"),
    "unallocated_ms": Column("count", "Free, ms", f"{_MS}no job holds the device"),
    "unreachable_ms": Column("count", "Unreachable, ms", f"{_MS}its agent was not heard of"),
    "energy_mj": Column("count", "Energy, mJ", "energy, millijoules", _NEVER),
    "flops_low": Column("flops", "FLOPs, least", "operations, at least", _NEVER),
    "flops_high": Column("flops", "FLOPs, most", "operations, at most", _NEVER),
    "input_bytes": Column("bytes", "Input", "bytes of input that jobs read", _NEVER),
    "cost": Column("number", "Cost", "device hours and measured energy at their prices", "there is no price of it"),
    "co2_g": Column("number", "CO2, g", "grams of CO2 of the energy that was measured", _NEVER),
    **{
        f"{name}_known_ms": Column("count", f"{title} known, ms", f"{_MS}of which the {text} known")
        for name, title, text in (
            ("energy", "Energy", "energy is"), ("flops", "FLOPs", "operations are"), ("input", "Input", "input is"),
            ("cost", "Cost", "cost is"), ("co2", "CO2", "CO2 is"),
        )
    },
}  # fmt: skip
_METRICS = {
    "device_use": ("share", "Busy"), "flop_rate": ("flop_rate", "FLOP/s"), "compute_use": ("share", "Of the peak"),
    "power_w": ("number", "Power, W"), "roofline_fraction": ("share", "Roofline"), "mfu": ("share", "MFU"),
    "reference_hours_per_byte": ("number", "Hours per byte"),
}  # fmt: skip
_TOPLINE = {
    "device_hours": Column("number", "Device hours", "hours of devices that jobs held"),
    "flop_rate_high": Column(
        "flop_rate", "FLOP/s, most", "FLOP/s of a device that is held, at most", "they are not measured"
    ),
    **{name: Column(*_METRICS[name], meaning, "it is not measured") for name, meaning in METRICS.items()},
}

_EVERY = {"": None, "hour": declaration.HOUR_NS, "day": declaration.DAY_NS}

QUESTIONS = (
    Question(
        "kernels", "the kernels that take most of the fleet's GPU time", declaration.KernelsAsking,
        {"rows": AnswerTable("kernels, most first", _KERNELS)}, {"total_ns": _TOTAL}, ("kernels", *_CAPTURES),
        lambda frames, asked: top_kernels(frames.kernels, frames.captures, asked.sort, asked.skip + asked.top + 1),
    ),
    Question(
        "kernel-history", "how long one kernel took in each job, over time", declaration.HistoryAsking,
        {
            "rows": AnswerTable(
                "jobs by the time of their first capture, the last 2,000",
                {
                    "start_ns": Column("time", "At", "start of the first capture of the job, Unix time"),
                    "job": Column("text", "Job", "name of the job, or of the capture that is of none"),
                    "mean_ns": Column("time", "Mean", "median over its captures of the mean of a piece of work"),
                    "count": _COUNT,
                    "total_ns": _GPU_NS,
                    "capture": Column("text", "Capture", "its first capture"),
                    "code": SCHEMAS["captures"].columns["code"],
                    "torch": SCHEMAS["captures"].columns["torch"],
                },
            )
        },
        {"jobs": Column("count", "Jobs", "jobs that ran it")}, ("kernels", *_CAPTURES),
        lambda frames, asked: kernel_history(frames.kernels, frames.captures, asked.kernel, asked.shapes or None),
        "kernels/history",
    ),
    Question(
        "regressions", "the kernels that became slower or faster: since when, by how much, and what changed with them",
        declaration.OfKernels,
        {
            "changes": AnswerTable(
                "changes, what costs most GPU time first, changes of the mix behind all others", _CHANGES,
                {"jobs": list[str]},
            )
        },
        {
            "series": Column("count", "Series", "kernels, shapes and models of device that were looked at"),
            "short": Column("count", "Short", "those of fewer than ten jobs, of which nothing is said"),
        },
        ("kernels", *_CAPTURES),
        lambda frames, _: regressions(frames.kernels, frames.captures, frames.devices),
    ),
    Question(
        "characterise", "where the fleet's GPU time goes, by kind, bound, kernel, job, version or whose it is",
        declaration.DividedAsking,
        {
            "rows": AnswerTable(
                "combinations of values, the longest first",
                {"count": _COUNT, "total_ns": _GPU_NS, "fraction": _FRACTION, "captures": _CAPTURES_OF},
                divided=GPU_TIME_BY,
            )
        },
        {"by": _BY}, ("kernels", *_CAPTURES),
        lambda frames, asked: gpu_time_by(frames.kernels, frames.captures, frames.owned, asked.by.split(",")),
    ),
    Question(
        "coverage", "what specialising kernels for the commonest shapes would cover", declaration.OfKernels,
        {
            "rows": AnswerTable(
                "kernels with shapes, the longest first",
                {
                    "number": Column("count", "Number", "its place, from 1 on"),
                    **{name: _OF_KERNELS[name] for name in ("kernel", "op", "shapes", "types", "device_model")},
                    "count": _COUNT,
                    "total_ns": _GPU_NS,
                    "fraction": _FRACTION,
                    "covered_fraction": Column("share", "Covered", "share of the GPU time with all before it"),
                },
            )
        },
        {"total_ns": _TOTAL, "unshaped_ns": Column("time", "No shapes", "the part without recorded shapes")},
        ("kernels", *_CAPTURES),
        lambda frames, asked: coverage(frames.kernels, asked.skip + asked.top + 1),
    ),
    Question(
        "attribution", "whose the time of devices was, and what it cost", declaration.AttributionAsking,
        {
            "rows": AnswerTable(
                "a tree: each part before its parts, the largest first; all levels have the same sum",
                {
                    "time_ns": Column("time", "Time", "start of the hour or day, Unix time", "all is in one"),
                    "values": Column("text", "Part", "values of the dimensions, outermost first; none for everything"),
                    **_AMOUNTS,
                },
                {"values": list[str]},
            )
        },
        {"by": _BY, "currency": Column("text", "Currency", "of the cost", "there are no prices")},
        ("usage_hour", "jobs", "owners"),
        lambda frames, asked: tree(
            attribution(frames.usage, frames.owned, asked.by.split(","), frames.prices, _EVERY[asked.over]), asked.top
        ),
    ),
    Question(
        "topline", "what jobs, models, hosts or the whole fleet get out of their devices", declaration.ToplineAsking,
        {
            "rows": AnswerTable("the most device time first", _TOPLINE, divided=DEVICE_TIME_BY),
            "correlations": AnswerTable(
                "how two metrics go together over jobs",
                {
                    "first": Column("text", "First", "a metric"),
                    "second": Column("text", "Second", "another metric"),
                    "jobs": Column("count", "Jobs", "jobs of which both are known"),
                    "correlation": Column("number", "Correlation", "Spearman's, -1 to 1", "too few jobs, or all alike"),
                },
            ),
        },
        {
            "by": Column("text", "By", "what a row is of; empty: everything in one row"),
            "reference": Column("text", "Reference", "the device that reference hours are counted in"),
        },
        ("usage_hour", *_CAPTURES),
        lambda frames, asked: topline(frames.usage, frames.owned, frames.captures, asked.by),
    ),
    Question(
        "findings", "which findings captures have, and how common each is", declaration.RulesAsking,
        {
            "rows": AnswerTable(
                "rules, the one of most captures first",
                {
                    "rule": SCHEMAS["findings"].columns["slug"],
                    "findings": Column("count", "Findings", "findings of the rule"),
                    "captures": _CAPTURES_OF,
                    "fraction": Column("share", "Of captures", "share of all captures that have it"),
                    "jobs": _JOBS_OF,
                    "saving_fraction": Column("share", "Of the step", "what fixing it saves, mean", "it saves no time"),
                    "confidence": Column("share", "Confidence", "how sure the rule is, mean"),
                    "example": Column("text", "Look at", "the capture where it saves most"),
                },
            )
        },
        {"captures": Column("count", "Captures", "captures that were looked at")}, ("findings", *_CAPTURES),
        lambda frames, asked: common_findings(
            frames.findings.filter(fits(pl.col("slug"), asked.rule)) if asked.rule else frames.findings, frames.captures
        ),
    ),
    Question(
        "outliers", "the hosts and ranks that are slower than their peers", declaration.Paged,
        {
            "hosts": AnswerTable(
                "hosts, the slowest first",
                {
                    "host": Column("text", "Host", "name of the host"),
                    "device_model": _OF_KERNELS["device_model"],
                    "ratio": _RATIO,
                    "z": _Z,
                    "outlier": _OUTLIER,
                    "kernels": Column("count", "Kernels", "kernels and shapes that at least four hosts ran"),
                    "jobs": Column("count", "Jobs", "jobs that ran there"),
                },
                {"outlier": bool},
            ),
            "ranks": AnswerTable(
                "ranks, the slowest first",
                {
                    "job": Column("text", "Job", "name of the job"),
                    "rank": Column("count", "Rank", "number of the rank"),
                    "host": Column("text", "Host", "host of its last capture", "no file names its host"),
                    "ratio": _RATIO,
                    "z": _Z,
                    "outlier": _OUTLIER,
                    "captures": _CAPTURES_OF,
                },
                {"outlier": bool},
            ),
        },
        {}, ("kernels", *_CAPTURES),
        lambda frames, _: outliers(frames.kernels, frames.captures, frames.devices),
    ),
    Question(
        "invest", "where work on software pays: device time times what fixing findings saves", declaration.InvestAsking,
        {
            "rows": AnswerTable(
                "combinations of values, the most first",
                {
                    "saved_ms": Column("number", "Saves, ms", f"{_MS}what fixing would save"),
                    "jobs": _JOBS_OF,
                    "confidence": Column("share", "Confidence", "how sure the rules are, mean by what is saved"),
                    "example": Column("text", "Look at", "a capture of the job that would save most"),
                },
                divided=SAVINGS_BY,
            )
        },
        {
            "by": _BY,
            "held_ms": Column("count", "Held, ms", f"{_MS}jobs held the device"),
            "analysed_ms": Column("count", "Analysed, ms", f"{_MS}of jobs that have captures"),
        },
        ("usage_hour", "findings", *_CAPTURES),
        lambda frames, asked: invest(
            frames.usage, frames.owned, frames.captures, frames.findings, asked.by.split(",")
        ),
    ),
)  # fmt: skip
"""In the order of the documentation."""

QUESTION: Mapping[str, Question] = {question.name: question for question in QUESTIONS}
"""By their names."""

EVERY_CHANGE = declaration.OfKernels(top=1000)
"""What the pages ask about regressions unless their reader asks another way: its answer is worked out once for all."""

QUESTION_ROUTES = tuple(
    FleetRoute(
        path=question.path, summary=f"{question.summary[0].upper()}{question.summary[1:]}",
        answers=lambda asked, question=question: asked.service.questions.ask(  # type: ignore[misc]
            question, asked.parameters(question.parameters)
        ),
        answer=question.answer, parameters=question.parameters, refuses=(400, 503),
    )
    for question in QUESTIONS
)  # fmt: skip
