"""From the rows of a rank's plan to the instructions of a program: registers, threads, streams, and what stands in."""

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

from traceloom.workload.replay.binding import KEEPS_MEMORY, Bound, Unbindable, bind
from traceloom.workload.replay.communication import TO_A_PEER, RunningGroups, finish
from traceloom.workload.replay.execution import (
    NOT_TIMED,
    Geometry,
    Instruction,
    Program,
    Turn,
    hold_until,
    new_tensors,
    picker,
)
from traceloom.workload.replay.kernels import KernelLoader
from traceloom.workload.replay.plan import COLLECTIVE, STAND_INS, VIEW, WAIT, RankPlan

if TYPE_CHECKING:
    import torch

Bind = Callable[..., Bound]


@dataclass(frozen=True)
class Manner:
    """How a plan is run.

    Attributes:
        device: Where.
        bind: Binds a call: its schema, its arguments and the device.
        communication: Groups of the ranks that run; None where one process runs alone.
        kernels: Binds compiled kernels; None where none run.
        keeps_gaps: Whether the host's gaps between ops are kept.
        keeps_threads: Whether ops run on as many threads as recorded.
        spends_time: Whether what stands in for an op takes its recorded time.
    """

    device: torch.device
    bind: Bind = bind
    communication: RunningGroups | None = None
    kernels: KernelLoader | None = None
    keeps_gaps: bool = False
    keeps_threads: bool = False
    spends_time: bool = False

    def runs(self, collective: Mapping[str, Any]) -> bool:
        """Whether a collective of the plan finds its peers."""
        return self.communication is not None and not self.communication.lacks(collective)


def keeps_host(plan: RankPlan, device: torch.device) -> bool:
    """Whether what was recorded on processors stays there: beside an accelerator, then and now."""
    return device.type != "cpu" and plan.has_accelerator


def geometries(plan: RankPlan, device: torch.device) -> list[Geometry]:
    """The tensors of a plan, on a device."""
    of_storages = plan.storages.select(
        "bytes", on_host=(pl.col("device") == "cpu") & pl.lit(keeps_host(plan, device))
    ).select(pl.all().gather(plan.tensors["storage"]))
    columns = plan.tensors.select("shape", "strides", "offset", "dtype").hstack(of_storages)
    return [Geometry(tuple(shape), tuple(strides), *rest) for shape, strides, *rest in columns.iter_rows()]


def hand_overs(lanes: Sequence[Hashable], touched: Sequence[Iterable[Hashable]]) -> list[tuple[int, int]]:
    """Which ops must be done before which others may begin, where work runs on several threads or streams.

    An op begins once every earlier op of another lane that touches one of its storages is done.

    Args:
        lanes: The thread or stream of each op; None where it is on none.
        touched: The storages of each op.

    Returns:
        Pairs of ops, without those that follow from others between the same two lanes.
    """
    pairs = []
    last: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)
    awaited: dict[tuple[Hashable, Hashable], int] = {}
    for op, (lane, storages) in enumerate(zip(lanes, touched, strict=True)):
        if lane is None:
            continue
        for storage in storages:
            for other, before in last[storage].items():
                if other != lane and awaited.get((lane, other), -1) < before:
                    awaited[lane, other] = before
                    pairs.append((before, op))
            last[storage][lane] = op
    return pairs


class _Pace:
    """Keeps the recorded gaps: what a thread did between the end of one op and the start of the next."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def begin(self) -> None:
        """A pass begins."""
        self._ends.clear()

    def hold(self, ended: int, thread: int, gap_ns: int) -> None:
        """An op of the thread `ended` has just ended, and one of `thread` comes."""
        now = self._ends[ended] = time.perf_counter_ns()
        hold_until(self._ends.get(thread, now) + gap_ns)


@dataclass
class _Around:
    """What comes before an op and after it, which no row of the plan stands for."""

    before: list[Instruction] = field(default_factory=list)
    after: list[Instruction] = field(default_factory=list)


def _beside(function: Callable[..., Any], *registers: int) -> Instruction:
    return Instruction(NOT_TIMED, function, picker(registers), fallible=False)


class Assembly:
    """The program of a plan, made row by row.

    Args:
        plan: Of one rank.
        manner: How it is run.

    Attributes:
        needed: Storages of the plan that something uses which runs; the others are never allocated.
        written_unseen: Those that kernels may write to, of which PyTorch hears nothing.
    """

    def __init__(self, plan: RankPlan, manner: Manner) -> None:
        self._plan = plan
        self._manner = manner
        self._geometries = geometries(plan, manner.device)
        self._works = len(self._geometries)
        self._registers: list[Any] = [None] * (self._works + plan.collectives.height)
        self._made: set[int] = set()
        self._numbers: dict[int, Any] = {}
        self._collectives = plan.collectives.to_dicts()
        calls = plan.calls.select("call", "schema", "arguments")
        self._keeps_host = keeps_host(plan, manner.device)
        self._bound = [self._bind(*call) for call in calls.iter_rows()]
        self._storage = plan.tensors["storage"].to_list()
        self.needed: set[int] = set()
        self.written_unseen: set[int] = set()
        kernels = set(plan.kernels["call"])
        columns = plan.ops.select("action", "call", "collective", "inputs", "outputs")
        for action, call, collective, inputs, outputs in columns.iter_rows():
            if call is not None:
                runs = isinstance(self._bound[call], Bound)
            else:
                runs = action == COLLECTIVE and manner.runs(self._collectives[collective])
            if runs:
                storages = {self._storage[tensor] for tensor in (*inputs, *outputs) if tensor is not None}
                self.needed |= storages
                self.written_unseen |= storages if call in kernels else set()
        self._stand_ins: list[tuple[Any, ...]] = []
        self._unawaited: dict[int, None] = {}
        self._turns: list[Turn] = []
        self._batches = self._find_batches()

    def program(self, tensors: Mapping[int, torch.Tensor]) -> tuple[Program, pl.DataFrame]:
        """The program, and what is not run as it is: columns as `STAND_INS`.

        Args:
            tensors: Registers that hold something before the first op: rows of the plan's `tensors` on external
                storages.
        """
        plan = self._plan
        for register, tensor in tensors.items():
            self._registers[register] = tensor
        self._made = set(tensors)
        self._numbers = self._plain_numbers(tensors)
        uses = plan.uses().filter(pl.col("storage").is_in(list(self.needed)))
        kept = plan.storages["external"].gather(uses["storage"])
        last = uses.filter(~kept).group_by("tensor").agg(pl.col("op").max())
        dead: dict[int, list[int]] = dict(last.group_by("op").agg("tensor").iter_rows())
        for op, batch in self._batches.items():  # what they send is taken when the last of them starts
            if op != batch[-1]["op"]:
                dead.setdefault(batch[-1]["op"], []).extend(dead.pop(op, ()))
        around = self._around(uses)
        threads = sorted(set(plan.ops["thread"])) if self._manner.keeps_threads else []
        instructions: list[Instruction] = []
        for row in plan.ops.iter_rows(named=True):
            op = row["op"]
            lane = threads.index(row["thread"]) if threads else 0
            first = len(instructions)
            instructions += around[op].before
            if row["call"] is not None:  # of a stand-in, too: what --import names may bring it
                instructions.append(self._run(row))
            elif row["action"] == VIEW:
                instructions.append(self._view(row))
            elif row["action"] in {COLLECTIVE, WAIT}:
                instructions += self._exchange(row)
            else:
                reason = row["reason"] or "stand-in"
                instructions.append(self._stand_in(row, reason, "the plan has nothing to run here"))
            instructions[-1].dead += tuple(dead.get(op, ()))
            instructions += around[op].after
            for instruction in instructions[first:]:
                instruction.lane = lane
        instructions += (_beside(finish, self._works + row) for row in self._unawaited)
        stand_ins = pl.DataFrame(self._stand_ins, schema=STAND_INS, orient="row")
        return Program(instructions, self._registers, self._geometries, self._manner.device, self._turns), stand_ins

    def _bind(self, call: int, schema: str, arguments: str) -> Bound | Unbindable:
        kernels = self._manner.kernels
        try:
            if kernels is not None and call in kernels.calls:
                return kernels.bind(call, arguments)
            return self._manner.bind(schema, arguments, self._manner.device, keeps_host=self._keeps_host)
        except Unbindable as error:
            return error

    def _run(self, row: Mapping[str, Any]) -> Instruction:
        import torch

        bound = self._bound[row["call"]]
        if isinstance(bound, Unbindable):
            return self._stand_in(row, bound.slug, bound.text)
        self._made.update(output for output in row["outputs"] if output is not None)
        inputs, registers = row["inputs"], dict(bound.places)
        namespace, _, name = row["name"].rpartition("::")
        # Of most ops PyTorch takes no number where their schema has a tensor.
        takes_numbers = not namespace or torch._C._should_allow_numbers_as_tensors(name)  # noqa: SLF001
        numbers = self._numbers if takes_numbers else {}
        place = partial(self._place, registers=registers, inputs=inputs, numbers=numbers)
        arguments = [place(argument, (at,)) for at, argument in enumerate(bound.arguments)]
        named = {path[0] for path in registers if isinstance(path[0], str)}
        constants = {name: value for name, value in bound.keywords.items() if name not in named}
        function = partial(bound.function, **constants) if constants else bound.function
        if named:
            names = sorted(named)
            arguments += [place(bound.keywords[name], (name,)) for name in names]
            function = partial(_with_names, function, names)
        return Instruction(
            row["op"], function, picker(arguments), tuple(row["outputs"]), stand_in_ns=self._stand_in_ns(row)
        )

    def _place(
        self,
        argument: Any,
        path: tuple[Any, ...],
        *,
        registers: Mapping[Any, int],
        inputs: Sequence[int],
        numbers: Mapping[int, Any],
    ) -> Any:
        """The register of an argument, or those of the parts of a list that holds tensors."""
        if path in registers:
            register = inputs[registers[path]]
            if len(path) > 1 or len(inputs) == 1 or register not in numbers:
                return register
            argument = numbers[register]
        elif isinstance(argument, list) and any(other[: len(path)] == path for other in registers):
            place = partial(self._place, registers=registers, inputs=inputs, numbers=numbers)
            return [place(part, (*path, at)) for at, part in enumerate(argument)]
        self._registers.append(argument)
        return len(self._registers) - 1

    def _plain_numbers(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        """Registers of what was a number in the program: PyTorch makes a tensor of it that does not promote types."""
        plan = self._plan
        about = pl.concat(
            [plan.tensors, plan.storages.select("device").select(pl.all().gather(plan.tensors["storage"]))],
            how="horizontal",
        )
        written = plan.uses().filter("made")["tensor"]
        plain = about.filter(
            pl.col("dtype").is_in(["float64", "int64"]),
            pl.col("shape").list.len() == 0,
            pl.col("device") == "cpu",
            ~pl.col("tensor").is_in(written.implode()),
        )
        return {row: tensors[row].item() for row in plain["tensor"] if row in tensors}

    def _view(self, row: Mapping[str, Any]) -> Instruction:
        import torch

        (source,), (output,) = row["inputs"], row["outputs"]
        if self._storage[source] not in self.needed:
            return Instruction(row["op"], bool, picker(()), fallible=False)
        geometry = self._geometries[output]
        arguments = geometry.shape, geometry.strides, geometry.offset
        self._made.add(output)
        if self._geometries[source].dtype == geometry.dtype:
            picked = [source]
            for argument in arguments:
                self._registers.append(argument)
                picked.append(len(self._registers) - 1)
            return Instruction(row["op"], torch.as_strided, picker(picked), outputs=(output,))
        return Instruction(row["op"], partial(on_storage, geometry), picker([source]), outputs=(output,))

    def _exchange(self, row: Mapping[str, Any]) -> list[Instruction]:
        collective = self._collectives[row["collective"]]
        work = self._works + row["collective"]
        communication = self._manner.communication
        if communication is None or not self._manner.runs(collective):
            return [self._stand_in(row, "no-peers", "no other rank runs that takes part")]
        if row["action"] == WAIT:
            self._unawaited.pop(row["collective"], None)
            return [Instruction(row["op"], finish, picker([work]), dead=(work,), fallible=False)]
        received = [output for output in row["outputs"] if output is not None]
        missing = [output for output in received if output not in self._made]
        instructions = []
        if missing:  # a functional collective makes what it receives
            made = partial(new_tensors, [self._geometries[output] for output in missing], self._manner.device)
            instructions.append(replace(_beside(made), outputs=tuple(missing)))
            self._made.update(missing)
        dtypes = [self._geometries[tensor].dtype for tensor in (*row["inputs"], *received)]
        call = communication.call(collective, len(row["inputs"]), dtypes)
        start = Instruction(row["op"], call, picker([*row["inputs"], *received]), fallible=False)
        if collective["asynchronous"]:
            self._unawaited[row["collective"]] = None
            start.outputs = (work,)
        if batch := self._batches.get(row["op"]):
            start.function, start.pick, start.outputs = bool, picker(()), ()
            if row["op"] == batch[-1]["op"]:
                tensors = [(*part["inputs"], *part["outputs"])[0] for part in batch]
                numbers = [part["collective"] for part in batch]
                start.function = communication.exchange([self._collectives[number] for number in numbers])
                start.pick, start.outputs = picker(tensors), tuple(self._works + number for number in numbers)
        return [*instructions, start]

    def _find_batches(self) -> dict[int, list[dict[str, Any]]]:
        """Sends and receives that follow each other, by op: rows of the plan's `ops`."""
        communication = self._manner.communication
        batches: dict[int, list[dict[str, Any]]] = {}
        if communication is None:
            return batches
        batch: list[dict[str, Any]] = []
        about: tuple[Any, ...] | None = None
        for row in self._plan.ops.filter(pl.col("action") != VIEW).iter_rows(named=True):
            collective = self._collectives[row["collective"]] if row["action"] == COLLECTIVE else {"kind": ""}
            before, about = about, None
            if collective["kind"] in TO_A_PEER and collective["asynchronous"] and not communication.lacks(collective):
                about = collective["group"], row["thread"]
            if about is None or about != before:
                batch = []
            if about is not None and len(row["inputs"]) + len(row["outputs"]) == 1:
                batch.append(row)
                batches[row["op"]] = batch
        return {op: rows for op, rows in batches.items() if len(rows) > 1}

    def _stand_in(self, row: Mapping[str, Any], reason: str, text: str) -> Instruction:
        outputs = tuple(
            None if output is None or output in self._made or self._storage[output] not in self.needed else output
            for output in row["outputs"]
        )
        self._made.update(output for output in outputs if output is not None)
        self._stand_ins.append((row["op"], row["node"], row["name"], reason, text))
        made = [None if output is None else self._geometries[output] for output in outputs]
        return Instruction(
            row["op"],
            partial(new_tensors, made, self._manner.device, self._stand_in_ns(row)),
            picker(()),
            outputs,
            fallible=False,
        )

    def _stand_in_ns(self, row: Mapping[str, Any]) -> int:
        """How long takes what stands in for an op."""
        return round(median(row["durations_ns"])) if self._manner.spends_time and row["durations_ns"] else 0

    def _around(self, uses: pl.DataFrame) -> Mapping[int, _Around]:
        """What keeps the order of threads and streams, and their pace."""
        around: dict[int, _Around] = defaultdict(_Around)
        ops, manner = self._plan.ops, self._manner
        touched: list[list[Any]] = [[] for _ in range(ops.height)]
        for op, storage in uses.select("op", "storage").unique().sort("op", "storage").iter_rows():
            touched[op].append(storage)
        for op, work in ops.filter(pl.col("collective").is_not_null()).select("op", "collective").iter_rows():
            touched[op].append(("work", work))
        if manner.keeps_gaps:
            pace = _Pace()
            threads = ops["thread"].to_list()
            for op, (thread, gap_ns) in enumerate(zip(threads, ops["gap_ns"], strict=True)):
                if op == 0:
                    around[op].before.append(_beside(pace.begin))
                if gap_ns:
                    ended = thread if manner.keeps_threads else threads[max(0, op - 1)]
                    around[op].before.append(_beside(partial(pace.hold, ended, thread, gap_ns)))
        if manner.keeps_threads:
            for before, after in hand_overs(ops["thread"].to_list(), touched):
                self._turns.append(turn := Turn())
                around[before].after.append(_beside(turn.give))
                around[after].before.append(_beside(turn.take))
        if manner.device.type != "cpu":
            self._add_streams(around, touched)
        return around

    def _add_streams(self, around: Mapping[int, _Around], touched: Sequence[Iterable[Hashable]]) -> None:
        """Let ops be launched on as many streams as recorded, with an event where one needs what another does."""
        import torch

        streams = self._plan.ops["stream"].to_list()
        for op in self._plan.ops.filter(pl.col("name") == KEEPS_MEMORY, pl.col("stream").is_null())["op"]:
            users = (later for later in range(op + 1, len(streams)) if not set(touched[op]).isdisjoint(touched[later]))
            streams[op] = next((streams[later] for later in users if streams[later] is not None), None)
        numbers = set(streams) - {None}
        if len(numbers) < 2:
            return
        module: Any = torch.get_device_module(self._manner.device)
        by_number = {number: module.Stream(self._manner.device) for number in sorted(numbers)}
        current: int | None = None
        made_on: dict[int | None, int] = {}
        recorded: set[tuple[int, int]] = set()
        for row in self._plan.ops.select("op", "inputs", "outputs").iter_rows(named=True):
            op, number = row["op"], streams[row["op"]]
            if number is None:
                continue
            if number != current:
                around[op].before.append(_beside(partial(module.set_stream, by_number[number])))
                current = number
            for register in row["inputs"]:  # the allocator must not give its memory away while this stream uses it
                if self._storage[register] not in self.needed or self._geometries[register].on_host:
                    continue
                if made_on.get(register, number) != number and (register, number) not in recorded:
                    recorded.add((register, number))
                    around[op].before.append(_beside(methodcaller("record_stream", by_number[number]), register))
            made_on.update((register, number) for register in row["outputs"])
        for before, after in hand_overs(streams, touched):
            event = module.Event()
            around[before].after.append(_beside(partial(event.record, by_number[streams[before]])))
            around[after].before.append(_beside(partial(event.wait, by_number[streams[after]])))


def on_storage(geometry: Geometry, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this geometry on the storage of another, whatever the type of that."""
    import torch

    empty = torch.empty(0, dtype=getattr(torch, geometry.dtype), device=tensor.device)
    return empty.set_(tensor.untyped_storage(), geometry.offset, geometry.shape, geometry.strides)


def _with_names(function: Callable[..., Any], names: Sequence[str], *arguments: Any) -> Any:
    return function(*arguments[: -len(names)], **dict(zip(names, arguments[-len(names) :], strict=True)))
