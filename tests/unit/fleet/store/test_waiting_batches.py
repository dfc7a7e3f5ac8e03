"""What waits for the tables: a plain model of it and the state agree, whatever comes, is begun, is cut off and ends."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `fleet` is not installed")

from support.fleet import KINDS, Kind
from support.postgres import database
from traceloom.errors import OutputError
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.database import LEADER
from traceloom.fleet.store.hosts import JobFacts

HOSTS = ("n1", "n2", "n3")


@pytest.fixture(params=KINDS)
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceState]:
    kind: Kind = request.param
    made = ServiceState(str(tmp_path / "state.db") if kind == "alone" else database())
    made.lead(LEADER, "me", 600)
    for host in HOSTS:
        made.put_host(host, "secret")
    yield made
    made.close()


class Minutes:
    """The model: what each host said, which of it is in a batch, and which is in the tables."""

    def __init__(self) -> None:
        self.through = dict.fromkeys(HOSTS, 0)
        self.waiting: dict[tuple[int, str], tuple[int, str]] = {}
        self.begun: dict[tuple[int, str], tuple[int, str]] = {}

    def add(self, host: str, minutes: dict[int, str]) -> None:
        for minute, document in sorted(minutes.items()):
            if minute > self.through[host]:
                since = self.through[host] + 1 if self.through[host] else minute
                self.waiting[minute, host] = since, document
                self.through[host] = minute

    def open(self, most: int) -> dict[tuple[int, str], tuple[int, str]]:
        if not self.begun:
            for key in sorted(self.waiting)[:most]:
                self.begun[key] = self.waiting.pop(key)
        return self.begun


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(4))
def test_minutes_are_in_one_batch_each_the_oldest_first(state: ServiceState, seed: int) -> None:
    order, model = random.Random(seed), Minutes()
    numbers: list[int] = []
    for _ in range(60):
        if order.random() < 0.6:
            host, first = order.choice(HOSTS), order.randrange(1, 40)
            minutes = {first + at: f"[{host} {first + at}]" for at in range(order.randrange(4))}
            state.add_usage(host, minutes)
            model.add(host, minutes)
        else:
            most = order.randrange(1, 6)
            expected, batch = model.open(most), state.open_usage(most, "me")
            assert state.has_rows_to_commit(minutes=True) == bool(expected)
            if batch is None:
                assert not expected
                continue
            number, waiting = batch
            rows = [((row.minute, row.host), (row.since, row.document)) for row in waiting]
            assert rows == sorted(expected.items())
            if numbers and order.random() < 0.5:
                assert number >= numbers[-1]
                continue  # whoever wrote it was killed, and the next call has the same batch
            assert number not in numbers
            numbers.append(number)
            state.close_usage(number, "me")
            model.begun = {}
        assert state.waiting_minutes() == len(model.waiting) + len(model.begun)
    assert numbers == sorted(numbers)


def test_who_does_not_lead_begins_and_ends_nothing(state: ServiceState) -> None:
    state.add_usage("n1", {5: "[]"})
    state.say_of_jobs({"j": JobFacts(user="ada")}, 7)
    opened = state.open_usage(10, "me")
    assert opened is not None
    state.resign("me")
    state.lead(LEADER, "another", 600)
    for refused in (
        lambda: state.open_usage(10, "me"),
        lambda: state.close_usage(opened[0], "me"),
        lambda: state.open_job_facts(10, "me"),
        lambda: state.open_batch(10, "me"),
    ):
        with pytest.raises(OutputError) as raised:
            refused()
        assert raised.value.slug == "not-leading"
    assert state.open_usage(10, "another") == opened  # who leads now goes on with it
    [fact] = (state.open_job_facts(10, "another") or (0, []))[1]
    assert fact.facts.user == "ada"


def test_facts_of_jobs_are_a_row_for_each_change_and_what_was_said_last_is_kept(
    state: ServiceState,
) -> None:
    spoken = [
        (10, {"a": JobFacts(user="ada"), "b": JobFacts(user="bob")}),
        (11, {"a": JobFacts(user="ada")}),  # nothing new
        (12, {"a": JobFacts(model="m"), "b": JobFacts(user="eve", labels={"x": "1"})}),
        (12, {"b": JobFacts(labels={"y": "2"})}),  # at the same instant, and after it
    ]
    now_ns = time.time_ns()
    assert [state.say_of_jobs(facts, now_ns + at) for at, facts in spoken] == [2, 0, 2, 1]
    whole: list[tuple[str, int, JobFacts]] = []
    sizes = []
    while (batch := state.open_job_facts(2, "me")) is not None:
        assert batch == state.open_job_facts(1, "me")  # the one that was begun, as large as it was
        whole += [(row.job, row.since_ns - now_ns, row.facts) for row in batch[1]]
        sizes.append(len(batch[1]))
        state.close_job_facts(batch[0], "me")
    assert sizes == [2, 2, 1]
    assert sorted(whole, key=lambda row: row[:2]) == [
        ("a", 10, JobFacts(user="ada")),
        ("a", 12, JobFacts(user="ada", model="m")),
        ("b", 10, JobFacts(user="bob")),
        ("b", 12, JobFacts(user="eve", labels={"x": "1"})),
        ("b", 13, JobFacts(user="eve", labels={"x": "1", "y": "2"})),
    ]
    assert not state.has_rows_to_commit(minutes=True)
    state.say_of_jobs({"old": JobFacts(user="eve")}, now_ns - 91 * 86_400 * 10**9)
    assert state.open_job_facts(9, "me") is not None
    state.close_job_facts(state.number("jobs"), "me")
    assert (
        state.say_of_jobs({"old": JobFacts(user="eve")}, now_ns) == 1
    )  # which nobody spoke of for 90 days
    assert (
        state.say_of_jobs({"b": JobFacts(user="eve")}, now_ns + 20) == 0
    )  # it is remembered, though it is in the tables


def test_captures_wait_though_minutes_do_not(state: ServiceState) -> None:
    assert not state.has_rows_to_commit(minutes=True)
    state.add_usage("n2", {3: "[]"})
    assert not state.has_rows_to_commit(minutes=False)
    assert state.has_rows_to_commit(minutes=True)
