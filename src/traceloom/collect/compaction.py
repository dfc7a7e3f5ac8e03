"""The route by which an operator has the tables compacted now, not at night."""

from __future__ import annotations

import asyncio
import time

from traceloom.agent.http.answers import HttpAnswer, RequestError
from traceloom.collect.routes import FleetAsked, FleetRoute


class CompactAnswer(HttpAnswer, frozen=True):
    """The tables are compacted; `seconds`: how long that took."""

    seconds: float


async def _compact(asked: FleetAsked) -> CompactAnswer:
    pipeline = asked.service.pipeline
    if not pipeline.leads:
        raise RequestError(503, "another service writes the tables now", slug="not-leading", retry_s=2)
    began = time.monotonic()
    await asyncio.to_thread(pipeline.compact)
    await asked.note()
    return CompactAnswer(seconds=time.monotonic() - began)


COMPACTION_ROUTES = (
    FleetRoute(
        path="/api/v1/compact", summary="Make large files of small ones, and remove what has been kept long enough",
        answers=_compact, answer=CompactAnswer, method="POST", role="operator", refuses=(403, 503),
    ),
)  # fmt: skip
