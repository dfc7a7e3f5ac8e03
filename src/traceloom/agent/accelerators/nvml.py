"""NVIDIA devices and their MIG partitions, through NVML; from Hopper on with the counters of its pipes (GPM).

What a driver, a device or the rights of the agent do not give is absent, and `capabilities` says why.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from traceloom.agent.accelerators import Device, DeviceEvent, DeviceProcess, NotHere
from traceloom.agent.accelerators.gpm import GPM_APART_S, MIB
from traceloom.agent.accelerators.nvml_calls import optional
from traceloom.agent.accelerators.nvml_device import NvmlDevice
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading

NO_INSTANCE = 0xFFFFFFFF
UNKNOWN_XID = 999
MOST_EVENTS = 1000  # of one sample

# Compute capability -> the architecture whose multiprocessors are alike (flop_per_clock.json).
ARCHITECTURES = {
    (7, 0): "volta", (7, 5): "turing", (8, 0): "ampere", (8, 6): "ampere-86", (8, 9): "ada", (9, 0): "hopper",
    (10, 0): "blackwell",
}  # fmt: skip
CORES_PER_SM = {"volta": 64, "turing": 64, "ampere": 64, "ampere-86": 128, "ada": 128, "hopper": 128, "blackwell": 128}

T = TypeVar("T")


class NvmlAccelerator:
    """All devices of NVIDIA's driver.

    Args:
        config: Nothing of it is used, as all devices are looked at.
        clock: Seconds that only grow.

    Raises:
        NotHere: There is no driver, no device, or nvidia-ml-py is not installed.
        NVMLError: The driver refuses; the back end is made again later, as after a reload of the driver.
    """

    name = "nvml"

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:  # noqa: ARG002
        try:
            import pynvml
        except ImportError as error:
            raise NotHere("nvidia-ml-py is not installed: pip install 'traceloom[agent]'") from error
        self._nvml = pynvml
        self._clock = clock
        self._devices: dict[str, NvmlDevice] = {}
        self._handles: dict[int | None, str] = {}  # handle -> device that it stands for, for events
        self._lost_before: dict[int, str] = {}  # index -> why it has no identity
        self._events: Any = None
        self._paused_until = 0.0
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                raise NotHere(
                    "NVIDIA's driver is not installed (libnvidia-ml.so.1); in a container, give it the devices"
                ) from error
            if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
                raise NotHere(
                    "NVIDIA's driver is installed but not loaded: modprobe nvidia, or restart the host"
                ) from error
            if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
                raise NotHere(
                    "NVIDIA's driver was updated while it ran: restart the agent, then the host if need be"
                ) from error
            raise
        self._driver = pynvml.nvmlSystemGetDriverVersion()
        with suppress(pynvml.NVMLError):
            self._events = pynvml.nvmlEventSetCreate()

    def devices(self) -> list[Device]:
        """The devices, each followed by its partitions; a lost one is stale."""
        nvml = self._nvml
        count = nvml.nvmlDeviceGetCount()
        if not count:
            raise NotHere("NVIDIA's driver is loaded but lists no device")
        self._devices = {entry.device.uuid: entry for index in range(count) for entry in self._list(index)}
        return [entry.device for entry in self._devices.values()]

    def capabilities(self) -> dict[str, str]:
        """What any device gives, and why what none gives is absent."""
        reasons = {f"device {index}": reason for index, reason in self._lost_before.items()}
        for entry in self._devices.values():
            reasons.update({key: reason for key, reason in entry.missing.items() if key not in reasons})
        if self._events is None:
            reasons["gpu_last_xid"] = "the driver tells of no events"
        return reasons | {key: "" for entry in self._devices.values() for key in entry.present}

    def sample(self) -> list[Reading]:
        """All metrics of all devices that answer."""
        if self._paused_until and self._clock() >= self._paused_until:
            self._paused_until = 0.0
            for _ in self._answering(NvmlDevice.arm):  # counts pipes again
                pass
        for _ in self._answering(NvmlDevice.take_gpm, self._clock()):
            pass
        if any(entry.gpm is not None and len(entry.gpm) == 1 for entry in self._devices.values()):
            # Ratios need two samples: after a start or a pause the second follows at once.
            time.sleep(GPM_APART_S * 1.1)
            for _ in self._answering(NvmlDevice.take_gpm, self._clock()):
                pass
        return [
            Reading(metric, (entry.device.uuid, *labels), float(value))
            for entry, values in self._answering(NvmlDevice.sample, self._clock())
            for (metric, labels), value in values.items()
        ]

    def processes(self) -> list[DeviceProcess]:
        """Who runs on the devices; of a partitioned one, on its partitions."""
        parents = {entry.device.parent for entry in self._devices.values()}
        return [
            process
            for entry, processes in self._answering(NvmlDevice.processes)
            if entry.device.uuid not in parents
            for process in processes
        ]

    def events(self) -> list[DeviceEvent]:
        """What happened since the last call."""
        nvml = self._nvml
        happened: list[DeviceEvent] = []
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # none is waiting, or the device is lost, which its own calls tell
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
            text = ("" if code is not None else "the driver does not know its number") if is_xid else "double-bit error"
            happened.append(DeviceEvent(at_ns=time.time_ns(), device=uuid, kind=kind, code=code, text=text))
        return happened

    def pause(self, seconds: float) -> bool:
        """Stop counting pipes, so that a profiler that needs the counters gets them."""
        self._paused_until = self._clock() + seconds
        return sum(entry.disarm() for entry in self._devices.values()) > 0

    def close(self) -> None:
        """Let go of counters, events and the library."""
        with suppress(self._nvml.NVMLError):
            for entry in self._devices.values():
                entry.disarm()
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    def _answering(self, call: Callable[..., T], *arguments: Any) -> Iterator[tuple[NvmlDevice, T]]:
        """What a call gives for each device that is not lost; one that falls off the bus meanwhile turns stale."""
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
        entry.device = msgspec.structs.replace(entry.device, stale=f"{error}: restart the host, or reset the device")

    def _list(self, index: int) -> list[NvmlDevice]:
        """A device and its partitions; those of the last time, stale, where it is lost."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)  # the others may answer of a lost device from memory
            entry = self._devices.get(uuid)
            if entry is None or entry.device.stale:
                entry = self._add(handle, uuid, index)
            self._lost_before.pop(index, None)
            return [entry, *self._partitions(entry)]
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            of_before = [
                entry for entry in self._devices.values() if entry.device.index.partition(":")[0] == str(index)
            ]
            for entry in of_before:
                self._lose(entry, error)
            if not of_before:
                self._lost_before[index] = f"{error}: restart the host, or reset the device"
            return of_before

    def _add(self, handle: Any, uuid: str, index: int) -> NvmlDevice:
        nvml = self._nvml
        attempt = partial(optional, nvml)
        pci = attempt(nvml.nvmlDeviceGetPciInfo, handle)
        capability = attempt(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        cores = attempt(nvml.nvmlDeviceGetNumGpuCores, handle)
        clock = attempt(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
        memory = attempt(nvml.nvmlDeviceGetMemoryInfo, handle)
        model = attempt(nvml.nvmlDeviceGetName, handle) or ""
        architecture = ARCHITECTURES.get(tuple(capability), "") if capability else ""
        cores_per_sm = CORES_PER_SM.get(architecture)
        if architecture and "GeForce" in model:  # whose matrix units add in 32 bits at half the rate
            architecture += "-geforce"
        device = Device(
            uuid=uuid, index=str(index), vendor="nvidia", model=model,
            pci=pci.busId if pci else "", driver=self._driver,
            memory_bytes=memory.total if memory else None,
            multiprocessors=cores // cores_per_sm if cores and cores_per_sm else None,
            highest_clock_hz=clock * 1e6 if clock else None, architecture=architecture,
        )  # fmt: skip
        self._handles[ctypes.cast(handle, ctypes.c_void_p).value] = uuid
        if self._events is not None:
            types = attempt(nvml.nvmlDeviceGetSupportedEventTypes, handle) or 0
            wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
            attempt(nvml.nvmlDeviceRegisterEvents, handle, types & wanted, self._events)
        return NvmlDevice(nvml, handle, device, None, armed=not self._paused_until)

    def _partitions(self, entry: NvmlDevice) -> Iterator[NvmlDevice]:
        nvml = self._nvml
        mode = entry.attempt("partitions", nvml.nvmlDeviceGetMigMode, entry.handle)
        if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
        for slot in range(entry.attempt("partitions", nvml.nvmlDeviceGetMaxMigDeviceCount, entry.handle) or 0):
            handle = optional(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, entry.handle, slot)
            uuid = None if handle is None else optional(nvml, nvml.nvmlDeviceGetUUID, handle)
            if uuid is None:  # nothing is in that slot, or it was taken away just now
                continue
            if uuid in self._devices and not self._devices[uuid].device.stale:
                yield self._devices[uuid]
                continue
            # A partition's numbers and size do not change while it exists.
            instance = optional(nvml, nvml.nvmlDeviceGetGpuInstanceId, handle)
            compute = optional(nvml, nvml.nvmlDeviceGetComputeInstanceId, handle)
            attributes = entry.attempt("partitions", nvml.nvmlDeviceGetAttributes_v2, handle)
            name = str(optional(nvml, nvml.nvmlDeviceGetName, handle) or "")
            device = msgspec.structs.replace(
                entry.device, uuid=uuid, index=f"{entry.device.index}:{slot}", parent=entry.device.uuid,
                partition=f"{name.rpartition('MIG ')[2]} gi={instance} ci={compute}",
                multiprocessors=attributes.multiprocessorCount if attributes else None,
                memory_bytes=attributes.memorySizeMB * MIB if attributes else None,
            )  # fmt: skip
            yield NvmlDevice(nvml, handle, device, entry, armed=not self._paused_until)
