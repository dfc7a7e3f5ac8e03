"""Begins to record this process: called by the start-up hook when torch has been imported, or by
`record`.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from dataclasses import dataclass
from typing import Any

from traceloom.capture.settings import VARIABLE, Settings, parse_settings, print_once
from traceloom.errors import InputError

_recorder: Any = None
MINIMUM_TORCH = (2, 4)


def get_recorder() -> Any:
    """The recorder of this process, or None."""
    return _recorder


def begin() -> None:
    """Begin as the environment says. Launchers are left alone."""
    from traceloom.capture import main_thread

    text = os.environ.get(VARIABLE)
    if not text or _recorder is not None or not is_torch_supported() or main_thread.is_launcher():
        return
    record_milestone(f"{os.getpid()}.torch")
    try:
        settings = parse_settings(text)
    except (
        InputError
    ) as error:  # this process has imported another Traceloom than the one that records
        print_once(error.slug, f"nothing is recorded: {error.message}")
        return
    attach(settings)


def is_torch_supported() -> bool:
    """Whether this torch can be recorded; says so where it cannot."""
    import torch

    numbers = tuple(
        int(word) for word in torch.__version__.split("+")[0].split(".")[:2] if word.isdigit()
    )
    if numbers >= MINIMUM_TORCH:
        return True
    print_once(
        "old-torch",
        f"nothing is recorded: torch 2.4 or newer is needed, this is {torch.__version__}",
    )
    return False


def record_milestone(name: str) -> None:
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
    from traceloom.capture import distributed, in_code
    from traceloom.capture.kineto import exclude_from_compile
    from traceloom.capture.recorder import Recorder

    exclude_from_compile(in_code.step)
    distributed.mark_children()
    recorder = Recorder(settings)
    _recorder = recorder
    _Attachment(recorder, in_child=in_child)
    return recorder


def handle_fork(parent: Any) -> None:
    """In a forked child: it never continues the parent's recording.

    The child may be a rank of its own (`torch.multiprocessing` with fork), so it is attached anew
    and waits for its first module call or optimizer step. Where the parent was being recorded, only
    a child with a process group counts.
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
class _ReplacedFunction:
    """A function of a stranger's class or module that we have replaced; `remove` puts the original
    back.
    """

    kind: Any
    name: str
    original: Any
    ours: Any

    def remove(self) -> None:
        if vars(self.kind).get(self.name) is self.ours:
            setattr(self.kind, self.name, self.original)


class _Attachment:
    """Everything that ties a recorder to its process."""

    def __init__(self, recorder: Any, *, in_child: bool) -> None:
        import torch
        import torch.utils.data._utils.worker as workers

        from traceloom.capture import main_thread
        from traceloom.capture.main_thread import ShutdownHandlers
        from traceloom.capture.observer_safety import ProfilerHooks

        self.recorder = recorder
        self._handles: list[Any] = []  # what stands for as long as this process is recorded
        self._hooks: list[Any] = []  # what is called in every step
        self._waiting = True
        self._suspended = False
        self._optimizer_steps = 0
        self._has_optimizer: bool | None = None
        self.inherits_kineto = False  # a fork of a process that was being recorded
        self.watch_steps()
        self.watch_modules()
        self._yielding = ProfilerHooks(
            recorder.foreign_profiler,
            recorder.foreign_profiler_ended,
            recorder.profiler_stepped,
            recorder.profiler_has_stepped,
        )
        self._yielding.install()
        self.watch_compiler()
        # A process that serves a DataLoader is not recorded; nobody can tell until it begins to
        # serve.
        worker_loop = workers._worker_loop  # noqa: SLF001

        @functools.wraps(worker_loop)
        def serve(*args: Any, **kwargs: Any) -> Any:
            if recorder.pid == os.getpid():  # a spawned one; a fork has been detached already
                recorder.abandon()
            return worker_loop(*args, **kwargs)

        workers._worker_loop = serve  # noqa: SLF001
        self._handles.append(_ReplacedFunction(workers, "_worker_loop", worker_loop, serve))
        self.endings = ShutdownHandlers(recorder)
        recorder.on_start = self.endings.watch_signals
        recorder.attachment = self
        self.set_alarm()
        # There is something to record at once, or with the first device, module or optimizer call:
        # with stacks the imports to come would be recorded, millions of calls; in a fork, what the
        # parent was doing.
        if not in_child and (recorder.settings.early or not recorder.settings.stacks):
            if main_thread.is_device_ready(torch):
                recorder.torch_imported()
            else:
                main_thread.call_on_device_use(torch, self.device_is_used)
        if not in_child:
            self._alarm.changed()

    def suspend(self) -> None:
        """Nothing of ours is called any more, and no thread of ours runs, until `resume`."""
        self._suspended = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._alarm.stop(wait=True)
        self.endings.suspend()

    def resume(self) -> None:
        """Everything is as it was before `suspend`."""
        if not self._suspended:
            return
        self._suspended = False
        self.watch_steps()
        self.watch_modules()
        self.set_alarm()
        self.endings.resume()

    def detach(self, *, in_child: bool = False) -> None:
        """Take every hook away again."""
        global _recorder
        for handle in (*self._hooks, *self._handles):
            handle.remove()
        self._yielding.remove()
        if not in_child:  # its thread does not exist there, and its lock may be held for ever
            self._alarm.stop()
        self.endings.remove()
        if _recorder is self.recorder:
            _recorder = None

    def watch_steps(self) -> None:
        import torch
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        from traceloom.capture.kineto import exclude_from_compile

        recorder = self.recorder

        def before(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if self._waiting:
                self.called()

        def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            self._optimizer_steps += 1
            if self._waiting and self.inherits_kineto:
                return
            frame = sys._getframe(1)  # noqa: SLF001
            annotated = (
                frame.f_code.co_name == "wrapper" and "profile_name" in frame.f_code.co_varnames
            )
            recorder.optimizer_stepped(optimizer, frame if annotated else None)

        exclude_from_compile(before)
        exclude_from_compile(after)
        scale_and_step = GradScaler.step

        @functools.wraps(scale_and_step)
        def scaled_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            steps = self._optimizer_steps
            result = scale_and_step(scaler, optimizer, *args, **kwargs)
            if (
                steps == self._optimizer_steps
            ):  # gradients were infinite: the optimizer was left out, the step was not
                recorder.optimizer_stepped(optimizer)
            return result

        passes = torch.autograd.backward

        @functools.wraps(passes)
        def backward(*args: Any, **kwargs: Any) -> Any:
            result = passes(*args, **kwargs)
            if (
                self._has_optimizer is None
            ):  # asked once, with the first pass: optimizers are made before
                self._has_optimizer = any(
                    issubclass(type(obj), torch.optim.Optimizer) for obj in gc.get_objects()
                )
            if not self._has_optimizer:
                recorder.backward_ended()
            return result

        exclude_from_compile(backward)
        GradScaler.step, torch.autograd.backward = scaled_step, backward
        self._hooks += [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
            _ReplacedFunction(GradScaler, "step", scale_and_step, scaled_step),
            _ReplacedFunction(torch.autograd, "backward", passes, backward),
        ]

    def watch_modules(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        from traceloom.capture.kineto import exclude_from_compile

        if self.recorder.settings.names_modules:
            self._hooks += self.recorder.modules.install()
        if self._waiting:

            def called(_module: Any, _args: Any) -> None:
                self.called()

            exclude_from_compile(called)
            self._module_hook = register_module_forward_pre_hook(called)
            self._hooks.append(self._module_hook)

    def set_alarm(self) -> None:
        from traceloom.capture import kineto, main_thread

        recorder = self.recorder
        anywhere = True in kineto.list_recorder_kinds(recorder.settings)
        self._alarm = main_thread.DeadlineTimer(
            recorder.tick, deadline=lambda: recorder.plan.deadline, anywhere=anywhere
        )
        recorder.deadline_changed = self._alarm.changed

    def watch_compiler(self) -> None:
        """Code is compiled with the hooks that are set then, so ours for the first call must be
        removed before.
        """
        import torch
        import torch.nn.modules.module as modules

        compile_, has_hooks = torch.compile, modules._has_any_global_hook  # noqa: SLF001

        @functools.wraps(compile_)
        def compiling(*args: Any, **kwargs: Any) -> Any:
            if self._waiting:
                self.called(by="compile")
            return compile_(*args, **kwargs)

        @functools.wraps(has_hooks)
        def has_hooks_of_the_program() -> bool:
            """PyTorch warns of global hooks where a module is compiled; ours are no concern of the
            user.
            """
            own_ids = {hook.id for hook in self._hooks if hasattr(hook, "hooks_dict_ref")}
            hooks = ("backward_pre", "backward", "forward", "forward_pre")
            return any(set(getattr(modules, f"_global_{name}_hooks")) - own_ids for name in hooks)

        torch.compile, modules._has_any_global_hook = compiling, has_hooks_of_the_program  # noqa: SLF001
        self._handles += [
            _ReplacedFunction(torch, "compile", compile_, compiling),
            _ReplacedFunction(modules, "_has_any_global_hook", has_hooks, has_hooks_of_the_program),
        ]

    def device_is_used(self) -> None:
        if self.recorder.pid == os.getpid() and _recorder is self.recorder:
            self.recorder.torch_imported()
            self._alarm.changed()

    def called(self, *, by: str = "module") -> None:
        """The first call has come.

        Who compiles something need not use it: libraries do that when they are imported.
        """
        from traceloom.capture import distributed, main_thread

        if self.inherits_kineto and not main_thread.is_loader_worker():
            if distributed.get_distributed() is None:
                return  # still only a child; an optimizer step asks again
            from traceloom.capture.kineto import abandon

            abandon()
        self._waiting = False
        self._module_hook.remove()
        if not main_thread.is_loader_worker():
            self.recorder.used_torch = by == "module"
            self.recorder.first_call()
            self._alarm.changed()
