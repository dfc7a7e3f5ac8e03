"""The kernels that take most of the fleet's GPU time."""

from __future__ import annotations

from traceloom.model import units
from traceloom.portal.asking import PageAnswer, ask, asking_form, choice, nothing, to_page
from traceloom.portal.links import to_capture
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageTable
from traceloom.portal.visit import Visit

MOST = "500"
_SORTS = {"time": "by GPU time", "cycles": "by cycles"}
_COLUMNS = (
    "kernel", "kind", "total_ns", "fraction", "mean_ns", "count", "roofline_ns", "cycles", "shapes", "captures", "jobs",
    "example",
)  # fmt: skip


async def compute(visit: Visit) -> PageAnswer:
    """Ask for them."""
    return await ask(visit, "kernels", top=MOST)


def content(asked: PageAnswer) -> PageContent:
    """What is shown of them."""
    asking = asking_form(asked.address, extra=choice(asked.address, "sort", _SORTS, "time", "Order"))
    rows, total = asked.tables["rows"], asked.fact("total_ns")
    links = {
        "kernel": lambda row: to_page("/kernels/history", asked.address, kernel=str(row["kernel"])),
        "jobs": lambda row: to_page("/kernels/history", asked.address, kernel=str(row["kernel"])) + "#jobs",
        "shapes": lambda row: to_page("/kernels/history", asked.address, kernel=str(row["kernel"])) + "#shapes",
        "example": lambda row: to_capture(str(row["example"])),
    }
    known_clock = any(row["cycles"] is not None for row in rows)
    names = [name for name in _COLUMNS if name != "cycles" or known_clock]
    table = PageTable("rows", "Kernels, most first", asked.columns("rows", names, links), rows, nothing("GPU work"))
    if not rows:
        return PageContent("Kernels", [ContentSection("kernels", "Kernels", table)], asking=asking)
    first = rows[0]
    known = sum(row["roofline_known_ns"] for row in rows)
    numbers = [
        KeyNumber("GPU time", units.duration(total), "in captures of this time"),
        KeyNumber("Largest", units.share(first["fraction"], 1.0), first["kernel"]),
        KeyNumber("Ten largest", units.share(sum(row["fraction"] for row in rows[:10]), 1.0), "of the GPU time"),
        KeyNumber("Modelled", units.share(known, total), "of the GPU time has a time at the peaks"),
    ]
    heading = f"{first['kernel']} takes {units.share(first['fraction'], 1.0)} of the GPU time"
    return PageContent(heading, [ContentSection("kernels", "Kernels", table)], numbers=numbers, asking=asking)


PAGE = Page(
    "/kernels", "Kernels", "The kernels that take most GPU time: how long each piece of work takes, at the peaks of "
    "the device too, in how many shapes, captures and jobs.", compute, content, menu="Understand",
)  # fmt: skip
