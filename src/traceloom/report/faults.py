"""Sections that fail, by a fault of ours: the report goes on without them, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from traceloom.errors import InvariantError, TraceloomError
from traceloom.model import Notice
from traceloom.report.absent import Absent
from traceloom.report.sections import FAILED

T = TypeVar("T")


class Faults:
    """What failed while a report was made.

    Args:
        named: What was asked for by name: its failure is the failure of the report.
    """

    def __init__(self, named: tuple[str, ...] | None) -> None:
        self._named = named or ()
        self._found: dict[str, Exception] = {}

    def guard(self, key: str, work: Callable[[], T]) -> T | None:
        """Do the work of a section; None where it fails, or has failed already.

        Raises:
            TraceloomError: What the work says of its input.
            Exception: Any failure of a section that was requested by name.
        """
        if key in self._found:
            return None
        try:
            return work()
        except Exception as error:
            internal = isinstance(error, InvariantError) or not isinstance(error, TraceloomError)
            if key in self._named or not internal:
                raise
            self._found[key] = error
            return None

    def failed(self, key: str) -> bool:
        """Whether a section is lost."""
        return key in self._found

    def say(self, key: str, absent: Absent, *paths: str) -> None:
        """Say why a section is not there: under its key, or the paths that it gives."""
        error = self._found[key]
        for path in paths or (key,):
            absent.say(path, f"{FAILED}: {type(error).__name__}: {error}")

    def notices(self) -> tuple[Notice, ...]:
        """One per section that is lost."""
        return tuple(
            Notice(
                "section-failed",
                "warning",
                f"{key} could not be worked out, by a fault of Traceloom ({type(error).__name__}: {error}); everything "
                f"else holds; `--only {key} --debug` shows where",
            )
            for key, error in self._found.items()
        )
