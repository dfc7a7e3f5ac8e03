"""Hosts as network namespaces on one bridge, whose links can be cut; needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

PORT = 9466


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """A bridge in a namespace of its own, at 10.77.0.1, and hosts that are joined to it by a veth pair each."""

    def __init__(self) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("openssl") is None:
            pytest.skip("network namespaces need root and iproute2, their service's certificate openssl")
        self.prefix = f"tl{os.getpid()}"
        self.hosts: list[str] = []
        self.hub = self._namespace("hub")
        _ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.hub, "address", "add", "10.77.0.1/24", "dev", "bridge")
        _ip("-n", self.hub, "link", "set", "bridge", "up")

    def _namespace(self, name: str) -> str:
        namespace = f"{self.prefix}-{name}"
        try:
            _ip("netns", "add", namespace)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
        self.hosts.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        return namespace

    def host(self, name: str) -> str:
        """A new host; its address."""
        namespace, number = self._namespace(name), len(self.hosts)
        pair = f"veth{number}"
        _ip("-n", self.hub, "link", "add", pair, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", self.hub, "link", "set", pair, "master", "bridge", "up")
        _ip("-n", namespace, "address", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        return f"10.77.0.{10 + number}"

    def link(self, name: str, state: str) -> None:
        """Cut the link of a host (`down`), or mend it (`up`)."""
        _ip("-n", f"{self.prefix}-{name}", "link", "set", "eth0", state)

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """A command that runs on a host, or on `hub`."""
        return ["ip", "netns", "exec", f"{self.prefix}-{name}", *command]

    def kill(self, name: str) -> None:
        """End every process of a host, until there is none."""
        question = ["ip", "netns", "pids", f"{self.prefix}-{name}"]
        while pids := subprocess.run(question, check=True, capture_output=True).stdout.split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        """Take all of it away; processes in there have ended."""
        for namespace in reversed(self.hosts):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def certificate(folder: Path, address: str) -> tuple[Path, Path, Path]:
    """An authority of its own in a folder, and a certificate of an address signed by it: authority, certificate, key."""

    def make(name: str, *more: str) -> Path:
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += [
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-out",
            f"{folder}/{name}.pem",
            "-keyout",
            f"{folder}/{name}.key",
        ]
        subprocess.run([*command, *more], check=True, capture_output=True)
        return folder / f"{name}.pem"

    authority = make("authority")
    names = ["-addext", f"subjectAltName=IP:{address}", "-addext", "basicConstraints=critical,CA:FALSE"]
    own = make("fleet", "-CA", str(authority), "-CAkey", f"{folder}/authority.key", *names)
    return authority, own, folder / "fleet.key"
