"""The pages about traces that were asked for and kept, drawn from answers written by hand."""

from __future__ import annotations

import re
from typing import get_args
from urllib.parse import unquote

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

import itertools

from support.html_tree import words
from support.page_contents import (
    EVIL,
    NOON,
    SECOND,
    SPELLED,
    ContentPage,
    Shown,
    fragment_tree,
    request,
)
from traceloom.agent.traces.requests import TraceSpec
from traceloom.agent.triggers.store import LastFiring, LastRefusal
from traceloom.fleet.api import CaptureResponse, TaskResponse
from traceloom.fleet.handlers.admin import FleetTriggerResponse, FleetTriggersResponse
from traceloom.fleet.handlers.hosts import RequestHost
from traceloom.fleet.portal.page_request import PageUrl
from traceloom.fleet.portal.pages import (
    admin as triggers_page,
    captures as captures_page,
    job as request_page,
    job as requests_page,
)
from traceloom.fleet.service.request_plan import ENDED_FLEET_STATES, FleetState

STATES: tuple[FleetState, ...] = get_args(FleetState)


def capture(number: int, state: str, **changes: object) -> CaptureResponse:
    fields: dict[str, object] = {
        "id": f"c{number}",
        "day": "2026-09-21",
        "job": "a",
        "uploader": "ana",
        "received_ns": NOON - number * SECOND,
        "bytes": 1_500_000,
        "state": state,
        "tasks": [],
        "files": {"rank0.json": 1_000_000, "rank1.json": 500_000},
        "digests": {},
    }
    return CaptureResponse(**{**fields, **changes})  # type: ignore[arg-type]


def test_requests_are_counted_by_how_they_ended() -> None:
    states = ["running", "done", "done", "partial", "failed", "cancelled", "planned"]
    rows = [request(f"r{number}", state) for number, state in enumerate(states)]
    page = ContentPage(requests_page.REQUESTS_PAGE.content(rows))
    assert page.column("requests", "State") == states
    assert page.numbers() == {
        "Being taken": Shown("2", "have not ended", "", ""),
        "Done": Shown("2", "whole", "", "/requests?requests.q=done"),
        "Partial": Shown(
            "1", "something of a host is missing", "warn", "/requests?requests.q=partial"
        ),
        "Failed": Shown("1", "gave nothing", "bad", "/requests?requests.q=failed"),
    }
    # What the number of those that failed leads to are exactly these.
    filtered = ContentPage(
        requests_page.REQUESTS_PAGE.content(rows), "requests.q=failed", "/requests"
    )
    assert filtered.column("requests", "State") == ["failed"]


def test_a_request_says_what_was_asked_by_whom_and_why_there_is_nothing() -> None:
    rows = [
        request(
            "r/1",
            "failed",
            spec=TraceSpec(job="b/c", duration_s=0.25, profilers=("stacks", "dump")),
            who=EVIL,
            detail=EVIL,
        ),
        request(
            "r2",
            "done",
            spec=TraceSpec(job=EVIL, steps=1),
            capture="c/2",
            hosts=[RequestHost(host="n", state="done", since_ns=1)],
        ),
    ]
    page = ContentPage(requests_page.REQUESTS_PAGE.content(rows))
    assert page.column("requests", "What") == ["250 ms, stacks, dump", "1 step, timeline"]
    assert page.column("requests", "By") == [SPELLED, "ana"]
    assert page.column("requests", "Why") == [SPELLED, "–"]
    assert page.column("requests", "Hosts") == ["0", "1"]
    assert page.leads("requests", "Asked") == ["/requests/r%2F1", "/requests/r2"]
    assert page.leads("requests", "Capture") == ["", "/captures/c%2F2"]
    assert unquote(page.leads("requests", "Job")[1]) == f"/jobs/{EVIL}"
    nothing = ContentPage(requests_page.REQUESTS_PAGE.content([]))
    assert (nothing.numbers(), nothing.tables()) == ({}, {})
    assert "/jobs" in nothing.links()


@pytest.mark.parametrize("state", STATES)
def test_a_request_stands_where_its_state_is_on_the_way(state: FleetState) -> None:
    content = request_page.REQUEST_PAGE.content(
        request("r", state, reason="some-reason", capture="c1")
    )
    assert content.ended == (state in ENDED_FLEET_STATES)
    page = ContentPage(content)
    way = page.by_id("way-part")
    steps = [words(of) for of in way.iter("li")]
    if state in {"failed", "cancelled"}:
        assert steps == [], "there is no way on"
        assert state in words(way)
    else:
        here = [words(of) for of in way.iter("li") if of.get("aria-current") == "step"]
        assert here == [state]
        passed = [
            words(of) for of in way.iter("li") if (of.get("class") or "").split()[:1] == ["passed"]
        ]
        assert passed == steps[: steps.index(state)], "all before it is behind it"
        assert steps[-1] == ("partial" if state == "partial" else "done")
    links = [of.get("href") for of in way.iter("a")]
    assert links == (["/captures/c1"] if state in ENDED_FLEET_STATES else []), (
        "a report is there when it has ended"
    )
    assert "some-reason" in words(way)
    assert len(page.heading.split()) >= 3, "its state in a sentence"


def test_a_capture_that_could_not_be_analysed_is_no_report() -> None:
    for reason, name in (("", "Open the report"), ("analysis-failed", "See the capture")):
        page = ContentPage(
            request_page.REQUEST_PAGE.content(request("r", "partial", capture="c1", reason=reason))
        )
        assert [words(of) for of in page.by_id("way-part").iter("a")] == [name]


def test_a_request_shows_every_host_and_what_it_says() -> None:
    hosts = [
        RequestHost(
            host="n/1",
            state="done",
            since_ns=NOON,
            ranks=[0, 1, 2, 5],
            targets=["0 timeline: done", "1 timeline: done"],
        ),
        RequestHost(host=EVIL, state="failed", since_ns=NOON, reason="unreachable", detail=EVIL),
        RequestHost(host="n3", state="failed", since_ns=NOON, reason="unreachable"),
    ]
    page = ContentPage(
        request_page.REQUEST_PAGE.content(
            request("r", "partial", start_ns=NOON + SECOND, hosts=hosts)
        )
    )
    assert page.column("hosts", "Ranks") == ["0-2, 5", "–", "–"]
    assert page.column("hosts", "Why") == ["–", SPELLED, "unreachable"]
    assert page.leads("hosts", "Host")[0] == "/hosts/n%2F1"
    assert page.column("targets", "Rank and profiler, and how far it is") == [
        "0 timeline: done",
        "1 timeline: done",
    ]
    numbers = page.numbers()
    assert numbers["Job"] == Shown("a", "that is traced", "", "/jobs/a")
    assert numbers["Begins"].value == "2026-09-21 14:13:21 UTC"
    early = ContentPage(request_page.REQUEST_PAGE.content(request("r", "planned")))
    assert early.numbers()["Begins"].value == "–"
    assert "No host has such processes." in words(early.by_id("hosts"))


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranges_of_ranks_hold_the_ranks_that_they_are_of(ranks: set[int]) -> None:
    hosts = [RequestHost(host="n", state="done", since_ns=1, ranks=sorted(ranks))]
    page = ContentPage(request_page.REQUEST_PAGE.content(request("r", "done", hosts=hosts)))
    [shown] = page.column("hosts", "Ranks")
    spans = [tuple(map(int, re.findall(r"\d+", part))) for part in shown.split(", ")]
    assert {rank for span in spans for rank in range(span[0], span[-1] + 1)} == ranks
    assert all(before[-1] + 1 < after[0] for before, after in itertools.pairwise(spans)), (
        "as few as can be"
    )


def test_captures_are_counted_by_state_and_lead_to_where_they_are() -> None:
    failed = TaskResponse(version="2", state="quarantined", attempts=3, error=EVIL)
    rows = [
        capture(0, "committed"),
        capture(
            1,
            "quarantined",
            tasks=[TaskResponse(version="1", state="committed", attempts=1, error="old"), failed],
        ),
        capture(2, "", job="", files={}, bytes=0),
    ]
    page = ContentPage(captures_page.CAPTURES_PAGE.content(rows))
    assert page.column("captures", "State") == ["committed", "quarantined", "–"]
    assert page.column("captures", "Why not") == ["–", SPELLED, "–"], (
        "the last that was tried counts"
    )
    assert page.column("captures", "Size") == ["1.50 MB", "1.50 MB", "0 B"]
    assert page.column("captures", "Files") == ["2", "2", "0"]
    assert page.leads("captures", "Job") == ["/jobs/a", "/jobs/a", ""]
    numbers = page.numbers()
    assert numbers["Captures"] == Shown("3", "in all", "", "")
    assert numbers["Not analysable"] == Shown(
        "1", "in quarantine", "bad", "/captures?captures.q=quarantined"
    )
    assert numbers["Size"].value == "3.00 MB"
    assert "older" not in {of.get("id") for of in page.root.iter()}


@pytest.mark.parametrize(("count", "about"), [(999, "in all"), (1000, "the last ones")])
def test_older_captures_are_led_to_where_a_page_is_full(count: int, about: str) -> None:
    page = ContentPage(
        captures_page.CAPTURES_PAGE.content(
            [capture(number, "committed") for number in range(count)]
        )
    )
    assert page.numbers()["Captures"].about == about
    older = [of.get("href") for of in page.all("a") if words(of) == "Older captures"]
    assert older == ([f"/captures?before={NOON - 999 * SECOND}"] if count == 1000 else [])


def rule(name: str, on: str, **changes: object) -> FleetTriggerResponse:
    fields: dict[str, object] = {
        "name": name,
        "on": on,
        "jobs": 2,
        "target": "job",
        "cooldown_seconds": 3600.0,
        "fired": 0,
        "refusals": {},
        "kept_bytes": 0,
        "last": None,
        "last_refusal": None,
    }
    return FleetTriggerResponse(**{**fields, **changes})  # type: ignore[arg-type]


def triggers(*rules: FleetTriggerResponse, **changes: object) -> FleetTriggersResponse:
    fields: dict[str, object] = {
        "toml": "",
        "rules": list(rules),
        "traces_per_day": 50,
        "traces_left": 48,
        "bytes_per_day": 20_000_000_000,
        "bytes_left": 5_000_000_000,
        "share": 0.01,
        "last_error": "",
    }
    return FleetTriggersResponse(**{**fields, **changes})  # type: ignore[arg-type]


def test_rules_say_what_they_did_and_why_they_did_not() -> None:
    rules = [
        rule(
            "daily",
            "cadence",
            fired=3,
            kept_bytes=2_000_000,
            refusals={"busy": 1, "budget": 1200},
            last=LastFiring(at_ns=NOON, target="b/c", what="its turn", request="r/9", uid=0),
            last_refusal=LastRefusal(
                at_ns=NOON + SECOND,
                target="a",
                what="its turn",
                uid=0,
                reason="budget",
                detail=EVIL,
            ),
        ),
        rule(
            "slow",
            "regression",
            target="slowest-and-median",
            cooldown_seconds=0.5,
            fired=1,
            last_refusal=LastRefusal(
                at_ns=NOON - SECOND, target="", what=EVIL, uid=0, reason="no-job", detail="it ended"
            ),
        ),
        rule("idle", "usage"),
    ]
    page = ContentPage(triggers_page.TRIGGERS_PAGE.content(triggers(*rules)))
    assert page.heading == "3 rules asked for 4 traces"
    assert page.column("rules", "Refused") == ["budget 1\u202f200×, busy 1×", "–", "–"], (
        "what was most often stands first"
    )
    assert page.column("rules", "Cooldown") == ["3\u202f600 s", "500 ms", "3\u202f600 s"]
    assert page.column("rules", "Traces") == [
        "all ranks",
        "slowest rank and one in the middle",
        "all ranks",
    ]
    assert page.leads("rules", "Fired")[0] == "/requests?requests.q=trigger+daily"
    assert page.column("last", "When") == [
        f"2026-09-21 14:13:{second} UTC" for second in (21, 20, 19)
    ], "newest first"
    assert page.column("last", "Result") == ["refused", "fired", "refused"]
    assert page.column("last", "Why not") == [f"budget: {SPELLED}", "–", "no-job: it ended"]
    assert page.leads("last", "Job") == ["/jobs/a", "/jobs/b/c", ""]
    assert page.leads("last", "Request") == ["", "/requests/r%2F9", ""]
    numbers = page.numbers()
    assert numbers["Traces left"] == Shown("48", "of 50 in 24 hours", "", "")
    assert numbers["Bytes left"] == Shown("5.00 GB", "of 20.0 GB in 24 hours", "", "")
    assert numbers["Share"].value == "1.0 %"


def test_a_budget_that_is_spent_and_rules_that_fail_are_seen_first() -> None:
    page = ContentPage(
        triggers_page.TRIGGERS_PAGE.content(
            triggers(rule("a", "usage"), traces_left=0, bytes_left=0, last_error=EVIL)
        )
    )
    numbers = page.numbers()
    assert (numbers["Traces left"].grade, numbers["Bytes left"].grade) == ("warn", "warn")
    assert numbers["Traces left"].value == "0"
    assert [words(of) for of in page.all("h2")] == ["What is wrong", "Rules", "What happened last"]
    assert SPELLED in words(page.by_id("problems-part"))
    assert "No rule has fired yet." in words(page.by_id("last"))
    none = ContentPage(triggers_page.TRIGGERS_PAGE.content(triggers()))
    assert none.heading == "There are no rules yet"
    assert none.numbers() == {}


def test_the_table_of_requests_is_filtered_by_all_that_it_shows() -> None:
    rows = [
        request("r1", "done", who="trigger daily"),
        request("r2", "done", who="ana", spec=TraceSpec(job="daily", steps=2)),
    ]
    table = requests_page.build_requests_table(rows)
    assert [
        row["id"] for row in table.chosen(PageUrl("/requests", "requests.q=trigger+daily"))
    ] == ["r1"]
    assert [row["id"] for row in table.chosen(PageUrl("/requests", "requests.q=DAILY"))] == [
        "r1",
        "r2",
    ]
    assert (
        fragment_tree(table.render(PageUrl("/requests", "requests.q=2+step")))
        .tables()["requests"]
        .texts[0][4]
        == "2 steps, timeline"
    )
