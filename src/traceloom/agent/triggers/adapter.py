"""Evaluates the rules, requests traces within cooldown and budget, and counts refusals."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from traceloom.agent.audit import AuditLog
from traceloom.agent.config import (
    OWNER_LABELS,
    AnyRule,
    CadenceRule,
    Config,
    HangRule,
    MetricRule,
    OomKillRule,
    StepRegressionRule,
    TriggerRule,
    XidRule,
)
from traceloom.agent.metrics import Reading
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.traces.requests import TraceRequest, TraceSpec, TriggerCause
from traceloom.agent.traces.runner import TraceService
from traceloom.agent.triggers.store import (
    DAY_NS,
    Charge,
    LastFiring,
    LastRefusal,
    ProcessIndex,
    RuleCounts,
    TriggerLedger,
    TriggerRefusal,
    TriggerStore,
    TriggerTarget,
    filter_by_owner,
    select_targets,
)
from traceloom.agent.triggers.watches import (
    CadenceWatch,
    MetricWatch,
    Occurrence,
    OomKillWatch,
    SeriesValues,
    StepRegressionWatch,
    Watch,
    XidWatch,
    match_rule_series,
)
from traceloom.server.access import RefusalCounter
from traceloom.server.problem import HttpError

LOG = logging.getLogger("traceloom.agent")
DEFAULT_STEPS = 3
_RETRY_AFTER_NS = 60 * 10**9  # after a refusal, while the occurrence lasts
_NEVER_NS = 1 << 63
_ASSUMED_STEP_S = 1.0  # if the step rate of a process is unknown
_GIVE_WAY_S = 5.0
_MAX_ATTEMPTS = 8192  # (rule, target) pairs kept
_REFUSAL_REASONS = (
    "cooldown",
    "budget-share",
    "budget-bytes",
    "traced",
    "not-registered",
    "no-steps",
    "no-such-process",
)
# Failures of a target that mean that its process was not traced at all.
_UNTRACED_REASONS = frozenset(
    {"not-registered", "expired", "exited", "leased", "no-profiler", "not-stepping"}
)


# By user and target, so that several ranks of a job make one occurrence.
_Occurrences = dict[tuple[int, str], tuple[TriggerTarget, list[Occurrence]]]


class _Attempt(NamedTuple):
    """The last attempt of a rule for a target: its occurrences, and the time of the next retry."""

    episodes: frozenset[str]
    again_ns: int


class TriggerEngine:
    """All rules of this agent. Runs in its loop; writes in a thread.

    Args:
        config: The agent's, with the rules.
        host_snapshot: Measured values, events and processes.
        trace_service: Takes the requests, and knows running traces and step rates.
        store: Persists charges and counts.
        disk: The thread for that.
        audit: Logs requests and refusals.
        now_ns: Start of the agent, on the clock of `tick`.
        watches: Creates the watches of further kinds of rules, by `on`.
    """

    def __init__(  # noqa: PLR0917  (the parts of the agent)
        self,
        config: Config,
        host_snapshot: Snapshot,
        trace_service: TraceService,
        store: TriggerStore,
        disk: Executor,
        audit: AuditLog,
        now_ns: int,
        watches: Mapping[str, Callable[[AnyRule], Watch]] | None = None,
    ) -> None:
        self.rules: dict[str, AnyRule] = {rule.name: rule for rule in config.triggers}
        self.counts: dict[str, RuleCounts] = {name: RuleCounts() for name in self.rules}
        self.ledger = TriggerLedger(config.trigger_budget)
        self.store = store
        self.now_ns = now_ns  # at the last tick
        self._config, self._board, self._desk, self._disk, self._audit = (
            config,
            host_snapshot,
            trace_service,
            disk,
            audit,
        )
        self._values = SeriesValues(
            host_snapshot,
            [match_rule_series(rule) for rule in config.triggers if isinstance(rule, MetricRule)],
        )
        self._more = watches or {}
        self._index = ProcessIndex(host_snapshot)
        self.watches: dict[str, Watch | None] = {
            name: self._watch(rule, now_ns) for name, rule in self.rules.items()
        }
        self._defects: dict[str, str] = {}  # rule -> last exception of its watch
        self._refusals = RefusalCounter(lambda: self.now_ns / 1e9)
        self._tried: dict[tuple[str, int, str], _Attempt] = {}
        self._changed: set[str] = set()  # rules whose counts are not written yet

    async def start(self, now_ns: int) -> None:
        """Load the state of an earlier agent; the trace service must have been started."""
        charges, counts = await asyncio.get_running_loop().run_in_executor(
            self._disk, self.store.load
        )
        self.counts |= {name: stored for name, stored in counts.items() if name in self.rules}
        self.ledger.add(charges, now_ns)
        # Restore charges from requests if the agent was killed between the two, or the file of
        # charges was damaged.
        charged = {charge.request for charge in charges}
        missing = [
            charge
            for request in self._desk.requests.values()
            if request.trigger is not None and request.id not in charged
            for charge in self._charges(request, request.trigger, request.asked_ns)
        ]
        self.ledger.add(missing, now_ns)
        self._write(missing)

    async def tick(self, now_ns: int) -> None:
        """Settle ended requests, evaluate all rules, and request their traces.

        Args:
            now_ns: Nanoseconds since the epoch, of a clock that never jumps while the agent runs.
        """
        self.now_ns = now_ns
        self._settle()
        longest = max((rule.cooldown for rule in self.rules.values()), default=0.0)
        self._write(removed=self.ledger.forget(now_ns - max(DAY_NS, int(longest * 1e9))))
        self._values.refresh()
        for name, rule in sorted(self.rules.items(), key=lambda item: _get_priority(item[1])):
            watch = self.watches[name]
            try:
                occurrences: _Occurrences = {}
                for firing in () if watch is None else watch.check(now_ns):
                    for target in self._targets(rule, firing):
                        occurrences.setdefault((target.uid, target.key), (target, []))[1].append(
                            firing
                        )
                for target, firings in occurrences.values():
                    await self._try(rule, firings, target, now_ns)
            except Exception as error:  # a bug in one rule must not stop the others
                if name not in self._defects:
                    LOG.exception("trigger %s has a defect", name)
                self._defects[name] = f"{type(error).__name__}: {error}"
            else:
                self._defects.pop(name, None)
        self._write()

    def readings(self) -> list[Reading]:
        readings = [
            Reading(
                "trigger_budget_left_bytes", (), float(max(self.ledger.bytes_left(self.now_ns), 0))
            )
        ]
        for name, counts in self.counts.items():
            readings += [
                Reading("trigger_requests_total", (name,), float(counts.fired)),
                Reading("trigger_traced_seconds_total", (name,), counts.traced_seconds),
                Reading("trigger_kept_bytes_total", (name,), float(counts.kept_bytes)),
                *(
                    Reading("trigger_refusals_total", (name, reason), float(number))
                    # Zeros as well: Prometheus misses the first increment of a counter that starts
                    # at 1.
                    for reason, number in (
                        dict.fromkeys(_REFUSAL_REASONS, 0) | counts.refusals
                    ).items()
                ),
            ]
        return readings if self.rules else []

    def list_problems(self) -> dict[str, str]:
        """Returns rule -> why it cannot fire now; without rules that can."""
        problems = {}
        for name, watch in self.watches.items():
            rule = self.rules[name]
            reason = (
                f"this agent does not watch for `{get_rule_kind(rule)}`"
                if watch is None
                else watch.find_problem()
            )
            try:
                self._desk.check(_build_trace_spec(rule, (os.getpid(),), ""))
            except HttpError as error:
                reason = error.message
            if reason := self._defects.get(name, "") or reason:
                problems[name] = reason
        return problems

    def _watch(self, rule: AnyRule, now_ns: int) -> Watch | None:
        if get_rule_kind(rule) in self._more:
            return self._more[get_rule_kind(rule)](rule)
        if isinstance(rule, MetricRule):
            return MetricWatch(
                rule, self._values, lambda labels: bool(self._index.find_by_labels(labels))
            )
        if isinstance(rule, OomKillRule):
            return OomKillWatch(self._board)
        if isinstance(rule, XidRule):
            return XidWatch(rule, self._board)
        if isinstance(rule, StepRegressionRule):
            return StepRegressionWatch(
                rule,
                self._desk.steps,
                self._desk.is_traced,
                lambda key: key in self._board.processes,
            )
        return (
            CadenceWatch(rule, self._config.host_name, now_ns)
            if isinstance(rule, CadenceRule)
            else None
        )

    def _targets(self, rule: TriggerRule, firing: Occurrence) -> Iterable[TriggerTarget]:
        """Yields the targets of a rule for an occurrence; an event whose processes have all ended
        gets a refusal.
        """
        processes = self._index.find_by_labels(firing.labels)
        if not processes and firing.labels and not firing.lasts:
            owners = {label: value for label, value in rule.where.items() if label in OWNER_LABELS}
            if all(firing.labels.get(label) == value for label, value in owners.items()):
                return [
                    TriggerTarget(
                        -1,
                        next(filter(None, firing.labels.values()), ""),
                        (),
                        TriggerRefusal(
                            "no-such-process", "none of its processes is left on this host"
                        ),
                    )
                ]
        # Labels of the series itself need no confirmation by owners: a rank may be known from step
        # reports only.
        owner_filter = {
            label: value for label, value in rule.where.items() if firing.labels.get(label) != value
        }
        traceable = [
            process
            for process in filter_by_owner(processes, owner_filter)
            if os.geteuid() in (0, process.uid)
        ]
        return select_targets(
            rule, traceable, self._index, self._desk.registry.clients.keys(), self._desk.steps
        )

    async def _try(
        self, rule: TriggerRule, firings: list[Occurrence], target: TriggerTarget, now_ns: int
    ) -> None:
        """Make the request, or count the refusal; once per occurrence, and periodically while it
        lasts.
        """
        key, episodes = (
            (rule.name, target.uid, target.key),
            frozenset(firing.episode for firing in firings),
        )
        tried, firing = self._tried.get(key), firings[0]
        if tried is not None and episodes <= tried.episodes and now_ns < tried.again_ns:
            return
        cooling = self.ledger.cooling((rule.name, target.uid, target.key), rule.cooldown, now_ns)
        if cooling:
            refusal: TriggerRefusal | None = TriggerRefusal(
                "cooldown", f"it was traced of late: not for {cooling:.0f} s"
            )
        else:
            refusal = await self._request(rule, firing, target, now_ns)
        cooldown_ns = int((cooling or rule.cooldown) * 1e9)
        if refusal is None:
            retry_ns = now_ns + cooldown_ns if firing.lasts else _NEVER_NS
        else:
            retry_ns = now_ns + (cooldown_ns if cooling else _RETRY_AFTER_NS)
            counts = self.counts[rule.name]
            counts.refusals[refusal.reason] = counts.refusals.get(refusal.reason, 0) + 1
            counts.last_refusal = LastRefusal(
                at_ns=now_ns,
                target=target.key,
                what=firing.what,
                uid=target.uid,
                reason=refusal.reason,
                detail=refusal.detail,
            )
            self._changed.add(rule.name)
            times = self._refusals.count(rule.name, str(target.uid), target.key)
            if times:
                facts = {"target": target.key, "detail": refusal.detail, "why": firing.what}
                facts |= {"times": str(times)} if times > 1 else {}
                write = partial(
                    self._audit.write, f"trigger {rule.name}", "trigger", refusal.reason, **facts
                )
                self._disk.submit(write)
        self._tried.pop(key, None)  # keeps the order by the last attempt
        self._tried[key] = _Attempt(episodes, retry_ns)
        if len(self._tried) > _MAX_ATTEMPTS:
            del self._tried[next(iter(self._tried))]

    async def _request(
        self, rule: TriggerRule, firing: Occurrence, target: TriggerTarget, now_ns: int
    ) -> TriggerRefusal | None:
        """Submit the request; returns the refusal, if any."""
        if target.refusal is not None:
            return target.refusal
        spec = _build_trace_spec(
            rule, tuple(process.pid for process in target.processes), target.processes[0].owner.job
        )
        uid, cause = target.uid, TriggerCause(rule=rule.name, target=target.key, what=firing.what)

        def may_trace(owner: int) -> bool:
            return owner == uid

        try:
            processes = self._desk.matching(spec, may_trace)  # includes children of a launcher
            await self._give_way(rule, {process.key for process in processes})
            if any(self._desk.is_traced(process.key) for process in processes):
                return TriggerRefusal("traced", "it is being traced already")
            seconds = {process.key: self._seconds(spec, process.key) for process in processes}
            refusal = self.ledger.refusal(processes, seconds, len(rule.profilers), now_ns)
            if refusal is not None:
                return refusal
            request = await self._desk.submit(
                spec,
                f"trigger {rule.name}",
                may_trace,
                trigger=cause,
                max_bytes=self.ledger.reserve(1),
            )
        except HttpError as error:
            return TriggerRefusal(error.slug, error.message)
        charges = list(self._charges(request, cause, now_ns))
        self.ledger.add(charges, now_ns)
        counts = self.counts[rule.name]
        counts.fired += 1
        counts.last = LastFiring(
            at_ns=request.asked_ns, request=request.id, target=target.key, what=firing.what, uid=uid
        )
        self._changed.add(rule.name)
        self._write(charges)
        pids = sorted({traced_target.pid for traced_target in request.targets})
        facts = {"request": request.id, "of": uid, "pids": pids, "why": firing.what}
        self._disk.submit(
            partial(self._audit.write, f"trigger {rule.name}", "trigger", "done", **facts)
        )
        return None

    async def _give_way(self, rule: TriggerRule, processes: Collection[str]) -> None:
        """Cancels timelines of these processes that rules of a lower priority asked for: a cadence's
        waits for steps that a hanging job does not make.
        """
        for request in list(self._desk.requests.values()):
            other = self.rules.get(request.trigger.rule) if request.trigger is not None else None
            if (
                other is not None
                and not request.ended
                and _get_priority(other) > _get_priority(rule)
                and any(target.process in processes for target in request.targets)
            ):
                await self._desk.end(request, _GIVE_WAY_S)

    def _seconds(self, spec: TraceSpec, process: str) -> float:
        rate, max_seconds = self._desk.steps.per_second(process), self._config.traces.max_seconds
        step_seconds = 2 * ((spec.steps or 0) + 1) * (1 / rate if rate else _ASSUMED_STEP_S)
        return min(step_seconds if spec.duration_s is None else spec.duration_s, max_seconds)

    def _charges(self, request: TraceRequest, cause: TriggerCause, at_ns: int) -> Iterator[Charge]:
        """Yields the max charges of a request, one per process."""
        for process in dict.fromkeys(target.process for target in request.targets):
            files = sum(target.process == process for target in request.targets)
            yield Charge(
                request=request.id,
                process=process,
                rule=cause.rule,
                uid=request.uid,
                target=cause.target,
                at_ns=at_ns,
                seconds=self._seconds(request.spec, process),
                bytes=files * (request.max_bytes or self.ledger.reserve(1)),
            )

    def _settle(self) -> None:
        """Replace reserved charges by measured ones, for requests that have ended."""
        settled = []
        for charge in self.ledger.charges:
            if charge.settled:
                continue
            request = self._desk.requests.get(charge.request)
            if request is not None and not request.ended:
                continue
            if request is not None:  # a deleted request keeps its reserved charge
                seconds = [0.0]
                targets = [target for target in request.targets if target.process == charge.process]
                for target in targets:
                    if target.window_start_ns is not None and target.window_end_ns is not None:
                        window_ns = max(target.window_end_ns - target.window_start_ns, 0)
                        seconds.append(window_ns / 1e9 * target.attempt)
                    elif target.state != "failed" or target.reason not in _UNTRACED_REASONS:
                        seconds.append(charge.seconds)  # not measured: the reserved amount
                charge.seconds = max(seconds)
                charge.bytes = sum(target.bytes or 0 for target in targets)
            charge.settled = True
            settled.append(charge)
            counts = self.counts.get(charge.rule)
            if counts is not None:
                counts.traced_seconds += charge.seconds
                counts.kept_bytes += charge.bytes
                self._changed.add(charge.rule)
        if settled:
            self._write(settled)

    def _write(
        self, charges: list[Charge] | None = None, removed: list[Charge] | None = None
    ) -> None:
        """Pass copies of the changes to the disk's thread."""
        changed, self._changed = self._changed, set()
        if charges or removed or changed:
            rules = {name: copy.deepcopy(self.counts[name]) for name in changed}
            self._disk.submit(self.store.put, copy.deepcopy(charges or []), rules, removed or [])


def _build_trace_spec(rule: TriggerRule, pids: tuple[int, ...], job: str) -> TraceSpec:
    return TraceSpec(
        pids=pids,
        job=job,
        profilers=rule.profilers,
        steps=DEFAULT_STEPS if rule.steps is None and rule.duration is None else rule.steps,
        duration_s=rule.duration,
        shapes=rule.shapes,
        stacks=rule.stacks,
    )


def _get_priority(rule: AnyRule | TriggerRule) -> int:
    """Returns the place of a rule's kind: what will not come again goes first."""
    kinds: dict[type, int] = {HangRule: 0, OomKillRule: 1, XidRule: 2, CadenceRule: 4}
    return kinds.get(type(rule), 3)


def get_rule_kind(rule: AnyRule) -> str:
    """Returns the kind of a rule, the value of `on` in agent.toml."""
    return str(rule.__struct_config__.tag)
