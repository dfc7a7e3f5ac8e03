"""Sizes with which every operator runs again: what of them can be rounded, settled and proved by dry runs.

Sizes are rounded by their prime factors (`by_factors`), so views and matrix products fit by themselves. What adds up
(parts of a concatenation, windows of a convolution) does so with rounded sizes only by chance. Where an operator does
not, its smallest factor that is still rounded stays as it is, in all sizes of all files: small ones tell least.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from traceloom import workers
from traceloom.anonymize.account import Account
from traceloom.anonymize.host_trace import HostRewriter
from traceloom.anonymize.kineto import Rules
from traceloom.anonymize.leaks import HiddenShapes
from traceloom.anonymize.shapes import prime_factors
from traceloom.anonymize.sources import InputFile
from traceloom.errors import TraceloomError

if TYPE_CHECKING:
    from traceloom.replay import ReplayPlan
    from traceloom.replay.dry_run import RankDryRun

_Node = tuple[int, int]  # rank and number of a node
_UNSEEN = ("data-dependent", "no-meta-kernel")  # run all the same
_MOST_ROUNDS = 64


def settle(hosts: Sequence[InputFile], rules: Rules) -> str:
    """Let those prime factors stay that the operators of host traces need.

    Args:
        hosts: The host traces.
        rules: By which they are rewritten; the factors that stay are told to its shapes.

    Returns:
        Why nothing could be tried, so that all are rounded; else empty.
    """
    kept: frozenset[int] = frozenset()
    if not hosts:
        return "there is no host trace"
    with workers.shared_folder() as folder:
        try:
            rules.shapes.keep_factors(None)
            exact = _planned(hosts, rules, folder)
            excused = set(_misfits(exact))  # for another reason than its size
            for _ in range(_MOST_ROUNDS):
                rules.shapes.keep_factors(kept)
                misfits = _misfits(_planned(hosts, rules, folder)) - excused
                if not misfits:
                    break
                more = {node: min(factors - kept, default=0) for node, factors in _odd_factors(exact, misfits)}
                excused |= {node for node, factor in more.items() if not factor}
                kept |= {factor for factor in more.values() if factor}
        except TraceloomError as error:
            rules.shapes.keep_factors(frozenset())
            return error.message
    return ""


def proof(paths: Sequence[Path], reason: str) -> dict[str, Any]:
    """What of rewritten traces runs again, as it stands in the report.

    Args:
        paths: Rewritten captures and files.
        reason: Why nothing was tried; empty where it was.
    """
    from traceloom.replay import dry_run, make_plan

    ranks: Iterable[RankDryRun] = ()
    if not reason:
        try:
            ranks = dry_run(make_plan(*paths, cache=False)).values()
        except TraceloomError as error:
            reason = error.message
    shares = []
    for rank in ranks:
        left = [part for part in rank.left if part.reason not in _UNSEEN]
        time = rank.duration_ns
        shares.append(
            {
                "rank": rank.rank,
                "operators": rank.ops,
                "run": rank.ops - sum(part.count for part in left),
                "other_shapes": sum(wrong.count for wrong in rank.wrong),
                "duration_ns": time,
                "run_ns": None if time is None else time - sum(part.duration_ns or 0 for part in left),
                "left": [msgspec.to_builtins(part) for part in left],
            }
        )
    return {"ranks": shares, "reason": reason or None}


def _planned(hosts: Sequence[InputFile], rules: Rules, folder: Path) -> ReplayPlan:
    """The plan of the host traces as the rules rewrite them now."""
    from traceloom.replay import make_plan

    targets = []
    for host in hosts:
        target = folder / host.name
        target.parent.mkdir(parents=True, exist_ok=True)
        HostRewriter(host.path, rules, Account(), HiddenShapes()).write(target)
        targets.append(target)
    return make_plan(*targets, cache=False)


def _misfits(plan: ReplayPlan) -> set[_Node]:
    """Nodes that refuse their arguments, give other shapes than recorded, or exchange other parts than they have."""
    from traceloom.replay import dry_run

    misfits = set()
    for rank, outcome in dry_run(plan).items():
        misfits |= {(rank, node) for node in (*outcome.refused, *(wrong.node for wrong in outcome.wrong))}
        ops, shapes = plan.ranks[rank].ops, plan.ranks[rank].tensors["shape"]
        for op, splits in plan.ranks[rank].collectives.select("op", "splits_in").iter_rows():
            node, inputs = ops.select("node", "inputs").row(op)
            if splits and inputs and sum(splits) not in {shapes[tensor][0] for tensor in inputs if len(shapes[tensor])}:
                misfits.add((rank, node))
    return {(rank, node) for rank, node in misfits if node is not None}


def _odd_factors(plan: ReplayPlan, nodes: set[_Node]) -> Iterator[tuple[_Node, set[int]]]:
    """The odd prime factors of all sizes of nodes; powers of two are never rounded."""
    for rank, rank_plan in plan.ranks.items():
        shapes, calls = rank_plan.tensors["shape"], rank_plan.calls["arguments"]
        chosen = rank_plan.ops.filter(pl.col("node").is_in([node for of, node in nodes if of == rank]))
        for row in chosen.iter_rows(named=True):
            sizes = {size for tensor in (*row["inputs"], *row["outputs"]) if tensor is not None
                     for size in shapes[tensor]}  # fmt: skip
            if row["collective"] is not None:
                sizes.update(*rank_plan.collectives.select("splits_in", "splits_out").row(row["collective"]))
            if row["call"] is not None:
                sizes |= set(_numbers(msgspec.json.decode(calls[row["call"]])))
            factors = {factor for size in sizes if 2 < size < 1 << 48 for factor in prime_factors(size)}
            yield (rank, row["node"]), factors - {2}


def _numbers(value: Any) -> Iterator[int]:
    """The whole numbers among arguments of a call."""
    if isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
