"""Who may use the service: tokens are made and revoked here."""

from __future__ import annotations

import time
from typing import get_args

import msgspec
from htpy import Node, button, code, div, form, label, option, p, select

from traceloom.agent.http.answers import wrong_request
from traceloom.collect.answers import RevokedAnswer, TokenAnswer, TokenBody, TokensAnswer
from traceloom.portal.forms import choices, number_of, sure, text_field
from traceloom.portal.layout import command, folded
from traceloom.portal.page import ContentSection, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit
from traceloom.store.state import Role, TokenRecord

COLUMNS = (
    PageColumn("name", "Token"),
    PageColumn("state", "State", "state"),
    PageColumn("role", "Role", hint="each may do what those before it may: viewer, requester, operator, admin"),
    PageColumn("created_ns", "Made", "instant"),
    PageColumn("expires_ns", "Until", "instant", unknown="it does not expire"),
)
_ABOUT: dict[Role, str] = {
    "viewer": "reads",
    "requester": "traces own jobs, uploads",
    "operator": "traces all jobs, lets hosts join",
    "admin": "makes tokens, reads the audit",
}
assert set(_ABOUT) == set(get_args(Role))


def _state(token: TokenRecord) -> str:
    if token.revoked_ns:
        return "revoked"
    return "expired" if token.expires_ns and token.expires_ns <= time.time_ns() else "active"


async def compute(visit: Visit) -> list[TokenRecord]:
    """All tokens."""
    return (await visit.answer(TokensAnswer, "/api/v1/tokens")).tokens


def content(tokens: list[TokenRecord]) -> PageContent:
    """What is shown of them."""
    rows: list[PageRow] = [
        {
            "name": token.name,
            "state": _state(token),
            "role": token.role,
            "created_ns": token.created_ns,
            "expires_ns": token.expires_ns or None,
        }
        for token in tokens
    ]
    lead = "The service keeps only hashes of them. Whoever is signed in by a token is signed out when it is revoked."
    table = PageTable("tokens", "Tokens", COLUMNS, rows)
    return PageContent("Tokens", [ContentSection("tokens", "By name", table)], lead=lead)


def controls(visit: Visit, tokens: list[TokenRecord]) -> Node:
    """Forms by which tokens are made and revoked."""
    roles = [(role, f"{role}: {about}") for role, about in _ABOUT.items()]
    inside = form(method="post")[
        div(".fields")[
            text_field(
                "name", "Name", "As the user is called whose jobs it traces.", value=visit.field("name"),
                required="required", maxlength="80",
            ),
            text_field("days", "Days", "After so many it expires; empty: never.", value=visit.field("days")),
            choices("role", "Role", roles, [visit.field("role") or "requester"]),
        ],
        div(".buttons")[button(".primary", type="submit")["Make it"]],
    ]  # fmt: skip
    names = [token.name for token in tokens if _state(token) == "active"]
    choice = div(".field")[
        label(for_="revoke")["Token"], select(id="revoke", name="revoke")[(option(value=name)[name] for name in names)]
    ]
    return [
        folded("make", "Make a token", inside, is_open=bool(visit.form)),
        sure("Revoke a token", choice, {}) if names else None,
    ]


async def act(visit: Visit) -> str | Node:
    """Make a token, and show it once; or revoke one.

    Raises:
        RequestError: `wrong-request`, `token-exists`, `no-such-token`.
    """
    if name := visit.field("revoke"):
        await visit.answer(RevokedAnswer, "/api/v1/tokens/{name}", method="DELETE", name=name)
        return visit.address.path
    days = number_of(visit.field("days"), "the number of days", float) or 0.0
    try:
        body = TokenBody(name=visit.field("name"), role=msgspec.convert(visit.field("role"), Role), days=days)
    except msgspec.ValidationError as error:
        raise wrong_request(str(error)) from error
    answer = await visit.answer(TokenAnswer, "/api/v1/tokens", method="POST", body=body)
    return div(".notice", role="status")[
        p["The token of ", code[answer.name], " is shown only now:"], command(answer.token)
    ]


PAGE = Page(
    "/tokens",
    "Tokens",
    "Who may use the service: tokens are made and revoked here.",
    compute,
    content,
    controls,
    role="admin",
    act=act,
    menu="Administration",
)
