"""Whose jobs are: the rules, what other rules would move before they are saved, and all versions of them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from htpy import Node, code, div, fragment, p

from traceloom.agent.http.answers import RequestError
from traceloom.collect.questions.rules import (
    DocumentAnswer,
    DocumentHistoryAnswer,
    OwnersChangeAnswer,
)
from traceloom.errors import InputError
from traceloom.fleet.attribution import UNATTRIBUTED
from traceloom.fleet.documents import OwnerRule, rules_of
from traceloom.model import units
from traceloom.portal.asking import ask
from traceloom.portal.documents import document_form, older_version, versions_section, written_text
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable, instant
from traceloom.portal.visit import Address, Visit

ROUTE = "/api/v1/owners"
EXAMPLE = """[[rule]]
match = {job = "llm-*", "label.team" = "ranking"}
set = {division = "ads", product = "feed"}
"""
_SINCE = "90d"  # of which time it is said what a change moves
_NOBODYS = Address("/attribution", "").changed(
    {"by": "division,job", "at": json.dumps([UNATTRIBUTED]), "since": _SINCE}
)
_RULES = (
    PageColumn("number", "Rule", "count", "the first that matches and says something of a dimension counts"),
    PageColumn("match", "Jobs", hint="all of it has to match what the job says itself"),
    PageColumn("set", "Are of"),
    PageColumn("first", "From", unknown="always"),
    PageColumn("until", "Until", unknown="it holds on"),
)
_MOVES = (
    PageColumn("dimension", "Dimension"),
    PageColumn("before", "Is of"),
    PageColumn("after", "Would be of"),
    PageColumn("jobs", "Jobs", "count"),
    PageColumn("hours", "Device hours", "number"),
)


@dataclass(frozen=True)
class OwnersView:
    """What the page shows. `text`: of the version that the address names; `last`: the number of the last."""

    document: DocumentAnswer
    rules: tuple[OwnerRule, ...]
    versions: DocumentHistoryAnswer
    unattributed_ms: int
    held_ms: int


async def compute(visit: Visit) -> OwnersView:
    """Ask for the rules, their versions, and how much time is nobody's.

    Raises:
        RequestError: `no-such-version`.
    """
    version = visit.address.query.get("version", "")
    document = await visit.answer(DocumentAnswer, ROUTE, query={"version": version} if version else {})
    versions = await visit.answer(DocumentHistoryAnswer, f"{ROUTE}/history")
    try:
        rules = rules_of(document.text)
    except InputError as error:
        raise RequestError(500, f"the rules that are kept are none: {error}", slug=error.slug) from error
    parts = (await ask(visit, "attribution", by="division", since=_SINCE, until="", top="100")).tables["rows"]
    of = {row["values"][0]: row["busy_ms"] + row["idle_ms"] for row in parts if row["values"]}
    return OwnersView(document, rules, versions, of.get(UNATTRIBUTED, 0), sum(of.values()))


def content(view: OwnersView) -> PageContent:
    """What is shown of them."""
    rows: list[PageRow] = [
        {
            "number": number, "match": ", ".join(f"{name} = {value}" for name, value in rule.match.items()) or "all",
            "set": ", ".join(f"{name} = {value}" for name, value in rule.set.items()),
            "first": None if rule.first is None else rule.first.isoformat(),
            "until": None if rule.until is None else rule.until.isoformat(),
        }
        for number, rule in enumerate(view.rules, 1)
    ]  # fmt: skip
    empty = fragment[
        p["There are no rules: jobs are of whom they say themselves, or their labels. Write rules, as:"],
        div(".command")[code[EXAMPLE.splitlines()[1]], code[EXAMPLE.splitlines()[2]]],
    ]
    sections = [
        ContentSection("rules", "Rules", PageTable("rules", "Rules", _RULES, rows, empty), "the first counts"),
        versions_section("/owners", view.versions),
    ]
    heading = f"{units.counted(len(rows), 'rule')} say whose jobs are"
    if len(rows) == 1:
        heading = "1 rule says whose jobs are"
    share = units.share(view.unattributed_ms, view.held_ms)
    numbers = [
        KeyNumber("Rules", units.count(len(rows)), f"version {view.document.version}" if rows else "none was written"),
        KeyNumber("Nobody's", share, "of the device time that jobs held, last 90 days",
                  "warn" if view.unattributed_ms else "", _NOBODYS),
    ]  # fmt: skip
    lead = (
        older_version("/owners", view.document, view.versions)
        or "They are applied when somebody asks: a rule that is put right puts the past right."
    )
    return PageContent(heading, sections, numbers=numbers, lead=lead, above=[("Device time", "/attribution")])


def controls(visit: Visit, view: OwnersView) -> Node:
    """The form by which rules are changed."""
    if not visit.may("operator"):
        return p(".quiet")["An operator may change the rules."]
    about = (
        "match: job, scheduler, user, model, product, division, application, framework or label.NAME, with * and ?. "
        "set: division, product, application, model, user, framework. from, until: days in UTC."
    )
    return document_form(visit, "Change the rules", "owners.toml", view.document.text or EXAMPLE, about)


async def act(visit: Visit) -> str | Node:
    """Say what the rules of the form would change, or save them.

    Raises:
        RequestError: `bad-owners`, `not-allowed`.
    """
    saves = visit.field("do") == "save"
    body = {"text": written_text(visit), "dry_run": not saves, "since": _SINCE}
    change = await visit.answer(OwnersChangeAnswer, ROUTE, method="POST", body=body)
    if saves:
        return f"/owners?saved={change.version}"
    since = ["From ", instant(change.since_ns), " on, "]
    if not change.moves:
        return div(".notice", role="status")[p[since, "nothing would be another's. Nothing is saved yet."]]
    rows: list[PageRow] = [
        {"dimension": move.dimension, "before": move.before, "after": move.after, "jobs": move.jobs,
         "hours": move.device_ms / 3.6e6}
        for move in change.moves
    ]  # fmt: skip
    return div(".notice.wide", role="status")[
        p[since, "this would move. Nothing is saved yet."], PageTable("moves", "What would move", _MOVES, rows).alone()
    ]


PAGE = Page(
    "/owners", "Owners", "Whose jobs are: the rules, what other rules would move before they are saved, all versions.",
    compute, content, controls, act=act, menu="Account",
)  # fmt: skip
