"""Recording from within the program: `traceloom.record` and `traceloom.step`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from traceloom.capture import manifest, writing
from traceloom.capture.attach import (
    attach,
    detach,
    get_recorder,
    has_recorded_before,
    is_torch_supported,
)
from traceloom.capture.settings import Settings, check_times, parse_steps, print_message, print_once
from traceloom.capture.writing import Lock
from traceloom.errors import CaptureError, OutputError


def step() -> None:
    """Say that a step of your loop has ended.

    Overrules every other notion of a step; free when nothing records.
    """
    recorder = get_recorder()
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
        self._made = not self.path.exists()
        self._old: dict[str, int] = {}
        self._lock = Lock(self.path / writing.NOTES / writing.NAME)

    def __enter__(self) -> Recording:  # noqa: PYI034  (never subclassed)
        if importlib.util.find_spec("torch") is None:
            raise CaptureError(
                "torch is not installed, so there is nothing to record",
                slug="no-torch",
                hint="pip install torch",
            )
        running = get_recorder()
        if running is not None:
            self.path = Path(running.settings.shown)
            print_once(
                "already-recording",
                f"this process is being recorded into `{self.path}` already; that goes on",
            )
            return self
        if not is_torch_supported():
            return self
        if has_recorded_before():
            print_once(
                "recorded-before",
                "nothing more is recorded: a process can be recorded once, and this one was",
            )
            return self
        from traceloom.capture.distributed import read_rank_and_world

        # Claim the directory for this rank. An earlier capture in it stays until the new one is
        # whole.
        rank, _, _ = read_rank_and_world()
        notes = self.path / writing.NOTES
        if not self._force and (self.path / f"rank{rank or 0}.{manifest.NAME}").exists():
            raise OutputError(
                f"`{self.path}` holds a capture already",
                slug="capture-exists",
                hint="choose another name, or pass force=True",
            )
        self._lock = Lock(notes / f"{writing.NAME}.rank{rank or 0}")
        try:
            self._lock.take()
            writing.check_free(notes, writing.NAME)
            old = manifest.list_files(self.path) if self._force else {}
            if old:
                self._old = {} if rank else old
                self._settings = replace(
                    self._settings, directory=str(notes / "new"), replaces=str(self.path)
                )
        except OSError as error:
            self._release()
            raise OutputError(
                f"`{self.path}` cannot be written: {error.strerror or error}", slug="not-writable"
            ) from error
        except OutputError:
            self._release()
            raise
        self._recorder = attach(self._settings)
        self.active = True
        self._recorder.called()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        self.active = False
        recorder.finish("block" if kind is None else f"exception: {kind.__name__}", error)
        detach(recorder)
        if not self._lock.held:
            return  # a fork of the process that records
        storage, made = recorder.storage, Path(self._settings.directory)
        if storage.empty:
            print_message(f"nothing was recorded: {recorder.why_nothing()} [nothing-recorded]")
        else:
            in_place = made == self.path
            try:
                if not in_place and not storage.moved:
                    manifest.replace_capture(made, self.path, self._old, {}, storage.stem())
                    in_place = True
            except (OSError, ValueError) as problem:
                print_message(
                    f"the parts of the capture could not be put together: {problem} [not-merged]"
                )
            if in_place and not self._settings.quiet:
                print_message(f"wrote `{self.path}`; next: traceloom report {self.path}")
        self._release()

    def _release(self) -> None:
        """Leave nothing behind but what was recorded, and what other ranks still need."""
        with contextlib.suppress(OSError):
            notes = self.path / writing.NOTES
            self._lock.release()
            if not any(notes.glob(f"{writing.NAME}*")):
                made = notes / "new"
                if made.is_dir() and manifest.list_parts(made):
                    kept = manifest.set_aside_incomplete(made, self.path)
                    print_message(
                        f"the capture in `{self.path}` stays; the unfinished one is in `{kept}` [kept-beside]"
                    )
                manifest.clear_notes(self.path)
                notes.rmdir()
            if self._made:
                self.path.rmdir()


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
        force: Replace an earlier capture in that directory, when the new one is whole.
        **options: `after` and `duration` in seconds instead of steps; `graph_step`, `sources`,
            `max_memory` and `quiet` as in `traceloom record --help`.

    Returns:
        A context manager; its `path` is the capture directory.

    Raises:
        UsageError: slugs `bad-steps`, `bad-time`.
        OutputError: slugs `capture-exists`, `being-recorded`, `not-writable`, when the block is entered.
        CaptureError: slug `no-torch`, when the block is entered.
    """
    check_times(options.get("after"), options.get("duration"), steps)
    first, count = parse_steps(steps)
    settings = Settings(
        os.fspath(directory), first_step=first, step_count=count, stacks=stacks, memory=memory
    )
    settings = replace(settings, **options)
    settings = replace(settings, whole=steps is None and not settings.by_time)
    if settings.whole:
        settings = replace(settings, graph_step=False)
    return Recording(settings, force=force)
