"""Where work on software pays, and the findings that it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from traceloom.model import units
from traceloom.portal.asking import PageAnswer, ask, asking_form, choice, nothing, to_page
from traceloom.portal.charts import share_bar
from traceloom.portal.links import to_capture, to_job
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit

BY = {
    "rule": "by rule", "rule,model": "by rule and model", "model": "by model", "model,rule": "by model and rule",
    "division": "by division", "user": "by user", "job": "by job", "job,rule": "by job and rule",
}  # fmt: skip
_LOOKS = ("compute", "communication", "memory", "annotation", "forward", "launch", "optimizer", "op", "python", "other")


@dataclass(frozen=True)
class SavingsView:
    """What the page shows."""

    savings: PageAnswer
    findings: PageAnswer


async def compute(visit: Visit) -> SavingsView:
    """Ask both questions."""
    return SavingsView(await ask(visit, "invest", top="1000"), await ask(visit, "findings", top="1000"))


def content(view: SavingsView) -> PageContent:
    """What is shown of it."""
    asking = asking_form(view.savings.address, extra=choice(view.savings.address, "by", BY, "rule", "By"))
    asked, by = view.savings, view.savings.fact("by")
    rows: list[PageRow] = [
        {**row, "hours": row["saved_ms"] / 3.6e6, **_meaning(row)} for row in asked.tables["rows"]
    ]  # fmt: skip
    held, analysed = asked.fact("held_ms"), asked.fact("analysed_ms")

    def leads(name: str) -> Callable[[PageRow], str]:
        if name == "job":
            return lambda row: to_job(str(row["job"]))
        return lambda row: to_page(
            "/invest", asked.address, by="job,rule", **{"rows.q" if name == "rule" else name: str(row[name])}
        )

    example = {"example": lambda row: to_capture(str(row["example"]))}
    columns = [
        *(PageColumn(name, name.capitalize(), link=leads(name)) for name in by),
        *([PageColumn("meaning", "What it is", hint="as `traceloom explain` has it")] if "rule" in by else []),
        PageColumn("hours", "Saves, device hours", "number", "device hours that fixing would save"),
        *asked.columns("rows", ("jobs", "confidence", "example"), example),
    ]
    words = BY.get(",".join(by), ", ".join(by))
    savings = PageTable(
        "rows", f"What fixing findings would save, {words}", columns, rows, nothing("finding that saves time")
    )
    found = view.findings
    common: list[PageRow] = [{**row, **_meaning(row)} for row in found.tables["rows"]]
    of_rules = [
        *found.columns(
            "rows", ("rule",), {"rule": leads("rule")}
        ),
        PageColumn("meaning", "What it is", hint="as `traceloom explain` has it"),
        *found.columns("rows", ("captures", "fraction", "jobs", "saving_fraction", "confidence", "example"), example),
    ]  # fmt: skip
    findings = PageTable("findings", "Findings by rule", of_rules, common, nothing("finding"))
    sections = [
        ContentSection("savings", words.capitalize(), savings, "the most first"),
        ContentSection("rules", "Findings", findings, f"in {units.counted(found.fact('captures'), 'capture')}"),
    ]
    if not rows:
        return PageContent("Where to invest", sections, asking=asking)
    saved = sum(row["saved_ms"] for row in asked.tables["rows"])
    head = asked.tables["rows"][: len(_LOOKS) - 1]
    parts = [(" · ".join(str(row[name]) for name in by), look, row["saved_ms"] / 3.6e6)
             for look, row in zip(_LOOKS, head, strict=False)]  # fmt: skip
    if rest := sum(row["saved_ms"] for row in asked.tables["rows"][len(head) :]):
        parts.append(("others", _LOOKS[-1], rest / 3.6e6))
    picture = share_bar(
        parts, lambda hours: f"{units.number(hours)} h", f"Device hours that fixing would save, {words}"
    )
    sections.insert(0, ContentSection("glance", "At a glance", picture))
    first = asked.tables["rows"][0]
    numbers = [
        KeyNumber(
            "Could be saved", f"{units.number(saved / 3.6e6)} h", f"{units.share(saved, held)} of the device time"
        ),
        KeyNumber("Held", f"{units.number(held / 3.6e6)} h", "device hours of jobs"),
        KeyNumber("Analysed", units.share(analysed, held), "of them, of jobs that have captures"),
    ]
    name = " · ".join(str(first[name]) for name in by)
    return PageContent(
        f"Fixing {name} would save {units.number(first['saved_ms'] / 3.6e6)} device hours"
        if by == ["rule"]
        else f"{name} could save {units.number(first['saved_ms'] / 3.6e6)} device hours",
        sections, numbers=numbers,
        lead="Device time of a job, times the share of its steps that fixing a finding saves. Findings of a capture "
        "are disjoint, so rules add up; time of jobs without captures is in none of it.", asking=asking)  # fmt: skip


def _meaning(row: PageRow) -> PageRow:
    return {"meaning": _titles().get(str(row["rule"]), "")} if "rule" in row else {}


@cache
def _titles() -> dict[str, str]:
    from traceloom.findings import RULES  # with all analyses, which the service is spared until somebody looks

    return {rule.slug: rule.title for rule in RULES}


PAGE = Page(
    "/invest", "Where to invest", "Where work on software pays: device time times what fixing findings saves; and how "
    "common each finding is.", compute, content, menu="Account",
)  # fmt: skip
