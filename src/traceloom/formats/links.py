"""Joins events inside a trace: GPU work to launches to ops, flows, collectives to their groups.

Details of collectives that the trace lacks are taken from capture.json.
"""

import json
import re
from typing import Any

import numpy as np
import polars as pl

from traceloom.formats.kineto_columns import COLLECTIVE_NUMBERS, COLLECTIVE_RAWS, COLLECTIVE_TEXTS
from traceloom.formats.kineto_fields import NULL
from traceloom.formats.kineto_metadata import parse_whole_number
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Array, Bools, Ints
from traceloom.trace.arrays import (
    NO_ROW,
    NumberedTexts,
    build_event_column,
    extract_column,
    gather_rows,
    take_texts,
    to_nullable_series,
    to_series,
)
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.mapped_arrays import MappedArray
from traceloom.trace.notice import Notice
from traceloom.trace.trace import SCHEMAS, DeferredFrame

_FLOW_KINDS = ("launch", "forward-backward", "dependency", "other")
# Names in three generations of writers, as category or name of the arrow.
_FLOW_KIND = {
    "ac2g": "launch",
    "async_cpu_to_gpu": "launch",
    "async_gpu": "launch",
    "async": "launch",
    "launch": "launch",
    "fwdbwd": "forward-backward",
    "forward_backward": "forward-backward",
}
_BOUND_BY = {
    **dict.fromkeys((vocab.RUNTIME, vocab.DRIVER, *vocab.GPU_WORK, vocab.SYNC, vocab.COMMAND), 0),
    **dict.fromkeys((vocab.OP, vocab.ANNOTATION), 1),
}
_BINDS = np.array([_BOUND_BY.get(name, 2) for name in vocab.CATEGORIES])
_FIRST_DEPENDENCY = 2**40  # "launch" arrows from this id on join two nodes of a CUDA graph
_MAX_TIES = 200  # max events with the same start that are examined


def find_first_rows(keys: Ints, rows: Ints, requested: Ints) -> Ints:
    """Returns the first row that has each requested key; -1 where none has, and for NULL."""
    has_key = keys != NULL
    keys, rows = keys[has_key], rows[has_key]
    if not len(keys):
        return np.full(len(requested), NO_ROW, dtype=np.int64)
    order = np.lexsort((rows, keys))
    keys, rows = keys[order], rows[order]
    index = np.minimum(np.searchsorted(keys, requested), len(keys) - 1)
    return np.where((keys[index] == requested) & (requested != NULL), rows[index], NO_ROW)


def find_launches(correlation: Ints, is_launch: Bools, is_work: Bools) -> Ints:
    """Returns the runtime or driver row of each GPU work, by correlation; -1 elsewhere.

    Where several rows have one correlation (a runtime call and the driver call inside it) the
    outermost is used: it starts first or, at equal starts, is longer. One graph launch owns all
    kernels of its graph.
    """
    calls = np.flatnonzero(is_launch)
    work = np.flatnonzero(is_work)
    out = np.full(len(correlation), NO_ROW, dtype=np.int64, like=correlation)
    out[work] = find_first_rows(correlation[calls], calls, correlation[work])
    return out


def find_uncorrelated_launches(
    work: Ints, external: Ints, is_launch: Bools, submits: Bools, flows: pl.DataFrame
) -> Ints:
    """Returns the runtime or driver row of GPU work that was written without correlations; -1 for
    none.

    The call from which an arrow points to the work is its launch. Else calls that submit something
    have its external id: a number of the launch alone, or one of the operator, whose calls and work
    are then in the same order.
    """
    arrows = flows.filter(pl.col("kind") == "launch").drop_nulls(["source", "target"])
    source = arrows["source"].to_numpy().astype(np.int64)
    from_call = np.asarray(is_launch[source])
    launch = find_first_rows(arrows["target"].to_numpy()[from_call], source[from_call], work)
    numbered = [
        pl.DataFrame({"row": np.asarray(rows), "external": np.asarray(external[rows])})
        .filter(pl.col("external") != NULL)
        .with_columns(nth=pl.int_range(pl.len()).over("external"))
        .sort("nth")
        for rows in (work[launch < 0], np.flatnonzero(is_launch & submits))
    ]
    pairs = numbered[0].join_asof(
        numbered[1], on="nth", by="external", suffix="_of_call", check_sortedness=False
    )
    found = pairs.drop_nulls("row_of_call")
    launch[np.searchsorted(work, found["row"].to_numpy())] = found["row_of_call"].to_numpy()
    return launch


def find_ops(  # noqa: PLR0917  (columns of events)
    parent_op: Ints, launch: Ints, is_launch: Bools, is_op: Bools, is_work: Bools, external: Ints
) -> Ints:
    """Returns the innermost op around each launch; for GPU work around its launch, else the op with
    its external id.
    """
    out = np.where(is_launch, parent_op, NO_ROW)
    launched = launch >= 0
    out[launched] = parent_op[launch[launched]]
    unlaunched = np.flatnonzero(is_work & ~launched & (external != NULL))
    if unlaunched.size:
        op_rows = np.flatnonzero(is_op)
        out[unlaunched] = find_first_rows(external[op_rows], op_rows, external[unlaunched])
    return out


def external_ids_repeat_correlations(external: Ints, correlation: Ints, is_work: Bools) -> bool:
    """Whether the external ids of GPU work only repeat its correlations (older writers); then they
    identify no op.
    """
    both = is_work & (external != NULL) & (correlation != NULL)
    return bool(both.any()) and bool((external[both] == correlation[both]).all())


def build_flow_frame(
    columns: dict[str, Array], texts: NumberedTexts, events: pl.DataFrame, thread: Array
) -> pl.DataFrame:
    """Builds the `flows` frame: starts and ends joined by kind and id, each resolved to the event
    at its place and time.

    Args:
        columns: `phase` (True = start), `flow`, `kind` (number of a text), `thread`, `start` of all
            arrow ends.
        texts: The texts of the numbers in `kind`.
        events: The `events` frame.
        thread: The place of each event.
    """
    if not len(columns["flow"]):
        return pl.DataFrame(schema=SCHEMAS["flows"])
    kinds = np.array([_FLOW_KINDS.index(_FLOW_KIND.get(text, "other")) for text in texts.names])
    kind = gather_rows(kinds, columns["kind"])
    is_start, flow = columns["phase"], columns["flow"]
    depends = (kind == 0) & (flow >= _FIRST_DEPENDENCY)
    kind = np.where(depends, _FLOW_KINDS.index("dependency"), kind)
    # Of several starts or ends with one kind and id the last one is used; without an id nothing is
    # joined.
    flow_ids, number = np.unique(flow, return_inverse=True)
    keys = len(flow_ids) * len(_FLOW_KINDS)
    key = number * len(_FLOW_KINDS) + kind
    slot = np.where(is_start, keys, 0) + key
    indices = np.arange(len(flow), like=flow)
    last = np.full(2 * keys, NO_ROW, dtype=np.int64, like=flow)
    last[slot] = indices  # of equal slots the last one is kept
    is_last = last[slot] == indices
    other = np.where(flow == NULL, NO_ROW, last[np.where(is_start, 0, keys) + key])
    # The arrows, starts first, and their other ends; -1 where there is none.
    row = np.concatenate(
        [np.flatnonzero(is_last & is_start), np.flatnonzero(is_last & ~is_start & (other < 0))]
    )
    other = other[row]
    large = isinstance(thread, MappedArray)
    start, category = (
        extract_column(events, "start_ns", large=large),
        extract_column(events, "category", large=large),
    )
    correlation = extract_column(events, "correlation", NULL, large=large)
    event = _find_flow_events(
        columns, np.where(depends, 0, kind), (start, category, thread, correlation)
    )
    ends = np.flatnonzero(depends & is_start)
    if ends.size:
        event[ends] = _find_ending_events(
            columns["place"][ends], columns["start"][ends], thread, events
        )
    endpoints = event[row], np.where(other >= 0, event[other], NO_ROW)
    is_start = is_start[row]
    return pl.DataFrame(
        {
            "flow": to_nullable_series(flow[row]),
            "kind": take_texts(pl.Series(_FLOW_KINDS, dtype=SCHEMAS["flows"]["kind"]), kind[row]),
            "source": build_event_column(np.where(is_start, *endpoints)),
            "target": build_event_column(np.where(is_start, *endpoints[::-1])),
        },
        schema=SCHEMAS["flows"],
    )


def _find_flow_events(
    endpoints: dict[str, Array], kind: Array, events: tuple[Ints, Array, Array, Ints]
) -> Ints:
    """Returns the event that starts at the time and place of each arrow end; -1 where there is
    none.

    Of several, the one whose correlation is the arrow's id, else the innermost of the kind that
    such arrows bind to, else the innermost of any kind.
    """
    start, category, pair_number, correlation = events
    low = np.searchsorted(start, endpoints["start"], "left")
    high = np.searchsorted(start, endpoints["start"], "right")
    event_rows = np.full(len(low), NO_ROW, dtype=np.int64, like=low)
    for choice in ("correlation", "kind", "any"):
        rows = np.flatnonzero((event_rows < 0) & (low < high))
        candidate = high[rows] - 1
        for _ in range(_MAX_TIES):
            hit = pair_number[candidate] == endpoints["place"][rows]
            if choice == "correlation":
                hit &= (
                    (correlation[candidate] == endpoints["flow"][rows])
                    & (kind[rows] == 0)
                    & (gather_rows(_BINDS, category[candidate]) == 0)
                )
            elif choice == "kind":
                hit &= gather_rows(_BINDS, category[candidate]) == kind[rows]
            event_rows[rows[hit]] = candidate[hit]
            on = ~hit & (candidate > low[rows])
            rows, candidate = rows[on], candidate[on] - 1
            if not rows.size:
                break
    return event_rows


def _find_ending_events(place: Array, time: Array, thread: Array, events: pl.DataFrame) -> Ints:
    """Returns the GPU work that ends at the time and place of each arrow, or runs then; -1 where
    none does.
    """
    work = np.flatnonzero(events["category"].is_in([*vocab.GPU_WORK, vocab.COMMAND]).to_numpy())
    start, duration = (events[name].gather(work).to_numpy() for name in ("start_ns", "duration_ns"))
    # By place, then end; times are rounded, so an end may lie 1 ns before its arrow.
    _, rank = np.unique(np.concatenate([start + duration + 1, time]), return_inverse=True)
    key = np.concatenate([thread[work], place]).astype(np.int64) * (rank.size + 1) + rank
    order = np.argsort(key[: work.size], kind="stable")
    index = np.searchsorted(key[order], key[work.size :])
    found = np.append(order, 0)[index]
    runs = (index < work.size) & (thread[work][found] == place) & (start[found] <= time)
    return np.where(runs, work[found], NO_ROW)


def build_source_frame(offset: Array, length: Array, rows: Ints) -> pl.DataFrame:
    """Returns where each event is in the text of the file; `rows` puts the columns of the file in
    time order.
    """
    return pl.DataFrame(
        {
            "event": to_series(np.arange(len(offset), dtype=np.uint32, like=offset), pl.UInt32),
            "offset": to_series(offset[rows], pl.Int64),
            "length": to_series(length[rows], pl.Int32),
        },
        schema=SCHEMAS["sources"],
    )


# Searched in this order, in the lower-case name without blanks and underscores.
_KINDS = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("bcast", "broadcast"),
    ("barrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
)
_ELEMENT_SIZES = {
    "float64": 8,
    "double": 8,
    "int64": 8,
    "long": 8,
    "longint": 8,
    "uint64": 8,
    "complexfloat": 8,
    "complex64": 8,
    "complexdouble": 16,
    "complex128": 16,
    "complexhalf": 4,
    "float32": 4,
    "float": 4,
    "int32": 4,
    "int": 4,
    "uint32": 4,
    "unsignedint": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "c10::bfloat16": 2,
    "c10::half": 2,
    "int16": 2,
    "short": 2,
    "uint16": 2,
    "int8": 1,
    "char": 1,
    "signedchar": 1,
    "uint8": 1,
    "byte": 1,
    "unsignedchar": 1,
    "bool": 1,
}
_ANNOTATION = r"^(?:nccl|gloo|mpi|ucc|hccl|xccl|rccl):\s*(.+)$"
_ANNOTATION_NAME = re.compile(_ANNOTATION)
_FILLED_COLUMNS = (
    "group",
    "group_size",
    "element_type",
    "in_bytes",
    "out_bytes",
    "sequence",
    "peer",
)
_MAX_ELEMENTS = 2**58  # of a tensor; with more, the bytes exceed an int64 column
_PEER = r"(?:->|<-|\bsrc:?|\bdst:?)\s*(\d+)"


def classify_collective(name: str) -> str:
    """Returns the kind of a collective from any writer's name for it; the name itself where it is
    unknown.

    Example:
        >>> classify_collective("_allgather_base"), classify_collective("nccl:all_to_allv"), classify_collective("init")
        ('all_gather', 'all_to_all', 'init')
    """
    normalized = re.sub(r"[\s_]", "", name.rsplit(":", maxsplit=1)[-1].lower())
    return next(
        (kind for part, kind in _KINDS if part in normalized),
        name.rsplit(":", maxsplit=1)[-1].strip().lower(),
    )


def get_element_size(name: str | None) -> int | None:
    """Returns the bytes of an element type as spelled by PyTorch or NCCL (`BFloat16`,
    `Float8_e4m3fn`, `long int`); None if unknown.
    """
    if name is None:
        return None
    normalized = re.sub(r"[\s_]", "", name.lower()).removeprefix("torch.")
    return 1 if normalized.startswith("float8") else _ELEMENT_SIZES.get(normalized)


def build_collective_frame(
    columns: dict[str, Array], texts: NumberedTexts, events: pl.DataFrame, tensors: DeferredFrame
) -> pl.DataFrame:
    """Builds the `collectives` frame: ops and kernels with arguments, and annotations such as
    `nccl:all_reduce`.
    """
    described = pl.DataFrame(schema=SCHEMAS["collectives"])
    if len(columns["event"]):
        text_columns = {
            key: texts.column(columns[key]) for key in (*COLLECTIVE_TEXTS, *COLLECTIVE_RAWS)
        }
        values = {key: to_nullable_series(columns[key]) for key in COLLECTIVE_NUMBERS}
        frame = pl.DataFrame({"event": columns["event"], **text_columns, **values})
        kinds = apply_per_text(frame["collective"], classify_collective)
        sizes = apply_per_text(frame["element_type"], get_element_size, pl.Int64)
        # Treat more elements than any tensor has as absent.
        in_bytes, out_bytes = (
            pl.when(pl.col(name).is_between(0, _MAX_ELEMENTS)).then(pl.col(name) * sizes)
            for name in ("in_elements", "out_elements")
        )
        src, dst = pl.col("source_rank"), pl.col("target_rank")
        peer = (
            pl.when(kinds == "send")
            .then(dst)
            .when(kinds == "recv")
            .then(src)
            .otherwise(pl.col("root_rank"))
        )
        described = frame.select(
            "event",
            kinds.alias("kind"),
            "group",
            "group_size",
            pl.col("group_ranks").alias("ranks"),
            "element_type",
            "in_elements",
            "out_elements",
            in_bytes.alias("in_bytes"),
            out_bytes.alias("out_bytes"),
            pl.col("collective_sequence").alias("sequence"),
            pl.when(peer >= 0).then(peer).alias("peer"),
            "in_splits",
            "out_splits",
            pl.col("asynchronous").replace_strict(
                {"true": True, "false": False}, default=None, return_dtype=pl.Boolean
            ),
        ).cast(SCHEMAS["collectives"], strict=False)
    if not any(":" in text and _ANNOTATION_NAME.match(text) for text in texts.names):
        return described.sort("event")
    return pl.concat([described, _read_annotations(events, tensors.frame())]).sort("event")


def apply_per_text(column: pl.Series, function: Any, dtype: Any = pl.String) -> pl.Series:
    """Applies a function once to each distinct text of a column with few distinct texts."""
    table = {text: function(text) for text in column.unique().drop_nulls()}
    return (
        column.replace_strict(table, default=None, return_dtype=dtype)
        if table
        else column.cast(dtype)
    )


def _read_annotations(events: pl.DataFrame, tensors: pl.DataFrame) -> pl.DataFrame:
    annotated = (
        events.lazy()
        .filter(pl.col("category") == "annotation")
        .select(
            "event",
            called=pl.col("name").str.extract(_ANNOTATION),
            peer=pl.col("name").str.extract(_PEER),
        )
        .filter(pl.col("called").is_not_null())
        .join(
            tensors.lazy().select("event", "shapes", "types"),
            on="event",
            how="left",
            maintain_order="left",
        )
        .collect()
    )
    if not annotated.height:
        return pl.DataFrame(schema=SCHEMAS["collectives"])
    table = {
        key: _count_elements(*key) for key in annotated.select("shapes", "types").unique().rows()
    }
    contents = [table[key] for key in annotated.select("shapes", "types").iter_rows()]
    return pl.DataFrame(
        {
            "event": annotated["event"],
            "kind": apply_per_text(annotated["called"], classify_collective),
            "element_type": [content[0] for content in contents],
            "in_elements": [content[1] for content in contents],
            "in_bytes": [content[2] for content in contents],
            "peer": annotated["peer"].cast(pl.Int32, strict=False),
        },
        schema_overrides={"element_type": pl.String, "in_elements": pl.Int64, "in_bytes": pl.Int64},
    ).select(
        [
            pl.col(name).cast(dtype)
            if name in ("event", "kind", "element_type", "in_elements", "in_bytes", "peer")
            else pl.lit(None, dtype=dtype).alias(name)
            for name, dtype in SCHEMAS["collectives"].items()
        ]
    )


def _count_elements(
    shapes: str | None, types: str | None
) -> tuple[str | None, int | None, int | None]:
    """Returns element type, number of elements and bytes of the tensors of an annotation."""
    try:
        dims, names = json.loads(shapes or ""), json.loads(types or "[]")
    except (ValueError, RecursionError):  # absent, or quoted text that is not a list
        return None, None, None
    if not isinstance(dims, list) or not isinstance(names, list):
        return None, None, None
    count, size, kinds = 0, 0, set()
    for index, dim in enumerate(dims):
        name = names[index] if index < len(names) and isinstance(names[index], str) else ""
        element_size = get_element_size(name)
        if not isinstance(dim, list) or not dim or not all(isinstance(n, int) for n in dim):
            continue
        elements = int(np.prod(dim, dtype=object))
        if not 0 <= elements <= _MAX_ELEMENTS:
            return None, None, None
        count += elements
        kinds.add(name)
        size = -1 if element_size is None or size < 0 else size + elements * element_size
    if not kinds or count > _MAX_ELEMENTS:
        return None, None, None
    return (kinds.pop() or None if len(kinds) == 1 else None), count, (size if size >= 0 else None)


def add_capture_details(
    collectives: pl.DataFrame, events: pl.DataFrame, capture: dict[str, Any] | None
) -> tuple[pl.DataFrame, list[Notice]]:
    """Fills in unknown properties of collectives from the calls that the recorder saw.

    The calls of a kind inside the window and the collectives of that kind in the trace are matched
    in order, separately for ops, annotations and kernels, where their numbers agree; otherwise they
    stay unchanged and a notice is added.
    """
    calls = _read_captured_calls(capture, events)
    if not calls.height or not collectives.height:
        return collectives, []
    category = events["category"].cast(pl.String).gather(collectives["event"])
    numbered = collectives.with_columns(
        category.alias("category"), pl.int_range(pl.len()).over(category, "kind").alias("nth")
    )
    counts = calls["kind"].value_counts(name="calls")
    sizes = numbered.group_by("category", "kind").len().join(counts, on="kind")
    agree = sizes.filter(pl.col("len") == pl.col("calls")).select("category", "kind")
    unmatched = sizes.filter(pl.col("len") != pl.col("calls"))
    matched = calls.join(agree, on="kind").with_columns(
        pl.int_range(pl.len()).over("category", "kind").alias("nth")
    )
    joined = numbered.join(
        matched, on=["category", "kind", "nth"], how="left", suffix="_known", maintain_order="left"
    )
    filled = joined.with_columns(
        pl.col(name).fill_null(pl.col(f"{name}_known")) for name in _FILLED_COLUMNS
    )
    notices = []
    if unmatched.height:
        kinds = ", ".join(sorted(set(unmatched["kind"].to_list())))
        text = f"the recorder saw another number of collectives ({kinds}) than the trace holds; they are not joined"
        notices.append(Notice("collectives-unmatched", "info", text, int(unmatched["len"].sum())))
    return filled.pipe(cast_to_schema, SCHEMAS["collectives"]), notices


def _read_captured_calls(capture: dict[str, Any] | None, events: pl.DataFrame) -> pl.DataFrame:
    """Returns the calls of capture.json inside the window, in order, with the columns that they can
    fill.
    """
    captured = (capture or {}).get("collectives")
    if not isinstance(captured, dict) or not events.height:
        return pl.DataFrame()
    columns = {
        key: captured.get(key)
        for key in (
            "group",
            "kind",
            "type",
            "sequence",
            "bytes_in",
            "bytes_out",
            "peer",
            "start_ns",
        )
    }
    starts = columns["start_ns"]
    if not isinstance(starts, list) or any(
        not isinstance(v, list) or len(v) != len(starts) for v in columns.values()
    ):
        return pl.DataFrame()
    sizes: dict[str | None, int] = {
        str(group.get("name")): len(group["ranks"])
        for group in (capture or {}).get("groups") or []
        if isinstance(group, dict) and isinstance(group.get("ranks"), list)
    }

    def named(key: str, code: Any) -> str | None:
        names = captured.get(key)
        if (
            isinstance(names, list)
            and isinstance(code, int)
            and 0 <= code < len(names)
            and names[code] is not None
        ):
            return str(names[code])
        return None

    rows = []
    for index in range(len(starts)):
        value = {key: column[index] for key, column in columns.items() if isinstance(column, list)}
        group = named("groups", value["group"])
        rows.append(
            {
                "kind": named("kinds", value["kind"]),
                "group": group,
                "group_size": sizes.get(group),
                "element_type": named("types", value["type"]),
                "in_bytes": parse_whole_number(value["bytes_in"]),
                "out_bytes": parse_whole_number(value["bytes_out"]),
                "sequence": parse_whole_number(value["sequence"]),
                "peer": parse_whole_number(value["peer"]),
                "start_ns": parse_whole_number(value["start_ns"]),
            }
        )
    types = {name: SCHEMAS["collectives"][name] for name in ("kind", *_FILLED_COLUMNS)}
    wide = pl.DataFrame(rows, schema={**types, "peer": pl.Int64, "start_ns": pl.Int64})
    calls = wide.cast(
        {"peer": types["peer"]}, strict=False
    )  # a value that is not a rank is unknown
    first, last = events["start_ns"][0], events["nested_end_ns"].max()
    in_window = pl.col("start_ns").is_null() | pl.col("start_ns").is_between(first, last)
    return (
        calls.filter(in_window & pl.col("kind").is_not_null())
        .sort("start_ns", maintain_order=True)
        .drop("start_ns")
    )
