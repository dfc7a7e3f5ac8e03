"""Allocator history, owners of live memory, out of memory.

PyTorch's profiler knows only blocks that are made while it records. The allocator's own history
goes back to the process's first block on the device, for two microseconds an allocation.

PyTorch tells nothing of blocks from before the window, so that a memory record opens with this
count.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import contextlib
import gc
import inspect
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from traceloom.capture.modules import iterate_modules
from traceloom.capture.settings import print_once
from traceloom.capture.writing import write_atomically, write_json

MAX_ENTRIES = 100_000
"""What the allocator keeps, the newest; blocks that are alive keep their stack however old they
are.
"""
_HISTORY_OPTIONS = {"context": "alloc", "stacks": "python", "max_entries": MAX_ENTRIES}


class AllocatorHistory:
    """The history of the CUDA (or HIP) allocator in this process. A program's own history is left
    as it is.

    Attributes:
        problem: Why there is none, in words; empty where nothing went wrong.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._pid = os.getpid()
        self._wanted = False
        self._ours = False

    def begin(self) -> None:
        """Keep a history from the moment on at which the program begins to use the device; that is
        never our doing.
        """
        if not self._wanted and torch.backends.cuda.is_built():
            self._wanted = True
            torch.cuda._lazy_call(self._device_is_used)

    def _device_is_used(self) -> None:
        """PyTorch would raise into the program what goes wrong here."""
        if (
            not self._wanted or os.getpid() != self._pid
        ):  # ended meanwhile, or a fork, which has one of its own
            return
        try:
            is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
            if is_enabled is None or not is_enabled():  # else the program keeps a history already
                supported = inspect.signature(torch.cuda.memory._record_memory_history).parameters
                options = {
                    name: value for name, value in _HISTORY_OPTIONS.items() if name in supported
                }
                torch.cuda.memory._record_memory_history("all", **options)
                self._ours = True
        except Exception as error:  # noqa: BLE001  (the boundary to a stranger's program)
            self.problem = f"the allocator keeps no history, so that blocks have no stacks: {error}"
            print_once("no-memory-history", self.problem)

    def save(self, path: Path) -> bool:
        """Write a snapshot with the history, whole or not at all; False where the device is not in
        use.

        Raises:
            OSError: It could not be written.
            RuntimeError: The allocator in use has no snapshots.
        """
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return False
        with write_atomically(path) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
        return True

    def end(self) -> None:
        """Keep no history any more, where it was ours."""
        self._wanted = False
        if self._ours and os.getpid() == self._pid:
            self._ours = False
            with contextlib.suppress(
                RuntimeError
            ):  # the device may be gone at the end of a process
                torch.cuda.memory._record_memory_history(None)


COLUMNS = ("address", "bytes", "device_type", "device", "owner", "name")
MAX_ROWS = 10_000
MAX_NODES = 200_000  # of the graph of a forward pass: some seconds
_SAVED_PREFIX = "_raw_saved_"
_MAX_PARTS = 16

Row = tuple[int, int, str, int, str, str]
Owned = tuple[str, str, torch.Tensor]


def list_live_storages() -> dict[str, list[Any]]:
    """All live storages that Python can reach, as columns (`COLUMNS`), the largest first; a storage
    counts once.

    Beyond `MOST_ROWS` the small ones are added up, with address 0.

    Parameters, buffers, gradients and optimizer state are named by the module that holds them
    (`GPT.blocks.0.weight`); what a forward pass has saved for its backward pass by the node of the
    graph that keeps it (`activation`), found by following the graphs of the tensors that are
    reachable; other tensors by their type and shape.
    """
    kinds = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    objects = [obj for obj in gc.get_objects() if issubclass(type(obj), kinds)]
    rows: dict[tuple[str, int], Row] = {}
    for owner, name, owned in _iterate_owned(objects):
        for tensor in _unwrap_tensor(owned):
            try:
                storage = tensor.untyped_storage()
                size, address, at = storage.nbytes(), storage.data_ptr(), storage.device
            except (RuntimeError, NotImplementedError, ReferenceError):
                continue  # no storage: sparse, fake or meta tensors, subclasses that wrap others
            if size and address:
                number = -1 if at.index is None else at.index
                rows.setdefault((at.type, address), (address, size, at.type, number, owner, name))
    ordered = sorted(rows.values(), key=lambda row: -row[1])
    kept = ordered[:MAX_ROWS]
    smallest: dict[tuple[str, int, str], list[int]] = {}
    for _, size, device_type, device, owner, _ in ordered[MAX_ROWS:]:
        entry = smallest.setdefault((device_type, device, owner), [0, 0])
        entry[0] += size
        entry[1] += 1
    for (device_type, device, owner), (size, count) in smallest.items():
        kept.append((0, size, device_type, device, owner, f"({count} smaller ones)"))
    return {name: [row[k] for row in kept] for k, name in enumerate(COLUMNS)}


def count_live_bytes(columns: dict[str, list[Any]]) -> dict[str, int]:
    """Bytes of a census by device, as `cpu` or `cuda:0`."""
    total: dict[str, int] = {}
    for size, kind, number in zip(
        columns["bytes"], columns["device_type"], columns["device"], strict=True
    ):
        device = kind if number < 0 else f"{kind}:{number}"
        total[device] = total.get(device, 0) + size
    return total


def _iterate_owned(objects: list[Any]) -> Iterator[Owned]:
    """(owner, name, tensor), the surest owner first."""
    modules = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
    inner = {
        id(child) for module in modules for child in module._modules.values() if child is not None
    }
    roots = [module for module in modules if id(module) not in inner]
    names: dict[int, str] = {}
    gradients: list[tuple[str, torch.Tensor]] = []
    for root in roots:
        for path, module in iterate_modules(root):
            for name, tensor in module._parameters.items():
                if tensor is None:
                    continue
                names.setdefault(id(tensor), f"{path}.{name}")
                yield "parameter", f"{path}.{name}", tensor
                if tensor.grad is not None:
                    gradients.append((f"{path}.{name}.grad", tensor.grad))
    for root in roots:
        for path, module in iterate_modules(root):
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    yield "buffer", f"{path}.{name}", tensor
    for name, tensor in gradients:
        yield "gradient", name, tensor
    for optimizer in [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]:
        for parameter, state in list(optimizer.state.items()):
            of = names.get(id(parameter), "(no module)")
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield "optimizer_state", f"{type(optimizer).__name__}.{key} of {of}", value
    tensors = [obj for obj in objects if isinstance(obj, torch.Tensor)]
    nodes = []
    for tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter):
            yield "parameter", "(no module)", tensor
        with contextlib.suppress(
            RuntimeError
        ):  # of a view that was changed in place where it must not be, as in FSDP
            if tensor.grad_fn is not None:
                nodes.append(tensor.grad_fn)
            elif tensor.grad is not None:
                yield "gradient", "(no module)", tensor.grad
    yield from _iterate_saved_tensors(nodes)
    for tensor in tensors:
        yield "other", f"{type(tensor).__name__} {list(tensor.shape)}", tensor


def _iterate_saved_tensors(todo: list[Any]) -> Iterator[Owned]:
    """What the graphs of forward passes have saved for their backward passes, in at most
    `MOST_NODES` nodes.

    Nothing is computed or changed: saved tensors are looked at as they lie there, unpacked by no
    hook. Whether the program holds such a tensor, too, cannot be determined: PyTorch keeps its
    Python object alive as long as the tensor.
    """
    seen: set[Any] = set()
    saved_by: dict[type, list[str]] = {}
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
        kind = type(node)
        if kind not in saved_by:
            saved_by[kind] = [name for name in dir(kind) if name.startswith(_SAVED_PREFIX)]
        for name in saved_by[kind]:
            try:
                value = getattr(node, name)
                several = value if isinstance(value, (tuple, list)) else (value,)
                tensors = [
                    saved.data for saved in several if saved is not None and hasattr(saved, "data")
                ]
            except (
                RuntimeError,
                AttributeError,
            ):  # it was freed already, or packed by hooks of the user
                continue
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    yield "activation", f"kept for backward by {node.name()}", tensor
        leaf = getattr(
            node, "variable", None
        )  # a leaf that the program has let go of, with its gradient
        if isinstance(leaf, torch.Tensor):
            if leaf.grad is not None:
                yield "gradient", "(no module)", leaf.grad
            yield "activation", f"kept for backward by {node.name()}", leaf


def _unwrap_tensor(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself; for one made of others (the shard in a `DTensor`), those."""
    todo = [tensor]
    for _ in range(_MAX_PARTS):
        if not todo:
            return
        current = todo.pop()
        parts = getattr(type(current), "__tensor_flatten__", None)
        if parts is None:
            yield current
            continue
        try:
            todo += [
                part
                for name in parts(current)[0]
                if isinstance(part := getattr(current, name), torch.Tensor)
            ]
        except (
            RuntimeError,
            AttributeError,
            TypeError,
            NotImplementedError,
        ):  # a subclass of the user's own
            yield current


FORMAT = "traceloom-out-of-memory"
VERSION = 1
_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes"
)
_CUDA = re.compile(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
MAX_FRAMES = 40


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception says that memory ran out: PyTorch's own kind, or the plain one of the
    CPU's allocator.
    """
    return error is not None and (
        type(error).__name__ == "OutOfMemoryError" or bool(_CPU.search(str(error)))
    )


def parse_requested_bytes(error: BaseException) -> int | None:
    """What was asked for in vain; None where the message does not say."""
    text = str(error)
    cpu = _CPU.search(text)
    if cpu:
        return int(cpu[1])
    cuda = _CUDA.search(text)
    return round(float(cuda[1]) * _UNITS[cuda[2]]) if cuda else None


def write(path: Path, error: BaseException, steps: int) -> None:
    """Write who holds the memory now, and where in the program it ran out.

    Args:
        path: The file.
        error: The exception, with its traceback: its frames still hold their tensors.
        steps: How many steps the run has ended.
    """
    stack = []  # where it happened, outermost frame first, as `file(line): function`
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        stack.append(f"{code.co_filename}({at.tb_lineno}): {code.co_name}")
        at = at.tb_next
    document = {
        "format": FORMAT,
        "version": VERSION,
        "time_ns": time.time_ns(),
        "step": steps,
        "asked_bytes": parse_requested_bytes(error),
        "message": str(error)[:4000],
        "stack": stack[-MAX_FRAMES:],
        "devices": describe_memory(),
        "live_storages": list_live_storages(),
    }
    try:
        write_json(path, document)
    except OSError as problem:
        print_once(
            "no-memory-report",
            f"the memory report could not be written: {problem.strerror or problem}",
        )


def describe_memory() -> list[dict[str, Any]]:
    """What the allocators and the devices say of themselves."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    out = []
    for number in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(number)
        if not stats:
            continue
        free, total = torch.cuda.mem_get_info(number)
        out.append(
            {
                "device_type": "cuda",
                "device": number,
                "allocated_bytes": stats.get("allocated_bytes.all.current", 0),
                "reserved_bytes": stats.get("reserved_bytes.all.current", 0),
                "free_bytes": free,
                "total_bytes": total,
                "retries": stats.get("num_alloc_retries", 0),
            }
        )
    return out


def get_last_error() -> BaseException | None:
    """The exception that ends the process, as Python's interpreter leaves it for those who run at
    exit.
    """
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None
