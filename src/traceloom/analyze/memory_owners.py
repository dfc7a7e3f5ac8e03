"""Owners and categories of blocks, partitions of blocks, the tree of holders, and the table of
blocks.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.host_events import (
    ADDRESS_PATTERN,
    LOADING,
    OPTIMIZER,
    classify_events,
)
from traceloom.analyze.memory import (
    CENSUS as MEMORY_CENSUS,
    SHARED_MEMORY,
    read_first_census,
    read_last_census,
)
from traceloom.analyze.memory_blocks import EXISTED_BEFORE, STILL_ALIVE, Blocks
from traceloom.analyze.memory_names import NamedBlocks
from traceloom.analyze.names import build_vocabulary
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, get_event_column, sort_unique
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.session import FRAME_SEPARATOR
from traceloom.trace.trace import Trace


class BlockOwners(Struct, frozen=True):
    """Owners by the censuses.

    Attributes:
        table: `CENSUS`: that of the start, then that of the end.
        of: Row of the table for each block, shape (blocks,); -1 where no census has it.
        unseen: Rows of the table: storages alive at the end without a block. Their allocation was
            not recorded: a thread that is not recorded made them, or another allocator than
            PyTorch's.
        gone: Numbers of blocks that the first census found and that nothing freed, but that the
            last one misses.
    """

    table: pl.DataFrame
    of: Ints
    unseen: Ints
    gone: Ints


def find_owners(trace: Trace, blocks: Blocks) -> BlockOwners:
    """Finds the owners by address: of a block from before in the first census, of one alive at the
    end in the last.

    The last census also shows which blocks from before are gone.
    """
    first, last = read_first_census(trace), read_last_census(trace)
    table = pl.concat([first, last]) if last.height else first
    owner_rows, none = blocks.owner.copy(), np.zeros(0, dtype=np.int64)
    if not last.height:
        return BlockOwners(table.select(list(MEMORY_CENSUS)), owner_rows, none, none)
    alive = np.flatnonzero(blocks.ended >= trace.allocations.height)
    kinds = pl.Series(
        [pool.device_type.removesuffix("-shared") for pool in blocks.pools], dtype=pl.String
    )
    alive_blocks = pl.DataFrame(
        {
            "address": blocks.address[alive],
            "device_type": kinds.gather(blocks.pool[alive]),
            "block": alive,
        }
    )
    listed = last.with_row_index("row", first.height).filter(pl.col("address") != 0)
    listed = listed.unique(["address", "device_type"], keep="first", maintain_order=True)
    matches = alive_blocks.join(listed, on=["address", "device_type"])
    owner_rows[matches["block"].to_numpy()] = matches["row"].cast(pl.Int64).to_numpy()
    recorded = kinds.unique()
    unseen = listed.join(
        alive_blocks, on=["address", "device_type"], how="anti", maintain_order="left"
    )
    # Devices without events are unknown.
    unseen = unseen.filter(pl.col("device_type").is_in(recorded.implode()))
    counted = alive[blocks.owner[alive] >= 0]
    # Small ones may be summed in a row without an address
    is_complete = listed.height == last.height
    freed_rows = (
        counted[(owner_rows[counted] < first.height) & (blocks.address[counted] != 0)]
        if is_complete
        else none
    )
    return BlockOwners(
        table.select(list(MEMORY_CENSUS)),
        owner_rows,
        unseen["row"].cast(pl.Int64).to_numpy(),
        freed_rows,
    )


CATEGORIES = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer_state",
    "activation",
    "input",
    "temporary",
    "before_recording",
    "unknown",
)
EVIDENCE = ("census", "inferred", "none")
PARAMETER, BUFFER, GRADIENT, STATE, ACTIVATION, INPUT, TEMPORARY, CATEGORIES_BEFORE, UNKNOWN = (
    range(len(CATEGORIES))
)
CENSUS, INFERRED, NONE = range(len(EVIDENCE))
_PIECE_ROWS = 1 << 19
_CODE_TYPE: Any = np.int8
_OWNERS = {
    "parameter": PARAMETER,
    "buffer": BUFFER,
    "gradient": GRADIENT,
    "optimizer_state": STATE,
    "activation": ACTIVATION,
    "other": UNKNOWN,
}


class BlockCategories(Struct, frozen=True):
    """Category and evidence of every block (numbers in `CATEGORIES` and `EVIDENCE`); arrays of
    shape (blocks,).
    """

    category: Ints
    evidence: Ints


def classify_blocks(
    trace: Trace, named_blocks: NamedBlocks, owners: BlockOwners
) -> BlockCategories:
    """Determines the category of each block, from the part of the step that made it and the part
    that freed it.

    Blocks whose owner is in a census are known by it; else:

    - made inside an optimizer's step: optimizer state where it outlives that step, else temporary;
    - made by the backward pass: a gradient where it outlives the pass, else temporary;
    - made by a data loader: input;
    - made otherwise and freed by the backward pass: an activation that was kept for it;
    - made and freed with no backward pass between: temporary.

    All of these are inferred. Blocks that are alive at the end without a reason, or that lived
    through a backward pass that did not need them, are unknown.
    """
    tree, phase, blocks = build_forest(trace), classify_events(trace).phase, named_blocks.blocks
    # For each host event (the last entry is for none): its phase, and when the outermost optimizer
    # step around it ends. The innermost event at or above each that opens a phase
    phase_of = np.append(np.append(phase, -1)[tree.nearest_or_self(phase >= 0)], -1)
    optimizer_end_ns = np.append(
        np.append(tree.end_ns, EXISTED_BEFORE)[tree.outermost_or_self(phase == OPTIMIZER)],
        EXISTED_BEFORE,
    )
    in_backward = np.append(named_blocks.places.backward, False)
    # Starts of backward nodes, sorted: a block with none of them in its lifetime saw no backward
    # pass.
    passes = np.sort(tree.start_ns[tree.topmost(named_blocks.places.backward)])
    shared = np.array([pool.device_type == SHARED_MEMORY for pool in blocks.pools], dtype=np.bool_)
    owner = (
        owners.table["owner"]
        .replace_strict(_OWNERS, default=UNKNOWN, return_dtype=pl.Int64)
        .to_numpy()
    )
    owner = np.append(owner, UNKNOWN)
    size = named_blocks.position.size
    out = BlockCategories(np.empty(size, dtype=_CODE_TYPE), np.empty(size, dtype=_CODE_TYPE))
    for low in range(0, size, _PIECE_ROWS):
        batch = slice(low, low + _PIECE_ROWS)
        position, start_ns, end_ns = (
            named_blocks.position[batch],
            blocks.start_ns[batch],
            blocks.end_ns[batch],
        )
        early = start_ns == EXISTED_BEFORE
        alive = blocks.ended[batch] >= trace.allocations.height
        made_in = phase_of[position]
        freed_in_backward = in_backward[named_blocks.freed[batch]] & ~alive
        optimizer = made_in == OPTIMIZER
        survives = end_ns > optimizer_end_ns[position]
        unbroken = np.searchsorted(passes, start_ns) == np.searchsorted(passes, end_ns)
        owned, listed = owner[owners.of[batch]], owners.of[batch] >= 0
        is_activation = owned == ACTIVATION
        counted = ~is_activation & ((owned != UNKNOWN) | (listed & (blocks.made[batch] < 0)))
        backward = named_blocks.backward[batch]
        rules: list[tuple[Bools, Ints | int]] = [
            (counted, owned),
            (is_activation & early, ACTIVATION),
            (early, CATEGORIES_BEFORE),
            (shared[blocks.pool[batch]], INPUT),
            (made_in == LOADING, INPUT),
            (is_activation, ACTIVATION),  # inputs are saved for the backward pass, too
            (optimizer & survives, STATE),
            (optimizer, TEMPORARY),
            (backward & freed_in_backward, TEMPORARY),
            (backward, GRADIENT),
            (freed_in_backward, ACTIVATION),
            (~alive & unbroken, TEMPORARY),
        ]
        category = np.select([rule for rule, _ in rules], [number for _, number in rules], UNKNOWN)
        evidence = np.where(counted | (is_activation & (category == ACTIVATION)), CENSUS, INFERRED)
        out.category[batch] = category
        out.evidence[batch] = np.where(
            (category == UNKNOWN) | (category == CATEGORIES_BEFORE), NONE, evidence
        )
    return out


SLICE_BLOCKS = 250_000
SHORT_COLUMNS = ("name", "bytes")
LONG_SCHEMA = build_schema(
    "name bytes time_ns lifetime_ns device category evidence backward step site innermost_op owner stack",
    {"device": pl.String},
)


def build_block_names(
    named_blocks: NamedBlocks, owners: BlockOwners, rows: np.ndarray, *, sites: bool = False
) -> pl.Series:
    """Returns names of some blocks; those from before the recording are named after their owner,
    where a census has it.
    """
    base_names = named_blocks.names(rows, sites=sites)
    early = named_blocks.blocks.made[rows] < 0
    if not early.any():
        return base_names
    owner = owners.table["name"].gather(
        pl.Series(owners.of[rows]).replace(-1, None).cast(pl.UInt32)
    )
    before = pl.Series(early)
    return pl.select(
        pl.when(before)
        .then(pl.concat_str(pl.lit("before."), owner.fill_null("unknown")))
        .otherwise(base_names)
    ).to_series()


def iterate_block_tables(
    trace: Trace,
    named_blocks: NamedBlocks,
    kinds: BlockCategories,
    owners: BlockOwners,
    stacks: Callable[[Ints], pl.Series] | None = None,
    *,
    full_table: bool,
) -> Iterator[pl.DataFrame]:
    """Yields the table of blocks in the order they were made: `name` and `bytes` of those made in
    the recording.

    With `full_table` all columns of `LONG`, and the blocks from before the recording too.

    `time_ns` is null for blocks from before the recording, `lifetime_ns` for those and for blocks
    alive at its end. `stack` lists Python frames, the innermost first; `stacks` gives those of some
    blocks where the trace has none.
    """
    blocks = named_blocks.blocks
    if full_table and stacks is None:
        stacks = StackTexts(trace).reader(named_blocks.position)
    devices = pl.Series(
        [
            pool.device_type if pool.device < 0 else f"{pool.device_type}:{pool.device}"
            for pool in blocks.pools
        ],
        dtype=pl.String,
    )
    first = 0 if full_table else int((blocks.made < 0).sum())  # blocks from before come first
    for low in range(first, max(blocks.made.size, first + 1), SLICE_BLOCKS):
        rows = np.arange(low, min(low + SLICE_BLOCKS, blocks.made.size))
        frame = pl.DataFrame(
            {"name": build_block_names(named_blocks, owners, rows), "bytes": blocks.bytes[rows]}
        )
        if not full_table or stacks is None:
            yield frame
            continue
        created_row = np.maximum(blocks.made[rows], 0)
        recorded = pl.Series(blocks.made[rows] >= 0)
        allocation_rows = (
            trace.allocations[created_row] if trace.allocations.height else trace.allocations
        )
        is_bounded = pl.Series(
            (blocks.start_ns[rows] != EXISTED_BEFORE) & (blocks.end_ns[rows] != STILL_ALIVE)
        )
        life = np.where(is_bounded, blocks.end_ns[rows], 0) - np.where(
            is_bounded, blocks.start_ns[rows], 0
        )
        yield (
            frame.with_columns(
                time_ns=pl.Series(blocks.start_ns[rows]).replace(EXISTED_BEFORE, None),
                lifetime_ns=pl.Series(life).set(~is_bounded, None),
                device=devices.gather(blocks.pool[rows]),
                category=pl.Series(CATEGORIES).gather(kinds.category[rows]),
                evidence=pl.Series(EVIDENCE).gather(kinds.evidence[rows]),
                backward=pl.Series(named_blocks.backward[rows]),
                step=allocation_rows["step"].set(~recorded, None),
                site=build_block_names(named_blocks, owners, rows, sites=True),
                innermost_op=trace.events["name"]
                .gather(allocation_rows["op"])
                .set(~recorded, None),
                owner=owners.table["name"].gather(
                    pl.Series(owners.of[rows]).replace(-1, None).cast(pl.UInt32)
                ),
                stack=stacks(rows),
            ).pipe(cast_to_schema, LONG_SCHEMA)
        )


class StackTexts:
    """Python stacks as text, made once per stack."""

    def __init__(self, trace: Trace) -> None:
        self._tree = build_forest(trace)
        vocabulary = build_vocabulary(trace)
        # The same function of two objects is one
        names = vocabulary.names.cast(pl.String).str.replace_all(ADDRESS_PATTERN, "")
        self._names = names.unique().sort()
        self._code = gather_rows(self._names.search_sorted(names).to_numpy(), vocabulary.code)
        self._python = get_event_column(trace, "category")[
            self._tree.row
        ] == vocab.CATEGORIES.index(vocab.PYTHON)
        self._above = self._tree.nearest(self._python)

    def reader(self, position: Ints) -> Callable[[Ints], pl.Series]:
        """Returns a function that gives the stacks of some blocks by the position of each block."""
        return lambda rows: self.of(position[rows])

    def of(self, position: np.ndarray) -> pl.Series:
        """Returns the stack of each position; null where no frames were recorded."""
        texts, number = self.divided(position)
        return pl.Series(texts, dtype=pl.String).gather(number)

    def divided(self, position: np.ndarray) -> tuple[list[str | None], Ints]:
        """Returns the distinct stacks of some positions, null where no frames were recorded, and
        the number of each position's.

        Goes down level by level: a stack is identified by that of its caller and the name of its
        frame, so that the steps are as many as levels and stacks, not as frames.
        """
        frame = np.where(
            np.append(self._python, False)[position], position, np.append(self._above, -1)[position]
        )
        if not (frame >= 0).any():
            return [None] * bool(frame.size), np.zeros(frame.size, dtype=np.int64)
        stack = np.zeros(self._above.size + 1, dtype=np.int64)  # 0 is none; so is the entry at -1
        pairs, count, width = [np.zeros(1, dtype=np.int64)], 1, len(self._names)
        for level in self._levels(frame):
            key = stack[self._above[level]] * width + self._code[self._tree.row[level]]
            new, number = np.unique(key, return_inverse=True)
            stack[level] = count + number
            pairs.append(new)
            count += new.size
        used, number = np.unique(stack[frame], return_inverse=True)
        callers, frames = np.divmod(np.concatenate(pairs), width)
        outer, name = callers.tolist(), self._names.gather(frames).to_list()
        texts: list[str | None] = []
        for node in used.tolist():
            path, up = [], node
            while up:
                path.append(str(name[up]))
                up = outer[up]
            texts.append(FRAME_SEPARATOR.join(path) if path else None)
        return texts, number

    def _levels(self, frame: Ints) -> Iterator[Ints]:
        """Yields these frames and those above them, by the number of frames above each, from 0."""
        needed = np.zeros(self._above.size, dtype=np.bool_)
        new = sort_unique(frame[frame >= 0])
        while new.size:
            needed[new] = True
            parents = self._above[new]
            parents = parents[parents >= 0]
            new = sort_unique(parents[~needed[parents]])
        frames = np.flatnonzero(self._python)
        change = np.bincount(frames + 1, minlength=needed.size + 1)
        change -= np.bincount(self._tree.stop[frames], minlength=needed.size + 1)
        rows = np.flatnonzero(needed)
        depth = np.cumsum(change)[rows]
        rows = rows[np.argsort(depth, kind="stable")]
        yield from np.split(rows, np.cumsum(np.bincount(depth))[:-1])


BEFORE_RECORDING_LABEL = "(before the recording)"
NO_MODULE = "(outside modules)"
NO_SCOPE = "(no scope)"
UNKNOWN_TYPE = "(unknown)"
NO_STACK = "(no stack recorded)"
_NON_TENSOR_TYPES = frozenset(
    (
        "",
        "Scalar",
        "ScalarList",
        "GenericList",
        "TensorList",
        "Int",
        "Double",
        "Bool",
        "Device",
        "None",
    )
)

Partition = tuple[list[str], Ints]
"""Names, and for each block the number of its name."""


def partition(
    grouping: str,
    trace: Trace,
    named_blocks: NamedBlocks,
    kinds: BlockCategories,
    owners: BlockOwners,
    *,
    depth: int | None = None,
) -> Partition:
    """Divides the blocks.

    Args:
        grouping: One of `BY`.
        trace: The trace.
        named_blocks: Its blocks with names.
        kinds: Their categories.
        owners: Their owners: a parameter, its gradient and its states belong to the module in its
            name.
        depth: For scopes and modules: this many parts of the path, from the root; None for all.
    """
    match grouping:
        case "scope":
            names, number = _encode_texts(
                [
                    (path if depth is None else ".".join(path.split(".")[:depth])) or NO_SCOPE
                    for path in named_blocks.places.paths
                ]
            )
            return _add_early_part(named_blocks, names, number[named_blocks.path])
        case "module":
            # The module whose call made it; for parameters and what belongs to them the module that
            # holds them.
            path_modules = named_blocks.places.modules[: len(named_blocks.places.paths)]
            # The path of the module in the name of a parameter, buffer, gradient or state
            owner_modules = []
            for owner, name in zip(owners.table["owner"], owners.table["name"], strict=True):
                target = name.rpartition(" of ")[2]
                target = target.removesuffix(".grad") if owner == "gradient" else target
                owner_modules.append(
                    ""
                    if owner in ("activation", "other") or "(" in name
                    else target.rpartition(".")[0]
                )
            texts = [
                (path if depth is None else ".".join(path.split(".")[:depth])) or NO_MODULE
                for path in (*path_modules, *owner_modules)
            ]
            names, number = _encode_texts(texts or [NO_MODULE])
            path_number = (
                number[named_blocks.path]
                if named_blocks.places.paths
                else np.zeros(0, dtype=np.int64)
            )
            owner_number = np.append(number[len(path_modules) :], 0)[owners.of]
            has_module = np.append(
                np.array([bool(path) for path in owner_modules], dtype=np.bool_), False
            )[owners.of]
            out = np.where(has_module, owner_number, path_number)
            has_no_owner = (named_blocks.blocks.made < 0) & ~has_module
            return [*names, BEFORE_RECORDING_LABEL], np.where(has_no_owner, len(names), out)
        case "category":
            return list(CATEGORIES), kinds.category
        case "op":
            return _add_early_part(named_blocks, named_blocks.places.labels, named_blocks.label)
        case "stack":
            return _partition_stacks(
                named_blocks, *StackTexts(trace).divided(named_blocks.position)
            )
        case "dtype":
            # A guess: the element type of the first tensor that the op around it, or its nearest
            # caller, works on.
            tree = build_forest(trace)
            types = trace.events.select("event").join(
                trace.tensors.select("event", "types"),
                on="event",
                how="left",
                maintain_order="left",
            )["types"]
            distinct = types.drop_nulls().unique(maintain_order=True)
            first_types = []  # of each list the first type of a tensor
            for text in distinct:
                try:
                    listed = json.loads(text)
                except ValueError:
                    listed = []
                first_types.append(
                    next(
                        (
                            name
                            for name in listed
                            if isinstance(name, str) and name not in _NON_TENSOR_TYPES
                        ),
                        None,
                    )
                )
            first = pl.Series(first_types, dtype=pl.String)
            event_types = types.replace_strict(
                distinct, first, default=None, return_dtype=pl.String
            )
            has = event_types.is_not_null().to_numpy()[tree.row]
            typed_event = np.append(tree.nearest_or_self(has), -1)[named_blocks.position]
            names = [UNKNOWN_TYPE, *event_types.drop_nulls().unique(maintain_order=True).to_list()]
            number = (
                event_types.fill_null(UNKNOWN_TYPE)
                .replace_strict(names, list(range(len(names))))
                .to_numpy()
            )
            rows = np.append(tree.row, 0)[typed_event]
            out = (
                np.where(typed_event >= 0, number[rows], 0)
                if number.size
                else np.zeros(typed_event.size, dtype=np.int64)
            )
            return _add_early_part(named_blocks, names, out)
    raise KeyError(grouping)


def _add_early_part(named_blocks: NamedBlocks, names: list[str], number: Ints) -> Partition:
    """Adds blocks from before the recording as a part of their own."""
    return [*names, BEFORE_RECORDING_LABEL], np.where(
        named_blocks.blocks.made < 0, len(names), number
    )


def _encode_texts(texts: list[str]) -> tuple[list[str], Ints]:
    numbers: dict[str, int] = {}
    number = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
    return list(numbers), number


def partition_by_stack(named_blocks: NamedBlocks, texts: pl.Series) -> Partition:
    """Divides the blocks by their Python stacks, given as texts."""
    names = texts.unique(maintain_order=True)
    code = pl.int_range(names.len(), eager=True, dtype=pl.Int64)
    number = texts.replace_strict(names, code) if names.len() else code
    return _partition_stacks(named_blocks, names.to_list(), number.to_numpy())


def _partition_stacks(
    named_blocks: NamedBlocks, texts: Sequence[str | None], number: Ints
) -> Partition:
    """Returns stacks in the order in which they first allocate; also of blocks from before the
    recording, where known.
    """
    _, first = np.unique(number, return_index=True)
    order = np.argsort(first, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    names = [texts[k] or NO_STACK for k in order.tolist()]
    unknown = np.array([not texts[k] for k in order.tolist()], dtype=np.bool_)
    number = position[number]
    before = (named_blocks.blocks.made < 0) & np.append(unknown, True)[number]
    return [*names, BEFORE_RECORDING_LABEL], np.where(before, len(names), number)


HOLDERS_BEFORE = "(before the recording)"
OWNER_LABELS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations",
    "other": "other tensors",
}
TREE = build_schema("node parent depth name path bytes self_bytes block_count fraction")


def build_scope_tree(
    named_blocks: NamedBlocks, selected: Bools, unseen_bytes: int, owners: BlockOwners
) -> pl.DataFrame:
    """Returns the chosen blocks by scope, then op, as a tree; parents come before children, the
    largest child first.

    Args:
        named_blocks: Blocks with names.
        selected: The chosen blocks.
        owners: The owners: blocks from before that a census has are listed under their owner's
            name.
        unseen_bytes: What the allocator's total holds beyond all blocks: memory from before the
            recording.

    Returns:
        `TREE`. The root has depth 0 and everything; `self_bytes` is held by no child; the values
        add up to the root.
    """
    rows = np.flatnonzero(selected)
    recorded = rows[named_blocks.blocks.made[rows] >= 0]
    pairs = pl.DataFrame(
        {
            "path": named_blocks.path[recorded],
            "label": named_blocks.label[recorded],
            "bytes": named_blocks.blocks.bytes[recorded],
        }
    )
    sums = pairs.group_by("path", "label").agg(
        pl.col("bytes").sum(), pl.len().cast(pl.Int64).alias("block_count")
    )
    scopes = [path.split(".") if path else [] for path in named_blocks.places.paths]
    labels = named_blocks.places.labels
    entries = [
        ((*scopes[path], labels[label]), size, count) for path, label, size, count in sums.rows()
    ]
    early = rows[named_blocks.blocks.made[rows] < 0]
    counted, unowned = early[owners.of[early] >= 0], early[owners.of[early] < 0]
    owner_rows = owners.table[owners.of[counted]]
    for kind, name, size in zip(
        owner_rows["owner"],
        owner_rows["name"],
        named_blocks.blocks.bytes[counted].tolist(),
        strict=True,
    ):
        entries.append(((HOLDERS_BEFORE, OWNER_LABELS.get(kind, kind), name), size, 1))
    unknown = int(named_blocks.blocks.bytes[unowned].sum()) + unseen_bytes
    if unknown:
        entries.append(((HOLDERS_BEFORE, "unknown"), unknown, unowned.size))
    return build_tree(entries)


def build_tree(entries: list[tuple[tuple[str, ...], int, int]]) -> pl.DataFrame:
    """Returns a tree from (names from the root, bytes, blocks); rows as `TREE`."""
    total: dict[tuple[str, ...], list[int]] = {(): [0, 0, 0]}
    for names, size, count in entries:
        for depth in range(len(names) + 1):
            entry = total.setdefault(names[:depth], [0, 0, 0])
            entry[0] += size
            entry[2] += count
        total[names][1] += size
    children: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for names in total:
        if names:
            children.setdefault(names[:-1], []).append(names)
    out: list[dict[str, object]] = []
    stack: list[tuple[tuple[str, ...], int | None]] = [((), None)]
    total_bytes = max(total[()][0], 1)
    while stack:
        names, parent = stack.pop()
        size, self_bytes, count = total[names]
        out.append(
            {
                "node": len(out),
                "parent": parent,
                "depth": len(names),
                "name": names[-1] if names else "total",
                "path": ".".join(names),
                "bytes": size,
                "self_bytes": self_bytes,
                "block_count": count,
                "fraction": size / total_bytes,
            }
        )
        node = len(out) - 1
        ordered_children = sorted(
            children.get(names, []), key=lambda child: (-total[child][0], child), reverse=True
        )
        stack.extend((child, node) for child in ordered_children)
    return pl.DataFrame(out, schema=TREE)


def summarize_blocks(
    named_blocks: NamedBlocks, selected: Bools, key: Ints, names: pl.Series
) -> pl.DataFrame:
    """Returns bytes and blocks of the chosen blocks by any number per block: name, bytes,
    block_count, fraction.
    """
    rows = np.flatnonzero(selected)
    sums = (
        pl.DataFrame({"key": key[rows], "bytes": named_blocks.blocks.bytes[rows]})
        .group_by("key")
        .agg(pl.col("bytes").sum(), pl.len().cast(pl.Int64).alias("block_count"))
    )
    total_bytes = max(int(sums["bytes"].sum()), 1)
    return sums.select(
        names.gather(sums["key"].cast(pl.UInt32)).alias("name"),
        "bytes",
        "block_count",
        fraction=pl.col("bytes") / total_bytes,
    ).sort("bytes", "name", descending=[True, False])
