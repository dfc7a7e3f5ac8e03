"""Tasks on other machines: what their workers do, and what the service makes of it, whichever cluster it is.

A worker of a cluster does a task as this host would: its files come into a folder of their own, and a process with
limits of memory and time, which knows nothing but that folder, works on them. So a capture that crashes, hangs or
swells ends that process, and not the worker. What goes over the network is the task and its answer: bytes that this
module made, and no object of a library that read a stranger's file.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from traceloom import __version__
from traceloom.collect.engine import MEMORY_BYTES, EngineTask, TaskError
from traceloom.collect.executors import ProcessEngine
from traceloom.errors import InputError, TraceloomError, UsageError

SLOTS = 16
"""How many tasks wait in a cluster at once, where nobody says it."""

_AGAIN_S = 5.0
_lock = threading.Lock()


class EngineTls(msgspec.Struct, frozen=True):
    """PEM files with which the service and a cluster prove each other who they are."""

    ca: str = ""
    certificate: str = ""
    key: str = ""


class ClusterSettings(msgspec.Struct, frozen=True):
    """What workers are told beside the task: whose version it is of, and the limits and module of its process."""

    version: str = __version__
    memory_bytes: int = MEMORY_BYTES
    main: str = "traceloom.collect.worker"


class ClusterAnswer(msgspec.Struct, frozen=True):
    """What became of a task: its result, or what failed. The `worker` did where it says nothing of the task."""

    result: bytes = b""
    failed: Literal["", "task", "for good", "worker"] = ""
    error: str = ""


def work_here(task: bytes, settings: bytes, slots: int = 1, temporary: str | None = None) -> bytes:
    """Do a task in a worker of a cluster; returns a `ClusterAnswer`. All bytes are MessagePack.

    Args:
        task: An `EngineTask`.
        settings: `ClusterSettings`.
        slots: How many this worker does at once.
        temporary: Where files are brought; None: the system's temporary directory.
    """
    return msgspec.msgpack.encode(_answer(task, settings, slots, temporary))


def _answer(task: bytes, encoded: bytes, slots: int, temporary: str | None) -> ClusterAnswer:
    try:
        settings = msgspec.msgpack.decode(encoded, type=ClusterSettings)
        if settings.version != __version__:
            differs = f"a worker has Traceloom {__version__}, the service {settings.version}"
            return ClusterAnswer(failed="worker", error=differs)
        with _lock:
            processes = _processes(slots, settings, temporary)
        return ClusterAnswer(processes.submit(msgspec.msgpack.decode(task, type=EngineTask)).result())
    except TaskError as error:
        return ClusterAnswer(failed="for good" if error.final else "task", error=str(error))
    except (TraceloomError, OSError) as error:
        return ClusterAnswer(failed="worker", error=f"{socket.gethostname()}: {error}")
    except Exception as error:  # noqa: BLE001  (raised, a cluster would log the task, and with it signed addresses)
        return ClusterAnswer(failed="worker", error=f"{socket.gethostname()}: {type(error).__name__}: {error}")


@cache
def _processes(slots: int, settings: ClusterSettings, temporary: str | None) -> ProcessEngine:
    """The processes of this worker, which end with it."""
    return ProcessEngine(
        slots, memory_bytes=settings.memory_bytes, main=settings.main, temporary=Path(temporary) if temporary else None
    )


class Cluster(ABC):
    """Tasks in a cluster; what is particular to a kind of cluster stands in its class.

    Args:
        address: `HOST:PORT` of who hands out work there.
        slots: How many tasks may wait or run there at once; None: 16.
        tls: Without it, only at a loopback address.
        settings: Limits of the processes.

    Raises:
        UsageError: `engine-without-tls`: others could read and change what is sent, and what is sent is run;
            `wrong-usage`: no address.
        InputError: `tls-unusable`.
    """

    kind = ""

    def __init__(
        self, address: str, slots: int | None = None, tls: EngineTls | None = None,
        settings: ClusterSettings = ClusterSettings(),  # noqa: B008  (it is frozen)
    ) -> None:  # fmt: skip
        self.where = f"{self.kind}://{address}"
        self.address = address
        self.tls = tls
        self.slots = slots or SLOTS
        self._settings = msgspec.msgpack.encode(settings)
        _check_security(self.where, address, tls)
        # One more than the pipeline has, so that a report need not wait for an analysis to end.
        self._pool = ThreadPoolExecutor(self.slots + 1, "traceloom-task")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reason = ""  # why the last try to connect failed
        self._again_s = 0.0  # of the monotonic clock, before which there is no other

    def submit(self, task: EngineTask) -> Future[bytes]:
        """Send a task; its result, or an error as of `Engine`."""
        return self._pool.submit(self._run, task)

    def check(self) -> str:
        """See that workers answer which have this version, and say how many there are.

        Raises:
            InputError: `no-engine`: nobody answers, nobody works there, or workers have other versions.
        """
        versions = self._versions()
        if not versions:
            raise self.away("no worker is there")
        if strange := sorted({str(version) for version in versions if version != __version__}):
            raise self.away(
                f"{sum(version != __version__ for version in versions)} of {len(versions)} workers have Traceloom "
                f"{', '.join(strange)[:200]}, the service {__version__}"
            )
        return f"{self.where}, workers: {len(versions)}"

    def close(self) -> None:
        """Leave the cluster; what runs there is done in vain."""
        self._closed.set()
        with self._lock:
            self._leave()
        self._pool.shutdown(cancel_futures=True)

    def away(self, reason: str) -> InputError:
        """The error where the cluster does not do its part."""
        return InputError(
            f"the cluster does not work: {reason}", slug="no-engine", where=self.where,
            hint="captures wait until it does",
        )  # fmt: skip

    def _reach(self) -> None:
        """Be connected, for `_asked` and `_versions`.

        Raises:
            InputError: `no-engine`.
        """
        with self._lock:
            if self._closed.is_set():
                raise self.away("the service left it")
            if time.monotonic() < self._again_s:  # whoever waited here need not wait again, each after the other
                raise self.away(self._reason)
            try:
                self._connect()
            except OSError as error:
                self._reason, self._again_s = f"nobody answers: {first_line(error)}", time.monotonic() + _AGAIN_S
                raise self.away(self._reason) from error

    def _run(self, task: EngineTask) -> bytes:
        try:
            content = self._asked(f"traceloom-{task.name}-{secrets.token_hex(8)}", msgspec.msgpack.encode(task))
            answer = msgspec.msgpack.decode(content, type=ClusterAnswer)
        except msgspec.MsgspecError as error:
            raise self.away(f"a worker answered something else: {error}") from error
        except TraceloomError as error:
            if self._closed.is_set():
                raise TaskError("the service ends") from error
            raise
        if answer.failed == "worker":
            raise self.away(answer.error)
        if answer.failed:
            raise TaskError(answer.error, final=answer.failed == "for good")
        return answer.result

    @abstractmethod
    def _connect(self) -> None:
        """Connect, where it is not connected.

        Raises:
            OSError: Nobody answers.
        """

    @abstractmethod
    def _asked(self, name: str, task: bytes) -> bytes:
        """What `work_here` gives there; waits for it.

        Raises:
            TaskError: The worker was killed over it.
            InputError: `no-engine`.
        """

    @abstractmethod
    def _versions(self) -> list[str]:
        """Of each worker the version of Traceloom, or why it has none.

        Raises:
            InputError: `no-engine`.
        """

    @abstractmethod
    def _leave(self) -> None:
        """Disconnect, if it is connected; whoever waits in `_asked` is told."""


def version_here() -> str:
    """The version of the Traceloom of a worker."""
    return __version__


def host_port(address: str) -> tuple[str, int]:
    """The host and the port of `HOST:PORT`.

    Raises:
        UsageError: `wrong-usage`.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16) or set(host) & set("/@?# "):
        raise UsageError(
            f"`{address[:80]}` is no address of a cluster", slug="wrong-usage", hint="it is HOST:PORT, as node1:8786"
        )
    return host.strip("[]"), int(port)


def first_line(error: BaseException) -> str:
    """What an error of a library says, shortly."""
    return str(error).partition("\n")[0][:200]


def _check_security(where: str, address: str, tls: EngineTls | None) -> None:
    host, port = host_port(address)
    if tls is None:
        try:
            numbers = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        except OSError:
            numbers = set()
        if numbers and all(ipaddress.ip_address(number.partition("%")[0]).is_loopback for number in numbers):
            return
        raise UsageError(
            "a cluster beyond this host is used with TLS only: who changes what is sent there runs anything there",
            slug="engine-without-tls", where=where[:80],
            hint="give --engine-ca, --engine-certificate and --engine-key",
        )  # fmt: skip
    if not (tls.ca and tls.certificate and tls.key):
        raise UsageError(
            "TLS of a cluster needs --engine-ca, --engine-certificate and --engine-key, all three", slug="wrong-usage"
        )
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"TLS of the cluster cannot be set up: {(error.strerror or str(error)).lower()}", slug="tls-unusable",
            where=f"{tls.ca}, {tls.certificate}, {tls.key}",
            hint="they must be readable PEM files that belong together",
        ) from error  # fmt: skip
