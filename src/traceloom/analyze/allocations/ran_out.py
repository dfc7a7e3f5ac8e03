"""Why memory ran out: who held it then, what was asked for, and what would free how much."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import polars as pl

from traceloom.analyze.allocations.census import KEPT, frame
from traceloom.analyze.allocations.holders import tree_of
from traceloom.model import units

KINDS = {
    "parameter": "parameters", "buffer": "buffers", "gradient": "gradients", "optimizer_state": "optimizer state",
    "activation": "kept for backward", "other": "other tensors",
}  # fmt: skip
_OF = re.compile(r"^.* of (.+)$")
_LIBRARY = re.compile(
    r"[/\\](?:site-packages|dist-packages|torch|traceloom|lib[/\\]python[\d.]+)[/\\]|^<frozen|^<string"
)
_BACKWARD = re.compile(r"\): (?:backward|_engine_run_backward)$")
_SMALL = 0.01  # of what was alive; advice that frees less is not worth a line


@dataclass(frozen=True)
class Advice:
    """Something to try.

    Attributes:
        action: Stable name: `shrink-request`, `release-gradients`, `drop-kept-tensors`, `checkpoint-activations`,
            `smaller-batch`, `shard-optimizer-state`, `expandable-segments`, `other-processes`, `stop-growth`.
        text: What to do.
        bytes: What it would free at most; None where it frees nothing but makes the request smaller.
        why: What in the data says so.
    """

    action: str
    text: str
    bytes: int | None
    why: str


class AllocatorState(TypedDict):
    """What an allocator said of its device; `free_bytes` and `total_bytes` are the device's."""

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int


def census_of(document: dict[str, Any]) -> pl.DataFrame:
    """The live storages of a report on memory that ran out, `CENSUS`; rows that are none are left out."""
    return frame(document.get("live_storages"))


def tree(live: pl.DataFrame) -> pl.DataFrame:
    """Live storages by kind of owner, then by module, or by type; `holders.TREE`."""
    leaves: list[tuple[tuple[str, ...], int, int]] = []
    for owner, name, size in live.select("owner", "name", "bytes").rows():  # at most some ten thousand
        kind = KINDS.get(owner, KINDS["other"])
        if owner in ("activation", "other"):
            leaves.append(((kind, name.removeprefix(KEPT)), size, 1))
            continue
        of = _OF.match(name)
        path = of[1] if of else name
        path = path.removesuffix(".grad") if owner == "gradient" else path
        parts = [path] if path.startswith("(") else path.split(".")
        leaves.append(((kind, *parts), size, 1))
    return tree_of(leaves)


def kinds(live: pl.DataFrame) -> dict[str, int]:
    """Bytes by kind of owner."""
    named = live.with_columns(
        kind=pl.when(pl.col("owner").is_in(list(KINDS)))
        .then(pl.col("owner").replace(KINDS))
        .otherwise(pl.lit(KINDS["other"]))
    )
    sums = named.group_by("kind").agg(pl.col("bytes").sum()).sort("bytes", "kind", descending=[True, False])
    return dict(sums.rows())


def where_in_program(stack: list[str]) -> str | None:
    """The innermost frame of the user's own code; the innermost of all where there is none."""
    own = [line for line in stack if not _LIBRARY.search(line.partition("(")[0])]
    return (own or stack)[-1] if stack else None


def advice(
    held: dict[str, int],
    live: pl.DataFrame,
    *,
    asked: int | None,
    stack: list[str],
    devices: Sequence[AllocatorState],
    ranks: int | None,
    growing: list[tuple[str, float, int]],
) -> list[Advice]:
    """What to try first, the largest saving first; each only where the data supports it.

    Args:
        held: Bytes by kind, as `kinds` gives them.
        live: The live storages; no rows without a census.
        asked: Bytes of the request that failed.
        stack: Where, the outermost frame first.
        devices: What the allocators say.
        ranks: How many ranks the job has.
        growing: (site, bytes per step, bytes so far) of what grows with every step.
    """
    whole = sum(held.values())
    out = []
    gradients, state = held.get(KINDS["gradient"], 0), held.get(KINDS["optimizer_state"], 0)
    kept, other = held.get(KINDS["activation"], 0), held.get(KINDS["other"], 0)
    if gradients and not any(_BACKWARD.search(line) for line in stack):
        text = "free the gradients before the next forward pass: optimizer.zero_grad(set_to_none=True)"
        out.append(Advice("release-gradients", text, gradients, "gradients were alive outside the backward pass"))
    if kept:
        many = f"{units.size(kept)} were kept for the backward pass"
        text = "recompute activations in the backward pass: torch.utils.checkpoint around the repeated blocks"
        out += [
            Advice("checkpoint-activations", text, kept, many),
            Advice("smaller-batch", "halve the batch (and accumulate gradients over two)", kept // 2, many),
        ]
    if other and live.height:
        largest = live.filter(~pl.col("owner").is_in([owner for owner in KINDS if owner != "other"]))
        most = largest.group_by("name").agg(pl.col("bytes").sum(), pl.len().alias("count"))
        name, size, count = most.sort("bytes", "name", descending=[True, False]).row(0)
        why = f"{units.count(count)} × {name} hold {units.size(size)} of them"
        text = "let go of tensors that the program itself holds (lists of results; losses with their graph: .detach())"
        out.append(Advice("drop-kept-tensors", text, other, why))
    if state and ranks is not None and ranks > 1:
        text = f"shard the optimizer's state over the {ranks} ranks (ZeroRedundancyOptimizer, fully_shard)"
        why = f"every rank holds all {units.size(state)} of it, if it is not sharded yet"
        out.append(Advice("shard-optimizer-state", text, state - state // ranks, why))
    for device in devices:
        idle = device["reserved_bytes"] - device["allocated_bytes"]
        if asked is not None and idle >= asked:
            text = "let the allocator join its free pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            why = f"{units.size(idle)} were reserved but free, in pieces too small for {units.size(asked)}"
            out.append(Advice("expandable-segments", text, idle, why))
        outside = device["total_bytes"] - device["free_bytes"] - device["reserved_bytes"]
        if outside > device["total_bytes"] // 10:
            text = "check what else uses the device: other processes (nvidia-smi), communication buffers, libraries"
            why = f"{units.size(outside)} of {units.size(device['total_bytes'])} are in use outside this allocator"
            out.append(Advice("other-processes", text, outside, why))
    out += [
        Advice("stop-growth", f"release what {site} leaves behind in every step", size,
               f"it grows by {units.size(round(per_step))} per step")
        for site, per_step, size in growing[:2]
    ]  # fmt: skip
    worth = [item for item in out if item.bytes is not None and item.bytes >= max(_SMALL * whole, 1)]
    worth.sort(key=lambda item: -(item.bytes or 0))
    if asked is not None and asked > whole:
        why = f"alone it asks for {units.size(asked)}, more than all that was alive ({units.size(whole)})"
        where = where_in_program(stack)
        at = f" at {where}" if where else ""
        worth.insert(0, Advice("shrink-request", f"check the request itself{at}", None, why))
    return worth
