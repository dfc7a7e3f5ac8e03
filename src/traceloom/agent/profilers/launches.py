"""Launches of kernels and graphs, and waits for devices, by probes of the functions of CUDA's runtime."""

from __future__ import annotations

from pathlib import Path

from traceloom.agent.owners import Process
from traceloom.agent.profilers import Window, probed


class LaunchesProfiler:
    """A profiler that needs nothing of the process: see `traceloom.agent.bpf`."""

    name = "launches"

    def resources(self, process: Process) -> frozenset[str]:  # noqa: ARG002  (probes exclude nothing)
        """None: any number of probes may be in a function."""
        return frozenset()

    async def record(self, process: Process, window: Window, directory: Path, stem: str) -> list[Path]:
        """Write `directory/STEM.launches.json.gz`.

        Raises:
            ProfilerError: `not-recorded`: the kernel or the rights forbid it, or the process has no such functions.
        """
        return await probed.record(self.name, process, window, directory, stem)
