"""What the devices of a host are called, and which of them a process was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from support import amd
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.ownership.devices import HostDevices, find_assigned_devices

A, B, C, D = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abcd")


def _gpus(*uuids: str, **fields: Any) -> list[Device]:
    return [
        Device(
            **{
                "uuid": uuid,
                "index": str(number),
                "vendor": "nvidia",
                "model": "H100",
                "pci": f"00000000:{number + 1}0:00.0",
            }
            | fields
        )
        for number, uuid in enumerate(uuids)
    ]


def _mig(uuid: str, slot: int, instance: int, compute: int = 0, above: str = D) -> Device:
    return Device(
        uuid=uuid,
        index=f"3:{slot}",
        vendor="nvidia",
        model="H100",
        pci="00000000:40:00.0",
        parent=above,
        partition=f"1g.10gb gi={instance} ci={compute}",
    )


def _minors(proc: Path, **minors: int) -> None:
    for bus, minor in minors.items():
        file = proc / f"driver/nvidia/gpus/0000:{bus.strip('b')}:00.0/information"
        file.parent.mkdir(parents=True)
        file.write_text(
            f"Model: \t\t H100\nIRQ:   \t\t 99\nGPU UUID: \t GPU-?\nDevice Minor: \t {minor}\n",
            encoding="ascii",
        )


def _host(tmp_path: Path, *devices: Device) -> HostDevices:
    return HostDevices(devices or _gpus(A, B, C, D), tmp_path / "proc", tmp_path / "sys")


def _given(host: HostDevices, **environment: str) -> tuple[str, ...] | None:
    match = find_assigned_devices(environment, host)
    return match and match[0]


@pytest.mark.parametrize(
    ("name", "uuid"),
    [
        (B, B),
        (f"{B}::3", B),  # a replica of NVIDIA's plugin
        ("nvidia1", A),  # as GKE's plugin names device files
        ("nvidia1/vgpu2", A),
        ("00000000:20:00.0", B),
        ("0000:20:00.0", B),
        ("MIG-1", "MIG-1"),
        (f"MIG-{D}/7/0", "MIG-1"),  # before driver 470
        ("3:8:1", "MIG-3"),
        ("nvidia3/gi7", "MIG-1"),
        ("nvidia3/gi8", ""),  # two compute instances
        (f"nvidia.com/gpu={C}", C),
        ("nvidia.com/gpu=2", C),
        ("nvidia.com/gpu=3:0", "MIG-1"),
        ("amd.com/gpu=2", ""),  # another vendor's
        ("gpu.nvidia.com/gpu-2", C),
        ("gpu.nvidia.com/gpu-1", ""),  # by index or by file: the driver did both
        ("2", ""),  # of whose counting?
        ("", ""),
        ("GPU-ffffffff-0000-0000-0000-000000000000", ""),
    ],
)
def test_names(tmp_path: Path, name: str, uuid: str) -> None:
    _minors(tmp_path / "proc", b10=1, b20=0, b30=2, b40=3)
    host = _host(
        tmp_path,
        *_gpus(A, B, C, D),
        _mig("MIG-1", 0, 7),
        _mig("MIG-2", 1, 8, 0),
        _mig("MIG-3", 2, 8, 1),
    )
    assert host.named(name) == uuid


def test_partitions_of_exporters_are_numbered_otherwise(tmp_path: Path) -> None:
    scraped = msgspec.structs.replace(_mig(f"{D}/7", 7, 7), partition="1g.10gb gi=7")
    assert _host(tmp_path, *_gpus(A, B, C, D), scraped).numbered("3:7") == ""


# CUDA_VISIBLE_DEVICES -> what CUDA makes of it on a host of four equal devices; None: not known.
LISTS: dict[str, tuple[str, ...] | None] = {
    "2,0": (C, A),
    " 1 , 3": (B, D),
    "": (),
    "-1": (),
    "NoDevFiles": (),
    "0,-1,2": (A,),
    "1,9,2": (B,),
    "0,x,1": (A,),
    "99999999999999999999": (),
    B: (B,),
    f"{D},{B}": (D, B),
    "GPU-bbbb,GPU-a": (B, A),
    "GPU-": (),  # of several, which CUDA takes as an error
    "GPU-eeee": (),
    "0,0": None,
    "MIG-unknown": None,
}


@pytest.mark.parametrize("text", LISTS)
def test_lists_as_cuda_reads_them(tmp_path: Path, text: str) -> None:
    assert _given(_host(tmp_path), CUDA_VISIBLE_DEVICES=text) == LISTS[text]


def test_what_says_it(tmp_path: Path) -> None:
    assert find_assigned_devices({"CUDA_VISIBLE_DEVICES": "1"}, _host(tmp_path)) == (
        (B,),
        "CUDA_VISIBLE_DEVICES",
    )
    assert find_assigned_devices({}, _host(tmp_path)) is None
    assert (
        find_assigned_devices({"CUDA_VISIBLE_DEVICES": A}, HostDevices([], tmp_path, tmp_path))
        is None
    )


def test_numbers_of_unequal_devices_are_known_by_pci_alone(tmp_path: Path) -> None:
    """CUDA counts the fastest first, and only the process knows which that is."""
    host = _host(tmp_path, *_gpus(A, B), *_gpus("", "", C, model="T4")[2:])
    assert _given(host, CUDA_VISIBLE_DEVICES="2") is None
    assert _given(host, CUDA_VISIBLE_DEVICES="2", CUDA_DEVICE_ORDER="PCI_BUS_ID") == (C,)
    assert _given(host, CUDA_VISIBLE_DEVICES=C) == (C,)


def test_the_order_is_that_of_numbers_and_not_of_texts(tmp_path: Path) -> None:
    uuids = [f"GPU-{number:08x}" for number in range(12)]
    host = _host(tmp_path, *reversed(_gpus(*uuids)))
    assert _given(host, CUDA_VISIBLE_DEVICES="2,10") == (uuids[2], uuids[10])


def test_numbers_beside_lost_or_divided_devices_are_not_known(tmp_path: Path) -> None:
    lost = _host(tmp_path, *_gpus(A, stale="fallen off the bus"), *_gpus("", B)[1:])
    divided = _host(tmp_path, *_gpus(A, B, C, D), _mig("MIG-1", 0, 7))
    assert _given(lost, CUDA_VISIBLE_DEVICES="1") is None
    assert _given(divided, CUDA_VISIBLE_DEVICES="1") is None
    assert _given(divided, CUDA_VISIBLE_DEVICES="MIG-1") == ("MIG-1",)


@pytest.mark.parametrize("variable", ["LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID"])
def test_schedulers_that_may_renumber(tmp_path: Path, variable: str) -> None:
    assert _given(_host(tmp_path), CUDA_VISIBLE_DEVICES="1", **{variable: "7"}) is None
    assert _given(_host(tmp_path), CUDA_VISIBLE_DEVICES=B, **{variable: "7"}) == (B,)


# Variables of Slurm -> devices, on a host whose device files are numbered as CUDA counts, but for the last two.
SLURM: list[tuple[dict[str, str], tuple[str, ...] | None]] = [
    ({"SLURM_JOB_GPUS": "1,2"}, (B, C)),
    ({"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1"}, (B,)),  # the step's are fewer
    ({"SLURM_JOB_GPUS": "3,2"}, (D, C)),  # the files are numbered the other way round
    ({"SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, (A, B)),
    (
        {"SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"},
        (B,),
    ),  # counted anew within a control group
    ({"SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1"}, (B,)),  # counted as on the host
    ({"SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "1"}, (B,)),  # both ways say the same
    (
        {"SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1"},
        None,
    ),  # the host's, or the second of the step's?
    ({"SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": ""}, ()),
    (
        {"SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "3"},
        (B,),
    ),  # the task's own, counted within the step
    ({"SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": A}, (B,)),
    ({"SLURM_STEP_GPUS": "7", "CUDA_VISIBLE_DEVICES": "0"}, None),  # of a file that nobody knows
]


@pytest.mark.parametrize(("environment", "uuids"), SLURM)
def test_devices_of_slurm(
    tmp_path: Path, environment: dict[str, str], uuids: tuple[str, ...] | None
) -> None:
    _minors(tmp_path / "proc", b10=0, b20=1, b30=2, b40=3)
    given = _given(_host(tmp_path), **environment)
    assert (given if given is None else set(given)) == (uuids if uuids is None else set(uuids))


def test_slurm_counts_device_files(tmp_path: Path) -> None:
    _minors(tmp_path / "proc", b10=3, b20=2, b30=1, b40=0)
    assert _given(_host(tmp_path), SLURM_JOB_GPUS="0") == (D,)
    assert _given(HostDevices(_gpus(A, B), tmp_path / "none", tmp_path), SLURM_JOB_GPUS="0") is None


# NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES -> devices of a process in a container.
CONTAINERS: list[tuple[str | None, str | None, tuple[str, ...] | None]] = [
    ("2,3", None, (C, D)),
    (f"{D},{B}", None, (B, D)),
    (f"{D},{B}", "0", (B,)),  # counted in the container, by PCI
    (f"{D},{B}", "1", (D,)),
    (f"{D},{B}", "2", ()),
    ("all", "2", (C,)),
    ("all", None, (A, B, C, D)),
    ("none", None, ()),
    ("none", "0", ()),
    ("void", None, None),  # what runtimes say that give devices in other ways
    ("void", "0", None),
    ("void", B, (B,)),
    (None, "0", None),
    ("/var/run/nvidia-container-devices", None, None),
]


@pytest.mark.parametrize(("nvidia", "cuda", "uuids"), CONTAINERS)
def test_devices_of_a_container(
    tmp_path: Path, nvidia: str | None, cuda: str | None, uuids: tuple[str, ...] | None
) -> None:
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    (root / "dev/nvidiactl").touch()
    variables = {"NVIDIA_VISIBLE_DEVICES": nvidia, "CUDA_VISIBLE_DEVICES": cuda}
    environment = {name: value for name, value in variables.items() if value is not None}
    match = find_assigned_devices(environment, _host(tmp_path), root=root)
    assert (match and match[0]) == uuids


def test_all_means_nothing_in_a_container_without_devices(tmp_path: Path) -> None:
    """Images of CUDA bring the variable along, however they are started."""
    (tmp_path / "root").mkdir()
    assert (
        find_assigned_devices(
            {"NVIDIA_VISIBLE_DEVICES": "all"}, _host(tmp_path), root=tmp_path / "root"
        )
        is None
    )


def test_the_variables_of_runtimes_mean_nothing_outside_of_containers(tmp_path: Path) -> None:
    assert _given(_host(tmp_path), NVIDIA_VISIBLE_DEVICES="1") is None
    assert _given(_host(tmp_path), NVIDIA_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="0") == (A,)


def test_the_kubelet_is_stronger_than_the_runtime(tmp_path: Path) -> None:
    environment = {"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "1"}
    given = find_assigned_devices(
        environment, _host(tmp_path), root=tmp_path, kubelet=frozenset({D, B})
    )
    assert given == ((D,), "CUDA_VISIBLE_DEVICES")
    assert find_assigned_devices({}, _host(tmp_path), root=tmp_path, kubelet=frozenset({D, B})) == (
        (B, D),
        "kubelet",
    )


def test_devices_of_amd_are_counted_as_kfd_does(tmp_path: Path) -> None:
    """The cards of this host stand in another order than its nodes, of which there are more than nine."""
    sys = tmp_path / "sys"
    amd.node(sys, 0, 0, simd_count=0)
    for number, bus in ((9, 0x30), (10, 0x10), (11, 0x20)):
        amd.node(sys, number, number, simd_count=304, location_id=bus << 8, domain=0)
    uuids = [f"GPU-{number:016x}" for number in (1, 2, 3)]
    devices = [
        Device(
            uuid=uuid,
            index=str(number),
            vendor="amd",
            model="MI300X",
            pci=f"0000:{number + 1}0:00.0",
        )
        for number, uuid in enumerate(uuids)
    ]
    host = HostDevices(devices, tmp_path / "proc", sys)
    first, second, third = uuids[2], uuids[0], uuids[1]
    assert _given(host, ROCR_VISIBLE_DEVICES="0,2") == (first, third)
    assert _given(host, ROCR_VISIBLE_DEVICES="1,2", HIP_VISIBLE_DEVICES="1") == (
        third,
    )  # within what ROCr leaves
    assert _given(host, HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="0") == (second,)
    assert _given(host, CUDA_VISIBLE_DEVICES="1") == (second,)  # which HIP reads as well
    assert _given(host, ROCR_VISIBLE_DEVICES=uuids[1]) == (third,)
    assert _given(host, ROCR_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="0") == ()
    assert host.named("0000:20:00.0") == uuids[1]  # as AMD's device plugin does
    without = HostDevices(devices, tmp_path / "proc", tmp_path / "none")
    assert _given(without, ROCR_VISIBLE_DEVICES="0") is None
