"""The collector of all accelerators: samples every back end in parallel, each for at most 2 s."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from traceloom.agent.accelerators.backend import (
    CALL_TIMEOUT_S,
    Device,
    DeviceEvent,
    DeviceProcess,
    Sample,
    TimeLimitedBackend,
    build_device_readings,
    create_backends,
)
from traceloom.agent.accelerators.simulated import SampleWriter
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.agent.topline import MatrixTypes, estimate_flops

MAX_KEPT_EVENTS = 1000


class AcceleratorCollector:
    """Devices, their processes, events and metrics.

    If two back ends see the same device (NVML, and an exporter that is scraped), the earlier has
    priority and the later adds what is missing.
    """

    name = "accelerators"

    def __init__(
        self, config: Config, backends: Sequence[TimeLimitedBackend] | None = None
    ) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        # The back ends time out before the collector does.
        self.timeout_s = config.collect.timeouts.get(self.name, CALL_TIMEOUT_S + 1.0)
        self.back_ends = create_backends(config) if backends is None else list(backends)
        self.devices: dict[str, Device] = {}
        self.device_processes: list[DeviceProcess] = []
        self.events: deque[DeviceEvent] = deque(maxlen=MAX_KEPT_EVENTS)
        # device -> types of its jobs at the daemon's last tick.
        self.element_types: dict[str, list[MatrixTypes]] = {}
        # (device, number) -> count since the agent started.
        self._xid_counts: Counter[tuple[str, str]] = Counter()
        self._last_xids: dict[str, int] = {}
        self._missing_reasons: dict[str, str] = {}  # metric that could not be estimated -> why
        self._configured_backends = config.accelerators.backends
        self._writer: SampleWriter | None = None
        self._recording_error = ""  # why a recording ended early

    def collect(self) -> list[Reading]:
        """Sample all back ends."""
        for backend in self.back_ends:
            backend.begin()
        devices: dict[str, Device] = {}
        events: list[DeviceEvent] = []
        processes: dict[tuple[str, int], DeviceProcess] = {}
        reading_by_labels: dict[tuple[str, tuple[str, ...]], Reading] = {}
        for backend in self.back_ends:
            sample = _replace_partition_uuids(backend.finish(), devices)
            for device in sample.devices:
                earlier = devices.get(device.uuid)
                if earlier is None or (earlier.stale and not device.stale):
                    devices[device.uuid] = device
                elif device.owner and not earlier.owner:
                    devices[device.uuid] = msgspec.structs.replace(earlier, owner=device.owner)
            for process in sample.processes:
                processes.setdefault((process.device, process.pid), process)
            for reading in sample.readings:
                reading_by_labels.setdefault((reading.metric, reading.labels), reading)
            events += sample.events
        # Events of devices that went away or came back; a device that vanished stays, stale, so
        # that alerts see it.
        for uuid, device in self.devices.items():
            if uuid not in devices and not device.parent:  # partitions may be removed on purpose
                stale_reason = device.stale or "its driver no longer lists it"
                devices[uuid] = msgspec.structs.replace(device, stale=stale_reason)
            stale = devices[uuid].stale if uuid in devices else "the partition was taken away"
            if bool(device.stale) != bool(stale):
                kind = "lost" if stale else "back"
                events.append(DeviceEvent(at_ns=time.time_ns(), device=uuid, kind=kind, text=stale))
        self.events += events
        for event in events:
            if event.kind == "xid":
                self._xid_counts[event.device, "" if event.code is None else str(event.code)] += 1
                if event.code is not None:
                    self._last_xids[event.device] = event.code
        self.devices, self.device_processes = devices, list(processes.values())
        # Counted here, so that the error that took a device or its driver down is still reported
        # while it is down.
        xid_readings = [
            Reading("gpu_errors_total", (uuid, "xid", xid), count)
            for (uuid, xid), count in self._xid_counts.items()
        ]
        xid_readings += [
            Reading("gpu_last_xid", (uuid,), xid) for uuid, xid in self._last_xids.items()
        ]
        for reading in xid_readings:
            reading_by_labels.setdefault((reading.metric, reading.labels), reading)
        readings = list(reading_by_labels.values())
        readings += self._estimate_flops(readings)
        readings += [
            reading for device in devices.values() for reading in build_device_readings(device)
        ]
        if self._writer is not None:
            sample = Sample(
                at_ns=time.time_ns(),
                devices=list(devices.values()),
                readings=list(reading_by_labels.values()),
                processes=self.device_processes,
                events=events,
                capabilities=self.capabilities(),
            )
            try:
                self._writer.write(sample)
            except OSError as error:  # a full disk ends the recording, not the collector
                with suppress(OSError):
                    self._writer.close()
                self._writer, self._recording_error = (
                    None,
                    f"the recording of devices ended: {error}",
                )
        return readings

    def capabilities(self) -> dict[str, str]:
        """Returns metric -> "" if an active back end provides it, else the first reason why not."""
        reasons: dict[str, str] = {}
        for backend in self.back_ends:
            for metric, reason in backend.capabilities.items():
                reasons[metric] = (
                    ""
                    if not reason or not reasons.get(metric, reason)
                    else reasons.get(metric, reason)
                )
        return self._missing_reasons | reasons

    def list_problems(self) -> list[str]:
        """Returns the errors of back ends and the metrics that devices lack, with what would
        help.
        """
        # A host need not have devices of every vendor: a missing one is reported only if it was
        # configured, or if there are no devices at all.
        problems = [
            f"{backend.name}: {backend.last_error}"
            for backend in self.back_ends
            if backend.last_error
            and (backend.here or backend.name in self._configured_backends or not self.devices)
        ]
        problems += [self._recording_error] if self._recording_error else []
        metrics_by_reason: dict[str, list[str]] = {}
        for metric, reason in sorted(self.capabilities().items()):
            if reason:
                metrics_by_reason.setdefault(reason, []).append(metric)
        problems += [
            f"{', '.join(metrics)}: {reason}" for reason, metrics in metrics_by_reason.items()
        ]
        return problems + [
            f"{device.uuid}: {device.stale}" for device in self.devices.values() if device.stale
        ]

    def pause(self, seconds: float) -> int:
        """Release the hardware counters for `seconds`; returns how many back ends had some."""
        return sum(backend.pause(seconds) for backend in self.back_ends)

    def record(self, path: str | Path) -> None:
        """Write all following samples to a file that the back end `recorded` can replay."""
        self._writer = SampleWriter(path)

    def close(self) -> None:
        """Close the back ends and a recording."""
        for backend in self.back_ends:
            backend.close()
        if self._writer is not None:
            self._writer.close()

    def _estimate_flops(self, readings: Iterable[Reading]) -> list[Reading]:
        """Returns the FLOP/s of all devices and partitions that respond; a partition runs at its
        device's clock.
        """
        values_by_device: defaultdict[str, dict[tuple[str, tuple[str, ...]], float]] = defaultdict(
            dict
        )
        for reading in readings:
            values_by_device[reading.labels[0]][reading.metric, reading.labels[1:]] = reading.value
        parents = {device.parent for device in self.devices.values()}
        estimates: list[Reading] = []
        self._missing_reasons = {}
        for uuid, device in self.devices.items():
            if not device.stale and uuid not in parents:  # its partitions are counted instead
                clocks = {
                    key: value
                    for key, value in values_by_device[device.parent].items()
                    if key == ("gpu_clock_hertz", ("sm",))
                }
                device_estimates, missing = estimate_flops(
                    device, clocks | values_by_device[uuid], self.element_types.get(uuid, ())
                )
                estimates += device_estimates
                self._missing_reasons |= missing
        for reading in estimates:
            self._missing_reasons.pop(reading.metric, None)
        return estimates


def _replace_partition_uuids(sample: Sample, known_devices: Mapping[str, Device]) -> Sample:
    """Returns a sample whose partitions have the uuids by which an earlier back end knows them.

    Exporters name a partition by its device and number, as `3g.40gb gi=2`, and not by its uuid.
    """
    uuids_by_partition: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for device in known_devices.values():
        if device.parent:
            uuids_by_partition[(device.parent, device.instance)].append(device.uuid)
    known_uuid_by_uuid: dict[str, str] = {}
    for device in sample.devices:
        candidates = (
            uuids_by_partition.get((device.parent, device.instance), ()) if device.parent else ()
        )
        if len(candidates) == 1:  # else several compute instances share its number
            known_uuid_by_uuid[device.uuid] = candidates[0]
    if not known_uuid_by_uuid:
        return sample
    return Sample(
        at_ns=sample.at_ns,
        devices=[
            msgspec.structs.replace(item, uuid=known_uuid_by_uuid.get(item.uuid, item.uuid))
            for item in sample.devices
        ],
        readings=[
            reading._replace(
                labels=(
                    known_uuid_by_uuid.get(reading.labels[0], reading.labels[0]),
                    *reading.labels[1:],
                )
            )
            for reading in sample.readings
        ],
        processes=[
            msgspec.structs.replace(item, device=known_uuid_by_uuid.get(item.device, item.device))
            for item in sample.processes
        ],
        events=[
            msgspec.structs.replace(item, device=known_uuid_by_uuid.get(item.device, item.device))
            for item in sample.events
        ],
        capabilities=sample.capabilities,
    )
