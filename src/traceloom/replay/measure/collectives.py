"""The calls of collectives, by kind: what torch.distributed calls each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ELEMENT = 4  # bytes: float32


def collective(
    kind: str, size_bytes: int, members: Sequence[int], group: Any, device: torch.device
) -> tuple[Callable[[], object], int]:
    """A collective with buffers of its own: the call, and its size as in the column `size_bytes`.

    Args:
        kind: One of `COLLECTIVES`.
        size_bytes: About so many.
        members: Ranks of the group; the first is the root, or sends.
        group: Of torch.distributed.
        device: Where the buffers are.
    """
    import torch
    import torch.distributed as dist

    part = max(size_bytes // _ELEMENT // len(members), 1)
    whole = torch.zeros(part * len(members), device=device)
    calls: dict[str, Callable[[], object]] = {}
    if kind in {"all_gather", "reduce_scatter"}:
        own = torch.zeros(part, device=device)
        # the newer names do not warn
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        calls["all_gather"] = lambda: gather(whole, own, group=group)
        calls["reduce_scatter"] = lambda: scatter(own, whole, group=group)
    elif kind == "all_to_all":
        received = torch.empty_like(whole)
        calls["all_to_all"] = lambda: dist.all_to_all_single(received, whole, group=group)
    elif kind == "send":
        sends = dist.get_rank() == members[0]
        calls["send"] = lambda: (
            dist.send(whole, members[1], group=group) if sends else dist.recv(whole, members[0], group=group)
        )
    calls["all_reduce"] = lambda: dist.all_reduce(whole, group=group)
    calls["broadcast"] = lambda: dist.broadcast(whole, members[0], group=group)
    return calls[kind], whole.numel() * _ELEMENT
