"""What the profilers by probes share: a worker records, and is killed where nobody waits for it any more."""

from __future__ import annotations

from pathlib import Path

from traceloom.agent import worker
from traceloom.agent.owners import Process
from traceloom.agent.profilers import ProfilerError, Window
from traceloom.errors import TraceloomError


async def record(kind: str, process: Process, window: Window, directory: Path, stem: str) -> list[Path]:
    """Record `directory/STEM.KIND.json.gz`.

    Raises:
        ProfilerError: `not-recorded`, with the reason.
    """
    if window.duration_s is None and window.steps is None:
        raise ProfilerError("neither a duration nor a number of steps was asked for", slug="not-recorded")
    path = directory / f"{stem}.{kind}.json.gz"
    try:
        written = await worker.run_alone(
            kind,
            order={
                "pid": process.pid, "start_ticks": process.start_ticks, "rank": process.owner.rank, "path": str(path),
                "start_ns": window.start_ns, "duration_s": window.duration_s, "steps": window.steps,
            },
        )  # fmt: skip
    except TraceloomError as error:
        raise ProfilerError(error.message, slug="not-recorded", where=f"process {process.pid}") from error
    finally:
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
    return [Path(text) for text in written]
