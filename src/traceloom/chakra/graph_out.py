"""Graph to `.et`: the nodes of a rank as wire bytes, made from columns, some ten thousand nodes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.chakra import graph_layout as layout
from traceloom.chakra import wire
from traceloom.chakra.dependencies import Dependencies, dependencies, written
from traceloom.chakra.et_pb2 import NodeType
from traceloom.chakra.graph_metadata import metadata_of
from traceloom.chakra.schema import GlobalMetadata
from traceloom.model.graph import Graph
from traceloom.model.graph_schema import COMMUNICATION, COPY, NODE_KINDS

WINDOW = 1 << 14  # nodes encoded together
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_COMMUNICATION = [NODE_KINDS.index(name) for name in COMMUNICATION]


@dataclass(frozen=True, slots=True)
class _Lists:
    """Numbers of many nodes: those of node `key[i]` are together, keys ascending; `width` numbers for each key."""

    key: Ints
    values: Ints
    width: int = 1

    def of(self, nodes: Ints) -> tuple[Ints, Ints]:
        """How many numbers each of the nodes (ascending) has, and all of them."""
        first = np.searchsorted(self.key, nodes, "left")
        last = np.searchsorted(self.key, nodes, "right")
        begin, end = (int(first[0]), int(last[-1])) if len(nodes) else (0, 0)
        inside: Any = np.isin(self.key[begin:end], nodes) if end - begin > (last - first).sum() else slice(None)
        values = self.values[begin * self.width : end * self.width].reshape(-1, self.width)[inside]
        return (last - first) * self.width, values.ravel()


class Outgoing:
    """A Graph that is being written; what concerns all ranks is worked out once.

    Args:
        graph: The graph; `graph.check()` holds for it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._written = written(graph)
        control, data = dependencies(graph)
        self._control, self._data = _lists(control), _lists(data)
        self._carried, self._loose_nodes, self._loose_edges = _carried(graph, self._written)
        self._in, self._out = self._edge_lists()
        self._hosts = _carriers(graph)
        # Of each lane, and last of nodes of no lane.
        self._of_host = np.append((graph.lanes["kind"] == "host").to_numpy(), True)
        lane_columns = {name: graph.lanes[name].extend_constant(None, 1) for name in ("device", "stream")}
        self._places = [
            wire.joined(table) for name, column in lane_columns.items() if (table := _numbers(name, column))
        ]
        self._beside = {
            "communication": _nodes_of(graph.communication),
            "transfers": _nodes_of(graph.transfers),
            "hosts": _nodes_of(self._hosts),
            "carried": _nodes_of(self._carried),
        }

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a file, ascending."""
        return sorted({*self.graph.nodes["rank"].unique().to_list(), *self.graph.ranks["rank"].to_list()})

    def metadata(self, rank: int) -> GlobalMetadata:
        """The first message of the file of a rank."""
        loose = self._loose_edges.join(self.graph.nodes.select("node", "rank"), left_on="target", right_on="node")
        return metadata_of(
            self.graph,
            rank,
            self._loose_nodes.filter(pl.col("rank") == rank),
            loose.filter(pl.col("rank") == rank).drop("rank"),
        )

    def windows(self, rank: int) -> Iterator[tuple[int, bytes]]:
        """The nodes of a rank, ascending by id: how many, and their messages with their lengths."""
        rows = self.graph.nodes.filter(pl.Series(self._written) & (self.graph.nodes["rank"] == rank))
        for at in range(0, rows.height, WINDOW):
            window = rows.slice(at, WINDOW)
            yield window.height, wire.framed(self._fields(window))
        bare = self._hosts.filter((pl.col("rank") == rank) & pl.col("node").is_null())
        for at in range(0, bare.height, WINDOW):
            window = bare.slice(at, WINDOW)
            yield window.height, self._bare(window)

    def _edge_lists(self) -> tuple[_Lists, _Lists]:
        edges = self.graph.edges
        source, target = (edges[name].to_numpy().astype(np.int64) for name in ("source", "target"))
        code = layout.edge_code(edges).to_numpy()
        delay, residual = edges["delay_ns"].to_numpy(), edges["residual_ns"].to_numpy()
        into, out = self._written[target], self._written[source] & ~self._written[target]

        def lists(rows: Flags, key: Ints, other: Ints) -> _Lists:
            order = np.flatnonzero(rows)[np.argsort(key[rows], kind="stable")]
            values = np.stack([other[order], code[order], delay[order], residual[order]], axis=1)
            return _Lists(key[order], values.ravel(), layout.PER_EDGE)

        return lists(into, target, source), lists(out, source, target)

    def _fields(self, nodes: pl.DataFrame) -> list[wire.Rows]:
        """All fields of some nodes of one rank."""
        ids = nodes["node"].to_numpy().astype(np.int64)
        kind = nodes["kind"].to_physical().to_numpy()
        transfer = self._joined(nodes.select("node"), ids, "transfers", self.graph.transfers)
        host = self._joined(nodes.select("node", node_name="name"), ids, "hosts", self._hosts)
        types: Ints = np.array([int(layout.NODE_TYPES.get(name, NodeType.COMP_NODE)) for name in NODE_KINDS])[kind]
        if transfer is not None:
            stores = transfer["kind"].is_in(layout.STORES).fill_null(value=False).to_numpy()
            types[stores & (kind == NODE_KINDS.index(COPY))] = int(NodeType.MEM_STORE_NODE)
        start = nodes["start_ns"].to_numpy()
        end = start + nodes["duration_ns"].to_numpy()
        micros = np.maximum(start, 0) // 1000
        return [
            wire.number_field(b"\x08", ids),
            wire.delimited(b"\x12", wire.texts(nodes["name"])),
            wire.number_field(b"\x18", types),
            wire.packed_field(b"\x22", *self._control.of(ids)),
            wire.packed_field(b"\x2a", *self._data.of(ids)),
            wire.number_field(b"\x30", micros),
            # Whole microseconds of a chain of nodes add up to those of the chain: no rounding gathers.
            wire.number_field(b"\x38", np.maximum(end, 0) // 1000 - micros),
            *([] if host is None else [_tensors(b"\x42", host, layout.HOST_INPUTS)]),
            *([] if host is None else [_tensors(b"\x4a", host, layout.HOST_OUTPUTS)]),
            *self._node_attributes(nodes, types),
            *self._communication_attributes(nodes, ids, kind),
            *_transfer_attributes(transfer, nodes, types),
            *([] if host is None else _host_attributes(host)),
            *self._edge_attributes(ids),
        ]

    def _joined(self, nodes: pl.DataFrame, ids: Ints, name: str, beside: pl.DataFrame) -> pl.DataFrame | None:
        """The rows of a side frame for these nodes (ascending), null where a node has none; None if none has any."""
        nodes_beside = self._beside[name]
        if np.searchsorted(nodes_beside, ids[0]) == np.searchsorted(nodes_beside, ids[-1], "right"):
            return None
        return _beside(nodes, beside)

    def _node_attributes(self, nodes: pl.DataFrame, types: Ints) -> Iterator[wire.Rows]:
        lane = nodes["lane"].fill_null(self.graph.lanes.height).to_numpy()
        # What other tools call a CPU node: compute of the host. Communication is none, wherever it ran.
        yield _kind_attributes(nodes, self._of_host[lane] & ~np.isin(types, layout.COMMUNICATION_TYPES))
        changed = {
            "work_ns": (nodes["work_ns"] != nodes["duration_ns"]).to_numpy(),
            "residual_ns": (nodes["residual_ns"] != 0).to_numpy(),
        }
        yield from _columns(nodes, layout.NODE_NUMBERS, changed)
        yield from (wire.picked(table, lane) for table in self._places)

    def _communication_attributes(self, nodes: pl.DataFrame, ids: Ints, kind: Ints) -> Iterator[wire.Rows]:
        frame = nodes.select("node", "rank", _kind=pl.col("kind"))
        joined = self._joined(frame, ids, "communication", self.graph.communication)
        if joined is not None:
            yield from _communication_attributes(joined, nodes)
        elif np.isin(kind, _COMMUNICATION).any():
            yield from _communication_attributes(_beside(frame, self.graph.communication.clear()), nodes)

    def _edge_attributes(self, ids: Ints) -> Iterator[wire.Rows]:
        for name, lists in ((layout.EDGES, self._in), (layout.EDGES_OUT, self._out)):
            counts, values = lists.of(ids)
            yield from wire.number_list_attribute(name, "sint64_list", counts, values, counts > 0)
        carried = self._joined(pl.DataFrame({"node": ids}, schema={"node": pl.UInt32}), ids, "carried", self._carried)
        if carried is not None:
            yield from wire.text_attribute(layout.CARRIED_NODES, carried["rows"])

    def _bare(self, ops: pl.DataFrame) -> bytes:
        """Host ops that no node stands for: metadata nodes, whose ids come after those of all other nodes."""
        ids = ops["row"].cast(pl.Int64).to_numpy() + self.graph.nodes.height
        ops = ops.with_columns(node_name=pl.col("name"))
        return wire.framed(
            [
                wire.number_field(b"\x08", ids),
                wire.delimited(b"\x12", wire.texts(ops["name"])),
                wire.number_field(b"\x18", np.full(ops.height, int(NodeType.METADATA_NODE))),
                _tensors(b"\x42", ops, layout.HOST_INPUTS),
                _tensors(b"\x4a", ops, layout.HOST_OUTPUTS),
                *_host_attributes(ops),
            ]
        )


def _beside(nodes: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    return nodes.join(frame, on="node", how="left", maintain_order="left", coalesce=False, suffix="_there")


def _lists(pairs: Dependencies) -> _Lists:
    return _Lists(pairs.target, pairs.source)


def _numbers(name: str, values: pl.Series, present: Flags | None = None) -> list[wire.Rows]:
    missing = values.null_count()
    if missing == len(values):
        return []
    if present is None:
        present = values.is_not_null().to_numpy() if missing else np.ones(len(values), np.bool_)
    whole = values.cast(pl.Int64)
    return wire.number_attribute(name, "int64_val", (whole.fill_null(0) if missing else whole).to_numpy(), present)


def _columns(frame: pl.DataFrame, columns: dict[str, str], present: dict[str, Flags]) -> Iterator[wire.Rows]:
    """Like `_numbers`, for several columns (by attribute name) at once."""
    missing = {name: frame[column].null_count() for name, column in columns.items()}
    filled = [name for name in columns if missing[name] < frame.height]
    whole = {name: pl.col(columns[name]).cast(pl.Int64) for name in filled}
    values = frame.select(
        **{name: column.fill_null(0) if missing[name] else column for name, column in whole.items()},
        **{f"{name} there": pl.col(columns[name]).is_not_null() for name in filled if missing[name]},
    )
    everywhere = np.ones(frame.height, np.bool_)
    for name in filled:
        flags = present.get(name)
        if flags is None:
            flags = values[f"{name} there"].to_numpy() if missing[name] else everywhere
        yield from wire.number_attribute(name, "int64_val", values[name].to_numpy(), flags)


def _kind_attributes(nodes: pl.DataFrame, cpu: Flags) -> wire.Rows:
    """`is_cpu_op` and what kind a node is: few differ, so that each combination is spelled once."""
    texts = [nodes[column] for column in layout.NODE_TEXTS.values()]
    key = cpu.astype(np.int64)
    for text in texts:
        codes = text.to_physical().cast(pl.Int64).fill_null(-1).to_numpy() + 1
        key = key * (int(codes.max(initial=0)) + 1) + codes
    _, example, number = np.unique(key, return_index=True, return_inverse=True)
    few = nodes.select(list(layout.NODE_TEXTS.values()))[example].cast(pl.String)
    parts = wire.number_attribute("is_cpu_op", "bool_val", cpu[example].astype(np.int64), np.ones(len(few), np.bool_))
    for name, column in layout.NODE_TEXTS.items():
        parts += wire.text_attribute(name, few[column])
    return wire.picked(wire.joined(parts), number)


def _nodes_of(frame: pl.DataFrame) -> Ints:
    """The nodes that have a row in a frame, ascending."""
    return frame["node"].drop_nulls().cast(pl.Int64).sort().to_numpy()


def _communication_attributes(frame: pl.DataFrame, nodes: pl.DataFrame) -> Iterator[wire.Rows]:
    """Attributes that simulators and feeders read, then whatever else the graph holds."""
    has_row = frame["node_there"].is_not_null()
    kind = nodes["kind"].cast(pl.String)
    if not has_row.any() and not kind.is_in(COMMUNICATION).any():
        return
    sends, receives = kind == "send", kind == "receive"
    comm_type = frame["kind"].replace_strict(
        {name: int(number) for name, number in layout.COMM_TYPES.items()}, default=None, return_dtype=pl.Int64
    )
    yield from _numbers("comm_type", comm_type.set((kind != "collective"), None))
    yield from _numbers("comm_size", _comm_size(frame, nodes, receives))
    rank, peer = nodes["rank"].cast(pl.Int64), frame["peer"].cast(pl.Int64)
    ends = pl.DataFrame({"rank": rank, "peer": peer, "sends": sends, "receives": receives, "tag": frame["tag"]}).select(
        comm_src=pl.when("sends").then("rank").when("receives").then("peer"),
        comm_dst=pl.when("sends").then("peer").when("receives").then("rank"),
        comm_tag=pl.when((pl.col("sends") | pl.col("receives")) & pl.col("tag").is_between(-(2**31), 2**31 - 1)).then(
            "tag"
        ),
    )
    for name in ends.columns:
        present = ends[name].is_not_null().to_numpy()
        yield from wire.number_attribute(name, "int32_val", ends[name].fill_null(0).to_numpy(), present)
    for name, column in layout.COMMUNICATION_TEXTS.items():
        yield from wire.text_attribute(name, frame[column])
    yield from wire.bare_attribute(layout.ROW_OF_COMMUNICATION, (has_row & frame["kind"].is_null()).to_numpy())
    for name, column in layout.COMMUNICATION_NUMBERS.items():
        yield from _numbers(name, frame[column])
    for name, column in layout.COMMUNICATION_LISTS.items():
        yield from wire.list_attribute(name, "int64_list", frame[column])


def _comm_size(frame: pl.DataFrame, nodes: pl.DataFrame, receives: pl.Series) -> pl.Series:
    """Bytes as simulators count them: what this rank puts in; what comes out, of a receive or where nothing goes in."""
    sizes = frame.select("in_bytes", "out_bytes", "kind").with_columns(bytes=nodes["bytes"], receives=receives)
    into, out = pl.col("in_bytes"), pl.col("out_bytes")
    first = pl.when((into > 0) & ~pl.col("receives")).then(into).otherwise(pl.coalesce(out, into))
    is_part = nodes["kind"].cast(pl.String).is_in(["collective", "send", "receive"])
    return sizes.select(pl.when(pl.lit(is_part)).then(pl.coalesce(first, "bytes"))).to_series()


def _transfer_attributes(frame: pl.DataFrame | None, nodes: pl.DataFrame, types: Ints) -> Iterator[wire.Rows]:
    moved = np.isin(types, [int(NodeType.MEM_LOAD_NODE), int(NodeType.MEM_STORE_NODE)])
    has_size = moved & nodes["bytes"].is_not_null().to_numpy()
    if has_size.any():
        yield from wire.number_attribute("tensor_size", "uint64_val", nodes["bytes"].fill_null(0).to_numpy(), has_size)
    if frame is None or frame["node_there"].null_count() == frame.height:
        return
    has_row = frame["node_there"].is_not_null()
    for name, column in layout.TRANSFER_TEXTS.items():
        yield from wire.text_attribute(name, frame[column])
    yield from wire.bare_attribute(layout.ROW_OF_TRANSFER, (has_row & frame["kind"].is_null()).to_numpy())


def _host_attributes(frame: pl.DataFrame) -> Iterator[wire.Rows]:
    if frame["row"].null_count() == frame.height:
        return
    for name, column in layout.HOST_NUMBERS.items():
        yield from _numbers(name, frame[column])
    renamed = frame.select(pl.when(pl.col("name").ne_missing(pl.col("node_name"))).then("name")).to_series()
    for name, column in layout.HOST_TEXTS.items():
        yield from wire.text_attribute(name, renamed if name == "host_name" else frame[column])


def _tensors(tag: bytes, frame: pl.DataFrame, columns: tuple[str, str, str]) -> wire.Rows:
    """The IOInfo of host ops: values, shapes and types as JSON text."""
    if frame["row"].null_count() == frame.height:
        return wire.nothing(frame.height)
    parts = [
        wire.delimited(key, wire.texts(frame[name]))
        for key, name in zip((b"\x0a", b"\x12", b"\x1a"), columns, strict=True)
    ]
    return wire.delimited(tag, wire.joined(parts))


def _carriers(graph: Graph) -> pl.DataFrame:
    """Host ops with their row and the node that stands for them: the first of each op; null where there is none."""
    first = (
        graph.nodes.filter(pl.col("host_op").is_not_null() & ~pl.col("kind").is_in(layout.CARRIED))
        .select("rank", "host_op", "node")
        .unique(["rank", "host_op"], keep="first", maintain_order=True)
    )
    ops = graph.host_ops.with_row_index("row").with_columns(first=pl.struct("rank", "id").is_first_distinct())
    carriers = ops.join(first, left_on=["rank", "id"], right_on=["rank", "host_op"], how="left", maintain_order="left")
    return carriers.with_columns(node=pl.when("first").then("node")).drop("first")


def _carried(graph: Graph, solid: Flags) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Rows of nodes that are not written, by the node that carries them (`rows`: JSON), then what nobody carries."""
    flags = graph.nodes.select("node", "rank", solid=pl.Series(solid))
    edges = graph.edges.select("source", "target")
    neighbours = pl.concat([edges, edges.select(source="target", target="source")])
    kept = (
        neighbours.join(flags.filter(~pl.col("solid")).select(source="node"), on="source")
        .join(flags.filter("solid").select(target="node", rank="rank"), on="target")
        .group_by("source", "rank")
        .agg(pl.col("target").min())
    )
    text = graph.nodes.join(kept.select(node="source").unique(), on="node").select(
        "node", row=pl.struct(layout.CARRIED_COLUMNS).struct.json_encode()
    )
    rows = (
        kept.join(text, left_on="source", right_on="node")
        .sort("target", "source")
        .group_by(node="target", maintain_order=True)
        .agg(("[" + pl.col("row").str.join(",") + "]").alias("rows"))
    )
    alone = graph.nodes.filter(~pl.Series(solid)).join(kept, left_on="node", right_on="source", how="anti")
    unwritten = flags.filter(~pl.col("solid")).select("node")
    between = graph.edges.join(unwritten, left_on="source", right_on="node", how="semi").join(
        unwritten, left_on="target", right_on="node", how="semi"
    )
    return rows, alone, between
