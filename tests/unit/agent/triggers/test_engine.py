"""Cooldown, budget, refusals, restarts: what rules do with the requests that they make."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from pathlib import Path

import msgspec
import pytest

from support.triggers import START_NS, Rules, rule, worker
from traceloom.agent.config import TriggerBudget
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.base import Window
from traceloom.agent.traces.requests import TraceRequest
from traceloom.agent.triggers.store import TriggerStore
from traceloom.agent.triggers.watches import Occurrence
from traceloom.errors import InputError

HOT = 'on = "metric"\nmetric = "gpu_power_watts"\nabove = 5.0\n'
WORKER = worker(0, rank=0, devices=("GPU-0",))


def measured(request: TraceRequest, seconds: float, size: int) -> None:
    """What profilers would have said of a request that has ended."""
    for target in request.targets:
        target.state, target.reason, target.bytes = "kept", "", size
        target.window_start_ns, target.window_end_ns = 10**18, 10**18 + int(seconds * 1e9)


async def hot(rules: Rules, seconds: float) -> list[TraceRequest]:
    """A new occurrence of what the rule watches for, so much later; the requests for it, which have ended."""
    rules.put("gpu_power_watts", {("GPU-0",): 1.0})
    await rules.after(seconds - 1)
    rules.put("gpu_power_watts", {("GPU-0",): 9.0})
    made = await rules.after(1)
    await rules.ended()
    return made


def test_a_request_names_its_trigger_everywhere(tmp_path: Path) -> None:
    async def live() -> None:
        rules = Rules(rule(HOT + "steps = 7\nshapes = true"), folder=tmp_path)
        rules.run(WORKER)
        (request,) = await hot(rules, 2)
        assert (request.who, request.uid) == ("trigger rule", WORKER.uid)
        assert (request.spec.steps, request.spec.shapes, request.spec.pids) == (
            7,
            True,
            (WORKER.pid,),
        )
        document = rules.trace_service._capture(request, request.targets)
        assert document["request"]["trigger"] == {
            "rule": "rule",
            "target": "job",
            "what": "gpu_power_watts of device GPU-0 is 9 watts, above 5 watts",
        }
        assert (tmp_path / "traces" / str(WORKER.uid) / request.id).is_dir()
        await rules.close()
        (line,) = [
            json.loads(line)
            for line in (tmp_path / "audit.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert (line["who"], line["what"], line["result"], line["request"]) == (
            "trigger rule",
            "trigger",
            "done",
            request.id,
        )

    asyncio.run(live())


def test_refusals_are_counted_by_reason_and_noted_once_a_minute(tmp_path: Path) -> None:
    async def live() -> None:
        rules = Rules(rule(HOT + "cooldown = 1000"), folder=tmp_path)
        rules.run(WORKER, polling=False)
        rules.put("gpu_power_watts", {("GPU-0",): 9.0})
        for _ in range(120):
            assert await rules.after(1) == []
        assert rules.refusals() == {"not-registered": 2}
        rules.run(WORKER)
        assert [await hot(rules, 2) != [] for _ in range(4)] == [True, False, False, False]
        assert rules.refusals() == {"not-registered": 2, "cooldown": 3}
        values = {
            (each.metric, each.labels): each.value
            for each in rules.triggers.readings()
            if isinstance(each, Reading)
        }
        assert values["trigger_refusals_total", ("rule", "cooldown")] == 3
        assert values["trigger_requests_total", ("rule",)] == 1
        refusal = rules.triggers.counts["rule"].last_refusal
        assert refusal is not None
        assert (refusal.reason, refusal.target, refusal.uid) == ("cooldown", "job", WORKER.uid)
        await rules.close()
        lines = [
            json.loads(line)
            for line in (tmp_path / "audit.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert [line["result"] for line in lines] == [
            "not-registered",
            "not-registered",
            "done",
            "cooldown",
        ]

    asyncio.run(live())


def test_the_same_of_several_ranks_is_one_occurrence(tmp_path: Path) -> None:
    async def live() -> None:
        rules = Rules(rule(HOT + "cooldown = 1000"), folder=tmp_path)
        rules.run(*(worker(number, rank=number, devices=(f"GPU-{number}",)) for number in range(8)))
        made = []
        for second in range(300):
            hot_ones = 7 if second < 250 else 8
            rules.put("gpu_power_watts", {(f"GPU-{number}",): 9.0 for number in range(hot_ones)})
            made += await rules.after(1)
            await rules.ended()
        assert [len(request.targets) for request in made] == [8]
        assert rules.refusals() == {"cooldown": 1}, "of the one that came later"
        await rules.close()

    asyncio.run(live())


def test_a_process_is_traced_for_its_share_of_time_at_most(tmp_path: Path) -> None:
    """A young process counts as one of an hour: 0.1 % of that are 3.6 s."""

    async def live() -> None:
        budget = TriggerBudget(share=0.001)
        rules = Rules(rule(HOT + "duration = 1.0\ncooldown = 1"), folder=tmp_path, budget=budget)
        rules.run(msgspec.structs.replace(WORKER, started_ns=START_NS - 60 * 10**9))
        for second in (1.0, 1.0, 0.5):
            (request,) = await hot(rules, 10)
            measured(request, second, 1000)
        (request,) = await hot(rules, 10)  # 2.5 s were measured, and 1 s is asked for
        measured(request, 1.0, 1000)
        assert await hot(rules, 10) == []
        assert rules.refusals() == {"budget-share": 1}
        assert rules.triggers.counts["rule"].traced_seconds == 3.5
        assert await hot(rules, 7200) != [], "as old as two hours it has 7.2 s"
        await rules.close()

    asyncio.run(live())


def test_bytes_of_a_day_are_measured_and_set_aside_until_then(tmp_path: Path) -> None:
    async def live() -> None:
        budget = TriggerBudget(mb_per_day=10.0, mb_per_trace=4.0, share=1.0)
        rules = Rules(rule(HOT + "duration = 0.1\ncooldown = 1"), folder=tmp_path, budget=budget)
        rules.run(WORKER)
        (first,) = await hot(rules, 10)
        assert first.max_bytes == 4_000_000
        measured(first, 0.1, 3_500_000)
        (second,) = await hot(rules, 10)
        measured(second, 0.1, 3_000_000)
        assert await hot(rules, 10) == [], "3.5 MB are left, and a trace may have 4"
        assert rules.refusals() == {"budget-bytes": 1}
        assert rules.triggers.ledger.bytes_left(rules.now_ns) == 3_500_000
        assert await hot(rules, 86_400 - 40) == []
        assert len(await hot(rules, 40)) == 1, "the first is of another day"
        await rules.close()

    asyncio.run(live())


class Writes:
    """A profiler that writes a hundred bytes."""

    name = "dump"

    def resources(self, process: Process) -> frozenset[str]:
        return frozenset()

    async def record(
        self, process: Process, window: Window, directory: Path, stem: str
    ) -> list[Path]:
        path = directory / f"{stem}.dump.json"
        path.write_bytes(b"x" * 100)
        return [path]


@pytest.mark.parametrize(("mb", "state"), [(0.0001, "kept"), (0.00009, "failed")])
def test_a_file_that_is_larger_than_a_trace_may_be_is_not_kept(
    tmp_path: Path, mb: float, state: str
) -> None:
    async def live() -> None:
        text = HOT + 'profilers = ["dump"]\nduration = 0.1'
        rules = Rules(rule(text), folder=tmp_path, budget=TriggerBudget(mb_per_trace=mb))
        rules.trace_service.parts = {"dump": Writes}
        rules.run(WORKER, polling=False)
        (request,) = await hot(rules, 2)
        (target,) = request.targets
        assert (target.state, target.reason) == (state, "" if state == "kept" else "quota")
        await rules.after(1)
        assert rules.triggers.counts["rule"].kept_bytes == (100 if state == "kept" else 0)
        await rules.close()

    asyncio.run(live())
    assert len(list(tmp_path.glob("traces/*/*/*.dump.json"))) == (state == "kept")


def test_a_job_of_two_users_is_traced_for_each_apart(tmp_path: Path) -> None:
    """A name of a job is nobody's own: what is traced of whose process belongs to that user."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to trace others")

    async def live() -> None:
        rules = Rules(rule('on = "cadence"\nevery = 60'), folder=tmp_path)
        users = (40_001, 40_002)
        rules.run(
            *(
                msgspec.structs.replace(worker(number, rank=number), uid=uid)
                for number, uid in enumerate(users)
            )
        )
        made = await rules.after(60)
        assert sorted(request.uid for request in made) == list(users)
        for request in made:
            assert [target.uid for target in request.targets] == [request.uid]
            assert (
                tmp_path / "traces" / str(request.uid) / "incoming"
            ).stat().st_uid == request.uid
        await rules.ended()
        await rules.close()

    asyncio.run(live())


def test_an_agent_of_a_user_leaves_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: WORKER.uid + 1)

    async def live() -> None:
        rules = Rules(rule('on = "cadence"\nevery = 60'), folder=tmp_path)
        rules.run(WORKER)
        assert await rules.after(60) == []
        await rules.close()

    asyncio.run(live())


class Stuck:
    """A watch that somebody else has made: a job hangs from an instant on."""

    def __init__(self, since_ns: int) -> None:
        self.since_ns = since_ns

    def check(self, now_ns: int) -> list[Occurrence]:
        hangs = now_ns >= self.since_ns
        return (
            [Occurrence({"job": "job"}, f"job@{self.since_ns}", "no step for 10 medians")]
            if hangs
            else []
        )

    def find_problem(self) -> str:
        return ""


def test_a_watch_of_another_part_of_the_agent(tmp_path: Path) -> None:
    async def live() -> None:
        watches = {"hang": lambda _: Stuck(START_NS + 60 * 10**9)}
        rules = Rules(
            rule('on = "hang"\nwhere = { job = "job" }'), folder=tmp_path, watches=watches
        )
        rules.run(WORKER, worker(1, "other"))
        assert rules.triggers.list_problems() == {}
        assert [len(await rules.after(30)) for _ in range(5)] == [0, 1, 0, 0, 0]
        await rules.ended()
        await rules.close()

    asyncio.run(live())


def test_who_is_traced_already_is_not_traced_twice(tmp_path: Path) -> None:
    async def live() -> None:
        rules = Rules(rule(HOT, "a"), rule(HOT, "b"), folder=tmp_path)
        rules.run(WORKER)
        rules.put("gpu_power_watts", {("GPU-0",): 9.0})
        assert len(await rules.after(1)) == 1
        assert (rules.refusals("a"), rules.refusals("b")) == ({}, {"traced": 1})
        await rules.ended()
        await rules.close()

    asyncio.run(live())


def test_cooldown_budget_and_counts_outlive_the_agent(tmp_path: Path) -> None:
    async def live() -> None:
        budget = TriggerBudget(mb_per_day=10.0, mb_per_trace=4.0, share=1.0)

        def begun(now_ns: int) -> Rules:
            rules = Rules(
                rule(HOT + "duration = 0.1\ncooldown = 100"), folder=tmp_path, budget=budget
            )
            rules.now_ns = now_ns
            rules.run(WORKER)
            return rules

        rules = begun(START_NS)
        (request,) = await hot(rules, 10)
        measured(request, 0.1, 7_000_000)
        await rules.after(1)
        await rules.close()

        rules = begun(rules.now_ns)
        await rules.trace_service.start()
        await rules.triggers.start(rules.now_ns)
        assert rules.triggers.counts["rule"].fired == 1
        assert rules.triggers.counts["rule"].kept_bytes == 7_000_000
        assert await hot(rules, 10) == []
        assert await hot(rules, 100) == []
        assert rules.refusals() == {"cooldown": 1, "budget-bytes": 1}
        await rules.close()

        rules = begun(START_NS - 3600 * 10**9)  # the host's clock was set back
        await rules.trace_service.start()
        await rules.triggers.start(rules.now_ns)
        assert await hot(rules, 10) == []
        assert rules.refusals() == {"cooldown": 2, "budget-bytes": 1}
        assert await hot(rules, 86_400) != [], "no clock makes a cooldown last for ever"
        await rules.close()

    asyncio.run(live())


@pytest.mark.parametrize("loss", ["missing", "damaged", "not-written"])
def test_what_the_file_has_lost_the_requests_still_tell(tmp_path: Path, loss: str) -> None:
    async def live() -> None:
        rules = Rules(rule(HOT + "cooldown = 100000"), folder=tmp_path)
        rules.run(WORKER)
        rules.now_ns = time.time_ns()
        assert len(await hot(rules, 10)) == 1
        await rules.close()
        path = tmp_path / "triggers.db"
        if loss == "missing":
            path.unlink()
        if loss == "not-written":  # as of an agent that is killed right after the request
            with sqlite3.connect(path) as database:
                assert database.execute("DELETE FROM charges").rowcount == 1
        if loss == "damaged":
            path.write_bytes(b"no database at all, but as long as a header of one is" * 100)
        rules = Rules(rule(HOT + "cooldown = 100000"), folder=tmp_path)
        rules.run(WORKER)
        rules.now_ns = time.time_ns()
        await rules.trace_service.start()
        await rules.triggers.start(rules.now_ns)
        assert await hot(rules, 10) == []
        assert rules.refusals() == {"cooldown": 1}
        await rules.close()

    asyncio.run(live())
    assert len(list(tmp_path.glob("triggers.db.damaged-*"))) == (loss == "damaged")


def test_a_file_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "triggers.db"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(InputError) as refusal:
        TriggerStore(path)
    assert refusal.value.slug == "other-version"
    assert path.read_bytes() == before


def test_a_disk_that_cannot_be_written_is_said_and_tried_again(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    store = TriggerStore(blocked / "triggers.db")
    assert store.last_error
    assert store.load() == ([], {})
    blocked.unlink()
    store.put([], {})
    assert not store.last_error
    assert (blocked / "triggers.db").stat().st_mode & 0o077 == 0


class HangsOnce:
    """A watch that sees a hang of the job when it is told so."""

    def __init__(self) -> None:
        self.hangs: list[Occurrence] = []

    def check(self, now_ns: int) -> list[Occurrence]:
        seen, self.hangs = self.hangs, []
        return seen

    def find_problem(self) -> str:
        return ""


def test_a_hang_is_recorded_though_a_lesser_rule_waits_for_steps(tmp_path: Path) -> None:
    async def live() -> None:
        watch = HangsOnce()
        rules = Rules(
            rule(HOT + "steps = 3\ncooldown = 1", "hot"),
            rule('on = "hang"\nduration = 1.0\ncooldown = 1', "hung"),
            folder=tmp_path,
            watches={"hang": lambda _: watch},
        )
        rules.run(WORKER)
        rules.put("gpu_power_watts", {("GPU-0",): 9.0})
        (waits,) = await rules.after(1)
        assert waits.trigger is not None
        assert (waits.trigger.rule, waits.ended) == ("hot", False)
        watch.hangs = [Occurrence({"job": "job"}, "h1", "it hangs")]
        (recorded,) = await rules.after(1)
        assert recorded.trigger is not None
        assert (recorded.trigger.rule, waits.ended) == ("hung", True)
        rules.put("gpu_power_watts", {("GPU-0",): 1.0})
        await rules.after(10)
        rules.put("gpu_power_watts", {("GPU-0",): 9.0})
        assert await rules.after(10) == []  # it does not displace what is worth more
        assert not recorded.ended
        assert set(rules.triggers.counts["hot"].refusals) == {"traced"}
        await rules.close()

    asyncio.run(live())
