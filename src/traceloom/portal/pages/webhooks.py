"""Where the fleet's events go: what waits, what has arrived, what was lost and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from htpy import Node, button, code, details, div, form, fragment, label, option, p, select, summary

from traceloom.agent.http.answers import wrong_request
from traceloom.collect.webhook_routes import (
    NewWebhookAnswer,
    RemovedWebhookAnswer,
    WebhookBody,
    WebhooksAnswer,
    WebhookTestAnswer,
)
from traceloom.model import units
from traceloom.portal.forms import choices, sure, text_field
from traceloom.portal.layout import command, folded
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit
from traceloom.store.webhook_state import EVENTS, MOST_WAITING, EventName, WebhookRecord

ROUTE = "/api/v1/webhooks"
COLUMNS = (
    PageColumn("name", "Webhook"),
    PageColumn("url", "Leads to"),
    PageColumn("events", "Is told of"),
    PageColumn("waiting", "Waiting", "count", f"events that have not arrived yet; {MOST_WAITING} at most"),
    PageColumn("delivered", "Arrived", "count"),
    PageColumn("lost", "Lost", "count", "given up after a day, or dropped as too many waited"),
    PageColumn("error", "Last error", unknown="the last event arrived, or there was none"),
    PageColumn("created_ns", "Made", "instant"),
)


async def compute(visit: Visit) -> list[WebhookRecord]:
    """All webhooks."""
    return (await visit.answer(WebhooksAnswer, ROUTE)).webhooks


def content(webhooks: list[WebhookRecord]) -> PageContent:
    """What is shown of them."""
    rows: list[PageRow] = [
        {
            "name": webhook.name, "url": webhook.url, "events": ", ".join(webhook.events), "waiting": webhook.waiting,
            "delivered": webhook.delivered, "lost": webhook.failed + webhook.dropped, "error": webhook.error,
            "created_ns": webhook.created_ns,
        }
        for webhook in webhooks
    ]  # fmt: skip
    empty = fragment[
        p["Nobody is told of anything. A webhook has the service post an event to an address when a trace has ended or "
          "a kernel became slower. Add one above, or by a command:"],
        command("traceloom fleet webhooks add chat https://chat.example/hook"),
    ]  # fmt: skip
    lead = "Each event is signed with the webhook's secret, and is tried again for a day."
    sections = [ContentSection("webhooks", "By name", PageTable("webhooks", "Webhooks", COLUMNS, rows, empty))]
    if not webhooks:
        return PageContent("No webhooks", sections, lead=lead)
    lost = sum(webhook.failed + webhook.dropped for webhook in webhooks)
    numbers = [
        KeyNumber("Waiting", units.count(sum(webhook.waiting for webhook in webhooks)), "events"),
        KeyNumber("Arrived", units.count(sum(webhook.delivered for webhook in webhooks)), "events"),
        KeyNumber("Lost", units.count(lost), "events", "bad" if lost else ""),
    ]
    return PageContent(units.counted(len(webhooks), "webhook"), sections, numbers=numbers, lead=lead)


def controls(visit: Visit, webhooks: list[WebhookRecord]) -> Node:
    """Forms by which webhooks are added, tried and removed."""
    chosen = visit.form.get("events", EVENTS)
    inside = form(method="post")[
        div(".fields")[
            text_field("name", "Name", "Letters, digits, dots, dashes.", value=visit.field("name"),
                       required="required", maxlength="63"),
            text_field("url", "Address", "It has to be https and public, unless the service allows its network.",
                       value=visit.field("url"), required="required", maxlength="2000", placeholder="https://"),
            choices("events", "Events", [(event, event) for event in EVENTS], chosen, several=True,
                    about="None: all of them."),
        ],
        div(".buttons")[button(".primary", type="submit", name="do", value="add")["Add it"]],
    ]  # fmt: skip
    names = [webhook.name for webhook in webhooks]
    adding = visit.field("do") == "add"
    if not names:
        return folded("add", "Add a webhook", inside, is_open=adding)
    trial = details(".sure")[
        summary["Send an event for a test …"],
        form(method="post")[_choice("try", names), button(type="submit", name="do", value="try")["Send it"]],
    ]
    return [
        folded("add", "Add a webhook", inside, is_open=adding), trial,
        sure("Remove a webhook", _choice("remove", names), {"do": "remove"}),
    ]  # fmt: skip


def _choice(name: str, names: Sequence[str]) -> Node:
    return div(".field")[
        label(for_=name)["Webhook"], select(id=name, name=name)[(option(value=each)[each] for each in names)]
    ]


async def act(visit: Visit) -> str | Node:
    """Add a webhook, and show its secret once; send one an event for a test; or remove one.

    Raises:
        RequestError: `wrong-request`, `webhook-exists`, `no-such-webhook`, and why an address is refused.
    """
    if visit.field("do") == "remove":
        name = visit.field("remove")
        await visit.answer(RemovedWebhookAnswer, f"{ROUTE}/{{name}}", method="DELETE", name=name)
        return visit.address.path
    if visit.field("do") == "try":
        tried = await visit.answer(WebhookTestAnswer, f"{ROUTE}/{{name}}/test", method="POST", name=visit.field("try"))
        if tried.arrived:
            return div(".notice", role="status")[p[code[tried.name], " took the event."]]
        return div(".notice.bad", role="alert")[p["The event did not arrive at ", code[tried.name], f": {tried.error}"]]
    try:
        events = msgspec.convert(visit.form.get("events", EVENTS), tuple[EventName, ...])
    except msgspec.ValidationError as error:
        raise wrong_request(str(error)) from error
    body = WebhookBody(name=visit.field("name"), url=visit.field("url"), events=events)
    answer = await visit.answer(NewWebhookAnswer, ROUTE, method="POST", body=body)
    return div(".notice", role="status")[
        p[
            "The secret of ",
            code[answer.name],
            ", by which it knows that events are of this service, is shown only now:",
        ],
        command(answer.secret),
    ]


PAGE = Page(
    "/webhooks", "Webhooks", "Where the fleet's events go: what waits, what has arrived, what was lost and why.",
    compute, content, controls, role="admin", act=act, menu="Administration",
)  # fmt: skip
