"""Memory and swap of the host, and processes that were killed for want of it."""

from __future__ import annotations

from traceloom.agent.collect import HostCollector, read, read_if_there
from traceloom.agent.metrics import Reading


class HostMemory(HostCollector):
    """Reads /proc/meminfo, and `oom_kill` of /proc/vmstat (since Linux 4.13)."""

    name = "memory"

    def collect(self) -> list[Reading]:
        """States that add up to all memory: `cached` is what the kernel can give back, without `buffers`."""
        pairs = (line.split(b":") for line in read(self.proc / "meminfo").splitlines() if b":" in line)
        sizes = {name.decode(): int(value.split()[0]) * 1024 for name, value in pairs}
        buffers = sizes.get("Buffers", 0)
        # Shared memory is counted as cached by the kernel, and cannot be given back.
        cached = max(sizes.get("Cached", 0) + sizes.get("SReclaimable", 0) - sizes.get("Shmem", 0), 0)
        used = max(sizes["MemTotal"] - sizes["MemFree"] - buffers - cached, 0)
        states = {"used": used, "free": sizes["MemFree"], "cached": cached, "buffers": buffers}
        readings = [Reading("host_memory_bytes", (state,), size) for state, size in states.items()]
        if "SwapTotal" in sizes and "SwapFree" in sizes:
            swapped = sizes["SwapTotal"] - sizes["SwapFree"]
            readings += [
                Reading("host_swap_bytes", ("used",), swapped),
                Reading("host_swap_bytes", ("free",), sizes["SwapFree"]),
            ]
        if (kills := self._kills()) is not None:
            readings.append(Reading("oom_kills_total", ("", ""), kills))
        return readings

    def trouble(self) -> list[str]:
        """Kernels that do not count kills."""
        if self._kills() is not None:
            return []
        return ["kills for want of memory are not counted: no `oom_kill` in /proc/vmstat (Linux 4.13 or later has it)"]

    def _kills(self) -> int | None:
        lines = read_if_there(self.proc / "vmstat").splitlines()  # in some sandboxes it is not there
        return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), None)
