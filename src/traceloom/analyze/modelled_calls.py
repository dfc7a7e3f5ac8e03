"""Calls of operators whose FLOPs and bytes are known, and the GPU work of each; every FLOP counts
once.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import polars as pl
from msgspec import Struct, structs

from traceloom.analyze.ancestry import Forest, build_forest
from traceloom.analyze.flops import MODELS, Call, Work
from traceloom.analyze.flops.attention import BATCH_ANNOTATION_PATTERN, PAGED_FAMILY
from traceloom.analyze.flops.registry import LaunchedKernel, parse_json_list
from traceloom.analyze.gpu_work import attribute_to_launches, find_gpu_event_rows
from traceloom.analyze.graph_launches import graph_launches, list_replayed_work, map_nodes
from traceloom.analyze.names import build_vocabulary
from traceloom.formats.arguments import can_reread_events, read_all_arguments
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, get_event_column
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.trace import Trace

_GRID_MISMATCH = "the capture ran this kernel with another grid, so with other shapes"
_CALL_NOT_RECORDED = (
    "the capture knows its operator, but not the shapes of its inputs, or there is no model of it"
)

_ANNOTATION = vocab.CATEGORIES.index(vocab.ANNOTATION)
LINK_COPIES = ("HtoD", "DtoH", "HtoH", "PtoP")
"""Copies that the link between host and devices bounds, not the memory of the device."""

_SIZE_IN_NAME = r"OpaqueType<(\d+)u?>"
_TYPE_IN_NAME = (
    (r"c10::BFloat16|__nv_bfloat16|__hip_bfloat16", "bf16"),
    (r"c10::Half|__half", "fp16"),
    (r"<double|\bdouble[,>]", "fp64"),
    (r"<float|\bfloat[,>]", "fp32"),
    (r"<long|\blong[,>]", "int64"),
    (r"<int[,>]|Functor<int\b", "int32"),
)
TF32_KERNEL = r"(?i)tf32|s1688|xf32|_S_MX_B|xmma_gemm_f32_tf32"
FP32_KERNEL = r"(?i)sgemm|simt|scudnn|winograd|gemv|f32f32_f32f32|_SB_|_S_B_|dot_kernel|fft"
"""Kernel names that show the arithmetic of fp32 matrix work: tf32, or fp32 itself."""

_INPUTS = ("name", "shapes", "types", "concrete", "strides", "list_type", "batch")
UNMAPPED = build_schema("event reason")
GROUPS = build_schema(
    "group name shapes types flops recomputed bytes dtype matrix reason", {"group": pl.UInt32}
)


class ModelledCalls(Struct, frozen=True):
    """The modelled calls of one trace.

    Attributes:
        groups: One row per distinct (name, shapes, types, values): FLOPs and bytes of one call, its
            element type, whether matrix units can do it; else null with the reason.
        group: For each host event (position in the forest) its group; -1 for none.
        owner: For each host event the outermost modelled call around it or it itself; -1 for none.
            Only calls with GPU work count; in a trace without GPU work all do.
        work_owner: For each piece of GPU work (rows of `trace.gpu_work()`) the modelled call it
            belongs to; -1 for none, and for copies that a link bounds.
        link: Which GPU work is such a copy.
        above: For each host event itself; for calls that were read from another recording (see
            `add_graph_replays`), which come after these in `group` and `owner`, the position of the
            graph launch that made them.
        unmapped: Work of graph replays (event) without a call in the other recording, with the
            reason.
        recorded: The recorded call of each group, as its model received it.
    """

    groups: pl.DataFrame
    group: Ints
    owner: Ints
    work_owner: Ints
    link: Bools
    above: Ints
    unmapped: pl.DataFrame
    recorded: pl.DataFrame


@cache_per_trace
def _get_cache(_trace: Trace) -> dict[int, ModelledCalls]:
    """Returns a dictionary that holds the last result by the number of registered models."""
    return {}


def find_modelled_calls(trace: Trace) -> ModelledCalls:
    """Models the operators of a trace; cached for the last trace, until a model is registered."""
    cache = _get_cache(trace)
    if MODELS.generation not in cache:
        calls = _find_calls(trace)
        cache.clear()
        cache[MODELS.generation] = calls
    return cache[MODELS.generation]


def _find_batch_annotations(trace: Trace, events: pl.Series) -> pl.Series:
    """Returns for host events the innermost annotation around each that states the batch of a
    serving engine, else "".
    """
    tree = build_forest(trace)
    vocabulary = build_vocabulary(trace)
    has_batch = vocabulary.matching(BATCH_ANNOTATION_PATTERN.pattern)
    marks = np.zeros(tree.row.size, dtype=np.bool_)
    if has_batch.any():
        marks = gather_rows(has_batch, vocabulary.code[tree.row]) & (
            get_event_column(trace, "category")[tree.row] == _ANNOTATION
        )
    if not marks.any():
        return pl.Series("batch", [""]).new_from_index(0, events.len())
    annotation = tree.nearest(marks)[tree.position[events.to_numpy()]]
    rows = np.where(annotation >= 0, tree.row[annotation], -1)
    names = trace.events["name"].gather(np.maximum(rows, 0))
    return pl.select(
        pl.when(pl.Series(rows >= 0)).then(names).otherwise(pl.lit("")).alias("batch")
    ).to_series()


def _find_calls(trace: Trace, positions: Ints | None = None, batch: str = "") -> ModelledCalls:
    """Returns the modelled calls of a recording, without caching.

    Args:
        trace: The recording.
        positions: Only those around some of its host events (positions in the forest), with work or
            not; else all that have GPU work.
        batch: The batch of calls without an annotation that states it.
    """
    tree = build_forest(trace)
    work = attribute_to_launches(trace)
    copies = trace.copies.filter(pl.col("kind").is_in(LINK_COPIES))["event"]
    link = np.isin(find_gpu_event_rows(trace), copies.to_numpy())
    origin = np.where(link, -1, work.launch_position)
    counted = origin[origin >= 0] if positions is None else positions
    launches = np.bincount(counted, minlength=tree.row.size).astype(np.int64)
    all_calls = positions is None and not work.launch_position.size
    relevant = (
        np.ones(tree.row.size, dtype=np.bool_) if all_calls else tree.subtree_sums(launches) > 0
    )
    # Calls with recorded inputs that launch GPU work and whose operator has a model.
    tensors = trace.tensors
    position = tree.position[tensors["event"].to_numpy()]
    launches_work = (position >= 0) & np.append(relevant, np.False_)[position]
    vocabulary = build_vocabulary(trace)
    code = vocabulary.code[tensors["event"].to_numpy()[launches_work]]
    modelled = np.zeros(vocabulary.names.len(), dtype=np.bool_)
    for used in np.unique(code).tolist():
        modelled[used] = MODELS.find(vocabulary.names[used]) is not None
    calls = tensors[np.flatnonzero(launches_work)[modelled[code]]]
    calls = calls.with_columns(
        trace.events["name"][calls["event"]].alias("name"),
        pl.when(pl.col("strides").str.contains(r"[\[,]0[,\]]"))
        .then("strides")
        .otherwise(pl.lit(""))
        .alias("strides"),
        pl.col("concrete").fill_null(""),
        _find_batch_annotations(trace, calls["event"]),
        list_type=pl.lit(""),
    )
    # Element types of the tensors in lists: from the name of the kernel that the call launched
    # itself.
    lists = calls.filter(pl.col("types").str.contains("TensorList", literal=True))
    if lists.height:
        kernels = (
            trace.events.lazy()
            .filter(
                pl.col("category") == vocab.KERNEL, pl.col("op").is_in(lists["event"].implode())
            )
            .group_by("op")
            .agg(pl.col("name").first())
            .collect()
        )
        size = pl.col("name").str.extract(_SIZE_IN_NAME) + "-byte"
        typed = [
            pl.when(pl.col("name").str.contains(pattern)).then(pl.lit(dtype))
            for pattern, dtype in _TYPE_IN_NAME
        ]
        type_by_op = kernels.select(event="op", list_type=pl.coalesce(size, *typed))
        joined = calls[["event"]].join(type_by_op, on="event", how="left", maintain_order="left")
        calls = calls.with_columns(joined["list_type"].fill_null(""))
    calls = (
        (calls.with_columns(pl.col("batch").replace("", batch)) if batch else calls)
        .group_by(_INPUTS, maintain_order=True)
        .agg("event")
    )
    calls = calls.with_row_index("group")
    groups = _apply_models(calls, _collect_call_contents(trace, tree, calls))
    group = np.full(tree.row.size, -1, dtype=np.int64)
    members = calls[["group", "event"]].explode("event")
    group[tree.position[members["event"].to_numpy()]] = members["group"].to_numpy()
    has_model = np.append(groups["flops"].is_not_null().to_numpy(), np.False_)
    owner = tree.outermost_or_self(has_model[group])
    ancestor = np.arange(tree.row.size, dtype=np.int64)
    recorded, none = calls.drop("event"), pl.DataFrame(schema=UNMAPPED)
    return ModelledCalls(
        groups, group, owner, np.append(owner, -1)[origin], link, ancestor, none, recorded
    )


def _collect_call_contents(
    trace: Trace, tree: Forest, calls: pl.DataFrame
) -> dict[int, tuple[tuple[Call, ...], tuple[LaunchedKernel, ...]]]:
    """Returns by group what is inside its first call: calls with recorded inputs, and kernels with
    their grids.

    Only for operators whose model needs it; calls with the same inputs do the same. For captures,
    which run no kernels, the launching calls have the grids.
    """
    names = [name for name in calls["name"].unique().to_list() if MODELS.looks_inside(name)]
    if not names:
        return {}
    events = trace.events.lazy()
    contents = {}
    for group, event in (
        calls.filter(pl.col("name").is_in(names))
        .select("group", pl.col("event").list.first())
        .rows()
    ):
        position = int(tree.position[event])
        descendants = (
            pl.Series(np.sort(tree.row[position + 1 : tree.stop[position]]))
            .cast(pl.UInt32)
            .implode()
        )
        inputs = trace.tensors.filter(pl.col("event").is_in(descendants))
        names_below = trace.events["name"].gather(inputs["event"]).alias("name")
        nested_calls = tuple(
            _call(*values)
            for values in inputs.select(names_below, "shapes", "types", "concrete").rows()
        )
        kernels = events.filter(
            pl.col("category") == vocab.KERNEL, pl.col("launch").is_in(descendants)
        )
        ran = kernels.select("event", "name").collect()
        if not ran.height:
            launches = events.filter(
                pl.col("category").is_in(vocab.LAUNCHES), pl.col("event").is_in(descendants)
            )
            ran = launches.select("event", pl.lit(None, pl.String).alias("name")).collect()
        launched = []
        if ran.height and can_reread_events(trace):
            ran = ran.sort("event")
            arguments = read_all_arguments(trace, ran["event"].to_numpy().astype(np.int64))
            for recorded_name, args in zip(ran["name"].to_list(), arguments, strict=True):
                name, grid = recorded_name or args.get("kernel"), args.get("grid")
                is_grid = isinstance(grid, list) and all(
                    isinstance(size, int) and size > 0 for size in grid
                )
                if isinstance(name, str) and grid and is_grid:
                    launched.append(LaunchedKernel(name, tuple(grid)))
        contents[group] = nested_calls, tuple(launched)
    return contents


def _apply_models(
    calls: pl.DataFrame, insides: Mapping[int, tuple[tuple[Call, ...], tuple[LaunchedKernel, ...]]]
) -> pl.DataFrame:
    rows: list[tuple[object, ...]] = []
    for group, *values in calls[["group", *_INPUTS]].rows():
        nested_calls, kernels = insides.get(group, ((), ()))
        if nested_calls or kernels:
            work = MODELS.work(replace(_call(*values), inside=nested_calls, kernels=kernels))
        else:
            work = _compute_work(MODELS.generation, *values)
        if isinstance(work, Work):
            rows.append((work.flops, work.recomputed, work.bytes, work.dtype, work.matrix, None))
        else:  # the reason
            rows.append((None, None, None, None, None, work))
    results = pl.DataFrame(
        rows,
        schema=["flops", "recomputed", "bytes", "dtype", "matrix", "reason"],
        orient="row",
        infer_schema_length=None,
    )
    return pl.concat([calls[["group", "name", "shapes", "types"]], results], how="horizontal").pipe(
        cast_to_schema, GROUPS
    )


@lru_cache(maxsize=4096)
def _compute_work(_generation: int, *values: str) -> Work | str:
    """Returns the work of such a call; cached, since the next rank mostly makes the same calls."""
    return MODELS.work(_call(*values))


def _call(  # noqa: PLR0917  (the recorded fields of a call)
    name: str,
    shapes: str,
    types: str,
    concrete: str,
    strides: str = "",
    list_type: str = "",
    batch: str = "",
) -> Call:
    type_names, values = (
        [str(entry) for entry in parse_json_list(text)] for text in (types, concrete)
    )
    return Call(
        name,
        parse_json_list(shapes),
        type_names,
        values,
        parse_json_list(strides),
        list_type,
        batch,
    )


def add_graph_replays(trace: Trace, capture: Trace) -> ModelledCalls:
    """Returns the modelled calls of a trace and those that its graph replays make, by the operators
    of the capture.

    Each replay of a graph makes the calls of the capture anew: the operator's FLOPs and bytes count
    once per replay; for attention those of the batch that is replayed, which the annotation around
    the launch states, since the capture has none. Where both recordings have the grid of a kernel
    they must agree: other grids mean other shapes, as in the capture of the same graph for another
    batch size.

    The calls of replays follow those of the forest: `above` is the graph launch that made them,
    `unmapped` gives the reason for the rest of the replayed work.
    """
    base = find_modelled_calls(trace)
    work = list_replayed_work(trace).with_columns(pl.col("graph", "node").cast(pl.UInt32))
    if not work.height:
        return base
    # By graph and node the position of the operator in the capture's forest, or the reason why
    # there is none.
    replays = graph_launches(trace)
    mapped = map_nodes(replays, capture, launches=True)
    grids = _read_grids(capture, mapped["kernel"]), _read_grids(trace, replays.nodes["example"])
    comparable = grids[0].is_not_null() & grids[1].is_not_null()
    other_grid = comparable & (grids[0] != grids[1]).fill_null(value=False)
    op = mapped["op"].fill_null(0).to_numpy()
    positions = build_forest(capture).position
    op_position = pl.Series(
        "position", positions[op] if positions.size else np.full(op.size, -1, dtype=np.int64)
    )
    has_position = mapped["op"].is_not_null() & ~other_grid & (op_position >= 0)
    nodes = mapped.select(
        "graph",
        "node",
        pl.when(has_position).then(op_position).alias("position"),
        pl.when(other_grid).then(pl.lit(_GRID_MISMATCH)).otherwise("reason").alias("reason"),
    )
    launches = work["launch"].unique().sort()
    batch_of = pl.DataFrame({"launch": launches, "batch": _find_batch_annotations(trace, launches)})
    batch_names = [batch for batch in batch_of["batch"].unique(maintain_order=True) if batch]
    captured_calls = _find_calls(
        capture, nodes["position"].drop_nulls().to_numpy(), batch_names[0] if batch_names else ""
    )
    capture_call = np.append(captured_calls.owner, -1)[nodes["position"].fill_null(-1).to_numpy()]
    nodes = nodes.with_columns(
        pl.Series("captured", capture_call),
        pl.when(pl.col("reason").is_null() & pl.Series(capture_call < 0))
        .then(pl.lit(_CALL_NOT_RECORDED))
        .otherwise("reason")
        .alias("reason"),
    )
    work = work.join(nodes, on=["graph", "node"], how="left", maintain_order="left")
    work_index = np.searchsorted(find_gpu_event_rows(trace), work["event"].to_numpy())
    free = (base.work_owner[work_index] < 0) & ~base.link[work_index]
    replayed = work.with_columns(pl.Series("at", work_index)).filter(
        pl.Series(free), pl.col("captured") >= 0
    )
    calls = replayed[["launch", "captured"]].unique(maintain_order=True).with_row_index("call")
    replayed = replayed.join(calls, on=["launch", "captured"], how="left", maintain_order="left")
    first = base.group.size
    work_owner = base.work_owner.copy()
    work_owner[replayed["at"].to_numpy()] = first + replayed["call"].to_numpy().astype(np.int64)
    numbers = np.arange(first, first + calls.height, dtype=np.int64)
    groups, group = _split_by_batch(
        captured_calls,
        calls.join(batch_of, on="launch", how="left", maintain_order="left"),
        batch_names,
    )
    offset = base.groups.height
    return structs.replace(
        base,
        groups=pl.concat([base.groups, groups.with_columns(pl.col("group") + offset)]),
        group=np.append(base.group, group + offset),
        owner=np.append(base.owner, numbers),
        above=np.append(base.above, build_forest(trace).position[calls["launch"].to_numpy()]),
        work_owner=work_owner,
        unmapped=work.filter(pl.col("reason").is_not_null())[["event", "reason"]],
    )


def _split_by_batch(
    captured_calls: ModelledCalls, calls: pl.DataFrame, batch_names: list[str]
) -> tuple[pl.DataFrame, Ints]:
    """Returns the groups of the calls that launches made (`captured`, `batch`): for attention one
    for each batch.

    Args:
        captured_calls: The calls of the capture, attention with the first batch.
        calls: One row per call.
        batch_names: The batches.

    Returns:
        All groups, and the number of the group of each call.
    """
    group = captured_calls.group[calls["captured"].to_numpy()]
    names = [
        name
        for name in captured_calls.groups["name"].unique().to_list()
        if MODELS.family(name) == PAGED_FAMILY
    ]
    paged = captured_calls.groups.filter(pl.col("name").is_in(names))["group"].to_numpy()
    groups, height = [captured_calls.groups], captured_calls.groups.height
    for batch in batch_names[1:] if paged.size else []:
        in_batch = np.isin(group, paged) & (calls["batch"] == batch).to_numpy()
        if in_batch.any():
            used, index = np.unique(group[in_batch], return_inverse=True)
            group[in_batch] = height + index
            batch_groups = _apply_models(
                captured_calls.recorded[used].with_columns(pl.lit(batch).alias("batch")), {}
            )
            groups.append(
                batch_groups.with_columns(
                    pl.int_range(pl.len(), dtype=pl.UInt32).alias("group") + height
                )
            )
            height += batch_groups.height
    return pl.concat(groups), group


def _read_grids(trace: Trace, rows: pl.Series) -> pl.Series:
    """Returns the grid of each of these events as text; null where it is not recorded."""
    none = pl.Series("grid", [None], dtype=pl.String).new_from_index(0, rows.len())
    distinct = rows.drop_nulls().unique().sort()
    if not distinct.len() or not can_reread_events(trace):
        return none
    events: Ints = distinct.to_numpy().astype(np.int64)
    grids = [args.get("grid") for args in read_all_arguments(trace, events)]
    grid_by_row = pl.DataFrame(
        {"row": distinct, "grid": [None if grid is None else str(grid) for grid in grids]}
    )
    grid_by_row = grid_by_row.with_columns(pl.col("grid").cast(pl.String))
    return (
        rows.alias("row")
        .to_frame()
        .join(grid_by_row, on="row", how="left", maintain_order="left")["grid"]
    )
