"""Summaries of explained memory: holders at the peak, largest blocks, growth over steps, and
activations by module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.host_events import fold_stack
from traceloom.analyze.memory_blocks import EXISTED_BEFORE, STILL_ALIVE, Blocks
from traceloom.analyze.memory_names import NamedBlocks, find_module_calls, name_blocks
from traceloom.analyze.memory_owners import (
    ACTIVATION,
    CATEGORIES,
    EVIDENCE,
    TREE,
    BlockCategories,
    BlockOwners,
    Partition,
    StackTexts,
    build_block_names,
    build_scope_tree,
    classify_blocks,
    find_owners,
    partition,
    partition_by_stack,
    summarize_blocks,
)
from traceloom.system import units
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import keep_in_memory
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.trace.session import FRAME_SEPARATOR, MemorySnapshot, format_stacks
from traceloom.trace.trace import Trace

_DEVICE = "cuda"
_CLOCK_RESOLUTION_NS = 2_000
"""The history has microseconds: no finer difference can be distinguished."""
_MAX_CLOCK_SHIFT_NS = 10_000_000
"""A larger shift between the clocks is rejected as implausible."""
_ADDRESS_KEY = ["device", "address"]


@dataclass(frozen=True, slots=True)
class ExplainedMemory:
    """Blocks with names, categories and owners.

    Attributes:
        trace: The trace of the blocks.
        named: Their names.
        kinds: Their categories.
        whose: Their owners.
        stacks: The stack of each block as text, the innermost frame first, where the source gives
            them with the blocks; None where frames are events of the trace.
        lines: The stacks by the history of the GPU's allocator, null where none is certain: for
            blocks without frames in the trace. None without a history.
    """

    trace: Trace
    named: NamedBlocks
    kinds: BlockCategories
    whose: BlockOwners
    stacks: pl.Series | None = None
    lines: pl.Series | None = None
    _divided: dict[tuple[str, int | None], Partition] = field(
        default_factory=dict, repr=False, compare=False
    )

    def by(self, grouping: str, depth: int | None = None) -> Partition:
        """Divides the blocks by scope, module, category, op, stack or dtype; cached, so it must not
        be changed.
        """
        partitions = self._divided
        if (grouping, depth) not in partitions:
            if grouping == "stack" and (self.stacks is not None or self.lines is not None):
                all_rows = np.arange(self.named.position.size)
                partitions[grouping, depth] = partition_by_stack(
                    self.named, self.stack_reader()(all_rows)
                )
            else:
                partitions[grouping, depth] = partition(
                    grouping, self.trace, self.named, self.kinds, self.whose, depth=depth
                )
        return partitions[grouping, depth]

    def stack_reader(self) -> Callable[[Ints], pl.Series]:
        """Returns a function that gives the Python stacks of some blocks, the innermost frame
        first; null where none was recorded.
        """
        if self.stacks is not None:
            return self.stacks.gather
        recorded, lines = StackTexts(self.trace).reader(self.named.position), self.lines
        if lines is None:
            return recorded
        return lambda rows: pl.select(pl.coalesce(recorded(rows), lines.gather(rows))).to_series()

    @property
    def has_stacks(self) -> bool:
        """Whether the Python stack of any block is known."""
        if any(
            stacks is not None and stacks.len() > stacks.null_count()
            for stacks in (self.stacks, self.lines)
        ):
            return True
        kinds = self.trace.events["category"].to_physical()
        return bool((kinds == vocab.CATEGORIES.index(vocab.PYTHON)).any())


def explain(
    trace: Trace, *, full_op_names: bool = False, snapshot: MemorySnapshot | None = None
) -> ExplainedMemory:
    """Pairs, names and explains the allocations of a trace.

    Args:
        trace: Recorded with `profile_memory`; without allocation events there are no blocks.
        full_op_names: Keep the namespaces of operators in names: `aten::relu`.
        snapshot: Snapshot of the allocator in the same process, taken later: its history holds the
            stacks.
    """
    # Blocks are held there, so the columns that describe them are too
    trace = keep_in_memory(trace)
    named_blocks = name_blocks(trace, full_op_names=full_op_names)
    named_blocks.blocks.check()
    owners = find_owners(trace, named_blocks.blocks)
    lines = None
    if snapshot is not None:
        number = _match_stacks(named_blocks.blocks, snapshot, trace.start_ns)
        lines = format_stacks(snapshot).gather(number)
    return ExplainedMemory(
        trace, named_blocks, classify_blocks(trace, named_blocks, owners), owners, lines=lines
    )


def _match_stacks(blocks: Blocks, snapshot: MemorySnapshot, start_ns: int) -> Ints:
    """Returns the number of the stack (of `snapshot.stacks`) that made each block; 0, which is
    none, where that is not certain.

    A trace recorded without stacks has the operator and module that made a block; the allocator's
    history has the lines, also for blocks from before the recording. Both record addresses, which
    are reused again and again, and times, which may differ a little. Blocks whose address occurs
    once in both give the offset between the clocks; by that the others are matched, and ambiguous
    blocks stay without a stack.

    Args:
        blocks: Blocks of a trace; only those of GPUs are looked up.
        snapshot: Snapshot of the same process, taken later; its history may begin after the blocks
            do.
        start_ns: When the recording began.

    Returns:
        Shape (blocks,).
    """
    allocations = snapshot.entries.filter(
        (pl.col("action") == "alloc") & pl.col("time_us").is_not_null()
    )
    # Within one microsecond: they cannot be distinguished
    twice = pl.len().over(*_ADDRESS_KEY, "time_us") > 1
    history = allocations.select(
        *_ADDRESS_KEY,
        pl.col("bytes").alias("asked"),
        pl.when(twice).then(0).otherwise("stack").alias("stack"),
        (pl.col("time_us") * 1000).alias("time"),
    ).sort("time")
    on_gpu = np.array([pool.device_type == _DEVICE for pool in blocks.pools], dtype=np.bool_)
    rows = np.zeros(0, dtype=np.int64)
    if on_gpu.any():
        rows = np.flatnonzero(on_gpu[blocks.pool] & (blocks.address < 1 << 63))
    recorded = blocks.start_ns[rows] != EXISTED_BEFORE
    device = np.array([max(pool.device, 0) for pool in blocks.pools], dtype=np.int32)
    gpu_blocks = pl.DataFrame(
        {
            "block": rows,
            "device": device[blocks.pool[rows]],
            "address": blocks.address[rows].astype(np.int64),
            "bytes": blocks.bytes[rows],
            "time": np.where(recorded, blocks.start_ns[rows], start_ns),
            "inside": recorded,
        }
    )
    out = np.zeros(blocks.made.size, dtype=np.int64)
    # How far the history is ahead of the trace, and the spread of that.
    once = [
        frame.filter(pl.len().over(_ADDRESS_KEY) == 1)
        for frame in (gpu_blocks.filter("inside"), history)
    ]
    both = (
        once[0]
        .join(once[1], on=_ADDRESS_KEY, suffix="_told")
        .filter(pl.col("asked") <= pl.col("bytes"))
    )
    difference = (both["time_told"] - both["time"]).to_numpy()
    ahead, reach = 0, _MAX_CLOCK_SHIFT_NS
    if difference.size:
        ahead = int(np.median(difference))
        spread = int(np.median(np.abs(difference - ahead)))
        if abs(ahead) + 5 * spread >= _MAX_CLOCK_SHIFT_NS:  # the two do not belong together
            return out
        reach = _CLOCK_RESOLUTION_NS + 5 * spread
    shifted = gpu_blocks.with_columns(pl.col("time") + ahead).sort("time")
    in_window, before = shifted.filter("inside"), shifted.filter(~pl.col("inside"))
    # Blocks of the recording: the only allocation at their address within `reach` of their time.
    last = _find_nearest(in_window, history, reach, "backward").filter(
        pl.col("told") >= pl.col("time") - reach
    )
    first = _find_nearest(in_window, history, -reach, "forward").select("block", first="told")
    unambiguous = last.join(first, on="block").filter(pl.col("told") == pl.col("first"))
    # Blocks from before: the last allocation at their address, unless it came after the beginning.
    earlier = _find_nearest(before, history, reach, "backward").filter(
        pl.col("told") <= pl.col("time") - reach
    )
    for matches in (unambiguous.filter(pl.len().over(*_ADDRESS_KEY, "told") == 1), earlier):
        fitting = matches.filter(pl.col("asked") <= pl.col("bytes"))
        out[fitting["block"].to_numpy()] = fitting["stack"].to_numpy()
    return out


def _find_nearest(
    gpu_blocks: pl.DataFrame,
    history: pl.DataFrame,
    shift: int,
    strategy: Literal["backward", "forward"],
) -> pl.DataFrame:
    """Returns each block with the next allocation at its address, seen from `shift` behind its
    time; `told` is its time.
    """
    columns = history.select(*_ADDRESS_KEY, "asked", "stack", "time", told="time")
    shifted = gpu_blocks.with_columns(at=pl.col("time") + shift).sort("at")
    return shifted.join_asof(
        columns.rename({"time": "at"}),
        on="at",
        by=_ADDRESS_KEY,
        strategy=strategy,
        check_sortedness=False,
    ).drop_nulls("told")


GROWTH = build_schema(
    "site pool step_count period bytes bytes_per_step block_count first_step last_step example frame",
    {"first_step": pl.Int64, "last_step": pl.Int64, "frame": pl.String},
)
MIN_STEPS = 3
_MAX_OF_BALANCE = 2.0  # times what the memory gains per step: more is not left behind


def find_growth(trace: Trace, named_blocks: NamedBlocks) -> pl.DataFrame:
    """Finds places in the code that leave memory alive in one step after the other, or in every
    second or third of them.

    A block counts where it was made in a step and is alive when the recording ends, its step being
    over. The last step does not count: what it made may be in use. A place grows where at least
    `LEAST_STEPS` steps leave something, at equal distances except for one that may be up to twice
    as long, and up to the end of the recording; what only the first step leaves (optimizer state,
    caches) does not grow, nor does a memory that gives back about as much as it takes.

    Returns:
        `GROWTH`, the fastest first: site (name with the counter restarting every step), pool
        (number of the memory), step_count (steps that left something), period (their distance, in
        steps), bytes and block_count (left in all), bytes_per_step (mean over the steps from the
        first to the last of these and those that belong to the last), first_step, last_step,
        example (a block), frame (of the user's own code that made it; null without stacks).
    """
    blocks, steps = named_blocks.blocks, trace.steps
    if steps.height < MIN_STEPS + 1 or not blocks.made.size:
        return GROWTH.to_frame()
    created_row = np.maximum(blocks.made, 0)
    step_of_row = trace.allocations["step"].fill_null(-1).cast(pl.Int64).to_numpy()
    step = step_of_row[created_row]
    last = int(steps["step"].to_numpy().max())
    remaining = np.flatnonzero(
        (blocks.made >= 0)
        & (blocks.ended >= trace.allocations.height)
        & (step >= 0)
        & (step < last)
    )
    rows = pl.DataFrame(
        {
            "site": named_blocks.names(remaining, sites=True),
            "pool": blocks.pool[remaining],
            "step": step[remaining],
            "bytes": blocks.bytes[remaining],
            "block": remaining.astype(np.uint32),
        }
    )
    grown = (
        rows.group_by("site", "pool")
        .agg(
            step_count=pl.col("step").n_unique().cast(pl.Int64),
            bytes=pl.col("bytes").sum(),
            block_count=pl.len().cast(pl.Int64),
            first_step=pl.col("step").min(),
            last_step=pl.col("step").max(),
            example=pl.col("block").last(),
            distances=pl.col("step").unique().sort().diff().drop_nulls(),
        )
        .filter(pl.col("step_count") >= MIN_STEPS)
        .with_columns(
            period=pl.col("distances").list.min(),
            longest=pl.col("distances").list.max(),
            span=pl.col("last_step") - pl.col("first_step"),
        )
        .filter(
            pl.col("longest") <= 2 * pl.col("period"),
            # All distances except one are the period.
            pl.col("span") == pl.col("period") * (pl.col("step_count") - 2) + pl.col("longest"),
            pl.col("last_step") >= last - 1 - pl.col("period"),
        )
        .with_columns(bytes_per_step=pl.col("bytes") / (pl.col("span") + pl.col("period")))
    )
    # The balance decides: where as much is given back as was taken, only the pairing is wrong.
    ended = np.minimum(blocks.ended, trace.allocations.height - 1)
    ended_step = np.where(blocks.ended > ended, -1, step_of_row[ended])
    change = pl.concat(
        pl.DataFrame({"step": steps_of, "pool": blocks.pool, "bytes": sign * blocks.bytes})
        for steps_of, sign in ((np.where(blocks.made < 0, -1, step), 1), (ended_step, -1))
    )
    first = grown.group_by("pool").agg(pl.col("first_step").min().alias("first"))
    balance = (
        change.join(first, on="pool")
        .filter(pl.col("step") > pl.col("first"), pl.col("step") < last)
        .group_by("pool")
        .agg(gained=pl.col("bytes").sum() / (last - 1 - pl.col("first").first()).clip(1))
    )
    grown = grown.join(balance, on="pool").filter(
        pl.col("bytes_per_step").sum().over("pool") <= _MAX_OF_BALANCE * pl.col("gained")
    )
    stacks = StackTexts(trace).of(named_blocks.position[grown["example"].to_numpy()])
    innermost = stacks.map_elements(fold_stack, return_dtype=pl.String).str.split(FRAME_SEPARATOR)
    grown = grown.with_columns(frame=innermost.list.first())
    return grown.pipe(cast_to_schema, GROWTH).sort(
        "bytes_per_step", "site", descending=[True, False]
    )


POOLS = build_schema(
    "pool device_type device peak_bytes peak_time_ns peak_step peak_row unseen_bytes",
    "start_bytes end_bytes allocation_count free_count reserved_at_peak_bytes",
)
"""One row per memory."""

_REUSED_ADDRESS = """blocks were never freed in the recording, and yet their address was given out again: they are taken to end
there (another thread freed them, or events were dropped)"""
_SIZE_MISMATCH = "frees say another size than their allocation: that of the allocation counts"
_UNRECORDED_ALLOCATION = """storages ({size}) are alive at the end whose allocation was not recorded, and that were not there before:
other threads made them, or they are not PyTorch's own (NumPy arrays, mapped files); no figure holds them"""
_STORAGES_GONE = """storages ({size}) from before the recording were not found any more at its end, but no free of them was
recorded: they count until the end"""
_FREED_WITHOUT_ALLOCATION = """blocks ({size}) were freed whose allocation was not recorded: they are taken to be from before the
recording, where no other thread made them; their owner is unknown"""
_NO_ADDRESS = """blocks were recorded without an address: a free is taken to end the youngest block of its size, so
that sums are right but single lifetimes are guesses"""
_UNKNOWN_BACKWARD = "backward nodes belong to no recorded forward operator: what they allocate is called backward.unknown"
_COMPILED_CODE = """allocations ({size}) were made in compiled code: they are charged to the scope that called it, because
modules and scopes inside it are gone"""


@dataclass(frozen=True)
class Allocations(Result):
    """The owners of memory in one trace.

    Attributes:
        pools: One row per memory (a device, or the shared memory of loader workers): peak, its
            time, step and row; `unseen_bytes` (memory that the allocator held before the recording
            and that was never seen), start, end, counts.
        peak: The holders at the peak of each pool: pool and `TREE`.
        categories: At the peak: pool, category, evidence, bytes, block_count, fraction.
        largest: The largest blocks alive at the peak: pool, name, bytes, category, time_ns, end_ns,
            step.
        growth: Places that leave memory alive step after step; see `find_growth`.
        notices: Notices about the pairing.
    """

    pools: pl.DataFrame
    peak: pl.DataFrame
    categories: pl.DataFrame
    largest: pl.DataFrame
    growth: pl.DataFrame
    notices: tuple[Notice, ...]


MAX_LARGEST = 100
CATEGORY_ROWS = build_schema("pool category evidence bytes block_count fraction")
LARGEST = build_schema("pool name owner bytes category backward time_ns end_ns step")


def explain_allocations(trace: Trace, *, full_op_names: bool = False) -> Allocations:
    """Pairs, names and explains the allocations of a trace (recorded with `profile_memory`).

    Args:
        trace: The trace; without allocation events all frames are empty.
        full_op_names: Keep namespaces in names: `aten::relu`.
    """
    return build_allocations(explain(trace, full_op_names=full_op_names))


def build_allocations(
    explained: ExplainedMemory,
    rows: Mapping[int, int] | None = None,
    *,
    max_blocks: int = MAX_LARGEST,
) -> Allocations:
    """Returns the same for blocks that are explained already, and for other instants than the
    peaks.

    Args:
        explained: The blocks.
        rows: Row of `trace.allocations` just after which each memory is inspected; the peak where
            none is given.
        max_blocks: The number of largest blocks to list; 0 for none.
    """
    trace, named_blocks, kinds, owners = (
        explained.trace,
        explained.named,
        explained.kinds,
        explained.whose,
    )
    pools = _summarize_pools(trace, named_blocks)
    peaks, category_tables, largest = (
        [TREE_ROWS.to_frame()],
        [CATEGORY_ROWS.to_frame()],
        [LARGEST.to_frame()],
    )
    for pool, highest, unseen in pools.select("pool", "peak_row", "unseen_bytes").rows():
        row = (rows or {}).get(pool, highest)
        selected = (named_blocks.blocks.pool == pool) & named_blocks.blocks.alive(row)
        pool_column = pl.lit(pool, pl.Int64).alias("pool")
        peaks.append(
            build_scope_tree(named_blocks, selected, unseen, owners).select(pool_column, pl.all())
        )
        key = kinds.category * len(EVIDENCE) + kinds.evidence
        both = [(category, evidence) for category in CATEGORIES for evidence in EVIDENCE]
        sums = summarize_blocks(named_blocks, selected, key, pl.int_range(len(both), eager=True))
        rows_of = [(*both[key], size, count) for key, size, count, _ in sums.rows()]
        if unseen:
            rows_of.append(("before_recording", "none", unseen, 0))
        category_columns = ["category", "evidence", "bytes", "block_count"]
        summed = pl.DataFrame(
            rows_of, schema={name: CATEGORY_ROWS[name] for name in category_columns}, orient="row"
        )
        summed = summed.group_by("category", "evidence").agg(pl.col("bytes", "block_count").sum())
        total_bytes = max(int(summed["bytes"].sum()), 1)
        ranked = summed.with_columns(pool_column, fraction=pl.col("bytes") / total_bytes)
        ranked = ranked.sort("bytes", "category", descending=[True, False])
        category_tables.append(ranked.pipe(cast_to_schema, CATEGORY_ROWS))
        if not max_blocks:
            continue
        chosen_rows = np.flatnonzero(selected)
        top = chosen_rows[
            np.argsort(-named_blocks.blocks.bytes[chosen_rows], kind="stable")[:max_blocks]
        ]
        created_row = named_blocks.blocks.made[top]
        step = (
            trace.allocations["step"].gather(np.maximum(created_row, 0))
            if top.size
            else pl.Series([], dtype=pl.Int32)
        )
        table = pl.DataFrame(
            {
                "name": build_block_names(named_blocks, owners, top),
                "owner": owners.table["name"].gather(
                    pl.Series(owners.of[top]).replace(-1, None).cast(pl.UInt32)
                ),
                "bytes": named_blocks.blocks.bytes[top],
                "category": pl.Series(CATEGORIES).gather(kinds.category[top]),
                "backward": named_blocks.backward[top],
                "time_ns": pl.Series(named_blocks.blocks.start_ns[top]).replace(
                    EXISTED_BEFORE, None
                ),
                "end_ns": pl.Series(named_blocks.blocks.end_ns[top]).replace(STILL_ALIVE, None),
                "step": step.set(pl.Series(created_row < 0), None),
            }
        )
        largest.append(table.select(pool_column, pl.all()).cast(LARGEST))
    # The assumptions of pairing and naming, and what the recording cannot have seen.
    blocks = named_blocks.blocks
    early = np.flatnonzero((blocks.start_ns == EXISTED_BEFORE) & (blocks.owner < 0))
    without_address = int(((blocks.address == 0) & (blocks.owner < 0)).sum())
    compiled = np.flatnonzero(np.append(named_blocks.places.compiled, False)[named_blocks.position])
    listed = owners.table["bytes"].to_numpy()
    none = early[:0]
    notices = (
        Notice("lost-frees", "warning", _format_notice(_REUSED_ADDRESS, none), blocks.lost_frees),
        Notice("resized-frees", "warning", _format_notice(_SIZE_MISMATCH, none), blocks.resized),
        Notice(
            "unrecorded-allocations",
            "warning",
            _format_notice(_UNRECORDED_ALLOCATION, listed[owners.unseen]),
            owners.unseen.size,
        ),
        Notice(
            "unrecorded-frees",
            "warning",
            _format_notice(_STORAGES_GONE, blocks.bytes[owners.gone]),
            owners.gone.size,
        ),
        Notice(
            "freed-from-before",
            "info",
            _format_notice(_FREED_WITHOUT_ALLOCATION, blocks.bytes[early]),
            early.size,
        ),
        Notice(
            "allocations-without-address",
            "info",
            _format_notice(_NO_ADDRESS, none),
            without_address,
        ),
        Notice(
            "backward-without-forward",
            "info",
            _format_notice(_UNKNOWN_BACKWARD, none),
            named_blocks.places.unknown_backward,
        ),
        Notice(
            "compiled-allocations",
            "info",
            _format_notice(_COMPILED_CODE, blocks.bytes[compiled]),
            compiled.size,
        ),
    )
    counted = (notice for notice in notices if notice.count)
    return Allocations(
        pools,
        pl.concat(peaks),
        pl.concat(category_tables),
        pl.concat(largest),
        find_growth(trace, named_blocks),
        tuple(
            replace(notice, message=f"{units.format_count(notice.count)} {notice.message}")
            for notice in counted
        ),
    )


TREE_ROWS = build_schema("pool", TREE)


def _summarize_pools(trace: Trace, named_blocks: NamedBlocks) -> pl.DataFrame:
    rows = trace.allocations
    times = rows["time_ns"]
    out = []
    for number, pool in enumerate(named_blocks.blocks.pools):
        levels = named_blocks.blocks.levels(number, rows.height)
        unseen = 0 if pool.start_bytes is None else pool.start_bytes - int(levels[0])
        peak = int(levels.argmax())
        row = max(peak - 1, 0)
        in_pool = named_blocks.blocks.pool == number
        before = named_blocks.blocks.start_ns == EXISTED_BEFORE
        out.append(
            {
                "pool": number,
                "device_type": pool.device_type,
                "device": pool.device,
                "peak_bytes": int(levels[peak]) + unseen,
                "peak_time_ns": times[row],
                "peak_step": rows["step"][row],
                "peak_row": peak - 1,
                "unseen_bytes": unseen,
                "start_bytes": pool.start_bytes,
                "end_bytes": int(levels[-1]) + unseen,
                "allocation_count": int((in_pool & ~before).sum()),
                "free_count": int((in_pool & (named_blocks.blocks.end_ns != STILL_ALIVE)).sum()),
                "reserved_at_peak_bytes": rows["reserved_bytes"][row]
                if pool.start_bytes is not None
                else None,
            }
        )
    return pl.DataFrame(out, schema=POOLS)


def _format_notice(text: str, sizes: Ints) -> str:
    return text.replace("\n", " ").format(size=units.format_size(int(sizes.sum())))


ACTIVATIONS = build_schema("module call_count bytes block_count saved_bytes host_ns device_ns")


def summarize_activations(explained: ExplainedMemory, pool: int, row: int) -> pl.DataFrame:
    """Returns activations alive at an instant by the module that made them.

    Args:
        explained: The blocks.
        pool: Number of the memory.
        row: The instant: just after this row of `trace.allocations`.

    Returns:
        `ACTIVATIONS`, the largest saving first: module, call_count (calls that hold some), bytes
        and block_count (made inside these calls, with modules inside), saved_bytes (what
        checkpointing the module would free: all but the last block of each call, which is taken for
        its output), host_ns and device_ns (what recomputing costs: the time of these calls on their
        threads, and of the GPU work that they launched). Rows of a module and of the modules inside
        it overlap.
    """
    blocks, block_places = explained.named.blocks, explained.named.places
    if explained.stacks is not None or not block_places.path.size:
        return ACTIVATIONS.to_frame()
    tree = build_forest(explained.trace)
    is_saved = (
        (blocks.pool == pool)
        & blocks.alive(row)
        & (explained.kinds.category == ACTIVATION)
        & (blocks.made >= 0)
    )
    # What earlier steps left behind is a leak, which checkpointing does not free
    step = explained.trace.allocations["step"].fill_null(-1).to_numpy()
    if row >= 0 and step[row] >= 0:
        is_saved &= step[np.maximum(blocks.made, 0)] == step[row]
    # Every pair of a module call and a block that was made in it, at any depth.
    is_call = find_module_calls(explained.trace, tree)
    parent_call = tree.nearest(is_call)
    block = np.flatnonzero(is_saved)
    call_row = np.append(tree.nearest_or_self(is_call, parent_call), -1)[
        explained.named.position[block]
    ]
    calls, made_in = [call_row[:0]], [block[:0]]
    while (call_row >= 0).any():
        in_call = np.flatnonzero(call_row >= 0)
        call_row, block = call_row[in_call], block[in_call]
        calls.append(call_row)
        made_in.append(block)
        call_row = parent_call[call_row]
    block = np.concatenate(made_in)
    pairs = pl.DataFrame(
        {"call": np.concatenate(calls), "bytes": blocks.bytes[block], "made": blocks.made[block]}
    )
    call_sums = pairs.group_by("call").agg(
        pl.col("bytes").sum(),
        pl.len().cast(pl.Int64).alias("block_count"),
        output=pl.col("bytes").sort_by("made").last(),
    )
    work = explained.trace.gpu_work().select("launch", "duration_ns").drop_nulls()
    position = (
        tree.position[work["launch"].to_numpy()] if work.height else np.zeros(0, dtype=np.int64)
    )
    has_launch = position >= 0
    # Of the GPU work that each host event launched itself
    launched_ns = np.zeros(tree.row.size, dtype=np.int64)
    np.add.at(
        launched_ns, position[has_launch], np.maximum(work["duration_ns"].to_numpy()[has_launch], 0)
    )
    call = call_sums["call"].to_numpy()
    paths = pl.Series(block_places.modules, dtype=pl.String)
    call_costs = call_sums.with_columns(
        module=paths.gather(block_places.path[call]),
        host_ns=pl.Series(tree.span_ns()[call]),
        device_ns=pl.Series(tree.subtree_sums(launched_ns)[call]),
    )
    summed = call_costs.group_by("module").agg(
        pl.len().cast(pl.Int64).alias("call_count"),
        pl.col("bytes", "block_count", "host_ns", "device_ns").sum(),
        saved_bytes=(pl.col("bytes") - pl.col("output")).sum(),
    )
    saved = summed.filter(pl.col("saved_bytes") > 0).pipe(cast_to_schema, ACTIVATIONS)
    return saved.sort("saved_bytes", "module", descending=[True, False])
