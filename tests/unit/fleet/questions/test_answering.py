"""Questions are answered a few at a time, in bounded time, and once as long as their tables stay as they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from traceloom.fleet.questions.answering import (  # noqa: E402
    MAX_CONCURRENT,
    MAX_WAITING,
    AnswerPendingError,
    QueryService,
)
from traceloom.fleet.questions.catalogue import QUESTION  # noqa: E402
from traceloom.fleet.questions.declaration import QuestionFrames, RuleQuery  # noqa: E402
from traceloom.fleet.store.captures import CaptureRecord, ServiceState  # noqa: E402
from traceloom.fleet.store.schema import SCHEMAS, get_utc_day  # noqa: E402
from traceloom.fleet.store.tables import Tables  # noqa: E402
from traceloom.server.problem import HttpError  # noqa: E402

NOW = 1_790_000_000 * 10**9
FINDINGS = QUESTION["findings"]


def with_desk(
    folder: Path, test: Callable[[QueryService], Awaitable[None]], seconds: float = 60.0
) -> None:
    async def run() -> None:
        tables, state = Tables(str(folder)), ServiceState(str(folder / "state.db"))
        tables.create()
        queries = QueryService(tables, state, lambda: NOW, seconds)
        try:
            await test(queries)
        finally:
            queries.close()
            state.close()

    asyncio.run(run())


def test_what_takes_too_long_is_said_so_and_what_is_too_much_is_refused(tmp_path: Path) -> None:
    async def test(queries: QueryService) -> None:
        release = threading.Event()
        slugs = []
        try:
            asked = [asyncio.ensure_future(queries.work(release.wait)) for _ in range(MAX_WAITING)]
            await asyncio.sleep(0)
            with pytest.raises(HttpError) as refused:
                await queries.work(release.wait)
            assert (refused.value.slug, refused.value.status) == ("busy", 503)
            # a state's method, as an agent's request needs it, goes on meanwhile
            assert await asyncio.to_thread(queries.state.counts)
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(answer, HttpError)
                slugs.append(answer.slug)
            names = [
                thread.name
                for thread in threading.enumerate()
                if "traceloom-question" in thread.name
            ]
            assert len(names) == MAX_CONCURRENT
        finally:
            release.set()
        assert set(slugs) == {"slow-question"}
        queries.seconds = 60.0
        await asyncio.to_thread(
            queries._threads.submit(bool).result
        )  # what was asked before has ended
        assert await queries.work(lambda: "answered") == "answered"

    with_desk(tmp_path, test, seconds=0.2)


def test_an_answer_is_given_again_until_a_table_or_a_rule_changes(tmp_path: Path) -> None:
    async def test(queries: QueryService) -> None:
        first = await queries.ask(FINDINGS, RuleQuery())
        assert await queries.ask(FINDINGS, RuleQuery()) is first
        assert await queries.ask(FINDINGS, RuleQuery(top=7)) is not first
        of_before = await queries.ask(FINDINGS, RuleQuery(top=8))
        day = get_utc_day(NOW)
        row = {"day": [day], "capture": ["c"], "slug": ["launch-bound"], "confidence": [1.0]}
        about = {"day": [day], "capture": ["c"], "start_ns": [NOW]}
        rows = {
            name: SCHEMAS[name].complete(pl.DataFrame(data))
            for name, data in (("findings", row), ("captures", about))
        }
        queries.tables.commit("captures", 1, rows)
        assert await queries.ask(FINDINGS, RuleQuery(top=8), seconds=3600.0) is of_before, (
            "it is not old"
        )
        second = await queries.ask(FINDINGS, RuleQuery())
        assert [each.rule for each in second.rows] == ["launch-bound"]  # type: ignore[attr-defined]
        queries.state.put_document("owners", "olga", "")
        assert await queries.ask(FINDINGS, RuleQuery()) is not second

    with_desk(tmp_path, test)


def test_who_asks_again_gets_the_answer_that_took_long_though_tables_changed_meanwhile(
    tmp_path: Path,
) -> None:
    async def test(queries: QueryService) -> None:
        release, worked = threading.Event(), []

        def slow(frames: QuestionFrames, asked: Any) -> Any:
            worked.append(asked)
            release.wait()
            return FINDINGS.compute(frames, asked)

        question, asked = replace(FINDINGS, compute=slow), RuleQuery()
        for _ in range(3):
            with pytest.raises(AnswerPendingError) as working:
                await queries.ask_again(question, asked, 0.0)
        assert working.value.seconds > 0
        queries.state.put_document("owners", "olga", "")  # which has an answer made anew
        release.set()
        answers = [await queries.ask_again(question, asked, 60.0) for _ in range(2)]
        assert answers[0] is answers[1]
        assert len(worked) == 1
        other = await queries.ask_again(question, RuleQuery(top=3), 60.0)
        assert other is not answers[0]

    with_desk(tmp_path, test)


def test_a_file_that_a_table_lacks_is_a_refusal_and_no_defect(tmp_path: Path) -> None:
    async def test(queries: QueryService) -> None:
        row = {"day": [get_utc_day(NOW)], "capture": ["c"], "start_ns": [NOW]}
        queries.tables.commit("captures", 1, {"captures": pl.DataFrame(row)})
        for file in (tmp_path / "tables" / "captures").rglob("*.parquet"):
            file.unlink()
        with pytest.raises(HttpError) as refused:
            await queries.ask(FINDINGS, RuleQuery())
        assert (refused.value.slug, refused.value.status) == ("unreadable", 503)

    with_desk(tmp_path, test)


def test_an_answer_says_how_many_captures_it_lacks(tmp_path: Path) -> None:
    async def test(queries: QueryService) -> None:
        assert (await queries.ask(FINDINGS, RuleQuery())).lacking == 0  # type: ignore[attr-defined]
        for number, state in enumerate(("received", "quarantined", "committed", "again")):
            record = CaptureRecord(
                id=f"c{number}",
                day="2026-11-26",
                job="",
                uploader="u",
                received_ns=1,
                complete=False,
                bytes=0,
                files=(),
            )
            queries.state.add_capture(record)
            queries.state.complete_capture(record.id, "1")
            with queries.state._transaction() as connection:
                kept = "committed" if state == "again" else state
                statement = "UPDATE tasks SET state = :state WHERE capture = :id"
                queries.state._change(connection, statement, state=kept, id=record.id)
        queries.state.backfill("2")  # which waits for all that were analysed or refused before
        answer = await queries.ask(FINDINGS, RuleQuery())
        assert answer.lacking == 2  # type: ignore[attr-defined]

    with_desk(tmp_path, test)
