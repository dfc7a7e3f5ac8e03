"""Answers questions in a bounded thread pool, with a cache of recent answers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from polars.exceptions import PanicException, PolarsError

from traceloom.errors import UsageError
from traceloom.fleet.questions.declaration import Period, Question, QuestionFrames, TimeQuery
from traceloom.fleet.rules import parse_prices, parse_rules
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.rules import StoredDocument
from traceloom.fleet.store.tables import Tables
from traceloom.server.problem import HttpError

T = TypeVar("T")
LOG = logging.getLogger(__name__)

MAX_CONCURRENT = 2
"""Max answers of a cache that are computed at once; those from the tables use all cores."""


@dataclass(slots=True)
class _CachedResponse(Generic[T]):
    """An answer, computed or in progress.

    `basis`: versions of its inputs, None: unknown; `at`: when it was computed, in seconds.
    """

    basis: Hashable
    answer: Future[T]
    at: float = 0.0


class AnswerCache(Generic[T]):
    """A cache of the last answers; different questions are computed in parallel up to
    `MAX_CONCURRENT`.

    Args:
        max_entries: Max cached answers.
        clock: Seconds.
    """

    def __init__(self, max_entries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.clock = max_entries, clock
        self._lock, self._room = threading.Lock(), threading.BoundedSemaphore(MAX_CONCURRENT)
        # Least recently used first.
        self._kept: dict[Hashable, _CachedResponse[T]] = {}

    def get(
        self,
        question: Hashable,
        work_out: Callable[[], T],
        *,
        basis: Hashable = None,
        seconds: float = 0.0,
    ) -> T:
        """Returns the answer to a question; blocks while it is computed.

        Args:
            question: Key of the question.
            work_out: Computes the answer; its exceptions are raised to all waiters, and not cached.
            basis: Versions of its inputs, such as those of tables; None: unknown.
            seconds: Max age of a cached answer with another basis.
        """
        with self._lock:
            cached = self._kept.pop(question, None)
            if cached is None:
                is_new = True
            elif basis is not None and cached.basis == basis:
                is_new = False
            elif cached.answer.done():
                is_new = self.clock() - cached.at >= seconds
            else:  # a caller that accepts an older answer also accepts one that is being computed
                is_new = seconds <= 0
            if cached is None or is_new:
                cached = _CachedResponse(basis, Future())
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
"""How long a late answer is kept for the client that did not wait for it, even if tables change."""
_MAX_CACHED = 128  # answers of the latest tables


class AnswerPendingError(Exception):
    """An answer is not ready yet; its computation continues.

    Args:
        seconds: How long it has been computed.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"worked out for {seconds:.0f} s")
        self.seconds = seconds


class QueryService:
    """Answers questions from the tables.

    Args:
        tables: The tables.
        state: Holds owner rules and prices.
        clock: Now, in ns since the epoch.
        seconds: Max wait of a client.
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
        """Returns an answer, from the cache unless its tables have changed; errors as of `work`.

        Args:
            question: The question.
            query: Its parameters.
            seconds: Max age of an answer although its tables have changed.
        """
        return await self.work(lambda: self._answer(question, query, seconds))

    async def ask_again(
        self, question: Question, query: TimeQuery, patience_s: float
    ) -> msgspec.Struct:
        """Returns an answer to a client that polls until it is ready; errors as of `work`.

        Args:
            question: The question.
            query: Its parameters.
            patience_s: Max wait of this call.

        Raises:
            AnswerPendingError: It takes longer.
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
        """Runs a computation in a thread.

        Raises:
            HttpError: `wrong-request`, and the slugs of any `UsageError` of the computation;
                `busy`: too many questions at once; `slow-question`: it takes too long.
        """
        return await self._answer_of(self._begin(compute))

    def frames(self, query: TimeQuery) -> QuestionFrames:
        """Returns the rows that a query selects, by the current rules and prices. Blocks.

        Raises:
            HttpError: `wrong-request`.
        """
        period = Period.of(query, self.clock())
        return self._frames(
            query, period, self.state.document("owners"), self.state.document("prices")
        )

    def close(self) -> None:
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
        except (
            OSError,
            PolarsError,
            PanicException,
        ) as error:  # Polars panics at a file that was cut
            LOG.warning("the tables cannot be read: %s", error)
            raise HttpError(
                503,
                "a file of the tables cannot be read",
                slug="unreadable",
                hint="its log names it",
            ) from error

    def _ended(self, working: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not working.cancelled():
            working.exception()  # the client may be gone

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
        answer = self._kept.get(
            msgspec.json.encode((question.name, period, query)),
            lambda: question.ask(self._frames(query, period, *documents), query),
            basis=(versions, *(document and document.version for document in documents)),
            seconds=seconds,
        )
        if "captures" in question.reads and (lacking := self.state.count_lacking()):
            return msgspec.structs.replace(answer, lacking=lacking)
        return answer
