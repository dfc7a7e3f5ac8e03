"""Rules of the fleet at work: asks the desk for what they want, as far as cooldown and budget allow it.

Refusals are counted, and the last one of each rule is kept with its reason. What rules did and cost is in the state.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from traceloom.agent.http.answers import RequestError
from traceloom.agent.requests.model import Cause
from traceloom.agent.triggers import Firing
from traceloom.agent.triggers.store import Fired, Refused, RuleCounts
from traceloom.agent.triggers.targets import TriggerRefusal
from traceloom.agent.uplink.messages import HostProcess
from traceloom.collect.hosts import HostDesk
from traceloom.collect.plan import FleetRequest
from traceloom.collect.trigger_ledger import DAY_NS, FleetCharge, FleetLedger
from traceloom.collect.trigger_rules import AnyFleetRule, FleetCadenceRule, FleetRule, FleetRules, UsageRule
from traceloom.collect.trigger_watches import (
    FleetCadenceWatch,
    FleetUsage,
    Jobs,
    NewsWatch,
    TableNews,
    UsageWatch,
    table_news,
)
from traceloom.errors import InputError, TraceloomError
from traceloom.store.tables import Tables

LOG = logging.getLogger("traceloom.collect")
_LOOK_S = 2.0
_NEWS_NS = 120 * 10**9  # between looks at the tables
_AGAIN_NS = 60 * 10**9  # after a refusal, while what the rule watches for goes on
_NEVER_NS = 1 << 63
_MOST_TRIED = 8192
# An agent makes steps of several ranks a window by time, which leaves room for a profiler that slows them down.
_STEPS_MARGIN, _SHORTEST_S = 3, 0.5
_WEEK_NS = 7 * DAY_NS  # the longest cooldown


class _Attempt(NamedTuple):
    """What became of a rule and a job last: which occurrence that was, and from when on it is tried again."""

    episode: str
    again_ns: int


class FleetTriggers:
    """All rules of the fleet. Lives in the loop of the service that leads.

    Args:
        desk: Takes the requests, and knows which jobs run; its clock is the one of the rules.
        tables: Say what captures showed.
    """

    def __init__(self, desk: HostDesk, tables: Tables) -> None:
        self.desk, self.tables = desk, tables
        self.text = ""
        self.rules: dict[str, AnyFleetRule] = {}
        self.counts: dict[str, RuleCounts] = {}
        self.ledger = FleetLedger(FleetRules().budget)
        self.trouble = ""  # why the rules that are on record cannot be used
        self.defects: dict[str, str] = {}  # rule, or "" for all of them -> what went wrong when it was looked at last
        self._usage = FleetUsage()
        self._watches: dict[str, FleetCadenceWatch | UsageWatch | NewsWatch] = {}
        self._kept: dict[str, RuleCounts] = {}  # of all rules that ever were
        self._tried: dict[tuple[str, str], _Attempt] = {}
        self._changed: set[str] = set()  # rules whose counts are not written yet
        self._news_ns = 0
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take up what is on record, and begin."""
        text = await asyncio.to_thread(self.desk.state.trigger_rules)
        charges, counts = await asyncio.to_thread(self.desk.state.trigger_documents)
        self._kept = {name: msgspec.json.decode(document, type=RuleCounts) for name, document in counts.items()}
        try:
            self._take(text, FleetRules.of(text))
        except InputError as error:  # somebody has changed them in the database
            self.trouble = str(error)
        now_ns = self.desk.clock()
        self.ledger.add((msgspec.json.decode(document, type=FleetCharge) for document in charges), now_ns)
        # A service that was killed between a request and its charge still has the request.
        for request in self.desk.requests.values():
            if request.trigger is not None and request.id not in self.ledger.charges:
                rates = [process.steps_per_second or 0.0 for process in self._jobs().get(request.wanted.job, ())]
                charge = FleetCharge(
                    request=request.id, rule=request.trigger.rule, job=request.trigger.target,
                    at_ns=request.asked_ns, steps=self._steps(request, max(rates, default=0.0)),
                    bytes=self.ledger.reserve(1),
                )  # fmt: skip
                self.ledger.add([charge], now_ns)
        self.desk.on_usage = self._usage.hear
        self._running = asyncio.create_task(self._look_for_ever(), name="triggers of the fleet")

    async def close(self) -> None:
        """Stop; what was asked for goes on."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def set_rules(self, text: str) -> None:
        """Put rules in the place of those before; what those of the same names did stays counted.

        Raises:
            InputError: `wrong-config`; those before stay.
        """
        rules = FleetRules.of(text)
        await asyncio.to_thread(self.desk.state.set_trigger_rules, text)
        self._take(text, rules)

    def jobs_of(self, rule: FleetRule) -> Jobs:
        """Jobs that run now and that the rule is about, with their processes."""
        return {job: of_job for job, of_job in self._jobs().items() if any(map(rule.takes, of_job))}

    async def tick(self, news: TableNews | None = None) -> None:
        """Settle what has ended, look at all rules, and ask for what they want.

        Args:
            news: What the tables say that they did not say before.
        """
        now_ns = self.desk.clock()
        # What was measured stands in the place of what was set aside, for requests that have ended.
        settled = []
        for charge in self.ledger.charges.values():
            request = self.desk.requests.get(charge.request)
            if charge.settled or (request is not None and not request.ended):
                continue
            if request is not None:  # of one that was forgotten nobody knows more
                targets = [target for progress in request.hosts.values() for target in progress.targets]
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
        gone = self.ledger.forget(now_ns - _WEEK_NS)
        self._usage.forget(now_ns)
        jobs = self._jobs()
        for name, rule in self.rules.items():
            watch = self._watches[name]
            try:
                if news is not None and isinstance(watch, NewsWatch):
                    watch.hear(news)
                for firing in list(watch.look(now_ns)):
                    await self._try(rule, firing, jobs, now_ns)
            except TraceloomError:  # of the state, which the others need as well
                raise
            except Exception as error:  # a defect of one rule must not stop the others
                if name not in self.defects:
                    LOG.exception("trigger %s has a defect", name)
                self.defects[name] = f"{type(error).__name__}: {error}"
            else:
                self.defects.pop(name, None)
        await self._write(settled, gone)

    # Inside.

    def _take(self, text: str, rules: FleetRules) -> None:
        self.text, self.trouble = text, ""
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
                self._watches[rule.name] = NewsWatch(rule, jobs)
        self._usage.keep_minutes = max(
            (rule.minutes for rule in rules.triggers if isinstance(rule, UsageRule)), default=0
        )  # fmt: skip
        self._tried, self.defects = {}, {}

    def _jobs(self) -> Jobs:
        """Processes of jobs that run now."""
        jobs: dict[str, list[HostProcess]] = defaultdict(list)
        for now in self.desk.fresh().values():
            for process in now.heartbeat.processes:
                if process.job:
                    jobs[process.job].append(process)
        return jobs

    async def _try(self, rule: FleetRule, firing: Firing, jobs: Jobs, now_ns: int) -> None:
        """Make the request, or count why there is none; once per occurrence, and now and then while it goes on."""
        job = firing.labels.get("job", "")
        of_job = jobs.get(job, ())
        if of_job and not any(map(rule.takes, of_job)):
            return
        key, tried = (rule.name, job), self._tried.get((rule.name, job))
        if tried is not None and tried.episode == firing.episode and now_ns < tried.again_ns:
            return
        refusal = await self._request(rule, firing, job, of_job, now_ns)
        again_ns = now_ns + _AGAIN_NS
        if refusal is None:
            again_ns = now_ns + int(rule.cooldown * 1e9) if firing.lasts else _NEVER_NS
        else:
            counts = self.counts[rule.name]
            counts.refusals[refusal.reason] = counts.refusals.get(refusal.reason, 0) + 1
            counts.last_refusal = Refused(
                at_ns=now_ns, target=job, what=firing.what, uid=-1, reason=refusal.reason, detail=refusal.detail
            )
            self._changed.add(rule.name)
        self._tried.pop(key, None)  # the one that was tried last stands last
        self._tried[key] = _Attempt(firing.episode, again_ns)
        if len(self._tried) > _MOST_TRIED:
            del self._tried[next(iter(self._tried))]

    async def _request(
        self,
        rule: FleetRule,
        firing: Firing,
        job: str,
        of_job: Sequence[HostProcess],
        now_ns: int,
    ) -> TriggerRefusal | None:
        """Ask the desk; why not, where it is refused."""
        if not of_job:
            return TriggerRefusal("no-such-job", "no host of late has processes of it")
        if any(request.wanted.job == job and not request.ended for request in self.desk.requests.values()):
            return TriggerRefusal("traced", "it is being traced already")
        if cooling := self.ledger.cooling(rule.name, job, rule.cooldown, now_ns):
            return TriggerRefusal("cooldown", f"it was traced of late: not for {cooling:.0f} s")
        rate = max((process.steps_per_second or 0.0 for process in of_job), default=0.0)  # its fastest rank's
        made = max((process.steps for process in of_job if process.steps is not None), default=0)
        if not rate:
            return TriggerRefusal("no-steps", "no host says how fast it steps")
        wanted, choice = rule.wanted(job), "slowest-and-median" if rule.target == "slowest-and-median" else ""
        cause = Cause(rule=rule.name, target=job, what=firing.what)
        steps = self._steps(FleetRequest(id="", who="", asked_ns=now_ns, wanted=wanted), rate)
        processes = 2 if choice else sum(process.polls for process in of_job)
        files = max(processes, 1) * len(rule.profilers)
        made_of_day = min(made, math.ceil(rate * 86_400))
        if refusal := self.ledger.refusal(job, steps, made_of_day, files, now_ns):
            return refusal
        try:
            request = await self.desk.submit(
                wanted, f"trigger {rule.name}", "slowest-and-median" if choice else "", hosts=rule.hosts, trigger=cause
            )
        except RequestError as error:
            return TriggerRefusal(error.slug, error.message)
        charge = FleetCharge(
            request=request.id, rule=rule.name, job=job, at_ns=request.asked_ns, steps=steps,
            bytes=self.ledger.reserve(files),
        )  # fmt: skip
        self.ledger.add([charge], now_ns)
        counts = self.counts[rule.name]
        counts.fired += 1
        counts.last = Fired(at_ns=now_ns, request=request.id, target=job, what=firing.what, uid=-1)
        self._changed.add(rule.name)
        await self._write([charge], [])
        await asyncio.to_thread(
            self.desk.state.note, f"trigger {rule.name}", "trigger", "done",
            {"request": request.id, "job": job, "why": firing.what},
        )  # fmt: skip
        return None

    @staticmethod
    def _steps(request: FleetRequest, rate: float) -> int:
        """Steps that a request traces at most, as far as it can be said before; `rate`: of its job, 0 if unknown."""
        wanted = request.wanted
        if wanted.duration_s is not None:
            return math.ceil(wanted.duration_s * rate) + 1
        return max(_STEPS_MARGIN * ((wanted.steps or 0) + 1), math.ceil(_SHORTEST_S * rate))

    async def _write(self, charges: list[FleetCharge], gone: list[str]) -> None:
        changed, self._changed = self._changed, set()
        if charges or gone or changed:
            documents = {charge.request: msgspec.json.encode(charge).decode() for charge in charges}
            counts = {name: msgspec.json.encode(self._kept[name]).decode() for name in changed}
            await asyncio.to_thread(self.desk.state.put_trigger_documents, documents, counts, gone)

    async def _look_for_ever(self) -> None:
        while True:
            try:
                now_ns, news = self.desk.clock(), None
                if now_ns - self._news_ns >= _NEWS_NS:
                    self._news_ns = now_ns
                    news = await asyncio.to_thread(table_news, self.desk.state, self.tables, now_ns)
                    asked = {request.capture for request in self.desk.requests.values() if request.trigger is not None}
                    findings = [finding for finding in news.findings if finding.capture not in asked]
                    news = news._replace(findings=findings)
                await self.tick(news)
                self.defects.pop("", None)
            except TraceloomError as error:
                LOG.warning("triggers: %s", error)
                self.defects[""] = str(error)
            except Exception as error:
                LOG.exception("triggers have a defect")
                self.defects[""] = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_LOOK_S)
