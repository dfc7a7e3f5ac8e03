"""Requests on disk: what was asked is there after a restart; leases exclude each other."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from traceloom.agent.database import RequestStore
from traceloom.agent.traces.requests import LeaseTable, TraceRequest, TraceSpec, TraceTarget
from traceloom.errors import InputError, OutputError


def _request(number: int) -> TraceRequest:
    target = TraceTarget(
        request=f"r{number}",
        process="7@100",
        profiler="timeline",
        pid=7,
        uid=1,
        rank=3,
        stem="rank3",
        since_ns=5,
        skew_ns=-4,
        sha256="ab",
        file="rank3.kineto.json.gz",
        bytes=2**40,
    )
    wanted = TraceSpec(pids=(7,), steps=3)
    return TraceRequest(
        id=f"r{number}",
        who="uid 1",
        uid=1,
        asked_ns=number,
        boot_id="b",
        spec=wanted,
        targets=[target],
    )


def test_requests_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "requests.db"
    store = RequestStore(path)
    for number in (2, 1):
        store.put(_request(number))
    changed = _request(1).targets[0]
    changed.state, changed.reason = "failed", "exited"
    store.put_target(changed)
    again = RequestStore(path)  # as after a kill: the first was never closed
    first, second = again.load()
    assert (first.id, second) == ("r1", _request(2))
    assert first.targets == [changed]
    again.delete("r1")
    assert [request.id for request in again.load()] == ["r2"]
    assert path.stat().st_mode & 0o077 == 0


def test_what_cannot_be_written_is_refused_and_later_tried_again(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    store = RequestStore(blocked / "requests.db")
    assert store.last_error
    assert store.load() == []
    with pytest.raises(OutputError) as refusal:
        store.put(_request(1))
    assert refusal.value.slug == "cannot-write"
    blocked.unlink()
    store.put(_request(1))
    assert not store.last_error
    assert store.load() == [_request(1)]


@pytest.mark.parametrize("version", [1, 99])
def test_another_version_is_not_touched(tmp_path: Path, version: int) -> None:
    path = tmp_path / "requests.db"
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version = {version}")
    database.close()
    with pytest.raises(InputError) as refusal:
        RequestStore(path)
    assert refusal.value.slug == "other-version"


def test_leases_are_taken_whole_or_not_at_all() -> None:
    leases = LeaseTable()
    assert leases.take("one", {"ptrace:1", "counters:G"}) == ""
    assert leases.take("one", {"ptrace:1"}) == ""
    assert leases.take("two", {"ptrace:2", "counters:G"}) == "counters:G is in use by one"
    assert leases.take("three", {"ptrace:2"}) == ""  # two has taken none of its own
    leases.give_back("one")
    assert leases.take("two", {"counters:G"}) == ""
