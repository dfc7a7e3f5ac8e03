"""Notices: what the user must know about the data itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from traceloom.files import with_addresses

Severity = Literal["info", "warning", "error"]
_ORDER = {"error": 0, "warning": 1, "info": 2}


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
    """One statement about the data: damage that was repaired, things that are missing or cannot be trusted.

    Attributes:
        slug: Stable name, which `traceloom explain` knows.
        severity: `info` (good to know), `warning` (a number is affected), `error` (a part is lost).
        message: One sentence with its numbers.
        count: How many events or files it is about.
        rank: The rank it is about; None for the run.
        where: The place: file, JSON path or byte; empty when it is everywhere.
    """

    slug: str
    severity: Severity
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
            "message": with_addresses(self.message),
            "rank": self.rank,
            "where": with_addresses(self.where),
        }


def worst_first(notices: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """Notices by severity, then by count; the order of equals is kept."""
    return tuple(sorted(notices, key=lambda notice: (_ORDER[notice.severity], -notice.count)))
