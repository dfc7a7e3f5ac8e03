"""NVIDIA devices through NVML: MIG, metrics, processes, and GPM counters.

Metrics that the driver, the device or the agent's permissions do not allow are absent, and
`capabilities` gives the reason.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from traceloom.agent.accelerators.backend import (
    BackendUnavailable,
    Device,
    DeviceEvent,
    DeviceProcess,
    format_capability,
)
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading, SeriesKey


def explain_nvml_error(nvml: Any, code: int) -> str:
    """Returns a description of an NVML error, and what would help."""
    texts = {
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old for it: newer drivers have it",
        # Driver 580, for metrics that are newer than it.
        nvml.NVML_ERROR_INVALID_ARGUMENT: "the driver does not know it: newer drivers may",
        nvml.NVML_ERROR_NOT_SUPPORTED: "this device, or its driver, does not have it",
        nvml.NVML_ERROR_NO_PERMISSION: "it needs more rights: run the agent as root",
    }
    return texts.get(code) or str(nvml.NVMLError(code))


def is_device_gone(nvml: Any, error: Any) -> bool:
    """Whether the error means that this device, or the driver, is lost, so that other calls fail,
    too.
    """
    return error.value in (
        nvml.NVML_ERROR_GPU_IS_LOST,
        nvml.NVML_ERROR_UNINITIALIZED,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
    )


def call_if_supported(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a call; None if it is not supported although the device is there."""
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        if is_device_gone(nvml, error):
            raise
        return None


MIB = 1 << 20

# GPM: metric id -> metric, labels, factor. Those from 248 on are counters since the host started.
GPM_METRICS: dict[int, tuple[str, tuple[str, ...], float]] = {
    1: ("gpu_graphics_active_ratio", (), 0.01),
    2: ("gpu_sm_active_ratio", (), 0.01),
    3: ("gpu_sm_occupancy_ratio", (), 0.01),
    4: ("gpu_pipe_active_ratio", ("int",), 0.01),
    5: ("gpu_pipe_active_ratio", ("tensor",), 0.01),
    6: ("gpu_pipe_active_ratio", ("dfma",), 0.01),
    7: ("gpu_pipe_active_ratio", ("hmma",), 0.01),
    8: ("gpu_pipe_active_ratio", ("dmma",), 0.01),
    9: ("gpu_pipe_active_ratio", ("imma",), 0.01),
    10: ("gpu_dram_active_ratio", (), 0.01),
    11: ("gpu_pipe_active_ratio", ("fp64",), 0.01),
    12: ("gpu_pipe_active_ratio", ("fp32",), 0.01),
    13: ("gpu_pipe_active_ratio", ("fp16",), 0.01),
    20: ("gpu_link_bytes_per_second", ("pcie", "transmit"), MIB),
    21: ("gpu_link_bytes_per_second", ("pcie", "receive"), MIB),
    60: ("gpu_link_bytes_per_second", ("nvlink", "receive"), MIB),
    61: ("gpu_link_bytes_per_second", ("nvlink", "transmit"), MIB),
    248: ("gpu_cycles_total", ("elapsed",), 1.0),
    249: ("gpu_cycles_total", ("active",), 1.0),
    250: ("gpu_cycles_total", ("tensor",), 1.0),
    251: ("gpu_cycles_total", ("dmma",), 1.0),
    252: ("gpu_cycles_total", ("hmma",), 1.0),
    253: ("gpu_cycles_total", ("imma",), 1.0),
    254: ("gpu_cycles_total", ("dfma",), 1.0),
    255: ("gpu_link_bytes_total", ("pcie", "transmit"), 1.0),
    256: ("gpu_link_bytes_total", ("pcie", "receive"), 1.0),
    257: ("gpu_cycles_total", ("int",), 1.0),
    258: ("gpu_cycles_total", ("fp64",), 1.0),
    259: ("gpu_cycles_total", ("fp32",), 1.0),
    260: ("gpu_cycles_total", ("fp16",), 1.0),
}
GPM_INTERVAL_S = 0.1  # the hardware refreshes its sample no faster
MAX_GPM_SAMPLES = 4


class GpmRing:
    """The last samples of the pipes of one device or partition; ratios are computed between two of
    them.
    """

    def __init__(self, nvml: Any, handle: Any, instance: int | None) -> None:
        self._nvml = nvml
        self._handle = handle  # of the whole device, even for a partition
        self._instance = instance
        self._samples: deque[tuple[float, Any]] = deque()

    def take(self, now: float) -> None:
        """Take a sample.

        Raises:
            NVMLError: The device cannot be sampled now.
        """
        full = len(self._samples) >= MAX_GPM_SAMPLES
        sample = self._samples.popleft()[1] if full else self._nvml.nvmlGpmSampleAlloc()
        try:
            if self._instance is None:
                self._nvml.nvmlGpmSampleGet(self._handle, sample)
            else:
                self._nvml.nvmlGpmMigSampleGet(self._handle, self._instance, sample)
        except Exception:
            self._nvml.nvmlGpmSampleFree(sample)
            raise
        self._samples.append((now, sample))

    def __len__(self) -> int:
        return len(self._samples)

    def values(self) -> dict[int, float | str]:
        """Returns GPM metric -> its value since the previous sample, or why there is none; empty
        with fewer than two samples.

        Raises:
            NVMLError: The driver cannot compare the samples.
        """
        now, newest = self._samples[-1]
        before = [
            sample for sampled_at, sample in self._samples if now - sampled_at >= GPM_INTERVAL_S
        ]
        if not before:
            return {}
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM_METRICS)
        request.sample1, request.sample2 = before[-1], newest
        for metric, number in zip(request.metrics, GPM_METRICS, strict=False):
            metric.metricId = number
        self._nvml.nvmlGpmMetricsGet(request)
        return {
            metric.metricId: explain_nvml_error(self._nvml, metric.nvmlReturn)
            if metric.nvmlReturn
            else metric.value
            if math.isfinite(metric.value)
            else "the device gave no number"
            for metric in request.metrics[: len(GPM_METRICS)]
        }

    def free(self) -> None:
        while self._samples:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(self._samples.pop()[1])


ALL_LINKS = 0xFFFFFFFF
NVLINKS = 18

# Metric, its labels after the device, the call, its arguments after the handle, and the factor to
# our unit.
MetricCalls = tuple[tuple[str, tuple[str, ...], str, tuple[int, ...], float], ...]
SIMPLE_METRICS: MetricCalls = (
    ("gpu_power_watts", (), "nvmlDeviceGetPowerUsage", (), 1e-3),
    ("gpu_energy_joules_total", (), "nvmlDeviceGetTotalEnergyConsumption", (), 1e-3),
    ("gpu_temperature_celsius", ("gpu",), "nvmlDeviceGetTemperature", (0,), 1.0),
    ("gpu_clock_hertz", ("sm",), "nvmlDeviceGetClockInfo", (1,), 1e6),
    ("gpu_clock_hertz", ("memory",), "nvmlDeviceGetClockInfo", (2,), 1e6),
)
# Period of metrics that change slowly or are slow to read.
SLOW_INTERVAL_S = 5.0
SLOW_METRICS: MetricCalls = (
    ("gpu_power_limit_watts", (), "nvmlDeviceGetEnforcedPowerLimit", (), 1e-3),
    ("gpu_errors_total", ("pcie-replay", ""), "nvmlDeviceGetPcieReplayCounter", (), 1.0),
    ("gpu_errors_total", ("ecc-corrected", ""), "nvmlDeviceGetTotalEccErrors", (0, 1), 1.0),
    ("gpu_errors_total", ("ecc-uncorrected", ""), "nvmlDeviceGetTotalEccErrors", (1, 1), 1.0),
)
# Field values: id -> metric, labels, factor. Of two for the same series the first one that the
# device supports is used.
NVLINK_DEVICE_FIELDS = (("transmit", 138, 1024.0), ("receive", 139, 1024.0))
NVLINK_LINK_FIELDS = (("transmit", 202, 1.0), ("receive", 204, 1.0))  # NVLink 5
NVML_FIELDS: tuple[tuple[int, str, tuple[str, ...], float], ...] = (
    (82, "gpu_temperature_celsius", ("memory",), 1.0),
    (197, "gpu_link_bytes_total", ("pcie", "transmit"), 1.0),
    (198, "gpu_link_bytes_total", ("pcie", "receive"), 1.0),
    (161, "gpu_errors_total", ("nvlink-replay", ""), 1.0),
    (162, "gpu_errors_total", ("nvlink-recovery", ""), 1.0),
    (163, "gpu_errors_total", ("nvlink-crc", ""), 1.0),
    (74, "gpu_throttled_seconds_total", ("power",), 1e-9),
    (76, "gpu_throttled_seconds_total", ("sync-boost",), 1e-9),
    (77, "gpu_throttled_seconds_total", ("board-limit",), 1e-9),
    (79, "gpu_throttled_seconds_total", ("reliability",), 1e-9),
    (269, "gpu_throttled_seconds_total", ("thermal",), 1e-9),
    (75, "gpu_throttled_seconds_total", ("thermal",), 1e-9),  # older drivers
    (270, "gpu_throttled_seconds_total", ("hardware-thermal",), 1e-9),
    (271, "gpu_throttled_seconds_total", ("power-brake",), 1e-9),
)
THROTTLE_REASONS = {
    0x02: "application-clocks",
    0x04: "power",
    0x08: "hardware-slowdown",
    0x10: "sync-boost",
    0x20: "thermal",
    0x40: "hardware-thermal",
    0x80: "power-brake",
    0x200: "board-limit",
    0x400: "reliability",
}
ROW_REMAP_KINDS = (
    "correctable",
    "uncorrectable",
    "pending",
    "failure",
)  # in the order of nvmlDeviceGetRemappedRows
GPM_UNSUPPORTED = "only Hopper and newer count pipes through NVML: let a dcgm-exporter run and name it in [accelerators] scrape"

T = TypeVar("T")
Values = dict[SeriesKey, float]  # (metric, labels after the device) -> value


class NvmlDevice:
    """One device or MIG partition that NVML lists."""

    def __init__(
        self, nvml: Any, handle: Any, device: Device, parent: NvmlDevice | None, *, armed: bool
    ) -> None:
        self.device = device
        self.handle = handle
        self.parent = parent
        self.instance: int | None = None
        self.missing: dict[str, str] = {}  # metric with its labels -> why it is absent
        self.present: set[str] = set()
        self.seen_us = 0  # time of the last query of process utilization, on the driver's clock
        self._nvml = nvml
        self._seldom: Values = {}
        self._seldom_at = 0.0
        self.gpm: GpmRing | None = None
        if parent is not None:
            self.instance = self.attempt("gpu_info", nvml.nvmlDeviceGetGpuInstanceId, handle)
        if armed:
            self.arm()

    def attempt(self, key: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """Returns the result of a call; None if it is not supported, and then `missing` has the
        reason.

        Raises:
            NVMLError: The device or the driver is lost, so that other calls would fail, too.
        """
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if is_device_gone(self._nvml, error):
                raise
            self.missing[key] = explain_nvml_error(self._nvml, error.value)
            return None

    def arm(self) -> None:
        """Start the pipe counters, if the device has any."""
        if self.gpm is not None:
            return
        device_handle = self.handle if self.parent is None else self.parent.handle
        support = self.attempt(
            "gpu_pipe_active_ratio", self._nvml.nvmlGpmQueryDeviceSupport, device_handle
        )
        if (
            support is None
            or not support.isSupportedDevice
            or (self.parent is not None and self.instance is None)
        ):
            for metric, labels, _ in GPM_METRICS.values():
                self.missing[format_capability(metric, labels)] = GPM_UNSUPPORTED
            return
        if self.parent is None:
            # Without streaming the counters are armed at every sample.
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSetStreamingEnabled(device_handle, 1)
        self.gpm = GpmRing(self._nvml, device_handle, self.instance)

    def disarm(self) -> bool:
        """Release the counters; returns whether there were any."""
        if self.gpm is None:
            return False
        self.gpm.free()
        self.gpm = None
        if self.parent is None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSetStreamingEnabled(self.handle, 0)
        return True

    def take_gpm(self, now: float) -> None:
        """Take a sample of the pipe counters."""
        if self.gpm is not None:
            self.attempt("gpu_pipe_active_ratio", self.gpm.take, now)

    def sample(self, now: float) -> Values:
        """Returns (metric, labels after the device) -> value; `now` in monotonic seconds."""
        values: Values = {}
        nvml, handle = self._nvml, self.handle
        memory = self.attempt(
            "gpu_memory_reserved_bytes", nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2
        )
        if memory is not None:
            values["gpu_memory_reserved_bytes", ()] = memory.reserved
        else:  # before version 2 of the call, memory reserved by the driver counts as used
            memory = self.attempt("gpu_memory_used_bytes", nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            values["gpu_memory_used_bytes", ()] = memory.used
            values["gpu_memory_free_bytes", ()] = memory.free
            values["gpu_memory_limit_bytes", ()] = memory.total
        if self.parent is None:
            self._call(SIMPLE_METRICS, values)
            rates = self.attempt("gpu_busy_ratio", nvml.nvmlDeviceGetUtilizationRates, handle)
            if rates is not None:
                values["gpu_busy_ratio", ()] = rates.gpu / 100
                values["gpu_memory_busy_ratio", ()] = rates.memory / 100
            supported = self.attempt(
                "gpu_throttled", nvml.nvmlDeviceGetSupportedClocksEventReasons, handle
            )
            reasons = self.attempt(
                "gpu_throttled", nvml.nvmlDeviceGetCurrentClocksEventReasons, handle
            )
            if reasons is not None:
                for mask, reason in THROTTLE_REASONS.items():
                    if supported is None or supported & mask:
                        values["gpu_throttled", (reason,)] = float(bool(reasons & mask))
            if now >= self._seldom_at:
                self._seldom_at = now + SLOW_INTERVAL_S
                self._seldom = self._seldom_values()
            values |= self._seldom
        pipes = (
            self.attempt("gpu_pipe_active_ratio", self.gpm.values)
            if self.gpm is not None and len(self.gpm)
            else None
        )
        for number, value in (pipes or {}).items():
            metric, labels, factor = GPM_METRICS[number]
            if isinstance(value, str):
                self.missing[format_capability(metric, labels)] = value
            else:
                values.setdefault((metric, labels), value * factor)
        self.present = {format_capability(metric, labels) for metric, labels in values}
        return values

    def _call(self, calls: MetricCalls, values: Values) -> None:
        for metric, labels, name, arguments, factor in calls:
            value = self.attempt(
                format_capability(metric, labels),
                getattr(self._nvml, name),
                self.handle,
                *arguments,
            )
            if value is not None:
                values[metric, labels] = value * factor

    def _seldom_values(self) -> Values:
        nvml, handle = self._nvml, self.handle
        values: Values = {}
        self._call(SLOW_METRICS, values)
        for engine, name in (("encoder", "Encoder"), ("decoder", "Decoder")):
            key = format_capability("gpu_video_busy_ratio", (engine,))
            use = self.attempt(key, getattr(nvml, f"nvmlDeviceGet{name}Utilization"), handle)
            if use is not None:
                values["gpu_video_busy_ratio", (engine,)] = use[0] / 100
        rows = self.attempt("gpu_remapped_rows", nvml.nvmlDeviceGetRemappedRows, handle)
        for kind, number in zip(ROW_REMAP_KINDS, rows or (), strict=False):
            values["gpu_remapped_rows", (kind,)] = number
        field_specs: list[tuple[tuple[int, int], str, tuple[str, ...], float]] = [
            ((number, 0), metric, labels, factor) for number, metric, labels, factor in NVML_FIELDS
        ]
        field_specs += [
            ((number, ALL_LINKS), "gpu_link_bytes_total", ("nvlink", direction), factor)
            for direction, number, factor in NVLINK_DEVICE_FIELDS
        ]
        field_specs += [
            ((number, link), "gpu_link_bytes_total", ("nvlink-each", direction), factor)
            for direction, number, factor in NVLINK_LINK_FIELDS
            for link in range(NVLINKS)
        ]
        fields = self.attempt(
            "gpu_link_bytes_total",
            self._nvml.nvmlDeviceGetFieldValues,
            self.handle,
            [identity for identity, *_ in field_specs],
        )
        link_totals: Counter[str] = Counter()
        for field, (_, metric, labels, factor) in zip(fields or (), field_specs, strict=False):
            if field.nvmlReturn:
                if labels[0] != "nvlink-each":
                    self.missing.setdefault(
                        format_capability(metric, labels),
                        explain_nvml_error(self._nvml, field.nvmlReturn),
                    )
                continue
            # The value is a union; its type is the index of the member: double, unsigned int, long,
            # long long, and signed ones.
            members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
            value = float(getattr(field.value, members[field.valueType])) * factor
            if labels[0] == "nvlink-each":
                link_totals[labels[1]] += int(value)
            else:
                values.setdefault((metric, labels), value)
        for direction, total in link_totals.items():
            values.setdefault(("gpu_link_bytes_total", ("nvlink", direction)), total)
        if ("gpu_link_bytes_total", ("pcie", "transmit")) not in values and self.gpm is None:
            # Only as a last resort: each measurement takes the driver 20 ms.
            for direction, counter in (("transmit", 0), ("receive", 1)):
                key = format_capability("gpu_link_bytes_per_second", ("pcie", direction))
                rate = self.attempt(key, nvml.nvmlDeviceGetPcieThroughput, handle, counter)
                if rate is not None:
                    values["gpu_link_bytes_per_second", ("pcie", direction)] = rate * 1024
        return values

    def processes(self) -> list[DeviceProcess]:
        """Returns its processes, and their utilization since the last call."""
        nvml = self._nvml
        memory: dict[int, int | None] = {}
        for name in (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        ):
            for process in (
                self.attempt(f"processes ({name})", getattr(nvml, name), self.handle) or ()
            ):
                memory[process.pid] = process.usedGpuMemory
        busy: dict[int, list[float]] = defaultdict(list)
        if memory:
            for use in self.attempt("process_gpu_share_ratio", self._uses, self.seen_us) or ():
                busy[use.pid].append(use.smUtil / 100)
                self.seen_us = max(self.seen_us, use.timeStamp)
        return [
            DeviceProcess(
                device=self.device.uuid,
                pid=pid,
                memory_bytes=used,
                # The driver reports only processes that ran; the others were idle.
                busy_ratio=(sum(busy[pid]) / len(busy[pid]) if pid in busy else 0.0)
                if busy
                else None,
            )
            for pid, used in memory.items()
        ]

    def _uses(self, since_us: int) -> list[Any]:
        """Returns the samples of process utilization since then; empty if nothing ran."""
        try:
            return list(self._nvml.nvmlDeviceGetProcessUtilization(self.handle, since_us))
        except self._nvml.NVMLError_NotFound:
            return []


NO_INSTANCE = 0xFFFFFFFF
UNKNOWN_XID = 999
MAX_EVENTS = 1000  # per sample

# Compute capability -> the architecture whose multiprocessors are alike (flop_per_clock.json).
ARCHITECTURES = {
    (7, 0): "volta",
    (7, 5): "turing",
    (8, 0): "ampere",
    (8, 6): "ampere-86",
    (8, 9): "ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
}
CORES_PER_SM = {
    "volta": 64,
    "turing": 64,
    "ampere": 64,
    "ampere-86": 128,
    "ada": 128,
    "hopper": 128,
    "blackwell": 128,
}


class NvmlAccelerator:
    """All devices of NVIDIA's driver.

    Args:
        config: Unused, as all devices are sampled.
        clock: Monotonic seconds.

    Raises:
        BackendUnavailable: There is no driver, no device, or nvidia-ml-py is not installed.
        NVMLError: The driver refuses; the back end is created again later, as after a reload of the
            driver.
    """

    name = "nvml"

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:  # noqa: ARG002
        try:
            import pynvml
        except ImportError as error:
            raise BackendUnavailable(
                "nvidia-ml-py is not installed: pip install 'traceloom[agent]'"
            ) from error
        self._nvml = pynvml
        self._clock = clock
        self._devices: dict[str, NvmlDevice] = {}
        self._handles: dict[int | None, str] = {}  # handle -> uuid of its device, for events
        self._lost_before: dict[int, str] = {}  # index -> why it has no identity
        self._events: Any = None
        self._paused_until = 0.0
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                raise BackendUnavailable(
                    "NVIDIA's driver is not installed (libnvidia-ml.so.1); in a container, give it the devices"
                ) from error
            if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
                raise BackendUnavailable(
                    "NVIDIA's driver is installed but not loaded: modprobe nvidia, or restart the host"
                ) from error
            if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
                raise BackendUnavailable(
                    "NVIDIA's driver was updated while it ran: restart the agent, then the host if need be"
                ) from error
            raise
        self._driver = pynvml.nvmlSystemGetDriverVersion()
        with suppress(pynvml.NVMLError):
            self._events = pynvml.nvmlEventSetCreate()

    def devices(self) -> list[Device]:
        """Returns the devices, each followed by its partitions; a lost one is stale."""
        count = self._nvml.nvmlDeviceGetCount()
        if not count:
            raise BackendUnavailable("NVIDIA's driver is loaded but lists no device")
        self._devices = {
            entry.device.uuid: entry for index in range(count) for entry in self._list(index)
        }
        return [entry.device for entry in self._devices.values()]

    def capabilities(self) -> dict[str, str]:
        """Returns the metrics of any device, and why the others are absent."""
        reasons = {f"device {index}": reason for index, reason in self._lost_before.items()}
        for entry in self._devices.values():
            reasons.update(
                {key: reason for key, reason in entry.missing.items() if key not in reasons}
            )
        if self._events is None:
            reasons["gpu_last_xid"] = "the driver tells of no events"
        return reasons | {key: "" for entry in self._devices.values() for key in entry.present}

    def sample(self) -> list[Reading]:
        """Returns all metrics of all devices that respond."""
        if self._paused_until and self._clock() >= self._paused_until:
            self._paused_until = 0.0
            for _ in self._answering(NvmlDevice.arm):  # restarts the pipe counters
                pass
        for _ in self._answering(NvmlDevice.take_gpm, self._clock()):
            pass
        if any(entry.gpm is not None and len(entry.gpm) == 1 for entry in self._devices.values()):
            # Ratios need two samples: after a start or a pause the second follows at once.
            time.sleep(GPM_INTERVAL_S * 1.1)
            for _ in self._answering(NvmlDevice.take_gpm, self._clock()):
                pass
        return [
            Reading(metric, (entry.device.uuid, *labels), float(value))
            for entry, values in self._answering(NvmlDevice.sample, self._clock())
            for (metric, labels), value in values.items()
        ]

    def processes(self) -> list[DeviceProcess]:
        """Returns the processes on the devices; those on a partitioned one belong to its
        partitions.
        """
        parents = {entry.device.parent for entry in self._devices.values()}
        return [
            process
            for entry, processes in self._answering(NvmlDevice.processes)
            if entry.device.uuid not in parents
            for process in processes
        ]

    def events(self) -> list[DeviceEvent]:
        """Returns the events since the last call."""
        nvml = self._nvml
        events: list[DeviceEvent] = []
        for _ in range(MAX_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:
                # No event is queued, or the device is lost, which its own calls report.
                break
            uuid = self._handles.get(ctypes.cast(event.device, ctypes.c_void_p).value, "")
            if event.gpuInstanceId != NO_INSTANCE:
                uuid = next(
                    (
                        other
                        for other, entry in self._devices.items()
                        if entry.device.parent == uuid and entry.instance == event.gpuInstanceId
                    ),
                    uuid,
                )
            is_xid = event.eventType == nvml.nvmlEventTypeXidCriticalError
            code = int(event.eventData) if is_xid and event.eventData != UNKNOWN_XID else None
            kind = "xid" if is_xid else "ecc"
            text = (
                ("" if code is not None else "the driver does not know its number")
                if is_xid
                else "double-bit error"
            )
            events.append(
                DeviceEvent(at_ns=time.time_ns(), device=uuid, kind=kind, code=code, text=text)
            )
        return events

    def pause(self, seconds: float) -> bool:
        """Release the pipe counters, so that a profiler can use them."""
        self._paused_until = self._clock() + seconds
        return sum(entry.disarm() for entry in self._devices.values()) > 0

    def close(self) -> None:
        """Release counters, events and the library."""
        with suppress(self._nvml.NVMLError):
            for entry in self._devices.values():
                entry.disarm()
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    def _answering(self, call: Callable[..., T], *arguments: Any) -> Iterator[tuple[NvmlDevice, T]]:
        """Yields the result of a call for each device that is not lost; one that fails meanwhile
        becomes stale.
        """
        for entry in self._devices.values():
            if entry.device.stale:
                continue
            try:
                yield entry, call(entry, *arguments)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_GPU_IS_LOST:
                    raise
                self._lose(entry, error)

    def _lose(self, entry: NvmlDevice, error: Exception) -> None:
        entry.disarm()
        entry.device = msgspec.structs.replace(
            entry.device, stale=f"{error}: restart the host, or reset the device"
        )

    def _list(self, index: int) -> list[NvmlDevice]:
        """Returns a device and its partitions; if it is lost, those of the last time, stale."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            # Other calls may answer for a lost device from a cache.
            call_if_supported(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
            entry = self._devices.get(uuid)
            if entry is None or entry.device.stale:
                entry = self._add(handle, uuid, index)
            self._lost_before.pop(index, None)
            return [entry, *self._partitions(entry)]
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            known_entries = [
                entry
                for entry in self._devices.values()
                if entry.device.index.partition(":")[0] == str(index)
            ]
            for entry in known_entries:
                self._lose(entry, error)
            if not known_entries:
                self._lost_before[index] = f"{error}: restart the host, or reset the device"
            return known_entries

    def _add(self, handle: Any, uuid: str, index: int) -> NvmlDevice:
        nvml = self._nvml
        attempt = partial(call_if_supported, nvml)
        pci = attempt(nvml.nvmlDeviceGetPciInfo, handle)
        capability = attempt(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        cores = attempt(nvml.nvmlDeviceGetNumGpuCores, handle)
        clock = attempt(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
        memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle)
        model = attempt(nvml.nvmlDeviceGetName, handle) or ""
        architecture = ARCHITECTURES.get(tuple(capability), "") if capability else ""
        cores_per_sm = CORES_PER_SM.get(architecture)
        # Matrix units of GeForce devices accumulate in 32 bits at half the rate.
        if architecture and "GeForce" in model:
            architecture += "-geforce"
        device = Device(
            uuid=uuid,
            index=str(index),
            vendor="nvidia",
            model=model,
            pci=pci.busId if pci else "",
            driver=self._driver,
            memory_bytes=memory.total if memory else None,
            multiprocessors=cores // cores_per_sm if cores and cores_per_sm else None,
            highest_clock_hz=clock * 1e6 if clock else None,
            architecture=architecture,
        )
        self._handles[ctypes.cast(handle, ctypes.c_void_p).value] = uuid
        if self._events is not None:
            types = attempt(nvml.nvmlDeviceGetSupportedEventTypes, handle) or 0
            event_types = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
            attempt(nvml.nvmlDeviceRegisterEvents, handle, types & event_types, self._events)
        return NvmlDevice(nvml, handle, device, None, armed=not self._paused_until)

    def _partitions(self, entry: NvmlDevice) -> Iterator[NvmlDevice]:
        nvml = self._nvml
        mode = entry.attempt("partitions", nvml.nvmlDeviceGetMigMode, entry.handle)
        if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
        for slot in range(
            entry.attempt("partitions", nvml.nvmlDeviceGetMaxMigDeviceCount, entry.handle) or 0
        ):
            handle = call_if_supported(
                nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, entry.handle, slot
            )
            uuid = (
                None if handle is None else call_if_supported(nvml, nvml.nvmlDeviceGetUUID, handle)
            )
            if uuid is None:  # the slot is empty, or the partition was just removed
                continue
            if uuid in self._devices and not self._devices[uuid].device.stale:
                yield self._devices[uuid]
                continue
            # A partition's numbers and size do not change while it exists.
            instance = call_if_supported(nvml, nvml.nvmlDeviceGetGpuInstanceId, handle)
            compute = call_if_supported(nvml, nvml.nvmlDeviceGetComputeInstanceId, handle)
            attributes = entry.attempt("partitions", nvml.nvmlDeviceGetAttributes_v2, handle)
            name = str(call_if_supported(nvml, nvml.nvmlDeviceGetName, handle) or "")
            device = msgspec.structs.replace(
                entry.device,
                uuid=uuid,
                index=f"{entry.device.index}:{slot}",
                parent=entry.device.uuid,
                partition=f"{name.partition('MIG ')[2]} gi={instance} ci={compute}".strip(),
                multiprocessors=attributes.multiprocessorCount if attributes else None,
                memory_bytes=attributes.memorySizeMB * MIB if attributes else None,
            )
            yield NvmlDevice(nvml, handle, device, entry, armed=not self._paused_until)
