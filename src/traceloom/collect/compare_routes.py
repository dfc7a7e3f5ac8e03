"""The route of two captures against each other."""

from __future__ import annotations

import asyncio

from starlette.responses import Response, StreamingResponse

from traceloom.agent.http.answers import RequestError
from traceloom.collect.engine import TaskError
from traceloom.collect.routes import PAGE_HEADERS, FleetAsked, FleetRoute
from traceloom.store.state import CaptureRecord


async def _against(asked: FleetAsked) -> Response:
    service = asked.service
    pair: list[CaptureRecord] = []
    for name in (asked.request.path_params["base"], asked.request.path_params["id"]):
        capture = await asyncio.to_thread(service.state.capture, name)
        if capture is None:
            raise RequestError(404, f"there is no capture `{name[:80]}`", slug="no-such-capture")
        tasks = await asyncio.to_thread(service.state.tasks, name)
        if not any(task.state in {"analysed", "committed"} for task in tasks):
            raise RequestError(409, f"the capture `{name[:80]}` is not analysed", slug="not-analysed")
        pair.append(capture)
    async with service.rendering:
        try:
            page = await asyncio.to_thread(service.pipeline.comparison, *pair)
        except TaskError as error:
            raise RequestError(503, f"they cannot be compared: {error}", slug="not-rendered") from error
    return StreamingResponse(service.objects.chunks(page), headers=PAGE_HEADERS, media_type="text/html")


COMPARE_ROUTES = (
    FleetRoute(
        path="/api/v1/captures/{id}/against/{base}",
        summary="A capture against another one, the base: a page, rendered when it is first asked for",
        answers=_against, content="text/html", refuses=(404, 409, 503),
    ),
)  # fmt: skip
