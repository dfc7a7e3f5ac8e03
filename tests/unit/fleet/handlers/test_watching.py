"""What pages and routes say of the fleet now, and of usage in its tables."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("deltalake", reason="the extra `fleet` is not installed")

from traceloom.agent.fleet_link.protocol import Heartbeat, HostDevice, HostProcess
from traceloom.fleet.handlers.now import (
    HostTelemetryInCapture,
    LiveQueries,
    UsagePeriod,
    count_states,
    list_devices,
)
from traceloom.fleet.service.requests import LastHeartbeat
from traceloom.fleet.store.tables import Tables

MINUTE = 60 * 10**9
NOW = 1_790_000_040 * 10**9  # a whole minute
DAY = date(2026, 9, 21)


def host_now(*devices: HostDevice, held: tuple[str, ...] = ()) -> LastHeartbeat:
    process = HostProcess(key="1@1", pid=1, uid=0, job="j", devices=held)
    beat = Heartbeat(
        sent_ns=1, boot_id="b", version="1", devices=list(devices), processes=[process]
    )
    return LastHeartbeat(heartbeat=beat, received_ns=1)


def test_a_device_is_in_the_state_that_its_agent_tells() -> None:
    measured = [
        HostDevice(uuid=name, values={"gpu_busy_ratio": ratio})
        for name, ratio in (("a", 0.5), ("b", 0.0), ("c", 0.9))
    ]
    now = {
        "here": host_now(
            *measured,
            HostDevice(uuid="d", stale="it hangs"),
            HostDevice(uuid="e"),
            held=("a", "b", "d", "e"),
        ),
        "lost": host_now(HostDevice(uuid="a"), held=("a",)),
    }
    states = {
        (of.host, of.device): (of.state, of.jobs) for of in list_devices(now, {"here": now["here"]})
    }
    assert states == {
        ("here", "a"): ("busy", ["j"]),
        ("here", "b"): ("idle-allocated", ["j"]),
        ("here", "c"): ("unallocated", []),
        ("here", "d"): ("unreachable", ["j"]),
        ("here", "e"): ("busy", ["j"]),  # nothing measures whether it computes
        ("lost", "a"): ("unreachable", ["j"]),
    }
    assert count_states(list_devices(now, {}))["unreachable"] == 6


def test_usage_is_that_of_the_host_the_job_and_the_minutes(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    tables.create()

    def row(
        minutes_ago: int, host: str, job: str | None, state: str, ms: int, energy: int | None
    ) -> dict[str, object]:
        return {
            "day": DAY,
            "time_ns": NOW - minutes_ago * MINUTE,
            "host": host,
            "device": f"{host}-0",
            "job": job,
            "state": state,
            "device_ms": ms,
            "energy_mj": energy,
            "flops_low": None,
        }

    rows = [
        row(3, "a", "j", "busy", 45_000, 900),
        row(3, "a", "j", "idle-allocated", 15_000, None),
        row(2, "a", None, "unallocated", 60_000, None),
        row(3, "b", "j", "busy", 60_000, None),
        row(400, "a", "j", "busy", 60_000, 1),
    ]
    tables.commit("usage", 1, {"usage_minute": pl.DataFrame(rows, infer_schema_length=None)})
    watching = LiveQueries(tables, lambda: NOW)
    assert watching.usage(host="a", hours=1) == [
        UsagePeriod(
            time_ns=NOW - 2 * MINUTE,
            job=None,
            state="unallocated",
            device_ms=60_000,
            energy_mj=None,
        ),
        UsagePeriod(
            time_ns=NOW - 3 * MINUTE, job="j", state="busy", device_ms=45_000, energy_mj=900
        ),
        UsagePeriod(
            time_ns=NOW - 3 * MINUTE,
            job="j",
            state="idle-allocated",
            device_ms=15_000,
            energy_mj=None,
        ),
    ]
    assert sum(of.device_ms for of in watching.usage(job="j", hours=1)) == 120_000
    within = watching.beside("j", NOW - 3 * MINUTE + 20 * 10**9, NOW - 3 * MINUTE + 21 * 10**9)
    assert within == [
        HostTelemetryInCapture(
            host="a", devices=1, busy_ms=45_000, idle_ms=15_000, energy_mj=900, flops_low=None
        ),
        HostTelemetryInCapture(
            host="b", devices=1, busy_ms=60_000, idle_ms=0, energy_mj=None, flops_low=None
        ),
    ]
    assert watching.facts("none") is None
    assert watching.topline().device_hours == pytest.approx(0)
