"""The jobs of each device, as a scheduler's prolog writes them down: a file per device, with a job a line.

dcgm-exporter reads the same directory (`--hpc-job-mapping-dir`). A file is named by the number of a device (`0`), of a
partition (`0:1`), or by a uuid.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading

MOST_FILES = 1024
MOST_BYTES = 64 << 10  # of a file
MOST_LETTERS = 256  # of a job's name


class JobMapping:
    """A collector without series: `jobs` has the jobs by the name of the file, and is replaced whole."""

    name = "job-mapping"

    def __init__(self, config: Config) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        self.timeout_s = config.collect.timeouts.get(self.name, config.collect.timeout)
        self.jobs: Mapping[str, tuple[str, ...]] = {}
        self._directory = Path(config.owners.job_mapping) if config.owners.job_mapping else None
        self._troubles: list[str] = []

    def collect(self) -> list[Reading]:
        """Read the files.

        Raises:
            OSError: The directory cannot be listed.
        """
        if self._directory is None:
            return []
        jobs: dict[str, tuple[str, ...]] = {}
        troubles = []
        try:
            paths = sorted(path for path in self._directory.iterdir() if not path.name.startswith("."))
        except OSError:
            self.jobs = {}  # what was true is not known to be
            raise
        if len(paths) > MOST_FILES:
            troubles.append(f"{self._directory} has {len(paths)} files: only the first {MOST_FILES} are read")
        for path in paths[:MOST_FILES]:
            try:
                jobs[path.name] = _jobs(path)
            except OSError as error:  # noqa: PERF203 - of one file
                troubles.append(f"{path}: {error.strerror or error}")
        self.jobs, self._troubles = jobs, troubles
        return []

    def trouble(self) -> list[str]:
        """Files that cannot be read."""
        return list(self._troubles)


def _jobs(path: Path) -> tuple[str, ...]:
    """The jobs that a file lists, once each."""
    # A pipe would keep us waiting.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("is no file")
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise OSError(f"is larger than {MOST_BYTES} bytes")
    lines = (line.strip() for line in text.decode(errors="replace").splitlines())
    return tuple(dict.fromkeys(line for line in lines if line and len(line) <= MOST_LETTERS and line.isprintable()))
