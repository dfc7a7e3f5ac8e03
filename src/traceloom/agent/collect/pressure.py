"""Pressure stall information: how long tasks waited for processors, memory or disks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from traceloom.agent.collect import HostCollector, read
from traceloom.agent.metrics import Reading

_RESOURCES = ("cpu", "io", "memory")
_LINE = re.compile(rb"^(some|full) .*total=(\d+)", re.MULTILINE)


class Pressure(HostCollector):
    """Reads /proc/pressure, in microseconds since boot; since Linux 4.20, where it is switched on."""

    name = "pressure"

    def collect(self) -> list[Reading]:
        """Of each resource the time in which some, and in which all tasks waited."""
        readings = []
        for resource in _RESOURCES:
            try:
                text = read(self.proc / "pressure" / resource)
            except OSError:  # said by `trouble`; EOPNOTSUPP where it is switched off
                continue
            readings += [
                Reading("host_pressure_seconds_total", (resource, share), waited) for share, waited in stalls(text)
            ]
        return readings

    def trouble(self) -> list[str]:
        """Kernels without it."""
        try:
            read(self.proc / "pressure" / "cpu")
        except OSError:
            return ["pressure (PSI) is not given: start the kernel (4.20 or later, CONFIG_PSI) with psi=1"]
        return []


def stalls(text: bytes) -> Iterator[tuple[str, float]]:
    """`some` and `full` of a file of pressure, in seconds."""
    for share, waited in _LINE.findall(text):
        yield share.decode(), int(waited) / 1e6
