"""The made fleet: the questions of the service answer with what was planted, and its files say what its rows say."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.demo_store import demo_store  # noqa: E402
from support.prometheus import free_port  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.analyze.compare import compare  # noqa: E402
from traceloom.analyze.kernel_efficiency import LATENCY_SHARE  # noqa: E402
from traceloom.cli.upload import FleetClient  # noqa: E402
from traceloom.errors import InputError, OutputError, UsageError  # noqa: E402
from traceloom.fleet.analyses.anomalies import find_outliers  # noqa: E402
from traceloom.fleet.analyses.attribution import (  # noqa: E402
    UNATTRIBUTED,
    compute_ownership_periods,
    divide_device_time,
)
from traceloom.fleet.analyses.efficiency import compute_fleet_topline, compute_savings  # noqa: E402
from traceloom.fleet.analyses.regressions import Regressions, find_regressions  # noqa: E402
from traceloom.fleet.demo import (  # noqa: E402  # noqa: E402
    MARKER_FILE,
    SILENT_HOST,
    SLOW_HOST,
    TRACE_FILE,
    build_last_heartbeats,
    open_demo_directory,
)
from traceloom.fleet.service.capture_rows import CaptureOrigin, build_capture_rows  # noqa: E402
from traceloom.fleet.store.tables import Tables  # noqa: E402
from traceloom.formats import load  # noqa: E402
from traceloom.testing.fleet_weeks import Weeks  # noqa: E402


class Filled(NamedTuple):
    """A store that holds a demo, and what is true of its weeks."""

    path: Path
    tables: Tables
    weeks: Weeks
    now_ns: int

    def file(self, capture: str) -> Path:
        [path] = self.path.glob(f"captures/*/{capture}/{TRACE_FILE}")
        return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    path, made, now_ns = demo_store(tmp_path_factory)
    return Filled(path, Tables(str(path)), Weeks(made), now_ns)


@pytest.fixture(scope="module")
def changes(demo: Filled) -> Regressions:
    return find_regressions(
        *(demo.tables.scan(name) for name in ("kernels", "captures", "devices"))
    )


def test_the_planted_changes_are_what_became_slower(demo: Filled, changes: Regressions) -> None:
    causes = {"code": "code", "": "unknown", "shapes": "shapes"}
    planted = {
        (demo.weeks.kernel(change), causes[change.cause]) for change in demo.weeks.recipe.changes
    }
    assert set(changes.changes.select("kernel", "cause").rows()) == planted
    worst = changes.slower.row(0, named=True)
    assert worst["kernel"] == demo.weeks.kernel(demo.weeks.recipe.changes[0])
    assert worst["low"] < 9 < worst["high"]


def test_its_captures_show_the_kernel_that_became_slower(
    demo: Filled, changes: Regressions
) -> None:
    worst = changes.slower.row(0, named=True)
    healthy, slow = (load(demo.file(worst[side])) for side in ("healthy_capture", "capture"))
    shown = compare(healthy, slow).kernels.sort("difference_ns", descending=True).row(0, named=True)
    assert (shown["status"], shown["new_kernel"]) == ("slower", worst["kernel"])


def test_the_slow_host_is_the_outlier(demo: Filled) -> None:
    hosts = find_outliers(
        *(demo.tables.scan(name) for name in ("kernels", "captures", "devices"))
    ).hosts
    assert hosts.filter("outlier")["host"].to_list() == [demo.weeks.hosts[SLOW_HOST]]


def test_there_are_owners_an_idle_team_and_what_to_invest_in(demo: Filled) -> None:
    owned = compute_ownership_periods(demo.tables.scan("jobs"), demo.tables.scan("owners"))
    usage = demo.tables.scan("usage_hour")
    divisions = divide_device_time(usage, owned, ["division"]).leaves["division"].to_list()
    assert {"ads", "research", UNATTRIBUTED, "unallocated", "unreachable"} == set(divisions)
    models = compute_fleet_topline(usage, owned, demo.tables.scan("captures"), "model").rows
    use = dict(models.select("model", "device_use").iter_rows())
    assert use["vision"] == pytest.approx(0.05, abs=0.001)
    assert use["assistant"] == pytest.approx(0.9, abs=0.001)
    captures, findings = demo.tables.scan("captures"), demo.tables.scan("findings")
    saved = compute_savings(usage, owned, captures, findings, ["model", "rule"]).rows
    idle = saved.filter(pl.col("model") == "vision").row(0, named=True)
    hours = dict(models.select("model", "device_hours").iter_rows())["vision"]
    assert (idle["rule"], idle["jobs"]) == (
        "host-pause",
        captures.filter(pl.col("job").str.starts_with("vision"))
        .select(pl.col("job").n_unique())
        .collect()
        .item(),
    )
    assert 0.7 < idle["saved_ms"] / hours / 3.6e6 < 0.95  # nearly all that its devices wait


def test_everything_ends_now(demo: Filled) -> None:
    ends = demo.tables.scan("usage_minute").select(pl.col("time_ns").max()).collect().item()
    assert 60 * 10**9 <= demo.now_ns - ends < 120 * 10**9
    captures = demo.tables.scan("captures").collect()
    assert (captures["start_ns"] + captures["window_ns"]).max() < demo.now_ns  # type: ignore[operator]
    assert captures["start_ns"].max() > demo.now_ns - 8 * 3600 * 10**9  # type: ignore[operator]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["recommender", "assistant", "vision", "speech"])
def test_the_rows_of_a_capture_are_what_its_file_says(demo: Filled, model: str) -> None:
    captures = (
        demo.tables.scan("captures")
        .filter(pl.col("job").str.starts_with(model))
        .sort("start_ns")
        .collect()
    )
    capture = captures.row(-1, named=True)
    by_analysis = build_capture_rows(
        load(demo.file(capture["capture"])),
        CaptureOrigin(capture["capture"], 1, job=capture["job"]),
    )
    of_capture = pl.col("capture") == capture["capture"]
    keys = ("kernel", "op", "shapes", "types")
    for table, exact in (
        (
            "captures",
            (
                "capture",
                "day",
                "start_ns",
                "window_ns",
                "ranks",
                "hosts",
                "device_model",
                "notices",
            ),
        ),
        ("devices", ("host", "device", "window_ns", "busy_ns", "idle_ns", "compute_ns")),
        (
            "kernels",
            (*keys, "kind", "count", "total_ns", "min_ns", "max_ns", "roofline_ns"),
        ),
        ("findings", ("slug", "rank")),
    ):
        order = exact[:4] if len(exact) > 4 else exact
        # Whether a kernel is far from its roofline is judged near a threshold, too.
        certain = pl.lit(True) if table != "findings" else pl.col("slug") != "low-roofline"
        kept = demo.tables.scan(table).filter(of_capture & certain).select(exact).sort(order)
        assert kept.collect().equals(by_analysis[table].filter(certain).select(exact).sort(order))
    # What bounds a kernel is that of the first capture of its kind: near the threshold it may differ.
    share = pl.col("roofline_ns") / pl.col("total_ns")
    clear = pl.col("roofline_ns").is_null() | ((share / LATENCY_SHARE - 1).abs() > 0.06)
    bounds = demo.tables.scan("kernels").filter(of_capture).filter(clear).collect()
    expected = by_analysis["kernels"].filter(clear)
    assert 0 < bounds.height == expected.height
    assert bounds.sort(keys)["bound"].to_list() == expected.sort(keys)["bound"].to_list()
    [said] = by_analysis["captures"].to_dicts()
    for number in ("step_ns", "mfu", "roofline_fraction"):
        assert capture[number] == pytest.approx(said[number], rel=0.05)


def test_a_demo_that_was_served_before_has_the_same_hosts(demo: Filled, tmp_path: Path) -> None:
    shutil.copytree(demo.path, tmp_path / "store")
    again = Tables(str(tmp_path / "store"))
    jobs = (
        demo.tables.scan("jobs").with_columns(pl.col("valid_from_ns") + 1).collect()
    )  # as its hosts tell of them
    again.commit("served before", 1, {"jobs": jobs})
    hosts = build_last_heartbeats(again)
    assert hosts == build_last_heartbeats(demo.tables)
    busy = [device.values["gpu_busy_ratio"] for host in hosts.values() for device in host.devices]
    assert 0.5 < max(busy) <= 1


def test_it_is_served_with_a_token_of_its_own_until_ctrl_c(demo: Filled, tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "log"
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    arguments = [
        "serve",
        "--demo",
        "--store",
        str(demo.path),
        "--address",
        f"127.0.0.1:{port}",
        "--workers",
        "1",
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "traceloom", *arguments],
            stdout=file,
            stderr=file,
            env=environment,
        )
    try:
        until(lambda: b"Try:" in log.read_bytes() or process.poll() is not None)
        token = re.search(r"tl_[\w-]+", log.read_text())
        assert token, log.read_text()
        client = FleetClient(f"http://127.0.0.1:{port}", token[0])
        hosts = {host["host"]: host["lost"] for host in until(lambda: _heard(client))}
        assert hosts == dict.fromkeys(demo.weeks.hosts, False) | {SILENT_HOST: True}
        states = [request["state"] for request in client.get("requests")["requests"]]
        assert sorted(states) == ["cancelled", "done", "done", "failed", "partial"]
        rules = {rule["name"]: rule for rule in client.get("triggers")["rules"]}
        [asked] = [
            request
            for request in client.get("requests")["requests"]
            if request["who"] == "trigger slower"
        ]
        assert (rules["slower"]["fired"], rules["slower"]["last"]["request"]) == (1, asked["id"])
        assert rules["idle-devices"]["refusals"]
        assert [webhook["name"] for webhook in client.get("webhooks")["webhooks"]] == ["chat"]
        assert client.post("backfill")["captures"] == 0
        assert not list(tmp_path.rglob("fleet-token"))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()


def _heard(client: FleetClient) -> list[dict[str, object]]:
    try:
        hosts: list[dict[str, object]] = client.get("hosts")["hosts"]
    except InputError as error:
        if error.slug != "not-leading":
            raise
        return []
    return hosts if sum(not host["lost"] for host in hosts) >= 8 else []


def test_a_temporary_store_goes_and_one_that_is_named_stays(tmp_path: Path) -> None:
    with open_demo_directory("") as directory:
        assert not directory.full
        (directory.path / "x").touch()
    assert not directory.path.exists()
    with open_demo_directory(str(tmp_path / "own")) as directory:
        directory.filled()
    with open_demo_directory(str(tmp_path / "own")) as directory:
        assert directory.full


@pytest.mark.parametrize("content", ["state.db", MARKER_FILE])
def test_nothing_is_put_among_other_things_or_into_half_a_demo(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / content).touch()
    with (
        pytest.raises(OutputError, match=r"other things|not filled to the end") as raised,
        open_demo_directory(str(tmp_path)),
    ):
        pass
    assert raised.value.slug == "cannot-write"
    assert [path.name for path in tmp_path.iterdir()] == [content]


def test_a_demo_is_kept_in_a_directory() -> None:
    with pytest.raises(UsageError), open_demo_directory("s3://bucket/prefix"):
        pass


def test_ctrl_c_while_it_is_filled_leaves_nothing() -> None:
    program = (
        "import time; from traceloom.system import process as leaving; from traceloom.fleet.demo import open_demo_directory as demo_directory\n"
        "leaving.install_signal_handlers()\n"
        "with demo_directory('') as made: print(made.path, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.is_dir()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not path.exists()
