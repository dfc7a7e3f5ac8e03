"""The state of the service: on SQLite and on PostgreSQL the same."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `fleet` is not installed")

from support.fleet import KINDS, Kind
from support.postgres import database
from traceloom.errors import InputError, OutputError, UsageError
from traceloom.fleet.store.captures import ATTEMPTS, CaptureFile, CaptureRecord, ServiceState
from traceloom.fleet.store.database import LEADER


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind: Kind = request.param
    return str(tmp_path / "state.db") if kind == "alone" else database()


@pytest.fixture
def state(url: str) -> Iterator[ServiceState]:
    made = ServiceState(url)
    made.lead(LEADER, "me", 600)
    yield made
    made.close()


def record(name: str, received_ns: int = 5, job: str = "") -> CaptureRecord:
    return CaptureRecord(
        id=name,
        day="2026-11-26",
        job=job,
        uploader="anna",
        received_ns=received_ns,
        complete=False,
        bytes=3,
        files=(CaptureFile("a.json", 3, "0" * 64),),
    )


def arrived(state: ServiceState, *names: str, version: str = "1") -> None:
    for at, name in enumerate(names):
        state.add_capture(record(name, at + 1))
        state.complete_capture(name, version)


def analysed(state: ServiceState, *names: str) -> None:
    arrived(state, *names)
    for _ in names:
        task = state.claim("me", 60)
        assert task is not None
        assert state.advance(task.id, "me", "checked")
        assert state.advance(task.id, "me", "analysed")


def test_a_capture_is_one_however_often_it_is_announced_and_completed(state: ServiceState) -> None:
    assert state.add_capture(record("c1", 5)) == record("c1", 5)
    assert state.add_capture(record("c1", 9)).received_ns == 5
    assert state.captures() == []  # its files are not there yet
    for version in ("1", "1", "2"):  # the last one after an upgrade
        state.complete_capture("c1", version)
    assert [task.version for task in state.tasks("c1")] == ["1"]
    assert [capture.id for capture in state.captures()] == ["c1"]


def test_captures_come_newest_first_and_by_whose_they_are(state: ServiceState) -> None:
    for at in range(5):
        state.add_capture(record(f"c{at}", at + 1, job="even" if at % 2 == 0 else "odd"))
        state.complete_capture(f"c{at}", "1")
    assert [capture.id for capture in state.captures(limit=2)] == ["c4", "c3"]
    assert [capture.id for capture in state.captures(before_ns=4)] == ["c2", "c1", "c0"]
    assert [capture.id for capture in state.captures(job="odd")] == ["c3", "c1"]
    assert state.captures(uploader="bert") == []


def test_one_holds_a_task_until_its_lease_ends(state: ServiceState) -> None:
    arrived(state, "c1")
    first = state.claim("a", 60)
    assert first is not None
    assert (first.state, first.attempts) == ("received", 0)
    assert state.claim("b", 60) is None
    assert not state.advance(first.id, "b", "checked")
    assert state.renew(first.id, "a", 0)  # it ends now
    second = state.claim("b", 60)
    assert second is not None
    assert second.id == first.id
    assert not state.renew(first.id, "a", 60)
    assert not state.advance(first.id, "a", "analysed")
    assert state.tasks("c1")[0].state == "received"


def test_many_who_claim_at_once_get_different_tasks(state: ServiceState) -> None:
    names = [f"c{at}" for at in range(20)]
    arrived(state, *names)
    claimed: list[str] = []

    def work(holder: str) -> None:
        while task := state.claim(holder, 600):
            claimed.append(task.capture)

    threads = [threading.Thread(target=work, args=(f"h{at}",)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(names)


def test_a_task_that_fails_is_tried_again_and_then_quarantined_with_its_error(
    state: ServiceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceloom.fleet.store.captures._RETRY_DELAY_NS", 10**8)
    arrived(state, "c1")
    for attempt in range(1, ATTEMPTS + 1):
        task = state.claim("a", 60)
        while task is None:  # it waits a while
            task = state.claim("a", 60)
        assert task.attempts == attempt - 1
        state.fail(task.id, "a", f"failed {attempt}\0 times \ud800")
    [task] = state.tasks("c1")
    assert (task.state, task.error.split("\0")[0][:8]) == ("quarantined", "failed 3")
    assert state.claim("a", 60) is None
    assert [task.capture for task in state.quarantined()] == ["c1"]
    assert state.backfill("1") == 0
    assert state.backfill("1", again=True) == 1
    assert state.claim("a", 60) is not None


def test_whoever_is_killed_with_a_task_says_nothing_about_it(state: ServiceState) -> None:
    arrived(state, "c1")
    for _ in range(2 * ATTEMPTS):
        assert state.claim("a", 0) is not None  # and it never comes back
    arrived(state, "c2")
    claimed = [state.claim("b", 60), state.claim("b", 60)]
    assert [task.capture for task in claimed if task] == ["c2", "c1"], "others come first"
    assert [state.tasks(name)[0].attempts for name in ("c1", "c2")] == [0, 0]


def test_a_task_that_is_given_back_has_lost_no_try(state: ServiceState) -> None:
    arrived(state, "c1")
    for _ in range(ATTEMPTS + 1):
        task = state.claim("a", 60)
        assert task is not None
        assert task.attempts == 0
        state.give_back(task.id, "a", 0)


def test_a_batch_that_was_begun_is_the_next_one_again(state: ServiceState) -> None:
    analysed(state, "c1", "c2", "c3")
    first = state.open_batch(2, "me")
    assert first is not None
    assert [task.capture for task in first.tasks] == ["c1", "c2"]
    assert state.open_batch(2, "me") == first
    state.close_batch(first.number, "me")
    second = state.open_batch(2, "me")
    assert second is not None
    assert second.number > first.number
    assert [task.capture for task in second.tasks] == ["c3"]
    state.close_batch(second.number, "me")
    assert state.open_batch(2, "me") is None
    assert state.counts() == {
        "received": 0,
        "checked": 0,
        "analysed": 0,
        "committed": 3,
        "quarantined": 0,
    }


def test_a_newer_version_replaces_rows_in_batches_of_their_own(state: ServiceState) -> None:
    analysed(state, "c1")
    batch = state.open_batch(9, "me")
    assert batch is not None
    state.close_batch(batch.number, "me")
    analysed(state, "c2")  # of the old version, on its way
    assert state.backfill("2") == 1
    assert state.backfill("2") == 0
    task = state.claim("a", 60)
    assert task is not None
    assert (task.capture, task.version, task.again) == ("c1", "2", True)
    assert state.advance(task.id, "a", "analysed")
    batches = []
    while batch := state.open_batch(9, "me"):
        batches.append((batch.again, [task.capture for task in batch.tasks]))
        state.close_batch(batch.number, "me")
    assert sorted(batches) == [(False, ["c2"]), (True, ["c1"])]
    assert state.backfill("2") == 1  # now the other one


def test_one_of_several_leads_until_its_lease_ends_or_it_resigns(url: str) -> None:
    one, two = ServiceState(url), ServiceState(url)
    assert one.lead("committer", "one", 60)
    assert not two.lead("committer", "two", 60)
    assert two.lead("other", "two", 60)
    assert one.lead("committer", "one", 0)  # renewed, and it ends now
    assert two.lead("committer", "two", 60)
    assert not one.lead("committer", "one", 60)
    two.resign("two")
    assert one.lead("committer", "one", 60)
    assert one.identity == two.identity
    one.close()
    two.close()


def test_who_led_once_changes_nothing_any_more(url: str) -> None:
    state = ServiceState(url)
    assert state.lead(LEADER, "first", 0)
    assert state.renew_lease(LEADER, "first", 0)  # its time is over, and nobody else took it
    state.put_request("r", 1, "by the first", "first", ended=False)
    state.put_host("a", "secret")
    state.add_usage("a", {5: "[]"})
    analysed(state, "c1")
    batch = state.open_batch(9, "first")
    assert batch is not None
    usage = state.open_usage(9, "first")
    assert usage is not None
    assert state.lead(LEADER, "second", 600)
    state.resign("second")  # it is gone as well, and the first one still does not know what it did
    changes: list[Callable[[], object]] = [
        lambda: state.put_request("r", 1, "late", "first", ended=True),
        lambda: state.open_batch(9, "first"),
        lambda: state.close_batch(batch.number, "first"),
        lambda: state.open_usage(9, "first"),
        lambda: state.close_usage(usage[0], "first"),
    ]
    for change in changes:
        with pytest.raises(OutputError) as raised:
            change()
        assert raised.value.slug == "not-leading"
    assert not state.renew_lease(LEADER, "first", 600)
    assert state.requests() == ["by the first"]
    assert state.lead(LEADER, "third", 600)
    assert state.open_batch(9, "third") == batch
    assert state.open_usage(9, "third") == usage
    state.close()


def test_a_token_opens_until_it_expires_or_is_revoked_and_only_its_hash_is_kept(
    state: ServiceState, url: str
) -> None:
    secret = state.add_token("anna", "operator")
    token = state.token(secret)
    assert token is not None
    assert (token.name, token.role) == ("anna", "operator")
    with pytest.raises(UsageError) as raised:
        state.add_token("anna", "admin")
    assert raised.value.slug == "token-exists"
    assert state.token(secret + "x") is None
    assert state.token(state.add_token("brief", "viewer", days=1e-12)) is None
    assert state.revoke_token("anna")
    assert not state.revoke_token("anna")
    assert state.token(secret) is None
    assert [token.name for token in state.tokens()] == ["anna", "brief"]
    again = state.add_token("anna", "viewer")  # its name is free
    assert state.token(again) is not None
    assert state.token(secret) is None
    if not url.startswith("postgresql"):
        kept = b"".join(path.read_bytes() for path in Path(url).parent.iterdir())
        assert again.encode() not in kept


@pytest.mark.parametrize("change", ["DELETE FROM audit", "UPDATE audit SET who = 'bert'"])
def test_nobody_changes_the_audit(state: ServiceState, url: str, change: str) -> None:
    state.note("anna", "GET /x", "done", {"capture": "c1"})
    state.note("bert", "POST /y", "not-allowed")
    with pytest.raises(Exception, match="only appended"):  # noqa: PT012
        if url.startswith("postgresql"):
            import psycopg

            with psycopg.connect(url) as connection:
                connection.execute(change)
        else:
            with sqlite3.connect(url) as lite:
                lite.execute(change)
    entries = sorted((entry.who, entry.result, entry.details) for entry in state.audit())
    assert entries == [("anna", "done", {"capture": "c1"}), ("bert", "not-allowed", {})]


@pytest.mark.parametrize("version", [1, 99])
def test_what_was_kept_is_there_after_a_restart_and_another_schema_is_refused(
    url: str, version: int
) -> None:
    state = ServiceState(url)
    arrived(state, "c1")
    state.close()
    again = ServiceState(url)
    assert [capture.id for capture in again.captures()] == ["c1"]
    with again._transaction() as connection:
        again._change(connection, "UPDATE schema_version SET version = :version", version=version)
    again.close()
    with pytest.raises(InputError) as raised:
        ServiceState(url)
    assert raised.value.slug == "other-version"


def test_a_database_that_another_keeps_locked_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceloom.fleet.store.database._BUSY_MS", 50)
    state = ServiceState(str(tmp_path / "state.db"))
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OutputError) as raised:
        state.counts()
    assert raised.value.slug == "state-busy"
    other.execute("ROLLBACK")
    assert state.counts()["received"] == 0
    other.close()
    state.close()


def test_a_full_disk_is_said_so_and_nothing_is_half_there(tmp_path: Path) -> None:
    state = ServiceState(str(tmp_path / "state.db"))
    arrived(state, "c1")
    with state._transaction() as connection:
        [row] = state._rows(connection, "PRAGMA page_count")
        connection.exec_driver_sql(
            f"PRAGMA max_page_count = {row['page_count']}"
        )  # as a disk that is full
    with pytest.raises(OutputError) as raised:  # noqa: PT012
        for at in range(500):
            arrived(state, f"more{at}")
    assert raised.value.slug == "state-unusable"
    assert "full" in raised.value.message
    assert state.capture("c1") is not None
    state.close()


@pytest.mark.parametrize(
    "url", ["mysql://host/fleet", "nothing://x", "postgresql://127.0.0.1:1/fleet?connect_timeout=2"]
)
def test_a_database_that_is_none_of_ours_or_does_not_answer_is_refused(url: str) -> None:
    with pytest.raises((UsageError, OutputError)) as raised:
        ServiceState(url)
    assert raised.value.slug in {"wrong-usage", "state-unusable"}
