"""Pages of the portal drawn from answers that a test writes by hand, without a service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from htpy import Node

from support.html_tree import HtmlTree, words
from traceloom.agent.traces.requests import TraceSpec
from traceloom.fleet.handlers.hosts import FleetRequestResponse
from traceloom.fleet.portal.asking import QueryResult
from traceloom.fleet.portal.charts import DAY_NS
from traceloom.fleet.portal.page import PageContent, build_main, format_value
from traceloom.fleet.portal.page_request import PageUrl
from traceloom.fleet.questions.catalogue import QUESTION

EVIL = "</title><script>alert(1)</script>&\"'\u202e"
"""A name that would run a script, end an attribute, or turn the order of letters."""
SPELLED = EVIL.replace("\u202e", "\\u202e")
"""The same as pages show it."""

SECOND = 10**9
NOON = 1_790_000_000 * SECOND  # 2026-09-21 14:13:20 UTC


class Shown(NamedTuple):
    """A key number as it stands on a page."""

    value: str
    about: str
    grade: str
    leads: str


class ContentPage(HtmlTree):
    """A page as a reader gets it, for an address."""

    def __init__(self, content: PageContent, query: str = "", path: str = "/p") -> None:
        super().__init__(
            format_value(build_main(content, PageUrl(path, query), None, None, live=True))
        )
        assert self.all("script") == [], "a name became an element"
        text = "".join(self.root.itertext())
        assert "\u202e" not in text
        assert not re.search(r"\b(None|nan|True|False)\b", text), text

    @property
    def heading(self) -> str:
        return words(self.all("h1")[0])

    def numbers(self) -> dict[str, Shown]:
        """The key numbers by their names."""
        out = {}
        for of in [of for whole in self.all("dl") for of in whole]:
            value = self.all("b", of)[0]
            link = next(iter(self.all("a", value)), None)
            leads = "" if link is None else link.get("href") or ""
            out[words(self.all("dt", of)[0])] = Shown(
                words(value), words(list(of[1])[-1]), of.get("class") or "", leads
            )
        return out

    def column(self, table: str, head: str) -> list[str]:
        """The texts of a column of a table."""
        of = self.tables()[table]
        return [row[of.heads.index(head)] for row in of.texts]

    def leads(self, table: str, head: str) -> list[str]:
        """Where the cells of a column lead; "" where nowhere."""
        of = self.tables()[table]
        cells = [row[of.heads.index(head)] for row in of.rows]
        return [next((link.get("href") or "" for link in cell.iter("a")), "") for cell in cells]


def fragment_tree(node: Node) -> HtmlTree:
    """A part of a page."""
    return HtmlTree(format_value(node))


def answered(
    name: str, query: str = "", facts: Mapping[str, Any] | None = None, **tables: list[Any]
) -> QueryResult:
    """What the service answers to a question of a page whose address has a query."""
    question = QUESTION[name]
    empty: dict[str, list[Any]] = {table: [] for table in question.tables}
    period = {"since_ns": NOON - 30 * DAY_NS, "until_ns": NOON, "more": False}
    return QueryResult(
        question, PageUrl("/p", query), {**period, **(facts or {})}, {**empty, **tables}
    )


def request(identity: str, state: str, **changes: object) -> FleetRequestResponse:
    """A request of three steps of the job `a`, taken from nobody yet."""
    fields: dict[str, object] = {
        "id": identity,
        "who": "ana",
        "asked_ns": NOON,
        "spec": TraceSpec(job="a", steps=3),
        "state": state,
        "since_ns": NOON,
        "start_ns": 0,
        "start_step": 0,
        "start_detail": "",
        "reason": "",
        "detail": "",
        "capture": "",
        "trigger": None,
        "hosts": [],
    }
    return FleetRequestResponse(**{**fields, **changes})  # type: ignore[arg-type]
