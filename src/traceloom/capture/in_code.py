"""Recording from within the program: `traceloom.record` and `traceloom.step`."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from traceloom.capture import manifest
from traceloom.capture.inject import attach, current, torch_is_new_enough
from traceloom.capture.messages import say, say_once
from traceloom.capture.settings import Settings, check_times, parse_steps
from traceloom.errors import CaptureError, OutputError


def step() -> None:
    """Say that a step of your loop has ended. Overrules every other notion of a step; free when nothing records."""
    recorder = current()
    if recorder is not None:
        recorder.step_called()


class Recording:
    """A recording of a block of code; made by `traceloom.record`.

    Attributes:
        path: The capture directory.
        active: Whether this recording records; False where `traceloom record` already does.
    """

    def __init__(self, settings: Settings, *, force: bool) -> None:
        self.path = Path(settings.directory)
        self.active = False
        self._settings = settings
        self._force = force
        self._recorder: Any = None

    def __enter__(self) -> Recording:  # noqa: PYI034  (never subclassed)
        if importlib.util.find_spec("torch") is None:
            raise CaptureError(
                "torch is not installed, so there is nothing to record", slug="no-torch", hint="pip install torch"
            )
        running = current()
        if running is not None:
            self.path = running.storage.directory
            say_once("already-recording", f"this process is being recorded into `{self.path}` already; that goes on")
            return self
        self._prepare()
        if not torch_is_new_enough():
            return self
        self._recorder = attach(self._settings)
        self.active = True
        self._recorder.used_torch = True
        self._recorder.first_call()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        self.active = False
        recorder.finish("block" if kind is None else f"exception: {kind.__name__}", error)
        recorder.attachment.detach()
        if recorder.storage.empty:
            say(f"nothing was recorded: {recorder.why_nothing()} [nothing-recorded]")
        elif not self._settings.quiet:
            say(f"wrote `{self.path}`; next: traceloom report {self.path}")

    def _prepare(self) -> None:
        from traceloom.capture.distributed import place

        rank, _, _ = place()
        mine = self.path / f"rank{rank or 0}.{manifest.NAME}"
        try:
            if self.path.is_dir() and self._force and not rank:
                manifest.remove(self.path)
            elif mine.exists() and not self._force:
                raise OutputError(
                    f"`{self.path}` holds a capture already",
                    slug="capture-exists",
                    hint="choose another name, or pass force=True",
                )
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"`{self.path}` cannot be written: {error.strerror or error}", slug="not-writable"
            ) from error


def record(
    directory: str | os.PathLike[str],
    *,
    steps: str | int | range | None = None,
    stacks: bool = False,
    memory: bool = False,
    force: bool = False,
    **options: Any,
) -> Recording:
    """Record a block: `with traceloom.record("run1", steps="20..25") as recording: ...`.

    Args:
        directory: The capture directory to write.
        steps: `"20..25"` or `range(20, 25)` for the steps 20 to 24, `5` for five steps after three of warm-up;
            None records the whole block. Steps are numbered from 0 at the start of the block.
        stacks: Record Python call stacks and modules.
        memory: Record allocations.
        force: Replace an earlier capture in that directory.
        **options: `after` and `duration` in seconds instead of steps; `shapes`, `graph_step` and `quiet` as in
            `traceloom record --help`.

    Returns:
        A context manager; its `path` is the capture directory.

    Raises:
        UsageError: slugs `bad-steps`, `bad-time`.
        OutputError: slugs `capture-exists`, `not-writable`, when the block is entered.
        CaptureError: slug `no-torch`, when the block is entered.
    """
    check_times(options.get("after"), options.get("duration"), steps)
    first, count = parse_steps(steps)
    settings = Settings(os.fspath(directory), first_step=first, step_count=count, stacks=stacks, memory=memory)
    settings = replace(settings, **options)
    settings = replace(settings, whole=steps is None and not settings.by_time)
    if settings.whole:
        settings = replace(settings, graph_step=False)
    return Recording(settings, force=force)
