"""Giving way to the user's own profilers, and following their steps.

Two profilers at once lose events silently (Kineto) or crash the process at its end (the legacy one), so every way to
start one is wrapped: ours stops first, and goes on when the last of theirs has ended.
"""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from traceloom.capture.kineto import ours

# Class, methods that begin, methods that end.
_PROFILERS = (
    ("torch.autograd.profiler", "profile", ("_prepare_trace", "_start_trace"), ("__exit__",)),
    ("torch.autograd.profiler", "emit_itt", ("__enter__",), ("__exit__",)),
    ("torch.autograd.profiler", "emit_nvtx", ("__enter__",), ("__exit__",)),
    ("torch.autograd.profiler_legacy", "profile", ("__enter__",), ("__exit__",)),
)


class Yielding:
    """Watches the user's profilers. `install` once; `remove` restores every method."""

    def __init__(
        self,
        began: Callable[[], None],
        ended: Callable[[], None],
        stepped: Callable[[], None],
        after_step: Callable[[], None],
    ) -> None:
        self._began, self._ended, self._stepped, self._after_step = began, ended, stepped, after_step
        self._active: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.RLock()
        self._restore: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Wrap every profiler of PyTorch that there is."""
        for module_name, class_name, begins, ends in _PROFILERS:
            module = importlib.import_module(module_name)
            kind = getattr(module, class_name, None)
            for name in begins:
                self._replace(kind, name, self._beginning)
            for name in ends:
                self._replace(kind, name, self._ending)
        import torch.profiler

        self._replace(torch.profiler.profile, "step", self._stepping)

    def remove(self) -> None:
        """Put the original methods back."""
        for kind, name, original in reversed(self._restore):
            setattr(kind, name, original)
        self._restore.clear()

    def _replace(self, kind: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = vars(kind).get(name) if kind is not None else None
        if original is not None:
            self._restore.append((kind, name, original))
            setattr(kind, name, functools.wraps(original)(wrap(original)))

    def _beginning(self, original: Any) -> Any:
        def begin(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if not ours() and getattr(profiler, "enabled", True):
                self._enter(profiler)
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

    def _stepping(self, original: Any) -> Any:
        def step(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            self._stepped()
            try:
                return original(profiler, *args, **kwargs)
            finally:
                self._after_step()

        return step

    def _enter(self, profiler: Any) -> None:
        identity = id(profiler)
        with self._lock:
            first = not self._active
            # A profiler that was prepared, never started and then dropped has ended as well.
            self._active[identity] = weakref.ref(profiler, lambda _: self._leave(identity))
        if first:
            self._began()

    def _leave(self, identity: int) -> None:
        with self._lock:
            was_active = self._active.pop(identity, None) is not None
            last = was_active and not self._active
        if last:
            self._ended()
