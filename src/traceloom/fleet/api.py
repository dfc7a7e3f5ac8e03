"""Request and response structs of the HTTP API, from which the OpenAPI document is generated."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from traceloom.fleet.store.captures import AuditEntry, Role, TaskState, TokenRecord
from traceloom.server.problem import HttpResponseBody
from traceloom.system.text import ONE_LINE, SHA256, USER_NAME

Job = Annotated[str, Meta(max_length=200, pattern=ONE_LINE)]
TokenName = Annotated[str, Meta(pattern=USER_NAME)]


class AnnouncedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that comes: its name within the capture, its bytes, their SHA-256 in hexadecimal."""

    name: Annotated[str, Meta(min_length=1, max_length=400)]
    size: Annotated[int, Meta(ge=0, le=1 << 50)]
    sha256: Annotated[str, Meta(pattern=SHA256)]


class AnnounceBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """A capture that is to be uploaded, and of which job it is, where that is known."""

    files: Annotated[list[AnnouncedFile], Meta(min_length=1, max_length=100_000)]
    job: Job = ""


class UploadTarget(HttpResponseBody, frozen=True):
    """Where to PUT a file: a whole address that is signed, or a path of this service, which wants
    the token.

    Azure's store wants the header `x-ms-blob-type: BlockBlob` beside it.
    """

    name: str
    url: str


class AnnounceResponse(HttpResponseBody, frozen=True):
    """The name of the capture, and the files that are not there yet.

    `complete`: nothing is left to do.
    """

    id: str
    complete: bool
    uploads: list[UploadTarget]


class FileResponse(HttpResponseBody, frozen=True):
    """A file that arrived whole."""

    name: str
    size: int


class TaskResponse(HttpResponseBody, frozen=True):
    """An analysis of a capture; `error`: why the last try failed."""

    version: str
    state: TaskState
    attempts: int
    error: str


class CaptureResponse(HttpResponseBody, frozen=True):
    """A capture.

    `state`: of its last task; "" where its files are not all there. `files`: name -> bytes;
    `digests`: name -> SHA-256 in hexadecimal.
    """

    id: str
    day: str
    job: str
    uploader: str
    received_ns: int
    bytes: int
    state: TaskState | Literal[""]
    tasks: list[TaskResponse]
    files: dict[str, int]
    digests: dict[str, str]


class CapturesParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Which captures: of a job, received before an instant, at most so many."""

    job: Job = ""
    before_ns: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    most: Annotated[int, Meta(ge=1, le=1000)] = 100


class CapturesResponse(HttpResponseBody, frozen=True):
    """Captures, newest first."""

    captures: list[CaptureResponse]


class FleetHealth(HttpResponseBody, frozen=True):
    """Whether the service lives: its state answers."""

    healthy: bool


class FleetCheck(HttpResponseBody, frozen=True):
    """A part of the service: whether it works, what there is to say of it, what would help."""

    name: str
    works: bool
    text: str
    help: str = ""


class FleetCheckResponse(HttpResponseBody, frozen=True):
    """All parts of the service, and how many tasks are in each state."""

    checks: list[FleetCheck]
    tasks: dict[TaskState, int]


class BackfillBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Analyse with this version what it did not analyse yet; with `again`, also what it
    quarantined.
    """

    again: bool = False


class BackfillResponse(HttpResponseBody, frozen=True):
    """How many captures wait now for an analysis by `version`."""

    version: str
    captures: int


class TokenBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """A token that is to be made. `days`: after how many it expires, 0: never."""

    name: TokenName
    role: Role
    days: Annotated[float, Meta(ge=0, le=36_500)] = 0


class TokenResponse(HttpResponseBody, frozen=True):
    """A new token; nobody can be told `token` again."""

    name: str
    role: Role
    token: str


class TokensResponse(HttpResponseBody, frozen=True):
    """All tokens, without what opens anything."""

    tokens: list[TokenRecord]


class RevokedResponse(HttpResponseBody, frozen=True):
    """A token that opens nothing any more."""

    name: str


class AuditParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Which entries: before an instant, at most so many."""

    before_ns: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 2**63 - 1
    most: Annotated[int, Meta(ge=1, le=1000)] = 1000


class AuditResponse(HttpResponseBody, frozen=True):
    """The last lines of the audit, newest first."""

    entries: list[AuditEntry]
