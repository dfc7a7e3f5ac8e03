"""Frames that are finished when somebody first asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl


class Deferred:
    """A frame to be made later, from little that is kept until then.

    Args:
        make: Makes the frame; called once.
        kept: Its arguments.
    """

    __slots__ = ("_frame", "_kept", "_make")

    def __init__(self, make: Callable[..., pl.DataFrame], *kept: Any) -> None:
        self._make = make
        self._kept = kept
        self._frame: pl.DataFrame | None = None

    def frame(self) -> pl.DataFrame:
        """The frame, made now if it was not before."""
        if self._frame is None:
            self._frame = self._make(*self._kept)
            self._kept = ()
        return self._frame
