"""Keeping torch.compile out of our hooks: it would trace them, warn about them and break graphs at them."""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_frames: Any = torch._C._dynamo.eval_frame
# Older versions can skip a frame, but not what it calls; there tracing is switched off and on around our work.
pause: Callable[[None], Any] | None = None if hasattr(_frames, "set_code_exec_strategy") else _frames.set_eval_frame


def never_compiled(function: _F) -> _F:
    """Let torch.compile call this function as it is, without importing the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # never inlined into compiled code
    return never_traced(function)


def never_traced(function: _F) -> _F:
    """Let the frame of this function, and what it calls, run in plain Python."""
    if pause is None:
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    else:
        _frames.skip_code(function.__code__)
    return function
