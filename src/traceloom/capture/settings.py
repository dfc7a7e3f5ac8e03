"""Options of recording; what it says to the user.

The settings travel to the recorded processes as JSON in one environment variable,
`TRACELOOM_RECORD`.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import asdict, dataclass
from typing import Any

from traceloom.errors import UsageError, other_version
from traceloom.system.sanitize import sanitize

VARIABLE = "TRACELOOM_RECORD"
VERSION = 1  # of what it holds

WARM_UP_STEPS = 3
WINDOW_STEPS = 5
EARLY_CAP_SECONDS = 60.0
DEFAULT_DURATION_SECONDS = 10.0


@dataclass(frozen=True)
class Settings:
    """One recording. Times are seconds, steps are numbered from 0 over the whole run."""

    directory: str
    first_step: int | None = (
        None  # None: the window is not chosen by steps (or it is the default one)
    )
    step_count: int | None = None
    after: float | None = None  # seconds after torch was imported
    duration: float | None = None
    stacks: bool = False
    memory: bool = False
    module_names: str = (
        "path"  # of the scopes that modules open by themselves with `memory`: path, class or off
    )
    graph_step: bool = False  # one more step with PyTorch's execution trace observer
    max_memory: int | None = None  # bytes for what is recorded; None: by what is free
    sources: bool = True  # of compiled kernels, with the graph step
    quiet: bool = False
    whole: bool = False  # in-code recording without steps: from `with` to the end of the block
    early_cap: float = EARLY_CAP_SECONDS
    replay_of: str = (
        ""  # what `traceloom replay --record` runs again; empty: the program itself is recorded
    )
    replaces: str = ""  # the directory whose capture this one replaces when it is whole; it lies elsewhere until then

    @property
    def shown(self) -> str:
        """The directory in which the capture is in the end."""
        return self.replaces or self.directory

    @property
    def by_time(self) -> bool:
        """Whether the window is chosen by the clock."""
        return self.after is not None or self.duration is not None

    @property
    def names_modules(self) -> bool:
        """Whether module calls open scopes by themselves."""
        return self.memory and self.module_names != "off"

    @property
    def early(self) -> bool:
        """Whether everything from the first torch call is kept until the window begins."""
        return self.first_step is None and not self.by_time and not self.whole

    @property
    def window(self) -> tuple[int, int]:
        """First step of the window and number of its steps."""
        first = WARM_UP_STEPS if self.first_step is None else self.first_step
        return first, WINDOW_STEPS if self.step_count is None else self.step_count

    @property
    def from_the_start(self) -> bool:
        """Whether the early part is kept as the beginning of the window: allocations are only whole
        from the start.

        Not with stacks: the first step imports half of PyTorch, a million frames that cost minutes
        and 400 MB.
        """
        return self.memory and self.early and not self.stacks

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """The settings as they are written into `capture.json`, without the directory."""
        first, count = self.window
        by_steps = not (self.by_time or self.whole)
        return {
            "first_step": first if by_steps else None,
            "step_count": count if by_steps else None,
            "after_seconds": self.after,
            "duration_seconds": self.duration,
            "stacks": self.stacks,
            "memory": self.memory,
            "module_names": self.module_names if self.memory else None,
            "shapes": True,
            "graph_step": self.graph_step,
            "sources": self.sources,
        }


def parse_settings(text: str) -> Settings:
    """Read what `Settings.to_json` wrote.

    Raises:
        InputError: `other-version`: by a Traceloom that writes them in another version.
    """
    values = json.loads(text)
    version = values.pop("version", None)
    if version != VERSION:
        raise other_version("request to record", version, VERSION, VARIABLE)
    return Settings(**values)


def parse_steps(value: str | int | range | None) -> tuple[int | None, int | None]:
    """Read a choice of steps: `20..25` (20 to 24), `5` (five steps after the warm-up), or a range.

    Returns:
        First step (None: after the usual warm-up) and number of steps.

    Raises:
        UsageError: slug `bad-steps`.
    """
    if value is None:
        return None, None
    first = end = -1
    if isinstance(value, range):
        if value.step == 1:
            first, end = value.start, value.stop
    elif isinstance(value, int) and not isinstance(value, bool):
        first, end = WARM_UP_STEPS, WARM_UP_STEPS + value
    elif isinstance(value, str) and (
        match := re.fullmatch(r"\s*(?:(\d{1,18})\s*\.\.\s*)?(\d{1,18})\s*", value)
    ):
        first, end = (
            (int(match[1]), int(match[2]))
            if match[1]
            else (WARM_UP_STEPS, WARM_UP_STEPS + int(match[2]))
        )
    if first < 0 or end <= first:
        raise UsageError(
            f"`{value}` is no choice of steps",
            slug="bad-steps",
            hint="give `20..25` for the steps 20 to 24, or `5` for five steps after the warm-up",
        )
    return first, end - first


def check_times(after: float | None, duration: float | None, steps: object) -> None:
    """Refuse a time window that cannot be.

    Raises:
        UsageError: slug `bad-time`.
    """
    if steps is not None and (after is not None or duration is not None):
        raise UsageError(
            "steps and seconds cannot both choose the window",
            slug="bad-time",
            hint="give either `--steps` or `--after` and `--duration`",
        )
    for name, value in (("after", after), ("duration", duration)):
        if value is not None and not 0 <= value < 1e9:
            raise UsageError(
                f"`{name}` must be a number of seconds from 0 on, got {value}", slug="bad-time"
            )
    if duration == 0:
        raise UsageError("a window of 0 seconds holds nothing", slug="bad-time")


_said: set[str] = set()


def print_message(text: str) -> None:
    """Print one line; a closed or missing standard error must not hurt the user's program."""
    with contextlib.suppress(Exception):
        print(f"traceloom: {sanitize(text)}", file=sys.stderr, flush=True)  # noqa: T201


def print_once(slug: str, text: str) -> None:
    """Print a line at most once in this process."""
    if slug not in _said:
        _said.add(slug)
        print_message(f"{text} [{slug}]")
