"""Processes whose PyTorch profiler polls: who they are, whether they are busy, and what they are to be told next."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from traceloom.agent.ipc.datagrams import Poll, configuration_reply

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_CLIENTS = 8192
USUAL_INTERVAL_S = 5.0  # between polls, where the process has not been told otherwise
_MOST_ANCESTORS = 10
_SILENT_S = 900.0  # a stopped process polls again when it goes on; it is forgotten when it has ended


class ProfilerClient(msgspec.Struct, kw_only=True):
    """A process that polls. Its identity is (boot, pid, start time); `key` is `PID@START` as of processes.

    `pid`, `uid` and `ancestors` are what the kernel says, whatever the process says of itself.
    """

    key: str
    pid: int
    uid: int
    gid: int
    start_ticks: int
    ancestors: tuple[int, ...] = ()
    address: str | bytes = ""
    busy: bool = False
    polls: int = 0
    first_ns: int = 0
    polled: float = 0.0  # on the monotonic clock
    interval_s: float = USUAL_INTERVAL_S


class Offer(msgspec.Struct, kw_only=True):
    """A configuration that waits for the next poll of an idle process.

    `text` gives it when that comes, "" to wait for another poll; `delivered` is called once it has been handed over.
    """

    text: Callable[[ProfilerClient], str]
    delivered: Callable[[], None]


class ProfilerRegistry:
    """Answers polls from memory. Used from the loop's thread alone.

    Args:
        proc: Where the kernel's `/proc` is.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self.proc = proc
        self.clients: dict[str, ProfilerClient] = {}
        self.offers: dict[str, Offer] = {}  # of clients, by key
        self.listeners: list[Callable[[ProfilerClient], None]] = []  # called after each poll
        self._keys: dict[int, str] = {}

    def poll(self, poll: Poll, pid: int, uid: int, gid: int, address: str | bytes = "") -> ProfilerClient | None:
        """Note a poll of a process; None where it has ended meanwhile, or there are too many.

        Two processes never have the same `address`: where it is that of the last poll of this pid, so is the process.
        """
        client = self.by_pid(pid)
        if client is None or not address or client.address != address:
            client = self._identified(pid, uid, gid)
            if client is None:
                return None
        now = time.monotonic()
        if client.polls:
            client.interval_s = min(max(now - client.polled, 0.1), 60.0)
        client.uid, client.gid, client.address = uid, gid, address  # it may have given up its rights since
        client.busy = poll.busy
        client.polls += 1
        client.polled = now
        return client

    def _identified(self, pid: int, uid: int, gid: int) -> ProfilerClient | None:
        """The client that a process is, a new one where it has not polled before."""
        try:
            parent, ticks = parent_and_start(self.proc, pid)
        except (OSError, ValueError, IndexError):
            return None
        key = f"{pid}@{ticks}"
        client = self.clients.get(key)
        if client is None:
            if len(self.clients) >= MOST_CLIENTS:
                self.forget()
                if len(self.clients) >= MOST_CLIENTS:
                    return None
            self.clients.pop(self._keys.get(pid, ""), None)  # an earlier process of this pid
            client = self.clients[key] = ProfilerClient(
                key=key, pid=pid, uid=uid, gid=gid, start_ticks=ticks, first_ns=time.time_ns(),
                ancestors=tuple(ancestors(self.proc, parent)),
            )  # fmt: skip
            self._keys[pid] = key
        return client

    def answer(self, client: ProfilerClient) -> tuple[bytes, Callable[[], None] | None]:
        """The datagram that answers the poll of a client, and what to call once it is sent."""
        offer = self.offers.get(client.key)
        text = "" if offer is None or client.busy else offer.text(client)
        if offer is None or not text:
            return configuration_reply(""), None
        return configuration_reply(text), lambda: self._delivered(client.key, offer)

    def answered(self, client: ProfilerClient) -> None:
        """Let those hear of a poll who wait for it."""
        for listener in list(self.listeners):
            listener(client)

    def by_pid(self, pid: int) -> ProfilerClient | None:
        """The client that has this pid now."""
        return self.clients.get(self._keys.get(pid, ""))

    def forget(self) -> None:
        """Drop clients that have ended."""
        now = time.monotonic()
        for key, client in list(self.clients.items()):
            if now - client.polled < USUAL_INTERVAL_S:
                continue
            alive = False
            with contextlib.suppress(OSError, ValueError, IndexError):
                alive = parent_and_start(self.proc, client.pid)[1] == client.start_ticks
            if not alive or now - client.polled > _SILENT_S:
                del self.clients[key]
                self.offers.pop(key, None)
                if self._keys.get(client.pid) == key:
                    del self._keys[client.pid]

    def _delivered(self, key: str, offer: Offer) -> None:
        if self.offers.get(key) is offer:
            del self.offers[key]
        offer.delivered()


def parent_and_start(proc: str, pid: int) -> tuple[int, int]:
    """Parent and start time (in ticks since boot) of a process.

    Raises:
        OSError: There is none.
    """
    descriptor = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)
    return int(fields[1]), int(fields[19])


def ancestors(proc: str, parent: int) -> Iterator[int]:
    """The parent of a process, its parent, and so on; without the first process of the host."""
    for _ in range(_MOST_ANCESTORS):
        if parent <= 1:
            return
        yield parent
        try:
            parent, _ticks = parent_and_start(proc, parent)
        except (OSError, ValueError, IndexError):
            return


def is_alive(proc: str, pid: int, start_ticks: int) -> bool:
    """Whether this very process still runs: pids are given again."""
    return bool(process_state(pid, start_ticks, proc))


def process_state(pid: int, start_ticks: int, proc: str = "/proc") -> str:
    """The state of this very process, as R, S, D, T or t; "" where it has ended."""
    try:
        fields = Path(proc, str(pid), "stat").read_bytes().rpartition(b")")[2].split()
        state, ticks = fields[0].decode("ascii"), int(fields[19])
    except (OSError, ValueError, IndexError):
        return ""
    return state if ticks == start_ticks and state not in ("Z", "X") else ""
