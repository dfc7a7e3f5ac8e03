"""Minutes that hosts sent are in the tables once, and add up to 60,000 ms of each device, whatever was killed when."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl
import pytest

from traceloom.agent.fleet_link.protocol import UsageRow
from traceloom.fleet.service.committer import commit_usage
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.database import LEADER
from traceloom.fleet.store.tables import Tables

FIRST = 28_333_320  # a minute of 2023, which begins an hour
MINUTE_NS = 60_000_000_000


def rows(minute: int, *shares: tuple[str, str, int]) -> str:
    """A host's minute, as the state keeps it: (job, state, ms) of one device."""
    usage = [
        UsageRow(
            minute=minute,
            device="GPU-0",
            device_model="H100",
            job=job,
            state=state,
            device_ms=ms,  # type: ignore[arg-type]
            busy_ms=ms if state == "busy" else 0,
            energy_mj=ms,
        )
        for job, state, ms in shares
    ]
    return msgspec.json.encode(usage).decode()


@pytest.fixture
def fleet(tmp_path: Path) -> tuple[ServiceState, Tables]:
    state, tables = ServiceState(str(tmp_path / "state.db")), Tables(str(tmp_path))
    tables.create()
    state.put_host("node1", "secret")
    state.lead(LEADER, "term", 600)
    return state, tables


def test_minutes_are_in_the_tables_once(
    fleet: tuple[ServiceState, Tables], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, tables = fleet
    whole = {FIRST: rows(FIRST, ("a", "busy", 45_000), ("a", "idle-allocated", 15_000))}
    state.add_usage("node1", whole)
    state.add_usage("node1", whole)  # its acknowledgement was lost
    with monkeypatch.context() as killed:  # after the tables took it, and before the state knows
        killed.setattr(
            ServiceState, "close_usage", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            commit_usage(state, tables, "term")
    assert commit_usage(state, tables, "term") == 1
    assert commit_usage(state, tables, "term") == 0
    state.add_usage("node1", whole)  # of long ago
    assert commit_usage(state, tables, "term") == 0
    usage = tables.scan("usage_minute").collect()
    assert usage.select("host", "job", "state", "device_ms", "busy_ms", "energy_mj").sort(
        "state"
    ).rows() == [
        ("node1", "a", "busy", 45_000, 45_000, 45_000),
        ("node1", "a", "idle-allocated", 15_000, 0, 15_000),
    ]
    assert tables.scan("usage_hour").collect()["device_ms"].sum() == 60_000


def test_what_a_host_left_out_was_unreachable(fleet: tuple[ServiceState, Tables]) -> None:
    state, tables = fleet
    state.add_usage("node1", {FIRST: rows(FIRST, ("", "unallocated", 60_000))})
    state.add_usage(
        "node1", {FIRST + 3: rows(FIRST + 3, ("b", "busy", 20_000))}
    )  # it was away for two minutes
    while commit_usage(state, tables, "term"):
        pass
    usage = tables.scan("usage_minute").collect()
    sums = usage.group_by("time_ns").agg(pl.col("device_ms").sum()).sort("time_ns")
    assert sums.rows() == [((FIRST + number) * MINUTE_NS, 60_000) for number in range(4)]
    lost = usage.filter(pl.col("state") == "unreachable").sort("time_ns")
    assert lost["device_ms"].to_list() == [60_000, 60_000, 40_000]
    assert lost["job"].to_list() == [None] * 3
