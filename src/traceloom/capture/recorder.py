"""The recorder of one process: joins the plan, the step clock and PyTorch's recorders.

Everything here runs inside somebody else's training loop. Between two steps nothing but two clock
readings happens; whatever fails is reported in one line, and the program goes on.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from traceloom.capture import distributed, kineto, memory, observer_safety
from traceloom.capture.kineto import exclude_from_tracing, pause
from traceloom.capture.main_thread import run_on_main_thread, run_on_main_thread_later
from traceloom.capture.memory import list_live_storages
from traceloom.capture.modules import CheckpointMarks, ModuleScopes
from traceloom.capture.output import CaptureOutput, FallbackTrace
from traceloom.capture.plan import Action, Phase, RecordingPlan
from traceloom.capture.processor_time import ThreadTimes
from traceloom.capture.settings import Settings, print_once
from traceloom.capture.steps import Instant, Mark, StepClock, StepLog, Tick

# Leaving the optimizer's annotation takes about ten events, a backward pass those of its hooks. Who
# needs more stays.
EVENTS_TO_LEAVE = 100_000
ATTEMPTS = 1000
# An early part with fewer operators is not worth to be the only one.
ENOUGH_OPERATORS = 1000
_STARTS = (Action.START, Action.GRAPH_START)

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass
class RecordedWindow:
    """A part of the run that Kineto records or has recorded."""

    kineto: kineto.Kineto
    kind: str  # "early", "steps", "time" or "block"
    first_step: int
    start_ns: int
    stacks: bool = False
    shapes: bool = False
    called: bool = False  # it began with, or after, the first module call or optimizer step
    held: FallbackTrace | None = None
    end_step: int = 0
    end_ns: int = 0
    times: ThreadTimes = field(default_factory=ThreadTimes)
    collectives: dict[str, Any] | None = None
    thread_cpu: dict[str, list[int]] | None = None
    census: dict[str, list[Any]] | None = None
    last_census: dict[str, list[Any]] | None = None


def guard_errors(method: _F) -> _F:
    """Whatever goes wrong in here must not reach the user's program."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            return None
        tracing = pause(None) if pause is not None else None
        try:
            with self._at_work:
                return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  (the boundary to a stranger's program)
            self.broken = True
            print_once("recorder-failed", f"recording stopped, your program goes on: {error!r}")
            self.give_up()
            return None
        finally:
            if pause is not None:
                pause(tracing)

    return exclude_from_tracing(guarded)  # type: ignore[return-value]


class _WorkLock:
    """One thread at a time: steps may end on one while a moment in time comes on another one.

    A signal is answered by the main thread in the middle of whatever it does; what has to wait for
    the end of that is kept until then.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread, self._depth = 0, 0
        self._pending: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._thread, self._depth = threading.get_ident(), self._depth + 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        pending = None
        if not self._depth:
            self._thread, pending, self._pending = 0, self._pending, None
        self._lock.release()
        if pending is not None:
            pending()

    def afterwards(self, call: Callable[[], None]) -> bool:
        """Keep `call` until this thread is done; False where it is not at work."""
        if self._thread != threading.get_ident():
            return False
        self._pending = call
        return True


class Recorder:
    """Records one process as its settings say."""

    def __init__(self, settings: Settings) -> None:
        now = time.monotonic()
        self.settings = settings
        self.pid = os.getpid()
        self.broken = False
        self._at_work = _WorkLock()
        self.used_torch = (
            False  # a module was called or an optimizer made a step, not merely torch imported
        )
        self._called = False
        self._began = False
        self._every_thread = True  # the kind of the last recorder of the timed part
        self.plan = RecordingPlan(settings, now, self._may_cross)
        self.clock = StepClock()
        self.log = StepLog(Instant.now())
        self.storage = CaptureOutput(settings, self.log, self.clock)
        self.graph: kineto.GraphStepRecorder | None = None
        self.attachment: Any = None
        self.deadline_changed: Callable[[], None] = lambda: None
        self.on_start: Callable[[], None] = lambda: None
        self._window: RecordedWindow | None = None
        self._held: RecordedWindow | None = None
        self._before: RecordedWindow | None = None  # what came before the first call, set aside
        self._collectives = distributed.CollectiveLog()
        self.modules = ModuleScopes(settings.module_names)
        self._checkpoints = CheckpointMarks()
        self._graph_step = 0
        self._disturbed = True
        self._finished = False
        self._lost = False  # Kineto runs on a thread where nobody can end it
        if settings.memory:
            self.storage.history.begin()

    # ---- what happens in the program

    @guard_errors
    def torch_imported(self) -> None:
        """The process can use torch from now on, and recording needs no device that it does not
        use.
        """
        self._turn(self.plan.torch_imported(time.monotonic()), between_steps=self.log.number == 0)

    @guard_errors
    def first_call(self) -> None:
        """The process calls a module, makes an optimizer step or enters a recorded block for the
        first time.
        """
        self._called = True
        elsewhere = self._window is not None and not self._window.kineto.records_here()
        actions = self.plan.first_call(time.monotonic(), elsewhere=elsewhere)
        if self.log.number == 0:
            self.log.begin(Instant.now())
            if self._window is not None and not actions:
                kineto.mark(0)
        self._turn(actions, between_steps=self.log.number == 0)

    @guard_errors
    def optimizer_stepped(self, optimizer: Any, frame: Any = None) -> None:
        """An optimizer has made a step; `frame` is the one in which PyTorch's annotation of that
        step is open.
        """
        self.used_torch = True
        self._boundary(self.clock.optimizer_stepped(optimizer), frame)

    @guard_errors
    def backward_ended(self) -> None:
        """A backward pass is over, in a program without an optimizer."""
        self.used_torch = True
        self._boundary(self.clock.backward_ended(), None)

    @guard_errors
    def step_called(self) -> None:
        """`traceloom.step()`."""
        self.used_torch = True
        self._boundary(self.clock.called(), None)

    @guard_errors
    def profiler_stepped(self) -> None:
        """The user's profiler is about to make a step."""
        self._boundary(self.clock.profiler_stepped(), None)

    @guard_errors
    def profiler_has_stepped(self) -> None:
        """The user's profiler has made its step: what it did there belongs to no step."""
        if self.clock.source == "profiler" and not self.plan.recording:
            self.log.begin(Instant.now())

    @guard_errors
    def foreign_profiler(self, with_stack: bool) -> None:
        """The user's profiler is about to start; one with stacks would show whatever of ours runs
        meanwhile.
        """
        actions = self.plan.foreign_profiler()
        if actions:
            print_once("yielded", "your own profiler starts: ours stops now and goes on afterwards")
        self._turn(actions, between_steps=False)
        if with_stack:
            self.storage.rest()
            self.attachment.suspend()

    @guard_errors
    def foreign_profiler_ended(self) -> None:
        """The user's profiler has stopped."""
        self.attachment.resume()
        self._turn(self.plan.foreign_profiler_ended(time.monotonic()), between_steps=False)

    @guard_errors
    def tick(self) -> None:
        """Some time has passed; called on the main thread."""
        actions = self.plan.at_time(time.monotonic())
        self._turn(actions, between_steps=False)
        if actions == [Action.HOLD]:
            held = self._held.held if self._held is not None else None
            enough = held is not None and held.operators >= ENOUGH_OPERATORS
            self._turn(self.plan.held(time.monotonic(), enough=enough), between_steps=False)

    @guard_errors
    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """The process or the recording ends, with `error` if it ends by one: keep what there is.

        Runs once.
        """
        if self._finished:
            return
        self._finished = True
        error = error or memory.get_last_error()
        if self.settings.memory and error is not None and memory.is_out_of_memory(error):
            self.storage.keep_out_of_memory(error, self.log.number)
        self._turn(self.plan.finish(), between_steps=False)
        held, before = self._held, self._before
        if held is None:
            held, before = before, None
        if held is not None:
            self.log.relabel(held.first_step, held.end_step, Mark.EARLY, Mark.RECORDED)
            self.storage.keep(held, used_torch=self.used_torch)
        if before is not None and before.held is not None:
            self.storage.keep_before(before.held)
        self._held = self._before = None
        self.storage.finish(reason, used_torch=self.used_torch, began=self._began)
        self.storage.history.end()

    @guard_errors
    def abandon(self) -> None:
        """This process turns out to be none that should be recorded: stop, and leave nothing
        behind.
        """
        self._finished = True
        self.plan.finish()
        self._stop()
        self.attachment.detach()

    def after_work(self, call: Callable[[], None]) -> bool:
        """Let `call` run when the recorder is done with what this thread is in.

        False: it is in nothing of ours.
        """
        return self._at_work.afterwards(call)

    def why_nothing(self) -> str:
        """Why nothing was recorded, in words."""
        if self.settings.by_time:
            return "the block was over before the window began"
        return f"the block did not reach step {self.settings.window[0]}: it made {self.log.number} steps"

    # ---- steps

    def _boundary(self, tick: Tick, frame: Any) -> None:
        if tick is Tick.NOTHING or self._finished:
            return
        boundary, now = Instant.now(), time.monotonic()
        restart: list[Action] = []
        if tick is Tick.RESTART:
            self.log.restart()
            self.storage.forget()
            restart = self.plan.renumber(now)
        if self.graph is not None:
            mark = Mark.GRAPH
        elif self._disturbed or (self._window is None and self.storage.busy):
            mark = Mark.DISTURBED
        elif self._window is None:
            mark = Mark.PLAIN
        else:
            mark = Mark.EARLY if self._window.kind == "early" else Mark.RECORDED
        self.log.end(boundary, mark)
        number = self.log.number
        if number == 1:
            self.storage.look_around()
        actions = restart + self.plan.step_starts(number, now)
        self.clock.frozen = self.plan.phase in (Phase.GRAPH_PENDING, Phase.GRAPH, Phase.DONE)
        self.log.begin(boundary)
        self._disturbed = self.storage.busy
        if not actions and not self.plan.recording:
            return
        # Cross to the next step where nothing of PyTorch is open around us: no annotation, no
        # backward pass.
        frame = observer_safety.find_outermost_torch_frame() or frame if actions else frame
        stacks = self.settings.stacks and Action.START in actions
        if self._window is None or not self._window.stacks:
            run_after_annotation(frame, lambda: self._cross(number, actions), outside=stacks)
            return
        # PyTorch's stack recorder has the very hook by which the annotation's end is told: end it
        # here, go on after it.
        ending = [action for action in actions if action not in _STARTS]
        starting = [action for action in actions if action in _STARTS]
        self._cross(number, ending)
        if starting:
            run_after_annotation(frame, lambda: self._cross(number, starting), outside=stacks)

    @guard_errors
    def _cross(self, number: int, actions: list[Action]) -> None:
        """The work between two steps; the next step begins after it."""
        if self._finished:  # it had been put off, and the program has ended in the meantime
            return
        if self._window is not None or self.graph is not None:
            kineto.mark(number)
        self._turn(actions, between_steps=True)
        if Action.START in actions or Action.GRAPH_START in actions:
            kineto.mark(number)
        if actions:
            self.log.begin(Instant.now())

    # ---- actions

    def _turn(self, actions: list[Action], *, between_steps: bool) -> None:
        if not actions:
            return
        for action in actions:
            if not self._lost and not self._do(action, between_steps=between_steps):
                self.plan.refused(time.monotonic())
                break
        if not between_steps:
            self._disturbed = True
        self.deadline_changed()

    def _do(self, action: Action, *, between_steps: bool) -> bool:
        """Do it; False where a recorder cannot begin now without harm."""
        if action is Action.START:
            return self._start(between_steps=between_steps)
        if action is Action.GRAPH_START:
            return self._start_graph()
        if action is Action.ADOPT:
            if self._window is not None:
                self._window.kind = "steps"
        elif action in (Action.GRAPH_KEEP, Action.GRAPH_DISCARD):
            graph, self.graph = self.graph, None
            self.modules.stop()
            self._checkpoints.stop()
            if graph is not None and self._stopped(graph.stop):
                if action is Action.GRAPH_KEEP:
                    self.storage.keep_graph(graph, self._graph_step)
                else:  # half a graph is of no use
                    graph.host_path.unlink(missing_ok=True)
        else:
            window = self._stop()
            if (
                action in (Action.SET_ASIDE, Action.HOLD) and window is not None
            ):  # in case nothing better follows
                window.held = self.storage.hold(window)
            if action is Action.SET_ASIDE:
                self._before = window
            elif action is Action.HOLD:
                self._hold(window)
            else:
                for early in (
                    self._held,
                    self._before,
                    window if action is Action.DISCARD else None,
                ):
                    self._forget(early)
                self._held = self._before = None
                if action is Action.KEEP and window is not None:
                    self.storage.keep(window, used_torch=True)
        return True

    def _may_cross(self) -> bool:
        """Whether one recorder of the timed part can end and the next one begin, as soon as PyTorch
        is left.
        """
        soon = (
            None if sys.getprofile() is not None else observer_safety.find_outermost_torch_frame()
        )
        with observer_safety.ignore_frame(soon):
            return observer_safety.is_safe_to_stop(
                every_thread=True in kineto.list_recorder_kinds(self.settings)
            )

    def _start(self, *, between_steps: bool) -> bool:
        settings = self.settings
        kinds = [
            kind
            for kind in kineto.list_recorder_kinds(settings)
            if observer_safety.is_safe_to_start(every_thread=kind)
        ]
        if not kinds:
            return False
        kind = "early" if self.plan.phase is Phase.EARLY else "steps"
        if settings.by_time or settings.whole:
            kind = "time" if settings.by_time else "block"
        self.on_start()
        self.storage.look_around()
        # The early part may hold the import of half of PyTorch: millions of Python calls. It goes
        # without stacks.
        hurried = kind == "early" and not settings.from_the_start
        shapes = settings.shapes
        if shapes is None:  # they keep every tensor's head alive, and a graph step has them all
            by_step = kind == "steps" or self.log.number > 0 or settings.from_the_start
            shapes = not (settings.graph_step and by_step)
        chosen = replace(settings, stacks=settings.stacks and not hurried, shapes=shapes)
        window = RecordedWindow(
            kineto.Kineto(chosen, every_thread=kinds[0]),
            kind,
            first_step=self.log.number + (0 if between_steps else 1),
            start_ns=time.time_ns(),
            stacks=chosen.stacks,
            shapes=shapes,
            called=self._called,
            census=list_live_storages() if settings.memory else None,
        )
        self._every_thread, self._began = kinds[0], True
        self._collectives.start()
        if settings.names_modules:
            self.modules.start()
        self._checkpoints.start()
        window.kineto.start()
        window.start_ns = time.time_ns()
        window.times.start()
        self._window = window
        if between_steps:
            self._disturbed = False
            if self.log.number == 0 and self._called:
                kineto.mark(0)
        return True

    def _stop(self) -> RecordedWindow | None:
        window, self._window = self._window, None
        if window is None:
            return None
        window.end_step, window.end_ns = max(self.log.number, window.first_step), time.time_ns()
        window.thread_cpu = window.times.stop()
        window.collectives = self._collectives.stop()
        self.modules.stop()
        self._checkpoints.stop()
        if not self._stopped(window.kineto.stop):
            return None
        window.last_census = list_live_storages() if self.settings.memory else None
        return window

    def _stopped(self, stop: Callable[[], None]) -> bool:
        """Stop a recorder; where it runs on the main thread and this is another one, let that one
        do it.
        """
        try:
            stop()
        except kineto.OtherThreadError:
            done = threading.Event()

            def stop_on_main() -> None:
                stop()
                done.set()

            if not (run_on_main_thread(stop_on_main) and done.wait(2.0)):
                print_once(
                    "other-thread",
                    "recording was begun on a thread that cannot be reached, and this PyTorch ends it there only: "
                    "nothing more is recorded; give the steps (`--steps 3..8`), to begin on the thread that trains",
                )
                self._lost = True
                self.plan.finish()
                return False
        return True

    def _hold(self, window: RecordedWindow | None) -> None:
        """Keep the better of two attempts: more whole steps, then with calls of modules, then more
        operators.
        """
        attempts = [attempt for attempt in (self._held, window) if attempt is not None]
        if not attempts:
            return

        def worth(attempt: RecordedWindow) -> tuple[int, bool, int]:
            operators = attempt.held.operators if attempt.held is not None else 0
            return attempt.end_step - attempt.first_step, attempt.called, operators

        best = max(attempts, key=worth)
        for attempt in attempts:
            if attempt is not best:
                self._forget(attempt)
        self._held = best

    def _forget(self, window: RecordedWindow | None) -> None:
        if window is not None:
            self.log.relabel(window.first_step, window.end_step, Mark.RECORDED, Mark.EARLY)
            if window.held is not None:
                window.held.path.unlink(missing_ok=True)

    def _start_graph(self) -> bool:
        # Not of the window's kind, whose annotations may still be open, where there is another one.
        every = sorted(
            kineto.list_recorder_kinds(replace(self.settings, memory=False)),
            reverse=not self._every_thread,
        )
        kinds = [kind for kind in every if observer_safety.is_safe_to_start(every_thread=kind)]
        if not kinds:
            return False
        self._graph_step = self.log.number
        graph = kineto.GraphStepRecorder(
            self.settings, self.storage.host_trace_path(), every_thread=kinds[0]
        )
        try:
            graph.start()
        except OSError as error:
            print_once("no-graph-step", f"the graph step is left out: {error.strerror or error}")
            return True
        self.graph = graph
        self._checkpoints.start()
        if self.settings.names_modules:
            self.modules.start()  # the same names as in the timed steps, which are matched by them
        return True

    def give_up(self) -> None:
        """After a failure of ours: do not leave Kineto running in the user's program."""
        window, self._window = self._window, None
        graph, self.graph = self.graph, None
        self._checkpoints.stop()
        for running in (window.kineto if window is not None else None, graph):
            if running is not None:
                with contextlib.suppress(Exception):  # it may be what has failed
                    running.stop()
        self.storage.history.end()

    # ---- forks

    def forked(self) -> bool:
        """This is a forked child: it must neither record nor write into the parent's files.

        Returns:
            Whether Kineto's state is still there, switched off. To end it costs time for each event
            so far, which loader workers should not pay; but call stacks and allocations cannot be
            switched off in another way.
        """
        self._finished = True
        self._checkpoints.stop()
        window, graph = self._window, self.graph
        self._window = self.graph = None
        inherits = window is not None
        if window is not None and (self.settings.memory or self.settings.stacks):
            kineto.abandon()
            inherits = False
        if inherits or graph is not None:
            torch._C._autograd._enable_record_function(False)
        if graph is not None:
            graph.redirect_in_child()
        return inherits


def run_after_annotation(frame: Any, call: Callable[[], None], *, outside: bool = False) -> None:
    """Run `call` when `frame` returns, or at once.

    Optimizer hooks run inside PyTorch's `Optimizer.step#...` annotation. A recorder stopped in
    there would leave it open, with an end that lies far behind the step. Python's profile hook
    tells when the frame is left; where somebody else uses that hook, the work is done at once.

    Args:
        frame: The one with the annotation; None for none.
        call: The work.
        outside: Not inside the profile hook, but soon after it, where this is the main thread: PyTorch's stack
            recorder would take the frames of a hook it is started in for those of the program.
    """
    if frame is None or sys.getprofile() is not None:
        call()
        return

    caller, events, inside, attempts = frame.f_back, 0, True, 0

    def soon() -> bool:
        return threading.current_thread() is threading.main_thread() and run_on_main_thread(
            when_outside
        )

    def when_outside() -> None:
        # Python may well begin within the hook what it was told to do soon, or in the midst of what
        # comes next.
        nonlocal attempts
        attempts += 1
        if not (inside or observer_safety.find_outermost_torch_frame() is not None):
            call()
        elif attempts > ATTEMPTS:
            run_on_main_thread_later(call)
        elif not soon():
            call()

    def watch(where: Any, event: str, _: Any) -> None:
        nonlocal events, inside
        events += 1
        left = (event == "return" and where is frame) or where is caller
        if left or events > EVENTS_TO_LEAVE:
            sys.setprofile(None)
            if not (outside and soon()):
                with observer_safety.ignore_frame(
                    frame if where is frame and event == "return" else None
                ):
                    call()
            inside = False  # last, with nothing called after it

    sys.setprofile(exclude_from_tracing(watch))
