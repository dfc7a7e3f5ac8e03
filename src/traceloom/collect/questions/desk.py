"""Answers questions: a few at a time, in threads of their own, so that no question keeps agents waiting."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from traceloom.agent.http.answers import RequestError
from traceloom.collect.questions.asking import Asking, Period
from traceloom.collect.questions.declared import Question
from traceloom.collect.questions.frames import QuestionFrames
from traceloom.errors import UsageError
from traceloom.store.tables import Tables

MOST_AT_ONCE = 2
MOST_WAITING = 32
MOST_SECONDS = 60.0
_MOST_KEPT = 128  # answers, of the last tables


class QuestionDesk:
    """Answers questions to tables.

    Args:
        tables: The tables.
        clock: Now, in ns since the epoch.
        seconds: How long whoever asks waits.
    """

    def __init__(self, tables: Tables, clock: Callable[[], int] = time.time_ns, seconds: float = MOST_SECONDS) -> None:
        self.tables, self.clock, self.seconds = tables, clock, seconds
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="traceloom-question")
        self._waiting = 0
        self._kept: OrderedDict[bytes, msgspec.Struct] = OrderedDict()

    async def ask(self, question: Question, asked: Asking) -> msgspec.Struct:
        """The answer; one that was given before is given again until its tables change.

        Raises:
            RequestError: `wrong-request`, and the slugs of `UsageError` of the question; `busy`: too many are asked at
                once; `slow-question`: it takes too long.
        """
        if self._waiting >= MOST_WAITING:
            raise RequestError(503, "too many questions are asked at once", slug="busy", retry_s=5)
        self._waiting += 1
        working = asyncio.get_running_loop().run_in_executor(self._threads, self._answer, question, asked)
        working.add_done_callback(self._ended)
        try:
            return await asyncio.wait_for(asyncio.shield(working), self.seconds)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise RequestError(
                503, f"the answer takes more than {self.seconds:g} s", slug="slow-question",
                hint="ask for less time, fewer jobs or fewer dimensions", retry_s=60,
            ) from error  # fmt: skip
        except UsageError as error:
            raise RequestError(400, error.message, slug=error.slug, hint=error.hint) from error

    def close(self) -> None:
        """Take no more questions."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, working: asyncio.Future[msgspec.Struct]) -> None:
        self._waiting -= 1
        if not working.cancelled():
            working.exception()  # whoever asked may be gone

    def _answer(self, question: Question, asked: Asking) -> msgspec.Struct:
        period = Period.of(asked, self.clock())
        versions = [self.tables.version(name) for name in question.reads]
        key = msgspec.json.encode((question.name, period, asked, versions))
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        answer = question.ask(QuestionFrames(self.tables, asked, period), asked)
        self._kept[key] = answer
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return answer
