"""Whose jobs are: the rules, what other rules would move before they are saved, and all versions of them."""

from __future__ import annotations

from dataclasses import dataclass

from htpy import (
    Node,
    a,
    button,
    caption,
    code,
    div,
    figure,
    form,
    fragment,
    label,
    p,
    table,
    tbody,
    td,
    textarea,
    th,
    thead,
    tr,
)  # fmt: skip
from markupsafe import Markup, escape

from traceloom.agent.http.answers import RequestError
from traceloom.collect.questions.rules import (
    DocumentAnswer,
    DocumentHistoryAnswer,
    MoveAnswer,
    OwnersChangeAnswer,
)
from traceloom.errors import InputError
from traceloom.fleet.attribution import UNATTRIBUTED
from traceloom.fleet.documents import OwnerRule, rules_of
from traceloom.model import units
from traceloom.portal.asking import ask
from traceloom.portal.layout import folded
from traceloom.portal.page import KeyNumber, Page, PageContent, PageSection
from traceloom.portal.table import PageColumn, PageRow, PageTable, instant
from traceloom.portal.visit import Visit

ROUTE = "/api/v1/owners"
EXAMPLE = """[[rule]]
match = {job = "llm-*", "label.team" = "ranking"}
set = {division = "ads", product = "feed"}
"""
_SINCE = "90d"  # of which time it is said what a change moves
_RULES = (
    PageColumn("number", "Rule", "count", "the first that matches and says something of a dimension counts"),
    PageColumn("match", "Jobs", hint="all of it has to match what the job says itself"),
    PageColumn("set", "Are of"),
    PageColumn("first", "From", unknown="always"),
    PageColumn("until", "Until", unknown="it holds on"),
)
_VERSIONS = (
    PageColumn("version", "Version", "count", link=lambda row: f"/owners?version={row['version']}"),
    PageColumn("at_ns", "Since", "instant", "since when it counts"),
    PageColumn("who", "By"),
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
    versions: list[PageRow] = [
        {"version": each.version, "at_ns": each.at_ns, "who": each.who} for each in view.versions.versions
    ]
    last = view.versions.versions[0].version if versions else 0
    old = view.document.version not in {0, last}
    sections = [
        PageSection("rules", "Rules", PageTable("rules", "Rules", _RULES, rows, empty), "the first counts"),
        PageSection(
            "versions", "History", PageTable("versions", "Versions", _VERSIONS, versions, "Nobody wrote rules yet."),
            "every version is kept",
        ),
    ]  # fmt: skip
    heading = f"{units.counted(len(rows), 'rule')} say whose jobs are"
    if len(rows) == 1:
        heading = "1 rule says whose jobs are"
    share = units.share(view.unattributed_ms, view.held_ms)
    numbers = [
        KeyNumber("Rules", units.count(len(rows)), f"version {view.document.version}" if rows else "none was written"),
        KeyNumber("Nobody's", share, "of the device time that jobs held, last 90 days",
                  "warn" if view.unattributed_ms else ""),
    ]  # fmt: skip
    lead: Node = "They are applied when somebody asks: a rule that is put right puts the past right."
    if old:
        when, to_last = instant(view.document.at_ns or 0), a(href="/owners")["To the last"]
        lead = ["This is version ", str(view.document.version), ", of ", when, ". ", to_last, "."]
    return PageContent(heading, sections, numbers=numbers, lead=lead, above=[("Device time", "/attribution")])


def controls(visit: Visit, view: OwnersView) -> Node:
    """The form by which rules are changed."""
    if not visit.may("operator"):
        return p(".quiet")["An operator may change the rules."]
    text = visit.form.get("text", [view.document.text or EXAMPLE])[0].replace("\r\n", "\n")
    inside = form(method="post", action="/owners")[
        div(".field")[
            label(for_="text")["owners.toml"],
            textarea(
                "#text", name="text", rows=max(10, min(30, text.count("\n") + 3)), spellcheck="false",
                autocomplete="off", aria_describedby="text-about",
            )[_lines(text)],
            p("#text-about.quiet")[
                "match: job, scheduler, user, model, product, division, application, framework or label.NAME, with * "
                "and ?. set: division, product, application, model, user, framework. from, until: days in UTC."
            ],
        ],
        div(".buttons")[
            button(type="submit", name="do", value="try")["Show what would change"],
            button(".primary", type="submit", name="do", value="save")["Save"],
        ],
    ]  # fmt: skip
    return folded("change", "Change the rules", inside, is_open=bool(visit.form))


def _lines(text: str) -> Markup:
    """Text of several lines; ends of lines would be spelled out as other control characters are."""
    return Markup(str(escape(text)).replace("\n", "&#10;").replace("\t", "&#9;"))  # noqa: S704  (escaped)


async def act(visit: Visit) -> str | Node:
    """Say what the rules of the form would change, or save them.

    Raises:
        RequestError: `bad-owners`, `not-allowed`.
    """
    saves = visit.field("do") == "save"
    body = {"text": visit.form.get("text", [""])[0].replace("\r\n", "\n"), "dry_run": not saves, "since": _SINCE}
    change = await visit.answer(OwnersChangeAnswer, ROUTE, method="POST", body=body)
    if saves:
        return f"/owners?saved={change.version}"
    return _moves(change)


def _moves(change: OwnersChangeAnswer) -> Node:
    since = ["From ", instant(change.since_ns), " on, "]
    if not change.moves:
        return div(".notice", role="status")[p[since, "nothing would be another's. Nothing is saved yet."]]
    return div(".notice.wide", role="status")[
        p[since, "this would move. Nothing is saved yet."],
        figure(".table.narrow")[
            div(".scroll", tabindex="0", role="region", aria_label="What would move")[
                table("#moves")[
                    caption(".unseen")["What would move"],
                    thead[
                        tr[th["Dimension"], th["Is of"], th["Would be of"], th(".n")["Jobs"], th(".n")["Device hours"]]
                    ],
                    tbody[(_move(move) for move in change.moves)],
                ]
            ]
        ],
    ]


def _move(move: MoveAnswer) -> Node:
    hours = units.number(move.device_ms / 3.6e6)
    return tr[td[move.dimension], td[move.before], td[move.after], td(".n")[units.count(move.jobs)], td(".n")[hours]]


PAGE = Page(
    "/owners", "Owners", "Whose jobs are: the rules, what other rules would move before they are saved, all versions.",
    compute, content, controls, act=act, menu="Account",
)  # fmt: skip
