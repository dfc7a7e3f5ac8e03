"""What hours and energy cost: the prices, what other prices would make of it before they are saved, all versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from htpy import Node, a, code, div, fragment, p

from traceloom.agent.http.answers import RequestError
from traceloom.collect.questions.rules import DocumentAnswer, DocumentHistoryAnswer, PricesChangeAnswer
from traceloom.errors import InputError
from traceloom.fleet.documents import Prices, prices_of
from traceloom.model import units
from traceloom.portal.asking import ask, to_page
from traceloom.portal.documents import document_form, older_version, versions_section, written_text
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable, instant
from traceloom.portal.visit import Address, Visit

ROUTE = "/api/v1/prices"
EXAMPLE = """currency = "EUR"
per_kwh = 0.30
co2_g_per_kwh = 350

[device_hour]
"NVIDIA H100 80GB HBM3" = 2.60
default = 2.00
"""
_SINCE = "90d"  # of which time it is said what prices make of it
_HOURS = PageColumn("hours", "Device hours", "number", "of devices that hosts told of, last 90 days")


@dataclass(frozen=True)
class PricesView:
    """What the page shows. `parts`: device time by model of device; `prices`: None where none were written."""

    document: DocumentAnswer
    prices: Prices | None
    versions: DocumentHistoryAnswer
    parts: Sequence[Mapping[str, Any]]
    whole: Mapping[str, Any] | None


async def compute(visit: Visit) -> PricesView:
    """Ask for the prices, their versions, and the time that they are of.

    Raises:
        RequestError: `no-such-version`.
    """
    version = visit.address.query.get("version", "")
    document = await visit.answer(DocumentAnswer, ROUTE, query={"version": version} if version else {})
    versions = await visit.answer(DocumentHistoryAnswer, f"{ROUTE}/history")
    try:
        prices = prices_of(document.text) if document.version else None
    except InputError as error:
        raise RequestError(500, f"the prices that are kept are none: {error}", slug=error.slug) from error
    rows = (await ask(visit, "attribution", by="device_model", since=_SINCE, until="", top="100")).tables["rows"]
    parts = [row for row in rows if row["values"]]
    return PricesView(document, prices, versions, parts, next((row for row in rows if not row["values"]), None))


def content(view: PricesView) -> PageContent:
    """What is shown of them."""
    prices, whole = view.prices, view.whole
    older = older_version("/prices", view.document, view.versions)
    since = Address("/prices", f"since={_SINCE}")
    columns = [
        PageColumn("model", "Device", link=lambda row: to_page(
            "/attribution", since, by="job", device_model=str(row["model"])
        )), _HOURS,
        PageColumn("hour", "An hour", "number", "of one device; `default` where its model has no price",
                   "it has no price"),
    ]  # fmt: skip
    if older is None:  # the service counts with the last prices alone
        columns.append(PageColumn("cost", "Cost", "number", "of these hours, with their energy", "it has no price"))
    hour = {} if prices is None else prices.device_hour
    rows: list[PageRow] = [
        {
            "model": row["values"][0], "hours": row["device_ms"] / 3.6e6, "cost": row["cost"],
            "hour": hour.get(row["values"][0], hour.get("default")),
        }
        for row in view.parts
    ]  # fmt: skip
    empty = fragment[
        p["No host has told of device time in the last 90 days. Hosts with devices do, once their agent has joined:"],
        p[a(href="/hosts")["Let a host join"]],
    ]
    note = "last 90 days" if prices is None else f"last 90 days, in {prices.currency}"
    sections = [
        ContentSection("devices", "Devices", PageTable("devices", "What devices cost", columns, rows, empty), note),
        versions_section("/prices", view.versions),
    ]  # fmt: skip
    if prices is None:
        lead: Node = ["No prices are set, so cost is not known. Set them as in ", code["prices.toml"], " below."]
        return PageContent("Nothing has a price yet", sections, above=[("Device time", "/attribution")], lead=lead)
    kwh = "in the price of the hour" if prices.per_kwh is None else f"{units.number(prices.per_kwh)} {prices.currency}"
    numbers = [KeyNumber("A kilowatt hour", kwh)]
    if prices.co2_g_per_kwh is not None:
        numbers.append(KeyNumber("CO₂", f"{units.number(prices.co2_g_per_kwh)} g", "of a kilowatt hour"))
    heading = f"Prices in {prices.currency}"
    if older is None and whole is not None and whole["device_ms"]:
        priced = units.share(whole["cost_known_ms"], whole["device_ms"])
        where = Address("/attribution", "").changed({"by": "device_model", "since": _SINCE})
        grade = "" if whole["cost_known_ms"] == whole["device_ms"] else "warn"
        numbers.append(KeyNumber("Priced", priced, "of device time, last 90 days", grade, where))
        if whole["cost"] is not None:
            heading = f"{units.number(whole['cost'])} {prices.currency} in the last 90 days"
    lead = older or "Prices are applied when somebody asks: prices that are put right put the past right."
    return PageContent(heading, sections, numbers=numbers, lead=lead, above=[("Device time", "/attribution")])


def controls(visit: Visit, view: PricesView) -> Node:
    """The form by which prices are changed."""
    if not visit.may("operator"):
        return p(".quiet")["An operator may change the prices."]
    about = (
        "currency; device_hour: an hour of each model of device, default: of all others; per_kwh: where energy is paid "
        "beside the hour; co2_g_per_kwh: grams of CO₂."
    )
    return document_form(visit, "Change the prices", "prices.toml", view.document.text or EXAMPLE, about)


async def act(visit: Visit) -> str | Node:
    """Say what the prices of the form would change, or save them.

    Raises:
        RequestError: `bad-prices`, `not-allowed`.
    """
    saves = visit.field("do") == "save"
    body = {"text": written_text(visit), "dry_run": not saves, "since": _SINCE}
    change = await visit.answer(PricesChangeAnswer, ROUTE, method="POST", body=body)
    if saves:
        return f"/prices?saved={change.version}"
    columns = (
        PageColumn("model", "Device"), _HOURS,
        PageColumn("before", " ".join(("Cost now", change.currency_before or "")), "number", unknown="it has no price"),
        PageColumn("after", f"Cost then {change.currency_after}", "number", unknown="it would have no price"),
    )  # fmt: skip
    rows: list[PageRow] = [
        {"model": of.device_model, "hours": of.device_ms / 3.6e6, "before": of.before, "after": of.after}
        for of in change.costs
    ]
    table = PageTable("costs", "What would cost how much", columns, rows, "No device time is known since then.")
    return div(".notice.wide", role="status")[
        p["From ", instant(change.since_ns), " on, this would be the cost. Nothing is saved yet."],
        table.alone(),
    ]


PAGE = Page(
    "/prices", "Prices", "What device hours and energy cost: what other prices would make of it before they are saved, "
    "all versions.", compute, content, controls, act=act, menu="Account",
)  # fmt: skip
