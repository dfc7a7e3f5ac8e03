"""Writes docs/reference/fleet-metrics.md from the service's series; with --check, says whether it
is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from made_page import write_or_check

from traceloom.fleet.service.service import FLEET_METRICS, FleetMetric

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "fleet-metrics.md"
_INTRODUCTION = """\
# Metrics of the fleet's service

<!-- Written by scripts/fleet_metrics_page.py from src/traceloom/fleet/service/service.py; do not edit. -->

What `traceloom serve` has under `/metrics`, for Prometheus with a token of a viewer. What is not known is absent, never
0: an object store does not say how full it is, and hosts, devices, jobs and traces are known by the service that leads
alone. Its dashboard is `deploy/fleet/grafana-dashboard.json`, its alerts are `deploy/fleet/alerts.rules.yml`. What
hosts and their devices do is in the [metrics of the agent](agent-metrics.md).

| metric | kind | meaning |
|---|---|---|
"""


def _line(metric: FleetMetric) -> str:
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    labels = f"<br>{', '.join(f'`{label}`' for label in metric.labels)}" if metric.labels else ""
    return f"| `{name}`{labels} | {metric.kind} | {metric.help} |\n"


if __name__ == "__main__":
    sys.exit(
        write_or_check(
            PAGE, _INTRODUCTION + "".join(_line(metric) for metric in FLEET_METRICS.values())
        )
    )
