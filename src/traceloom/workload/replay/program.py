"""Building the instructions of a program from a rank's plan: registers, threads, streams, and
stand-ins.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from statistics import median
from typing import TYPE_CHECKING, Any

import polars as pl

from traceloom.workload.replay.binding import RECORD_STREAM, BindError, BoundCall, bind_call
from traceloom.workload.replay.communication import POINT_TO_POINT, RunningGroups, finish
from traceloom.workload.replay.execution import (
    NOT_TIMED,
    Geometry,
    Instruction,
    Program,
    ThreadHandOff,
    create_tensors,
    make_picker,
    wait_until,
)
from traceloom.workload.replay.kernels import KernelLoader
from traceloom.workload.replay.plan import COLLECTIVE, STAND_INS, VIEW, WAIT, RankPlan

if TYPE_CHECKING:
    import torch

Bind = Callable[..., BoundCall]


@dataclass(frozen=True)
class RunMode:
    """How a plan is run.

    Attributes:
        device: The device.
        bind: Binds a call: its schema, its arguments and the device.
        communication: Groups of the running ranks; None if one process runs alone.
        kernels: Binds compiled kernels; None if none run.
        keeps_gaps: Whether the host's gaps between ops are kept.
        keeps_threads: Whether ops run on as many threads as recorded.
        stand_ins_take_time: Whether a stand-in takes the recorded time of its op.
    """

    device: torch.device
    bind: Bind = bind_call
    communication: RunningGroups | None = None
    kernels: KernelLoader | None = None
    keeps_gaps: bool = False
    keeps_threads: bool = False
    stand_ins_take_time: bool = False

    def runs(self, collective: Mapping[str, Any]) -> bool:
        return self.communication is not None and not self.communication.lacks(collective)


def should_stay_on_cpu(plan: RankPlan, device: torch.device) -> bool:
    """Returns whether tensors recorded on the CPU stay there: if there was an accelerator then, and
    is one now.
    """
    return device.type != "cpu" and plan.has_accelerator


def build_geometries(plan: RankPlan, device: torch.device) -> list[Geometry]:
    """Returns the geometries of the plan's tensors, on a device."""
    storage_columns = plan.storages.select(
        "bytes", on_host=(pl.col("device") == "cpu") & pl.lit(should_stay_on_cpu(plan, device))
    ).select(pl.all().gather(plan.tensors["storage"]))
    columns = plan.tensors.select("shape", "strides", "offset", "dtype").hstack(storage_columns)
    return [
        Geometry(tuple(shape), tuple(strides), *other_fields)
        for shape, strides, *other_fields in columns.iter_rows()
    ]


def find_cross_lane_dependencies(
    lanes: Sequence[Hashable], touched_storages: Sequence[Iterable[Hashable]]
) -> list[tuple[int, int]]:
    """Returns which ops must be done before which others start, if work runs on several threads or
    streams.

    An op starts once every earlier op of another lane that touches one of its storages is done.

    Args:
        lanes: The thread or stream of each op; None if it is on none.
        touched_storages: The storages of each op.

    Returns:
        Pairs of ops, without those implied by others between the same two lanes.
    """
    pairs = []
    last_op_by_lane: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)
    latest_dependency: dict[tuple[Hashable, Hashable], int] = {}
    for op, (lane, storages) in enumerate(zip(lanes, touched_storages, strict=True)):
        if lane is None:
            continue
        for storage in storages:
            for other, earlier_op in last_op_by_lane[storage].items():
                if other != lane and latest_dependency.get((lane, other), -1) < earlier_op:
                    latest_dependency[lane, other] = earlier_op
                    pairs.append((earlier_op, op))
            last_op_by_lane[storage][lane] = op
    return pairs


class _GapTimer:
    """Reproduces the recorded gaps of a thread between the end of one op and the start of the
    next.
    """

    def __init__(self) -> None:
        self._last_end_ns: dict[int, int] = {}

    def begin(self) -> None:
        self._last_end_ns.clear()

    def hold(self, ended_thread: int, thread: int, gap_ns: int) -> None:
        """Waits for the gap between an op of `ended_thread`, which has just ended, and the next one
        of `thread`.
        """
        now = self._last_end_ns[ended_thread] = time.perf_counter_ns()
        wait_until(self._last_end_ns.get(thread, now) + gap_ns)


@dataclass
class _SurroundingCalls:
    """Calls before and after an op that are not in the plan."""

    before: list[Instruction] = field(default_factory=list)
    after: list[Instruction] = field(default_factory=list)


def _make_untimed_instruction(function: Callable[..., Any], *registers: int) -> Instruction:
    return Instruction(NOT_TIMED, function, make_picker(registers), fallible=False)


class ProgramBuilder:
    """Builds the program of a plan row by row.

    Args:
        plan: Plan of one rank.
        mode: How it is run.

    Attributes:
        needed: Storages of the plan that a running op uses; the others are never allocated.
        kernel_written_storages: Storages that kernels may write to without PyTorch's knowledge.
    """

    def __init__(self, plan: RankPlan, mode: RunMode) -> None:
        self._plan = plan
        self._mode = mode
        self._geometries = build_geometries(plan, mode.device)
        self._first_work_register = len(self._geometries)
        self._registers: list[Any] = [None] * (self._first_work_register + plan.collectives.height)
        self._filled_registers: set[int] = set()
        self._scalar_values: dict[int, Any] = {}
        self._collectives = plan.collectives.to_dicts()
        calls = plan.calls.select("call", "schema", "arguments")
        self._stays_on_cpu = should_stay_on_cpu(plan, mode.device)
        self._bound_calls = [self._bind_call(*call) for call in calls.iter_rows()]
        self._tensor_storages = plan.tensors["storage"].to_list()
        self.needed: set[int] = set()
        self.kernel_written_storages: set[int] = set()
        kernels = set(plan.kernels["call"])
        columns = plan.ops.select("action", "call", "collective", "inputs", "outputs")
        for action, call, collective, inputs, outputs in columns.iter_rows():
            if call is not None:
                runs = isinstance(self._bound_calls[call], BoundCall)
            else:
                runs = action == COLLECTIVE and mode.runs(self._collectives[collective])
            if runs:
                storages = {
                    self._tensor_storages[tensor]
                    for tensor in (*inputs, *outputs)
                    if tensor is not None
                }
                self.needed |= storages
                self.kernel_written_storages |= storages if call in kernels else set()
        self._stand_ins: list[tuple[Any, ...]] = []
        self._unfinished_collectives: dict[int, None] = {}
        self._hand_offs: list[ThreadHandOff] = []
        self._p2p_batches = self._find_p2p_batches()

    def program(self, tensors: Mapping[int, torch.Tensor]) -> tuple[Program, pl.DataFrame]:
        """Returns the program, and the ops that are replaced by stand-ins: columns as `STAND_INS`.

        Args:
            tensors: Registers with contents before the first op: rows of the plan's `tensors` on
                external storages.
        """
        plan = self._plan
        for register, tensor in tensors.items():
            self._registers[register] = tensor
        self._filled_registers = set(tensors)
        self._scalar_values = self._find_scalar_values(tensors)
        uses = plan.uses().filter(pl.col("storage").is_in(list(self.needed)))
        is_external = plan.storages["external"].gather(uses["storage"])
        last_uses = uses.filter(~is_external).group_by("tensor").agg(pl.col("op").max())
        dead_registers: dict[int, list[int]] = dict(
            last_uses.group_by("op").agg("tensor").iter_rows()
        )
        for (
            op,
            batch,
        ) in self._p2p_batches.items():  # their inputs are read when the last of them starts
            if op != batch[-1]["op"]:
                dead_registers.setdefault(batch[-1]["op"], []).extend(dead_registers.pop(op, ()))
        surrounding_calls = self._build_surrounding_calls(uses)
        threads = sorted(set(plan.ops["thread"])) if self._mode.keeps_threads else []
        instructions: list[Instruction] = []
        for row in plan.ops.iter_rows(named=True):
            op = row["op"]
            lane = threads.index(row["thread"]) if threads else 0
            first = len(instructions)
            instructions += surrounding_calls[op].before
            if row["call"] is not None:  # also for a stand-in: a module of --import may define it
                instructions.append(self._build_call(row))
            elif row["action"] == VIEW:
                instructions.append(self._build_view(row))
            elif row["action"] in {COLLECTIVE, WAIT}:
                instructions += self._build_communication(row)
            else:
                reason = row["reason"] or "stand-in"
                instructions.append(
                    self._build_stand_in(row, reason, "the plan has nothing to run here")
                )
            instructions[-1].dead += tuple(dead_registers.get(op, ()))
            instructions += surrounding_calls[op].after
            for instruction in instructions[first:]:
                instruction.lane = lane
        instructions += (
            _make_untimed_instruction(finish, self._first_work_register + row)
            for row in self._unfinished_collectives
        )
        return Program(
            instructions, self._registers, self._geometries, self._mode.device, self._hand_offs
        ), pl.DataFrame(self._stand_ins, schema=STAND_INS, orient="row")

    def _bind_call(self, call: int, schema: str, arguments: str) -> BoundCall | BindError:
        kernels = self._mode.kernels
        try:
            if kernels is not None and call in kernels.calls:
                return kernels.bind(call, arguments)
            return self._mode.bind(
                schema, arguments, self._mode.device, keeps_host=self._stays_on_cpu
            )
        except BindError as error:
            return error

    def _build_call(self, row: Mapping[str, Any]) -> Instruction:
        import torch

        bound = self._bound_calls[row["call"]]
        if isinstance(bound, BindError):
            return self._build_stand_in(row, bound.slug, bound.text)
        self._filled_registers.update(output for output in row["outputs"] if output is not None)
        inputs, registers = row["inputs"], dict(bound.places)
        namespace, _, name = row["name"].rpartition("::")
        # Most ops do not accept a number where their schema has a tensor.
        takes_numbers = not namespace or torch._C._should_allow_numbers_as_tensors(name)  # noqa: SLF001
        scalar_values = self._scalar_values if takes_numbers else {}
        assign = partial(
            self._place, registers=registers, inputs=inputs, scalar_values=scalar_values
        )
        arguments = [assign(argument, (index,)) for index, argument in enumerate(bound.arguments)]
        keyword_tensors = {path[0] for path in registers if isinstance(path[0], str)}
        constant_keywords = {
            name: value for name, value in bound.keywords.items() if name not in keyword_tensors
        }
        function = (
            partial(bound.function, **constant_keywords) if constant_keywords else bound.function
        )
        if keyword_tensors:
            names = sorted(keyword_tensors)
            arguments += [assign(bound.keywords[name], (name,)) for name in names]
            function = partial(_call_with_keywords, function, names)
        return Instruction(
            row["op"],
            function,
            make_picker(arguments),
            tuple(row["outputs"]),
            stand_in_ns=self._get_stand_in_ns(row),
        )

    def _place(
        self,
        argument: Any,
        path: tuple[Any, ...],
        *,
        registers: Mapping[Any, int],
        inputs: Sequence[int],
        scalar_values: Mapping[int, Any],
    ) -> Any:
        """Returns the register of an argument, or those of the items of a list of tensors."""
        if path in registers:
            register = inputs[registers[path]]
            if len(path) > 1 or len(inputs) == 1 or register not in scalar_values:
                return register
            argument = scalar_values[register]
        elif isinstance(argument, list) and any(other[: len(path)] == path for other in registers):
            assign = partial(
                self._place, registers=registers, inputs=inputs, scalar_values=scalar_values
            )
            return [assign(part, (*path, index)) for index, part in enumerate(argument)]
        self._registers.append(argument)
        return len(self._registers) - 1

    def _find_scalar_values(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        """Returns the values of registers that were numbers in the program: PyTorch turns them into
        tensors that do not promote types.
        """
        plan = self._plan
        tensor_rows = pl.concat(
            [
                plan.tensors,
                plan.storages.select("device").select(pl.all().gather(plan.tensors["storage"])),
            ],
            how="horizontal",
        )
        scalar_rows = tensor_rows.filter(
            pl.col("dtype").is_in(["float64", "int64"]),
            pl.col("shape").list.len() == 0,
            pl.col("device") == "cpu",
            ~pl.col("tensor").is_in(plan.uses().filter("made")["tensor"].implode()),
        )
        return {row: tensors[row].item() for row in scalar_rows["tensor"] if row in tensors}

    def _build_view(self, row: Mapping[str, Any]) -> Instruction:
        import torch

        (source,), (output,) = row["inputs"], row["outputs"]
        if self._tensor_storages[source] not in self.needed:
            return Instruction(row["op"], bool, make_picker(()), fallible=False)
        geometry = self._geometries[output]
        arguments = geometry.shape, geometry.strides, geometry.offset
        self._filled_registers.add(output)
        if self._geometries[source].dtype == geometry.dtype:
            picked = [source]
            for argument in arguments:
                self._registers.append(argument)
                picked.append(len(self._registers) - 1)
            return Instruction(row["op"], torch.as_strided, make_picker(picked), outputs=(output,))
        return Instruction(
            row["op"], partial(create_view, geometry), make_picker([source]), outputs=(output,)
        )

    def _build_communication(self, row: Mapping[str, Any]) -> list[Instruction]:
        collective = self._collectives[row["collective"]]
        work_register = self._first_work_register + row["collective"]
        communication = self._mode.communication
        if communication is None or not self._mode.runs(collective):
            return [self._build_stand_in(row, "no-peers", "no other rank runs that takes part")]
        if row["action"] == WAIT:
            self._unfinished_collectives.pop(row["collective"], None)
            return [
                Instruction(
                    row["op"],
                    finish,
                    make_picker([work_register]),
                    dead=(work_register,),
                    fallible=False,
                )
            ]
        output_registers = [output for output in row["outputs"] if output is not None]
        unfilled_outputs = [
            output for output in output_registers if output not in self._filled_registers
        ]
        instructions = []
        if unfilled_outputs:  # a functional collective creates its outputs
            create_outputs = partial(
                create_tensors,
                [self._geometries[output] for output in unfilled_outputs],
                self._mode.device,
            )
            instructions.append(
                replace(_make_untimed_instruction(create_outputs), outputs=tuple(unfilled_outputs))
            )
            self._filled_registers.update(unfilled_outputs)
        dtypes = [self._geometries[tensor].dtype for tensor in (*row["inputs"], *output_registers)]
        call = communication.call(collective, len(row["inputs"]), dtypes)
        instruction = Instruction(
            row["op"], call, make_picker([*row["inputs"], *output_registers]), fallible=False
        )
        if collective["asynchronous"]:
            self._unfinished_collectives[row["collective"]] = None
            instruction.outputs = (work_register,)
        if batch := self._p2p_batches.get(row["op"]):
            instruction.function, instruction.pick, instruction.outputs = bool, make_picker(()), ()
            if row["op"] == batch[-1]["op"]:
                tensors = [(*part["inputs"], *part["outputs"])[0] for part in batch]
                numbers = [part["collective"] for part in batch]
                instruction.function = communication.exchange(
                    [self._collectives[number] for number in numbers]
                )
                instruction.pick, instruction.outputs = (
                    make_picker(tensors),
                    tuple(self._first_work_register + number for number in numbers),
                )
        return [*instructions, instruction]

    def _find_p2p_batches(self) -> dict[int, list[dict[str, Any]]]:
        """Returns consecutive sends and receives, by op: rows of the plan's `ops`."""
        communication = self._mode.communication
        batches: dict[int, list[dict[str, Any]]] = {}
        if communication is None:
            return batches
        batch: list[dict[str, Any]] = []
        batch_key: tuple[Any, ...] | None = None
        for row in self._plan.ops.filter(pl.col("action") != VIEW).iter_rows(named=True):
            collective = (
                self._collectives[row["collective"]]
                if row["action"] == COLLECTIVE
                else {"kind": ""}
            )
            previous_key, batch_key = batch_key, None
            if (
                collective["kind"] in POINT_TO_POINT
                and collective["asynchronous"]
                and not communication.lacks(collective)
            ):
                batch_key = collective["group"], row["thread"]
            if batch_key is None or batch_key != previous_key:
                batch = []
            if batch_key is not None and len(row["inputs"]) + len(row["outputs"]) == 1:
                batch.append(row)
                batches[row["op"]] = batch
        return {op: rows for op, rows in batches.items() if len(rows) > 1}

    def _build_stand_in(self, row: Mapping[str, Any], reason: str, text: str) -> Instruction:
        outputs = tuple(
            None
            if output is None
            or output in self._filled_registers
            or self._tensor_storages[output] not in self.needed
            else output
            for output in row["outputs"]
        )
        self._filled_registers.update(output for output in outputs if output is not None)
        self._stand_ins.append((row["op"], row["node"], row["name"], reason, text))
        output_geometries = [
            None if output is None else self._geometries[output] for output in outputs
        ]
        return Instruction(
            row["op"],
            partial(
                create_tensors, output_geometries, self._mode.device, self._get_stand_in_ns(row)
            ),
            make_picker(()),
            outputs,
            fallible=False,
        )

    def _get_stand_in_ns(self, row: Mapping[str, Any]) -> int:
        return (
            round(median(row["durations_ns"]))
            if self._mode.stand_ins_take_time and row["durations_ns"]
            else 0
        )

    def _build_surrounding_calls(self, uses: pl.DataFrame) -> Mapping[int, _SurroundingCalls]:
        """Returns calls that preserve the order of threads and streams, and their pace."""
        surrounding_calls: dict[int, _SurroundingCalls] = defaultdict(_SurroundingCalls)
        ops, mode = self._plan.ops, self._mode
        touched_storages: list[list[Any]] = [[] for _ in range(ops.height)]
        for op, storage in uses.select("op", "storage").unique().sort("op", "storage").iter_rows():
            touched_storages[op].append(storage)
        for op, work in (
            ops.filter(pl.col("collective").is_not_null()).select("op", "collective").iter_rows()
        ):
            touched_storages[op].append(("work", work))
        if mode.keeps_gaps:
            gap_timer = _GapTimer()
            threads = ops["thread"].to_list()
            for op, (thread, gap_ns) in enumerate(zip(threads, ops["gap_ns"], strict=True)):
                if op == 0:
                    surrounding_calls[op].before.append(_make_untimed_instruction(gap_timer.begin))
                if gap_ns:
                    ended_thread = thread if mode.keeps_threads else threads[max(0, op - 1)]
                    surrounding_calls[op].before.append(
                        _make_untimed_instruction(
                            partial(gap_timer.hold, ended_thread, thread, gap_ns)
                        )
                    )
        if mode.keeps_threads:
            for before, after in find_cross_lane_dependencies(
                ops["thread"].to_list(), touched_storages
            ):
                self._hand_offs.append(hand_off := ThreadHandOff())
                surrounding_calls[before].after.append(_make_untimed_instruction(hand_off.give))
                surrounding_calls[after].before.append(_make_untimed_instruction(hand_off.take))
        if mode.device.type != "cpu":
            self._add_stream_calls(surrounding_calls, touched_storages)
        return surrounding_calls

    def _add_stream_calls(
        self,
        surrounding_calls: Mapping[int, _SurroundingCalls],
        touched_storages: Sequence[Iterable[Hashable]],
    ) -> None:
        """Launches ops on as many streams as recorded, with an event for each dependency between
        streams.
        """
        import torch

        streams = self._plan.ops["stream"].to_list()
        for op in self._plan.ops.filter(
            pl.col("name") == RECORD_STREAM, pl.col("stream").is_null()
        )["op"]:
            later_uses = (
                later
                for later in range(op + 1, len(streams))
                if not set(touched_storages[op]).isdisjoint(touched_storages[later])
            )
            streams[op] = next(
                (streams[later] for later in later_uses if streams[later] is not None), None
            )
        numbers = set(streams) - {None}
        if len(numbers) < 2:
            return
        module: Any = torch.get_device_module(self._mode.device)
        stream_by_number = {number: module.Stream(self._mode.device) for number in sorted(numbers)}
        current: int | None = None
        stream_of_register: dict[int | None, int] = {}
        recorded: set[tuple[int, int]] = set()
        for row in self._plan.ops.select("op", "inputs", "outputs").iter_rows(named=True):
            op, number = row["op"], streams[row["op"]]
            if number is None:
                continue
            if number != current:
                surrounding_calls[op].before.append(
                    _make_untimed_instruction(partial(module.set_stream, stream_by_number[number]))
                )
                current = number
            for register in row[
                "inputs"
            ]:  # the allocator must not reuse its memory while this stream uses it
                if (
                    self._tensor_storages[register] not in self.needed
                    or self._geometries[register].on_host
                ):
                    continue
                if (
                    stream_of_register.get(register, number) != number
                    and (register, number) not in recorded
                ):
                    recorded.add((register, number))
                    surrounding_calls[op].before.append(
                        _make_untimed_instruction(
                            methodcaller("record_stream", stream_by_number[number]), register
                        )
                    )
            stream_of_register.update((register, number) for register in row["outputs"])
        for before, after in find_cross_lane_dependencies(streams, touched_storages):
            event = module.Event()
            surrounding_calls[before].after.append(
                _make_untimed_instruction(partial(event.record, stream_by_number[streams[before]]))
            )
            surrounding_calls[after].before.append(
                _make_untimed_instruction(partial(event.wait, stream_by_number[streams[after]]))
            )


def create_view(geometry: Geometry, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of this geometry on the storage of another, whatever the other's type."""
    import torch

    return torch.empty(0, dtype=getattr(torch, geometry.dtype), device=tensor.device).set_(
        tensor.untyped_storage(), geometry.offset, geometry.shape, geometry.strides
    )


def _call_with_keywords(function: Callable[..., Any], names: Sequence[str], *arguments: Any) -> Any:
    return function(
        *arguments[: -len(names)], **dict(zip(names, arguments[-len(names) :], strict=True))
    )
