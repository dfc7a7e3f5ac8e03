"""Runs long tasks in processes of their own: facts of a capture, recordings by probes.

A task is a function `module:name` of the package that takes keywords and returns JSON-compatible
data. The process ends with its task; if it crashes, hangs or uses too much memory, nothing else is
affected.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from typing import Any

from traceloom.errors import TraceloomError
from traceloom.system.processes import WorkerProcess

TASKS = {
    "pod-resources": "traceloom.agent.ownership.kubernetes:list_containers",
    "stacks": "traceloom.agent.profilers.py_spy:convert_stacks",
    "job-facts": "traceloom.agent.topline:load_traced_facts",
    "flight-records": "traceloom.agent.hangs.flight_recorder:analyse_flight_files",
    "keep-trace": "traceloom.agent.traces.files:verify_and_store",
    "keep-memory": "traceloom.agent.traces.files:verify_and_store_memory",
    "allocations": "traceloom.agent.probes.recording:record_allocations",
    "launches": "traceloom.agent.probes.recording:record_launches",
    "attach": "traceloom.agent.attach.injection:inject_order",
}


_MAX_ANSWER_BYTES = 64 << 20
_NO_LIMIT_S = 86_400.0  # of tasks that whoever asked ends


def run(task: str, *, timeout_s: float = 600.0, user: int | None = None, **arguments: Any) -> Any:
    """Run a task, optionally as another user; blocks, so it is called in a thread.

    Raises:
        TraceloomError: `task-failed`: it could not start, raised, was killed, or took longer than
            `timeout_s`.
    """
    worker = _start(task, user)
    try:
        return _ask(worker, task, arguments, timeout_s, f"the task `{task}` failed: ")
    finally:
        worker.kill()
        worker.ended()


async def run_alone(task: str, **arguments: Any) -> Any:
    """Run a task without a time limit; on cancellation its process is killed.

    The end of the process is not awaited: if it has probes, the kernel removes them first, which
    takes seconds.

    Raises:
        TraceloomError: `task-failed`: it could not start, raised or was killed; the message is its
            own.
    """
    worker = _start(task, None)
    try:
        return await asyncio.to_thread(_ask, worker, task, arguments, _NO_LIMIT_S)
    finally:
        worker.kill()
        threading.Thread(target=worker.ended, name=f"end of {task}", daemon=True).start()


def _ask(
    worker: WorkerProcess, task: str, arguments: dict[str, Any], timeout_s: float, prefix: str = ""
) -> Any:
    try:
        worker.send({"task": task, "arguments": arguments})
        answer = worker.read_answer(timeout_s, _MAX_ANSWER_BYTES)
    except (ValueError, RecursionError):
        answer = None  # it was cut while it wrote
    if answer is None or "error" in answer:
        reason = answer["error"] if answer else "its process ended"
        raise TraceloomError(f"{prefix}{reason}", slug="task-failed")
    return answer["result"]


def _start(task: str, user: int | None) -> WorkerProcess:
    try:
        return WorkerProcess("traceloom.agent.worker", quiet=True, user=user)
    except OSError as error:
        raise TraceloomError(
            f"the task `{task}` did not start: {(error.strerror or str(error)).lower()}",
            slug="task-failed",
        ) from error


def main() -> None:
    """Process entry point: one task from standard input, its answer to standard output."""
    job = json.loads(sys.stdin.readline())
    module, _, name = TASKS[job["task"]].partition(":")
    try:
        answer = {"result": getattr(importlib.import_module(module), name)(**job["arguments"])}
    except Exception as error:  # noqa: BLE001  (said where it was asked for)
        answer = {"error": str(error) or type(error).__name__}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
