"""Accelerators of all vendors behind one protocol.

A back end is an entry point of the group `traceloom.accelerators`: something that takes the `Config` and gives an
`Accelerator`, or raises `NotHere`. It is made, asked and closed in a thread of its own (`watched.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from traceloom.agent.metrics import Reading


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device, or a partition of one (MIG), which has an identity of its own. None: not known."""

    uuid: str
    index: str
    vendor: str
    model: str
    pci: str = ""
    driver: str = ""
    parent: str = ""  # uuid of the device that this is a partition of
    partition: str = ""  # what kind of partition, as `1g.10gb`, with its numbers
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    highest_clock_hz: float | None = None
    architecture: str = ""  # as volta, ampere, ada, hopper, blackwell, cdna3
    owner: dict[str, str] = {}  # whose it is, where its back end says so: job, user, pod, namespace, container ...
    stale: str = ""  # why nothing is known of it now; "" where it answers


class DeviceProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a device. `busy_ratio`: share of the last interval in which its kernels ran."""

    device: str
    pid: int
    memory_bytes: int | None = None
    busy_ratio: float | None = None


class DeviceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a device. `kind`: xid, ecc, throttle, lost, back; times in ns since the epoch."""

    at_ns: int
    device: str
    kind: str
    code: int | None = None
    text: str = ""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """All that a back end has to say at one time, in ns since the epoch."""

    at_ns: int
    devices: list[Device] = []
    readings: list[Reading] = []
    processes: list[DeviceProcess] = []
    events: list[DeviceEvent] = []
    capabilities: dict[str, str] = {}


class NotHere(Exception):  # noqa: N818 - it is no error that a host has no such device
    """There is nothing on this host for a back end to look at: why, and what would help."""


class Accelerator(Protocol):
    """A back end. Its methods block; they are called from one thread of its own, and abandoned after 2 s."""

    name: str

    def devices(self) -> list[Device]:
        """The devices there are now."""

    def capabilities(self) -> dict[str, str]:
        """`capability` -> "" where it can be had, else why not and what would help."""

    def sample(self) -> list[Reading]:
        """Metrics of all its devices."""

    def processes(self) -> list[DeviceProcess]:
        """Who is on them."""

    def events(self) -> list[DeviceEvent]:
        """What happened since the last call."""

    def pause(self, seconds: float) -> bool:
        """Release hardware counters for another profiler, for so long at most; whether there were any."""

    def close(self) -> None:
        """Let go of the driver."""


def capability(metric: str, labels: Iterable[str] = ()) -> str:
    """What `capabilities` calls a metric: with its labels after the device, as `gpu_pipe_active_ratio{hmma}`."""
    text = ",".join(label for label in labels if label)
    return f"{metric}{{{text}}}" if text else metric
