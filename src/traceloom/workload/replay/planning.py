"""Planning: turning host traces into a plan, with versions of storages.

The numbers of a host trace are reused after their object has died. So a storage here is a version:
it begins where an op returns a storage that is not among its inputs, or where an op reads one that
nothing recorded has created (an external one), and ends with its last use.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from msgspec import Struct, structs

from traceloom.errors import UsageError
from traceloom.system.process import pause_gc
from traceloom.system.units import format_quantity
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import find_nearest_ancestor
from traceloom.trace.notice import Notice
from traceloom.workload.replay.contents import RecordedIntegers, settle_contents
from traceloom.workload.replay.inputs import (
    AnyPath,
    PlanInput,
    RecordedTimes,
    Resources,
    open_inputs,
)
from traceloom.workload.replay.kernels import KernelSource, convert_arguments, read_source
from traceloom.workload.replay.nodes import (
    WAIT,
    Exchange,
    Level,
    Nodes,
    choose,
    count_bytes,
    filter_rows,
    list_groups,
    read_called_groups,
    read_exchange,
)
from traceloom.workload.replay.plan import (
    COLLECTIVE,
    ENDING,
    GUESSED_STRIDES,
    NO_SOURCES,
    NOT_TRUSTED,
    PLAN_SCHEMAS,
    RUN,
    STAND_IN,
    VIEW,
    RankPlan,
    ReplayPlan,
    build_frame,
    is_plan,
)
from traceloom.workload.replay.schema import OperatorSchema, UnreadableSchemaError, parse_schema
from traceloom.workload.replay.values import (
    CUT,
    NUMBERS,
    ROUNDED,
    UNKNOWN,
    RecordedTensor,
    build_op_kind,
    compute_contiguous_strides,
    count_tensors as values_count_of,
    encode,
    encode_arguments,
    find_unknown_type,
    list_observed_numbers,
    parse_kinds,
)


class StorageVersions:
    """Tracks storages through the ops of a rank, in order of execution."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self._registers: dict[tuple[Any, ...], int] = {}
        self._exists: set[int] = set()
        self._latest: dict[int, int] = {}
        self._recorded: list[int] = []
        self._bytes: list[int] = []
        self._device: list[str] = []
        self._external: list[bool] = []
        self._tensors: list[tuple[int, int, tuple[int, ...], tuple[int, ...], str]] = []
        self.guessed_strides = 0

    def read(self, tensor: RecordedTensor) -> tuple[int, int | None]:
        """Returns the register of an input tensor, a row of `tensors`.

        Also returns another register on the same storage of which it must first be made a view, if
        no op created it.
        """
        version = self._live.get(tensor.identity)
        # An unrecorded storage may have reused the number of a dead one: it is larger, or
        # elsewhere.
        if version is None or (
            (not self._external[version] and tensor.end_bytes > self._bytes[version])
            or self._device[version] != tensor.device
        ):
            version = self._begin(tensor, external=True)
        register = self._register(version, tensor, by_shape=True)
        source = None
        if register not in self._exists:
            source = None if self._external[version] else self._latest[version]
            self._exists.add(register)
        self._latest[version] = register
        return register, source

    def has(self, tensor: RecordedTensor) -> bool:
        version = self._live.get(tensor.identity)
        if version is None:
            return False
        geometry = tensor.geometry
        last = tensor.number if geometry.strides is None else None
        return self._registers.get((version, tensor.offset, geometry, last)) in self._exists

    def make(self, tensors: list[RecordedTensor], read: Iterable[RecordedTensor]) -> list[int]:
        """Returns the registers of the output tensors of an op, given its input tensors.

        An output on the storage of an input is a view of it, or was written in place; any other
        begins a new version.
        """
        numbers = {tensor.identity for tensor in read}
        registers = []
        for tensor in tensors:
            identity = tensor.identity
            version = self._live.get(identity)
            if identity not in numbers or version is None:
                version = self._begin(tensor, external=False)
                numbers.add(identity)
            register = self._register(version, tensor, by_shape=False)
            self._exists.add(register)
            self._latest[version] = register
            registers.append(register)
        return registers

    def forget(self, tensors: Iterable[RecordedTensor]) -> None:
        """Forgets the outputs of an op that is not run, so that readers get external ones."""
        for tensor in tensors:
            self._live.pop(tensor.identity, None)

    def frames(self, rank: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Returns the frames `tensors` and `storages` of the plan; lifetimes and contents are not
        determined yet.
        """
        versions, offsets, shapes, strides, dtypes = (
            zip(*self._tensors, strict=True) if self._tensors else ((),) * 5
        )
        tensors = build_frame(
            "tensors",
            {
                "rank": [rank] * len(versions),
                "tensor": range(len(versions)),
                "storage": versions,
                "offset": offsets,
                "shape": shapes,
                "strides": strides,
                "dtype": dtypes,
            },
        )
        count = len(self._recorded)
        nothing = [None] * count
        storages = build_frame(
            "storages",
            {
                "rank": [rank] * count,
                "storage": range(count),
                "recorded": self._recorded,
                "bytes": self._bytes,
                "device": self._device,
                "external": self._external,
                "first_op": [0] * count,
                "last_op": [0] * count,
                "content": nothing,
                "low": nothing,
                "high": nothing,
                "evidence": nothing,
            },
        )
        return tensors, storages

    def _begin(self, tensor: RecordedTensor, *, external: bool) -> int:
        self._live[tensor.identity] = version = len(self._recorded)
        self._recorded.append(tensor.storage)
        self._bytes.append(0)
        self._device.append(tensor.device)
        self._external.append(external)
        return version

    def _register(self, version: int, tensor: RecordedTensor, *, by_shape: bool) -> int:
        """Returns the register of a geometry.

        Without strides, a transposed square matrix differs from the original only in the number of
        the tensor. But autograd gives saved tensors another number, so readers take the first
        register of that shape.
        """
        self._bytes[version] = max(self._bytes[version], tensor.end_bytes)
        geometry, offset = tensor.geometry, tensor.offset
        key = (version, offset, geometry, tensor.number if geometry.strides is None else None)
        register = self._registers.get(key)
        if register is not None:
            return register
        shape, strides, dtype, _ = structs.astuple(geometry)
        shape_key = (version, offset, shape, dtype)
        if strides is None and by_shape:
            register = self._registers.get(shape_key)
        if register is None:
            register = self._registers[key] = len(self._tensors)
            self._registers.setdefault(shape_key, register)
            self.guessed_strides += strides is None and len(shape) > 1
            self._tensors.append(
                (
                    version,
                    offset,
                    shape,
                    compute_contiguous_strides(shape) if strides is None else strides,
                    dtype,
                )
            )
        return register


_STORAGE = attrgetter("storage")
# Neutral values in place of numbers that a program wrote, by type.
_NUMBER_DTYPES: dict[str, float] = {"float64": 1.0, "int64": 1, "bool": True}

StatusCallback = Callable[[str], None]


class Choice(Struct, frozen=True):
    """The part of a workload to run.

    Attributes:
        level: `outermost`: the ops that the program called; `leaf`: those that call no others.
        steps: Numbers of the steps; None for all.
        scope: Name of a user's scope or module; None for all.
        only: `compute` or `communication`; None for both.
        ranks: The ranks; None for all.
    """

    level: Level = "outermost"
    steps: tuple[int, ...] | None = None
    scope: str | None = None
    only: Literal["compute", "communication"] | None = None
    ranks: tuple[int, ...] | None = None


def make_plan(
    *paths: AnyPath,
    choice: Choice | None = None,
    cache: bool = True,
    progress: StatusCallback | None = None,
) -> ReplayPlan:
    """Plans a replay; a saved plan is loaded.

    Args:
        paths: A capture; host traces of any ranks, with or without device traces; a `.graph`; a
            `.plan`.
        choice: The part to run.
        cache: Use the cache of parsed traces, and fill it.
        progress: Called with a status message.

    Raises:
        UsageError: `no-inputs`, `several-runs`, `wrong-usage`, `no-such-step`, `no-such-scope`,
            `no-such-rank`.
        InputError: `no-host-trace`: no input has ops with their arguments; or the rejection of a
            file.
    """
    choice = choice or Choice()
    on_status = progress or (lambda _: None)
    if not paths:
        raise UsageError("expected at least one file or directory, got none", slug="no-inputs")
    if (
        len(paths) == 1
        and Path(paths[0]).is_file()
        and (str(paths[0]).endswith(ENDING) or is_plan(Path(paths[0])))
    ):
        return _load_plan(os.fspath(paths[0]), choice)
    name, inputs, notices = open_inputs(paths, cache=cache)
    if choice.ranks is not None:
        have = {entry.rank for entry in inputs}
        if absent := sorted(set(choice.ranks) - have):
            available = ", ".join(map(str, sorted(have)[:8]))
            raise UsageError(
                f"rank {absent[0]} has no host trace; there are those of {available}",
                slug="no-such-rank",
            )
        inputs = [entry for entry in inputs if entry.rank in choice.ranks]
    worlds = [int((entry.capture or {}).get("world_size") or 1) for entry in inputs]
    world = max(*worlds, *(entry.rank + 1 for entry in inputs))
    ranks: dict[int, RankPlan] = {}
    groups: dict[str, dict[str, Any]] = {}
    for entry in inputs:
        on_status(f"planning rank {entry.rank}")
        with pause_gc():
            nodes = Nodes.of(entry.host)
            for group in list_groups(nodes, entry.capture, world, entry.rank):
                groups.setdefault(group["name"], group)
            maker = _RankPlanner(entry, nodes, choice, groups)
            ranks[entry.rank] = maker.plan()
        notices += maker.notices()
    if choice.steps is not None and not any(plan.ops.height for plan in ranks.values()):
        raise UsageError(f"no op is in step {choice.steps[0]}", slug="no-such-step")
    if choice.scope is not None and not any(plan.ops.height for plan in ranks.values()):
        raise UsageError(f"no op is in a scope `{choice.scope}`", slug="no-such-scope")
    capture = next((entry.capture for entry in inputs if entry.capture), None) or {}
    versions = capture.get("versions")
    members = max((len(group["ranks"]) for group in groups.values()), default=1)
    return ReplayPlan(
        dict(sorted(ranks.items())),
        pl.DataFrame(list(groups.values()), schema=PLAN_SCHEMAS["groups"]),
        source=name,
        torch=versions.get("torch") if isinstance(versions, dict) else None,
        threads=capture.get("torch_threads"),
        level=choice.level,
        only=choice.only,
        world_size=max(world, members),
        notices=tuple(notices),
    )


@dataclass
class _RankPlanner:
    entry: PlanInput
    nodes: Nodes
    choice: Choice
    groups: dict[str, dict[str, Any]]
    storages: StorageVersions = field(default_factory=StorageVersions)
    ops: list[tuple[Any, ...]] = field(default_factory=list)
    calls: dict[tuple[str, bytes], int] = field(default_factory=dict)
    call_flags: list[list[str]] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    omitted: list[dict[str, Any]] = field(default_factory=list)
    kernels: dict[int, tuple[str | None, ...]] = field(default_factory=dict)
    sources: dict[str, KernelSource | None] = field(default_factory=dict)
    # collectives without a wait so far, by the storages that they write
    _pending: dict[int, int] = field(default_factory=dict)
    _waited: set[int] = field(default_factory=set)
    _by_sequence: dict[tuple[str | None, int], int] = field(default_factory=dict)
    _guessed_groups: int = 0
    # the sparse tensors that ops which are run made
    _sparse: set[int] = field(default_factory=set)
    # encoded arguments of calls with their flags, by the recorded values and types
    _arguments: dict[tuple[Any, ...], tuple[bytes, list[str]]] = field(default_factory=dict)
    _called: dict[tuple[str, int], list[str]] | None = None
    _turns: Counter[tuple[str, int]] = field(default_factory=Counter)
    # recorded integers by node and number among the op's inputs, and the number of unusable dumps
    _seen: dict[int, dict[int, RecordedIntegers]] = field(default_factory=dict)
    _unfit_dumps: int = 0

    def plan(self) -> RankPlan:
        nodes, choice = self.nodes, self.choice
        rows = filter_rows(
            nodes, choose(nodes, choice.level), steps=choice.steps, scope=choice.scope
        )
        ids = nodes.host.ops["id"].to_numpy()
        self.originals = self.entry.originals(ids[rows])
        self.names = nodes.host.ops["name"].to_list()
        self.schemas = nodes.host.ops["schema"].to_list()
        self.types = nodes.host.ops["input_types"].to_list()
        self.output_types = nodes.host.ops["output_types"].to_list()
        self.ids = ids.tolist()
        self.resources = Resources(nodes.host.path)
        self.ranges = nodes.ranges
        self.integers = self.integers_of(rows) if self.ranges or self.resources.dumps else {}
        inner = _find_inner_communication(nodes)
        for row in rows.tolist():
            if nodes.exchanges[row]:
                if choice.only != "compute":
                    self.add_exchange(row, inner.get(row))
                else:
                    self.storages.forget(nodes.returned[row])
            elif choice.only != "communication":
                (self.add_kernel if nodes.kernels[row] else self.add_op)(row)
        for collective in list(dict.fromkeys(self._pending.values())):
            self.wait(collective)
        return self.assembled()

    def notices(self) -> list[Notice]:
        out = []
        flags = Counter(flag for flags in self.call_flags for flag in set(flags))
        zeros, cut, objects = (
            format_quantity(flags[flag], "call") for flag in (ROUNDED, CUT, UNKNOWN)
        )
        if flags[ROUNDED]:
            text = f"{zeros} with an argument 0.0 that may have been smaller than 5e-7: PyTorch writes six digits"
            out.append(Notice("rounded-numbers", "info", text, flags[ROUNDED]))
        if flags[CUT]:
            text = f"{cut} with a list that PyTorch cut at 4,096 entries"
            out.append(Notice("cut-lists", "warning", text, flags[CUT]))
        if flags[UNKNOWN]:
            text = f"{objects} with an argument that no file can hold"
            out.append(Notice("unknown-objects", "info", text, flags[UNKNOWN]))
        if self.kernels:
            captured_count = sum(source is not None for source in self.sources.values())
            text = (
                f"{format_quantity(len(self.kernels), 'different call')} of compiled kernels: "
                + (
                    f"{captured_count} of {format_quantity(len(self.sources), 'source')} captured, which run on a GPU with --trust"
                    if captured_count
                    else "no source was captured, so that stand-ins take their places"
                )
            )
            out.append(
                Notice(
                    "compiled-kernels",
                    "info" if captured_count else "warning",
                    text,
                    len(self.kernels),
                )
            )
        if self._unfit_dumps:
            text = (
                f"{format_quantity(self._unfit_dumps, 'dumped tensor')} left out, and what they held is guessed: the file is "
                "not of the tensor's size or memory, or holds what an op cannot take"
            )
            out.append(Notice("unfit-dumps", "warning", text, self._unfit_dumps))
        if self._guessed_groups:
            text = f"{format_quantity(self._guessed_groups, 'collective')} do not say their group; taken to be of all ranks"
            out.append(Notice("guessed-groups", "warning", text, self._guessed_groups))
        if self.storages.guessed_strides:
            text = f"strides are not recorded: {format_quantity(self.storages.guessed_strides, 'tensor')} taken to be contiguous"
            out.append(Notice(GUESSED_STRIDES, "info", text, self.storages.guessed_strides))
        if self.entry.host.notices:
            out += self.entry.host.notices
        return [notice.of_rank(self.entry.rank) for notice in out]

    # -- ops --

    def add_op(self, row: int) -> None:
        read, returned = self.nodes.read[row], self.nodes.returned[row]
        text, types = self.schemas[row], self.types[row]
        try:
            schema, refusal, has_numbers, unknown_type, kinds, is_plain, slots = build_op_kind(
                text, types, self.output_types[row]
            )
        except UnreadableSchemaError as error:
            self.leave_out(row, "unreadable-schema", str(error))
            return
        if row in self.nodes.unreadable:
            self.leave_out(row, "unreadable-values", self.nodes.unreadable[row])
            return
        if unknown_type:
            self.leave_out(row, "unknown-type", f"a tensor is of the type {unknown_type!r}")
            return
        if not all(map(_STORAGE, (*read, *returned))) and any(
            tensor.is_symbolic for tensor in (*read, *returned)
        ):
            text = "shapes of its tensors are symbols, which PyTorch does not write: record a step that compiles nothing"
            self.leave_out(row, "symbolic-shape", text)
            return
        if not all(map(_STORAGE, read)) and any(
            tensor.is_sparse and tensor.identity not in self._sparse for tensor in read
        ):
            text = (
                f"{self.names[row]} is given a sparse tensor that no op made here: no file holds it"
            )
            self.leave_out(row, "sparse-tensor", text)
            return
        if refusal is None:
            self._sparse.update(tensor.identity for tensor in returned if tensor.is_sparse)
        else:
            self._sparse.difference_update(tensor.identity for tensor in returned)
        if self._pending:
            self.wait_for(read)
        numbers: dict[int, tuple[str, float]] = {}
        if has_numbers and not all(tensor.geometry.shape for tensor in read):
            numbers = self.plain_numbers(row, schema)
            read = [tensor for tensor in read if tensor.number not in numbers]
        # Tensors are numbered from 0, so calls of one op with equal other values have equal
        # arguments.
        values = self.nodes.inputs[row]
        key = (text, types, encode((len(values), *compress(values, is_plain))), *numbers.values())
        if key not in self._arguments:
            self._arguments[key] = encode_arguments(values, kinds, schema, dict(numbers.values()))
        arguments, flags = self._arguments[key]
        inputs = self.registers_of(read)
        if row in self.integers:
            self.examine_integers(row, read)
        if schema.name == "set_" and b'{"object":"Storage"}' in arguments and returned:
            # A storage from elsewhere, such as a data loader worker: an external one.
            inputs.append(self.registers_of(returned)[0])
            arguments = arguments.replace(
                b'{"object":"Storage"}', b'{"storage":%d}' % (len(inputs) - 1)
            )
            flags = [flag for flag in flags if flag != "unknown-object"]
            outputs: list[int | None] = [inputs[-1]]
        else:
            registers = iter(self.storages.make(returned, read))
            outputs = [next(registers) if slot else None for slot in slots]
        self.add(
            row,
            RUN if refusal is None else STAND_IN,
            inputs,
            outputs,
            call=self.call_of(text, arguments, flags),
            reason=refusal and refusal.slug,
        )

    def add_kernel(self, row: int) -> None:
        read = self.nodes.read[row]
        if row in self.nodes.unreadable:
            self.leave_out(row, "unreadable-values", self.nodes.unreadable[row])
            return
        if unknown_type := find_unknown_type(self.types[row]):
            self.leave_out(row, "unknown-type", f"a tensor is of the type {unknown_type!r}")
            return
        self.wait_for(read)
        arguments, grid = convert_arguments(self.nodes.inputs[row], parse_kinds(self.types[row]))
        file = str(self.nodes.attributes[row].kernel_file or "")
        if file not in self.sources:
            self.sources[file] = read_source(self.resources, file)
        source = self.sources[file]
        name = self.names[row]
        call = self.call_of(
            f"kernel {name} of {file}{'' if grid is None else f' on {grid}'}", arguments, []
        )
        source_fields = (source.sha256, source.text) if source else (None, None)
        self.kernels[call] = (name, file or None, *source_fields, grid)
        self.add(
            row,
            STAND_IN,
            self.registers_of(read),
            call=call,
            reason=NOT_TRUSTED if source else NO_SOURCES,
        )

    def integers_of(self, rows: Ints) -> dict[int, list[int]]:
        """Returns, by row to run, it and the rows below it with recorded integers."""
        nodes = self.nodes
        runs = np.zeros(nodes.parent.size, dtype=np.bool_)
        runs[rows] = True
        recorded_rows = np.flatnonzero(np.isin(self.ids, [*self.ranges, *self.resources.dumps]))
        running_rows = np.where(
            runs[recorded_rows],
            recorded_rows,
            find_nearest_ancestor(nodes.parent, runs)[recorded_rows],
        )
        out: dict[int, list[int]] = defaultdict(list)
        for row, inner in zip(running_rows.tolist(), recorded_rows.tolist(), strict=True):
            out[row].append(inner)
        return out

    def examine_integers(self, row: int, read: list[RecordedTensor]) -> None:
        """Collects the recorded integers of the inputs of a node, or of one below it."""
        integers = self._seen[self.ids[row]] = {}
        index_by_tensor = {
            tensor[1:]: index for index, tensor in enumerate(read)
        }  # inside an op, a view of it has another number
        for inner in self.integers[row]:
            dumps = self.resources.dumps.get(self.ids[inner], {})
            ranges = self.ranges.get(self.ids[inner], {})
            numbers = list_observed_numbers(self.types[inner])
            for tensor, number in zip(self.nodes.read[inner], numbers, strict=False):
                index = index_by_tensor.get(tensor[1:], -1)
                if index >= 0 and number in ranges:
                    integers.setdefault(index, RecordedIntegers(*ranges[number]))
                if index >= 0 and number in dumps:
                    values = self.resources.dumped(dumps[number], tensor)
                    self._unfit_dumps += values is None
                    if values is not None and values.size:
                        integers[index] = RecordedIntegers(
                            int(values.min()), int(values.max()), values
                        )

    def plain_numbers(self, row: int, schema: OperatorSchema) -> dict[int, tuple[str, float]]:
        """Returns tensors that the program passed as plain numbers: by their numbers, the argument
        and a replacement value.

        PyTorch turns the 2 in `x * 2` into a tensor of one element, and records it without its
        value.
        """
        out: dict[int, tuple[str, float]] = {}
        tensors = iter(self.nodes.read[row])
        for kind, argument in zip(parse_kinds(self.types[row]), schema.arguments, strict=False):
            if isinstance(kind, tuple) or not kind:
                deque(islice(tensors, values_count_of(kind)), maxlen=0)
                continue
            value = next(tensors)
            if argument.name not in NUMBERS:
                continue
            dtype, shape = value.geometry.dtype, value.geometry.shape
            is_plain = dtype in _NUMBER_DTYPES and value.device in {"cpu", ""} and not shape
            if is_plain and not self.storages.has(value):
                out[value.number] = (argument.name, _NUMBER_DTYPES[dtype])
        return out

    def call_of(self, schema: str, arguments: bytes, flags: list[str]) -> int:
        call = self.calls.setdefault((schema, arguments), len(self.calls))
        if call == len(self.call_flags):
            self.call_flags.append(sorted(set(flags)))
        return call

    def registers_of(self, tensors: list[RecordedTensor]) -> list[int]:
        """Returns registers of tensors; adds views that no op creates."""
        out = []
        for tensor in tensors:
            register, source = self.storages.read(tensor)
            if source is not None:
                self.add(None, VIEW, [source], [register])
            out.append(register)
        return out

    def add(
        self,
        row: int | None,
        action: str,
        inputs: Sequence[int] = (),
        outputs: Sequence[int | None] = (),
        *,
        call: int | None = None,
        collective: int | None = None,
        reason: str | None = None,
    ) -> int:
        """Adds an instruction, which belongs to the node of `row` unless that is None, and returns
        its number.
        """
        self.ops.append((row, action, call, collective, inputs, outputs, reason))
        return len(self.ops) - 1

    def leave_out(self, row: int, reason: str, text: str) -> None:
        self.storages.forget(self.nodes.returned[row])
        self._sparse.difference_update(tensor.identity for tensor in self.nodes.returned[row])
        durations = self.originals.durations_ns.get(self.ids[row])
        self.omitted.append(
            {
                "rank": self.entry.rank,
                "node": self.ids[row],
                "name": self.names[row],
                "reason": reason,
                "text": text,
                "duration_ns": sorted(durations)[len(durations) // 2] if durations else None,
            }
        )

    # -- communication --

    def add_exchange(self, row: int, inner: int | None) -> None:
        schema: OperatorSchema | None = None
        if self.schemas[row]:
            try:
                schema = parse_schema(self.schemas[row])
            except UnreadableSchemaError as error:
                if inner is None:
                    self.leave_out(row, "unreadable-schema", str(error))
                    return
        call = row if schema is not None or inner is None else inner
        exchange = read_exchange(self.nodes, call, schema, inner)
        if call in self.nodes.unreadable:
            self.leave_out(row, "unreadable-values", self.nodes.unreadable[call])
            return
        if exchange.kind == WAIT:
            # a wait has the sequence number of its collective, but not the group
            collective = next(
                (
                    number
                    for (_, sequence), number in self._by_sequence.items()
                    if sequence == exchange.sequence
                ),
                None,
            )
            if schema is not None:
                self.wait_for(exchange.sent)
                inputs = self.registers_of(exchange.sent)
                outputs = self.storages.make(self.nodes.returned[row], exchange.sent)
                for source, output in zip(inputs, outputs, strict=False):
                    if output != source:
                        self.add(row, VIEW, [source], [output])
            elif collective is not None:
                self.wait(collective, row)
            return
        if exchange.kind is None:
            if schema is not None:
                self.leave_out(
                    row,
                    "unknown-collective",
                    f"`{schema.qualified}` is no collective that is known",
                )
            elif self.nodes.read[row] or self.nodes.returned[row]:
                self.leave_out(row, "unknown-collective", "its kind is not recorded")
            return
        self.wait_for([*exchange.sent, *exchange.received])
        sent = self.registers_of(exchange.sent)
        received = [] if exchange.made else self.registers_of(exchange.received)
        if exchange.made:
            received = self.storages.make(exchange.received, exchange.sent)
        group, peer = self.group_of(exchange)
        number = len(self.collectives)
        op = self.add(row, COLLECTIVE, sent, received, collective=number)
        self.collectives.append(
            {
                "rank": self.entry.rank,
                "collective": number,
                "op": op,
                "kind": exchange.kind,
                "group": group,
                "sequence": exchange.sequence,
                "peer": peer,
                "tag": exchange.tag,
                "splits_in": exchange.splits[0],
                "splits_out": exchange.splits[1],
                "asynchronous": exchange.asynchronous,
                "bytes": count_bytes(exchange.sent or exchange.received),
            }
        )
        if exchange.sequence is not None:
            self._by_sequence[exchange.group, exchange.sequence] = number
        if exchange.asynchronous:
            for tensor in (*exchange.sent, *exchange.received):
                self._pending[tensor.storage] = number
        else:
            self._waited.add(number)

    def group_of(self, exchange: Exchange) -> tuple[str, int | None]:
        """Returns the group's name, and the peer as a rank of the job."""
        name = exchange.group
        if name not in self.groups:
            name = self.called_group(exchange)
        if name not in self.groups:
            is_ambiguous = len({tuple(group["ranks"]) for group in self.groups.values()}) > 1
            self._guessed_groups += is_ambiguous
            name = max(self.groups, key=lambda label: len(self.groups[label]["ranks"]))
        members = self.groups[name]["ranks"]
        peer = exchange.peer
        if peer is not None and 0 <= peer < len(members):
            peer = members[peer]
        return name, peer

    def called_group(self, exchange: Exchange) -> str | None:
        """Returns the group of the same call in the timed steps according to the capture; in turn
        if several match.
        """
        if self._called is None:
            self._called = read_called_groups(self.entry.capture)
        key = (exchange.kind or "", count_bytes(exchange.sent or exchange.received))
        groups = self._called.get(key)
        if not groups:
            return None
        call_index = self._turns[key]
        self._turns[key] += 1
        return groups[call_index % len(groups)]

    def wait_for(self, tensors: list[RecordedTensor]) -> None:
        """Adds waits for the collectives that read or write these tensors, before they are used."""
        for tensor in tensors:
            if tensor.storage in self._pending:
                self.wait(self._pending[tensor.storage])

    def wait(self, collective: int, row: int | None = None) -> None:
        self._pending = {
            storage: number for storage, number in self._pending.items() if number != collective
        }
        if collective not in self._waited:
            self._waited.add(collective)
            self.add(row, WAIT, collective=collective)

    # -- the end --

    def ops_frame(self) -> pl.DataFrame:
        """Returns the instructions with data of their nodes; those without a node take the thread,
        step and scope of the previous one.
        """
        rows, actions, calls, collectives, inputs, outputs, reasons = (
            zip(*self.ops, strict=True) if self.ops else [()] * 7
        )
        nodes, count = self.nodes, len(rows)
        row = pl.Series("row", rows, dtype=pl.UInt32)
        before = row.fill_null(strategy="forward")
        node_facts = nodes.host.ops.select("name", "thread").with_columns(
            pl.Series("scope", nodes.scopes, dtype=pl.String),
            pl.Series("phase", nodes.phases, dtype=pl.String),
            pl.Series("step", nodes.steps).replace(-1, None),
        )
        op_names, surrounding = (
            node_facts["name"].gather(row),
            node_facts.select(pl.all().gather(before)),
        )
        node = nodes.host.ops["id"].gather(row)
        measured, ids = self.originals, node.to_list()
        return build_frame(
            "ops",
            {
                "rank": [self.entry.rank] * count,
                "op": range(count),
                "node": node,
                "action": actions,
                "name": op_names.fill_null(pl.Series(actions, dtype=pl.String)),
                "call": calls,
                "collective": collectives,
                "inputs": inputs,
                "outputs": outputs,
                "thread": surrounding["thread"].fill_null(0),
                "stream": [measured.stream.get(number) for number in ids],
                "step": surrounding["step"],
                "scope": surrounding["scope"].fill_null(""),
                "phase": surrounding["phase"],
                "durations_ns": [measured.durations_ns.get(number, ()) for number in ids],
                "gap_ns": [measured.gap_ns.get(number) for number in ids],
                "gpu_ns": [measured.gpu_ns.get(number) for number in ids],
                "reason": reasons,
            },
        )

    def assembled(self) -> RankPlan:
        rank = self.entry.rank
        ops = self.ops_frame()
        texts = list(self.calls)
        calls = build_frame(
            "calls",
            {
                "rank": [rank] * len(texts),
                "call": range(len(texts)),
                "schema": [schema for schema, _ in texts],
                "arguments": [arguments.decode() for _, arguments in texts],
                "flags": self.call_flags,
            },
        )
        tensors, storages = self.storages.frames(rank)
        rank_column = pl.lit(rank, pl.Int32).alias("rank")
        is_whole = not (self.choice.scope or self.choice.only)
        measured = self.originals if is_whole else RecordedTimes()
        plan = RankPlan(
            rank,
            ops,
            calls,
            tensors,
            storages,
            collectives=pl.DataFrame(self.collectives, schema=PLAN_SCHEMAS["collectives"]),
            kernels=pl.DataFrame(
                [(rank, call, *kernel) for call, kernel in self.kernels.items()],
                schema=PLAN_SCHEMAS["kernels"],
                orient="row",
            ),
            omitted=pl.DataFrame(self.omitted, schema=PLAN_SCHEMAS["omitted"]),
            steps=measured.steps.select(rank_column, pl.all()),
            holes=measured.holes.select(rank_column, pl.all()),
        ).with_computed_lifetimes()
        plan, refused = settle_contents(plan, self._seen)
        self._unfit_dumps += refused
        plan.check()
        return plan


def _load_plan(path: str, choice: Choice) -> ReplayPlan:
    """Loads a saved plan, or some of its ranks."""
    if choice != Choice(ranks=choice.ranks):
        raise UsageError(
            "a plan holds what was chosen; only ranks are chosen from it",
            slug="wrong-usage",
            hint="give what the plan was made of",
        )
    plan = ReplayPlan.load(path)
    if choice.ranks is None:
        return plan
    if absent := sorted(set(choice.ranks) - set(plan.ranks)):
        available = ", ".join(map(str, list(plan.ranks)[:8]))
        raise UsageError(
            f"the plan has no rank {absent[0]}; it has {available}", slug="no-such-rank"
        )
    return replace(plan, ranks={rank: plan.ranks[rank] for rank in choice.ranks})


def _find_inner_communication(nodes: Nodes) -> dict[int, int]:
    rows = (nodes.host.ops["name"] == "record_param_comms").arg_true().to_list()
    parent = nodes.parent.tolist()
    out: dict[int, int] = {}
    for row in rows:
        ancestor = parent[row]
        while ancestor >= 0 and not nodes.has_schema[ancestor]:
            ancestor = parent[ancestor]
        if ancestor >= 0:
            out.setdefault(ancestor, row)
    return out
