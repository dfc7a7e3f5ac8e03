"""Whatever jobs do and however requests end: budgets of any 24 hours and cooldowns of the fleet's rules hold."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from traceloom.agent.triggers.store import DAY_NS
from traceloom.fleet.rules import FleetBudget
from traceloom.fleet.triggers import FleetCharge, FleetLedger

MADE = 10_000  # steps of each job in a day
COOLDOWN_S = 3000.0
ASKED = st.tuples(
    st.integers(0, 6 * 3600),  # seconds until then
    st.sampled_from(["rule1", "rule2"]),
    st.sampled_from(["job1", "job2", "job3"]),
    st.integers(1, 60),  # steps
    st.integers(1, 4),  # files
    st.floats(0, 1),  # how much of what was set aside it needs in the end
    st.booleans(),  # whether it has ended by the next
    st.booleans(),  # whether the service starts again
)


@given(
    st.lists(ASKED, max_size=60),
    st.integers(1, 12),
    st.floats(100, 5000),
    st.floats(0.001, 0.05),
    st.floats(10, 300),
)
def test_budgets_and_cooldowns_hold(
    asked: list[tuple[int, str, str, int, int, float, bool, bool]],
    traces: int,
    mb: float,
    share: float,
    each: float,
) -> None:
    budget = FleetBudget(traces_per_day=traces, mb_per_day=mb, mb_per_trace=each, share=share)
    ledger, now_ns, refused = FleetLedger(budget), 1_795_000_000 * 10**9, 0
    made: list[
        tuple[int, str, str, FleetCharge]
    ] = []  # when, rule, job and what it costs, beside the ledger
    for number, (pause, rule, job, steps, files, part, ends, restarts) in enumerate(asked):
        now_ns += pause * 10**9
        if ledger.cooling((rule, job), COOLDOWN_S, now_ns) or ledger.refusal(
            job, steps, MADE, files, now_ns
        ):
            refused += 1
            continue
        charge = FleetCharge(
            request=str(number),
            rule=rule,
            job=job,
            at_ns=now_ns,
            steps=steps,
            bytes=ledger.reserve(files),
        )
        ledger.add([charge], now_ns)
        made.append((now_ns, rule, job, charge))
        if ends:
            charge.bytes, charge.steps, charge.settled = (
                int(charge.bytes * part),
                int(charge.steps * part),
                True,
            )
        ledger.forget(now_ns - 7 * DAY_NS)
        if restarts:
            charges = list(ledger.charges)
            ledger = FleetLedger(budget)
            ledger.add(charges, now_ns)
        window = [entry for entry in made if entry[0] > now_ns - DAY_NS]
        assert len(window) <= traces
        assert sum(entry[3].bytes for entry in window) <= mb * 1e6
        for of in {entry[2] for entry in window}:
            assert sum(entry[3].steps for entry in window if entry[2] == of) <= share * MADE
    for of_rule in {entry[1:3] for entry in made}:
        times = [entry[0] for entry in made if entry[1:3] == of_rule]
        assert all(later - earlier >= COOLDOWN_S * 1e9 for earlier, later in pairwise(times))
    assert len(made) + refused == len(asked)
