"""One device or partition that NVML lists: its metrics and its processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from traceloom.agent.accelerators import Device, DeviceProcess, capability
from traceloom.agent.accelerators.gpm import GPM, GpmRing
from traceloom.agent.accelerators.nvml_calls import is_gone, why_not
from traceloom.agent.metrics import Series

ALL_LINKS = 0xFFFFFFFF
NVLINKS = 18

# Metric, its labels after the device, the call, its arguments after the handle, and what its unit is of ours.
Simple = tuple[tuple[str, tuple[str, ...], str, tuple[int, ...], float], ...]
SIMPLE: Simple = (
    ("gpu_power_watts", (), "nvmlDeviceGetPowerUsage", (), 1e-3),
    ("gpu_energy_joules_total", (), "nvmlDeviceGetTotalEnergyConsumption", (), 1e-3),
    ("gpu_temperature_celsius", ("gpu",), "nvmlDeviceGetTemperature", (0,), 1.0),
    ("gpu_clock_hertz", ("sm",), "nvmlDeviceGetClockInfo", (1,), 1e6),
    ("gpu_clock_hertz", ("memory",), "nvmlDeviceGetClockInfo", (2,), 1e6),
)
# What changes slowly, or takes a driver long: not at every sample of a fast series.
SELDOM_S = 5.0
SELDOM: Simple = (
    ("gpu_power_limit_watts", (), "nvmlDeviceGetEnforcedPowerLimit", (), 1e-3),
    ("gpu_errors_total", ("pcie-replay", ""), "nvmlDeviceGetPcieReplayCounter", (), 1.0),
    ("gpu_errors_total", ("ecc-corrected", ""), "nvmlDeviceGetTotalEccErrors", (0, 1), 1.0),
    ("gpu_errors_total", ("ecc-uncorrected", ""), "nvmlDeviceGetTotalEccErrors", (1, 1), 1.0),
)
# Field values: id -> metric, labels, factor. Of two for the same series the first that the device has is taken.
NVLINK_OF_ALL = (("transmit", 138, 1024.0), ("receive", 139, 1024.0))
NVLINK_OF_EACH = (("transmit", 202, 1.0), ("receive", 204, 1.0))  # NVLink 5
FIELDS: tuple[tuple[int, str, tuple[str, ...], float], ...] = (
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
THROTTLES = {
    0x02: "application-clocks", 0x04: "power", 0x08: "hardware-slowdown", 0x10: "sync-boost", 0x20: "thermal",
    0x40: "hardware-thermal", 0x80: "power-brake", 0x200: "board-limit", 0x400: "reliability",
}  # fmt: skip
REMAPPED = ("correctable", "uncorrectable", "pending", "failure")  # in the order of nvmlDeviceGetRemappedRows
NO_GPM = "only Hopper and newer count pipes through NVML: let a dcgm-exporter run and name it in [accelerators] scrape"

T = TypeVar("T")
Values = dict[Series, float]  # (metric, labels after the device) -> value


class NvmlDevice:
    """One device or MIG partition that NVML lists."""

    def __init__(self, nvml: Any, handle: Any, device: Device, parent: NvmlDevice | None, *, armed: bool) -> None:
        self.device = device
        self.handle = handle
        self.parent = parent
        self.instance: int | None = None
        self.missing: dict[str, str] = {}  # metric, with its labels, -> why it is absent
        self.present: set[str] = set()
        self.seen_us = 0  # when use by processes was asked for last, in the driver's time
        self._nvml = nvml
        self._seldom: Values = {}
        self._seldom_at = 0.0
        self.gpm: GpmRing | None = None
        if parent is not None:
            self.instance = self.attempt("gpu_info", nvml.nvmlDeviceGetGpuInstanceId, handle)
        if armed:
            self.arm()

    def attempt(self, key: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """What a call gives; None where it cannot be had, and then `missing` has the reason.

        Raises:
            NVMLError: The device is lost, or the driver is gone: nothing else can be had either.
        """
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if is_gone(self._nvml, error):
                raise
            self.missing[key] = why_not(self._nvml, error.value)
            return None

    def arm(self) -> None:
        """Begin to count pipes, where the device can."""
        if self.gpm is not None:
            return
        whole = self.handle if self.parent is None else self.parent.handle
        support = self.attempt("gpu_pipe_active_ratio", self._nvml.nvmlGpmQueryDeviceSupport, whole)
        if support is None or not support.isSupportedDevice or (self.parent is not None and self.instance is None):
            for metric, labels, _ in GPM.values():
                self.missing[capability(metric, labels)] = NO_GPM
            return
        if self.parent is None:
            with suppress(self._nvml.NVMLError):  # without it the counters are armed at every sample
                self._nvml.nvmlGpmSetStreamingEnabled(whole, 1)
        self.gpm = GpmRing(self._nvml, whole, self.instance)

    def disarm(self) -> bool:
        """Release the counters; whether there were any."""
        if self.gpm is None:
            return False
        self.gpm.free()
        self.gpm = None
        if self.parent is None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSetStreamingEnabled(self.handle, 0)
        return True

    def take_gpm(self, now: float) -> None:
        """Take a sample of the pipes."""
        if self.gpm is not None:
            self.attempt("gpu_pipe_active_ratio", self.gpm.take, now)

    def sample(self, now: float) -> Values:
        """(metric, labels after the device) -> value; `now` in seconds that only grow."""
        values: Values = {}
        nvml, handle = self._nvml, self.handle
        memory = self.attempt("gpu_memory_reserved_bytes", nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        if memory is not None:
            values["gpu_memory_reserved_bytes", ()] = memory.reserved
        else:  # before version 2, what the driver reserves counts as used
            memory = self.attempt("gpu_memory_used_bytes", nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            values["gpu_memory_used_bytes", ()] = memory.used
            values["gpu_memory_free_bytes", ()] = memory.free
            values["gpu_memory_limit_bytes", ()] = memory.total
        if self.parent is None:
            self._call(SIMPLE, values)
            rates = self.attempt("gpu_busy_ratio", nvml.nvmlDeviceGetUtilizationRates, handle)
            if rates is not None:
                values["gpu_busy_ratio", ()] = rates.gpu / 100
                values["gpu_memory_busy_ratio", ()] = rates.memory / 100
            supported = self.attempt("gpu_throttled", nvml.nvmlDeviceGetSupportedClocksEventReasons, handle)
            reasons = self.attempt("gpu_throttled", nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
            if reasons is not None:
                for bit, reason in THROTTLES.items():
                    if supported is None or supported & bit:
                        values["gpu_throttled", (reason,)] = float(bool(reasons & bit))
            if now >= self._seldom_at:
                self._seldom_at = now + SELDOM_S
                self._seldom = self._seldom_values()
            values |= self._seldom
        pipes = (
            self.attempt("gpu_pipe_active_ratio", self.gpm.values) if self.gpm is not None and len(self.gpm) else None
        )
        for number, value in (pipes or {}).items():
            metric, labels, factor = GPM[number]
            if isinstance(value, str):
                self.missing[capability(metric, labels)] = value
            else:
                values.setdefault((metric, labels), value * factor)
        self.present = {capability(metric, labels) for metric, labels in values}
        return values

    def _call(self, calls: Simple, values: Values) -> None:
        for metric, labels, name, arguments, factor in calls:
            value = self.attempt(capability(metric, labels), getattr(self._nvml, name), self.handle, *arguments)
            if value is not None:
                values[metric, labels] = value * factor

    def _seldom_values(self) -> Values:
        nvml, handle = self._nvml, self.handle
        values: Values = {}
        self._call(SELDOM, values)
        for engine, name in (("encoder", "Encoder"), ("decoder", "Decoder")):
            key = capability("gpu_video_busy_ratio", (engine,))
            use = self.attempt(key, getattr(nvml, f"nvmlDeviceGet{name}Utilization"), handle)
            if use is not None:
                values["gpu_video_busy_ratio", (engine,)] = use[0] / 100
        rows = self.attempt("gpu_remapped_rows", nvml.nvmlDeviceGetRemappedRows, handle)
        for kind, number in zip(REMAPPED, rows or (), strict=False):
            values["gpu_remapped_rows", (kind,)] = number
        wanted: list[tuple[tuple[int, int], str, tuple[str, ...], float]] = [
            ((number, 0), metric, labels, factor) for number, metric, labels, factor in FIELDS
        ]
        wanted += [
            ((number, ALL_LINKS), "gpu_link_bytes_total", ("nvlink", direction), factor)
            for direction, number, factor in NVLINK_OF_ALL
        ]
        wanted += [
            ((number, link), "gpu_link_bytes_total", ("nvlink-each", direction), factor)
            for direction, number, factor in NVLINK_OF_EACH
            for link in range(NVLINKS)
        ]
        fields = self.attempt("gpu_link_bytes_total", self._nvml.nvmlDeviceGetFieldValues, self.handle,
                              [identity for identity, *_ in wanted])  # fmt: skip
        each: Counter[str] = Counter()
        for field, (_, metric, labels, factor) in zip(fields or (), wanted, strict=False):
            if field.nvmlReturn:
                if labels[0] != "nvlink-each":
                    self.missing.setdefault(capability(metric, labels), why_not(self._nvml, field.nvmlReturn))
                continue
            # The value is a union; its type says which member holds it: double, unsigned int, long, long long, and
            # signed ones.
            members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
            value = float(getattr(field.value, members[field.valueType])) * factor
            if labels[0] == "nvlink-each":
                each[labels[1]] += int(value)
            else:
                values.setdefault((metric, labels), value)
        for direction, total in each.items():
            values.setdefault(("gpu_link_bytes_total", ("nvlink", direction)), total)
        if ("gpu_link_bytes_total", ("pcie", "transmit")) not in values and self.gpm is None:
            # Only where nothing else tells: the driver measures for 20 ms each.
            for direction, counter in (("transmit", 0), ("receive", 1)):
                key = capability("gpu_link_bytes_per_second", ("pcie", direction))
                rate = self.attempt(key, nvml.nvmlDeviceGetPcieThroughput, handle, counter)
                if rate is not None:
                    values["gpu_link_bytes_per_second", ("pcie", direction)] = rate * 1024
        return values

    def processes(self) -> list[DeviceProcess]:
        """Who runs on it, and how much since the last call."""
        nvml = self._nvml
        memory: dict[int, int | None] = {}
        for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"):
            for process in self.attempt(f"processes ({name})", getattr(nvml, name), self.handle) or ():
                memory[process.pid] = process.usedGpuMemory
        busy: dict[int, list[float]] = defaultdict(list)
        if memory:
            key = "process_gpu_share_ratio"
            for use in self.attempt(key, self._uses, self.seen_us) or ():
                busy[use.pid].append(use.smUtil / 100)
                self.seen_us = max(self.seen_us, use.timeStamp)
        return [
            DeviceProcess(
                device=self.device.uuid, pid=pid, memory_bytes=used,
                # The driver tells of those that ran: among them, who is not named did not.
                busy_ratio=(sum(busy[pid]) / len(busy[pid]) if pid in busy else 0.0) if busy else None,
            )
            for pid, used in memory.items()
        ]  # fmt: skip

    def _uses(self, since_us: int) -> list[Any]:
        """Samples of what processes used since then; none where nothing ran."""
        try:
            return list(self._nvml.nvmlDeviceGetProcessUtilization(self.handle, since_us))
        except self._nvml.NVMLError_NotFound:
            return []
