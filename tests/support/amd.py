"""Trees of /sys as amdgpu and KFD make them."""

from __future__ import annotations

import struct
from pathlib import Path


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")


def card(sys: Path, number: int, pci: str, files: dict[str, str]) -> Path:
    """A device with its files, and the card that links to it."""
    device = sys / "devices/pci0000:00" / pci
    write(device, {"vendor": "0x1002", **files})
    link = sys / f"class/drm/card{number}"
    link.mkdir(parents=True)
    (link / "device").symlink_to(device)
    write(
        sys / f"class/drm/card{number}-DP-1", {"status": "disconnected"}
    )  # a connector is no device
    return device


def node(sys: Path, number: int, gpu_id: int, **properties: int) -> None:
    text = "\n".join(f"{key} {value}" for key, value in properties.items())
    write(
        sys / f"class/kfd/kfd/topology/nodes/{number}", {"gpu_id": str(gpu_id), "properties": text}
    )


def metrics_file(device: Path, revision: int, joules: float, size: int = 256) -> None:
    at = 88 if revision == 5 else 24
    content = bytearray(size)
    struct.pack_into("<HBB", content, 0, size, 1, revision)
    struct.pack_into("<Q", content, at, int(joules * 2**16))
    (device / "gpu_metrics").write_bytes(content)


def mi250x(sys: Path) -> None:
    """A card of two dies, each a device of its own, and a process on both."""
    for number, pci in enumerate(("0000:c1:00.0", "0000:c6:00.0")):
        device = card(
            sys,
            number,
            pci,
            {
                "device": "0x740c",
                "unique_id": f"a3f2b1c4d5e6f70{number}",
                "gpu_busy_percent": f"{90 + number}",
                "mem_busy_percent": "35",
                "mem_info_vram_total": "68702699520",
                "mem_info_vram_used": "34351349760",
                "hwmon/hwmon3/name": "amdgpu",
                "hwmon/hwmon3/power1_average": "412000000",
                "hwmon/hwmon3/power1_cap": "560000000",
                "hwmon/hwmon3/temp1_input": "48000",
                "hwmon/hwmon3/temp1_label": "edge",
                "hwmon/hwmon3/temp2_input": "55000",
                "hwmon/hwmon3/temp2_label": "junction",
                "hwmon/hwmon3/temp3_input": "62000",
                "hwmon/hwmon3/temp3_label": "mem",
                "hwmon/hwmon3/freq1_input": "1700000000",
                "hwmon/hwmon3/freq1_label": "sclk",
                "hwmon/hwmon3/freq2_input": "1600000000",
                "hwmon/hwmon3/freq2_label": "mclk",
                "pp_dpm_sclk": "0: 500Mhz\n1: 800Mhz\n2: 1700Mhz *",
                "pcie_replay_count": "2",
                "pcie_bw": "1000 2000 256",
                "ras/umc_err_count": "ue: 1\nce: 7",
                "ras/sdma_err_count": "ue: 0\nce: 2",
            },
        )
        metrics_file(device, 3, 1000.5)
        bus = int(pci[5:7], 16)
        node(
            sys,
            2 + number,
            51000 + number,
            simd_count=440,
            simd_per_cu=4,
            location_id=bus << 8,
            domain=0,
            gfx_target_version=90010,
        )
    node(sys, 0, 0, cpu_cores_count=64, simd_count=0)
    write(
        sys / "class/kfd/kfd/proc/4711",
        {
            "vram_51000": "1048576",
            "vram_51001": "2097152",
            "stats_51000/cu_occupancy": "55",
            "sdma_51000": "9",
        },
    )
    write(sys / "class/kfd/kfd/proc/4712", {"vram_51000": "5", "vram_99999": "1"})
    write(sys / "module/amdgpu", {"version": "6.12.12"})


def mi300x(sys: Path) -> Path:
    """A device without an edge sensor, whose power is an instant one."""
    device = card(
        sys,
        0,
        "0000:05:00.0",
        {
            "device": "0x74a1",
            "unique_id": "ccff74a180e0c6d4",
            "product_name": "AMD Instinct MI300X OAM",
            "gpu_busy_percent": "77",
            "mem_info_vram_total": "206141652992",
            "mem_info_vram_used": "6141652992",
            "current_compute_partition": "SPX",
            "current_memory_partition": "NPS1",
            "hwmon/hwmon5/power1_input": "650000000",
            "hwmon/hwmon5/power1_cap": "750000000",
            "hwmon/hwmon5/temp2_input": "71000",
            "hwmon/hwmon5/temp2_label": "junction",
            "hwmon/hwmon5/freq1_input": "2100000000",
            "hwmon/hwmon5/freq1_label": "sclk",
        },
    )
    metrics_file(device, 4, 77.0)
    node(
        sys,
        1,
        28851,
        simd_count=1216,
        simd_per_cu=4,
        location_id=0x0500,
        domain=0,
        gfx_target_version=90402,
        unique_id=0xCCFF74A180E0C6D4,
    )
    return device
