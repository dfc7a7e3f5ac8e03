"""The one session of PyTorch's profiler that this process gets: begun once, paused, ended once.

PyTorch writes the end of an operator into memory of the session under which it began, and does so
whenever a session of the same kind exists by then. So ending a session is safe, and beginning a
second one is what overwrites memory: there is never a second one. It is of the kind that sees all
threads, which the program's own profilers are not, and which any thread may pause and end. Only
allocations are reported to the other kind alone; see `Session.all_threads`.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.autograd.profiler_legacy
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, supported_activities

with contextlib.suppress(ImportError):
    # A session imports it when it begins, and takes what a signal handler raises then for a failure.
    importlib.import_module("torch.profiler._cupti_monitor")

_F = TypeVar("_F", bound=Callable[..., Any])
_OPTIONS = _ExperimentalConfig.__init__.__doc__ or ""
"""The options that this PyTorch has, as `name: type`."""

_BYTES_PER_EVENT, _FOR_STACKS, _FOR_MEMORY = 3600, 2400, 1400
RECORDED_BYTES_PER_EVENT = 600
_EVENTS_PER_BLOCK = 512
_EVENT_COUNTER = (
    "_ZZN5torch8profiler4impl19ThreadLocalSubqueue14TorchOpStorage10EventBlockINS1_21"
    f"KinetoObserverContext5EventELm{_EVENTS_PER_BLOCK}EEC4EvE8counter_"
)
# Naming them all keeps PyTorch from printing a warning about those that are left out.
_ACTIVITIES = {
    getattr(ProfilerActivity, name)
    for name in ("CPU", "CUDA", "XPU")
    if hasattr(ProfilerActivity, name)
}
_KINETO_LEVEL = "_ZN9libkineto6Logger14severityLevel_E"
_PYTORCH_LEVEL = "FLAGS_caffe2_log_level"
_KINETO = "_ZN9libkineto3apiEv"
_REGISTER = "_ZN9libkineto12LibkinetoApi14registerClientEPNS_15ClientInterfaceE"
_LOG_VARIABLE = "KINETO_LOG_LEVEL"
_SILENT, _USUAL = 6, 4
_frames: Any = torch._C._dynamo.eval_frame


PROFILERS = (
    (torch.autograd.profiler.profile, "_prepare_trace"),
    (torch.autograd.profiler.emit_itt, "__enter__"),
    (torch.autograd.profiler.emit_nvtx, "__enter__"),
    (torch.autograd.profiler_legacy.profile, "__enter__"),
)
"""Profilers of PyTorch, and the method that begins one."""


class Replaced:
    """An attribute that we have replaced; `remove` puts the original back."""

    def __init__(self, holder: Any, name: str, ours: Any) -> None:
        self._holder, self._name, self._ours = holder, name, ours
        self._original = vars(holder)[name]
        setattr(holder, name, ours)

    def remove(self) -> None:
        """Puts the original back, where ours still stands."""
        if vars(self._holder).get(self._name) is self._ours:
            setattr(self._holder, self._name, self._original)


class ToldBefore:
    """A method that tells when it is looked up, which is just before it is called."""

    def __init__(self, original: Any, tell: Callable[[Any], None]) -> None:
        self._original, self._tell = original, tell
        self.__doc__ = original.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        method = self._original.__get__(instance, owner)  # which may tell somebody, too, and first
        if instance is not None:
            self._tell(instance)
        return method


def find_missing_part() -> str:
    """Names what recording needs and this PyTorch does not have; empty where nothing is missing."""
    if not torch.profiler.kineto_available():
        return "Kineto"
    parts = (
        (_OPTIONS, "profile_all_threads"),
        (dir(torch._C._autograd), "_toggle_collection_dynamic"),
        (dir(torch._C._autograd), "_record_function_with_args_enter"),
        (dir(_frames), "set_code_exec_strategy"),
        (dir(torch.autograd.profiler.profile), "_prepare_trace"),
        (dir(torch.autograd.profiler.profile), "_start_trace"),
    )
    return next((name for where, name in parts if name not in where), "")


@functools.cache
def leave_forks_without_handlers() -> None:
    """From now on leaves C's exit handlers out at the end of forks.

    Kineto has a thread that a fork has not, and its handler would wait for that one for ever. What
    the fork has written is flushed, and its exit status stays.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)

    def after_in_child() -> None:
        library.on_exit(ctypes.cast(library._exit, ctypes.c_void_p), None)
        flush = ctypes.cast(library.fflush, ctypes.c_void_p)
        getattr(library, "__cxa_atexit")(flush, None, None)

    os.register_at_fork(after_in_child=after_in_child)


def exclude_from_compile(function: _F) -> _F:
    """Lets torch.compile call this function as it is, without importing the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # never inlined into compiled code
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function


def _load_library(name: str = "libtorch_cpu.so") -> ctypes.CDLL:
    """A library of PyTorch, which is loaded already."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _find_symbol(kind: Any, name: str, *library: str) -> Any:
    """A variable that a library of PyTorch exports, or None where it does not."""
    try:
        return kind.in_dll(_load_library(*library), name)
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def hide_log_lines() -> Iterator[None]:
    """Runs a block in which PyTorch and libkineto print nothing from C++.

    Their lines about our session are not wanted. libkineto reads its level from the environment
    when it is first used; both levels are as the program wants them afterwards.
    """
    kineto = _find_symbol(ctypes.c_int, _KINETO_LEVEL)
    pytorch = _find_symbol(ctypes.c_int, _PYTORCH_LEVEL, "libc10.so")
    wanted = os.environ.get(_LOG_VARIABLE)
    before = []
    if kineto is not None:
        usual = int(wanted) if wanted and wanted.isdigit() else _USUAL
        before.append((kineto, kineto.value or usual))
    if pytorch is not None:
        before.append((pytorch, pytorch.value))
    os.environ[_LOG_VARIABLE] = str(_SILENT)
    for level, _ in before:
        level.value = _SILENT
    try:
        yield
    finally:
        for level, value in before:
            level.value = value
        if wanted is None:
            del os.environ[_LOG_VARIABLE]
        else:
            os.environ[_LOG_VARIABLE] = wanted


def _begin_on_this_thread() -> None:
    """Lets Kineto begin here, though another thread has imported it, without a line that says so.

    The line is about its client, which serves nobody but Kineto's daemon.
    """
    library = _load_library()
    if "KINETO_USE_DAEMON" in os.environ or not all(
        hasattr(library, name) for name in (_KINETO, _REGISTER)
    ):
        return
    get = library[_KINETO]
    get.restype = ctypes.c_void_p
    library[_REGISTER](ctypes.c_void_p(get()), None)


class Session:
    """A session that records from `start` to `pause`; `end` and `save` it once.

    Args:
        stacks: Record Python call stacks.
        memory: Record allocations; the session then sees the thread that starts it, and the threads
            that work for that one.
    """

    def __init__(self, *, stacks: bool, memory: bool) -> None:
        # An accelerator that is not in use stays so: a profiler would make a context on it.
        accelerators = (
            ("cuda", ProfilerActivity.CUDA, torch.cuda),
            ("xpu", ProfilerActivity.XPU, torch.xpu),
        )
        used = [
            name
            for name, activity, backend in accelerators
            if backend.is_initialized() and activity in supported_activities()
        ]
        self.all_threads, self.stacks = not memory, stacks
        self.uses_device = bool(used)
        self.paused = self.ended = False
        self._told_of_job = False
        self._thread = 0
        options = {
            "trace_only": not stacks,
            "profile_all_threads": self.all_threads,
            # Which stream waits for which event of another one is in no other record.
            "enable_cuda_sync_events": "cuda" in used,
        }
        self._metadata = {
            name: "1"
            for name, on in (
                ("record_shapes", True),
                ("profile_memory", memory),
                ("with_stack", stacks),
            )
            if on
        }
        chosen: dict[str, Any] = {
            name: True for name, on in options.items() if on and f"{name}:" in _OPTIONS
        }
        self._profile: Any = torch.autograd.profiler.profile(
            use_cpu=True,
            use_device=used[0] if used else None,
            record_shapes=True,
            profile_memory=memory,
            with_stack=stacks,
            use_kineto=True,
            experimental_config=_ExperimentalConfig(**chosen),
        )
        # PyTorch's own count of the blocks that it puts events into; to read it is the only way to
        # know how much a session holds while it runs.
        self._counter = _find_symbol(ctypes.c_uint64, _EVENT_COUNTER)
        self._first_block = 0
        self._started_cpu_s = 0.0
        self._guards: list[Replaced] = []

    def owns(self, profiler: Any) -> bool:
        """Whether a profiler of PyTorch is this session's."""
        return profiler is self._profile

    def start(self) -> None:
        compiler = sys.modules.get("torch._inductor.config")
        if self.uses_device and compiler is not None and compiler.triton.cudagraphs:
            # As torch.profiler does: CUPTI must not be torn down beside CUDA graphs.
            os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "1"
            os.environ["TEARDOWN_CUPTI"] = "0"
        if threading.current_thread() is not threading.main_thread():
            _begin_on_this_thread()
        with hide_log_lines():
            # PyTorch prints a line at the first free of a block from before: be the first.
            block = None if self.all_threads else torch.empty(1)
            self._profile._prepare_trace()
            self._started_cpu_s = time.process_time()
            self._first_block = self._counter.value if self._counter is not None else 0
            self._profile._start_trace()
            del block
        for name, value in self._metadata.items():
            torch.autograd._add_metadata_json(name, value)
        self._describe_job()
        self._thread = threading.get_ident()
        self._guards = [
            Replaced(kind, name, ToldBefore(vars(kind)[name], self._end_before))
            for kind, name in PROFILERS
        ]
        leave_forks_without_handlers()

    def _end_before(self, profiler: Any) -> None:
        """Ends it before another profiler prepares, which would crash; in forks, too."""
        if not self.owns(profiler) and getattr(profiler, "enabled", True) and self.can_end_here():
            self.end()

    def _describe_job(self) -> None:
        """Puts the rank and the groups of this process into the trace, once they are known."""
        distributed = sys.modules.get("torch.distributed")
        if (
            self._told_of_job
            or distributed is None
            or not (distributed.is_available() and distributed.is_initialized())
        ):
            return
        info = torch.profiler.profile._get_distributed_info(self)
        if info:
            torch.autograd._add_metadata_json("distributedInfo", json.dumps(info, default=str))
        self._told_of_job = True

    @property
    def bytes_per_event(self) -> int:
        """What an event costs at most when the session is ended and written.

        Measured: 2,900 B; 5,200 with stacks, 3,700 with allocations; 600 while it is recorded.
        """
        return _BYTES_PER_EVENT + _FOR_STACKS * self.stacks + _FOR_MEMORY * (not self.all_threads)

    def count_events(self) -> int:
        """How many operators and annotations it holds, to 512 of each thread.

        Where PyTorch's count cannot be read, as many as a processor could have made by now.
        """
        if self._counter is not None:
            return int(self._counter.value - self._first_block) * _EVENTS_PER_BLOCK
        return int((time.process_time() - self._started_cpu_s) * 500_000)

    def can_end_here(self) -> bool:
        return self.all_threads or threading.get_ident() == self._thread

    def pause(self) -> None:
        """Takes nothing new; a paused session may be left as it is for ever. It never goes on."""
        if not (self.paused or self.ended):
            self.paused = True
            torch._C._autograd._toggle_collection_dynamic(False, _ACTIVITIES)

    def end(self) -> None:
        """Ends it: this takes `BYTES_PER_EVENT` for each event, and its time."""
        if self.ended:
            return
        self.pause()
        # A thread may be inside the few instructions that put an event into it.
        if self.all_threads and len(sys._current_frames()) > 1:
            time.sleep(0.005)
        with contextlib.suppress(RuntimeError):
            self._describe_job()
        self.ended = True
        for guard in self._guards:
            guard.remove()
        with hide_log_lines():
            self._profile.__exit__(None, None, None)

    def save(self, path: Path) -> None:
        """Writes the trace as plain JSON.

        Raises:
            OSError: It could not be written whole.
        """
        with hide_log_lines():
            self._profile.kineto_results.save(str(path))
        require_whole(path)


def require_whole(path: Path) -> None:
    """Checks that a JSON object was written to its end: PyTorch's writers do not notice a full disk.

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


@exclude_from_compile
def mark(step: int) -> None:
    """Puts the boundary at which a step starts into the trace: an annotation, opened and closed."""
    annotate(f"traceloom.step#{step}").__exit__(None, None, None)


class annotate:  # noqa: N801  (used like a function)
    """An open user annotation; cheaper than `record_function`, which goes through the dispatcher."""

    __slots__ = ("_handle",)

    @exclude_from_compile
    def __init__(self, name: str) -> None:
        self._handle = torch._C._autograd._record_function_with_args_enter(name)

    @exclude_from_compile
    def __exit__(self, *error: object) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            torch._C._autograd._record_function_with_args_exit(handle)
