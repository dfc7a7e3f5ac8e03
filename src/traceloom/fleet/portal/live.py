"""Pages that change while they are read: each is worked out once a second for all of its readers
together.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import NamedTuple

import msgspec

from traceloom.server.problem import HttpError

_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
_KEEP_ALIVE_S = 15.0
_MAX_CONNECTION_S = 60.0  # then the browser comes again, and shows who it is
_MAX_STREAMS = 256
NOT_LEADING = 503


class LiveContent(NamedTuple):
    """What a page shows, as HTML, and whether it changes no more."""

    head: str
    parts: str
    ended: bool


class LiveEvent(NamedTuple):
    """What a page shows, as it is sent; `name` changes with it."""

    name: str
    sent: bytes


class LivePage:
    """One page, as it is now, for all who read it.

    Args:
        look: Works it out.
        look_s: How often.
    """

    def __init__(
        self, poll: Callable[[], Coroutine[object, object, LiveContent]], look_s: float
    ) -> None:
        self.readers = 0
        self.now: LiveEvent | None = None
        self.gone = False  # there is nothing to look at any more
        self._look, self._look_s = poll, look_s
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._follow(), name="live page")

    async def next(self, name: str) -> LiveEvent | None:
        """What it shows as soon as that is another than `name`; None when a while has passed
        without.
        """
        if self.now is None or (self.now.name == name and not self.gone):
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), _KEEP_ALIVE_S)
            except (asyncio.TimeoutError, TimeoutError):
                return None
        return self.now if self.now is not None and self.now.name != name else None

    async def close(self) -> None:
        """Look no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while not self.gone:
            try:
                content = await self._look()
            except HttpError as error:  # what cannot be answered now may be later
                self.gone = error.status != NOT_LEADING
            except Exception:  # noqa: BLE001  (its readers hear that it has ended, and the log why)
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
    """All pages that somebody reads now.

    Args:
        look_s: How often each is worked out.
    """

    def __init__(self, look_s: float = _POLL_S) -> None:
        self.look_s = look_s
        self.streams: dict[str, LivePage] = {}

    async def events(
        self, key: str, poll: Callable[[], Coroutine[object, object, LiveContent]], name: str
    ) -> AsyncGenerator[bytes, None]:
        """What a reader is sent: each state of the page that differs from the one before, the first
        from `name`.

        Args:
            key: Of the page and what its address asks for: readers with the same see the same.
            poll: Works out what it shows.
            name: Of the state that the reader has.
        """
        stream = self.streams.get(key)
        if stream is None or stream.gone:
            stream = self.streams[key] = LivePage(poll, self.look_s)
        stream.readers += 1
        loop = asyncio.get_running_loop()
        until = loop.time() + _MAX_CONNECTION_S
        try:
            yield b"retry: 1000\n\n"
            while loop.time() < until:
                event = await stream.next(name)
                if event is not None:
                    name = event.name
                    yield event.sent
                if stream.gone:
                    yield b"event: ended\ndata: {}\n\n"
                    return
                if event is None:
                    yield b": alive\n\n"
        finally:
            stream.readers -= 1
            if not stream.readers:
                if self.streams.get(key) is stream:
                    del self.streams[key]
                await stream.close()

    def check_room(self, key: str) -> None:
        """See that another page can be followed.

        Raises:
            RequestError: `busy`.
        """
        if key not in self.streams and len(self.streams) >= _MAX_STREAMS:
            raise HttpError(503, "too many pages are read now", slug="busy", retry_s=10)
