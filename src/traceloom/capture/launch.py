"""Starting the command that is recorded, waiting for it, and saying what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import traceloom
from traceloom.capture import manifest, writing
from traceloom.capture.settings import VARIABLE, Settings
from traceloom.capture.stack_samples import StackSampler
from traceloom.capture.writing import Lock
from traceloom.errors import OutputError, UsageError
from traceloom.system.process import clean_up_on_exit

_HOME = Path(traceloom.__file__).resolve().parent
_HOOK = _HOME / "capture" / "hook"


class Launch:
    """One recorded run of a command."""

    def __init__(self, settings: Settings, command: list[str], *, force: bool) -> None:
        self._settings = settings
        self._command = command
        self._directory = Path(settings.directory)
        self._made = not self._directory.exists()
        self._lock = Lock(self._directory / writing.NOTES / writing.NAME)
        self._old: dict[str, int] = {}
        self.recorded = False
        self._status = 0
        self._described = ""  # what was recorded, in a sentence; "" of what is not whole
        self._reached: set[str] = set()
        self._ends: list[dict[str, Any]] = []
        self._remarks: list[str] = []
        self._until_cleaned = contextlib.ExitStack()
        self._until_cleaned.enter_context(clean_up_on_exit(self._clean))
        # Claim the directory. An earlier capture in it stays until the new one is whole, which is
        # made beside it.
        directory = self._directory
        notes = directory / writing.NOTES
        beside = notes / "new"
        try:
            self._holds_capture(force=force)
            self._lock.take()
            writing.check_free(notes, f"{writing.NAME}.*")
            replaces = self._holds_capture(force=force)
            if beside.is_dir() and manifest.list_parts(
                beside
            ):  # what a recorder that was killed could not put in its place
                self._keep(beside)
            manifest.clear_notes(directory)
            if replaces:
                self._old = manifest.list_files(directory)
                self._settings = replace(
                    self._settings, directory=str(beside), replaces=str(directory)
                )
                (beside / writing.NOTES).mkdir(parents=True)
        except OSError as error:
            self._clean()
            raise OutputError(
                f"`{directory}` cannot be written: {error.strerror or error}",
                slug="not-writable",
                hint="choose another directory with `-o`",
            ) from error
        except OutputError:
            self._clean()
            raise
        self._place = Path(self._settings.directory)
        self._notes = self._place / writing.NOTES
        self._sampler = StackSampler(self._notes, wanted=not settings.stacks)

    def _holds_capture(self, *, force: bool) -> bool:
        """Whether there is a capture in the directory already, which only `force` replaces."""
        directory = self._directory
        if not (
            (directory / manifest.NAME).exists()
            or (directory.is_dir() and manifest.list_parts(directory))
        ):
            return False
        if not force:
            raise OutputError(
                f"`{directory}` holds a capture already",
                slug="capture-exists",
                hint="choose another directory with `-o`, or replace it with `--force`",
            )
        return True

    def environment(self) -> dict[str, str]:
        """The environment of the command: our hook and the settings."""
        env = dict(os.environ)
        path = env.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([str(_HOOK), *([path] if path else [])])
        env[VARIABLE] = self._settings.to_json()
        env["TRACELOOM_HOME"] = str(_HOME)
        env["TRACELOOM_MARKER"] = str(self._notes / "hook")
        # PyTorch's own record of collective calls must hold a whole window (its default is 2,000
        # calls).
        env.setdefault("TORCH_FR_BUFFER_SIZE", "20000")
        return env

    def run(self) -> int:
        """Run the command; its exit code, negative for the signal that ended it.

        Raises:
            UsageError: slug `command-not-found`.
        """
        started = time.time_ns()
        with self._signals() as reached:
            try:
                process = subprocess.Popen(self._command, env=self.environment())
            except OSError as error:
                self._clean()
                raise UsageError(
                    f"`{self._command[0]}` cannot be run: {error.strerror or error}",
                    slug="command-not-found",
                ) from error
            reached(process)
            status = self._status = process.wait()
            writing.wait_for_writers(self._notes)
            self._sampler.stop()
            with contextlib.suppress(OSError, ValueError):  # only the diagnosis suffers
                for path in self._notes.iterdir():
                    self._reached.add(path.name)
                    if path.suffix == ".end":
                        self._ends.append(json.loads(path.read_text(encoding="utf-8")))
            self._finish(
                {
                    "command": self._command,
                    "exit_code": status if status >= 0 else None,
                    "signal": -status if status < 0 else None,
                    "started_ns": started,
                    "ended_ns": time.time_ns(),
                }
            )
        return status

    @contextlib.contextmanager
    def _signals(self) -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
        """Go on after Ctrl-C, which reaches the command by itself; pass SIGTERM on to it, and what
        came early.
        """
        processes: list[subprocess.Popen[bytes]] = []
        early: list[int] = []

        def pass_on(number: int, _: Any) -> None:
            if not processes:
                early.append(number)
            elif number != signal.SIGINT:
                processes[0].send_signal(number)

        def reached(process: subprocess.Popen[bytes]) -> None:
            processes.append(process)
            for number in early:
                process.send_signal(number)

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        # Only signals that somebody handles: one that is ignored stays ignored, for the command
        # too.
        replaced = {
            number: handler
            for number, handler in before.items()
            if handler not in (signal.SIG_IGN, None)
        }
        for number in replaced:
            signal.signal(number, pass_on)
        try:
            yield reached
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)

    def _finish(self, run: dict[str, Any]) -> None:
        """Merge what the ranks wrote, and put it where it belongs."""
        self.recorded = bool(manifest.list_parts(self._place))
        if not self.recorded:
            return
        complete = True
        try:
            manifest.drop_incidental(self._place)
            self._sampler.save(self._place)
            ranks = manifest.merge(self._place, run)["ranks"]
            if self._place != self._directory:
                complete = not any(
                    notice["slug"] == "capture-moved"
                    for rank in ranks
                    for notice in rank["notices"]
                )
            if complete:
                self._described = describe(ranks)
            if complete and self._place != self._directory:
                manifest.replace_capture(self._place, self._directory, self._old, run)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._remarks.append(
                f"the parts of the capture could not be put together: {error} [not-merged]"
            )
            complete, self._described = False, ""
        if not complete and self._place != self._directory:
            self._keep(self._place)

    def _keep(self, made: Path) -> None:
        """Put what is not to replace the earlier capture where it can be found."""
        where = manifest.set_aside_incomplete(made, self._directory)
        sentence = f"the capture in `{self._directory}` stays; the unfinished one is in `{where}`"
        self._remarks.append(f"{sentence} [kept-beside]")

    def _clean(self) -> None:
        """Leave nothing of ours behind but what was recorded, and touch nothing of another
        recording.
        """
        with contextlib.suppress(OSError):  # it holds something: leave it
            if self._lock.held:
                manifest.clear_notes(self._directory)
                self._lock.release()
            (self._directory / writing.NOTES).rmdir()
            if self._made:
                self._directory.rmdir()
        self._until_cleaned.close()

    def die_alike(self, number: int) -> None:
        """End this process by the signal that ended the command, so that the caller sees what it
        would have seen.
        """
        if sys.platform == "win32":
            return
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # ---- what to say at the end

    def summary(self, shown: str) -> list[str]:
        """The closing lines: what was recorded, what it cost, where it is, what to do next."""
        self._clean()
        if not self.recorded:
            slug, reason = self._why_nothing()
            stays = f"; the earlier capture in {shown} stays" if self._old else ""
            return [*self._remarks, f"nothing was recorded: {reason}{stays} [{slug}]"]
        if self._settings.quiet or not self._described:
            return self._remarks
        size = sum(path.stat().st_size for path in self._directory.iterdir() if path.is_file())
        return [
            *self._remarks,
            self._described,
            f"wrote {shown} ({size / 1e6:.1f} MB); next: traceloom report {shown}",
        ]

    def _why_nothing(self) -> tuple[str, str]:
        if any(end["wrote_elsewhere"] for end in self._ends):
            return "capture-moved", f"`{self._directory}` took no data, see above"
        steps = [end["steps"] for end in self._ends if end["used_torch"]]
        if steps and self._settings.by_time:
            return "never-reached", "the run was over before the window began"
        if steps:
            first, _ = self._settings.window
            if max(steps) > first:
                return "recording-lost", "see above"
            made = f"it made {max(steps)} steps" if max(steps) else "it never made a step"
            return "never-reached", f"the run did not reach step {first}: {made}"
        if self._status < 0:
            name = signal.Signals(-self._status).name
            return "ended-unseen", f"{name} ended the command before anything could be written"
        begun = [name for name in self._reached if name.endswith(".torch")]
        unseen = len(begun) - len(self._ends)
        if unseen > 0:
            who = "the process" if len(begun) == 1 else f"{unseen} of {len(begun)} processes"
            return "ended-unseen", (
                f"{who} that imported torch ended without writing: killed (SIGKILL, the system out of memory), "
                "crashed, replaced by another program, or unable to write (then it says above why)"
            )
        if begun and not any(end["began"] for end in self._ends):
            return "no-torch-calls", (
                "torch was imported, but no module was called, no optimizer made a step and no GPU was used; record "
                "operators on the processor of a machine with GPUs by `with traceloom.record(...)` in the code"
            )
        if begun:
            return "no-torch-calls", "torch was imported, but no operator ran"
        if "hook" in self._reached:
            return "no-torch", "no process of the command imported torch"
        return (
            "no-hook",
            (
                "no Python of the command ran our start-up hook: it was started with -E, -I or -S, its environment "
                "was cleared (containers, ssh, sudo), or it is not Python"
            ),
        )


def describe(ranks: list[dict[str, Any]]) -> str:
    """One sentence about what was recorded."""
    windows = [rank["window"] for rank in ranks if rank["window"] is not None]
    words = []
    if windows and windows[0]["step_count"]:
        first, count = windows[0]["first_step"], windows[0]["step_count"]
        steps = f"step {first}" if count == 1 else f"steps {first} to {first + count - 1}"
        table = ranks[0]["steps"]  # of all whole steps of the run, here or in a file of its own
        words.append(
            f"recorded {steps} of {table['rows'] if 'rows' in table else len(table['start_ns'])}"
        )
    elif windows:
        seconds = (windows[0]["end_ns"] - windows[0]["start_ns"]) / 1e9
        words.append(f"recorded {seconds:.1f} s (no whole step)")
    elif any(rank["graph_step"] is not None for rank in ranks):
        words.append("recorded the graph step only")
    else:
        words.append("recorded what was alive when memory ran out, and no step")
    runs = {rank["job"] or rank["name"] for rank in ranks}
    if len(runs) > 1:
        words[0] += f" in {ranks[0]['name']}, the first of {len(runs)} separate runs"
    elif len(ranks) > 1:
        words[0] += f" on {len(ranks)} ranks"
    overhead = ranks[0]["overhead"]
    ratio, low, high = overhead["ratio"], overhead["ratio_low"], overhead["ratio_high"]
    if ratio is not None:
        of = "the CPU time of " if overhead["ratio_of"] == "cpu" else ""
        spread = f" ({low:.2f} to {high:.2f})" if f"{low:.2f}" != f"{high:.2f}" else ""
        words.append(f"a recorded step took {ratio:.2f} x{spread} {of}an unrecorded one")
    graph = ranks[0]["graph_step"]
    if graph is not None:
        ratio = overhead["graph_step_ratio"]
        words.append(
            f"graph step {graph['step']}" + (f" took {ratio:.2f} x" if ratio is not None else "")
        )
    return "; ".join(words)
