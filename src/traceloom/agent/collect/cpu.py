"""Processor time by mode, and load."""

from __future__ import annotations

import os

from traceloom.agent.collect import HostCollector, read
from traceloom.agent.metrics import Reading

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "softirq", "steal")


class Cpu(HostCollector):
    """Reads /proc/stat and /proc/loadavg. Time of guests is in `user` and `nice` already."""

    name = "cpu"

    def collect(self) -> list[Reading]:
        """Time since boot of all processors together."""
        lines = read(self.proc / "stat").split(b"\n")
        ticks = [int(word) for word in lines[0].split()[1:]]
        readings = [
            Reading("host_cpu_seconds_total", (mode,), spent / TICKS_PER_S)
            for mode, spent in zip(_MODES, ticks, strict=False)
        ]
        processors = sum(line.startswith(b"cpu") for line in lines) - 1
        if processors:
            load = float(read(self.proc / "loadavg").split()[0])
            readings.append(Reading("host_load_ratio", (), load / processors))
        return readings

    def trouble(self) -> list[str]:
        """Nothing: every kernel has these."""
        return []
