"""Whatever fires, whenever: no cooldown and no budget is ever exceeded, across restarts of the agent."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from hypothesis import given, strategies as st

from support.triggers import START_NS, Rules, rule, worker
from traceloom.agent.config import TriggerBudget

DAY_S = 86_400.0
MB_PER_TRACE = 3.0
BUDGETS = st.sampled_from([(0.0003, 1000.0), (0.5, 12.0), (0.0005, 24.0)])  # share, MB per day
RULES = tuple(
    rule(f'on = "metric"\nmetric = "gpu_power_watts"\nabove = 5.0\n{text}', name)
    for name, text in (
        ("quick", 'duration = 4.0\ncooldown = 60\ntarget = "process"'),
        ("slow", "duration = 15.0\ncooldown = 5000"),
    )
)
# (seconds until then, devices that are hot, share of what was set aside that is measured, whether the agent restarts)
EVENTS = st.lists(
    st.tuples(
        st.one_of(st.floats(1, 100), st.floats(100, 20_000)),
        st.sets(st.integers(0, 2), min_size=1),
        st.floats(0.5, 1),
        st.booleans(),
    ),
    min_size=10,
    max_size=40,
)


@given(EVENTS, BUDGETS)
def test_cooldown_and_budget_are_never_exceeded(
    events: list[tuple[float, set[int], float, bool]], limits: tuple[float, float]
) -> None:
    share, mb_per_day = limits
    workers = [
        worker(number, f"job{number // 2}", number, (f"GPU-{number}",)) for number in range(3)
    ]
    fired: dict[tuple[str, str], list[float]] = defaultdict(list)
    costs: list[tuple[float, str, float, int]] = []  # at, process, seconds, bytes

    async def begun(folder: Path, now_ns: int) -> Rules:
        budget = TriggerBudget(share=share, mb_per_day=mb_per_day, mb_per_trace=MB_PER_TRACE)
        rules = Rules(*RULES, folder=folder, budget=budget)
        rules.now_ns = now_ns
        rules.run(*workers)
        await rules.trace_service.start()
        await rules.triggers.start(now_ns)
        return rules

    async def live(folder: Path) -> None:
        rules = await begun(folder, START_NS)
        for seconds, hot, measured, restarts in events:
            if restarts:
                await rules.close()
                rules = await begun(folder, rules.now_ns)
            rules.put("gpu_power_watts", {(f"GPU-{number}",): 9.0 for number in hot})
            made = await rules.after(seconds)
            await rules.ended()
            at = (rules.now_ns - START_NS) / 1e9
            for request in made:
                assert request.trigger is not None
                fired[request.trigger.rule, request.trigger.target].append(at)
                for target in request.targets:
                    assert request.spec.duration_s is not None
                    took, size = (
                        request.spec.duration_s * measured,
                        int(MB_PER_TRACE * 1e6 * measured),
                    )
                    target.state, target.bytes = "kept", size
                    target.window_start_ns, target.window_end_ns = 0, int(took * 1e9)
                    costs.append((at, target.process, took, size))
            rules.put("gpu_power_watts", {})
            await rules.after(0.5)
        await rules.close()

    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        asyncio.run(live(Path(folder)))
    for (name, _), instants in fired.items():
        cooldown = {each.name: each.cooldown for each in RULES}[name]
        assert all(later - earlier >= cooldown for earlier, later in pairwise(instants))
    for end, *_ in costs:
        day = [cost for cost in costs if end - DAY_S < cost[0] <= end]
        assert sum(size for *_, size in day) <= mb_per_day * 1e6
        for process in workers:
            assert (
                sum(took for _, key, took, _ in day if key == process.key) <= share * DAY_S + 1e-6
            )
