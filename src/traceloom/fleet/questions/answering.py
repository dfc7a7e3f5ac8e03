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
from traceloom.fleet.questions.declaration import Period, Question, QuestionFrames, TimeQuery
from traceloom.fleet.rules import parse_prices, parse_rules
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.rules import StoredDocument
from traceloom.fleet.store.tables import Tables
from traceloom.server.problem import HttpError

T = TypeVar("T")

MAX_CONCURRENT = 2
"""Answers of a sort that are worked out at the same time; those of the store keep all cores busy.
"""


@dataclass(slots=True)
class _CachedAnswer(Generic[T]):
    """An answer that is worked out or was; `basis`: what it was made of, None: unknown; `at`: when,
    in seconds.
    """

    basis: Hashable
    answer: Future[T]
    at: float = 0.0


class AnswerCache(Generic[T]):
    """Keeps the last answers. Different questions do not wait for each other, as long as few are
    asked at once.

    Args:
        most: Answers that are kept.
        clock: Seconds.
    """

    def __init__(self, max_entries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.clock = max_entries, clock
        self._lock, self._room = threading.Lock(), threading.BoundedSemaphore(MAX_CONCURRENT)
        self._kept: dict[
            Hashable, _CachedAnswer[T]
        ] = {}  # the one that was not asked for longest is first

    def get(
        self,
        question: Hashable,
        work_out: Callable[[], T],
        *,
        basis: Hashable = None,
        seconds: float = 0.0,
    ) -> T:
        """The answer to a question; it blocks while it is worked out.

        Args:
            question: The question.
            work_out: Answers it; what it raises is raised to all who wait, and is not kept.
            basis: What it is to be made of, as versions of tables; None: unknown.
            seconds: An answer of another basis does too while it is not older.
        """
        with self._lock:
            cached = self._kept.pop(question, None)
            if cached is None:
                is_new = True
            elif basis is not None and cached.basis == basis:
                is_new = False
            elif cached.answer.done():
                is_new = self.clock() - cached.at >= seconds
            else:  # whoever takes an older answer takes one that is only being made
                is_new = seconds <= 0
            if cached is None or is_new:
                cached = _CachedAnswer(basis, Future())
            self._kept[question] = cached
            if len(self._kept) > self.most:
                del self._kept[next(iter(self._kept))]
        if is_new:
            try:
                with self._room:
                    answer = work_out()
            except BaseException as error:
                with self._lock:
                    if self._kept.get(question) is cached:
                        del self._kept[question]
                cached.answer.set_exception(error)
                raise
            cached.at = self.clock()
            cached.answer.set_result(answer)
        return cached.answer.result()


MAX_WAITING = 32
MAX_SECONDS = 60.0
LATE_S = 60.0
"""How long an answer that somebody would not wait for is kept for them, though tables change
meanwhile.
"""
_MAX_CACHED = 128  # answers, of the last tables


class AnswerPendingError(Exception):
    """An answer is not there yet; it is worked out all the same.

    Args:
        seconds: For how long it has been.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"worked out for {seconds:.0f} s")
        self.seconds = seconds


class QueryService:
    """Answers questions to tables.

    Args:
        tables: The tables.
        state: Where rules and prices are.
        clock: Now, in ns since the epoch.
        seconds: How long whoever asks waits.
    """

    def __init__(
        self,
        tables: Tables,
        state: ServiceState,
        clock: Callable[[], int] = time.time_ns,
        seconds: float = MAX_SECONDS,
    ) -> None:
        self.tables, self.state, self.clock, self.seconds = tables, state, clock, seconds
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="traceloom-question")
        self._waiting = 0
        self._kept = AnswerCache[msgspec.Struct](_MAX_CACHED)
        self._late: dict[tuple[str, TimeQuery], tuple[float, asyncio.Future[msgspec.Struct]]] = {}

    async def ask(
        self, question: Question, query: TimeQuery, *, seconds: float = 0.0
    ) -> msgspec.Struct:
        """The answer; one that was given before is given again until its tables change; errors as
        of `work`.

        Args:
            question: The question.
            query: What of it.
            seconds: So old an answer may be, though its tables changed since.
        """
        return await self.work(lambda: self._answer(question, query, seconds))

    async def ask_again(
        self, question: Question, query: TimeQuery, patience_s: float
    ) -> msgspec.Struct:
        """The same for who asks again and again until the answer is there; errors as of `work`.

        Args:
            question: The question.
            query: What of it.
            patience_s: So long this time.

        Raises:
            StillWorkingError: It takes longer.
        """
        key, loop = (question.name, query), asyncio.get_running_loop()
        begun_s, working = self._late.get(key) or (
            loop.time(),
            self._begin(lambda: self._answer(question, query, 0.0)),
        )
        await asyncio.wait({working}, timeout=patience_s)
        if working.done():
            return await self._answer_of(working)
        if key not in self._late:
            self._late[key] = (begun_s, working)
            working.add_done_callback(lambda _: loop.call_later(LATE_S, self._late.pop, key))
        raise AnswerPendingError(loop.time() - begun_s)

    async def work(self, compute: Callable[[], T]) -> T:
        """Have something computed in a thread.

        Raises:
            RequestError: `wrong-request`, and the slugs of `UsageError` of what is computed; `busy`: too much is asked
                at once; `slow-question`: it takes too long.
        """
        return await self._answer_of(self._begin(compute))

    def frames(self, query: TimeQuery) -> QuestionFrames:
        """The rows that are asked for, by the rules and prices of now. It blocks.

        Raises:
            RequestError: `wrong-request`.
        """
        period = Period.of(query, self.clock())
        return self._frames(
            query, period, self.state.document("owners"), self.state.document("prices")
        )

    def close(self) -> None:
        """Take no more questions."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        if self._waiting >= MAX_WAITING:
            raise HttpError(503, "too many questions are asked at once", slug="busy", retry_s=5)
        self._waiting += 1
        working = asyncio.get_running_loop().run_in_executor(self._threads, compute)
        working.add_done_callback(self._ended)
        return working

    async def _answer_of(self, working: asyncio.Future[T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.shield(working), self.seconds)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise HttpError(
                503,
                f"the answer takes more than {self.seconds:g} s",
                slug="slow-question",
                hint="ask for less time, fewer jobs or fewer dimensions",
                retry_s=60,
            ) from error
        except UsageError as error:
            raise HttpError(400, error.message, slug=error.slug, hint=error.hint) from error

    def _ended(self, working: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not working.cancelled():
            working.exception()  # whoever asked may be gone

    def _frames(
        self,
        query: TimeQuery,
        period: Period,
        owners: StoredDocument | None,
        prices: StoredDocument | None,
    ) -> QuestionFrames:
        rules = parse_rules(owners.document) if owners else ()
        return QuestionFrames(
            self.tables, query, period, rules, parse_prices(prices.document) if prices else None
        )

    def _answer(self, question: Question, query: TimeQuery, seconds: float) -> msgspec.Struct:
        period = Period.of(query, self.clock())
        documents = self.state.document("owners"), self.state.document("prices")
        versions = tuple(self.tables.version(name) for name in question.reads)
        return self._kept.get(
            msgspec.json.encode((question.name, period, query)),
            lambda: question.ask(self._frames(query, period, *documents), query),
            basis=(versions, *(document and document.version for document in documents)),
            seconds=seconds,
        )
