"""Tasks in a Ray cluster, by its server for clients. Ray itself carries only bytes of ours, by pickles of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.collect.cluster import Cluster, first_line, version_here, work_here
from traceloom.collect.engine import TaskError

if TYPE_CHECKING:
    from ray.client_builder import ClientContext

_CHECK_S = 20.0


class Ray(Cluster):
    """Tasks in the workers of a Ray cluster, each of one CPU."""

    kind = "ray"
    _context: ClientContext | None = None

    def _connect(self) -> None:
        import ray

        if self._context is not None and ray.is_initialized():
            return
        options: dict[str, Any] = {}
        if self.tls is not None:
            import grpc

            files = (self.tls.ca, self.tls.key, self.tls.certificate)
            options["_credentials"] = grpc.ssl_channel_credentials(*(Path(file).read_bytes() for file in files))
        try:
            self._context = ray.init(
                f"ray://{self.address}", namespace="traceloom", log_to_driver=False, configure_logging=False, **options
            )
        except RuntimeError as error:  # where it was connected, and half of that is left
            raise ConnectionError(first_line(error)) from error

    def _asked(self, name: str, task: bytes) -> bytes:
        import ray
        from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

        self._reach()
        try:
            work = ray.remote(work_here).options(name=name, num_cpus=1, max_retries=1)
            answer: bytes = ray.get(work.remote(task, self._settings))
        except (WorkerCrashedError, NodeDiedError, OutOfMemoryError) as error:
            raise TaskError("workers of the cluster that worked on it were killed") from error
        except Exception as error:  # whatever a worker raises that cannot even begin it
            raise self.away(f"{type(error).__name__}: {first_line(error)}") from error
        return answer

    def _versions(self) -> list[str]:
        """Of one worker: which nodes a task can run on is the cluster's affair."""
        import ray

        self._reach()
        try:
            return [ray.get(ray.remote(version_here).options(num_cpus=0).remote(), timeout=_CHECK_S)]
        except Exception as error:  # as above
            raise self.away(f"{type(error).__name__}: {first_line(error)}") from error

    def _leave(self) -> None:
        if self._context is not None:
            self._context.disconnect()
