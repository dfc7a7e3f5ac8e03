"""Clients that speak as libkineto does, written from its protocol: for tests of whoever answers them."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path


def request(mask: int, job: int, pids: tuple[int, ...]) -> bytes:
    payload = struct.pack(f"=iiq{len(pids)}i", mask, len(pids), job, *pids)
    return struct.pack("=Q32s", len(payload), b"req") + payload


class KinetoClient:
    """One process's profiler: bound in a directory, or abstract where that is None."""

    def __init__(self, directory: Path | None, name: str = "") -> None:
        self.directory = directory
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = name or f"dynoconfigclient{uuid.uuid4()}"
        self.address: str | bytes = (
            f"\0{name}\0".encode() if directory is None else str(directory / name)
        )
        self.socket.bind(self.address)
        self.daemon: str | bytes = (
            b"\0dynolog\0" if directory is None else str(directory / "dynolog")
        )

    def poll(self, mask: int = 3, pids: tuple[int, ...] = (), job: int = 0) -> None:
        self.socket.sendto(request(mask, job, pids or (os.getpid(), os.getppid())), self.daemon)

    def answer(self, timeout_s: float = 30.0) -> str | None:
        """The text that it is told; None where no answer comes."""
        poller = select.poll()  # unlike `select` it takes files of any number
        poller.register(self.socket, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            return None
        datagram, sender = self.socket.recvfrom(8192)
        # libkineto ends its process where the answer comes from another name than it asked.
        assert sender == self.daemon
        size, kind = struct.unpack_from("=Q32s", datagram)
        assert kind.rstrip(b"\0") == b"req"
        assert size == len(datagram) - 40
        return datagram[40:].decode()

    def close(self) -> None:
        self.socket.close()


class PollingProcess:
    """A process that polls when its test says so: its profiler is in a state for as long as the test likes."""

    def __init__(self, directory: Path) -> None:
        command = [
            sys.executable,
            "-S",
            "-c",
            "from support.kineto_clients import main; main()",
            str(directory),
        ]
        tests = str(Path(__file__).resolve().parents[1])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": tests},
        )
        self.pid = self.process.pid

    def poll(self, mask: int = 3) -> dict[str, str]:
        """Poll once; the configuration that answers it, {} where there is nothing to do or nobody answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{mask}\n")
        self.process.stdin.flush()
        text = json.loads(self.process.stdout.readline())
        return dict(line.split("=") for line in text.splitlines())

    def close(self) -> None:
        self.process.kill()
        with self.process:
            self.process.wait()


def main() -> None:
    """The process: a mask per line of input, the answer to its poll as a line of JSON."""
    client = KinetoClient(Path(sys.argv[1]))
    for line in sys.stdin:
        answer = None
        try:
            client.poll(int(line))
            answer = client.answer(5)
        except (ConnectionRefusedError, FileNotFoundError):  # no agent runs; libkineto goes on, too
            pass
        print(json.dumps(answer or ""), flush=True)


def trace_text(
    trace_id: str, *, operators: int = 3, steps: int = 3, start_ns: int = 0, seconds: float = 0.5
) -> str:
    """A trace as libkineto writes it, as far as the agent looks at it."""
    start_us = (start_ns or time.time_ns()) / 1000
    events = [
        {
            "ph": "X",
            "name": "PyTorch Profiler (0)",
            "cat": "Trace",
            "ts": start_us,
            "dur": seconds * 1e6,
        }
    ]
    events += [
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": start_us + 1, "dur": 2.0}
    ] * operators
    events += [
        {
            "ph": "X",
            "name": "Optimizer.step#SGD.step",
            "cat": "user_annotation",
            "ts": start_us,
            "dur": 1.0,
        }
    ] * steps
    return json.dumps({"trace_id": trace_id, "baseTimeNanoseconds": 0, "traceEvents": events})


def write_trace(
    lines: dict[str, str],
    *,
    operators: int = 3,
    steps: int = 3,
    start_ns: int = 0,
    seconds: float = 0.5,
) -> None:
    """Write what a configuration asks for as libkineto does: under another name, then whole at once."""
    path = Path(lines["ACTIVITIES_LOG_FILE"])
    part = path.with_name(path.name + ".tmp")
    text = trace_text(
        lines["REQUEST_TRACE_ID"],
        operators=operators,
        steps=steps,
        start_ns=start_ns,
        seconds=seconds,
    )
    part.write_text(text, encoding="utf-8")
    part.rename(path)
