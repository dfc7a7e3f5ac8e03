"""Stacks of the recorded processes, read from outside while their windows last.

The process of `traceloom record` reads the interpreters' frames out of the memory of the processes
that it has started. In these nothing runs for it: each leaves a word in a pipe of the capture's
directory when its window opens, and when it is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from pathlib import Path
from typing import Any

from traceloom.capture import manifest, writing
from traceloom.system.python_frames import Frame, PythonFrames

RATE = 100  # looks per second, where these take less than a hundredth of a processor's time
_MAX_SHARE = 0.01
_END = "end 0 -"  # of looking, in the pipe
_MOST_LOOKS = 200_000  # at threads of a process
_OWN_CODE = f"{Path(__file__).parent}{os.sep}"


class SampledProcess:
    """What is seen of the threads of one process.

    Raises:
        OSError: It cannot be read.
    """

    def __init__(self, process: int) -> None:
        self.interpreter = PythonFrames(process)
        self._looks: list[tuple[int, int, tuple[Frame, ...]]] = []  # when, thread, stack

    def look(self) -> None:
        """Takes the stack of each of its threads, but of ours.

        Raises:
            OSError: It has ended, or changed its threads just now.
        """
        now = time.time_ns()
        for thread, stack in self.interpreter.stacks().items():
            is_ours = not stack or stack[0].file.startswith(_OWN_CODE)
            if not is_ours and len(self._looks) < _MOST_LOOKS:
                self._looks.append((now, thread, stack))

    def build_document(self, rank: dict[str, Any]) -> dict[str, Any]:
        """Returns what was seen in the kept part of the window, as it is written."""
        window = rank["window"]
        threads: dict[int, int] = {}
        frames: dict[Frame, int] = {}
        following: dict[int, int] = {}
        samples = []
        for at, thread, stack in reversed(self._looks):
            period = following.get(thread, at) - at
            following[thread] = at
            if window["start_ns"] <= at < window["end_ns"]:
                number = threads.setdefault(thread, len(threads))
                numbers = [frames.setdefault(frame, len(frames)) for frame in stack]
                samples.append((at, number, period, numbers))
        return {
            "format": "traceloom-stacks",
            "version": 1,
            "pid": rank["process"],
            "rank": rank["rank"],
            "rate": RATE,
            "threads": [
                {"id": thread, "name": "MainThread" if thread == rank["process"] else ""}
                for thread in threads
            ],
            "frames": list(frames),
            "samples": samples[::-1],
        }


class StackSampler:
    """Looks at the threads of all processes whose windows are open, on a thread of this process.

    Args:
        notes: The directory in which the processes find the pipe.
        wanted: Whether to look at all: not where the processes themselves record stacks.
    """

    def __init__(self, notes: Path, *, wanted: bool = True) -> None:
        self._seen: dict[int, SampledProcess] = {}
        self._reasons: dict[int, str] = {}  # why a process is not looked at
        self._reason = "the process did not say when its window opened"
        self._thread = threading.Thread(target=self._run, daemon=True)
        if not wanted:
            self._reason = "stacks were recorded in the process itself"
            return
        try:
            os.mkfifo(notes / writing.WINDOWS)
            self._pipe = os.open(notes / writing.WINDOWS, os.O_RDWR | os.O_NONBLOCK)
        except (OSError, AttributeError) as error:  # Windows has none
            self._reason = f"there is no pipe to say when a window opens: {error}"
            return
        self._thread.start()

    def stop(self) -> None:
        """Looks at nothing any more."""
        if self._thread.is_alive():
            os.write(self._pipe, f"{_END}\n".encode())
            self._thread.join()

    def save(self, directory: Path) -> None:
        """Writes the samples of each recorded process, and into its part where they are, or why
        there are none.

        Raises:
            OSError: They cannot be written.
            ValueError: A part is none.
        """
        for path in manifest.list_parts(directory):
            part = json.loads(path.read_text(encoding="utf-8"))
            for rank in part["ranks"]:
                rank["stack_samples"] = self._save_rank(directory, rank)
            writing.write_json(path, part)

    def _save_rank(self, directory: Path, rank: dict[str, Any]) -> dict[str, Any]:
        process = rank.get("process", 0)
        if process not in self._seen or rank["window"] is None:
            return {"file": None, "reason": self._reasons.get(process, self._reason)}
        document = self._seen[process].build_document(rank)
        if not document["samples"]:
            return {"file": None, "reason": "the window was over before the first look"}
        name = f"{rank['name']}.stacks.json.gz"
        content = json.dumps(document, separators=(",", ":")).encode()
        writing.CaptureFolders(directory).write_compressed(
            name, directory, lambda sink: sink.write(content)
        )
        return {"file": name, "reason": None}

    def _run(self) -> None:
        opened: dict[int, SampledProcess] = {}
        pause_s, words = 1 / RATE, [""]
        try:
            while _END not in words:
                words = []
                if select.select([self._pipe], [], [], pause_s if opened else None)[0]:
                    words = os.read(self._pipe, 1 << 16).decode("ascii").splitlines()
                for word in words:
                    self._hear(opened, *word.split())
                began_s = time.thread_time()  # what is done once must not delay the next look
                for sampled in opened.values():
                    with contextlib.suppress(OSError):  # another look will do, if it goes on
                        sampled.look()
                spent_s = (time.thread_time() - began_s) / max(1, len(opened))
                pause_s = max(1 / RATE, spent_s / _MAX_SHARE)
        except Exception as error:  # noqa: BLE001  (what runs and is recorded needs none of this)
            self._reason = f"the stacks could not be read: {error!r}"

    def _hear(
        self, opened: dict[int, SampledProcess], word: str, number: str, namespace: str
    ) -> None:
        """Begins to look at a process whose window opens, or ends that where it is over."""
        process = int(number)
        if process in opened:
            opened.pop(process).interpreter.close()
        if word != writing.OPENS:
            return
        if namespace != writing.read_process_namespace():
            self._reasons[process] = "it runs in a container, whose processes have other numbers"
            return
        try:
            opened[process] = self._seen[process] = SampledProcess(process)
        except OSError as error:
            self._reasons[process] = f"it cannot be read: {error.strerror or error}"
