"""Communication in a host trace: which kind, of which group, what each rank gives and receives, and who waits."""

from __future__ import annotations

from typing import Any, NamedTuple

from traceloom.read.metadata import whole
from traceloom.replay.nodes import Nodes
from traceloom.replay.schema import OperatorSchema
from traceloom.replay.values import RecordedTensor, count_of, kinds_of

WAIT = "wait"
# Names of ops (after their namespace, without underscores around) and of `record_param_comms`.
_KINDS = {
    "all_reduce": "allreduce allreduce_coalesced allreduce_sparse all_reduce all_reduce_coalesced",
    "all_gather": "allgather allgather_base allgather_coalesced allgather_into_tensor_coalesced all_gather "
    "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced all_gather_base "
    "_all_gather_base",
    "reduce_scatter": "reduce_scatter reduce_scatter_base reduce_scatter_tensor reduce_scatter_tensor_coalesced "
    "reduce_scatter_tensor_out",
    "all_to_all": "alltoall alltoall_base all_to_all all_to_allv all_to_all_single",
    "broadcast": "broadcast broadcast_coalesced",
    "reduce": "reduce", "gather": "gather", "scatter": "scatter", "send": "send",
    "recv": "recv recv_any_source", "barrier": "barrier monitored_barrier", WAIT: "wait wait_tensor",
}  # fmt: skip
KINDS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_IN_PLACE = {"all_reduce", "broadcast", "reduce"}
_PEERS = {"root_rank", "dst", "src", "root"}


class Exchange(NamedTuple):
    """One call of communication.

    Attributes:
        kind: As `all_reduce`; `wait` for a wait; None where the name is of none.
        sent: Tensors that this rank puts in.
        received: Tensors that it gets, given by the caller or made by the call.
        made: Whether the call makes what it returns.
        group: Name of the group, where recorded.
        sequence: Number of the call in its group, where recorded.
        peer: Root or peer as a rank of the group, where there is one.
        splits: Rows of the first dimension for each rank: sent, received; empty where equal.
        asynchronous: Whether the caller waits later.
    """

    kind: str | None
    sent: list[RecordedTensor]
    received: list[RecordedTensor]
    made: bool = False
    group: str | None = None
    sequence: int | None = None
    peer: int | None = None
    splits: tuple[list[int], list[int]] = ([], [])
    asynchronous: bool = True


def exchange_of(nodes: Nodes, row: int, schema: OperatorSchema | None, inner: int | None) -> Exchange:
    """What a node of communication does.

    Args:
        nodes: The nodes.
        row: The node.
        schema: Its schema; None for `record_param_comms`.
        inner: The `record_param_comms` within, which names the group.
    """
    about = _recorded(nodes, inner if schema is not None else row)
    if schema is None:
        kind = KINDS.get(about.get("name", "").lower())
        received = nodes.returned[row] or (nodes.read[row] if kind in _IN_PLACE | {"recv"} else [])
        sent = [] if kind == "recv" else nodes.read[row]
        return Exchange(
            kind, sent, received, False, about.get("group"), about.get("sequence"), about.get("peer"),
            about.get("splits", ([], [])),
        )  # fmt: skip
    kind = KINDS.get(schema.name.strip("_"))
    values, kinds = nodes.inputs[row], kinds_of(nodes.host.ops["input_types"][row])
    sides: tuple[list[RecordedTensor], list[RecordedTensor]] = ([], [])
    peer, asynchronous = None, True
    splits: tuple[list[int], list[int]] = ([], [])
    tensors = iter(nodes.read[row])
    for value, value_kind, argument in zip(values, kinds, schema.arguments, strict=False):
        count = count_of(value_kind)
        if count:
            part = [next(tensors) for _ in range(count)]
            sides[argument.name.startswith(("output", "out")) or kind == "recv"].extend(part)
        elif argument.name in _PEERS:
            peer = _rank(value)
        elif argument.name in {"async_op", "asyncOp"}:
            asynchronous = value is not False
        elif argument.name in {"input_split_sizes", "output_split_sizes"} and isinstance(value, list):
            splits[argument.name == "output_split_sizes"].extend(_rows(value))
    sent, received = sides
    functional = schema.namespace != "c10d"
    if functional and not received:
        received = nodes.returned[row]
    elif kind in _IN_PLACE:
        received = sent
    named = (value for value, of in zip(values, schema.arguments, strict=False) if of.name == "group_name")
    group = about.get("group") or next((value for value in named if isinstance(value, str)), None)
    return Exchange(
        kind, sent, received, functional and not schema.mutates, group, about.get("sequence"),
        peer if peer is not None else about.get("peer"), splits if any(splits) else about.get("splits", ([], [])),
        asynchronous and kind != "barrier",
    )  # fmt: skip


def _rank(value: Any) -> int | None:
    """A rank of a group, if it is one."""
    number = whole(value)
    return number if number is not None and 0 <= number < 2**31 else None


def _rows(values: list[Any]) -> list[int]:
    """Splits, if all of them are numbers of rows."""
    rows = [whole(value) for value in values]
    return [row for row in rows if row is not None] if None not in rows else []


def _recorded(nodes: Nodes, row: int | None) -> dict[str, Any]:
    """What `record_param_comms` says: [tensors], sequence, group, rank, name, splits sent, splits received, ..."""
    if row is None:
        return {}
    values, kinds = nodes.inputs[row], kinds_of(nodes.host.ops["input_types"][row])
    rest = [value for value, kind in zip(values, kinds, strict=False) if not count_of(kind)]
    if rest and isinstance(rest[0], list) and not any(isinstance(value, str) for value in rest[:1]) and not rest[0]:
        rest = rest[1:]  # a list of no tensors
    out: dict[str, Any] = {}
    at = next((i for i, value in enumerate(rest) if isinstance(value, str)), None)
    if at is None or at < 3:
        return out
    sequence, group, rank = rest[at - 3 : at]
    out["name"] = rest[at]
    out["sequence"] = whole(sequence[0] if isinstance(sequence, list) and sequence else sequence)
    out["group"] = str(nodes.attributes[row].pg_name or "") or (
        group[0] if isinstance(group, list) and group else str(group)
    )
    if rest[at].lower() in {"broadcast", "reduce", "gather", "scatter", "send", "recv"} and _rank(rank) is not None:
        out["peer"] = rank
    lists = [value for value in rest[at + 1 : at + 3] if isinstance(value, list)]
    if len(lists) == 2:
        out["splits"] = (_rows(lists[0]), _rows(lists[1]))
    return out


def groups_of(nodes: Nodes, capture: dict[str, Any] | None, world_size: int, rank: int) -> list[dict[str, Any]]:
    """Process groups with their ranks: of the capture, else of the host trace, else all ranks as one."""
    listed = (capture or {}).get("groups")
    rows = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    out = {
        str(entry.get("name")): {
            "name": str(entry.get("name")), "description": entry.get("description"), "backend": entry.get("backend"),
            "ranks": [int(member) for member in entry.get("ranks") or range(world_size)],
        }
        for entry in rows
    }  # fmt: skip
    for name, description, members in nodes.host.groups.select("group", "description", "ranks").iter_rows():
        ranks = list(members) if members is not None and len(members) else list(range(world_size))
        out.setdefault(str(name), {"name": str(name), "description": description, "backend": None, "ranks": ranks})
    if not out:
        everyone = {"name": "0", "description": "all ranks, since none is recorded", "backend": None}
        out["0"] = everyone | {"ranks": list(range(max(world_size, rank + 1)))}
    return list(out.values())


def called_groups(capture: dict[str, Any] | None) -> dict[tuple[str, int], list[str]]:
    """Groups of the collectives that a capture wrote down, in their order, by kind and bytes put in."""
    calls = (capture or {}).get("collectives")
    out: dict[tuple[str, int], list[str]] = {}
    if not isinstance(calls, dict):
        return out
    try:
        for group, kind, size in zip(calls["group"], calls["kind"], calls["bytes_in"], strict=False):
            out.setdefault((str(calls["kinds"][kind]), int(size)), []).append(str(calls["groups"][group]))
    except (KeyError, IndexError, TypeError, ValueError):  # a part that was changed by hand says nothing
        return {}
    return out


def tensors_bytes(tensors: list[RecordedTensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.elements * tensor.item_bytes for tensor in tensors)
