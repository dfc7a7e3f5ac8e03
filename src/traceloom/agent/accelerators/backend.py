"""The `Accelerator` protocol of back ends, and the thread with a time limit that runs each of them.

A back end is an entry point of the group `traceloom.accelerators`: a callable that takes the
`Config` and returns an `Accelerator`, or raises `BackendUnavailable`. It is created, called and
closed in a thread of its own (`BackendWorker`).
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, TypeVar

import msgspec

from traceloom.agent.config import Config
from traceloom.agent.metrics import METRICS, Reading
from traceloom.errors import InputError, nearest


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device, or a partition of one (MIG), which has an identity of its own. None: unknown."""

    uuid: str
    index: str
    vendor: str
    model: str
    pci: str = ""
    driver: str = ""
    parent: str = ""  # of a partition: uuid of its device
    partition: str = ""  # profile of the partition if known, with its ids: `1g.10gb gi=3 ci=0`
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    highest_clock_hz: float | None = None
    architecture: str = ""  # as volta, ampere, ada, hopper, blackwell, cdna3
    # Owner, if the back end reports it: job, user, pod, namespace, container ...
    owner: dict[str, str] = {}
    stale: str = ""  # why it cannot be read now; "" if it can

    @property
    def instance(self) -> str:
        """Returns the number of a partition on its device, as `gi=3`; "" if unknown."""
        return next((part for part in self.partition.split() if part.startswith("gi=")), "")


class DeviceProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a device. `busy_ratio`: share of the last interval in which its kernels ran."""

    device: str
    pid: int
    memory_bytes: int | None = None
    busy_ratio: float | None = None


class DeviceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a device.

    `kind`: xid, ecc, throttle, lost, back; times in ns since the epoch.
    """

    at_ns: int
    device: str
    kind: str
    code: int | None = None
    text: str = ""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a back end reports at one time, in ns since the epoch."""

    at_ns: int
    devices: list[Device] = []
    readings: list[Reading] = []
    processes: list[DeviceProcess] = []
    events: list[DeviceEvent] = []
    capabilities: dict[str, str] = {}


class BackendUnavailable(Exception):  # noqa: N818 - it is no error that a host has no such device
    """This host has nothing that the back end supports; the message says why, and what would
    help.
    """


class Accelerator(Protocol):
    """A back end.

    Its methods may block; they are called from one thread, and abandoned after 2 s.
    """

    name: str

    def devices(self) -> list[Device]:
        """Returns the current devices."""

    def capabilities(self) -> dict[str, str]:
        """Returns capability -> "" if available, else why not and what would help."""

    def sample(self) -> list[Reading]:
        """Returns the metrics of all its devices."""

    def processes(self) -> list[DeviceProcess]:
        """Returns the processes on the devices."""

    def events(self) -> list[DeviceEvent]:
        """Returns the events since the last call."""

    def pause(self, seconds: float) -> bool:
        """Release hardware counters for another profiler, for at most `seconds`; returns whether
        there were any.
        """

    def close(self) -> None:
        """Shut down the driver's library."""


def format_capability(metric: str, labels: Iterable[str] = ()) -> str:
    """Returns the key of a metric in `capabilities`: with its labels after the device, as
    `gpu_pipe_active_ratio{hmma}`.
    """
    text = ",".join(label for label in labels if label)
    return f"{metric}{{{text}}}" if text else metric


CALL_TIMEOUT_S = 2.0
# Between searches on a host without such devices: a driver may be loaded later.
UNAVAILABLE_RETRY_S = 60.0
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0  # doubled from one failure to the next
MAX_STUCK_THREADS = 2  # threads that hang in a driver at the same time; they cannot be ended

T = TypeVar("T")


class BackendWorker:
    """A thread that creates one back end, runs its calls one after the other, and closes it."""

    def __init__(self, name: str, make: Callable[[], Accelerator]) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._make = make
        self._accelerator: Accelerator | None = None
        self._thread = threading.Thread(target=self._run, name=f"accelerator {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[Accelerator], T]) -> Future[T]:
        """Queue a call after the previous ones."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                if self._accelerator is None:
                    self._accelerator = self._make()
                answer.set_result(call(self._accelerator))
            except Exception as error:  # noqa: BLE001 - a stranger's back end may raise anything
                answer.set_exception(error)

        self._calls.put(run)
        return answer

    def stop(self) -> None:
        """End after the queued calls; a call that hangs keeps the thread until it returns, if
        ever.
        """
        self._calls.put(None)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
        if self._accelerator is not None:
            with suppress(Exception):
                self._accelerator.close()


def _take_sample(accelerator: Accelerator) -> Sample:
    """Returns everything that a back end reports now.

    Raises:
        ValueError: A reading of an undeclared metric, so that only this back end fails, not the
            whole snapshot.
    """
    sample = Sample(
        at_ns=time.time_ns(),
        devices=accelerator.devices(),
        # A value that is not finite is unknown.
        readings=[reading for reading in accelerator.sample() if math.isfinite(reading.value)],
        processes=accelerator.processes(),
        events=accelerator.events(),
        capabilities=accelerator.capabilities(),
    )
    for reading in sample.readings:
        metric = METRICS.get(reading.metric)
        if metric is None or len(metric.labels) != len(reading.labels):
            raise ValueError(
                f"`{reading.metric}` with {len(reading.labels)} labels is no metric of the agent"
            )
    return sample


class TimeLimitedBackend:
    """Runs a back end so that its caller never waits for longer than the limit.

    A back end that hangs is abandoned with its thread; one that fails is closed. In both cases its
    devices stay, stale, without readings, and a new back end is created later, at growing
    intervals, unless too many threads already hang.

    Args:
        name: Its name in the configuration.
        make: Creates a new back end; called in the thread.
        limit_s: Time limit of a sample.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Accelerator],
        limit_s: float = CALL_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.last_error = ""  # why there is no sample; "" if there is one
        self.here = True  # False if the host has no such devices
        self.capabilities: dict[str, str] = {}
        self._make = make
        self._limit_s = limit_s
        self._clock = clock
        self._devices: list[Device] = []
        self._thread: BackendWorker | None = None
        self._stuck: list[BackendWorker] = []
        self._pending: Future[Sample] | None = None
        self._deadline = 0.0
        self._failures = 0
        self._next_try = 0.0

    def begin(self) -> None:
        """Start to take a sample, unless a retry is not due yet."""
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if (
            self._thread is None
            and self._clock() >= self._next_try
            and len(self._stuck) < MAX_STUCK_THREADS
        ):
            self._thread = BackendWorker(self.name, self._make)
        if self._thread is not None:
            self._pending = self._thread.submit(_take_sample)
            self._deadline = time.monotonic() + self._limit_s

    def finish(self) -> Sample:
        """Returns the sample that was started; without one, the last devices marked as stale."""
        pending, self._pending = self._pending, None
        if (
            pending is not None
            and not wait([pending], max(0.0, self._deadline - time.monotonic())).done
        ):
            self._give_up(f"its driver has not answered for {self._limit_s:g} s", hangs=True)
        elif pending is not None:
            try:
                sample = pending.result()
            except BackendUnavailable as error:
                self._give_up(str(error), hangs=False)
                self.here, self._next_try, self._devices = (
                    False,
                    self._clock() + UNAVAILABLE_RETRY_S,
                    [],
                )
            except Exception as error:  # noqa: BLE001 - a stranger's back end may raise anything
                self._give_up(f"it failed: {type(error).__name__}: {error}", hangs=False)
            else:
                self.here, self.last_error, self._failures = True, "", 0
                self._devices, self.capabilities = sample.devices, sample.capabilities
                return sample
        return Sample(at_ns=time.time_ns(), devices=self._devices)

    def pause(self, seconds: float) -> bool:
        """Release the hardware counters; False if the back end did not do it in time."""
        return self._ask(lambda accelerator: accelerator.pause(seconds))

    def close(self) -> None:
        """Close the back end; a thread that hangs is abandoned."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def _ask(self, call: Callable[[Accelerator], bool]) -> bool:
        thread = self._thread  # another thread may reset it concurrently
        if thread is None:
            return False
        with suppress(Exception):
            return thread.submit(call).result(self._limit_s)
        return False

    def _give_up(self, reason: str, *, hangs: bool) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
        if thread is not None and hangs:
            self._stuck.append(thread)
        self.last_error = reason
        self._next_try = self._clock() + min(FIRST_RETRY_S * 2**self._failures, LAST_RETRY_S)
        self._failures += 1
        self._devices = [msgspec.structs.replace(device, stale=reason) for device in self._devices]


def build_device_readings(device: Device) -> list[Reading]:
    """Returns `gpu_up`, `gpu_info` and the fixed properties of a device."""
    info = (
        device.uuid,
        device.index,
        device.vendor,
        device.model,
        device.pci,
        device.driver,
        device.parent,
        device.partition,
    )
    return [
        Reading("gpu_up", (device.uuid,), float(not device.stale)),
        Reading("gpu_info", info, 1.0),
    ]


ENTRY_POINT_GROUP = "traceloom.accelerators"
_PACKAGE = "traceloom.agent.accelerators"
# In order of priority: if two see the same device, the earlier one wins. pyproject.toml declares
# the same.
BUILTIN_BACKENDS = {
    "nvml": f"{_PACKAGE}.nvml:NvmlAccelerator",
    "amd": f"{_PACKAGE}.amd:AmdAccelerator",
    "scrape": f"{_PACKAGE}.scrape:ScrapedAccelerator",
    "simulated": f"{_PACKAGE}.simulated:SimulatedAccelerator",
    "recorded": f"{_PACKAGE}.simulated:RecordedAccelerator",
}


def create_backends(config: Config) -> list[TimeLimitedBackend]:
    """Returns the back ends, each behind a thread; none is imported before its first sample.

    Raises:
        InputError: `wrong-config`: the configuration names a back end that is not installed.
    """
    points = {
        name: EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in BUILTIN_BACKENDS.items()
    }
    for point in entry_points(group=ENTRY_POINT_GROUP):
        points.setdefault(point.name, point)
    settings = config.accelerators
    is_unset = {
        "scrape": not settings.scrape,
        "simulated": not settings.simulated,
        "recorded": not settings.recorded,
    }
    names = settings.backends or tuple(name for name in points if not is_unset.get(name))
    for name in names:
        if name not in points:
            raise InputError(
                f"there is no back end `{name}`",
                slug="wrong-config",
                where="accelerators.backends",
                hint=nearest(name, points) + f"installed are {', '.join(points)}",
            )
    watched = []
    for name in names:

        def make(point: EntryPoint = points[name]) -> Accelerator:
            accelerator: Accelerator = point.load()(config)
            return accelerator

        watched.append(TimeLimitedBackend(name, make))
    return watched
