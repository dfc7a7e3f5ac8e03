"""The pages about what runs now, drawn from answers written by hand: every number is worked out beside them."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

from support.html_tree import words
from support.page_contents import EVIL, NOON, SECOND, SPELLED, ContentPage, Shown, request
from traceloom.agent.fleet_link.protocol import HostProcess
from traceloom.fleet.handlers.hosts import FleetJobResponse, HostResponse
from traceloom.fleet.handlers.now import (
    DailyTopline,
    DeviceStatus,
    FleetFinding,
    FleetProblemsResponse,
    FleetStatusResponse,
    HostDetailResponse,
    JobDetailResponse,
    JobProcess,
    QuarantinedCapture,
    SlowerKernel,
    UsagePeriod,
)
from traceloom.fleet.portal.pages import (
    job as job_page,
    overview,
    overview as host_page,
    overview as hosts_page,
    overview as jobs_page,
)
from traceloom.fleet.portal.pages.job import JobView
from traceloom.fleet.portal.pages.overview import FleetView, HostView
from traceloom.server.problem import HttpError

HERE = HostResponse(
    host="node1",
    heard_ns=NOON,
    lost=False,
    version="1.2",
    clock_offset_ns=-2_500_000,
    clock_error_ns=30_000,
    devices=8,
    stale_devices=1,
    processes=9,
    jobs=["a", "b/c"],
    collector_errors={"nvml": "no permission", "disk": EVIL},
)
LOST = HostResponse(
    host=EVIL, heard_ns=NOON - 90 * SECOND, lost=True, version="1.1", devices=4, jobs=["a"]
)
NEVER = HostResponse(host="node3")


def job(identity: str = "a", **changes: object) -> FleetJobResponse:
    fields: dict[str, object] = {
        "job": identity,
        "name": identity,
        "scheduler": "slurm",
        "user": "ana",
        "framework": "torch",
        "hosts": ["node1"],
        "processes": 8,
        "traceable": 8,
        "ranks": 8,
        "world_size": 8,
        "devices": 8,
        "steps_per_second": 2.5,
        "hung": False,
    }
    return FleetJobResponse(**{**fields, **changes})  # type: ignore[arg-type]


def test_hosts_are_told_apart_by_whether_they_were_heard_of() -> None:
    page = ContentPage(hosts_page.HOSTS_PAGE.content([HERE, LOST, NEVER]))
    assert page.column("hosts", "Host") == ["node1", SPELLED, "node3"]
    assert page.column("hosts", "State") == ["here", "lost", "never"]
    assert page.column("hosts", "Heard") == [
        "2026-09-21 14:13:20 UTC",
        "2026-09-21 14:11:50 UTC",
        "–",
    ]
    assert page.column("hosts", "Clock") == ["-2.50 ms", "–", "–"]
    assert page.column("hosts", "Errors") == [f"disk: {SPELLED}; nvml: no permission", "–", "–"]
    # Of several jobs the host's own page tells; of one its page.
    assert page.leads("hosts", "Jobs") == ["/hosts/node1", "/jobs/a", ""]
    assert unquote(page.leads("hosts", "Host")[1]) == f"/hosts/{EVIL}"
    numbers = page.numbers()
    assert {name: (of.value, of.grade) for name, of in numbers.items()} == {
        "Hosts": ("3", ""),
        "Lost": ("2", "bad"),
        "Devices": ("12", ""),
        "Silent": ("1", "warn"),
    }


def test_a_fleet_in_which_nothing_is_wrong_has_no_colour() -> None:
    page = ContentPage(
        hosts_page.HOSTS_PAGE.content(
            [HostResponse(host="node1", heard_ns=NOON, lost=False, devices=1)]
        )
    )
    assert {of.grade for of in page.numbers().values()} == {""}
    assert "Errors" not in page.tables()["hosts"].heads, "no row has any"
    nobody = ContentPage(hosts_page.HOSTS_PAGE.content([]))
    assert nobody.numbers() == {}
    assert "traceloom fleet token enrol node7 > node7.token" in [
        words(of) for of in nobody.all("code")
    ]


def test_jobs_that_run_are_counted_and_named() -> None:
    jobs = [
        job("a"),
        job(
            "b/c d",
            user="",
            ranks=3,
            world_size=None,
            devices=0,
            traceable=2,
            steps_per_second=None,
            hosts=["x", "y"],
        ),
        job(EVIL, user="bo", traceable=0, processes=1, steps_per_second=0.0),
    ]
    page = ContentPage(jobs_page.JOBS_PAGE.content(jobs))
    assert page.column("jobs", "Traceable") == ["all", "2 of 8", "0 of 1"]
    assert page.column("jobs", "Steps/s") == ["2.50", "–", "0"]
    assert page.column("jobs", "Of") == ["8", "–", "8"]
    assert page.column("jobs", "Hosts") == ["1", "2", "1"]
    assert [unquote(of) for of in page.leads("jobs", "Job")] == [
        "/jobs/a",
        "/jobs/b/c d",
        f"/jobs/{EVIL}",
    ]
    assert {name: of.value for name, of in page.numbers().items()} == {
        "Jobs": "3",
        "Traceable": "2",
        "Devices": "16",
        "Users": "2",
    }
    nothing = ContentPage(jobs_page.JOBS_PAGE.content([]))
    assert nothing.numbers() == {}
    assert nothing.tables() == {}
    assert "TRACELOOM_JOB" in [words(of) for of in nothing.all("code")]


def fleet(**changes: object) -> FleetView:
    fields: dict[str, object] = {
        "now": FleetStatusResponse(
            hosts=3,
            lost=["node9"],
            devices={"busy": 6, "idle-allocated": 1, "unallocated": 4, "unreachable": 1},
            tasks={"received": 1, "checked": 2, "analysed": 4, "committed": 50, "quarantined": 3},
            topline=None,
        ),
        "hosts": [],
        "jobs": [job()],
        "failed": [],
        "open": [],
        "problems": FleetProblemsResponse(slower=[], quarantined=[]),
    }
    return FleetView(**{**fields, **changes})  # type: ignore[arg-type]


def wrong(page: ContentPage) -> list[tuple[str, str, list[str]]]:
    """Look, text and links of each line of what is wrong."""
    lists = [of for of in page.all("ul") if of.get("class") == "wrong"]
    return [
        (of.get("class") or "", words(of), [link.get("href") or "" for link in of.iter("a")])
        for each in lists
        for of in each.iter("li")
    ]


def test_the_overview_counts_devices_and_what_waits() -> None:
    page = ContentPage(overview.OVERVIEW_PAGE.content(fleet(open=[request("r1", "running")])))
    assert page.heading == "6 of 12 devices on 3 hosts are busy, for 1 job"
    numbers = page.numbers()
    assert numbers["Requests"] == Shown("1", "traces that are being taken", "", "/requests")
    # What is received, checked or analysed waits; what is in quarantine does not.
    assert numbers["Captures"] == Shown("50", "analysed; 7 wait", "", "/captures")
    assert set(numbers) == {"Requests", "Captures"}, "of the last day nothing is known"
    bars = [float(of.get("width") or 0) for of in page.all("rect")]
    assert [round(12 * width / 1000, 3) for width in bars] == [6, 1, 4, 1]
    assert "Nothing that is known of." in words(page.by_id("wrong-part"))


def of_day(device_use: float, flop_rate: float | None, power_w: float) -> DailyTopline:
    return DailyTopline(
        device_hours=8.0,
        device_use=device_use,
        flop_rate=flop_rate,
        flop_rate_high=None,
        compute_use=None,
        power_w=power_w,
        roofline_fraction=None,
        mfu=None,
    )


def test_the_topline_of_the_day_leaves_out_what_nobody_measures() -> None:
    day = of_day(0.375, None, 412.4)
    now = FleetStatusResponse(hosts=1, lost=[], devices={"busy": 1}, tasks={}, topline=day)
    numbers = ContentPage(overview.OVERVIEW_PAGE.content(fleet(now=now))).numbers()
    assert (numbers["Device use"].value, numbers["Power"].value) == ("37.5 %", "412 W")
    assert "FLOP/s" not in numbers
    assert numbers["Captures"] == Shown("0", "analysed; 0 wait", "", "/captures")
    idle = of_day(0.0, 0.0, 0.0)
    zero = ContentPage(
        overview.OVERVIEW_PAGE.content(
            fleet(
                now=FleetStatusResponse(
                    hosts=1, lost=[], devices={"busy": 1}, tasks={}, topline=idle
                )
            )
        )
    ).numbers()
    assert {"Device use", "FLOP/s", "Power"} <= set(zero), "measured to be nothing is not unknown"


@pytest.mark.parametrize(
    ("hosts", "devices", "heading"),
    [
        (0, {}, "No host belongs to the fleet yet"),
        (1, {}, "1 host, 1 job, no devices"),
        (2, {"unallocated": 1}, "0 of 1 device on 2 hosts are busy, for 1 job"),
    ],
    ids=["no host", "no device", "one device"],
)
def test_the_overview_of_a_small_fleet_says_what_there_is(
    hosts: int, devices: dict[str, int], heading: str
) -> None:
    now = FleetStatusResponse(hosts=hosts, lost=[], devices=devices, tasks={}, topline=None)  # type: ignore[arg-type]
    page = ContentPage(overview.OVERVIEW_PAGE.content(fleet(now=now)))
    assert page.heading == heading
    joining = "traceloom agent run --server URL --token-file node7.token" in [
        words(of) for of in page.all("code")
    ]
    assert joining == (hosts == 0)


def slower(kernel: str, change: float, **changes: object) -> SlowerKernel:
    fields: dict[str, object] = {
        "kernel": kernel,
        "shapes": None,
        "device_model": "H100",
        "since_ns": NOON,
        "change": change,
        "extra_ns": 5,
        "jobs_after": 12,
    }
    return SlowerKernel(**{**fields, **changes})  # type: ignore[arg-type]


def test_what_stops_work_stands_first_and_each_line_leads_to_it() -> None:
    quarantined = [QuarantinedCapture(capture="c/1", error="no trace")]
    view = fleet(
        hosts=[HERE, LOST, NEVER],
        jobs=[job("b c", hung=True), job("fine")],
        failed=[
            request("r/1", "failed", detail="nobody came"),
            request("r2", "failed", reason="no-such-job"),
        ],
        problems=FleetProblemsResponse(
            slower=[slower("gemm", 0.26), slower("norm", 1.5, shapes=EVIL), slower("gemm", 0.1)],
            quarantined=quarantined,
        ),
    )
    lines = wrong(ContentPage(overview.OVERVIEW_PAGE.content(view)))
    assert [(look, text) for look, text, _ in lines] == [
        ("bad", "b c hangs: it makes no steps any more"),
        ("bad", f"{SPELLED} was last heard of 2026-09-21 14:11:50 UTC"),
        ("bad", "node3 was not heard of since the service started"),
        ("warn", f"node1: 1 device silent; disk: {SPELLED}; nvml: no permission"),
        ("bad", "gemm takes 26.0 % longer since 2026-09-21 14:13:20 UTC, in 12 jobs"),
        ("bad", "norm takes 2.5× as long since 2026-09-21 14:13:20 UTC, in 12 jobs"),
        ("bad", "Trace of a failed: nobody came"),
        ("bad", "Trace of a failed: no-such-job"),
        ("bad", "c/1 could not be analysed: no trace"),
    ]
    links = [unquote(href) for *_, [href] in lines]
    assert links[0] == "/jobs/b c"
    assert links[6:] == ["/requests/r/1", "/requests/r2", "/captures/c/1"]
    assert lines[6][2] == ["/requests/r%2F1"], "a name with a slash is one part of the path"
    assert links[4].startswith("/regressions/change?")
    assert f"at={NOON}" in links[4]


@pytest.mark.parametrize("count", [8, 9, 30])
def test_of_many_things_that_are_wrong_the_first_are_shown_and_the_rest_counted(count: int) -> None:
    view = fleet(hosts=[HostResponse(host=f"n{number}", heard_ns=NOON) for number in range(count)])
    lines = wrong(ContentPage(overview.OVERVIEW_PAGE.content(view)))
    assert len(lines) == min(count, 9)
    if count > 8:
        assert lines[-1] == ("", f"and {count - 8} more", ["/hosts"])


def test_that_it_is_not_known_whether_kernels_are_slower_is_said() -> None:
    view = fleet(problems=HttpError(503, "the tables are being rebuilt", slug="not-ready"))
    assert wrong(ContentPage(overview.OVERVIEW_PAGE.content(view))) == [
        ("warn", "Whether kernels became slower is not known now: the tables are being rebuilt", [])
    ]


def device(index: str, state: str, values: dict[str, float], **changes: object) -> DeviceStatus:
    fields: dict[str, object] = {
        "host": "node1",
        "device": f"GPU-{index}",
        "index": index,
        "model": "H100",
        "state": state,
        "jobs": [],
        "values": values,
    }
    return DeviceStatus(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_host_shows_what_its_devices_measure_and_nothing_where_they_do_not() -> None:
    full = {
        "gpu_busy_ratio": 0.5,
        "gpu_sm_active_ratio": 0.25,
        "gpu_power_watts": 699.6,
        "gpu_memory_used_bytes": 40e9,
        "gpu_memory_limit_bytes": 80e9,
    }
    devices = [
        device("0", "busy", full, jobs=["a"]),
        device(
            "1", "idle-allocated", {"gpu_busy_ratio": 0.0, "gpu_power_watts": 0.0}, jobs=["a", "b"]
        ),
        device("", "unreachable", {}, stale=EVIL, model=""),
    ]
    processes = [
        HostProcess(
            key="1@1", pid=41, uid=0, job="b/c", rank=0, devices=("GPU-0", "GPU-1"), polls=True
        ),
        HostProcess(key="2@1", pid=42, uid=0, steps_per_second=0.0),
    ]
    minute = 60 * SECOND
    usage = [
        UsagePeriod(
            time_ns=NOON + minute, job=None, state="unallocated", device_ms=60_000, energy_mj=None
        ),
        UsagePeriod(time_ns=NOON, job="a", state="busy", device_ms=30_000, energy_mj=1),
        UsagePeriod(time_ns=NOON, job="b", state="busy", device_ms=15_000, energy_mj=1),
    ]
    page = ContentPage(
        host_page.HOST_PAGE.content(
            HostView(HostDetailResponse(host=HERE, devices=devices, processes=processes), usage)
        )
    )
    assert page.heading == "node1"
    assert page.column("devices", "Busy") == ["50.0 %", "0 %", "–"]
    assert page.column("devices", "Power, W") == ["700", "0", "–"]
    assert page.column("devices", "Memory") == ["40.0 GB", "–", "–"]
    assert page.column("devices", "Why silent") == ["–", "–", SPELLED]
    assert page.leads("devices", "Jobs") == ["/jobs/a", "/jobs", ""]
    assert page.column("processes", "Rank") == ["0", "–"]
    assert page.column("processes", "Steps/s") == ["–", "0"]
    assert page.column("processes", "Traces") == ["prepared", "not prepared"]
    assert page.leads("processes", "Job") == ["/jobs/b/c", ""]
    numbers = page.numbers()
    assert (numbers["Devices"].value, numbers["Devices"].about) == ("3", "1 busy")
    assert numbers["Clock"] == Shown("2.50 ms", "ahead of the service, ± 30.0 µs", "", "")
    assert numbers["State"].about == "heard 2026-09-21 14:13:20 UTC"
    # Two minutes: in the first, devices were busy for 45 s of 60 s of the highest one.
    paths = {of.get("class"): of.get("d") for of in page.all("path")}
    assert paths == {
        "f-compute": "M0.0 120.0V30.0H500.0V120.0Z",
        "f-idle": "M500.0 120.0V0.0H1000.0V120.0Z",
    }


def test_a_host_that_was_never_heard_of_has_no_clock_and_no_version() -> None:
    page = ContentPage(
        host_page.HOST_PAGE.content(
            HostView(HostDetailResponse(host=NEVER, devices=[], processes=[]), [])
        )
    )
    numbers = page.numbers()
    assert {name: of.value for name, of in numbers.items()} == {
        "State": "never",
        "Devices": "0",
        "Processes": "0",
        "Clock": "–",
        "Agent": "–",
    }
    assert numbers["Clock"].about == "not measured yet"
    assert page.tables() == {}
    behind = ContentPage(
        host_page.HOST_PAGE.content(
            HostView(
                HostDetailResponse(
                    host=HostResponse(
                        host="n", heard_ns=NOON, lost=False, clock_offset_ns=0, clock_error_ns=0
                    ),
                    devices=[],
                    processes=[],
                ),
                [],
            )
        )
    )
    assert behind.numbers()["Clock"].value == "0 ns", "measured to be right is not unknown"


def job_view(answer: FleetJobResponse | None, **changes: object) -> JobView:
    fields: dict[str, object] = {
        "name": "a",
        "detail": JobDetailResponse(job=answer, processes=[]),
        "captures": [],
        "findings": [],
        "requests": [],
        "usage": [],
    }
    return JobView(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_job_that_does_not_run_says_so_and_keeps_what_was_captured() -> None:
    view = job_view(None, name="it's $HOME", requests=[request("r1", "done", capture="c1")])
    page = ContentPage(job_page.JOB_PAGE.content(view))
    assert page.heading == "it's $HOME"
    assert page.numbers() == {}
    assert "It does not run now, as far as hosts say." in words(page.all("header")[0])
    assert page.leads("requests", "Capture") == ["/captures/c1"]
    assert "Job" not in page.tables()["requests"].heads, "all are of this one"
    commands = [words(of) for of in page.all("code")]
    assert """traceloom upload run --job 'it'"'"'s $HOME'""" in commands, (
        "it can be pasted into a shell"
    )


def test_a_job_that_makes_no_steps_is_not_called_unmeasured() -> None:
    numbers = ContentPage(
        job_page.JOB_PAGE.content(job_view(job(steps_per_second=0.0, hung=True)))
    ).numbers()
    assert numbers["Steps/s"] == Shown("0", "of its slowest rank", "", "")
    assert numbers["Hangs"] == Shown("yes", "it makes no steps any more", "bad", "#processes-part")
    unmeasured = ContentPage(
        job_page.JOB_PAGE.content(job_view(job(steps_per_second=None)))
    ).numbers()
    assert unmeasured["Steps/s"] == Shown("–", "nobody measures it", "", "")
    assert "Hangs" not in unmeasured


def test_a_job_has_its_processes_findings_and_numbers() -> None:
    processes = [
        JobProcess(host="n/1", process=HostProcess(key="1@1", pid=7, uid=0, rank=0, polls=True)),
        JobProcess(host="n2", process=HostProcess(key="2@1", pid=8, uid=0)),
    ]
    findings = [
        FleetFinding(
            capture="c/1",
            slug="exposed-communication",
            saving_ns=2_000_000,
            saving_fraction=0.2,
            confidence=0.9,
            rank=3,
        ),
        FleetFinding(
            capture="c2",
            slug=EVIL,
            saving_ns=None,
            saving_fraction=None,
            confidence=None,
            rank=None,
        ),
    ]
    answer = job(
        world_size=None,
        hosts=["n/1", "n2"],
        processes=2,
        traceable=1,
        name="train",
        scheduler="slurm",
    )
    view = job_view(
        answer, detail=JobDetailResponse(job=answer, processes=processes), findings=findings
    )
    page = ContentPage(job_page.JOB_PAGE.content(view))
    numbers = page.numbers()
    assert numbers["Ranks"] == Shown("8", "the world size is not known, on 2 hosts", "", "")
    assert numbers["Traceable"].value == "1 of 2"
    assert numbers["User"] == Shown("ana", "train", "", "")
    assert page.leads("processes", "Host") == ["/hosts/n%2F1", "/hosts/n2"]
    assert page.column("processes", "Rank") == ["0", "–"]
    titles = page.tables()["findings"].texts
    assert [row[0] for row in titles] == ["exposed-communication", SPELLED]
    assert titles[1][1:-1] == ["–"] * (len(titles[1]) - 2)
    rows = page.tables()["findings"].rows
    assert [link.get("href") for link in rows[0][-1].iter("a")] == ["/captures/c%2F1"]
    assert "".join(rows[0][1].itertext()) == "20.0 %"
