"""Engines that run tasks in local processes or in a Dask cluster.

A task's process knows no secret of the service: it gets files, but no credentials for the stores.

A worker of a cluster runs a task like the local host: its files are copied to a folder of their
own, and a process with limits of memory and time, which knows only that folder, works on them. So a
capture that crashes, hangs or exhausts memory ends that process, and not the worker. Only the task
and its answer go over the network: bytes encoded by this module, never an object of a library that
read an untrusted file. Dask itself carries them in pickles between its own processes.
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
    sweep_scratch,
)
from traceloom.system.processes import WorkerProcess, count_cores

if TYPE_CHECKING:
    from distributed import Client


_TASKS_PER_PROCESS = 200  # then it is replaced, which bounds leaks
_SERVICE_ENDS = "the service ends"


class ProcessEngine:
    """Runs tasks in reused processes of this host; one that crashes, hangs or exhausts memory is
    replaced.

    Args:
        slots: Max tasks at once; None: one for each core but one.
        memory_bytes: Max data of a process.
        main: The module that a process runs.
        temporary: Where files of tasks are copied; None: the system's temporary directory.
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
        sweep_scratch(temporary)
        self._pool = ThreadPoolExecutor(self.slots, "traceloom-task")
        self._lock = threading.Lock()
        self._idle: list[tuple[WorkerProcess, int]] = []
        self._running: set[WorkerProcess] = set()
        self._closed = False

    def submit(self, task: EngineTask) -> Future[bytes]:
        """Starts a task once a process is free; result and errors as of `Engine`."""
        return self._pool.submit(self._run, task)

    def check(self) -> str:
        """Returns a description of the number of processes."""
        return f"{self.slots} at once, in processes of this host"

    def close(self) -> None:
        """Kills running processes, and waits until they have ended."""
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
        worker, tasks_done = self._taken()
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
            answer = None  # it was killed while it wrote
        finally:
            timer.cancel()
        with self._lock:
            self._running.discard(worker)
            reusable = (
                answer is not None
                and not late.is_set()
                and tasks_done + 1 < _TASKS_PER_PROCESS
                and not self._closed
            )
            if reusable:
                self._idle.append((worker, tasks_done + 1))
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
                worker, tasks_done = self._idle.pop()
            else:
                try:
                    worker, tasks_done = WorkerProcess(self._main, quiet=True, environment={}), 0
                except OSError as error:
                    raise TaskError(f"no process could be started: {error}") from error
                worker.send({"memory_bytes": self._memory_bytes})
            self._running.add(worker)
            return worker, tasks_done


def create_engine(address: str, slots: int | None = None, tls: EngineTls | None = None) -> Engine:
    """Returns the engine for an address: `processes` or `dask://HOST:PORT`.

    Args:
        address: Address of the engine.
        slots: Max tasks at once.
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
"""Default for the max number of tasks in a cluster at once."""

_RETRY_AFTER_S = 5.0
_CONNECT_S = 10.0
_lock = threading.Lock()


class EngineTls(msgspec.Struct, frozen=True):
    """PEM files for mutual TLS between the service and a cluster."""

    ca: str = ""
    certificate: str = ""
    key: str = ""


class ClusterSettings(msgspec.Struct, frozen=True):
    """Settings sent to workers with each task: version of the service, memory limit, module
    to run.
    """

    version: str = __version__
    memory_bytes: int = MEMORY_BYTES
    main: str = "traceloom.fleet.service.worker"


class ClusterResponse(msgspec.Struct, frozen=True):
    """Outcome of a task in a cluster: its result, or what failed.

    `failed` is `worker` if the failure is not due to the task.
    """

    result: bytes = b""
    failed: Literal["", "task", "for good", "worker"] = ""
    error: str = ""


def _work_in_worker(task: bytes, settings: bytes) -> bytes:
    from distributed import get_worker

    worker = get_worker()
    return run_in_worker(task, settings, worker.state.nthreads, worker.local_directory)


def run_in_worker(task: bytes, settings: bytes, slots: int, temporary: str) -> bytes:
    """Runs a task in a worker of the cluster; returns a `ClusterResponse`. All bytes are MessagePack.

    Args:
        task: An `EngineTask`.
        settings: `ClusterSettings`.
        slots: Max tasks at once in this worker.
        temporary: Where files are copied.
    """
    return msgspec.msgpack.encode(_run_task(task, settings, slots, temporary))


def _run_task(task: bytes, encoded: bytes, slots: int, temporary: str) -> ClusterResponse:
    try:
        settings = msgspec.msgpack.decode(encoded, type=ClusterSettings)
        if settings.version != __version__:
            differs = f"a worker has Traceloom {__version__}, the service {settings.version}"
            return ClusterResponse(failed="worker", error=differs)
        with _lock:
            processes = _get_processes(slots, settings, temporary)
        return ClusterResponse(
            processes.submit(msgspec.msgpack.decode(task, type=EngineTask)).result()
        )
    except TaskError as error:
        return ClusterResponse(failed="for good" if error.final else "task", error=str(error))
    except (TraceloomError, OSError) as error:
        return ClusterResponse(failed="worker", error=f"{socket.gethostname()}: {error}")
    except Exception as error:  # noqa: BLE001  (if raised, the cluster would log the task, including signed URLs)
        return ClusterResponse(
            failed="worker", error=f"{socket.gethostname()}: {type(error).__name__}: {error}"
        )


@cache
def _get_processes(slots: int, settings: ClusterSettings, temporary: str) -> ProcessEngine:
    """Returns the processes of this worker, which end with it."""
    return ProcessEngine(
        slots, memory_bytes=settings.memory_bytes, main=settings.main, temporary=Path(temporary)
    )


class DaskEngine:
    """Runs tasks in the workers of a Dask scheduler, one per thread of a worker.

    Args:
        address: `HOST:PORT` of the scheduler.
        slots: Max tasks that wait or run there; None: 16.
        tls: Required unless the address is loopback.
        settings: Limits of the processes.

    Raises:
        UsageError: `engine-without-tls`: others could read and change what is sent, and what is
            sent is executed; `wrong-usage`: not an address.
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
        # One more than the pipeline uses, so that a report need not wait for an analysis.
        self._pool = ThreadPoolExecutor(self.slots + 1, "traceloom-task")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reason = ""  # why the last attempt to connect failed
        self._again_s = 0.0  # monotonic time before which there is no other attempt

    def submit(self, task: EngineTask) -> Future[bytes]:
        """Sends a task; result and errors as of `Engine`."""
        return self._pool.submit(self._run, task)

    def check(self) -> str:
        """Checks that workers with this version respond; returns their number in a description.

        Raises:
            InputError: `no-engine`: no scheduler or worker responds, or workers have other
                versions.
        """
        versions = self._versions()
        if not versions:
            raise self._unavailable("no worker is there")
        if other_versions := sorted(
            {str(version) for version in versions if version != __version__}
        ):
            raise self._unavailable(
                f"{sum(version != __version__ for version in versions)} of {len(versions)} workers have Traceloom "
                f"{', '.join(other_versions)[:200]}, the service {__version__}"
            )
        return f"{self._where}, workers: {len(versions)}"

    def close(self) -> None:
        """Disconnects from the cluster; results of running tasks are lost."""
        self._closed.set()
        with self._lock:
            if self._client is not None:
                self._client.close(timeout=_CONNECT_S)  # pending results raise an error
        self._pool.shutdown(cancel_futures=True)

    def _unavailable(self, reason: str) -> InputError:
        return InputError(
            f"the cluster does not work: {reason}",
            slug="no-engine",
            where=self._where,
            hint="captures wait until it does",
        )

    def _connected(self) -> Client:
        """Returns a connected client.

        Raises:
            InputError: `no-engine`.
        """
        with self._lock:
            if self._closed.is_set():
                raise self._unavailable("the service left it")
            # Threads that waited for the lock need not each wait for a timeout.
            if time.monotonic() < self._again_s:
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
            answer = msgspec.msgpack.decode(content, type=ClusterResponse)
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
        """Runs `run_in_worker` in a worker, and waits for its answer.

        Raises:
            TaskError: Its workers were killed.
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
        except Exception as error:  # anything that a worker raises before it starts the task
            raise self._unavailable(f"{type(error).__name__}: {_first_line(error)}") from error
        return answer

    def _versions(self) -> list[str]:
        """Returns the Traceloom version of each worker, or why it has none.

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
    """Splits `HOST:PORT`.

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
    """Returns the first line of a library's error, at most 200 characters."""
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
