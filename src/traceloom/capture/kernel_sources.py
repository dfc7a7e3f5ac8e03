"""Sources of the compiled kernels that a graph step launched, beside its host trace.

A host trace names the file of each kernel's source and not where it lies; PyTorch's profiler, which runs meanwhile,
writes the whole path. PyTorch's own list (`PyCodeCache.modules`) lacks the kernels that its worker processes compiled.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from traceloom.capture import writing

FOLDER = ".host_resources"  # behind the name of a process: where PyTorch's observer would leave them
FILE_NAME = re.compile(r"\w[\w-]*\.py")
MOST_BYTES = 1 << 20  # of a source; a plan reads no longer one
MOST_TOGETHER = 1 << 26
_PIECE = 1 << 20
_LONGEST = 4096  # of a path
_NAMED = re.compile(rb'"kernel_file": ?("(?:[^"\\\n]|\\.){1,%d}")' % _LONGEST)


@dataclass
class KernelSources:
    """What was copied.

    Attributes:
        files: Names in the folder.
        left_out: Of those that were not copied the name and why.
    """

    files: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def copy_sources(trace: Path, folder: Path) -> KernelSources:
    """Copy the sources that a trace of Kineto in plain JSON names into a folder, which is made where there are any.

    Raises:
        OSError: The trace cannot be read, or the folder not be written.
    """
    out, left = KernelSources(), MOST_TOGETHER
    for path in sorted(_named(trace)):
        if path.suffix != ".py":  # none is stated, or it is no module of Python
            continue
        if not FILE_NAME.fullmatch(path.name) or path.name in out.files:
            out.left_out.append((path.name, "no name for a file of its own"))
            continue
        most = min(MOST_BYTES, left)
        try:
            if not path.is_file():
                out.left_out.append((path.name, "there is no such file any more"))
                continue
            with path.open("rb") as file:
                text = file.read(most + 1)
        except OSError as error:
            out.left_out.append((path.name, error.strerror or str(error)))
            continue
        if len(text) > most:
            out.left_out.append((path.name, "too large"))
            continue
        folder.mkdir(exist_ok=True)
        with writing.replacing(folder / path.name) as temporary:
            temporary.write_bytes(text)
        left -= len(text)
        out.files.append(path.name)
    return out


def _named(trace: Path) -> set[Path]:
    """The paths of sources in a trace, read piece by piece: it may be long."""
    texts: set[bytes] = set()
    rest = b""
    with trace.open("rb") as file:
        while piece := file.read(_PIECE):
            text = rest + piece
            texts.update(_NAMED.findall(text))
            rest = text[-2 * _LONGEST :]
    paths = set()
    for text in texts:
        try:
            paths.add(Path(json.loads(text)))
        except ValueError:  # noqa: PERF203  (there are few; no JSON: PyTorch escapes little)
            continue
    return paths
