"""Documents made of inputs that have not changed since: kept beside the cache of what was read.

An entry is named by the inputs as the user wrote them, the place, size and times of every file that they stand for (of
a capture: of every file in it), the code of the package and what else decides what was made. An input whose change
could go unseen (standard input, a file written a moment ago) has no entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from traceloom.errors import InputError, OutputError
from traceloom.files import open_regular, write
from traceloom.read.inputs import find
from traceloom.storage.cache import Seen, prune, root

MOST_BYTES = 1 << 26  # of one entry
CAP_BYTES = 10**9  # of all
Stamp = tuple[str, tuple[int, ...]]


class Kept:
    """The place of the documents that were made of some inputs.

    Args:
        paths: The inputs.
        beside: Other files that decide what is made.
        about: The choices that decide it.
    """

    def __init__(self, paths: Iterable[str], beside: Iterable[str], about: str) -> None:
        self._paths, self._beside, self._about = tuple(map(str, paths)), tuple(beside), about
        self._key = self._digest()

    def _digest(self) -> str:
        """Changes with the inputs, the code and the choices; empty where a change of the inputs could go unseen."""
        if "-" in self._paths:
            return ""
        try:
            discovered = find(self._paths)
            files = [source.path for source in discovered.inputs]
            for folder in discovered.captures:
                files += sorted(path for path in folder.iterdir() if path.is_file())
            seen = {path: Seen.now(path) for path in (*files, *map(Path, self._beside))}
            stamps = [(str(path.resolve()), now.stamp) for path, now in seen.items()]
        except (InputError, OSError, ValueError):  # who reads it will say what is wrong
            return ""
        if not all(now.settled for now in seen.values()):  # a change within the tick of the clock would not be seen
            return ""
        text = json.dumps([_code(), self._paths, stamps, self._about])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()

    @property
    def _folder(self) -> Path:
        return root() / "reports" / self._key

    def get(self, name: str) -> Any:
        """A document that was made; None where it was not, or not of these inputs, or cannot be read."""
        if self._key:
            with contextlib.suppress(OSError, ValueError), open_regular(self._folder / name) as file:
                document = json.loads(file.read())
                os.utime(self._folder)
                return document if isinstance(document, dict) else None
        return None

    def put(self, name: str, content: bytes) -> None:
        """Keep a document, as JSON, if the inputs are still what they were; what cannot be written is not kept."""
        if not self._key or len(content) > MOST_BYTES or self._digest() != self._key:
            return
        with contextlib.suppress(OSError, OutputError):
            write(self._folder / name, lambda out: out.write(content), force=True, private=True)
            prune(self._folder.parent, CAP_BYTES)


@cache
def _code() -> list[tuple[str, int, int]]:
    """Size and time of every file of the package: another version of it makes something else."""
    package = Path(__file__).parents[1]
    files = sorted(path for path in package.rglob("*") if path.suffix in {".py", ".json"})
    return [(str(file.relative_to(package)), (about := file.stat()).st_size, about.st_mtime_ns) for file in files]
