"""Starting the command that is recorded, waiting for it, and saying what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import traceloom
from traceloom.capture import manifest, writing
from traceloom.capture.settings import VARIABLE, Settings
from traceloom.errors import OutputError, UsageError

_HOME = Path(traceloom.__file__).resolve().parent
_HOOK = _HOME / "capture" / "hook"


class Launch:
    """One recorded run of a command."""

    def __init__(self, settings: Settings, command: list[str], *, force: bool) -> None:
        self._settings = settings
        self._command = command
        self._directory = Path(settings.directory)
        self._made = not self._directory.exists()
        self._notes = self._directory / writing.NOTES
        self._reached: set[str] = set()
        self._ends: list[dict[str, Any]] = []
        self._prepare(force=force)

    def _prepare(self, *, force: bool) -> None:
        directory = self._directory
        try:
            if (directory / manifest.NAME).exists() or (directory.is_dir() and manifest.parts(directory)):
                if not force:
                    raise OutputError(
                        f"`{directory}` holds a capture already",
                        slug="capture-exists",
                        hint="choose another directory with `-o`, or replace it with `--force`",
                    )
                manifest.remove(directory)
            self._notes.mkdir(parents=True, exist_ok=True)
            manifest.clear_notes(directory)
            self._notes.mkdir()
        except OSError as error:
            raise OutputError(
                f"`{directory}` cannot be written: {error.strerror or error}",
                slug="not-writable",
                hint="choose another directory with `-o`",
            ) from error

    def environment(self) -> dict[str, str]:
        """The environment of the command: our hook, the settings, and silence for libkineto."""
        env = dict(os.environ)
        path = env.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([str(_HOOK), *([path] if path else [])])
        env[VARIABLE] = self._settings.to_json()
        env["TRACELOOM_HOME"] = str(_HOME)
        env["TRACELOOM_MARKER"] = str(self._notes / "hook")
        env.setdefault("KINETO_LOG_LEVEL", "6")
        # PyTorch's own record of collective calls must hold a whole window (its default is 2,000 calls).
        env.setdefault("TORCH_FR_BUFFER_SIZE", "20000")
        return env

    def run(self) -> int:
        """Run the command; its exit code, negative for the signal that ended it.

        Raises:
            UsageError: slug `command-not-found`.
        """
        started = time.time_ns()
        try:
            process = subprocess.Popen(self._command, env=self.environment())
        except OSError as error:
            self._clean()
            raise UsageError(
                f"`{self._command[0]}` cannot be run: {error.strerror or error}", slug="command-not-found"
            ) from error
        status = self._wait(process)
        self._collect_notes()
        if manifest.parts(self._directory):
            run = {
                "command": self._command,
                "exit_code": status if status >= 0 else None,
                "signal": -status if status < 0 else None,
                "started_ns": started,
                "ended_ns": time.time_ns(),
            }
            # On failure the parts are there, and `summary` tells what is wrong with the directory.
            with contextlib.suppress(OSError):
                manifest.merge(self._directory, run)
        return status

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait through Ctrl-C, which reaches the command by itself; pass SIGTERM on to it."""

        def pass_on(number: int, _: Any) -> None:
            process.send_signal(number)

        previous = signal.signal(signal.SIGTERM, pass_on)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, previous)
            signal.signal(signal.SIGINT, interrupt)

    def _collect_notes(self) -> None:
        try:
            for path in self._notes.iterdir():
                self._reached.add(path.name)
                if path.suffix == ".end":
                    self._ends.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return  # only the diagnosis suffers

    def _clean(self) -> None:
        try:
            manifest.clear_notes(self._directory)
            if self._made:
                self._directory.rmdir()
        except OSError:
            return  # it holds something: leave it

    def die_alike(self, number: int) -> None:
        """End this process by the signal that ended the command, so that the caller sees what it would have seen."""
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
        try:
            capture = json.loads((self._directory / manifest.NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            capture = {"ranks": []}
        ranks = capture["ranks"]
        self._clean()
        if not ranks:
            slug, reason = self._why_nothing()
            return [f"nothing was recorded: {reason} [{slug}]"]
        if self._settings.quiet:
            return []
        size = sum(path.stat().st_size for path in self._directory.iterdir() if path.is_file())
        return [
            describe(ranks),
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
        if "torch" in self._reached:
            return "no-torch-calls", "torch was imported, but the process used it for nothing, or was killed"
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
        what = f"step {first}" if count == 1 else f"steps {first} to {first + count - 1}"
        words.append(f"recorded {what} of {len_steps(ranks[0])}")
    elif windows:
        seconds = (windows[0]["end_ns"] - windows[0]["start_ns"]) / 1e9
        words.append(f"recorded {seconds:.1f} s (no whole step)")
    else:
        words.append("recorded the graph step only")
    words[0] += f" on {len(ranks)} ranks" if len(ranks) > 1 else ""
    ratio = ranks[0]["overhead"]["ratio"]
    if ratio is not None:
        words.append(f"a recorded step took {ratio:.2f} x an unrecorded one")
    graph = ranks[0]["graph_step"]
    if graph is not None:
        ratio = ranks[0]["overhead"]["graph_step_ratio"]
        words.append(f"graph step {graph['step']}" + (f" took {ratio:.2f} x" if ratio is not None else ""))
    return "; ".join(words)


def len_steps(rank: dict[str, Any]) -> int:
    """Number of whole steps of a rank's run."""
    steps = rank["steps"]
    return int(steps["rows"]) if "rows" in steps else len(steps["start_ns"])
