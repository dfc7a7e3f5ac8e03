"""`Notice`, `Finding` and `Evidence`: statements about the data and about the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypedDict

from traceloom.system.files import restore_addresses

NoticeSeverity = Literal["info", "warning", "error"]
_SEVERITY_ORDER = {"error": 0, "warning": 1, "info": 2}


class NoticeFields(TypedDict):
    """A notice in documents."""

    slug: str
    severity: str
    count: int
    message: str
    rank: int | None
    where: str


@dataclass(frozen=True, slots=True)
class Notice:
    """One statement about the data: damage that was repaired, or parts that are missing or
    unreliable.

    Attributes:
        slug: Stable name, which `traceloom explain` accepts.
        severity: `info` (good to know), `warning` (a number is affected), `error` (a part is lost).
        message: One sentence with its numbers.
        count: Number of affected events or files.
        rank: The affected rank; None for the run.
        where: File, JSON path or byte; empty if it applies everywhere.
    """

    slug: str
    severity: NoticeSeverity
    message: str
    count: int = 1
    rank: int | None = None
    where: str = ""

    def of_rank(self, rank: int | None) -> Notice:
        return replace(self, rank=rank)

    def to_dict(self) -> NoticeFields:
        """Returns the notice as it appears in report JSON."""
        return {
            "slug": self.slug,
            "severity": self.severity,
            "count": self.count,
            "message": restore_addresses(self.message),
            "rank": self.rank,
            "where": restore_addresses(self.where),
        }


def sort_by_severity(notices: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """Sorts notices by severity, then by count; stable."""
    return tuple(
        sorted(notices, key=lambda notice: (_SEVERITY_ORDER[notice.severity], -notice.count))
    )


Severity = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One item to look at in the timeline.

    Attributes:
        what: A short description; names are as recorded.
        rank: Its rank; None where unknown.
        start_ns: Start on the session's clock; None if it has no time.
        duration_ns: Duration; None if it has none.
        lane: Row of the rank's lanes; None if it is on none.
        count: Number of such items.
        total_ns: Their total time.
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
        alone_ns: Saving per step if the other fix is not applied.
    """

    slug: str
    title: str
    alone_ns: int


@dataclass(frozen=True, slots=True)
class HotFrame:
    """A Python frame that accounts for host time of a finding.

    Attributes:
        name: The function; a built-in function as recorded.
        file: Its file, as recorded; None if it has none.
        line: Its first line; where stacks were sampled, the line that ran.
        time_ns: Its time over all ranks, without the time of other listed frames.
        share: Share of the finding's host time.
        inside: A direct or indirect callee with at least half of that time; None if there is none.
        inside_ns: Time of that callee.
        rank: Rank with the longest time; None in a run of one rank.
        rank_count: Number of ranks with any such time.
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
        """The suffix about its ranks; empty in a run of one rank."""
        if self.rank is None:
            return ""
        return (
            f", on rank {self.rank}"
            if self.rank_count == 1
            else f", on {self.rank_count} ranks, most on {self.rank}"
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to fix, with the estimated saving.

    Attributes:
        slug: The rule; docs/findings/SLUG.md explains its meaning, its fix and when it is wrong.
        title: One line with the main figure.
        severity: By saving: high from 10 % of the step, medium from 3 %; memory findings by risk.
        saving_ns: Per step, from re-timing with the fix and all findings above it applied; None for
            memory findings.
        saving_fraction: Share of the original step.
        alone_ns: Saving if nothing else is fixed.
        saving_low_ns: Min saving over the steps of the window; None if only one was evaluated.
        saving_high_ns: Max saving over those steps.
        step_count: Number of evaluated steps; `saving_ns` is that of the median one.
        saving_bytes: Bytes that a memory finding frees; None for others.
        risk: What will go wrong, and why; None if nothing will.
        confidence: From 0 to 1: how certain the rule is of the diagnosis and of the effect of the
            fix.
        evidence: Items to look at, the most significant first.
        advice: What to do, in one or two sentences.
        learn_more: The page about the rule.
        change: The evaluated change, in words.
        lower_bound: Whether the true saving may be larger, since waits with no recorded cause are
            kept as they are.
        alternatives: Other fixes for the same time, which save nothing more once this one is
            applied.
        host_ns: Affected host time over all ranks; None if it is not about the host.
        frames: Python frames with the largest share of it, the longest first; empty if none was
            recorded.
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
        """Returns the finding as it appears in report JSON."""
        lists = {
            name: [asdict(entry) for entry in getattr(self, name)]
            for name in ("evidence", "alternatives", "frames")
        }
        return asdict(self) | lists


@dataclass(frozen=True, slots=True)
class Abstention:
    """A rule that cannot decide.

    Attributes:
        slug: The rule.
        reason: Why, as a sentence fragment.
    """

    slug: str
    reason: str
