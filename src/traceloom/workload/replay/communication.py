"""The process groups of a plan among the running ranks, and its collectives over torch.distributed.

A collective is started and, unless it was asynchronous, waited for at once; the plan states where
the others are waited for. Groups are reduced to the running ranks: buffers with a part for each
rank are used only for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import polars as pl

from traceloom.errors import InputError
from traceloom.workload.replay.plan import COLLECTIVE, ITEM_BYTES, RankPlan, ReplayPlan

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
"""Backends for a device type and the CPU next to it; others use gloo."""
_CARRIED = {
    "bool",
    "uint8",
    "int8",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}
"""Types that every backend supports; others are sent as bytes."""
_ROOTED_KINDS = ("broadcast", "reduce", "gather", "scatter")
POINT_TO_POINT = ("send", "recv")
_SAME_SIZES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


def check_agreement(plan: ReplayPlan, ranks: Sequence[int]) -> None:
    """Checks that the ranks of each group issue the same collectives in the same order, before
    anything can hang.

    Args:
        plan: The plan.
        ranks: The running ranks.

    Raises:
        InputError: slug `different-collectives`.
    """
    issued = pl.concat([_list_issued(plan.ranks[rank], ranks) for rank in ranks])
    for name, members in plan.groups.select("name", "ranks").iter_rows():
        group_ops = issued.filter(pl.col("group") == name)
        lists = {
            rank: group_ops.filter((pl.col("rank") == rank) & ~pl.col("kind").is_in(POINT_TO_POINT))
            .select("what")
            .to_series()
            for rank in members
            if rank in ranks
        }
        _check_same(lists, f"group `{name}`", "issue different collectives")
        between = group_ops.filter(pl.col("kind").is_in(POINT_TO_POINT))
        for (source, target, _), both in between.group_by(
            "source", "target", "tag", maintain_order=True
        ):
            lists = {rank: both.filter(pl.col("rank") == rank)["what"] for rank in (source, target)}
            _check_same(
                lists,
                f"group `{name}`, from {source} to {target}",
                "send and receive differently",
            )


def _check_same(lists: Mapping[int, pl.Series], location: str, difference: str) -> None:
    """Rejects ranks whose lists differ, reporting the first difference."""
    if len(lists) < 2:
        return
    first, expected = next(iter(lists.items()))
    for rank, actual in lists.items():
        for nth, (expected_op, right) in enumerate(
            zip_longest(expected, actual, fillvalue="nothing"), start=1
        ):
            if expected_op != right:
                raise InputError(
                    f"ranks {first} and {rank} {difference}: number {nth} is {expected_op} on rank {first}, {right} on rank {rank}",
                    slug="different-collectives",
                    where=location,
                    hint=f"give host traces of one step of one run, or replay one of them alone with --ranks {first}",
                )


def _list_issued(plan: RankPlan, ranks: Sequence[int]) -> pl.DataFrame:
    """Returns the collectives of a rank, in order: rank, group, kind, tag, source, target, what (in
    words, equal on all ranks).
    """
    uses = plan.uses()
    elements = plan.tensors["shape"].list.eval(pl.element().product()).list.first().fill_null(1)
    sizes = elements * plan.tensors["dtype"].replace_strict(ITEM_BYTES, return_dtype=pl.Int64)
    sizes_of_ops = (
        uses.with_columns(sizes.gather(uses["tensor"]).alias("size"))
        .group_by("op")
        .agg(
            pl.col("size").filter(~pl.col("made")).sum().alias("source"),
            pl.col("size").filter("made").sum().alias("target"),
        )
    )
    kind = pl.col("kind")
    is_peer = kind.is_in(POINT_TO_POINT)
    size = pl.coalesce(pl.when(kind == "recv").then("target").otherwise("source"), "bytes")
    return (
        plan.ops.filter(pl.col("action") == COLLECTIVE)
        .select("op", "collective")
        .join(plan.collectives.drop("op"), on="collective", how="left", maintain_order="left")
        .join(sizes_of_ops, on="op", how="left", maintain_order="left")
        .filter(~is_peer | pl.col("peer").is_in(ranks))
        .select(
            pl.lit(plan.rank, pl.Int32).alias("rank"),
            "group",
            "kind",
            pl.col("tag").fill_null(0),
            pl.when(kind == "send").then(plan.rank).otherwise("peer").alias("source"),
            pl.when(kind == "send").then("peer").otherwise(plan.rank).alias("target"),
            pl.concat_str(
                pl.when(is_peer).then(pl.lit("a message")).otherwise(kind),
                pl.when(kind.is_in(_ROOTED_KINDS)).then(pl.format(" of rank {}", pl.col("peer"))),
                pl.when(kind.is_in(_SAME_SIZES) | is_peer).then(pl.format(" ({} bytes)", size)),
                ignore_nulls=True,
            ).alias("what"),
        )
    )


class AsyncHandles:
    """The handles of a started collective."""

    def __init__(self, works: Iterable[dist.Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Waits for completion; on an accelerator, makes its current stream wait.

        The handles are dropped, since Gloo would wait forever a second time.
        """
        works, self._works = self._works, []
        for work in works:
            work.wait()


def finish(works: AsyncHandles | None) -> None:
    """Waits for a collective, unless that was done before."""
    if works is not None:
        works.wait()


@dataclass(frozen=True)
class RunningGroups:
    """The groups of a plan among the running ranks.

    Attributes:
        ranks: Recorded ranks that run; the process of each has its index here as its number.
        groups: Process groups by name, of those that this process is in.
        members: Recorded ranks of each group, in its order.
    """

    ranks: tuple[int, ...]
    groups: Mapping[str, dist.ProcessGroup]
    members: Mapping[str, tuple[int, ...]]

    @staticmethod
    def join(
        plan: ReplayPlan, ranks: Sequence[int], backend: str, timeout_s: float
    ) -> RunningGroups:
        """Creates the groups of a plan; every process calls it, after torch.distributed is
        initialized.
        """
        import torch.distributed as dist

        groups, members = {}, {}
        for name, group_ranks in plan.groups.select("name", "ranks").iter_rows():
            members[name] = tuple(group_ranks or range(plan.world_size))
            processes = [ranks.index(rank) for rank in members[name] if rank in ranks]
            group = (
                dist.new_group(processes, backend=backend, timeout=timedelta(seconds=timeout_s))
                if processes
                else None
            )
            if dist.get_rank() in processes:
                groups[name] = group
        return RunningGroups(tuple(ranks), groups, members)

    def lacks(self, row: Mapping[str, Any]) -> bool:
        """Returns whether the only other rank of a collective is not running."""
        return row["kind"] in POINT_TO_POINT and row["peer"] not in self.ranks

    def exchange(self, rows: Sequence[Mapping[str, Any]]) -> Callable[..., list[AsyncHandles]]:
        """Returns a function that starts several sends and receives of one tensor each, together,
        since NCCL would otherwise wait for the first.

        Args:
            rows: Rows of the plan's `collectives`, in one group; the tensors are the arguments of
                the returned function.
        """
        import torch.distributed as dist

        group = self.groups[rows[0]["group"]]
        ways = [
            (
                dist.isend if row["kind"] == "send" else dist.irecv,
                self.ranks.index(row["peer"]),
                row["tag"] or 0,
            )
            for row in rows
        ]

        def exchange(*tensors: torch.Tensor) -> list[AsyncHandles]:
            carried = (
                tensor if str(tensor.dtype)[6:] in _CARRIED else as_bytes(tensor)
                for tensor in tensors
            )
            parts = [
                dist.P2POp(way, tensor, peer, group, tag)
                for (way, peer, tag), tensor in zip(ways, carried, strict=True)
            ]
            return [AsyncHandles(dist.batch_isend_irecv(parts))] * len(rows)

        return exchange

    def call(
        self, row: Mapping[str, Any], inputs: int, dtypes: Iterable[str]
    ) -> Callable[..., AsyncHandles]:
        """Returns a function that starts a collective, and waits for it unless it was asynchronous.

        Args:
            row: Row of the plan's `collectives`.
            inputs: Number of sent tensors, the first arguments of the returned function; the others
                are received.
            dtypes: Types of all tensors.
        """
        members = self.members[row["group"]]
        kept_positions = [position for position, rank in enumerate(members) if rank in self.ranks]
        running = [members[position] for position in kept_positions]
        peer = (
            row["peer"] if row["peer"] in running or row["kind"] in POINT_TO_POINT else running[0]
        )
        start = _Start(
            row["kind"],
            self.groups[row["group"]],
            kept_positions,
            len(members),
            self.ranks.index(peer) if peer is not None else 0,
            row["splits_in"],
            row["splits_out"],
            row["tag"] or 0,
        )

        are_carried = _CARRIED.issuperset(dtypes)

        def call(*tensors: torch.Tensor) -> AsyncHandles:
            if not are_carried:
                tensors = tuple(map(as_bytes, tensors))
            works = AsyncHandles(start(tensors[:inputs], tensors[inputs:]))
            if not row["asynchronous"]:
                works.wait()
            return works

        return call


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor with one extra last dimension; the dimensions before it, which
    splits refer to, are kept.
    """
    import torch

    return tensor.unsqueeze(-1).view(torch.uint8)


@dataclass(frozen=True)
class _Start:
    """Starts one collective: `kept` are the positions of the running ranks in the group, `size` is
    its recorded size.
    """

    kind: str
    group: dist.ProcessGroup
    kept: Sequence[int]
    size: int
    peer: int
    splits_in: Sequence[int]
    splits_out: Sequence[int]
    tag: int = 0

    def __call__(
        self, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]
    ) -> Iterator[dist.Work | None]:
        import torch.distributed as dist

        group: dict[str, Any] = {"group": self.group, "async_op": True}
        if self.kind == "barrier":
            yield dist.barrier(**group)
        elif self.kind == "send":
            yield from (dist.isend(tensor, self.peer, self.group, self.tag) for tensor in source)
        elif self.kind == "recv":
            yield from (dist.irecv(tensor, self.peer, self.group, self.tag) for tensor in target)
        elif self.kind == "all_reduce":
            yield from (dist.all_reduce(tensor, **group) for tensor in target or source)
        elif self.kind in {"broadcast", "reduce"}:
            start = dist.broadcast if self.kind == "broadcast" else dist.reduce
            yield from (start(tensor, self.peer, **group) for tensor in target or source)
        elif self.kind == "gather":
            parts = self.parts(target) if dist.get_rank() == self.peer else None
            yield dist.gather(source[0], parts, self.peer, **group)
        elif self.kind == "scatter":
            parts = self.parts(source) if dist.get_rank() == self.peer else None
            yield dist.scatter(target[0], parts, self.peer, **group)
        elif self.kind == "all_to_all":
            yield self.all_to_all(source, target)
        elif len(source) == len(target):
            for sent, filled in zip(source, target, strict=True):
                if self.kind == "all_gather":
                    yield dist.all_gather_into_tensor(
                        self.cut(filled, sent), sent.view(-1), **group
                    )
                else:
                    yield dist.reduce_scatter_tensor(
                        filled.view(-1), self.cut(sent, filled), **group
                    )
        elif self.kind == "all_gather":
            yield dist.all_gather(self.parts(target), source[0], **group)
        else:
            yield dist.reduce_scatter(target[0], self.parts(source), **group)

    def cut(self, buffer: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Returns the parts of a buffer for the running ranks; flat, because gloo requires shapes
        that NCCL does not.
        """
        return buffer.view(-1)[: part.numel() * len(self.kept)]

    def parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the parts for the running ranks, of a list or of one buffer."""
        parts = tensors if len(tensors) == self.size else tensors[0].view(-1).chunk(self.size)
        return [parts[position] for position in self.kept]

    def all_to_all(
        self, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]
    ) -> dist.Work | None:
        import torch.distributed as dist

        if len(source) == self.size and len(source) > 1:
            return dist.all_to_all(
                self.parts(target), self.parts(source), group=self.group, async_op=True
            )
        buffers, splits = [], []
        for tensor, rows in ((target[0], self.splits_out), (source[0], self.splits_in)):
            running_rows = [rows[position] for position in self.kept] if rows else []
            if len(self.kept) == self.size:
                buffers.append(tensor)
            else:
                buffers.append(
                    tensor[: sum(running_rows)]
                    if running_rows
                    else tensor.view(-1)[: tensor.numel() // self.size * len(self.kept)]
                )
            splits.append(running_rows or None)
        return dist.all_to_all_single(*buffers, *splits, group=self.group, async_op=True)
