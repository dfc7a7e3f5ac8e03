"""Where a demo keeps its store: a temporary directory, or an empty one that it is given and marks as its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from traceloom import leaving
from traceloom.errors import OutputError, UsageError
from traceloom.files import is_address

MARK = "traceloom-demo"
"""The file that says that a store is a demo's, and whether it was filled to the end."""

_FULL = "full\n"


class DemoDirectory(NamedTuple):
    """The directory of a demo's store. `full`: it was filled before."""

    path: Path
    full: bool

    def filled(self) -> None:
        """It was filled to the end."""
        (self.path / MARK).write_text(_FULL, encoding="ascii")


@contextmanager
def demo_directory(store: str) -> Iterator[DemoDirectory]:
    """Where the demo keeps its store; a temporary directory is removed at the end.

    Args:
        store: A directory that is empty, not there yet, or a demo's own; "" for a temporary one.

    Raises:
        UsageError: `wrong-usage`: it is an address.
        OutputError: `cannot-write`: it cannot be made, holds something else, or a demo that was not filled to the end.
    """
    if not store:
        with (
            tempfile.TemporaryDirectory(prefix="traceloom-demo-", ignore_cleanup_errors=True) as temporary,
            leaving.undone_on_leaving(lambda: shutil.rmtree(temporary, ignore_errors=True)),
        ):
            yield DemoDirectory(Path(temporary), full=False)
        return
    if is_address(store):
        raise UsageError("a demo is kept in a directory", slug="wrong-usage", where=store[:80])
    yield _prepared(Path(store).absolute())


def _prepared(path: Path) -> DemoDirectory:
    mark = path / MARK
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mark.is_file():
            if mark.read_text(encoding="ascii", errors="replace") == _FULL:
                return DemoDirectory(path, full=True)
            reason, hint = "a demo was not filled to the end here", "remove the directory, and start again"
        elif any(path.iterdir()):
            reason, hint = "the directory holds other things; no demo is put among them", "name an empty one, or none"
        else:
            mark.touch()
            return DemoDirectory(path, full=False)
    except OSError as error:
        reason = f"a demo cannot be kept there: {(error.strerror or str(error)).lower()}"
        raise OutputError(reason, slug="cannot-write", where=str(path), hint="name another directory") from error
    raise OutputError(reason, slug="cannot-write", where=str(path), hint=hint)
