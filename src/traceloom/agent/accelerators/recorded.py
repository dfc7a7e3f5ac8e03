"""Samples of a back end as JSON lines: written beside a running agent, played again on a host without such devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from traceloom.agent.accelerators import Device, DeviceEvent, DeviceProcess, NotHere, Sample
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.errors import InputError, other_version, unreadable

FORMAT = "traceloom-accelerators"
VERSION = 1
OVER = "the recording is over"


class RecordingHead(msgspec.Struct, frozen=True):
    """The first line of a file of samples."""

    format: str
    version: int


class SampleWriter:
    """Writes samples to a file, a line each, behind one that says what the file is."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("wb")  # noqa: SIM115 - open for as long as the agent records
        self._encoder = msgspec.json.Encoder()
        self._file.write(self._encoder.encode(RecordingHead(FORMAT, VERSION)) + b"\n")

    def write(self, sample: Sample) -> None:
        """Append a sample, whole before the next begins."""
        self._file.write(self._encoder.encode(sample) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()


def samples(path: str | Path) -> Generator[Sample, None, None]:
    """The samples of a file, one after the other; a last line that was cut off is left out.

    Raises:
        InputError: `unreadable`, `other-version`; `wrong-recording`: not a file of samples.
    """
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise unreadable(path, error, "recording") from error
    with file:
        try:
            head = msgspec.json.decode(file.readline(), type=RecordingHead)
        except msgspec.DecodeError as error:
            raise InputError("this is no recording of devices", slug="wrong-recording", where=str(path)) from error
        if head.format != FORMAT:
            raise InputError(f"expected {FORMAT}, got {head.format}", slug="wrong-recording", where=str(path))
        if head.version != VERSION:
            raise other_version("recording of devices", head.version, VERSION, path)
        decoder = msgspec.json.Decoder(Sample)
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise InputError(
                    f"a sample cannot be read: {error}", slug="wrong-recording", where=f"{path}, line {number}"
                ) from error


class RecordedAccelerator:
    """Plays samples again, as far apart as they were recorded; after the last one its devices are stale.

    Args:
        config: Where the file is.
        clock: Seconds that only grow.
    """

    name = "recorded"

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        if not config.accelerators.recorded:
            raise NotHere("no recording is played: [accelerators] recorded = FILE names one")
        self._samples = samples(config.accelerators.recorded)
        self._clock = clock
        first = next(self._samples, None)
        if first is None:
            raise NotHere(f"{config.accelerators.recorded} has no samples")
        self._now, self._next = first, next(self._samples, None)
        self._events = list(first.events)
        self._start_s = clock() - first.at_ns / 1e9
        self._apart_s = config.collect.period

    def devices(self) -> list[Device]:
        """Those of the sample whose time it is."""
        while self._next is not None and self._next.at_ns / 1e9 <= self._clock() - self._start_s:
            self._apart_s = (self._next.at_ns - self._now.at_ns) / 1e9
            self._now, self._next = self._next, next(self._samples, None)
            self._events += self._now.events
        devices = self._now.devices
        return [msgspec.structs.replace(device, stale=OVER) for device in devices] if self._is_over() else devices

    def capabilities(self) -> dict[str, str]:
        """What could be had where it was recorded."""
        return self._now.capabilities

    def sample(self) -> list[Reading]:
        """The readings of the sample whose time it is."""
        return [] if self._is_over() else self._now.readings

    def processes(self) -> list[DeviceProcess]:
        """Who was on the devices."""
        return [] if self._is_over() else self._now.processes

    def events(self) -> list[DeviceEvent]:
        """What happened since the last call, with the times of the recording."""
        events, self._events = self._events, []
        return events

    def pause(self, seconds: float) -> bool:  # noqa: ARG002 - as every back end
        """There is nothing to release."""
        return False

    def close(self) -> None:
        """Let go of the file."""
        self._samples.close()

    def _is_over(self) -> bool:
        # The last sample is true for as long as the one before it was.
        return self._next is None and self._clock() - self._start_s > self._now.at_ns / 1e9 + self._apart_s
