"""Hosts as namespaces of network and processes, joined by a bridge, whose links can be cut.

Nothing has a name that would outlive it: the first process of each host reads from a pipe of the test, and ends with
it, by which the kernel ends the host's other processes (those in sessions of their own too) and takes its network away.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Sequence
from typing import Literal


class NamespacesError(Exception):
    """Why namespaces cannot be made here."""


class Namespaces:
    """A bridge at `address` in namespaces of its own (`hub`), and hosts that are joined to it by a veth pair each.

    `port` is free on the hub, `interface` is that of a host to the others.

    Raises:
        NamespacesError: It needs root with its rights, iproute2, and a kernel with bridges.
    """

    address, port, interface = "10.77.0.1", 9466, "eth0"

    def __init__(self) -> None:
        self._first: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers = itertools.count(11)
        try:
            self._begin("hub")
            self._ip("hub", "link", "add", "bridge", "type", "bridge")
            self._ip("hub", "address", "add", f"{self.address}/24", "dev", "bridge")
            self._ip("hub", "link", "set", "bridge", "up")
            self.host("probe")
            self.end("probe")
        except (NamespacesError, OSError) as error:
            self.close()
            raise NamespacesError(str(error)) from error

    def host(self, name: str) -> str:
        """A new host; its address."""
        self._begin(name)
        address = f"10.77.0.{next(self._numbers)}"
        veth = ["link", "add", f"to-{name}", "type", "veth"]
        self._ip("hub", *veth, "peer", "name", self.interface, "netns", str(self._first[name].pid))
        self._ip("hub", "link", "set", f"to-{name}", "master", "bridge", "up")
        self._ip(name, "address", "add", f"{address}/24", "dev", self.interface)
        self._ip(name, "link", "set", self.interface, "up")
        return address

    def link(self, name: str, state: Literal["up", "down"]) -> None:
        """Cut the link of a host, or mend it, at the bridge's end, as if a cable were pulled."""
        self._ip("hub", "link", "set", f"to-{name}", state)

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """A command that runs on a host, or on `hub`: as its child a process waits that only passes its exit code on."""
        of = f"/proc/{self._first[name].pid}/ns"
        return [
            "nsenter",
            f"--net={of}/net",
            f"--mount={of}/mnt",
            f"--pid={of}/pid_for_children",
            *command,
        ]

    def end(self, name: str) -> None:
        """Take a host away, or `hub`: with its first process all others end."""
        first = self._first.pop(name)
        first.communicate()
        assert first.returncode is not None

    def close(self) -> None:
        """Take all of it away."""
        for name in list(self._first):
            self.end(name)

    def _begin(self, name: str) -> None:
        unshare = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        first = subprocess.Popen(
            [*unshare, "sh", "-c", "echo begun; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert first.stdout is not None
        if first.stdout.readline() != b"begun\n":
            _, text = first.communicate()
            raise NamespacesError(text.decode().strip())
        self._first[name] = first
        self._ip(name, "link", "set", "lo", "up")

    def _ip(self, name: str, *words: str) -> None:
        # Its processes are not entered: `netns` is the number of one that is seen from here.
        command = ["nsenter", f"--net=/proc/{self._first[name].pid}/ns/net", "ip", *words]
        done = subprocess.run(command, check=False, capture_output=True)
        if done.returncode:
            raise NamespacesError(f"ip {' '.join(words)}: {done.stderr.decode().strip()}")
