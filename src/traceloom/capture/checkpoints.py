"""What activation checkpointing itself does in the forward pass, marked while Kineto runs.

Without stacks nothing else in a trace tells it: the state of chance is copied, hooks and contexts are made, in Python.
Two marks stand around each checkpointed part, one for what comes before it and one for what comes behind it. Only the
way without reentrant autograd is marked; the older one has a node of its own in every trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from traceloom.capture.kineto import annotate

NAME = "traceloom.checkpoint"
# Who holds the function that checkpoints; each calls it by its own name for it.
_HOLDERS = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
_FUNCTION = "_checkpoint_without_reentrant_generator"
_ORIGINAL = "_traceloom_original"


class CheckpointMarks:
    """Marks checkpoints between `start` and `stop`, where the program has imported them."""

    def __init__(self) -> None:
        self._on = False
        self._replaced: list[tuple[Any, Any, Any]] = []

    def start(self) -> None:
        """From now on checkpoints are marked."""
        self._on = True
        for holder in _HOLDERS:
            module = sys.modules.get(holder)
            function = vars(module).get(_FUNCTION) if module is not None else None
            if function is not None:
                # a module that was imported meanwhile has ours under its own name
                original = getattr(function, _ORIGINAL, function)
                marked = self._marked(original)
                setattr(module, _FUNCTION, marked)
                self._replaced.append((module, original, marked))

    def stop(self) -> None:
        """Leave PyTorch as it was; a checkpoint that is going on ends as it began."""
        self._on = False
        for module, original, marked in self._replaced:
            if vars(module).get(_FUNCTION) is marked:
                setattr(module, _FUNCTION, original)
        self._replaced = []

    def _marked(self, original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
        def checkpointing(*args: Any, **kwargs: Any) -> Iterator[None]:
            parts = original(*args, **kwargs)
            return _Parts(parts) if self._on and not torch.compiler.is_compiling() else parts

        checkpointing.__name__ = _FUNCTION
        setattr(checkpointing, _ORIGINAL, original)
        return checkpointing


class _Parts:
    """A generator whose every advance is marked."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __iter__(self) -> _Parts:
        return self

    def __next__(self) -> None:
        opened = annotate(NAME)
        try:
            next(self._inner)
        finally:
            opened.__exit__(None, None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
