"""Writes deploy/fleet/grafana-dashboard.json from the panels below; with --check, says whether it
is up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana import Board, Panel, variable
from made_page import write_or_check

BOARD = Path(__file__).resolve().parents[1] / "deploy" / "fleet" / "grafana-dashboard.json"
_LONG = {
    "HERE": 'instance=~"$instance"',
    "RATE": "$__rate_interval",
}  # what the queries below abbreviate

ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel(
            "Hosts that are there",
            "none",
            {"": 'sum(traceloom_fleet_hosts{HERE, state="here"})'},
            "",
            "stat",
            4,
        ),
        Panel(
            "Hosts that are lost",
            "none",
            {"": 'sum(traceloom_fleet_hosts{HERE, state="lost"})'},
            "",
            "stat",
            4,
        ),
        Panel(
            "Devices that can be read",
            "none",
            {"": 'sum(traceloom_fleet_devices{HERE, state="well"})'},
            "",
            "stat",
            4,
        ),
        Panel("Jobs", "none", {"": "sum(traceloom_fleet_jobs{HERE})"}, "", "stat", 4),
        Panel(
            "Captures in quarantine",
            "none",
            {"": 'max(traceloom_fleet_tasks{HERE, state="quarantined"})'},
            "`traceloom fleet check` says why.",
            "stat",
            4,
        ),
        Panel(
            "Services that lead",
            "none",
            {"": "sum(traceloom_fleet_leads{HERE})"},
            "One, whatever their number.",
            "stat",
            4,
        ),
    ),
    "Hosts": (
        Panel("Hosts", "none", {"{{state}}": "sum by (state) (traceloom_fleet_hosts{HERE})"}),
        Panel(
            "Lost now",
            "none",
            {"": "traceloom_fleet_host_up{HERE} == 0 or count(traceloom_fleet_host_up{HERE}) * 0"},
            "Hosts that were silent for a minute; the line without a host is always there.",
            "table",
        ),
        Panel(
            "How far clocks are off",
            "s",
            {"{{host}}": "topk(10, abs(traceloom_fleet_host_clock_offset_seconds{HERE}))"},
            "The ten that are farthest. Captures are put on one clock all the same.",
        ),
        Panel("Devices", "none", {"{{state}}": "sum by (state) (traceloom_fleet_devices{HERE})"}),
        Panel(
            "Minutes of usage that wait",
            "none",
            {"{{instance}}": "traceloom_fleet_usage_waiting{HERE}"},
            "Until they are in the tables: of a thousand hosts a thousand a minute.",
        ),
        Panel(
            "Rows of usage that were refused in the last hour",
            "none",
            {"{{host}}": "topk(10, increase(traceloom_fleet_usage_refused_rows_total{HERE}[1h]))"},
            "Of minutes that have not been, or of devices with more than 60 s in one: a clock that was set, or an agent that lies.",
        ),
    ),
    "Captures": (
        Panel(
            "Traces that were asked for",
            "none",
            {"{{state}}": "sum by (state) (traceloom_fleet_traces{HERE})"},
            "Open ones, and the last that ended.",
        ),
        Panel(
            "Analyses on their way",
            "none",
            {
                "{{state}}": 'max by (state) (traceloom_fleet_tasks{HERE, state!~"committed|quarantined"})'
            },
        ),
        Panel(
            "Captures that were analysed",
            "none",
            {
                "{{state}}": 'max by (state) (traceloom_fleet_tasks{HERE, state=~"committed|quarantined"})'
            },
        ),
        Panel(
            "Disk of the store",
            "bytes",
            {"{{state}}": "max by (state) (traceloom_fleet_store_bytes{HERE})"},
            "An object store does not say.",
            "timeseries",
            12,
        ),
        Panel(
            "Used part of it",
            "percentunit",
            {
                "{{instance}}": 'traceloom_fleet_store_bytes{HERE, state="used"} / on (instance) sum by (instance) (traceloom_fleet_store_bytes{HERE})'
            },
            "",
            "timeseries",
            12,
        ),
    ),
    "The service itself": (
        Panel(
            "Its processor time",
            "percentunit",
            {"{{instance}}": "rate(traceloom_fleet_cpu_seconds_total{HERE}[RATE])"},
            "Of one processor; workers count when they end.",
        ),
        Panel(
            "Its memory",
            "bytes",
            {"{{instance}}": "traceloom_fleet_memory_bytes{HERE}"},
            "Without its workers.",
        ),
        Panel(
            "Requests",
            "reqps",
            {
                "{{route}} {{code}}": "sum by (route, code) (rate(traceloom_fleet_requests_total{HERE}[RATE]))"
            },
        ),
    ),
}


def host_snapshot() -> Board:
    """The whole dashboard."""
    return Board(
        title="Traceloom: the fleet's service",
        uid="traceloom-fleet",
        text="Of the service (traceloom serve), scraped with a token of a viewer.",
        tags=("traceloom", "gpu"),
        variables=(
            variable("instance", "Service", "label_values(traceloom_fleet_leads, instance)"),
        ),
        rows=ROWS,
        long=_LONG,
    )


if __name__ == "__main__":
    BOARD.parent.mkdir(parents=True, exist_ok=True)
    sys.exit(write_or_check(BOARD, json.dumps(host_snapshot().drawn(), indent=1) + "\n"))
