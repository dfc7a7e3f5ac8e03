"""Columns of very large files on disk: one file per column, mapped into memory when the trace is put together."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traceloom.errors import InputError

SPILL_BYTES = 2 * 10**9  # of text, from which on columns go to disk

Array = NDArray[Any]


class Spill:
    """A temporary directory of columns.

    Args:
        folder: Where it is made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="spill-", dir=folder))
        self._numbers: dict[tuple[str, str], int] = {}

    def add(self, table: str, name: str, values: Array) -> None:
        """Append values to a column.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        number = self._numbers.setdefault((table, name), len(self._numbers))
        try:
            with (self._folder / str(number)).open("ab") as file:
                file.write(np.ascontiguousarray(values).data)
        except OSError as error:
            raise InputError(
                f"the columns of this large trace do not fit the disk: {error.strerror}",
                slug="no-space",
                where=str(self._folder),
                hint="set TRACELOOM_CACHE_DIR to a directory with more space",
            ) from error

    def column(self, table: str, name: str, rest: list[Array], dtype: Any) -> Array:
        """The whole column: what was added, then the rest; read-only, paged in from disk as it is used."""
        for values in rest:
            self.add(table, name, values)
        path = self._folder / str(self._numbers[table, name])
        return np.memmap(path, dtype=dtype, mode="r")

    def holds(self, table: str, name: str) -> bool:
        """Whether something was added to the column."""
        return (table, name) in self._numbers

    def close(self) -> None:
        """Remove the directory; mapped columns stay readable until they are dropped."""
        shutil.rmtree(self._folder, ignore_errors=True)
