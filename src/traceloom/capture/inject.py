"""Begins to record this process: called by the start-up hook when torch has been imported, or by `record`."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from typing import Any

from traceloom.capture.messages import say_once
from traceloom.capture.settings import VARIABLE, Settings, from_json

_recorder: Any = None
MINIMUM_TORCH = (2, 4)


def current() -> Any:
    """The recorder of this process, or None."""
    return _recorder


def begin() -> None:
    """Begin as the environment says. Launchers are left alone."""
    from traceloom.capture import moments

    text = os.environ.get(VARIABLE)
    if not text or _recorder is not None or not torch_is_new_enough():
        return
    if moments.is_launcher():
        return
    note("torch")
    attach(from_json(text))


def torch_is_new_enough() -> bool:
    """Whether this torch can be recorded; says so where it cannot."""
    import torch

    numbers = tuple(int(word) for word in torch.__version__.split("+")[0].split(".")[:2] if word.isdigit())
    if numbers >= MINIMUM_TORCH:
        return True
    say_once("old-torch", f"nothing is recorded: torch 2.4 or newer is needed, this is {torch.__version__}")
    return False


def note(name: str) -> None:
    """Leave a trace for the diagnosis at the end: how far a process came."""
    marker = os.environ.get("TRACELOOM_MARKER")
    if marker:
        try:
            os.close(os.open(os.path.join(os.path.dirname(marker), name), os.O_CREAT | os.O_WRONLY))  # noqa: PTH118, PTH120
        except OSError:
            return  # only the diagnosis would have used it


def attach(settings: Settings, *, in_child: bool = False) -> Any:
    """Record this process with these settings; gives the recorder. `in_child`: within a fork."""
    global _recorder
    from traceloom.capture import in_code
    from traceloom.capture.compiler import never_compiled
    from traceloom.capture.recorder import Recorder

    never_compiled(in_code.step)
    recorder = Recorder(settings)
    _recorder = recorder
    Attachment(recorder, in_child=in_child)
    return recorder


def forked(parent: Any) -> None:
    """In a forked child: it never continues the parent's recording.

    The child may be a rank of its own (`torch.multiprocessing` with fork), so it is attached anew and waits for its
    first module call or optimizer step. Where the parent was being recorded, only a child with a process group counts.
    """
    global _recorder
    in_graph_step = parent.graph is not None
    inherits_kineto = parent.forked()
    parent.attachment.detach(in_child=True)
    _recorder = None
    if VARIABLE in os.environ and not in_graph_step:
        attach(parent.settings, in_child=True)
        _recorder.attachment.inherits_kineto = inherits_kineto


@dataclass
class _Restored:
    """A method of a stranger's class that we have replaced; `remove` puts the original back."""

    kind: Any
    name: str
    original: Any
    ours: Any

    def remove(self) -> None:
        if vars(self.kind).get(self.name) is self.ours:
            setattr(self.kind, self.name, self.original)


class Attachment:
    """Everything that ties a recorder to its process."""

    def __init__(self, recorder: Any, *, in_child: bool) -> None:
        from traceloom.capture.endings import Endings

        self.recorder = recorder
        self._handles: list[Any] = []
        self._waiting = True
        self.inherits_kineto = False  # a fork of a process that was being recorded
        self._watch_steps()
        self._watch_profilers()
        self._watch_first_call(in_child=in_child)
        self.endings = Endings(recorder)
        recorder.on_start = self.endings.watch_signals
        recorder.attachment = self

    def detach(self, *, in_child: bool = False) -> None:
        """Take every hook away again."""
        global _recorder
        for handle in self._handles:
            handle.remove()
        self._yielding.remove()
        if not in_child:  # its thread does not exist there, and its lock may be held for ever
            self._alarm.stop()
        self.endings.remove()
        if _recorder is self.recorder:
            _recorder = None

    def _watch_steps(self) -> None:
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        from traceloom.capture.compiler import never_compiled

        recorder = self.recorder
        self._optimizer_steps = 0

        def before(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if self._waiting:
                self._called()

        def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            self._optimizer_steps += 1
            if self._waiting and self.inherits_kineto:
                return
            frame = sys._getframe(1)  # noqa: SLF001
            annotated = frame.f_code.co_name == "wrapper" and "profile_name" in frame.f_code.co_varnames
            recorder.optimizer_stepped(optimizer, frame if annotated else None)

        never_compiled(before)
        never_compiled(after)
        scale_and_step = GradScaler.step

        @functools.wraps(scale_and_step)
        def scaled_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            steps = self._optimizer_steps
            result = scale_and_step(scaler, optimizer, *args, **kwargs)
            if steps == self._optimizer_steps:  # gradients were infinite: the optimizer was left out, the step was not
                recorder.optimizer_stepped(optimizer)
            return result

        GradScaler.step = scaled_step
        self._handles += [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
            _Restored(GradScaler, "step", scale_and_step, scaled_step),
        ]

    def _watch_profilers(self) -> None:
        from traceloom.capture.yielding import Yielding

        recorder = self.recorder
        self._yielding = Yielding(
            recorder.foreign_profiler,
            recorder.foreign_profiler_ended,
            recorder.profiler_stepped,
            recorder.profiler_has_stepped,
        )
        self._yielding.install()

    def _watch_first_call(self, *, in_child: bool) -> None:
        """The first module call or optimizer step; in a plain script also a moment after torch was imported.

        A child of multiprocessing may be a loader worker, which nobody can tell when it imports torch; there only the
        first call decides.
        """
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook

        from traceloom.capture import moments
        from traceloom.capture.compiler import never_compiled

        recorder = self.recorder
        stacks_at_once = recorder.settings.stacks and not recorder.settings.early  # imports would be in them
        guess = not (in_child or stacks_at_once or moments.is_child_of_multiprocessing())

        def called(_module: Any, _args: Any) -> None:
            self._called()

        never_compiled(called)
        self._module_hook = register_module_forward_pre_hook(called)
        self._handles.append(self._module_hook)

        def tick() -> None:
            if self._waiting and guess and moments.device_is_ready(torch):
                self._stop_waiting()
                recorder.first_call()
            recorder.tick()

        self._alarm = moments.Alarm(tick, poll=lambda: self._waiting and guess, deadline=lambda: recorder.plan.deadline)
        recorder.deadline_changed = self._alarm.changed
        if not in_child:
            self._alarm.changed()

    def _called(self) -> None:
        from traceloom.capture import distributed, moments

        if self.inherits_kineto and not moments.is_loader_worker():
            if distributed.module() is None:
                return  # still only a child; an optimizer step asks again
            from traceloom.capture.kineto import abandon

            abandon()
        self._stop_waiting()
        if not moments.is_loader_worker():
            self.recorder.used_torch = True
            self.recorder.first_call()
            self._alarm.changed()

    def _stop_waiting(self) -> None:
        self._waiting = False
        self._module_hook.remove()
