"""AMD devices, from the files of the kernel drivers (amdgpu, KFD); amdsmi, if installed, adds
links.

The driver exposes no pipe counters in its files: FLOP/s need AMD's exporter with a profiler, or a
trace.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from traceloom.agent.accelerators.backend import (
    BackendUnavailable,
    Device,
    DeviceEvent,
    DeviceProcess,
    format_capability,
)
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.agent.topline import find_device_model

AMD_VENDOR_ID = "0x1002"
# PCI device id -> name, for drivers that do not report it.
MODEL_NAMES = {
    "0x7408": "AMD Instinct MI250X",
    "0x740c": "AMD Instinct MI250X",
    "0x740f": "AMD Instinct MI210",
    "0x74a1": "AMD Instinct MI300X",
    "0x74a5": "AMD Instinct MI325X",
    "0x75a3": "AMD Instinct MI355X",
}
GFX_ARCHITECTURES = {
    90010: "cdna2",
    90400: "cdna3",
    90401: "cdna3",
    90402: "cdna3",
    90500: "cdna4",
}  # such as gfx90a, gfx942, gfx950

# File of the device -> metric, labels, factor.
METRIC_FILES: tuple[tuple[str, str, tuple[str, ...], float], ...] = (
    ("gpu_busy_percent", "gpu_busy_ratio", (), 0.01),
    ("mem_busy_percent", "gpu_memory_busy_ratio", (), 0.01),
    ("mem_info_vram_used", "gpu_memory_used_bytes", (), 1.0),
    ("mem_info_vram_total", "gpu_memory_limit_bytes", (), 1.0),
    ("pcie_replay_count", "gpu_errors_total", ("pcie-replay", ""), 1.0),
)
# hwmon files; of two for the same series the first one that exists is used.
HWMON_SENSORS: tuple[tuple[str, str, tuple[str, ...], float], ...] = (
    ("power1_average", "gpu_power_watts", (), 1e-6),
    ("power1_input", "gpu_power_watts", (), 1e-6),
    ("power1_cap", "gpu_power_limit_watts", (), 1e-6),
)
LABELLED_SENSORS = (  # kind of sensor, its hwmon label -> metric, labels, factor
    ("temp", "edge", "gpu_temperature_celsius", ("gpu",), 1e-3),
    ("temp", "junction", "gpu_temperature_celsius", ("hotspot",), 1e-3),
    ("temp", "mem", "gpu_temperature_celsius", ("memory",), 1e-3),
    ("freq", "sclk", "gpu_clock_hertz", ("sm",), 1.0),
    ("freq", "mclk", "gpu_clock_hertz", ("memory",), 1.0),
)
RAS_ERROR_KINDS = {"ce": "ecc-corrected", "ue": "ecc-uncorrected"}
# The binary file `gpu_metrics`: revision in its header -> offset of the energy counter (2^-16 J).
ENERGY_OFFSETS = {1: 24, 2: 24, 3: 24, 4: 24, 5: 88}
JOULES_PER_COUNT = 2.0**-16
NO_PIPE_COUNTERS = (
    "the driver's files count no pipes: scrape AMD's device-metrics-exporter, or record a trace"
)


class AmdDevice(NamedTuple):
    """A device and the paths of its files."""

    device: Device
    directory: Path
    kfd: int | None  # its number in KFD's files of processes


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _read_number(path: Path) -> float | None:
    with suppress(ValueError):
        return float(_read_text(path) or "")
    return None


class AmdAccelerator:
    """All devices of the driver amdgpu that can compute."""

    name = "amd"

    def __init__(self, config: Config) -> None:
        self._sys = Path(config.collect.sys)
        self._entries: dict[str, AmdDevice] = {}
        self._missing: dict[str, str] = {}
        self._present: set[str] = set()
        # device -> bytes/s received and sent, measured over one recent second.
        self._traffic: dict[str, tuple[float, float]] = {}
        self._traffic_thread: threading.Thread | None = None
        self._smi: Any = None
        try:
            import amdsmi

            amdsmi.amdsmi_init()
            self._smi = amdsmi
        except Exception:  # noqa: BLE001 - without ROCm the package raises whatever its loader does
            self._smi = None
        if not any(self._cards()):
            raise BackendUnavailable(
                f"no AMD device in {self._sys}/class/drm: load the driver amdgpu, or give the container its devices"
            )

    def devices(self) -> list[Device]:
        """Returns the devices whose files exist."""
        entries: dict[str, AmdDevice] = {}
        nodes = {
            key: properties
            for identities, properties in _iterate_kfd_nodes(self._sys)
            for key in identities
        }
        for index, directory in enumerate(self._cards()):
            entry = self._device(str(index), directory, nodes)
            if entry.device.uuid in entries:  # two dies of one card share a number
                uuid = f"{entry.device.uuid}-{entry.device.pci}"
                entry = entry._replace(device=msgspec.structs.replace(entry.device, uuid=uuid))
            entries[entry.device.uuid] = entry
        self._entries = entries
        return [entry.device for entry in entries.values()]

    def capabilities(self) -> dict[str, str]:
        """Returns the metrics of any device, and why the others are absent."""
        return (
            self._missing
            | {"gpu_pipe_active_ratio": NO_PIPE_COUNTERS}
            | dict.fromkeys(self._present, "")
        )

    def sample(self) -> list[Reading]:
        readings: list[Reading] = []
        self._missing = {}
        for uuid, entry in self._entries.items():
            values: dict[tuple[str, tuple[str, ...]], float] = {}
            for metric, labels, value in self._values(entry):
                if value is not None:
                    values.setdefault((metric, labels), value)
                else:
                    self._missing.setdefault(
                        format_capability(metric, labels),
                        "the driver has no file for it on this device",
                    )
            readings += [
                Reading(metric, (uuid, *labels), value)
                for (metric, labels), value in values.items()
            ]
        self._measure_traffic()
        self._present = {
            format_capability(reading.metric, reading.labels[1:]) for reading in readings
        }
        return readings

    def processes(self) -> list[DeviceProcess]:
        """Returns the processes with a queue on a device: memory, and their share of all compute
        units now.
        """
        entries_by_kfd = {
            entry.kfd: entry for entry in self._entries.values() if entry.kfd is not None
        }
        processes: list[DeviceProcess] = []
        for directory in sorted((self._sys / "class/kfd/kfd/proc").glob("[0-9]*")):
            for file in directory.glob("vram_*"):
                number = file.name.removeprefix("vram_")
                entry = entries_by_kfd.get(int(number)) if number.isdigit() else None
                memory = _read_number(file)
                if entry is None or memory is None:
                    continue
                occupied = _read_number(directory / f"stats_{number}" / "cu_occupancy")
                units = entry.device.multiprocessors
                processes.append(
                    DeviceProcess(
                        device=entry.device.uuid,
                        pid=int(directory.name),
                        memory_bytes=int(memory),
                        busy_ratio=min(1.0, occupied / units)
                        if occupied is not None and units
                        else None,
                    )
                )
        return processes

    def events(self) -> list[DeviceEvent]:
        """Always empty: the files report no events."""
        return []

    def pause(self, seconds: float) -> bool:  # noqa: ARG002 - as every back end
        """Always False: the files use no counters that a profiler needs."""
        return False

    def close(self) -> None:
        """Shut down the management library."""
        if self._smi is not None:
            with suppress(Exception):
                self._smi.amdsmi_shut_down()

    def _cards(self) -> Iterator[Path]:
        for card in sorted(
            (self._sys / "class/drm").glob("card[0-9]*"),
            key=lambda path: (len(path.name), path.name),
        ):
            # Connectors of a card match the pattern, too, but have no vendor file.
            if _read_text(card / "device/vendor") == AMD_VENDOR_ID:
                yield card / "device"

    def _device(self, index: str, directory: Path, nodes: dict[str, dict[str, int]]) -> AmdDevice:
        pci = os.path.realpath(directory).rpartition("/")[2]
        unique = _read_text(directory / "unique_id") or ""
        node = nodes.get(pci) or (nodes.get(unique) if unique else None) or {}
        name = _read_text(directory / "product_name") or MODEL_NAMES.get(
            _read_text(directory / "device") or "", ""
        )
        partition = _read_text(directory / "current_compute_partition") or ""
        per_unit = node.get("simd_per_cu", 0)
        model = find_device_model(name)
        clocks = [
            float(mhz)
            for mhz in re.findall(r"(\d+)Mhz", _read_text(directory / "pp_dpm_sclk") or "")
        ]
        memory = _read_number(directory / "mem_info_vram_total")
        device = Device(
            uuid=f"GPU-{unique}" if unique else f"amd-{pci}",
            index=index,
            vendor="amd",
            model=name,
            pci=pci,
            driver=_read_text(self._sys / "module/amdgpu/version") or "",
            partition=partition if partition.upper() != "SPX" else "",
            memory_bytes=None if memory is None else int(memory),
            multiprocessors=node["simd_count"] // per_unit
            if per_unit
            else model.multiprocessors
            if model
            else None,
            highest_clock_hz=max(clocks) * 1e6
            if clocks
            else model.highest_clock_hz
            if model
            else None,
            architecture=GFX_ARCHITECTURES.get(
                node.get("gfx_target_version", 0), model.architecture if model else ""
            ),
        )
        return AmdDevice(device, directory, node.get("gpu_id"))

    def _values(self, entry: AmdDevice) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
        """Yields (metric, labels after the device, value or None)."""
        directory = entry.directory

        def scaled(path: Path, factor: float) -> float | None:
            value = _read_number(path)
            return None if value is None else value * factor

        for name, metric, labels, factor in METRIC_FILES:
            yield metric, labels, scaled(directory / name, factor)
        used, limit = (
            _read_number(directory / "mem_info_vram_used"),
            _read_number(directory / "mem_info_vram_total"),
        )
        yield "gpu_memory_free_bytes", (), None if used is None or limit is None else limit - used
        for sensors in directory.glob("hwmon/hwmon*"):
            for name, metric, labels, factor in HWMON_SENSORS:
                yield metric, labels, scaled(sensors / name, factor)
            for label_file in sensors.glob("*_label"):
                kind = re.sub(r"\d*_label$", "", label_file.name)
                for sensor_kind, label, metric, labels, factor in LABELLED_SENSORS:
                    if kind == sensor_kind and _read_text(label_file) == label:
                        value = label_file.with_name(label_file.name.replace("_label", "_input"))
                        yield metric, labels, scaled(value, factor)
        counts = dict.fromkeys(RAS_ERROR_KINDS, 0)
        blocks = list(directory.glob("ras/*_err_count"))
        for block in blocks:
            for kind, count in re.findall(r"(ue|ce):\s*(\d+)", _read_text(block) or ""):
                counts[kind] += int(count)
        for kind, error_kind in RAS_ERROR_KINDS.items():
            yield "gpu_errors_total", (error_kind, ""), float(counts[kind]) if blocks else None
        yield "gpu_energy_joules_total", (), _read_energy_joules(directory / "gpu_metrics")
        if entry.device.uuid in self._traffic:
            received, sent = self._traffic[entry.device.uuid]
            yield "gpu_link_bytes_per_second", ("pcie", "receive"), received
            yield "gpu_link_bytes_per_second", ("pcie", "transmit"), sent
        if self._smi is not None:
            yield from _read_link_counters(self._smi, entry.device.pci)

    def _measure_traffic(self) -> None:
        """Measure PCIe traffic in a thread for the next samples: the driver takes a second per
        device.
        """
        if self._traffic_thread is not None and self._traffic_thread.is_alive():
            return
        files = {
            uuid: entry.directory / "pcie_bw"
            for uuid, entry in self._entries.items()
            if (entry.directory / "pcie_bw").exists()
        }

        def measure() -> None:
            traffic = {}
            for uuid, file in files.items():
                fields = (_read_text(file) or "").split()
                # Packets received and sent in a second, and the max bytes per packet.
                if len(fields) == 3:
                    traffic[uuid] = (
                        int(fields[0]) * int(fields[2]) * 1.0,
                        int(fields[1]) * int(fields[2]) * 1.0,
                    )
            self._traffic = traffic

        if files:
            self._traffic_thread = threading.Thread(
                target=measure, name="accelerator amd pcie", daemon=True
            )
            self._traffic_thread.start()


def _iterate_kfd_nodes(sys: Path) -> Iterator[tuple[list[str], dict[str, int]]]:
    """Yields the devices known to KFD, in ROCm's order.

    Each comes with the identifiers that match it to a device of the driver: the PCI address and the
    unique id.
    """
    nodes = (sys / "class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for node in sorted(nodes, key=lambda path: (len(path.name), path.name)):
        pairs = (line.split() for line in (_read_text(node / "properties") or "").splitlines())
        properties = {
            pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()
        }
        number = _read_number(node / "gpu_id")
        if number and properties.get("simd_count"):  # CPUs have a node, too
            location, domain = properties.get("location_id", 0), properties.get("domain", 0)
            identities = []
            if location:
                identities.append(
                    f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
                )
            if properties.get("unique_id"):
                identities.append(f"{properties['unique_id']:016x}")
            yield identities, properties | {"gpu_id": int(number)}


def list_rocm_addresses(sys: Path) -> list[str]:
    """Returns the PCI addresses of the devices in ROCm's order; "" if a device does not report
    it.
    """
    return [
        next((key for key in identities if ":" in key), "")
        for identities, _ in _iterate_kfd_nodes(sys)
    ]


def _read_energy_joules(path: Path) -> float | None:
    """Returns the energy in joules since the driver was loaded, from the binary metrics; None for
    an unknown revision.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < 4:
        return None
    size, format_version, revision = struct.unpack_from("<HBB", content)
    offset = ENERGY_OFFSETS.get(revision)
    if format_version != 1 or offset is None or min(size, len(content)) < offset + 8:
        return None
    (count,) = struct.unpack_from("<Q", content, offset)
    return None if count == 2**64 - 1 else count * JOULES_PER_COUNT


def _read_link_counters(smi: Any, pci: str) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    """Yields the data sent over each XGMI link, in KB, which the files do not provide."""
    metrics: dict[str, Any] = {}
    with suppress(Exception):
        for handle in smi.amdsmi_get_processor_handles():
            if smi.amdsmi_get_gpu_device_bdf(handle) == pci:
                metrics = smi.amdsmi_get_gpu_metrics_info(handle)
    for direction, key in (("receive", "xgmi_read_data_acc"), ("transmit", "xgmi_write_data_acc")):
        # A missing link has "N/A".
        links = [link for link in metrics.get(key, ()) if isinstance(link, int)]
        yield (
            "gpu_link_bytes_total",
            ("xgmi", direction),
            float(sum(links)) * 1024 if links else None,
        )
