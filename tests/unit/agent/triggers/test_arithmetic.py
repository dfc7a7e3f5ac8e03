"""What rules count, against plain loops over everything that was delivered: rates, durations, budgets, medians."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import pytest

from support.triggers import START_NS, rule, worker
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.config import CadenceRule, MetricRule, StepRegressionRule, TriggerBudget
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.steps import StepCounter, StepsTaken
from traceloom.agent.triggers.store import (
    DAY_NS,
    Charge,
    ProcessIndex,
    TriggerLedger,
    filter_by_owner,
    select_targets,
)
from traceloom.agent.triggers.watches import (
    CadenceWatch,
    MetricWatch,
    SeriesValues,
    StepRegressionWatch,
    match_rule_series,
    match_series,
)

S = 10**9
DEVICES = ("GPU-0", "GPU-1", "GPU-2")


def metric_rule(condition: str) -> MetricRule:
    made = rule(f'on = "metric"\nmetric = "gpu_power_watts"\n{condition}')
    assert isinstance(made, MetricRule)
    return made


class Watched:
    """A rule on a metric, a snapshot that the test writes, and all that was ever delivered."""

    def __init__(self, condition: str, *, there: bool = True) -> None:
        self.rule = metric_rule(condition)
        self.host_snapshot = Snapshot()
        self.values = SeriesValues(self.host_snapshot, [match_rule_series(self.rule)])
        self.watch = MetricWatch(self.rule, self.values, lambda _: there)
        self.history: list[tuple[int, dict[str, float]]] = []

    def deliver(self, at_ns: int, values: dict[str, float]) -> set[str]:
        """Devices for which the rule holds after this delivery."""
        self.host_snapshot.put(
            "gpu",
            [Reading("gpu_power_watts", (device,), value) for device, value in values.items()],
            at_ns,
        )
        self.history.append((at_ns, values))
        self.values.refresh()
        return {firing.labels["device"] for firing in self.watch.check(at_ns)}

    def held(self, device: str, now_ns: int) -> bool:
        """Whether it holds, read from the whole history."""
        limit = self.rule.above if self.rule.above is not None else self.rule.below
        if self.rule.changed is not None and self.rule.within is not None:
            # Of the stretch in which it was never away.
            recent: list[float] = []
            for at_ns, values in reversed(self.history):
                if device not in values:
                    break
                if at_ns < now_ns - self.rule.within * S:
                    break
                recent.append(values[device])
            return bool(recent) and max(recent) - min(recent) >= self.rule.changed
        if self.rule.absent is not None:
            seen = [at_ns for at_ns, values in self.history if device in values]
            return bool(seen) and now_ns - seen[-1] >= self.rule.absent * S
        assert limit is not None
        since_ns: int | None = None
        for at_ns, values in self.history:
            value = values.get(device, math.nan)
            is_so = value > limit if self.rule.above is not None else value < limit
            since_ns = (since_ns if since_ns is not None else at_ns) if is_so else None
        return since_ns is not None and now_ns - since_ns >= self.rule.for_seconds * S


@pytest.mark.parametrize(
    "condition",
    [
        "above = 5.0",
        "below = 5.0",
        "above = 6.0\nfor = 35",
        "below = 4.0\nfor = 20",
        "changed = 6.0\nwithin = 45",
        "changed = 8.5\nwithin = 100",
        "absent = 30",
        "absent = 55",
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_rule_holds_when_the_whole_history_says_so(condition: str, seed: int) -> None:
    chance = random.Random(f"{condition} {seed}")
    watched, now_ns, ever = Watched(condition), START_NS, set[bool]()
    present = 0.4 if "absent" in condition else 0.85
    for _ in range(300):
        now_ns += chance.choice((5, 10, 10, 15)) * S
        values = {
            device: float(chance.randrange(11)) for device in DEVICES if chance.random() < present
        }
        held = watched.deliver(now_ns, values)
        assert held == {device for device in DEVICES if watched.held(device, now_ns)}
        ever.add(bool(held))
    assert ever == {True, False}


def test_what_is_absent_with_those_whom_it_was_of_is_not_asked_about() -> None:
    watched = Watched("absent = 30", there=False)
    watched.deliver(START_NS, {"GPU-0": 1.0})
    assert watched.deliver(START_NS + 100 * S, {}) == set()
    assert watched.deliver(START_NS + 200 * S, {"GPU-0": 1.0}) == set()


def test_no_number_is_no_value() -> None:
    watched = Watched("below = 5.0\nfor = 10")
    assert watched.deliver(START_NS, {"GPU-0": 1.0}) == set()
    assert watched.deliver(START_NS + 5 * S, {"GPU-0": math.nan}) == set()
    assert watched.deliver(START_NS + 11 * S, {"GPU-0": 1.0}) == set()  # it began anew
    assert watched.deliver(START_NS + 21 * S, {"GPU-0": -math.inf}) == {"GPU-0"}


@pytest.mark.parametrize("seed", range(4))
def test_counters_are_rates_between_two_deliveries_of_their_collector(seed: int) -> None:
    chance = random.Random(seed)
    metric, names = (
        "host_network_bytes_total",
        [(f"eth{card}", way) for card in range(3) for way in ("receive", "transmit")],
    )
    host_snapshot = Snapshot()
    asked = [
        match_series(metric, {}),
        match_series(metric, {"interface": "eth1"}),
        match_series(metric, {"direction": "transmit"}),
        match_series(metric, {"direction": "receive", "interface": "eth2"}),
    ]
    values = SeriesValues(host_snapshot, asked)
    before: dict[str, tuple[int, dict[tuple[str, str], float]]] = {}
    rates: dict[str, dict[tuple[str, str], float]] = {}
    now_ns = START_NS
    for _ in range(120):
        now_ns += chance.randrange(1, 20) * S
        collector = chance.choice(("network", "other"))
        own = names[:4] if collector == "network" else names[4:]
        if chance.random() < 0.1:
            host_snapshot.stale(collector)
            before.pop(collector, None)
            rates.pop(collector, None)
        else:
            totals = {name: float(chance.randrange(10**6)) for name in own if chance.random() < 0.9}
            host_snapshot.put(
                collector, [Reading(metric, name, total) for name, total in totals.items()], now_ns
            )
            at_ns, old = before.get(collector, (now_ns, {}))
            rates[collector] = {}
            for name, total in totals.items():
                if name in old and now_ns > at_ns:
                    more = total - old[name] if total >= old[name] else total
                    rates[collector][name] = more / ((now_ns - at_ns) / 1e9)
            before[collector] = (now_ns, totals)
        values.refresh()
        everything = {name: rate for of in rates.values() for name, rate in of.items()}
        for wanted, (card, way) in zip(
            asked, (("", ""), ("eth1", ""), ("", "transmit"), ("eth2", "receive")), strict=True
        ):
            expected = {
                name: rate
                for name, rate in everything.items()
                if name[0] == (card or name[0]) and name[1] == (way or name[1])
            }
            assert dict(values.of(wanted)) == pytest.approx(expected)
        assert values.delivered() == (
            {metric} if any(totals for _, totals in before.values()) else set()
        )


# What may be spent.


def charges(chance: random.Random, number: int, now_ns: int) -> list[Charge]:
    return [
        Charge(
            request=f"r{row}",
            process=worker(chance.randrange(4)).key,
            rule=chance.choice(("a", "b")),
            uid=chance.randrange(2),
            target=chance.choice(("job", "other")),
            at_ns=now_ns - chance.randrange(3 * DAY_NS),
            seconds=chance.uniform(0, 200),
            bytes=chance.randrange(10**8),
            settled=chance.random() < 0.8,
        )
        for row in range(number)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_budgets_are_sums_over_the_charges_of_a_day(seed: int) -> None:
    chance = random.Random(seed)
    now_ns = START_NS
    budget = TriggerBudget(share=chance.uniform(0.005, 0.02), mb_per_day=1000.0, mb_per_trace=64.0)
    ledger, made = TriggerLedger(budget), charges(chance, 40, now_ns)
    for start in range(0, 40, 7):
        ledger.add(made[start : start + 7], now_ns)
    assert [charge.at_ns for charge in ledger.charges] == sorted(charge.at_ns for charge in made)
    counting = [charge for charge in made if charge.at_ns > now_ns - DAY_NS or not charge.settled]
    spent_bytes = sum(charge.bytes for charge in counting)
    assert ledger.bytes_left(now_ns) == 10**9 - spent_bytes
    results = set()
    for number in range(4):
        process = worker(number)
        spent = sum(charge.seconds for charge in counting if charge.process == process.key)
        allowed = budget.share * 86_400  # they are a week old
        for more in (0.0, max(allowed - spent, 0.0) * 0.99, max(allowed - spent, 0.0) + 1.0):
            refusal = ledger.refusal([process], {process.key: more}, 1, now_ns)
            reason = "" if refusal is None else refusal.reason
            expected = (
                "budget-share"
                if spent + more > allowed
                else "budget-bytes"
                if 10**9 - spent_bytes < 64_000_000
                else ""
            )
            assert reason == expected
            results.add(reason)
    assert "budget-share" in results
    for name in ("a", "b"):
        for uid in (0, 1):
            for target in ("job", "other", "third"):
                fired = [c.at_ns for c in made if (c.rule, c.uid, c.target) == (name, uid, target)]
                for cooldown_s in (60.0, 86_400.0):
                    left_s = max(0.0, cooldown_s - (now_ns - max(fired)) / 1e9) if fired else 0.0
                    assert ledger.cooling((name, uid, target), cooldown_s, now_ns) == pytest.approx(
                        left_s
                    )


@pytest.mark.parametrize("age_s", [1, 600, 3600, 7200, 86_400, 10 * 86_400])
def test_a_young_process_may_be_traced_as_long_as_one_of_an_hour(age_s: int) -> None:
    ledger = TriggerLedger(TriggerBudget(share=0.01))
    process = Process(
        key="7@1",
        pid=7,
        start_ticks=1,
        started_ns=START_NS - age_s * S,
        parent_pid=1,
        uid=0,
        command="",
    )
    allowed = 0.01 * min(max(age_s, 3600), 86_400)
    assert ledger.refusal([process], {"7@1": allowed - 0.001}, 1, START_NS) is None
    refusal = ledger.refusal([process], {"7@1": allowed + 0.001}, 1, START_NS)
    assert refusal is not None
    assert refusal.reason == "budget-share"


def test_charges_that_are_forgotten_are_old_and_settled() -> None:
    chance = random.Random(1)
    ledger, made = TriggerLedger(TriggerBudget()), charges(chance, 60, START_NS)
    ledger.add(made, START_NS)
    left_before = ledger.bytes_left(START_NS)
    old_ns = START_NS - 2 * DAY_NS
    gone = ledger.forget(old_ns)
    assert {charge.request for charge in gone} == {
        c.request for c in made if c.settled and c.at_ns < old_ns
    }
    assert len(gone) + len(ledger.charges) == 60
    assert gone
    assert ledger.bytes_left(START_NS) == left_before  # they counted no more
    assert ledger.forget(old_ns) == []


def test_a_clock_that_was_set_back_keeps_no_rule_waiting_longer_than_its_cooldown() -> None:
    ledger = TriggerLedger(TriggerBudget())
    ledger.add(
        [
            Charge(
                request="r",
                process="1@1",
                rule="a",
                uid=0,
                target="job",
                at_ns=START_NS + 10 * DAY_NS,
                seconds=1.0,
                bytes=1,
            )
        ],
        START_NS,
    )
    assert ledger.cooling(("a", 0, "job"), 600.0, START_NS) == 600.0
    assert ledger.cooling(("a", 0, "job"), 600.0, START_NS + 600 * S) == 0.0


# Whom a rule is about.


def crowd(chance: random.Random) -> Snapshot:
    host_snapshot = Snapshot()
    host_snapshot.devices = {
        **{
            uuid: Device(uuid=uuid, index=str(row), vendor="nvidia", model="H100")
            for row, uuid in enumerate(DEVICES)
        },
        "MIG-1": Device(uuid="MIG-1", index="0:1", vendor="nvidia", model="H100", parent="GPU-0"),
    }
    processes = {}
    for number in range(30):
        devices = tuple(chance.sample([*DEVICES, "MIG-1"], chance.randrange(3)))
        job = chance.choice(("", "j1", "j2"))
        rank = chance.choice((None, 0, 1, 2)) if job else None
        made = Process(
            key=f"{number}@1",
            pid=number + 10,
            start_ticks=1,
            started_ns=1,
            parent_pid=1,
            uid=chance.randrange(2),
            command="",
            cgroup=chance.choice(("", "/a", "/b")),
            devices=devices[:1],
            owner=Owner(job=job, rank=rank, devices=devices[1:]),
        )
        processes[made.key] = made
    host_snapshot.processes = processes
    return host_snapshot


@pytest.mark.parametrize("seed", range(4))
def test_the_processes_that_labels_name(seed: int) -> None:
    host_snapshot = crowd(random.Random(seed))
    everybody, index = list(host_snapshot.processes.values()), ProcessIndex(host_snapshot)

    def keys(some: list[Process]) -> set[str]:
        assert len({each.key for each in some}) == len(some)  # nobody twice
        return {each.key for each in some}

    for device in (*DEVICES, "MIG-1", "GPU-9"):
        of = {
            device,
            *(uuid for uuid, each in host_snapshot.devices.items() if each.parent == device),
        }
        expected = {p.key for p in everybody if of & {*p.devices, *p.owner.devices}}
        assert keys(index.find_by_labels({"device": device})) == expected
    for group in ("/a", "/b", "/c"):
        assert keys(index.find_by_labels({"cgroup": group})) == {
            p.key for p in everybody if p.cgroup == group
        }
    for job in ("j1", "j2", "j3"):
        members = [p for p in everybody if p.owner.job == job]
        assert keys(index.find_by_labels({"job": job})) == {p.key for p in members}
        assert keys(index.list_job_processes(1, job)) == {p.key for p in members if p.uid == 1}
        for rank in ("0", "1", "2", "7"):
            of_rank = [p for p in members if str(p.owner.rank) == rank] or [
                p for p in members if p.owner.rank is None
            ]
            assert keys(index.find_by_labels({"job": job, "rank": rank})) == {
                p.key for p in of_rank
            }
    assert keys(index.find_by_labels({"process": "3@1", "device": "GPU-0"})) == {"3@1"}
    assert index.find_by_labels({"process": "99@1"}) == []
    assert keys(index.find_by_labels({})) == set(host_snapshot.processes)
    assert keys(filter_by_owner(everybody, {"job": "j1", "rank": "1", "device": "GPU-0"})) == {
        p.key for p in everybody if p.owner.job == "j1" and p.owner.rank == 1
    }
    assert keys(filter_by_owner(everybody, {"rank": ""})) == {
        p.key for p in everybody if p.owner.rank is None
    }


def test_the_index_follows_the_board() -> None:
    host_snapshot = crowd(random.Random(0))
    index = ProcessIndex(host_snapshot)
    assert index.find_by_labels({"job": "j1"})
    host_snapshot.processes = {}
    assert index.find_by_labels({"job": "j1"}) == index.list_job_processes(0, "j1") == []


@pytest.mark.parametrize("seed", range(6))
def test_the_slowest_and_the_median_rank_by_sorted_means(seed: int) -> None:
    chance = random.Random(seed)
    host_snapshot, steps = Snapshot(), StepCounter()
    ranks = [worker(number, rank=number) for number in range(chance.randrange(1, 9))]
    launcher = worker(20)  # polls too, and has no rank
    host_snapshot.processes = {each.key: each for each in (*ranks, launcher)}
    means = {}
    for each in ranks:
        durations = [chance.uniform(0.1, 0.2) for _ in range(chance.randrange(1, 5))]
        steps.report(each.key, "job", each.owner.rank, durations)
        means[each.key] = sum(durations) / len(durations)
    made = rule('on = "cadence"\nevery = 3600\ntarget = "slowest-and-median"')
    (target,) = select_targets(
        made,
        [launcher, *ranks[:1]],
        ProcessIndex(host_snapshot),
        set(host_snapshot.processes),
        steps,
    )
    ordered = sorted(means, key=lambda key: means[key])
    assert {each.key for each in target.processes} == {
        ordered[-1],
        ordered[(len(ordered) - 1) // 2],
    }
    assert target.refusal is None
    (nobody,) = select_targets(made, ranks[:1], ProcessIndex(host_snapshot), set(), steps)
    assert nobody.refusal is not None
    assert nobody.refusal.reason == "not-registered"
    (unknown,) = select_targets(
        made, ranks[:1], ProcessIndex(host_snapshot), set(host_snapshot.processes), StepCounter()
    )
    assert unknown.refusal is not None
    assert (unknown.refusal.reason, unknown.processes) == ("no-steps", ())


# Rules on steps and on the clock.


@pytest.mark.parametrize("every_s", [60, 3600, 5400])
def test_a_cadence_fires_once_in_each_stretch(every_s: int) -> None:
    made = rule(f'on = "cadence"\nevery = {every_s}')
    assert isinstance(made, CadenceRule)
    watch = CadenceWatch(made, "node7", START_NS)
    first: dict[str, int] = {}
    for second in range(0, 12 * every_s, every_s // 12):
        for firing in watch.check(START_NS + second * S):
            first.setdefault(firing.episode, second)
    times = sorted(first.values())
    assert len(times) in {11, 12}
    assert 0 < times[0] <= every_s
    assert all(abs(after - before - every_s) <= every_s // 12 for before, after in pairwise(times))


def looped(durations: list[float], last: int, by: float) -> Iterator[bool]:
    """Whether a process is slower than it was, after each step: the rule of the page, in plain lists."""
    before: list[float] = []
    window: list[float] = []
    is_slow = False
    for duration in durations:
        window.append(duration)
        if len(window) == last:
            kept = before[-4 * last :]
            if len(kept) < 2 * last:
                before += window
            else:
                usual = median(kept)
                above = sum(each > usual for each in window)
                is_slow = (
                    median(window) > usual * (1 + by)
                    and (above - last / 2) / (math.sqrt(last) / 2) >= 4.9
                )
                if not is_slow:
                    before += window
            window = []
        yield is_slow


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_slower_when_their_median_is_and_chance_is_no_reason(seed: int) -> None:
    chance = random.Random(seed)
    made = rule('on = "step-regression"\nby = 0.2\nlast = 40')
    assert isinstance(made, StepRegressionRule)
    steps = StepCounter()
    traced, living = set[str](), {"7@1"}
    watch = StepRegressionWatch(made, steps, lambda key: key in traced, lambda key: key in living)
    pace = [1.0] * 300 + [chance.choice((1.1, 1.35))] * 200 + [1.0] * 150 + [1.5] * 200
    durations = [level * chance.uniform(0.9, 1.1) for level in pace]
    seen = set()
    for duration, expected in zip(durations, looped(durations, 40, 0.2), strict=True):
        steps.report("7@1", "job", 0, [duration])
        firings = list(watch.check(START_NS))
        assert [firing.labels for firing in firings] == ([{"process": "7@1"}] if expected else [])
        seen.add(expected)
    assert seen == {True, False}
    traced.add("7@1")
    for _ in range(200):  # under a trace nothing is learnt
        steps.report("7@1", "job", 0, [99.0])
    assert bool(list(watch.check(START_NS))) == expected
    living.clear()
    assert list(watch.check(START_NS)) == []


def test_means_of_many_steps_are_fewer_witnesses() -> None:
    """What probes see are means: one look counts for a tenth of the window at most."""
    made = rule('on = "step-regression"\nby = 0.2\nlast = 40')
    assert isinstance(made, StepRegressionRule)
    steps = StepCounter()
    watch = StepRegressionWatch(made, steps, lambda _: False, lambda _: True)
    for seconds, looks in ((1.0, 30), (2.0, 9)):  # 120 witnesses, then 36: not a window yet
        for _ in range(looks):
            steps.count(
                StepsTaken(
                    "7@1", (0,) * 10 + (100,) + (0,) * (len(_bounds()) - 10), 100 * seconds, None
                ),
                "job",
                0,
            )
    assert list(watch.check(START_NS)) == []
    steps.count(
        StepsTaken("7@1", (0,) * 10 + (100,) + (0,) * (len(_bounds()) - 10), 200.0, None), "job", 0
    )
    assert len(list(watch.check(START_NS))) == 1


def _bounds() -> tuple[float, ...]:
    from traceloom.agent.metrics import METRICS

    return METRICS["step_seconds"].bounds
