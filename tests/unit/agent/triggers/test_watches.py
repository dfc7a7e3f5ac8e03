"""What rules watch for, on a clock that the test moves: metrics, kills, errors of devices, steps, the clock itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from support.triggers import START_NS, Rules, rule, worker
from traceloom.agent.accelerators.backend import Device, DeviceEvent
from traceloom.agent.collectors.host import OomKill
from traceloom.agent.config import AnyRule, CadenceRule
from traceloom.agent.steps import StepCounter, StepsTaken
from traceloom.agent.triggers.watches import CadenceWatch


def live(rules: Callable[[], Rules], test: Callable[[Rules], Awaitable[None]]) -> None:
    async def run() -> None:
        made = rules()
        try:
            await test(made)
        finally:
            await made.close()

    asyncio.run(run())


def of(*texts: str) -> Callable[[], Rules]:
    """Rules of a job with two ranks, each on a device of its own."""

    def make() -> Rules:
        rules = Rules(*(rule(text) for text in texts))
        rules.run(worker(0, rank=0, devices=("GPU-0",)), worker(1, rank=1, devices=("GPU-1",)))
        return rules

    return make


async def fires(
    rules: Rules,
    values: list[float | None],
    *,
    every_s: float = 10.0,
    metric: str,
    labels: tuple[str, ...],
) -> list[int]:
    """Deliver values one after the other; the numbers of those at which a request was made."""
    at = []
    for number, value in enumerate(values):
        rules.put(metric, {labels: value} if value is not None else {})
        if await rules.after(every_s):
            at.append(number)
    return at


@pytest.mark.parametrize(
    ("condition", "values", "at"),
    [
        ("above = 5.0", [4.0, 5.0, 6.0, 7.0], [2]),
        ("above = 5.0\nfor = 20", [6.0, 4.0, 6.0, 6.0, 6.0, 6.0], [4]),
        ("below = 5.0\nfor = 10", [4.0, None, 4.0, 4.0], [3]),  # what is not known is not below
        ("changed = 3.0\nwithin = 20", [1.0, 2.0, 3.0, 3.9, 5.0, 7.0], [5]),
        ("changed = 3.0\nwithin = 30", [7.0, 7.0, 5.0, 4.0], [3]),
        ("absent = 25", [1.0, None, None, None, None], [3]),
        ("absent = 25", [1.0, None, None, 1.0, None, None], []),
        ("above = nan", [1.0, 2.0], []),
    ],
)
def test_a_gauge(condition: str, values: list[float | None], at: list[int]) -> None:
    async def test(rules: Rules) -> None:
        assert await fires(rules, values, metric="gpu_power_watts", labels=("GPU-0",)) == at

    live(of(f'on = "metric"\nmetric = "gpu_power_watts"\n{condition}'), test)


def test_the_sentence_has_units() -> None:
    async def test(rules: Rules) -> None:
        rules.put("gpu_memory_used_bytes", {("GPU-1",): 60e9})
        await rules.after(1)
        rules.put("gpu_memory_used_bytes", {("GPU-1",): 70e9})
        (request,) = await rules.after(10)
        assert request.trigger is not None
        assert request.trigger.what == (
            "gpu_memory_used_bytes of device GPU-1 changed by 10.0 GB within 60 s, to 70.0 GB"
        )

    live(of('on = "metric"\nmetric = "gpu_memory_used_bytes"\nchanged = 5e9\nwithin = 60'), test)


def test_a_counter_counts_as_its_rate() -> None:
    async def test(rules: Rules) -> None:
        # 1, 2, 5 seconds of each ten; then the counter begins anew and has 1.
        totals: list[float | None] = [100.0, 101.0, 103.0, 108.0, 1.0]
        assert await fires(
            rules, totals, metric="dataloader_wait_seconds_total", labels=("job", "1")
        ) == [3]
        (request,) = rules.trace_service.requests.values()
        assert request.trigger is not None
        assert (
            request.trigger.what
            == "dataloader_wait_seconds_total of job job, rank 1 is 0.5 seconds/s, above 0.3 seconds/s"
        )

    live(of('on = "metric"\nmetric = "dataloader_wait_seconds_total"\nabove = 0.3'), test)


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ('target = "process"', [[0]]),
        ('target = "job"', [[0, 1]]),
        ('target = "process"\nwhere = { device = "GPU-1" }', []),
        ('target = "process"\nwhere = { rank = "0" }', [[0]]),
        ('target = "process"\nwhere = { rank = "1" }', []),
        ('target = "job"\nwhere = { job = "other" }', []),
    ],
)
def test_whom_it_traces(more: str, ranks: list[list[int]]) -> None:
    async def test(rules: Rules) -> None:
        rules.put("gpu_power_watts", {("GPU-0",): 9.0, ("GPU-1",): 1.0})
        made = await rules.after(1)
        assert [sorted(target.rank or 0 for target in request.targets) for request in made] == ranks

    live(of(f'on = "metric"\nmetric = "gpu_power_watts"\nabove = 5.0\n{more}'), test)


def test_a_rank_that_only_its_steps_tell() -> None:
    async def test(rules: Rules) -> None:
        rules.run(worker(0), worker(1, "other"))
        for total in (0.0, 9.0):
            rules.put("dataloader_wait_seconds_total", {("job", "3"): total})
            made = await rules.after(10)
        assert [target.pid for request in made for target in request.targets] == [worker(0).pid]

    text = 'on = "metric"\nmetric = "dataloader_wait_seconds_total"\nabove = 0.3\nwhere = { rank = "3", job = "job" }'
    live(of(text), test)


@pytest.mark.parametrize("target", ["process", "job"])
def test_a_launcher_that_polls_too_is_not_traced_beside_its_ranks(target: str) -> None:
    async def test(rules: Rules) -> None:
        rules.run(worker(0), worker(1, rank=0), worker(2, rank=1))
        made = await rules.after(3600)
        assert sorted(each.pid for request in made for each in request.targets) == [
            worker(2).pid,
            worker(1).pid,
        ]

    live(of(f'on = "cadence"\nevery = 3600\ntarget = "{target}"'), test)


def test_a_partition_of_a_device_with_an_error() -> None:
    async def test(rules: Rules) -> None:
        rules.host_snapshot.devices = {
            uuid: Device(uuid=uuid, index="0", vendor="nvidia", model="", parent=parent)
            for uuid, parent in (("GPU-9", ""), ("GPU-1", "GPU-9"))
        }
        rules.host_snapshot.events = [DeviceEvent(at_ns=1, device="GPU-9", kind="xid", code=94)]
        (request,) = await rules.after(1)
        assert [target.rank for target in request.targets] == [1]

    live(of('on = "xid"\ntarget = "process"'), test)


def test_the_absent_are_forgotten_with_those_whom_they_were_of() -> None:
    async def test(rules: Rules) -> None:
        rules.put("gpu_power_watts", {("GPU-0",): 9.0})
        await rules.after(1)
        rules.put("gpu_power_watts", {})
        rules.run()
        assert await rules.after(100) == []
        rules.run(worker(5, devices=("GPU-0",)))  # the next job never had it
        assert await rules.after(100) == []
        assert rules.refusals() == {}

    live(of('on = "metric"\nmetric = "gpu_power_watts"\nabsent = 30'), test)


def test_while_it_lasts_it_is_traced_again_after_the_cooldown() -> None:
    async def test(rules: Rules) -> None:
        at = []
        for second in range(250):
            rules.put("gpu_power_watts", {("GPU-0",): 9.0})
            if await rules.after(1):
                at.append(second)
            await rules.ended()
        assert at == [0, 100, 200]
        assert rules.refusals() == {}

    live(of('on = "metric"\nmetric = "gpu_power_watts"\nabove = 5.0\ncooldown = 100'), test)


def test_a_kill_for_want_of_memory_is_of_its_job_and_happens_once() -> None:
    async def test(rules: Rules) -> None:
        assert rules.triggers.list_problems() == {
            "rule": "no collector counts processes that are killed for want of memory"
        }
        rules.put("oom_kills_total", {("/job", "job"): 1.0})
        assert rules.triggers.list_problems() == {}
        assert await rules.after(1) == []
        kill = OomKill(at_ns=START_NS, cgroup="/job", job="job", uid=0, kills=1)
        rules.host_snapshot.oom_kills = [kill]
        (request,) = await rules.after(1)
        assert request.trigger is not None
        assert request.trigger.what == "1 process killed for want of memory in /job"
        assert await rules.after(10_000) == []
        rules.host_snapshot.oom_kills = [
            kill,
            OomKill(at_ns=START_NS + 1, cgroup="/gone", job="gone", uid=0, kills=1),
        ]
        assert await rules.after(1) == []
        assert rules.refusals() == {"no-such-process": 1}

    live(of('on = "oom-kill"'), test)


def test_errors_of_devices() -> None:
    async def test(rules: Rules) -> None:
        assert "NVIDIA" in rules.triggers.list_problems()["rule"]
        rules.host_snapshot.devices = {
            "GPU-1": Device(uuid="GPU-1", index="1", vendor="nvidia", model="")
        }
        assert rules.triggers.list_problems() == {}
        events = [
            DeviceEvent(at_ns=1, device="GPU-1", kind="xid", code=13),
            DeviceEvent(at_ns=2, device="GPU-1", kind="ecc", code=79),
        ]
        rules.host_snapshot.events = events
        assert await rules.after(1) == []
        rules.host_snapshot.events = [
            *events,
            DeviceEvent(at_ns=3, device="GPU-1", kind="xid", code=79, text="fell off"),
        ]
        (request,) = await rules.after(1)
        assert [target.rank for target in request.targets] == [1]
        assert request.trigger is not None
        assert request.trigger.what == "Xid 79 of device GPU-1: fell off"

    live(of('on = "xid"\ncodes = [79]\ntarget = "process"'), test)


def _slower(by: float, seed: int, *, probed: bool = False) -> bool:
    """Whether a rule of 20 % fires for steps of 100 ms with noise that become slower by a share."""
    chance, steps = random.Random(seed), StepCounter()
    process = worker(0, rank=0)

    async def run() -> bool:
        rules = Rules(rule('on = "step-regression"\nby = 0.2\nlast = 100'), steps=steps)
        rules.run(process)
        made: list[object] = []
        for now in (1.0, 1.0 + by):
            for _ in range(10 if not probed else 60):
                # Steps are skewed: most are near the median, some take several times as long.
                seconds = [now * (0.09 + chance.expovariate(50.0)) for _ in range(100)]
                if probed:
                    buckets = (100, *[0] * 15)
                    steps.count(StepsTaken(process.key, buckets, sum(seconds), None), "job", 0)
                else:
                    steps.report(process.key, "job", 0, seconds)
                made += await rules.after(10)
        await rules.close()
        return bool(made)

    return asyncio.run(run())


@pytest.mark.parametrize("probed", [False, True])
def test_steps_that_became_slower_and_noise_that_did_not(probed: bool) -> None:
    assert all(_slower(0.35, seed, probed=probed) for seed in range(5))
    assert not any(_slower(0.0, seed, probed=probed) for seed in range(20))


def test_one_slow_stretch_as_probes_see_it_is_no_regression() -> None:
    """A checkpoint in one look makes the mean of that look large, and of no other."""
    steps, process = StepCounter(), worker(0, rank=0)

    async def test(rules: Rules) -> None:
        rules.run(process)
        for look in range(200):
            seconds = 500.0 if look % 25 == 24 else 100.0
            steps.count(StepsTaken(process.key, (1000, *[0] * 15), seconds, None), "job", 0)
            assert await rules.after(10) == []

    live(lambda: Rules(rule('on = "step-regression"'), steps=steps), test)


def test_steps_under_a_trace_do_not_count() -> None:
    steps, process = StepCounter(), worker(0, rank=0, devices=("GPU-0",))

    async def test(rules: Rules) -> None:
        rules.run(process)
        steps.report(process.key, "job", 0, [0.1] * 1000)
        rules.put("gpu_power_watts", {("GPU-0",): 9.0})
        assert rules.trace_service.is_traced(process.key) is False
        (request,) = await rules.after(1)
        assert rules.trace_service.is_traced(process.key)
        steps.report(process.key, "job", 0, [0.9] * 1000)
        await rules.ended()
        assert request.ended
        assert await rules.after(1) == []
        steps.report(process.key, "job", 0, [0.9] * 100)
        (after,) = await rules.after(2000)
        assert after.trigger is not None
        assert after.trigger.rule == "slower"

    def make() -> Rules:
        always = rule(
            'on = "metric"\nmetric = "gpu_power_watts"\nabove = 5.0\ncooldown = 600000', "always"
        )
        return Rules(always, rule('on = "step-regression"', "slower"), steps=steps)

    live(make, test)


def test_a_cadence_differs_from_host_to_host_and_is_the_same_after_a_restart() -> None:
    every = rule('on = "cadence"\nevery = 3600', "often")
    assert isinstance(every, CadenceRule)
    hour = 3600 * 10**9
    phases = {CadenceWatch(every, f"node{number}", START_NS).phase_ns for number in range(200)}
    assert len(phases) == 200
    counts = [sum(phase * 4 // hour == quarter for phase in phases) for quarter in range(4)]
    assert min(counts) > 25, "spread over the hour"

    def instants(restarts: set[int]) -> list[int]:
        watch, last, at = CadenceWatch(every, "node1", START_NS), "", []
        for minute in range(600):
            now = START_NS + minute * 60 * 10**9
            if minute in restarts:
                watch, last = CadenceWatch(every, "node1", now), ""
            for firing in watch.check(now):
                if firing.episode != last:
                    at.append(minute)
                    last = firing.episode
        return at

    regular = instants(set())
    assert [later - earlier for earlier, later in pairwise(regular)] == [60] * 9
    assert instants({regular[3] + 1, regular[3] + 5}) == regular
    assert instants({regular[3] - 1}) == regular


def test_a_cadence_traces_every_job() -> None:
    async def test(rules: Rules) -> None:
        rules.run(worker(0, "a", 0), worker(1, "a", 1), worker(2, "b", 0), worker(3, ""))
        made = await rules.after(3600)
        assert sorted(request.trigger.target for request in made if request.trigger) == sorted(
            ["a", "b", worker(3, "").key]
        )
        await rules.ended()
        assert await rules.after(10) == []
        assert len(await rules.after(3600)) == 3

    live(of('on = "cadence"\nevery = 3600'), test)


def _waits(waits: dict[int, float | None]) -> StepCounter:
    steps = StepCounter()
    for number, wait in waits.items():
        steps.report(worker(number).key, "job", number, [0.1 + number / 100] * 10, wait)
    return steps


@pytest.mark.parametrize(
    ("by", "waits", "ranks"),
    [
        ("steps", {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}, [2, 4]),
        ("waits", {0: 0.3, 1: 5.0, 2: 0.1, 3: 0.2, 4: 0.4}, [0, 1]),
        ("waits", {0: 0.3, 1: None, 2: 0.1, 3: None, 4: None}, [0, 2]),
        ("steps", {3: 0.0}, [3]),
        ("waits", {0: None, 1: None}, []),
    ],
)
def test_the_slowest_rank_and_a_median_one(
    by: str, waits: dict[int, float | None], ranks: list[int]
) -> None:
    steps = _waits(waits)

    async def test(rules: Rules) -> None:
        rules.run(*(worker(number, rank=number) for number in waits))
        made = await rules.after(3600)
        assert [sorted(target.rank or 0 for target in request.targets) for request in made] == (
            [ranks] if ranks else []
        )
        assert rules.refusals() == ({} if ranks else {"no-steps": 1})

    text = f'on = "cadence"\nevery = 3600\ntarget = "slowest-and-median"\nranks_by = "{by}"'
    live(lambda: Rules(rule(text), steps=steps), test)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'on = "metric"\nmetric = "gpu_power_watts"\nabove = 5.0',
            "no collector delivers `gpu_power_watts` here now, but `gpu_power_limit_watts`",
        ),
        (
            'on = "metric"\nmetric = "gpu_power_limit_watts"\nabove = 5.0\nwhere = { device = "GPU-9" }',
            "no series of `gpu_power_limit_watts` has the labels",
        ),
        ('on = "step-regression"', "no steps of any process are known"),
        ('on = "hang"', "this agent does not watch for `hang`"),
        ('on = "cadence"\nevery = 60\nsteps = 5000', "a trace has at most 60 s or 1000 steps"),
    ],
)
def test_a_rule_that_can_never_fire_is_known(text: str, words: str) -> None:
    async def test(rules: Rules) -> None:
        rules.put("gpu_power_limit_watts", {("GPU-0",): 9.0})
        await rules.after(1)
        assert words in rules.triggers.list_problems()["rule"]

    live(of(text), test)


def test_a_defect_of_one_rule_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def check(self, now_ns: int) -> list[object]:
            raise RuntimeError("planted")

        def find_problem(self) -> str:
            return ""

    async def test(rules: Rules) -> None:
        rules.triggers.watches["bad"] = Broken()  # type: ignore[assignment]
        rules.run(worker(0))
        assert len(await rules.after(3600)) == 1
        assert rules.triggers.list_problems()["bad"] == "RuntimeError: planted"
        await rules.after(1)
        assert caplog.text.count("trigger bad has a defect") == 1

    def rules() -> Rules:
        every: list[AnyRule] = [
            rule('on = "hang"', "bad"),
            rule('on = "cadence"\nevery = 3600', "good"),
        ]
        return Rules(*every)

    live(rules, test)
