"""A capture beside another one: the page of `traceloom diff` in a frame that has no part in this service."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlencode

from htpy import Node, a, div, iframe

from traceloom.agent.http.answers import RequestError
from traceloom.collect.answers import CaptureAnswer
from traceloom.portal.links import to_capture, to_job
from traceloom.portal.page import ContentSection, Page, PageContent
from traceloom.portal.table import instant
from traceloom.portal.visit import Visit


def to_comparison(base: str, new: str) -> str:
    """The page of a capture against another one."""
    return f"/compare?{urlencode({'base': base, 'new': new})}"


@dataclass(frozen=True)
class TwoCaptures:
    """What is compared."""

    base: CaptureAnswer
    new: CaptureAnswer


async def compute(visit: Visit) -> TwoCaptures:
    """Ask for both.

    Raises:
        RequestError: `no-such-capture`.
    """
    query = visit.address.query
    if not query.get("base") or not query.get("new"):
        raise RequestError(
            404, "two captures are compared, and no two are named", slug="no-such-capture",
            hint="a page of a capture lets one choose another to hold it against; one of a regression has both",
        )  # fmt: skip
    base, new = [await visit.answer(CaptureAnswer, "/api/v1/captures/{id}", id=query[side]) for side in ("base", "new")]
    return TwoCaptures(base, new)


def content(both: TwoCaptures) -> PageContent:
    """What is shown of them."""
    where = f"/captures/{quote(both.new.id, safe='')}/against/{quote(both.base.id, safe='')}"
    frame = iframe(
        ".report", src=where, title=f"{both.new.id} against {both.base.id}", sandbox="allow-scripts allow-downloads"
    )
    buttons = div(".buttons")[
        a(".button", href=to_capture(both.base.id))["The base"],
        a(".button", href=to_capture(both.new.id))["The new one"],
        a(".button", href=to_comparison(both.new.id, both.base.id))["The other way round"],
        a(".button", href=where)["In a window of its own"],
    ]
    lead: list[Node] = []
    for words, capture in (("Base: ", both.base), (" New: ", both.new)):
        name = capture.job or capture.id
        lead += [words, a(href=to_job(capture.job))[name] if capture.job else name, ", received ",
                 instant(capture.received_ns), "."]  # fmt: skip
    return PageContent(
        f"{both.new.job or both.new.id} against {both.base.job or both.base.id}",
        [ContentSection("comparison", "What changed", [frame, buttons], "as traceloom diff shows it")],
        above=[("Captures", "/captures")],
        lead=lead,
    )


PAGE = Page(
    "/compare", "Comparison", "A capture held against another one, as `traceloom diff` does it.", compute, content
)
