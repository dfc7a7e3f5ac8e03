"""Maps names of devices used by kubelets, schedulers and launchers to uuids, and finds the devices
assigned to a process.

An ambiguous name maps to no device: unknown is absent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from traceloom.agent.accelerators.amd import list_rocm_addresses
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.collectors.collector import read_if_there

_INSTANCE = re.compile(r"gi=(?P<instance>\d+)(?: ci=(?P<compute>\d+))?")
_REPLICA = re.compile(r"::\d+$|/vgpu\d+$")  # suffix of a device that a plugin shares
_CDI = re.compile(r"(?P<kind>[^/=]+/[^/=]+)=(?P<name>.+)")
_DRA = re.compile(r"gpu\.nvidia\.com/(?P<name>gpu-\d+)")
_PCI = re.compile(r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
# These schedulers may or may not renumber the devices of a job, which the process does not show.
_RENUMBERING_SCHEDULERS = ("LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")
_SLURM_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")


class HostDevices:
    """The devices of a host by their names in other systems.

    Args:
        devices: All, including partitions.
        proc: The host's /proc: NVIDIA's driver lists there which device is /dev/nvidia0.
        sys: The host's /sys: KFD lists there ROCm's order of devices.
    """

    def __init__(self, devices: Iterable[Device], proc: Path, sys: Path) -> None:
        self.by_uuid = {device.uuid: device for device in devices}
        self.vendor = next(
            (v for v in ("nvidia", "amd") if any(d.vendor == v for d in self.by_uuid.values())), ""
        )
        self._whole = [device for device in self.by_uuid.values() if not device.parent]
        self._amd_order = list_rocm_addresses(sys) if self.vendor == "amd" else []
        self._names = _drop_ambiguous(self._names_of(proc))
        self._indices = _drop_ambiguous(
            (device.index, device.uuid)
            for device in self.by_uuid.values()
            # Exporters number partitions differently from nvidia-smi.
            if device.vendor == self.vendor
            and (not device.parent or device.uuid.startswith("MIG-"))
        )

    def named(self, name: str) -> str:
        """Returns the uuid for a name of a device plugin, CDI, DRA or a scheduler; "" if that is
        not certain.
        """
        if cdi := _CDI.fullmatch(name):
            is_nvidia = cdi["kind"] == "nvidia.com/gpu"
            return self.named(cdi["name"]) or (self.numbered(cdi["name"]) if is_nvidia else "")
        if dra := _DRA.fullmatch(name):
            name = dra["name"]
        name = _REPLICA.sub("", name)
        return self._names.get(_normalise_pci_address(name) or name, "")

    def numbered(self, index: str) -> str:
        """Returns the uuid for a number of nvidia-smi (`0`; `0:1` a partition), else of AMD's
        driver.
        """
        return self._indices.get(index, "")

    def beginning(self, prefix: str) -> str:
        """Returns the uuid of the only device whose uuid starts with the prefix."""
        matches = [uuid for uuid in self.by_uuid if uuid.startswith(prefix)]
        return matches[0] if len(matches) == 1 else ""

    def parts(self, uuids: Iterable[str]) -> frozenset[str]:
        device_uuids = set(uuids)
        return frozenset(
            device_uuids
            | {uuid for uuid, device in self.by_uuid.items() if device.parent in device_uuids}
        )

    def all(self) -> list[str]:
        """Returns the vendor's usable devices: of a divided one its partitions."""
        parents = {device.parent for device in self.by_uuid.values()}
        return [
            u
            for u, device in self.by_uuid.items()
            if device.vendor == self.vendor and u not in parents
        ]

    def in_order(self, *, pci_order: bool = False) -> list[str]:
        """Returns all devices in the order of CUDA or ROCm; [] if that is not certain.

        Args:
            pci_order: CUDA is configured to use the order of PCI addresses; otherwise it lists the
                fastest first, which is the same if all are of one model.
        """
        whole_devices = [device for device in self._whole if device.vendor == self.vendor]
        undivided = {device.uuid for device in whole_devices} == set(self.all())
        certain = undivided and not any(device.stale for device in whole_devices)
        if self.vendor == "amd":
            order = [
                self._names.get(_normalise_pci_address(address), "") for address in self._amd_order
            ]
            return order if certain and "" not in order and len(order) == len(whole_devices) else []
        certain = certain and all(device.index.isdecimal() for device in whole_devices)
        if not certain or not (pci_order or len({device.model for device in whole_devices}) <= 1):
            return []
        return [
            device.uuid for device in sorted(whole_devices, key=lambda device: int(device.index))
        ]  # in the order of PCI addresses

    def _names_of(self, proc: Path) -> Iterator[tuple[str, str]]:
        # PCI address -> number of the device file, from NVIDIA's driver.
        minors: dict[str, str] = {}
        for directory in (proc / "driver/nvidia/gpus").glob("*"):
            match = re.search(
                rb"^Device Minor:\s*(\d+)", read_if_there(directory / "information"), re.MULTILINE
            )
            if match:  # else it was just removed
                minors[_normalise_pci_address(directory.name)] = match[1].decode()
        for device in self.by_uuid.values():
            yield device.uuid, device.uuid
            parent = self.by_uuid.get(device.parent, device)
            minor = (
                minors.get(_normalise_pci_address(parent.pci), "")
                if parent.vendor == "nvidia"
                else ""
            )
            instance = _INSTANCE.search(device.partition)
            if not device.parent:
                yield _normalise_pci_address(device.pci), device.uuid
                if minor:
                    yield f"nvidia{minor}", device.uuid
                # DRA's driver used to number by index, and now by the device file.
                if minor == device.index:
                    yield f"gpu-{minor}", device.uuid
            elif instance:
                numbers = f"{instance['instance']}", f"{instance['compute'] or 0}"
                yield f"MIG-{device.parent}/{'/'.join(numbers)}", device.uuid
                yield f"{parent.index}:{':'.join(numbers)}", device.uuid
                if minor:
                    yield f"nvidia{minor}/gi{numbers[0]}", device.uuid


def _drop_ambiguous(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    uuids: dict[str, set[str]] = {}
    for name, uuid in pairs:
        uuids.setdefault(name, set()).add(uuid)
    return {
        name: min(candidates) for name, candidates in uuids.items() if name and len(candidates) == 1
    }


def _normalise_pci_address(text: str) -> str:
    """Returns a PCI address, which drivers write with four or eight digits of the domain, in one
    format; "" if it is none.
    """
    match = _PCI.fullmatch(text.lower())
    return f"{int(match['domain'] or '0', 16):x}:{match['rest']}" if match else ""


def find_assigned_devices(
    environment: Mapping[str, str],
    devices: HostDevices,
    *,
    root: Path | None = None,
    kubelet: frozenset[str] | None = None,
) -> tuple[tuple[str, ...], str] | None:
    """Returns the devices assigned to a process, and the source; None if that is not certain.

    Args:
        environment: Its listed variables.
        devices: Those of its host.
        root: Its root directory, if it runs in a container.
        kubelet: Devices that the kubelet assigned to its container, if known.
    """
    if not devices.vendor:
        return None
    allowed, source = (
        (kubelet, "kubelet")
        if kubelet is not None
        else _find_allowed_devices(environment, devices, root)
    )
    order = devices.in_order(pci_order=environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")
    orders = [] if any(environment.get(name) for name in _RENUMBERING_SCHEDULERS) else [order]
    in_slurm = root is None and any(environment.get(name) for name in _SLURM_VARIABLES)
    if root is not None:
        orders = [[uuid for uuid in order if uuid in allowed]] if allowed is not None else []
    elif in_slurm:
        # If Slurm hides other devices by control groups, those of the step are numbered from 0.
        orders = [order, [uuid for uuid in order if uuid in allowed]] if allowed is not None else []
    filters: list[tuple[str, ...]] = [("CUDA_VISIBLE_DEVICES",)]
    # HIP numbers the devices that ROCr leaves, and falls back to CUDA's variable.
    if devices.vendor == "amd":
        filters = [("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")]
    for names in filters:
        variable = next((name for name in names if name in environment), "")
        if not variable or allowed == frozenset():
            continue
        text = environment[variable]
        matches = {
            listed_devices
            for listed_devices in [
                _parse_visible_devices(text, order, devices, strict=in_slurm)
                for order in orders or [[]]
            ]
            if listed_devices is not None
            and (allowed is None or allowed.issuperset(listed_devices))
        }
        if (
            not matches
            and in_slurm
            and allowed is not None
            and len(text.split(",")) == len(allowed)
        ):
            continue  # Slurm numbers the step's devices; this task has as many as the list names
        if len(matches) != 1:
            return None
        (result,) = matches
        orders, allowed, source = [list(result)], frozenset(result), variable
    if allowed is None:
        return None
    return tuple(uuid for uuid in (orders[0] if orders else ()) if uuid in allowed) or tuple(
        sorted(allowed)
    ), source


def _find_allowed_devices(
    environment: Mapping[str, str], devices: HostDevices, root: Path | None
) -> tuple[frozenset[str] | None, str]:
    """Returns the devices that the container runtime, or Slurm, lets a process access, as far as
    variables show.
    """
    if root is None:
        for variable in _SLURM_VARIABLES:
            entries = list(filter(None, map(str.strip, environment.get(variable, "").split(","))))
            if entries:  # Slurm names device files, whose order may differ from CUDA's
                uuids = [
                    devices.named(f"nvidia{entry}") or devices.named(entry) for entry in entries
                ]
                return (frozenset(uuids) if all(uuids) else None), variable
        return None, ""
    variable = "NVIDIA_VISIBLE_DEVICES"
    entries = list(filter(None, map(str.strip, environment.get(variable, "").split(","))))
    if entries == ["none"]:
        return frozenset(), variable
    if entries == ["all"]:
        # Images may set this variable even if they are started without the NVIDIA runtime.
        reached = devices.vendor == "nvidia" and os.path.exists(root / "dev/nvidiactl")  # noqa: PTH110 (never raises)
        return (frozenset(devices.all()) if reached else None), variable
    uuids = [devices.numbered(entry) or devices.named(entry) for entry in entries]
    return (devices.parts(uuids) & set(devices.all()) if uuids and all(uuids) else None), variable


def _parse_visible_devices(
    text: str, order: Sequence[str], devices: HostDevices, *, strict: bool
) -> tuple[str, ...] | None:
    """Parses a list of devices as CUDA and ROCm do: up to the first invalid entry. None: unknown.

    `strict`: the order is one of several possible ones; a number beyond it rules it out.
    """
    listed: list[str] = []
    for part in text.split(","):
        entry = part.strip()
        if entry.isdecimal():
            if not order or (strict and int(entry[:9]) >= len(order)):
                return None
            uuid = order[int(entry)] if len(entry) < 5 and int(entry) < len(order) else ""
        elif entry.startswith("MIG-"):
            uuid = devices.named(entry)
            if not uuid:  # partitions change, and some back ends do not know their uuids
                return None
        elif entry.startswith("GPU-"):
            uuid = devices.beginning(entry)
        else:
            uuid = ""
        if not uuid:
            break
        if uuid in listed:  # CUDA's handling of duplicates depends on its version
            return None
        listed.append(uuid)
    return tuple(listed)
