"""Made trees of /proc and /sys: the files that the agent reads, as kernels write them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from traceloom.agent.config import Collect, Config

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class HostTree:
    """A host whose /proc and /sys lie in a directory; `uptime` seconds after its boot."""

    def __init__(self, directory: Path, uptime: float = 1000.0) -> None:
        self.proc = directory / "proc"
        self.sys = directory / "sys"
        self.write("proc/uptime", f"{uptime:.2f} 0.00\n")
        self.write("proc/self/mounts", f"proc {self.proc} proc rw,relatime 0 0\n")
        self.sys.mkdir()

    def write(self, path: str, text: str | bytes) -> Path:
        """A file of the tree, below `proc/` or `sys/`."""
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def config(self, **collect: object) -> Config:
        """A configuration of an agent that reads this tree."""
        return Config(collect=Collect(proc=str(self.proc), sys=str(self.sys), **collect))  # type: ignore[arg-type]

    def cgroups(self, **hierarchies: str) -> None:
        """Mount hierarchies of control groups: directory below /sys/fs/cgroup -> controllers; none means version 2."""
        lines = [
            "23 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
            "30 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw",
        ]
        for number, (name, controllers) in enumerate(hierarchies.items()):
            at = f"/sys/fs/cgroup/{name}".rstrip("/").replace("_", ",")
            kind = (
                f"cgroup cgroup rw,{controllers}"
                if controllers
                else "cgroup2 cgroup2 rw,nsdelegate"
            )
            lines.append(
                f"{31 + number} 30 0:{29 + number} / {at} rw,nosuid,relatime shared:{9 + number} - {kind}"
            )
        self.write("proc/1/mountinfo", "\n".join(lines) + "\n")

    def cgroup(self, path: str, **files: str) -> Path:
        """Files of a group, below sys/fs/cgroup; `memory_current` is `memory.current`, `cpu_stat` `cpu.stat`."""
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{path}/{name.replace('_', '.', 1)}", text)
        return self.sys / "fs/cgroup" / path

    def process(
        self,
        pid: int,
        *,
        start_ticks: int = 50_000,
        name: str = "python3",
        state: str = "S",
        parent: int = 1,
        flags: int = 0x400000,
        user_ticks: int = 0,
        system_ticks: int = 0,
        threads: int = 1,
        resident_pages: int = 100,
        uid: int = 1000,
        command: Sequence[str | bytes] = ("python3", "train.py"),
        environment: Mapping[str, str | bytes] | None = None,
        maps: Sequence[str] = ("/usr/bin/python3.12",),
        cgroup: str = "0::/user.slice\n",
        io: tuple[int, int] | None = (0, 0),
    ) -> Path:
        """Write the directory of a process; it replaces that of an earlier one in place."""
        at = f"proc/{pid}"
        self.write(
            f"{at}/stat",
            f"{pid} ({name}) {state} {parent} {pid} {pid} 0 -1 {flags} 9 0 0 0 {user_ticks} {system_ticks} 0 0 20 0 "
            f"{threads} 0 {start_ticks} 1000000 {resident_pages} 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 0 0\n",
        )
        self.write(
            f"{at}/status",
            f"Name:\t{name}\nUmask:\t0022\nState:\t{state}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n",
        )
        self.write(f"{at}/cmdline", b"".join(_bytes(part) + b"\0" for part in command))
        variables = {"PATH": "/usr/bin", "HOME": "/root", **(environment or {})}
        self.write(
            f"{at}/environ",
            b"".join(key.encode() + b"=" + _bytes(v) + b"\0" for key, v in variables.items()),
        )
        lines = (
            f"7f00{i:08x}-7f01{i:08x} r-xp 00000000 08:01 {i + 7:<26}{path}\n"
            for i, path in enumerate(maps)
        )
        self.write(
            f"{at}/maps",
            "".join(lines) + "7ffc0000-7ffc2000 rw-p 00000000 00:00 0                [stack]\n",
        )
        self.write(f"{at}/cgroup", cgroup)
        if io is not None:
            read, written = io
            self.write(
                f"{at}/io",
                f"rchar: 9\nwchar: 9\nsyscr: 9\nsyscw: 9\nread_bytes: {read}\nwrite_bytes: {written}\ncancelled_write_bytes: 0\n",
            )
        return self.proc / str(pid)


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
