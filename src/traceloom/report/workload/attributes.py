"""The attributes of one node of a `.et` file, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traceloom.chakra.columns import Decoder
from traceloom.chakra.schema import AttributeProto, Node
from traceloom.chakra.stream import EtReader
from traceloom.errors import InputError

_LONGEST = 400
_MOST_VALUES = 12


def attributes_of(path: Path, identity: int) -> list[tuple[str, str]]:
    """Every attribute and tensor list of the node with an id: (name, value as text); empty if there is no such node."""
    node = _find(path, identity)
    if node is None:
        return []
    attributes = [(attribute.name, _value(attribute)) for attribute in node.attr]
    for name, tensors in (("inputs", node.inputs), ("outputs", node.outputs)):
        attributes += [
            (f"{name}.{part}", _cut(getattr(tensors, part)))
            for part in ("values", "shapes", "types")
            if getattr(tensors, part)
        ]
    return attributes


def _find(path: Path, identity: int) -> Node | None:
    """The node, decoded; of the others only the ids are read."""
    with EtReader(path) as reader:
        decoder = Decoder(["is_cpu_op"], str(path))
        try:
            for block in reader.blocks():
                matches = (next(decoder.columns([block])).id == identity).nonzero()[0]
                if len(matches):
                    row = int(matches[0])
                    return Node.FromString(block.data[block.starts[row] : block.stops[row]])
        except InputError:
            return None  # the file is damaged there, which the summary says
    return None


def _value(attribute: AttributeProto) -> str:
    kind = attribute.WhichOneof("value")
    if kind is None:
        return "(no value)"
    value: Any = getattr(attribute, kind)
    if kind.endswith("_list"):
        values = value.values
        more = f", … {len(values) - _MOST_VALUES} more" if len(values) > _MOST_VALUES else ""
        return _cut("[" + ", ".join(str(each) for each in values[:_MOST_VALUES]) + more + "]")
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
