"""What one check of a capture found."""

from __future__ import annotations

from msgspec import Struct

from traceloom.model.notice import Severity
from traceloom.model.units import count


class QualityCheck(Struct, frozen=True):
    """One check: `affected` of `total` things are so; the message is for when some are.

    Attributes:
        affected: How many were found.
        total: Of how many.
        severity: How bad it is, if any were found.
        message: One sentence with its numbers.
        slug: Name of the check and of its notice.
    """

    affected: int
    total: int
    severity: Severity
    message: str
    slug: str


def graded(affected: int, total: int, limit: float) -> Severity:
    """`warning` where the share is above the limit, else `info`."""
    return "warning" if total and affected > limit * total else "info"


def many(number: int, singular: str, plural: str | None = None) -> str:
    """`1 piece`, `2 pieces`."""
    return f"{count(number)} {singular if number == 1 else plural or singular + 's'}"
