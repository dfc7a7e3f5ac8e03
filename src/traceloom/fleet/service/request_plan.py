"""How a request for a trace of many hosts goes: from what its hosts say and the time, to the next
state.

`planned → announced → armed → running → collecting → stitching → analysing → done | partial |
failed | cancelled`

Everything here is a function of the request and the time, so that a service that starts again goes
on where it was. Hosts that do not keep up are left out with a reason; the others do not wait for
them beyond a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from traceloom.agent.fleet_link.protocol import (
    ENDED_HOST_STATES,
    ArmedProcess,
    ClockOffset,
    HostFile,
    HostReport,
    HostWork,
    StartBy,
)
from traceloom.agent.traces.requests import TraceSpec, TraceTarget, TriggerCause

FleetState = Literal[
    "planned",
    "announced",
    "armed",
    "running",
    "collecting",
    "stitching",
    "analysing",
    "done",
    "partial",
    "failed",
    "cancelled",
]
ENDED_FLEET_STATES = frozenset({"done", "partial", "failed", "cancelled"})

_SECOND_NS = 1_000_000_000
_ARM_TIMEOUT_NS = 30 * _SECOND_NS  # for the hosts to say that they are ready
# Between the decision and the instant, at least: a host hears of it at once, its processes poll
# every second, and have to know it three seconds before. Hosts that were slow to say that they are
# armed are as slow to begin, and to begin takes several such ways: to hear of it, to find the
# processes, to write it down, to hand it over.
_LEAD_NS, _MOST_LEAD_NS = 6 * _SECOND_NS, 60 * _SECOND_NS
_ROUND_TRIPS = 4
_READY_TIMEOUT_NS = (
    120 * _SECOND_NS
)  # that a host waits for processes to be ready, beyond the instant
_DRAIN_TIMEOUT_NS = 120 * _SECOND_NS  # for files to be written and verified
_UPLOAD_TIMEOUT_NS = 900 * _SECOND_NS
# Of a clock that is believed: one that begins anew in 1970 is, and no round trip of an agent takes
# twice the error.
_MOST_OFFSET_NS, _MOST_ERROR_NS = 100 * 365 * 86_400 * _SECOND_NS, 10 * _SECOND_NS
# Of a pace that is believed: a step a day, and more of them than a loop of Python makes.
_SLOWEST, _FASTEST = 1 / 86_400, 1e6
_MAX_AHEAD_S = (
    30 * 86_400.0
)  # that a step may be ahead, or a trace take: no clock has room for all that one may ask
_MAX_NAMED = 8  # runs of ranks, or others that are alike
_MAX_STEP_S = 60.0  # where nobody knows how long the steps of a job take


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a host is.

    `state` is "" until it has said something; `since_ns`, `heard_ns`: by the service's clock, as
    are `answered_ns` and `begun_ns`: when it first said something, and that it begins, 0 before
    that; `ranks`: that it had when it was asked.
    """

    ranks: tuple[int, ...] = ()
    state: str = ""
    since_ns: int = 0
    heard_ns: int = 0
    answered_ns: int = 0
    begun_ns: int = 0
    reason: str = ""
    detail: str = ""
    processes: list[ArmedProcess] = []
    targets: list[TraceTarget] = []
    files: list[HostFile] = []
    clock: ClockOffset | None = None
    at_ns: int = 0  # when it is to begin, by its own clock

    @property
    def ended(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.state in ENDED_HOST_STATES


class FleetRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a trace of the processes of a job, on all hosts that have some.

    `start`: by what all are to begin, an instant or a step; `at_step`, `earliest_ns`: with which
    step at the earliest, and when. `start_ns`: the common instant by the service's clock, about
    which where it is a step, 0 before it is set; `start_step`: the common step, 0 where they begin
    at an instant; `start_detail`: why that is so, or it is a later step, or who began late. `mark`:
    who asks again with it means the same request. `reason` and `detail`: why it failed, or what is
    missing; `capture`: the result; `trigger`: the rule that asked, None where somebody did.
    """

    id: str
    who: str
    asked_ns: int
    wanted: TraceSpec
    hosts: dict[str, HostStatus] = {}
    state: FleetState = "planned"
    since_ns: int = 0
    start: StartBy = "instant"
    at_step: int = 0
    earliest_ns: int = 0
    start_ns: int = 0
    start_step: int = 0
    start_detail: str = ""
    mark: str = ""
    reason: str = ""
    detail: str = ""
    capture: str = ""
    trigger: TriggerCause | None = None

    @property
    def ended(self) -> bool:
        """Whether it changes no more."""
        return self.state in ENDED_FLEET_STATES


def assign_hosts(
    request: FleetRequest, hosts: Mapping[str, Iterable[int]], now_ns: int
) -> FleetRequest:
    """The request with the hosts that have processes of it, and their ranks as far as they are
    known.
    """
    host_statuses = {
        host: HostStatus(since_ns=now_ns, ranks=tuple(sorted(hosts[host])))
        for host in sorted(hosts)
    }
    if not host_statuses:
        return _set_state(
            request, "failed", now_ns, "no-such-job", "no host of the fleet has such processes"
        )
    return _set_state(replace(request, hosts=host_statuses), "announced", now_ns)


def apply_report(request: FleetRequest, host: str, report: HostReport, now_ns: int) -> FleetRequest:
    """The request with what a host says; what has ended stays as it ended."""
    before = request.hosts[host]
    if before.ended or request.ended:
        return request
    clock = report.clock
    if clock is not None and (
        abs(clock.offset_ns) > _MOST_OFFSET_NS or clock.error_ns > _MOST_ERROR_NS
    ):
        clock = None  # all would wait for it, or the capture would lie in no time that there is
    processes = [
        replace(process, steps_per_second=validate_step_rate(process.steps_per_second))
        for process in report.processes
    ]
    progress = HostStatus(
        state=report.state,
        since_ns=before.since_ns if report.state == before.state else now_ns,
        reason=report.reason,
        detail=report.detail,
        processes=processes or before.processes,
        targets=report.targets or before.targets,
        files=report.files or before.files,
        clock=clock or before.clock,
        at_ns=before.at_ns,
        heard_ns=now_ns,
        ranks=before.ranks,
        answered_ns=before.answered_ns or now_ns,
        begun_ns=before.begun_ns or (0 if report.state == "armed" else now_ns),
    )
    return replace(request, hosts={**request.hosts, host: progress})


def validate_step_rate(steps_per_second: float | None) -> float | None:
    """Steps per second as a host says; None where that cannot be, as a host may say anything."""
    believed = steps_per_second is not None and (
        steps_per_second == 0 or _SLOWEST <= steps_per_second <= _FASTEST
    )
    return steps_per_second if believed else None


def repeat_upload(request: FleetRequest, hosts: Iterable[str], now_ns: int) -> FleetRequest:
    """The request, some of whose hosts are to send their files once more: they are not where they
    were.
    """
    sending = {
        host: replace(request.hosts[host], state="uploading", since_ns=now_ns) for host in hosts
    }
    request = replace(request, hosts={**request.hosts, **sending})
    return (
        _set_state(request, "collecting", now_ns)
        if request.state in {"collecting", "stitching"}
        else request
    )


def cancel_request(request: FleetRequest, now_ns: int) -> FleetRequest:
    """The request, which nobody wants any more."""
    return (
        request
        if request.ended
        else _set_state(request, "cancelled", now_ns, "cancelled", "it was cancelled")
    )


def advance_request(request: FleetRequest, now_ns: int) -> FleetRequest:
    """The request as far as it has come by now, the same object if that is no further; apply until
    it is.

    `stitching` and `analysing` are left by `stitched` and `analysed`.
    """
    hosts = request.hosts
    if request.state == "announced":
        late = now_ns >= request.since_ns + _ARM_TIMEOUT_NS
        if not late and any(not progress.state for progress in hosts.values()):
            return request  # as it is after nearly every word of a thousand hosts, so it is told quickly
        open_hosts = {host: progress for host, progress in hosts.items() if not progress.ended}
        ready = {
            host
            for host, progress in open_hosts.items()
            if progress.state == "armed" and all(process.ready for process in progress.processes)
        }
        if late:
            waited = f"{(now_ns - request.since_ns) / _SECOND_NS:.1f} s after it was asked"
            missing = {
                host: ("not-armed", f"it was {progress.state} when the others began, {waited}")
                if progress.state
                else (
                    "no-answer",
                    f"it did not say in time that it is ready: nothing was heard of it {waited}",
                )
                for host, progress in open_hosts.items()
                if progress.state != "armed"
            }
            request = _fail_hosts(request, missing, now_ns)
            ready |= (
                open_hosts.keys() - missing.keys()
            )  # some of its processes are ready, or will be
        if not late and ready != open_hosts.keys():
            return request
        if not ready:
            return _set_state(request, "failed", now_ns, "no-host", _describe_missing(request))
        return _set_state(_set_start(request, now_ns), "armed", now_ns)
    if request.state in {"armed", "running"}:
        if (
            now_ns >= request.start_ns + _READY_TIMEOUT_NS + _DRAIN_TIMEOUT_NS
            and now_ns >= request.start_ns + _estimate_duration_ns(request)
        ):
            overdue = {
                host: ("deadline", "it did not end in time")
                for host, progress in hosts.items()
                if progress.state in {"armed", "running"}
            }
            request = _fail_hosts(request, overdue, now_ns)
        states = {progress.state for progress in request.hosts.values()}
        if not states & {"armed", "running"}:
            return _set_state(request, "collecting", now_ns)
        if request.state == "armed" and (states & {"running", "uploading", "uploaded"}):
            return _set_state(request, "running", now_ns)
        return request
    if request.state == "collecting":
        overdue = {
            host: ("upload-failed", "its files did not come in time")
            for host, progress in hosts.items()
            if not progress.ended and now_ns >= request.since_ns + _UPLOAD_TIMEOUT_NS
        }
        request = _fail_hosts(request, overdue, now_ns)
        if all(progress.ended for progress in request.hosts.values()):
            if any(progress.state == "uploaded" for progress in request.hosts.values()):
                return _set_state(request, "stitching", now_ns)
            return _set_state(request, "failed", now_ns, "no-host", _describe_missing(request))
    return request


def finish_stitching(
    request: FleetRequest, capture: str, now_ns: int, faults: Sequence[str] = ()
) -> FleetRequest:
    """The request whose parts have become a capture; `faults`: what was wrong with parts."""
    return _set_state(
        replace(request, capture=capture), "analysing", now_ns, detail="; ".join(faults)[:4000]
    )


def finish_analysis(request: FleetRequest, now_ns: int, fault: str = "") -> FleetRequest:
    """The request whose capture is analysed, or cannot be (`fault`); `partial` where something of a
    host is missing.
    """
    missing = "; ".join(filter(None, (_describe_missing(request), request.detail)))[:4000]
    late = []
    for host, progress in request.hosts.items() if not request.start_step else ():
        behind_ns = max(
            (
                target.start_ns - progress.at_ns
                for target in progress.targets
                if target.start_ns is not None
            ),
            default=0,
        )
        if behind_ns > 0 and progress.state == "uploaded":
            late.append(f"{host} began {behind_ns / _SECOND_NS:.1f} s after the instant")
    omitted_note = (
        [f"{len(late) - _MAX_NAMED} more hosts began late"] if len(late) > _MAX_NAMED else []
    )
    request = replace(
        request,
        start_detail="; ".join(
            filter(None, (request.start_detail, *late[:_MAX_NAMED], *omitted_note))
        ),
    )
    if fault:
        return _set_state(
            request, "partial" if request.capture else "failed", now_ns, "analysis-failed", fault
        )
    return _set_state(
        request, "partial" if missing else "done", now_ns, "missing" if missing else "", missing
    )


def get_host_work(request: FleetRequest, host: str) -> HostWork | None:
    """What a host is to do now; None where it has nothing to do with the request any more."""
    progress = request.hosts.get(host)
    if progress is None or progress.ended or request.ended:
        return None
    spec = replace(request.wanted, host="", at_ns=0)
    if not request.start_ns:
        return HostWork(request=request.id, step="arm", wanted=spec, start=request.start)
    return HostWork(
        request=request.id,
        step="start",
        wanted=spec,
        start=request.start,
        at_ns=progress.at_ns,
        at_step=request.start_step,
    )


# Inside.


def _set_state(
    request: FleetRequest, state: FleetState, now_ns: int, reason: str = "", detail: str = ""
) -> FleetRequest:
    return replace(request, state=state, since_ns=now_ns, reason=reason, detail=detail)


def _fail_hosts(
    request: FleetRequest, faults: Mapping[str, tuple[str, str]], now_ns: int
) -> FleetRequest:
    """The request without hosts that did not keep up."""
    if not faults:
        return request
    ended = {
        host: replace(
            request.hosts[host], state="failed", since_ns=now_ns, reason=reason, detail=detail
        )
        for host, (reason, detail) in faults.items()
    }
    return replace(request, hosts={**request.hosts, **ended})


def _compute_lead_ns(request: FleetRequest) -> int:
    """How long before the instant it is decided: as the slowest host that is armed needs, by how
    late it answered.
    """
    answers = (
        status.answered_ns - request.since_ns
        for status in request.hosts.values()
        if status.state == "armed"
    )
    return min(_LEAD_NS + _ROUND_TRIPS * max(answers, default=0), _MOST_LEAD_NS)


def _set_start(request: FleetRequest, now_ns: int) -> FleetRequest:
    """The request with what all begin by: one step, where that is wanted and can be, else one
    instant.
    """
    if request.start == "step":
        reason, steps_made, rate = _estimate_steps(request, now_ns)
        if not reason:
            possible = (
                steps_made + math.ceil(rate * 2 * _compute_lead_ns(request) / _SECOND_NS) + 1
            )  # no clock says when: twice the room
            step = max(request.at_step, possible)
            if 0 < request.at_step < step:
                reason = f"step {request.at_step} is too near: all can begin with step {step}"
            start_ns = now_ns + int(min((step - steps_made) / rate, _MAX_AHEAD_S) * _SECOND_NS)
            request = _set_start_time(replace(request, earliest_ns=start_ns), now_ns)
            return replace(request, start_step=step, start_detail=reason)
        request = replace(request, start_detail=f"they begin at one instant: {reason}")
    return _set_start_time(request, now_ns)


def _estimate_steps(request: FleetRequest, now_ns: int) -> tuple[str, int, float]:
    """Why there can be no common step, "" where there can; steps that were made by now, and are
    made per second.
    """
    if request.wanted.steps is None or request.wanted.profilers != ("timeline",):
        return "only a timeline of a number of steps can begin with a step", 0, 0.0
    steps_by_process: dict[str, float] = {}
    rates: list[float] = []
    for host, progress in request.hosts.items():
        for process in progress.processes if progress.state == "armed" else ():
            name = f"process {process.pid}" if process.rank is None else f"rank {process.rank}"
            if not process.ready:
                return f"{name} on {host} is not ready", 0, 0.0
            if process.steps is None or not process.steps_per_second:
                return f"not all steps of {name} on {host} are known", 0, 0.0
            steps_by_process[f"{name} on {host}"] = (
                process.steps + process.steps_per_second * (now_ns - progress.heard_ns) / _SECOND_NS
            )
            rates.append(process.steps_per_second)
    if not steps_by_process:
        return "no process is ready", 0, 0.0
    first, last = (
        min(steps_by_process, key=steps_by_process.__getitem__),
        max(steps_by_process, key=steps_by_process.__getitem__),
    )
    if steps_by_process[last] - steps_by_process[first] > max(
        2.0, *rates
    ):  # two steps, or what is made in a second
        return (
            f"{first} has made {steps_by_process[first]:.0f} steps, {last} {steps_by_process[last]:.0f}",
            0,
            0.0,
        )
    return "", math.ceil(steps_by_process[last]), max(rates)


def _set_start_time(request: FleetRequest, now_ns: int) -> FleetRequest:
    """The request with one instant for all, in each host's own clock.

    A clock that is not known is taken as right: its host is not left out, and the capture says so.
    """
    errors = [
        progress.clock.error_ns for progress in request.hosts.values() if progress.clock is not None
    ]
    start_ns = max(now_ns + _compute_lead_ns(request) + max(errors, default=0), request.earliest_ns)
    hosts = {
        host: replace(
            progress,
            at_ns=start_ns - (progress.clock.offset_ns if progress.clock is not None else 0),
        )
        for host, progress in request.hosts.items()
    }
    return replace(request, start_ns=start_ns, hosts=hosts)


def _estimate_duration_ns(request: FleetRequest) -> int:
    """How long after the instant a host may still be at it."""
    seconds = request.wanted.duration_s
    if seconds is None:
        rates = [
            process.steps_per_second
            for progress in request.hosts.values()
            for process in progress.processes
            if process.steps_per_second
        ]
        seconds = (
            (request.wanted.steps or 0) * min(2 / min(rates), _MAX_STEP_S) if rates else _MAX_STEP_S
        )
    return int(min(seconds, _MAX_AHEAD_S) * _SECOND_NS) + _READY_TIMEOUT_NS + _DRAIN_TIMEOUT_NS


def _describe_missing(request: FleetRequest) -> str:
    """What is missing, host by host, in a sentence; "" where nothing is."""
    parts = []
    for host, progress in request.hosts.items():
        if progress.state != "uploaded":
            armed = {process.rank for process in progress.processes if process.rank is not None}
            ranks = _format_ranks(tuple(sorted(armed)) or progress.ranks)
            reason = progress.detail or progress.reason or progress.state or "it said nothing"
            parts.append(f"{host}{f' ({ranks})' if ranks else ''}: {reason}")
            continue
        lost = [target for target in progress.targets if target.state != "kept"]
        ranks = ", ".join(
            f"{'process ' + str(target.pid) if target.rank is None else 'rank ' + str(target.rank)} ({target.profiler})"
            for target in lost[:_MAX_NAMED]
        )
        if lost:
            explanation = lost[0].detail or lost[0].reason
            if lost[0].reason == "expired" and progress.begun_ns and not request.start_step:
                ahead_s = (request.start_ns - progress.begun_ns) / _SECOND_NS
                explanation += f"; the host took it up {abs(ahead_s):.1f} s {'before' if ahead_s > 0 else 'after'} the instant"
            parts.append(f"{host}: {ranks}: {explanation}")
    return "; ".join(parts)[:4000]


def _format_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks in a few words, as `ranks 0-7, 12`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    ellipsis = ", ..." if len(texts) > _MAX_NAMED else ""
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts[:_MAX_NAMED])}{ellipsis}"
        if ranks
        else ""
    )
