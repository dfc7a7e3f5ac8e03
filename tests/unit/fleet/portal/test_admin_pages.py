"""Tokens, webhooks and the audit, drawn from answers written by hand; and who is shown which form."""

from __future__ import annotations

import re
import time
from typing import Any, cast, get_args

import pytest

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

from support.html_tree import HtmlTree, words
from support.page_contents import EVIL, NOON, SECOND, SPELLED, ContentPage, Shown, fragment_tree
from traceloom.agent.traces.requests import TraceSpec
from traceloom.fleet.handlers.hosts import FleetJobResponse, FleetRequestResponse, HostResponse
from traceloom.fleet.handlers.now import HostDetailResponse, JobDetailResponse
from traceloom.fleet.portal.page_request import PageRequest, PageUrl
from traceloom.fleet.portal.pages import admin, job, job as request, overview
from traceloom.fleet.portal.pages.job import JobView
from traceloom.fleet.portal.pages.overview import HostView
from traceloom.fleet.service.service import FleetService
from traceloom.fleet.store.captures import ROLES, AuditEntry, Role, TokenRecord
from traceloom.fleet.store.rules import EVENTS, WebhookRecord

NO_SERVICE = cast("FleetService", None)  # forms are drawn of what was asked already


def visitor(role: Role, user: str = "ana", /, **form: str | list[str]) -> PageRequest:
    """A visit of somebody with a role, who may have sent a form."""
    token = TokenRecord(name=user, role=role, created_ns=0, expires_ns=0, revoked_ns=0)
    sent = {field: value if isinstance(value, list) else [value] for field, value in form.items()}
    return PageRequest(
        NO_SERVICE, token, PageUrl("/p", ""), {"job": "a", "id": "r", "host": "h"}, sent
    )


def fields(page: HtmlTree) -> dict[str, str]:
    """What stands in the fields of a form; of those that are chosen, what is chosen."""
    out: dict[str, str] = {}
    for of in page.all("input"):
        if of.get("type") in {"radio", "checkbox"} and "checked" not in of.attrib:
            continue
        name = of.get("name") or ""
        out[name] = ",".join(filter(None, (out.get(name, ""), of.get("value") or "")))
    return out


def test_tokens_are_active_until_they_are_revoked_or_expire() -> None:
    now = time.time_ns()
    day = 24 * 3600 * SECOND
    rows = [
        TokenRecord(name="a", role="admin", created_ns=NOON, expires_ns=0, revoked_ns=0),
        TokenRecord(name=EVIL, role="viewer", created_ns=NOON, expires_ns=now + day, revoked_ns=0),
        TokenRecord(
            name="late", role="viewer", created_ns=NOON, expires_ns=now - day, revoked_ns=0
        ),
        TokenRecord(
            name="gone", role="viewer", created_ns=NOON, expires_ns=now - day, revoked_ns=NOON
        ),
    ]
    page = ContentPage(admin.TOKENS_PAGE.content(rows))
    assert page.column("tokens", "Token") == ["a", SPELLED, "late", "gone"]
    assert page.column("tokens", "State") == ["active", "active", "expired", "revoked"]
    assert page.column("tokens", "Until")[0] == "–"
    form = fragment_tree(admin.TOKENS_PAGE.controls(visitor("admin"), rows))
    revocable = [of.get("value") for of in form.all("option")]
    assert revocable == ["a", EVIL.replace("\u202e", "\\u202e")], (
        "what opens nothing any more need not be revoked"
    )
    assert fields(form)["role"] == "requester", "not more than is asked for"
    assert [of.get("value") for of in form.all("input") if of.get("name") == "role"] == list(
        get_args(Role)
    )


def test_a_form_that_was_refused_shows_what_was_written() -> None:
    sent = {"name": EVIL, "days": "-3", "role": "operator"}
    form = fragment_tree(admin.TOKENS_PAGE.controls(visitor("admin", **sent), []))
    assert fields(form) == {"name": SPELLED, "days": "-3", "role": "operator"}
    [unfolded] = [of for of in form.all("details") if of.get("id") == "make"]
    assert "open" in unfolded.attrib
    assert all(words(of) != "Revoke a token …" for of in form.all("summary")), (
        "there is none to revoke"
    )
    hook = fragment_tree(
        admin.WEBHOOKS_PAGE.controls(
            visitor("admin", do="add", name="x", url=EVIL, events=["request.done"]), []
        )
    )
    assert fields(hook) == {"name": "x", "url": SPELLED, "events": "request.done"}
    text = "a = 1\r\nb = '</textarea><script>'\t\r\n"
    written = fragment_tree(
        admin.build_document_form(
            visitor("operator", text=text), "Change", "prices.toml", "old", "about"
        )
    )
    assert written.all("script") == []
    assert "".join(written.all("textarea")[0].itertext()) == text.replace("\r\n", "\n"), (
        "with its lines and tabs"
    )


def webhook(name: str, **changes: Any) -> WebhookRecord:
    return WebhookRecord(
        name=name,
        url="https://x.example",
        events=("request.done", "regression.new"),
        created_ns=NOON,
        **changes,
    )


def test_webhooks_say_what_waits_arrived_and_was_lost() -> None:
    rows = [
        webhook("chat", waiting=3, delivered=1200, failed=1, dropped=4, error=EVIL),
        webhook("pager", delivered=5),
    ]
    page = ContentPage(admin.WEBHOOKS_PAGE.content(rows))
    assert page.heading == "2 webhooks"
    assert page.column("webhooks", "Lost") == ["5", "0"], "what was given up and what was dropped"
    assert page.column("webhooks", "Last error") == [SPELLED, "–"]
    assert page.column("webhooks", "Is told of") == ["request.done, regression.new"] * 2
    assert page.numbers() == {
        "Waiting": Shown("3", "events", "", ""),
        "Arrived": Shown("1\u202f205", "events", "", ""),
        "Lost": Shown("5", "events", "bad", ""),
    }
    none = ContentPage(admin.WEBHOOKS_PAGE.content([]))
    assert (none.heading, none.numbers(), none.tables()) == ("No webhooks", {}, {})
    form = fragment_tree(admin.WEBHOOKS_PAGE.controls(visitor("admin"), rows))
    assert fields(form)["events"].split(",") == list(EVENTS), "all are chosen where nobody chose"
    by_name = {
        of.get("name"): [each.get("value") for each in of.iter("option")]
        for of in form.all("select")
    }
    assert by_name == {"try": ["chat", "pager"], "remove": ["chat", "pager"]}


def test_the_audit_says_who_did_what() -> None:
    rows = [
        AuditEntry(
            at_ns=NOON,
            who=EVIL,
            what="POST /api/v1/tokens",
            result="done",
            details={"name": "x", "role": "admin"},
        ),
        AuditEntry(
            at_ns=NOON - SECOND, who="", what="POST /sign-in", result="unknown-token", details={}
        ),
    ]
    page = ContentPage(admin.AUDIT_PAGE.content(rows))
    assert page.tables()["audit"].texts == [
        ["2026-09-21 14:13:20 UTC", SPELLED, "POST /api/v1/tokens", "done", "name x, role admin"],
        ["2026-09-21 14:13:19 UTC", "–", "POST /sign-in", "unknown-token", "–"],
    ]


def running(state: str = "running", who: str = "ana") -> FleetRequestResponse:
    return FleetRequestResponse(
        id="r",
        who=who,
        asked_ns=NOON,
        spec=TraceSpec(job="a", steps=3),
        state=state,
        since_ns=NOON,  # type: ignore[arg-type]
        start_ns=0,
        start_step=0,
        start_detail="",
        reason="",
        detail="",
        capture="",
        trigger=None,
        hosts=[],
    )


def job_of(traceable: int = 2) -> JobView:
    answer = FleetJobResponse(
        job="a",
        name="a",
        scheduler="",
        user="ana",
        framework="",
        hosts=["h"],
        processes=2,
        traceable=traceable,
        ranks=2,
        world_size=2,
        devices=2,
        steps_per_second=1.0,
        hung=False,
    )
    return JobView("a", JobDetailResponse(job=answer, processes=[]), [], [], [], [])


@pytest.mark.parametrize("role", ROLES)
def test_forms_are_shown_to_those_who_may_send_them(role: Role) -> None:
    rank = ROLES.index(role)

    def forms(controls: object) -> int:
        return 0 if controls is None else len(fragment_tree(cast("Any", controls)).all("form"))

    somebodys, own = running(who="bo"), running()
    assert forms(request.REQUEST_PAGE.controls(visitor(role), somebodys)) == (
        rank >= ROLES.index("operator")
    )
    assert forms(request.REQUEST_PAGE.controls(visitor(role), own)) == (
        rank >= ROLES.index("requester")
    )
    assert forms(request.REQUEST_PAGE.controls(visitor(role), running("done"))) == 0, "it has ended"
    assert forms(overview.HOSTS_PAGE.controls(visitor(role), [])) == (
        rank >= ROLES.index("operator")
    )
    view = HostView(HostDetailResponse(host=HostResponse(host="h"), devices=[], processes=[]), [])
    assert forms(overview.HOST_PAGE.controls(visitor(role), view)) == (
        rank >= ROLES.index("operator")
    )
    assert forms(job.JOB_PAGE.controls(visitor(role), job_of())) == (
        rank >= ROLES.index("requester")
    )
    assert forms(job.JOB_PAGE.controls(visitor(role), job_of(traceable=0))) == 0, (
        "nothing of it can be traced"
    )
    assert (
        job.JOB_PAGE.controls(
            visitor(role), JobView("a", JobDetailResponse(job=None, processes=[]), [], [], [], [])
        )
        is None
    )
    rules = admin.FleetTriggersResponse(
        toml="",
        rules=[],
        traces_per_day=1,
        traces_left=1,
        bytes_per_day=1,
        bytes_left=1,
        share=0.1,
        last_error="",
    )
    assert forms(admin.TRIGGERS_PAGE.controls(visitor(role), rules)) == (
        rank >= ROLES.index("operator")
    )


def test_the_form_of_a_trace_keeps_what_was_chosen() -> None:
    first = fields(fragment_tree(job.JOB_PAGE.controls(visitor("requester"), job_of())))
    assert first == {
        "by": "steps",
        "length": "3",
        "choose": "",
        "ranks": "",
        "profilers": "timeline",
    }
    again = fields(
        fragment_tree(
            job.JOB_PAGE.controls(
                visitor(
                    "requester",
                    by="seconds",
                    length="0.5",
                    choose="slowest-and-median",
                    ranks="0,x",
                    profilers=["stacks", "dump"],
                    details=["shapes", "flops"],
                ),
                job_of(),
            )
        )
    )
    assert again == {
        "by": "seconds",
        "length": "0.5",
        "choose": "slowest-and-median",
        "ranks": "0,x",
        "profilers": "stacks,dump",
        "details": "shapes,flops",
    }


def test_what_cannot_be_taken_back_is_asked_once_more() -> None:
    for controls in (
        request.REQUEST_PAGE.controls(visitor("admin"), running()),
        admin.TOKENS_PAGE.controls(
            visitor("admin"),
            [TokenRecord(name="a", role="admin", created_ns=0, expires_ns=0, revoked_ns=0)],
        ),
        admin.WEBHOOKS_PAGE.controls(visitor("admin"), [webhook("chat")]),
    ):
        tree = fragment_tree(controls)
        dangerous = [of for of in tree.all("button") if of.get("class") == "danger"]
        assert len(dangerous) == 1
        [around] = [
            of
            for of in tree.all("details")
            if of.get("class") == "sure" and dangerous[0] in list(of.iter("button"))
        ]
        assert "open" not in around.attrib
        assert re.fullmatch(r".+ …", words(around.findall("summary")[0]))
