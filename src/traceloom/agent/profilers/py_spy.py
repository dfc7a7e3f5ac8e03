"""py-spy: looks into Python processes from outside, without stopping them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from pathlib import Path

from traceloom.agent.collect import read
from traceloom.agent.owners import Process
from traceloom.agent.profilers import ProfilerError

_HINT_RIGHTS = "run the agent as root, or set kernel.yama.ptrace_scope to 0"
_ERROR_BYTES = 1 << 16


def path() -> str:
    """Where py-spy is: on the path, or beside this Python; "" where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.exists() else "")


class PySpy:
    """A py-spy that runs; it is killed where what is done inside ends early.

    Args:
        process: The one looked into. A pid is used again: what py-spy says counts while `check` agrees.
        arguments: The verb and its options.

    Raises:
        ProfilerError: `no-py-spy`, `exited`.
    """

    def __init__(self, process: Process, *arguments: str) -> None:
        self.process = process
        self.arguments = (*arguments, "--pid", str(process.pid))
        self._running: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> asyncio.subprocess.Process:
        """Start it."""
        program = path()
        if not program:
            raise ProfilerError(
                "py-spy is not installed beside the agent", slug="no-py-spy", hint="pip install 'traceloom[agent]'"
            )
        self.check()
        pipe = asyncio.subprocess.PIPE
        self._running = await asyncio.create_subprocess_exec(
            program, *self.arguments, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        return self._running

    async def __aexit__(self, *_: object) -> None:
        """End it, whatever happened."""
        assert self._running is not None
        with contextlib.suppress(ProcessLookupError):
            self._running.kill()
        await self._running.wait()

    def check(self) -> None:
        """Whether the pid still belongs to the process.

        Raises:
            ProfilerError: `exited`.
        """
        try:
            fields = read(f"/proc/{self.process.pid}/stat").rpartition(b")")[2].split()
        except OSError:
            fields = []
        if not fields or int(fields[19]) != self.process.start_ticks or fields[0] in (b"Z", b"X"):
            raise ProfilerError(f"the process {self.process.pid} has ended", slug="exited")

    def failure(self, errors: bytes) -> ProfilerError:
        """Why it gave nothing, from what it said."""
        text = errors.decode(errors="replace").strip()
        first = text.splitlines()[0].removeprefix("Error: ") if text else "py-spy ended without a word"
        if "Permission Denied" in text or "Operation not permitted" in text:
            return ProfilerError(
                f"the kernel does not let the agent look into process {self.process.pid}", slug="not-permitted",
                hint=_HINT_RIGHTS,
            )  # fmt: skip
        if "python version" in text:
            return ProfilerError(f"process {self.process.pid} runs no Python that py-spy knows", slug="not-python")
        return ProfilerError(f"py-spy failed: {first[:300]}", slug="py-spy-failed")


async def said(process: Process, *arguments: str, seconds: float, most_bytes: int) -> bytes:
    """What py-spy prints about a process.

    Raises:
        ProfilerError: It is missing, may not look, took longer than `seconds`, or said more than `most_bytes`.
    """
    spy = PySpy(process, *arguments)
    try:
        async with spy as running:
            assert running.stdout is not None
            assert running.stderr is not None
            text, errors = await asyncio.wait_for(
                asyncio.gather(whole(running.stdout, most_bytes), whole(running.stderr, _ERROR_BYTES)), seconds
            )
            code = await asyncio.wait_for(running.wait(), seconds)
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise ProfilerError(
            f"py-spy had not looked at process {process.pid} after {seconds:g} s", slug="py-spy-failed"
        ) from error
    spy.check()
    if code:
        raise spy.failure(errors)
    if len(text) > most_bytes:
        raise ProfilerError(f"the stacks of process {process.pid} are larger than anybody reads", slug="py-spy-failed")
    return text


async def whole(stream: asyncio.StreamReader, most: int) -> bytes:
    """All of a stream; one byte more than `most` where it is longer, and the rest of it is dropped."""
    text = b""
    while piece := await stream.read(1 << 16):
        if len(text) <= most:
            text = (text + piece)[: most + 1]
    return text
