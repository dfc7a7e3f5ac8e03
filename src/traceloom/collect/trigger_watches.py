"""What rules of the fleet watch for: the clock, how jobs use their devices, and what the tables say of new captures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import polars as pl

from traceloom.agent.triggers import Firing
from traceloom.agent.uplink.messages import HostProcess, UsageRow
from traceloom.collect.telling import fleet_event
from traceloom.collect.trigger_ledger import DAY_NS
from traceloom.collect.trigger_rules import FindingTriggerRule, FleetCadenceRule, RegressionRule, UsageRule
from traceloom.collect.watching import slower_kernels
from traceloom.fleet.regressions import ChangeRow
from traceloom.model.units import duration, per_cent
from traceloom.store.state import State
from traceloom.store.tables import Tables
from traceloom.store.webhook_state import FleetEvent

Jobs = Mapping[str, Sequence[HostProcess]]
_HOUR_NS, _MINUTE_NS = 3600 * 10**9, 60 * 10**9
_MOST_JOBS = 20_000


class FleetCadenceWatch:
    """Chooses a job by a hash of the rule, the job and the day, so that a service that starts again chooses alike.

    Args:
        rule: How many.
        jobs: Those that run now.
        fired_ns: When the rule last traced a job.
    """

    def __init__(
        self, rule: FleetCadenceRule, jobs: Callable[[], Jobs], fired_ns: Callable[[str], int | None]
    ) -> None:  # fmt: skip
        self._rule, self._jobs, self._fired_ns = rule, jobs, fired_ns
        self._first: dict[str, int] = {}  # job -> when it was first seen

    def look(self, now_ns: int) -> Iterator[Firing]:
        """Jobs whose instant of this day has come."""
        running = self._jobs()
        self._first = {job: self._first.get(job, now_ns) for job in running}
        day = now_ns // DAY_NS
        for job, first_ns in self._first.items():
            digest = hashlib.sha256(f"{self._rule.name}\0{job}\0{day}".encode()).digest()
            chosen = int.from_bytes(digest[:8], "big") < self._rule.share * 2**64
            due_ns = max(day * DAY_NS, first_ns) + int.from_bytes(digest[8:16], "big") * _HOUR_NS // 2**64
            if not chosen or now_ns < due_ns:
                continue
            fired_ns = self._fired_ns(job)
            if fired_ns is None or fired_ns < day * DAY_NS:
                what = f"one of the {per_cent(self._rule.share)} % of jobs that are traced each day"
                yield Firing({"job": job}, f"{self._rule.name}#{day}", what)


class FleetUsage:
    """What jobs had of their devices, minute by minute, as hosts told of it."""

    def __init__(self) -> None:
        self.keep_minutes = 0  # as many as the longest rule looks at
        self._minutes: dict[str, dict[tuple[int, str], tuple[int, int]]] = {}  # job -> (minute, host) -> (held, busy)

    def hear(self, host: str, rows: Iterable[UsageRow]) -> None:
        """Take minutes of a host; what it told before of the same minute this replaces."""
        if not self.keep_minutes:
            return
        amounts: dict[tuple[str, int], tuple[int, int]] = {}
        for row in rows:
            if row.job:
                held, busy = amounts.get((row.job, row.minute), (0, 0))
                amounts[row.job, row.minute] = (
                    held + row.device_ms, busy + (row.device_ms if row.state == "busy" else 0),
                )  # fmt: skip
        for (job, minute), amount in amounts.items():
            if job in self._minutes or len(self._minutes) < _MOST_JOBS:
                self._minutes.setdefault(job, {})[minute, host] = amount

    def forget(self, now_ns: int) -> None:
        """Drop minutes that no rule looks at."""
        oldest = now_ns // _MINUTE_NS - self.keep_minutes - 5  # hosts tell of a minute when it has ended, or later
        for job, minutes in list(self._minutes.items()):
            kept = {key: amount for key, amount in minutes.items() if key[0] >= oldest}
            if kept:
                self._minutes[job] = kept
            else:
                del self._minutes[job]

    def busy(self, job: str, minutes: int) -> tuple[int, float] | None:
        """The last minute of a job, and the share of its device time in which it computed in so many until then.

        None where one of these minutes is missing.
        """
        known = self._minutes.get(job, {})
        last = max((minute for minute, _ in known), default=0)
        window = {key: amount for key, amount in known.items() if key[0] > last - minutes}
        if len({minute for minute, _ in window}) < minutes:
            return None
        held = sum(amount[0] for amount in window.values())
        return last, sum(amount[1] for amount in window.values()) / held if held else 0.0


class UsageWatch:
    """Fires while a job computes too little.

    Args:
        rule: How little, in how many minutes.
        jobs: Those that run now.
        usage: What they had.
    """

    def __init__(self, rule: UsageRule, jobs: Callable[[], Jobs], usage: FleetUsage) -> None:
        self._rule, self._jobs, self._usage = rule, jobs, usage

    def look(self, now_ns: int) -> Iterator[Firing]:
        """Jobs that compute too little."""
        oldest = now_ns // _MINUTE_NS - self._rule.minutes - 5
        for job in self._jobs():
            busy = self._usage.busy(job, self._rule.minutes)
            if busy is not None and busy[0] > oldest and busy[1] < self._rule.busy_below:
                text = duration(self._rule.minutes * _MINUTE_NS)
                what = f"it computed in {per_cent(busy[1])} % of its device time in the last {text}"
                yield Firing({"job": job}, self._rule.name, what, lasts=True)


class FoundInCapture(NamedTuple):
    """A finding of a capture that is new. `saving`: share of the step, 0.0 where it saves no time."""

    capture: str
    job: str
    slug: str
    saving: float


class TableNews(NamedTuple):
    """What the tables say that they did not say before."""

    findings: list[FoundInCapture]
    regressions: list[ChangeRow]


class NewsWatch:
    """Fires once for each of the news that a rule is about."""

    def __init__(self, rule: FindingTriggerRule | RegressionRule, jobs: Callable[[], Jobs]) -> None:
        self._rule, self._jobs = rule, jobs
        self._firings: list[Firing] = []

    def hear(self, news: TableNews) -> None:
        """Take news."""
        if isinstance(self._rule, FindingTriggerRule):
            for finding in news.findings:
                if finding.slug == self._rule.slug and finding.saving >= self._rule.saving:
                    what = f"`{finding.slug}` in {finding.capture} saves {per_cent(finding.saving)} % of the step"
                    self._firings.append(Firing({"job": finding.job}, finding.capture, what))
            return
        running = self._jobs()
        for change in news.regressions:
            if change["change"] >= self._rule.by:
                shows = [job for job in change["jobs"] if job in running] or change["jobs"]
                what = f"`{change['kernel'][:200]}` takes {per_cent(change['change'])} % longer than before"
                labels = {"job": shows[0]} if shows else {}
                self._firings.append(Firing(labels, f"{_series(change)}#{change['since_ns']}", what))

    def look(self, now_ns: int) -> Iterator[Firing]:  # noqa: ARG002  (of the protocol)
        """What was heard since the last look."""
        firings, self._firings = self._firings, []
        yield from firings


def table_news(state: State, tables: Tables, now_ns: int) -> TableNews:
    """Look at captures that were analysed since the last call, and tell webhooks of new regressions. Blocks."""
    through, committed = state.newly_committed()
    if not committed:
        state.note_committed(through)
        return TableNews([], [])
    jobs = {capture.capture: capture.job for capture in committed if capture.job}
    rows = (
        tables.scan("findings")
        .filter(pl.col("capture").is_in(list(jobs)))
        .select("capture", "slug", saving=pl.col("saving_fraction").fill_null(0.0))
        .collect()
    )
    findings = [FoundInCapture(capture, jobs[capture], slug, saving) for capture, slug, saving in rows.iter_rows()]
    changes: dict[str, ChangeRow] = {}
    for change in slower_kernels(tables, now_ns).iter_rows(named=True):
        row = cast("ChangeRow", change)
        changes.setdefault(_series(row), row)

    def event(series: str) -> FleetEvent:
        about = f"{series[:16]}.{changes[series]['since_ns']}"
        return fleet_event("regression.new", "regression", about, changes[series], now_ns)

    since_ns = {series: change["since_ns"] for series, change in changes.items()}
    new = state.add_regressions(since_ns, DAY_NS, event)
    state.note_committed(through)
    return TableNews(findings, [changes[series] for series in new])


def _series(change: ChangeRow) -> str:
    """What tells the series of a change from others; kernels have long names."""
    text = "\0".join((change["kernel"], change["shapes"] or "", change["device_model"] or ""))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
