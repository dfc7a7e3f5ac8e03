"""Tasks in a Dask cluster. Dask itself carries only bytes of ours, by pickles of its own between its processes."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from traceloom.collect.cluster import Cluster, first_line, version_here, work_here
from traceloom.collect.engine import TaskError

if TYPE_CHECKING:
    from distributed import Client

_CONNECT_S = 10.0


class Dask(Cluster):
    """Tasks in the workers of a Dask scheduler: as many at once in each worker as it has threads."""

    kind = "dask"
    _client: Client | None = None

    def _connect(self) -> None:
        from distributed import Client
        from distributed.security import Security

        if self._client is not None and self._client.status in {"running", "connecting"}:
            return
        scheme, security = "tcp", None
        if self.tls is not None:
            scheme = "tls"
            security = Security(
                require_encryption=True, tls_ca_file=self.tls.ca, tls_client_cert=self.tls.certificate,
                tls_client_key=self.tls.key,
            )  # fmt: skip
        self._client = Client(
            f"{scheme}://{self.address}", security=security, timeout=_CONNECT_S, set_as_default=False, name="traceloom"
        )

    def _asked(self, name: str, task: bytes) -> bytes:
        from distributed.scheduler import KilledWorker

        self._reach()
        assert self._client is not None
        try:
            answer: bytes = self._client.submit(_work, task, self._settings, key=name, pure=False).result()
        except KilledWorker as error:
            raise TaskError("workers of the cluster that worked on it were killed") from error
        except CancelledError as error:
            raise self.away("its scheduler lost the task") from error
        except Exception as error:  # whatever a worker raises that cannot even begin it
            raise self.away(f"{type(error).__name__}: {first_line(error)}") from error
        return answer

    def _versions(self) -> list[str]:
        self._reach()
        assert self._client is not None
        try:
            answers = self._client.run(version_here, on_error="return")
        except Exception as error:  # as above
            raise self.away(f"{type(error).__name__}: {first_line(error)}") from error
        return [str(answer).partition("\n")[0] for answer in answers.values()]

    def _leave(self) -> None:
        if self._client is not None:
            self._client.close(timeout=_CONNECT_S)


def _work(task: bytes, settings: bytes) -> bytes:
    from distributed import get_worker

    worker = get_worker()
    return work_here(task, settings, worker.state.nthreads, worker.local_directory)
