"""Running one rank's plan in this process: memory, contents, the first pass, and passes until their
median is precise.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import polars as pl

import traceloom
from traceloom.errors import CheckError, InputError, TraceloomError, UsageError
from traceloom.system import units
from traceloom.system.process import get_free_memory
from traceloom.trace.notice import Notice
from traceloom.workload.replay import binding
from traceloom.workload.replay.contents import generate_content
from traceloom.workload.replay.execution import GPU_TIMES, measure_device_times
from traceloom.workload.replay.kernels import KernelLoader
from traceloom.workload.replay.plan import FAILURES, RankPlan, RankReplayResult, ReplayPlan
from traceloom.workload.replay.program import (
    Bind,
    ProgramBuilder,
    RunMode,
    build_geometries,
    create_view,
    should_stay_on_cpu,
)
from traceloom.workload.replay.schema import UnreadableSchemaError, find_own_modules, parse_schema

if TYPE_CHECKING:
    import torch

    from traceloom.workload.replay.communication import RunningGroups

Pace = Literal["fast", "recorded"]
ThreadMode = Literal["one", "recorded"]

_MEDIAN_TOLERANCE = 0.02
_CONFIDENCE = 0.95
_WARMUP_PASSES, _WARMUP_S = 2, 1.0
_MIN_BUSY_SHARE = 0.05  # of the time of the passes
# Number of recorded passes, of passes before them, and of passes for the recorder's graph step.
_RECORDED_PASSES, _PASSES_BEFORE_RECORDED, _GRAPH_STEP_PASSES = 5, 3, 3
_MAX_MEAN_MAGNITUDE = 1e6
"""Floats that accumulate over passes get their initial content again beyond this mean magnitude."""
_ENVIRONMENT_VARIABLE_PREFIXES = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "HIP_",
    "LD_PRELOAD",
)


@dataclass(frozen=True)
class RunOptions:
    """The user's options of a run.

    Attributes:
        device: `cpu`, `cuda`, `xpu`; None for the recorded type if available, else the CPU.
        pace: `fast`: one op after the other; `recorded`: with the host's gaps between them.
        iterations: Number of timed passes; None: until the median is known to 2 %.
        max_time_s: No pass starts later than this after the first.
        timeout_s: Of a collective.
        memory_limit: Max bytes of a rank's tensors; None for the free memory.
        seed: Random seed of the contents and of random ops.
        backend: Of torch.distributed; None for the device's default.
        ranks: Recorded ranks that run; None: all.
        stand_ins: Whether ops that cannot be run take their recorded time.
        strict: Whether the first op that fails ends the run.
        threads: `one` thread that calls all ops, or as `recorded`.
        imports: Modules that define custom ops.
        trust: Whether to execute the sources of compiled kernels, which came with the trace.
        record: Directory for a capture of some extra passes; None for no capture.
        force: Whether to replace an earlier capture there.
    """

    device: str | None = None
    pace: Pace = "fast"
    iterations: int | None = None
    max_time_s: float = 60.0
    timeout_s: float = 300.0
    memory_limit: int | None = None
    seed: int = 0
    backend: str | None = None
    ranks: tuple[int, ...] | None = None
    stand_ins: bool = False
    strict: bool = False
    threads: ThreadMode = "one"
    imports: tuple[str, ...] = ()
    trust: bool = False
    record: str | None = None
    force: bool = False


def is_median_precise(values: Sequence[int], tolerance: float = _MEDIAN_TOLERANCE) -> bool:
    """Returns whether the 95 % confidence interval of the median is within `tolerance` of it on
    both sides.

    The interval lies between two of the values, whatever their distribution; fewer than six values
    have none.
    """
    count = len(values)
    tail_probability, trimmed_count = 0.0, 0
    while (tail_probability := tail_probability + math.comb(count, trimmed_count) / 2**count) <= (
        1 - _CONFIDENCE
    ) / 2:
        trimmed_count += 1
    if not trimmed_count:
        return False
    sorted_values = sorted(values)
    return (
        sorted_values[count - trimmed_count] - sorted_values[trimmed_count - 1]
        <= 2 * tolerance * sorted_values[count // 2]
    )


def get_free_bytes(device: torch.device) -> int | None:
    """Returns the memory available for tensors of this device; None if the system does not report
    it.
    """
    if device.type != "cpu":
        import torch

        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return get_free_memory()


def check_memory(
    plan: RankPlan,
    device: torch.device,
    limit: int | None,
    process_count: int,
    needed: Collection[int] | None = None,
) -> None:
    """Checks that the tensors of a plan fit into memory, before the first of them is allocated.

    Args:
        plan: Plan of one rank.
        device: Device of the run.
        limit: The user's limit.
        process_count: Processes that share the memory.
        needed: The storages that are allocated; None: all.

    Raises:
        InputError: slug `too-little-memory`.
    """
    storages = (
        plan.storages
        if needed is None
        else plan.storages.filter(pl.col("storage").is_in(list(needed)))
    )
    peak, free = plan.peak_bytes(storages), get_free_bytes(device)
    allowed = [(limit, "--memory-limit allows")] if limit is not None else []
    if free is not None:
        shared = f" for each of {process_count} processes" if process_count > 1 else ""
        allowed.append((free // process_count, f"this machine has free on {device.type}{shared}"))
    for allowed_bytes, limit_text in allowed:
        if peak > allowed_bytes:
            raise InputError(
                f"the tensors of rank {plan.rank} take {units.format_size(peak)}, and {units.format_size(allowed_bytes)} is what {limit_text}",
                slug="too-little-memory",
                hint="replay a part with --scope or --steps, or fewer ranks with --ranks",
            )


def choose_device(
    plan: ReplayPlan, options: RunOptions, process_index: int
) -> tuple[torch.device, tuple[Notice, ...]]:
    """Returns the device of a process, and notices about the choice.

    Raises:
        InputError: slug `no-device`.
    """
    import torch

    recorded = {
        str(name).partition(":")[0]
        for rank_plan in plan
        for name in rank_plan.storages["device"].unique()
    } - {"cpu", "meta", ""}  # a sparse tensor has no storage that is anywhere
    kind = options.device or next(
        (name for name in sorted(recorded) if _is_device_available(name)), "cpu"
    )
    if kind != "cpu" and not _is_device_available(kind):
        raise InputError(
            f"this torch ({torch.__version__}) has no device of the kind {kind} here",
            slug="no-device",
            hint="leave --device out to run on what is there, or install a torch for it",
        )
    notices: tuple[Notice, ...] = ()
    if recorded != {kind} - {"cpu"}:
        recorded_text = " and ".join(sorted(recorded)) or "cpu"
        text = f"recorded on {recorded_text}, replayed on {kind}: times of ops are those of this device, not of the recorded one"
        notices = (Notice("other-device", "warning", text),)
    if kind == "cpu":
        return torch.device("cpu"), notices
    module: Any = torch.get_device_module(kind)
    index = int(os.environ.get("LOCAL_RANK", process_index)) % module.device_count()
    module.set_device(index)
    return torch.device(kind, index), notices


def _is_device_available(kind: str) -> bool:
    import torch

    try:
        return kind == "cpu" or bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False


def import_custom_ops(modules: Sequence[str], plans: Iterable[RankPlan] = ()) -> frozenset[str]:
    """Imports modules that define custom ops, also from the current directory, and those of PyTorch
    that define ops of some plans; returns their namespaces.

    Raises:
        UsageError: slug `no-such-module`.
    """
    import torch

    def namespaces() -> set[str]:
        return {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}  # noqa: SLF001

    for module in find_own_modules(
        schema for plan in plans for schema in plan.calls["schema"]
    ).values():
        with contextlib.suppress(ImportError):  # of another version: its ops get stand-ins
            importlib.import_module(module)
    before = namespaces()
    sys.path += [str(Path.cwd())] if modules else []
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:  # noqa: PERF203  (only a few modules)
            raise UsageError(
                f"--import {module}: {error}",
                slug="no-such-module",
                hint="install it, or start where it lies",
            ) from error
    return frozenset(namespaces() - before)


def find_async_copied_storages(plan: RankPlan) -> frozenset[int]:
    """Returns the storages that ops copy asynchronously: on the host the program had pinned them,
    or the copy would have been synchronous.
    """
    calls = []
    for call, schema, arguments in plan.calls.select("call", "schema", "arguments").iter_rows():
        try:
            names = (
                [argument.name for argument in parse_schema(schema).arguments]
                if "non_blocking" in schema
                else []
            )
        except UnreadableSchemaError:  # such an op does not run
            continue
        values = dict(zip(names, msgspec.json.decode(arguments, type=list), strict=False))
        calls += [call] if values.get("non_blocking") is True else []
    inputs = plan.ops.filter(pl.col("call").is_in(calls))["inputs"].explode().drop_nulls()
    return frozenset(plan.tensors["storage"].gather(inputs))


class _ExternalStorages:
    def __init__(
        self, plan: RankPlan, device: torch.device, seed: int, needed: Collection[int]
    ) -> None:
        self._geometries = build_geometries(plan, device)
        self._device, self._seed, self._keep_on_host = (
            device,
            seed,
            should_stay_on_cpu(plan, device),
        )
        self._pinned = find_async_copied_storages(plan) if self._keep_on_host else frozenset()
        external = plan.storages.filter("external", pl.col("storage").is_in(list(needed)))
        external_tensors = plan.tensors.filter(
            pl.col("storage").is_in(external["storage"].implode())
        )
        self._dtypes = dict(
            external_tensors.group_by("storage", maintain_order=True)
            .agg(pl.col("dtype").first())
            .iter_rows()
        )
        self._rows = {
            row["storage"]: row for row in external.to_dicts() if row["storage"] in self._dtypes
        }
        self._storage_of = dict(external_tensors.select("tensor", "storage").iter_rows())
        self._data: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for tensor, values in plan.data.select("tensor", "values").iter_rows():
            if tensor in self._storage_of:
                self._data[self._storage_of[tensor]].append((tensor, values))
        self._storages = {storage: self._create_storage(storage) for storage in self._rows}
        self.tensors = {tensor: self._create_tensor(tensor) for tensor in self._storage_of}
        self._versions = {row: tensor._version for row, tensor in self.tensors.items()}  # noqa: SLF001
        self._saved_integers: dict[int, torch.Tensor] = {}
        self._written_float_storages: list[int] = []
        self._rebound_tensors: list[int] = []

    def _create_storage(self, storage: int) -> torch.Tensor:
        import torch

        row, dtype = self._rows[storage], getattr(torch, self._dtypes[storage])
        elements = -(-row["bytes"] // dtype.itemsize)
        content = {None: "floats", "data": "integers"}.get(row["content"], row["content"])
        elements_tensor = generate_content(
            elements, dtype, content, row["low"], row["high"], seed=self._seed + storage
        )
        for tensor, values in self._data[storage]:
            view = create_view(self._geometries[tensor], elements_tensor)
            view.copy_(torch.frombuffer(bytearray(values), dtype=view.dtype).view(view.shape))
        if self._keep_on_host and row["device"] == "cpu":
            return elements_tensor.pin_memory() if storage in self._pinned else elements_tensor
        return elements_tensor.to(self._device)

    def _create_tensor(self, tensor: int) -> torch.Tensor:
        # Not a view of the whole storage: some ops refuse to work in place on views.
        return create_view(self._geometries[tensor], self._storages[self._storage_of[tensor]])

    def find_changes(
        self, registers: Sequence[Any], untracked_writes: Collection[int] = ()
    ) -> None:
        """Determines after a pass which storages ops write to, and which tensors got another
        geometry or storage.

        Args:
            registers: Registers at the start of the pass.
            untracked_writes: Storages that may have been written to without PyTorch's knowledge.
        """
        written = {
            self._storage_of[row]
            for row, version in self._versions.items()
            if registers[row]._version != version  # noqa: SLF001
        } | (self._storages.keys() & untracked_writes)
        for storage in sorted(written):
            if self._storages[storage].dtype.is_floating_point:
                self._written_float_storages.append(storage)
            else:
                self._saved_integers[storage] = self._create_storage(storage)
        self._rebound_tensors = [
            row
            for row in self.tensors
            if tuple(registers[row].shape) != self._geometries[row].shape
            or registers[row].untyped_storage().data_ptr()
            != self._storages[self._storage_of[row]].untyped_storage().data_ptr()
        ]

    def restore(self, registers: list[Any], *, check_floats: bool = True) -> None:
        """Restores contents before a pass: integers, because they may be indices, and floats that
        have grown too large.
        """
        for storage, content in self._saved_integers.items():
            self._storages[storage].copy_(content)
        for storage in self._written_float_storages if check_floats else ():
            storage_tensor = self._storages[storage]
            if not float(storage_tensor.float().sum().abs()) < _MAX_MEAN_MAGNITUDE * max(
                1, storage_tensor.numel()
            ):
                storage_tensor.copy_(self._create_storage(storage))
        for row in self._rebound_tensors:
            registers[row] = self._create_tensor(row)


class PlanRunner:
    """A rank's plan that has been run once, and can be run again.

    Args:
        plan: Plan of one rank.
        device: The device.
        options: The options.
        communication: Groups of the running ranks; None if this process runs alone.
        process_count: Processes that share this machine's memory.
        bind: Binds calls.
        kernels: Binds compiled kernels; None for stand-ins.

    Raises:
        InputError: slug `too-little-memory`.
        CheckError: slug `op-failed`, with `strict`.
    """

    def __init__(
        self,
        plan: RankPlan,
        device: torch.device,
        options: RunOptions,
        communication: RunningGroups | None = None,
        process_count: int = 1,
        *,
        bind: Bind = binding.bind_call,
        kernels: KernelLoader | None = None,
    ) -> None:
        import torch

        mode = RunMode(
            device,
            bind,
            communication,
            kernels or KernelLoader(plan, device),
            options.pace == "recorded",
            options.threads == "recorded",
            options.stand_ins,
        )
        lowering = ProgramBuilder(plan, mode)
        check_memory(plan, device, options.memory_limit, process_count, lowering.needed)
        self.plan = plan
        self._seed = options.seed
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._cpu_clock = (
            time.thread_time_ns if torch.get_num_threads() == 1 else time.process_time_ns
        )
        with torch.no_grad():
            self._contents = _ExternalStorages(plan, device, options.seed, lowering.needed)
            self.program, self.stand_ins = lowering.program(self._contents.tensors)
            torch.manual_seed(self._seed)
            self.program.settle(*([self._raise_op_error] if options.strict else []))
            self._contents.find_changes(self.program.registers, lowering.kernel_written_storages)

    def _raise_op_error(self, op: int, text: str) -> None:
        row = _build_op_messages(self.plan, {op: text}).row(0, named=True)
        raise CheckError(
            f"{row['name']}: {row['text']}",
            slug="op-failed",
            where=f"op {op}" if row["node"] is None else f"node {row['node']}",
        )

    def run_pass(
        self,
        *,
        with_timer: bool = False,
        is_recording: bool = False,
        call_wrapper: Callable[..., Any] | None = None,
        wait_for_ranks: Callable[[], None] | None = None,
    ) -> tuple[int, int]:
        """Runs one pass; returns wall time and processor time of the thread that calls the ops, ns.

        Args:
            with_timer: Use a timer around each op; `program.times` returns the readings.
            call_wrapper: Makes each call, see `Program.run_wrapped`.
            is_recording: A recorder is active: run nothing outside the plan that is not essential.
            wait_for_ranks: Waits for the other ranks.
        """
        import torch

        with torch.no_grad():
            self._contents.restore(self.program.registers, check_floats=not is_recording)
            run = self.program.run_once
            if with_timer:
                run = partial(self.program.run_timed, self._cpu_clock)
            elif call_wrapper:
                run = partial(self.program.run_wrapped, call_wrapper)
            # Random numbers that are lengths must be those for which the first pass found what runs
            torch.manual_seed(self._seed)
            self._synchronize()
            if wait_for_ranks:
                wait_for_ranks()
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            run()
            self._synchronize()
            return time.perf_counter_ns() - wall, time.thread_time_ns() - cpu

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated()) if self._module else self.program.peak_bytes

    def _synchronize(self) -> None:
        if self._module:
            self._module.synchronize()


def record_passes(
    runner: PlanRunner,
    directory: str,
    source_run: str,
    *,
    force: bool = False,
    wait_for_ranks: Callable[[], None] | None = None,
) -> None:
    """Records some passes, each as a step, as `traceloom record --graph` does: one of them as the
    graph step.

    Args:
        runner: The plan to record.
        directory: Directory of the capture.
        source_run: The replayed run, to be named in the capture.
        force: Whether to replace an earlier capture.
        wait_for_ranks: Waits for the other ranks before a pass.

    Raises:
        OutputError: `capture-exists`, `not-writable`.
    """
    with traceloom.record(
        directory,
        steps=_RECORDED_PASSES,
        force=force,
        memory=True,
        graph_step=True,
        quiet=True,
        replay_of=source_run,
    ):
        for _ in range(_PASSES_BEFORE_RECORDED + _RECORDED_PASSES + _GRAPH_STEP_PASSES):
            runner.run_pass(is_recording=True, wait_for_ranks=wait_for_ranks)
            traceloom.step()


def run_passes(
    runner: PlanRunner,
    options: RunOptions,
    *,
    wait_for_ranks: Callable[[], None] | None = None,
    agree_to_continue: Callable[[bool], bool] = bool,
    report_progress: Callable[[str], None] = lambda _: None,
) -> RankReplayResult:
    """Runs a rank's plan until its time is precise, with passes with a timer around each op in
    between.

    Args:
        runner: The plan, run once.
        options: Limits on the number of passes.
        wait_for_ranks: Waits for the other ranks before a pass.
        agree_to_continue: Returns whether any rank continues, given whether this one does.
        report_progress: Called with a progress message.
    """
    import resource

    wall_times_ns: list[int] = []
    cpu_times_ns: list[int] = []
    times: list[pl.DataFrame] = []
    gc.collect()
    gc.disable()  # a collection would distort single passes
    try:
        started, should_continue = time.monotonic(), True
        for _ in range(_WARMUP_PASSES):
            if agree_to_continue(time.monotonic() - started < _WARMUP_S):
                runner.run_pass(wait_for_ranks=wait_for_ranks)
        started, waited_ns = time.monotonic(), _read_waiting_ns()
        while should_continue:
            wall, cpu = runner.run_pass(wait_for_ranks=wait_for_ranks)
            wall_times_ns.append(wall)
            cpu_times_ns.append(cpu)
            runner.run_pass(with_timer=True, wait_for_ranks=wait_for_ranks)
            times.append(runner.program.times())
            report_progress(f"pass {len(wall_times_ns)}: {units.format_duration(wall)}")
            enough = (
                len(wall_times_ns) >= options.iterations
                if options.iterations is not None
                else is_median_precise(wall_times_ns)
            )
            should_continue = agree_to_continue(
                not enough and time.monotonic() - started < options.max_time_s
            )
        waited_share = (_read_waiting_ns() - waited_ns) / 1e9 / (time.monotonic() - started)
    finally:
        gc.enable()
    ops = (
        pl.concat(times)
        .group_by("op", maintain_order=True)
        .agg(pl.col("duration_ns").alias("durations_ns"), pl.col("cpu_ns"))
    )
    notices = []
    if waited_share >= _MIN_BUSY_SHARE:
        text = (
            f"the machine is busy: for {waited_share:.0%} of the time of the passes, the replay waited for a processor "
            "that others used; alone it takes less"
        )
        notices.append(Notice("busy-machine", "warning", text, rank=runner.plan.rank))
    try:
        device_times = measure_device_times(runner, wait_for_ranks)
    except TraceloomError as error:
        text = f"how long the GPU worked for each op could not be measured: {error.message}"
        notices.append(Notice("no-gpu-times", "warning", text, rank=runner.plan.rank))
        device_times = GPU_TIMES.to_frame()
    if options.iterations is None and not is_median_precise(wall_times_ns):
        text = f"after {units.format_quantity(len(wall_times_ns), 'pass')} the median time of a pass is not known to 2 %"
        notices.append(Notice("median-unsure", "warning", text, rank=runner.plan.rank))
    program = runner.program
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return RankReplayResult(
        runner.plan.rank,
        tuple(wall_times_ns),
        tuple(cpu_times_ns),
        ops.join(device_times, on="op", how="left", maintain_order="left"),
        runner.peak_bytes(),
        resident_bytes,
        _build_op_messages(runner.plan, program.failures),
        _build_op_messages(runner.plan, program.replaced),
        runner.stand_ins,
        tuple(notices),
    )


def _read_waiting_ns() -> int:
    """Returns how long this thread has been ready to run while others ran; 0 where the system does
    not say.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _build_op_messages(plan: RankPlan, text_by_op: dict[int, str]) -> pl.DataFrame:
    """Returns ops with a message, and the arguments of their calls."""
    messages = pl.DataFrame(
        {"op": list(text_by_op), "text": list(text_by_op.values())},
        schema={"op": pl.UInt32, "text": pl.String},
    )
    return (
        plan.ops.select("op", "node", "name", "call")
        .join(messages, on="op", maintain_order="left")
        .join(plan.calls.select("call", "arguments"), on="call", how="left", maintain_order="left")
        .with_columns(
            pl.concat_str("text", pl.format(" (arguments {})", "arguments"), ignore_nulls=True)
        )
        .select(*FAILURES)
    )


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Returns other facts that affect times."""
    import torch

    name = (
        platform.processor() or platform.machine()
        if device.type == "cpu"
        else torch.get_device_module(device).get_device_name(device)
    )
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device_name": name,
        "processors": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "flush_denormal": device.type == "cpu",
        "variables": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(_ENVIRONMENT_VARIABLE_PREFIXES)
        },
    }
