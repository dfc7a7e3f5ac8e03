"""Requests over every order of what hosts say and how time goes on: what holds at each instant, and that they end."""

from __future__ import annotations

import msgspec
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from traceloom.agent.fleet_link.protocol import ArmedProcess, ClockOffset, HostReport, HostState
from traceloom.agent.traces.requests import TraceSpec, TraceTarget
from traceloom.fleet.service.request_plan import (
    FleetRequest,
    advance_request,
    apply_report,
    assign_hosts,
    cancel_request,
    finish_analysis,
    finish_stitching,
    get_host_work,
    repeat_upload,
)

S = 1_000_000_000
NOW = 1_700_000_000 * S
HOSTS = ("a", "b", "c")
ORDER = ("planned", "announced", "armed", "running", "collecting", "stitching", "analysing")
ENDED = {"done", "partial", "failed", "cancelled"}
SAID: tuple[HostState, ...] = ("armed", "running", "uploading", "uploaded", "failed", "cancelled")
LONGEST_S = (
    30 + 60 + 10 + 120 + 120 + 120 + 900
)  # to arm, the lead, a clock's error, to be ready, to trace, to drain, to send


class Requests(RuleBasedStateMachine):
    """A request of three hosts beside what a reader of the documentation would note of it."""

    @initialize(by_step=st.booleans(), ranks=st.integers(0, 2))
    def ask(self, by_step: bool, ranks: int) -> None:
        self.now = NOW
        wanted = TraceSpec(job="j", steps=3)
        request = FleetRequest(
            id="f", who="ada", asked_ns=NOW, spec=wanted, start="step" if by_step else "instant"
        )
        self.request = assign_hosts(request, {host: range(ranks) for host in HOSTS}, NOW)
        self.started: dict[
            str, tuple[int, int]
        ] = {}  # host -> the instant and step that it was told
        self.ended_hosts: dict[str, str] = {}
        self.last_state, self.moved_ns, self.ended_as = "announced", NOW, b""
        self.again = False

    def put(self, request: FleetRequest) -> None:
        while (further := advance_request(request, self.now)) is not request:
            request = further
        self.request = request

    @rule(
        host=st.sampled_from(HOSTS),
        state=st.sampled_from(SAID),
        ready=st.booleans(),
        offset_s=st.integers(-9, 9),
        steps=st.none() | st.integers(0, 500),
        kept=st.booleans(),
    )
    def say(
        self, host: str, state: HostState, ready: bool, offset_s: int, steps: int | None, kept: bool
    ) -> None:
        process = ArmedProcess(
            key="7@1", pid=7, rank=0, ready=ready, steps=steps, steps_per_second=2.0
        )
        target = TraceTarget(
            request="f",
            process="7@1",
            profiler="timeline",
            pid=7,
            uid=0,
            rank=0,
            stem="rank0",
            state="kept" if kept else "failed",
            reason="" if kept else "expired",
        )
        report = HostReport(
            state=state,
            processes=[process],
            targets=[] if state == "armed" else [target],
            clock=ClockOffset(offset_ns=offset_s * S, error_ns=S // 10, round_trips=8),
        )
        self.put(apply_report(self.request, host, report, self.now))

    @rule(seconds=st.sampled_from([1, 7, 29, 31, 130, 500, 901]))
    def wait(self, seconds: int) -> None:
        self.now += seconds * S
        self.put(self.request)

    @rule()
    def start_the_service_again(self) -> None:
        """All that it knows is what is on record."""
        self.put(msgspec.json.decode(msgspec.json.encode(self.request), type=FleetRequest))

    @precondition(lambda self: self.request.state == "stitching")
    @rule(lost=st.booleans())
    def join(self, lost: bool) -> None:
        sent = [
            host for host, progress in self.request.hosts.items() if progress.state == "uploaded"
        ]
        assert sent, "there is something to join"
        if lost:
            self.again = True
            del self.ended_hosts[sent[0]]
            self.put(repeat_upload(self.request, sent[:1], self.now))
        else:
            self.put(finish_stitching(self.request, "c1", self.now))

    @precondition(lambda self: self.request.state == "analysing")
    @rule(fault=st.sampled_from(["", "no reader takes it"]))
    def analyse(self, fault: str) -> None:
        self.put(finish_analysis(self.request, self.now, fault))
        missing = {host for host, state in self.ended_hosts.items() if state != "uploaded"}
        assert (self.request.state == "done") <= (not missing and not fault)
        assert all(host in self.request.detail for host in missing if not fault)

    @precondition(lambda self: self.now > NOW + 60 * S)
    @rule()
    def cancel(self) -> None:
        before = self.request
        self.put(cancel_request(self.request, self.now))
        assert self.request == before if before.ended else self.request.state == "cancelled"

    @invariant()
    def it_goes_forward_and_ends_for_good(self) -> None:
        state = self.request.state
        assert state in ENDED or ORDER.index(state) >= ORDER.index(self.last_state) or self.again
        self.again = False
        if self.last_state != state:
            self.moved_ns = self.now
        self.last_state = state if state not in ENDED else self.last_state
        document = msgspec.json.encode(self.request)
        if self.ended_as:
            assert document == self.ended_as
        elif state in ENDED:
            self.ended_as = document
            assert self.request.reason or state == "done"

    @invariant()
    def hosts_that_ended_stay_so_and_say_why(self) -> None:
        for host, progress in self.request.hosts.items():
            if host in self.ended_hosts:
                assert progress.state == self.ended_hosts[host]
                assert not get_host_work(self.request, host)
            elif progress.ended:
                self.ended_hosts[host] = progress.state

    @invariant()
    def all_are_told_one_start_once(self) -> None:
        starts = set()
        for host, progress in self.request.hosts.items():
            work = get_host_work(self.request, host)
            assert (work is None) == (self.request.ended or progress.ended)
            if work is None:
                continue
            assert (work.step == "start") == (self.request.start_ns > 0)
            if work.step == "start":
                assert self.started.setdefault(host, (work.at_ns, work.at_step)) == (
                    work.at_ns,
                    work.at_step,
                )
                starts.add(work.at_step)
        assert len(starts) <= 1
        assert not self.request.start_step or self.request.start == "step"

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        if self.request.state in {"announced", "armed", "running", "collecting"}:
            assert self.now <= self.moved_ns + LONGEST_S * S, (
                f"{self.request.state} has no deadline"
            )


Requests.TestCase.settings = settings(stateful_step_count=25, deadline=None)
test_requests = Requests.TestCase
