"""Rules of the fleet: which job is traced when, what is refused and why, what survives, and what is no rule."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import date
from pathlib import Path

import polars as pl
import pytest

for package in ("sqlalchemy", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import Stores, add_capture, opened, places  # noqa: E402
from traceloom.agent.fleet_link.protocol import (  # noqa: E402
    ArmedProcess,
    Heartbeat,
    HostProcess,
    HostReport,
    UsageRow,
)
from traceloom.agent.traces.requests import TraceTarget  # noqa: E402
from traceloom.errors import InputError  # noqa: E402
from traceloom.fleet.handlers.admin import _build_triggers_answer  # noqa: E402
from traceloom.fleet.rules import FleetRules  # noqa: E402
from traceloom.fleet.service.requests import HostRegistry  # noqa: E402
from traceloom.fleet.store.database import LEADER  # noqa: E402
from traceloom.fleet.store.rules import EVENTS  # noqa: E402
from traceloom.fleet.triggers import (  # noqa: E402
    CaptureFinding,
    FleetTriggerEngine,
    TableEvents,
    collect_table_events,
)

S = 10**9
DAY = 86_400 * S
MIDNIGHT = 20_783 * DAY


class Fleet:
    """A registry and its rules, at a time that stands still until it is set."""

    def __init__(self, stores: Stores, folder: Path) -> None:
        self.now_ns = MIDNIGHT
        stores.state.lead(LEADER, "term", 600)
        self.registry = HostRegistry(
            stores.state, folder / "from-hosts", "term", lambda: self.now_ns
        )
        self.triggers = FleetTriggerEngine(self.registry, stores.tables)

    async def beat(
        self, *jobs: str, usage: list[UsageRow] | None = None, host: str = "a", **facts: object
    ) -> None:
        """A host tells of its jobs: ranks 0 to 2 of each, the last the slowest."""
        processes = [
            HostProcess(
                key=f"{job}{rank}@1",
                pid=rank + 1,
                uid=0,
                job=job,
                rank=rank,
                user="ada",
                polls=True,
                steps=100_000,
                steps_per_second=3.0 - rank,
                **facts,  # type: ignore[arg-type]
            )
            for job in jobs
            for rank in range(3)
        ]
        beat = Heartbeat(
            sent_ns=1, boot_id="b", version="1", processes=processes, usage=usage or []
        )
        await self.registry.heartbeat(host, beat)

    async def end(self, request: str, size: int = 1000) -> None:
        """A request ends as it should, with a file of so many bytes."""
        await self.registry.report(
            "a", request, HostReport(state="armed", processes=[ArmedProcess(key="k", pid=1)])
        )
        target = TraceTarget(
            request="r",
            process="k",
            profiler="timeline",
            pid=1,
            uid=0,
            stem="s",
            state="kept",
            bytes=size,
            steps=5,
        )
        failed = HostReport(state="failed", reason="upload-failed", targets=[target])
        await self.registry.report("a", request, failed)
        await self.registry._advance(self.registry.requests[request])
        assert self.registry.requests[request].ended

    def counts(self, rule: str) -> tuple[int, dict[str, int]]:
        return self.triggers.counts[rule].fired, self.triggers.counts[rule].refusals


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    return opened(places("alone", tmp_path, monkeypatch))


def with_fleet(
    stores: Stores, folder: Path, rules: str, test: Callable[[Fleet], Awaitable[None]]
) -> None:
    async def run() -> None:
        fleet = Fleet(stores, folder)
        for host in ("a", "b"):
            stores.state.put_host(host, host)
        await fleet.registry.start()
        await fleet.triggers.start()
        await fleet.triggers.close()  # the test looks itself
        try:
            if rules:
                await fleet.triggers.set_rules(rules)
            await test(fleet)
        finally:
            await fleet.registry.close()

    asyncio.run(run())


def usage(minute: int, busy: int, job: str = "j", device: str = "g") -> list[UsageRow]:
    rows = [(busy, "busy"), (60_000 - busy, "idle-allocated")]
    return [
        UsageRow(minute=minute, device=device, job=job, state=state, device_ms=ms)
        for ms, state in rows
    ]  # type: ignore[arg-type]


def test_a_cadence_traces_its_share_of_jobs_once_a_day_and_others_never(
    stores: Stores, tmp_path: Path
) -> None:
    jobs = [f"job{number}" for number in range(400)]

    async def test(fleet: Fleet) -> None:
        for minute in range(0, 24 * 60, 20):
            fleet.now_ns = MIDNIGHT + minute * 60 * S
            await fleet.beat(*jobs)
            await fleet.triggers.tick()
        traced = {request.spec.job for request in fleet.registry.requests.values()}
        assert len(fleet.registry.requests) == len(traced), "each once a day"
        assert 20 <= len(traced) <= 64, (
            "10 % of 400 jobs, by chance within four standard deviations"
        )
        assert fleet.counts("some") == (len(traced), {})
        request = next(iter(fleet.registry.requests.values()))
        assert (request.who, request.spec.steps) == ("trigger some", 2)

    with_fleet(
        stores,
        tmp_path,
        '[[triggers]]\nname = "some"\non = "cadence"\nshare = 0.1\nsteps = 2\n[budget]\ntraces_per_day = 1000\n'
        "mb_per_day = 1e6\n",
        test,
    )


USAGE = """
[[triggers]]
name = "idle"
on = "usage"
busy_below = 0.5
minutes = 3
target = "slowest-and-median"
where = {job = "j*"}
cooldown = 600

[budget]
traces_per_day = 2
"""


def test_a_job_that_computes_too_little_is_traced_within_cooldown_and_budget(
    stores: Stores, tmp_path: Path
) -> None:
    async def test(fleet: Fleet) -> None:
        minute = MIDNIGHT // (60 * S)
        for more, busy in enumerate([50_000, 20_000, 10_000]):
            rows = usage(minute + more, busy) + usage(minute + more, 0, "other", "h")
            fleet.now_ns = MIDNIGHT + (more + 1) * 60 * S
            await fleet.beat("j", "other", usage=rows)
            await fleet.triggers.tick()
            assert fleet.counts("idle")[0] == (1 if more == 2 else 0), (
                "80 s of 180 only after the third minute"
            )
        [request] = fleet.registry.requests.values()
        assert (request.spec.job, request.spec.ranks) == ("j", (1, 2))
        assert request.trigger is not None
        assert "44.4 %" in request.trigger.what
        await fleet.triggers.tick()
        assert fleet.counts("idle") == (1, {}), "it was traced for this already"
        for number in range(3, 40):
            fleet.now_ns = MIDNIGHT + (number + 1) * 60 * S
            for running in [of for of in fleet.registry.requests.values() if not of.ended]:
                await fleet.end(running.id)
            await fleet.beat("j", "other", usage=usage(minute + number, 0))
            await fleet.triggers.tick()
        fired, refusals = fleet.counts("idle")
        assert (fired, set(refusals)) == (2, {"budget-traces"})
        times = sorted(request.asked_ns for request in fleet.registry.requests.values())
        assert times[1] - times[0] >= 600 * S
        assert fleet.triggers.counts["idle"].kept_bytes == 2000

    with_fleet(stores, tmp_path, USAGE, test)

    async def again(fleet: Fleet) -> None:
        assert list(fleet.triggers.rules) == ["idle"]
        assert fleet.counts("idle")[0] == 2
        assert fleet.triggers.ledger.traces_left(MIDNIGHT + 3600 * S) == 0
        assert fleet.triggers.ledger.traces_left(MIDNIGHT + 2 * DAY) == 2

    with_fleet(stores, tmp_path, "", again)


FINDING = '[[triggers]]\nname = "starved"\non = "finding"\nslug = "data-starved"\nsaving = 0.1\n'


def test_refusals_are_counted_by_reason_and_say_why(stores: Stores, tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        async def find(job: str, saving: float = 0.2, slug: str = "data-starved") -> str:
            fleet.now_ns += S
            news = TableEvents([CaptureFinding(f"c{fleet.now_ns}", job, slug, saving)], [])
            await fleet.triggers.tick(news)
            refusal = fleet.triggers.counts["starved"].last_refusal
            return refusal.reason if refusal is not None and refusal.at_ns == fleet.now_ns else ""

        await fleet.beat("j", "k", "young")
        assert await find("gone") == "no-such-job"
        assert await find("j", 0.05) == ""
        assert await find("j", slug="straggler") == ""
        assert fleet.counts("starved")[0] == 0
        assert await find("j") == ""
        assert fleet.counts("starved")[0] == 1
        assert await find("j") == "traced"
        [request] = fleet.registry.requests
        await fleet.end(request)
        assert await find("j") == "cooldown"
        await fleet.triggers.set_rules(FINDING + "[budget]\nmb_per_day = 1\n")
        assert await find("k") == "budget-bytes"
        await fleet.triggers.set_rules(FINDING + "[budget]\nshare = 1e-5\n")
        assert await find("k") == "budget-share"
        assert fleet.counts("starved")[1] == {
            "no-such-job": 1,
            "traced": 1,
            "cooldown": 1,
            "budget-bytes": 1,
            "budget-share": 1,
        }
        await fleet.triggers.set_rules(
            FINDING.replace("[[triggers]]\n", '[[triggers]]\nhosts = ["b"]\n')
        )
        assert await find("k") == "no-such-job"
        assert fleet.triggers.counts["starved"].fired == 1, "what a rule did stays counted"

    with_fleet(stores, tmp_path, FINDING, test)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("x = 1", "no key `x`"),
        ('[[triggers]]\nname = "a"\non = "cadense"\nshare = 1.0', "cadence"),
        ('[[triggers]]\nname = "a"\non = "cadence"\nshare = 2.0', "<= 1"),
        ('[[triggers]]\nname = "a"\non = "usage"\nbusy_below = 0.1\nwhere = {jop = "x"}', "job"),
        (
            '[[triggers]]\nname = "a"\non = "cadence"\nshare = 0.1\nsteps = 1\nduration = 1.0',
            "both",
        ),
        (2 * '[[triggers]]\nname = "a"\non = "cadence"\nshare = 0.1\n', "two triggers"),
        ("[budget]\ntraces_per_day = 0", ">= 1"),
        ("a = " + "[" * 5000, "not TOML"),
    ],
    ids=["key", "kind", "share", "label", "window", "twice", "budget", "deep"],
)
def test_what_is_no_rule_is_refused_with_the_reason(text: str, hint: str) -> None:
    with pytest.raises(InputError) as error:
        FleetRules.of(text)
    assert error.value.slug == "wrong-config"
    assert hint in str(error.value)


def rows(jobs: int, slower_from: int) -> dict[str, pl.DataFrame]:
    """A kernel in jobs of successive hours, a third slower from one of them on."""
    tables: dict[str, list[dict[str, object]]] = {
        "captures": [],
        "kernels": [],
        "devices": [],
        "findings": [],
    }
    for number in range(jobs):
        about = {"day": date(2026, 11, 25), "capture": f"c{number}"}
        ns = (1000 if number < slower_from else 1330) + 7 * (number % 3)
        tables["captures"].append(
            {**about, "job": f"job{number}", "start_ns": MIDNIGHT + number * 3600 * S}
        )
        tables["devices"].append({**about, "rank": 0, "host": "h"})
        work = {
            "kernel": "k",
            "shapes": "[[8]]",
            "device_model": "H100",
            "count": 100,
            "total_ns": 100 * ns,
        }
        tables["kernels"].append({**about, "rank": 0, **work})
        tables["findings"].append({**about, "slug": "straggler", "saving_fraction": 0.3})
    return {name: pl.DataFrame(of) for name, of in tables.items()}


def committed(stores: Stores, first: int, last: int, slower_from: int) -> None:
    """Captures of jobs from the first to before the last come into the tables."""
    for number in range(first, last):
        add_capture(stores, f"c{number}")
        task = stores.state.claim("me", 60)
        assert task is not None
        stores.state.advance(task.id, "me", "analysed")
    stores.state.lead(LEADER, "term", 600)
    batch = stores.state.open_batch(1000, "term")
    assert batch is not None
    frames = {name: frame[first:last] for name, frame in rows(last, slower_from).items()}
    stores.tables.commit("captures", batch.number, frames)
    stores.state.close_batch(batch.number, "term")


def test_a_new_regression_is_told_once_and_traces_a_job_that_shows_it(
    stores: Stores, tmp_path: Path
) -> None:
    state = stores.state
    state.add_webhook("w", "https://8.8.8.8", EVENTS)
    now_ns = MIDNIGHT + 3 * DAY
    assert collect_table_events(state, stores.tables, now_ns) == TableEvents([], [])
    committed(stores, 0, 14, slower_from=14)
    first = collect_table_events(state, stores.tables, now_ns)
    assert {finding.slug for finding in first.findings} == {"straggler"}
    assert first.regressions == []
    assert collect_table_events(state, stores.tables, now_ns).findings == [], "they are new no more"
    committed(stores, 14, 24, slower_from=14)
    news = collect_table_events(state, stores.tables, now_ns)
    assert [change["kernel"] for change in news.regressions] == ["k"]
    committed(stores, 24, 26, slower_from=14)
    assert collect_table_events(state, stores.tables, now_ns).regressions == []
    [delivery] = state.due_deliveries(2**62)
    body = json.loads(delivery.document)
    assert (body["event"], body["id"]) == ("regression.new", delivery.id)
    assert body["regression"]["jobs_after"] == 10

    async def test(fleet: Fleet) -> None:
        await fleet.beat("job2", "job20")
        await fleet.triggers.tick(news)
        [request] = fleet.registry.requests.values()
        assert request.spec.job == "job20"

    with_fleet(
        stores, tmp_path, '[[triggers]]\nname = "slower"\non = "regression"\nby = 0.2\n', test
    )


def test_rules_that_are_only_tried_are_shown_with_their_own_budget(
    stores: Stores, tmp_path: Path
) -> None:
    proposed = FleetRules.of("[budget]\ntraces_per_day = 7\nmb_per_day = 5\nshare = 0.125\n")

    async def test(fleet: Fleet) -> None:
        tried = _build_triggers_answer(fleet.triggers, proposed, "text")
        assert (tried.traces_per_day, tried.traces_left, tried.bytes_per_day) == (7, 7, 5_000_000)
        assert (tried.share, tried.rules) == (0.125, [])
        kept = _build_triggers_answer(fleet.triggers)
        assert (kept.traces_per_day, [rule.name for rule in kept.rules]) == (2, ["idle"])

    with_fleet(stores, tmp_path, USAGE, test)
