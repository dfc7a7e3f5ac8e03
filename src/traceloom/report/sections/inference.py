"""The section about inference servers: steps and batches, time between tokens, operators of graph
replays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.inference import MIX, NODES, OPERATORS, RATES, STEPS, Inference
from traceloom.report.document import ListSchema, ReportOptions, Table, UnknownValues
from traceloom.report.sections.launches import read_graph_capture
from traceloom.report.sections.section import Measurements, Section, TableSpec
from traceloom.system import units
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import InferenceValue

_MAX_ROWS = 500  # steps and nodes of a rank
_FRAMES = {
    name: {column: kind for column, kind in shape.items() if column != "rank"}
    for name, shape in (
        ("steps", STEPS),
        ("mix", MIX),
        ("rates", RATES),
        ("operators", OPERATORS),
        ("nodes", NODES),
    )
}
_NO_CAPTURE_REASON = (
    "no recording of the graphs' capture was given (--graph-capture), or there are no graphs"
)
_NOT_ANNOTATED_REASON = "an annotation does not say"
_TOO_FEW_STEPS_REASON = "fewer than two steps that generate"
_NOT_MAPPED_REASON = "not mapped; see its reason"


def _get_table(name: str, result: Inference) -> pl.DataFrame:
    table: pl.DataFrame = getattr(result, name)
    return table.drop("rank")


class InferenceSection(Section[Inference, "InferenceValue"]):
    key, title = "inference", "Inference"
    note = "Steps of an inference server with their batches, the time between tokens, the operators of graph replays."
    missing = (
        "no step of an inference server is recorded (known are vLLM's, SGLang's and ATOM's annotations), "
        "and nothing is declared per step"
    )
    parts = {
        "steps": ListSchema(
            _FRAMES["steps"],
            "steps of the server, the first 500 of each rank",
            {"between_ns": "the step generates nothing, or is the first that does"},
            (
                "requests",
                *(name for name in STEPS if name.startswith(("context_", "generation_"))),
                "gpu_span_ns",
                "lag_ns",
            ),
        ),
        "mix": ListSchema(
            _FRAMES["mix"],
            "steps by kind, over all of them",
            {
                **dict.fromkeys(
                    ("mean_requests", "context_tokens", "generation_tokens"), _NOT_ANNOTATED_REASON
                ),
                **{name: _TOO_FEW_STEPS_REASON for name in MIX if name.startswith("between")},
            },
        ),
        "rates": ListSchema(
            _FRAMES["rates"], "tokens and samples per second, from the annotations or declared"
        ),
        "operators": ListSchema(
            _FRAMES["operators"],
            "GPU time of graph replays by operator and module of the capture",
            {"op_name": "null is what could not be mapped"},
            ("module",),
            _NO_CAPTURE_REASON,
        ),
        "nodes": ListSchema(
            _FRAMES["nodes"],
            "nodes of graphs with their operators, the 500 that take longest on each rank",
            dict.fromkeys(("op", "op_name", "evidence"), _NOT_MAPPED_REASON),
            ("module", "reason"),
            _NO_CAPTURE_REASON,
        ),
    }
    others = {"mapped_fraction": {"type": ["number", "null"]}}
    unknown = {"mapped_fraction": _NO_CAPTURE_REASON}

    def measure(self, trace: Trace, options: ReportOptions) -> Inference:
        measured = analyze.inference(
            trace,
            read_graph_capture(options),
            tokens_per_step=options.tokens_per_step,
            samples_per_step=options.samples_per_step,
        )
        nodes = measured.nodes.sort("total_ns", descending=True, maintain_order=True).head(
            _MAX_ROWS
        )
        return replace(measured, steps=measured.steps.head(_MAX_ROWS), nodes=nodes)

    def build(
        self, measurements: Measurements[Inference], unknowns: UnknownValues
    ) -> InferenceValue | None:
        results = measurements.results
        if not any(
            result.steps.height or result.rates.height or result.nodes.height for result in results
        ):
            unknowns.explain("inference")
            return None
        frames = {name: measurements.concat(partial(_get_table, name)) for name in self.parts}
        if not frames["nodes"].height:
            unknowns.explain("inference.operators")
        shares = [
            result.mapped_fraction for result in results if result.mapped_fraction is not None
        ]
        min_fraction = unknowns.value(min(shares, default=None), "inference.mapped_fraction")
        return {**self.lists(frames, unknowns), "mapped_fraction": min_fraction}

    def tables(self, value: InferenceValue) -> Iterator[Table]:
        listed: list[TableSpec] = [
            (
                "mix",
                "Steps by kind",
                value["mix"],
                [
                    "?rank",
                    "kind",
                    "step_count",
                    "mean_duration_ns",
                    "mean_gpu_ns",
                    "+max_gpu_ns",
                    "gpu_fraction",
                    "mean_requests",
                    "context_tokens",
                    "generation_tokens",
                    "between_median_ns",
                    "+between_p95_ns",
                ],
            ),
            (
                "rates",
                "Per second",
                value["rates"],
                ["?rank", "what", "count", "window_ns", "per_second", "evidence"],
            ),
            (
                "steps",
                "Steps of the server",
                value["steps"],
                [
                    "?rank",
                    "number",
                    "kind",
                    "+start_ns",
                    "duration_ns",
                    "gpu_ns",
                    "requests",
                    "context_tokens",
                    "generation_tokens",
                    "between_ns",
                    "+lag_ns",
                    "+graph_work_count",
                ],
            ),
            (
                "operators",
                "Operators of graph replays",
                value["operators"],
                ["?rank", "gpu_ns", "kernel_count", "+module", "op_name"],
            ),
            (
                "nodes",
                "Nodes of graphs",
                value["nodes"],
                ["?rank", "graph", "node", "total_ns", "op_name", "+evidence", "+reason", "name"],
            ),
        ]
        yield from self.filled(listed, [row for _, _, rows, _ in listed for row in rows])

    def summary(self, value: InferenceValue) -> str | None:
        if not value:
            return None
        clauses = []
        for kind in dict.fromkeys(row["kind"] for row in value["mix"]):
            rows = [row for row in value["mix"] if row["kind"] == kind]
            count = sum(row["step_count"] for row in rows)
            mean = sum(row["mean_gpu_ns"] * row["step_count"] for row in rows) / count
            steps = f"{units.format_count(count)} {kind} {'step' if count == 1 else 'steps'}"
            ranks = f" of {len(rows)} ranks" if len(rows) > 1 else ""
            text = f"{steps}{ranks} of {units.format_duration(round(mean))}"
            between = max((row["between_median_ns"] or 0 for row in rows), default=0)
            bound_prefix = "at most " if len(rows) > 1 else ""
            clauses.append(
                text
                + (
                    f" ({bound_prefix}{units.format_duration(between)} between tokens)"
                    if between
                    else ""
                )
                + " on the GPU"
            )
        for rate_unit in dict.fromkeys(row["what"] for row in value["rates"]):
            rates = [row["per_second"] for row in value["rates"] if row["what"] == rate_unit]
            low, high = units.format_number(min(rates)), units.format_number(max(rates))
            rank_suffix = " on each rank" if len(rates) > 1 else ""
            clauses.append(
                f"{low if low == high else f'{low} to {high}'} {rate_unit} per second{rank_suffix}"
            )
        if value["mapped_fraction"] is not None:
            clauses.append(
                f"{units.format_share(value['mapped_fraction'], 1.0)} of the graphs' time has an operator"
            )
        return "; ".join(clauses[:8])


SECTION = InferenceSection()
