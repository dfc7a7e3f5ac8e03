"""When PyTorch's observers may be stopped; giving way to the user's profilers.

PyTorch writes the end of an operator or annotation into memory of the recorder under which it
began. That memory is freed when the recorder stops, yet the end is still written if another
recorder *of the same kind* runs by then. There are two kinds: one records every thread, the other
one thread and what works for it; each ignores the other's ends.

So before a recorder of a kind begins again, nothing that began under an earlier one may be open on
any thread:

- annotations that Python holds (`record_function`, ours) are ended here; their own end does nothing any more;
- what C++ holds cannot be ended, only noticed: a thread inside an operator does not move, a thread inside a backward
  pass or a compiled region has frames of PyTorch on its stack, a collective that is under way has a
  `Work`.

Two profilers at once lose events silently (Kineto) or crash the process at its end (the legacy
one), so ours stops before one of theirs starts, and goes on when the last of theirs has ended. A
profile of theirs with Python stacks would show every function of ours that runs meanwhile, or that
stands around its beginning: none does.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.profiler

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep  # noqa: PTH100, PTH120
_SAFE_PATHS = (
    "_compile.py",
    "amp/",
    "autograd/profiler.py",
    "autograd/profiler_legacy.py",
    "cuda/amp/",
    "distributed/optim/",
    "multiprocessing/",
    "nn/",
    "optim/",
    "profiler/",
    "utils/_contextlib.py",
    "utils/data/",
)
_SAFE_FILES = tuple(_TORCH + part.replace("/", os.sep) for part in _SAFE_PATHS)
"""Code of PyTorch that calls Python while no operator or annotation of C++ is open around it."""

# Functions of the standard library in which a thread waits; by their file's last parts.
_WAIT_FUNCTIONS = {
    ("threading.py", "wait"),
    ("threading.py", "_wait_for_tstate_lock"),
    ("threading.py", "join"),
    ("queue.py", "get"),
    ("queue.py", "put"),
    ("thread.py", "_worker"),
    ("selectors.py", "select"),
    ("connection.py", "wait"),
    ("connection.py", "_recv"),
    ("subprocess.py", "_try_wait"),
}
# System calls in which a thread waits for time, a file or a process, and never for an operator.
_IDLE_CALLS = {
    "x86_64": {0, 7, 23, 35, 43, 45, 47, 61, 230, 232, 247, 270, 271, 281, 288},
    "aarch64": {22, 63, 72, 73, 95, 101, 115, 202, 207, 212, 242, 260},
}.get(platform.machine(), set())

PATIENCE_SECONDS = 0.02
"""How long the program waits for its other threads to leave an operator; then it goes on as it is.
"""
MAX_SETTLE_SECONDS = 1.0
_PAUSE_SECONDS = 0.0005
_RAN_NS = 500_000

_left: dict[bool, list[_Open]] = {True: [], False: []}
_works: weakref.WeakSet[Any] = weakref.WeakSet()
_ran: set[bool] = set()
_here = threading.local()


def track_collective(work: Any) -> None:
    """A collective was started from Python; it is open until it is complete."""
    if hasattr(work, "is_completed"):
        _works.add(work)


def is_safe_to_start(*, every_thread: bool) -> bool:
    """Whether a recorder of this kind does no harm if it begins now. Ends the annotations that
    could.

    The recorder of one thread lives in what PyTorch keeps per thread, and a backward pass puts that
    back as it was.
    """
    if not every_thread and (
        find_outermost_torch_frame() is not None or torch._C._current_graph_task_id() != -1
    ):
        return False
    left = _left[every_thread] = _filter_open(_left[every_thread])
    if every_thread in _ran:
        end_annotations()
    return not left


def remember_open_work(*, every_thread: bool) -> None:
    """A recorder of this kind is about to stop: remember what is open beneath it."""
    _ran.add(every_thread)
    _left[every_thread] += _wait_for(_open(every_thread=every_thread))


def is_safe_to_stop(*, every_thread: bool) -> bool:
    """Whether a recorder of this kind could stop here and another one begin at once."""
    return not _wait_for(_open(every_thread=every_thread))


def wait_for_other_threads() -> None:
    """Wait until each other thread has left the few instructions in which it uses the recorder
    itself.

    To be called when no new operator is recorded any more. A thread has left them when it sleeps,
    or when it has run for half a millisecond; one that waits for a processor may be in them.
    Without `/proc` a fixed time must do.
    """
    tasks = "/proc/self/task"
    try:
        others = {task: run_ns(f"{tasks}/{task}") for task in os.listdir(tasks)}  # noqa: PTH208
    except OSError:
        time.sleep(0.005)
        return
    others.pop(str(threading.get_native_id()), None)
    deadline = time.monotonic() + MAX_SETTLE_SECONDS
    while time.monotonic() < deadline:
        others = {
            task: before
            for task, before in others.items()
            if _is_possibly_inside(f"{tasks}/{task}", before)
        }
        if not others:
            return
        time.sleep(_PAUSE_SECONDS)


def find_outermost_torch_frame() -> FrameType | None:
    """The outermost frame of this thread that is PyTorch's and may stand around open operators;
    None without one.
    """
    stack = _list_frames(_get_frames().get(threading.get_ident()))
    return next((frame for frame in reversed(stack) if _is_inside(frame)), None)


@contextlib.contextmanager
def ignore_frame(frame: FrameType | None) -> Iterator[None]:
    """For the block this thread is taken to have left a frame that is about to return; None for
    none.
    """
    _here.left = frame
    try:
        yield
    finally:
        _here.left = None


def end_annotations() -> None:
    """End every open annotation, the innermost first.

    With no recorder running this writes nothing.
    """
    from traceloom.capture.kineto import annotate

    kinds = (torch.autograd.profiler.record_function, annotate)
    for annotation in reversed(
        [annotation for annotation in gc.get_objects() if type(annotation) in kinds]
    ):
        if type(annotation) is annotate:
            annotation.__exit__()
        elif annotation.record is not None:
            with contextlib.suppress(RuntimeError), torch._C.DisableTorchFunctionSubclass():
                torch.ops.profiler._record_function_exit._RecordFunction(annotation.record)


# ---- what C++ holds


class _InFrame(NamedTuple):
    """A frame of PyTorch is on the stack of a thread."""

    thread: int
    frame: int

    def is_open(self, frames: dict[int, FrameType]) -> bool:
        return any(id(frame) == self.frame for frame in _list_frames(frames.get(self.thread)))


class _AtCall(NamedTuple):
    """A thread has not moved: it may be inside an operator."""

    thread: int
    frame: int
    instruction: int

    def is_open(self, frames: dict[int, FrameType]) -> bool:
        top = frames.get(self.thread)
        return top is not None and id(top) == self.frame and top.f_lasti == self.instruction


class _Working(NamedTuple):
    """A collective is not complete."""

    work: weakref.ref[Any]

    def is_open(self, _: dict[int, FrameType]) -> bool:
        work = self.work()
        try:
            return work is not None and not work.is_completed()
        except RuntimeError:  # it has failed, and is over
            return False


def _list_frames(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


_Open = _InFrame | _AtCall | _Working
"""What was open once; it tells whether it still is, by the frames that all threads are in now."""


def _open(*, every_thread: bool) -> list[_Open]:
    own_ident = threading.get_ident()
    frames = _get_frames()
    open_: list[_Open] = [
        _InFrame(thread, id(frame))
        for thread, top in frames.items()
        if every_thread or thread == own_ident
        for frame in _list_frames(top)
        if _is_inside(frame)
    ]
    if not every_thread:
        return open_
    threads = {thread.ident: thread for thread in threading.enumerate()}
    for ident, top in frames.items():
        thread = threads.get(ident)
        is_own = thread is not None and thread.name.startswith("traceloom-")
        if (
            ident != own_ident
            and not is_own
            and not _is_waiting(top, thread.native_id if thread is not None else None)
        ):
            open_.append(_AtCall(ident, id(top), top.f_lasti))
    open_ += [_Working(weakref.ref(work)) for work in list(_works)]
    return open_


def _filter_open(open_: list[_Open]) -> list[_Open]:
    frames = _get_frames() if open_ else {}
    return [entry for entry in open_ if entry.is_open(frames)]


def _wait_for(open_: list[_Open]) -> list[_Open]:
    """Wait a moment for these to end; returns what is still open.

    What this thread is in itself cannot end here.
    """
    own_ident = threading.get_ident()
    deadline = time.monotonic() + PATIENCE_SECONDS
    open_ = _filter_open(open_)
    while open_ and time.monotonic() < deadline:
        if all(isinstance(entry, _InFrame) and entry.thread == own_ident for entry in open_):
            break
        time.sleep(_PAUSE_SECONDS)
        open_ = _filter_open(open_)
    return open_


def _get_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, without those that this thread has `left`."""
    frames = dict(sys._current_frames())
    frame = getattr(_here, "left", None)
    if frame is not None:
        outer = frame.f_back
        frames.pop(threading.get_ident(), None)
        if outer is not None:
            frames[threading.get_ident()] = outer
    return frames


def _is_inside(frame: FrameType) -> bool:
    code = frame.f_code
    if not code.co_filename.startswith(_TORCH) or code.co_filename.startswith(_SAFE_FILES):
        return False
    # What only keeps the compiler out opens nothing.
    return not getattr(code, "co_qualname", "").startswith("DisableContext.")


def _is_waiting(top: FrameType, native: int | None) -> bool:
    """Whether a thread waits for something that is no operator."""
    if (os.path.basename(top.f_code.co_filename), top.f_code.co_name) in _WAIT_FUNCTIONS:  # noqa: PTH119
        return True
    if native is None or not _IDLE_CALLS:
        return False
    try:
        with open(f"/proc/self/task/{native}/syscall", encoding="ascii") as file:  # noqa: PTH123
            number = file.read().split()[:1]
    except OSError:
        return False
    return bool(number) and number[0].isdigit() and int(number[0]) in _IDLE_CALLS


def run_ns(task: str) -> int | None:
    """How long a thread has run; None where the system does not tell."""
    try:
        with open(f"{task}/schedstat", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _is_possibly_inside(task: str, before: int | None) -> bool:
    try:
        with open(f"{task}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False  # the thread has ended
    if state not in "RD":
        return False
    now = run_ns(task)
    return before is None or now is None or now - before < _RAN_NS


_ours = threading.local()


def is_own_recorder_active() -> bool:
    """Whether this thread is starting or stopping our own recorder just now."""
    return getattr(_ours, "active", False)


# Class, methods that begin, methods that end. The first one is over when PyTorch calls
# `_run_on_profiler_stop`.
_PROFILERS = (
    ("torch.autograd.profiler", "profile", ("_prepare_trace",), ()),
    ("torch.autograd.profiler", "emit_itt", ("__enter__",), ("__exit__",)),
    ("torch.autograd.profiler", "emit_nvtx", ("__enter__",), ("__exit__",)),
    ("torch.autograd.profiler_legacy", "profile", ("__enter__",), ("__exit__",)),
)


class ProfilerHooks:
    """Watches the user's profilers. `install` once; `remove` restores every method.

    Args:
        began: Called before one starts while none runs, with whether it records Python stacks.
        ended: Called when the last one has ended.
        stepped: Called before a step of theirs, where it records no stacks.
        after_step: Called after it.
    """

    def __init__(
        self,
        began: Callable[[bool], None],
        ended: Callable[[], None],
        stepped: Callable[[], None],
        after_step: Callable[[], None],
    ) -> None:
        self._began, self._ended, self._stepped, self._after_step = (
            began,
            ended,
            stepped,
            after_step,
        )
        self._active: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.RLock()
        self._restore: list[tuple[Any, str, Any]] = []
        self._stacked: list[weakref.ref[Any]] = []
        self._steps: tuple[Any, Any] | None = None  # `profile.step` without and with our wrapper

    def install(self) -> None:
        """Wrap every profiler of PyTorch that there is."""
        for module_name, class_name, begins, ends in _PROFILERS:
            kind = getattr(importlib.import_module(module_name), class_name, None)
            for name in begins:
                self._replace(kind, name, self._beginning)
            for name in ends:
                self._replace(kind, name, self._ending)
        self._replace(torch.autograd.profiler, "_run_on_profiler_stop", self._stopping)
        self._replace(torch.profiler.profile, "__init__", self._making)
        self._replace(torch.profiler.profile, "step", self._stepping)
        self._steps = (self._restore[-1][2], torch.profiler.profile.step)

    def remove(self) -> None:
        """Put the original methods back."""
        for kind, name, original in reversed(self._restore):
            setattr(kind, name, original)
        self._restore.clear()
        self._steps = None

    def _replace(self, kind: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = vars(kind).get(name) if kind is not None else None
        if original is not None:
            self._restore.append((kind, name, original))
            setattr(kind, name, functools.wraps(original)(wrap(original)))

    def _beginning(self, original: Any) -> Any:
        def begin(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_own_recorder_active() and getattr(profiler, "enabled", True):
                identity = id(profiler)
                with self._lock:
                    first = not self._active
                    # A profiler that was prepared, never started and then dropped has ended as
                    # well.
                    self._active[identity] = weakref.ref(profiler, lambda _: self._leave(identity))
                if first:
                    self._began(bool(getattr(profiler, "with_stack", False)))
            return original(profiler, *args, **kwargs)

        return begin

    def _ending(self, original: Any) -> Any:
        def end(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(profiler, *args, **kwargs)
            finally:
                if not is_own_recorder_active():
                    self._leave(id(profiler))

        return end

    def _stopping(self, original: Any) -> Any:
        def stopped() -> Any:
            profiler = sys._getframe(1).f_locals.get("self")
            try:
                return original()
            finally:
                if not is_own_recorder_active() and profiler is not None:
                    options = getattr(profiler, "experimental_config", None)
                    remember_open_work(
                        every_thread=bool(getattr(options, "profile_all_threads", False))
                    )
                    self._leave(id(profiler))

        return stopped

    def _making(self, original: Any) -> Any:
        def make(profiler: Any, *args: Any, **kwargs: Any) -> None:
            original(profiler, *args, **kwargs)
            if getattr(profiler, "with_stack", False):
                with self._lock:
                    self._stacked.append(weakref.ref(profiler, self._gone))
                    self._count_steps(wrapped=False)

        return make

    def _gone(self, reference: weakref.ref[Any]) -> None:
        with self._lock:
            self._stacked.remove(reference)
            self._count_steps(wrapped=not self._stacked)

    def _count_steps(self, *, wrapped: bool) -> None:
        """Steps of a profiler begin and end its windows, so that a wrapper around them would be in
        its stacks.
        """
        if self._steps is not None and wrapped != (torch.profiler.profile.step is self._steps[1]):
            torch.profiler.profile.step = self._steps[wrapped]

    def _stepping(self, original: Any) -> Any:
        def step(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            self._stepped()
            try:
                return original(profiler, *args, **kwargs)
            finally:
                self._after_step()

        return step

    def _leave(self, identity: int) -> None:
        with self._lock:
            was_active = self._active.pop(identity, None) is not None
            last = was_active and not self._active
        if last:
            self._ended()
