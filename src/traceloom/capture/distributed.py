"""The process's place in the job, its groups, and its collective calls.

PyTorch's traces lose which gloo call used which group. Two sources give it back: PyTorch's flight
recorder (which sees every call, also those that DDP makes in C++; torch >= 2.8 for gloo), and a
thin wrapper around the methods of `ProcessGroup`, in place only while the window is recorded (which
knows roots, peers and threads).
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

# Method of ProcessGroup -> kind of collective. Newer and older spellings of one thing share a kind.
KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "barrier": "barrier",
}
_OUTPUT_FIRST = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
_ITEM_BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Short": 2,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
    "ComplexHalf": 4,
    "ComplexFloat": 8,
    "ComplexDouble": 16,
    "UInt16": 2,
    "UInt32": 4,
    "UInt64": 8,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "Float8_e4m3fnuz": 1,
    "Float8_e5m2fnuz": 1,
    "Float8_e8m0fnu": 1,
}
_TYPE_NAMES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


_LAUNCH = "TORCHELASTIC_RUN_ID"
# What all ranks of a job share, also after a restart, and no other job. Not MASTER_ADDR: hosts may
# spell it anyhow.
_JOB_VARIABLES = (_LAUNCH, "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
_PARENT = "TRACELOOM_PARENT"
_parent = ("", "")  # the recorded process that started this one, and what its launcher had told it


def get_distributed() -> Any | None:
    """`torch.distributed` with an initialised process group, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def read_rank_and_world() -> tuple[int | None, int | None, int | None]:
    """Rank, world size and local rank, as far as anything tells; (None, None, None) outside a job."""
    local = _read_number("LOCAL_RANK")
    distributed = get_distributed()
    if distributed is not None:
        return distributed.get_rank(), distributed.get_world_size(), local
    variables = _find_rank_variables()
    if variables is None or (is_child() and _format_rank_variables(variables) == _parent[1]):
        return None, None, None
    rank, size, local_rank = variables
    return _read_number(rank), _read_number(size), _read_number(local_rank)


def identify_job() -> str | None:
    """Names the job of this process: equal for its ranks, another for any other job; None for a
    process on its own.
    """
    _, size, _ = read_rank_and_world()
    names = {
        variable: os.environ[variable] for variable in _JOB_VARIABLES if os.environ.get(variable)
    }
    if size is None or (size == 1 and _LAUNCH not in names):
        return None
    return hashlib.sha256(json.dumps([size, names]).encode()).hexdigest()[:12]


def mark_children() -> None:
    """Note what started this process, and let those that it starts know that they inherit its
    launcher's variables.
    """
    global _parent
    process, _, inherited = os.environ.get(_PARENT, "").partition(" ")
    if process != str(os.getpid()):
        _parent = process, inherited
    variables = _find_rank_variables()
    os.environ[_PARENT] = f"{os.getpid()} {_format_rank_variables(variables) if variables else ''}"


def is_child() -> bool:
    return bool(_parent[0])


def _find_rank_variables() -> tuple[str, str, str] | None:
    """The variables of the launcher that started this process, if any did."""
    for variables in _RANK_VARIABLES:
        if _read_number(variables[0]) is not None and _read_number(variables[1]) is not None:
            return variables
    return None


def _format_rank_variables(variables: tuple[str, str, str]) -> str:
    return " ".join(f"{name}={os.environ.get(name, '')}" for name in (*variables, "MASTER_PORT"))


def _read_number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else None


def describe_groups() -> list[dict[str, Any]]:
    """Every process group of this process: name, description, backend, and its members as global
    ranks.
    """
    if get_distributed() is None:
        return []
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    described = []
    for group, members in world.pg_group_ranks.items():
        name = world.pg_names.get(group, "")
        backend = world.pg_map.get(group, ("", None))[0]
        described.append(
            {
                "name": str(name),
                "description": str(getattr(group, "group_desc", "") or ""),
                "backend": str(backend),
                "ranks": sorted(int(rank) for rank in members),
            }
        )
    return described


class CollectiveLog:
    """The collective calls between `start` and `stop`, as columns."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, ...]] = []
        self._originals: dict[str, Any] = {}
        self._class: Any = None
        self._begin_ns = 0

    def start(self) -> None:
        """Begin to note calls, also those of a job that is only joined later."""
        self._begin_ns = time.time_ns()
        self._calls.clear()
        self._class = getattr(
            sys.modules.get("torch._C._distributed_c10d"), "ProcessGroup", self._class
        )
        if self._class is None or self._originals:
            return
        for name in KINDS:
            original = self._class.__dict__.get(name)
            if original is not None:
                self._originals[name] = original
                setattr(self._class, name, self._wrap(name, original))

    def stop(self) -> dict[str, Any] | None:
        """End, and give the columns; None where nothing was called.

        All columns have one length. `group` is an index into `groups`, `kind` into `kinds`, `type`
        into `types`.
        """
        end_ns = time.time_ns()
        for name, original in self._originals.items():
            setattr(self._class, name, original)
        self._originals.clear()
        if self._class is None:
            return None
        rows = self._merge(_read_flight_recorder(self._begin_ns, end_ns))
        self._calls.clear()
        if not rows:
            return None
        rows.sort(key=lambda row: row["start_ns"])
        table: dict[str, Any] = {}
        for column, legend in (("group", "groups"), ("kind", "kinds"), ("type", "types")):
            names = list(dict.fromkeys(row[column] for row in rows))
            index = {name: at for at, name in enumerate(names)}
            table[legend] = names
            table[column] = [index[row[column]] for row in rows]
        for column in ("sequence", "bytes_in", "bytes_out", "peer", "start_ns", "thread"):
            table[column] = [row[column] for row in rows]
        return table

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        calls, clock, thread = self._calls, time.time_ns, threading.get_native_id

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return original(group, *args, **kwargs)
            finally:
                end = clock()
                try:  # the group's own count of calls, after this one; not every backend keeps it
                    sequence = int(group._get_sequence_number_for_group())
                except RuntimeError:
                    sequence = None
                calls.append(
                    (
                        name,
                        _get_group_name(group),
                        _compute_sizes(name, args),
                        _get_global_rank(group, _find_peer(name, args)),
                        (start, end, thread(), sequence),
                    )
                )

        method.__name__ = name
        method.__doc__ = original.__doc__
        return method

    def _merge(self, recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Join both sources: a recorded call belongs to the wrapper's call of that group during
        which it was made.
        """
        rows = list(recorded)
        by_group: dict[str, list[dict[str, Any]]] = {}
        for row in recorded:
            by_group.setdefault(row["group"], []).append(row)
        position = dict.fromkeys(by_group, 0)
        for name, group_name, (kind_type, bytes_in, bytes_out), peer, where in self._calls:
            start, end, thread, sequence = where
            candidates = by_group.get(group_name, [])
            at = position.get(group_name, 0)
            while at < len(candidates) and candidates[at]["start_ns"] < start:
                at += 1
            matched = False
            while at < len(candidates) and candidates[at]["start_ns"] <= end:
                candidates[at].update(thread=thread, peer=peer)
                matched = True
                at += 1
            position[group_name] = at
            if not matched:
                rows.append(
                    {
                        "group": group_name,
                        "sequence": sequence,
                        "kind": KINDS[name],
                        "type": kind_type,
                        "bytes_in": bytes_in,
                        "bytes_out": bytes_out,
                        "peer": peer,
                        "start_ns": start,
                        "thread": thread,
                    }
                )
        return rows


def _iterate_tensors(value: Any) -> Iterable[Any]:
    if hasattr(value, "element_size"):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _iterate_tensors(item)


def _compute_sizes(name: str, args: tuple[Any, ...]) -> tuple[str, int, int]:
    """Element type, and bytes that go in and come out on this rank."""
    first = list(_iterate_tensors(args[0])) if args else []
    second = (
        list(_iterate_tensors(args[1])) if len(args) > 1 and KINDS[name] in _OUTPUT_FIRST else []
    )
    outputs, inputs = (first, second) if KINDS[name] in _OUTPUT_FIRST else (first, first)
    any_tensor = next(iter(first or second), None)
    kind = str(any_tensor.dtype).removeprefix("torch.") if any_tensor is not None else ""
    return (
        _TYPE_NAMES.get(kind, kind),
        sum(tensor.nelement() * tensor.element_size() for tensor in inputs),
        sum(tensor.nelement() * tensor.element_size() for tensor in outputs),
    )


def _find_peer(name: str, args: tuple[Any, ...]) -> int | None:
    """Root of a rooted collective or the other side of send and recv, as a rank within the group."""
    if name in ("send", "recv") and len(args) > 1 and isinstance(args[1], int):
        return args[1]
    for argument in args:
        root = getattr(argument, "rootRank", None)
        if isinstance(root, int):
            return root
    return None


def _get_group_name(group: Any) -> str:
    names = sys.modules["torch.distributed.distributed_c10d"]._world.pg_names
    return str(names.get(group) or getattr(group, "group_name", ""))


def _get_global_rank(group: Any, rank: int | None) -> int | None:
    if rank is None or rank < 0:
        return None
    members = sys.modules["torch.distributed.distributed_c10d"]._world.pg_group_ranks.get(group)
    if not members:
        return rank
    return next((int(world) for world, inside in members.items() if inside == rank), rank)


def _read_flight_recorder(begin_ns: int, end_ns: int) -> list[dict[str, Any]]:
    """The calls that PyTorch's own flight recorder saw in this span of time; none where it is
    missing or off.
    """
    c10d = sys.modules["torch._C._distributed_c10d"]
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(
        c10d, "_dump_nccl_trace_json", None
    )
    if dump is None:
        return []
    threads = {str(thread.ident): thread.native_id for thread in threading.enumerate()}
    rows = []
    for entry in json.loads(dump(True, False)).get("entries") or []:
        start = int(entry.get("time_created_ns") or 0)
        if not begin_ns <= start <= end_ns:
            continue
        kind, peer = _parse_recorded_kind(str(entry.get("profiling_name") or ""))
        types = entry.get("input_dtypes") or entry.get("output_dtypes") or [""]
        sequence = (
            entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
        )
        rows.append(
            {
                "group": str((entry.get("process_group") or [""])[0]),
                "sequence": sequence,
                "kind": kind,
                "type": types[0],
                "bytes_in": _count_bytes(entry.get("input_sizes"), entry.get("input_dtypes")),
                "bytes_out": _count_bytes(entry.get("output_sizes"), entry.get("output_dtypes")),
                "peer": peer,
                "start_ns": start,
                "thread": threads.get(str(entry.get("thread_id"))),
            }
        )
    rows.sort(key=lambda row: row["start_ns"])
    return rows


def _parse_recorded_kind(name: str) -> tuple[str, int | None]:
    """`gloo:all_reduce`, `nccl:_all_gather_base`, `nccl:send 0->1` -> kind, and the peer where the
    name has it.
    """
    bare = name.split(":", 1)[-1]
    arrow = re.fullmatch(r"(send|recv)\s+\d+\s*(?:->|<-)\s*(\d+)", bare)
    if arrow:
        return arrow[1], int(arrow[2])
    word = bare.split(" ")[0].lower().lstrip("_").removesuffix("_coalesced")
    for kind in sorted(set(KINDS.values()), key=len, reverse=True):
        if word.startswith((kind, kind.replace("_", ""))):
            return kind, None
    return word, None


def _count_bytes(sizes: Any, types: Any) -> int | None:
    """Bytes of all tensors; None where an element type is unknown."""
    tensors = list(zip(sizes or [], types or [], strict=False))
    if any(kind not in _ITEM_BYTES for _, kind in tensors):
        return None
    return sum(math.prod(map(int, size)) * _ITEM_BYTES[kind] for size, kind in tensors)
