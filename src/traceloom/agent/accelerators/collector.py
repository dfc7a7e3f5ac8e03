"""The collector of all accelerators: every back end is sampled at the same time, none is waited for longer than 2 s."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from traceloom.agent.accelerators.backend import (
    LIMIT_S,
    Device,
    DeviceEvent,
    DeviceProcess,
    Sample,
    Watched,
    back_ends,
    device_readings,
)
from traceloom.agent.accelerators.simulated import SampleWriter
from traceloom.agent.config import Config
from traceloom.agent.flops import MatrixTypes, estimate
from traceloom.agent.metrics import Reading

EVENTS_KEPT = 1000


class AcceleratorCollector:
    """Devices, who is on them, what happened to them, and their metrics.

    Of two back ends that see the same device (NVML, and an exporter that is scraped), the earlier has its say first and
    the later adds what the earlier does not have.
    """

    name = "accelerators"

    def __init__(self, config: Config, watched: Sequence[Watched] | None = None) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        # The back ends are given up before the collector is.
        self.timeout_s = config.collect.timeouts.get(self.name, LIMIT_S + 1.0)
        self.back_ends = back_ends(config) if watched is None else list(watched)
        self.devices: dict[str, Device] = {}
        self.device_processes: list[DeviceProcess] = []
        self.events: deque[DeviceEvent] = deque(maxlen=EVENTS_KEPT)
        self.element_types: dict[str, list[MatrixTypes]] = {}  # device -> of its jobs, as the daemon last knew
        self._xids: Counter[tuple[str, str]] = Counter()  # (device, number) -> how often since the agent began
        self._last_xids: dict[str, int] = {}
        self._missing: dict[str, str] = {}  # what could not be estimated, and why
        self._named = config.accelerators.backends
        self._writer: SampleWriter | None = None
        self._unwritten = ""  # why a recording ended before it was to

    def collect(self) -> list[Reading]:
        """Sample all back ends."""
        for back_end in self.back_ends:
            back_end.begin()
        devices: dict[str, Device] = {}
        events: list[DeviceEvent] = []
        processes: dict[tuple[str, int], DeviceProcess] = {}
        values: dict[tuple[str, tuple[str, ...]], Reading] = {}
        for back_end in self.back_ends:
            sample = _renamed(back_end.finish(), devices)
            for device in sample.devices:
                earlier = devices.get(device.uuid)
                if earlier is None or (earlier.stale and not device.stale):
                    devices[device.uuid] = device
                elif device.owner and not earlier.owner:
                    devices[device.uuid] = msgspec.structs.replace(earlier, owner=device.owner)
            for process in sample.processes:
                processes.setdefault((process.device, process.pid), process)
            for reading in sample.readings:
                values.setdefault((reading.metric, reading.labels), reading)
            events += sample.events
        # Of devices that stopped or began to answer; one that vanished stays, stale, for alerts to see.
        for uuid, device in self.devices.items():
            if uuid not in devices and not device.parent:  # a partition may be taken away
                gone = device.stale or "its driver no longer lists it"
                devices[uuid] = msgspec.structs.replace(device, stale=gone)
            stale = devices[uuid].stale if uuid in devices else "the partition was taken away"
            if bool(device.stale) != bool(stale):
                kind = "lost" if stale else "back"
                events.append(DeviceEvent(at_ns=time.time_ns(), device=uuid, kind=kind, text=stale))
        self.events += events
        for event in events:
            if event.kind == "xid":
                self._xids[event.device, "" if event.code is None else str(event.code)] += 1
                if event.code is not None:
                    self._last_xids[event.device] = event.code
        self.devices, self.device_processes = devices, list(processes.values())
        # Counted here, so that the error that took a device or its driver down is told while it is down.
        counted = [Reading("gpu_errors_total", (uuid, "xid", xid), count) for (uuid, xid), count in self._xids.items()]
        counted += [Reading("gpu_last_xid", (uuid,), xid) for uuid, xid in self._last_xids.items()]
        for reading in counted:
            values.setdefault((reading.metric, reading.labels), reading)
        readings = list(values.values())
        readings += self._estimates(readings)
        readings += [reading for device in devices.values() for reading in device_readings(device)]
        if self._writer is not None:
            sample = Sample(
                at_ns=time.time_ns(), devices=list(devices.values()), readings=list(values.values()),
                processes=self.device_processes, events=events, capabilities=self.capabilities(),
            )  # fmt: skip
            try:
                self._writer.write(sample)
            except OSError as error:  # a full disk ends the recording, not the measuring
                with suppress(OSError):
                    self._writer.close()
                self._writer, self._unwritten = None, f"the recording of devices ended: {error}"
        return readings

    def capabilities(self) -> dict[str, str]:
        """Metric -> "" where a back end that runs has it, else the first reason why not."""
        reasons: dict[str, str] = {}
        for back_end in self.back_ends:
            for metric, reason in back_end.capabilities.items():
                reasons[metric] = "" if not reason or not reasons.get(metric, reason) else reasons.get(metric, reason)
        return self._missing | reasons

    def trouble(self) -> list[str]:
        """Back ends that do not work, metrics that devices do not give, and what would help."""
        # A host needs no device of every vendor: what is not there matters where it was named, or if nothing is there.
        troubles = [
            f"{back_end.name}: {back_end.trouble}"
            for back_end in self.back_ends
            if back_end.trouble and (back_end.here or back_end.name in self._named or not self.devices)
        ]
        troubles += [self._unwritten] if self._unwritten else []
        absent: dict[str, list[str]] = {}
        for metric, reason in sorted(self.capabilities().items()):
            if reason:
                absent.setdefault(reason, []).append(metric)
        troubles += [f"{', '.join(metrics)}: {reason}" for reason, metrics in absent.items()]
        return troubles + [f"{device.uuid}: {device.stale}" for device in self.devices.values() if device.stale]

    def pause(self, seconds: float) -> int:
        """Release the hardware counters for so long; how many back ends had some."""
        return sum(back_end.pause(seconds) for back_end in self.back_ends)

    def record(self, path: str | Path) -> None:
        """Write every sample from now on to a file that the back end `recorded` plays."""
        self._writer = SampleWriter(path)

    def close(self) -> None:
        """Let go of the back ends and of a recording."""
        for back_end in self.back_ends:
            back_end.close()
        if self._writer is not None:
            self._writer.close()

    def _estimates(self, readings: Iterable[Reading]) -> list[Reading]:
        """FLOP/s of all devices and partitions that answer; a partition runs at the clock of its device."""
        values: defaultdict[str, dict[tuple[str, tuple[str, ...]], float]] = defaultdict(dict)
        for reading in readings:
            values[reading.labels[0]][reading.metric, reading.labels[1:]] = reading.value
        parents = {device.parent for device in self.devices.values()}
        estimates: list[Reading] = []
        self._missing = {}
        for uuid, device in self.devices.items():
            if not device.stale and uuid not in parents:  # what its partitions do is not counted twice
                clocks = {
                    key: value for key, value in values[device.parent].items() if key == ("gpu_clock_hertz", ("sm",))
                }
                of_device, missing = estimate(device, clocks | values[uuid], self.element_types.get(uuid, ()))
                estimates += of_device
                self._missing |= missing
        for reading in estimates:
            self._missing.pop(reading.metric, None)
        return estimates


def _renamed(sample: Sample, earlier: Mapping[str, Device]) -> Sample:
    """A sample whose partitions have the identities that an earlier back end knows them by.

    Exporters name a partition by its device and number, as `3g.40gb gi=2`, and not by its uuid.
    """
    instances: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for device in earlier.values():
        if device.parent:
            instances[(device.parent, *device.partition.split()[:2])].append(device.uuid)
    uuids: dict[str, str] = {}
    for device in sample.devices:
        same = instances.get((device.parent, *device.partition.split()[:2]), ()) if device.parent else ()
        if len(same) == 1:  # else its number is shared by several compute instances
            uuids[device.uuid] = same[0]
    if not uuids:
        return sample
    return Sample(
        at_ns=sample.at_ns,
        devices=[msgspec.structs.replace(each, uuid=uuids.get(each.uuid, each.uuid)) for each in sample.devices],
        readings=[
            reading._replace(labels=(uuids.get(reading.labels[0], reading.labels[0]), *reading.labels[1:]))
            for reading in sample.readings
        ],
        processes=[
            msgspec.structs.replace(each, device=uuids.get(each.device, each.device)) for each in sample.processes
        ],
        events=[msgspec.structs.replace(each, device=uuids.get(each.device, each.device)) for each in sample.events],
        capabilities=sample.capabilities,
    )
