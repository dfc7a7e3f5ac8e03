"""How long the threads of the program have run, sampled while a window is recorded.

A trace tells what a thread called, not whether it ran: between two operators it may compute in
Python or wait for a request. The difference is in the time that the system gave it. Linux tells
that of every thread in `/proc`.
"""

from __future__ import annotations

import threading
import time
from array import array

from traceloom.capture import observer_safety

EVERY_SECONDS = 0.02


class ThreadTimes:
    """Samples the processor time of the program's Python threads between `start` and `stop`."""

    def __init__(self) -> None:
        self._threads, self._times, self._run = array("q"), array("q"), array("q")
        self._over = threading.Event()
        self._sampler: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample."""
        self._sample()
        if not self._threads:
            return  # this system does not tell
        self._sampler = threading.Thread(target=self._watch, name="traceloom-times", daemon=True)
        try:
            self._sampler.start()
        except RuntimeError:  # no threads any more: the interpreter ends
            self._sampler = None

    def stop(self) -> dict[str, list[int]] | None:
        """End; the samples as columns of one length in the order of time, or None where there are
        none.

        `thread` is the system's id, `time_ns` Unix time, `cpu_ns` how long the thread has run since
        it began.
        """
        self._over.set()
        if not self._threads:
            return None
        self._sample()
        return {
            "thread": self._threads.tolist(),
            "time_ns": self._times.tolist(),
            "cpu_ns": self._run.tolist(),
        }

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            self._sample()

    def _sample(self) -> None:
        for thread in threading.enumerate():
            native = thread.native_id
            if native is None or thread.name.startswith("traceloom-"):
                continue
            ran = observer_safety.run_ns(f"/proc/self/task/{native}")
            if ran is not None:
                self._threads.append(native)
                self._times.append(time.time_ns())
                self._run.append(ran)
