"""Pages made of the questions' declarations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from htpy import Node, div, p
from markupsafe import Markup

from traceloom.fleet.analyses.anomalies import FAR, LEAST_PEERS
from traceloom.fleet.analyses.efficiency import METRICS
from traceloom.fleet.portal.asking import PageAnswer, ask, asking_form, choice, nothing, to_page
from traceloom.fleet.portal.charts import share_bar
from traceloom.fleet.portal.page import ContentSection, KeyNumber, Page, PageContent, to_capture, to_host, to_job
from traceloom.fleet.portal.page_request import Visit
from traceloom.fleet.portal.pages import admin, attribution, kernel
from traceloom.fleet.portal.tables import PageColumn, PageRow, PageTable
from traceloom.system import units

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


async def compute_characterise(visit: Visit) -> WorkView:
    """Ask both questions."""
    return WorkView(await ask(visit, "characterise", top="500"), await ask(visit, "coverage", top="200"))


def build_characterise_content(view: WorkView) -> PageContent:
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
CHARACTERISE_PAGE = Page(
    "/gpu-time", "GPU time", "Where GPU time goes, by kind of work, what bounds it, device, version or whose it is; "
    "and what specialising kernels for the commonest shapes would cover.",
    compute_characterise, build_characterise_content, menu="Understand",
)  # fmt: skip

INVEST_BY = {
    "rule": "by rule", "rule,model": "by rule and model", "model": "by model", "model,rule": "by model and rule",
    "division": "by division", "user": "by user", "job": "by job", "job,rule": "by job and rule",
}  # fmt: skip


@dataclass(frozen=True)
class SavingsView:
    """What the page shows."""

    savings: PageAnswer
    findings: PageAnswer


async def compute_invest(visit: Visit) -> SavingsView:
    """Ask both questions."""
    return SavingsView(await ask(visit, "invest", top="1000"), await ask(visit, "findings", top="1000"))


def build_invest_content(view: SavingsView) -> PageContent:
    """What is shown of it."""
    asking = asking_form(view.savings.address, extra=choice(view.savings.address, "by", INVEST_BY, "rule", "By"))
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
    words = INVEST_BY.get(",".join(by), ", ".join(by))
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
        ContentSection("rules", "Findings", findings, f"in {units.count_of(found.fact('captures'), 'capture')}"),
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


INVEST_PAGE = Page(
    "/invest", "Where to invest", "Where work on software pays: device time times what fixing findings saves; and how "
    "common each finding is.", compute_invest, build_invest_content, menu="Account",
)  # fmt: skip

MOST = "500"
_SORTS = {"time": "by GPU time", "cycles": "by cycles"}
_COLUMNS = (
    "kernel", "kind", "total_ns", "fraction", "mean_ns", "count", "roofline_ns", "cycles", "shapes", "captures", "jobs",
    "example",
)  # fmt: skip


async def compute_kernels(visit: Visit) -> PageAnswer:
    """Ask for them."""
    return await ask(visit, "kernels", top=MOST)


def build_kernels_content(asked: PageAnswer) -> PageContent:
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


KERNELS_PAGE = Page(
    "/kernels", "Kernels", "The kernels that take most GPU time: how long each piece of work takes, at the peaks of "
    "the device too, in how many shapes, captures and jobs.", compute_kernels, build_kernels_content, menu="Understand",
)  # fmt: skip

_MARK = PageColumn("mark", "Outlier", "state", f"z of {FAR} or more, and slower by 5 % at least")


async def compute_outliers(visit: Visit) -> PageAnswer:
    """Ask for them."""
    return await ask(visit, "outliers", top="1000")


def build_outliers_content(asked: PageAnswer) -> PageContent:
    """What is shown of them."""
    asking = asking_form(asked.address)
    sections, slow = [], {}
    for table, title, like, names, links, note in (
        ("hosts", "Hosts", "that ran the same kernels on the same shapes and devices",
         ("device_model", "ratio", "z", "kernels", "jobs"),
         {"jobs": lambda row: to_page("/kernels", asked.address, host=str(row["host"]))},
         "against hosts that ran the same kernels"),
        ("ranks", "Ranks", "in a capture", ("rank", "host", "ratio", "z", "captures"),
         {"host": lambda row: to_host(str(row["host"]))}, "against the ranks of their job"),
    ):  # fmt: skip
        rows = [{**row, "mark": "slow" if row["outlier"] else "like its peers"} for row in asked.tables[table]]
        slow[table] = [row for row in rows if row["mark"] == "slow"]
        first = "host" if table == "hosts" else "job"
        lead = {
            first: (lambda row: to_host(str(row["host"])))
            if table == "hosts"
            else (lambda row: to_job(str(row["job"])))
        }
        columns = [*asked.columns(table, (first,), lead), _MARK, *asked.columns(table, names, links)]
        empty = f"No {table} are compared: it takes {LEAST_PEERS} {like} at least. Ask for more time, or drop a filter."
        sections.append(ContentSection(f"of-{table}", title, PageTable(table, title, columns, rows, empty), note))
    hosts = slow["hosts"]
    heading = "No host is slower than its peers"
    if hosts:
        heading = f"{hosts[0]['host']} takes {units.per_cent(hosts[0]['ratio'] - 1)} % longer than its peers"
    numbers = [
        KeyNumber("Slow hosts", units.count(len(hosts)), f"of {units.count(len(asked.tables['hosts']))} compared",
                  "bad" if hosts else "", "#of-hosts-part"),
        KeyNumber("Slow ranks", units.count(len(slow["ranks"])),
                  f"of {units.count(len(asked.tables['ranks']))} compared", "bad" if slow["ranks"] else "",
                  "#of-ranks-part"),
    ]  # fmt: skip
    return PageContent(heading, sections, numbers=numbers, asking=asking)


OUTLIERS_PAGE = Page(
    "/outliers", "Outliers", "Hosts and ranks that are slower than their peers, with how far they are from them.",
    compute_outliers, build_outliers_content, menu="Understand",
)  # fmt: skip

BY = {
    "model": "by model", "division": "by division", "product": "by product", "user": "by user",
    "framework": "by framework", "job": "by job", "host": "by host", "device_model": "by device",
}  # fmt: skip
_SHORT = {
    "device_use": "Device use", "flop_rate": "FLOP/s", "compute_use": "Compute use", "power_w": "Power, W",
    "roofline_fraction": "Roofline", "mfu": "MFU", "reference_hours_per_byte": "Reference h per byte",
}  # fmt: skip
_CELL = 46


@dataclass(frozen=True)
class ToplineView:
    """What the page shows: everything in one row, and divided."""

    whole: PageAnswer
    divided: PageAnswer
    by: str


async def compute_topline(visit: Visit) -> ToplineView:
    """Ask twice."""
    by = visit.address.query.get("by", "model")
    return ToplineView(await ask(visit, "topline", by=""), await ask(visit, "topline", by=by, top="1000"), by)


def build_topline_content(view: ToplineView) -> PageContent:
    """What is shown of it."""
    asking = asking_form(view.divided.address, extra=choice(view.divided.address, "by", BY, "model", "By"))
    rows = view.divided.tables["rows"]
    of_rows = view.divided.question.tables["rows"].columns

    def lead(row: PageRow) -> str:
        value = str(row[view.by])
        if view.by in {"job", "host"}:
            return to_job(value) if view.by == "job" else to_host(value)
        return to_page("/topline", view.divided.address, by="job", **{view.by: value})

    columns = [
        PageColumn(view.by, view.by.replace("_", " ").capitalize(), "name", link=lead if view.by else None),
        *view.divided.columns("rows", ("device_hours",)),
        *(
            PageColumn(name, _SHORT[name], of_rows[name].unit, of_rows[name].meaning, of_rows[name].unknown)
            for name in METRICS
        ),
    ]
    table = PageTable("rows", f"The topline {BY.get(view.by, '')}", columns, rows, nothing("device time"))
    strongest: list[PageRow] = [
        {**row, "first": _SHORT[row["first"]], "second": _SHORT[row["second"]]}
        for row in sorted(view.whole.tables["correlations"], key=lambda row: -abs(row["correlation"] or 0.0))
    ]
    pairs = PageTable(
        "correlations", "Pairs of numbers",
        view.whole.columns("correlations", ("first", "second", "correlation", "jobs")), strongest,
    )  # fmt: skip
    sections = [
        ContentSection("divided", BY.get(view.by, "Parts").capitalize(), table, "the most device time first"),
        ContentSection("together", "What goes together", _correlations(view.whole), "rank correlation over jobs"),
        ContentSection("pairs", "The same as a table", pairs, "the strongest first"),
    ]
    whole = view.whole.tables["rows"][0] if view.whole.tables["rows"] else None
    if not rows or whole is None or whole["device_use"] is None:
        return PageContent("The topline", sections[:1], asking=asking)
    numbers = [
        KeyNumber(_SHORT[name], units.format_value(whole[name], of_rows[name].unit), of_rows[name].meaning)
        for name in METRICS
        if whole[name] is not None and name != "reference_hours_per_byte"
    ]
    heading = (
        f"Devices that jobs hold compute {units.share(whole['device_use'], 1.0)} of the time"
        if whole["compute_use"] is None
        else f"Devices that jobs hold compute {units.share(whole['device_use'], 1.0)} of the time, at "
        f"{units.share(whole['compute_use'], 1.0)} of their peak at least"
    )
    lead_text = (
        "None of these numbers says enough alone: a device can be busy and compute nothing, draw power and wait, reach "
        "its FLOP/s on work that is thrown away."
    )
    return PageContent(heading, sections, lead=lead_text, numbers=numbers, asking=asking)


def _correlations(asked: PageAnswer) -> Node:
    """A triangle of coloured fields, one for each pair."""
    pairs = {(row["first"], row["second"]): row for row in asked.tables["correlations"]}
    names = [name for name in METRICS if any(name in pair for pair in pairs)]
    if not pairs or all(row["correlation"] is None for row in pairs.values()):
        return div(".empty")[p["Fewer than ten jobs have two of the numbers: nothing is said of how they go together."]]
    cells = Markup("")
    left = 170
    for down, second in enumerate(names[1:]):
        y = down * _CELL
        cells += Markup('<text class="side" x="{}" y="{}" text-anchor="end">{}</text>').format(
            left - 12, y + _CELL / 2 + 4, _SHORT[second]
        )
        for across, first in enumerate(names[: down + 1]):
            row = pairs.get((first, second)) or pairs.get((second, first))
            value = None if row is None else row["correlation"]
            x = left + across * 2 * _CELL
            says = f"{_SHORT[first]} and {_SHORT[second]}: "
            says += "not known" if value is None else f"{value:+.2f} over {units.count_of(row['jobs'], 'job')}"  # type: ignore[index]
            look = "none" if value is None else "with" if value > 0 else "against"
            cells += Markup(
                '<g class="pair {}"><title>{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="5" '
                'fill-opacity="{:.2f}"/><text x="{}" y="{}" text-anchor="middle">{}</text></g>'
            ).format(
                look, says, x, y + 2, 2 * _CELL - 4, _CELL - 4, 0.08 + 0.72 * abs(value or 0.0), x + _CELL - 2,
                y + _CELL / 2 + 4, "–" if value is None else f"{value:+.2f}",
            )  # fmt: skip
    foot = Markup("").join(
        Markup('<text class="side" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            left + at * 2 * _CELL + _CELL - 2, (len(names) - 1) * _CELL + 18, _SHORT[name]
        )
        for at, name in enumerate(names[:-1])
    )
    width, height = left + (len(names) - 1) * 2 * _CELL, (len(names) - 1) * _CELL + 28
    picture = Markup(
        '<svg class="pairs" role="img" aria-label="Rank correlations of pairs of numbers over jobs" width="{}" '
        'height="{}">{}{}</svg>'
    ).format(width, height, cells, foot)
    return div(".scroll", tabindex="0", role="region", aria_label="Correlations")[picture]


TOPLINE_PAGE = Page(
    "/topline", "Topline", "What jobs, models, hosts or the whole fleet get out of their devices: use, FLOP/s, power, "
    "roofline, MFU, reference hours; and how these go together.", compute_topline, build_topline_content, menu="Account",
)  # fmt: skip

QUESTION_PAGES: tuple[Page[Any], ...] = (
    kernel.REGRESSIONS_PAGE, kernel.REGRESSION_PAGE, KERNELS_PAGE, kernel.KERNEL_PAGE, CHARACTERISE_PAGE, OUTLIERS_PAGE, kernel.COMPARISON_PAGE,
    attribution.PAGE, TOPLINE_PAGE, INVEST_PAGE, admin.OWNERS_PAGE,
    admin.PRICES_PAGE,
)  # fmt: skip
