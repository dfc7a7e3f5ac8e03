"""The demo as `traceloom serve` runs it: its directory, its token, its hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from traceloom.collect.service import Service
from traceloom.demo.directory import DemoDirectory, demo_directory
from traceloom.demo.fleet import fill, recipe
from traceloom.demo.hosts import hosts_at_the_end, speak
from traceloom.errors import UsageError
from traceloom.store.objects import Objects
from traceloom.store.state import State
from traceloom.store.tables import Tables

TOKEN = "demo"  # noqa: S105  (its name)


class Demo:
    """A made fleet that is served.

    Attributes:
        directory: Where its store is.
        token: What opens all of it; "" before it is filled.
    """

    def __init__(self, directory: DemoDirectory) -> None:
        self.directory = directory
        self.token = ""

    @classmethod
    @contextmanager
    def in_directory(cls, store: str, state: str) -> Iterator[Demo]:
        """Have a directory for it, as `demo_directory`.

        Raises:
            UsageError: `wrong-usage`: a state of its own is asked for, too.
        """
        if state:
            raise UsageError("a demo keeps its state in its store", slug="wrong-usage", hint="leave --state out")
        with demo_directory(store) as directory:
            yield cls(directory)

    def fill(self, state: State, objects: Objects, tables: Tables, progress: Callable[[str], object]) -> None:
        """Fill its store, unless it is full, and make a token; progress is called with what is done next.

        The token of this user's own service is left alone.
        """
        if not self.directory.full:
            now_ns = time.time_ns()
            fill(state, objects, tables, recipe(now_ns), now_ns, progress=progress)
            self.directory.filled()
        state.revoke_token(TOKEN)
        self.token = state.add_token(TOKEN, "admin")

    @asynccontextmanager
    async def hosts(self, service: Service) -> AsyncIterator[None]:
        """Let its hosts say how they are, while the service runs."""
        speaking = asyncio.create_task(
            speak(service, await asyncio.to_thread(hosts_at_the_end, service.tables)), name="hosts of the demo"
        )
        try:
            yield
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
