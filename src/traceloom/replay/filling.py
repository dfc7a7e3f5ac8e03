"""What tensors that come from outside hold: seeded, and such that the ops that take them behave.

`traceloom.replay.script` copies the function into the scripts it writes, so it uses torch alone, and the tensors of a
script hold what those of the replay held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def filled(
    elements: int, dtype: torch.dtype, content: str, low: int | None = None, high: int | None = None, *, seed: int
) -> torch.Tensor:
    """A flat tensor on the host.

    Args:
        elements: How many.
        dtype: Of which type.
        content: floats (around 0), weights (around 0, such that a sum of `high` products keeps its size), positive,
            probability (0 to 1), integers (low to high), offsets (ascending from low to high), lengths (descending
            from `low`, their sum is `high`), zeros.
        low: Of integers and offsets; None: 0.
        high: Of integers and offsets; None: low.
        seed: Of the random numbers.
    """
    import torch

    block = 1_000_003  # many are repeated, which is much faster; a prime, so that no rows of a matrix are equal
    if elements > block and content not in {"zeros", "offsets", "lengths"}:
        whole = torch.empty(elements, dtype=dtype)
        part = filled(block, dtype, content, low, high, seed=seed)
        for start in range(0, elements, block):
            whole[start : start + block] = part[: elements - start]
        return whole
    random = torch.Generator().manual_seed(seed)
    low = low or 0
    high = low if high is None else max(low, high)
    if content == "zeros":
        return torch.zeros(elements, dtype=dtype)
    if content == "offsets":
        return torch.linspace(low, high, elements, dtype=torch.float64).to(dtype)
    if content == "lengths":
        lengths = torch.full((elements,), (high - low) // max(elements - 1, 1))
        lengths[: (high - low) % max(elements - 1, 1) + 1] += 1
        lengths[:1] = low if elements > 1 else high
        return lengths.to(dtype)
    if content == "integers":
        most = 2**63 - 1 if dtype == torch.int64 else 2**31
        return torch.randint(low, min(high, most - 1) + 1, (elements,), generator=random).to(dtype)
    if dtype.is_complex:
        return torch.randn(elements, generator=random, dtype=torch.complex64).to(dtype)
    if not dtype.is_floating_point:
        return torch.zeros(elements, dtype=dtype)
    uniform = torch.rand(elements, generator=random)
    if content in {
        "floats",
        "weights",
    }:  # a tenth at the least: products of smaller ones become denormal, which is slow
        uniform = (0.1 + 0.9 * uniform) * (torch.randint(0, 2, (elements,), generator=random) * 2 - 1)
        uniform *= (3 / max(high, 1)) ** 0.5 if content == "weights" else 1
    elif content == "positive":
        uniform = 0.1 + 0.9 * uniform
    return uniform.to(dtype)
