"""Inputs of a plan: host traces, recorded times, and the files next to a host trace.

PyTorch's observer writes host traces and, if told to, files with tensors; our recorder writes the
sources of compiled kernels.

The author of the trace also controls the directory, so names must be those that PyTorch uses, and
only regular files of limited size in that directory are read, no links or devices.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.compiled import COMPILED, mark_compiled_events
from traceloom.analyze.names import build_vocabulary
from traceloom.errors import InputError, UsageError
from traceloom.formats.host_trace import HostTraceHead, find_groups, peek_either, read_host_trace
from traceloom.formats.inputs import find
from traceloom.graph import graph as graph_store
from traceloom.graph.graph import Graph
from traceloom.graph.host_match import Matching
from traceloom.graph.linking import load_ranks
from traceloom.system.files import remember_input
from traceloom.trace.array_types import Array, Bools, Ints
from traceloom.trace.arrays import find_nearest_ancestor, gather_rows
from traceloom.trace.frames import build_schema
from traceloom.trace.notice import Notice
from traceloom.trace.trace import HostTrace, Trace
from traceloom.trace.vocabulary import GPU_WORK
from traceloom.workload.chakra.convert import ConversionInput, is_chakra
from traceloom.workload.replay.plan import ITEM_BYTES
from traceloom.workload.replay.values import RecordedTensor, compute_contiguous_strides

STEPS = build_schema("step duration_ns cpu_ns")
HOLES = build_schema("name count duration_ns")
_FOR_GPU = r"^triton_"  # kernels that a compiled graph launches


@dataclass(frozen=True)
class RecordedTimes:
    """Measured times of the nodes of a host trace, by their id there.

    Attributes:
        durations_ns: Durations of each node's events, in order of time.
        gap_ns: Host time between the end of the previous op on its thread and its start, the
            median.
        stream: Stream of the first GPU work below it.
        gpu_ns: GPU time of the work that it launched, the median over its events; nodes without
            work have none.
        steps: The timed steps: step, duration_ns, cpu_ns.
        holes: Compiled graphs that spend time outside of ops; see `find_uncovered_time`.
    """

    durations_ns: dict[int, list[int]] = field(default_factory=dict)
    gap_ns: dict[int, int] = field(default_factory=dict)
    stream: dict[int, int] = field(default_factory=dict)
    gpu_ns: dict[int, int] = field(default_factory=dict)
    steps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=STEPS))
    holes: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=HOLES))


def collect_recorded_times(trace: Trace, matching: Matching, node_ids: Ints) -> RecordedTimes:
    """Returns the times of a device trace for the ops of a host trace.

    Args:
        trace: The device trace.
        matching: The host trace joined to it.
        node_ids: Ids of the nodes that are run; shape (ops,).
    """
    events = trace.events
    host_op = matching.host_op
    runs = np.isin(host_op, node_ids)
    rows = np.flatnonzero(runs)
    table = pl.DataFrame(
        {
            "node": host_op[rows],
            "lane": events["lane"].to_numpy()[rows],
            "start": events["start_ns"].to_numpy()[rows],
            "duration": events["duration_ns"].to_numpy()[rows],
        }
    ).sort("lane", "start")
    before = (pl.col("start") + pl.col("duration")).cum_max().shift(1).over("lane")
    node_times = (
        table.with_columns((pl.col("start") - before).clip(lower_bound=0).alias("gap"))
        .sort("start")
        .group_by("node", maintain_order=True)
        .agg(pl.col("duration"), pl.col("gap").median().cast(pl.Int64))
    )
    nodes = node_times["node"].to_list()
    gaps = dict(zip(nodes, node_times["gap"].to_list(), strict=True))
    work = find_launched_work(trace, runs)
    work = work.with_columns(pl.Series("node", host_op[work["event"].to_numpy()]))
    gpu_times = (
        work.group_by("event", "node")
        .agg(pl.sum("duration_ns"))
        .group_by("node")
        .agg(pl.median("duration_ns"))
    )
    return RecordedTimes(
        dict(zip(nodes, node_times["duration"].to_list(), strict=True)),
        {node: gap for node, gap in gaps.items() if gap is not None},
        dict(work.drop_nulls("stream").group_by("node").agg(pl.col("stream").first()).iter_rows()),
        dict(gpu_times.with_columns(pl.col("duration_ns").round().cast(pl.Int64)).iter_rows()),
        _select_complete_steps(trace),
        find_uncovered_time(trace, runs),
    )


def find_uncovered_time(trace: Trace, runs: Bools) -> pl.DataFrame:
    """Returns host time in compiled graphs that no op explains: CPU kernels are not ops, so they
    are in no host trace.

    GPU kernels are, so time between the ops of a graph with GPU kernels is Python's and does not
    count.

    Args:
        trace: The device trace.
        runs: Events that are ops which run; shape (events,).

    Returns:
        By name of the graph: count, and duration_ns of all of them without the ops inside, both per
        step if there are complete ones.
    """
    if (
        not build_vocabulary(trace).matching(COMPILED).any()
        or not (graphs := mark_compiled_events(trace).graph).any()
    ):
        return pl.DataFrame(schema=HOLES)
    tree = build_forest(trace)
    in_ops = tree.topmost(runs[tree.row])
    length = tree.end_ns - tree.start_ns
    op_time_before = np.append(0, np.cumsum(np.where(in_ops, length, 0)))
    for_gpu = gather_rows(
        build_vocabulary(trace).matching(_FOR_GPU), build_vocabulary(trace).code[tree.row]
    )
    graph_positions = np.flatnonzero(graphs & (tree.subtree_sums(for_gpu.astype(np.int64)) == 0))
    steps = max(int(trace.steps["complete"].sum()), 1)
    empty = length[graph_positions] - (
        op_time_before[tree.stop[graph_positions]] - op_time_before[graph_positions]
    )
    return (
        pl.DataFrame(
            {"name": trace.events["name"].gather(tree.row[graph_positions]), "empty": empty}
        )
        .filter(pl.col("empty") > 0)
        .group_by("name", maintain_order=True)
        .agg(
            (pl.len() / steps).ceil().alias("count"),
            (pl.sum("empty") / steps).round().alias("duration_ns"),
        )
        .cast(HOLES)
    )


def _select_complete_steps(trace: Trace) -> pl.DataFrame:
    """Returns the complete steps of a window, with their processor time if the capture has it."""
    steps = trace.steps.filter(pl.col("complete")).select(
        "step", (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    )
    step_table = (trace.meta.capture or {}).get("steps")
    cpu_times_ns = step_table.get("cpu_ns") if isinstance(step_table, dict) else None
    cpu = pl.DataFrame(
        {"step": range(len(cpu_times_ns or ())), "cpu_ns": cpu_times_ns or []},
        schema={"step": STEPS["step"], "cpu_ns": pl.Int64},
    )
    return (
        steps.join(cpu, on="step", how="left", maintain_order="left")
        .select(STEPS.names())
        .cast(STEPS)
    )


def find_launched_work(trace: Trace, among: Bools) -> pl.DataFrame:
    """Returns the GPU work that some host events launched, in trace order.

    Args:
        trace: The device trace.
        among: The candidate events; shape (events,). Work is assigned to the innermost of them
            around its launch.

    Returns:
        A row for each piece of work: event (its row in `events`), stream, duration_ns.
    """
    work = trace.events.filter(pl.col("category").is_in(GPU_WORK)).drop_nulls("launch")
    parent = trace.events["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    launch = work["launch"].cast(pl.Int64).to_numpy()
    event = np.where(among[launch], launch, find_nearest_ancestor(parent, among)[launch])
    return work.select(
        pl.Series("event", event, dtype=pl.Int64), pl.col("stream").cast(pl.Int64), "duration_ns"
    ).filter(pl.col("event") >= 0)


def collect_graph_times(graph: Graph, rank: int, _chosen: Ints) -> RecordedTimes:
    """Returns the times in a saved graph: of each op the span of its nodes, in every step."""
    spans = (
        graph.nodes.filter(
            (pl.col("rank") == rank) & pl.col("host_op").is_not_null() & pl.col("op").is_not_null()
        )
        .group_by("host_op", "op")
        .agg(
            pl.col("start_ns").min(),
            (pl.col("start_ns") + pl.col("duration_ns")).max().alias("end_ns"),
        )
        .sort("start_ns")
        .group_by("host_op", maintain_order=True)
        .agg(pl.col("end_ns") - pl.col("start_ns"))
    )
    return RecordedTimes(dict(spans.iter_rows()))


AnyPath = str | os.PathLike[str]
_MAX_TIME_APART = timedelta(days=1)  # ranks may be in other time zones


class PlanInput(Struct, frozen=True):
    """The host trace of one rank with its other data.

    Attributes:
        rank: The rank.
        host: Its host trace.
        originals: Returns the measured times for the ids of chosen nodes.
        capture: The rank's part of capture.json.
    """

    rank: int
    host: HostTrace
    originals: Callable[[Ints], RecordedTimes]
    capture: dict[str, Any] | None = None


def open_inputs(
    paths: Sequence[AnyPath], *, cache: bool
) -> tuple[str, list[PlanInput], list[Notice]]:
    """Reads the inputs of a plan; returns the kind of input in a word, the host trace of each rank,
    and notices.

    Args:
        paths: A capture; host traces of any ranks, with or without device traces; a `.graph`, or
            our own `.et` files.
        cache: Use the cache of parsed traces, and fill it.

    Raises:
        InputError: `no-host-trace`, `two-host-traces`; or the rejection of a file.
    """
    texts = tuple(os.fspath(path) for path in paths)
    if len(texts) == 1 and (is_chakra(Path(texts[0])) or graph_store.is_graph(Path(texts[0]))):
        with ConversionInput(Path(texts[0])) as source:
            graph = source.graph()
        return texts[0], _open_graph(graph, texts[0]), list(graph.notices)
    sources = find(texts)
    peeks = [] if sources.captures else [peek_either(file) for file in sources.inputs]
    for file in sources.inputs:
        remember_input(file.path)
    if peeks and all(isinstance(peek, HostTraceHead) for peek in peeks):
        hosts = [read_host_trace(peek.source.path) for peek in peeks]
        ranks = [
            host.rank if host.rank is not None else number for number, host in enumerate(hosts)
        ]
        if len(set(ranks)) < len(ranks):
            text = f"two host traces are of rank {Counter(ranks).most_common(1)[0][0]}"
            raise InputError(text, slug="two-host-traces", hint="give one for each rank")
        _check_one_run(hosts)
        entries = [
            PlanInput(rank, host, lambda _chosen: RecordedTimes())
            for rank, host in zip(ranks, hosts, strict=True)
        ]
        text = "there is no device trace: how long the ops took is not known"
        notices = [Notice("no-device-trace", "info", text, len(hosts))]
        return " ".join(texts), sorted(entries, key=lambda entry: entry.rank), notices
    loaded = load_ranks(*paths, cache=cache)
    entries = []
    for rank in loaded.ranks:
        matching = rank.matching
        if matching is not None:
            entries.append(
                PlanInput(
                    rank.rank,
                    matching.host,
                    partial(collect_recorded_times, rank.trace, matching),
                    rank.trace.meta.capture,
                )
            )
    if not entries:
        raise InputError(
            "there is no host trace: nothing says which ops ran with which arguments",
            slug="no-host-trace",
            where=loaded.name,
            hint="record with `traceloom record --graph`, or with torch.profiler.ExecutionTraceObserver beside the profiler",
        )
    return loaded.name, entries, loaded.notices


def _check_one_run(hosts: Sequence[HostTrace]) -> None:
    """Checks that host traces have one version, name the same groups and started together.

    Raises:
        UsageError: `several-runs`.
    """
    first, *other_hosts = hosts
    members = dict(first.groups.select("group", "ranks").drop_nulls().iter_rows())
    for other in other_hosts:
        groups = other.groups.select("group", "ranks").drop_nulls().iter_rows()
        differing_groups = [
            name for name, ranks in groups if members.setdefault(name, ranks) != ranks
        ]
        start_times = [
            time for host in (first, other) if (time := _parse_time(host.recorded_at)) is not None
        ]
        difference = (
            f"one has the schema {first.schema}, one {other.schema}"
            if first.schema != other.schema
            else f"the group {differing_groups[0]!r} has other members"
            if differing_groups
            else f"one is of {start_times[0]}, one of {start_times[1]}"
            if len(start_times) == 2 and abs(start_times[0] - start_times[1]) > _MAX_TIME_APART
            else ""
        )
        if difference:
            raise UsageError(
                f"{first.path} and {other.path} are of different runs: {difference}",
                slug="several-runs",
                hint="give the host traces of one run",
            )


def _parse_time(text: str | None) -> datetime | None:
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text or "")
    return None


def _open_graph(graph: Graph, path: str) -> list[PlanInput]:
    if not graph.host_ops.height:
        raise InputError(
            "the graph holds no ops of a host trace: nothing says which ops ran with which arguments",
            slug="no-host-trace",
            where=path,
            hint="record with `traceloom record --graph`, or link device traces together with their host traces",
        )
    return [
        PlanInput(
            rank,
            HostTrace(path, ops.drop("rank"), rank=rank, groups=find_groups(ops, path)[0]),
            partial(collect_graph_times, graph, rank),
        )
        for (rank,), ops in graph.host_ops.sort("rank", "id").group_by("rank", maintain_order=True)
        if isinstance(rank, int)
    ]


_MAX_DUMP_BYTES = 1 << 28  # bytes read in total from a directory
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_DUMP = re.compile(r"nid_(\d{1,18})_tid_(\d{1,9})\.dat")


class Resources:
    """The directory that belongs to a host trace; empty if there is none.

    Args:
        trace: The host trace. PyTorch puts files for `a.json` into `a_resources`, for `a.json.gz`
            into `a.json_resources`; if `a.json` was compressed later, there are `a.json.gz` and
            `a_resources`.
    """

    def __init__(self, trace: str | Path) -> None:
        base_name = str(trace).removesuffix(".gz")
        names = [f"{base_name.removesuffix('.json')}_resources", f"{base_name}_resources"]
        self.directory = next(
            (path for path in map(Path, names) if path.is_dir() and not path.is_symlink()), None
        )
        self._left = _MAX_DUMP_BYTES

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The files in it, with their sizes in bytes."""
        if self.directory is None:
            return {}
        try:
            with os.scandir(self.directory) as entries:
                return {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                }
        except OSError:
            return {}

    @cached_property
    def dumps(self) -> Mapping[int, Mapping[int, str]]:
        """Files with the values of integer tensors at the start of an op: by node and number of the
        tensor among its inputs.

        PyTorch writes them with
        ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA=aten::embedding,...
        """
        out: dict[int, dict[int, str]] = defaultdict(dict)
        for name in self.sizes:
            if match := _DUMP.fullmatch(name):
                out[int(match[1])][int(match[2])] = name
        return out

    def dumped(self, name: str, tensor: RecordedTensor) -> Array | None:
        """Returns the values of an integer tensor; None if the file does not have its size, or has
        other memory than the tensor's.

        PyTorch writes the memory from the first element on, as many bytes as the tensor has. For a
        tensor on the CPU, it uses the offset, which is in elements, as one in bytes.
        """
        geometry = tensor.geometry
        size = tensor.elements * ITEM_BYTES.get(geometry.dtype, 0)
        is_misplaced = tensor.offset > 0 and tensor.device == "cpu" and tensor.item_bytes > 1
        is_whole = geometry.dtype.startswith(("int", "uint")) and geometry.span == tensor.elements
        if not is_whole or is_misplaced or self.sizes[name] != size:
            return None
        data = self.read(name, min(size, self._left))
        if data is None or len(data) != size:
            return None
        self._left -= size
        memory = np.frombuffer(data, dtype=np.dtype(geometry.dtype).newbyteorder("<"))
        strides = (
            compute_contiguous_strides(geometry.shape)
            if geometry.strides is None
            else geometry.strides
        )
        steps = [stride * memory.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(memory, geometry.shape, steps, writeable=False)

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Returns the content of a file of the directory; None if there is none of that name, or it
        has more than `max_bytes` bytes.
        """
        if self.directory is None or self.sizes.get(name, max_bytes + 1) > max_bytes:
            return None
        try:
            with open(
                self.directory / name,
                "rb",
                opener=lambda path, flags: os.open(path, flags | _NO_FOLLOW),
            ) as handle:
                data = handle.read(max_bytes + 1)
        except OSError:
            return None
        return data if len(data) <= max_bytes else None
