"""OTLP: received by a real HTTP server, parsed with the official protobuf."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

from support.agent_server import full_board
from traceloom.agent.config import Config, Otlp
from traceloom.agent.metrics import METRICS, Reading
from traceloom.agent.publishers import OtlpPublisher, build_metrics_data
from traceloom.agent.snapshot import Snapshot


class Receiver(HTTPServer):
    """Takes what is sent; answers with the statuses in turn, then with 200."""

    def __init__(self, statuses: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses = statuses
        self.taken: list[tuple[str, dict[str, str], bytes]] = []


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiver(*statuses: int) -> Iterator[Receiver]:
    with Receiver(list(statuses)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _publisher(server: Receiver, timeout: float = 10.0) -> OtlpPublisher:
    endpoint = f"http://127.0.0.1:{server.server_port}"
    publisher = OtlpPublisher(
        Config(
            host="node1", otlp=Otlp(endpoint=endpoint, headers={"x-team": "ml"}, timeout=timeout)
        )
    )
    publisher.start()
    return publisher


def _metrics(body: bytes):
    request = ExportMetricsServiceRequest()
    request.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    (of_resource,) = request.resource_metrics
    (of_scope,) = of_resource.scope_metrics
    return of_resource.resource, {metric.name: metric for metric in of_scope.metrics}


def _attributes(holder):
    return {attribute.key: attribute.value.string_value for attribute in holder.attributes}


@pytest.fixture(scope="module")
def delivered():
    """The snapshot, the headers, and what the receiver got."""
    host_snapshot = full_board()
    with receiver() as server:
        publisher = _publisher(server)
        publisher.put(host_snapshot)
        publisher.close()
        assert (publisher.failures, publisher.last_error) == (0, "")
        ((path, headers, body),) = server.taken
    assert path == "/v1/metrics"
    resource, metrics = _metrics(body)
    return host_snapshot, headers, resource, metrics


def test_the_resource_is_the_host(delivered) -> None:
    _, headers, resource, _ = delivered
    attributes = _attributes(resource)
    assert (attributes["service.name"], attributes["host.name"]) == ("traceloom-agent", "node1")
    assert headers["x-team"] == "ml"
    assert headers["content-type"] == "application/x-protobuf"


def test_names_units_and_values_are_those_of_the_conventions(delivered) -> None:
    host_snapshot, _, _, metrics = delivered
    values = {series: value for series, value, _ in host_snapshot.values()}
    points = {
        (name, tuple(sorted(_attributes(point).items()))): point.as_double
        for name, metric in metrics.items()
        for point in [*metric.gauge.data_points, *metric.sum.data_points]
    }
    assert len(points) == len(values) - 1  # all are there; what the host is, is in the resource
    described = {
        "hw.type": "gpu",
        "hw.id": "GPU-0",
        "hw.name": "H100 0",
        "hw.vendor": "nvidia",
        "hw.model": "H100",
    }

    def of(name: str, **attributes: str) -> float:
        return points[
            name, tuple(sorted({k.replace("_", "."): v for k, v in attributes.items()}.items()))
        ]

    assert of("system.cpu.time", cpu_mode="user") == values["host_cpu_seconds_total", ("user",)]
    assert of("hw.power", **described) == values["gpu_power_watts", ("GPU-0",)]
    assert (
        of("hw.gpu.utilization", **described, hw_gpu_task="general")
        == values["gpu_busy_ratio", ("GPU-0",)]
    )
    assert of("hw.status", **described, hw_state="ok") == values["gpu_up", ("GPU-0",)]
    units = {name: metric.unit for name, metric in metrics.items()}
    assert (units["system.cpu.time"], units["hw.energy"], units["hw.gpu.memory.usage"]) == (
        "s",
        "J",
        "By",
    )


def test_counters_are_cumulative_sums_and_gauges_are_gauges(delivered) -> None:
    host_snapshot, _, _, metrics = delivered
    for metric in METRICS.values():
        if not metric.opentelemetry_name:
            continue
        sent = metrics[metric.opentelemetry_name]
        assert (
            sent.WhichOneof("data")
            == {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}[metric.kind]
        )
        if metric.kind == "counter":
            assert sent.sum.is_monotonic
            assert (
                sent.sum.aggregation_temporality
                == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
            )
            assert all(0 < p.start_time_unix_nano < p.time_unix_nano for p in sent.sum.data_points)
    (first, _) = metrics["process.disk.io"].sum.data_points
    assert first.start_time_unix_nano == host_snapshot.processes["11@100"].started_ns
    assert (
        metrics["traceloom.dataloader.wait"].sum.data_points[0].start_time_unix_nano
        == host_snapshot.started_ns
    )
    assert (
        metrics["system.cpu.time"].sum.data_points[0].start_time_unix_nano
        < host_snapshot.started_ns
    )


def test_a_histogram_keeps_its_buckets(delivered) -> None:
    sent = delivered[3]["traceloom.step.duration"].histogram
    assert sent.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    point = sent.data_points[0]
    assert _attributes(point) == {"traceloom.job": "slurm-7", "traceloom.rank": "0"}
    assert list(point.explicit_bounds) == list(METRICS["step_seconds"].bounds)
    assert (list(point.bucket_counts)[:5], sum(point.bucket_counts), point.sum) == (
        [0, 1, 1, 1, 0],
        5,
        1.25,
    )


def test_metrics_that_share_a_name_agree_in_kind_and_unit() -> None:
    kinds: dict[str, tuple[str, str]] = {}
    for metric in METRICS.values():
        if metric.opentelemetry_name:
            assert kinds.setdefault(
                metric.opentelemetry_name, (metric.kind, metric.opentelemetry_unit)
            ) == (
                metric.kind,
                metric.opentelemetry_unit,
            ), metric.name


def test_a_receiver_that_is_busy_is_tried_again() -> None:
    with receiver(503) as server:
        publisher = _publisher(server)
        publisher.put(full_board())
        assert (len(server.taken), publisher.failures) == (2, 0)
        publisher.close()


def test_a_refusal_is_counted_and_said() -> None:
    with receiver(400) as server:
        publisher = _publisher(server)
        publisher.put(full_board())
        assert publisher.failures == 1
        assert "400" in publisher.last_error
        publisher.put(full_board())
        assert (publisher.failures, publisher.last_error) == (1, "")
        publisher.close()


def test_closing_ends_a_delivery_that_waits() -> None:
    with receiver(*[503] * 50) as server:
        publisher = _publisher(server, timeout=300)
        waiting = threading.Thread(target=publisher.put, args=(full_board(),))
        waiting.start()
        while not server.taken:
            threading.Event().wait(0.01)
        publisher.close()
        waiting.join(60)
        assert not waiting.is_alive()
        assert publisher.failures == 1


def test_counters_say_when_they_began_to_count(delivered) -> None:
    """Those of a process with it, those of the agent with the agent, those of the kernel and of devices with the host."""
    host_snapshot, _, _, metrics = delivered
    booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    starts: dict[str, set[int]] = {}
    for metric in METRICS.values():
        if metric.kind == "counter":
            points = metrics[
                metric.opentelemetry_name or f"traceloom.{metric.name.replace('_', '.')}"
            ].sum.data_points
            starts[metric.name] = {point.start_time_unix_nano for point in points}
            assert all(point.time_unix_nano >= point.start_time_unix_nano for point in points)
    assert starts["process_cpu_seconds_total"] == {
        process.started_ns for process in host_snapshot.processes.values()
    }
    for name in ("agent_requests_total", "collector_failures_total", "job_energy_joules_total"):
        assert starts[name] == {host_snapshot.started_ns}
    for name in ("host_cpu_seconds_total", "gpu_energy_joules_total", "cgroup_cpu_seconds_total"):
        assert all(abs(start - booted_ns) < 10**9 for start in starts[name])


def test_a_series_of_no_device_is_sent_and_sums_begin_at_one_instant() -> None:
    host_snapshot = Snapshot()
    host_snapshot.put("a", [Reading("gpu_power_watts", ("",), 1.0)], 5)
    host_snapshot.put("b", [Reading("host_cpu_seconds_total", ("user",), 1.0)], 5)
    starts = set()
    for _ in range(3):
        data = build_metrics_data(host_snapshot, Config())
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        assert len(metrics) == 2
        starts |= {
            point.start_time_unix_nano for metric in metrics for point in metric.data.data_points
        }
    assert len(starts) == 2, "that of a gauge, and that of the host"
