"""Who did what, and who was refused."""

from __future__ import annotations

from traceloom.collect.answers import AuditAnswer
from traceloom.portal.page import ContentSection, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit
from traceloom.store.state import AuditEntry

COLUMNS = (
    PageColumn("at_ns", "When", "instant"),
    PageColumn("who", "Who", unknown="nobody who is known"),
    PageColumn("what", "What", "name"),
    PageColumn("result", "Result", "state", "done, or the name of the refusal"),
    PageColumn("details", "Details", unknown="there are none"),
)


async def compute(visit: Visit) -> list[AuditEntry]:
    """The last lines, newest first."""
    return (await visit.answer(AuditAnswer, "/api/v1/audit")).entries


def content(entries: list[AuditEntry]) -> PageContent:
    """What is shown of them."""
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
    table = PageTable("audit", "The audit", COLUMNS, rows)
    lead = "The last thousand lines. The database lets everybody only add to them."
    return PageContent("Audit", [ContentSection("audit", "Newest first", table)], lead=lead)


PAGE = Page(
    "/audit",
    "Audit",
    "Who did what, and who was refused, newest first.",
    compute,
    content,
    role="admin",
    menu="Administration",
)
