"""What the program does that matters to its recorder: steps, first calls, profilers, annotations.

Nothing here stays on the stack while the program's code runs: hooks return before it goes on, and
functions that have no hook are replaced by what tells of a lookup and gives out the original.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.modules.module as modules
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ExecutionTraceObserver

from traceloom.capture.session import PROFILERS, Replaced, ToldBefore, exclude_from_compile


class Listener(Protocol):
    """Who is told; nothing of it may raise."""

    def called(self) -> None:
        """A module is called for the first time."""

    def compiles(self) -> None:
        """The program compiles something: hooks on modules must be gone by then."""

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step."""

    def scaler_updates(self) -> None:
        """A gradient scaler has let its optimizer make a step, or left that out."""

    def observer_begins(self, observer: Any) -> None:
        """An execution trace observer is about to be registered."""

    def quiet_moment(self) -> None:
        """No operator of this thread is open: a backward pass or optimizer step is about to begin."""

    def backward_begins(self) -> None:
        """A backward pass is about to begin."""

    def annotations_closed(self) -> None:
        """The last open fast annotation was closed."""

    def profiler_begins(self, profiler: Any) -> None:
        """A profiler of PyTorch is about to begin."""

    def profiler_stepped(self) -> None:
        """The program's own profiler is about to make a step."""


class FastAnnotations:
    """Counts the fast annotations that are open, in place of PyTorch's class for them.

    A session that begins while one is open makes the program raise at its end. Launches of compiled
    kernels are such annotations; a session of all threads does not take up which file one is from.
    """

    def __init__(self, closed: Callable[[], None]) -> None:
        self.open: weakref.WeakSet[Any] = weakref.WeakSet()
        self.kernel_files: set[str] = set()
        kernel_files = self.kernel_files
        fast = torch._C._profiler._RecordFunctionFast
        entered = self.open

        class _RecordFunctionFast:
            __slots__ = ("__weakref__", "_inner")
            __doc__ = fast.__doc__

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._inner = fast(*args, **kwargs)
                for values in (*args[2:], *kwargs.values()):
                    if isinstance(values, dict) and isinstance(values.get("kernel_file"), str):
                        kernel_files.add(values["kernel_file"])

            def __enter__(self) -> None:
                self._inner.__enter__()
                entered.add(self)

            def __exit__(self, *error: object) -> None:
                self.close(*error)
                if not entered:
                    closed()

            def close(self, *error: object) -> None:
                if self in entered:
                    entered.discard(self)
                    self._inner.__exit__(*(error or (None, None, None)))

        self._replaced = Replaced(torch._C._profiler, "_RecordFunctionFast", _RecordFunctionFast)

    def close(self) -> None:
        """Ends them all; their own ends do nothing any more."""
        for annotation in list(self.open):
            annotation.close()

    def remove(self) -> None:
        """Puts PyTorch's class back."""
        self._replaced.remove()


class OpenAnnotations:
    """The `record_function` blocks that are open, for the kinds of recording that must close them.

    What was opened under a session of one thread, or under our execution trace observer, must be
    closed before one of the program begins: the end would be written into memory that is gone.
    """

    def __init__(self) -> None:
        kind = torch.autograd.profiler.record_function
        self._open: list[Any] = []
        open_, enter, leave = self._open, kind.__enter__, kind.__exit__

        @functools.wraps(enter)
        def entering(annotation: Any) -> Any:
            open_.append(annotation)
            return enter(annotation)

        @functools.wraps(leave)
        def leaving(annotation: Any, *error: Any) -> Any:
            with contextlib.suppress(ValueError):
                open_.remove(annotation)
            return leave(annotation, *error)

        self._replaced = [
            Replaced(kind, "__enter__", entering),
            Replaced(kind, "__exit__", leaving),
        ]

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Ends them all, the innermost first; their own ends do nothing any more."""
        while self._open:
            annotation = self._open.pop()
            if annotation.record is not None:
                with contextlib.suppress(RuntimeError), torch._C.DisableTorchFunctionSubclass():
                    torch.ops.profiler._record_function_exit._RecordFunction(annotation.record)

    def remove(self) -> None:
        """Puts PyTorch's methods back."""
        for replaced in self._replaced:
            replaced.remove()


class _ToldAutograd(types.ModuleType):
    """`torch.autograd` while somebody wants to know of backward passes."""

    @property
    def backward(self) -> Any:
        # Code that names it is about to call it; the compiler, for one, goes through all names.
        if "backward" in sys._getframe(1).f_code.co_names:
            _backward_listener()
        return self.__dict__["backward"]

    @backward.setter
    def backward(self, value: Any) -> None:
        self.__dict__["backward"] = value


_backward_listener: Callable[[], None] = lambda: None  # noqa: E731


class _BackwardHook:
    def __init__(self, tell: Callable[[], None]) -> None:
        global _backward_listener
        _backward_listener = tell
        torch.autograd.__class__ = _ToldAutograd

    def remove(self) -> None:
        global _backward_listener
        _backward_listener = lambda: None  # noqa: E731
        torch.autograd.__class__ = types.ModuleType


class ProgramHooks:
    """Everything that ties a recorder to its program; installed whole or not at all."""

    def __init__(
        self, listener: Listener, *, module_hooks: list[Any], tracks_annotations: bool
    ) -> None:
        self._listener = listener
        self._handles: list[Any] = list(module_hooks)
        self._own_ids: set[int] = {hook.id for hook in module_hooks}
        self._first_call: Any = None
        self.fast: FastAnnotations
        self.annotations: OpenAnnotations | None = None
        try:
            self._install(tracks_annotations=tracks_annotations)
        except BaseException:
            self.remove()
            raise

    def _install(self, *, tracks_annotations: bool) -> None:
        listener, handles = self._listener, self._handles

        def called(_module: Any, _args: Any) -> None:
            self.forget_first_call()
            listener.called()

        def before(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            listener.quiet_moment()

        def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            listener.optimizer_stepped(optimizer)

        for hook in (called, before, after):
            exclude_from_compile(hook)
        self._first_call = register_module_forward_pre_hook(called)
        self._own_ids.add(self._first_call.id)
        handles += [
            self._first_call,
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
            _BackwardHook(listener.backward_begins),
        ]
        self.fast = FastAnnotations(listener.annotations_closed)
        handles.append(self.fast)
        if tracks_annotations:
            self.annotations = OpenAnnotations()
            handles.append(self.annotations)
            begins = vars(ExecutionTraceObserver)["register_callback"]
            told = ToldBefore(begins, listener.observer_begins)
            handles.append(Replaced(ExecutionTraceObserver, "register_callback", told))
        update = ToldBefore(GradScaler.update, lambda _: listener.scaler_updates())
        handles.append(Replaced(GradScaler, "update", update))
        for kind, name in PROFILERS:
            method = vars(kind)[name]
            handles.append(Replaced(kind, name, ToldBefore(method, listener.profiler_begins)))
        step = torch.profiler.profile.step
        told = ToldBefore(step, lambda _: listener.profiler_stepped())
        handles.append(Replaced(torch.profiler.profile, "step", told))
        self._watch_compiler()

    def _watch_compiler(self) -> None:
        """Code is compiled with the hooks that are set then, so the one for the first call goes."""
        compile_, has_hooks = torch.compile, modules._has_any_global_hook

        @functools.wraps(compile_)
        def compiling(*args: Any, **kwargs: Any) -> Any:
            self.forget_first_call()
            self._listener.compiles()
            return compile_(*args, **kwargs)

        @functools.wraps(has_hooks)
        def has_hooks_of_the_program() -> bool:
            """PyTorch warns of global hooks where a module is compiled; ours are no concern of it."""
            kinds = ("backward_pre", "backward", "forward", "forward_pre")
            return any(
                set(getattr(modules, f"_global_{name}_hooks")) - self._own_ids for name in kinds
            )

        self._handles += [
            Replaced(torch, "compile", compiling),
            Replaced(modules, "_has_any_global_hook", has_hooks_of_the_program),
        ]

    def forget_first_call(self) -> None:
        if self._first_call is not None:
            self._first_call.remove()

    def remove(self) -> None:
        handles, self._handles = self._handles, []
        for handle in reversed(handles):
            handle.remove()


def is_profiler_active(profiler: weakref.ref[Any] | None) -> bool:
    """Whether the program's own profiler runs, or is prepared to."""
    if torch.autograd.profiler._is_profiler_enabled:
        return True
    alive = profiler() if profiler is not None else None
    return alive is not None and getattr(alive, "kineto_results", 0) is None


def defines_modules() -> bool:
    """Whether the program has classes of modules of its own, which it will then call."""
    return any(
        not kind.__module__.startswith("torch.") for kind in _iterate_subclasses(torch.nn.Module)
    )


def _iterate_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for below in kind.__subclasses__():
        yield below
        yield from _iterate_subclasses(below)


def is_loading() -> bool:
    """Whether some thread imports a library, or is inside PyTorch's compiler, just now."""
    package = Path(torch.__file__).parent
    compiler = tuple(f"{package}{os.sep}{part}{os.sep}" for part in ("_dynamo", "_inductor"))
    libraries = (str(package.parent), sysconfig.get_path("purelib"))
    for frame in sys._current_frames().values():
        at: Any = frame
        while at is not None:
            code = at.f_code
            if code.co_filename.startswith(compiler) or (
                code.co_name == "<module>"
                and code.co_filename.startswith(libraries)
                and at.f_globals.get("__name__") != "__main__"  # `python -m`
            ):
                return True
            at = at.f_back
    return False


def has_optimizer() -> bool:
    """Whether an optimizer was made: PyTorch marks the `step` of its class then."""
    kinds = (torch.optim.Optimizer, *_iterate_subclasses(torch.optim.Optimizer))
    return any(getattr(kind.step, "hooked", False) for kind in kinds)
