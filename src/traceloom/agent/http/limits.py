"""What one client may cost: requests per second, connections, bytes of a request, seconds of waiting for it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

from traceloom.agent.config import Access
from traceloom.agent.http.answers import RequestError
from traceloom.agent.http.peers import Peer

AGENT_HINT = "`access.request_bytes` of agent.toml"
_PEERS = 4096  # that are remembered; those beyond are the ones that have been quiet longest


class Rates:
    """A token bucket for each peer: it holds what two seconds bring, and a request takes a token."""

    def __init__(
        self, per_second: float, clock: Callable[[], float] = time.monotonic,
        *, hint: str = "`access.requests_per_second` of agent.toml",
    ) -> None:  # fmt: skip
        self.per_second, self.hint = per_second, hint
        self.most = max(1.0, 2 * per_second)
        self.clock = clock
        self.buckets: dict[str, tuple[float, float]] = {}  # peer -> tokens, when; the last to ask is last

    def take(self, name: str) -> None:
        """Count a request of a peer.

        Raises:
            RequestError: `too-many-requests`: it has none left.
        """
        now = self.clock()
        tokens, then = self.buckets.pop(name, (self.most, now))
        tokens = min(self.most, tokens + (now - then) * self.per_second)
        self.buckets[name] = (max(0.0, tokens - 1), now)
        if len(self.buckets) > _PEERS:
            del self.buckets[next(iter(self.buckets))]
        if tokens < 1:
            wait = math.ceil((1 - tokens) / self.per_second)
            raise RequestError(
                429,
                f"more than {self.per_second:g} requests a second",
                slug="too-many-requests",
                retry_s=wait,
                hint=self.hint,
            )


class Connections:
    """How many connections there are, in all and of each peer: one peer may have half of them; root is not counted."""

    def __init__(self, access: Access) -> None:
        self.most = access.connections
        self.of: Counter[str] = Counter()

    def enter(self, peer: Peer) -> None:
        """Count a connection.

        Raises:
            RequestError: `too-many-connections`.
        """
        if not peer.unlimited and (self.of.total() >= self.most or self.of[peer.name] >= max(1, self.most // 2)):
            raise RequestError(
                503,
                "too many connections are open",
                slug="too-many-connections",
                retry_s=1,
                hint="`access.connections` of agent.toml; one user may have half of them",
            )
        self.of[peer.name] += not peer.unlimited

    def leave(self, peer: Peer) -> None:
        """Its connection ended."""
        self.of[peer.name] -= not peer.unlimited
        if not self.of[peer.name]:
            del self.of[peer.name]


async def body_of(chunks: AsyncIterator[bytes], declared: str, most: int, hint: str = AGENT_HINT) -> bytes:
    """The body of a request, no longer than `most` bytes; `declared` is its Content-Length, or "".

    Raises:
        RequestError: `too-large`.
    """
    body = bytearray()  # bytes would be copied with every chunk
    if not declared.isdecimal() or int(declared) <= most:
        async for chunk in chunks:
            body += chunk
            if len(body) > most:
                break
        else:
            return bytes(body)
    raise RequestError(
        413,
        f"the body is larger than {most:,} bytes",
        slug="too-large",
        hint=hint,
    )
