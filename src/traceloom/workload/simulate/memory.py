"""The memory that a simulation may take."""

from traceloom.errors import UsageError
from traceloom.system import units
from traceloom.system.process import get_free_memory

MIN_FREE_BYTES = 1 << 28  # that what grows step by step leaves to the system


def require_memory(needed: int, what: str, hint: str) -> None:
    """Checks that memory is free before it is taken.

    Args:
        needed: Bytes.
        what: What takes them, as the beginning of a sentence: `8 nodes need`.
        hint: How to need less.

    Raises:
        UsageError: `no-memory-left`: less is free than is needed.
    """
    free = get_free_memory()
    if free is not None and free < needed:
        raise UsageError(
            f"{what} {units.format_size(needed)} of memory, and {units.format_size(free)} are free",
            slug="no-memory-left",
            hint=hint,
        )
