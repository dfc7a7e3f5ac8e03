"""Simulated devices, recording of samples, and replay of recorded ones."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from traceloom.agent.accelerators.backend import (
    BackendUnavailable,
    Device,
    DeviceEvent,
    DeviceProcess,
    Sample,
    format_capability,
)
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.errors import InputError, other_version, unreadable

CLOCK_HZ, MAX_CLOCK_HZ, MEMORY_CLOCK_HZ = 1.755e9, 1.98e9, 2.619e9
MEMORY_BYTES, RESERVED_BYTES = 80 << 30, 600 << 20
IDLE_WATTS, POWER_LIMIT_WATTS = 75.0, 700.0
CHECKPOINT_INTERVAL_S, CHECKPOINT_DURATION_S = (
    120.0,
    8.0,
)  # the simulated job pauses to write a checkpoint
PIPES = ("tensor", "hmma", "imma", "dmma", "dfma", "fp64", "fp32", "fp16", "int")


class DeviceLoad(msgspec.Struct, kw_only=True):
    """The load of one device. Ratios are of time; a pipe without an entry is idle."""

    busy: float
    pipes: dict[str, float]
    power_watts: float
    clock_hz: float = CLOCK_HZ
    memory_bytes: int = 60 << 30
    processes: list[DeviceProcess] = []
    stale: str = ""  # why it does not respond


class SimulatedAccelerator:
    """Simulated H100 devices. Their load is a function of time and index only, unless overridden.

    Args:
        config: Number of devices, and the host: devices of two hosts have different identities.
        clock: Seconds.
    """

    name = "simulated"

    def __init__(self, config: Config, clock: Callable[[], float] = time.time) -> None:
        self.overrides: dict[int, DeviceLoad] = {}  # index -> its load from now on
        self.pending_events: list[DeviceEvent] = []  # returned by the next call of `events`
        self.paused_until = 0.0
        self._clock = clock
        self._device_count = config.accelerators.simulated
        self._host = config.host_name
        self._last_sample_s: float | None = None
        self._energy_joules = [0.0] * self._device_count
        self._throttled_s = [0.0] * self._device_count
        if not self._device_count:
            raise BackendUnavailable(
                "no devices are simulated: [accelerators] simulated = 8 makes up eight"
            )

    def uuid(self, index: int) -> str:
        """Returns the uuid of a device, which is stable for this host."""
        return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{self._host}')}"

    def load(self, index: int) -> DeviceLoad:
        """Returns the current load of a device."""
        if index in self.overrides:
            return self.overrides[index]
        # A job that trains in BF16, writes checkpoints, and whose devices differ slightly.
        seconds = self._clock()
        if seconds % CHECKPOINT_INTERVAL_S < CHECKPOINT_DURATION_S:
            return DeviceLoad(
                busy=0.02, pipes={}, power_watts=IDLE_WATTS + 40.0, clock_hz=MAX_CLOCK_HZ
            )
        busy = 0.94 + 0.05 * math.sin(seconds / 7.0 + index)
        tensor_ratio = 0.48 * busy
        pipes = {
            "tensor": tensor_ratio,
            "hmma": tensor_ratio,
            "fp32": 0.09 * busy,
            "fp16": 0.01 * busy,
            "int": 0.12 * busy,
        }
        return DeviceLoad(
            busy=busy, pipes=pipes, power_watts=IDLE_WATTS + 580.0 * busy - 3.0 * index
        )

    def devices(self) -> list[Device]:
        return [
            Device(
                uuid=self.uuid(index),
                index=str(index),
                vendor="nvidia",
                model="NVIDIA H100 80GB HBM3",
                pci=f"00000000:{0x10 + index:02X}:00.0",
                driver="simulated",
                memory_bytes=MEMORY_BYTES,
                multiprocessors=132,
                highest_clock_hz=MAX_CLOCK_HZ,
                architecture="hopper",
                stale=self.load(index).stale,
            )
            for index in range(self._device_count)
        ]

    def capabilities(self) -> dict[str, str]:
        return {
            format_capability(reading.metric, reading.labels[1:]): ""
            for reading in self._build_readings(0)
        }

    def sample(self) -> list[Reading]:
        """Returns the metrics of a Hopper device with GPM; energy and throttling accumulate from
        the first call.
        """
        now = self._clock()
        seconds = 0.0 if self._last_sample_s is None else max(0.0, now - self._last_sample_s)
        self._last_sample_s = now
        for index in range(self._device_count):
            watts = self.load(index).power_watts
            self._energy_joules[index] += watts * seconds
            self._throttled_s[index] += seconds if watts >= POWER_LIMIT_WATTS else 0.0
        return [
            reading
            for index in range(self._device_count)
            if not self.load(index).stale
            for reading in self._build_readings(index)
        ]

    def processes(self) -> list[DeviceProcess]:
        """Returns the processes planted by `overrides`."""
        return [
            msgspec.structs.replace(process, device=self.uuid(index))
            for index, load in self.overrides.items()
            if not load.stale
            for process in load.processes
        ]

    def events(self) -> list[DeviceEvent]:
        """Returns and clears `pending_events`."""
        events, self.pending_events = self.pending_events, []
        return events

    def pause(self, seconds: float) -> bool:
        """Report no pipe activity for `seconds`."""
        self.paused_until = self._clock() + seconds
        return True

    def close(self) -> None:
        """Does nothing: there are no resources."""

    def _build_readings(self, index: int) -> list[Reading]:
        load, device = self.load(index), (self.uuid(index),)
        power_ratio = load.power_watts / POWER_LIMIT_WATTS
        links = (("pcie", 6e9), ("nvlink", 180e9))
        readings = [
            Reading("gpu_busy_ratio", device, load.busy),
            Reading("gpu_memory_busy_ratio", device, 0.5 * load.busy),
            *(
                Reading("gpu_video_busy_ratio", (*device, engine), 0.0)
                for engine in ("encoder", "decoder")
            ),
            Reading("gpu_memory_used_bytes", device, load.memory_bytes),
            Reading(
                "gpu_memory_free_bytes", device, MEMORY_BYTES - RESERVED_BYTES - load.memory_bytes
            ),
            Reading("gpu_memory_reserved_bytes", device, RESERVED_BYTES),
            Reading("gpu_memory_limit_bytes", device, MEMORY_BYTES),
            Reading("gpu_power_watts", device, load.power_watts),
            Reading("gpu_power_limit_watts", device, POWER_LIMIT_WATTS),
            Reading("gpu_energy_joules_total", device, self._energy_joules[index]),
            Reading("gpu_temperature_celsius", (*device, "gpu"), 30.0 + 35.0 * power_ratio),
            Reading("gpu_temperature_celsius", (*device, "memory"), 34.0 + 45.0 * power_ratio),
            Reading("gpu_clock_hertz", (*device, "sm"), load.clock_hz),
            Reading("gpu_clock_hertz", (*device, "memory"), MEMORY_CLOCK_HZ),
            Reading(
                "gpu_throttled", (*device, "power"), float(load.power_watts >= POWER_LIMIT_WATTS)
            ),
            Reading("gpu_throttled_seconds_total", (*device, "power"), self._throttled_s[index]),
            Reading("gpu_errors_total", (*device, "pcie-replay", ""), 0.0),
            *(
                Reading("gpu_remapped_rows", (*device, kind), 0.0)
                for kind in ("correctable", "uncorrectable")
            ),
        ]
        if self._clock() < self.paused_until:
            return readings
        readings += [
            Reading("gpu_graphics_active_ratio", device, load.busy),
            Reading("gpu_sm_active_ratio", device, 0.9 * load.busy),
            Reading("gpu_sm_occupancy_ratio", device, 0.3 * load.busy),
            Reading("gpu_dram_active_ratio", device, 0.4 * load.busy),
            *(
                Reading("gpu_pipe_active_ratio", (*device, pipe), load.pipes.get(pipe, 0.0))
                for pipe in PIPES
            ),
            *(
                Reading("gpu_link_bytes_per_second", (*device, link, direction), rate * load.busy)
                for link, rate in links
                for direction in ("transmit", "receive")
            ),
        ]
        return readings


RECORDING_FORMAT = "traceloom-accelerators"
RECORDING_VERSION = 1
RECORDING_ENDED = "the recording is over"


class RecordingHeader(msgspec.Struct, frozen=True):
    """The first line of a file of samples."""

    format: str
    version: int


class SampleWriter:
    """Writes samples to a file, one per line, after a header line."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("wb")  # noqa: SIM115 - open for as long as the agent records
        self._encoder = msgspec.json.Encoder()
        self._file.write(
            self._encoder.encode(RecordingHeader(RECORDING_FORMAT, RECORDING_VERSION)) + b"\n"
        )

    def write(self, sample: Sample) -> None:
        self._file.write(self._encoder.encode(sample) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_samples(path: str | Path) -> Generator[Sample, None, None]:
    """Yields the samples of a file; an incomplete last line is dropped.

    Raises:
        InputError: `unreadable`, `other-version`; `wrong-recording`: not a file of samples.
    """
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise unreadable(path, error, "recording") from error
    with file:
        try:
            header = msgspec.json.decode(file.readline(), type=RecordingHeader)
        except msgspec.DecodeError as error:
            raise InputError(
                "this is no recording of devices", slug="wrong-recording", where=str(path)
            ) from error
        if header.format != RECORDING_FORMAT:
            raise InputError(
                f"expected {RECORDING_FORMAT}, got {header.format}",
                slug="wrong-recording",
                where=str(path),
            )
        if header.version != RECORDING_VERSION:
            raise other_version("recording of devices", header.version, RECORDING_VERSION, path)
        decoder = msgspec.json.Decoder(Sample)
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise InputError(
                    f"a sample cannot be read: {error}",
                    slug="wrong-recording",
                    where=f"{path}, line {number}",
                ) from error


class RecordedAccelerator:
    """Replays samples at their recorded pace; after the last one its devices are stale.

    Args:
        config: Has the path of the file.
        clock: Monotonic seconds.
    """

    name = "recorded"

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        if not config.accelerators.recorded:
            raise BackendUnavailable(
                "no recording is played: [accelerators] recorded = FILE names one"
            )
        self._samples = read_samples(config.accelerators.recorded)
        self._clock = clock
        first = next(self._samples, None)
        if first is None:
            raise BackendUnavailable(f"{config.accelerators.recorded} has no samples")
        self._current, self._next = first, next(self._samples, None)
        self._events = list(first.events)
        self._clock_offset_s = clock() - first.at_ns / 1e9
        self._interval_s = config.collect.period

    def devices(self) -> list[Device]:
        while (
            self._next is not None
            and self._next.at_ns / 1e9 <= self._clock() - self._clock_offset_s
        ):
            self._interval_s = (self._next.at_ns - self._current.at_ns) / 1e9
            self._current, self._next = self._next, next(self._samples, None)
            self._events += self._current.events
        devices = self._current.devices
        return (
            [msgspec.structs.replace(device, stale=RECORDING_ENDED) for device in devices]
            if self._has_ended()
            else devices
        )

    def capabilities(self) -> dict[str, str]:
        return self._current.capabilities

    def sample(self) -> list[Reading]:
        return [] if self._has_ended() else self._current.readings

    def processes(self) -> list[DeviceProcess]:
        return [] if self._has_ended() else self._current.processes

    def events(self) -> list[DeviceEvent]:
        """Returns the events since the last call, with the times of the recording."""
        events, self._events = self._events, []
        return events

    def pause(self, seconds: float) -> bool:  # noqa: ARG002 - as every back end
        """Always False: there are no counters."""
        return False

    def close(self) -> None:
        self._samples.close()

    def _has_ended(self) -> bool:
        # The last sample is valid for as long as the previous one was.
        return (
            self._next is None
            and self._clock() - self._clock_offset_s > self._current.at_ns / 1e9 + self._interval_s
        )
