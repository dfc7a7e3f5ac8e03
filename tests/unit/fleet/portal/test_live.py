"""Live pages: worked out once for all of their readers, only while somebody reads, and until nothing changes any more."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

from traceloom.fleet.portal.app import LiveContent, LivePages
from traceloom.server.problem import HttpError


class Changing:
    """A page that shows a number, and how often it was worked out."""

    def __init__(self) -> None:
        self.number, self.looks, self.ended = 1, 0, False
        self.last_error: HttpError | None = None

    async def look(self) -> LiveContent:
        self.looks += 1
        if self.last_error is not None:
            raise self.last_error
        return LiveContent("head", f"{self.number}", self.ended)


def parts(event: bytes) -> str:
    [data] = [line for line in event.decode().splitlines() if line.startswith("data: ")]
    return str(json.loads(data.removeprefix("data: "))["parts"])


def test_all_readers_of_a_page_share_it() -> None:
    async def run() -> None:
        live, page = LivePages(0.01), Changing()
        readers = [live.events("/p", page.look, "") for _ in range(50)]
        for reader in readers:
            assert await anext(reader) == b"retry: 1000\n\n"
        assert {parts(await anext(reader)) for reader in readers} == {"1"}
        waiting = [asyncio.ensure_future(anext(reader)) for reader in readers]
        before = page.looks
        await asyncio.sleep(0)
        page.number = 2
        events = await asyncio.gather(*waiting)
        assert {parts(event) for event in events} == {"2"}
        assert len({id(event) for event in events}) == 1, "it is encoded once"
        assert page.looks - before <= 3, "not once for each reader"
        assert len(live.streams) == 1
        for reader in readers:
            await reader.aclose()
        assert live.streams == {}
        looks = page.looks
        await asyncio.sleep(0.05)
        assert page.looks == looks, "nobody reads it"

    asyncio.run(run())


def test_who_has_the_page_already_is_not_sent_it_again() -> None:
    async def run() -> None:
        live, page = LivePages(0.01), Changing()
        first = live.events("/p", page.look, "")
        await anext(first)
        name = (await anext(first)).split(b"\n")[0].removeprefix(b"id: ").decode()
        again = live.events("/p", page.look, name)
        await anext(again)
        coming = asyncio.ensure_future(anext(again))
        await asyncio.sleep(0.03)
        assert not coming.done()
        page.number = 3
        assert parts(await coming) == "3"
        await again.aclose()
        await first.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("status", [0, 404, 503])
def test_it_ends_with_what_it_is_about_and_waits_for_a_service_that_leads(status: int) -> None:
    async def run() -> None:
        live, page = LivePages(0.01), Changing()
        reader = live.events("/p", page.look, "")
        await anext(reader)
        await anext(reader)
        if status:
            page.last_error = HttpError(status, "no", slug="not-leading")
        else:
            page.ended, page.number = True, 9
            assert parts(await anext(reader)) == "9"
        coming = asyncio.ensure_future(anext(reader))
        if status == 503:
            await asyncio.sleep(0.03)
            page.last_error, page.number = None, 7
            assert parts(await coming) == "7"
            await reader.aclose()
            return
        assert (await coming).startswith(b"event: ended")
        with pytest.raises(StopAsyncIteration):
            await anext(reader)
        assert live.streams == {}

    asyncio.run(run())
