"""`--structure collapse` for device traces and Chakra.

The tree of operators, annotations and Python frames tells how a model is built. What is left is when a thread was in
any operator at all, so that launches, waits and idle time keep their causes.

A node is joined to the one it waits for where nothing else waits for that one and both run in the same place: then
the chain takes as long as its nodes together, whatever happens around it, so that times and dependencies stay.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Spans, difference, union
from traceloom.formats.chakra.et_pb2 import AttributeProto, NodeType
from traceloom.formats.chakra.files import EtReader
from traceloom.trace import vocabulary as cat
from traceloom.trace.trace import Trace
from traceloom.workload.anonymize.names import COMMUNICATION, LOADING, STEP

FUSED = "host_work"
_PIECE = 4096


@dataclass(frozen=True, slots=True)
class Fused:
    """The fused operators of one thread.

    Attributes:
        process, thread: As the file writes them.
        spans: When they ran.
    """

    process: str
    thread: str
    spans: Spans


def fused(trace: Trace) -> list[Fused]:
    """For each host thread the time inside operators, without launches and communication, which stay events."""
    host = trace.lanes.filter(pl.col("kind") == "host").select("lane", "process", "thread")
    events = trace.events.select("lane", "name", "category", "start_ns", "nested_end_ns")
    steps = pl.col("name").is_in(trace.steps["name"].unique().implode())
    out = []
    for lane, process, thread in host.iter_rows():
        of_lane = events.filter(pl.col("lane") == lane)
        on_host = pl.col("category").is_in([cat.OP, cat.ANNOTATION, cat.COLLECTIVE])
        talking = on_host & pl.col("name").str.contains(f"^(?:{COMMUNICATION.pattern})")
        around = on_host & (pl.col("name").str.contains(f"^(?:{STEP.pattern})$|{LOADING.pattern}") | steps)
        inside, shown = (
            union(events["start_ns"].to_numpy(), events["nested_end_ns"].to_numpy())
            for events in (
                of_lane.filter(pl.col("category").is_in([cat.OP, cat.COLLECTIVE]) & ~around),
                of_lane.filter(pl.col("category").is_in(cat.LAUNCHES) | talking),
            )
        )
        spans = difference(inside, shown)
        borders = of_lane.filter(around)
        if spans.start.size:
            # The same time in more pieces: none of them crosses a border of a step or of loading.
            cuts = np.unique(np.concatenate([borders["start_ns"].to_numpy(), borders["nested_end_ns"].to_numpy()]))
            at = np.searchsorted(spans.start, cuts, side="right") - 1
            cuts = cuts[(at >= 0) & (cuts < spans.end[np.maximum(at, 0)]) & (cuts > spans.start[np.maximum(at, 0)])]
            pieces = (np.sort(np.concatenate([side, cuts])) for side in (spans.start, spans.end))
            out.append(Fused(process, thread, Spans(*pieces)))
    return out


def microseconds(time_ns: int) -> bytes:
    """Nanoseconds as exact decimal microseconds."""
    if time_ns < 0:
        return b"-" + microseconds(-time_ns)
    micros, rest = divmod(time_ns, 1000)
    return b"%d.%03d" % (micros, rest) if rest else b"%d" % micros


def borders(first_ns: int, last_ns: int) -> list[bytes]:
    """Two events without length at the ends of the trace, which may have begun with what is left out."""
    head = b'{"ph":"X","cat":"overhead","name":"Resource","pid":-1,"tid":0,"ts":'
    return [b"".join((head, microseconds(at), b',"dur":0}')) for at in (first_ns, last_ns)]


def fused_events(threads: list[Fused], where: dict[tuple[str, str], bytes], origin_ns: int) -> Iterator[list[bytes]]:
    """The fused operators as events, some thousand at a time.

    Args:
        threads: From `fused`.
        where: (process, thread) -> `"pid":1,"tid":2` of the output.
        origin_ns: Subtracted from the times.
    """
    head = b'{"ph":"X","cat":"cpu_op","name":' + json.dumps(FUSED).encode() + b","
    for thread in threads:
        ids = where[thread.process, thread.thread]
        starts, ends = thread.spans.start - origin_ns, thread.spans.end - origin_ns
        for at in range(0, len(starts), _PIECE):
            pairs = zip(starts[at : at + _PIECE].tolist(), ends[at : at + _PIECE].tolist(), strict=True)
            yield [
                b"".join((head, ids, b',"ts":', microseconds(start), b',"dur":', microseconds(end - start), b"}"))
                for start, end in pairs
            ]


SUMMED = ("num_ops", "tensor_size")
_LANE = ("is_cpu_op", "tid", "stream", "device", "lane")  # where a node computes: processor, thread or stream


@dataclass(slots=True)
class Chains:
    """Which nodes are joined.

    Attributes:
        head: Node -> first node of its chain, for all others than the first.
        duration_us: First node -> duration of all of its chain.
        sums: (first node, attribute) -> sum over the chain, of `SUMMED`.
    """

    head: dict[int, int] = field(default_factory=dict)
    duration_us: Counter[int] = field(default_factory=Counter)
    sums: Counter[tuple[int, str]] = field(default_factory=Counter)

    def of(self, ids: list[int], own: int) -> list[int]:
        """Dependencies after joining: once each, and never on the node itself."""
        return [node for node in dict.fromkeys(self.head.get(node, node) for node in ids) if node != own]


def find_chains(path: Path) -> Chains:
    """Read a file and find its chains; takes some hundred bytes of memory per node.

    Raises:
        InputError: The file is no Chakra trace.
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
        if first is None or first == node_id or lanes.get(first) != lanes[node_id] or followers[first] != 1:
            continue
        if control <= waits[first][1] | {first}:
            before[node_id] = first
    chains = Chains(_heads(before))
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
                    chains.sums[head, attribute.name] += int(number_of(attribute))
    return chains


def _heads(before: dict[int, int]) -> dict[int, int]:
    """The first node of each chain, by steps that double; a chain that closes upon itself is left alone."""
    heads = dict(before)
    for start in before:
        trail: list[int] = []
        at = start
        while at in heads and len(trail) <= len(before):
            trail.append(at)
            at = heads[at]
            if at == start:
                break
        for node in trail:
            if at == start:
                heads.pop(node, None)
            else:
                heads[node] = at
    return heads


def number_of(attribute: AttributeProto) -> float:
    """The number that an attribute holds; 0 where it holds none."""
    value = getattr(attribute, attribute.WhichOneof("value") or "int64_val")
    return value if isinstance(value, (int, float)) and abs(value) < 2**64 else 0
