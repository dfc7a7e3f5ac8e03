"""From py-spy's events to the stacks file; runs in a process of its own (`worker.py`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from traceloom.agent.profilers.dump import Frame
from traceloom.errors import InputError
from traceloom.packed import write_packed

VERSION = 1
_MOST_BYTES = 256 << 20
_THREAD = re.compile(r"thread \((?:0x([0-9A-Fa-f]{1,16})|([0-9]{1,19}))\)(?:: (.*))?", re.DOTALL)


class _Place(msgspec.Struct):
    filename: str = ""
    line: int = 0


class _Event(msgspec.Struct):
    name: str
    ph: str
    tid: int
    ts: int  # us since py-spy began
    args: _Place


class _Run(NamedTuple):
    """A stack that was seen again and again: ns since py-spy began, the number of its thread, frames by number."""

    start: int
    end: int
    thread: int
    frames: tuple[int, ...]


def convert(
    source: str, target: str, *, pid: int, rank: int | None, start_ns: int, end_ns: int, rate: int,
    began_ns: int, opened_ns: int, threads: list[int],
) -> None:  # fmt: skip
    """Write the stacks file of a window.

    py-spy ends what is still open when it opens its file, which is the last time in it; so the wall clock at which the
    file came into being says when its clock began, whatever the machine did meanwhile.

    Args:
        source: py-spy's file.
        target: The one to write.
        pid: Of the process.
        rank: Of it.
        start_ns: Beginning of the window, wall clock.
        end_ns: Its end.
        rate: Looks per second.
        began_ns: Wall clock before py-spy was started: its clock began later.
        opened_ns: Wall clock when it opened its file.
        threads: Those that the process still had at the end. Of others it is not known when they ended: their last
            stack counts for one look.

    Raises:
        InputError: `py-spy-failed`: it is no such file, or too large.
    """
    if Path(source).stat().st_size > _MOST_BYTES:
        raise InputError("the recorded stacks are larger than anybody reads", slug="py-spy-failed")
    try:
        events = msgspec.json.decode(Path(source).read_bytes(), type=list[_Event])
    except msgspec.DecodeError as error:
        raise InputError(f"what py-spy wrote is not understood: {error}", slug="py-spy-failed") from error
    base_ns = max(began_ns, opened_ns - max((event.ts for event in events), default=0) * 1000)
    named, frames, runs = _runs(events)
    last = {run.thread: run for run in runs}
    period_ns = 10**9 // rate
    samples = []
    for run in sorted(runs):
        ended = run is last[run.thread] and named[run.thread][0] not in threads
        first = max(base_ns + run.start, start_ns)
        length = min(base_ns + (run.start + period_ns if ended else run.end), end_ns) - first
        if length > 0:
            samples.append([first, run.thread, length, run.frames])
    document = {
        "format": "traceloom-stacks", "version": VERSION, "pid": pid, "rank": rank, "rate": rate,
        "threads": [
            {"id": number, "name": name or ("MainThread" if number == pid else "")} for number, name in named
        ],
        "frames": frames, "samples": samples,
    }  # fmt: skip
    content = msgspec.json.encode(document)
    write_packed(Path(target), lambda file: file.write(content), gzip=True)


def _runs(events: list[_Event]) -> tuple[list[tuple[int, str]], list[Frame], list[_Run]]:
    """Threads (number of the kernel, name), frames, and what was seen of each thread."""
    threads: dict[int, int] = {}
    named: list[tuple[int, str]] = []
    numbers: dict[Frame, int] = {}
    runs: list[_Run] = []
    stacks: dict[int, list[int]] = {}
    since: dict[int, int] = {}
    for event in events:
        at = event.ts * 1000
        stack = stacks.setdefault(event.tid, [])
        thread = threads.get(event.tid)
        if stack and thread is not None and at > since[event.tid]:
            runs.append(_Run(since[event.tid], at, thread, tuple(stack)))
        since[event.tid] = at
        if event.ph == "B":
            if match := _THREAD.fullmatch(event.name) if not event.args.filename else None:
                if event.tid not in threads:
                    threads[event.tid] = len(named)
                    named.append((int(match[1], 16) if match[1] else int(match[2]), match[3] or ""))
            else:
                frame = Frame(event.name, event.args.filename, event.args.line)
                stack.append(numbers.setdefault(frame, len(numbers)))
        else:
            del stack[-1:]  # of the thread itself, which ends last, nothing is left to delete
    return named, list(numbers), runs
