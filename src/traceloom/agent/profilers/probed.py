"""The profilers by probes of functions: a worker records, and is killed where nobody waits for it any more."""

from __future__ import annotations

from pathlib import Path

from traceloom.agent import worker
from traceloom.agent.owners import Process
from traceloom.agent.profilers import ProfilerError, Window
from traceloom.errors import TraceloomError


class ProbedProfiler:
    """A profiler that needs nothing of the process: see `traceloom.agent.bpf`."""

    name: str

    def resources(self, process: Process) -> frozenset[str]:  # noqa: ARG002  (probes exclude nothing)
        """None: any number of probes may be in a function."""
        return frozenset()

    async def record(self, process: Process, window: Window, directory: Path, stem: str) -> list[Path]:
        """Write `directory/STEM.NAME.json.gz`.

        Raises:
            ProfilerError: `not-recorded`: the kernel or the rights forbid it, or the process has no such functions.
        """
        if window.duration_s is None and window.steps is None:
            raise ProfilerError("neither a duration nor a number of steps was asked for", slug="not-recorded")
        path = directory / f"{stem}.{self.name}.json.gz"
        try:
            written = await worker.run_alone(
                self.name,
                order={
                    "pid": process.pid, "start_ticks": process.start_ticks, "rank": process.owner.rank,
                    "path": str(path), "start_ns": window.start_ns, "duration_s": window.duration_s,
                    "steps": window.steps,
                },
            )  # fmt: skip
        except TraceloomError as error:
            raise ProfilerError(error.message, slug="not-recorded", where=f"process {process.pid}") from error
        finally:
            path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        return [Path(text) for text in written]


class AllocationsProfiler(ProbedProfiler):
    """Who allocates and frees memory, with stacks, by probes of PyTorch's and CUDA's functions."""

    name = "allocations"


class LaunchesProfiler(ProbedProfiler):
    """Launches of kernels and graphs, and waits for devices, by probes of the functions of CUDA's runtime."""

    name = "launches"
