"""Devices from exporters that already run: dcgm-exporter, AMD's device-metrics-exporter, GKE's TPU
device plugin.

`[accelerators] scrape = ["http://127.0.0.1:9400/metrics"]`; if NVML has no pipe counters (A100),
these come from here and everything else from NVML.
"""

from __future__ import annotations

import http.client
import math
import threading
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from traceloom.agent.accelerators.backend import (
    BackendUnavailable,
    Device,
    DeviceEvent,
    DeviceProcess,
    format_capability,
)
from traceloom.agent.config import Config
from traceloom.agent.metrics import METRICS, Reading
from traceloom.agent.topline import find_device_model

# Per exporter; below the limit of the back end, so that one that hangs does not affect the others.
SCRAPE_TIMEOUT_S = 1.5
# Exporters measure no faster, although a running trace samples ten times a second.
MIN_INTERVAL_S = 1.0
MAX_BYTES = 16 << 20
CHUNK_BYTES = 1 << 16
MIB = float(1 << 20)
BLANK_RANGES = (
    (2**31 - 16, 2**31),
    (2**47, 2**47 + 16),
    (2**63 - 16, 2**64),
)  # how DCGM writes a missing value


class ExporterSeries(NamedTuple):
    """A series of an exporter and the metric that it becomes: its value is that of the metric
    divided by `factor`.
    """

    name: str
    metric: str
    labels: tuple[str, ...] = ()
    factor: float = 1.0
    where: tuple[tuple[str, str], ...] = ()


_DCGM = tuple(
    ExporterSeries(
        alias.name,
        metric.name,
        tuple(dict(alias.where).get(label, "") for label in metric.labels[1:]),
        1 / alias.factor,
    )
    for metric in METRICS.values()
    for alias in metric.dcgm_aliases
)
_DEV, _PROF, _PIPE = "DCGM_FI_DEV_", "DCGM_FI_PROF_", "gpu_pipe_active_ratio"
# Names of DCGM 4.6 in addition to the older ones (which it still accepts); some have other units.
_DCGM_4 = (
    ExporterSeries(_PROF + "GR_ENGINE_UTIL_RATIO", "gpu_graphics_active_ratio"),
    ExporterSeries(_PROF + "SM_UTIL_RATIO", "gpu_sm_active_ratio"),
    ExporterSeries(_PROF + "SM_OCCUPANCY_RATIO", "gpu_sm_occupancy_ratio"),
    ExporterSeries(_PROF + "DRAM_UTIL_RATIO", "gpu_dram_active_ratio"),
    ExporterSeries(_PROF + "TENSOR_UTIL_RATIO", _PIPE, ("tensor",)),
    *(
        ExporterSeries(f"{_PROF}{pipe.upper()}_UTIL_RATIO", _PIPE, (pipe,))
        for pipe in ("fp64", "fp32", "fp16", "imma", "hmma", "dfma", "int")
    ),
    ExporterSeries(_PROF + "SM_CYCLES_ELAPSED_TOTAL", "gpu_cycles_total", ("elapsed",)),
    ExporterSeries(_PROF + "SM_CYCLES_ACTIVE_TOTAL", "gpu_cycles_total", ("active",)),
    ExporterSeries(_PROF + "MMA_CYCLES_ACTIVE_TOTAL", "gpu_cycles_total", ("tensor",)),
    *(
        ExporterSeries(f"{_PROF}{pipe.upper()}_CYCLES_ACTIVE_TOTAL", "gpu_cycles_total", (pipe,))
        for pipe in ("dmma", "hmma", "imma", "dfma", "int", "fp64", "fp32", "fp16")
    ),
    ExporterSeries(_PROF + "PCIE_TX_BYTES_TOTAL", "gpu_link_bytes_total", ("pcie", "transmit")),
    ExporterSeries(_PROF + "PCIE_RX_BYTES_TOTAL", "gpu_link_bytes_total", ("pcie", "receive")),
    ExporterSeries(_DEV + "GPU_UTIL_RATIO", "gpu_busy_ratio", (), 0.01),  # as before: percent
    ExporterSeries(_DEV + "SM_CLOCK_HERTZ", "gpu_clock_hertz", ("sm",)),
    ExporterSeries(_DEV + "MEMORY_CLOCK_HERTZ", "gpu_clock_hertz", ("memory",)),
    ExporterSeries(_DEV + "GPU_ENERGY_JOULES_TOTAL", "gpu_energy_joules_total"),
    ExporterSeries(_DEV + "PCIE_REPLAY_TOTAL", "gpu_errors_total", ("pcie-replay", "")),
    ExporterSeries(_DEV + "XID_ERROR", "gpu_last_xid"),
    ExporterSeries(_DEV + "ROW_REMAP_UNCORRECTABLE_TOTAL", "gpu_remapped_rows", ("uncorrectable",)),
    ExporterSeries(_DEV + "ROW_REMAP_CORRECTABLE_TOTAL", "gpu_remapped_rows", ("correctable",)),
    ExporterSeries(_DEV + "ROW_REMAP_FAILED", "gpu_remapped_rows", ("failure",)),
    ExporterSeries(_DEV + "ROW_REMAP_PENDING", "gpu_remapped_rows", ("pending",)),
    ExporterSeries(_DEV + "ECC_SBE_AGG_TOTAL", "gpu_errors_total", ("ecc-corrected", "")),
    ExporterSeries(_DEV + "ECC_DBE_AGG_TOTAL", "gpu_errors_total", ("ecc-uncorrected", "")),
)
_AMD = (
    ExporterSeries("gpu_gfx_activity", "gpu_busy_ratio", (), 0.01),
    ExporterSeries("gpu_umc_activity", "gpu_memory_busy_ratio", (), 0.01),
    ExporterSeries("gpu_package_power", "gpu_power_watts"),
    ExporterSeries("gpu_average_package_power", "gpu_power_watts"),
    ExporterSeries("gpu_power_usage", "gpu_power_watts"),
    ExporterSeries("gpu_energy_consumed", "gpu_energy_joules_total", (), 1e-6),
    ExporterSeries("gpu_edge_temperature", "gpu_temperature_celsius", ("gpu",)),
    ExporterSeries("gpu_junction_temperature", "gpu_temperature_celsius", ("hotspot",)),
    ExporterSeries("gpu_memory_temperature", "gpu_temperature_celsius", ("memory",)),
    ExporterSeries("gpu_total_vram", "gpu_memory_limit_bytes", (), MIB),
    ExporterSeries("gpu_used_vram", "gpu_memory_used_bytes", (), MIB),
    ExporterSeries("gpu_free_vram", "gpu_memory_free_bytes", (), MIB),
    *(
        ExporterSeries(
            "gpu_clock",
            "gpu_clock_hertz",
            (domain,),
            1e6,
            (("clock_type", f"GPU_CLOCK_TYPE_{kind}"), ("clock_index", index)),
        )
        for domain, kind, index in (
            ("sm", "SYSTEM", "0"),
            ("memory", "MEMORY", "8"),
            ("memory", "MEMORY", "0"),
        )
    ),
    ExporterSeries("pcie_replay_count", "gpu_errors_total", ("pcie-replay", "")),
    ExporterSeries("gpu_ecc_correct_total", "gpu_errors_total", ("ecc-corrected", "")),
    ExporterSeries("gpu_ecc_uncorrect_total", "gpu_errors_total", ("ecc-uncorrected", "")),
)
_TPU = tuple(
    ExporterSeries(name + suffix, metric, labels, factor)
    for suffix in ("", "_node")  # `_node` includes the chips that no container holds
    for name, metric, labels, factor in (
        ("duty_cycle", "gpu_busy_ratio", (), 0.01),
        ("tensorcore_utilization", _PIPE, ("tensor",), 0.01),
        ("memory_bandwidth_utilization", "gpu_dram_active_ratio", (), 0.01),
        ("memory_used", "gpu_memory_used_bytes", (), 1.0),
        ("memory_total", "gpu_memory_limit_bytes", (), 1.0),
    )
)
# Of two for the same series the first one that the exporter has is used.
EXPORTER_SERIES = (
    *_DCGM,
    *_DCGM_4,
    *_AMD,
    *(source._replace(name="amd_" + source.name) for source in _AMD),
    *_TPU,
)
_SERIES_BY_NAME: dict[str, list[tuple[int, ExporterSeries]]] = defaultdict(list)
for _order, _source in enumerate(EXPORTER_SERIES):
    _SERIES_BY_NAME[_source.name].append((_order, _source))

# Label of an exporter -> field of the device's owner.
_OWNER_LABELS = {
    "pod": "pod",
    "namespace": "namespace",
    "container": "container",
    "hpc_job": "job",
    "job_id": "job",
    "job_user": "user",
    "job_partition": "partition",
}


def build_device(labels: Mapping[str, str]) -> Device | None:
    """Returns the device of a series, from its exporter's labels; None if it has none."""
    owner = {field: labels[label] for label, field in _OWNER_LABELS.items() if labels.get(label)}
    if uuid := labels.get("UUID"):
        model = find_device_model(labels.get("modelName", ""))
        instance = labels.get("GPU_I_ID", "")
        return Device(
            uuid=f"{uuid}/{instance}" if instance else uuid,
            parent=uuid if instance else "",
            index=f"{labels.get('gpu', '')}:{instance}" if instance else labels.get("gpu", ""),
            vendor="nvidia",
            model=labels.get("modelName", ""),
            pci=labels.get("pci_bus_id", ""),
            driver=labels.get("DCGM_FI_DRIVER_VERSION", ""),
            partition=f"{labels.get('GPU_I_PROFILE', '')} gi={instance}".strip()
            if instance
            else "",
            # The number of multiprocessors of a partition is unknown.
            multiprocessors=model.multiprocessors if model and not instance else None,
            highest_clock_hz=model.highest_clock_hz if model else None,
            architecture=model.architecture if model else "",
            owner=owner,
        )
    if accelerator := labels.get("accelerator_id"):
        return Device(
            uuid=accelerator,
            index=accelerator.rpartition("-")[2],
            vendor="google",
            model=labels.get("model", ""),
            owner=owner,
        )
    identity = labels.get("gpu_uuid") or labels.get("serial_number")
    if identity and "gpu_id" in labels:
        name = labels.get("card_series") or labels.get("card_model", "")
        model = find_device_model(name)
        # A divided card lists its partitions one by one; the first has the number of the whole
        # card.
        partition = labels.get("gpu_partition_id", "0")
        divided = labels.get("gpu_compute_partition_type", "spx").lower() != "spx"
        return Device(
            uuid=f"{identity}/{partition}" if divided else identity,
            index=labels["gpu_id"],
            vendor="amd",
            model=name,
            driver=labels.get("driver_version", ""),
            partition=f"{labels['gpu_compute_partition_type']} {partition}" if divided else "",
            multiprocessors=model.multiprocessors if model and not divided else None,
            highest_clock_hz=model.highest_clock_hz if model else None,
            architecture=model.architecture if model else "",
            owner=owner,
        )
    return None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuse redirects: the configuration names the addresses to scrape."""


class ScrapedAccelerator:
    """Devices reported by exporters; those of an exporter that does not respond become stale.

    Args:
        config: Has the addresses.
        clock: Monotonic seconds.
    """

    name = "scrape"

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        if not config.accelerators.scrape:
            raise BackendUnavailable(
                'no exporter is scraped: [accelerators] scrape = ["http://127.0.0.1:9400/metrics"] names one'
            )
        self._addresses: list[str] = []
        for text in config.accelerators.scrape:  # `host:port` means its `/metrics` over HTTP
            parts = urllib.parse.urlsplit(text if "//" in text else f"http://{text}")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"`{text}` in [accelerators] scrape is no address of an exporter")
            path = parts.path if parts.path.strip("/") else "/metrics"
            self._addresses.append(urllib.parse.urlunsplit(parts._replace(path=path)))
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
        self._devices: dict[str, dict[str, Device]] = {address: {} for address in self._addresses}
        self._readings: dict[str, list[Reading]] = {}
        self._failures: dict[str, str] = {}
        self._clock = clock
        self._again_at = -math.inf

    def devices(self) -> list[Device]:
        """Scrape all exporters in parallel, unless that was just done, and return their devices."""
        if self._clock() >= self._again_at:
            self._again_at = self._clock() + MIN_INTERVAL_S
            threads = [
                threading.Thread(
                    target=self._scrape, args=(exporter,), name=f"scrape {exporter}", daemon=True
                )
                for exporter in self._addresses
            ]
            deadline = time.monotonic() + SCRAPE_TIMEOUT_S * 1.1
            for thread in threads:
                thread.start()
            for thread, address in zip(threads, self._addresses, strict=True):
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():  # it hangs in name resolution, which has no time-out
                    self._fail(address, "it has not answered in time")
        return [device for address in self._addresses for device in self._devices[address].values()]

    def capabilities(self) -> dict[str, str]:
        """Returns the metrics of the exporters, and the errors of those that do not respond."""
        present = {
            format_capability(reading.metric, reading.labels[1:]): "" for reading in self.sample()
        }
        return present | {
            f"exporter {address}": reason for address, reason in self._failures.items()
        }

    def sample(self) -> list[Reading]:
        return [reading for readings in list(self._readings.values()) for reading in readings]

    def processes(self) -> list[DeviceProcess]:
        """Always empty: exporters do not list processes."""
        return []

    def events(self) -> list[DeviceEvent]:
        """Always empty: exporters do not report events."""
        return []

    def pause(self, seconds: float) -> bool:  # noqa: ARG002 - as every back end
        """Always False: the counters belong to the exporter."""
        return False

    def close(self) -> None:
        """Does nothing: no connection stays open between scrapes."""

    def _scrape(self, address: str) -> None:
        try:
            deadline = time.monotonic() + SCRAPE_TIMEOUT_S
            with self._opener.open(address, timeout=SCRAPE_TIMEOUT_S) as answer:
                parts: list[bytes] = []
                size = 0
                # Chunk by chunk, to check the total time: a socket's time-out restarts with every
                # byte of a slow exporter.
                while chunk := answer.read1(CHUNK_BYTES):
                    size += len(chunk)
                    if size > MAX_BYTES:
                        raise ValueError(f"it says more than {MAX_BYTES >> 20} MB")  # noqa: TRY301
                    if time.monotonic() > deadline:
                        raise TimeoutError("it has not answered in time")
                    parts.append(chunk)
            devices, readings = parse_exporter_text(b"".join(parts).decode("utf-8"))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._fail(address, str(error) or type(error).__name__)
        else:
            self._devices[address], self._readings[address] = devices, readings
            self._failures.pop(address, None)

    def _fail(self, address: str, reason: str) -> None:
        self._failures[address] = reason
        self._readings.pop(address, None)
        stale = f"the exporter {address} does not answer: {reason}"
        self._devices[address] = {
            uuid: msgspec.structs.replace(device, stale=stale)
            for uuid, device in self._devices[address].items()
        }


def parse_exporter_text(text: str) -> tuple[dict[str, Device], list[Reading]]:
    """Returns the devices and readings in the response of an exporter.

    Raises:
        ValueError: It is not the text format of Prometheus.
    """
    from prometheus_client.parser import text_string_to_metric_families

    devices: dict[str, Device] = {}
    values: dict[tuple[str, str, tuple[str, ...]], tuple[int, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser appends OpenMetrics' `_total` to every counter, which these exporters do
            # not print.
            for order, source in _SERIES_BY_NAME.get(sample.name) or _SERIES_BY_NAME.get(
                sample.name.removesuffix("_total"), []
            ):
                if any(sample.labels.get(label) != expected for label, expected in source.where):
                    continue
                device = build_device(sample.labels)
                if (
                    device is None
                    or not math.isfinite(sample.value)
                    or any(a <= sample.value < b for a, b in BLANK_RANGES)
                ):
                    continue
                if source.metric == "gpu_last_xid" and not sample.value:  # 0: no error so far
                    continue
                if device.uuid not in devices or (device.owner and not devices[device.uuid].owner):
                    devices[device.uuid] = device
                key = (source.metric, device.uuid, source.labels)
                if key not in values or order < values[key][0]:
                    values[key] = (order, sample.value * source.factor)
    return devices, [
        Reading(metric, (uuid, *labels), value)
        for (metric, uuid, labels), (_, value) in values.items()
    ]
