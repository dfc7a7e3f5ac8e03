"""The fleet's trigger engine: cadence, usage, finding and regression rules, and their budget.

Refusals are counted, and the last one of each rule is kept with its reason. Counts and charges are
in the state.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import msgspec
import polars as pl

from traceloom.agent.fleet_link.protocol import HostProcess, UsageRow
from traceloom.agent.traces.requests import TriggerCause
from traceloom.agent.triggers.store import (
    DAY_NS,
    BaseCharge,
    LastFiring,
    LastRefusal,
    Ledger,
    RuleCounts,
    TriggerRefusal,
)
from traceloom.agent.triggers.watches import Occurrence
from traceloom.errors import InputError, TraceloomError
from traceloom.fleet.analyses.regressions import ChangeRow
from traceloom.fleet.handlers.now import find_slower_kernels
from traceloom.fleet.rules import (
    AnyFleetRule,
    FindingTriggerRule,
    FleetBudget,
    FleetCadenceRule,
    FleetRule,
    FleetRules,
    RegressionRule,
    UsageRule,
)
from traceloom.fleet.service.request_plan import FleetRequest
from traceloom.fleet.service.requests import HostRegistry
from traceloom.fleet.service.webhooks import build_fleet_event
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.rules import FleetEvent
from traceloom.fleet.store.tables import Tables
from traceloom.server.problem import HttpError
from traceloom.system.units import format_duration, format_percent, format_size


class FleetCharge(BaseCharge, kw_only=True):
    """Cost of a rule's request: traced steps and stored bytes."""

    job: str
    steps: int

    @property
    def scope(self) -> tuple[object, ...]:
        """The rule and the job."""
        return self.rule, self.job


class FleetLedger(Ledger[FleetCharge, FleetBudget]):
    """All charges of the rules of the fleet."""

    def refusal(
        self, job: str, steps: int, steps_made: int, files: int, now_ns: int
    ) -> TriggerRefusal | None:
        """Returns why a job cannot be traced for a number of steps; None if it can.

        Args:
            job: Its name.
            steps: Steps to trace.
            steps_made: Steps of the job in the last day.
            files: Number of files to store.
            now_ns: Now.
        """
        counting, budget = self.list_counted(now_ns), self.budget
        if len(counting) + 1 > budget.traces_per_day:
            return TriggerRefusal(
                "budget-traces", f"the {budget.traces_per_day} of `budget.traces_per_day` were made"
            )
        requested_bytes, remaining = self.reserve(files), self.bytes_left(now_ns)
        if requested_bytes > remaining:
            return TriggerRefusal(
                "budget-bytes",
                f"{format_size(requested_bytes)} are to be set aside, and {format_size(max(remaining, 0))} of `budget.mb_per_day` are left",
            )
        spent = sum(charge.steps for charge in counting if charge.job == job)
        if spent + steps > budget.share * steps_made:
            return TriggerRefusal(
                "budget-share",
                f"{spent} of the {steps_made} steps that the job made in a day were traced, and {steps} more are above what "
                "`budget.share` allows",
            )
        return None

    def traces_left(self, now_ns: int) -> int:
        """Returns how many traces the budget still allows."""
        return max(self.budget.traces_per_day - len(self.list_counted(now_ns)), 0)


Jobs = Mapping[str, Sequence[HostProcess]]
_HOUR_NS, _MINUTE_NS = 3600 * 10**9, 60 * 10**9
_MAX_JOBS = 20_000


class FleetCadenceWatch:
    """Chooses jobs by a hash of rule, job and day, so that a restarted service chooses the same
    ones.

    Args:
        rule: The rule.
        jobs: Returns the running jobs.
        fired_ns: Returns when the rule last traced a job.
    """

    def __init__(
        self,
        rule: FleetCadenceRule,
        jobs: Callable[[], Jobs],
        fired_ns: Callable[[str], int | None],
    ) -> None:
        self._rule, self._jobs, self._fired_ns = rule, jobs, fired_ns
        self._first: dict[str, int] = {}  # job -> when it was first seen

    def check(self, now_ns: int) -> Iterator[Occurrence]:
        """Yields jobs whose time of this day has come."""
        self._first = {job: self._first.get(job, now_ns) for job in self._jobs()}
        day = now_ns // DAY_NS
        for job, first_ns in self._first.items():
            digest = hashlib.sha256(f"{self._rule.name}\0{job}\0{day}".encode()).digest()
            is_selected = int.from_bytes(digest[:8], "big") < self._rule.share * 2**64
            due_ns = (
                max(day * DAY_NS, first_ns)
                + int.from_bytes(digest[8:16], "big") * _HOUR_NS // 2**64
            )
            if not is_selected or now_ns < due_ns:
                continue
            fired_ns = self._fired_ns(job)
            if fired_ns is None or fired_ns < day * DAY_NS:
                description = f"one of the {format_percent(self._rule.share)} % of jobs that are traced each day"
                yield Occurrence({"job": job}, f"{self._rule.name}#{day}", description)


class FleetUsage:
    """Usage of devices by job and minute, as reported by hosts."""

    def __init__(self) -> None:
        self.keep_minutes = 0  # as many as the longest window of a rule
        # Job -> (minute, host) -> (held, busy).
        self._minutes: dict[str, dict[tuple[int, str], tuple[int, int]]] = {}

    def hear(self, host: str, rows: Iterable[UsageRow]) -> None:
        """Adds minutes of a host, replacing earlier values of the same minutes."""
        if not self.keep_minutes:
            return
        amounts: dict[tuple[str, int], tuple[int, int]] = {}
        for row in rows:
            if row.job:
                held_ms, busy = amounts.get((row.job, row.minute), (0, 0))
                amounts[row.job, row.minute] = (
                    held_ms + row.device_ms,
                    busy + (row.device_ms if row.state == "busy" else 0),
                )
        for (job, minute), amount in amounts.items():
            if job in self._minutes or len(self._minutes) < _MAX_JOBS:
                self._minutes.setdefault(job, {})[minute, host] = amount

    def forget(self, now_ns: int) -> None:
        """Drops minutes that no rule needs."""
        # Hosts report a minute after it has ended, or later.
        oldest = now_ns // _MINUTE_NS - self.keep_minutes - 5
        for job, minutes in list(self._minutes.items()):
            recent = {key: amount for key, amount in minutes.items() if key[0] >= oldest}
            if recent:
                self._minutes[job] = recent
            else:
                del self._minutes[job]

    def busy(self, job: str, minutes: int) -> tuple[int, float] | None:
        """Returns the last minute of a job, and the busy share of its device time in the window up
        to it.

        Returns None if one of the `minutes` is missing.
        """
        amounts = self._minutes.get(job, {})
        last = max((minute for minute, _ in amounts), default=0)
        window = {key: amount for key, amount in amounts.items() if key[0] > last - minutes}
        if len({minute for minute, _ in window}) < minutes:
            return None
        held_ms = sum(amount[0] for amount in window.values())
        return last, sum(amount[1] for amount in window.values()) / held_ms if held_ms else 0.0


class UsageWatch:
    """Fires while a job's busy share is too low.

    Args:
        rule: Threshold and window.
        jobs: Returns the running jobs.
        usage: Their usage.
    """

    def __init__(self, rule: UsageRule, jobs: Callable[[], Jobs], usage: FleetUsage) -> None:
        self._rule, self._jobs, self._usage = rule, jobs, usage

    def check(self, now_ns: int) -> Iterator[Occurrence]:
        """Yields jobs whose busy share is too low."""
        oldest = now_ns // _MINUTE_NS - self._rule.minutes - 5
        for job in self._jobs():
            busy = self._usage.busy(job, self._rule.minutes)
            if busy is not None and busy[0] > oldest and busy[1] < self._rule.busy_below:
                text = format_duration(self._rule.minutes * _MINUTE_NS)
                description = f"it computed in {format_percent(busy[1])} % of its device time in the last {text}"
                yield Occurrence({"job": job}, self._rule.name, description, lasts=True)


class CaptureFinding(NamedTuple):
    """A new finding of a capture.

    `saving`: share of the step, 0.0 if it saves no time.
    """

    capture: str
    job: str
    slug: str
    saving: float


class TableEvents(NamedTuple):
    """New findings and regressions in the tables."""

    findings: list[CaptureFinding]
    regressions: list[ChangeRow]


class TableEventWatch:
    """Fires once for each new finding or regression that matches a rule."""

    def __init__(self, rule: FindingTriggerRule | RegressionRule, jobs: Callable[[], Jobs]) -> None:
        self._rule, self._jobs = rule, jobs
        self._firings: list[Occurrence] = []

    def hear(self, news: TableEvents) -> None:
        """Queues occurrences for matching events."""
        if isinstance(self._rule, FindingTriggerRule):
            for finding in news.findings:
                if finding.slug == self._rule.slug and finding.saving >= self._rule.saving:
                    description = f"`{finding.slug}` in {finding.capture} saves {format_percent(finding.saving)} % of the step"
                    self._firings.append(
                        Occurrence({"job": finding.job}, finding.capture, description)
                    )
            return
        running = self._jobs()
        for change in news.regressions:
            if change["change"] >= self._rule.by:
                shows = [job for job in change["jobs"] if job in running] or change["jobs"]
                description = f"`{change['kernel'][:200]}` takes {format_percent(change['change'])} % longer than before"
                labels = {"job": shows[0]} if shows else {}
                self._firings.append(
                    Occurrence(labels, f"{_hash_series(change)}#{change['since_ns']}", description)
                )

    def check(self, now_ns: int) -> Iterator[Occurrence]:  # noqa: ARG002  (of the protocol)
        """Yields occurrences since the last call."""
        firings, self._firings = self._firings, []
        yield from firings


def collect_table_events(state: ServiceState, tables: Tables, now_ns: int) -> TableEvents:
    """Collects events of captures analysed since the last call, and queues webhook events of new
    regressions. Blocks.
    """
    through, committed = state.newly_committed()
    if not committed:
        state.note_committed(through)
        return TableEvents([], [])
    jobs = {capture.capture: capture.job for capture in committed if capture.job}
    findings = [
        CaptureFinding(capture, jobs[capture], slug, saving)
        for capture, slug, saving in tables.scan("findings")
        .filter(pl.col("capture").is_in(list(jobs)))
        .select("capture", "slug", saving=pl.col("saving_fraction").fill_null(0.0))
        .collect()
        .iter_rows()
    ]
    changes: dict[str, ChangeRow] = {}
    for change in find_slower_kernels(tables, now_ns).iter_rows(named=True):
        row = cast("ChangeRow", change)
        changes.setdefault(_hash_series(row), row)

    def event(series: str) -> FleetEvent:
        identity = f"{series[:16]}.{changes[series]['since_ns']}"
        return build_fleet_event("regression.new", "regression", identity, changes[series], now_ns)

    since_ns = {series: change["since_ns"] for series, change in changes.items()}
    new = state.add_regressions(since_ns, DAY_NS, event)
    state.note_committed(through)
    return TableEvents(findings, [changes[series] for series in new])


def _hash_series(change: ChangeRow) -> str:
    """Returns a short identifier of a change's series; names of kernels are long."""
    text = "\0".join((change["kernel"], change["shapes"] or "", change["device_model"] or ""))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


LOG = logging.getLogger("traceloom.collect")
_POLL_S = 2.0
_TABLE_POLL_NS = 120 * 10**9  # between polls of the tables
_RETRY_AFTER_NS = 60 * 10**9  # after a refusal, while the condition persists
_NEVER_NS = 1 << 63
_MAX_ATTEMPTS = 8192
# Agents trace several steps per rank in a time window, with margin for slow profilers.
_STEPS_MARGIN, _SHORTEST_S = 3, 0.5
_WEEK_NS = 7 * DAY_NS  # the longest cooldown


class _Attempt(NamedTuple):
    """Last attempt of a rule for a job: the occurrence, and when to try again."""

    episode: str
    again_ns: int


class FleetTriggerEngine:
    """Evaluates all rules of the fleet. Runs in the event loop of the leading service.

    Args:
        registry: Takes requests, knows the running jobs, and provides the clock.
        tables: Source of findings and regressions.
    """

    def __init__(self, registry: HostRegistry, tables: Tables) -> None:
        self.registry, self.tables = registry, tables
        self.text = ""
        self.rules: dict[str, AnyFleetRule] = {}
        self.counts: dict[str, RuleCounts] = {}
        self.ledger = FleetLedger(FleetRules().budget)
        self.last_error = ""  # why the stored rules cannot be used
        # Rule, or "" for all -> error of its last evaluation.
        self.defects: dict[str, str] = {}
        self._usage = FleetUsage()
        self._watches: dict[str, FleetCadenceWatch | UsageWatch | TableEventWatch] = {}
        self._kept: dict[str, RuleCounts] = {}  # of all rules, including removed ones
        self._tried: dict[tuple[str, str], _Attempt] = {}
        self._changed: set[str] = set()  # rules whose counts are not stored yet
        self._news_ns = 0
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads the stored rules and charges, and starts."""
        text = await asyncio.to_thread(self.registry.state.trigger_rules)
        charges, counts = await asyncio.to_thread(self.registry.state.trigger_documents)
        self._kept = {
            name: msgspec.json.decode(document, type=RuleCounts)
            for name, document in counts.items()
        }
        try:
            self._take(text, FleetRules.of(text))
        except InputError as error:  # somebody changed them in the database
            self.last_error = str(error)
        now_ns = self.registry.clock()
        self.ledger.add(
            (msgspec.json.decode(document, type=FleetCharge) for document in charges), now_ns
        )
        # If the service was killed between a request and its charge, the request still exists.
        charged = {charge.request for charge in self.ledger.charges}
        for request in self.registry.requests.values():
            if request.trigger is not None and request.id not in charged:
                rates = [
                    process.steps_per_second or 0.0
                    for process in self._jobs().get(request.spec.job, ())
                ]
                charge = FleetCharge(
                    request=request.id,
                    rule=request.trigger.rule,
                    job=request.trigger.target,
                    at_ns=request.asked_ns,
                    steps=self._steps(request, max(rates, default=0.0)),
                    bytes=self.ledger.reserve(1),
                )
                self.ledger.add([charge], now_ns)
        self.registry.on_usage = self._usage.hear
        self._running = asyncio.create_task(self._look_for_ever(), name="triggers of the fleet")

    async def close(self) -> None:
        """Stops; requests continue."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def set_rules(self, text: str) -> None:
        """Replaces the rules; counts of rules with the same names are kept.

        Raises:
            InputError: `wrong-config`; the previous rules stay active.
        """
        rules = FleetRules.of(text)
        await asyncio.to_thread(self.registry.state.set_trigger_rules, text)
        self._take(text, rules)

    def jobs_of(self, rule: FleetRule) -> Jobs:
        """Returns running jobs that the rule covers, with their processes."""
        return {
            job: job_processes
            for job, job_processes in self._jobs().items()
            if any(map(rule.takes, job_processes))
        }

    async def tick(self, news: TableEvents | None = None) -> None:
        """Settles ended requests, evaluates all rules, and makes their requests.

        Args:
            news: New findings and regressions in the tables.
        """
        now_ns = self.registry.clock()
        # Measured costs replace the reserved ones of requests that have ended.
        settled = []
        for charge in self.ledger.charges:
            request = self.registry.requests.get(charge.request)
            if charge.settled or (request is not None and not request.ended):
                continue
            if request is not None:  # a forgotten request cannot be settled any better
                targets = [
                    target for progress in request.hosts.values() for target in progress.targets
                ]
                charge.bytes = sum(target.bytes or 0 for target in targets)
                if not targets:
                    charge.steps = 0
                elif all(target.steps is not None for target in targets if target.state == "kept"):
                    measured = max((target.steps or 0 for target in targets), default=0)
                    charge.steps = measured or charge.steps
            charge.settled = True
            settled.append(charge)
            if charge.rule in self.counts:
                self.counts[charge.rule].kept_bytes += charge.bytes
                self._changed.add(charge.rule)
        removed = [charge.request for charge in self.ledger.forget(now_ns - _WEEK_NS)]
        self._usage.forget(now_ns)
        jobs = self._jobs()
        for name, rule in self.rules.items():
            watch = self._watches[name]
            try:
                if news is not None and isinstance(watch, TableEventWatch):
                    watch.hear(news)
                for firing in list(watch.check(now_ns)):
                    await self._try(rule, firing, jobs, now_ns)
            except TraceloomError:  # a failure of the state, which the other rules need as well
                raise
            except Exception as error:  # a defect of one rule must not stop the others
                if name not in self.defects:
                    LOG.exception("trigger %s has a defect", name)
                self.defects[name] = f"{type(error).__name__}: {error}"
            else:
                self.defects.pop(name, None)
        await self._write(settled, removed)

    # Private.

    def _take(self, text: str, rules: FleetRules) -> None:
        self.text, self.last_error = text, ""
        self.rules = {rule.name: rule for rule in rules.triggers}
        self.counts = {name: self._kept.setdefault(name, RuleCounts()) for name in self.rules}
        self.ledger.budget = rules.budget
        self._watches = {}
        for rule in rules.triggers:
            jobs = partial(self.jobs_of, rule)
            if isinstance(rule, FleetCadenceRule):
                fired_ns = partial(self.ledger.fired_ns, rule.name)
                self._watches[rule.name] = FleetCadenceWatch(rule, jobs, fired_ns)
            elif isinstance(rule, UsageRule):
                self._watches[rule.name] = UsageWatch(rule, jobs, self._usage)
            else:
                self._watches[rule.name] = TableEventWatch(rule, jobs)
        self._usage.keep_minutes = max(
            (rule.minutes for rule in rules.triggers if isinstance(rule, UsageRule)), default=0
        )
        self._tried, self.defects = {}, {}

    def _jobs(self) -> Jobs:
        jobs: dict[str, list[HostProcess]] = defaultdict(list)
        for last in self.registry.fresh().values():
            for process in last.heartbeat.processes:
                if process.job:
                    jobs[process.job].append(process)
        return jobs

    async def _try(self, rule: FleetRule, firing: Occurrence, jobs: Jobs, now_ns: int) -> None:
        """Makes a request, or counts its refusal: once per occurrence, with retries while that
        lasts.
        """
        job = firing.labels.get("job", "")
        job_processes = jobs.get(job, ())
        if job_processes and not any(map(rule.takes, job_processes)):
            return
        key, last_attempt = (rule.name, job), self._tried.get((rule.name, job))
        if (
            last_attempt is not None
            and last_attempt.episode == firing.episode
            and now_ns < last_attempt.again_ns
        ):
            return
        refusal = await self._request(rule, firing, job, job_processes, now_ns)
        again_ns = now_ns + _RETRY_AFTER_NS
        if refusal is None:
            again_ns = now_ns + int(rule.cooldown * 1e9) if firing.lasts else _NEVER_NS
        else:
            counts = self.counts[rule.name]
            counts.refusals[refusal.reason] = counts.refusals.get(refusal.reason, 0) + 1
            counts.last_refusal = LastRefusal(
                at_ns=now_ns,
                target=job,
                what=firing.what,
                uid=-1,
                reason=refusal.reason,
                detail=refusal.detail,
            )
            self._changed.add(rule.name)
        self._tried.pop(key, None)  # keeps the dict in order of the last attempt
        self._tried[key] = _Attempt(firing.episode, again_ns)
        if len(self._tried) > _MAX_ATTEMPTS:
            del self._tried[next(iter(self._tried))]

    async def _request(
        self,
        rule: FleetRule,
        firing: Occurrence,
        job: str,
        job_processes: Sequence[HostProcess],
        now_ns: int,
    ) -> TriggerRefusal | None:
        """Submits a request; returns the refusal, if any."""
        if not job_processes:
            return TriggerRefusal("no-such-job", "no host of late has processes of it")
        if any(
            request.spec.job == job and not request.ended
            for request in self.registry.requests.values()
        ):
            return TriggerRefusal("traced", "it is being traced already")
        if cooling := self.ledger.cooling((rule.name, job), rule.cooldown, now_ns):
            return TriggerRefusal("cooldown", f"it was traced of late: not for {cooling:.0f} s")
        # The rate of its fastest rank.
        rate = max((process.steps_per_second or 0.0 for process in job_processes), default=0.0)
        steps_made = max(
            (process.steps for process in job_processes if process.steps is not None), default=0
        )
        if not rate:
            return TriggerRefusal("no-steps", "no host says how fast it steps")
        spec, choice = (
            rule.make_spec(job),
            "slowest-and-median" if rule.target == "slowest-and-median" else "",
        )
        cause = TriggerCause(rule=rule.name, target=job, what=firing.what)
        steps = self._steps(FleetRequest(id="", who="", asked_ns=now_ns, spec=spec), rate)
        processes = 2 if choice else sum(process.polls for process in job_processes)
        files = max(processes, 1) * len(rule.profilers)
        made_of_day = min(steps_made, math.ceil(rate * 86_400))
        if refusal := self.ledger.refusal(job, steps, made_of_day, files, now_ns):
            return refusal
        try:
            request = await self.registry.submit(
                spec,
                f"trigger {rule.name}",
                "slowest-and-median" if choice else "",
                hosts=rule.hosts,
                trigger=cause,
            )
        except HttpError as error:
            return TriggerRefusal(error.slug, error.message)
        charge = FleetCharge(
            request=request.id,
            rule=rule.name,
            job=job,
            at_ns=request.asked_ns,
            steps=steps,
            bytes=self.ledger.reserve(files),
        )
        self.ledger.add([charge], now_ns)
        counts = self.counts[rule.name]
        counts.fired += 1
        counts.last = LastFiring(
            at_ns=now_ns, request=request.id, target=job, what=firing.what, uid=-1
        )
        self._changed.add(rule.name)
        await self._write([charge], [])
        await asyncio.to_thread(
            self.registry.state.note,
            f"trigger {rule.name}",
            "trigger",
            "done",
            {"request": request.id, "job": job, "why": firing.what},
        )
        return None

    @staticmethod
    def _steps(request: FleetRequest, rate: float) -> int:
        """Returns the max steps of a request, as far as known in advance; `rate`: of its job, 0 if
        unknown.
        """
        spec = request.spec
        if spec.duration_s is not None:
            return math.ceil(spec.duration_s * rate) + 1
        return max(_STEPS_MARGIN * ((spec.steps or 0) + 1), math.ceil(_SHORTEST_S * rate))

    async def _write(self, charges: list[FleetCharge], removed: list[str]) -> None:
        changed, self._changed = self._changed, set()
        if charges or removed or changed:
            documents = {charge.request: msgspec.json.encode(charge).decode() for charge in charges}
            counts = {name: msgspec.json.encode(self._kept[name]).decode() for name in changed}
            await asyncio.to_thread(
                self.registry.state.put_trigger_documents, documents, counts, removed
            )

    async def _look_for_ever(self) -> None:
        while True:
            try:
                now_ns, events = self.registry.clock(), None
                if now_ns - self._news_ns >= _TABLE_POLL_NS:
                    self._news_ns = now_ns
                    events = await asyncio.to_thread(
                        collect_table_events, self.registry.state, self.tables, now_ns
                    )
                    requested_captures = {
                        request.capture
                        for request in self.registry.requests.values()
                        if request.trigger is not None
                    }
                    findings = [
                        finding
                        for finding in events.findings
                        if finding.capture not in requested_captures
                    ]
                    events = events._replace(findings=findings)
                await self.tick(events)
                self.defects.pop("", None)
            except TraceloomError as error:
                LOG.warning("triggers: %s", error)
                self.defects[""] = str(error)
            except Exception as error:
                LOG.exception("triggers have a defect")
                self.defects[""] = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_POLL_S)
