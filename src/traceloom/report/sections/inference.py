"""Inference servers: their steps and batches, time between tokens, the operators of graph replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from traceloom import analyze
from traceloom.analyze.inference import MIX, NODES, OPERATORS, RATES, STEPS, Inference
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.capture_of_graphs import capture_of_graphs
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import or_null, ranked, record
from traceloom.report.table import Col, Table

_ROWS = 500  # steps and nodes of a rank
_SHAPES: dict[str, tuple[Mapping[str, Any], str]] = {
    "steps": (STEPS, "steps of the server, the first 500 of each rank"),
    "mix": (MIX, "steps by kind, over all of them"),
    "rates": (RATES, "tokens and samples per second, told by the names or declared"),
    "operators": (OPERATORS, "GPU time of graph replays by operator and module of the capture"),
    "nodes": (NODES, "nodes of graphs with their operators, the 500 with the most time of each rank"),
}
_FACTS = [name for name in STEPS if name.startswith(("context_", "generation_"))]
_NULLS = {
    "steps": ("requests", *_FACTS, "gpu_span_ns", "lag_ns", "between_ns"),
    "mix": (
        "mean_requests",
        "context_tokens",
        "generation_tokens",
        *(name for name in MIX if name.startswith("between")),
    ),
    "rates": (),
    "operators": ("op_name", "module"),
    "nodes": ("op", "op_name", "module", "evidence", "reason"),
}
_NO_CAPTURE = "no recording of the graphs' capture was given (--graph-capture), or there are no graphs"


def _measure(trace: Trace, options: ReportOptions) -> Inference:
    measured = analyze.inference(
        trace,
        capture_of_graphs(options),
        tokens_per_step=options.tokens_per_step,
        samples_per_step=options.samples_per_step,
    )
    nodes = measured.nodes.sort("total_ns", descending=True, maintain_order=True).head(_ROWS)
    return replace(measured, steps=measured.steps.head(_ROWS), nodes=nodes)


def _build(study: Study[Inference], absent: Absent) -> Row | None:
    results = study.results
    if not any(result.steps.height or result.rates.height or result.nodes.height for result in results):
        absent.say("inference")
        return None
    out: Row = {
        name: absent.rows(study.concat(lambda part, name=name: getattr(part, name).drop("rank")), f"inference.{name}")  # type: ignore[misc]
        for name in _SHAPES
    }
    if not out["nodes"]:
        absent.say("inference.nodes")
        absent.say("inference.operators")
    shares = [result.mapped_fraction for result in results if result.mapped_fraction is not None]
    return {**out, "mapped_fraction": absent.value(min(shares, default=None), "inference.mapped_fraction")}


def _tables(value: Row) -> Iterator[Table]:
    everything = [row for name in _SHAPES for row in value[name]]
    rank = [Col("rank", "Rank", "count")] if len({row["rank"] for row in everything}) > 1 else []
    columns = {
        "mix": (
            "Steps by kind",
            [Col("kind", "Kind"), Col("step_count", "Steps", "count"),
             Col("mean_duration_ns", "Mean", "time", "of the host"),
             Col("mean_gpu_ns", "GPU", "time", "mean"), Col("max_gpu_ns", "Most", "time", narrow=False),
             Col("gpu_fraction", "Of GPU time", "share"), Col("mean_requests", "Requests", "number", "mean"),
             Col("context_tokens", "Context", "count", "tokens computed"),
             Col("generation_tokens", "Generated", "count", "tokens"),
             Col("between_median_ns", "Between tokens", "time", "median"),
             Col("between_p95_ns", "95 %", "time", narrow=False)],
        ),
        "rates": (
            "Per second",
            [Col("what", "What"), Col("count", "Count", "count"), Col("window_ns", "In", "time"),
             Col("per_second", "Per second", "number"), Col("evidence", "Known by")],
        ),
        "steps": (
            "Steps of the server",
            [Col("number", "Step", "count"), Col("kind", "Kind"), Col("start_ns", "At", "time", narrow=False),
             Col("duration_ns", "Host", "time"), Col("gpu_ns", "GPU", "time"),
             Col("requests", "Requests", "count"), Col("context_tokens", "Context", "count", "tokens computed"),
             Col("generation_tokens", "Generated", "count", "tokens"), Col("between_ns", "Between tokens", "time"),
             Col("lag_ns", "Lag", "time", "from the end of the annotation to that of its GPU work", narrow=False),
             Col("graph_work_count", "In graphs", "count", "pieces of GPU work", narrow=False)],
        ),
        "operators": (
            "Operators of graph replays",
            [Col("gpu_ns", "GPU time", "time"), Col("kernel_count", "Kernels", "count"),
             Col("module", "Module", narrow=False), Col("op_name", "Operator", "name")],
        ),
        "nodes": (
            "Nodes of graphs",
            [Col("graph", "Graph", "count"), Col("node", "Node", "count"), Col("total_ns", "Total", "time"),
             Col("op_name", "Operator"), Col("evidence", "Evidence", narrow=False),
             Col("reason", "Why none", narrow=False), Col("name", "Kernel", "name")],
        ),
    }  # fmt: skip
    for name, (title, shown) in columns.items():
        if value[name]:
            yield Table(f"inference-{name}", title, [*rank, *shown], value[name], f"inference.{name}")


def _summary(value: Row | None) -> str | None:
    if not value:
        return None
    words = []
    for kind in dict.fromkeys(row["kind"] for row in value["mix"]):
        rows = [row for row in value["mix"] if row["kind"] == kind]
        count = sum(row["step_count"] for row in rows)
        mean = sum(row["mean_gpu_ns"] * row["step_count"] for row in rows) / count
        steps = f"{units.count(count)} {kind} {'step' if count == 1 else 'steps'}"
        ranks = f" of {len(rows)} ranks" if len(rows) > 1 else ""
        text = f"{steps}{ranks} of {units.duration(round(mean))}"
        between = max((row["between_median_ns"] or 0 for row in rows), default=0)
        most = "at most " if len(rows) > 1 else ""
        words.append(text + (f" ({most}{units.duration(between)} between tokens)" if between else "") + " on the GPU")
    for what in dict.fromkeys(row["what"] for row in value["rates"]):
        rows = [row for row in value["rates"] if row["what"] == what]
        low, high = (units.number(end(row["per_second"] for row in rows)) for end in (min, max))
        each = " on each rank" if len(rows) > 1 else ""
        words.append(f"{low if low == high else f'{low} to {high}'} {what} per second{each}")
    if value["mapped_fraction"] is not None:
        words.append(f"{units.share(value['mapped_fraction'], 1.0)} of the graphs' time has an operator")
    return "; ".join(words[:8])


SECTION = Section(
    key="inference",
    title="Inference",
    note="Steps of an inference server with their batches, the time between tokens, the operators of graph replays.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=or_null(
        record(
            {
                **{name: ranked({k: v for k, v in shape.items() if k != "rank"}, nullable=_NULLS[name], what=what)
                   for name, (shape, what) in _SHAPES.items()},
                "mapped_fraction": {"type": ["number", "null"]},
            }
        )
    ),
    reasons={
        "inference": "no step of an inference server is recorded (known are vLLM's, SGLang's and ATOM's annotations), "
        "and nothing is declared per step",
        **dict.fromkeys(("inference.nodes", "inference.operators", "inference.mapped_fraction"), _NO_CAPTURE),
        **{f"inference.{name}[*].rank": "the file does not say its rank" for name in _SHAPES},
        **{f"inference.steps[*].{name}": "the annotation does not tell" for name in ("requests", *_FACTS)},
        **{f"inference.mix[*].{name}": "an annotation does not tell" for name in _NULLS["mix"][:3]},
        **{f"inference.mix[*].{name}": "fewer than two steps that generate" for name in _NULLS["mix"][3:]},
        "inference.steps[*].gpu_span_ns": "the step launched no GPU work",
        "inference.steps[*].lag_ns": "the step launched no GPU work",
        "inference.steps[*].between_ns": "the step generates nothing, or is the first that does",
        "inference.operators[*].op_name": "null is what could not be mapped",
        "inference.operators[*].module": "no module stands around it in the capture",
        **{f"inference.nodes[*].{name}": "not mapped; see its reason" for name in ("op", "op_name", "evidence")},
        "inference.nodes[*].module": "no module stands around it in the capture",
        "inference.nodes[*].reason": "null is a node that was mapped",
    },
)  # fmt: skip
