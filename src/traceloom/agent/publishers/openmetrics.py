"""Renders the snapshot as OpenMetrics text, optionally with dcgm-exporter's names.

Counters of dcgm-exporter lack the suffix `_total` that OpenMetrics requires, so in that format
their type is `unknown`; Prometheus treats both alike.

The name of the host is a label of `traceloom_host_info` only: a scraper adds `instance` to
everything.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from traceloom.agent.accelerators.backend import Device, DeviceProcess
from traceloom.agent.config import Config
from traceloom.agent.metrics import METRICS, HistogramReading, Metric, SeriesKey
from traceloom.agent.ownership.model import Process


def build_dcgm_families(host_snapshot: ReadableSnapshot, host: str) -> list[Family]:
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


def build_device_labels(host_snapshot: ReadableSnapshot, host: str) -> dict[str, dict[str, str]]:
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


class ReadableSnapshot(Protocol):
    """The snapshot, or the part of it that a caller may see."""

    @property
    def devices(self) -> Mapping[str, Device]:
        """Devices by uuid."""

    @property
    def device_processes(self) -> Sequence[DeviceProcess]:
        """The processes on devices."""

    @property
    def processes(self) -> Mapping[str, Process]:
        """Processes by key."""

    def values(self) -> Iterator[tuple[SeriesKey, float, int]]:
        """Yields every series with its value and its time."""

    def histograms(self) -> Iterator[tuple[HistogramReading, int]]:
        """Yields every histogram with its time."""


class FamilyCollector:
    """A collector in prometheus_client's sense: families of metrics with their samples."""

    def __init__(self, families: list[Family]) -> None:
        self.families = families

    def collect(self) -> list[Family]:
        """Returns all families."""
        return self.families


def render_openmetrics(
    host_snapshot: ReadableSnapshot, config: Config, accept: str = ""
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


def build_families(host_snapshot: ReadableSnapshot) -> list[Family]:
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
