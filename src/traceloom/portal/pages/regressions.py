"""The kernels that became slower or faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traceloom.collect.questions.catalogue import EVERY_CHANGE
from traceloom.fleet.regressions import MIX
from traceloom.model import units
from traceloom.portal.asking import PageAnswer, ask, asking_form, to_page
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageTable
from traceloom.portal.visit import Address, Visit

COLUMNS = (
    "kernel", "shapes", "change", "low", "high", "since_ns", "before_ns", "after_ns", "extra_ns", "jobs_after", "cause",
)  # fmt: skip
_HOW = {
    "code": "with another version of the program or of PyTorch",
    "host": "on other hosts",
    "device": "as other models of device do more of its work",
    "shapes": "as larger or smaller shapes have more of its work",
    "unknown": "for no cause that is recorded",
}


async def compute(visit: Visit) -> PageAnswer:
    """Ask for them."""
    return await ask(visit, "regressions", top=str(EVERY_CHANGE.top))


def to_change(address: Address, row: Mapping[str, Any]) -> str:
    """The page of a change, about the same time and filters."""
    names = {name: str(row[name]) for name in ("shapes", "device_model") if row[name] is not None}
    return to_page("/regressions/change", address, kernel=str(row["kernel"]), at=str(row["since_ns"]), **names)


def times(change: float) -> str:
    """A change in words: `9.1× as long`, `26.0 % longer`, `50.0 % shorter`."""
    if change >= 1:
        return f"{1 + change:.1f}× as long"
    return f"{units.per_cent(abs(change))} % {'longer' if change > 0 else 'shorter'}"


def sentence(row: Mapping[str, Any]) -> str:
    """What changed and why, as far as it is known."""
    certain = {"shown": "", "possible": " (possible: no job can tell)", "none": ""}[row["evidence"]]
    return f"takes {times(row['change'])}, {_HOW[row['cause']]}{certain}"


def content(asked: PageAnswer) -> PageContent:
    """What is shown of them."""
    asking = asking_form(asked.address)
    rows = asked.tables["changes"]
    slower = [row for row in rows if row["change"] > 0 and row["cause"] not in MIX]
    faster = [row for row in rows if row["change"] <= 0 and row["cause"] not in MIX]
    mixed = [row for row in rows if row["cause"] in MIX]
    links = {
        "kernel": lambda row: to_change(asked.address, row),
        "jobs_after": lambda row: to_change(asked.address, row) + "#jobs",
    }
    columns = asked.columns("changes", COLUMNS, links)
    series, short = asked.fact("series"), asked.fact("short")
    looked = f"{units.count(series)} kernels with their shapes and devices were looked at"
    empty = (
        f"No kernel became slower by more than chance explains: {looked}, of which {units.count(short)} ran in fewer "
        "than ten jobs. Ask for more time to look at more jobs."
    )
    sections = [
        ContentSection(
            "slower", "Slower", PageTable("slower-changes", "Kernels that became slower", columns, slower, empty),
            "what costs most GPU time first",
        )
    ]  # fmt: skip
    for key, title, of, note in (
        ("mixed", "Another mix", mixed, "each piece of work takes as long as before, but longer ones became more"),
        ("faster", "Faster", faster, ""),
    ):
        if of:
            sections.append(ContentSection(key, title, PageTable(f"{key}-changes", title, columns, of), note))
    costs = sum(row["extra_ns"] for row in slower)
    numbers = [
        KeyNumber(
            "Slower",
            units.count(len({row["kernel"] for row in slower})),
            "kernels",
            "bad" if slower else "",
            "#slower-part",
        ),
        KeyNumber("Cost", units.duration(costs), "GPU time in captures beyond before"),
        KeyNumber(
            "Faster",
            units.count(len({row["kernel"] for row in faster})),
            "kernels",
            leads="#faster-part" if faster else "",
        ),
        KeyNumber("Looked at", units.count(series - short), f"series; {units.count(short)} have too few jobs"),
    ]
    heading = "No kernel became slower"
    if slower:
        heading = f"{slower[0]['kernel']} takes {times(slower[0]['change'])} now"
    return PageContent(heading, sections, numbers=numbers, asking=asking)


PAGE = Page(
    "/regressions", "Regressions", "Kernels that became slower or faster: since when, by how much, with its interval, "
    "what changed with them, and what that costs.", compute, content, menu="Understand",
)  # fmt: skip
