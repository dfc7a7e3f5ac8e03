"""What lies beside a host trace, in `<host trace>_resources`: contents of tensors, and sources.

PyTorch's observer leaves both there where it is told to; our recorder leaves the sources of compiled kernels.

Who made the trace made the directory too. So names are those that PyTorch gives, and what is read are files that lie in
the directory: no links, no devices, none larger than it may be.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from traceloom.array_types import Array
from traceloom.replay.plan import ITEM_BYTES
from traceloom.replay.values import RecordedTensor, contiguous

_MOST_DUMPED = 1 << 28  # bytes of all that is taken of a directory
_NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
_DUMP = re.compile(r"nid_(\d{1,18})_tid_(\d{1,9})\.dat")


class Resources:
    """The directory that belongs to a host trace; empty where there is none.

    Args:
        trace: The host trace. PyTorch leaves what belongs to `a.json` in `a_resources`, to `a.json.gz` in
            `a.json_resources`; whoever compresses `a.json` later has `a.json.gz` and `a_resources`.
    """

    def __init__(self, trace: str | Path) -> None:
        whole = str(trace).removesuffix(".gz")
        names = [f"{whole.removesuffix('.json')}_resources", f"{whole}_resources"]
        self.directory = next((path for path in map(Path, names) if path.is_dir() and not path.is_symlink()), None)
        self._left = _MOST_DUMPED

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The files in it, with their sizes in bytes."""
        if self.directory is None:
            return {}
        try:
            with os.scandir(self.directory) as entries:
                return {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                }
        except OSError:
            return {}

    @cached_property
    def dumps(self) -> Mapping[int, Mapping[int, str]]:
        """Files with what an integer tensor held when an op began: by node and number of the tensor among its inputs.

        PyTorch writes them with ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA=aten::embedding,...
        """
        out: dict[int, dict[int, str]] = defaultdict(dict)
        for name in self.sizes:
            if match := _DUMP.fullmatch(name):
                out[int(match[1])][int(match[2])] = name
        return out

    def dumped(self, name: str, tensor: RecordedTensor) -> Array | None:
        """What a tensor of integers held; None where the file is not of its size, or of other memory than its own.

        PyTorch writes the memory from the first element on, as many bytes as the tensor has. Of a tensor on a CPU it
        takes the offset, which is in elements, for one in bytes.
        """
        geometry = tensor.geometry
        size = tensor.elements * ITEM_BYTES.get(geometry.dtype, 0)
        is_misplaced = tensor.offset > 0 and tensor.device == "cpu" and tensor.item_bytes > 1
        is_whole = geometry.dtype.startswith(("int", "uint")) and geometry.span == tensor.elements
        if not is_whole or is_misplaced or self.sizes[name] != size:
            return None
        data = self.read(name, min(size, self._left))
        if data is None or len(data) != size:
            return None
        self._left -= size
        memory = np.frombuffer(data, dtype=np.dtype(geometry.dtype).newbyteorder("<"))
        strides = contiguous(geometry.shape) if geometry.strides is None else geometry.strides
        steps = [stride * memory.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(memory, geometry.shape, steps, writeable=False)

    def read(self, name: str, most: int) -> bytes | None:
        """A file of the directory; None where it has none of that name, or one of more than `most` bytes."""
        if self.directory is None or self.sizes.get(name, most + 1) > most:
            return None
        try:
            with open(
                self.directory / name, "rb", opener=lambda path, flags: os.open(path, flags | _NO_LINKS)
            ) as handle:
                data = handle.read(most + 1)
        except OSError:
            return None
        return data if len(data) <= most else None
