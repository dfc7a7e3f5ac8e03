"""A few kernels: a large copy and triad, and matrix products of several sizes and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

_ROWS = {"cpu": (128, 1024)}
_ROWS_ON_DEVICES = 256, 8192
_MOVED = {"cpu": 1 << 28}  # bytes that no cache holds
_MOVED_ON_DEVICES = 1 << 30
_PRODUCTS = {"cpu": {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}}
_MATRIX_UNITS = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Kernel(NamedTuple):
    """A kernel with buffers of its own.

    Attributes:
        name: `matrix_product`, `copy` or `triad`.
        element_type: As peaks name it.
        size: Rows and columns of each matrix, or bytes of each buffer.
        amount: Operations, or bytes that it reads and writes.
        call: Does it.
    """

    name: str
    element_type: str
    size: int
    amount: int
    call: Callable[[], object]


def kernels(device: torch.device) -> Iterator[Kernel]:
    """The kernels of a device, matrix products from the smallest to the largest; buffers of one live at a time."""
    import torch

    size = _MOVED.get(device.type, _MOVED_ON_DEVICES)
    first, second, third = (torch.ones(size // torch.float32.itemsize, device=device) for _ in range(3))
    yield Kernel("copy", "fp32", size, 2 * size, partial(third.copy_, first))
    yield Kernel("triad", "fp32", size, 3 * size, partial(torch.add, first, second, alpha=3.0, out=third))
    del first, second, third
    low, high = _ROWS.get(device.type, _ROWS_ON_DEVICES)
    before = torch.get_float32_matmul_precision()
    for name, dtype in _PRODUCTS.get(device.type, _MATRIX_UNITS).items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        rows = low
        while rows <= high:
            left, right, out = (torch.rand(rows, rows, device=device).to(getattr(torch, dtype)) for _ in range(3))
            yield Kernel("matrix_product", name, rows, 2 * rows**3, partial(torch.mm, left, right, out=out))
            rows *= 2
    torch.set_float32_matmul_precision(before)
