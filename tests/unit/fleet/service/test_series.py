"""The service's own series, held against what hosts said and what was asked for, counted one by one."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from support.answering import AnsweringService, answering  # noqa: E402
from traceloom.agent.fleet_link.protocol import (  # noqa: E402
    ClockOffset,
    Heartbeat,
    HostDevice,
    HostProcess,
    UsageRow,
)
from traceloom.agent.traces.requests import TraceSpec  # noqa: E402
from traceloom.fleet.service.request_plan import FleetRequest  # noqa: E402
from traceloom.fleet.service.requests import LastHeartbeat  # noqa: E402
from traceloom.fleet.service.service import FLEET_METRICS  # noqa: E402
from traceloom.fleet.store.captures import CaptureFile, CaptureRecord  # noqa: E402

Series = dict[tuple[str, ...], float]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[AnsweringService]:
    with answering(tmp_path) as running:
        yield running


def series(service: AnsweringService) -> dict[str, Series]:
    """Name -> values of the labels -> value, as Prometheus reads them."""
    values: dict[str, Series] = defaultdict(dict)
    for family in text_string_to_metric_families(service.service.render_metrics().decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                name = sample.name.removesuffix("_total")
                key = tuple(sample.labels[label] for label in FLEET_METRICS[name].labels)
                assert key not in values[name], sample
                values[name][key] = sample.value
    return values


def heard(
    number: int, ago_s: float, stale: str = "", job: str = "", offset_ns: int | None = None
) -> LastHeartbeat:
    clock = (
        None if offset_ns is None else ClockOffset(offset_ns=offset_ns, error_ns=1, round_trips=16)
    )
    devices = [HostDevice(uuid=f"g{at}", stale=stale) for at in range(number)]
    processes = [HostProcess(key="1@1", pid=1, uid=0, job=job)]
    beat = Heartbeat(
        sent_ns=1, boot_id="b", version="1", devices=devices, processes=processes, clock=clock
    )
    return LastHeartbeat(heartbeat=beat, received_ns=time.time_ns() - int(ago_s * 1e9))


def test_hosts_devices_and_jobs_are_counted_as_they_are_now(service: AnsweringService) -> None:
    registry = service.service.hosts
    assert registry is not None
    said = {
        "a": heard(3, 1, job="j", offset_ns=-2_500_000_000),
        "b": heard(2, 5, stale="gone", job="j"),
        "c": heard(8, 3600, job="long ago", offset_ns=7),
        "d": heard(0, 2, job="k"),
        "e": heard(1, 3),
    }
    for host, now in said.items():
        registry.members[host] = ""
        registry.now[host] = now
    registry.members["never"] = ""
    values = series(service)
    assert values["traceloom_fleet_leads"] == {(): 1}
    assert values["traceloom_fleet_hosts"] == {("here",): 4, ("lost",): 2}
    up = {"a": 1, "b": 1, "c": 0, "d": 1, "e": 1, "never": 0}
    assert values["traceloom_fleet_host_up"] == {(host,): here for host, here in up.items()}
    assert values["traceloom_fleet_devices"] == {("well",): 4, ("stale",): 2}
    assert values["traceloom_fleet_jobs"] == {(): 2}
    assert values["traceloom_fleet_host_clock_offset_seconds"] == {("a",): -2.5}
    assert values["traceloom_fleet_usage_refused_rows"] == {(host,): 0 for host in up}


def test_rows_that_cannot_be_are_counted_for_their_host(service: AnsweringService) -> None:
    registry = service.service.hosts
    assert registry is not None
    for host in ("a", "b"):
        service.service.state.put_host(host, "credential")
        registry.members[host] = ""
    minute = time.time_ns() // 60_000_000_000
    rows = [
        UsageRow(minute=minute - 1, device="g", state="busy", device_ms=60_000),
        UsageRow(minute=minute - 2, device="g", state="busy", device_ms=40_000),
        UsageRow(minute=minute - 2, device="g", state="busy", job="j", device_ms=20_001),
        UsageRow(minute=minute + 100, device="g", state="busy", device_ms=1),
    ]
    beat = Heartbeat(sent_ns=1, boot_id="b", version="1", usage=rows)
    asyncio.run(registry.heartbeat("a", beat))
    values = series(service)
    assert values["traceloom_fleet_usage_refused_rows"] == {("a",): 3, ("b",): 0}
    assert values["traceloom_fleet_usage_waiting"] == {
        (): 2
    }  # one of the host's minutes has no row that can be


def test_captures_and_requests_are_counted_by_how_far_they_are(service: AnsweringService) -> None:
    state, registry = service.service.state, service.service.hosts
    assert registry is not None
    for number in range(3):
        files = (CaptureFile("a", 1, "0" * 64),)
        state.add_capture(
            CaptureRecord(
                id=f"c{number}",
                day="2026-11-26",
                job="",
                uploader="u",
                received_ns=number,
                complete=False,
                bytes=1,
                files=files,
            )
        )
        if number:
            state.complete_capture(f"c{number}", "1")
    for number, how in enumerate(("armed", "armed", "done", "failed")):
        name = f"q{number}"
        registry.requests[name] = FleetRequest(
            id=name,
            who="w",
            asked_ns=1,
            spec=TraceSpec(job="j", steps=1),
            state=how,  # type: ignore[arg-type]
        )
    values = series(service)
    tasks = {key: value for key, value in values["traceloom_fleet_tasks"].items() if value}
    assert tasks == {("received",): 2}  # what has not arrived whole waits for nothing
    assert values["traceloom_fleet_traces"] == {("armed",): 2, ("done",): 1, ("failed",): 1}


def test_requests_are_counted_by_route_and_code_and_never_by_what_a_stranger_names(
    service: AnsweringService,
) -> None:
    for _ in range(2):
        service.admin.get("captures")
    for name in ("c0", "c1", "../x", "%2e%2e", "a b"):
        with pytest.raises(Exception, match=r"no such|not-found|there is no|nothing"):
            service.admin.get(f"captures/{name}")
    counts = series(service)["traceloom_fleet_requests"]
    assert counts["/api/v1/captures", "200"] == 2
    assert counts["/api/v1/captures/{id}", "404"] >= 2
    of_requests = {
        key: count for key, count in counts.items() if key != ("other", "500")
    }  # of the server's beginning
    assert sum(of_requests.values()) == 7
    assert {route for route, _ in counts} <= {"/api/v1/captures", "/api/v1/captures/{id}", "other"}


def test_a_service_that_does_not_lead_says_nothing_of_hosts(service: AnsweringService) -> None:
    registry, service.service.hosts = service.service.hosts, None
    try:
        names = set(series(service))
        assert not names & {
            "traceloom_fleet_hosts",
            "traceloom_fleet_devices",
            "traceloom_fleet_traces",
        }
        assert {
            "traceloom_fleet_leads",
            "traceloom_fleet_tasks",
            "traceloom_fleet_store_bytes",
        } <= names
    finally:
        service.service.hosts = registry


def test_a_table_that_cannot_be_read_and_rows_that_wait_for_it_are_told(
    service: AnsweringService, tmp_path: Path
) -> None:
    fleet = service.service
    assert {check.name for check in fleet.check().checks if check.works} >= {"tables"}
    assert series(service)["traceloom_fleet_commit_delay_seconds"] == {(): pytest.approx(0, abs=60)}
    log = Path(fleet.tables.address("findings")) / "_delta_log"
    entries = {file: file.read_bytes() for file in log.iterdir()}
    for file in log.iterdir():
        file.write_bytes(b"no log")
    fleet.pipeline._settled_at -= 3600
    fleet.pipeline.commit_error = "as the disk says"
    failed = {check.name: check.text for check in fleet.check().checks if not check.works}
    for file, content in entries.items():
        file.write_bytes(content)
    assert failed.keys() == {"table findings", "commits"}
    assert "as the disk says" in failed["commits"]
    assert series(service)["traceloom_fleet_commit_delay_seconds"][()] >= 3600
