"""Debian's Prometheus scrapes the fleet's service: it answers the dashboard, and the alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.prometheus import Prometheus, prometheus, until  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.simulated_hosts import SimulatedHost, ranked_process  # noqa: E402
from traceloom.agent.fleet_link.protocol import UsageRow  # noqa: E402
from traceloom.fleet.service.service import FLEET_METRICS  # noqa: E402

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "fleet"
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_bytes())
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Debian's package prometheus is not installed",
)


@pytest.fixture(scope="module")
def scraped(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RunningService, Prometheus]]:
    folder = tmp_path_factory.mktemp("fleet")
    service = RunningService(folder, "--store", str(folder / "store"), "--workers", "1")
    try:
        until(lambda: service.ask("GET", "/api/v1/hosts")[0] == 200)
        hosts = []
        for rank in range(2):
            token = service.client().post("agents", {"host": f"node{rank}"})["token"]
            hosts.append(
                SimulatedHost(
                    [service.url], f"node{rank}", token, [ranked_process(rank, "job")], folder
                )
            )
        minute = time.time_ns() // 60_000_000_000
        row = UsageRow(minute=minute - 1, device="GPU-0", state="busy", device_ms=60_000)
        hosts[0].beat([row])
        hosts[0].beat(
            [UsageRow(minute=minute + 60, device="GPU-0", state="busy", device_ms=1)]
        )  # has not been
        service.ask("POST", "/api/v1/requests", body={"spec": {"job": "job", "steps": 2}})
        viewer = service.client().post("tokens", {"name": "prometheus", "role": "viewer"})["token"]
        (folder / "viewer").write_text(viewer, encoding="ascii")
        configuration = {
            "rule_files": [str(DEPLOY / "alerts.rules.yml")],
            "scrape_configs": [
                {
                    "job_name": "fleet",
                    "scrape_interval": "1s",
                    "static_configs": [{"targets": [f"127.0.0.1:{service.port}"]}],
                    "authorization": {"credentials_file": str(folder / "viewer")},
                }
            ],
        }
        with prometheus(folder / "prometheus", json.dumps(configuration)) as server:
            yield service, server
        for host in hosts:
            host.close()
    finally:
        assert service.end() == 0, service.log.read_text()


def test_every_panel_of_the_dashboard_has_an_answer(
    scraped: tuple[RunningService, Prometheus],
) -> None:
    _, answers = scraped
    values = {"$instance": ".*", "$__rate_interval": "20s"}
    expressions = [
        target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
    ]
    expressions += [
        variable["query"].removeprefix("label_values(").partition(",")[0]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    ]
    assert len(expressions) > 15
    for expression in expressions:
        query = re.sub(r"\$\w+", lambda match: values[match[0]], expression)
        until(lambda query=query: answers.ask(query))  # type: ignore[misc]


def test_what_hosts_sent_is_what_prometheus_has(scraped: tuple[RunningService, Prometheus]) -> None:
    _, answers = scraped
    until(lambda: answers.ask("traceloom_fleet_traces"))
    for query, value in {
        'traceloom_fleet_hosts{state="lost"}': 1,  # the one that joined and said nothing
        'traceloom_fleet_host_up{host="node0"}': 1,
        'traceloom_fleet_host_up{host="node1"}': 0,
        'traceloom_fleet_devices{state="well"}': 1,
        "traceloom_fleet_jobs": 1,
        'traceloom_fleet_usage_refused_rows_total{host="node0"}': 1,
        'traceloom_fleet_traces{state="announced"}': 1,
        'traceloom_fleet_tasks{state="committed"}': 0,
    }.items():
        assert answers.number(query) == value, query


def test_the_page_has_every_series_and_no_other(scraped: tuple[RunningService, Prometheus]) -> None:
    service, answers = scraped
    text = service.ask("GET", "/metrics")[1].decode()
    assert set(re.findall(r"^# HELP (\w+?)(?:_total|_created)? ", text, re.MULTILINE)) == set(
        FLEET_METRICS
    )
    until(lambda: answers.ask("up == 1"))
    assert answers.number("scrape_samples_scraped") > len(FLEET_METRICS)
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            for name in re.findall(r"traceloom_\w+", target["expr"]):
                assert name.removesuffix("_total") in FLEET_METRICS


def test_alerts_fire_when_they_should() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", DEPLOY / "alerts.test.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_ask_for_series_that_there_are() -> None:
    from traceloom.agent.metrics import METRICS, PREFIX

    rules = (DEPLOY / "alerts.rules.yml").read_text()
    names = set(re.findall(r"traceloom_\w+", rules))
    there = {PREFIX + name for name in METRICS}
    there |= {
        name + ("_total" if metric.kind == "counter" else "")
        for name, metric in FLEET_METRICS.items()
    }
    assert len(names) >= 7
    assert names <= there
