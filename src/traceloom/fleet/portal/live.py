"""Live pages: each is rendered once a second for all of its readers together."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import NamedTuple

import msgspec

from traceloom.server.problem import HttpError

_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
_MAX_STREAMS = 256
_MAX_STREAMS_OF_READER = 64
NOT_LEADING = 503


class LiveContent(NamedTuple):
    """Content of a page as HTML, and whether it is final."""

    head: str
    parts: str
    ended: bool


class LiveEvent(NamedTuple):
    """Content of a page as it is sent; `name` identifies its version."""

    name: str
    sent: bytes


class LivePage:
    """A page that is polled for all of its readers.

    Args:
        poll: Renders its content.
        look_s: Seconds between polls.
    """

    def __init__(
        self, poll: Callable[[], Coroutine[object, object, LiveContent]], look_s: float
    ) -> None:
        self.readers = 0
        self.now: LiveEvent | None = None
        self.gone = False  # the page no longer exists
        self._look, self._look_s = poll, look_s
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._follow(), name="live page")

    async def next(self, name: str) -> LiveEvent | None:
        """Returns the content as soon as its version is not `name`; None if it changes no more."""
        if self.now is None or (self.now.name == name and not self.gone):
            await self._changed.wait()
        return self.now if self.now is not None and self.now.name != name else None

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while not self.gone:
            try:
                content = await self._look()
            except HttpError as error:  # a temporary failure, which may pass
                self.gone = error.status != NOT_LEADING
            except Exception:  # noqa: BLE001  (readers get an end event, and the log the reason)
                _LOG.exception("a live page")
                self.gone = True
            else:
                body = msgspec.json.encode({"head": content.head, "parts": content.parts})
                name = hashlib.sha256(body).hexdigest()[:16]
                if self.now is None or name != self.now.name:
                    self.now = LiveEvent(
                        name, b"id: " + name.encode() + b"\ndata: " + body + b"\n\n"
                    )
                    self._tell()
                self.gone = content.ended
            if not self.gone:
                await asyncio.sleep(self._look_s)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LivePages:
    """All live pages that currently have readers.

    Args:
        look_s: Seconds between polls of each page.
    """

    def __init__(self, look_s: float = _POLL_S) -> None:
        self.look_s = look_s
        self.streams: dict[str, LivePage] = {}
        self.open_by_reader: Counter[str] = Counter()

    async def events(
        self,
        key: str,
        poll: Callable[[], Coroutine[object, object, LiveContent]],
        name: str,
        reader: str = "",
    ) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events: each changed version of the page, the first one other than
        `name`.

        Args:
            key: Page and parameters: readers with the same key share the content.
            poll: Renders the content.
            name: Version that the reader has.
            reader: Who reads.
        """
        if self.open_by_reader[reader] >= _MAX_STREAMS_OF_READER:  # others began just now
            return
        stream = self.streams.get(key)
        if stream is None or stream.gone:
            stream = self.streams[key] = LivePage(poll, self.look_s)
        stream.readers += 1
        self.open_by_reader[reader] += 1
        try:
            yield b"retry: 1000\n\n"
            while True:
                event = await stream.next(name)
                if event is not None:
                    name = event.name
                    yield event.sent
                if stream.gone:
                    yield b"event: ended\ndata: {}\n\n"
                    return
        finally:
            stream.readers -= 1
            self.open_by_reader -= Counter([reader])
            if not stream.readers:
                if self.streams.get(key) is stream:
                    del self.streams[key]
                await stream.close()

    def check_room(self, key: str, reader: str) -> None:
        """Checks that a reader can follow another page.

        Raises:
            HttpError: `busy`.
        """
        if self.open_by_reader[reader] >= _MAX_STREAMS_OF_READER or (
            key not in self.streams and len(self.streams) >= _MAX_STREAMS
        ):
            raise HttpError(503, "too many pages are read now", slug="busy", retry_s=10)
