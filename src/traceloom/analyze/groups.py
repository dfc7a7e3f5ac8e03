"""Groups, what they are for, who sends how much to whom."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.analyze.collectives import sum_or_null
from traceloom.trace.frames import Result, cast_to_schema, schema
from traceloom.trace.trace import Trace

ROLES = ("data", "sharded data", "tensor", "pipeline", "expert", "context", "embedding", "world", "unknown")
RoleType = pl.Enum(ROLES)
GROUP_SCHEMA = schema(
    "group description backend group_size members stride recorded_ranks",
    "kinds count bytes total_ns exposed_ns role evidence",
    {"members": pl.List(pl.Int32()), "role": RoleType},
)

# First match wins; names and descriptions in lower case.
_WORDS = (
    (r"expert_data_parallel|expert_dp|edp_?group", "data"),
    (r"expert|(^|[^a-z])(ep|moe)([^a-z]|$)|(^|_)ep_size", "expert"),
    (r"^data_parallel", "data"),
    (r"tensor|(^|[^a-z])(tp|mp)([^a-z]|$)", "tensor"),
    (r"pipeline|(^|[^a-z])(pp|pipe)([^a-z]|$)", "pipeline"),
    (r"context|sequence_parallel|ulysses|(^|[^a-z])(cp|sp)([^a-z]|$)", "context"),
    (r"embedding", "embedding"),
    (r"fsdp|dp_shard|zero|(^|[^a-z])(shard|hsdp)([^a-z]|$)", "sharded data"),
    (r"data_parallel|dp_replicate|(^|[^a-z])(dp|ddp|replicate)([^a-z]|$)", "data"),
)
_KIND, _PHASE = pl.col("kind").fill_null(""), pl.col("phase").cast(pl.String).fill_null("")
_MOVED = _KIND.is_in(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"])
# The calls of which a share speaks for a role.
_SHARES = {
    "pairs": _KIND.is_in(["send", "recv", "send_recv"]),
    "exchange": _KIND.is_in(["all_to_all", "dispatch", "combine", "notify", "layout"]),
    "backward": _MOVED & (_PHASE == "backward"),
    "forward": _MOVED & (_PHASE == "forward"),
    "gathers": (_KIND == "all_gather") & (_PHASE != "backward"),
    "scatters": _KIND == "reduce_scatter",
    "reduces": _KIND == "all_reduce",
}
_MOSTLY = 0.6  # share of a group's calls that decides what it is for


@dataclass(frozen=True)
class ProcessGroups(Result):
    """The groups of a job. Rules of the roles: docs/concepts/groups.md.

    Attributes:
        groups: One row per group (name and members): group, description, backend, group_size, members (null where no
            file has the whole list), stride (distance of neighbours; null where it is not even), recorded_ranks (ranks
            at hand that call it), kinds (what was called, the most frequent first), count, bytes, total_ns and
            exposed_ns over the recorded ranks, role and the evidence for it.
    """

    groups: pl.DataFrame


def declared_groups(trace: Trace) -> pl.DataFrame:
    """The groups that the file lists: group, description, backend, size, members."""
    return trace.groups.select("group", "description", "backend", pl.col("size"), pl.col("ranks").alias("members"))


def groups(calls: pl.DataFrame, declared: pl.DataFrame, world_size: int | None) -> ProcessGroups:
    """Find the groups of a job and their roles.

    Args:
        calls: Rows of `collectives(...).calls`, of any number of ranks.
        declared: Rows of `declared_groups` of the same ranks.
        world_size: Ranks of the job, where known.
    """
    declared = declared.unique(["group", "members"], keep="first", maintain_order=True)
    member_list = pl.col("members").cast(pl.List(pl.String)).list.join(",")
    keyed = calls.with_columns(pl.col("group").fill_null("").alias("key"), member_list.fill_null("").alias("whom"))
    used = keyed.group_by("key", "whom", maintain_order=True).agg(
        pl.col("group").first(),
        pl.col("group_size").drop_nulls().first(),
        pl.col("members").first(),
        pl.col("backend").drop_nulls().mode().sort().first(),
        pl.col("rank").n_unique().alias("recorded_ranks"),
        pl.len().alias("count"),
        sum_or_null("size_bytes").alias("bytes"),
        pl.col("duration_ns").sum().alias("total_ns"),
        sum_or_null("exposed_ns"),
        *(share.mean().alias(name) for name, share in _SHARES.items()),
    )
    counts = keyed.group_by("key", "whom", "kind", maintain_order=True).agg(pl.len().alias("n"))
    counts = counts.sort("n", "kind", descending=[True, False], nulls_last=True)
    word = pl.format("{} {}", pl.col("kind").fill_null("unknown"), pl.col("n"))
    kinds = counts.group_by("key", "whom", maintain_order=True).agg(word.str.join(", ").alias("kinds"))
    descriptions = declared.group_by("group", maintain_order=True).agg(pl.col("description").first())
    steps = pl.col("members").list.diff(null_behavior="drop")
    even = (steps.list.n_unique() == 1) & (steps.list.len() > 0)
    used = used.join(kinds, on=["key", "whom"], how="left", maintain_order="left").join(
        descriptions, on="group", how="left", maintain_order="left"
    )
    # groups that the files list and nobody called in the window are rows too
    silent = declared.filter(~pl.col("group").is_in(used["group"].drop_nulls().implode())).select(
        "group",
        "description",
        "backend",
        pl.col("size").cast(pl.Int32).alias("group_size"),
        "members",
        pl.lit(0, pl.Int64).alias("count"),
        pl.lit(0, pl.UInt32).alias("recorded_ranks"),
    )
    rows = pl.concat([used.with_columns(pl.col("count").cast(pl.Int64)), silent], how="diagonal_relaxed")
    rows = rows.with_columns(pl.when(even).then(steps.list.first()).alias("stride"))
    decided = [_role(row, world_size) for row in rows.to_dicts()]
    roles = pl.DataFrame(decided, {"role": RoleType, "evidence": pl.String()}, orient="row")
    frame = rows.hstack(roles).pipe(cast_to_schema, GROUP_SCHEMA)
    return ProcessGroups(frame.sort("total_ns", "group", descending=[True, False], nulls_last=True))


def _role(row: dict[str, object], world_size: int | None) -> tuple[str, str]:
    """Role of a group and what speaks for it: its name or description first, then its calls, then its members."""
    for source in ("description", "group"):
        words = str(row.get(source) or "").lower()
        if words and not words.isdigit() and words not in ("default_pg", "undefined"):
            text = pl.Series([words])
            for pattern, role in _WORDS:
                if text.str.contains(pattern)[0]:
                    return role, f"its {'description' if source == 'description' else 'name'} is `{words[:60]}`"
    if row.get("key") is None:  # listed, never called
        return "unknown", "no calls in the window"
    kinds, evidence = str(row["kinds"]), f"calls: {row['kinds']}"
    if row["group"] is None and row["members"] is None and "," in kinds and "dispatch" not in kinds:
        return "unknown", f"{evidence}; the file does not say their groups"
    whole = row["group_size"] is not None and row["group_size"] == world_size
    share = {name: float(str(row[name])) for name in _SHARES}
    both = share["forward"] >= 0.25 and share["backward"] >= 0.25  # calls of a layer: about as many each way
    if share["pairs"] >= _MOSTLY:
        return "pipeline", f"{evidence}; sends and receives between single ranks"
    if share["exchange"] >= _MOSTLY:
        if "all_to_all" in kinds:
            return "unknown", f"{evidence}; exchanges rows of experts or of sharded embeddings, which calls do not tell"
        return "expert", f"{evidence}; dispatches tokens to experts and combines them"
    if share["scatters"] > 0 and share["gathers"] > 0 and share["scatters"] + share["gathers"] >= 0.3:
        if row["stride"] == 1 and not whole and share["reduces"] == 0 and both:
            return "unknown", f"{evidence}; sharded weights or sequence-parallel tensors, both gather and scatter"
        return "sharded data", f"{evidence}; weights gathered before use, gradients scattered in the backward pass"
    if share["reduces"] >= _MOSTLY and share["backward"] >= _MOSTLY:
        return "data", f"{evidence}; {share['backward']:.0%} of them in the backward pass: gradients"
    if share["reduces"] >= _MOSTLY and both and row["stride"] == 1:
        return "tensor", f"{evidence}; all-reduces in forward and backward passes over neighbouring ranks"
    if whole:
        return "world", f"{evidence}; it holds all ranks of the job"
    return "unknown", f"{evidence}; neither name nor calls tell what it is for"


MATRIX_SCHEMA = schema("source target bytes exact_bytes duration_ns count", {"source": pl.Int32, "target": pl.Int32})
EXCHANGE_SCHEMA = schema("group rank count sent_bytes received_bytes peer_max_over_mean split_count")
_EVEN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
_ONCE = pl.lit(1, pl.Int64).alias("count")
# all-to-alls that say how many rows of the first dimension each member gets
_WITH_SPLITS = (
    (pl.col("kind") == "all_to_all")
    & pl.col("members").is_not_null()
    & pl.col("in_bytes").is_not_null()
    & (pl.col("in_splits").list.len() == pl.col("members").list.len())
    & (pl.col("in_splits").list.sum() > 0)
).fill_null(value=False)


def matrix(calls: pl.DataFrame) -> pl.DataFrame:
    """Bytes from rank to rank.

    Sends, receives and all-to-alls with recorded splits say exactly who got what. Of every other collective the ring or
    tree that ran is not in the trace: what a rank sends (`bus_factor` × `size_bytes`) is shared evenly among the other
    members; a root that is known sends to (or gets from) each of them. Time is shared like bytes.

    Args:
        calls: Rows of `collectives(...).calls`, of any number of ranks.

    Returns:
        source, target (global ranks), bytes, exact_bytes (the part that is recorded), duration_ns (of the calls
        of the source, waiting included), count; by source, then target. Calls without members, bytes or rank are not
        in it.
    """
    rank, peer, member = pl.col("rank"), pl.col("peer"), pl.col("members")
    size, time = pl.col("size_bytes"), pl.col("duration_ns")
    sent = calls.filter(pl.col("kind") == "send").drop_nulls(["rank", "peer", "size_bytes"])
    received = calls.filter(pl.col("kind") == "recv").drop_nulls(["rank", "peer", "size_bytes"])
    # receives count where their sender is not recorded
    only_received = received.join(
        sent.select("rank", "peer").unique(),
        left_on=["peer", "rank"],
        right_on=["rank", "peer"],
        how="anti",
        maintain_order="left",
    )
    whole = pl.col("in_splits").list.sum().alias("whole")
    split = calls.filter(_WITH_SPLITS, rank.is_not_null()).with_columns(whole).explode("members", "in_splits")
    share = pl.col("in_splits") / pl.col("whole")
    parts = [
        sent.select(*_row(rank, peer, size, time, exact=True), _ONCE),
        only_received.select(*_row(peer, rank, size, time, exact=True), _ONCE),
        split.filter(member != rank).select(
            *_row(rank, member, pl.col("in_bytes") * share, time * share, exact=True), _ONCE
        ),
        _shared(calls),
    ]
    return (
        pl.concat(parts)
        .group_by("source", "target")
        .agg(
            pl.col("bytes").sum(),
            pl.when("exact").then("bytes").otherwise(0).sum().alias("exact_bytes"),
            pl.col("duration_ns").sum(),
            pl.col("count").sum(),
        )
        .sort("source", "target")
        .pipe(cast_to_schema, MATRIX_SCHEMA)
    )


def _row(source: pl.Expr, target: pl.Expr, size: pl.Expr, time: pl.Expr, *, exact: bool) -> list[pl.Expr]:
    return [
        source.cast(pl.Int32).alias("source"),
        target.cast(pl.Int32).alias("target"),
        size.round().cast(pl.Int64).alias("bytes"),
        time.round().cast(pl.Int64).alias("duration_ns"),
        pl.lit(exact).alias("exact"),
    ]


def _shared(calls: pl.DataFrame) -> pl.DataFrame:
    """Collectives whose way through the ranks is not recorded; those with a known root go from or to it."""
    shared = calls.filter(
        pl.col("kind").is_in([*_EVEN, *_FROM_ROOT, *_TO_ROOT]),
        ~_WITH_SPLITS,
        pl.col("rank").is_not_null(),
        pl.col("members").list.len() > 1,
        pl.col("size_bytes").is_not_null(),
    )
    ranks = pl.col("members").list.len()
    rooted = pl.col("kind").is_in([*_FROM_ROOT, *_TO_ROOT])
    one_way = pl.when(pl.col("kind").is_in(["gather", "scatter"])).then(pl.col("size_bytes") / ranks)
    to_each = (
        # without a root every rank stands for its share of the one way through all
        pl.when(rooted & pl.col("peer").is_null()).then(one_way.otherwise("size_bytes") / ranks)
        .when(rooted).then(one_way.otherwise("size_bytes"))
        .otherwise(pl.col("size_bytes") * pl.col("bus_factor") / (ranks - 1))
    )  # fmt: skip
    # calls of one group and size fill the same cells
    member_list = pl.col("members").cast(pl.List(pl.String)).list.join(",").alias("whom")
    alike = shared.group_by("rank", "peer", member_list, "kind", "size_bytes", maintain_order=True).agg(
        pl.col("members").first(), to_each.sum().alias("moved"), pl.col("duration_ns").sum(), pl.len().alias("count")
    )
    to_root = pl.col("kind").is_in(_TO_ROOT) & pl.col("peer").is_not_null()
    from_other = pl.col("kind").is_in(_FROM_ROOT) & (pl.col("peer") != pl.col("rank")).fill_null(value=False)
    each = (
        alike.filter(~from_other)
        .with_columns((pl.col("duration_ns") / pl.when(to_root).then(1).otherwise(ranks - 1)).alias("took"))
        .explode("members")
        .filter(pl.col("members") != pl.col("rank"), ~to_root | (pl.col("members") == pl.col("peer")))
    )
    return each.select(
        *_row(pl.col("rank"), pl.col("members"), pl.col("moved"), pl.col("took"), exact=False),
        pl.col("count").cast(pl.Int64),
    )


def exchanges(calls: pl.DataFrame) -> pl.DataFrame:
    """How much each rank sends and receives in all-to-alls, and how unevenly over its peers.

    Returns:
        group, rank, count, sent_bytes, received_bytes (null where unknown), peer_max_over_mean (of the bytes to each
        peer, summed over the calls; null without splits), split_count (calls with recorded splits).
    """
    all_to_alls = calls.filter(pl.col("kind") == "all_to_all")
    marked = all_to_alls.with_columns(_WITH_SPLITS.alias("split"))
    sums = marked.group_by("group", "rank", maintain_order=True).agg(
        pl.len().alias("count"),
        sum_or_null("in_bytes").alias("sent_bytes"),
        sum_or_null("out_bytes").alias("received_bytes"),
        pl.col("split").sum().alias("split_count"),
    )
    peers = (
        marked.filter("split")
        .with_columns((pl.col("in_bytes") / pl.col("in_splits").list.sum()).alias("each"))
        .explode("members", "in_splits")
        .group_by("group", "rank", "members")
        .agg((pl.col("in_splits") * pl.col("each")).sum().alias("sent"))
        .group_by("group", "rank")
        .agg((pl.col("sent").max() / pl.col("sent").mean()).alias("peer_max_over_mean"))
    )
    return (
        sums.join(peers, on=["group", "rank"], how="left", nulls_equal=True, maintain_order="left")
        .pipe(cast_to_schema, EXCHANGE_SCHEMA)
        .sort("group", "rank", nulls_last=True)
    )
