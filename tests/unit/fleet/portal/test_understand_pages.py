"""The pages about captures, kernels, GPU time and outliers, drawn from answers written by hand."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

from support.html_tree import words
from support.page_contents import EVIL, NOON, SECOND, SPELLED, ContentPage, Shown, answered
from traceloom.fleet.api import CaptureResponse, TaskResponse
from traceloom.fleet.handlers.now import (
    CaptureFacts,
    CaptureFactsResponse,
    FleetFinding,
    HostTelemetryInCapture,
)
from traceloom.fleet.portal import question_pages
from traceloom.fleet.portal.charts import DAY_NS
from traceloom.fleet.portal.pages import capture, kernel, kernel as comparison, kernel as regression
from traceloom.fleet.portal.pages.capture import CaptureView
from traceloom.fleet.portal.pages.kernel import CapturePair, ChangeView, KernelView
from traceloom.fleet.portal.question_pages import WorkView


def capture_of(identity: str, state: str, *states: str, **changes: Any) -> CaptureResponse:
    fields: dict[str, Any] = {
        "id": identity,
        "day": "2026-09-21",
        "job": "a/b",
        "uploader": "ana",
        "received_ns": NOON,
        "bytes": 1_500_000,
        "state": state,
        "files": {"rank1.json": 500_000, "rank0 <b>.json": 1_000_000},
        "digests": {},
        "tasks": [
            TaskResponse(version=str(at), state=of, attempts=1, error=EVIL)
            for at, of in enumerate(states)
        ],  # type: ignore[arg-type]
    }
    return CaptureResponse(**{**fields, **changes})


def facts(**changes: Any) -> CaptureFacts:
    fields: dict[str, Any] = {
        "start_ns": NOON,
        "window_ns": 3 * SECOND,
        "ranks": 16,
        "hosts": 2,
        "device_model": "H100",
        "torch": "2.9",
        "code": "abc",
        "step_ns": 250_000_000,
        "mfu": 0.4,
        "roofline_fraction": 0.625,
        "notices": [],
        "version": "1",
    }
    return CaptureFacts(**{**fields, **changes})


def view_of(
    of_capture: CaptureResponse,
    of_tables: CaptureFacts | None = None,
    *beside: HostTelemetryInCapture,
    **more: Any,
) -> CaptureView:
    return CaptureView(
        of_capture,
        CaptureFactsResponse(facts=of_tables, beside=list(beside)),
        more.get("findings", []),
        more.get("others", []),
    )


def test_a_capture_shows_its_report_its_numbers_and_what_was_measured_meanwhile() -> None:
    beside = [
        HostTelemetryInCapture(
            host="n/1",
            devices=8,
            busy_ms=30_000,
            idle_ms=10_000,
            energy_mj=20_000_000,
            flops_low=8e18,
        ),
        HostTelemetryInCapture(
            host=EVIL, devices=1, busy_ms=0, idle_ms=0, energy_mj=None, flops_low=None
        ),
    ]
    finding = FleetFinding(
        capture="c/1",
        slug="blocking-item",
        saving_ns=1,
        saving_fraction=0.5,
        confidence=1.0,
        rank=0,
    )
    view = view_of(
        capture_of("c/1", "committed", "committed"),
        facts(),
        *beside,
        findings=[finding],
        others=[capture_of(EVIL, "committed")],
    )
    content = capture.CAPTURE_PAGE.content(view)
    assert content.ended
    page = ContentPage(content)
    assert {name: of.value for name, of in page.numbers().items()} == {
        "Ranks": "16",
        "Window": "3.00 s",
        "Step": "250 ms",
        "Roofline": "62.5 %",
        "MFU": "40.0 %",
        "Device": "H100",
    }
    assert page.numbers()["Ranks"].about == "on 2 hosts"
    assert page.column("beside", "Busy") == ["75.0 %", "–"]
    assert page.column("beside", "Busy time") == ["30.0 s", "0 ns"]
    assert page.column("beside", "Power, W") == ["500", "–"], "20 kJ in 40 s"
    assert page.column("beside", "FLOP/s") == ["200 PFLOP/s", "–"], "8e18 in 40 s"
    assert page.column("files", "File") == ["rank0 <b>.json", "rank1.json"]
    assert page.leads("files", "File")[0] == "/captures/c%2F1/files/rank0%20%3Cb%3E.json"
    frames = page.all("iframe")
    assert [(of.get("src"), of.get("sandbox")) for of in frames] == [
        ("/captures/c%2F1/report", "allow-scripts allow-downloads")
    ]
    assert [of.get("value") for of in page.all("option")] == [SPELLED]
    assert "Capture" not in page.tables()["findings"].heads, "all are of this one"
    assert [of.get("href") for of in page.all("p")[0].iter("a")] == ["/jobs/a/b"]


@pytest.mark.parametrize(
    ("state", "tasks", "says", "framed"),
    [
        ("", [], "Its files are not all there yet.", False),
        ("received", ["received"], "It is being analysed; its report follows here.", False),
        ("checked", ["checked"], "It is being analysed; its report follows here.", False),
        ("analysed", ["analysed"], "", True),
        ("quarantined", ["quarantined"], f"It could not be analysed: {SPELLED}", False),
        ("quarantined", ["committed", "quarantined"], "", True),  # an older version analysed it
    ],
    ids=["incomplete", "received", "checked", "analysed", "quarantined", "analysed before"],
)
def test_a_capture_says_why_there_is_no_report(
    state: str, tasks: list[str], says: str, framed: bool
) -> None:
    content = capture.CAPTURE_PAGE.content(view_of(capture_of("c1", state, *tasks)))
    page = ContentPage(content)
    assert says in words(page.by_id("report-part"))
    assert bool(page.all("iframe")) == framed
    assert content.ended == (state == "quarantined")
    assert page.numbers()["State"].value == (state or "incomplete")
    assert (page.numbers()["State"].grade == "bad") == (state == "quarantined")


def test_what_is_not_known_of_a_capture_is_left_out() -> None:
    unknown = facts(
        hosts=None, device_model=None, torch=None, step_ns=None, mfu=None, roofline_fraction=None
    )
    page = ContentPage(
        capture.CAPTURE_PAGE.content(
            view_of(capture_of("c1", "committed", "committed", job=""), unknown)
        )
    )
    numbers = page.numbers()
    assert set(numbers) == {"Ranks", "Window", "Device"}
    assert numbers["Ranks"].about == "no file names its host"
    assert numbers["Device"] == Shown("–", "the version of PyTorch is not known", "", "")
    assert "of no job that is known" in words(page.all("header")[0])
    assert "No agent measured devices of this job" in words(page.by_id("beside"))
    assert "No rule has anything against it." in words(page.by_id("findings"))
    zero = ContentPage(
        capture.CAPTURE_PAGE.content(
            view_of(capture_of("c1", "committed", "committed"), facts(mfu=0.0))
        )
    )
    assert zero.numbers()["MFU"].value == "0 %", "measured to be nothing is not unknown"


def test_two_captures_are_held_against_each_other_and_can_be_turned() -> None:
    both = CapturePair(
        capture_of("b/1", "committed", job=""), capture_of(EVIL, "committed", job="new job")
    )
    page = ContentPage(comparison.COMPARISON_PAGE.content(both))
    assert page.heading == "new job against b/1"
    [frame] = page.all("iframe")
    assert unquote(frame.get("src") or "") == f"/captures/{EVIL}/against/b/1"
    assert "/against/b%2F1" in (frame.get("src") or "")
    by_name = {words(of): of.get("href") or "" for of in page.by_id("comparison-part").iter("a")}
    assert dict(parse_qsl(urlsplit(by_name["The other way round"]).query)) == {
        "base": EVIL,
        "new": "b/1",
    }
    assert by_name["The base"] == "/captures/b%2F1"
    assert [of.get("href") for of in page.all("p")[0].iter("a")] == ["/jobs/new%20job"]


def kernel_row(name: str, total: int, fraction: float, **more: Any) -> dict[str, Any]:
    row = {
        "kernel": name,
        "kind": "gemm",
        "count": 4,
        "total_ns": total,
        "fraction": fraction,
        "mean_ns": total // 4,
        "cycles": None,
        "cycles_known_ns": 0,
        "shapes": 2,
        "captures": 3,
        "jobs": 2,
        "roofline_known_ns": 0,
        "roofline_ns": None,
        "example": "c/1",
    }
    return {**row, **more}


def test_kernels_lead_to_their_history_and_their_sums_stand_above() -> None:
    rows = [
        kernel_row(EVIL, 600_000_000, 0.6, roofline_known_ns=300_000_000, roofline_ns=150_000_000)
    ]
    rows += [kernel_row(f"k{number}", 20_000_000, 0.02) for number in range(15)]
    page = ContentPage(
        question_pages.KERNELS_PAGE.content(
            answered("kernels", "since=7d&job=x", {"total_ns": 1_000_000_000}, rows=rows)
        )
    )
    assert page.heading == f"{SPELLED} takes 60.0 % of the GPU time"
    numbers = page.numbers()
    assert (numbers["GPU time"].value, numbers["Largest"].value) == ("1.00 s", "60.0 %")
    assert numbers["Ten largest"].value == "78.0 %", "60 and nine times 2"
    assert numbers["Modelled"].value == "30.0 %"
    assert "Cycles" not in page.tables()["rows"].heads, "no clock is known"
    first = urlsplit(page.leads("rows", page.tables()["rows"].heads[0])[0])
    assert (first.path, dict(parse_qsl(first.query))) == (
        "/kernels/history",
        {"since": "7d", "job": "x", "kernel": EVIL},
    )
    clocked = ContentPage(
        question_pages.KERNELS_PAGE.content(
            answered("kernels", "", {"total_ns": 1}, rows=[kernel_row("a", 1, 1.0, cycles=5.0)])
        )
    )
    assert "Cycles" in clocked.tables()["rows"].heads
    none = ContentPage(
        question_pages.KERNELS_PAGE.content(answered("kernels", "", {"total_ns": 0}, rows=[]))
    )
    assert (none.heading, none.numbers(), none.tables()) == ("Kernels", {}, {})


def of_job(job: str, day: int, mean_ns: int, code: str | None, **more: Any) -> dict[str, Any]:
    row = {
        "start_ns": NOON + day * DAY_NS,
        "job": job,
        "mean_ns": mean_ns,
        "count": 2,
        "total_ns": 2 * mean_ns,
        "capture": f"c-{job}",
        "code": code,
        "torch": None,
    }
    return {**row, **more}


CHANGE: dict[str, Any] = {
    "kernel": EVIL,
    "shapes": "[[2, 2]]",
    "device_model": "H100",
    "cause": "code",
    "evidence": "shown",
    "since_ns": NOON + 2 * DAY_NS,
    "last_before_ns": NOON + DAY_NS,
    "before_ns": 1000,
    "after_ns": 2500,
    "change": 1.5,
    "low": 1.4,
    "high": 1.6,
    "extra_ns": 3_000,
    "jobs_before": 2,
    "jobs_after": 2,
    "jobs": ["d", "c", "gone"],
    "capture": "c-d",
    "healthy_capture": "c-a",
}
HISTORY = [
    of_job("a", 0, 1000, "v1"),
    of_job("b", 1, 1000, "v1"),
    of_job("c", 2, 2500, "v2"),
    of_job("d", 3, 2500, None),
]


def test_a_kernel_is_drawn_over_its_jobs_with_the_levels_of_its_change() -> None:
    query = f"kernel={EVIL}&shapes=s"
    history = answered("kernel-history", query, {"jobs": 4}, rows=HISTORY)
    covered = [
        {
            "number": 1,
            "kernel": EVIL,
            "op": "aten::mm",
            "shapes": EVIL,
            "types": None,
            "device_model": "H100",
            "count": 8,
            "total_ns": 14_000,
            "fraction": 0.75,
            "covered_fraction": 0.75,
        },
        {
            "number": 2,
            "kernel": "another",
            "op": None,
            "shapes": "x",
            "types": None,
            "device_model": "H100",
            "count": 1,
            "total_ns": 1,
            "fraction": 0.25,
            "covered_fraction": 1.0,
        },
    ]
    coverage = answered("coverage", query, {"total_ns": 1, "unshaped_ns": 0}, rows=covered)
    changed = answered("regressions", query, changes=[CHANGE])
    page = ContentPage(
        kernel.KERNEL_PAGE.content(
            KernelView(EVIL, "[[2, 2]]", history, coverage, [CHANGE], changed)
        )
    )
    assert page.heading == SPELLED
    numbers = page.numbers()
    assert (numbers["Jobs"].value, numbers["Now"].value, numbers["GPU time"].value) == (
        "4",
        "2.50 µs",
        "14.0 µs",
    )
    assert numbers["Changes"] == Shown(
        "1",
        "takes 2.5× as long, with another version of the program or of PyTorch",
        "bad",
        "#changed-part",
    )
    dots = page.all("circle")
    assert [of.get("class") for of in dots] == [
        "f-compute",
        "f-compute",
        "f-communication",
        "f-memory",
    ], "by version"
    height = [float(of.get("cy") or 0) for of in dots]
    bottom = 216.0  # where 0 stands
    assert (bottom - height[2]) / (bottom - height[0]) == pytest.approx(2.5, rel=0.01)
    levels = {
        of.get("class"): float(of.get("y1") or 0)
        for of in page.all("line")
        if "level" in (of.get("class") or "")
    }
    assert levels == {
        "level l-before": pytest.approx(height[0], abs=0.06),
        "level l-after": pytest.approx(height[2], abs=0.06),
    }
    assert [words(of) for of in page.all("text") if of.get("class") == "word"] == ["+150.0 %"]
    assert page.column("jobs", "Job") == ["d", "c", "b", "a"], "the latest first"
    assert [row[0] for row in page.tables()["shapes"].texts] == [SPELLED], "of this kernel alone"
    names = [words(of) for of in page.all("ul")[0].iter("li")]
    assert names == ["v1", "v2", "version not known"]


def test_a_kernel_that_nothing_ran_has_no_chart() -> None:
    none = answered("kernel-history", "kernel=k", {"jobs": 0}, rows=[])
    coverage = answered("coverage", "kernel=k", {"total_ns": 0, "unshaped_ns": 0}, rows=[])
    page = ContentPage(
        kernel.KERNEL_PAGE.content(
            KernelView("k", "", none, coverage, [], answered("regressions", changes=[]))
        )
    )
    assert (page.heading, page.numbers(), page.tables()) == ("k", {}, {})
    assert page.all("circle") == []


def test_a_change_has_its_jobs_in_the_order_in_which_they_lose_by_it() -> None:
    history = answered("kernel-history", "", {"jobs": 4}, rows=HISTORY)
    changed = answered("regressions", "since=7d", changes=[CHANGE])
    page = ContentPage(regression.REGRESSION_PAGE.content(ChangeView(CHANGE, changed, history)))
    assert page.heading == f"{SPELLED} takes 2.5× as long"
    assert page.column("jobs", "Job") == ["d", "c"], "what is not known of them is left out"
    assert [dict(parse_qsl(urlsplit(of).query)) for of in page.leads("jobs", "Compare")] == [
        {"base": "c-a", "new": "c-d"},
        {"base": "c-a", "new": "c-c"},
    ]
    numbers = page.numbers()
    assert numbers["Change"] == Shown("+150.0 %", "95 % interval +140.0 % to +160.0 %", "bad", "")
    assert numbers["A piece of work"] == Shown("2.50 µs", "1.00 µs before", "", "")
    assert numbers["Costs"].value == "3.00 µs"
    assert numbers["Jobs"] == Shown("2", "after it, 2 before", "", "")
    lead = words(next(of for of in page.all("p") if of.get("class") == "lead"))
    assert (
        lead
        == "On inputs of [[2, 2]]. Takes 2.5× as long, with another version of the program or of PyTorch."
    )
    faster = {
        **CHANGE,
        "change": -0.5,
        "low": -0.6,
        "high": -0.4,
        "extra_ns": -3_000,
        "shapes": None,
    }
    other = ContentPage(regression.REGRESSION_PAGE.content(ChangeView(faster, changed, history)))
    assert other.numbers()["Saves"].value == "3.00 µs"
    assert other.numbers()["Change"].grade == ""


def test_gpu_time_is_divided_into_parts_that_make_up_the_whole() -> None:
    rows = [
        {
            "kind": EVIL if number == 0 else f"kind{number}",
            "count": 1,
            "total_ns": 100 - number,
            "captures": 1,
            "fraction": (100 - number) / 1_134,
        }
        for number in range(12)
    ]
    covered = [
        {
            "number": number + 1,
            "kernel": "k",
            "op": None,
            "shapes": "[[1]]",
            "types": None,
            "device_model": None,
            "count": 1,
            "total_ns": 10,
            "fraction": 0.25,
            "covered_fraction": 0.25 * (number + 1),
        }
        for number in range(4)
    ]
    coverage = answered("coverage", "job=x", {"total_ns": 200, "unshaped_ns": 50}, rows=covered)
    page = ContentPage(
        question_pages.CHARACTERISE_PAGE.content(
            WorkView(answered("characterise", "job=x", {"by": ["kind"]}, rows=rows), coverage)
        )
    )
    assert page.heading == f"{SPELLED} makes up 8.8 % of the GPU time"
    numbers = page.numbers()
    assert numbers["Half of it"].value == "2", "two shapes of a quarter each"
    assert numbers["Without shapes"].value == "25.0 %"
    assert numbers["Parts"] == Shown("12", "by kind of work", "", "")
    titles = [words(of) for of in page.by_id("glance-part").iter("title")]
    assert len(titles) == 10
    assert titles[-1] == "3 others: 23.8 %", "91 + 90 + 89 of 1134"
    first = dict(parse_qsl(urlsplit(page.leads("rows", "Kind of work")[0]).query))
    assert first == {"job": "x", "rows.q": EVIL}
    history = dict(
        parse_qsl(urlsplit(page.leads("covered", page.tables()["covered"].heads[1])[0]).query)
    )
    assert history == {"job": "x", "kernel": "k", "shapes": "[[1]]"}
    none = WorkView(
        answered("characterise", "", {"by": ["op"]}, rows=[]),
        answered("coverage", "", {"total_ns": 0, "unshaped_ns": 0}, rows=[]),
    )
    empty = ContentPage(question_pages.CHARACTERISE_PAGE.content(none))
    assert (empty.heading, empty.numbers(), empty.tables()) == ("GPU time", {}, {})


def test_outliers_are_told_from_their_peers() -> None:
    hosts = [
        {
            "host": EVIL,
            "device_model": "H100",
            "ratio": 1.25,
            "z": 6.0,
            "outlier": True,
            "kernels": 9,
            "jobs": 2,
        },
        {
            "host": "n2",
            "device_model": "H100",
            "ratio": 1.0,
            "z": 0.1,
            "outlier": False,
            "kernels": 9,
            "jobs": 2,
        },
    ]
    ranks = [
        {
            "job": "a/b",
            "rank": 3,
            "host": None,
            "ratio": 1.5,
            "z": 9.0,
            "outlier": True,
            "captures": 1,
        }
    ]
    page = ContentPage(
        question_pages.OUTLIERS_PAGE.content(
            answered("outliers", "since=7d", hosts=hosts, ranks=ranks)
        )
    )
    assert page.heading == f"{SPELLED} takes 25.0 % longer than its peers"
    assert page.column("hosts", "Outlier") == ["slow", "like its peers"]
    assert page.numbers() == {
        "Slow hosts": Shown("1", "of 2 compared", "bad", "#of-hosts-part"),
        "Slow ranks": Shown("1", "of 1 compared", "bad", "#of-ranks-part"),
    }
    assert page.leads("ranks", "Job") == ["/jobs/a/b"]
    led = [
        dict(parse_qsl(urlsplit(of).query))
        for of in page.leads("hosts", page.tables()["hosts"].heads[-1])
    ]
    assert led == [{"since": "7d", "host": EVIL}, {"since": "7d", "host": "n2"}]
    none = ContentPage(question_pages.OUTLIERS_PAGE.content(answered("outliers")))
    assert none.heading == "No host is slower than its peers"
    assert {of.grade for of in none.numbers().values()} == {""}
    assert "Ask for more time" in words(none.by_id("hosts"))
