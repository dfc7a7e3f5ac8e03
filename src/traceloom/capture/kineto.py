"""Runs Kineto and the host observer; hides their log lines; keeps the compiler out.

Their lines come from C++ straight to descriptor 2. While we start or stop them, that descriptor
leads to a temporary file; what is not theirs is passed on at once afterwards.

A recorder of every thread can be stopped by any of them. The state of the other kind belongs to the
thread that starts it, and only that thread may stop it (another one would crash).
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch._C._profiler import _ExperimentalConfig, _remove_execution_trace_observer
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, supported_activities
from torch.profiler.profiler import _KinetoProfile

from traceloom.capture import observer_safety
from traceloom.capture.observer_safety import _ours
from traceloom.capture.settings import Settings

_F = TypeVar("_F", bound=Callable[..., Any])
_frames: Any = torch._C._dynamo.eval_frame
# Older versions can skip a frame, but not what it calls; there tracing is switched off and on
# around our work.
pause: Callable[[None], Any] | None = (
    None if hasattr(_frames, "set_code_exec_strategy") else _frames.set_eval_frame
)


def exclude_from_compile(function: _F) -> _F:
    """Let torch.compile call this function as it is, without importing the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # never inlined into compiled code
    return exclude_from_tracing(function)


def exclude_from_tracing(function: _F) -> _F:
    """Let the frame of this function, and what it calls, run in plain Python."""
    if pause is None:
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    else:
        _frames.skip_code(function.__code__)
    return function


_LOG_LINE = re.compile(
    rb"^(USDT:|STAGE:|INFO:|WARNING:|ERROR:|\w* ?\[?[\w-]*.{0,80})"
    rb".*(ActivityProfiler|SyncActivityProfilerHandler|execution_trace_observer|Execution ?Trace ?Observer|"
    rb"Kineto|kineto|CuptiActivity|profiler_start|profiler_stop|Memory block of unknown size was allocated before|"
    rb"External init callback must run in same thread|DeviceProperties\.cpp)"
)


@contextlib.contextmanager
def hide_log_lines() -> Iterator[None]:
    """Run a block in which libkineto's and the observer's lines do not reach standard error."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, AttributeError, ValueError):
        yield  # no standard error: nothing to keep from anyone
        return
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, kept)
        try:
            lines = stack.enter_context(tempfile.TemporaryFile())
        except OSError:
            yield  # nowhere to collect the lines: let them through
            return
        os.dup2(lines.fileno(), 2)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, AttributeError, ValueError):
                sys.stderr.flush()
            os.dup2(kept, 2)
            lines.seek(0)
            others = b"".join(line for line in lines if not _LOG_LINE.match(line))
            if others:
                with contextlib.suppress(OSError):
                    os.write(2, others)


_OPTIONS = (
    _ExperimentalConfig.__init__.__doc__ or ""
)  # those that this PyTorch has, as `name: type`


class _OwnBlock:
    """Marks a block as ours and hides what C++ has to say about it."""

    def __enter__(self) -> None:
        self._hidden = hide_log_lines()
        self._hidden.__enter__()
        _ours.active = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        _ours.active = False
        self._hidden.__exit__(kind, error, where)


class OtherThreadError(RuntimeError):
    """Kineto runs on another thread."""


class _Profile(_KinetoProfile):  # type: ignore[misc]
    """PyTorch's profiler without its import of torch._inductor, which takes seconds."""

    def prepare_trace(self) -> None:
        compiler = sys.modules.get("torch._inductor.config")
        self.has_cudagraphs = compiler is not None and bool(compiler.triton.cudagraphs)
        self.profiler = torch.autograd.profiler.profile(
            use_cpu=True,
            use_device=self.use_device,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            use_kineto=True,
            experimental_config=self.experimental_config,
        )
        self.profiler._prepare_trace()

    def start_trace(self) -> None:
        if "has_cudagraphs" in _KinetoProfile.start_trace.__code__.co_names:
            super().start_trace()
            return
        # Older versions ask for the compiler's settings here, and import it for that, within the
        # recording.
        self.profiler._start_trace()
        for option in ("profile_memory", "with_stack", "record_shapes"):
            if getattr(self, option):
                self.add_metadata_json(option, "1")
        if info := self._get_distributed_info():
            self.add_metadata_json("distributedInfo", json.dumps(info, default=str))
        if self.has_cudagraphs:  # CUPTI must not be torn down beside CUDA graphs
            os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "1"
            os.environ["TEARDOWN_CUPTI"] = "0"


class Kineto:
    """One window of Kineto: `start`, `stop`, then `save`, once.

    Args:
        settings: What to record.
        with_observer: For the graph step: shapes, and nothing that costs more.
        every_thread: Record all threads, and let any of them stop it; see `kinds`.
    """

    def __init__(
        self, settings: Settings, *, every_thread: bool, with_observer: bool = False
    ) -> None:
        # The processor, and the accelerators in use: asking for another one would make a context on
        # it.
        accelerators = ((ProfilerActivity.CUDA, torch.cuda), (ProfilerActivity.XPU, torch.xpu))
        idle = {activity for activity, backend in accelerators if not backend.is_initialized()}
        wanted = {
            "trace_only": not settings.stacks,
            "profile_all_threads": every_thread,
            # Which stream waits for which event of which other one is in no other record.
            "enable_cuda_sync_events": ProfilerActivity.CUDA not in idle,
        }
        options: dict[str, Any] = {
            name: True for name, on in wanted.items() if on and f"{name}:" in _OPTIONS
        }
        self.every_thread = every_thread
        self._profile = _Profile(
            activities=[activity for activity in supported_activities() if activity not in idle],
            record_shapes=bool(settings.shapes) or with_observer,
            profile_memory=settings.memory and not with_observer,
            with_stack=settings.stacks and not with_observer,
            experimental_config=_ExperimentalConfig(**options),
        )
        self._memory = settings.memory
        self._told_of_job = False
        self.thread = 0

    def start(self) -> None:
        """Record this thread, and the threads that work for it, from now on."""
        with _OwnBlock():
            # PyTorch's line about a block from before the window comes with the first one that is
            # freed: be the first.
            block = torch.empty(1) if self._memory else None
            self._profile.prepare_trace()
            self._profile.start_trace()
            del block
        self._told_of_job = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.thread = threading.get_ident()

    def records_here(self) -> bool:
        """Whether this thread is recorded."""
        return self.every_thread or threading.get_ident() == self.thread

    def stop(self) -> None:
        """End the window.

        Raises:
            OtherThreadError: This is not the thread that started it.
        """
        if not self.records_here():
            raise OtherThreadError
        with _OwnBlock():
            if self.every_thread:
                # Other threads may be at work; none of them may just be writing into what is freed
                # now.
                torch._C._autograd._toggle_collection_dynamic(False, {ProfilerActivity.CPU})
                observer_safety.wait_for_other_threads()
            observer_safety.remember_open_work(every_thread=self.every_thread)
            if not self._told_of_job:
                # Without this the trace of a window that began before init_process_group would have
                # no rank.
                info = self._profile._get_distributed_info()
                if info:
                    self._profile.add_metadata_json(
                        "distributedInfo", json.dumps(info, default=str)
                    )
            self._profile.stop_trace()

    def save(self, path: Path) -> None:
        """Write the trace as plain JSON.

        Raises:
            OSError: It could not be written whole.
        """
        inner = self._profile.profiler
        assert inner is not None, "saved before it was started"
        with _OwnBlock():
            inner.kineto_results.save(str(path))
        require_whole(path)


def require_whole(path: Path) -> None:
    """Check that a JSON object was written to its end: PyTorch's writers do not notice a full disk.

    Raises:
        OSError: The file is missing, empty or cut.
    """
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        file.seek(max(0, size - 64))
        tail = file.read().rstrip()
    if not tail.endswith(b"}"):
        raise OSError(28, os.strerror(28), str(path))


def list_recorder_kinds(settings: Settings) -> tuple[bool, ...]:
    """The kinds of recorder that this PyTorch has for these settings, the better first: of every
    thread, or of one.

    Allocations reach only a recorder of one thread.
    """
    able = "profile_all_threads:" in _OPTIONS and hasattr(
        torch._C._autograd, "_toggle_collection_dynamic"
    )
    return (True, False) if able and not settings.memory else (False,)


class _Observer(ExecutionTraceObserver):  # type: ignore[misc]
    """PyTorch's observer without its copies of Triton's kernels, for which older versions import
    the compiler.
    """

    _registered: bool

    def unregister_callback(self) -> None:
        if self._registered:
            self.stop()
            _remove_execution_trace_observer()
            self._registered = False


class GraphStepRecorder:
    """The graph step: the host trace, and Kineto at the same time, joined by `Record function id`."""

    def __init__(self, settings: Settings, host_path: Path, *, every_thread: bool) -> None:
        self.host_path = host_path
        self._kineto = Kineto(settings, every_thread=every_thread, with_observer=True)
        self._observer = _Observer()

    def start(self) -> None:
        """Record from now on.

        Raises:
            OSError: The host trace cannot be written there.
        """
        self.host_path.touch()
        with _OwnBlock():
            self._observer.register_callback(str(self.host_path))
            self._observer.start()
        self._kineto.start()

    def stop(self) -> None:
        """End; the host trace is whole afterwards.

        Raises:
            OtherThreadError: This is not the thread that started it.
        """
        self._kineto.stop()
        with _OwnBlock():
            self._observer.stop()
            observer_safety.wait_for_other_threads()  # it records all threads, and is freed when it is removed
            self._observer.unregister_callback()

    def save(self, path: Path) -> None:
        """Write Kineto's part and check the host trace.

        Raises:
            OSError: One of the two could not be written whole.
        """
        require_whole(self.host_path)
        self._kineto.save(path)

    def redirect_in_child(self) -> None:
        """In a forked child: the observer's descriptor must not reach the parent's file any more."""
        try:
            target = self.host_path.stat()
        except OSError:
            return
        null = os.open(os.devnull, os.O_WRONLY)
        descriptors = list(range(3, 256))
        for directory in ("/proc/self/fd", "/dev/fd"):
            if os.path.isdir(directory):  # noqa: PTH112
                descriptors = [int(name) for name in os.listdir(directory) if name.isdigit()]  # noqa: PTH208
                break
        for descriptor in descriptors:
            with contextlib.suppress(
                OSError
            ):  # closed in the meantime: it was the one that listed them
                same = os.path.samestat(os.fstat(descriptor), target)
                if same:
                    os.dup2(null, descriptor)
        os.close(null)


def abandon() -> None:
    """In a forked child: end the recording that it inherited, and forget it."""
    with _OwnBlock():
        torch._C._autograd._enable_record_function(True)
        torch._C._autograd._disable_profiler()
        torch.autograd.profiler._run_on_profiler_stop()


@exclude_from_tracing
def mark(step: int) -> None:
    """Put the boundary at which step `step` starts into the trace: an annotation opened and closed
    at once.
    """
    annotate(f"traceloom.step#{step}").__exit__(None, None, None)


class annotate:  # noqa: N801  (used like a function)
    """An open user annotation; cheaper than `record_function`, which goes through the dispatcher."""

    __slots__ = ("_close", "_handle")

    @exclude_from_tracing
    def __init__(self, name: str) -> None:
        if _enter is not None:
            self._handle, self._close = _enter(name), _exit
        else:
            self._handle = torch.autograd.profiler.record_function(name)
            self._handle.__enter__()
            self._close = None

    @exclude_from_tracing
    def __exit__(self, *error: object) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return  # ended already, because the recorder stopped
        if self._close is not None:
            self._close(handle)
        else:
            handle.__exit__(*error or (None, None, None))


_enter = getattr(torch._C._autograd, "_record_function_with_args_enter", None)
_exit = getattr(torch._C._autograd, "_record_function_with_args_exit", None)
