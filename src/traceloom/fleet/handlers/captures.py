"""HTTP handlers for captures (announce, upload, complete, list, report, timeline, comparison),
backfill, compaction, tokens and the audit log.

The event loop never waits for a database or a store: calls to them run in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
from starlette.responses import Response, StreamingResponse

from traceloom import __version__
from traceloom.errors import TraceloomError, UsageError
from traceloom.fleet import api as forms
from traceloom.fleet.service.forwarding import note_leader_needed
from traceloom.fleet.service.pipeline import get_capture_directory
from traceloom.fleet.service.tasks import TaskError
from traceloom.fleet.store.captures import (
    ROLES,
    CaptureFile,
    CaptureRecord,
    Role,
    TaskRecord,
    TokenRecord,
)
from traceloom.fleet.store.objects import check_object_name
from traceloom.server.problem import HttpError, HttpResponseBody, make_bad_request
from traceloom.server.routing import (
    DescribedRoute,
    decode_body,
    decode_query,
    make_truncated_error,
)
from traceloom.system.text import hide_paths

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.types import Scope

    from traceloom.fleet.service.request_plan import FleetRequest
    from traceloom.fleet.service.requests import HostRegistry
    from traceloom.fleet.service.service import FleetService
    from traceloom.fleet.store.objects import ObjectStore
    from traceloom.fleet.triggers import FleetTriggerEngine


Form = TypeVar("Form", bound=msgspec.Struct)
T = TypeVar("T")

BODY_BYTES = 32 << 20  # an announcement with the max number of files
_UPLOAD_TIMEOUT_S = 3600  # validity of a signed URL
_WRITE_BYTES = 1 << 20
_METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PAGE_HEADERS = {
    # Pages come from untrusted traces: they may run their own scripts, but access nothing of this
    # service.
    "Content-Security-Policy": "sandbox allow-scripts allow-downloads",
    "X-Content-Type-Options": "nosniff",
}


class FleetRequestContext:
    """A request, its token, and the service that handles it."""

    def __init__(self, service: FleetService, request: Request) -> None:
        self.service, self.request = service, request
        self.token: TokenRecord = request.state.token

    async def body(self, kind: type[T] | Callable[[bytes], T], max_bytes: int = BODY_BYTES) -> T:
        """Decodes the body of the request.

        Raises:
            HttpError: `too-large`, `wrong-request`, `too-slow`.
        """
        return await decode_body(self.request, kind, max_bytes, "send less at once")

    def parameters(self, kind: type[Form]) -> Form:
        """Decodes the query string.

        Raises:
            HttpError: `wrong-request`.
        """
        return decode_query(self.request, kind)

    async def capture(self) -> CaptureRecord:
        """Returns the capture named in the path.

        Raises:
            HttpError: `no-such-capture`.
        """
        capture = await asyncio.to_thread(
            self.service.state.capture, self.request.path_params["id"]
        )
        if capture is None:
            raise HttpError(404, "there is no such capture", slug="no-such-capture")
        return capture

    async def own_capture(self) -> CaptureRecord:
        """Returns the capture named in the path, if the client is its uploader or an operator.

        Raises:
            HttpError: `no-such-capture`, `not-allowed`.
        """
        capture = await self.capture()
        if capture.uploader != self.token.name and not has_role(self.token, "operator"):
            raise HttpError(403, "another one uploads this capture", slug="not-allowed")
        return capture

    def file_of(self, capture: CaptureRecord) -> CaptureFile:
        """Returns the file of a capture named in the path.

        Raises:
            HttpError: `no-such-file`.
        """
        name = self.request.path_params["name"]
        for file in capture.files:
            if file.name == name:
                return file
        raise HttpError(404, "the capture has no such file", slug="no-such-file")

    def hosts(self) -> HostRegistry:
        """Returns the registry of hosts.

        Raises:
            HttpError: `not-leading`: another service of this state leads; retry later.
        """
        if self.service.hosts is None:
            note_leader_needed()
            raise HttpError(
                503, "another service talks to hosts now", slug="not-leading", retry_s=2
            )
        return self.service.hosts

    def triggers(self) -> FleetTriggerEngine:
        """Returns the trigger engine.

        Raises:
            HttpError: `not-leading`, as of `hosts`.
        """
        self.hosts()
        assert self.service.triggers is not None, "both are there, or none"
        return self.service.triggers

    def fleet_request(self) -> FleetRequest:
        """Returns the trace request named in the path.

        Raises:
            HttpError: `no-such-request`; `not-leading`, as of `hosts`.
        """
        request = self.hosts().requests.get(self.request.path_params["id"])
        if request is None:
            hint = "`traceloom fleet requests`"
            raise HttpError(404, "there is no such request", slug="no-such-request", hint=hint)
        return request

    async def note(self, **details: str) -> None:
        """Records the successful action in the audit log."""
        await asyncio.to_thread(
            self.service.state.note, self.token.name, self.request.state.what, "done", details
        )


class FleetRoute(DescribedRoute, frozen=True, kw_only=True):
    """A route with its handler and required role (None: public)."""

    answers: Callable[
        [FleetRequestContext], Awaitable[msgspec.Struct | Response] | msgspec.Struct | Response
    ]
    role: Role | None = "viewer"


def name_client(scope: Scope) -> str:
    """Returns who sends a request, for limits before it says who it is: its address, or its user on
    this host.
    """
    identify = scope.get("state", {}).get("identify")
    return str(identify(None).name if identify else f"tcp {(scope['client'] or ('',))[0]}")


def get_bearer(headers: Headers) -> str:
    """Returns the token of a request; "" if it has none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def has_role(token: TokenRecord, role: Role) -> bool:
    """Returns whether a token has at least a role: each role includes those before it."""
    return ROLES.index(token.role) >= ROLES.index(role)


_RECHECK_S = 5.0  # between looks whether the reader of a stream still may read it


async def send_events(
    events: AsyncGenerator[bytes, None], may_read: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Yields server-sent events, and signs of life between them, for as long as their reader may
    read: tokens and sessions end while streams last.
    """
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=_RECHECK_S)
            if not await may_read():
                return
            if done:
                yield coming.result()
                coming = asyncio.ensure_future(anext(events))
            else:
                yield b": alive\n\n"
    except (StopAsyncIteration, TraceloomError):  # they are over, or the state does not answer
        return
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


async def check_own_job(context: FleetRequestContext, job: str) -> None:
    """Checks that the client may trace a job, upload captures of it and make statements about it.

    Raises:
        HttpError: `not-allowed`.
    """
    if has_role(context.token, "operator"):
        return
    registry, name = context.service.hosts, context.token.name.partition("@")[0]
    owners = (registry.users_of(job) if registry is not None else set()) or await asyncio.to_thread(
        context.service.state.job_owners, job
    )
    if any(owner.partition("@")[0] != name for owner in owners):
        raise HttpError(
            403,
            f"`{job}` is not the job of `{context.token.name}`",
            slug="not-allowed",
            hint="a token of a requester is called as its user is; an operator's are for all jobs",
        )


@asynccontextmanager
async def _enter_in_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enters and leaves a blocking context manager in a thread."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    except BaseException:
        if not await asyncio.to_thread(manager.__exit__, *sys.exc_info()):
            raise
    else:
        await asyncio.to_thread(manager.__exit__, None, None, None)


def _get_readiness(context: FleetRequestContext) -> forms.FleetHealth:
    if not context.service.pipeline.state_answers:
        raise HttpError(
            503,
            "the state does not answer",
            slug="not-healthy",
            hint="its log says more",
            retry_s=5,
        )
    return forms.FleetHealth(healthy=True)


async def _check_service(context: FleetRequestContext) -> forms.FleetCheckResponse:
    answer = await asyncio.to_thread(context.service.check)
    if has_role(context.token, "operator"):
        return answer
    checks = [  # where the service keeps things is for those who run it
        msgspec.structs.replace(check, text="" if check.works else hide_paths(check.text))
        for check in answer.checks
    ]
    return msgspec.structs.replace(answer, checks=checks)


async def _announce(context: FleetRequestContext) -> forms.AnnounceResponse:
    body = await context.body(forms.AnnounceBody)
    if body.job:
        await check_own_job(context, body.job)
    limits, names = context.service.limits, [file.name for file in body.files]
    try:
        for name in names:
            check_object_name(name)
    except UsageError as error:
        raise HttpError(400, error.message, slug=error.slug, hint=error.hint) from error
    # On a case-insensitive file system two such files would be the same.
    folded = {name.casefold() for name in names}
    folders = {name.rpartition("/")[0] for name in folded}
    if len(folded) < len(names) or folders & folded or any(name.count("/") > 1 for name in names):
        raise make_bad_request(
            "a file is named twice, is a folder too, or lies deeper than one folder"
        )
    total = sum(file.size for file in body.files)
    max_bytes = min(limits.file_bytes, context.service.objects.most_uploaded)
    too_large = max(file.size for file in body.files) > max_bytes or total > limits.capture_bytes
    if too_large or len(names) > limits.files:
        raise HttpError(
            413,
            f"a capture has at most {limits.files:,} files of {max_bytes / 1e9:.3g} GB, "
            f"{limits.capture_bytes / 1e9:.3g} GB in all",
            slug="too-large",
            hint="record fewer ranks or steps",
        )
    now_ns = time.time_ns()
    files = tuple(
        CaptureFile(file.name, file.size, file.sha256)
        for file in sorted(body.files, key=lambda f: f.name)
    )
    # The id is a hash of files, job and uploader, so that an upload can be retried.
    identity = msgspec.json.encode((context.token.name, body.job, files))
    capture = await asyncio.to_thread(
        context.service.state.add_capture,
        CaptureRecord(
            id=f"c{hashlib.sha256(identity).hexdigest()[:20]}",
            day=datetime.fromtimestamp(now_ns / 1e9, timezone.utc).date().isoformat(),
            job=body.job,
            uploader=context.token.name,
            received_ns=now_ns,
            complete=False,
            bytes=total,
            files=files,
        ),
    )
    if capture.complete:
        return forms.AnnounceResponse(id=capture.id, complete=True, uploads=[])

    def missing() -> list[forms.UploadTarget]:
        objects, incoming = context.service.objects, _get_incoming(capture)
        arrived = _find_uploads(objects, capture)
        return [
            forms.UploadTarget(
                name=file.name,
                url=objects.upload_url(f"{incoming}/{file.name}", _UPLOAD_TIMEOUT_S)
                or f"/api/v1/captures/{capture.id}/files/{file.name}",
            )
            for file in capture.files
            if file.name not in arrived
        ]

    async with context.service.upload_slots:
        uploads = await asyncio.to_thread(missing)
    await context.note(capture=capture.id)
    return forms.AnnounceResponse(id=capture.id, complete=False, uploads=uploads)


def _get_incoming(capture: CaptureRecord) -> str:
    return f"incoming/{capture.day}/{capture.id}"


def _find_uploads(objects: ObjectStore, capture: CaptureRecord) -> dict[str, str]:
    """Returns the files that have arrived, and the object of each: that in the capture, or in an
    object store that to which it was sent.
    """
    found: dict[str, str] = {}
    for prefix in (_get_incoming(capture), get_capture_directory(capture)):
        sizes = objects.sizes(prefix)
        found |= {
            file.name: f"{prefix}/{file.name}"
            for file in capture.files
            if sizes.get(f"{prefix}/{file.name}") == file.size
        }
    return found


async def _receive_file(context: FleetRequestContext) -> forms.FileResponse:
    from starlette.requests import ClientDisconnect

    capture = await context.own_capture()
    file, objects = context.file_of(capture), context.service.objects
    if objects.directory is None or capture.complete:
        raise HttpError(
            409,
            "files of this capture are not taken here",
            slug="not-taken",
            hint="announce it again",
        )
    digest, size, waiting = hashlib.sha256(), 0, bytearray()
    async with _enter_in_thread(
        objects.writing(f"{get_capture_directory(capture)}/{file.name}")
    ) as out:
        try:
            async for chunk in context.request.stream():
                size += len(chunk)
                if size > file.size:
                    raise HttpError(
                        413,
                        f"the file is longer than the {file.size:,} bytes announced",
                        slug="too-large",
                    )
                digest.update(chunk)
                waiting += chunk
                if len(waiting) >= _WRITE_BYTES:
                    await asyncio.to_thread(out.write, bytes(waiting))
                    waiting.clear()
        except ClientDisconnect as error:
            raise make_truncated_error() from error
        if size != file.size or digest.hexdigest() != file.sha256:
            raise HttpError(
                400,
                "the file is another than announced",
                slug="upload-differs",
                hint="send it again",
            )
        await asyncio.to_thread(out.write, bytes(waiting))
    return forms.FileResponse(name=file.name, size=size)


async def _complete(context: FleetRequestContext) -> forms.CaptureResponse:
    capture = await context.own_capture()
    service = context.service
    if capture.job and not capture.complete:  # whose it is may be known since it was announced
        await check_own_job(context, capture.job)

    def finish() -> list[str]:
        if capture.complete:
            return []
        wrong, arrived = [], _find_uploads(service.objects, capture)
        for file in capture.files:
            name = f"{get_capture_directory(capture)}/{file.name}"
            sent = arrived.get(file.name)
            if sent not in {None, name}:  # a signed URL could still change what was accepted
                incoming = f"{_get_incoming(capture)}/{file.name}"
                service.objects.copy(incoming, name)
                service.objects.delete(incoming)
                sent = name if service.objects.size(name) == file.size else None
            if sent is None:
                service.objects.delete(name)
                wrong.append(file.name)
        if not wrong:
            service.pipeline.accept(capture)
        return wrong

    async with service.upload_slots:
        wrong = await asyncio.to_thread(finish)
    if wrong:
        raise HttpError(
            409,
            f"{len(wrong)} files are not there as announced, {wrong[0]} among them",
            slug="upload-incomplete",
            hint="announce the capture again, and send what is asked for",
        )
    await context.note(capture=capture.id)
    return await _get_capture(context)


def _build_capture_answer(capture: CaptureRecord, tasks: list[TaskRecord]) -> forms.CaptureResponse:
    return forms.CaptureResponse(
        id=capture.id,
        day=capture.day,
        job=capture.job,
        uploader=capture.uploader,
        received_ns=capture.received_ns,
        bytes=capture.bytes,
        state=tasks[-1].state if tasks else "",
        tasks=[
            forms.TaskResponse(version=t.version, state=t.state, attempts=t.attempts, error=t.error)
            for t in tasks
        ],
        files={file.name: file.size for file in capture.files},
        digests={file.name: file.sha256 for file in capture.files},
    )


async def _get_capture(context: FleetRequestContext) -> forms.CaptureResponse:
    capture = await context.capture()
    return _build_capture_answer(
        capture, await asyncio.to_thread(context.service.state.tasks, capture.id)
    )


async def _list_captures(context: FleetRequestContext) -> forms.CapturesResponse:
    parameters = context.parameters(forms.CapturesParameters)

    def rows() -> list[forms.CaptureResponse]:
        state = context.service.state
        captures = state.captures(
            job=parameters.job, before_ns=parameters.before_ns, limit=parameters.most
        )
        tasks = state.tasks(*(capture.id for capture in captures))
        return [
            _build_capture_answer(capture, [task for task in tasks if task.capture == capture.id])
            for capture in captures
        ]

    return forms.CapturesResponse(captures=await asyncio.to_thread(rows))


def check_digest(chunks: Iterator[bytes], file: CaptureFile) -> Iterator[bytes]:
    """Yields a file as it was accepted; if it is another now, the last part of it is missing.

    Raises:
        HttpError: `upload-differs`.
    """
    digest, held = hashlib.sha256(), b""
    for chunk in chunks:
        if held:
            yield held
        digest.update(chunk)
        held = chunk
    if digest.hexdigest() != file.sha256:
        raise HttpError(
            503,
            f"{file.name} was changed in the store after it was accepted",
            slug="upload-differs",
        )
    yield held


async def _send_file(context: FleetRequestContext) -> Response:
    capture = await context.capture()
    file = context.file_of(capture)
    name = f"{get_capture_directory(capture)}/{file.name}"
    if await asyncio.to_thread(context.service.objects.size, name) is None:
        raise HttpError(404, "the file has not arrived", slug="no-such-file")
    headers = {
        "Content-Disposition": f'attachment; filename="{file.name.rpartition("/")[2]}"',
        "Repr-Digest": f"sha-256=:{b64encode(bytes.fromhex(file.sha256)).decode()}:",
    } | PAGE_HEADERS
    chunks = check_digest(context.service.objects.chunks(name), file)
    first = await asyncio.to_thread(next, chunks, b"")  # a small file is refused whole
    return StreamingResponse(
        chain((first,), chunks), headers=headers, media_type="application/octet-stream"
    )


async def _send_rendered(
    task: Literal["render", "render_timeline"],
    media_type: str,
    ending: str,
    context: FleetRequestContext,
) -> Response:
    """Sends a page of a capture, rendered on first access; with an `ending`, as a download."""
    capture = await _find_analysed(context, context.request.path_params["id"])
    download = (
        {"Content-Disposition": f'attachment; filename="{capture.id}{ending}"'} if ending else {}
    )
    render = partial(context.service.pipeline.rendered, capture, task)
    return await _send_page(context.service, render, media_type, download)


async def _find_analysed(context: FleetRequestContext, name: str) -> CaptureRecord:
    """Returns a capture that is analysed.

    Raises:
        HttpError: `no-such-capture`, `not-analysed`.
    """
    state = context.service.state
    capture = await asyncio.to_thread(state.capture, name)
    if capture is None:
        raise HttpError(404, f"there is no capture `{name[:80]}`", slug="no-such-capture")
    tasks = await asyncio.to_thread(state.tasks, name)
    if not any(task.state in {"analysed", "committed"} for task in tasks):
        error = tasks[-1].error if tasks else "its files are not all there"
        raise HttpError(
            409,
            f"the capture `{name}` is not analysed" + (f": {error}" if error else ""),
            slug="not-analysed",
        )
    return capture


async def _send_page(
    service: FleetService, render: Callable[[], str], media_type: str, headers: dict[str, str]
) -> Response:
    """Sends a page, which `render` makes unless it is there, and which strangers may have made.

    Raises:
        HttpError: `not-rendered`.
    """
    async with service.render_lock:
        try:
            name = await asyncio.to_thread(render)
        except TaskError as error:
            raise HttpError(
                503, f"it cannot be rendered: {hide_paths(str(error))}", slug="not-rendered"
            ) from error
    return StreamingResponse(
        service.objects.chunks(name), headers=headers | PAGE_HEADERS, media_type=media_type
    )


async def _start_backfill(context: FleetRequestContext) -> forms.BackfillResponse:
    body = await context.body(forms.BackfillBody)
    captures = await asyncio.to_thread(
        context.service.state.backfill, __version__, again=body.again
    )
    context.service.pipeline.wake()
    await context.note(captures=str(captures))
    return forms.BackfillResponse(version=__version__, captures=captures)


async def _add_token(context: FleetRequestContext) -> forms.TokenResponse:
    body = await context.body(forms.TokenBody)
    try:
        secret = await asyncio.to_thread(
            context.service.state.add_token, body.name, body.role, days=body.days
        )
    except UsageError as error:
        raise HttpError(409, error.message, slug=error.slug, hint=error.hint) from error
    await context.note(token=body.name, role=body.role)
    return forms.TokenResponse(name=body.name, role=body.role, token=secret)


async def _revoke(context: FleetRequestContext) -> forms.RevokedResponse:
    name = context.request.path_params["name"]
    if not await asyncio.to_thread(context.service.state.revoke_token, name):
        raise HttpError(404, "there is no such token", slug="no-such-token")
    await context.note(token=name)
    return forms.RevokedResponse(name=name)


async def _list_audit(context: FleetRequestContext) -> forms.AuditResponse:
    asked = context.parameters(forms.AuditParameters)
    entries = await asyncio.to_thread(context.service.state.audit, asked.most, asked.before_ns)
    return forms.AuditResponse(entries=entries)


FLEET_ROUTES = (
    FleetRoute(
        path="/healthz",
        summary="Whether the service lives; needs no token",
        answers=lambda _: forms.FleetHealth(healthy=True),
        role=None,
        answer=forms.FleetHealth,
    ),
    FleetRoute(
        path="/readyz",
        summary="Whether the service is ready for requests, as its state answers; needs no token",
        answers=_get_readiness,
        role=None,
        answer=forms.FleetHealth,
        refuses=(503,),
    ),
    FleetRoute(
        path="/metrics",
        summary="The service's own series",
        content="text/plain",
        answers=lambda asked: asyncio.to_thread(
            lambda: Response(asked.service.render_metrics(), media_type=_METRICS_MEDIA_TYPE)
        ),
    ),
    FleetRoute(
        path="/api/v1/check",
        summary="What works and what does not",
        answer=forms.FleetCheckResponse,
        answers=_check_service,
    ),
    FleetRoute(
        path="/api/v1/captures",
        summary="Captures, newest first",
        answers=_list_captures,
        answer=forms.CapturesResponse,
        parameters=forms.CapturesParameters,
        refuses=(400,),
    ),
    FleetRoute(
        path="/api/v1/captures",
        summary="Announce a capture, and hear where its files go",
        answers=_announce,
        answer=forms.AnnounceResponse,
        method="POST",
        body=forms.AnnounceBody,
        role="requester",
        refuses=(400, 403, 413),
    ),
    FleetRoute(
        path="/api/v1/captures/{id}",
        summary="A capture and how far it is",
        answers=_get_capture,
        answer=forms.CaptureResponse,
        refuses=(404,),
    ),
    FleetRoute(
        path="/api/v1/captures/{id}/complete",
        summary="All files of a capture are there: analyse it",
        answers=_complete,
        answer=forms.CaptureResponse,
        method="POST",
        role="requester",
        refuses=(403, 404, 409),
    ),
    FleetRoute(
        path="/api/v1/captures/{id}/files/{name:path}",
        summary="A file of a capture",
        answers=_send_file,
        content="application/octet-stream",
        refuses=(404, 503),
    ),
    FleetRoute(
        path="/api/v1/captures/{id}/files/{name:path}",
        summary="Send a file of a capture",
        answers=_receive_file,
        answer=forms.FileResponse,
        method="PUT",
        role="requester",
        refuses=(400, 403, 404, 409, 413),
    ),
    FleetRoute(
        path="/api/v1/captures/{id}/report",
        summary="The report of a capture, rendered when it is first asked for",
        answers=partial(_send_rendered, "render", "text/html", ""),
        content="text/html",
        refuses=(404, 409, 503),
    ),
    FleetRoute(
        path="/api/v1/captures/{id}/timeline",
        summary="The timeline of a capture for Perfetto",
        answers=partial(_send_rendered, "render_timeline", "application/gzip", ".perfetto.json.gz"),
        content="application/gzip",
        refuses=(404, 409, 503),
    ),
    FleetRoute(
        path="/api/v1/backfill",
        summary="Analyse captures again with this version",
        answers=_start_backfill,
        answer=forms.BackfillResponse,
        method="POST",
        body=forms.BackfillBody,
        role="operator",
        refuses=(400, 403),
    ),
    FleetRoute(
        path="/api/v1/tokens",
        summary="All tokens",
        answer=forms.TokensResponse,
        role="admin",
        refuses=(403,),
        answers=lambda asked: asyncio.to_thread(
            lambda: forms.TokensResponse(tokens=asked.service.state.tokens())
        ),
    ),
    FleetRoute(
        path="/api/v1/tokens",
        summary="Make a token",
        answers=_add_token,
        answer=forms.TokenResponse,
        method="POST",
        body=forms.TokenBody,
        role="admin",
        refuses=(400, 403, 409),
    ),
    FleetRoute(
        path="/api/v1/tokens/{name}",
        summary="Revoke a token",
        answers=_revoke,
        answer=forms.RevokedResponse,
        method="DELETE",
        role="admin",
        refuses=(403, 404),
    ),
    FleetRoute(
        path="/api/v1/audit",
        summary="Who did what",
        answer=forms.AuditResponse,
        role="admin",
        refuses=(400, 403),
        parameters=forms.AuditParameters,
        answers=_list_audit,
    ),
)


async def _compare_captures(context: FleetRequestContext) -> Response:
    names = context.request.path_params
    base, new = [await _find_analysed(context, names[side]) for side in ("base", "id")]
    render = partial(context.service.pipeline.comparison, base, new)
    return await _send_page(context.service, render, "text/html", {})


COMPARE_ROUTES = (
    FleetRoute(
        path="/api/v1/captures/{id}/against/{base}",
        summary="A capture against another one, the base: a page, rendered when it is first asked for",
        answers=_compare_captures,
        content="text/html",
        refuses=(404, 409, 503),
    ),
)


class CompactResponse(HttpResponseBody, frozen=True):
    """The tables are compacted; `seconds`: how long that took."""

    seconds: float


async def _compact(context: FleetRequestContext) -> CompactResponse:
    pipeline = context.service.pipeline
    context.hosts()  # who talks to hosts writes the tables, too
    began = time.monotonic()
    await asyncio.to_thread(pipeline.compact)
    await context.note()
    return CompactResponse(seconds=time.monotonic() - began)


COMPACTION_ROUTES = (
    FleetRoute(
        path="/api/v1/compact",
        summary="Make large files of small ones, and remove what has been kept long enough",
        answers=_compact,
        answer=CompactResponse,
        method="POST",
        role="operator",
        refuses=(403, 503),
    ),
)
