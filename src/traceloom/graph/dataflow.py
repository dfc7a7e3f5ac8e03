"""Data flow between ops: tensors, by the last writer of each storage, and forward ops to their
backward ops.
"""

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.graph.device_work import DeviceWork
from traceloom.graph.edges import Edges
from traceloom.graph.host_tree import HostTree, Segments
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import find_nearest_ancestor
from traceloom.trace.trace import Trace

# A tensor in a host trace: [tensor, storage, offset, elements, bytes each, device]; old files have
# no device, and their lists of five numbers look the same.
_OLD_TENSOR_PATTERN = r"\[\s*\d+\s*,\s*\d+\s*,\s*-?\d+\s*,\s*\d+\s*,\s*\d+\s*\]"
_TENSOR_PATTERN = _OLD_TENSOR_PATTERN[:-2] + r',\s*"[^"]*"\s*\]'
_TENSOR_FIELDS = (
    r"^\[\s*(?<tensor>\d+)\s*,\s*(?<storage>\d+)\s*,\s*-?\d+\s*,\s*(?<content>\d+\s*,\s*\d+)"
    r'\s*(?:,\s*"(?<device>[a-z]+)[^"]*"\s*)?\]$'
)
_TYPE_PATTERN = r"Tensor\((?:[^()]|\([^()]*\))*\)"
_PYTHON_NUMBERS = r"^1,(?:1|8|16),"
# Reads and writes its inputs
_COMMUNICATION_PATTERN = r"^(?:record_param_comms|nccl:|gloo:|mpi:|ucc:|hccl:|xccl:)"


class DataFlow(Struct, frozen=True):
    """Edges from the writer of a storage to its readers.

    Attributes:
        source: Node of each edge that wrote the storage.
        target: Node that read it.
        unplaced: Reads of storages that nothing recorded had written.
        late: Reads that began, by the recorded times, before the write had ended; these have no
            edges.
    """

    source: Ints
    target: Ints
    unplaced: int
    late: int


def find_data_flow(  # noqa: PLR0917  (the parts of a rank)
    tree: HostTree,
    host: Segments,
    work: DeviceWork,
    segment_node: Ints,
    work_node: Ints,
    host_op: Ints,
    ops: pl.DataFrame,
) -> DataFlow:
    """Finds the last writer of each storage that an op reads.

    Ops that only make views write nothing. Allocations on a device write nothing, but discard the
    old content.

    Args:
        tree: Host events.
        host: Their segments.
        work: GPU work.
        segment_node: Node of each segment.
        work_node: Node of each work.
        host_op: Id in the host trace of each host event; -1 where it has none.
        ops: The ops of the host trace: columns as `host_ops`.
    """
    # Ops that act: the innermost ops around launches, and ops without ops inside; with the first
    # and the last GPU work of each (-1: none).
    matched = host_op >= 0
    matched_ancestor = find_nearest_ancestor(tree.parent, matched)
    owner = np.where(matched, np.arange(matched.size), matched_ancestor)
    launched = np.flatnonzero(work.call >= 0)
    owners = owner[work.call[launched]]
    launched, owners = launched[owners >= 0], owners[owners >= 0]
    first_work, last_work = (np.full(matched.size, -1, dtype=np.int64) for _ in range(2))
    start_order, end_order = (
        np.argsort(-work.start[launched], kind="stable"),
        np.argsort(work.end[launched], kind="stable"),
    )
    first_work[owners[start_order]] = launched[start_order]
    last_work[owners[end_order]] = launched[end_order]
    acts = matched.copy()
    acts[matched_ancestor[matched & (matched_ancestor >= 0)]] = False
    acts |= first_work >= 0
    uses = _list_tensor_uses(tree, host_op, acts, ops)
    position, write = uses["position"].to_numpy(), uses["write"].to_numpy()
    storage, on_device = uses["storage"].to_numpy(), uses["on_device"].to_numpy()
    writer = np.where(write, np.arange(write.size), -1)
    last = np.append(-1, np.maximum.accumulate(writer)[:-1]) if write.size else writer
    written = last >= 0
    written[written] = storage[last[written]] == storage[written]
    reads = np.flatnonzero(~write & written)
    unplaced = int((~write & ~written).sum())
    writers, reader, on_device = position[last[reads]], position[reads], on_device[reads]
    # A device op without GPU work "writes" memory that it was given.
    real = (writers != reader) & ~(on_device & (last_work[writers] < 0))
    writers, reader, on_device = writers[real], reader[real], on_device[real]
    source = np.where(
        last_work[writers] >= 0,
        _take_or_default(work_node, last_work[writers]),
        segment_node[host.last[writers]],
    )
    done = np.where(
        last_work[writers] >= 0, _take_or_default(work.end, last_work[writers]), tree.end[writers]
    )
    to_work = on_device & (first_work[reader] >= 0)
    target = np.where(
        to_work, _take_or_default(work_node, first_work[reader]), segment_node[host.first[reader]]
    )
    begun = np.where(to_work, _take_or_default(work.start, first_work[reader]), tree.start[reader])
    in_order = (done <= begun) & ~(on_device & ~to_work)
    late = int(((done > begun) & ~(on_device & ~to_work)).sum())
    pairs = np.unique(np.stack([source[in_order], target[in_order]], axis=1), axis=0)
    return DataFlow(pairs[:, 0], pairs[:, 1], unplaced, late)


def _take_or_default(values: Ints, rows: Ints) -> Ints:
    """Returns the values at rows; any value where the row is -1."""
    return values[np.maximum(rows, 0)] if values.size else np.zeros(rows.size, dtype=np.int64)


def _list_tensor_uses(
    tree: HostTree, host_op: Ints, acts: Bools, ops: pl.DataFrame
) -> pl.DataFrame:
    """Returns one row per storage that an acting op reads or writes, by storage and time: position,
    storage, on_device, write.
    """
    position = np.flatnonzero(host_op >= 0)
    in_backward = tree.words.str.contains("[Bb]ackward").to_numpy()[tree.word]
    in_backward |= find_nearest_ancestor(tree.parent, in_backward) >= 0
    placed = pl.DataFrame(
        {
            "id": host_op[position],
            "position": position,
            "start": tree.start[position],
            "end": tree.end[position],
            "stop": tree.stop[position],
            "acts": acts[position],
            "in_backward": in_backward[position],
        }
    )
    op_fields = ops.unique("id", keep="first", maintain_order=True).select(
        "id",
        "inputs",
        "outputs",
        pl.col("schema").fill_null("").alias("schema"),
        pl.col("name").str.contains(_COMMUNICATION_PATTERN).fill_null(value=False).alias("talks"),
        pl.col("name").str.contains(r"[^_]_$").fill_null(value=False).alias("underscored"),
        pl.col("input_types").fill_null("").alias("input_types"),
        pl.col("output_types").fill_null("").alias("output_types"),
    )
    read = parse_tensors(op_fields, "inputs", "input_types").with_columns(output=False)
    outputs = parse_tensors(op_fields, "outputs", "output_types").with_columns(output=True)
    # Outputs in the storage of an input are views, unless the op is known to change its inputs.
    input_storages = read.select("id", "storage", given=True).unique()
    changes = op_fields.select(
        "id",
        (
            pl.col("schema").str.contains("!", literal=True)
            | pl.col("talks")
            | pl.col("underscored")
        ).alias("changes"),
    )
    outputs = outputs.join(input_storages, on=["id", "storage"], how="left").join(
        changes, on="id", how="left"
    )
    in_place_ops = changes.filter("changes").join(outputs, on="id", how="anti").select("id")
    made = pl.col("given").is_null()
    mentions = pl.concat(
        [
            read.with_columns(write=False, made=False),
            outputs.select(*read.columns, write=made | pl.col("changes"), made=made),
            read.join(in_place_ops, on="id", how="semi").with_columns(
                output=True, write=True, made=False
            ),
        ]
    )
    return (
        _separate_storages(mentions.join(placed, on="id", how="inner"))
        .filter("acts", pl.col("write") | ~pl.col("output"))
        .select("position", "storage", "on_device", "write")
        .unique(maintain_order=True)
    )


def _separate_storages(mentions: pl.DataFrame) -> pl.DataFrame:
    """Numbers storages anew, by storage and time: a host trace uses the number of a released
    storage again.

    A storage begins where an op returns one that it was not given: at the end of the innermost such
    op, or at its start if ops inside use it. It has ended where an op is given a tensor of a size
    that no op had returned in it. That one was made without a recorded op, as are the tensors for
    Python's numbers; those are told from other single elements by their tensor, except in a
    backward pass, where saved tensors are new ones too.
    """
    nested = (pl.col("position").shift(-1).over("storage") < pl.col("stop")).fill_null(value=False)
    begun = (
        mentions.group_by("storage", "position", maintain_order=True)
        .agg(pl.first("start", "end", "stop"), pl.any("made"))
        .sort("storage", "position")
        .with_columns(time=pl.when(nested).then("start").otherwise("end"))
        .filter("made")
        .filter(~nested)
        .select("storage", "position", "time", made_by="end", begins=True)
    )
    used = mentions.with_columns(time=pl.when("output").then("end").otherwise("start"))
    order = pl.when("output").then(1).otherwise(2 - 2 * pl.col("begins").fill_null(0))
    row, new_number = pl.int_range(pl.len()), pl.col("storage") != pl.col("storage").shift(1)
    begins = new_number.fill_null(value=True) | pl.col("begins").is_not_null()
    returned = pl.col("row").filter("output").min()
    is_number = pl.col("content").str.contains(_PYTHON_NUMBERS) & ~pl.col("in_backward")
    unknown = (returned.over("life", "content").fill_null(row) >= row) | is_number & (
        returned.over("life", "tensor").fill_null(row) >= row
    )
    foreign = (
        unknown & ~pl.col("output") & (pl.col("start") >= pl.col("made_by").first().over("life"))
    )
    changed = (pl.col("content") != pl.col("content").shift(1)) | pl.col("foreign")
    return (
        pl.concat([used, begun], how="diagonal")
        .sort("storage", "time", order, "position", maintain_order=True)
        .with_columns(row=row, life=begins.cum_sum())
        .with_columns(foreign=foreign.fill_null(value=False))
        .with_columns(dead=pl.col("foreign").cum_max().over("life") & ~pl.col("output") & changed)
        .with_columns(storage=(begins | pl.col("dead")).cum_sum().cast(pl.Int64))
        .filter(pl.col("begins").is_null())
    )


def parse_tensors(op_fields: pl.DataFrame, values: str, types: str) -> pl.DataFrame:
    """Returns the tensors in a list of values: id, tensor, storage, content (elements, bytes of
    each, type), on_device.
    """
    parts = pl.col("parts").struct
    has_devices = op_fields[values].str.contains(_TENSOR_PATTERN).any()
    listed = pl.col(values).str.extract_all(_TENSOR_PATTERN if has_devices else _OLD_TENSOR_PATTERN)
    kinds = pl.col(types).str.extract_all(_TYPE_PATTERN)
    unknown = pl.lit("", pl.String).repeat_by(listed.list.len())
    return (
        op_fields.filter(pl.col(types).str.contains("Tensor", literal=True))
        .select(
            "id",
            listed.alias("listed"),
            pl.when(listed.list.len() == kinds.list.len())
            .then(kinds)
            .otherwise(unknown)
            .alias("kind"),
        )
        .explode("listed", "kind")
        .drop_nulls("listed")
        .with_columns(pl.col("listed").str.extract_groups(_TENSOR_FIELDS).alias("parts"))
        .select(
            "id",
            parts.field("tensor", "storage").cast(pl.Int64, strict=False),
            pl.format("{},{}", parts.field("content").str.replace_all(r"\s", ""), "kind").alias(
                "content"
            ),
            parts.field("device").fill_null("cuda").ne("cpu").alias("on_device"),
        )
        .filter(pl.col("storage") > 0)
        .unique(maintain_order=True)
    )


def forward_backward_edges(
    edges: Edges, trace: Trace, tree: HostTree, host: Segments, segment_node: Ints
) -> None:
    """Adds edges from the end of each forward op to the start of its backward op.

    Arrows of the file come first. Else ops are joined by process and sequence number, which counts
    within one forward thread, so only in a process with one such thread. Several ops can have one
    number, since it is read when an op begins: of forward ops the last to begin made the node, of
    backward ops the outermost represents it.
    """
    columns = trace.events[["process", "sequence", "forward_thread", "category", "lane"]]
    numbered = columns.hstack([pl.Series("position", tree.position)]).filter(
        (pl.col("sequence") >= 0) & (pl.col("category") == vocab.OP) & (pl.col("position") >= 0)
    )
    is_forward, is_backward = (
        pl.col("forward_thread").fill_null(0) == 0,
        pl.col("forward_thread") > 0,
    )
    threads = numbered.group_by("process").agg(
        pl.col("lane").filter(is_forward).n_unique(),
        pl.col("forward_thread").filter(is_backward).n_unique(),
    )
    backward = numbered.filter(is_backward)
    if (threads["lane"] > 1).any() or (threads["forward_thread"] > 1).any():
        backward = backward.clear()
    in_backward = np.zeros(tree.row.size, dtype=np.bool_)
    in_backward[backward["position"].to_numpy()] = True
    outermost = find_nearest_ancestor(tree.parent, in_backward) < 0
    forward = (
        numbered.filter(is_forward)
        .group_by("process", "sequence")
        .agg(forward=pl.col("position").max())
    )
    matched = (
        backward[np.flatnonzero(outermost[backward["position"].to_numpy()])]
        .join(forward, on=["process", "sequence"], how="inner")
        .sort("position")
    )
    arrows = trace.flows.filter(
        pl.col("kind") == "forward-backward",
        pl.col("source").is_not_null(),
        pl.col("target").is_not_null(),
    )
    source, target = (tree.position[arrows[name].to_numpy()] for name in ("source", "target"))
    has_both = (source >= 0) & (target >= 0)
    source, target = source[has_both], target[has_both]
    # An arrow may end at an op inside the one that represents the node.
    arrows_before = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=tree.row.size))])
    numbered_target = matched["position"].to_numpy()
    has_arrow = arrows_before[tree.stop[numbered_target]] > arrows_before[numbered_target]
    evidence = np.repeat(["measured", "correlated"], [target.size, int((~has_arrow).sum())])
    source = np.concatenate([source, matched["forward"].to_numpy()[~has_arrow]])
    target = np.concatenate([target, numbered_target[~has_arrow]])
    possible = tree.end[source] <= tree.start[target]
    source, target = source[possible], target[possible]
    edges.add(
        "forward-backward",
        evidence[possible],
        segment_node[host.last[source]],
        segment_node[host.first[target]],
        from_end=True,
        to_end=False,
    )
