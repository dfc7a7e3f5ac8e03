"""Where the fleet's GPU time goes, and what specialising kernels for common shapes would cover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from traceloom.model import units
from traceloom.portal.asking import PageAnswer, ask, asking_form, choice, nothing, to_page
from traceloom.portal.charts import share_bar
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit

NAMES = {
    "kind": "kind of work", "bound": "what bounds it", "device_model": "device", "kernel": "kernel", "op": "operator",
    "rank": "rank", "job": "job", "torch": "PyTorch", "code": "version", "division": "division", "product": "product",
    "application": "sort of work", "model": "model", "user": "user", "framework": "framework",
}  # fmt: skip
"""What GPU time is divided by, in the order of the form -> in words."""

_LOOKS = ("compute", "communication", "memory", "annotation", "forward", "launch", "optimizer", "op", "python", "other")
_LED = frozenset({"job", "user", "division", "product", "model", "framework", "device_model"})
"""Dimensions that are filters of all questions."""

_COVERED = ("number", "kernel", "shapes", "total_ns", "fraction", "covered_fraction")


@dataclass(frozen=True)
class WorkView:
    """What the page shows."""

    divided: PageAnswer
    coverage: PageAnswer


async def compute(visit: Visit) -> WorkView:
    """Ask both questions."""
    return WorkView(await ask(visit, "characterise", top="500"), await ask(visit, "coverage", top="200"))


def content(view: WorkView) -> PageContent:
    """What is shown of it."""
    asking = asking_form(view.divided.address, extra=choice(view.divided.address, "by", BY_CHOICES, "kind", "By"))
    asked = view.divided
    by, rows = asked.fact("by"), asked.tables["rows"]
    columns = [
        *(PageColumn(name, NAMES[name].capitalize(), "name", link=_leads(asked, name)) for name in by),
        *asked.columns("rows", ("total_ns", "fraction", "count", "captures")),
    ]
    words = ", then ".join(NAMES[name] for name in by)
    table = PageTable("rows", f"GPU time by {words}", columns, rows, nothing("GPU work"))
    sections: list[ContentSection] = []
    numbers: list[KeyNumber] = []
    heading = "GPU time"
    if rows:
        total = sum(row["total_ns"] for row in rows)
        head, rest = rows[: len(_LOOKS) - 1], rows[len(_LOOKS) - 1 :]
        parts = [(_name(row, by), look, float(row["total_ns"])) for look, row in zip(_LOOKS, head, strict=False)]
        if rest:
            parts.append((f"{units.count(len(rest))} others", _LOOKS[-1], float(sum(row["total_ns"] for row in rest))))
        picture = share_bar(parts, lambda ns: units.share(ns, total), f"GPU time by {words}")
        sections.append(ContentSection("glance", "At a glance", picture))
        heading = f"{_name(rows[0], by)} makes up {units.share(rows[0]['fraction'], 1.0)} of the GPU time"
        needed = next((row["number"] for row in view.coverage.tables["rows"] if row["covered_fraction"] >= 0.5), None)
        unshaped = view.coverage.fact("unshaped_ns")
        numbers = [
            KeyNumber("GPU time", units.duration(total), "in captures of this time"),
            KeyNumber("Parts", units.count(len(rows)), f"by {words}"),
            KeyNumber("Half of it", "–" if needed is None else units.count(needed), "shapes of kernels make up half"),
            KeyNumber("Without shapes", units.share(unshaped, view.coverage.fact("total_ns")), "of the GPU time"),
        ]
    covered = PageTable(
        "covered", "Kernels with their shapes, the longest first",
        view.coverage.columns(
            "rows", _COVERED,
            {"kernel": lambda row: to_page("/kernels/history", asked.address, kernel=str(row["kernel"]),
                                           shapes=str(row["shapes"]))},
        ),
        view.coverage.tables["rows"], "No shapes were recorded.",
    )  # fmt: skip
    sections += [
        ContentSection("divided", f"By {words}", table),
        ContentSection("coverage", "Common shapes", covered, "what specialising kernels for the commonest would cover"),
    ]
    return PageContent(heading, sections, numbers=numbers, asking=asking)


def _name(row: PageRow, by: list[str]) -> str:
    return " · ".join(str(row[name]) for name in by)


def _leads(asked: PageAnswer, name: str) -> Callable[[PageRow], str] | None:
    if name == "kernel":
        return lambda row: to_page("/kernels/history", asked.address, kernel=str(row["kernel"]))
    if name == "kind":
        return lambda row: to_page("/kernels", asked.address, **{"rows.q": str(row["kind"])})
    if name in _LED:
        return lambda row: to_page("/kernels", asked.address, **{name: str(row[name])})
    return None


BY_CHOICES = {
    **{name: f"by {words}" for name, words in NAMES.items()},
    "kind,bound": "by kind and bound", "bound,kind": "by bound and kind", "division,kind": "by division and kind",
    "model,kind": "by model and kind", "framework,kind": "by framework and kind",
}  # fmt: skip
PAGE = Page(
    "/gpu-time", "GPU time", "Where GPU time goes, by kind of work, what bounds it, device, version or whose it is; "
    "and what specialising kernels for the commonest shapes would cover.",
    compute, content, menu="Understand",
)  # fmt: skip
