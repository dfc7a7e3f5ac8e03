"""Giving way to the user's own profilers, and following their steps.

Two profilers at once lose events silently (Kineto) or crash the process at its end (the legacy one), so ours stops
before one of theirs starts, and goes on when the last of theirs has ended. A profile of theirs with Python stacks would
show every function of ours that runs meanwhile, or that stands around its beginning: none does.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.profiler

from traceloom.capture import crossing
from traceloom.capture.kineto import ours

# Class, methods that begin, methods that end. The first one is over when PyTorch calls `_run_on_profiler_stop`.
_PROFILERS = (
    ("torch.autograd.profiler", "profile", ("_prepare_trace",), ()),
    ("torch.autograd.profiler", "emit_itt", ("__enter__",), ("__exit__",)),
    ("torch.autograd.profiler", "emit_nvtx", ("__enter__",), ("__exit__",)),
    ("torch.autograd.profiler_legacy", "profile", ("__enter__",), ("__exit__",)),
)


class Yielding:
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
        self._began, self._ended, self._stepped, self._after_step = began, ended, stepped, after_step
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
            if not ours() and getattr(profiler, "enabled", True):
                identity = id(profiler)
                with self._lock:
                    first = not self._active
                    # A profiler that was prepared, never started and then dropped has ended as well.
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
                if not ours():
                    self._leave(id(profiler))

        return end

    def _stopping(self, original: Any) -> Any:
        def stopped() -> Any:
            profiler = sys._getframe(1).f_locals.get("self")  # noqa: SLF001
            try:
                return original()
            finally:
                if not ours() and profiler is not None:
                    options = getattr(profiler, "experimental_config", None)
                    crossing.stopping(every_thread=bool(getattr(options, "profile_all_threads", False)))
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
        """Steps of a profiler begin and end its windows, so that a wrapper around them would be in its stacks."""
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
