"""The rows of a capture say what its report says: the same devices, the same sums, nothing lost and nothing twice."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date

import polars as pl
import pytest

from support.jobs import ParallelRecipe, parallel_job
from support.public_traces import DATA, NAMES, NEEDS_TRACES
from support.sessions import busy_step, empty, host_only, several_devices
from traceloom.analyze.idle import CAUSES
from traceloom.analyze.kernel_efficiency import kernel_bounds
from traceloom.findings import findings
from traceloom.fleet.service import capture_rows
from traceloom.fleet.service.capture_rows import CaptureOrigin, build_capture_rows
from traceloom.fleet.store.schema import SCHEMAS
from traceloom.formats import load
from traceloom.report import ReportOptions, build
from traceloom.testing import TraceBuilder
from traceloom.trace.session import TELEMETRY_SCHEMA, Session

FAILING = DATA / "failing" / "05_two_processes_without_rank"
ORIGIN = CaptureOrigin("c0", 1_790_000_000 * 10**9, request="r", job="j", code="abc")
QUICK = (
    "h100_bert_small",
    "mi250_minitoy",
    "h800_deepseek_train",
    "mtia_inference",
    "cpu_only_gloo_rank34",
)


def hold(session: Session) -> dict[str, pl.DataFrame]:
    """Compare the rows with the report of the same session."""
    tables = build_capture_rows(session, ORIGIN)
    document = build(session, ReportOptions(only=("kinds", "kernel_shapes", "roofline")))
    assert {name: frame.schema for name, frame in tables.items()} == {
        name: SCHEMAS[name].types for name in ("captures", "devices", "kernels", "findings")
    }
    reported = [(rank, device) for rank in document["ranks"] for device in rank["devices"]]
    devices = tables["devices"].to_dicts()
    assert len(devices) == len(reported)
    for row, (rank, device) in zip(devices, reported, strict=True):
        assert (row["capture"], row["rank"], row["device"]) == (
            "c0",
            rank["rank"],
            device["device"],
        )
        for name in (
            "window_ns",
            "busy_ns",
            "idle_ns",
            "compute_ns",
            "communication_ns",
            "memory_ns",
        ):
            assert row[name] == device[name]
        causes = {cause: row[f"idle_{cause}_ns"] for cause in CAUSES}
        assert {cause: ns for cause, ns in causes.items() if ns} == {
            cause: ns for cause, ns in device["idle_causes"].items() if ns
        }
        assert sum(causes.values()) == row["idle_ns"]
        exposed = row["exposed_communication_ns"] + row["exposed_memory_ns"]
        assert row["compute_ns"] + exposed + row["idle_ns"] == row["window_ns"]
    kernels = tables["kernels"]
    for column, entries in (("kernel", document["kernels"]), ("kind", document["kinds"]["job"])):
        summed = dict(kernels.group_by(column).agg(pl.col("total_ns").sum()).rows())
        total, name = ("total_ns", "name") if column == "kernel" else ("sum_ns", "kind")
        expected: dict[str, int] = {}
        for entry in entries:
            expected[entry[name]] = expected.get(entry[name], 0) + entry[total]
        assert {key: ns for key, ns in summed.items() if ns} == {
            key: ns for key, ns in expected.items() if ns
        }
    shapes = ["op", "shapes", "types", "kernel"]
    by_shape = kernels.group_by(shapes).agg(
        pl.col("count", "total_ns").sum(), pl.col("min_ns").min(), pl.col("max_ns").max()
    )
    of_report = pl.DataFrame(
        document["kernel_shapes"]["rows"],
        schema_overrides=dict.fromkeys(shapes, pl.String),
        infer_schema_length=None,
    )
    if of_report.height:
        of_report = of_report.group_by(shapes).agg(
            pl.col("count", "total_ns").sum(), pl.col("min_ns").min(), pl.col("max_ns").max()
        )
        both = by_shape.join(
            of_report, on=[*shapes, "count", "total_ns", "min_ns", "max_ns"], nulls_equal=True
        )
        assert both.height == of_report.height  # it may leave out the smallest rows
    bounds: dict[str, int] = {}
    for trace in session.traces:
        for bound, ns in kernel_bounds(trace).bounds.select("bound", "sum_ns").rows():
            bounds[bound] = bounds.get(bound, 0) + ns
    assert dict(kernels.group_by("bound").agg(pl.col("total_ns").sum()).rows()) == pytest.approx(
        {bound: ns for bound, ns in bounds.items() if ns or bound in kernels["bound"]}
    )
    capture = tables["captures"].row(0, named=True)
    assert capture["step_ns"] == document["answer"]["step_ns"]
    assert (capture["request"], capture["job"], capture["code"]) == ("r", "j", "abc")
    ranked = findings(session)
    assert tables["findings"].select("slug", "saving_ns").rows() == [
        (finding.slug, finding.saving_ns) for finding in (*ranked.time, *ranked.memory)
    ]
    return tables


class TestPublicTraces:
    pytestmark = NEEDS_TRACES

    @pytest.mark.parametrize("name", QUICK)
    def test_rows_are_those_of_the_report(self, name: str) -> None:
        hold(load(DATA / "kineto" / f"{name}.json.gz"))

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", sorted({*NAMES} - {*QUICK}))
    def test_rows_of_all_others_are_too(self, name: str) -> None:
        hold(load(DATA / "kineto" / f"{name}.json.gz"))


@pytest.mark.thorough
def test_rows_of_a_made_job_of_several_ranks() -> None:
    run = parallel_job(ParallelRecipe(data=2, tensor=2, steps=2)).run()
    tables = hold(Session(tuple(builder.build() for builder in run.traces()), "made"))
    assert tables["captures"].row(0, named=True)["ranks"] == 4
    assert tables["devices"]["rank"].to_list() == [0, 1, 2, 3]


@pytest.mark.parametrize("made", [several_devices, host_only, empty])
def test_rows_of_odd_runs(made: object) -> None:
    hold(made())  # type: ignore[operator]


def session() -> Session:
    builder = TraceBuilder(rank=3, host="node7")
    for step in range(4):
        busy_step(builder, step, 1000 * step)
    return Session((builder.build(),), "made")


def test_a_capture_without_a_time_of_day_is_of_the_day_it_came() -> None:
    trace = session().traces[0]
    boot = replace(trace, meta=replace(trace.meta, clock="unknown"))
    capture = build_capture_rows(Session((boot,), "made"), ORIGIN)["captures"].row(0, named=True)
    assert (capture["start_ns"], capture["day"]) == (ORIGIN.received_ns, date(2026, 9, 21))


def test_clocks_come_from_the_telemetry_of_the_host() -> None:
    samples = [
        {
            "host": host,
            "time_ns": 1,
            "metric": "gpu_clock_hertz",
            "labels": json.dumps({"device": "d", "domain": domain}),
            "value": value,
            "unit": "hertz",
            "kind": "gauge",
        }
        for host, domain, value in (
            ("node7", "sm", 1.0e9),
            ("node7", "sm", 2.0e9),
            ("node7", "memory", 9e9),
            ("other", "sm", 7e9),
        )
    ]
    telemetry = pl.DataFrame(samples, schema=TELEMETRY_SCHEMA)
    with_clock = build_capture_rows(replace(session(), telemetry=telemetry), ORIGIN)["kernels"]
    assert set(with_clock["clock_hz"]) == {1.5e9}
    assert set(build_capture_rows(session(), ORIGIN)["kernels"]["clock_hz"]) == {None}


def test_of_very_many_kernels_the_small_become_one_and_no_time_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = TraceBuilder()
    for number in range(7):
        builder.launch("cudaLaunchKernel", 100 * number, 5, correlation=number)
        builder.kernel(f"kernel{number}", 100 * number + 20, 10 + number, correlation=number)
    many = Session((builder.build(),), "many")
    whole = build_capture_rows(many, ORIGIN)["kernels"]
    monkeypatch.setattr(capture_rows, "MAX_KERNELS", 3)
    cut = build_capture_rows(many, ORIGIN)["kernels"]
    assert cut.select("kernel", "count", "total_ns", "min_ns", "max_ns").rows() == [
        ("kernel6", 1, 16_000, 16_000, 16_000),
        ("kernel5", 1, 15_000, 15_000, 15_000),
        (capture_rows.OTHERS_LABEL, 5, 60_000, 10_000, 14_000),
    ]
    assert cut.select("count", "total_ns").sum().row(0) == whole.select(
        "count", "total_ns"
    ).sum().row(0)


def test_what_fails_by_our_fault_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr(capture_rows, "find_linkable", fails)
    tables = build_capture_rows(session(), ORIGIN)
    assert tables["findings"].height == 0
    assert "section-failed" in tables["captures"]["notices"].item().to_list()
    assert tables["devices"].height == 1


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_without_ranks_have_the_rows_of_each_as_their_report_does(replicas: int) -> None:
    """As the replicas of a server, which cannot form one graph."""
    traces = []
    for number in range(replicas):
        builder = TraceBuilder()
        busy_step(builder, 0, 10 * number)
        trace = builder.build()
        meta = replace(trace.meta, rank=None, process=100 + number, path=f"pid{number}.json")
        traces.append(replace(trace, meta=meta))
    together = Session(tuple(traces), "replicas")
    tables = build_capture_rows(together, ORIGIN)
    document = build(together, ReportOptions())
    assert document["findings"] == []
    assert tables["captures"]["ranks"].to_list() == [replicas]
    assert tables["findings"].is_empty()
    alone = [build_capture_rows(Session((trace,), "one"), ORIGIN) for trace in traces]
    for name in ("devices", "kernels"):
        rows = [row for each in alone for row in each[name].rows()]
        assert sorted(tables[name].rows(), key=str) == sorted(rows, key=str)


@pytest.mark.skipif(not FAILING.exists(), reason="the given recordings are not there")
def test_given_processes_without_ranks_are_a_capture() -> None:
    tables = build_capture_rows(load(FAILING), ORIGIN)
    assert tables["captures"]["ranks"].to_list() == [2]
