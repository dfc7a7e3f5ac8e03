"""Autograd: matches of backward ops with their forward ops, and recomputed forward work."""

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import Forest, build_forest
from traceloom.analyze.names import build_vocabulary
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, get_event_column
from traceloom.trace.batch import (
    TRACE_COLUMN,
    cache_per_trace,
    concatenate_by_trace,
    gather_event_column,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.trace import Trace

# Of a forward thread's sequence numbers that a lane must hold to be identified with it
_MIN_SEQUENCE_SHARE = 0.5


class BackwardMatches(Struct, frozen=True):
    """Backward ops with a known forward op; arrays of shape (joined backward ops,).

    Attributes:
        backward: Position (in the forest) of the backward op; where several of one node are nested,
            of each.
        forward: Position of the forward op that made the node.
    """

    backward: Ints
    forward: Ints


@cache_per_trace
def match_backward_ops(trace: Trace) -> BackwardMatches | None:
    """Joins backward ops to forward ops by forward thread and sequence number; None where nothing
    can be joined.

    A sequence number is unique only within the thread that ran the forward pass, and the file
    numbers those threads in a way of its own (`Fwd thread id`). The lane of such a number is known
    from the file's forward-backward arrows; where there are none, from the only lane of the process
    with forward ops; where there are several, from the one lane that holds (nearly) all of the
    thread's sequence numbers. Otherwise its ops are not joined. Several ops can carry one number,
    since it is read when an op begins: the one that began last made the node.
    """
    return _match_by_sequence(trace)


@run_in_batches
def _match_by_sequence(traces: Sequence[Trace]) -> Iterable[BackwardMatches | None]:
    ops = concatenate_by_trace(map(_select_sequenced_ops, traces))
    forward_thread = ops["forward_thread"].fill_null(0)
    forward, backward = ops.filter(forward_thread == 0), ops.filter(forward_thread > 0)
    if not forward.height or not backward.height:
        return [None for _ in traces]
    # The lane of each (trace, process, forward_thread)
    keys = [TRACE_COLUMN, "process", "forward_thread"]
    # Each arrow joins a forward op (its lane) to a backward op (its forward thread).
    flows = concatenate_by_trace(trace.flows for trace in traces).filter(
        pl.col("kind") == "forward-backward"
    )
    flows = flows.drop_nulls(["source", "target"])
    arrows = flows.select(
        TRACE_COLUMN,
        *(gather_event_column(traces, flows, "target", name) for name in keys[1:]),
        gather_event_column(traces, flows, "source", "lane"),
    )
    arrow_counts = (
        arrows.filter(pl.col("forward_thread") > 0)
        .group_by(*keys, "lane")
        .agg(pl.len().alias("n"))
        .sort(TRACE_COLUMN, "n", "lane", descending=[False, True, False])
    )
    lanes_from_arrows = arrow_counts.unique(keys, keep="first", maintain_order=True)[
        [*keys, "lane"]
    ]
    unresolved_ops = backward.join(lanes_from_arrows, on=keys, how="anti")
    if not unresolved_ops.height:
        lane_by_thread = lanes_from_arrows
    else:
        lanes = forward[[TRACE_COLUMN, "process", "lane", "sequence"]].unique()
        sequence_numbers = unresolved_ops[[*keys, "sequence"]].unique()
        sequence_counts = sequence_numbers.group_by(keys).agg(pl.len().alias("wanted"))
        shared_counts = (
            sequence_numbers.join(lanes, on=[TRACE_COLUMN, "process", "sequence"], how="inner")
            .group_by(*keys, "lane")
            .agg(pl.len().alias("n"))
        )
        lanes_from_sequences = (
            shared_counts.filter(pl.col("n") == pl.col("n").max().over(keys))
            .join(sequence_counts, on=keys)
            .filter(pl.col("n") >= _MIN_SEQUENCE_SHARE * pl.col("wanted"), pl.len().over(keys) == 1)
        )
        lane_by_thread = pl.concat([lanes_from_arrows, lanes_from_sequences[[*keys, "lane"]]])
    latest_forward_ops = forward.group_by(TRACE_COLUMN, "process", "lane", "sequence").agg(
        pl.col("position").max().alias("forward")
    )
    joined = (
        backward[[*keys, "sequence", "position"]]
        .join(lane_by_thread, on=keys, how="inner")
        .join(latest_forward_ops, on=[TRACE_COLUMN, "process", "lane", "sequence"], how="inner")
        .sort(TRACE_COLUMN, "position")
    )
    return map(_keep_earlier_forward_ops, traces, split_by_trace(joined, traces))


def _select_sequenced_ops(trace: Trace) -> pl.DataFrame:
    """Returns the ops with a sequence number: process, sequence, forward_thread, lane, position (in
    the forest).
    """
    tree = build_forest(trace)
    is_op = get_event_column(trace, "category")[tree.row] == vocab.CATEGORIES.index(vocab.OP)
    position = np.flatnonzero(is_op & (get_event_column(trace, "sequence", -1)[tree.row] >= 0))
    columns = trace.events[["process", "sequence", "forward_thread", "lane"]]
    return columns[tree.row[position]].hstack([pl.Series("position", position, dtype=pl.Int64)])


def _keep_earlier_forward_ops(trace: Trace, joined: pl.DataFrame) -> BackwardMatches | None:
    """Keeps the pairs whose forward op began earlier; None for none."""
    row = build_forest(trace).row
    backward_positions, forward_positions = (
        joined["position"].to_numpy(),
        joined["forward"].to_numpy(),
    )
    earlier = row[forward_positions] < row[backward_positions]
    return (
        BackwardMatches(backward_positions[earlier], forward_positions[earlier])
        if earlier.any()
        else None
    )


# The frame that repeats the forward (use_reentrant=False), and the name of the backward node of the
# older, reentrant way.
RECOMPUTE_FRAME_PATTERN = r"(^|/)torch/utils/checkpoint\.py\(\d+\): recompute_fn$"
REENTRANT_NODE_PATTERN = r"^CheckpointFunctionBackward$"
# The checkpoint's own work: Traceloom's marks around each checkpointed part, and the checkpoint's
# frames.
CHECKPOINT_MARK_PATTERN = r"^traceloom\.checkpoint$"
CHECKPOINT_FRAME_PATTERN = r"(^|/)torch/utils/checkpoint\.py\(\d+\): (_checkpoint_without_reentrant_generator|pack_hook|unpack_hook)$"
ENGINE_NODE_PATTERN = r"^autograd::engine::evaluate_function: "
# Of nodes that may hold forward ops; where more do, the backward pass is being recorded for a
# second one
_MAX_RECOMPUTING_NODE_SHARE = 0.5


class RecomputedWork(Struct, frozen=True):
    """Repeated forward work.

    Attributes:
        root: For each host event whether a repetition begins with it; events below are part of it,
            except the backward pass that the older way of checkpointing runs inside. Shape (host
            events,).
        own: For each host event whether it is the checkpoint's own work, mostly in the forward
            pass: keeping the RNG state, making contexts, hooks. Known by the marks of `traceloom
            record`, and by frames.
        evidence: `frames` where Python frames or autograd nodes name it, `operators` where it is
            inferred from ops that autograd recorded inside the backward pass, `none`.
    """

    root: Bools
    own: Bools
    evidence: str


@cache_per_trace
def find_recomputed_work(trace: Trace) -> RecomputedWork:
    """Finds repeated forward work by its frame or its autograd node, else by forward ops inside the
    backward pass.

    An op inside a backward node that has a sequence number and no forward thread was recorded by
    autograd there. That happens when a checkpoint repeats its forward, and in a backward pass that
    is itself to be differentiated; the latter is recognized by two things: most nodes hold such
    ops, and their sequence numbers come back in a later backward.
    """
    tree = build_forest(trace)
    vocabulary = build_vocabulary(trace)
    name_codes = vocabulary.code[tree.row]
    category = get_event_column(trace, "category")[tree.row]
    is_python = category == vocab.CATEGORIES.index(vocab.PYTHON)
    is_recompute_frame = (
        gather_rows(vocabulary.matching(RECOMPUTE_FRAME_PATTERN), name_codes) & is_python
    )
    is_reentrant_node = gather_rows(vocabulary.matching(REENTRANT_NODE_PATTERN), name_codes) & (
        category == vocab.CATEGORIES.index(vocab.OP)
    )
    recomputed_by_name = tree.topmost(is_recompute_frame | is_reentrant_node)
    inferred = _infer_recomputation(
        trace, tree, gather_rows(vocabulary.matching(ENGINE_NODE_PATTERN), name_codes)
    )
    inferred &= tree.nearest_or_self(recomputed_by_name) < 0
    evidence = "frames" if recomputed_by_name.any() else "operators" if inferred.any() else "none"
    is_checkpoint_overhead = gather_rows(
        vocabulary.matching(CHECKPOINT_MARK_PATTERN), name_codes
    ) & (category == vocab.CATEGORIES.index(vocab.ANNOTATION))
    is_checkpoint_overhead |= (
        gather_rows(vocabulary.matching(CHECKPOINT_FRAME_PATTERN), name_codes) & is_python
    )
    return RecomputedWork(recomputed_by_name | inferred, is_checkpoint_overhead, evidence)


def _infer_recomputation(trace: Trace, tree: Forest, is_engine_node: Bools) -> Bools:
    """Returns outermost ops that autograd recorded inside a backward node, and that no later
    backward belongs to.
    """
    is_autograd_op = gather_rows(trace.events["sequence"].is_not_null().to_numpy(), tree.row)
    is_autograd_op &= get_event_column(trace, "category")[tree.row] == vocab.CATEGORIES.index(
        vocab.OP
    )
    is_backward_op = get_event_column(trace, "forward_thread", 0)[tree.row] > 0
    enclosing_backward = tree.nearest(is_engine_node | is_backward_op)
    is_recomputed: Bools = (
        is_autograd_op & ~is_backward_op & ~is_engine_node & (enclosing_backward >= 0)
    )
    rows = np.flatnonzero(is_recomputed)
    if not rows.size:
        return is_recomputed
    outermost_nodes = tree.topmost(is_engine_node | is_backward_op)
    nodes_with_forward_ops = np.unique(
        tree.outermost_or_self(is_engine_node | is_backward_op)[rows]
    )
    if nodes_with_forward_ops.size > _MAX_RECOMPUTING_NODE_SHARE * np.count_nonzero(
        outermost_nodes
    ):
        return np.zeros_like(is_recomputed)
    matches = match_backward_ops(trace)
    if matches is not None:
        # Not those that carry the sequence number of an op on their lane whose backward is
        # recorded.
        lane_count = int(tree.lane.max(initial=0)) + 1
        sequence_and_lane = (
            get_event_column(trace, "sequence", -1)[tree.row] * lane_count + tree.lane
        )
        is_recomputed &= ~np.isin(sequence_and_lane, sequence_and_lane[matches.forward])
    return tree.topmost(is_recomputed)
