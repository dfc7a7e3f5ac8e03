"""Writes docs/reference/agent-metrics.md from the agent's registry; with --check, says whether it
is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from made_page import write_or_check

from traceloom.agent.metrics import METRICS, Metric

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "agent-metrics.md"
_INTRODUCTION = """\
# Metrics of the agent

<!-- Written by scripts/agent_metrics_page.py from src/traceloom/agent/metrics.py; do not edit. -->

What `traceloom agent run` publishes, under `/metrics` and by OTLP, and what `traceloom agent query` answers. Names in
Prometheus begin with `traceloom_`; units are base units. What cannot be measured is absent, never 0:
`traceloom agent doctor` says why. With `compat = ["dcgm"]` in `agent.toml` the names of dcgm-exporter in the last
column are published too, with its labels and units, so that boards made for it keep working.

*Sharing*: how a device's value becomes that of the jobs on it. Values that add up are split by the shares of their
processes; properties are averaged over the devices that a job is on.
"""
_PARTS = {
    "host": "The host",
    "rdma": "RDMA",
    "oom": "Memory that ran out",
    "cgroup": "Control groups of jobs",
    "process": "Processes",
    "gpu": "Devices",
    "job": "Jobs",
    "step": "Steps",
    "dataloader": "Data loading",
    "trigger": "Triggers",
    "collector": "Collectors",
    "agent": "The agent itself",
}


def page() -> str:
    """The whole page."""
    parts: dict[str, list[Metric]] = {}
    for metric in METRICS.values():
        parts.setdefault(metric.name.split("_")[0], []).append(metric)
    return "\n".join(
        [_INTRODUCTION, *(line for name, metrics in parts.items() for line in _part(name, metrics))]
    )


def _part(name: str, metrics: list[Metric]) -> Iterator[str]:
    yield f"## {_PARTS[name]}\n"
    yield "| metric | kind | unit | meaning | sharing | OpenTelemetry | dcgm-exporter |"
    yield "|---|---|---|---|---|---|---|"
    for metric in metrics:
        labels = (
            f"<br>{', '.join(f'`{label}`' for label in metric.labels)}" if metric.labels else ""
        )
        aliases = "<br>".join(
            f"`{alias.name}`" + "".join(f" ({value})" for _, value in alias.where)
            for alias in metric.dcgm_aliases
        )
        yield (
            f"| `{metric.name}`{labels} | {metric.kind} | {metric.unit} | {metric.help} | {metric.aggregation} "
            f"| {f'`{metric.opentelemetry_name}`' if metric.opentelemetry_name else ''} | {aliases} |"
        )
    yield ""


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
