"""What `traceloom memory` is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Choices of `traceloom memory`.

    Attributes:
        ranks: Only these ranks; None for all.
        by: How memory is divided: one of `analyze.allocations.BY`.
        depth: How many parts of a scope's or module's path are told apart; None for all.
        at: The instant: `peak`, `start`, `end`, `step N` (the highest point of that step) or nanoseconds after the
            start of the recording, as text.
        top: Rows of a table on a terminal.
        full_op_names: Names keep the namespace of the operator.
    """

    ranks: tuple[int, ...] | None = None
    by: str = "scope"
    depth: int | None = None
    at: str = "peak"
    top: int = 10
    full_op_names: bool = False
