"""Encoding a graph as `.et`: the nodes of a rank as wire bytes, built from columns in windows of
`WINDOW` nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from traceloom.formats.chakra import encode
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, NodeType
from traceloom.graph.graph import COMMUNICATION, COPY, NODE_KINDS, Graph
from traceloom.trace.array_types import Bools, Ints
from traceloom.workload.chakra import graph_layout as layout
from traceloom.workload.chakra.graph_layout import build_metadata

WINDOW = 1 << 14  # nodes encoded together

_COMMUNICATION = [NODE_KINDS.index(name) for name in COMMUNICATION]


@dataclass(frozen=True, slots=True)
class _NumberLists:
    """Lists of numbers of many nodes: those of node `key[i]` are contiguous, keys ascending;
    `width` numbers for each key.
    """

    key: Ints
    values: Ints
    width: int = 1

    def of(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Returns how many numbers each of the nodes (ascending) has, and all of them."""
        first = np.searchsorted(self.key, nodes, "left")
        last = np.searchsorted(self.key, nodes, "right")
        start, end = (int(first[0]), int(last[-1])) if len(nodes) else (0, 0)
        in_nodes: Any = (
            np.isin(self.key[start:end], nodes)
            if end - start > (last - first).sum()
            else slice(None)
        )
        values = self.values[start * self.width : end * self.width].reshape(-1, self.width)[
            in_nodes
        ]
        return (last - first) * self.width, values.ravel()


class GraphWriter:
    """A Graph that is being written; data shared by all ranks are computed once.

    Args:
        graph: The graph; `graph.check()` holds for it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._written: Bools = (
            graph.nodes.select(~pl.col("kind").is_in(layout.CARRIED)).to_series().to_numpy()
        )
        self._control, self._data = find_dependencies(graph, self._written)
        # Rows of unwritten nodes, by the node that carries them (`rows`: JSON), then those that no
        # node carries.
        flags = graph.nodes.select("node", "rank", written=pl.Series(self._written))
        edge_ends = graph.edges.select("source", "target")
        neighbours = pl.concat([edge_ends, edge_ends.select(source="target", target="source")])
        carried_pairs = (
            neighbours.join(flags.filter(~pl.col("written")).select(source="node"), on="source")
            .join(flags.filter("written").select(target="node", rank="rank"), on="target")
            .group_by("source", "rank")
            .agg(pl.col("target").min())
        )
        text = graph.nodes.join(carried_pairs.select(node="source").unique(), on="node").select(
            "node", row=pl.struct(layout.CARRIED_COLUMNS).struct.json_encode()
        )
        self._carried = (
            carried_pairs.join(text, left_on="source", right_on="node")
            .sort("target", "source")
            .group_by(node="target", maintain_order=True)
            .agg(("[" + pl.col("row").str.join(",") + "]").alias("rows"))
        )
        unwritten = graph.nodes.filter(~pl.Series(self._written))
        self._loose_nodes = unwritten.join(
            carried_pairs, left_on="node", right_on="source", how="anti"
        )
        unwritten = unwritten.select("node")
        self._loose_edges = graph.edges.join(
            unwritten, left_on="source", right_on="node", how="semi"
        ).join(unwritten, left_on="target", right_on="node", how="semi")
        # The edges of written nodes by target; then those from written to unwritten nodes, by
        # source.
        source, target = (
            graph.edges[name].to_numpy().astype(np.int64) for name in ("source", "target")
        )
        code = graph.edges.select(
            pl.col("kind").to_physical().cast(pl.Int64) * 16
            + pl.col("evidence").to_physical().cast(pl.Int64) * 4
            + pl.col("from_end").cast(pl.Int64) * 2
            + pl.col("to_end").cast(pl.Int64)
        )["kind"].to_numpy()
        delay, residual = graph.edges["delay_ns"].to_numpy(), graph.edges["residual_ns"].to_numpy()
        enters_written, out = self._written[target], self._written[source] & ~self._written[target]
        lists = []
        for rows, key, other in ((enters_written, target, source), (out, source, target)):
            order = np.flatnonzero(rows)[np.argsort(key[rows], kind="stable")]
            values = np.stack([other[order], code[order], delay[order], residual[order]], axis=1)
            lists.append(_NumberLists(key[order], values.ravel(), layout.PER_EDGE))
        self._in, self._out = lists
        # Host ops with their row and the node that represents them: the first of each op, else
        # null.
        first = (
            graph.nodes.filter(
                pl.col("host_op").is_not_null() & ~pl.col("kind").is_in(layout.CARRIED)
            )
            .select("rank", "host_op", "node")
            .unique(["rank", "host_op"], keep="first", maintain_order=True)
        )
        hosts = (
            graph.host_ops.with_row_index("row")
            .with_columns(first=pl.struct("rank", "id").is_first_distinct())
            .join(
                first,
                left_on=["rank", "id"],
                right_on=["rank", "host_op"],
                how="left",
                maintain_order="left",
            )
        )
        self._hosts = hosts.with_columns(node=pl.when("first").then("node")).drop("first")
        # Per lane, with an extra entry for nodes without a lane.
        self._of_host = np.append((graph.lanes["kind"] == "host").to_numpy(), True)
        lane_columns = {
            name: graph.lanes[name].extend_constant(None, 1) for name in ("device", "stream")
        }
        self._places = [
            encode.join_columns(table)
            for name, column in lane_columns.items()
            if (table := _encode_numbers(name, column))
        ]
        self._beside = {
            "communication": graph.communication,
            "transfers": graph.transfers,
            "foreign": graph.foreign,
            "hosts": self._hosts,
            "carried": self._carried,
        }
        self._nodes_beside = {
            name: frame["node"].drop_nulls().cast(pl.Int64).sort().to_numpy()
            for name, frame in self._beside.items()
        }

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a file, ascending."""
        return sorted(
            {*self.graph.nodes["rank"].unique().to_list(), *self.graph.ranks["rank"].to_list()}
        )

    def metadata(self, rank: int) -> GlobalMetadata:
        """Returns the first message of the file of a rank."""
        loose = self._loose_edges.join(
            self.graph.nodes.select("node", "rank"), left_on="target", right_on="node"
        )
        return build_metadata(
            self.graph,
            rank,
            self._loose_nodes.filter(pl.col("rank") == rank),
            loose.filter(pl.col("rank") == rank).drop("rank"),
        )

    def windows(self, rank: int) -> Iterator[tuple[int, bytes]]:
        """Yields the nodes of a rank in windows, ascending by id: their number, and their
        length-prefixed messages.
        """
        rows = self.graph.nodes.filter(
            pl.Series(self._written) & (self.graph.nodes["rank"] == rank)
        )
        for start_row in range(0, rows.height, WINDOW):
            window = rows.slice(start_row, WINDOW)
            yield window.height, encode.encode_messages(self._fields(window))
        unlinked_ops = self._hosts.filter((pl.col("rank") == rank) & pl.col("node").is_null())
        for start_row in range(0, unlinked_ops.height, WINDOW):
            # Host ops without a node become metadata nodes, with ids after those of all other
            # nodes.
            ops = unlinked_ops.slice(start_row, WINDOW).with_columns(node_name=pl.col("name"))
            rows_of_ops = [
                encode.encode_number_field(
                    b"\x08", ops["row"].cast(pl.Int64).to_numpy() + self.graph.nodes.height
                ),
                encode.encode_delimited(b"\x12", encode.encode_texts(ops["name"])),
                encode.encode_number_field(
                    b"\x18", np.full(ops.height, int(NodeType.METADATA_NODE))
                ),
                _encode_tensors(b"\x42", ops, layout.HOST_INPUTS),
                _encode_tensors(b"\x4a", ops, layout.HOST_OUTPUTS),
                *_encode_host_attributes(ops),
            ]
            yield ops.height, encode.encode_messages(rows_of_ops)

    def _fields(self, nodes: pl.DataFrame) -> list[encode.ByteRows]:
        ids = nodes["node"].to_numpy().astype(np.int64)
        kind = nodes["kind"].to_physical().to_numpy()
        transfer = self._joined(nodes.select("node"), ids, "transfers")
        host = self._joined(nodes.select("node", node_name="name"), ids, "hosts")
        types: Ints = np.array(
            [int(layout.NODE_TYPES.get(name, NodeType.COMP_NODE)) for name in NODE_KINDS]
        )[kind]
        if transfer is not None:
            stores = transfer["kind"].is_in(layout.STORES).fill_null(value=False).to_numpy()
            types[stores & (kind == NODE_KINDS.index(COPY))] = int(NodeType.MEM_STORE_NODE)
        if (foreign := self._joined(nodes.select("node"), ids, "foreign")) is not None:
            types = foreign["type"].fill_null(pl.Series(types)).to_numpy()
        start = nodes["start_ns"].to_numpy()
        end = start + nodes["duration_ns"].to_numpy()
        micros = np.maximum(start, 0) // 1000
        fields = [
            encode.encode_number_field(b"\x08", ids),
            encode.encode_delimited(b"\x12", encode.encode_texts(nodes["name"])),
            encode.encode_number_field(b"\x18", types),
            encode.encode_packed_field(b"\x22", *self._control.of(ids)),
            encode.encode_packed_field(b"\x2a", *self._data.of(ids)),
            encode.encode_number_field(b"\x30", micros),
            # The microseconds of a chain of nodes add up to those of the chain, so that no rounding
            # error accumulates.
            encode.encode_number_field(b"\x38", np.maximum(end, 0) // 1000 - micros),
            *([] if host is None else [_encode_tensors(b"\x42", host, layout.HOST_INPUTS)]),
            *([] if host is None else [_encode_tensors(b"\x4a", host, layout.HOST_OUTPUTS)]),
            *self._node_attributes(nodes, types),
        ]
        communication = self._joined(nodes.select("node"), ids, "communication")
        if communication is not None or np.isin(kind, _COMMUNICATION).any():
            if communication is None:
                communication = _join_rows(nodes.select("node"), self.graph.communication.clear())
            fields += _encode_communication(communication, nodes)
        moved = np.isin(types, [int(NodeType.MEM_LOAD_NODE), int(NodeType.MEM_STORE_NODE)])
        has_size = moved & nodes["bytes"].is_not_null().to_numpy()
        if has_size.any():
            fields += encode.encode_number_attribute(
                "tensor_size", "uint64_val", nodes["bytes"].fill_null(0).to_numpy(), has_size
            )
        if transfer is not None and transfer["node_there"].null_count() < transfer.height:
            for name, column in layout.TRANSFER_TEXTS.items():
                fields += encode.encode_text_attribute(name, transfer[column])
            is_bare = (transfer["node_there"].is_not_null() & transfer["kind"].is_null()).to_numpy()
            fields += encode.encode_bare_attribute(layout.TRANSFER_MARKER, is_bare)
        fields += [] if host is None else _encode_host_attributes(host)
        if foreign is not None:
            fields += [
                *_encode_numbers(layout.FOREIGN_ID, foreign["id"].reinterpret(signed=True)),
                encode.encode_binary(foreign["attributes"]),
            ]
        for name, lists in ((layout.EDGES, self._in), (layout.EDGES_OUT, self._out)):
            counts, values = lists.of(ids)
            fields += encode.encode_number_list_attribute(
                name, "sint64_list", counts, values, counts > 0
            )
        carried = self._joined(
            pl.DataFrame({"node": ids}, schema={"node": pl.UInt32}), ids, "carried"
        )
        return fields + (
            []
            if carried is None
            else encode.encode_text_attribute(layout.CARRIED_NODES, carried["rows"])
        )

    def _joined(self, nodes: pl.DataFrame, ids: Ints, name: str) -> pl.DataFrame | None:
        """Returns the rows of a side frame for these nodes (ascending), null where a node has none;
        None if no node has any.
        """
        node_ids = self._nodes_beside[name]
        if np.searchsorted(node_ids, ids[0]) == np.searchsorted(node_ids, ids[-1], "right"):
            return None
        return _join_rows(nodes, self._beside[name])

    def _node_attributes(self, nodes: pl.DataFrame, types: Ints) -> Iterator[encode.ByteRows]:
        lane = nodes["lane"].fill_null(self.graph.lanes.height).to_numpy()
        # Other tools call only host computation a CPU node, never communication, wherever it ran.
        cpu = self._of_host[lane] & ~np.isin(types, layout.COMMUNICATION_TYPES)
        # `is_cpu_op` and the kind of a node have few combinations, so each is encoded once.
        key = cpu.astype(np.int64)
        for column in layout.NODE_TEXTS.values():
            codes = nodes[column].to_physical().cast(pl.Int64).fill_null(-1).to_numpy() + 1
            key = key * (int(codes.max(initial=0)) + 1) + codes
        _, example, number = np.unique(key, return_index=True, return_inverse=True)
        distinct_texts = nodes.select(list(layout.NODE_TEXTS.values()))[example].cast(pl.String)
        parts = encode.encode_number_attribute(
            "is_cpu_op",
            "bool_val",
            cpu[example].astype(np.int64),
            np.ones(len(distinct_texts), np.bool_),
        )
        for name, column in layout.NODE_TEXTS.items():
            parts += encode.encode_text_attribute(name, distinct_texts[column])
        yield encode.pick_rows(encode.join_columns(parts), number)
        changed = {
            "work_ns": (nodes["work_ns"] != nodes["duration_ns"]).to_numpy(),
            "residual_ns": (nodes["residual_ns"] != 0).to_numpy(),
        }
        # Encode all numbers of the nodes at once.
        missing = {name: nodes[column].null_count() for name, column in layout.NODE_NUMBERS.items()}
        filled = [name for name in layout.NODE_NUMBERS if missing[name] < nodes.height]
        number_columns = {name: pl.col(layout.NODE_NUMBERS[name]).cast(pl.Int64) for name in filled}
        values = nodes.select(
            **{
                name: column.fill_null(0) if missing[name] else column
                for name, column in number_columns.items()
            },
            **{
                f"{name} there": pl.col(layout.NODE_NUMBERS[name]).is_not_null()
                for name in filled
                if missing[name]
            },
        )
        all_nodes = np.ones(nodes.height, np.bool_)
        for name in filled:
            flags = changed.get(name)
            if flags is None:
                flags = values[f"{name} there"].to_numpy() if missing[name] else all_nodes
            yield from encode.encode_number_attribute(
                name, "int64_val", values[name].to_numpy(), flags
            )
        yield from (encode.pick_rows(table, lane) for table in self._places)


def _join_rows(nodes: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    return nodes.join(
        frame, on="node", how="left", maintain_order="left", coalesce=False, suffix="_there"
    )


def _encode_numbers(
    name: str, values: pl.Series, present: Bools | None = None
) -> list[encode.ByteRows]:
    missing = values.null_count()
    if missing == len(values):
        return []
    if present is None:
        present = values.is_not_null().to_numpy() if missing else np.ones(len(values), np.bool_)
    integers = values.cast(pl.Int64)
    return encode.encode_number_attribute(
        name, "int64_val", (integers.fill_null(0) if missing else integers).to_numpy(), present
    )


def _encode_communication(frame: pl.DataFrame, nodes: pl.DataFrame) -> Iterator[encode.ByteRows]:
    """Yields attributes that simulators and feeders read, then the other fields of the graph."""
    has_row = frame["node_there"].is_not_null()
    kind = nodes["kind"].cast(pl.String)
    if not has_row.any() and not kind.is_in(COMMUNICATION).any():
        return
    sends, receives = kind == "send", kind == "receive"
    comm_type = frame["kind"].replace_strict(
        {name: int(number) for name, number in layout.COMM_TYPES.items()},
        default=None,
        return_dtype=pl.Int64,
    )
    yield from _encode_numbers("comm_type", comm_type.set((kind != "collective"), None))
    # Bytes as simulators count them: the rank's input; the output for a receive or without input.
    sizes = frame.select("in_bytes", "out_bytes").with_columns(
        bytes=nodes["bytes"], receives=receives
    )
    in_bytes, out = pl.col("in_bytes"), pl.col("out_bytes")
    size = (
        pl.when((in_bytes > 0) & ~pl.col("receives"))
        .then(in_bytes)
        .otherwise(pl.coalesce(out, in_bytes))
    )
    is_part = pl.lit(kind.is_in(["collective", "send", "receive"]))
    yield from _encode_numbers(
        "comm_size", sizes.select(pl.when(is_part).then(pl.coalesce(size, "bytes"))).to_series()
    )
    rank, peer = nodes["rank"].cast(pl.Int64), frame["peer"].cast(pl.Int64)
    endpoints = pl.DataFrame(
        {
            "rank": rank,
            "peer": peer,
            "sends": sends,
            "receives": receives,
            "tag": frame["tag"].fill_null(0),  # PyTorch's default, which NCCL never changes
        }
    ).select(
        comm_src=pl.when("sends").then("rank").when("receives").then("peer"),
        comm_dst=pl.when("sends").then("peer").when("receives").then("rank"),
        comm_tag=pl.when(
            (pl.col("sends") | pl.col("receives")) & pl.col("tag").is_between(-(2**31), 2**31 - 1)
        ).then("tag"),
    )
    for name in endpoints.columns:
        present = endpoints[name].is_not_null().to_numpy()
        yield from encode.encode_number_attribute(
            name, "int32_val", endpoints[name].fill_null(0).to_numpy(), present
        )
    for name, column in layout.COMMUNICATION_TEXTS.items():
        yield from encode.encode_text_attribute(name, frame[column])
    yield from encode.encode_bare_attribute(
        layout.COMMUNICATION_MARKER, (has_row & frame["kind"].is_null()).to_numpy()
    )
    for name, column in layout.COMMUNICATION_NUMBERS.items():
        yield from _encode_numbers(name, frame[column])
    for name, column in layout.COMMUNICATION_LISTS.items():
        yield from encode.encode_list_attribute(name, "int64_list", frame[column])


def _encode_host_attributes(frame: pl.DataFrame) -> Iterator[encode.ByteRows]:
    if frame["row"].null_count() == frame.height:
        return
    for name, column in layout.HOST_NUMBERS.items():
        yield from _encode_numbers(name, frame[column])
    renamed = frame.select(
        pl.when(pl.col("name").ne_missing(pl.col("node_name"))).then("name")
    ).to_series()
    for name, column in layout.HOST_TEXTS.items():
        yield from encode.encode_text_attribute(
            name, renamed if name == "host_name" else frame[column]
        )


def _encode_tensors(
    tag: bytes, frame: pl.DataFrame, columns: tuple[str, str, str]
) -> encode.ByteRows:
    """Returns the IOInfo of host ops: values, shapes and types as JSON text."""
    if frame["row"].null_count() == frame.height:
        return encode.build_empty_rows(frame.height)
    parts = [
        encode.encode_delimited(key, encode.encode_texts(frame[name]))
        for key, name in zip((b"\x0a", b"\x12", b"\x1a"), columns, strict=True)
    ]
    return encode.encode_delimited(tag, encode.join_columns(parts))


def find_dependencies(graph: Graph, solid: Bools) -> Iterator[_NumberLists]:
    """Yields control, then data dependencies between written nodes of the same rank, without
    cycles.

    Chakra has one relation: a node starts after other nodes have ended. An edge of a Graph is more
    specific (from start or end, to start or end), so:
    - end to start is a dependency; a `call` edge is a control dependency, everything else a data
      dependency;
    - a launch, which holds from the start of the call, is one too: all Chakra tools start the work
      after its call;
    - an edge to the *end* of a node (a synchronization awaits a kernel) is a dependency of that
      node if the awaited one started before it; otherwise (a blocking copy, which the call itself
      submits) of its successors;
    - other edges from a start (kernels that overlap on one stream) order no ends, and are omitted.
    Every dependency points to a node that starts earlier, or at the same time and before it in the
    order of the graph's points. A cycle is therefore impossible; the few edges against the order of
    the starts are left out.
    """
    source, target = (
        graph.edges[name].to_numpy().astype(np.int64) for name in ("source", "target")
    )
    rank, start = graph.nodes["rank"].to_numpy(), graph.nodes["start_ns"].to_numpy()
    is_local = solid[source] & solid[target] & (rank[source] == rank[target]) & (source != target)
    kind, from_end, to_end = (graph.edges[name] for name in ("kind", "from_end", "to_end"))
    after, into_end = from_end.to_numpy(), to_end.to_numpy()
    call, launch = (kind == "call").to_numpy(), (kind == "launch").to_numpy()
    forward = start[source] <= start[target]
    before = start[source] < start[target]

    is_direct = is_local & ~into_end & (after | launch) & forward
    awaited = is_local & into_end & after
    late = awaited & ~before
    # Successors of a node whose end awaits something later await it too.
    pairs = pl.DataFrame({"node": target[late], "awaited": source[late]}).join(
        pl.DataFrame({"node": source[is_direct], "follower": target[is_direct]}), on="node"
    )
    followers, inherited = pairs["follower"].to_numpy(), pairs["awaited"].to_numpy()
    is_earlier = start[inherited] < start[followers]
    is_control = is_direct & ~call | awaited & before
    for targets, sources in (
        (target[is_direct & call], source[is_direct & call]),
        (
            np.concatenate([target[is_control], followers[is_earlier]]),
            np.concatenate([source[is_control], inherited[is_earlier]]),
        ),
    ):
        order = np.lexsort((sources, targets))
        key, values = targets[order], sources[order]
        new = np.ones(len(key), np.bool_)
        new[1:] = (key[1:] != key[:-1]) | (values[1:] != values[:-1])
        yield _NumberLists(key[new], values[new])
