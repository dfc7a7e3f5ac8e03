"""Begins to record this process: called by the start-up hook when torch has been imported, or by
`record`.
"""

from __future__ import annotations

import os
from typing import Any

from traceloom.capture.settings import VARIABLE, Settings, parse_settings, print_once
from traceloom.errors import InputError

_recorder: Any = None
_had_session = False
MINIMUM_TORCH = (2, 8)


def get_recorder() -> Any:
    return _recorder


def begin() -> None:
    """Begin as the environment says. Launchers are left alone."""
    from traceloom.capture import exits

    text = os.environ.get(VARIABLE)
    if not text or _recorder is not None or exits.is_launcher() or not is_torch_supported():
        return
    touch_marker_file(f"{os.getpid()}.torch")
    try:
        settings = parse_settings(text)
    except (
        InputError
    ) as error:  # this process has imported another Traceloom than the one that records
        print_once(error.slug, f"nothing is recorded: {error.message}")
        return
    attach(settings)


def is_torch_supported() -> bool:
    """Whether this torch can be recorded without harm; says so where it cannot."""
    import torch

    numbers = tuple(
        int(word) for word in torch.__version__.split("+")[0].split(".")[:2] if word.isdigit()
    )
    why = "" if numbers >= MINIMUM_TORCH else "torch 2.8 or newer is needed"
    if not why:
        from traceloom.capture.session import find_missing_part

        missing = find_missing_part()
        why = f"it lacks `{missing}`" if missing else ""
    if not why:
        return True
    print_once(
        "unsupported-torch",
        f"nothing is recorded: {why}, this is {torch.__version__}; record with torch.profiler in "
        "the program, whose traces all other commands read",
    )
    return False


def touch_marker_file(name: str) -> None:
    """Leave a trace for the diagnosis at the end: how far a process came."""
    marker = os.environ.get("TRACELOOM_MARKER")
    if marker:
        try:
            os.close(os.open(os.path.join(os.path.dirname(marker), name), os.O_CREAT | os.O_WRONLY))  # noqa: PTH118, PTH120
        except OSError:
            return  # only the diagnosis would have used it


def attach(settings: Settings) -> Any:
    """Records this process with these settings; gives the recorder."""
    global _recorder
    from traceloom.capture import distributed, in_code
    from traceloom.capture.recorder import Recorder
    from traceloom.capture.session import exclude_from_compile

    exclude_from_compile(in_code.step)
    distributed.mark_children()
    recorder = Recorder(settings)
    recorder.attach()
    _recorder = recorder
    recorder.begin()
    return recorder


def detach(recorder: Any) -> None:
    """Takes a recorder's hooks out of the process."""
    global _recorder, _had_session
    recorder.detach()
    _had_session = _had_session or recorder.has_session
    if _recorder is recorder:
        _recorder = None


def has_recorded_before() -> bool:
    """Whether a recording that is over has had the one session of this process."""
    return _had_session


def handle_fork(parent: Any) -> None:
    """In a forked child: it never continues the parent's recording.

    The child may be a rank of its own (`torch.multiprocessing` with fork), so it is attached anew
    where its parent has had no session: a process gets one, and a fork inherits it.
    """
    global _recorder
    parent.forked()
    _recorder = None
    if parent.has_session:
        return  # its hooks stay: a profiler of the fork must not meet the session that it inherits
    parent.hooks.remove()
    if VARIABLE in os.environ:
        attach(parent.settings)
