"""AMD devices, from trees of /sys as the driver makes them."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from support.amd import card, metrics_file, mi250x, mi300x, write
from support.devices import values
from traceloom.agent.accelerators.amd import AmdAccelerator
from traceloom.agent.accelerators.backend import BackendUnavailable, DeviceProcess
from traceloom.agent.config import Collect, Config
from traceloom.agent.snapshot import Snapshot

FIRST, SECOND = "GPU-a3f2b1c4d5e6f700", "GPU-a3f2b1c4d5e6f701"


def _back_end(tree: Path) -> AmdAccelerator:
    return AmdAccelerator(Config(collect=Collect(sys=str(tree))))


def test_each_die_of_a_card_is_a_device(tmp_path: Path) -> None:
    mi250x(tmp_path)
    first, second = _back_end(tmp_path).devices()
    assert (first.uuid, second.uuid) == (FIRST, SECOND)
    assert (first.model, first.pci, first.index, first.vendor) == (
        "AMD Instinct MI250X",
        "0000:c1:00.0",
        "0",
        "amd",
    )
    assert (first.multiprocessors, first.architecture, first.highest_clock_hz) == (
        110,
        "cdna2",
        1.7e9,
    )
    assert (first.memory_bytes, first.driver, first.partition) == (68702699520, "6.12.12", "")


def test_every_metric_has_the_value_of_its_file(tmp_path: Path) -> None:
    mi250x(tmp_path)
    back_end = _back_end(tmp_path)
    back_end.devices()
    readings = back_end.sample()
    Snapshot().put("accelerators", readings, 1)
    of_first = {
        (reading.metric, *reading.labels[1:]): reading.value
        for reading in readings
        if reading.labels[0] == FIRST
    }
    assert of_first == {
        ("gpu_busy_ratio",): 0.9,
        ("gpu_memory_busy_ratio",): pytest.approx(0.35),
        ("gpu_memory_used_bytes",): 34351349760.0,
        ("gpu_memory_limit_bytes",): 68702699520.0,
        ("gpu_memory_free_bytes",): 34351349760.0,
        ("gpu_power_watts",): pytest.approx(412.0),
        ("gpu_power_limit_watts",): pytest.approx(560.0),
        ("gpu_energy_joules_total",): 1000.5,
        ("gpu_temperature_celsius", "gpu"): 48.0,
        ("gpu_temperature_celsius", "hotspot"): 55.0,
        ("gpu_temperature_celsius", "memory"): 62.0,
        ("gpu_clock_hertz", "sm"): 1.7e9,
        ("gpu_clock_hertz", "memory"): 1.6e9,
        ("gpu_errors_total", "pcie-replay", ""): 2.0,
        ("gpu_errors_total", "ecc-corrected", ""): 9.0,
        ("gpu_errors_total", "ecc-uncorrected", ""): 1.0,
    }
    assert values(readings, "gpu_busy_ratio")[SECOND,] == 0.91


def test_traffic_is_measured_aside_for_the_next_sample(tmp_path: Path) -> None:
    mi250x(tmp_path)
    back_end = _back_end(tmp_path)
    back_end.devices()
    assert not values(back_end.sample(), "gpu_link_bytes_per_second"), (
        "nobody waits for the second that it takes"
    )
    assert back_end._traffic_thread is not None
    back_end._traffic_thread.join(30)
    rates = values(back_end.sample(), "gpu_link_bytes_per_second")
    assert rates[FIRST, "pcie", "receive"] == 1000 * 256
    assert rates[FIRST, "pcie", "transmit"] == 2000 * 256


def test_processes_of_kfd(tmp_path: Path) -> None:
    """One on two devices, two on one; a queue on a device that is not listed is of no device."""
    mi250x(tmp_path)
    back_end = _back_end(tmp_path)
    back_end.devices()
    assert sorted(back_end.processes(), key=lambda process: (process.pid, process.device)) == [
        DeviceProcess(device=FIRST, pid=4711, memory_bytes=1048576, busy_ratio=0.5),
        DeviceProcess(device=SECOND, pid=4711, memory_bytes=2097152, busy_ratio=None),
        DeviceProcess(device=FIRST, pid=4712, memory_bytes=5, busy_ratio=None),
    ]


def test_a_device_with_other_sensors(tmp_path: Path) -> None:
    mi300x(tmp_path)
    back_end = _back_end(tmp_path)
    (device,) = back_end.devices()
    readings = back_end.sample()
    assert (device.uuid, device.model, device.partition) == (
        "GPU-ccff74a180e0c6d4",
        "AMD Instinct MI300X OAM",
        "",
    )
    assert (device.multiprocessors, device.architecture, device.highest_clock_hz) == (
        304,
        "cdna3",
        2.1e9,
    )
    assert values(readings, "gpu_power_watts") == {(device.uuid,): pytest.approx(650.0)}
    assert values(readings, "gpu_energy_joules_total") == {(device.uuid,): 77.0}
    assert values(readings, "gpu_temperature_celsius") == {(device.uuid, "hotspot"): 71.0}
    reasons = back_end.capabilities()
    assert reasons["gpu_memory_busy_ratio"] == "the driver has no file for it on this device"
    assert reasons["gpu_busy_ratio"] == ""
    assert "exporter" in reasons["gpu_pipe_active_ratio"]


def test_the_mode_of_a_divided_card_is_told(tmp_path: Path) -> None:
    device = mi300x(tmp_path)
    write(device, {"current_compute_partition": "CPX"})
    assert _back_end(tmp_path).devices()[0].partition == "CPX"


def test_without_a_unique_number_the_address_identifies(tmp_path: Path) -> None:
    card(tmp_path, 0, "0000:0a:00.0", {"unique_id": ""})
    card(tmp_path, 1, "0000:0b:00.0", {"unique_id": "77"})
    card(tmp_path, 2, "0000:0c:00.0", {"unique_id": "77"})
    card(tmp_path, 10, "0000:0d:00.0", {})
    uuids = [device.uuid for device in _back_end(tmp_path).devices()]
    assert uuids == ["amd-0000:0a:00.0", "GPU-77", "GPU-77-0000:0c:00.0", "amd-0000:0d:00.0"]


@pytest.mark.parametrize(
    ("revision", "joules"), [(1, 5.0), (4, 5.0), (5, 5.0), (0, None), (9, None)]
)
def test_the_energy_counter_of_known_revisions_alone(
    tmp_path: Path, revision: int, joules: float | None
) -> None:
    device = mi300x(tmp_path)
    metrics_file(device, revision, 5.0)
    back_end = _back_end(tmp_path)
    back_end.devices()
    energy = values(back_end.sample(), "gpu_energy_joules_total")
    assert list(energy.values()) == ([] if joules is None else [joules])


@pytest.mark.parametrize(
    "content", [b"", b"\x10\x00\x01\x04", struct.pack("<HBB", 256, 1, 4) + b"\xff" * 60]
)
def test_damaged_or_empty_metrics_give_no_energy(tmp_path: Path, content: bytes) -> None:
    device = mi300x(tmp_path)
    (device / "gpu_metrics").write_bytes(content)
    back_end = _back_end(tmp_path)
    back_end.devices()
    assert not values(back_end.sample(), "gpu_energy_joules_total")


def test_a_device_that_vanishes_is_no_longer_listed(tmp_path: Path) -> None:
    mi250x(tmp_path)
    back_end = _back_end(tmp_path)
    back_end.devices()
    (tmp_path / "class/drm/card1/device").unlink()
    assert [device.uuid for device in back_end.devices()] == [FIRST]
    assert {reading.labels[0] for reading in back_end.sample()} == {FIRST}


def test_other_vendors_cards_are_none_of_its(tmp_path: Path) -> None:
    card(tmp_path, 0, "0000:0a:00.0", {"vendor": "0x10de"})
    with pytest.raises(BackendUnavailable, match="load the driver amdgpu"):
        _back_end(tmp_path)


def test_amdsmi_adds_what_the_files_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for AMD's package, which does not load without ROCm."""
    module = """
def amdsmi_init(): pass
def amdsmi_shut_down(): open(__file__ + ".closed", "w").close()
def amdsmi_get_processor_handles(): return ["0000:99:00.0", "0000:05:00.0"]
def amdsmi_get_gpu_device_bdf(handle): return handle
def amdsmi_get_gpu_metrics_info(handle):
    return {"xgmi_read_data_acc": [1, 2, "N/A"], "xgmi_write_data_acc": ["N/A"]}
"""
    packages = tmp_path / "packages"
    write(packages, {"amdsmi.py": module})
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    mi300x(tmp_path)
    back_end = _back_end(tmp_path)
    (device,) = back_end.devices()
    assert values(back_end.sample(), "gpu_link_bytes_total") == {
        (device.uuid, "xgmi", "receive"): 3 * 1024
    }
    back_end.close()
    assert (packages / "amdsmi.py.closed").exists()
    monkeypatch.delitem(sys.modules, "amdsmi")
