"""Accelerators of all vendors behind one protocol.

A back end is an entry point of the group `traceloom.accelerators`.
"""

from __future__ import annotations

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


class Accelerator(Protocol):
    """A back end. Its methods block; they are called from one thread of its own, and abandoned after 2 s."""

    name: str

    def devices(self) -> list[Device]:
        """The devices there are now."""

    def capabilities(self) -> dict[str, str]:
        """Metric -> "" where it can be had, else why not and what would help."""

    def sample(self) -> list[Reading]:
        """Metrics of all its devices."""

    def processes(self) -> list[DeviceProcess]:
        """Who is on them."""

    def events(self) -> list[DeviceEvent]:
        """What happened since the last call."""

    def pause(self, seconds: float) -> bool:
        """Release hardware counters for another profiler; whether there was something to release."""

    def resume(self) -> bool:
        """Take them again."""

    def close(self) -> None:
        """Let go of the driver."""
