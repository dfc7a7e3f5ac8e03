"""Frames of the asked rows, a bounded pool, cache of recent answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from traceloom.errors import UsageError
from traceloom.fleet.questions.declaration import Asking, Period, Question, QuestionFrames
from traceloom.fleet.rules import prices_of, rules_of
from traceloom.fleet.store.captures import State
from traceloom.fleet.store.rules import KeptDocument
from traceloom.fleet.store.tables import Tables
from traceloom.server.problem import RequestError

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


MOST_WAITING = 32
MOST_SECONDS = 60.0
LATE_S = 60.0
"""How long an answer that somebody would not wait for is kept for them, though tables change meanwhile."""
_MOST_KEPT = 128  # answers, of the last tables


class StillWorkingError(Exception):
    """An answer is not there yet; it is worked out all the same.

    Args:
        seconds: For how long it has been.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"worked out for {seconds:.0f} s")
        self.seconds = seconds


class QuestionDesk:
    """Answers questions to tables.

    Args:
        tables: The tables.
        state: Where rules and prices are.
        clock: Now, in ns since the epoch.
        seconds: How long whoever asks waits.
    """

    def __init__(
        self, tables: Tables, state: State, clock: Callable[[], int] = time.time_ns, seconds: float = MOST_SECONDS
    ) -> None:
        self.tables, self.state, self.clock, self.seconds = tables, state, clock, seconds
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="traceloom-question")
        self._waiting = 0
        self._kept = RecentAnswers[msgspec.Struct](_MOST_KEPT)
        self._late: dict[tuple[str, Asking], tuple[float, asyncio.Future[msgspec.Struct]]] = {}

    async def ask(self, question: Question, asked: Asking, *, seconds: float = 0.0) -> msgspec.Struct:
        """The answer; one that was given before is given again until its tables change; errors as of `work`.

        Args:
            question: The question.
            asked: What of it.
            seconds: So old an answer may be, though its tables changed since.
        """
        return await self.work(lambda: self._answer(question, asked, seconds))

    async def ask_again(self, question: Question, asked: Asking, patience_s: float) -> msgspec.Struct:
        """The same for who asks again and again until the answer is there; errors as of `work`.

        Args:
            question: The question.
            asked: What of it.
            patience_s: So long this time.

        Raises:
            StillWorkingError: It takes longer.
        """
        key, loop = (question.name, asked), asyncio.get_running_loop()
        begun_s, working = self._late.get(key) or (
            loop.time(), self._begin(lambda: self._answer(question, asked, 0.0))
        )  # fmt: skip
        await asyncio.wait({working}, timeout=patience_s)
        if working.done():
            return await self._answer_of(working)
        if key not in self._late:
            self._late[key] = (begun_s, working)
            working.add_done_callback(lambda _: loop.call_later(LATE_S, self._late.pop, key))
        raise StillWorkingError(loop.time() - begun_s)

    async def work(self, compute: Callable[[], T]) -> T:
        """Have something computed in a thread.

        Raises:
            RequestError: `wrong-request`, and the slugs of `UsageError` of what is computed; `busy`: too much is asked
                at once; `slow-question`: it takes too long.
        """
        return await self._answer_of(self._begin(compute))

    def frames(self, asked: Asking) -> QuestionFrames:
        """The rows that are asked for, by the rules and prices of now. It blocks.

        Raises:
            RequestError: `wrong-request`.
        """
        period = Period.of(asked, self.clock())
        return self._frames(asked, period, self.state.document("owners"), self.state.document("prices"))

    def close(self) -> None:
        """Take no more questions."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        if self._waiting >= MOST_WAITING:
            raise RequestError(503, "too many questions are asked at once", slug="busy", retry_s=5)
        self._waiting += 1
        working = asyncio.get_running_loop().run_in_executor(self._threads, compute)
        working.add_done_callback(self._ended)
        return working

    async def _answer_of(self, working: asyncio.Future[T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.shield(working), self.seconds)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise RequestError(
                503, f"the answer takes more than {self.seconds:g} s", slug="slow-question",
                hint="ask for less time, fewer jobs or fewer dimensions", retry_s=60,
            ) from error  # fmt: skip
        except UsageError as error:
            raise RequestError(400, error.message, slug=error.slug, hint=error.hint) from error

    def _ended(self, working: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not working.cancelled():
            working.exception()  # whoever asked may be gone

    def _frames(
        self, asked: Asking, period: Period, owners: KeptDocument | None, prices: KeptDocument | None
    ) -> QuestionFrames:
        rules = rules_of(owners.document) if owners else ()
        return QuestionFrames(self.tables, asked, period, rules, prices_of(prices.document) if prices else None)

    def _answer(self, question: Question, asked: Asking, seconds: float) -> msgspec.Struct:
        period = Period.of(asked, self.clock())
        documents = self.state.document("owners"), self.state.document("prices")
        versions = tuple(self.tables.version(name) for name in question.reads)
        return self._kept.get(
            msgspec.json.encode((question.name, period, asked)),
            lambda: question.ask(self._frames(asked, period, *documents), asked),
            basis=(versions, *(each and each.version for each in documents)), seconds=seconds,
        )  # fmt: skip
