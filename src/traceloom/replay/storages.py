"""Which recorded tensors are one register, and which version of its storage each of them is on.

The numbers of a host trace are used again when what they named has died. So a storage here is a version: it begins
where an op returns a storage that it was not given, or where an op reads one that nothing recorded had made (an
external one), and ends with its last use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import polars as pl
from msgspec import structs

from traceloom.replay.plan import frame
from traceloom.replay.values import RecordedTensor, contiguous


class Storages:
    """Follows storages through the ops of a rank, in the order in which they are run."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self._registers: dict[tuple[Any, ...], int] = {}
        self._exists: set[int] = set()
        self._latest: dict[int, int] = {}
        self._recorded: list[int] = []
        self._bytes: list[int] = []
        self._device: list[str] = []
        self._external: list[bool] = []
        self._tensors: list[tuple[int, int, tuple[int, ...], tuple[int, ...], str]] = []
        self.guessed_strides = 0

    def read(self, tensor: RecordedTensor) -> tuple[int, int | None]:
        """The register of a tensor that an op is given, a row of `tensors`.

        Beside it another register on the same storage that it must be made of first, where no op made it.
        """
        version = self._live.get(tensor.identity)
        # What nothing recorded made may have taken the number of a storage that died: it is larger, or elsewhere.
        if version is None or (
            (not self._external[version] and tensor.end_bytes > self._bytes[version])
            or self._device[version] != tensor.device
        ):
            version = self._begin(tensor, external=True)
        register = self._register(version, tensor, by_shape=True)
        source = None
        if register not in self._exists:
            source = None if self._external[version] else self._latest[version]
            self._exists.add(register)
        self._latest[version] = register
        return register, source

    def has(self, tensor: RecordedTensor) -> bool:
        """Whether an op that was run made this very tensor."""
        version = self._live.get(tensor.identity)
        if version is None:
            return False
        geometry = tensor.geometry
        last = tensor.number if geometry.strides is None else None
        return self._registers.get((version, tensor.offset, geometry, last)) in self._exists

    def make(self, tensors: list[RecordedTensor], read: Iterable[RecordedTensor]) -> list[int]:
        """The registers of the tensors that an op returns, of those that it was given.

        What is on a storage that the op was given is a view of it, or was written in place; what is not begins a new
        version.
        """
        numbers = {tensor.identity for tensor in read}
        registers = []
        for tensor in tensors:
            identity = tensor.identity
            version = self._live.get(identity)
            if identity not in numbers or version is None:
                version = self._begin(tensor, external=False)
                numbers.add(identity)
            register = self._register(version, tensor, by_shape=False)
            self._exists.add(register)
            self._latest[version] = register
            registers.append(register)
        return registers

    def forget(self, tensors: Iterable[RecordedTensor]) -> None:
        """What an op that is not run returned: whoever reads it gets an external one."""
        for tensor in tensors:
            self._live.pop(tensor.identity, None)

    def frames(self, rank: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The frames `tensors` and `storages` of the plan; lives and what external ones hold are not settled."""
        versions, offsets, shapes, strides, dtypes = zip(*self._tensors, strict=True) if self._tensors else ((),) * 5
        tensors = frame(
            "tensors",
            {
                "rank": [rank] * len(versions), "tensor": range(len(versions)), "storage": versions,
                "offset": offsets, "shape": shapes, "strides": strides, "dtype": dtypes,
            },
        )  # fmt: skip
        count = len(self._recorded)
        nothing = [None] * count
        storages = frame(
            "storages",
            {
                "rank": [rank] * count, "storage": range(count), "recorded": self._recorded, "bytes": self._bytes,
                "device": self._device, "external": self._external, "first_op": [0] * count, "last_op": [0] * count,
                "content": nothing, "low": nothing, "high": nothing, "evidence": nothing,
            },
        )  # fmt: skip
        return tensors, storages

    def _begin(self, tensor: RecordedTensor, *, external: bool) -> int:
        self._live[tensor.identity] = version = len(self._recorded)
        self._recorded.append(tensor.storage)
        self._bytes.append(0)
        self._device.append(tensor.device)
        self._external.append(external)
        return version

    def _register(self, version: int, tensor: RecordedTensor, *, by_shape: bool) -> int:
        """The register of a geometry.

        Without strides a transposed square matrix is told from itself by the number of the tensor; but autograd gives
        what it kept another number, so who reads takes the first of that shape.
        """
        self._bytes[version] = max(self._bytes[version], tensor.end_bytes)
        geometry, offset = tensor.geometry, tensor.offset
        key = (version, offset, geometry, tensor.number if geometry.strides is None else None)
        register = self._registers.get(key)
        if register is not None:
            return register
        shape, strides, dtype, _ = structs.astuple(geometry)
        of_shape = (version, offset, shape, dtype)
        if strides is None and by_shape:
            register = self._registers.get(of_shape)
        if register is None:
            register = self._registers[key] = len(self._tensors)
            self._registers.setdefault(of_shape, register)
            self.guessed_strides += strides is None and len(shape) > 1
            self._tensors.append((version, offset, shape, contiguous(shape) if strides is None else strides, dtype))
        return register
