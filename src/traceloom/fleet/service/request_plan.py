"""The state machine of a trace request across many hosts, driven by host reports and time.

`planned → announced → armed → running → collecting → stitching → analysing → done | partial |
failed | cancelled`

All functions here are pure functions of the request and the time, so that a restarted service
resumes where it was. Hosts that miss a deadline are dropped with a reason; the others do not wait
for them any longer.
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
from traceloom.system.units import find_runs

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
_ARM_TIMEOUT_NS = 30 * _SECOND_NS  # for the hosts to report that they are ready
# Min lead between the decision and the start: a host is notified at once, its processes poll every
# second and must know the start three seconds in advance. Hosts that were slow to arm are as slow
# to start, and starting takes several round trips: notification, finding the processes, storing the
# request, handing it over.
_LEAD_NS, _MOST_LEAD_NS = 6 * _SECOND_NS, 60 * _SECOND_NS
_ROUND_TRIPS = 4
# How long a host waits after the start for processes to be ready.
_READY_TIMEOUT_NS = 120 * _SECOND_NS
_DRAIN_TIMEOUT_NS = 120 * _SECOND_NS  # for files to be written and verified
_UPLOAD_TIMEOUT_NS = 900 * _SECOND_NS
# Bounds of plausible clocks: an offset back to 1970 is plausible; an error of 10 s means a round
# trip of 20 s, longer than any of an agent.
_MOST_OFFSET_NS, _MOST_ERROR_NS = 100 * 365 * 86_400 * _SECOND_NS, 10 * _SECOND_NS
# Bounds of plausible step rates: one step a day, and more than a Python loop can make.
_SLOWEST, _FASTEST = 1 / 86_400, 1e6
# Max wait for a step, or duration of a trace: larger values overflow clocks.
_MAX_AHEAD_S = 30 * 86_400.0
_MAX_NAMED = 8  # max named ranges of ranks, or other groups of equal items
_MAX_STEP_S = 60.0  # assumed if the step time of a job is unknown


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a host.

    `state` is "" until its first report. By the service's clock: `since_ns`, `heard_ns`,
    `answered_ns` (its first report) and `begun_ns` (its start); 0 before that. `ranks`: ranks it
    had when the request was sent.
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
    at_ns: int = 0  # start by the host's own clock

    @property
    def ended(self) -> bool:
        """Whether no more reports are expected."""
        return self.state in ENDED_HOST_STATES


class FleetRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to trace the processes of a job on all hosts that run it.

    `start`: whether all start at an instant or at a step; `at_step`, `earliest_ns`: earliest step
    and time. `start_ns`: the common start by the service's clock, approximate if it is a step, 0
    before it is set; `start_step`: the common step, 0 if they start at an instant; `start_detail`:
    why it is an instant or a later step, or who started late. `mark`: idempotency key; a repeated
    submission with it is the same request. `reason` and `detail`: why it failed, or what is
    missing; `capture`: the result; `trigger`: the rule that made it, None if a person did.
    """

    id: str
    who: str
    asked_ns: int
    spec: TraceSpec
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
        return self.state in ENDED_FLEET_STATES


def assign_hosts(
    request: FleetRequest, hosts: Mapping[str, Iterable[int]], now_ns: int
) -> FleetRequest:
    """Returns the request with the hosts that run its processes, and their known ranks."""
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
    """Returns the request updated with a host's report; a host that has ended keeps its state."""
    before = request.hosts[host]
    if before.ended or request.ended:
        return request
    clock = report.clock
    if clock is not None and (
        abs(clock.offset_ns) > _MOST_OFFSET_NS or clock.error_ns > _MOST_ERROR_NS
    ):
        clock = None  # all hosts would wait for it, or the capture's time would be out of range
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
    """Returns the reported steps per second; None if the value is not plausible."""
    believed = steps_per_second is not None and (
        steps_per_second == 0 or _SLOWEST <= steps_per_second <= _FASTEST
    )
    return steps_per_second if believed else None


def repeat_upload(request: FleetRequest, hosts: Iterable[str], now_ns: int) -> FleetRequest:
    """Returns the request with hosts that must upload their files again, as those were lost."""
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
    return (
        request
        if request.ended
        else _set_state(request, "cancelled", now_ns, "cancelled", "it was cancelled")
    )


def advance_request(request: FleetRequest, now_ns: int) -> FleetRequest:
    """Returns the request advanced by one transition, or the same object if none is due.

    Call it until the object does not change. `finish_stitching` and `finish_analysis` leave the
    states `stitching` and `analysing`.
    """
    hosts = request.hosts
    if request.state == "announced":
        late = now_ns >= request.since_ns + _ARM_TIMEOUT_NS
        if not late and any(not progress.state for progress in hosts.values()):
            return request  # fast path: true after nearly every report of a thousand hosts
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
            # Some of its processes are ready, or will be.
            ready |= open_hosts.keys() - missing.keys()
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
    """Returns the request once its parts are merged into a capture; `faults` lists problems of
    parts.
    """
    return _set_state(
        replace(request, capture=capture), "analysing", now_ns, detail="; ".join(faults)[:4000]
    )


def finish_analysis(request: FleetRequest, now_ns: int, fault: str = "") -> FleetRequest:
    """Returns the request once its capture is analysed, or failed (`fault`).

    It is `partial` if something of a host is missing.
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
    """Returns the current work of a host; None if it has no more work for the request."""
    progress = request.hosts.get(host)
    if progress is None or progress.ended or request.ended:
        return None
    spec = replace(request.spec, host="", at_ns=0)
    if not request.start_ns:
        return HostWork(request=request.id, step="arm", spec=spec, start=request.start)
    return HostWork(
        request=request.id,
        step="start",
        spec=spec,
        start=request.start,
        at_ns=progress.at_ns,
        at_step=request.start_step,
    )


# Private.


def _set_state(
    request: FleetRequest, state: FleetState, now_ns: int, reason: str = "", detail: str = ""
) -> FleetRequest:
    return replace(request, state=state, since_ns=now_ns, reason=reason, detail=detail)


def _fail_hosts(
    request: FleetRequest, faults: Mapping[str, tuple[str, str]], now_ns: int
) -> FleetRequest:
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
    """Returns the time between the decision and the start, in ns.

    It follows the slowest armed host, by the delay of its answer.
    """
    answers = (
        status.answered_ns - request.since_ns
        for status in request.hosts.values()
        if status.state == "armed"
    )
    return min(_LEAD_NS + _ROUND_TRIPS * max(answers, default=0), _MOST_LEAD_NS)


def _set_start(request: FleetRequest, now_ns: int) -> FleetRequest:
    """Returns the request with a common start: a step if requested and possible, else an
    instant.
    """
    if request.start == "step":
        reason, steps_made, rate = _estimate_steps(request, now_ns)
        if not reason:
            # No clock gives the time: twice the margin.
            possible = steps_made + math.ceil(rate * 2 * _compute_lead_ns(request) / _SECOND_NS) + 1
            step = max(request.at_step, possible)
            if 0 < request.at_step < step:
                reason = f"step {request.at_step} is too near: all can begin with step {step}"
            start_ns = now_ns + int(min((step - steps_made) / rate, _MAX_AHEAD_S) * _SECOND_NS)
            request = _set_start_time(replace(request, earliest_ns=start_ns), now_ns)
            return replace(request, start_step=step, start_detail=reason)
        request = replace(request, start_detail=f"they begin at one instant: {reason}")
    return _set_start_time(request, now_ns)


def _estimate_steps(request: FleetRequest, now_ns: int) -> tuple[str, int, float]:
    """Returns why there is no common step ("" if there is), the steps done by now, and steps per
    second.
    """
    if request.spec.steps is None or request.spec.profilers != ("timeline",):
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
    # Two steps, or the steps of a second.
    if steps_by_process[last] - steps_by_process[first] > max(2.0, *rates):
        return (
            f"{first} has made {steps_by_process[first]:.0f} steps, {last} {steps_by_process[last]:.0f}",
            0,
            0.0,
        )
    return "", math.ceil(steps_by_process[last]), max(rates)


def _set_start_time(request: FleetRequest, now_ns: int) -> FleetRequest:
    """Returns the request with a common start instant, in each host's own clock.

    An unknown clock is assumed correct: its host takes part, and the capture states it.
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
    """Returns how long after the start a host may still be tracing, in ns."""
    seconds = request.spec.duration_s
    if seconds is None:
        rates = [
            process.steps_per_second
            for progress in request.hosts.values()
            for process in progress.processes
            if process.steps_per_second
        ]
        seconds = (
            (request.spec.steps or 0) * min(2 / min(rates), _MAX_STEP_S) if rates else _MAX_STEP_S
        )
    return int(min(seconds, _MAX_AHEAD_S) * _SECOND_NS) + _READY_TIMEOUT_NS + _DRAIN_TIMEOUT_NS


def _describe_missing(request: FleetRequest) -> str:
    """Returns a sentence that lists what is missing by host; "" if nothing is."""
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


def format_rank_runs(ranks: Sequence[int]) -> list[str]:
    """Formats sorted ranks as ranges: 0, 1, 2, 5 as `0-2` and `5`."""
    return [str(first) if first == last else f"{first}-{last}" for first, last in find_runs(ranks)]


def _format_ranks(ranks: tuple[int, ...]) -> str:
    texts = format_rank_runs(ranks)
    ellipsis = ", ..." if len(texts) > _MAX_NAMED else ""
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts[:_MAX_NAMED])}{ellipsis}"
        if ranks
        else ""
    )
