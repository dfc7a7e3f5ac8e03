"""The recorder of one process: joins the plan, the step clock and PyTorch's one session.

Everything here runs inside somebody else's training loop. Between two steps nothing but two clock
readings happens; whatever fails is reported in one line, the session is paused, every hook is taken
out, and the program goes on.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from traceloom.capture import distributed, exits, memory, program, writing
from traceloom.capture.host_trace import HostTrace
from traceloom.capture.memory import list_live_storages
from traceloom.capture.modules import CheckpointMarks, ModuleScopes
from traceloom.capture.output import CaptureOutput
from traceloom.capture.plan import Action, Phase, RecordingPlan
from traceloom.capture.program import ProgramHooks
from traceloom.capture.session import (
    RECORDED_BYTES_PER_EVENT,
    Session,
    exclude_from_compile,
    mark,
)
from traceloom.capture.settings import Settings, print_once
from traceloom.capture.steps import Instant, Mark, StepClock, StepLog, ThreadTimes, Tick
from traceloom.system.process import get_free_memory

WITHOUT_CALLS_SECONDS = 1.0
"""A program that has called no module by then, and defines none, is recorded as it is."""
MAIN_THREAD_SECONDS = 1.0
_SHARE_OF_FREE = 0.05
_DEFAULT_BUDGET_BYTES = 512_000_000
_WAIT_FOR_DEVICE_STEPS = 2
_MEMORY_PERIOD_NS = 20_000_000
_GROWTH_PART = 5  # the end of a session takes four times what it has grown by

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass
class RecordedWindow:
    """What the session has recorded, and which part of it is kept."""

    session: Session
    kind: str = "early"  # "early", "steps", "time" or "block"
    start_ns: int = 0
    end_ns: int = 0
    first_step: int = 0
    end_step: int = 0
    boundaries: list[tuple[int, int]] = field(default_factory=list)  # step, when it began
    thread: int = 0  # the system's number of the thread that makes the steps
    events: int = 0
    memory_bytes: int = 0  # of the process, when its growth began to be watched
    collectives: dict[str, Any] | None = None
    thread_cpu: dict[str, list[int]] | None = None
    census: dict[str, list[Any]] | None = None
    last_census: dict[str, list[Any]] | None = None


def guard_errors(method: _F) -> _F:
    """Whatever goes wrong in here must not reach the user's program, and what is the program's must.

    Python runs the program's signal handlers in whatever code the main thread is in, ours too: what
    they raise is theirs, and goes on.
    """

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            return None
        try:
            with self.lock:
                return method(self, *args, **kwargs)
        except Exception as error:
            is_ours = not is_of_program(error)
            if is_ours or self._half_done:
                self.give_up()
            if not is_ours:
                raise
            print_once("recorder-failed", f"recording stopped, your program goes on: {error!r}")
            return None
        except BaseException:
            if self._half_done:
                self.give_up()
            raise

    return exclude_from_compile(guarded)  # type: ignore[return-value]


def is_of_program(error: BaseException) -> bool:
    """Whether a signal handler of the program raised this while our code ran."""
    handlers = {_find_code(signal.getsignal(number)) for number in signal.valid_signals()}
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code in handlers:
            return True
        at = at.tb_next
    return False


def _find_code(handler: Any) -> Any:
    """The code that runs when this is called, as far as Python tells."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    call = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", None)
    if call is None and callable(handler):
        call = getattr(type(handler), "__call__", None)  # noqa: B004
    return getattr(call, "__code__", None)


class Recorder:
    """Records one process as its settings say."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pid = os.getpid()
        self.broken = False
        self.lock = threading.RLock()
        self.used_torch = False  # a module was called or an optimizer made a step
        self.plan = RecordingPlan(settings, time.monotonic())
        self.clock = StepClock()
        self.log = StepLog(Instant.now())
        self.storage = CaptureOutput(settings, self.log, self.clock)
        self.modules = ModuleScopes(settings.module_names)
        self.hooks: ProgramHooks | None = None
        self.exits: exits.Exits | None = None
        self._began = self._stepped = False
        self._created = time.monotonic()
        self._budget = choose_budget(settings)
        self._window: RecordedWindow | None = None
        self._graph: HostTrace | None = None
        self._stop_pending = False  # the window is over; the session is paused at a quiet moment
        self._start_pending = False  # it could not begin yet
        self._finished = False
        self._half_done = False  # what is begun must be ended, or nothing can go on
        self._asked_main_s: float | None = None
        self._seen_events = 0
        self._compiles = False
        self._profiler: weakref.ref[Any] | None = None  # the program's own
        self._collectives = distributed.CollectiveLog()
        self._checkpoints = CheckpointMarks()
        self._times = ThreadTimes()
        self._memory_read_ns = 0
        self._threads: set[int] = set()  # those that make steps and backward passes
        self._watch = exits.Watch(self._check_window)
        if settings.memory:
            self.storage.history.begin()

    def attach(self) -> None:
        """Installs every hook, or none.

        Raises:
            Exception: One cannot be installed; none is.
        """
        settings = self.settings
        module_hooks = self.modules.install() if settings.names_modules else []
        self.hooks = ProgramHooks(
            self,
            module_hooks=module_hooks,
            tracks_annotations=settings.memory or settings.graph_step,
        )
        self.storage.kernel_files = self.hooks.fast.kernel_files
        self.exits = exits.Exits(self)

    def begin(self) -> None:
        """Torch is imported: begin, or wait for what the recording begins with."""
        if exits.may_use_device(torch):
            exits.call_on_device_use(torch, self._device_is_used)
        if self.settings.from_the_start and not exits.is_child_of_multiprocessing():
            self._start()
        self._watch_if_needed()

    def detach(self) -> None:
        """Takes every hook out again."""
        if self.hooks is not None:
            self.hooks.remove()
        if self.exits is not None:
            self.exits.remove()
        self._watch.stop()

    # ---- what happens in the program

    @guard_errors
    def called(self) -> None:
        """The process calls a module for the first time."""
        self.used_torch = True
        if exits.is_loader_worker():
            self.abandon()
            return
        if self.log.number == 0:
            self.log.begin(Instant.now())
        if self.plan.starts_with_first_call and self.plan.phase is Phase.WAITING:
            self._start()

    @guard_errors
    def compiles(self) -> None:
        """The program compiles something, which makes more operators than its steps."""
        self._compiles = True
        self._watch_if_needed()

    @guard_errors
    def optimizer_stepped(self, optimizer: Any) -> None:
        self.used_torch = self._stepped = True
        self._boundary(self.clock.optimizer_stepped(optimizer))

    @guard_errors
    def scaler_updates(self) -> None:
        """Gradients were infinite where no optimizer has stepped; the step was one nevertheless."""
        stepped, self._stepped = self._stepped, False
        if not stepped:
            self._boundary(self.clock.optimizer_skipped())

    @guard_errors
    def observer_begins(self, observer: Any) -> None:
        """The program's own observer is about to be registered: ours must be gone by then."""
        if self._graph is not None and not self._graph.owns(observer):
            self.plan.finish()
            self._stop()

    @guard_errors
    def backward_begins(self) -> None:
        """A backward pass begins, which in a program without an optimizer is a step."""
        self.used_torch = True
        self._quiet_moment()
        if not program.has_optimizer():
            self._boundary(self.clock.backward_began())

    @guard_errors
    def quiet_moment(self) -> None:
        """An optimizer step is about to begin, its annotation not yet open."""
        self._quiet_moment()

    @guard_errors
    def annotations_closed(self) -> None:
        if self._start_pending:
            self._start()

    @guard_errors
    def step_called(self) -> None:
        """`traceloom.step()`."""
        self.used_torch = True
        self._boundary(self.clock.called())
        self._quiet_moment()

    @guard_errors
    def profiler_stepped(self) -> None:
        """The user's profiler is about to make a step."""
        self._boundary(self.clock.profiler_stepped())

    @guard_errors
    def profiler_begins(self, profiler: Any) -> None:
        """The user's profiler is about to begin: ours must be ended before it prepares."""
        window = self._window
        if (window is not None and window.session.owns(profiler)) or not getattr(
            profiler, "enabled", True
        ):
            return
        if self._finished:
            return  # nothing is written any more, in a fork for one; the session ends itself
        self._profiler = weakref.ref(profiler)
        if self.plan.phase in {Phase.RECORDING, Phase.GRAPH}:
            print_once("yielded", "your own profiler starts: ours stops now")
        if window is not None and not window.session.ended:
            if self.plan.finish() is Action.STOP or self._stop_pending:
                self._stop(forks=False)
            if self.storage.has_writer:
                window.session.end()
            else:
                self._end_session()
            self._close_annotations()
        if getattr(profiler, "with_stack", False) and self.plan.phase is Phase.DONE:
            self.detach_hooks()  # it would see whatever of ours runs meanwhile

    @guard_errors
    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """The process or the recording ends, with `error` if it ends by one: keep what there is.

        Runs once.
        """
        if self._finished:
            return
        self._finished = True
        self._watch.stop()
        error = error or memory.get_last_error()
        if self.settings.memory and error is not None and memory.is_out_of_memory(error):
            self.storage.keep_out_of_memory(error, self.log.number)
        if self.plan.finish() is Action.STOP or self._stop_pending:
            self._stop(forks=False)
        if self._window is not None and not self.storage.collect_forked_result():
            self._end_session()
        self.storage.finish(reason, used_torch=self.used_torch, began=self._began)
        self.storage.history.end()

    @guard_errors
    def abandon(self) -> None:
        """This process turns out to be none that should be recorded: leave nothing behind."""
        self._finished = True
        self.plan.finish()
        self.detach()

    def why_nothing(self) -> str:
        """Why nothing was recorded, in words."""
        if self.settings.by_time:
            return "the block was over before the window began"
        first = self.settings.window[0]
        return f"the block did not reach step {first}: it made {self.log.number} steps"

    # ---- steps

    def _boundary(self, tick: Tick) -> None:
        if tick is Tick.NOTHING or self._finished:
            return
        boundary = Instant.now()
        window = self._window
        if tick is Tick.RESTART:
            self.log.restart()
            resumes = self._stop_pending and self._graph is None
            self._stop_pending = self._stop_pending and not resumes
            self.plan.renumber(resumes=resumes)
            if window is not None:
                window.boundaries.clear()
        recording = self.plan.phase is Phase.RECORDING and window is not None
        if self.plan.phase is Phase.GRAPH:
            state = Mark.GRAPH
        elif self._stop_pending:
            state = Mark.DISTURBED
        else:
            state = Mark.EARLY if recording else Mark.PLAIN
        self.log.end(boundary, state, *self._read_memory(boundary))
        self.log.begin(boundary)
        number = self.log.number
        if number == 1:
            self.storage.refresh_job_info()
        self._threads.add(threading.get_ident())
        if window is not None and self.plan.phase in {Phase.RECORDING, Phase.GRAPH}:
            window.boundaries.append((number, boundary.unix_ns))
            self._times.sample()
        action = self.plan.step_starts(number)
        self.clock.frozen = self.plan.phase in {Phase.GRAPH, Phase.DONE}
        if self._watch.running and not self.settings.by_time:
            self._watch.stop()
        if action is Action.START:
            self._start(at_boundary=True)
        elif action is Action.GRAPH:
            self._start_graph()
        elif action is Action.STOP:
            if self._graph is not None:
                mark(number)  # in the host trace, which goes on until a quiet moment
            self._stop_soon()
        elif recording and window is not None:
            self._check_budget(window, steps=number - self.plan.first_whole_step)

    def _read_memory(self, boundary: Instant) -> tuple[int, int]:
        """Returns the bytes that the process and its device hold, or -1 for each that is not read:
        seldom enough to cost nothing.
        """
        if boundary.steady_ns - self._memory_read_ns < _MEMORY_PERIOD_NS:
            return -1, -1
        self._memory_read_ns = boundary.steady_ns
        used = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else -1
        return read_own_bytes() or -1, used

    def _check_budget(self, window: RecordedWindow, steps: int) -> None:
        """Ends the window where another step would be more than memory was given for."""
        if steps == 1:
            window.memory_bytes = read_own_bytes()
        full = steps > 0 and self._is_full(window, ahead=1 / steps, grows=steps > 1)
        if full and self.plan.finish() is Action.STOP:
            self._stop_soon()

    def _is_full(self, window: RecordedWindow, *, ahead: float = 0.0, grows: bool) -> bool:
        """Whether the session has used up its memory; says so.

        Operators of thousands of inputs cost more than their number tells: so does it count, too,
        what the process has grown by while it should not (`grows`).
        """
        events = window.session.count_events()
        ending = events * (1 + ahead) * window.session.bytes_per_event
        unexplained = read_own_bytes() - window.memory_bytes - events * RECORDED_BYTES_PER_EVENT
        if ending > self._budget:
            cause = f", for which {self._budget / 1e6:.0f} MB are set aside"
        elif grows and unexplained > self._budget / _GROWTH_PART:
            cause = (
                f": meanwhile the process grew by {unexplained / 1e6:.0f} MB beyond them, too much "
                f"for a budget of {self._budget / 1e6:.0f} MB"
            )
        else:
            return False
        self.storage.note(
            "budget-reached",
            f"recording stopped after {events:,} events{cause}; give more with --max-memory, or "
            "begin later with --steps",
        )
        return True

    # ---- begin and end

    def _start(self, *, at_boundary: bool = False) -> None:
        """Begins the session, or waits where something is open, or a device is yet to come."""
        if self._began or self._finished:
            return
        settings, number = self.settings, self.log.number
        hooks = self.hooks
        waits_for_device = (
            exits.may_use_device(torch) and number < _WAIT_FOR_DEVICE_STEPS and settings.early
        )
        compiling = self._compiles and number == 0 and settings.early
        self._start_pending = (
            program.is_profiler_active(self._profiler)
            or (hooks is not None and len(hooks.fast.open) > 0)
            or waits_for_device
            or compiling
            or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        )
        if self._start_pending:
            return
        records_memory = settings.memory and exits.is_main_thread() and self._profiler is None
        if settings.memory and not records_memory:
            self.storage.note(
                "no-memory-recorded",
                "allocations were not recorded: they are reported to the main thread alone, and "
                "not after another profiler",
            )
        stacks = settings.stacks and sys.getprofile() is None
        if settings.stacks and not stacks:
            self.storage.note(
                "no-stacks",
                "stacks were not recorded: the program has a profile function of its own",
            )
        self._half_done = True
        self.storage.refresh_job_info()
        session = Session(stacks=stacks, memory=records_memory)
        window = RecordedWindow(session)
        window.census = list_live_storages() if settings.memory else None
        self._collectives.start()
        if settings.names_modules:
            self.modules.start()
        self._checkpoints.start()
        self._window, self._began = window, True
        session.start()
        now = Instant.now()
        window.start_ns = now.unix_ns
        window.memory_bytes = read_own_bytes()
        window.thread = threading.get_native_id()
        self._times.sample()
        # Begun at a boundary or before the first step, it has the step that runs now from its start.
        if number == 0 or at_boundary:
            self.log.begin(now)
            first = number
            window.boundaries.append((number, now.unix_ns))
        else:
            first = number + 1
        self.plan.start(time.monotonic(), first)
        self._half_done = False
        writing.announce_window(self.storage.directory, writing.OPENS)
        self._watch_if_needed()

    def _stop_soon(self) -> None:
        """The window is over: pause where no annotation of the optimizer is open any more."""
        self._stop_pending = True
        if self.clock.source in {"call", "profiler"}:
            self._quiet_moment()

    def _quiet_moment(self) -> None:
        if self._start_pending and not self._began:
            self._start()
        if self._stop_pending and not self._finished:
            self._stop()
        self._threads.add(threading.get_ident())

    def _stop(self, *, forks: bool = True) -> None:
        """Pauses the session, and has what it holds written: by a fork, or else at the end."""
        self._stop_pending = False
        window = self._window
        if window is None:
            return
        if not window.session.can_end_here():
            self._stop_pending = exits.run_on_main_thread(self._stop_on_main)
            return
        self._half_done = True
        window.session.pause()
        if self._graph is not None:
            self._graph.stop(self.hooks)
        if window.end_ns:
            self._half_done = False
            return
        window.end_ns = time.time_ns()
        writing.announce_window(self.storage.directory, writing.CLOSES)
        window.events = window.session.count_events()
        window.thread_cpu = self._times.to_columns()
        window.collectives = self._collectives.stop()
        self.modules.stop()
        self._checkpoints.stop()
        window.last_census = list_live_storages() if self.settings.memory else None
        self._choose_part(window)
        self.storage.prepare(window)
        graph, self._graph = self._graph, None
        if graph is not None:
            self.storage.set_host_trace(graph)
        if forks:
            # The recorder of stacks goes on while its session is only paused.
            if window.session.uses_device or window.session.stacks:
                self._end_session()
            elif sys.platform == "linux":
                self.storage.save_in_fork(window, used_torch=self.used_torch)
        self._half_done = False

    def _start_on_main(self, now: float) -> None:
        """Has the main thread begin, where it runs Python; else begins here.

        Kineto prints a line where another thread than the one that imported it is the first.
        """
        if self._asked_main_s is None:
            self._asked_main_s = now
            exits.run_on_main_thread(self._start_where_we_are)
        elif now - self._asked_main_s > MAIN_THREAD_SECONDS:
            self._start()

    @guard_errors
    def _start_where_we_are(self) -> None:
        if self.plan.phase is Phase.WAITING:
            self._start()

    @guard_errors
    def _stop_on_main(self) -> None:
        self._stop()

    def _choose_part(self, window: RecordedWindow) -> None:
        """Decides which steps of the session are the window, and marks them."""
        first, end = self.plan.window
        settings, whole = self.settings, self.plan.first_whole_step
        made = window.boundaries[-1][0] if window.boundaries else 0
        if settings.by_time or settings.whole:
            window.kind = "time" if settings.by_time else "block"
            first, end = whole, made
        elif made > first and not settings.from_the_start:
            window.kind, end = "steps", min(end, made)
        else:
            window.kind = "steps" if made > first else "early"
            first, end = whole, min(end, made) if made > first else made
        times = dict(window.boundaries)
        window.first_step, window.end_step = first, max(first, end)
        if window.kind == "steps":
            window.start_ns = times.get(first, window.start_ns)
            window.end_ns = times.get(end, window.end_ns)
        window.boundaries = [(step, at) for step, at in window.boundaries if first <= step <= end]
        self.log.relabel(first, end, Mark.EARLY, Mark.RECORDED)

    def _end_session(self) -> None:
        """Ends the session here, and writes what it holds; never again."""
        window = self._window
        if window is None or window.session.ended:
            return
        if not window.session.can_end_here():
            exits.run_on_main_thread(self._end_on_main)
            return
        self.storage.keep(window, used_torch=self.used_torch)

    @guard_errors
    def _end_on_main(self) -> None:
        self._end_session()

    def _close_annotations(self) -> None:
        window, hooks = self._window, self.hooks
        if window is not None and not window.session.all_threads and hooks is not None:
            if hooks.annotations is not None:
                hooks.annotations.close()
            hooks.fast.close()

    def _start_graph(self) -> None:
        """Adds PyTorch's execution trace observer for one step, where that is known to be safe."""
        reason = HostTrace.find_danger(self._threads)
        if reason:
            self.storage.note("no-graph-step", f"the graph step is left out: {reason}")
            self.plan.finish()
            self._stop_soon()
            return
        self._graph = HostTrace(self.storage.host_trace_path(), self.log.number)
        self._graph.start()
        mark(self.log.number)  # the host trace has no other
        self.log.begin(Instant.now())  # looking for dangers is no time of the step

    def give_up(self) -> None:
        """After a failure: pause the session, take every hook out, and never act again."""
        self.broken = True
        window = self._window
        steps: list[Callable[[], None]] = [self.detach, self._checkpoints.stop, self.modules.stop]
        if window is not None:
            ends = functools.partial(
                writing.announce_window, self.storage.directory, writing.CLOSES
            )
            steps = [window.session.pause, *steps, ends]
        if self._graph is not None:
            steps.insert(0, self._graph.abandon)
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001, PERF203  (it may be what has failed)
                print_once("recorder-failed", f"recording could not be taken out: {error!r}")

    def detach_hooks(self) -> None:
        """Takes the hooks out, and keeps what writes at the end."""
        if self.hooks is not None:
            self.hooks.remove()

    # ---- time, devices and memory

    def _watch_if_needed(self) -> None:
        plan = self.plan
        needed = plan.phase is not Phase.DONE and (
            self.settings.by_time
            or (self.log.number == 0 and not self.settings.whole and self.settings.early)
            or (self.settings.whole and plan.phase is Phase.RECORDING)
        )
        if needed:
            self._watch.start()

    def _check_window(self) -> bool:
        """Looks after time and memory on a thread of its own; False when that is not needed."""
        if not self.lock.acquire(timeout=0.001):
            return True
        try:
            return bool(self._check_window_now())
        finally:
            self.lock.release()

    @guard_errors
    def _check_window_now(self) -> bool:
        plan, window, now = self.plan, self._window, time.monotonic()
        if self._finished or plan.phase is Phase.DONE:
            return False
        if plan.phase is Phase.WAITING:
            if plan.at_time(now) is Action.START or self._start_pending:
                self._start_on_main(now)
            elif (
                self.settings.early
                and now - self._created > WITHOUT_CALLS_SECONDS
                and not (program.defines_modules() or exits.is_loader_worker())
                and not program.is_loading()
                and not self.settings.memory
            ):
                self._compiles = False
                self._start_on_main(now)
            return True
        if window is None:
            return True
        self._times.sample()
        events = window.session.count_events()
        ahead = 2 * (1 - self._seen_events / events) if events else 0.0  # until the next look
        self._seen_events = events
        calls_modules = self.used_torch or program.defines_modules()
        full = self._is_full(window, ahead=ahead, grows=not calls_modules)
        if full:
            plan.finish()
        if full or plan.at_time(now) is Action.STOP:
            self._stop()
            return False
        return True

    def _device_is_used(self) -> None:
        """The program initialises a device; its next quiet moment is a good one to begin."""
        if self.pid == os.getpid() and not self._began and self.plan.starts_with_first_call:
            self._start_pending = self.used_torch or self._start_pending

    # ---- forks

    def before_fork(self) -> None:
        """The program is about to fork: have no thread, and nothing half done."""
        self.lock.acquire()
        self._watch.stop()

    def after_fork(self) -> None:
        self.lock.release()
        if self.log.number == 0 or self.settings.by_time:
            if sys.version_info >= (3, 12) and not (self._began or self.settings.by_time):
                return  # Python counts threads after a fork, and warns; a first call comes
            self._watch_if_needed()

    def forked(self) -> None:
        """This is a forked child, in which the parent's recording is over."""
        self._finished = True
        self.lock = threading.RLock()
        self.plan.finish()
        self._stop_pending = self._start_pending = False
        self._checkpoints.stop()
        if self._graph is not None:
            self._graph.redirect_in_child()
        window = self._window
        if window is not None:
            window.session.pause()

    @property
    def has_session(self) -> bool:
        """Whether this process has had its session, and so gets no other one."""
        return self._window is not None


def choose_budget(settings: Settings) -> int:
    """How many bytes recording may take in this process."""
    if settings.max_memory is not None:
        return settings.max_memory
    free_bytes = get_free_memory()
    if free_bytes is None:
        return _DEFAULT_BUDGET_BYTES
    return min(_DEFAULT_BUDGET_BYTES, int(_SHARE_OF_FREE * free_bytes))


def read_own_bytes() -> int:
    """How much memory this process alone holds; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            _, resident, shared = map(int, file.read().split()[:3])
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
