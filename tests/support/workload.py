"""Small sets of `.et` files, node by node: right ones and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from traceloom.formats.chakra import files
from traceloom.formats.chakra.et_pb2 import AttributeProto, CollectiveCommType, GlobalMetadata, Node

METADATA = GlobalMetadata(version="0.0.4")
_INT32 = ("comm_src", "comm_dst", "comm_tag", "comm_priority")


def node(number: int, kind: str = "COMP_NODE", deps: Iterable[int] = (), **more: Any) -> Node:
    """One node.

    Args:
        number: Its id.
        kind: Name of its type.
        deps: Its data dependencies.
        more: `name`, `us` (duration, 1 where not given), `ctrl` (control dependencies); everything else is an
            attribute, written as readers expect it, or as `("int32_val", 1)` says.
    """
    made = Node(
        id=number,
        name=more.pop("name", f"n{number}"),
        type=kind,
        data_deps=deps,
        ctrl_deps=more.pop("ctrl", ()),
        duration_micros=more.pop("us", 1),
    )
    made.attr.extend(attribute(name, value) for name, value in more.items())
    return made


def attribute(name: str, value: Any) -> AttributeProto:
    """An attribute: its member follows from the type of the value, and from what readers expect of the name."""
    if isinstance(value, tuple):
        member, value = value
    else:
        member = {bool: "bool_val", str: "string_val", list: "bool_list"}.get(
            type(value), "int64_val"
        )
        member = (
            "int32_val" if name in _INT32 else "uint64_val" if name == "tensor_size" else member
        )
    made = AttributeProto(name=name)
    if member == "bool_list":
        made.bool_list.values.extend(value)
    else:
        setattr(made, member, value)
    return made


def collective(
    number: int, kind: str = "ALL_REDUCE", size: int = 1024, deps: Iterable[int] = (), **more: Any
) -> Node:
    """One rank's part of a collective of `size` bytes."""
    of_kind = CollectiveCommType.Value(kind)
    return node(number, "COMM_COLL_NODE", deps, comm_type=of_kind, comm_size=size, **more)


def send(number: int, to: int, deps: Iterable[int] = (), **more: Any) -> Node:
    """A message of 8 bytes to a rank; `comm_size` and `comm_tag` say otherwise."""
    return node(
        number, "COMM_SEND_NODE", deps, **{"comm_size": 8, "comm_dst": to, "comm_tag": 0, **more}
    )


def receive(number: int, source: int, deps: Iterable[int] = (), **more: Any) -> Node:
    """A message of 8 bytes from a rank."""
    return node(
        number,
        "COMM_RECV_NODE",
        deps,
        **{"comm_size": 8, "comm_src": source, "comm_tag": 0, **more},
    )


def write_set(home: Path, *ranks: Sequence[Node], groups: Any = None, ending: str = ".et") -> Path:
    """A directory with `w.0.et`, `w.1.et`, ... and, where given, a group file; returns the directory."""
    home.mkdir(parents=True, exist_ok=True)
    for rank, nodes in enumerate(ranks):
        files.write(home / f"w.{rank}{ending}", METADATA, nodes, force=True)
    if groups is not None:
        (home / "comm_groups.json").write_text(json.dumps(groups), encoding="utf-8")
    return home
