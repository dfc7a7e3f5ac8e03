"""Columns of very large files on disk while they are gathered: one nameless file per column."""

from __future__ import annotations

import tempfile
from typing import Any, BinaryIO

import numpy as np

from traceloom.array_types import Array
from traceloom.storage import ondisk

SPILL_BYTES = 500 * 10**6  # of text, from which on columns go to disk: in memory the report of more needs too much

_READ_BYTES = 1 << 22  # at once


class Spill:
    """Columns that grow on disk; the files vanish when they are closed, however the process ends."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], BinaryIO] = {}

    def add(self, table: str, name: str, values: Array) -> None:
        """Append values to a column.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        try:
            if (table, name) not in self._files:
                folder = ondisk.folder()
                folder.mkdir(parents=True, exist_ok=True)
                self._files[table, name] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open until `column`
            self._files[table, name].write(np.ascontiguousarray(values).data)
        except OSError as error:
            raise ondisk.no_space(error) from error

    def column(self, table: str, name: str, rest: list[Array], dtype: Any) -> Array:
        """The whole column, what was added and then the rest; it can be asked for once."""
        for values in rest:
            self.add(table, name, values)
        try:
            with self._files.pop((table, name)) as file:
                file.flush()
                values = ondisk.empty(file.tell() // np.dtype(dtype).itemsize, dtype)
                file.seek(0)
                into = values.view(np.ndarray).view(np.uint8)
                at = 0
                while count := file.readinto(into[at : at + _READ_BYTES].data):  # type: ignore[attr-defined]
                    at += count
        except OSError as error:
            raise ondisk.no_space(error) from error
        return values

    def holds(self, table: str, name: str) -> bool:
        """Whether something was added to the column."""
        return (table, name) in self._files

    def close(self) -> None:
        """Remove the columns that nobody asked for."""
        for file in self._files.values():
            file.close()
        self._files.clear()
