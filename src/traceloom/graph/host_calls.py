"""What a host trace knows of communication: sizes, groups, peers and tags."""

import polars as pl

from traceloom.formats.links import apply_per_text, classify_collective
from traceloom.graph.dataflow import parse_tensors
from traceloom.graph.host_match import Matching
from traceloom.trace.trace import Trace

# Calls that give back what they are given, and PyTorch's own record of any call
_CALLS = r"^(?:record_param_comms|c10d::(?:allreduce_|broadcast_|reduce_|send|recv_))$"
# Group and its description, or its number or address in old versions; own rank or peer, name, splits; then the group's first rank, the stride
# of its ranks, and its size
_RECORD = (
    r',(?:\["(?<group>[^"]*)","[^"]*"\]|(?<number>\d+)),(?<other>-?\d+),"(?<called>\w+)",\[[\d,]*\],\[[\d,]*\]'
    r"(?:,(?<first>\d+),(?<stride>\d+),(?<group_size>\d+))?\]$"
)
_MESSAGE_CALLS = ("c10d::send", "c10d::recv_")
_MAX_RANKS = 1 << 20
_MESSAGE = r",(?<to>\d+),(?<tag>\d+)\]$"


def describe_host_calls(trace: Trace, matching: Matching) -> pl.DataFrame:
    """Returns the communication calls of a host trace by the event of the trace that each was
    joined to; columns as in `collectives` of a trace, with a `tag`; a peer is a rank of its group.
    """
    events = pl.DataFrame({"event": trace.events["event"], "id": matching.host_op})
    calls = describe_calls(matching.host.ops)
    is_address = pl.col("group").str.contains(r"^\d{8}")  # which other ranks do not know
    calls = calls.with_columns(pl.when(~is_address).then("group").alias("group"))
    return events.join(calls, on="id", maintain_order="left")


def describe_message_calls(trace: Trace) -> pl.DataFrame:
    """Returns the calls of messages whose values a device trace has, as `describe_host_calls`."""
    named = trace.events.select("event", "name").filter(pl.col("name").is_in(_MESSAGE_CALLS))
    calls = named.join(trace.tensors, on="event", maintain_order="left").select(
        "name",
        pl.col("event").alias("id"),
        pl.col("concrete").str.replace_all('"', "", literal=True).alias("inputs"),
        *(pl.lit("").alias(name) for name in ("outputs", "input_types", "output_types")),
    )
    return describe_calls(calls).rename({"id": "event"})


def describe_calls(ops: pl.DataFrame) -> pl.DataFrame:
    """Returns the communication calls among the ops of a host trace, by id."""
    calls = ops.filter(pl.col("name").str.contains(_CALLS)).with_columns(
        pl.col("inputs", "outputs", "input_types", "output_types").fill_null("")
    )
    arguments = pl.col("inputs").str.replace_all(r"\s", "")
    described = calls.select(
        "id",
        "name",
        arguments.str.extract_groups(_RECORD).alias("record"),
        pl.when(pl.col("name").is_in(_MESSAGE_CALLS))
        .then(arguments)
        .str.extract_groups(_MESSAGE)
        .alias("message"),
    ).unnest("record", "message")
    kind = apply_per_text(
        described["called"].fill_null(described["name"]), classify_collective
    ).alias("kind")
    first, stride, size, other, to = (
        pl.col(name).cast(pl.Int64, strict=False)
        for name in ("first", "stride", "group_size", "other", "to")
    )
    described = described.select(
        "id",
        kind,
        pl.coalesce("group", "number").replace("", None).alias("group"),
        size.cast(pl.Int32),
        pl.when(size.is_between(1, _MAX_RANKS), (stride > 0) | (size == 1))
        .then(first + stride * pl.int_ranges(0, size.clip(0, _MAX_RANKS)))
        .cast(pl.List(pl.Int32))
        .alias("ranks"),
        pl.when(kind.is_in(["send", "recv"]))
        .then(pl.coalesce(to, other))
        .cast(pl.Int32)
        .alias("peer"),
        pl.col("tag").cast(pl.Int64, strict=False),
    )
    for side in ("in", "out"):
        content = pl.col("content").str.split_exact(",", 2).struct
        count, each = (content.field(f"field_{number}").cast(pl.Int64) for number in (0, 1))
        kinds = content.field("field_2").str.extract(r"^Tensor\((.*)\)$")
        sizes = (
            parse_tensors(calls, f"{side}puts", f"{side}put_types")
            .group_by("id")
            .agg((count * each).sum().alias(f"{side}_bytes"), kinds.first().alias(f"{side}_type"))
        )
        described = described.join(sizes, on="id", how="left")
    return described.with_columns(
        pl.coalesce("in_type", "out_type").alias("element_type"),
        pl.coalesce("out_bytes", "in_bytes").alias("out_bytes"),
    )
