"""Tasks on local processes, Dask, Ray.

A process of a task knows no secret of the service: it gets files, never where they are kept.

A worker does a task as this host would: its files come into a folder of their own, and a process
with limits of memory and time, which knows nothing but that folder, works on them. So a capture
that crashes, hangs or swells ends that process, and not the worker. What goes over the network is
the task and its answer: bytes that this module made, and no object of a library that read a
stranger's file. Dask itself carries them in pickles between its own processes.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import secrets
import signal
import socket
import ssl
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from traceloom import __version__
from traceloom.errors import InputError, TraceloomError, UsageError
from traceloom.fleet.service.tasks import (
    MEMORY_BYTES,
    Engine,
    EngineTask,
    TaskError,
    run_in_scratch,
)
from traceloom.system.processes import WorkerProcess, count_cores

if TYPE_CHECKING:
    from distributed import Client


_TASKS_PER_PROCESS = 200  # then it is replaced: what little each leaves behind does not add up
_SERVICE_ENDS = "the service ends"


class ProcessEngine:
    """Tasks in processes of this host, used again: one that crashes, hangs or swells is replaced.

    Args:
        slots: How many at once; None: one for each core but one.
        memory_bytes: Of data that a process may have.
        main: The module that a process runs.
        temporary: Where files of tasks are brought; None: the system's temporary directory.
    """

    def __init__(
        self,
        slots: int | None = None,
        *,
        memory_bytes: int = MEMORY_BYTES,
        main: str = "traceloom.fleet.service.worker",
        temporary: Path | None = None,
    ) -> None:
        self.slots = slots or max(1, count_cores() - 1)
        self._memory_bytes = memory_bytes
        self._main = main
        self._temporary = temporary
        self._pool = ThreadPoolExecutor(self.slots, "traceloom-task")
        self._lock = threading.Lock()
        self._idle: list[tuple[WorkerProcess, int]] = []
        self._running: set[WorkerProcess] = set()
        self._closed = False

    def submit(self, task: EngineTask) -> Future[bytes]:
        """Begin a task as soon as a process is free; its result, or an error as of `Engine`."""
        return self._pool.submit(self._run, task)

    def check(self) -> str:
        """How many there are."""
        return f"{self.slots} at once, in processes of this host"

    def close(self) -> None:
        """Kill what runs, and wait for its end."""
        with self._lock:
            self._closed = True
            workers = [*self._running, *(worker for worker, _ in self._idle)]
            self._idle.clear()
        for worker in workers:
            worker.kill()
        self._pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.ended()

    def _run(self, task: EngineTask) -> bytes:
        end_s = time.monotonic() + task.seconds

        def go_on() -> None:
            if self._closed:
                raise TaskError(_SERVICE_ENDS)
            if time.monotonic() > end_s:
                raise TaskError(f"`{task.name}` took longer than {task.seconds:g} s")

        return run_in_scratch(
            task, lambda arguments: self._work(task, arguments, end_s), go_on, self._temporary
        )

    def _work(self, task: EngineTask, arguments: dict[str, Any], end_s: float) -> None:
        worker, done = self._taken()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            worker.kill()

        timer = threading.Timer(max(0.0, end_s - time.monotonic()), give_up)
        timer.daemon = True
        timer.start()
        try:
            worker.send({"task": task.name, "arguments": arguments})
            answer = next(worker.answers(), None)
        except ValueError:
            answer = None  # it was cut while it wrote
        finally:
            timer.cancel()
        with self._lock:
            self._running.discard(worker)
            reusable = (
                answer is not None
                and not late.is_set()
                and done + 1 < _TASKS_PER_PROCESS
                and not self._closed
            )
            if reusable:
                self._idle.append((worker, done + 1))
        if not reusable:
            worker.kill()
            code = worker.ended()
        if answer is None:
            names = {int(number): number.name for number in signal.Signals}
            if late.is_set():
                reason = f"`{task.name}` took longer than {task.seconds:g} s"
            elif code >= 0:
                reason = f"its process ended with exit code {code}"
            else:
                reason = f"its process was ended by {names.get(-code, f'signal {-code}')}"
            raise TaskError(reason)
        if "error" in answer:
            raise TaskError(answer["error"], final=answer["final"])

    def _taken(self) -> tuple[WorkerProcess, int]:
        with self._lock:
            if self._closed:
                raise TaskError(_SERVICE_ENDS)
            if self._idle:
                worker, done = self._idle.pop()
            else:
                try:
                    worker, done = WorkerProcess(self._main, quiet=True, environment={}), 0
                except OSError as error:
                    raise TaskError(f"no process could be started: {error}") from error
                worker.send({"memory_bytes": self._memory_bytes})
            self._running.add(worker)
            return worker, done


def create_engine(address: str, slots: int | None = None, tls: EngineTls | None = None) -> Engine:
    """Make the engine of an address: `processes` or `dask://HOST:PORT`.

    Args:
        address: Which it is.
        slots: How many tasks at once.
        tls: For a cluster.

    Raises:
        InputError: `no-extra`: its package is not installed; `tls-unusable`.
        UsageError: `unknown-engine`, `engine-without-tls`, `wrong-usage`.
    """
    if address == "processes":
        return ProcessEngine(slots)
    scheme, _, scheduler = address.partition("://")
    if scheme != "dask":
        raise UsageError(
            f"there is no engine `{address[:80]}`",
            slug="unknown-engine",
            hint="it has `processes` and `dask://HOST:PORT`",
        )
    if importlib.util.find_spec("distributed") is None:
        hint = "pip install 'traceloom[fleet,dask]'"
        raise InputError(
            "the engine dask needs the package distributed", slug="no-extra", hint=hint
        )

    return DaskEngine(scheduler, slots, tls)


SLOTS = 16
"""How many tasks wait in a cluster at once, where nobody says it."""

_RETRY_AFTER_S = 5.0
_CONNECT_S = 10.0
_lock = threading.Lock()


class EngineTls(msgspec.Struct, frozen=True):
    """PEM files with which the service and a cluster prove each other who they are."""

    ca: str = ""
    certificate: str = ""
    key: str = ""


class ClusterSettings(msgspec.Struct, frozen=True):
    """What workers get besides the task: the version of the service, and the limits and module of
    its process.
    """

    version: str = __version__
    memory_bytes: int = MEMORY_BYTES
    main: str = "traceloom.fleet.service.worker"


class ClusterAnswer(msgspec.Struct, frozen=True):
    """What became of a task: its result, or what failed.

    The `worker` did where it says nothing of the task.
    """

    result: bytes = b""
    failed: Literal["", "task", "for good", "worker"] = ""
    error: str = ""


def _work_in_worker(task: bytes, settings: bytes) -> bytes:
    from distributed import get_worker

    worker = get_worker()
    return run_in_worker(task, settings, worker.state.nthreads, worker.local_directory)


def run_in_worker(task: bytes, settings: bytes, slots: int, temporary: str) -> bytes:
    """Do a task in a worker of the cluster; returns a `ClusterAnswer`. All bytes are MessagePack.

    Args:
        task: An `EngineTask`.
        settings: `ClusterSettings`.
        slots: How many this worker does at once.
        temporary: Where files are brought.
    """
    return msgspec.msgpack.encode(_run_task(task, settings, slots, temporary))


def _run_task(task: bytes, encoded: bytes, slots: int, temporary: str) -> ClusterAnswer:
    try:
        settings = msgspec.msgpack.decode(encoded, type=ClusterSettings)
        if settings.version != __version__:
            differs = f"a worker has Traceloom {__version__}, the service {settings.version}"
            return ClusterAnswer(failed="worker", error=differs)
        with _lock:
            processes = _get_processes(slots, settings, temporary)
        return ClusterAnswer(
            processes.submit(msgspec.msgpack.decode(task, type=EngineTask)).result()
        )
    except TaskError as error:
        return ClusterAnswer(failed="for good" if error.final else "task", error=str(error))
    except (TraceloomError, OSError) as error:
        return ClusterAnswer(failed="worker", error=f"{socket.gethostname()}: {error}")
    except Exception as error:  # noqa: BLE001  (raised, a cluster would log the task, and with it signed addresses)
        return ClusterAnswer(
            failed="worker", error=f"{socket.gethostname()}: {type(error).__name__}: {error}"
        )


@cache
def _get_processes(slots: int, settings: ClusterSettings, temporary: str) -> ProcessEngine:
    """The processes of this worker, which end with it."""
    return ProcessEngine(
        slots, memory_bytes=settings.memory_bytes, main=settings.main, temporary=Path(temporary)
    )


class DaskEngine:
    """Tasks in the workers of a Dask scheduler: as many at once in each worker as it has threads.

    Args:
        address: `HOST:PORT` of the scheduler.
        slots: How many tasks may wait or run there at once; None: 16.
        tls: Without it, only at a loopback address.
        settings: Limits of the processes.

    Raises:
        UsageError: `engine-without-tls`: others could read and change what is sent, and what is sent is run;
            `wrong-usage`: no address.
        InputError: `tls-unusable`.
    """

    def __init__(
        self,
        address: str,
        slots: int | None = None,
        tls: EngineTls | None = None,
        settings: ClusterSettings = ClusterSettings(),  # noqa: B008  (it is frozen)
    ) -> None:
        self.slots = slots or SLOTS
        self._where = f"dask://{address}"
        self._address, self._tls = address, tls
        self._client: Client | None = None
        self._settings = msgspec.msgpack.encode(settings)
        _check_security(self._where, address, tls)
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
            raise self._unavailable("no worker is there")
        if strange := sorted({str(version) for version in versions if version != __version__}):
            raise self._unavailable(
                f"{sum(version != __version__ for version in versions)} of {len(versions)} workers have Traceloom "
                f"{', '.join(strange)[:200]}, the service {__version__}"
            )
        return f"{self._where}, workers: {len(versions)}"

    def close(self) -> None:
        """Leave the cluster; what runs there is done in vain."""
        self._closed.set()
        with self._lock:
            if self._client is not None:
                self._client.close(timeout=_CONNECT_S)  # whoever waits for a result gets an error
        self._pool.shutdown(cancel_futures=True)

    def _unavailable(self, reason: str) -> InputError:
        """The error where the cluster does not do its part."""
        return InputError(
            f"the cluster does not work: {reason}",
            slug="no-engine",
            where=self._where,
            hint="captures wait until it does",
        )

    def _connected(self) -> Client:
        """The client, connected.

        Raises:
            InputError: `no-engine`.
        """
        with self._lock:
            if self._closed.is_set():
                raise self._unavailable("the service left it")
            if (
                time.monotonic() < self._again_s
            ):  # whoever waited here need not wait again, each after the other
                raise self._unavailable(self._reason)
            if self._client is None or self._client.status not in {"running", "connecting"}:
                try:
                    self._client = self._connect()
                except OSError as error:
                    self._reason, self._again_s = (
                        f"nobody answers: {_first_line(error)}",
                        time.monotonic() + _RETRY_AFTER_S,
                    )
                    raise self._unavailable(self._reason) from error
            return self._client

    def _connect(self) -> Client:
        from distributed import Client
        from distributed.security import Security

        scheme, security = "tcp", None
        if self._tls is not None:
            scheme = "tls"
            security = Security(
                require_encryption=True,
                tls_ca_file=self._tls.ca,
                tls_client_cert=self._tls.certificate,
                tls_client_key=self._tls.key,
            )
        return Client(
            f"{scheme}://{self._address}",
            security=security,
            timeout=_CONNECT_S,
            set_as_default=False,
            name="traceloom",
        )

    def _run(self, task: EngineTask) -> bytes:
        try:
            content = self._request(
                f"traceloom-{task.name}-{secrets.token_hex(8)}", msgspec.msgpack.encode(task)
            )
            answer = msgspec.msgpack.decode(content, type=ClusterAnswer)
        except msgspec.MsgspecError as error:
            raise self._unavailable(f"a worker answered something else: {error}") from error
        except TraceloomError as error:
            if self._closed.is_set():
                raise TaskError("the service ends") from error
            raise
        if answer.failed == "worker":
            raise self._unavailable(answer.error)
        if answer.failed:
            raise TaskError(answer.error, final=answer.failed == "for good")
        return answer.result

    def _request(self, name: str, task: bytes) -> bytes:
        """Have a worker do `work_here`, and wait for its answer.

        Raises:
            TaskError: The worker was killed over it.
            InputError: `no-engine`.
        """
        client = self._connected()
        from distributed.scheduler import KilledWorker

        try:
            answer: bytes = client.submit(
                _work_in_worker, task, self._settings, key=name, pure=False
            ).result()
        except KilledWorker as error:
            raise TaskError("workers of the cluster that worked on it were killed") from error
        except CancelledError as error:
            raise self._unavailable("its scheduler lost the task") from error
        except Exception as error:  # whatever a worker raises that cannot even begin it
            raise self._unavailable(f"{type(error).__name__}: {_first_line(error)}") from error
        return answer

    def _versions(self) -> list[str]:
        """The version of Traceloom of each worker, or why it has none.

        Raises:
            InputError: `no-engine`.
        """
        client = self._connected()
        try:
            answers = client.run(_version_here, on_error="return")
        except Exception as error:  # as above
            raise self._unavailable(f"{type(error).__name__}: {_first_line(error)}") from error
        return [str(answer).partition("\n")[0] for answer in answers.values()]


def _version_here() -> str:
    return __version__


def _host_port(address: str) -> tuple[str, int]:
    """The host and the port of `HOST:PORT`.

    Raises:
        UsageError: `wrong-usage`.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16) or set(host) & set(
        "/@?# "
    ):
        raise UsageError(
            f"`{address[:80]}` is no address of a cluster",
            slug="wrong-usage",
            hint="it is HOST:PORT, as node1:8786",
        )
    return host.strip("[]"), int(port)


def _first_line(error: BaseException) -> str:
    """What an error of a library says, shortly."""
    return str(error).partition("\n")[0][:200]


def _check_security(location: str, address: str, tls: EngineTls | None) -> None:
    host, port = _host_port(address)
    if tls is None:
        try:
            numbers = {
                str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            }
        except OSError:
            numbers = set()
        if numbers and all(
            ipaddress.ip_address(number.partition("%")[0]).is_loopback for number in numbers
        ):
            return
        raise UsageError(
            "a cluster beyond this host is used with TLS only: who changes what is sent there runs anything there",
            slug="engine-without-tls",
            where=location[:80],
            hint="give --engine-ca, --engine-certificate and --engine-key",
        )
    if not (tls.ca and tls.certificate and tls.key):
        raise UsageError(
            "TLS of a cluster needs --engine-ca, --engine-certificate and --engine-key, all three",
            slug="wrong-usage",
        )
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"TLS of the cluster cannot be set up: {(error.strerror or str(error)).lower()}",
            slug="tls-unusable",
            where=f"{tls.ca}, {tls.certificate}, {tls.key}",
            hint="they must be readable PEM files that belong together",
        ) from error
