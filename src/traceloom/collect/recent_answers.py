"""Answers that many ask for again and again: each is worked out once, for all who wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_AT_ONCE = 2
"""Answers of a sort that are worked out at the same time; those of the store keep all cores busy."""


@dataclass(slots=True)
class _RecentAnswer(Generic[T]):
    """An answer that is worked out or was; `basis`: what it was made of, None: unknown; `at`: when, in seconds."""

    basis: Hashable
    answer: Future[T]
    at: float = 0.0


class RecentAnswers(Generic[T]):
    """Keeps the last answers. Different questions do not wait for each other, as long as few are asked at once.

    Args:
        most: Answers that are kept.
        clock: Seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.clock = most, clock
        self._lock, self._room = threading.Lock(), threading.BoundedSemaphore(MOST_AT_ONCE)
        self._kept: dict[Hashable, _RecentAnswer[T]] = {}  # the one that was not asked for longest is first

    def get(
        self, question: Hashable, work_out: Callable[[], T], *, basis: Hashable = None, seconds: float = 0.0
    ) -> T:  # fmt: skip
        """The answer to a question; it blocks while it is worked out.

        Args:
            question: The question.
            work_out: Answers it; what it raises is raised to all who wait, and is not kept.
            basis: What it is to be made of, as versions of tables; None: unknown.
            seconds: An answer of another basis does too while it is not older.
        """
        with self._lock:
            kept = self._kept.pop(question, None)
            if kept is None:
                is_new = True
            elif basis is not None and kept.basis == basis:
                is_new = False
            elif kept.answer.done():
                is_new = self.clock() - kept.at >= seconds
            else:  # whoever takes an older answer takes one that is only being made
                is_new = seconds <= 0
            if kept is None or is_new:
                kept = _RecentAnswer(basis, Future())
            self._kept[question] = kept
            if len(self._kept) > self.most:
                del self._kept[next(iter(self._kept))]
        if is_new:
            try:
                with self._room:
                    answer = work_out()
            except BaseException as error:
                with self._lock:
                    if self._kept.get(question) is kept:
                        del self._kept[question]
                kept.answer.set_exception(error)
                raise
            kept.at = self.clock()
            kept.answer.set_result(answer)
        return kept.answer.result()
