"""The nodes of a host trace, the choice of those to replay, and their communication."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import polars as pl

from traceloom.formats.kineto_metadata import parse_whole_number
from traceloom.graph.host_calls import describe_calls
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import find_nearest_ancestor
from traceloom.trace.trace import HostTrace
from traceloom.workload.replay.schema import OperatorSchema
from traceloom.workload.replay.values import (
    Layout,
    RecordedTensor,
    build_layout,
    count_tensors,
    list_storages,
    list_tensors,
    parse_kinds,
)

Level = Literal["outermost", "leaf"]
T = TypeVar("T")

_STEP = r"^(?:ProfilerStep|traceloom\.step)#(\d+)"
_BACKWARD = "autograd::engine::evaluate_function: "
# Annotations that are not user scopes.
_NO_SCOPE = r"^(?:autograd::engine::|torch::autograd::|torch(?:\.|::)distributed|traceloom\.step#|ProfilerStep#|gloo:|nccl:)"
_MESSAGES = r"^(?:gloo|mpi|ucc):(?:send|recv)"
_RECORDER_SCOPES = r"^traceloom\.(?:module|scope):"
_PHASES = {"Optimizer.": "optimizer", "enumerate(DataLoader)": "loading", _BACKWARD: "backward"}


class Attributes(msgspec.Struct, gc=False):
    """Attributes of a node besides its columns that a replay needs."""

    input_strides: Any = None
    output_strides: Any = None
    tensor_range: Any = None
    kernel_backend: Any = None
    kernel_file: Any = None
    pg_name: Any = None


@dataclass(frozen=True)
class NodeTensors:
    """The tensors on one side of all nodes, by row, decoded on access.

    Attributes:
        values: Recorded values of each node.
        layouts: Positions of tensors among them, or the error if the layout is invalid.
        unreadable: Row -> error if its values do not match their types; filled on access.
    """

    values: Sequence[list[Any]]
    layouts: Sequence[Layout | str]
    unreadable: dict[int, str]

    def __getitem__(self, row: int) -> list[RecordedTensor]:
        """Returns the tensors of a node; empty if its values are unreadable."""
        layout = self.layouts[row]
        if isinstance(layout, str):
            self.unreadable[row] = layout
            return []
        try:
            return list_tensors(self.values[row], layout)
        except (TypeError, ValueError, IndexError, KeyError) as error:
            self.unreadable[row] = str(error)
            return []

    def storages(self, rows: Iterable[int]) -> tuple[Ints, Ints]:
        """Returns only the numbers of their storages: row and number of each, without unreadable
        ones.
        """
        storage_rows: list[int] = []
        numbers: list[int] = []
        for row in rows:
            layout = self.layouts[row]
            if layout and not isinstance(layout, str):
                storages = list_storages(self.values[row], layout)
                numbers += storages
                storage_rows += [row] * len(storages)
        return np.array(storage_rows, dtype=np.int64), np.array(numbers, dtype=np.int64)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a host trace in the order of their start, decoded on demand.

    Attributes:
        host: The host trace.
        parent: Row of each node's parent; -1 if there is none; shape (nodes,).
        inputs: Decoded input values of each; shape (nodes,).
        outputs: Decoded output values of each.
        attributes: The remaining attributes.
        unreadable: Row -> error if its values do not match their types.
    """

    host: HostTrace
    parent: Ints
    inputs: Sequence[list[Any]]
    outputs: Sequence[list[Any]]
    attributes: Sequence[Attributes]
    unreadable: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, host: HostTrace) -> Nodes:
        """Decodes a host trace. Values that are not JSON (truncated files) are treated as empty."""
        ops = host.ops
        ids = ops["id"].to_numpy()
        parent_ids = ops["parent"].fill_null(-1).to_numpy()
        row = np.minimum(np.searchsorted(ids, parent_ids), max(ids.size - 1, 0))
        parent = (
            np.where((ids[row] == parent_ids) & (row < np.arange(ids.size)), row, -1)
            if ids.size
            else row
        )
        texts = ops["attributes"].unique()  # most nodes share them with another
        attributes = dict(
            zip(texts.to_list(), _decode_values(texts, Attributes, "{}"), strict=True)
        )
        # A message lasts until it is waited for; what is called meanwhile seems to be part of it.
        names = ops["name"].fill_null("")
        lasting = names.str.contains(_MESSAGES).to_numpy().copy()
        own = lasting | (names == "record_param_comms").to_numpy()
        lasting[parent[lasting & (parent >= 0)]] = True
        if lasting.any():
            parent = np.where(own, parent, find_nearest_ancestor(parent, ~lasting))
        return cls(
            host,
            parent.astype(np.int64),
            _decode_values(ops["inputs"], list[Any]),
            _decode_values(ops["outputs"], list[Any]),
            [attributes[text] for text in ops["attributes"].to_list()],
        )

    @cached_property
    def read(self) -> NodeTensors:
        """The tensors among the inputs of each node."""
        return self._tensors(self.inputs, "input")

    @cached_property
    def returned(self) -> NodeTensors:
        return self._tensors(self.outputs, "output")

    def _tensors(self, values: Sequence[list[Any]], side: str) -> NodeTensors:
        """Builds the layouts; nodes with the same types, shapes and strides share one."""
        ops = self.host.ops
        texts = [f"{side}_types", f"{side}_shapes", "attributes"]
        first = ops.with_row_index("row").select(pl.col("row").first().over(texts)).to_series()
        rows = first.unique()
        shapes = _decode_values(ops[f"{side}_shapes"].gather(rows), list[Any])
        layouts: dict[int, Layout | str] = {}
        for row, types, shape in zip(
            rows.to_list(), ops[texts[0]].gather(rows).to_list(), shapes, strict=True
        ):
            try:
                layouts[row] = build_layout(
                    parse_kinds(types), shape, getattr(self.attributes[row], f"{side}_strides")
                )
            except (TypeError, ValueError, IndexError, KeyError) as error:  # noqa: PERF203  (files that are damaged)
                layouts[row] = str(error)
        return NodeTensors(values, [layouts[row] for row in first.to_list()], self.unreadable)

    @cached_property
    def ranges(self) -> dict[int, dict[int, tuple[int, int]]]:
        """Min and max values of integer tensors, by id and number of the tensor among the inputs.

        PyTorch writes them with ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE=1.
        """
        out: dict[int, dict[int, tuple[int, int]]] = {}
        for node, attributes in zip(self.host.ops["id"].to_list(), self.attributes, strict=True):
            if attributes.tensor_range:
                with contextlib.suppress(
                    msgspec.DecodeError, TypeError
                ):  # damaged: the values are guessed instead
                    out[node] = msgspec.json.decode(
                        attributes.tensor_range, type=dict[int, tuple[int, int]]
                    )
        return out

    @cached_property
    def has_schema(self) -> Bools:
        return np.asarray(self.host.ops["schema"].is_not_null().to_numpy())

    @cached_property
    def exchanges(self) -> Bools:
        """Which nodes are collectives, sends, receives, barriers, or waits for them."""
        exchanges = self.host.ops["name"].str.contains(
            r"^(?:c10d::|_c10d_functional::|c10d_functional::|record_param_comms$)"
        )
        return np.asarray(exchanges.fill_null(value=False).to_numpy())

    @cached_property
    def kernels(self) -> Bools:
        """Which nodes are kernels that a compiled graph launched."""
        backends = [attributes.kernel_backend == "triton" for attributes in self.attributes]
        return np.array(backends, dtype=np.bool_) & ~self.has_schema

    @cached_property
    def runs(self) -> Bools:
        """Which nodes a replay can run: ops, exchanges and kernels."""
        return self.has_schema | self.exchanges | self.kernels

    @cached_property
    def steps(self) -> Ints:
        """Number of each node's step; -1 before the first, if there are step marks."""
        step_numbers = self.host.ops.select(
            pl.col("name").str.extract(_STEP).cast(pl.Int64)
        ).to_series()
        marks = np.flatnonzero(step_numbers.is_not_null().to_numpy())
        numbers = step_numbers.drop_nulls().to_numpy()
        mark_index = np.searchsorted(marks, np.arange(step_numbers.len()), side="right") - 1
        return (
            np.where(mark_index >= 0, numbers[np.maximum(mark_index, 0)], -1)
            if marks.size
            else np.full(step_numbers.len(), -1)
        )

    @cached_property
    def scopes(self) -> list[str]:
        """The user scopes around each node, outermost first; a backward op has those of its forward
        op.
        """
        ops = self.host.ops
        names = ops["name"].str.replace(_RECORDER_SCOPES, "").to_list()
        labels = (
            ~self.has_schema
            & ~self.host.roots().to_numpy()
            & ~(
                ops["name"].str.contains(_NO_SCOPE) | ops["name"].str.contains(r"Backward\d*$")
            ).to_numpy()
            & (ops["scope"].fill_null(-1) == 7).to_numpy()
        )
        sequence = ops["sequence"].fill_null(-1).to_numpy()
        in_backward = np.append(ops["name"].str.starts_with(_BACKWARD).to_numpy(), False)[
            self.parent
        ]
        # Rows whose scopes may differ from those of their parents; forward ops precede backward
        # ops.
        is_boundary = labels | (in_backward & (sequence >= 0) & ~self.has_schema)
        nearest = find_nearest_ancestor(self.parent, is_boundary)
        scope_rows = np.where(is_boundary, np.arange(is_boundary.size), nearest).tolist()
        forward: dict[int, int] = {}
        paths = {-1: ""}
        for row in np.flatnonzero(is_boundary | (self.has_schema & (sequence >= 0))).tolist():
            number = int(sequence[row])
            if not is_boundary[row]:
                forward[number] = row
                continue
            path, name = paths[int(nearest[row])], names[row]
            if number >= 0 and in_backward[row] and number in forward:
                path = paths[scope_rows[forward[number]]]
            if labels[row]:  # a module's name already is its full path
                path = name if not path or name.startswith(f"{path}.") else f"{path}/{name}"
            paths[row] = path
        return [paths[row] for row in scope_rows]

    @cached_property
    def phases(self) -> list[str]:
        """Phase of each node: forward, backward, optimizer or loading."""
        names = self.host.ops["name"].to_list()
        phases = {
            name: next((phase for start, phase in _PHASES.items() if name.startswith(start)), None)
            for name in set(names)
        }
        own_phases = [phases[name] for name in names]
        marked = np.fromiter(map(bool, own_phases), dtype=np.bool_, count=len(own_phases))
        phase_rows = np.where(
            marked, np.arange(marked.size), find_nearest_ancestor(self.parent, marked)
        )
        return [own_phases[row] or "" if row >= 0 else "forward" for row in phase_rows.tolist()]


def _decode_values(texts: pl.Series, kind: type[T], nothing: str = "[]") -> list[T]:
    """Decodes a column of JSON texts, all at once if every text is well-formed; a malformed one
    becomes `kind()`.
    """
    texts = texts.fill_null(nothing)
    with contextlib.suppress(msgspec.DecodeError, UnicodeError):
        values = msgspec.json.decode(f"[{texts.str.join(',').item()}]", type=list[kind])  # type: ignore[valid-type]
        if len(values) == texts.len():
            return values
    out = []
    for text in texts.to_list():
        try:
            out.append(msgspec.json.decode(text, type=kind))
        except (msgspec.DecodeError, UnicodeError):  # noqa: PERF203  (files that are damaged)
            out.append(kind())
    return out


def choose(nodes: Nodes, level: Level = "outermost") -> Ints:
    """Returns the rows of the nodes that a replay runs, in the order of their start.

    `outermost`: dispatcher ops without another one around them. But a composite op, which only
    calls others, is replaced by its inner ops if their results are used outside of it, since
    nothing else would create them. `leaf`: every composite op is replaced. Communication is taken
    as a whole.
    """
    is_runnable = nodes.runs
    caller = find_nearest_ancestor(nodes.parent, is_runnable)
    calls = np.zeros(is_runnable.size, dtype=np.bool_)
    calls[caller[is_runnable & (caller >= 0)]] = True
    # An op that does work itself cannot be replaced by those that it calls.
    opened = (
        calls & ~nodes.exchanges & nodes.host.ops["name"].is_in(read_composite_ops()).to_numpy()
    )
    if level == "outermost" and opened.any():
        opened = _find_leaking_ops(nodes, opened)
    # outermost after the opened ones are removed
    remaining = is_runnable & ~opened
    return np.flatnonzero(remaining & (find_nearest_ancestor(nodes.parent, remaining) < 0))


@cache
def read_composite_ops() -> list[str]:
    """Returns ops that only call other ops; written by `scripts/composite_ops.py`."""
    text = (
        resources.files("traceloom.workload.replay")
        .joinpath("composite_ops.txt")
        .read_text(encoding="utf-8")
    )
    return [f"aten::{name}" for name in text.split()]


def _find_leaking_ops(nodes: Nodes, composite: Bools) -> Bools:
    """Returns composite ops that created inside, at any depth, a storage that is read outside of
    them although they do not return it.
    """
    acts = np.flatnonzero(nodes.runs).tolist()
    (read_row, read_storage), (made_row, made_storage) = (
        nodes.read.storages(acts),
        nodes.returned.storages(acts),
    )
    count = composite.size
    outer = find_nearest_ancestor(nodes.parent, composite)
    inner = made_storage[(composite | (outer >= 0))[made_row]]  # others do not matter
    is_inner = np.isin(read_storage, inner), np.isin(made_storage, inner)
    read_row, made_row = read_row[is_inner[0]], made_row[is_inner[1]]
    _, number = np.unique(
        np.concatenate([read_storage[is_inner[0]], made_storage[is_inner[1]]]), return_inverse=True
    )
    # an occurrence is ordered by storage, then by row
    read, creations = (
        number[: read_row.size] * count + read_row,
        number[read_row.size :] * count + made_row,
    )
    occurs = np.sort(np.concatenate([read, creations]))
    written = np.sort(creations[~np.isin(creations, read)])
    before = np.searchsorted(written, read) - 1  # the last write before the read
    source = written[np.maximum(before, 0)] if written.size else read
    is_made = (before >= 0) & (source // count == read // count)
    hider_rows = np.where(composite[source % count], source % count, outer[source % count])[is_made]
    storage, row = read[is_made] - read_row[is_made], read_row[is_made]
    opened = np.zeros(count, dtype=np.bool_)
    parent = nodes.parent.tolist()
    while (is_within := hider_rows >= 0).any():
        storage, row, hider_rows = storage[is_within], row[is_within], hider_rows[is_within]
        hides = np.flatnonzero(
            occurs[np.searchsorted(occurs, storage + hider_rows) % occurs.size]
            != storage + hider_rows
        )
        for pair in hides.tolist():
            ancestor, hider = int(row[pair]), int(hider_rows[pair])
            while ancestor > hider:
                ancestor = parent[ancestor]
            if ancestor == hider:
                hider_rows[pair] = -1
            else:
                opened[hider] = True
        hider_rows = np.where(hider_rows >= 0, outer[hider_rows], -1)
    return opened


def filter_rows(
    nodes: Nodes, rows: Ints, *, steps: Iterable[int] | None = None, scope: str | None = None
) -> Ints:
    """Returns those of the rows that are in some steps, and below a scope of the given name."""
    if steps is not None:
        rows = rows[np.isin(nodes.steps[rows], list(steps))]
    if scope is not None:
        scopes = nodes.scopes
        rows = rows[
            [
                scope in scopes[row].split("/") or scopes[row].startswith(f"{scope}.")
                for row in rows.tolist()
            ]
        ]
    return rows


WAIT = "wait"
# Names of ops (without namespace and surrounding underscores) and of `record_param_comms`.
_KINDS = {
    "all_reduce": "allreduce allreduce_coalesced allreduce_sparse all_reduce all_reduce_coalesced",
    "all_gather": "allgather allgather_base allgather_coalesced allgather_into_tensor_coalesced all_gather "
    "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced all_gather_base "
    "_all_gather_base",
    "reduce_scatter": "reduce_scatter reduce_scatter_base reduce_scatter_tensor reduce_scatter_tensor_coalesced "
    "reduce_scatter_tensor_out",
    "all_to_all": "alltoall alltoall_base all_to_all all_to_allv all_to_all_single",
    "broadcast": "broadcast broadcast_coalesced",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv recv_any_source",
    "barrier": "barrier monitored_barrier",
    WAIT: "wait wait_tensor",
}
KINDS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_IN_PLACE = {"all_reduce", "broadcast", "reduce"}
_PEERS = {"root_rank", "dst", "src", "root"}


class Exchange(NamedTuple):
    """One communication call.

    Attributes:
        kind: Such as `all_reduce`; `wait` for a wait; None if the name is unknown.
        sent: Tensors that this rank sends.
        received: Tensors that it receives into, passed by the caller or created by the call.
        made: Whether the call creates its outputs.
        group: Name of the group, if recorded.
        sequence: Number of the call in its group, if recorded.
        peer: Root or peer as a rank of the group, if there is one.
        tag: Of a message, if recorded.
        splits: Rows of the first dimension for each rank: sent, received; empty if equal.
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
    tag: int | None = None


def read_exchange(
    nodes: Nodes, row: int, schema: OperatorSchema | None, inner: int | None
) -> Exchange:
    """Returns the communication of a node.

    Args:
        nodes: The nodes.
        row: The node.
        schema: Its schema; None for `record_param_comms`.
        inner: The `record_param_comms` below it, which names the group.
    """
    details = _parse_communication(nodes, inner if schema is not None else row)
    if schema is None:
        kind = KINDS.get(details.get("name", "").lower())
        received = nodes.returned[row] or (nodes.read[row] if kind in _IN_PLACE | {"recv"} else [])
        sent = [] if kind == "recv" else nodes.read[row]
        return Exchange(
            kind,
            sent,
            received,
            False,
            details.get("group"),
            details.get("sequence"),
            details.get("peer"),
            details.get("splits", ([], [])),
        )
    kind = KINDS.get(schema.name.strip("_"))
    values, kinds = nodes.inputs[row], parse_kinds(nodes.host.ops["input_types"][row])
    sides: tuple[list[RecordedTensor], list[RecordedTensor]] = ([], [])
    peer, tag, asynchronous = None, None, True
    splits: tuple[list[int], list[int]] = ([], [])
    tensors = iter(nodes.read[row])
    for value, value_kind, argument in zip(values, kinds, schema.arguments, strict=False):
        count = count_tensors(value_kind)
        if count:
            sides[argument.name.startswith(("output", "out")) or kind == "recv"].extend(
                [next(tensors) for _ in range(count)]
            )
        elif argument.name in _PEERS:
            peer = _parse_rank(value)
        elif argument.name == "tag":
            tag = _parse_rank(value)
        elif argument.name in {"async_op", "asyncOp"}:
            asynchronous = value is not False
        elif argument.name in {"input_split_sizes", "output_split_sizes"} and isinstance(
            value, list
        ):
            splits[argument.name == "output_split_sizes"].extend(_parse_splits(value))
    sent, received = sides
    functional = schema.namespace != "c10d"
    if functional and not received:
        received = nodes.returned[row]
    elif kind in _IN_PLACE:
        received = sent
    group_names = (
        value
        for value, declared in zip(values, schema.arguments, strict=False)
        if declared.name == "group_name"
    )
    group = details.get("group") or next(
        (value for value in group_names if isinstance(value, str)), None
    )
    return Exchange(
        kind,
        sent,
        received,
        functional and not schema.mutates,
        group,
        details.get("sequence"),
        peer if peer is not None else details.get("peer"),
        splits if any(splits) else details.get("splits", ([], [])),
        asynchronous and kind != "barrier",
        tag,
    )


def _parse_rank(value: Any) -> int | None:
    """Returns a rank of a group; None if the value is not one."""
    number = parse_whole_number(value)
    return number if number is not None and 0 <= number < 2**31 else None


def _parse_splits(values: list[Any]) -> list[int]:
    """Returns splits if all of them are row counts; else none."""
    rows = [parse_whole_number(value) for value in values]
    return [row for row in rows if row is not None] if None not in rows else []


def _parse_communication(nodes: Nodes, row: int | None) -> dict[str, Any]:
    """Decodes `record_param_comms`: [tensors], sequence, group, rank, name, splits sent, splits received,
    ...
    """
    if row is None:
        return {}
    values, kinds = nodes.inputs[row], parse_kinds(nodes.host.ops["input_types"][row])
    other_values = [
        value for value, kind in zip(values, kinds, strict=False) if not count_tensors(kind)
    ]
    if (
        other_values
        and isinstance(other_values[0], list)
        and not any(isinstance(value, str) for value in other_values[:1])
        and not other_values[0]
    ):
        other_values = other_values[1:]  # an empty list of tensors
    out: dict[str, Any] = {}
    name_index = next((i for i, value in enumerate(other_values) if isinstance(value, str)), None)
    if name_index is None or name_index < 3:
        return out
    sequence, group, rank = other_values[name_index - 3 : name_index]
    out["name"] = other_values[name_index]
    out["sequence"] = parse_whole_number(
        sequence[0] if isinstance(sequence, list) and sequence else sequence
    )
    out["group"] = str(nodes.attributes[row].pg_name or "") or (
        group[0] if isinstance(group, list) and group else str(group)
    )
    if (
        other_values[name_index].lower()
        in {"broadcast", "reduce", "gather", "scatter", "send", "recv"}
        and _parse_rank(rank) is not None
    ):
        out["peer"] = rank
    lists = [
        value for value in other_values[name_index + 1 : name_index + 3] if isinstance(value, list)
    ]
    if len(lists) == 2:
        out["splits"] = (_parse_splits(lists[0]), _parse_splits(lists[1]))
    return out


def list_groups(
    nodes: Nodes, capture: dict[str, Any] | None, world_size: int, rank: int
) -> list[dict[str, Any]]:
    """Returns process groups with their ranks: from the capture, else the host trace, else a single
    group of all ranks.
    """
    captured_groups = (capture or {}).get("groups")
    rows = (
        [entry for entry in captured_groups if isinstance(entry, dict)]
        if isinstance(captured_groups, list)
        else []
    )
    out = {
        str(entry.get("name")): {
            "name": str(entry.get("name")),
            "description": entry.get("description"),
            "backend": entry.get("backend"),
            "ranks": [int(member) for member in entry.get("ranks") or range(world_size)],
        }
        for entry in rows
    }
    recorded = describe_calls(nodes.host.ops).filter(
        pl.col("group", "ranks").is_not_null(), pl.col("kind") != WAIT
    )
    for name, description, members in pl.concat(
        [nodes.host.groups, recorded], how="diagonal_relaxed"
    )["group", "description", "ranks"].iter_rows():
        ranks = list(members) if members is not None and len(members) else list(range(world_size))
        out.setdefault(
            str(name),
            {"name": str(name), "description": description, "backend": None, "ranks": ranks},
        )
    if not out:
        world_group = {
            "name": "0",
            "description": "all ranks, since none is recorded",
            "backend": None,
        }
        least = 2 if capture is None and nodes.exchanges.any() else 1  # with itself none speaks
        out["0"] = world_group | {"ranks": list(range(max(world_size, rank + 1, least)))}
    return list(out.values())


def read_called_groups(capture: dict[str, Any] | None) -> dict[tuple[str, int], list[str]]:
    """Returns the groups of the collectives listed in a capture, in order, by kind and input
    bytes.
    """
    calls = (capture or {}).get("collectives")
    out: dict[tuple[str, int], list[str]] = {}
    if not isinstance(calls, dict):
        return out
    try:
        for group, kind, size in zip(
            calls["group"], calls["kind"], calls["bytes_in"], strict=False
        ):
            out.setdefault((str(calls["kinds"][kind]), int(size)), []).append(
                str(calls["groups"][group])
            )
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
    ):  # ignore a manually edited entry
        return {}
    return out


def count_bytes(tensors: list[RecordedTensor]) -> int:
    return sum(tensor.elements * tensor.item_bytes for tensor in tensors)
