"""Process groups with their roles, and the traffic between ranks."""

from dataclasses import dataclass

import polars as pl

from traceloom.analyze.collectives import add_up_or_null
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

ROLES = (
    "data",
    "sharded data",
    "tensor",
    "pipeline",
    "expert",
    "context",
    "embedding",
    "world",
    "unknown",
)
RoleEnum = pl.Enum(ROLES)
GROUP_SCHEMA = build_schema(
    "group description backend group_size members stride recorded_ranks",
    "kinds count bytes total_ns exposed_ns role evidence",
    {"members": pl.List(pl.Int32()), "role": RoleEnum},
)

# First match wins; names and descriptions in lower case.
_ROLE_PATTERNS = (
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
_IS_WEIGHT_OR_GRADIENT_CALL = _KIND.is_in(
    ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]
)
# The kinds of calls whose share indicates a role.
_ROLE_INDICATORS = {
    "pairs": _KIND.is_in(["send", "recv", "send_recv"]),
    "exchange": _KIND.is_in(["all_to_all", "dispatch", "combine", "notify", "layout"]),
    "backward": _IS_WEIGHT_OR_GRADIENT_CALL & (_PHASE == "backward"),
    "forward": _IS_WEIGHT_OR_GRADIENT_CALL & (_PHASE == "forward"),
    "gathers": (_KIND == "all_gather") & (_PHASE != "backward"),
    "scatters": _KIND == "reduce_scatter",
    "reduces": _KIND == "all_reduce",
}
_MIN_CALL_SHARE = 0.6  # share of a group's calls that decides its role


@dataclass(frozen=True)
class ProcessGroups(Result):
    """The groups of a job. Rules of the roles: docs/concepts/groups.md.

    Attributes:
        groups: One row per group (name and members): group, description, backend, group_size,
            members (null where no file has the whole list), stride (distance of neighbours; null
            where it is not even), recorded_ranks (recorded ranks that call it), kinds (what was
            called, the most frequent first), count, bytes, total_ns and exposed_ns over the
            recorded ranks, role and the evidence for it.
    """

    groups: pl.DataFrame


def declared_groups(trace: Trace) -> pl.DataFrame:
    """Returns the groups that the file lists: group, description, backend, size, members."""
    return trace.groups.select(
        "group", "description", "backend", pl.col("size"), pl.col("ranks").alias("members")
    )


def groups(calls: pl.DataFrame, declared: pl.DataFrame, world_size: int | None) -> ProcessGroups:
    """Finds the groups of a job and their roles.

    Args:
        calls: Rows of `collectives(...).calls`, of any number of ranks.
        declared: Rows of `declared_groups` of the same ranks.
        world_size: Ranks of the job, where known.
    """
    declared = declared.unique(["group", "members"], keep="first", maintain_order=True)
    member_list = pl.col("members").cast(pl.List(pl.String)).list.join(",")
    keyed_calls = calls.with_columns(
        pl.col("group").fill_null("").alias("key"), member_list.fill_null("").alias("whom")
    )
    called_groups = keyed_calls.group_by("key", "whom", maintain_order=True).agg(
        pl.col("group").first(),
        pl.col("group_size").drop_nulls().first(),
        pl.col("members").first(),
        pl.col("backend").drop_nulls().mode().sort().first(),
        pl.col("rank").n_unique().alias("recorded_ranks"),
        pl.len().alias("count"),
        add_up_or_null("size_bytes").alias("bytes"),
        pl.col("duration_ns").sum().alias("total_ns"),
        add_up_or_null("exposed_ns"),
        *(share.mean().alias(name) for name, share in _ROLE_INDICATORS.items()),
    )
    counts = keyed_calls.group_by("key", "whom", "kind", maintain_order=True).agg(
        pl.len().alias("n")
    )
    counts = counts.sort("n", "kind", descending=[True, False], nulls_last=True)
    kind_text = pl.format("{} {}", pl.col("kind").fill_null("unknown"), pl.col("n"))
    kinds = counts.group_by("key", "whom", maintain_order=True).agg(
        kind_text.str.join(", ").alias("kinds")
    )
    descriptions = declared.group_by("group", maintain_order=True).agg(
        pl.col("description").first()
    )
    rank_distances = pl.col("members").list.diff(null_behavior="drop")
    is_evenly_spaced = (rank_distances.list.n_unique() == 1) & (rank_distances.list.len() > 0)
    called_groups = called_groups.join(
        kinds, on=["key", "whom"], how="left", maintain_order="left"
    ).join(descriptions, on="group", how="left", maintain_order="left")
    # Groups that the files list and that were not called in the window are rows too.
    uncalled_groups = declared.filter(
        ~pl.col("group").is_in(called_groups["group"].drop_nulls().implode())
    ).select(
        "group",
        "description",
        "backend",
        pl.col("size").cast(pl.Int32).alias("group_size"),
        "members",
        pl.lit(0, pl.Int64).alias("count"),
        pl.lit(0, pl.UInt32).alias("recorded_ranks"),
    )
    rows = pl.concat(
        [called_groups.with_columns(pl.col("count").cast(pl.Int64)), uncalled_groups],
        how="diagonal_relaxed",
    )
    rows = rows.with_columns(
        pl.when(is_evenly_spaced).then(rank_distances.list.first()).alias("stride")
    )
    role_rows = [_infer_role(row, world_size) for row in rows.to_dicts()]
    roles = pl.DataFrame(role_rows, {"role": RoleEnum, "evidence": pl.String()}, orient="row")
    frame = rows.hstack(roles).pipe(cast_to_schema, GROUP_SCHEMA)
    return ProcessGroups(frame.sort("total_ns", "group", descending=[True, False], nulls_last=True))


def _infer_role(row: dict[str, object], world_size: int | None) -> tuple[str, str]:
    """Returns the role of a group and the evidence for it: its name or description first, then its
    calls, then its members.
    """
    for source in ("description", "group"):
        label = str(row.get(source) or "").lower()
        if label and not label.isdigit() and label not in ("default_pg", "undefined"):
            text = pl.Series([label])
            for pattern, role in _ROLE_PATTERNS:
                if text.str.contains(pattern)[0]:
                    return (
                        role,
                        f"its {'description' if source == 'description' else 'name'} is `{label[:60]}`",
                    )
    if row.get("key") is None:  # listed, never called
        return "unknown", "no calls in the window"
    kinds, evidence = str(row["kinds"]), f"calls: {row['kinds']}"
    if row["group"] is None and row["members"] is None and "," in kinds and "dispatch" not in kinds:
        return "unknown", f"{evidence}; the file does not say their groups"
    has_all_ranks = row["group_size"] is not None and row["group_size"] == world_size
    call_shares = {name: float(str(row[name])) for name in _ROLE_INDICATORS}
    # Calls of a layer: about as many each way
    is_in_both_passes = call_shares["forward"] >= 0.25 and call_shares["backward"] >= 0.25
    if call_shares["pairs"] >= _MIN_CALL_SHARE:
        return "pipeline", f"{evidence}; sends and receives between single ranks"
    if call_shares["exchange"] >= _MIN_CALL_SHARE:
        if "all_to_all" in kinds:
            return (
                "unknown",
                f"{evidence}; exchanges rows of experts or of sharded embeddings, which calls do not tell",
            )
        return "expert", f"{evidence}; dispatches tokens to experts and combines them"
    if (
        call_shares["scatters"] > 0
        and call_shares["gathers"] > 0
        and call_shares["scatters"] + call_shares["gathers"] >= 0.3
    ):
        if (
            row["stride"] == 1
            and not has_all_ranks
            and call_shares["reduces"] == 0
            and is_in_both_passes
        ):
            return (
                "unknown",
                f"{evidence}; sharded weights or sequence-parallel tensors, both gather and scatter",
            )
        return (
            "sharded data",
            f"{evidence}; weights gathered before use, gradients scattered in the backward pass",
        )
    if call_shares["reduces"] >= _MIN_CALL_SHARE and call_shares["backward"] >= _MIN_CALL_SHARE:
        return (
            "data",
            f"{evidence}; {call_shares['backward']:.0%} of them in the backward pass: gradients",
        )
    if call_shares["reduces"] >= _MIN_CALL_SHARE and is_in_both_passes and row["stride"] == 1:
        return (
            "tensor",
            f"{evidence}; all-reduces in forward and backward passes over neighbouring ranks",
        )
    if has_all_ranks:
        return "world", f"{evidence}; it holds all ranks of the job"
    return "unknown", f"{evidence}; neither name nor calls tell what it is for"


MATRIX_SCHEMA = build_schema(
    "source target bytes exact_bytes duration_ns count", {"source": pl.Int32, "target": pl.Int32}
)
ALL_TO_ALL_SCHEMA = build_schema(
    "group rank count sent_bytes received_bytes peer_max_over_mean split_count"
)
_SYMMETRIC_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_FROM_ROOT_KINDS, _TO_ROOT_KINDS = ("broadcast", "scatter"), ("reduce", "gather")
_ONE_CALL = pl.lit(1, pl.Int64).alias("count")
# All-to-alls that record how many rows of the first dimension each member gets.
_HAS_SPLITS = (
    (pl.col("kind") == "all_to_all")
    & pl.col("members").is_not_null()
    & pl.col("in_bytes").is_not_null()
    & (pl.col("in_splits").list.len() == pl.col("members").list.len())
    & (pl.col("in_splits").list.sum() > 0)
).fill_null(value=False)


def matrix(calls: pl.DataFrame) -> pl.DataFrame:
    """Returns the bytes from rank to rank.

    Sends, receives and all-to-alls with recorded splits state exactly which rank got what. For
    every other collective the ring or tree that ran is not in the trace: what a rank sends
    (`bus_factor` × `size_bytes`) is divided evenly among the other members; a root that is known
    sends to (or gets from) each of them. Time is divided like bytes.

    Args:
        calls: Rows of `collectives(...).calls`, of any number of ranks.

    Returns:
        source, target (global ranks), bytes, exact_bytes (the part that is recorded), duration_ns
        (of the calls of the source, waiting included), count; by source, then target. Calls without
        members, bytes or rank are not in it.
    """
    rank, peer, member = pl.col("rank"), pl.col("peer"), pl.col("members")
    size, time = pl.col("size_bytes"), pl.col("duration_ns")
    sent = calls.filter(pl.col("kind") == "send").drop_nulls(["rank", "peer", "size_bytes"])
    received = calls.filter(pl.col("kind") == "recv").drop_nulls(["rank", "peer", "size_bytes"])
    # Receives count where their sender is not recorded.
    unmatched_received = received.join(
        sent.select("rank", "peer").unique(),
        left_on=["peer", "rank"],
        right_on=["rank", "peer"],
        how="anti",
        maintain_order="left",
    )
    total_split = pl.col("in_splits").list.sum().alias("whole")
    split_calls = (
        calls.filter(_HAS_SPLITS, rank.is_not_null())
        .with_columns(total_split)
        .explode("members", "in_splits")
    )
    share = pl.col("in_splits") / pl.col("whole")
    transfers = [
        sent.select(*_build_transfer_columns(rank, peer, size, time, exact=True), _ONE_CALL),
        unmatched_received.select(
            *_build_transfer_columns(peer, rank, size, time, exact=True), _ONE_CALL
        ),
        split_calls.filter(member != rank).select(
            *_build_transfer_columns(
                rank, member, pl.col("in_bytes") * share, time * share, exact=True
            ),
            _ONE_CALL,
        ),
        _estimate_collective_transfers(calls),
    ]
    return (
        pl.concat(transfers)
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


def _build_transfer_columns(
    source: pl.Expr, target: pl.Expr, size: pl.Expr, time: pl.Expr, *, exact: bool
) -> list[pl.Expr]:
    return [
        source.cast(pl.Int32).alias("source"),
        target.cast(pl.Int32).alias("target"),
        size.round().cast(pl.Int64).alias("bytes"),
        time.round().cast(pl.Int64).alias("duration_ns"),
        pl.lit(exact).alias("exact"),
    ]


def _estimate_collective_transfers(calls: pl.DataFrame) -> pl.DataFrame:
    """Estimates the transfers of collectives whose route through the ranks is not recorded; those
    with a known root go from or to it.
    """
    collectives = calls.filter(
        pl.col("kind").is_in([*_SYMMETRIC_KINDS, *_FROM_ROOT_KINDS, *_TO_ROOT_KINDS]),
        ~_HAS_SPLITS,
        pl.col("rank").is_not_null(),
        pl.col("members").list.len() > 1,
        pl.col("size_bytes").is_not_null(),
    )
    member_count = pl.col("members").list.len()
    has_root_kind = pl.col("kind").is_in([*_FROM_ROOT_KINDS, *_TO_ROOT_KINDS])
    rooted_bytes = pl.when(pl.col("kind").is_in(["gather", "scatter"])).then(
        pl.col("size_bytes") / member_count
    )
    bytes_per_peer = (
        # Without a root every rank has its share of the one route through all.
        pl.when(has_root_kind & pl.col("peer").is_null())
        .then(rooted_bytes.otherwise("size_bytes") / member_count)
        .when(has_root_kind)
        .then(rooted_bytes.otherwise("size_bytes"))
        .otherwise(pl.col("size_bytes") * pl.col("bus_factor") / (member_count - 1))
    )
    # Calls of one group and size fill the same cells.
    member_list = pl.col("members").cast(pl.List(pl.String)).list.join(",").alias("whom")
    merged_calls = collectives.group_by(
        "rank", "peer", member_list, "kind", "size_bytes", maintain_order=True
    ).agg(
        pl.col("members").first(),
        bytes_per_peer.sum().alias("moved"),
        pl.col("duration_ns").sum(),
        pl.len().alias("count"),
    )
    has_known_root = pl.col("kind").is_in(_TO_ROOT_KINDS) & pl.col("peer").is_not_null()
    is_root_elsewhere = pl.col("kind").is_in(_FROM_ROOT_KINDS) & (
        pl.col("peer") != pl.col("rank")
    ).fill_null(value=False)
    transfers = (
        merged_calls.filter(~is_root_elsewhere)
        .with_columns(
            (
                pl.col("duration_ns") / pl.when(has_known_root).then(1).otherwise(member_count - 1)
            ).alias("took")
        )
        .explode("members")
        .filter(
            pl.col("members") != pl.col("rank"),
            ~has_known_root | (pl.col("members") == pl.col("peer")),
        )
    )
    return transfers.select(
        *_build_transfer_columns(
            pl.col("rank"), pl.col("members"), pl.col("moved"), pl.col("took"), exact=False
        ),
        pl.col("count").cast(pl.Int64),
    )


def exchanges(calls: pl.DataFrame) -> pl.DataFrame:
    """Returns how much each rank sends and receives in all-to-alls, and how unevenly over its
    peers.

    Returns:
        group, rank, count, sent_bytes, received_bytes (null where unknown), peer_max_over_mean (of
        the bytes to each peer, summed over the calls; null without splits), split_count (calls with
        recorded splits).
    """
    all_to_alls = calls.filter(pl.col("kind") == "all_to_all")
    all_to_alls_with_splits = all_to_alls.with_columns(_HAS_SPLITS.alias("split"))
    totals = all_to_alls_with_splits.group_by("group", "rank", maintain_order=True).agg(
        pl.len().alias("count"),
        add_up_or_null("in_bytes").alias("sent_bytes"),
        add_up_or_null("out_bytes").alias("received_bytes"),
        pl.col("split").sum().alias("split_count"),
    )
    peers = (
        all_to_alls_with_splits.filter("split")
        .with_columns((pl.col("in_bytes") / pl.col("in_splits").list.sum()).alias("each"))
        .explode("members", "in_splits")
        .group_by("group", "rank", "members")
        .agg((pl.col("in_splits") * pl.col("each")).sum().alias("sent"))
        .group_by("group", "rank")
        .agg((pl.col("sent").max() / pl.col("sent").mean()).alias("peer_max_over_mean"))
    )
    return (
        totals.join(
            peers, on=["group", "rank"], how="left", nulls_equal=True, maintain_order="left"
        )
        .pipe(cast_to_schema, ALL_TO_ALL_SCHEMA)
        .sort("group", "rank", nulls_last=True)
    )
