"""What the state keeps of triggers, news and statements of jobs: on SQLite and on PostgreSQL the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `fleet` is not installed")

from support.fleet import KINDS
from support.postgres import database
from traceloom.fleet.store.captures import CaptureFile, CaptureRecord, ServiceState
from traceloom.fleet.store.database import LEADER
from traceloom.fleet.store.rules import EVENTS, FleetEvent


@pytest.fixture(params=KINDS)
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceState]:
    made = ServiceState(str(tmp_path / "state.db") if request.param == "alone" else database())
    yield made
    made.close()


def committed(state: ServiceState, *names: str) -> None:
    state.lead(LEADER, "term", 600)
    for name in names:
        files = (CaptureFile("a.json", 3, "0" * 64),)
        record = CaptureRecord(
            id=name,
            day="2026-11-26",
            job=f"job of {name}",
            uploader="anna",
            received_ns=1,
            complete=False,
            bytes=3,
            files=files,
        )
        state.add_capture(record)
        state.complete_capture(name, "1")
        task = state.claim("me", 60)
        assert task is not None
        state.advance(task.id, "me", "analysed")
    batch = state.open_batch(10, "term")
    assert batch is not None
    state.close_batch(batch.number, "term")


def test_rules_charges_and_counts_are_kept(state: ServiceState) -> None:
    assert (state.trigger_rules(), state.trigger_documents()) == ("", ([], {}))
    for text in ("a = 1", "b = 2"):
        state.set_trigger_rules(text)
    state.put_trigger_documents({"r1": "one", "r2": "two"}, {"rule": "x"})
    state.put_trigger_documents({"r2": "three"}, {"rule": "y"}, ["r1"])
    assert (state.trigger_rules(), state.trigger_documents()) == (
        "b = 2",
        (["three"], {"rule": "y"}),
    )


def test_captures_are_new_until_they_are_noted(state: ServiceState) -> None:
    committed(state, "c1")
    through, new = state.newly_committed()
    assert new == [], "before anything was noted none is new"
    state.note_committed(through)
    committed(state, "c2", "c3")
    assert {capture.job for capture in state.newly_committed()[1]} == {"job of c2", "job of c3"}
    through, new = state.newly_committed()
    assert len(new) == 2
    state.note_committed(through)
    assert state.newly_committed()[1] == []
    state.backfill("2")
    task = state.claim("me", 60)
    assert task is not None
    state.advance(task.id, "me", "analysed")
    batch = state.open_batch(10, "term")
    assert batch is not None
    state.close_batch(batch.number, "term")
    assert state.newly_committed()[1] == [], "what is analysed again is no news"


def test_a_regression_is_new_once_unless_its_series_changes_much_later(state: ServiceState) -> None:
    def event(series: str) -> FleetEvent:
        return FleetEvent(f"regression.new:{series}", "regression.new", "{}")

    state.add_webhook("w", "https://8.8.8.8", EVENTS)
    assert state.add_regressions({"a": 100}, 50, event) == []
    assert state.add_regressions({"a": 120, "b": 100}, 50, event) == ["b"]
    assert state.add_regressions({"a": 120, "b": 150}, 50, event) == []
    assert state.add_regressions({"a": 151}, 50, event) == ["a"]
    assert state.webhooks()[0].waiting == 2
