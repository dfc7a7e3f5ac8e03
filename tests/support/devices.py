"""Back ends of tests, and what is read off a sample."""

from __future__ import annotations

import threading

from traceloom.agent.accelerators.backend import Device, DeviceEvent, DeviceProcess, Sample
from traceloom.agent.metrics import Reading


def values(readings: list[Reading], metric: str) -> dict[tuple[str, ...], float]:
    """Label values -> value of one metric."""
    return {reading.labels: reading.value for reading in readings if reading.metric == metric}


class ByHand:
    """A back end that says what it is told to; `hold` makes it hang until the event is set."""

    name = "by-hand"

    def __init__(self) -> None:
        self.sampled = Sample(
            at_ns=1,
            devices=[Device(uuid="GPU-1", index="0", vendor="nvidia", model="H")],
            readings=[Reading("gpu_busy_ratio", ("GPU-1",), 0.5)],
            processes=[DeviceProcess(device="GPU-1", pid=7)],
        )
        self.reasons = {"gpu_busy_ratio": "", "gpu_power_watts": "the driver has no such call"}
        self.hold: threading.Event | None = None
        self.meet: threading.Barrier | None = None
        self.error: Exception | None = None
        self.paused = 0.0
        self.closed = threading.Event()

    def devices(self) -> list[Device]:
        if self.hold is not None:
            self.hold.wait(60)
        if self.meet is not None:
            self.meet.wait(30)
        if self.error is not None:
            raise self.error
        return self.sampled.devices

    def capabilities(self) -> dict[str, str]:
        return self.reasons

    def sample(self) -> list[Reading]:
        return self.sampled.readings

    def processes(self) -> list[DeviceProcess]:
        return self.sampled.processes

    def events(self) -> list[DeviceEvent]:
        return self.sampled.events

    def pause(self, seconds: float) -> bool:
        self.paused = seconds
        return True

    def close(self) -> None:
        self.closed.set()
