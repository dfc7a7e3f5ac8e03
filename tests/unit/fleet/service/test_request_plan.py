"""A request for a trace of many hosts, with simulated hosts that are late, silent, failing or well: it always ends."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from traceloom.agent.fleet_link.protocol import ArmedProcess, ClockOffset, HostReport, WorkResponse
from traceloom.agent.traces.requests import TraceSpec, TraceTarget
from traceloom.fleet.service import request_plan
from traceloom.fleet.service.request_plan import (
    FleetRequest,
    advance_request,
    apply_report,
    assign_hosts,
    finish_analysis,
    finish_stitching,
    get_host_work,
)

S = 1_000_000_000
NOW = 1_700_000_000 * S
WANTED = TraceSpec(job="j", steps=3)


def asked(*hosts: str, spec: TraceSpec = WANTED) -> FleetRequest:
    return assign_hosts(
        FleetRequest(id="f", who="ada", asked_ns=NOW, spec=spec),
        dict.fromkeys(hosts, (0, 1, 2, 7)),
        NOW,
    )


def target(host: str, state: str = "kept", rank: int = 0) -> TraceTarget:
    return TraceTarget(
        request="r",
        process="7@1",
        profiler="timeline",
        pid=7,
        uid=0,
        rank=rank,
        stem=f"rank{rank}",
        state=state,  # type: ignore[arg-type]
        detail=f"{host} is full" if state == "failed" else "",
    )


def armed(*, ready: bool = True, offset_ns: int = 0, error_ns: int = 1000) -> HostReport:
    process = ArmedProcess(key="7@1", pid=7, rank=0, ready=ready, steps_per_second=2.0)
    return HostReport(
        state="armed",
        processes=[process],
        clock=ClockOffset(offset_ns=offset_ns, error_ns=error_ns, round_trips=16),
    )


def test_all_begin_at_one_instant_of_their_own_clocks() -> None:
    request = asked("a", "b")
    request = apply_report(request, "a", armed(offset_ns=-3 * S), NOW + S)
    assert advance_request(request, NOW + S) == request  # b has not said anything
    assert [work.step for host in "ab" if (work := get_host_work(request, host))] == ["arm", "arm"]
    request = advance_request(
        apply_report(request, "b", armed(offset_ns=2 * S, error_ns=40_000_000), NOW + 2 * S),
        NOW + 2 * S,
    )
    assert request.state == "armed"
    works = {host: get_host_work(request, host) for host in "ab"}
    starts = {
        host: work.at_ns
        for host, work in works.items()
        if work is not None and work.step == "start"
    }
    assert starts["a"] - 3 * S == starts["b"] + 2 * S == request.start_ns
    assert request.start_ns > NOW + 2 * S + 40_000_000


def by_step(*hosts: str, at_step: int = 0, spec: TraceSpec = WANTED) -> FleetRequest:
    request = FleetRequest(
        id="f", who="ada", asked_ns=NOW, spec=spec, start="step", at_step=at_step
    )
    return assign_hosts(request, dict.fromkeys(hosts, (0,)), NOW)


def stepping(steps: int | None, rate: float | None = 2.0, *, ready: bool = True) -> HostReport:
    process = ArmedProcess(
        key="7@1", pid=7, rank=0, ready=ready, steps=steps, steps_per_second=rate
    )
    return HostReport(
        state="armed",
        processes=[process],
        clock=ClockOffset(offset_ns=0, error_ns=1000, round_trips=16),
    )


def test_all_begin_with_one_step_that_lies_ahead_of_all() -> None:
    request = apply_report(
        apply_report(by_step("a", "b"), "a", stepping(100), NOW),
        "b",
        stepping(101, ready=False),
        NOW,
    )
    request = advance_request(
        apply_report(request, "b", stepping(109), NOW + 4 * S), NOW + 4 * S
    )  # a is at 108 by then
    assert (request.state, request.start_detail) == ("armed", "")
    works = [work for host in "ab" if (work := get_host_work(request, host))]
    assert {work.at_step for work in works} == {request.start_step}
    # At 2 steps per second there is time for the way, a poll of each process and libkineto's own look.
    assert 109 + 2 * 6 < request.start_step < 109 + 2 * 20
    assert (request.start_ns - NOW - 4 * S) / S == pytest.approx((request.start_step - 109) / 2)


def test_a_step_that_was_asked_for_is_taken_where_it_can_be() -> None:
    request = advance_request(
        apply_report(by_step("a", at_step=1000), "a", stepping(100), NOW), NOW
    )
    assert (request.start_step, request.start_detail) == (1000, "")
    assert request.start_ns == NOW + 450 * S
    running = advance_request(
        apply_report(request, "a", HostReport(state="running"), NOW), NOW + 449 * S
    )
    assert running.state == "running", "nobody is late before it begins"
    late = advance_request(apply_report(by_step("a", at_step=101), "a", stepping(100), NOW), NOW)
    assert late.start_step > 101
    assert "step 101 is too near" in late.start_detail


@pytest.mark.parametrize(
    ("first", "second", "spec", "why"),
    [
        (stepping(100), stepping(None), WANTED, "not all steps of rank 0 on b are known"),
        (stepping(100), stepping(100, None), WANTED, "not all steps"),
        (stepping(100), stepping(4000), WANTED, "rank 0 on a has made 100 steps, rank 0 on b 4000"),
        (stepping(100), stepping(100), TraceSpec(job="j", duration_s=1.0), "only a timeline"),
        (
            stepping(100),
            stepping(100),
            TraceSpec(job="j", steps=3, profilers=("timeline", "telemetry")),
            "only a timeline",
        ),
    ],
    ids=["unknown", "pace", "differ", "duration", "profilers"],
)
def test_where_there_is_no_common_step_they_begin_at_an_instant(
    first: HostReport, second: HostReport, spec: TraceSpec, why: str
) -> None:
    request = apply_report(
        apply_report(by_step("a", "b", spec=spec), "a", first, NOW), "b", second, NOW
    )
    request = advance_request(request, NOW)
    assert (request.state, request.start_step) == ("armed", 0)
    assert why in request.start_detail
    assert all(
        (work := get_host_work(request, host)) and work.at_step == 0 and work.at_ns > NOW
        for host in "ab"
    )


@pytest.mark.parametrize(
    ("offset_ns", "error_ns"),
    [(0, 2**62), (2**62, 0), (-(2**63), 5)],
    ids=["unsure", "ahead", "behind"],
)
def test_a_clock_that_cannot_be_holds_nobody_up(offset_ns: int, error_ns: int) -> None:
    request = apply_report(asked("a", "b"), "a", armed(offset_ns=offset_ns, error_ns=error_ns), NOW)
    request = advance_request(apply_report(request, "b", armed(offset_ns=3600 * S), NOW), NOW)
    assert NOW < request.start_ns < NOW + 30 * S
    works = {host: get_host_work(request, host) for host in "ab"}
    # The one that cannot be is taken as right; an hour is what a clock may be off.
    assert {host: work.at_ns for host, work in works.items() if work is not None} == {
        "a": request.start_ns,
        "b": request.start_ns - 3600 * S,
    }
    assert request.hosts["a"].clock is None


@pytest.mark.parametrize(
    "rate", [1e308, 1e-300, -2.0, 5e-324], ids=["fast", "slow", "back", "least"]
)
@pytest.mark.parametrize("steps", [5, 2**63 - 1])
def test_a_pace_that_cannot_be_holds_nobody_up(rate: float, steps: int) -> None:
    request = apply_report(by_step("a", "b"), "a", stepping(steps, rate), NOW)
    request = advance_request(apply_report(request, "b", stepping(5), NOW), NOW)
    assert (request.state, request.start_step) == ("armed", 0)
    assert "not all steps of rank 0 on a are known" in request.start_detail
    request = advance_request(request, request.start_ns + 3600 * S)
    assert request.state in {"collecting", "failed"}


@pytest.mark.parametrize(
    "spec",
    [TraceSpec(job="j", steps=2**53), TraceSpec(job="j", duration_s=1e9)],
    ids=["steps", "duration"],
)
def test_whatever_is_asked_for_its_work_is_understood_and_it_ends(spec: TraceSpec) -> None:
    """An agent that cannot read one piece of work has none of the others."""
    request = apply_report(by_step("a", at_step=2**53, spec=spec), "a", stepping(5), NOW)
    request = advance_request(request, NOW)
    work = WorkResponse(
        version="v", work=[of for of in [get_host_work(request, "a")] if of is not None]
    )
    assert msgspec.json.decode(msgspec.json.encode(work), type=WorkResponse) == work
    now = NOW
    while not request.ended:
        now += 86_400 * S
        assert now < NOW + 100 * 86_400 * S
        request = advance_request(request, now)


def test_a_whole_trace_is_done() -> None:
    request = advance_request(apply_report(asked("a"), "a", armed(), NOW), NOW)
    request = advance_request(
        apply_report(request, "a", HostReport(state="running", targets=[target("a")]), NOW + S),
        NOW + S,
    )
    assert request.state == "running"
    request = advance_request(
        apply_report(request, "a", HostReport(state="uploading"), NOW + 9 * S), NOW + 9 * S
    )
    assert request.state == "collecting"
    request = advance_request(
        apply_report(request, "a", HostReport(state="uploaded"), NOW + 10 * S), NOW + 10 * S
    )
    assert request.state == "stitching"
    assert get_host_work(request, "a") is None
    request = finish_analysis(finish_stitching(request, "c1", NOW + 11 * S), NOW + 12 * S)
    assert (request.state, request.capture, request.detail) == ("done", "c1", "")


def test_a_host_that_is_late_is_left_out_and_named() -> None:
    request = apply_report(asked("a", "b", "c"), "a", armed(), NOW + S)
    request = apply_report(request, "c", armed(ready=False), NOW + S)
    request = advance_request(request, NOW + 31 * S)
    assert request.state == "armed"
    assert (request.hosts["b"].state, request.hosts["b"].reason) == ("failed", "no-answer")
    assert request.hosts["c"].state == "armed"  # its process may be ready at the instant
    assert get_host_work(request, "b") is None
    for host in "ac":
        request = apply_report(
            request, host, HostReport(state="uploaded", targets=[target(host)]), NOW + 60 * S
        )
    request = advance_request(advance_request(request, NOW + 60 * S), NOW + 60 * S)
    assert request.state == "stitching"
    request = finish_analysis(finish_stitching(request, "c1", NOW), NOW)
    assert request.state == "partial"
    why = (
        "it did not say in time that it is ready: nothing was heard of it 31.0 s after it was asked"
    )
    assert request.detail == f"b (ranks 0-2, 7): {why}"


def traced_by_slow_hosts(
    delays_ns: dict[str, int], lead_ns: int | None = None
) -> tuple[FleetRequest, set[str]]:
    """A request whose hosts take a while for each thing that they do, and the hosts that were too late to begin.

    Hosts do what agents do: they hear of work, answer; hear of the instant, find their processes, write it down, and
    hand it over with the next poll of a process, which is to have it three seconds before. `lead_ns`: what stands
    between the decision and the instant, in place of what was planned.
    """
    request = asked(*delays_ns)
    for host, delay_ns in sorted(delays_ns.items(), key=lambda item: item[1]):
        decided_ns = NOW + delay_ns
        request = advance_request(apply_report(request, host, armed(), decided_ns), decided_ns)
    assert request.state == "armed"
    start_ns = request.start_ns if lead_ns is None else decided_ns + lead_ns
    late = set()
    for host, delay_ns in delays_ns.items():
        progress = request.hosts[host]
        handed_over_ns = decided_ns + 4 * delay_ns + S
        begun = target(host)
        if handed_over_ns + 3 * S > start_ns:
            late.add(host)
            begun = msgspec.structs.replace(
                begun, state="failed", reason="expired", detail="it did not poll early enough"
            )
        begun = msgspec.structs.replace(begun, start_ns=progress.at_ns)
        request = apply_report(request, host, HostReport(state="running"), handed_over_ns - S)
        request = apply_report(
            request, host, HostReport(state="uploaded", targets=[begun]), start_ns + 9 * S
        )
    request = advance_request(advance_request(request, start_ns + 9 * S), start_ns + 9 * S)
    return finish_analysis(finish_stitching(request, "c", start_ns + 9 * S), start_ns + 9 * S), late


def test_hosts_that_answer_slowly_have_more_time_until_they_begin() -> None:
    quick = dict.fromkeys(["a", "b"], S // 20)
    request, late = traced_by_slow_hosts(quick)
    assert (request.state, late) == ("done", set())
    assert request.start_ns - NOW < 7 * S, "who is quick does not wait"
    busy = quick | {"c": 5 * S, "d": 13 * S}
    assert traced_by_slow_hosts(busy, 6 * S)[1] == {"c", "d"}, (
        "what was enough for quick hosts is not for these"
    )
    request, late = traced_by_slow_hosts(busy)
    assert (request.state, request.detail, late) == ("done", "", set())


def test_nobody_waits_for_ever_for_a_slow_host_which_is_named_with_how_late_it_was() -> None:
    request, late = traced_by_slow_hosts({"a": S, "b": 25 * S})
    assert (request.state, late) == ("partial", {"b"})
    assert (
        request.start_ns == NOW + 25 * S + 60 * S + 1000
    )  # the bound, and the error of the clocks
    # It took it up 4 * 25 s after the decision: 40 s too late.
    assert request.detail == (
        "b: rank 0 (timeline): it did not poll early enough; the host took it up 40.0 s after the instant"
    )


def test_a_host_that_begins_after_the_instant_is_named_by_its_own_clock() -> None:
    request = apply_report(asked("a", "b"), "a", armed(offset_ns=3600 * S), NOW)
    request = advance_request(apply_report(request, "b", armed(), NOW), NOW)
    for host, behind_ns in (("a", 2_500_000_000), ("b", 0)):
        begun = msgspec.structs.replace(
            target(host), start_ns=request.hosts[host].at_ns + behind_ns
        )
        request = apply_report(
            request, host, HostReport(state="uploaded", targets=[begun]), NOW + 20 * S
        )
    request = advance_request(advance_request(request, NOW + 20 * S), NOW + 20 * S)
    request = finish_analysis(finish_stitching(request, "c", NOW), NOW)
    assert (request.state, request.start_detail) == ("done", "a began 2.5 s after the instant")


def test_a_rank_that_failed_makes_it_partial() -> None:
    request = advance_request(apply_report(asked("a"), "a", armed(), NOW), NOW)
    report = HostReport(state="uploaded", targets=[target("a"), target("a", "failed", rank=3)])
    request = apply_report(request, "a", report, NOW + S)
    request = advance_request(advance_request(request, NOW + S), NOW + S)
    assert (
        finish_analysis(finish_stitching(request, "c", NOW), NOW).detail
        == "a: rank 3 (timeline): a is full"
    )


@pytest.mark.parametrize("hosts", [(), ("a", "b")])
def test_a_request_that_nobody_can_answer_fails_with_the_reason(hosts: tuple[str, ...]) -> None:
    request = advance_request(asked(*hosts), NOW + 31 * S)
    assert request.state == "failed"
    assert request.detail
    assert request.reason == ("no-host" if hosts else "no-such-job")


def test_a_host_that_says_now_this_and_now_that_holds_nobody_up() -> None:
    request = advance_request(
        apply_report(apply_report(asked("a", "b"), "a", armed(), NOW), "b", armed(), NOW), NOW
    )
    request = advance_request(
        apply_report(request, "a", HostReport(state="uploaded", targets=[target("a")]), NOW), NOW
    )
    now = NOW
    for number in range(40):
        now += 300 * S
        state = "running" if number % 2 else "uploading"
        request = advance_request(apply_report(request, "b", HostReport(state=state), now), now)  # type: ignore[arg-type]
        request = advance_request(request, now)
    assert request.state == "stitching"
    assert request.hosts["b"].reason == "upload-failed"
    assert request.since_ns < NOW + 2000 * S


def test_what_has_ended_stays_as_it_ended() -> None:
    request = request_plan.cancel_request(asked("a"), NOW)
    assert request.state == "cancelled"
    assert get_host_work(request, "a") is None
    assert apply_report(request, "a", armed(), NOW) == request
    assert advance_request(request, NOW + 10**6 * S) == request
    done = advance_request(
        apply_report(asked("a", "b"), "a", HostReport(state="failed", reason="quota"), NOW), NOW
    )
    assert apply_report(done, "a", armed(), NOW) == done


@pytest.mark.parametrize("seed", range(40))
def test_whatever_hosts_do_it_ends_and_says_who_is_missing(seed: int) -> None:
    """Each host goes its way with random pauses, or stops somewhere for good."""
    chance = random.Random(seed)
    names = [f"h{number}" for number in range(chance.randint(1, 5))]
    ways = [
        ("armed", "running", "uploading", "uploaded"),
        ("armed", "failed"),
        ("armed", "running", "cancelled"),
        (),
    ]
    events: list[tuple[int, str, str]] = []
    for name in names:
        at, way = NOW, chance.choice(ways)
        for state in way[: chance.randint(0, len(way))]:
            at += chance.choice([0, S, 20 * S, 500 * S])
            events.append((at, name, state))
    request, now, states = asked(*names), NOW, []
    for at in sorted({*(at for at, *_ in events), *range(NOW, NOW + 3000 * S, 10 * S)}):
        now = at
        for when, name, state in events:
            if when == at:
                report = (
                    armed() if state == "armed" else HostReport(state=state, targets=[target(name)])
                )  # type: ignore[arg-type]
                request = apply_report(request, name, report, at)
        while (further := advance_request(request, at)) != request:
            request = further
        if request.state == "stitching":
            request = finish_analysis(finish_stitching(request, "c", at), at)
        states.append(request.state)
    assert request.ended
    assert now >= request.since_ns
    order = ["announced", "armed", "running", "collecting", "done", "partial", "failed"]
    assert [order.index(state) for state in states] == sorted(
        order.index(state) for state in states
    )
    uploaded = {name for name, progress in request.hosts.items() if progress.state == "uploaded"}
    assert request.state == (
        "done" if uploaded == set(names) else "partial" if uploaded else "failed"
    )
    for name in names:
        assert (re.search(rf"{name} \(rank[^)]*\): ", request.detail) is not None) == (
            name not in uploaded
        )
        assert request.hosts[name].ended
