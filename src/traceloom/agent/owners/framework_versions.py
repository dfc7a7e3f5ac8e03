"""Versions of the frameworks that processes have loaded, by the names of what was installed beside their libraries."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading

if TYPE_CHECKING:
    from traceloom.agent.collect.processes import ProcessFacts

MOST_NAMES = 20_000  # of a directory of packages that are looked at
# Framework -> the package whose library is loaded, and the distributions that have it.
_PACKAGES = {
    "pytorch": ("torch", "torch"),
    "jax": ("jaxlib", "jaxlib"),
    "tensorflow": ("tensorflow", "tensorflow(?:_cpu|_rocm|_intel)?"),
}


class FrameworkVersions:
    """A collector without series: `versions` has those that are known, by process and library.

    Directories of users are listed as the process sees them, and may lie on a disk that hangs: nobody waits for it. Of
    what is there only the name of a distribution is read.
    """

    name = "frameworks"

    def __init__(self, config: Config) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        self.timeout_s = config.collect.timeouts.get(self.name, config.collect.timeout)
        self.wanted: Mapping[str, ProcessFacts] = {}  # by key; for whoever knows the processes to set
        self.versions: Mapping[tuple[str, str], str] = {}  # "" where it is not known
        self._proc = Path(config.collect.proc)

    def collect(self) -> list[Reading]:
        """Look for the versions of processes that are new."""
        versions = {}
        for process in self.wanted.values():
            for framework, library in process.frameworks.items():
                key = (process.key, library)
                versions[key] = self.versions[key] if key in self.versions else self._version(process, framework)
        self.versions = versions
        return []

    def trouble(self) -> list[str]:
        """Nothing: a version that is not known is absent."""
        return []

    def _version(self, process: ProcessFacts, framework: str) -> str:
        """As in `torch-2.13.0+cpu.dist-info`; "" where there is none or several."""
        package, distribution = _PACKAGES[framework]
        folder, separator, _ = process.frameworks[framework].rpartition(f"/{package}/")
        if not separator:
            return ""
        pattern = re.compile(rf"{distribution}-(\d[A-Za-z0-9.+!_]{{0,63}})\.dist-info")
        try:
            with os.scandir(f"{self._proc}/{process.pid}/root{folder}") as entries:
                matches = [
                    match[1] for entry in islice(entries, MOST_NAMES) if (match := pattern.fullmatch(entry.name))
                ]
        except OSError:  # it has ended, or its files are not ours to see
            return ""
        return matches[0] if len(matches) == 1 else ""
