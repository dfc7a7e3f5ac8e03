"""Running the instructions of a program on threads and streams, with timers, failures and GPU
times.

A register holds a tensor, a constant, or a work that is waited for later. An instruction is a
function, a picker of its arguments from the registers (all in C), the register of its result, the
registers for parts of it, and the registers to clear afterwards, so that unused memory is freed as
in the original.

The first, untimed pass determines what only running can show: the structure of results, which ops
fail here, and which yield another shape than recorded. From then on a pass is a fixed list of
calls.

For an op on a GPU, a host clock measures its launch; an op that waits for the device takes as long
as all work before it.
"""

from __future__ import annotations

import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from traceloom.errors import CheckError
from traceloom.formats import load
from traceloom.trace.frames import build_schema
from traceloom.trace.trace import Trace
from traceloom.workload.replay.inputs import find_launched_work
from traceloom.workload.replay.script import flatten_values

if TYPE_CHECKING:
    import torch

    from traceloom.workload.replay.running import PlanRunner


Registers = list[Any]
Pick = Callable[[Registers], Sequence[Any]]
NOT_TIMED = -1
"""The op of an instruction without a row in the plan."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A tensor of the plan without its content; `bytes` is the size of its storage, `on_host`
    whether it stays on the CPU.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str
    bytes: int
    on_host: bool = False

    def new(self, device: torch.device | str) -> torch.Tensor:
        """Returns a tensor on a new storage, filled with ones; with zeros unless it holds floats,
        since integers may be indices.
        """
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        target = "cpu" if self.on_host else device
        storage = torch.zeros(-(-self.bytes // dtype.itemsize), dtype=dtype, device=target)
        if dtype.is_floating_point and dtype.itemsize > 1:
            storage.fill_(1)
        return storage.as_strided(self.shape, self.strides, self.offset)

    def is_of(self, value: Any) -> bool:
        """Returns whether a result has this shape and type."""
        return (
            hasattr(value, "dtype")
            and value.shape == self.shape
            and str(value.dtype) == f"torch.{self.dtype}"
        )


@dataclass(slots=True)
class Instruction:
    """One call.

    Attributes:
        op: The row of the plan's `ops`, or `NOT_TIMED`.
        function: The function to call.
        pick: Picks its arguments from the registers.
        outputs: Registers of its flattened results; None for unused ones.
        dead: Registers to clear afterwards.
        fallible: Whether a failure is replaced by a stand-in; else it ends the run.
        lane: The number of the thread that calls it.
        stand_in_ns: Duration of its stand-in if it fails.
    """

    op: int
    function: Callable[..., Any]
    pick: Pick
    outputs: tuple[int | None, ...] = ()
    dead: tuple[int, ...] = ()
    fallible: bool = True
    lane: int = 0
    stand_in_ns: int = 0


class ThreadHandOff:
    """Hands over from a thread that is done with an op to one that waits for it."""

    def __init__(self) -> None:
        self._given = threading.Semaphore(0)
        self._stopped = False

    def give(self) -> None:
        """Lets the other thread continue."""
        self._given.release()

    def take(self) -> None:
        """Waits for the other thread.

        Raises:
            InterruptedError: The other thread failed.
        """
        self._given.acquire()
        if self._stopped:
            raise InterruptedError

    def stop(self) -> None:
        """Wakes the waiting thread with an error."""
        self._stopped = True
        self._given.release()


def make_picker(argument_registers: Sequence[int | Sequence[Any]]) -> Pick:
    """Returns a function that picks arguments from the registers.

    Args:
        argument_registers: The register of each argument; a list of them (of lists ...) for an
            argument that is a list of tensors.
    """
    if any(not isinstance(item, int) for item in argument_registers):
        parts = [
            itemgetter(item) if isinstance(item, int) else make_picker(item)
            for item in argument_registers
        ]
        return lambda registers: [part(registers) for part in parts]
    if len(argument_registers) > 1:
        return itemgetter(*argument_registers)
    first = argument_registers[0] if argument_registers else 0
    return itemgetter(slice(first, first + len(argument_registers)))  # type: ignore[operator]


def create_tensors(
    geometries: Sequence[Geometry | None], device: torch.device | str, time_ns: int = 0
) -> list[Any]:
    """Stands in for an op: returns tensors of its recorded outputs after its recorded time."""
    end = time.perf_counter_ns() + time_ns
    tensors = [geometry.new(device) if geometry else None for geometry in geometries]
    wait_until(end)
    return tensors


_SLEEPS_LATE_NS = 200_000


def wait_until(end_ns: int) -> None:
    """Waits until a time of `time.perf_counter_ns`; spins at the end, because sleep wakes late."""
    remaining_ns = end_ns - time.perf_counter_ns()
    if remaining_ns > 2 * _SLEEPS_LATE_NS:
        time.sleep((remaining_ns - _SLEEPS_LATE_NS) / 1e9)
    while time.perf_counter_ns() < end_ns:
        pass


# Index of the instruction, function, picker of its arguments, register of its result, registers of
# parts of the result, and registers to clear afterwards.
_Call = tuple[int, Callable[..., Any], Pick, int, tuple[tuple[int, int], ...], tuple[int, ...]]


class Program:
    """A rank's plan, ready to run.

    Args:
        instructions: The calls, in order; the program changes those that fail.
        registers: Registers at the start of every pass: external tensors and constants, all else
            None.
        geometries: Geometries of the registers that hold tensors of the plan, which are the first
            ones.
        device: Device of replacement tensors.
        hand_offs: Those used by instructions of several threads.

    Attributes:
        registers: Registers at the start of every pass.
        failures: Op -> its error message. Its outputs are replaced by tensors as recorded from then
            on.
        replaced: Op -> the shapes it returned that differ from the recording. Tensors as recorded
            replace them.
        peak_bytes: Peak bytes of storages in registers.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        registers: Registers,
        geometries: Sequence[Geometry],
        device: torch.device | str,
        hand_offs: Sequence[ThreadHandOff] = (),
    ) -> None:
        lanes = 1 + max((instruction.lane for instruction in instructions), default=0)
        self.registers = [
            *registers,
            *[None] * lanes,
        ]  # each thread has a register for unused results
        self.failures: dict[int, str] = {}
        self.replaced: dict[int, str] = {}
        self.peak_bytes = 0
        self._instructions = instructions
        self._geometries = geometries
        self._device = device
        self._turns = hand_offs
        self._scratch = len(registers)
        self._lanes: list[list[_Call]] = [[] for _ in range(lanes)]
        self._times = [[0] * len(instructions) for _ in range(4)]

    def settle(self, failed: Callable[[int, str], object] = lambda _op, _text: None) -> None:
        """Runs the first pass: one op after another, checking each result.

        Args:
            failed: Called with each op that fails and its message; an exception from it ends the
                pass.
        """
        registers = self.registers.copy()
        alive = _LiveBytes(registers)
        for lane in self._lanes:
            lane.clear()
        for index, instruction in enumerate(self._instructions):
            try:
                result = instruction.function(*instruction.pick(registers))
            except Exception as error:
                if not instruction.fallible:
                    raise
                text = f"{type(error).__name__}: {error}"
                failed(instruction.op, text)
                self.failures[instruction.op] = text
                # Tensors changed in place are already in their registers.
                instruction.outputs = tuple(
                    output if output is not None and registers[output] is None else None
                    for output in instruction.outputs
                )
                output_geometries = [
                    None if output is None else self._geometries[output]
                    for output in instruction.outputs
                ]
                instruction.function = partial(
                    create_tensors, output_geometries, self._device, instruction.stand_in_ns
                )
                instruction.pick = make_picker(())
                result = instruction.function()
            store, spread, result = self._settle_result(instruction, result)
            registers[store] = result
            for register, part in spread:
                registers[register] = result[part]
            del result
            dead = (*instruction.dead, store) if store >= self._scratch else instruction.dead
            self._lanes[instruction.lane].append(
                (index, instruction.function, instruction.pick, store, spread, dead)
            )
            alive.update(output for output in instruction.outputs if output is not None)
            for register in dead:
                registers[register] = None
            alive.update(dead)
        self.peak_bytes = alive.max_bytes

    def _settle_result(
        self, instruction: Instruction, result: Any
    ) -> tuple[int, tuple[tuple[int, int], ...], Any]:
        """Returns where the result of an op goes from now on: the register of the whole, those of
        its parts; and the result itself.
        """
        is_one = not isinstance(result, (list, tuple))
        scratch = self._scratch + instruction.lane
        parts = list(flatten_values(result))
        stored_parts = tuple(
            (register, part)
            for part, register in enumerate(instruction.outputs)
            if register is not None
        )
        wrong = {
            part: self._geometries[register]
            for register, part in stored_parts
            if register < len(self._geometries)
            and (part >= len(parts) or not self._geometries[register].is_of(parts[part]))
        }
        if wrong:
            tensors = [parts[part] for part in wrong if part < len(parts)]
            gave = ", ".join(
                f"{str(part.dtype).removeprefix('torch.')} {[*part.shape]}"
                if hasattr(part, "dtype")
                else repr(part)
                for part in tensors
            )
            recorded = ", ".join(
                f"{geometry.dtype} {[*geometry.shape]}" for geometry in wrong.values()
            )
            self.replaced[instruction.op] = f"gave {gave or 'nothing'}, recorded {recorded}"
            instruction.function = partial(
                _call_and_replace, instruction.function, wrong, self._device
            )
            parts = _call_and_replace(lambda: result, wrong, self._device)
        elif is_one:
            return stored_parts[0][0] if stored_parts else scratch, (), result
        elif any(isinstance(part, (list, tuple)) for part in result):
            instruction.function = partial(_call_and_flatten, instruction.function)
        return scratch, stored_parts, parts

    def run_once(self) -> None:
        """Runs one pass with nothing but the calls."""
        self._on_all_lanes(_run_calls)

    def run_wrapped(self, within: Callable[..., Any]) -> None:
        """Runs one pass in which `within(op, function, *arguments)` makes each call."""

        def run(registers: Registers, calls: Sequence[_Call]) -> None:
            ops = (self._instructions[call[0]].op for call in calls)
            marked = (
                (call[0], partial(within, op, call[1]), *call[2:])
                for op, call in zip(ops, calls, strict=True)
            )
            _run_calls(registers, marked)

        self._on_all_lanes(run)

    def run_timed(self, cpu_clock: Callable[[], int] = time.thread_time_ns) -> None:
        """Runs one pass with a timer around each call; `times` returns the readings."""
        clock = time.perf_counter_ns
        start, end, cpu_begin, cpu_end = self._times

        def run(registers: Registers, calls: Sequence[_Call]) -> None:
            for index, function, pick, store, spread, dead in calls:
                cpu_begin[index] = cpu_clock()
                start[index] = clock()
                registers[store] = function(*pick(registers))
                end[index] = clock()
                cpu_end[index] = cpu_clock()
                for register, part in spread:
                    registers[register] = registers[store][part]
                for register in dead:
                    registers[register] = None

        self._on_all_lanes(run)

    def _on_all_lanes(self, run: Callable[[Registers, Sequence[_Call]], None]) -> None:
        """Runs the calls of each thread; the first error in one of them stops the others."""
        registers = self.registers.copy()
        if len(self._lanes) == 1:
            return run(registers, self._lanes[0])

        import torch

        def guarded(calls: Sequence[_Call]) -> None:
            try:
                with torch.no_grad():
                    run(registers, calls)
            except BaseException:
                for hand_off in self._turns:
                    hand_off.stop()
                raise

        with ThreadPoolExecutor(len(self._lanes)) as threads:
            done = [threads.submit(guarded, calls) for calls in self._lanes]
        errors = [error for future in done if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, InterruptedError)):
            raise error
        return None

    def times(self) -> pl.DataFrame:
        """Returns the times of the last timed pass, a row per op: op, duration_ns, cpu_ns."""
        start, end, cpu_begin, cpu_end = (
            pl.Series(values, dtype=pl.Int64) for values in self._times
        )
        rows = [instruction.op for instruction in self._instructions]
        return (
            pl.DataFrame({"op": rows, "duration_ns": end - start, "cpu_ns": cpu_end - cpu_begin})
            .filter(pl.col("op") != NOT_TIMED)
            .with_columns(pl.col("op").cast(pl.UInt32))
        )


def _run_calls(registers: Registers, calls: Iterable[_Call]) -> None:
    for _, function, pick, store, spread, dead in calls:
        registers[store] = function(*pick(registers))
        for register, part in spread:
            registers[register] = registers[store][part]
        for register in dead:
            registers[register] = None


def _call_and_flatten(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return list(flatten_values(function(*arguments)))


def _call_and_replace(
    function: Callable[..., Any],
    wrong: Mapping[int, Geometry],
    device: torch.device | str,
    *arguments: Any,
) -> list[Any]:
    parts = _call_and_flatten(function, *arguments)
    parts += [None] * (max(wrong) + 1 - len(parts))
    for part, geometry in wrong.items():
        parts[part] = geometry.new(device)
    return parts


class _LiveBytes:
    def __init__(self, registers: Registers) -> None:
        self._registers = registers
        self._storages: dict[int, tuple[int, int]] = {}
        self._holders: Counter[tuple[int, int]] = Counter()
        self._bytes = 0
        self.max_bytes = 0
        self.update(range(len(registers)))

    def update(self, changed: Iterable[int]) -> None:
        """Accounts for registers whose content has changed."""
        for register in changed:
            if (before := self._storages.pop(register, None)) is not None:
                self._holders[before] -= 1
                self._bytes -= 0 if self._holders[before] else before[1]
            tensor = self._registers[register]
            if str(getattr(tensor, "layout", None)) == "torch.strided":  # others have no storage
                storage = tensor.untyped_storage()
                now = self._storages[register] = storage.data_ptr(), storage.nbytes()
                self._bytes += 0 if self._holders[now] else now[1]
                self._holders[now] += 1
        self.max_bytes = max(self.max_bytes, self._bytes)


GPU_TIMES = build_schema("op gpu_ns", {"op": pl.UInt32})
MARK = "traceloom.replay.op "
_PASSES = 5


def measure_device_times(
    execution: PlanRunner, wait_for_ranks: Callable[[], None] | None = None
) -> pl.DataFrame:
    """Returns the GPU time of the ops of a plan, the median over some extra passes; no rows if it
    runs on the CPU.

    Args:
        execution: The plan, run once.
        wait_for_ranks: Waits for the other ranks before a pass.

    Raises:
        CheckError: `no-gpu-times`: the profiler does not start, or records nothing.
        InputError: Its output cannot be read.
    """
    if execution.device.type == "cpu":
        return GPU_TIMES.to_frame()
    from torch.profiler import ProfilerActivity, profile, record_function

    def within(op: int, function: Callable[..., Any], *arguments: Any) -> Any:
        with record_function(f"{MARK}{op}"):
            return function(*arguments)

    profiler = None
    failure = ""
    with ExitStack() as stack:
        try:
            activity = getattr(ProfilerActivity, execution.device.type.upper())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # warnings that a second window clears the first
            profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU, activity]))
        except (RuntimeError, AttributeError) as error:
            failure = str(error)
        for _ in range(_PASSES):  # even without marks: the other ranks wait in each pass
            execution.run_pass(call_wrapper=within, wait_for_ranks=wait_for_ranks)
    if profiler is None:
        raise CheckError(f"the profiler does not start: {failure}", slug="no-gpu-times")
    with tempfile.TemporaryDirectory(prefix="traceloom-") as directory:
        path = Path(directory, "passes.json")
        profiler.export_chrome_trace(str(path))
        return compute_marked_times(load(path, cache=False).traces[0])


def compute_marked_times(trace: Trace) -> pl.DataFrame:
    """Returns the GPU time below the marks of each op, the median over its marks.

    Args:
        trace: Trace of some passes with marked ops.

    Returns:
        op, gpu_ns; a row for each op that launched something.
    """
    events = trace.events
    names = events["name"].cast(pl.String)
    is_mark = names.str.starts_with(MARK) & events["device"].is_null()
    work_by_mark = (
        find_launched_work(trace, is_mark.to_numpy()).group_by("event").agg(pl.sum("duration_ns"))
    )
    ops = names.gather(work_by_mark["event"]).str.strip_prefix(MARK).cast(pl.UInt32, strict=False)
    return (
        work_by_mark.with_columns(ops.alias("op"))
        .group_by("op")
        .agg(pl.median("duration_ns").round().cast(pl.Int64).alias("gpu_ns"))
        .drop_nulls("op")
        .sort("op")
        .cast(GPU_TIMES)
    )
