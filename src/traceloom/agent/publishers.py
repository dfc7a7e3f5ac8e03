"""Publishes metrics: the OpenMetrics text that Prometheus scrapes, and OTLP to a collector.

Counters of dcgm-exporter lack the suffix `_total` that OpenMetrics requires, so in that format
their type is `unknown`; Prometheus treats both alike.

The name of the host is a label of `traceloom_host_info` only: a scraper adds `instance` to
everything.

The snapshot is converted to the SDK's data points directly, not through instruments: times are
those of the collectors, an ended series is not repeated, and histograms keep their buckets. The
SDK's exporter encodes, sends, and retries until `otlp.timeout`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from traceloom import __version__
from traceloom.agent.config import Config
from traceloom.agent.metrics import METRICS, HistogramReading, Metric, SeriesKey
from traceloom.agent.snapshot import Snapshot, VisibleSnapshot
from traceloom.errors import InputError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData


def build_dcgm_families(host_snapshot: Snapshot | VisibleSnapshot, host: str) -> list[Family]:
    """Returns families with dcgm-exporter's names, without series of unknown devices."""
    labels = build_device_labels(host_snapshot, host)
    families: dict[str, Family] = {}
    # Several collectors may have a series.
    latest = {
        key: value for key, value, _ in host_snapshot.values() if METRICS[key[0]].dcgm_aliases
    }
    for (name, values), value in latest.items():
        metric = METRICS[name]
        series_labels = dict(zip(metric.labels, values, strict=True))
        device = labels.get(series_labels.get("device", ""))
        if device is None:
            continue
        for alias in metric.dcgm_aliases:
            if any(series_labels.get(label) != expected for label, expected in alias.where):
                continue
            family = families.get(alias.name)
            if family is None:
                kind = "gauge" if alias.kind == "gauge" else "unknown"
                family = families[alias.name] = Family(
                    alias.name, f"{metric.help} As {metric.full_name}.", kind
                )
            family.add_sample(alias.name, device, value * alias.factor)
    return list(families.values())


def build_device_labels(
    host_snapshot: Snapshot | VisibleSnapshot, host: str
) -> dict[str, dict[str, str]]:
    """Returns the labels of each device; a partition has those of its device, with its profile and
    number.

    Pod, container and job are set only if a device has exactly one of them: a series for each would
    count it twice.
    """
    owners: dict[str, set[tuple[str, str, str, str]]] = defaultdict(set)
    for process in host_snapshot.processes.values():
        process_owner = process.owner
        scheduled = (
            process_owner.job.partition("-")[2]
            if process_owner.scheduler in ("slurm", "pbs", "lsf", "flux")
            else ""
        )
        for uuid in {*process.devices, *process.owner.devices}:
            owners[uuid].add(
                (process_owner.pod, process_owner.namespace, process_owner.container, scheduled)
            )
    labels_by_device = {}
    shared = Counter((device.parent, device.instance) for device in host_snapshot.devices.values())
    for uuid, device in host_snapshot.devices.items():
        physical_device = host_snapshot.devices.get(device.parent, device)
        labels = {
            "gpu": physical_device.index,
            "UUID": physical_device.uuid,
            "pci_bus_id": physical_device.pci,
            "device": f"nvidia{physical_device.index}",
            "modelName": physical_device.model,
            "Hostname": host,
            "DCGM_FI_DRIVER_VERSION": physical_device.driver,
        }
        if device.parent:
            labels |= {
                "GPU_I_PROFILE": device.partition.partition("gi=")[0].strip(),
                "GPU_I_ID": device.instance.removeprefix("gi=") or device.index,
            }
            if shared[device.parent, device.instance] > 1:  # compute instances of one of these
                labels["GPU_C_ID"] = device.partition.rpartition("ci=")[2]
        owner = owners[uuid].copy() - {("", "", "", "")}
        if len(owner) == 1:
            names = ("pod", "namespace", "container", "hpc_job")
            labels |= {name: value for name, value in zip(names, owner.pop(), strict=True) if value}
        labels_by_device[uuid] = {name: value for name, value in labels.items() if value}
    return labels_by_device


class FamilyCollector:
    """A collector in prometheus_client's sense: families of metrics with their samples."""

    def __init__(self, families: list[Family]) -> None:
        self.families = families

    def collect(self) -> list[Family]:
        """Returns all families."""
        return self.families


def render_openmetrics(
    host_snapshot: Snapshot | VisibleSnapshot, config: Config, accept: str = ""
) -> tuple[bytes, str]:
    """Returns the text of all series, and its media type.

    Args:
        host_snapshot: The snapshot.
        config: With `dcgm` in `compat`, dcgm-exporter's names are appended.
        accept: The scraper's `Accept` header; without OpenMetrics in it, the text format of
            Prometheus.
    """
    collected = build_families(host_snapshot)
    if "dcgm" in config.compat:
        collected += build_dcgm_families(host_snapshot, config.host_name)
    registry = FamilyCollector(collected)
    if is_openmetrics_preferred(accept):
        return openmetrics.generate_latest(registry), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def is_openmetrics_preferred(accept: str) -> bool:
    """Whether an `Accept` header prefers OpenMetrics to, or accepts it as well as, any other text
    type.
    """
    weights: dict[str, float] = {}
    for choice in accept.split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            weights[kind] = max(weights.get(kind, 0.0), float(quality))
        except ValueError:
            continue
    weight = weights.pop("application/openmetrics-text", 0.0)
    return weight > 0 and weight >= max(
        (weights.get(kind, 0.0) for kind in ("text/plain", "*/*")), default=0.0
    )


def build_families(host_snapshot: Snapshot | VisibleSnapshot) -> list[Family]:
    """Returns a family for each metric that has series, in the order of declaration."""
    values_by_metric: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for (name, labels), value, _ in host_snapshot.values():
        values_by_metric[name][labels] = value  # deduplicates series of several collectors
    histograms: dict[str, list[HistogramReading]] = defaultdict(list)
    for histogram, _ in host_snapshot.histograms():
        histograms[histogram.metric].append(histogram)
    families = []
    for name, metric in METRICS.items():
        if name not in values_by_metric and name not in histograms:
            continue
        family = Family(
            metric.full_name.removesuffix("_total").removesuffix("_info"), metric.help, metric.kind
        )
        family.unit = metric.unit
        for values, value in values_by_metric[name].items():
            family.add_sample(metric.full_name, _build_labels(metric, values), value)
        for histogram in histograms[name]:
            histogram_labels = _build_labels(metric, histogram.labels)
            for bound, count in zip(
                (*metric.bounds, math.inf), (*histogram.counts, histogram.number), strict=True
            ):
                bound_text = "+Inf" if bound == math.inf else repr(bound)
                family.add_sample(
                    f"{metric.full_name}_bucket", {**histogram_labels, "le": bound_text}, count
                )
            family.add_sample(f"{metric.full_name}_count", histogram_labels, histogram.number)
            family.add_sample(f"{metric.full_name}_sum", histogram_labels, histogram.total)
        families.append(family)
    return families


def _build_labels(metric: Metric, values: tuple[str, ...]) -> dict[str, str]:
    return {label: value for label, value in zip(metric.labels, values, strict=True) if value}


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
