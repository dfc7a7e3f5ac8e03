"""Who reads the pages: by a token that was shown once and a cookie since, or as a proxy in front says."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from traceloom.agent.http.answers import RequestError
from traceloom.agent.http.limits import Rates
from traceloom.collect.answers import TokenName
from traceloom.store.state import Role, State, TokenRecord

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

SESSION_S = 12 * 3600.0
_TRIES_PER_S = 0.5  # of an address, after the first
_HINT = "come again later"
_HEADER = re.compile(r"[A-Za-z0-9-]{1,100}")


class ProxyUsers(msgspec.Struct, frozen=True, kw_only=True):
    """A proxy that has checked who asks, and says so in a header. `source`: its address, or a network.

    `role`: of users of whom no token says another.
    """

    header: str
    source: str
    role: Role = "requester"

    def __post_init__(self) -> None:
        if not _HEADER.fullmatch(self.header):
            raise ValueError(f"`{self.header[:80]}` is no name of a header")
        ipaddress.ip_network(self.source, strict=False)

    def name_of(self, request: Request) -> str | None:
        """The user whom the proxy names; None where the request is not the proxy's, or has not just one name."""
        try:
            address = ipaddress.ip_address(request.client.host if request.client else "")
        except ValueError:
            return None
        names = request.headers.getlist(self.header)
        if address not in ipaddress.ip_network(self.source, strict=False) or len(names) != 1:
            return None
        try:
            return msgspec.convert(names[0], TokenName)
        except msgspec.ValidationError:
            return None


class Readers:
    """Lets readers in.

    Args:
        state: Where tokens and sessions are.
        proxy: Says who reads, where it is asked through one.
    """

    def __init__(self, state: State, proxy: ProxyUsers | None) -> None:
        self.state, self.proxy = state, proxy
        self.tries = Rates(_TRIES_PER_S, hint=_HINT)
        self.tries.most = 20.0

    async def reader(self, request: Request) -> TokenRecord | None:
        """Who asks; None where nobody is signed in, or not any more."""
        user = self.proxy.name_of(request) if self.proxy else None
        if user is not None:
            return await asyncio.to_thread(self._of_user, user)
        secret = _cookie(request)
        return await asyncio.to_thread(self._of_session, secret) if secret else None

    async def sign_in(self, request: Request, shown: str) -> str:
        """Begin a session by a token; its secret.

        Raises:
            RequestError: `too-many-requests`; `unknown-token`, whatever is wrong with it.
        """
        self.tries.take(request.client.host if request.client else "")
        token = await asyncio.to_thread(self.state.token, shown)
        who = "" if token is None else token.name
        await asyncio.to_thread(self.state.note, who, "POST /sign-in", "unknown-token" if token is None else "done")
        if token is None:
            raise RequestError(401, "this token does not open anything", slug="unknown-token")
        return await asyncio.to_thread(self.state.open_session, shown, SESSION_S)

    async def sign_out(self, request: Request) -> None:
        """End the session."""
        await asyncio.to_thread(self.state.close_session, _cookie(request))

    def set_cookie(self, request: Request, response: Response, secret: str) -> None:
        """Have the browser keep the secret of a session, or forget it where it is ""."""
        response.set_cookie(
            _cookie_name(request), secret, max_age=int(SESSION_S) if secret else 0, httponly=True, samesite="strict",
            secure=request.url.scheme == "https",
        )  # fmt: skip

    def _of_session(self, secret: str) -> TokenRecord | None:
        sha256 = self.state.session(secret)
        return None if sha256 is None else self.state.token_of(sha256)

    def _of_user(self, user: str) -> TokenRecord:
        assert self.proxy is not None
        own = next((token for token in self.state.tokens() if token.name == user and token.opens), None)
        return TokenRecord(
            name=user, role=own.role if own else self.proxy.role, created_ns=0, expires_ns=0, revoked_ns=0
        )


def check_origin(request: Request) -> None:
    """Refuse what a page of somebody else has the reader's browser send.

    Raises:
        RequestError: `wrong-origin`.
    """
    origin = request.headers.get("origin", "")
    site = request.headers.get("sec-fetch-site", "same-origin")
    if not origin or urlsplit(origin).netloc != request.headers.get("host", "") or site != "same-origin":
        raise RequestError(
            403, "this was sent from another page", slug="wrong-origin",
            hint="a proxy in front of the service has to leave `Host` as it is",
        )  # fmt: skip


def _cookie_name(request: Request) -> str:
    # With this prefix browsers take it from nobody but this host, over TLS.
    return "__Host-traceloom" if request.url.scheme == "https" else "traceloom"


def _cookie(request: Request) -> str:
    try:
        cookies = SimpleCookie(request.headers.get("cookie", ""))
    except CookieError:
        return ""
    morsel = cookies.get(_cookie_name(request))
    return morsel.value if morsel else ""
