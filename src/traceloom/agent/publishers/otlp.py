"""Sends metrics to an OpenTelemetry receiver by OTLP over HTTP, in the semantic conventions.

The snapshot is converted to the SDK's data points directly, not through instruments: times are
those of the collectors, an ended series is not repeated, and histograms keep their buckets. The
SDK's exporter encodes, sends, and retries until `otlp.timeout`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from traceloom import __version__
from traceloom.agent.config import Config
from traceloom.agent.metrics import METRICS, Metric, SeriesKey
from traceloom.agent.snapshot import Snapshot
from traceloom.errors import InputError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData

_AGENT_COUNTERS = ("job_", "step_", "dataloader_", "collector_", "agent_")  # count from its start
_HARDWARE_TYPES = {"gpu_": "gpu", "rdma_": "network"}  # prefix of metrics -> `hw.type`


class OtlpPublisher:
    """Sends the snapshot to `otlp.endpoint`.

    A failed delivery is counted in `failures` and never raised; `last_error` is the last error, or "".
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.failures = 0
        self.last_error = ""
        self._exporter: MetricExporter | None = None
        self._log = _LastMessageHandler()

    def start(self) -> None:
        """Load the SDK.

        Raises:
            InputError: `no-extra`: it is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        except ImportError as error:
            raise InputError(
                "OTLP needs the OpenTelemetry SDK",
                slug="no-extra",
                where="otlp.endpoint",
                hint="pip install 'traceloom[otlp]'",
            ) from error
        logger = logging.getLogger("opentelemetry.exporter")
        # Its messages become our `last_error` instead of a log line per minute.
        logger.addHandler(self._log)
        logger.propagate = False
        otlp = self.config.otlp
        endpoint = (
            otlp.endpoint
            if urlsplit(otlp.endpoint).path.strip("/")
            else otlp.endpoint.rstrip("/") + "/v1/metrics"
        )
        self._exporter = OTLPMetricExporter(endpoint, headers=otlp.headers, timeout=otlp.timeout)

    def put(self, host_snapshot: Snapshot) -> None:
        """Send all of the snapshot; blocks, so it is called in a thread."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        if self._exporter is None:
            return
        self._log.words = ""
        result = self._exporter.export(
            build_metrics_data(host_snapshot, self.config),
            timeout_millis=1000 * self.config.otlp.timeout,
        )
        if result is MetricExportResult.SUCCESS:
            self.last_error = ""
        else:
            self.failures += 1
            self.last_error = f"{self.config.otlp.endpoint}: {self._log.words or 'not delivered'}"

    def close(self) -> None:
        """Cancel a delivery in progress; called from another thread than `put`, which may be
        waiting for the receiver.
        """
        if self._exporter is not None:
            self._exporter.shutdown()
        logging.getLogger("opentelemetry.exporter").removeHandler(self._log)


class _LastMessageHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.words = record.getMessage()


@cache
def find_boot_ns() -> int:
    """Returns when the host was started: one instant, however its clocks are corrected later, as sums
    that begin at another one are other sums.
    """
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def build_metrics_data(host_snapshot: Snapshot, config: Config) -> MetricsData:
    """Returns the snapshot in the SDK's structures: cumulative sums with their start time, gauges,
    histograms.

    Metrics that share a name in the conventions (`hw.errors` of GPUs and of RDMA ports) become one,
    distinguished by attributes.
    """
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    points_by_name: dict[str, tuple[Metric, list[export.NumberDataPoint]]] = {}
    booted_ns = find_boot_ns()
    for series, value, at_ns in host_snapshot.values():
        metric = METRICS[series[0]]
        if metric.name == "host_info":  # it is in the resource
            continue
        start_ns = 0  # of a counter: when it started to count
        if metric.kind == "counter" and metric.name.startswith("process_"):
            process = host_snapshot.processes.get(series[1][metric.labels.index("process")])
            start_ns = process.started_ns if process else host_snapshot.started_ns
        elif metric.kind == "counter":
            start_ns = (
                host_snapshot.started_ns if metric.name.startswith(_AGENT_COUNTERS) else booted_ns
            )
        name = metric.opentelemetry_name or "traceloom." + metric.name.replace("_", ".")
        points_by_name.setdefault(name, (metric, []))[1].append(
            export.NumberDataPoint(_build_attributes(series, host_snapshot), start_ns, at_ns, value)
        )
    cumulative = export.AggregationTemporality.CUMULATIVE
    metrics = [
        export.Metric(
            name,
            metric.help,
            metric.opentelemetry_unit or "1",
            export.Sum(rows, cumulative, is_monotonic=True)
            if metric.kind == "counter"
            else export.Gauge(rows),
        )
        for name, (metric, rows) in points_by_name.items()
    ]
    histograms: dict[str, list[export.HistogramDataPoint]] = defaultdict(list)
    for histogram, at_ns in host_snapshot.histograms():
        attributes = _build_attributes((histogram.metric, histogram.labels), host_snapshot)
        cumulated = (0, *histogram.counts, histogram.number)
        histograms[histogram.metric].append(
            export.HistogramDataPoint(
                attributes,
                host_snapshot.started_ns,
                at_ns,
                histogram.number,
                histogram.total,
                [later - earlier for earlier, later in pairwise(cumulated)],
                METRICS[histogram.metric].bounds,
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )
        )
    for name, rows in histograms.items():
        metric = METRICS[name]
        data = export.Histogram(rows, cumulative)
        metrics.append(
            export.Metric(metric.opentelemetry_name, metric.help, metric.opentelemetry_unit, data)
        )
    identity = ""
    with contextlib.suppress(OSError):
        identity = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    resource = {
        "service.name": "traceloom-agent",
        "service.version": __version__,
        "service.instance.id": socket.gethostname(),
        "host.name": config.host_name,
        **({"host.id": identity} if identity else {}),
    }
    scope = export.ScopeMetrics(InstrumentationScope("traceloom.agent", __version__), metrics, "")
    return export.MetricsData([export.ResourceMetrics(Resource(resource), [scope], "")])


def _build_attributes(series: SeriesKey, host_snapshot: Snapshot) -> dict[str, str]:
    metric = METRICS[series[0]]
    labels = {label: value for label, value in zip(metric.labels, series[1], strict=True) if value}
    names = dict(metric.attributes)
    out = {
        **dict(metric.constants),
        **{names.get(label, f"traceloom.{label}"): value for label, value in labels.items()},
    }
    kind = next(
        (kind for prefix, kind in _HARDWARE_TYPES.items() if metric.name.startswith(prefix)), ""
    )
    if kind:
        out["hw.type"] = kind
    if kind == "gpu" and (device := host_snapshot.devices.get(labels.get("device", ""))):
        described = {
            "hw.name": f"{device.model} {device.index}",
            "hw.vendor": device.vendor,
            "hw.model": device.model,
            "hw.parent": device.parent,
        }
        out |= {name: value for name, value in described.items() if value}
    return out
