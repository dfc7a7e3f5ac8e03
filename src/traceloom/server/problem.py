"""The HTTP error (`HttpError`: status, slug, message, hint, retry time), its JSON body, and the
responses of exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from traceloom.errors import TraceloomError, nearest
from traceloom.system.text import describe_validation_error

API_VERSION = 1  # part of each path


class HttpError(TraceloomError):
    """A request that fails with the HTTP status `status`; `retry_s`: seconds until a retry may
    succeed, 0 if unknown.
    """

    exit_code = 3

    def __init__(
        self, status: int, message: str, *, slug: str, hint: str = "", retry_s: int = 0
    ) -> None:
        super().__init__(message, slug=slug, hint=hint)
        self.status = status
        self.retry_s = retry_s


def other_api_version(path: str, service_name: str) -> HttpError | None:
    """Returns the error for a request whose path has another version of the API; None if it does
    not.
    """
    version_match = re.match(r"/api/v([0-9]{1,9})/", path)
    if version_match is None or int(version_match[1]) == API_VERSION:
        return None
    message = f"this is a request of version {version_match[1]}, and {service_name} answers those of version {API_VERSION}"
    return HttpError(
        404, message, slug="other-version", hint="use the same version of Traceloom on both sides"
    )


def make_bad_request(message: str) -> HttpError:
    """Returns the error (400, `wrong-request`) of an invalid request."""
    return HttpError(
        400, f"the request is wrong: {describe_validation_error(message)}", slug="wrong-request"
    )


class HttpResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """What a route answers with."""


class Problem(HttpResponseBody, frozen=True):
    """Why a request is refused: a stable name, a sentence, what to do."""

    slug: str
    message: str
    hint: str = ""


class ProblemResponse(HttpResponseBody, frozen=True):
    """The body of every answer that is no success."""

    error: Problem


METRICS_PATH, DOCUMENT_PATH = "/metrics", "/api/v1/openapi.json"


def build_error_response(refusal: HttpError) -> Response:
    headers = {"Retry-After": str(refusal.retry_s)} if refusal.retry_s else {}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    answer = ProblemResponse(
        error=Problem(slug=refusal.slug, message=refusal.message, hint=refusal.hint)
    )
    return Response(
        msgspec.json.encode(answer), refusal.status, headers, media_type="application/json"
    )


def build_exception_handlers(
    paths: Sequence[str], service_name: str
) -> dict[Any, Callable[[Request, Exception], Response]]:
    """Returns the exception handlers of an application: `paths` are suggested for unknown routes,
    `service_name` appears in the message of an internal error.
    """

    def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        if error.status_code == 405:
            return build_error_response(
                HttpError(405, f"{path} does not take {request.method}", slug="wrong-method")
            )
        if other := other_api_version(path, service_name):
            return build_error_response(other)
        return build_error_response(
            HttpError(
                error.status_code,
                f"there is no {path}",
                slug="no-such-route",
                hint=nearest(path, paths) + f"{DOCUMENT_PATH} lists all",
            )
        )

    def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        return build_error_response(error)

    def failed(_request: Request, _error: Exception) -> Response:
        return build_error_response(
            HttpError(
                500, f"a defect of {service_name}", slug="internal-error", hint="its log says more"
            )
        )

    return {HTTPException: no_route, HttpError: refused, Exception: failed}
