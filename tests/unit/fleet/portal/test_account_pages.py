"""The pages about device time, prices, owners and changes of kernels, drawn from answers written by hand."""

from __future__ import annotations

import csv
import io
import json
from datetime import date
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

from support.html_tree import words
from support.page_contents import EVIL, NOON, SECOND, SPELLED, ContentPage, Shown, answered
from traceloom.fleet.analyses.attribution import UNATTRIBUTED
from traceloom.fleet.handlers.admin import (
    DocumentHistoryResponse,
    DocumentResponse,
    DocumentVersion,
)
from traceloom.fleet.portal import question_pages
from traceloom.fleet.portal.asking import build_page_url
from traceloom.fleet.portal.charts import DAY_NS
from traceloom.fleet.portal.page import PageContent
from traceloom.fleet.portal.page_request import PageUrl
from traceloom.fleet.portal.pages import admin, attribution, kernel
from traceloom.fleet.portal.pages.admin import OwnersView, PricesView
from traceloom.fleet.portal.pages.attribution import AttributionView
from traceloom.fleet.portal.question_pages import SavingsView, ToplineView
from traceloom.fleet.portal.tables import PageTable
from traceloom.fleet.rules import OwnerRule, parse_prices

HOUR_MS = 3_600_000


def table_of(content: PageContent, key: str) -> PageTable:
    [table] = [
        of.content
        for of in content.sections
        if isinstance(of.content, PageTable) and of.content.key == key
    ]
    return table


def part(
    values: list[str], busy: float, idle: float, free: float = 0.0, silent: float = 0.0, **more: Any
) -> dict[str, Any]:
    """A row of device time, from hours."""
    hours = {"busy_ms": busy, "idle_ms": idle, "unallocated_ms": free, "unreachable_ms": silent}
    row: dict[str, Any] = {
        "time_ns": None,
        "values": values,
        **{name: int(of * HOUR_MS) for name, of in hours.items()},
        "device_ms": int(sum(hours.values()) * HOUR_MS),
        "energy_mj": None,
        "cost": None,
        "energy_known_ms": 0,
        "cost_known_ms": 0,
    }
    return {**row, **more}


TREE = [
    part(
        [],
        6,
        2,
        3,
        1,
        cost=24.0,
        cost_known_ms=9 * HOUR_MS,
        energy_mj=int(1.8e10),
        energy_known_ms=6 * HOUR_MS,
    ),
    part(["ads"], 4, 1, cost=15.0, energy_mj=int(3.6e9)),
    part(["ads", "bo/c"], 4, 0),
    part(["ads", "ana"], 0, 1),
    part([EVIL], 2, 1),
    part([EVIL, "ana"], 2, 1),
    part(["free"], 0, 0, 3, 1),
]


def time_page(
    at: tuple[str, ...] = (), query: str = "by=division,user", rows: list[Any] = TREE
) -> AttributionView:
    facts = {"by": ["division", "user"], "currency": "EUR"}
    over = [
        {**part(list(at), 3, 1), "time_ns": NOON - DAY_NS},
        {**part(list(at), 0, 0, 1), "time_ns": NOON},
        {**part(["another"], 9, 9), "time_ns": NOON},
    ]
    return AttributionView(
        at,
        answered("attribution", query, facts, rows=rows),
        answered("attribution", query, facts, rows=over),
        DAY_NS,
    )


def test_device_time_is_divided_and_its_parts_add_up() -> None:
    content = attribution.ATTRIBUTION_PAGE.content(time_page())
    page = ContentPage(content)
    assert page.heading == "12 device hours; jobs that held them computed 75.0 % of the time"
    assert {name: (of.value, of.about) for name, of in page.numbers().items()} == {
        "Busy": ("50.0 %", "6 device hours"),
        "Held, idle": ("16.7 %", "2 device hours"),
        "Free": ("25.0 %", "3 device hours"),
        "Unreachable": ("8.3 %", "1 device hours"),
        "Cost": ("24 EUR", "of 75.0 % of the time"),
        "Energy": ("5 kWh", "of 50.0 % of the time"),
    }
    assert page.column("of-part", "Division") == ["ads", SPELLED, "free"]
    assert page.column("of-part", "Device hours") == ["5", "3", "4"]
    assert page.column("of-part", "Share") == ["41.7 %", "25.0 %", "33.3 %"]
    assert page.column("of-part", "Use") == ["80.0 %", "66.7 %", "–"], (
        "of what nobody held nothing is said"
    )
    assert page.column("of-part", "Energy, kWh") == ["1", "–", "–"]
    rows = json.loads(table_of(content, "of-part").json(PageUrl("/p", "")))
    assert sum(row["hours"] for row in rows) == 12
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def test_each_part_leads_into_itself_and_back() -> None:
    page = ContentPage(attribution.ATTRIBUTION_PAGE.content(time_page()))
    links = page.leads("of-part", "Division")
    assert [json.loads(parse_qs(urlsplit(of).query)["at"][0]) for of in links] == [
        ["ads"],
        [EVIL],
        ["free"],
    ]
    inside = ContentPage(attribution.ATTRIBUTION_PAGE.content(time_page(("ads",))))
    assert inside.heading == "ads: 5 device hours; jobs that held them computed 80.0 % of the time"
    assert inside.column("of-part", "User") == ["bo/c", "ana"]
    assert inside.column("of-part", "Share") == ["80.0 %", "20.0 %"]
    trail = [of.get("href") for of in inside.all("nav")[0].iter("a")]
    assert [parse_qs(urlsplit(str(of)).query).get("at") for of in trail] == [None]
    leaf = ContentPage(attribution.ATTRIBUTION_PAGE.content(time_page(("ads", "bo/c"))))
    assert "of-part" not in leaf.tables(), "it is divided no further"
    assert [words(of) for of in leaf.all("nav")[0].iter("a")] == ["All devices", "ads"]


def test_the_picture_of_device_time_is_to_scale() -> None:
    page = ContentPage(attribution.ATTRIBUTION_PAGE.content(time_page()))
    boxes = [of for of in page.all("svg") if "box" in (of.get("class") or "").split()]
    shown = {words(next(of.iter("b"))): of for of in boxes}
    widths = {name: float(str(of.get("width")).removesuffix("%")) for name, of in shown.items()}
    assert widths["All devices"] == 100
    assert [widths[name] for name in ("ads", SPELLED, "free")] == pytest.approx(
        [500 / 12, 300 / 12, 400 / 12], abs=1e-3
    )
    starts = {name: float(str(of.get("x")).removesuffix("%")) for name, of in shown.items()}
    assert starts["ads"] == starts["bo/c"] == 0
    assert starts["free"] == pytest.approx(800 / 12, abs=1e-3)
    dark = {words(next(of.iter("b"))): of.findall("rect")[1].get("width") for of in boxes}
    assert dark["ads"] == "80.0%"
    assert dark["All devices"] == "50.0%"
    titles = [words(of) for of in page.by_id("over-part").iter("title")]
    assert titles == ["busy 3 h, held, idle 1 h", "free 1 h"], "the part of the page, not another's"


def test_time_of_which_nothing_is_known_says_what_to_do() -> None:
    for view in (time_page(rows=[]), time_page(("nobody",))):
        page = ContentPage(attribution.ATTRIBUTION_PAGE.content(view))
        assert page.heading == "Device time"
        assert page.numbers() == {}
        assert "drop a filter" in words(page.by_id("of-part"))
    unheld = ContentPage(attribution.ATTRIBUTION_PAGE.content(time_page(("free",))))
    assert unheld.heading == "free: 4 device hours that no job held"


def test_dimensions_are_moved_dropped_and_added_by_links() -> None:
    page = ContentPage(
        attribution.ATTRIBUTION_PAGE.content(
            time_page(("ads",), "by=division,user&at=%5B%22ads%22%5D&job=x")
        )
    )
    order = next(of for of in page.all("div") if of.get("class") == "order")
    by_name = {
        of.get("aria-label") or words(of): dict(parse_qsl(urlsplit(of.get("href") or "").query))
        for of in order.iter("a")
    }
    assert by_name["user outer"]["by"] == "user,division"
    assert by_name["Drop division"]["by"] == "user"
    assert by_name["host"]["by"] == "division,user,host"
    assert "division outer" not in by_name
    assert all("at" not in query and query["job"] == "x" for query in by_name.values()), (
        "the filter stays, the part not"
    )


HISTORY = DocumentHistoryResponse(
    versions=[
        DocumentVersion(version=2, at_ns=NOON, who=EVIL),
        DocumentVersion(version=1, at_ns=NOON - SECOND, who="ana"),
    ]
)
NONE = DocumentHistoryResponse(versions=[])


def prices_page(text: str, version: int = 2, rows: list[Any] | None = None) -> ContentPage:
    document = DocumentResponse(version=version, at_ns=NOON, who="ana", text=text)
    parts = [part(["H100"], 10, 0, cost=30.0), part([EVIL], 5, 0)] if rows is None else rows
    whole = part([], 15, 0, cost=30.0, cost_known_ms=10 * HOUR_MS)
    view = PricesView(
        document,
        parse_prices(text) if version else None,
        HISTORY if version else NONE,
        parts,
        whole,
    )
    return ContentPage(admin.PRICES_PAGE.content(view))


def test_prices_say_what_hours_cost_and_of_how_much_time() -> None:
    page = prices_page(
        'currency = "EUR"\nper_kwh = 0.3\nco2_g_per_kwh = 350\n[device_hour]\nH100 = 2.6\n'
    )
    assert page.heading == "30 EUR in the last 90 days"
    assert page.column("devices", "Device hours") == ["10", "5"]
    assert page.column("devices", "An hour") == ["2.60", "–"]
    assert page.column("devices", "Cost") == ["30", "–"]
    numbers = page.numbers()
    assert numbers["A kilowatt hour"].value == "0.30 EUR"
    assert numbers["CO₂"] == Shown("350 g", "of a kilowatt hour", "", "")
    assert (numbers["Priced"].value, numbers["Priced"].grade) == ("66.7 %", "warn")
    query = dict(parse_qsl(urlsplit(unquote(page.leads("devices", "Device")[0])).query))
    assert query == {"since": "90d", "by": "job", "device_model": "H100"}
    assert page.column("versions", "By") == [SPELLED, "ana"]
    assert page.leads("versions", "Version") == ["/prices?version=2", "/prices?version=1"]


def test_a_default_price_is_that_of_all_other_devices_and_free_is_no_unknown_price() -> None:
    page = prices_page('currency = "EUR"\n[device_hour]\nH100 = 0.0\ndefault = 1.5\n')
    assert page.column("devices", "An hour") == ["0", "1.50"]
    assert page.numbers()["A kilowatt hour"].value == "in the price of the hour"


def test_of_an_older_version_no_cost_is_shown_and_without_prices_none_either() -> None:
    old = prices_page('currency = "USD"\n[device_hour]\ndefault = 1\n', version=1)
    assert old.heading == "Prices in USD"
    assert "Cost" not in old.tables()["devices"].heads
    assert "Priced" not in old.numbers()
    assert "This is version 1, of 2026-09-21 14:13:20 UTC. To the last." in words(
        old.all("header")[0]
    )
    none = prices_page("", version=0, rows=[])
    assert none.heading == "Nothing has a price yet"
    assert none.tables() == {}
    assert "/hosts" in none.links()


def owners_page(
    rules: list[OwnerRule], version: int, unattributed: int = 0, held: int = 0
) -> ContentPage:
    document = DocumentResponse(version=version, at_ns=NOON, who="ana", text="")
    view = OwnersView(document, tuple(rules), HISTORY if version else NONE, unattributed, held)
    return ContentPage(admin.OWNERS_PAGE.content(view))


def test_rules_of_owners_are_shown_in_their_order_with_what_is_nobodys() -> None:
    rules = [
        OwnerRule(
            match={"job": "llm-*", "label.team": EVIL},
            set={"division": "ads"},
            first=date(2026, 1, 2),
        ),
        OwnerRule(match={}, set={"division": "rest", "user": "bo"}, until=date(2027, 1, 1)),
    ]
    page = owners_page(rules, 2, 3 * HOUR_MS, 12 * HOUR_MS)
    assert page.heading == "2 rules say whose jobs are"
    assert page.column("rules", "Jobs") == [f"job = llm-*, label.team = {SPELLED}", "all"]
    assert page.column("rules", "Are of") == ["division = ads", "division = rest, user = bo"]
    assert page.column("rules", "From") == ["2026-01-02", "–"]
    assert page.column("rules", "Until") == ["–", "2027-01-01"]
    numbers = page.numbers()
    assert (numbers["Nobody's"].value, numbers["Nobody's"].grade) == ("25.0 %", "warn")
    query = parse_qs(urlsplit(numbers["Nobody's"].leads).query)
    assert json.loads(query["at"][0]) == [UNATTRIBUTED]
    assert owners_page(rules[:1], 2).heading == "1 rule says whose jobs are"
    nothing = owners_page([], 0)
    assert (nothing.heading, nothing.numbers()["Nobody's"].value) == (
        "0 rules say whose jobs are",
        "–",
    )


def change(kernel: str, by: float, cause: str = "code", **more: Any) -> dict[str, Any]:
    row = {
        "kernel": kernel,
        "shapes": None,
        "device_model": "H100",
        "cause": cause,
        "evidence": "shown",
        "since_ns": NOON,
        "last_before_ns": NOON - SECOND,
        "before_ns": 1000,
        "after_ns": int(1000 * (1 + by)),
        "change": by,
        "low": by - 0.01,
        "high": by + 0.01,
        "extra_ns": int(by * 1e9),
        "jobs_before": 10,
        "jobs_after": 20,
        "jobs": ["a"],
        "capture": "c1",
        "healthy_capture": "c0",
    }
    return {**row, **more}


def test_changes_of_kernels_are_divided_by_what_they_mean() -> None:
    rows = [
        change(EVIL, 1.5),
        change("norm", 0.26, "host"),
        change("mixed", 0.4, "shapes"),
        change("fast", -0.5),
    ]
    page = ContentPage(
        kernel.REGRESSIONS_PAGE.content(
            answered("regressions", facts={"series": 100, "short": 30}, changes=rows)
        )
    )
    assert page.heading == f"{SPELLED} takes 2.5× as long now"
    tables = page.tables()
    assert list(tables) == ["slower-changes", "mixed-changes", "faster-changes"]
    assert [row[0] for row in tables["slower-changes"].texts] == [SPELLED, "norm"]
    assert [row[0] for row in tables["mixed-changes"].texts] == ["mixed"]
    numbers = page.numbers()
    assert numbers["Slower"] == Shown("2", "kernels", "bad", "#slower-part")
    assert numbers["Cost"].value == "1.76 s", "of those that became slower alone"
    assert numbers["Faster"].value == "1"
    assert (numbers["Looked at"].value, numbers["Looked at"].about) == (
        "70",
        "series; 30 have too few jobs",
    )
    none = ContentPage(
        kernel.REGRESSIONS_PAGE.content(
            answered("regressions", facts={"series": 5, "short": 5}, changes=[])
        )
    )
    assert none.heading == "No kernel became slower"
    assert "5 kernels with their shapes and devices were looked at" in words(
        none.by_id("slower-changes")
    )
    assert none.numbers()["Faster"].leads == ""


@pytest.mark.parametrize(
    ("by", "shown"),
    [
        (1.0, "2.0× as long"),
        (8.08, "9.1× as long"),
        (0.26, "26.0 % longer"),
        (-0.5, "50.0 % shorter"),
        (0.0004, "<0.1 % longer"),
        (-0.9996, ">99.9 % shorter"),
        (0.9999, ">99.9 % longer"),
    ],
)
def test_a_change_is_said_in_words(by: float, shown: str) -> None:
    assert kernel.format_change(by) == shown
    sentence = kernel.describe_change(change("k", by, "device", evidence="possible"))
    assert (
        sentence
        == f"takes {shown}, as other models of device do more of its work (possible: no job can tell)"
    )


@given(
    st.dictionaries(
        st.sampled_from(["since", "until", "job", "host", "sort", "t.leaf", "by", "kernel"]),
        st.text(max_size=6),
    )
)
def test_time_and_filters_go_along_from_page_to_page(query: dict[str, str]) -> None:
    address = PageUrl("/p", "")
    address.query = dict(query)
    there = dict(
        parse_qsl(
            urlsplit(build_page_url("/q", address, by="x", top="")).query, keep_blank_values=True
        )
    )
    kept = {
        name: value
        for name, value in query.items()
        if name in {"since", "until", "job", "host"} and value
    }
    assert there == {**kept, "by": "x"}


def savings(by: list[str], rows: list[Any]) -> SavingsView:
    facts = {"by": by, "held_ms": 100 * HOUR_MS, "analysed_ms": 40 * HOUR_MS}
    of_rules = [
        {
            "rule": "exposed-communication",
            "findings": 3,
            "captures": 2,
            "fraction": 0.5,
            "jobs": 1,
            "saving_fraction": 0.25,
            "confidence": None,
            "example": "c/1",
        }
    ]
    return SavingsView(
        answered("invest", "since=7d", facts, rows=rows),
        answered("findings", facts={"captures": 4}, rows=of_rules),
    )


def test_what_is_saved_is_the_sum_of_its_parts() -> None:
    rows = [
        {
            "rule": f"rule-{number}",
            "saved_ms": (12 - number) * HOUR_MS,
            "jobs": 2,
            "confidence": 0.9,
            "example": "c/1",
        }
        for number in range(12)
    ]
    page = ContentPage(question_pages.INVEST_PAGE.content(savings(["rule"], rows)))
    assert page.heading == "Fixing rule-0 would save 12 device hours"
    numbers = page.numbers()
    assert numbers["Could be saved"] == Shown("78 h", "78.0 % of the device time", "", "")
    assert numbers["Analysed"].value == "40.0 %"
    shown = [words(of) for of in page.by_id("glance-part").iter("title")]
    assert len(shown) == 10
    assert shown[0] == "rule-0: 12 h"
    assert shown[-1] == "others: 6 h", "3 + 2 + 1"
    widths = [
        float(str(of.get("width")).removesuffix("%"))
        for of in page.by_id("glance-part").iter("rect")
    ]
    assert widths[0] == pytest.approx(1200 / 78, abs=0.13)
    assert page.column("rows", "Saves, device hours")[:2] == ["12", "11"]
    first = dict(parse_qsl(urlsplit(page.leads("rows", "Rule")[0]).query))
    assert first == {"since": "7d", "by": "job,rule", "rows.q": "rule-0"}
    assert page.leads("findings", "Rule")[0].startswith("/invest?")
    assert page.column("findings", "What it is")[0], "as its page has it"
    by_job = [{"job": EVIL, "saved_ms": HOUR_MS, "jobs": 1, "confidence": None, "example": "c1"}]
    other = ContentPage(question_pages.INVEST_PAGE.content(savings(["job"], by_job)))
    assert other.heading == f"{SPELLED} could save 1 device hours"
    assert unquote(other.leads("rows", "Job")[0]) == f"/jobs/{EVIL}"
    nothing = ContentPage(question_pages.INVEST_PAGE.content(savings(["rule"], [])))
    assert (nothing.heading, nothing.numbers()) == ("Where to invest", {})


METRICS = (
    "device_use",
    "flop_rate",
    "compute_use",
    "power_w",
    "roofline_fraction",
    "mfu",
    "reference_hours_per_byte",
)


def topline_row(**more: Any) -> dict[str, Any]:
    return {"device_hours": 5.0, "flop_rate_high": None, **dict.fromkeys(METRICS), **more}


def test_the_topline_says_what_is_measured_and_how_it_goes_together() -> None:
    pairs = [
        {"first": "device_use", "second": "flop_rate", "jobs": 12, "correlation": 0.25},
        {"first": "device_use", "second": "compute_use", "jobs": 9, "correlation": None},
        {"first": "flop_rate", "second": "compute_use", "jobs": 1, "correlation": -0.75},
    ]
    facts = {"by": [], "reference": None}
    whole = answered(
        "topline",
        facts=facts,
        rows=[topline_row(device_use=0.5, compute_use=0.125)],
        correlations=pairs,
    )
    rows = [topline_row(model=EVIL, device_use=0.0), topline_row(model="llm", flop_rate=2.5e14)]
    view = ToplineView(whole, answered("topline", "since=7d", facts, rows=rows), "model")
    page = ContentPage(question_pages.TOPLINE_PAGE.content(view))
    assert (
        page.heading
        == "Devices that jobs hold compute 50.0 % of the time, at 12.5 % of their peak at least"
    )
    assert set(page.numbers()) == {"Device use", "Compute use"}
    assert page.column("rows", "Device use") == ["0 %", "–"]
    assert page.column("rows", "FLOP/s") == ["–", "250 TFLOP/s"]
    assert "MFU" not in page.tables()["rows"].heads, "no row has one"
    assert dict(parse_qsl(urlsplit(page.leads("rows", "Model")[0]).query)) == {
        "since": "7d",
        "by": "job",
        "model": EVIL,
    }
    fields = {
        words(of.findall("title")[0]): of
        for of in page.all("g")
        if "pair" in (of.get("class") or "")
    }
    assert {
        name: (of.get("class"), words(of.findall("text")[0])) for name, of in fields.items()
    } == {
        "Device use and FLOP/s: +0.25 over 12 jobs": ("pair with", "+0.25"),
        "Device use and Compute use: not known": ("pair none", "–"),
        "FLOP/s and Compute use: -0.75 over 1 job": ("pair against", "-0.75"),
    }
    shades = [float(of.findall("rect")[0].get("fill-opacity") or 0) for of in fields.values()]
    assert shades[2] > shades[0] > shades[1], "the stronger, the darker"
    assert next(row[:2] for row in page.tables()["correlations"].texts) == [
        "FLOP/s",
        "Compute use",
    ], "the strongest first"
    unknown = ToplineView(
        answered("topline", facts=facts, rows=[topline_row()]),
        answered("topline", facts=facts, rows=rows),
        "job",
    )
    alone = ContentPage(question_pages.TOPLINE_PAGE.content(unknown))
    assert (alone.heading, alone.numbers(), list(alone.tables())) == ("The topline", {}, ["rows"])


@pytest.mark.parametrize("key", ["device_ms", "kernel"])
def test_what_is_downloaded_of_a_page_is_exact(key: str) -> None:
    """A page rounds; its CSV and its JSON do not, and they agree."""
    if key == "kernel":
        rows = [change(EVIL, 1 / 3), change("=cmd()", 0.1)]
        content = kernel.REGRESSIONS_PAGE.content(
            answered("regressions", facts={"series": 2, "short": 0}, changes=rows)
        )
        table, exact = (
            table_of(content, "slower-changes"),
            [(row["kernel"], row["change"], row["extra_ns"]) for row in rows],
        )
        names = ("kernel", "change", "extra_ns")
    else:
        content = attribution.ATTRIBUTION_PAGE.content(time_page())
        table = table_of(content, "of-part")
        exact = [("ads", 5.0, 5 / 12), (EVIL, 3.0, 3 / 12), ("free", 4.0, 4 / 12)]
        names = ("part", "hours", "share")
    address = PageUrl("/p", "")
    as_json = [tuple(row[name] for name in names) for row in json.loads(table.json(address))]
    assert as_json == exact
    as_csv = list(csv.DictReader(io.StringIO(table.to_csv(address))))
    for line, row in zip(as_csv, exact, strict=True):
        assert line[names[0]] == (f"'{row[0]}" if row[0].startswith("=") else row[0])
        assert [float(line[name]) for name in names[1:]] == [float(value) for value in row[1:]]
