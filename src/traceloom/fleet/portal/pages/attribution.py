"""Whose the time of devices was: by any dimensions in any order, drilled down, and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from htpy import Node, a, div, fragment, li, ol, span

from traceloom.fleet.analyses.attribution import BY, UNATTRIBUTED
from traceloom.fleet.portal.asking import PageAnswer, ask, asking_form, choice, nothing
from traceloom.fleet.portal.charts import DAY_NS, HOUR_NS, ChartColumn, TreeBox, columns, icicle, legend
from traceloom.fleet.portal.page import ContentSection, KeyNumber, Page, PageContent, to_host, to_job
from traceloom.fleet.portal.page_request import Address, Visit
from traceloom.fleet.portal.tables import PageColumn, PageRow, PageTable
from traceloom.server.problem import RequestError
from traceloom.system import units

DEFAULT = "division,product,user"
MOST_DIMENSIONS = 6
LOOKS = {"busy_ms": "compute", "idle_ms": "communication", "unallocated_ms": "idle", "unreachable_ms": "blocking"}
"""Part of device time -> its colour group."""

_WORDS = {"busy_ms": "Busy", "idle_ms": "Held, idle", "unallocated_ms": "Free", "unreachable_ms": "Unreachable"}
_THIN = 0.002  # boxes narrower than this share of the whole are left out of the picture
_TOP = {"10": "10 largest parts", "20": "20 largest parts", "50": "50 largest parts", "100": "100 largest parts"}
Values = tuple[str, ...]
"""Of dimensions, outermost first: a part of device time."""


@dataclass(frozen=True)
class TimeView:
    """What the page shows. `at`: the part that is looked into, its values outermost first."""

    at: Values
    whole: PageAnswer
    over: PageAnswer
    every_ns: int

    @property
    def by(self) -> tuple[str, ...]:
        """The dimensions, outermost first."""
        return tuple(self.whole.fact("by"))


async def compute(visit: Visit) -> TimeView:
    """Ask for the tree, and for the same over time.

    Raises:
        RequestError: `wrong-request`: the address names no part.
    """
    by = visit.address.query.get("by", DEFAULT)
    try:
        at = msgspec.json.decode(visit.address.query.get("at", "[]"), type=Values)
    except msgspec.MsgspecError as error:
        raise RequestError(400, f"`at` names no part of device time: {error}", slug="wrong-request") from error
    whole = await ask(visit, "attribution", by=by)
    every = "hour" if whole.fact("until_ns") - whole.fact("since_ns") <= 3 * DAY_NS else "day"
    over = await ask(visit, "attribution", by=by, over=every)
    return TimeView(at, whole, over, HOUR_NS if every == "hour" else DAY_NS)


def content(view: TimeView) -> PageContent:
    """What is shown of it."""
    asking = fragment[
        _order(view.whole.address, view.by),
        asking_form(
            view.whole.address, extra=choice(view.whole.address, "top", _TOP, "20", "Parts"), keep=("by", "at")
        ),
    ]
    address, rows = view.whole.address, view.whole.tables["rows"]
    tree = {tuple(row["values"]): row for row in rows}
    chosen = tree.get(view.at)
    if not rows or chosen is None or not chosen["device_ms"]:
        empty = div(".empty", id="of-part")[nothing("device time")]
        return PageContent(
            "Device time", [ContentSection("divided", "Parts", empty)], above=_above(view, address), asking=asking
        )
    depth = len(view.at)
    parts = [row for row in rows if len(row["values"]) == depth + 1 and tuple(row["values"][:depth]) == view.at]
    every = "day" if view.every_ns == DAY_NS else "hour"
    sections = [
        ContentSection(
            "tree",
            "At a glance",
            _picture(view, tree),
            "as wide as the device time; the line: jobs compute",
        ),
        ContentSection("over", "Over time", _over(view), f"device hours by {every}, UTC"),
    ]
    if parts:
        dimension = _words(view.by[depth])
        sections.append(ContentSection("divided", f"By {dimension}", _table(view, parts, chosen)))
    heading = f"{view.at[-1]}: " if view.at else ""
    heading += f"{_hours(chosen['device_ms'])} device hours"
    if held := chosen["busy_ms"] + chosen["idle_ms"]:
        heading += f"; jobs that held them computed {units.share(chosen['busy_ms'], held)} of the time"
    else:
        heading += " that no job held"
    return PageContent(
        heading, sections, above=_above(view, address), numbers=_numbers(view, chosen), asking=asking,
        lead=[a(href="/owners")["Rules"], f" say whose a job is; what nobody says is {UNATTRIBUTED}."],
    )  # fmt: skip


def _numbers(view: TimeView, chosen: Mapping[str, Any]) -> list[KeyNumber]:
    numbers = [
        KeyNumber(words, units.share(chosen[name], chosen["device_ms"]), f"{_hours(chosen[name])} device hours")
        for name, words in _WORDS.items()
    ]
    if chosen["cost"] is not None:
        priced = units.share(chosen["cost_known_ms"], chosen["device_ms"])
        cost = f"{units.number(chosen['cost'])} {view.whole.fact('currency') or ''}"
        numbers.append(KeyNumber("Cost", cost, f"of {priced} of the time"))
    if chosen["energy_mj"] is not None:
        measured = units.share(chosen["energy_known_ms"], chosen["device_ms"])
        kwh = chosen["energy_mj"] / 3.6e9
        numbers.append(KeyNumber("Energy", f"{units.number(kwh)} kWh", f"of {measured} of the time"))
    return numbers


def _picture(view: TimeView, tree: Mapping[Values, Mapping[str, Any]]) -> Node:
    """The way to the part over the whole width, and below it what it holds."""
    depth = len(view.at)
    whole = tree[view.at]["device_ms"]
    boxes = [_box(view, tree[view.at[:level]], level, 0.0, 1.0) for level in range(depth + 1)]
    starts: dict[Values, float] = {view.at: 0.0}
    for values, row in tree.items():
        if len(values) <= depth or values[:depth] != view.at or values[:-1] not in starts:
            continue
        start, size = starts[values[:-1]], row["device_ms"] / whole
        starts[values] = start
        starts[values[:-1]] = start + size
        if size >= _THIN:
            boxes.append(_box(view, row, len(values), start, size))
    label = f"Device time by {', then '.join(map(_words, view.by))}"
    entries = [(words, LOOKS[name], "") for name, words in _WORDS.items() if tree[view.at][name]]
    return fragment[icicle(boxes, label), legend(entries)]


def _box(view: TimeView, row: Mapping[str, Any], level: int, start: float, size: float) -> TreeBox:
    values = tuple(row["values"])
    hours = f"{_hours(row['device_ms'])} h"
    held = row["busy_ms"] + row["idle_ms"]
    use = f", {units.share(row['busy_ms'], held)} of those held compute" if held else ""
    name = values[-1] if values else "All devices"
    largest = max(LOOKS, key=lambda part: row[part])
    look = "compute" if held else LOOKS[largest]
    return TreeBox(
        level, start, size, name, f"{name}: {hours}{use}", hours, row["busy_ms"] / row["device_ms"] if held else 1.0,
        look, to_part(view.whole.address, values), here=values == view.at,
    )  # fmt: skip


def _over(view: TimeView) -> Node:
    shown = [row for row in view.over.tables["rows"] if tuple(row["values"]) == view.at]
    stretches = [
        ChartColumn(
            row["time_ns"], [(LOOKS[name], row[name] / 3.6e6) for name in LOOKS],
            ", ".join(f"{_WORDS[name].lower()} {_hours(row[name])} h" for name in LOOKS if row[name]),
        )
        for row in shown
    ]  # fmt: skip
    name = view.at[-1] if view.at else "all devices"
    entries = [(words, LOOKS[name], "") for name, words in _WORDS.items() if any(row[name] for row in shown)]
    picture = columns(stretches, view.every_ns, label=f"Device hours of {name} over time", write=units.number)
    return fragment[picture, legend(entries)]


def _table(view: TimeView, parts: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> PageTable:
    depth = len(view.at)
    dimension = view.by[depth]
    rows: list[PageRow] = [
        {
            "part": row["values"][-1], "hours": row["device_ms"] / 3.6e6,
            "share": row["device_ms"] / chosen["device_ms"],
            "use": row["busy_ms"] / held if (held := row["busy_ms"] + row["idle_ms"]) else None,
            "idle": row["idle_ms"] / 3.6e6, "energy": None if row["energy_mj"] is None else row["energy_mj"] / 3.6e9,
            "cost": row["cost"], "about": "about it",
        }
        for row in parts
    ]  # fmt: skip
    shown = [
        PageColumn("part", _words(dimension).capitalize(), "name",
                   link=lambda row: to_part(view.whole.address, (*view.at, str(row["part"])))),
        PageColumn("hours", "Device hours", "number", "hours of devices, whatever they did"),
        PageColumn("share", "Share", "share", "of the part above"),
        PageColumn("use", "Use", "share", "share of the time that jobs held in which they computed",
                   "no job held devices"),
        PageColumn("idle", "Held, idle, h", "number", "hours in which a job held the device, and nothing ran"),
        PageColumn("energy", "Energy, kWh", "number", "what was measured", "no device measures it"),
        PageColumn("cost", f"Cost, {view.whole.fact('currency')}", "number", "at the prices", "it has no price")
        if view.whole.fact("currency")
        else None,
    ]  # fmt: skip
    if dimension in {"job", "host"}:
        lead = to_job if dimension == "job" else to_host
        shown.append(PageColumn("about", "", link=lambda row: lead(str(row["part"]))))
    return PageTable("of-part", f"Device time by {_words(dimension)}", list(filter(None, shown)), rows)


def to_part(address: Address, values: Values) -> str:
    """The page of a part of device time."""
    return address.changed({"at": msgspec.json.encode(values).decode() if values else "", "of-part.leaf": ""})


def _above(view: TimeView, address: Address) -> list[tuple[str, str]]:
    if not view.at:
        return []
    return [
        ("All devices", to_part(address, ())),
        *((value, to_part(address, view.at[: at + 1])) for at, value in enumerate(view.at[:-1])),
    ]


def _order(address: Address, by: Sequence[str]) -> Node:
    """The dimensions, each with ways to move it out, or to drop it; and those that can be added."""

    def to(names: Sequence[str]) -> str:
        return address.changed({"by": ",".join(names), "at": "", "of-part.leaf": ""})

    chips = []
    for at, name in enumerate(by):
        outer = [*by[: at - 1], name, by[at - 1], *by[at + 1 :]] if at else None
        rest = [other for other in by if other != name]
        chips.append(
            li(".chip")[
                a(href=to(outer), title=f"{_words(name)} before {_words(by[at - 1])}", aria_label=f"{name} outer")["‹"]
                if outer
                else None,
                _words(name),
                a(href=to(rest), title=f"Do not divide by {_words(name)}", aria_label=f"Drop {name}")["×"]
                if rest
                else None,
            ]
        )  # fmt: skip
    more = [name for name in BY if name not in by] if len(by) < MOST_DIMENSIONS else []
    return div(".order")[
        span(".quiet")["Divided by"],
        ol[chips],
        span(".quiet")["then by"] if more else None,
        div(".more")[(a(href=to((*by, name)))[_words(name)] for name in more)],
    ]


def _words(name: str) -> str:
    return {"device_model": "model of device", "application": "sort of work"}.get(name, name)


def _hours(ms: float) -> str:
    return units.number(ms / 3.6e6)


PAGE = Page(
    "/attribution", "Device time", "Whose the time of devices was, by division, product, user, job, host or device, in "
    "any order, drilled down and over time; with energy and cost. All levels have the same sum.",
    compute, content, menu="Account",
)  # fmt: skip
