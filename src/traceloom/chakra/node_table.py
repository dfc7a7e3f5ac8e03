"""The nodes of one `.et` file in columns: a few arrays, however many nodes, and no object per node."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.chakra.schema import AttributeProto, GlobalMetadata, Node
from traceloom.chakra.stream import EtReader
from traceloom.errors import InputError
from traceloom.model.notice import Notice

Ints = NDArray[np.int64]

# Attributes that readers look at, and the member of the value that they look into.
EXPECTED = {
    "is_cpu_op": "bool_val",
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "comm_priority": "int32_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "pg_name": "string_val",
    "involved_dim": "bool_list",
}
NUMBERS = tuple(name for name, kind in EXPECTED.items() if kind.endswith("_val") and kind != "string_val")
KINDS = tuple(field.name for field in AttributeProto.DESCRIPTOR.oneofs_by_name["value"].fields)
_CODE = {name: code for code, name in enumerate(EXPECTED)}
_KIND = {name: code for code, name in enumerate(KINDS)}
_WHOLE = frozenset(
    kind for kind in KINDS if kind.endswith("_val") and ("int" in kind or "fixed" in kind or "bool" in kind)
)
_ABSENT_KIND = len(KINDS)  # an attribute without any value
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The dependencies of all nodes of one kind, in the order of the nodes.

    Attributes:
        row: Row of the node that waits, ascending.
        id: Id of the node it waits for; uint64, as written: nobody says that it exists.
    """

    row: Ints
    id: NDArray[np.uint64]


@dataclass(frozen=True)
class NodeTable:
    """One `.et` file.

    Attributes:
        path: Where it was read from.
        nodes: `id` (UInt64), `name`, `type` (Int32, as written), `start_us`, `duration_us` (UInt64), and one column per
            attribute of `NUMBERS` and `pg_name`: its value, null where it is absent or no whole number (no text).
        attributes: One row per known attribute of each node: `row`, `attribute` and `kind` (names as String), in the
            order of the file.
        data: Data dependencies.
        control: Control dependencies.
        metadata: The first message; None where the file has none.
        notices: What the stream says of the file: damage.
    """

    path: str
    nodes: pl.DataFrame
    attributes: pl.DataFrame
    data: Dependencies
    control: Dependencies
    metadata: GlobalMetadata | None = None
    notices: tuple[Notice, ...] = ()

    def __len__(self) -> int:
        return self.nodes.height


def read_table(path: str | Path) -> NodeTable:
    """Read a `.et` or `.et.gz` file: all of it up to where it is damaged.

    Raises:
        InputError: Not even its beginning is a Chakra trace, or it cannot be read.
    """
    with EtReader(path) as reader:
        columns = _Columns()
        damage: list[Notice] = []
        try:
            for node in reader:
                columns.add(node)
        except InputError as error:
            said = f"{error.message}; what comes before it is read, what comes after it is not"
            damage.append(Notice(error.slug, "error", said, where=str(path)))  # already said where it stands
        table = columns.table(str(path), reader.metadata)
        return replace(table, notices=(*reader.notices, *damage))


def tabulate(path: str, nodes: Iterable[Node], metadata: GlobalMetadata | None = None) -> NodeTable:
    """The table of the nodes of a file. Takes one node at a time: memory grows by about 100 bytes per node."""
    columns = _Columns()
    for node in nodes:
        columns.add(node)
    return columns.table(path, metadata)


class _Columns:
    """Arrays that grow node by node."""

    def __init__(self) -> None:
        self.id, self.start, self.duration = array("Q"), array("Q"), array("Q")
        self.type, self.name = array("i"), array("I")
        self.names: dict[str, int] = {}
        self.data, self.control = (array("q"), array("Q")), (array("q"), array("Q"))
        # of each known attribute that is there: row, which one, kind, value (a number, or a code of `texts`)
        self.at, self.which, self.kind, self.value = array("q"), array("b"), array("b"), array("q")
        self.known = array("b")  # whether the value could be taken as a whole number or a text
        self.texts: dict[str, int] = {}

    def add(self, node: Node) -> None:
        row = len(self.id)
        self.id.append(node.id)
        self.type.append(node.type)
        self.name.append(self.names.setdefault(node.name, len(self.names)))
        self.start.append(node.start_time_micros)
        self.duration.append(node.duration_micros)
        for (rows, ids), deps in ((self.data, node.data_deps), (self.control, node.ctrl_deps)):
            if deps:
                ids.extend(deps)
                rows.extend([row] * (len(ids) - len(rows)))
        for attribute in node.attr:
            which = _CODE.get(attribute.name)
            if which is not None:
                self._add_attribute(row, which, attribute)

    def _add_attribute(self, row: int, which: int, attribute: AttributeProto) -> None:
        kind = attribute.WhichOneof("value")
        number = None
        if kind in _WHOLE:
            number = int(getattr(attribute, kind))
        elif kind == "string_val":
            number = self.texts.setdefault(attribute.string_val, len(self.texts))
        self.at.append(row)
        self.which.append(which)
        self.kind.append(_KIND[kind] if kind else _ABSENT_KIND)
        self.value.append(number if number is not None and number <= _LARGEST else 0)
        self.known.append(number is not None and number <= _LARGEST)

    def table(self, path: str, metadata: GlobalMetadata | None) -> NodeTable:
        names = pl.Series("name", list(self.names), dtype=pl.String)
        nodes = pl.DataFrame(
            {
                "id": _array(self.id, np.uint64),
                "name": names.gather(pl.Series(_array(self.name, np.uint32))),
                "type": _array(self.type, np.int32),
                "start_us": _array(self.start, np.uint64),
                "duration_us": _array(self.duration, np.uint64),
            }
        )
        at, which = _array(self.at, np.int64), _array(self.which, np.int8)
        kind, known = _array(self.kind, np.int8), _array(self.known, np.int8).astype(bool)
        value = _array(self.value, np.int64)
        texts = pl.Series("pg_name", list(self.texts), dtype=pl.String)
        is_text = kind == _KIND["string_val"]
        columns = []
        for name in (*NUMBERS, "pg_name"):
            mine = (which == _CODE[name]) & known & (is_text == (name == "pg_name"))
            column = np.zeros(len(nodes), dtype=np.int64)
            there = np.zeros(len(nodes), dtype=bool)
            column[at[mine]], there[at[mine]] = value[mine], True
            numbers = pl.Series(name, column).set(pl.Series(~there), None)
            columns.append(texts.gather(numbers).alias(name) if name == "pg_name" else numbers)
        return NodeTable(
            path,
            nodes.with_columns(columns).with_columns(pl.col("is_cpu_op").cast(pl.Boolean)),
            _attributes(at, which, kind),
            Dependencies(_array(self.data[0], np.int64), _array(self.data[1], np.uint64)),
            Dependencies(_array(self.control[0], np.int64), _array(self.control[1], np.uint64)),
            metadata,
        )


def _attributes(at: Ints, which: NDArray[np.int8], kind: NDArray[np.int8]) -> pl.DataFrame:
    names = pl.Series(list(EXPECTED), dtype=pl.Enum(list(EXPECTED)))
    kinds = pl.Series([*KINDS, "no value"], dtype=pl.Enum([*KINDS, "no value"]))
    return pl.DataFrame({"row": at, "attribute": names.gather(pl.Series(which)), "kind": kinds.gather(pl.Series(kind))})


def _array(values: array[Any], kind: Any) -> NDArray[Any]:
    return np.frombuffer(values, dtype=kind) if len(values) else np.empty(0, dtype=kind)
