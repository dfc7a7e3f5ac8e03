"""`--structure collapse` for device traces and Chakra.

The tree of operators, annotations and Python frames reveals how a model is built. What is kept is
when a thread was in any operator at all, so that launches, waits and idle time keep their causes.

In Chakra, a node is joined to its predecessor if nothing else waits for that one and both run in
the same place. The chain then takes exactly as long as its nodes together, whatever happens around
it, so times and dependencies are preserved.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Spans, merge_intervals, subtract_spans
from traceloom.formats.chakra.et_pb2 import AttributeProto, NodeType
from traceloom.formats.chakra.files import EtReader
from traceloom.trace import vocabulary as vocab
from traceloom.trace.trace import Trace
from traceloom.workload.anonymize.names import COMMUNICATION, LOADING, STEP

FUSED = "host_work"
_BATCH_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class FusedThread:
    """The fused operators of one thread.

    Attributes:
        process, thread: As written in the file.
        spans: Start and end of each.
    """

    process: str
    thread: str
    spans: Spans


def merge_host_work(trace: Trace) -> list[FusedThread]:
    """Returns, for each host thread, the time inside operators, without launches and communication,
    which remain events.
    """
    host = trace.lanes.filter(pl.col("kind") == "host").select("lane", "process", "thread")
    events = trace.events.select("lane", "name", "category", "start_ns", "nested_end_ns")
    steps = pl.col("name").is_in(trace.steps["name"].unique().implode())
    out = []
    for lane, process, thread in host.iter_rows():
        lane_events = events.filter(pl.col("lane") == lane)
        on_host = pl.col("category").is_in([vocab.OP, vocab.ANNOTATION, vocab.COLLECTIVE])
        talking = on_host & pl.col("name").str.contains(f"^(?:{COMMUNICATION.pattern})")
        is_step_or_loading = on_host & (
            pl.col("name").str.contains(f"^(?:{STEP.pattern})$|{LOADING.pattern}") | steps
        )
        op_spans, visible_spans = (
            merge_intervals(events["start_ns"].to_numpy(), events["nested_end_ns"].to_numpy())
            for events in (
                lane_events.filter(
                    pl.col("category").is_in([vocab.OP, vocab.COLLECTIVE]) & ~is_step_or_loading
                ),
                lane_events.filter(pl.col("category").is_in(vocab.LAUNCHES) | talking),
            )
        )
        spans = subtract_spans(op_spans, visible_spans)
        borders = lane_events.filter(is_step_or_loading)
        if spans.start.size:
            # Split the time so that no piece crosses the boundary of a step or of data loading.
            cuts = np.unique(
                np.concatenate(
                    [borders["start_ns"].to_numpy(), borders["nested_end_ns"].to_numpy()]
                )
            )
            span_index = np.searchsorted(spans.start, cuts, side="right") - 1
            cuts = cuts[
                (span_index >= 0)
                & (cuts < spans.end[np.maximum(span_index, 0)])
                & (cuts > spans.start[np.maximum(span_index, 0)])
            ]
            borders_with_cuts = (
                np.sort(np.concatenate([side, cuts])) for side in (spans.start, spans.end)
            )
            out.append(FusedThread(process, thread, Spans(*borders_with_cuts)))
    return out


def format_microseconds(time_ns: int) -> bytes:
    """Nanoseconds as exact decimal microseconds."""
    if time_ns < 0:
        return b"-" + format_microseconds(-time_ns)
    micros, nanos = divmod(time_ns, 1000)
    return b"%d.%03d" % (micros, nanos) if nanos else b"%d" % micros


def build_border_events(first_ns: int, last_ns: int) -> list[bytes]:
    """Returns two zero-length events at the ends of the trace, whose first and last events may be
    dropped.
    """
    head = b'{"ph":"X","cat":"overhead","name":"Resource","pid":-1,"tid":0,"ts":'
    return [
        b"".join((head, format_microseconds(time_ns), b',"dur":0}'))
        for time_ns in (first_ns, last_ns)
    ]


def format_fused_events(
    threads: list[FusedThread], thread_ids: dict[tuple[str, str], bytes], origin_ns: int
) -> Iterator[list[bytes]]:
    """Yields the fused operators as events, some thousands at a time.

    Args:
        threads: From `merge_host_work`.
        thread_ids: (process, thread) -> `"pid":1,"tid":2` of the output.
        origin_ns: Subtracted from the times.
    """
    head = b'{"ph":"X","cat":"cpu_op","name":' + json.dumps(FUSED).encode() + b","
    for thread in threads:
        ids = thread_ids[thread.process, thread.thread]
        starts, end_ns = thread.spans.start - origin_ns, thread.spans.end - origin_ns
        for index in range(0, len(starts), _BATCH_EVENTS):
            pairs = zip(
                starts[index : index + _BATCH_EVENTS].tolist(),
                end_ns[index : index + _BATCH_EVENTS].tolist(),
                strict=True,
            )
            yield [
                b"".join(
                    (
                        head,
                        ids,
                        b',"ts":',
                        format_microseconds(start),
                        b',"dur":',
                        format_microseconds(end - start),
                        b"}",
                    )
                )
                for start, end in pairs
            ]


SUMMED = ("num_ops", "tensor_size")
_LANE = (
    "is_cpu_op",
    "tid",
    "stream",
    "device",
    "lane",
)  # where a node runs: processor, thread or stream


@dataclass(slots=True)
class Chains:
    """Chains of joined nodes.

    Attributes:
        head: Node -> first node of its chain, for all nodes but the first.
        duration_us: First node -> duration of the whole chain.
        sums: (first node, attribute) -> sum over the chain, for the attributes in `SUMMED`.
    """

    head: dict[int, int] = field(default_factory=dict)
    duration_us: Counter[int] = field(default_factory=Counter)
    sums: Counter[tuple[int, str]] = field(default_factory=Counter)

    def of(self, ids: list[int], node_id: int) -> list[int]:
        """Returns dependencies after joining, without duplicates and without the node itself."""
        return [
            node
            for node in dict.fromkeys(self.head.get(node, node) for node in ids)
            if node != node_id
        ]


def find_chains(path: Path) -> Chains:
    """Read a file and find its chains; takes a few hundred bytes of memory per node.

    Raises:
        InputError: The file is not a Chakra trace.
    """
    lanes: dict[int, tuple[Any, ...]] = {}
    waits: dict[int, tuple[tuple[int, ...], frozenset[int]]] = {}
    followers: Counter[int] = Counter()
    with EtReader(path) as reader:
        for node in reader:
            followers.update(set(node.ctrl_deps) | set(node.data_deps))
            if node.type == NodeType.COMP_NODE:
                values = {
                    attribute.name: getattr(attribute, attribute.WhichOneof("value") or "int64_val")
                    for attribute in node.attr
                    if attribute.name in _LANE
                }
                lanes[node.id] = tuple(values.get(name) for name in _LANE)
                waits[node.id] = (tuple(set(node.data_deps)), frozenset(node.ctrl_deps))
    before = {}
    for node_id, (data, control) in waits.items():
        first = data[0] if len(data) == 1 else None
        if (
            first is None
            or first == node_id
            or lanes.get(first) != lanes[node_id]
            or followers[first] != 1
        ):
            continue
        if control <= waits[first][1] | {first}:
            before[node_id] = first
    chains = Chains(_find_chain_heads(before))
    if not chains.head:
        return chains
    firsts = set(chains.head.values())
    with EtReader(path) as reader:
        for node in reader:
            head = chains.head.get(node.id, node.id if node.id in firsts else None)
            if head is None:
                continue
            chains.duration_us[head] += node.duration_micros
            for attribute in node.attr:
                if attribute.name in SUMMED:
                    chains.sums[head, attribute.name] += int(get_number(attribute))
    return chains


def _find_chain_heads(before: dict[int, int]) -> dict[int, int]:
    """Returns the first node of each chain by pointer doubling; cycles are left alone."""
    heads = dict(before)
    for start in before:
        visited: list[int] = []
        current = start
        while current in heads and len(visited) <= len(before):
            visited.append(current)
            current = heads[current]
            if current == start:
                break
        for node in visited:
            if current == start:
                heads.pop(node, None)
            else:
                heads[node] = current
    return heads


def get_number(attribute: AttributeProto) -> float:
    """Returns the number in an attribute; 0 if it has none."""
    value = getattr(attribute, attribute.WhichOneof("value") or "int64_val")
    return value if isinstance(value, (int, float)) and abs(value) < 2**64 else 0
