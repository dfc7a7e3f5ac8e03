"""`--structure collapse` for Chakra files: chains of computation become one node each.

A node is joined to the one it waits for where nothing else waits for that one and both run in the same place: then
the chain takes as long as its nodes together, whatever happens around it, so that times and dependencies stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceloom.chakra.schema import AttributeProto, NodeType
from traceloom.chakra.stream import EtReader

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
