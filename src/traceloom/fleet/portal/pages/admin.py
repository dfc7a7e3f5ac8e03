"""Administration pages: audit log, tokens, webhooks, triggers, owner rules and prices."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from htpy import (
    Node,
    a,
    button,
    code,
    details,
    div,
    form,
    fragment,
    label,
    option,
    p,
    select,
    summary,
    textarea,
)
from markupsafe import Markup, escape

from traceloom.errors import InputError
from traceloom.fleet.analyses.attribution import UNATTRIBUTED
from traceloom.fleet.api import (
    AuditResponse,
    RevokedResponse,
    TokenBody,
    TokenResponse,
    TokensResponse,
)
from traceloom.fleet.handlers.admin import (
    DocumentHistoryResponse,
    DocumentResponse,
    FleetTriggerResponse,
    FleetTriggersBody,
    FleetTriggersResponse,
    NewWebhookResponse,
    OwnersChangeResponse,
    PricesChangeResponse,
    RemovedWebhookResponse,
    WebhookBody,
    WebhooksResponse,
    WebhookTestResponse,
)
from traceloom.fleet.portal.asking import build_page_url, fetch_answer
from traceloom.fleet.portal.page import (
    ContentSection,
    KeyFigure,
    Page,
    PageContent,
    build_choices,
    build_command,
    build_confirm_button,
    build_fold_out,
    build_job_url,
    build_request_url,
    build_text_field,
    parse_positive_number,
)
from traceloom.fleet.portal.page_request import PageRequest, PageUrl
from traceloom.fleet.portal.tables import PageColumn, PageRow, PageTable, render_time
from traceloom.fleet.rules import OwnerRule, Prices, parse_prices, parse_rules
from traceloom.fleet.store.captures import AuditEntry, Role, TokenRecord
from traceloom.fleet.store.rules import EVENTS, MAX_WAITING, EventName, WebhookRecord
from traceloom.server.problem import HttpError, make_bad_request
from traceloom.system import units

AUDIT_COLUMNS = (
    PageColumn("at_ns", "When", "instant"),
    PageColumn("who", "Who", unknown="nobody who is known"),
    PageColumn("what", "What", "name"),
    PageColumn("result", "Result", "state", "done, or the name of the refusal"),
    PageColumn("details", "Details", unknown="there are none"),
)


async def compute_audit(visit: PageRequest) -> list[AuditEntry]:
    """Returns the latest entries of the audit log, newest first."""
    return (await visit.answer(AuditResponse, "/api/v1/audit")).entries


def build_audit_content(entries: list[AuditEntry]) -> PageContent:
    rows: list[PageRow] = [
        {
            "at_ns": entry.at_ns,
            "who": entry.who,
            "what": entry.what,
            "result": entry.result,
            "details": ", ".join(f"{name} {value}" for name, value in entry.details.items()),
        }
        for entry in entries
    ]
    table = PageTable("audit", "The audit", AUDIT_COLUMNS, rows)
    lead = (
        "The last thousand lines; /api/v1/audit?before_ns= gives earlier ones. The database lets everybody only add to "
        "them. A refusal that is repeated has a line a minute, with its number."
    )
    return PageContent("Audit", [ContentSection("audit", "Newest first", table)], lead=lead)


AUDIT_PAGE = Page(
    "/audit",
    "Audit",
    "Who did what, and who was refused, newest first.",
    compute_audit,
    build_audit_content,
    role="admin",
    menu="Administration",
)

TOKENS_COLUMNS = (
    PageColumn("name", "Token"),
    PageColumn("state", "State", "state"),
    PageColumn(
        "role",
        "Role",
        hint="each may do what those before it may: viewer, requester, operator, admin",
    ),
    PageColumn("created_ns", "Made", "instant"),
    PageColumn("expires_ns", "Until", "instant", unknown="it does not expire"),
)
_ROLE_TEXTS: dict[Role, str] = {
    "viewer": "reads",
    "requester": "traces own jobs, uploads",
    "operator": "traces all jobs, lets hosts join",
    "admin": "makes tokens, reads the audit",
}
assert set(_ROLE_TEXTS) == set(get_args(Role))


def _get_token_state(token: TokenRecord) -> str:
    if token.revoked_ns:
        return "revoked"
    return "expired" if token.expires_ns and token.expires_ns <= time.time_ns() else "active"


async def compute_tokens(visit: PageRequest) -> list[TokenRecord]:
    return (await visit.answer(TokensResponse, "/api/v1/tokens")).tokens


def build_tokens_content(tokens: list[TokenRecord]) -> PageContent:
    rows: list[PageRow] = [
        {
            "name": token.name,
            "state": _get_token_state(token),
            "role": token.role,
            "created_ns": token.created_ns,
            "expires_ns": token.expires_ns or None,
        }
        for token in tokens
    ]
    lead = "The service keeps only hashes of them. Whoever is signed in by a token is signed out when it is revoked."
    table = PageTable("tokens", "Tokens", TOKENS_COLUMNS, rows)
    return PageContent("Tokens", [ContentSection("tokens", "By name", table)], lead=lead)


def build_tokens_controls(visit: PageRequest, tokens: list[TokenRecord]) -> Node:
    roles = [(role, f"{role}: {description}") for role, description in _ROLE_TEXTS.items()]
    content = form(method="post")[
        div(".fields")[
            build_text_field(
                "name",
                "Name",
                "As the user is called whose jobs it traces.",
                value=visit.field("name"),
                required="required",
                maxlength="80",
            ),
            build_text_field(
                "days", "Days", "After so many it expires; empty: never.", value=visit.field("days")
            ),
            build_choices("role", "Role", roles, [visit.field("role") or "requester"]),
        ],
        div(".buttons")[button(".primary", type="submit")["Make it"]],
    ]
    names = [token.name for token in tokens if _get_token_state(token) == "active"]
    choice = div(".field")[
        label(for_="revoke")["Token"],
        select(id="revoke", name="revoke")[(option(value=name)[name] for name in names)],
    ]
    return [
        build_fold_out("make", "Make a token", content, is_open=bool(visit.form)),
        build_confirm_button("Revoke a token", choice, {}) if names else None,
    ]


async def handle_tokens_action(visit: PageRequest) -> str | Node:
    """Creates a token and shows it once, or revokes one.

    Raises:
        HttpError: `wrong-request`, `token-exists`, `no-such-token`.
    """
    if name := visit.field("revoke"):
        await visit.answer(RevokedResponse, "/api/v1/tokens/{name}", method="DELETE", name=name)
        return visit.address.path
    days = parse_positive_number(visit.field("days"), "the number of days", float) or 0.0
    try:
        body = TokenBody(
            name=visit.field("name"), role=msgspec.convert(visit.field("role"), Role), days=days
        )
    except msgspec.ValidationError as error:
        raise make_bad_request(str(error)) from error
    answer = await visit.answer(TokenResponse, "/api/v1/tokens", method="POST", body=body)
    return div(".notice", role="status")[
        p["The token of ", code[answer.name], " is shown only now:"], build_command(answer.token)
    ]


TOKENS_PAGE = Page(
    "/tokens",
    "Tokens",
    "Who may use the service: tokens are made and revoked here.",
    compute_tokens,
    build_tokens_content,
    build_tokens_controls,
    role="admin",
    act=handle_tokens_action,
    menu="Administration",
)

WEBHOOKS_ROUTE = "/api/v1/webhooks"
WEBHOOK_COLUMNS = (
    PageColumn("name", "Webhook"),
    PageColumn("url", "Leads to"),
    PageColumn("events", "Is told of"),
    PageColumn(
        "waiting", "Waiting", "count", f"events that have not arrived yet; {MAX_WAITING} at most"
    ),
    PageColumn("delivered", "Arrived", "count"),
    PageColumn("lost", "Lost", "count", "given up after a day, or dropped as too many waited"),
    PageColumn("error", "Last error", unknown="the last event arrived, or there was none"),
    PageColumn("created_ns", "Made", "instant"),
)


async def compute_webhooks(visit: PageRequest) -> list[WebhookRecord]:
    return (await visit.answer(WebhooksResponse, WEBHOOKS_ROUTE)).webhooks


def build_webhooks_content(webhooks: list[WebhookRecord]) -> PageContent:
    rows: list[PageRow] = [
        {
            "name": webhook.name,
            "url": webhook.url,
            "events": ", ".join(webhook.events),
            "waiting": webhook.waiting,
            "delivered": webhook.delivered,
            "lost": webhook.failed + webhook.dropped,
            "error": webhook.error,
            "created_ns": webhook.created_ns,
        }
        for webhook in webhooks
    ]
    empty = fragment[
        p[
            "Nobody is told of anything. A webhook has the service post an event to an address when a trace has ended or "
            "a kernel became slower. Add one above, or by a command:"
        ],
        build_command("traceloom fleet webhooks add chat https://chat.example/hook"),
    ]
    lead = "Each event is signed with the webhook's secret, and is tried again for a day."
    sections = [
        ContentSection(
            "webhooks", "By name", PageTable("webhooks", "Webhooks", WEBHOOK_COLUMNS, rows, empty)
        )
    ]
    if not webhooks:
        return PageContent("No webhooks", sections, lead=lead)
    lost = sum(webhook.failed + webhook.dropped for webhook in webhooks)
    numbers = [
        KeyFigure(
            "Waiting", units.format_count(sum(webhook.waiting for webhook in webhooks)), "events"
        ),
        KeyFigure(
            "Arrived", units.format_count(sum(webhook.delivered for webhook in webhooks)), "events"
        ),
        KeyFigure("Lost", units.format_count(lost), "events", "bad" if lost else ""),
    ]
    return PageContent(
        units.format_quantity(len(webhooks), "webhook"), sections, numbers=numbers, lead=lead
    )


def build_webhooks_controls(visit: PageRequest, webhooks: list[WebhookRecord]) -> Node:
    """Builds the forms to add, test and remove webhooks."""
    content = form(method="post")[
        div(".fields")[
            build_text_field(
                "name",
                "Name",
                "Letters, digits, dots, dashes.",
                value=visit.field("name"),
                required="required",
                maxlength="63",
            ),
            build_text_field(
                "url",
                "Address",
                "It has to be https and public, unless the service allows its network.",
                value=visit.field("url"),
                required="required",
                maxlength="2000",
                placeholder="https://",
            ),
            build_choices(
                "events",
                "Events",
                [(event, event) for event in EVENTS],
                visit.form.get("events", EVENTS),
                several=True,
                hint="None: all of them.",
            ),
        ],
        div(".buttons")[button(".primary", type="submit", name="do", value="add")["Add it"]],
    ]
    names = [webhook.name for webhook in webhooks]
    adding = visit.field("do") == "add"
    if not names:
        return build_fold_out("add", "Add a webhook", content, is_open=adding)
    return [
        build_fold_out("add", "Add a webhook", content, is_open=adding),
        details(".sure")[
            summary["Send an event for a test …"],
            form(method="post")[
                _build_webhook_select("try", names),
                button(type="submit", name="do", value="try")["Send it"],
            ],
        ],
        build_confirm_button(
            "Remove a webhook", _build_webhook_select("remove", names), {"do": "remove"}
        ),
    ]


def _build_webhook_select(name: str, names: Sequence[str]) -> Node:
    return div(".field")[
        label(for_=name)["Webhook"],
        select(id=name, name=name)[
            (option(value=webhook_name)[webhook_name] for webhook_name in names)
        ],
    ]


async def handle_webhooks_action(visit: PageRequest) -> str | Node:
    """Adds a webhook and shows its secret once, sends a test event, or removes a webhook.

    Raises:
        HttpError: `wrong-request`, `webhook-exists`, `no-such-webhook`, and why a URL is
            refused.
    """
    if visit.field("do") == "remove":
        name = visit.field("remove")
        await visit.answer(
            RemovedWebhookResponse, f"{WEBHOOKS_ROUTE}/{{name}}", method="DELETE", name=name
        )
        return visit.address.path
    if visit.field("do") == "try":
        test_result = await visit.answer(
            WebhookTestResponse,
            f"{WEBHOOKS_ROUTE}/{{name}}/test",
            method="POST",
            name=visit.field("try"),
        )
        if test_result.arrived:
            return div(".notice", role="status")[p[code[test_result.name], " took the event."]]
        return div(".notice.bad", role="alert")[
            p["The event did not arrive at ", code[test_result.name], f": {test_result.error}"]
        ]
    try:
        events = msgspec.convert(visit.form.get("events", EVENTS), tuple[EventName, ...])
    except msgspec.ValidationError as error:
        raise make_bad_request(str(error)) from error
    body = WebhookBody(name=visit.field("name"), url=visit.field("url"), events=events)
    answer = await visit.answer(NewWebhookResponse, WEBHOOKS_ROUTE, method="POST", body=body)
    return div(".notice", role="status")[
        p[
            "The secret of ",
            code[answer.name],
            ", by which it knows that events are of this service, is shown only now:",
        ],
        build_command(answer.secret),
    ]


WEBHOOKS_PAGE = Page(
    "/webhooks",
    "Webhooks",
    "Where the fleet's events go: what waits, what has arrived, what was lost and why.",
    compute_webhooks,
    build_webhooks_content,
    build_webhooks_controls,
    role="admin",
    act=handle_webhooks_action,
    menu="Administration",
)


def build_document_form(
    visit: PageRequest, button_text: str, file: str, text: str, hint: Node
) -> Node:
    """Builds the form to preview or save a change of a document.

    Args:
        visit: Request for the page; its form values are kept.
        button_text: Label of the button that unfolds it.
        file: Name of the document.
        text: Its current text.
        hint: Its format.
    """
    text = get_submitted_text(visit) or text
    # Newlines would be spelled out like other control characters.
    lines = Markup(str(escape(text)).replace("\n", "&#10;").replace("\t", "&#9;"))  # noqa: S704  (escaped)
    content = form(method="post", action=visit.address.path)[
        div(".field")[
            label(for_="text")[file],
            textarea(
                "#text",
                name="text",
                rows=max(10, min(30, text.count("\n") + 3)),
                spellcheck="false",
                autocomplete="off",
                aria_describedby="text-about",
            )[lines],
            p("#text-about.quiet")[hint],
        ],
        div(".buttons")[
            button(type="submit", name="do", value="try")["Show what would change"],
            button(".primary", type="submit", name="do", value="save")["Save"],
        ],
    ]
    return build_fold_out("change", button_text, content, is_open=bool(visit.form))


def get_submitted_text(visit: PageRequest) -> str:
    """Returns the text of the form; browsers send CRLF newlines."""
    return visit.form.get("text", [""])[0].replace("\r\n", "\n")


def describe_older_version(
    path: str, document: DocumentResponse, history: DocumentHistoryResponse
) -> Node | None:
    """Returns a notice that a version is outdated; None if it is the latest, or there is none."""
    if document.version in {0, history.versions[0].version if history.versions else 0}:
        return None
    when, to_last = render_time(document.at_ns or 0), a(href=path)["To the last"]
    return ["This is version ", str(document.version), ", of ", when, ". ", to_last, "."]


def build_versions_section(path: str, history: DocumentHistoryResponse) -> ContentSection:
    """Builds the list of all versions of a document, with a link to each."""
    columns = (
        PageColumn(
            "version", "Version", "count", link=lambda row: f"{path}?version={row['version']}"
        ),
        PageColumn("at_ns", "Since", "instant", "since when it counts"),
        PageColumn("who", "By"),
    )
    rows: list[PageRow] = [
        {"version": version.version, "at_ns": version.at_ns, "who": version.who}
        for version in history.versions
    ]
    table = PageTable("versions", "Versions", columns, rows, "Nobody has written one yet.")
    return ContentSection("versions", "History", table, "every version is kept")


TRIGGERS_ROUTE = "/api/v1/triggers"
TRIGGERS_EXAMPLE = """[[triggers]]
name = "daily-share"
on = "cadence"
share = 0.2               # of the jobs, each day, once each

[[triggers]]
name = "idle-devices"
on = "usage"
busy_below = 0.3          # computes in less of its device time
minutes = 15              # in the last ones
target = "slowest-and-median"

[budget]                  # of all rules together, in any 24 hours
traces_per_day = 50
mb_per_day = 20000.0
share = 0.01              # of the steps of a job
"""
_KIND_TEXTS = {
    "cadence": "each day, a share of the jobs",
    "usage": "devices are hardly used",
    "finding": "a finding in a capture",
    "regression": "a kernel became slower",
}
_TARGET_TEXTS = {"job": "all ranks", "slowest-and-median": "slowest rank and one in the middle"}
_RULE_COLUMNS = (
    PageColumn("name", "Rule"),
    PageColumn("on", "Fires on"),
    PageColumn(
        "jobs",
        "Jobs",
        "count",
        "that run now and that the rule is about",
        link=lambda _row: "/jobs",
    ),
    PageColumn("target", "Traces"),
    PageColumn(
        "fired",
        "Fired",
        "count",
        "traces that it asked for",
        link=lambda row: f"/requests?requests.q=trigger+{row['name']}",
    ),
    PageColumn(
        "refusals",
        "Refused",
        hint="how often it wanted a trace and there was none, by reason",
        unknown="it was never refused",
    ),
    PageColumn("kept_bytes", "Kept", "bytes", "files of its traces"),
    PageColumn("cooldown", "Cooldown", "time", "until it may trace the same job again"),
)
_LAST_COLUMNS = (
    PageColumn("at_ns", "When", "instant"),
    PageColumn("name", "Rule"),
    PageColumn("result", "Result", "state"),
    PageColumn(
        "job",
        "Job",
        "name",
        unknown="it is about no job",
        link=lambda row: build_job_url(str(row["job"])),
    ),
    PageColumn("what", "What it saw"),
    PageColumn(
        "request",
        "Request",
        "name",
        unknown="there is none",
        link=lambda row: build_request_url(str(row["request"])),
    ),
    PageColumn("detail", "Why not", unknown="it fired"),
)


async def compute_triggers(visit: PageRequest) -> FleetTriggersResponse:
    return await visit.answer(FleetTriggersResponse, TRIGGERS_ROUTE)


def build_triggers_content(answer: FleetTriggersResponse) -> PageContent:
    lead = [
        "For what a host sees by itself (errors, slower steps, hangs) its agent has rules, in ",
        code["agent.toml"],
        ".",
    ]
    if not answer.rules:
        empty = fragment[
            p[
                "Nothing is traced unless somebody asks. Rules ask for traces of jobs whose devices idle, in which "
                "something was found, whose kernels became slower; or of a share of all jobs each day."
            ],
            p["Write rules above, or from a file:"],
            build_command("traceloom fleet triggers set fleet-triggers.toml"),
        ]
        return PageContent(
            "There are no rules yet",
            [ContentSection("rules", "Rules", div(".empty", id="rules")[empty])],
            lead=lead,
        )
    fired = sum(rule.fired for rule in answer.rules)
    happened: list[PageRow] = []  # the last firing and refusal of each rule
    for rule in answer.rules:
        if (last := rule.last) is not None:
            happened.append(
                {
                    "at_ns": last.at_ns,
                    "name": rule.name,
                    "result": "fired",
                    "job": last.target,
                    "what": last.what,
                    "request": last.request,
                }
            )
        if (refusal := rule.last_refusal) is not None:
            happened.append(
                {
                    "at_ns": refusal.at_ns,
                    "name": rule.name,
                    "result": "refused",
                    "job": refusal.target,
                    "what": refusal.what,
                    "detail": f"{refusal.reason}: {refusal.detail}",
                }
            )
    happened.sort(key=lambda row: -int(row["at_ns"] or 0))
    sections = [
        ContentSection(
            "rules",
            "Rules",
            PageTable(
                "rules", "Rules", _RULE_COLUMNS, [_build_rule_row(rule) for rule in answer.rules]
            ),
        ),
        ContentSection(
            "last",
            "What happened last",
            PageTable(
                "last", "What rules did last", _LAST_COLUMNS, happened, "No rule has fired yet."
            ),
            "of each rule",
        ),
    ]
    if answer.last_error:
        sections.insert(
            0, ContentSection("problems", "What is wrong", p(".bad")[answer.last_error])
        )
    numbers = [
        KeyFigure(
            "Fired",
            units.format_count(fired),
            "since these rules are there",
            leads="/requests?requests.q=trigger",
        ),
        KeyFigure(
            "Traces left",
            units.format_count(answer.traces_left),
            f"of {units.format_count(answer.traces_per_day)} in 24 hours",
            "warn" if not answer.traces_left else "",
        ),
        KeyFigure(
            "Bytes left",
            units.format_size(answer.bytes_left),
            f"of {units.format_size(answer.bytes_per_day)} in 24 hours",
            "" if answer.bytes_left else "warn",
        ),
        KeyFigure("Share", units.format_share(answer.share, 1.0), "of the steps of a job, at most"),
    ]
    rules = units.format_quantity(len(answer.rules), "rule")
    heading = f"{rules} asked for {units.format_quantity(fired, 'trace')}"
    return PageContent(heading, sections, numbers=numbers, lead=lead)


def _build_rule_row(rule: FleetTriggerResponse) -> PageRow:
    refusals = sorted(rule.refusals.items(), key=lambda item: -item[1])
    return {
        "name": rule.name,
        "on": f"{rule.on}: {_KIND_TEXTS[rule.on]}",
        "jobs": rule.jobs,
        "target": _TARGET_TEXTS[rule.target],
        "fired": rule.fired,
        "refusals": ", ".join(
            f"{reason} {units.format_count(times)}×" for reason, times in refusals
        ),
        "kept_bytes": rule.kept_bytes,
        "cooldown": int(rule.cooldown_seconds * 1e9),
    }


def build_triggers_controls(visit: PageRequest, answer: FleetTriggersResponse) -> Node:
    """Builds the form to change the rules."""
    if not visit.may("operator"):
        return p(".quiet")["An operator may set rules."]
    hint = (
        "on: cadence (share), usage (busy_below, minutes), finding (slug, saving), regression (by). "
        "Each may have where (job, user, account, scheduler, framework), target, profilers, steps or duration, shapes, "
        "stacks, cooldown."
    )
    return build_document_form(
        visit, "Set rules", "fleet-triggers.toml", answer.toml or TRIGGERS_EXAMPLE, hint
    )


async def handle_triggers_action(visit: PageRequest) -> str | Node:
    """Previews the rules of the form, or saves them.

    Raises:
        HttpError: `wrong-config`: what is wrong with them; `not-allowed`.
    """
    saves = visit.field("do") == "save"
    body = FleetTriggersBody(toml=get_submitted_text(visit), dry_run=not saves)
    answer = await visit.answer(FleetTriggersResponse, TRIGGERS_ROUTE, method="PUT", body=body)
    if saves:
        return visit.address.path
    names = {"name", "on", "jobs", "target", "cooldown"}
    return div(".notice.wide", role="status")[
        p["The rules are right, and are about so many jobs that run now. Nothing is saved yet."],
        PageTable(
            "checked",
            "Rules of the form",
            [column for column in _RULE_COLUMNS if column.key in names],
            [_build_rule_row(rule) for rule in answer.rules],
            "There would be no rules: nothing would be traced unless somebody asks.",
        ).render_static(),
    ]


TRIGGERS_PAGE = Page(
    "/triggers",
    "Triggers",
    "Rules by which jobs are traced though nobody asks: what each did, why it did not, what "
    "may still be spent; they are checked before they are set.",
    compute_triggers,
    build_triggers_content,
    build_triggers_controls,
    act=handle_triggers_action,
    live=True,
    menu="Traces",
)

OWNERS_ROUTE = "/api/v1/owners"
OWNERS_EXAMPLE = """[[rule]]
match = {job = "llm-*", "label.team" = "ranking"}
set = {division = "ads", product = "feed"}
"""
_SINCE = "90d"  # period for which a change is previewed
_UNATTRIBUTED_PAGE = PageUrl("/attribution", "").changed(
    {"by": "division,job", "at": json.dumps([UNATTRIBUTED]), "since": _SINCE}
)
_OWNER_RULE_COLUMNS = (
    PageColumn(
        "number", "Rule", "count", "the first that matches and says something of a dimension counts"
    ),
    PageColumn("match", "Jobs", hint="all of it has to match what the job says itself"),
    PageColumn("set", "Are of"),
    PageColumn("first", "From", unknown="always"),
    PageColumn("until", "Until", unknown="it holds on"),
)
_MOVE_COLUMNS = (
    PageColumn("dimension", "Dimension"),
    PageColumn("before", "Is of"),
    PageColumn("after", "Would be of"),
    PageColumn("jobs", "Jobs", "count"),
    PageColumn("hours", "Device hours", "number"),
)


@dataclass(frozen=True)
class OwnersView:
    """Data of the page."""

    document: DocumentResponse
    rules: tuple[OwnerRule, ...]
    versions: DocumentHistoryResponse
    unattributed_ms: int
    held_ms: int


async def compute_owners(visit: PageRequest) -> OwnersView:
    """Asks for the rules, their versions, and the unattributed device time.

    Raises:
        HttpError: `no-such-version`.
    """
    version = visit.address.query.get("version", "")
    document = await visit.answer(
        DocumentResponse, OWNERS_ROUTE, query={"version": version} if version else {}
    )
    versions = await visit.answer(DocumentHistoryResponse, f"{OWNERS_ROUTE}/history")
    try:
        rules = parse_rules(document.text)
    except InputError as error:
        raise HttpError(
            500, f"the rules that are kept are none: {error}", slug=error.slug
        ) from error
    parts = (
        await fetch_answer(visit, "attribution", by="division", since=_SINCE, until="", top="100")
    ).tables["rows"]
    held_by_division = {
        row["values"][0]: row["busy_ms"] + row["idle_ms"] for row in parts if row["values"]
    }
    return OwnersView(
        document,
        rules,
        versions,
        held_by_division.get(UNATTRIBUTED, 0),
        sum(held_by_division.values()),
    )


def build_owners_content(view: OwnersView) -> PageContent:
    rows: list[PageRow] = [
        {
            "number": number,
            "match": ", ".join(f"{name} = {value}" for name, value in rule.match.items()) or "all",
            "set": ", ".join(f"{name} = {value}" for name, value in rule.set.items()),
            "first": None if rule.first is None else rule.first.isoformat(),
            "until": None if rule.until is None else rule.until.isoformat(),
        }
        for number, rule in enumerate(view.rules, 1)
    ]
    empty = fragment[
        p[
            "There are no rules: jobs are of whom they say themselves, or their labels. Write rules, as:"
        ],
        div(".command")[code[OWNERS_EXAMPLE.splitlines()[1]], code[OWNERS_EXAMPLE.splitlines()[2]]],
    ]
    sections = [
        ContentSection(
            "rules",
            "Rules",
            PageTable("rules", "Rules", _OWNER_RULE_COLUMNS, rows, empty),
            "the first counts",
        ),
        build_versions_section("/owners", view.versions),
    ]
    verb = "says" if len(rows) == 1 else "say"
    heading = f"{units.format_quantity(len(rows), 'rule')} {verb} whose jobs are"
    numbers = [
        KeyFigure(
            "Rules",
            units.format_count(len(rows)),
            f"version {view.document.version}" if rows else "none was written",
        ),
        KeyFigure(
            "Nobody's",
            units.format_share(view.unattributed_ms, view.held_ms),
            "of the device time that jobs held, last 90 days",
            "warn" if view.unattributed_ms else "",
            _UNATTRIBUTED_PAGE,
        ),
    ]
    lead = (
        describe_older_version("/owners", view.document, view.versions)
        or "They are applied when somebody asks: a rule that is put right puts the past right."
    )
    return PageContent(
        heading, sections, numbers=numbers, lead=lead, above=[("Device time", "/attribution")]
    )


def build_owners_controls(visit: PageRequest, view: OwnersView) -> Node:
    """Builds the form to change the rules."""
    if not visit.may("operator"):
        return p(".quiet")["An operator may change the rules."]
    hint = (
        "match: job, scheduler, user, model, product, division, application, framework or label.NAME, with * and ?. "
        "set: division, product, application, model, user, framework. from, until: days in UTC."
    )
    return build_document_form(
        visit, "Change the rules", "owners.toml", view.document.text or OWNERS_EXAMPLE, hint
    )


async def handle_owners_action(visit: PageRequest) -> str | Node:
    """Previews the effect of the rules of the form, or saves them.

    Raises:
        HttpError: `bad-owners`, `not-allowed`.
    """
    saves = visit.field("do") == "save"
    body = {"text": get_submitted_text(visit), "dry_run": not saves, "since": _SINCE}
    change = await visit.answer(OwnersChangeResponse, OWNERS_ROUTE, method="POST", body=body)
    if saves:
        return f"/owners?saved={change.version}"
    since = ["From ", render_time(change.since_ns), " on, "]
    if not change.moves:
        return div(".notice", role="status")[
            p[since, "nothing would be another's. Nothing is saved yet."]
        ]
    rows: list[PageRow] = [
        {
            "dimension": move.dimension,
            "before": move.before,
            "after": move.after,
            "jobs": move.jobs,
            "hours": move.device_ms / 3.6e6,
        }
        for move in change.moves
    ]
    return div(".notice.wide", role="status")[
        p[since, "this would move. Nothing is saved yet."],
        PageTable("moves", "What would move", _MOVE_COLUMNS, rows).render_static(),
    ]


OWNERS_PAGE = Page(
    "/owners",
    "Owners",
    "Whose jobs are: the rules, what other rules would move before they are saved, all versions.",
    compute_owners,
    build_owners_content,
    build_owners_controls,
    act=handle_owners_action,
    menu="Account",
)

PRICES_ROUTE = "/api/v1/prices"
PRICES_EXAMPLE = """currency = "EUR"
per_kwh = 0.30
co2_g_per_kwh = 350

[device_hour]
"NVIDIA H100 80GB HBM3" = 2.60
default = 2.00
"""
_HOURS_COLUMN = PageColumn(
    "hours", "Device hours", "number", "of devices that hosts told of, last 90 days"
)


@dataclass(frozen=True)
class PricesView:
    """Data of the page.

    `parts`: device time by device model; `prices`: None if there are none.
    """

    document: DocumentResponse
    prices: Prices | None
    versions: DocumentHistoryResponse
    parts: Sequence[Mapping[str, Any]]
    whole: Mapping[str, Any] | None


async def compute_prices(visit: PageRequest) -> PricesView:
    """Asks for the prices, their versions, and the priced device time.

    Raises:
        HttpError: `no-such-version`.
    """
    version = visit.address.query.get("version", "")
    document = await visit.answer(
        DocumentResponse, PRICES_ROUTE, query={"version": version} if version else {}
    )
    versions = await visit.answer(DocumentHistoryResponse, f"{PRICES_ROUTE}/history")
    try:
        prices = parse_prices(document.text) if document.version else None
    except InputError as error:
        raise HttpError(
            500, f"the prices that are kept are none: {error}", slug=error.slug
        ) from error
    rows = (
        await fetch_answer(
            visit, "attribution", by="device_model", since=_SINCE, until="", top="100"
        )
    ).tables["rows"]
    parts = [row for row in rows if row["values"]]
    return PricesView(
        document, prices, versions, parts, next((row for row in rows if not row["values"]), None)
    )


def build_prices_content(view: PricesView) -> PageContent:
    prices, total_row = view.prices, view.whole
    older = describe_older_version("/prices", view.document, view.versions)
    since = PageUrl("/prices", f"since={_SINCE}")
    columns = [
        PageColumn(
            "model",
            "Device",
            link=lambda row: build_page_url(
                "/attribution", since, by="job", device_model=str(row["model"])
            ),
        ),
        _HOURS_COLUMN,
        PageColumn(
            "hour",
            "An hour",
            "number",
            "of one device; `default` where its model has no price",
            "it has no price",
        ),
    ]
    if older is None:  # the service uses only the latest prices
        columns.append(
            PageColumn(
                "cost", "Cost", "number", "of these hours, with their energy", "it has no price"
            )
        )
    hour = {} if prices is None else prices.device_hour
    rows: list[PageRow] = [
        {
            "model": row["values"][0],
            "hours": row["device_ms"] / 3.6e6,
            "cost": row["cost"],
            "hour": hour.get(row["values"][0], hour.get("default")),
        }
        for row in view.parts
    ]
    empty = fragment[
        p[
            "No host has told of device time in the last 90 days. Hosts with devices do, once their agent has joined:"
        ],
        p[a(href="/hosts")["Let a host join"]],
    ]
    sections = [
        ContentSection(
            "devices",
            "Devices",
            PageTable("devices", "What devices cost", columns, rows, empty),
            "last 90 days" if prices is None else f"last 90 days, in {prices.currency}",
        ),
        build_versions_section("/prices", view.versions),
    ]
    if prices is None:
        lead: Node = [
            "No prices are set, so cost is not known. Set them as in ",
            code["prices.toml"],
            " below.",
        ]
        return PageContent(
            "Nothing has a price yet", sections, above=[("Device time", "/attribution")], lead=lead
        )
    kwh = (
        "in the price of the hour"
        if prices.per_kwh is None
        else f"{units.format_number(prices.per_kwh)} {prices.currency}"
    )
    numbers = [KeyFigure("A kilowatt hour", kwh)]
    if prices.co2_g_per_kwh is not None:
        numbers.append(
            KeyFigure("CO₂", f"{units.format_number(prices.co2_g_per_kwh)} g", "of a kilowatt hour")
        )
    heading = f"Prices in {prices.currency}"
    if older is None and total_row is not None and total_row["device_ms"]:
        priced = units.format_share(total_row["cost_known_ms"], total_row["device_ms"])
        attribution_url = PageUrl("/attribution", "").changed(
            {"by": "device_model", "since": _SINCE}
        )
        grade = "" if total_row["cost_known_ms"] == total_row["device_ms"] else "warn"
        numbers.append(
            KeyFigure("Priced", priced, "of device time, last 90 days", grade, attribution_url)
        )
        if total_row["cost"] is not None:
            heading = (
                f"{units.format_number(total_row['cost'])} {prices.currency} in the last 90 days"
            )
    lead = (
        older
        or "Prices are applied when somebody asks: prices that are put right put the past right."
    )
    return PageContent(
        heading, sections, numbers=numbers, lead=lead, above=[("Device time", "/attribution")]
    )


def build_prices_controls(visit: PageRequest, view: PricesView) -> Node:
    if not visit.may("operator"):
        return p(".quiet")["An operator may change the prices."]
    hint = (
        "currency; device_hour: an hour of each model of device, default: of all others; per_kwh: where energy is paid "
        "beside the hour; co2_g_per_kwh: grams of CO₂."
    )
    return build_document_form(
        visit, "Change the prices", "prices.toml", view.document.text or PRICES_EXAMPLE, hint
    )


async def handle_prices_action(visit: PageRequest) -> str | Node:
    """Previews the effect of the prices of the form, or saves them.

    Raises:
        HttpError: `bad-prices`, `not-allowed`.
    """
    saves = visit.field("do") == "save"
    body = {"text": get_submitted_text(visit), "dry_run": not saves, "since": _SINCE}
    change = await visit.answer(PricesChangeResponse, PRICES_ROUTE, method="POST", body=body)
    if saves:
        return f"/prices?saved={change.version}"
    columns = (
        PageColumn("model", "Device"),
        _HOURS_COLUMN,
        PageColumn(
            "before",
            " ".join(("Cost now", change.currency_before or "")),
            "number",
            unknown="it has no price",
        ),
        PageColumn(
            "after",
            f"Cost then {change.currency_after}",
            "number",
            unknown="it would have no price",
        ),
    )
    rows: list[PageRow] = [
        {
            "model": model_cost.device_model,
            "hours": model_cost.device_ms / 3.6e6,
            "before": model_cost.before,
            "after": model_cost.after,
        }
        for model_cost in change.costs
    ]
    table = PageTable(
        "costs", "What would cost how much", columns, rows, "No device time is known since then."
    )
    return div(".notice.wide", role="status")[
        p[
            "From ",
            render_time(change.since_ns),
            " on, this would be the cost. Nothing is saved yet.",
        ],
        table.render_static(),
    ]


PRICES_PAGE = Page(
    "/prices",
    "Prices",
    "What device hours and energy cost: what other prices would make of it before they are saved, "
    "all versions.",
    compute_prices,
    build_prices_content,
    build_prices_controls,
    act=handle_prices_action,
    menu="Account",
)
