"""Why parts of the report are missing, in the report's own words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from traceloom.report.views.html.text import prose

if TYPE_CHECKING:
    from traceloom.report.documents.report import AbsentRow


class Reasons:
    """The document's `absent` list, asked by path."""

    def __init__(self, absent: Iterable[AbsentRow]) -> None:
        self._reasons = {entry["path"]: entry["reason"] for entry in absent}

    def of(self, path: str, otherwise: str = "the report does not say") -> str:
        """Why the value at `path` is unknown."""
        return self._reasons.get(path, otherwise)

    def columns(self, path: str) -> dict[str, str]:
        """Why single columns of the rows at `path` are unknown, by key."""
        start = f"{path}[*]."
        return {key[len(start) :]: reason for key, reason in self._reasons.items() if key.startswith(start)}

    def line(self, path: str, what: str) -> str:
        """One quiet line in place of a part that is missing."""
        return f'<p class="quiet absent"><span class="what">{what}: </span>{prose(self.of(path))}.</p>'
