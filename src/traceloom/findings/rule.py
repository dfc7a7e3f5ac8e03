"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import polars as pl
from msgspec import Struct

from traceloom.findings.context import Context
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change


class Candidate(Struct, frozen=True):
    """Something that could be fixed, before it is known what that saves.

    Attributes:
        title: One line with the main figure.
        changes: What the fix does to works and delays; evaluated by re-timing.
        confidence: From 0 to 1.
        advice: What to do.
        evidence: Things to look at.
        at_most_ns: A bound on what it can save, where re-timing would promise more than the fix can; None for none.
        seen_ns: The time that looks as if it could be saved, where a reader sees it elsewhere and asks why it is not
            told; None where there is none.
        host: Works out the host time that it is about, as `Context.stretches` does; None where that is the host time of
            what the changes are about. Asked of findings alone.
        hot_advice: What to do instead where one Python frame holds most of that time; `{frame}` stands for how much of
            it which one holds.
    """

    title: str
    changes: tuple[Change, ...]
    confidence: float
    advice: str
    evidence: tuple[Evidence, ...] = ()
    at_most_ns: int | None = None
    seen_ns: int | None = None
    host: Callable[[], pl.DataFrame] | None = None
    hot_advice: str | None = None


class MemoryCandidate(Struct, frozen=True):
    """A finding about memory: bytes or a risk, no time.

    Attributes:
        title: One line with the main figure.
        saving_bytes: What the fix frees; None where it is only a risk.
        risk: What will go wrong, and on which context.
        severe: Whether the run will fail.
        confidence: From 0 to 1.
        advice: What to do.
        evidence: Things to look at.
    """

    title: str
    saving_bytes: int | None
    risk: str | None
    severe: bool
    confidence: float
    advice: str
    evidence: tuple[Evidence, ...] = ()


class Remark(Struct, frozen=True):
    """Something that has to be known when the others are read; it saves nothing on its own.

    Attributes:
        title: One line with the main figure.
        confidence: From 0 to 1.
        advice: What to do.
        evidence: Things to look at.
    """

    title: str
    confidence: float
    advice: str
    evidence: tuple[Evidence, ...] = ()


Said = Candidate | MemoryCandidate | Remark | Abstention


class FindingRule(Struct, frozen=True):
    """One rule; its page is docs/findings/SLUG.md.

    Attributes:
        slug: Stable name.
        title: What it looks for, in a few words.
        look: Context -> candidates, or why it cannot know. Nothing where all is well.
    """

    slug: str
    title: str
    look: Callable[[Context], Iterable[Said]]
