"""A process of ours for each rank: started with a job, listened to, and all ended when one fails.

A process gets its job as a line of JSON and leaves its answer in a file of a folder of ours; what it and its libraries
print stands in another one there, and is shown should it fail.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from traceloom import errors, leaving
from traceloom.errors import PartialError, TraceloomError
from traceloom.workers import Worker

Say = Callable[[str], None]
_OTHERS_FAIL_S = 3.0
_LAST_LINES = 5


def run_processes(
    main: str, job: dict[str, Any], ranks: Sequence[int], folder: Path, say: Say, *, hint: str
) -> list[dict[str, Any]]:
    """Start a process for each rank and wait for all; when one fails, the others are ended.

    Args:
        main: A module whose `main` calls `take_part`.
        job: What all of them do; each is told `folder`, `process` (its place) and `ranks` besides.
        ranks: Their names.
        folder: For what they leave.
        say: Told what the first of them is doing.
        hint: What to do should a rank fail; `{rank}` is its name.

    Returns:
        The answer of each.

    Raises:
        PartialError: slug `rank-failed`; or whatever a rank raised of `TraceloomError`.
    """
    heard: queue.SimpleQueue[tuple[int, dict[str, Any] | int]] = queue.SimpleQueue()

    def listen(process: int, worker: Worker) -> None:
        for answer in worker.answers():
            heard.put((process, answer))
        heard.put((process, worker.ended()))

    failed: dict[int, dict[str, Any] | int] = {}
    running = set(range(len(ranks)))
    workers: list[Worker] = []

    def kill() -> None:
        for worker in workers:
            worker.kill()

    with leaving.undone_on_leaving(kill):
        try:
            for process in range(len(ranks)):
                with leaving.put_off():
                    workers.append(Worker(main, threads=1))
                workers[-1].send({**job, "folder": str(folder), "process": process, "ranks": list(ranks)})
            for process, worker in enumerate(workers):
                threading.Thread(target=listen, args=(process, worker), daemon=True).start()
            until = None
            while running:
                try:
                    process, what = heard.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if isinstance(what, int):
                    running.discard(process)
                    if what:
                        failed.setdefault(process, what)
                elif "error" in what:
                    failed[process] = what
                elif process == 0:
                    say(what["says"])
                if failed and until is None:  # it pulls the others down, and which was first shows in a moment
                    until = time.monotonic() + _OTHERS_FAIL_S
        finally:
            kill()
            for worker in workers:
                worker.ended()
    if failed:
        raise _first_failure(failed, ranks, folder, hint)
    return [msgspec.json.decode((folder / f"{process}.json").read_bytes()) for process in range(len(ranks))]


def _first_failure(
    failed: dict[int, dict[str, Any] | int], ranks: Sequence[int], folder: Path, hint: str
) -> TraceloomError:
    """The failure that the others follow from: of who ended without a word, else the first that was spoken of."""
    others = ", and the others were ended" if len(ranks) > 1 else ""
    spoken = {process: what for process, what in failed.items() if isinstance(what, dict)}
    silent = {process: code for process, code in failed.items() if isinstance(code, int)}
    if silent:
        process, code = next(iter(silent.items()))
        how = f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        log = folder / f"{process}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        text = " | ".join(lines[-_LAST_LINES:])
    else:
        process, first = min(spoken.items(), key=lambda item: int(item[1]["time_ns"]))
        if first["type"]:
            kind: type[TraceloomError] = getattr(errors, first["type"])
            return kind(**first["error"])
        how, text = "failed", first["error"]
    rank = ranks[process]
    message = f"rank {rank} {how}{others}" + (f": {text}" if text else "")
    return PartialError(message, slug="rank-failed", hint=hint.format(rank=rank))


def take_part(run: Callable[[dict[str, Any], Say], dict[str, Any]]) -> None:
    """What a process does that `run_processes` started; it ends here.

    Args:
        run: Given the job, and who is told what is being done, the answer.
    """
    job = json.loads(sys.stdin.readline())
    folder, process, ranks = Path(job["folder"]), job["process"], job["ranks"]

    def end_with_parent() -> None:  # nobody reads what is measured once the standard input ends
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    log = os.open(folder / f"{process}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):  # ops and libraries may print
        os.dup2(log, stream)

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        os.environ |= {"RANK": str(process), "LOCAL_RANK": str(process), "WORLD_SIZE": str(len(ranks))}
        if len(ranks) > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        answer = run(job, lambda text: say(says=text))
        (folder / f"{process}.json").write_bytes(msgspec.json.encode(answer))
    except TraceloomError as error:
        where = ", ".join(filter(None, [error.where, f"rank {ranks[process]}" if len(ranks) > 1 else ""]))
        say(type=type(error).__name__, error={**error.to_dict(), "where": where}, time_ns=time.time_ns())
    except Exception as error:  # noqa: BLE001  (whatever it is, the parent must hear of it)
        traceback.print_exc()
        say(type="", error=f"{type(error).__name__}: {error}", time_ns=time.time_ns())
    finally:
        sys.stdout.flush()
        os._exit(0)  # without the destructors of process groups, which wait for peers that may be gone
