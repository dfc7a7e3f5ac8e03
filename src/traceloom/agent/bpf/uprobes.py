"""Probes on the functions of one library."""

from __future__ import annotations

import errno
import os

from traceloom.agent.bpf.elf import Elf, Function
from traceloom.agent.bpf.kernel import attach


class Uprobes:
    """Probes of a file that processes map; each program runs in every process that maps it, or in one.

    Args:
        descriptor: The open file; it is closed with the probes.
        process: Of this process alone.

    Raises:
        OSError: The file is no library.
    """

    def __init__(self, descriptor: int, process: int | None = None) -> None:
        self._descriptor = descriptor
        self._process = process
        self._probes: list[int] = []
        try:
            self.elf = Elf(descriptor)
        except OSError:
            os.close(descriptor)
            raise

    def find(self, beginning: str) -> Function:
        """The function whose name begins so.

        Raises:
            OSError: There is none.
        """
        function = self.elf.find(beginning)
        if function is None:
            raise OSError(errno.ENOENT, f"it has no function {beginning}")
        return function

    def attach(self, function: Function, program: int, *, at_return: bool = False) -> None:
        """Run a program whenever the function is entered, or left.

        Raises:
            OSError: The kernel does not let us.
        """
        # Of the very file that was looked into, whatever lies at its path now.
        path = f"/proc/self/fd/{self._descriptor}"
        self._probes.append(attach(program, path, function.offset, at_return=at_return, process=self._process))

    def close(self) -> None:
        """Take the probes away."""
        for probe in (*self._probes, self._descriptor):
            os.close(probe)
        self._probes = []
