"""Notice, Finding, Evidence: what is told of the data and of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypedDict

from traceloom.system.files import restore_addresses

NoticeSeverity = Literal["info", "warning", "error"]
_SEVERITY_ORDER = {"error": 0, "warning": 1, "info": 2}


class NoticeFields(TypedDict):
    """A notice as it stands in documents."""

    slug: str
    severity: str
    count: int
    message: str
    rank: int | None
    where: str


@dataclass(frozen=True, slots=True)
class Notice:
    """One statement about the data: damage that was repaired, things that are missing or cannot be
    trusted.

    Attributes:
        slug: Stable name, which `traceloom explain` knows.
        severity: `info` (good to know), `warning` (a number is affected), `error` (a part is lost).
        message: One sentence with its numbers.
        count: How many events or files it is about.
        rank: The rank it is about; None for the run.
        where: The place: file, JSON path or byte; empty when it is everywhere.
    """

    slug: str
    severity: NoticeSeverity
    message: str
    count: int = 1
    rank: int | None = None
    where: str = ""

    def of_rank(self, rank: int | None) -> Notice:
        """The same notice, said of one rank."""
        return replace(self, rank=rank)

    def to_dict(self) -> NoticeFields:
        """The notice as it stands in report JSON."""
        return {
            "slug": self.slug,
            "severity": self.severity,
            "count": self.count,
            "message": restore_addresses(self.message),
            "rank": self.rank,
            "where": restore_addresses(self.where),
        }


def sort_by_severity(notices: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """Notices by severity, then by count; the order of equals is kept."""
    return tuple(
        sorted(notices, key=lambda notice: (_SEVERITY_ORDER[notice.severity], -notice.count))
    )


Severity = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One thing that can be looked at in the timeline.

    Attributes:
        what: What it is, in a few words; names are as recorded.
        rank: Whose it is; None where unknown.
        start_ns: When, on the session's clock; None where it is no moment.
        duration_ns: How long; None where it has no length.
        lane: Row of the rank's lanes; None where it is on none.
        count: How many such things there are.
        total_ns: How long they take together.
    """

    what: str
    rank: int | None = None
    start_ns: int | None = None
    duration_ns: int | None = None
    lane: int | None = None
    count: int = 1
    total_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another fix for the same time.

    Attributes:
        slug: Its rule.
        title: One line with the main figure.
        alone_ns: What it saves where the other is not fixed, per step.
    """

    slug: str
    title: str
    alone_ns: int


@dataclass(frozen=True, slots=True)
class HotFrame:
    """A Python frame that holds host time of a finding.

    Attributes:
        name: The function; a built-in function as recorded.
        file: Its file, as recorded; None where it has none.
        line: Where it begins there.
        time_ns: How long it holds, over all ranks, without what other frames of the list hold.
        share: Of the host time of the finding.
        inside: What it calls, directly or not, that takes at least half of that; None where nothing does.
        inside_ns: How long that takes.
        rank: Where it holds longest; None in a run of one rank.
        rank_count: Ranks on which it holds any.
    """

    name: str
    file: str | None
    line: int | None
    time_ns: int
    share: float
    inside: str | None = None
    inside_ns: int | None = None
    rank: int | None = None
    rank_count: int = 1

    def __str__(self) -> str:
        location = "" if self.file is None else f" ({self.file}:{self.line})"
        mostly = "" if self.inside is None else f", mostly {self.inside}"
        return f"{self.name}{location}{mostly}{self.of_ranks}"

    @property
    def of_ranks(self) -> str:
        """What to say behind it about its ranks; nothing in a run of one rank."""
        if self.rank is None:
            return ""
        return (
            f", on rank {self.rank}"
            if self.rank_count == 1
            else f", on {self.rank_count} ranks, most on {self.rank}"
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """What to fix.

    Attributes:
        slug: The rule; docs/findings/SLUG.md says what it means, how to fix it and when it is wrong.
        title: One line with the main figure.
        severity: By what it saves: high from 10 % of the step on, medium from 3 %; memory findings by risk.
        saving_ns: Per step, from re-timing with the fix and all findings above it applied; None for memory findings.
        saving_fraction: Of the step as it was.
        alone_ns: What it saves when nothing else is fixed.
        saving_low_ns: What it saves at least, by the steps of the window; None where only one was looked at.
        saving_high_ns: The same at most.
        step_count: Steps in which it was evaluated: `saving_ns` is of the middle one.
        saving_bytes: What a memory finding frees; None else.
        risk: What will go wrong, and on which ground; None where nothing will.
        confidence: From 0 to 1: how sure the rule is that this is so, and that the fix does what it says.
        evidence: Things to look at, the most telling first.
        advice: What to do, in one or two sentences.
        learn_more: The page about the rule.
        change: What was evaluated, in words.
        lower_bound: Whether it may save more: threads wait for what nothing recorded tells, which is taken as given.
        alternatives: Other fixes that save nothing more once this is done: they are about the same time.
        host_ns: How long the host is busy with what it is about, over all ranks; None where it is not about the host.
        frames: Python frames that hold most of that, the longest first; empty where none was recorded.
    """

    slug: str
    title: str
    severity: Severity
    confidence: float
    advice: str
    saving_ns: int | None = None
    saving_fraction: float | None = None
    alone_ns: int | None = None
    saving_low_ns: int | None = None
    saving_high_ns: int | None = None
    step_count: int = 1
    saving_bytes: int | None = None
    risk: str | None = None
    evidence: tuple[Evidence, ...] = field(default_factory=tuple)
    learn_more: str = ""
    change: str = ""
    lower_bound: bool = False
    alternatives: tuple[Alternative, ...] = ()
    host_ns: int | None = None
    frames: tuple[HotFrame, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The finding as it appears in report JSON."""
        lists = {
            name: [asdict(entry) for entry in getattr(self, name)]
            for name in ("evidence", "alternatives", "frames")
        }
        return asdict(self) | lists


@dataclass(frozen=True, slots=True)
class Abstention:
    """A rule that cannot know.

    Attributes:
        slug: The rule.
        reason: Why, as a part of a sentence.
    """

    slug: str
    reason: str
