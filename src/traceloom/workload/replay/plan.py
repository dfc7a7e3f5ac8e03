"""The replay plan (frames, checks, saving and loading) and the results of a replay.

A plan consists of registers and calls. A *storage* here is one version of a recorded storage, from
the op that creates it to its last use, because recorded numbers are reused. A *tensor* is a
geometry (offset, shape, strides, type) on a storage: two recorded tensors of one geometry are the
same register. A *call* is a schema with its arguments, in which tensors are numbered; ops with
equal calls share it.

Arguments are JSON, one value for each argument of the schema in order: numbers, booleans, null,
strings and lists represent themselves, and an object everything else:

| object | meaning |
|---|---|
| `{"tensor": k}` | the k-th of the op's inputs |
| `{"storage": k}` | the storage of the k-th of the op's inputs (`aten::set_`) |
| `{"dtype": "float32"}`, `{"layout": "strided"}`, `{"memory_format": "channels_last"}` | an enum, by the schema |
| `{"device": "cuda:0"}` | a device, as recorded |
| `{"float": "inf"}` | inf, -inf or nan |
| `{"complex": [re, im]}` | a complex number |
| `{"generator": null}` | the default generator |
| `{"object": "text"}` | the recorded text of an object that cannot be stored |
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import polars as pl

from traceloom.errors import broken
from traceloom.system import files
from traceloom.trace.frames import Result, build_schema
from traceloom.trace.notice import Notice
from traceloom.trace.storage import ArchiveFormat

ENDING = ".plan"
RUN, VIEW, COLLECTIVE, WAIT, STAND_IN = ACTIONS = ("run", "view", "collective", "wait", "stand-in")
CONTENTS = (
    "floats",
    "weights",
    "positive",
    "probability",
    "integers",
    "offsets",
    "lengths",
    "zeros",
    "data",
)
EVIDENCE = ("data", "range", "consumer", "guess")
NO_SOURCES, NOT_TRUSTED = (
    "no-sources",
    "not-trusted",
)  # reasons why a stand-in replaces a compiled kernel
SOURCE_NAME = re.compile(r"\w[\w-]*\.py")  # a file name without directories
GUESSED_STRIDES = (
    "guessed-strides"  # a notice: the host trace has no strides, so tensors are assumed contiguous
)
_RowList = pl.List(pl.UInt32)
_IntegerList = pl.List(pl.Int64)

# fmt: off
PLAN_SCHEMAS: dict[str, pl.Schema] = {
    # One row per instruction, in order of execution. `node` is the id in the host trace, null for
    # `view`: a geometry that no op creates, of a live tensor (its only input). `inputs` are rows of
    # `tensors` in the order of their numbers in the call; `outputs` those of the returned tensors,
    # flattened, null where unused. The durations are those of the timed steps, empty if unknown;
    # the gap is the time of the thread since the end of its previous op. `gpu_ns` is the time of
    # the GPU work that it launched, null if there is none. `reason` is why a stand-in replaces an
    # op.
    "ops": build_schema(
        "rank op node name action call collective inputs outputs thread stream step scope phase durations_ns gap_ns",
        "gpu_ns reason",
        {
            "op": pl.UInt32, "node": pl.Int64, "action": pl.Enum(ACTIONS), "call": pl.UInt32, "collective": pl.UInt32,
            "inputs": _RowList, "outputs": _RowList, "thread": pl.Int32, "scope": pl.String, "durations_ns": _IntegerList,
            "phase": pl.String,
        },
    ),
    # `flags` lists deviations of the arguments from those that ran: `cut-list`, `rounded-number`,
    # `unknown-object`.
    "calls": build_schema(
        "rank call schema arguments flags",
        {"call": pl.UInt32, "arguments": pl.String, "flags": pl.List(pl.String)},
    ),
    # Calls of kernels that a compiled graph launched; their `schema` is not an op schema. Their ops
    # are stand-ins until the source is trusted. `sha256` and `source` are null if the source was
    # not captured; `grid` is as recorded, null since PyTorch 2.6.
    "kernels": build_schema(
        "rank call name file sha256 source grid",
        dict.fromkeys(("file", "sha256", "source", "grid"), pl.String) | {"call": pl.UInt32},
    ),
    # Offset and strides in elements.
    "tensors": build_schema(
        "rank tensor storage offset shape strides dtype",
        {"tensor": pl.UInt32, "storage": pl.UInt32, "shape": _IntegerList, "strides": _IntegerList},
    ),
    # `recorded` is the number in the host trace. An external storage gets its content before the
    # run and is kept over iterations; the others are created by `first_op` and freed after
    # `last_op`. `content` is the required content of an external one, with integers from `low` to
    # `high`, and `evidence` how it is known.
    "storages": build_schema(
        "rank storage recorded bytes device external first_op last_op content low high evidence",
        {
            "storage": pl.UInt32, "recorded": pl.Int64, "device": pl.String, "external": pl.Boolean,
            "first_op": pl.UInt32, "last_op": pl.UInt32, "content": pl.Enum(CONTENTS), "low": pl.Int64,
            "high": pl.Int64, "evidence": pl.Enum(EVIDENCE),
        },
    ),
    # Values of integer tensors on external storages, if they were dumped: flattened by row, as
    # little-endian bytes of the tensor's type. The rest of the storage holds integers from `low` to
    # `high`.
    "data": build_schema("rank tensor values", {"tensor": pl.UInt32, "values": pl.Binary}),
    # `peer` is the root or the peer, a rank of the job. Splits are in rows of the first dimension,
    # empty if equal.
    "collectives": build_schema(
        "rank collective op kind group sequence peer tag splits_in splits_out bytes asynchronous",
        {"collective": pl.UInt32, "op": pl.UInt32, "splits_in": _IntegerList, "splits_out": _IntegerList},
    ),
    # Ops that are not run at all, and the reason.
    "omitted": build_schema("rank node name reason text duration_ns", {"node": pl.Int64, "text": pl.String}),
    # The timed steps with their duration, and the processor time of the thread that marked them.
    "steps": build_schema("rank step duration_ns cpu_ns"),
    # Compiled graphs, whose CPU kernels are in no host trace: their number per step, and their time
    # outside of ops.
    "holes": build_schema("rank name count duration_ns"),
    "groups": build_schema("name description backend ranks", {"ranks": pl.List(pl.Int32)}),
}
# fmt: on
_RANK_FRAMES = tuple(name for name, columns in PLAN_SCHEMAS.items() if "rank" in columns)
_FORMAT = ArchiveFormat(
    "plan",
    another_slug="not-a-plan",
    damaged_slug="plan-damaged",
    version=3,
    schemas=PLAN_SCHEMAS,
    never_null={
        "ops": (
            "rank",
            "op",
            "name",
            "action",
            "inputs",
            "outputs",
            "thread",
            "scope",
            "durations_ns",
        ),
        "calls": ("rank", "call", "schema", "arguments", "flags"),
        "tensors": tuple(PLAN_SCHEMAS["tensors"]),
        "storages": ("rank", "storage", "bytes", "device", "external", "first_op", "last_op"),
        "data": tuple(PLAN_SCHEMAS["data"]),
        "kernels": ("rank", "call", "name"),
        "collectives": (
            "rank",
            "collective",
            "op",
            "kind",
            "group",
            "splits_in",
            "splits_out",
            "asynchronous",
        ),
        "omitted": ("rank", "node", "name", "reason", "text"),
        "steps": ("rank", "step", "duration_ns"),
        "holes": tuple(PLAN_SCHEMAS["holes"]),
        "groups": ("name", "ranks"),
    },
    hint="make it again with `traceloom replay INPUT --plan-only -o run.plan`",
)
is_plan = _FORMAT.holds


def build_empty_frame(name: str) -> pl.DataFrame:
    """Returns a frame of a plan without rows."""
    return pl.DataFrame(schema=PLAN_SCHEMAS[name])


def build_frame(name: str, columns: Mapping[str, Any]) -> pl.DataFrame:
    """Returns a frame of a plan from columns of Python values; lists are passed as JSON, which
    Polars reads faster than Python lists.
    """
    series = {}
    for column, kind in PLAN_SCHEMAS[name].items():
        values = columns[column]
        if isinstance(kind, pl.List):
            rows = (
                pl.Series(column, [msgspec.json.encode(values).decode()])
                .str.json_decode(pl.List(kind))
                .explode()
            )
            series[column] = rows.head(len(values))  # `explode` returns null for an empty list
        else:
            series[column] = pl.Series(column, values, dtype=kind)
    return pl.DataFrame(series)


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank; frames as in `PLAN_SCHEMAS`, with rows of this rank only; `op`, `call`,
    `tensor`, ... are row numbers.

    Attributes:
        rank: The rank of the job.
        ops: Instructions in order of execution.
        calls: Distinct calls.
        tensors: Registers.
        storages: Versions of storages.
        data: Recorded values of integer tensors.
        kernels: Calls of compiled kernels.
        collectives: Communication with other ranks.
        omitted: Ops that are not run.
        steps: The timed steps; empty if the recording has none, or part of a step is run.
        holes: Time per step in compiled code that is not run.
    """

    rank: int
    ops: pl.DataFrame
    calls: pl.DataFrame = field(default_factory=lambda: build_empty_frame("calls"))
    tensors: pl.DataFrame = field(default_factory=lambda: build_empty_frame("tensors"))
    storages: pl.DataFrame = field(default_factory=lambda: build_empty_frame("storages"))
    data: pl.DataFrame = field(default_factory=lambda: build_empty_frame("data"))
    kernels: pl.DataFrame = field(default_factory=lambda: build_empty_frame("kernels"))
    collectives: pl.DataFrame = field(default_factory=lambda: build_empty_frame("collectives"))
    omitted: pl.DataFrame = field(default_factory=lambda: build_empty_frame("omitted"))
    steps: pl.DataFrame = field(default_factory=lambda: build_empty_frame("steps"))
    holes: pl.DataFrame = field(default_factory=lambda: build_empty_frame("holes"))

    def check(self) -> None:
        """Raise InvariantError if the plan of a rank cannot be run.

        Numbers are row numbers; references point to rows; an op has a call, or is a view, a
        collective or a wait; a tensor lies within its storage; a storage that no op creates is
        external; a tensor is created before it is used, and no storage is used outside its
        lifetime.
        """
        for name, number in (
            ("ops", "op"),
            ("calls", "call"),
            ("tensors", "tensor"),
            ("storages", "storage"),
            ("collectives", "collective"),
        ):
            frame = getattr(self, name)
            if not np.array_equal(frame[number].to_numpy(), np.arange(frame.height)):
                raise broken("plan", f"the numbers of `{name}` are not 0, 1, 2, ...")
        for name, column, target_frame in (
            ("ops", "inputs", "tensors"),
            ("ops", "outputs", "tensors"),
            ("ops", "call", "calls"),
            ("ops", "collective", "collectives"),
            ("tensors", "storage", "storages"),
            ("collectives", "op", "ops"),
            ("data", "tensor", "tensors"),
            ("kernels", "call", "calls"),
            ("storages", "last_op", "ops"),
            ("storages", "first_op", "ops"),
        ):
            values = getattr(self, name)[column]
            highest = (values.explode() if isinstance(values.dtype, pl.List) else values).max()
            if highest is not None and int(highest) >= getattr(self, target_frame).height:
                raise broken("plan", f"`{column}` of `{name}` has no row in `{target_frame}`")
        if (self.ops["call"].is_null() & (self.ops["action"] == RUN)).any() or (
            self.ops["call"].is_not_null() & ~self.ops["action"].is_in([RUN, STAND_IN])
        ).any():
            raise broken("plan", "calls are of ops that run, and of these alone")
        for text, sha256, file in {*self.kernels.select("source", "sha256", "file").rows()}:
            is_valid_name = SOURCE_NAME.fullmatch(file or "") is not None
            if text is not None and not (
                is_valid_name and hashlib.sha256(text.encode()).hexdigest() == sha256
            ):
                raise broken(
                    "plan", f"the source of a kernel, {file!r}, is not the one that was captured"
                )
        self._check_tensors()
        self._check_order()

    def _check_tensors(self) -> None:
        last = (pl.col("shape") - 1) * pl.col("strides")
        extents = self.tensors.select(
            "storage",
            pl.col("dtype")
            .replace_strict(ITEM_BYTES, default=None, return_dtype=pl.Int64)
            .alias("item"),
            (pl.col("offset") + last.list.sum()).alias("last"),
            (pl.col("shape").list.min() == 0).fill_null(value=False).alias("empty"),
            (pl.col("offset") < 0).alias("negative"),
        ).with_columns(self.storages["bytes"].gather(self.tensors["storage"]))
        if extents["item"].null_count():
            raise broken("plan", "a tensor is of no type of PyTorch's")
        exceeds = (
            ~extents["empty"] & ((extents["last"] + 1) * extents["item"] > extents["bytes"])
            | extents["negative"]
        )
        if exceeds.any():
            raise broken("plan", f"{exceeds.sum()} tensors do not lie within their storages")
        for tensor, values in self.data.select("tensor", "values").iter_rows():
            storage, shape, dtype = self.tensors.select("storage", "shape", "dtype").row(tensor)
            fits = (
                len(values) == prod(shape) * ITEM_BYTES[dtype]
                and self.storages["external"][storage]
            )
            if not fits or not dtype.startswith(("int", "uint")):
                raise broken(
                    "plan", "data are of integer tensors from outside, and as long as these"
                )

    def _check_order(self) -> None:
        op, tensor, is_output, storage = (column.to_numpy() for column in self.uses())
        first, last, external = (
            self.storages[name].to_numpy() for name in ("first_op", "last_op", "external")
        )
        if ((op < first[storage]) | (op > last[storage])).any():
            raise broken("plan", "a storage is used outside its life")
        first_output_op = np.full(self.tensors.height, self.ops.height, dtype=op.dtype)
        np.minimum.at(first_output_op, tensor[is_output], op[is_output])
        read = ~is_output & ~external[storage]
        if (first_output_op[tensor[read]] >= op[read]).any():
            raise broken("plan", "a tensor is used that nothing has made")

    def with_computed_lifetimes(self) -> RankPlan:
        """Returns the plan with each storage living from the first op that uses it to the last;
        unused ones have no lifetime.
        """
        op, _, _, storage = (column.to_numpy() for column in self.uses())
        count, end = self.storages.height, self.ops.height
        first, last = np.full(count, end, dtype=op.dtype), np.zeros(count, dtype=op.dtype)
        np.minimum.at(first, storage, op)
        np.maximum.at(last, storage, op)
        first[first == end] = 0
        lives = pl.DataFrame({"first_op": first, "last_op": last})
        return replace(self, storages=self.storages.with_columns(lives.get_columns()))

    @property
    def has_accelerator(self) -> bool:
        """Whether some of its tensors were on a device other than the CPU."""
        return not self.storages["device"].is_in(["cpu", "meta"]).all()

    def peak_bytes(self, storages: pl.DataFrame | None = None) -> int:
        """Returns the peak bytes of live storages, without allocations inside ops.

        Args:
            storages: Rows of `storages`; None: all.
        """
        storages = self.storages if storages is None else storages
        allocated = storages.filter(~pl.col("external"))
        changes = np.zeros(self.ops.height + 1, dtype=np.int64)
        np.add.at(changes, allocated["first_op"].to_numpy(), allocated["bytes"].to_numpy())
        np.subtract.at(changes, allocated["last_op"].to_numpy() + 1, allocated["bytes"].to_numpy())
        return int(storages.filter("external")["bytes"].sum()) + int(changes.cumsum().max())

    def uses(self) -> pl.DataFrame:
        """Returns one row per input or output tensor of an op: op, tensor, storage, made (it is an
        output).
        """
        parts = [
            self.ops.select(
                "op", pl.col(side).alias("tensor"), pl.lit(value=side == "outputs").alias("made")
            )
            .explode("tensor")
            .drop_nulls("tensor")
            for side in ("inputs", "outputs")
        ]
        all_uses = pl.concat(parts)
        return all_uses.with_columns(self.tensors["storage"].gather(all_uses["tensor"]))


@dataclass(frozen=True)
class ReplayPlan:
    """The plans of the ranks of a job.

    Attributes:
        ranks: By rank, ascending.
        groups: Process groups: columns as `PLAN_SCHEMAS["groups"]`.
        source: The input, as the user gave it.
        torch: Version of PyTorch that ran the workload, if known.
        threads: Threads that an op could use, if known.
        level: `outermost` or `leaf`.
        only: `compute` or `communication`; None for both.
        world_size: Ranks of the job.
        notices: Notices about the plan.
    """

    ranks: dict[int, RankPlan]
    groups: pl.DataFrame = field(default_factory=lambda: build_empty_frame("groups"))
    source: str = ""
    torch: str | None = None
    threads: int | None = None
    level: str = "outermost"
    only: str | None = None
    world_size: int = 1
    notices: tuple[Notice, ...] = ()

    def __iter__(self) -> Iterator[RankPlan]:
        return iter(self.ranks.values())

    def check(self) -> None:
        """Raise InvariantError if one of its ranks cannot be run; see `RankPlan.check`."""
        for rank_plan in self:
            rank_plan.check()
        names = set(self.groups["name"])
        if unknown_groups := {name for plan in self for name in plan.collectives["group"]} - names:
            raise broken("plan", f"no group is named {min(unknown_groups)!r}")

    def save(self, path: str | Path, *, force: bool = False) -> int:
        """Write the plan as one file; returns its size in bytes. See `traceloom.trace.storage`.

        Raises:
            OutputError: `file-exists`, `cannot-write`.
        """
        return files.write(Path(path), self.pack, force=force)

    def pack(self, handle: BinaryIO) -> None:
        header = {
            "source": self.source,
            "torch": self.torch,
            "threads": self.threads,
            "level": self.level,
            "only": self.only,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "notices": [asdict(notice) for notice in self.notices],
        }
        frames = {
            name: pl.concat([build_empty_frame(name), *(getattr(plan, name) for plan in self)])
            for name in _RANK_FRAMES
        }
        _FORMAT.pack(header, {**frames, "groups": self.groups}, handle)

    @staticmethod
    def load(path: str | Path) -> ReplayPlan:
        """Reads a saved plan, and checks it.

        Raises:
            InputError: `unreadable`, `not-a-plan`, `plan-damaged`, `other-version`.
        """
        return _FORMAT.load(path, _build_plan)


def _build_plan(header: dict[str, Any], frames: dict[str, pl.DataFrame]) -> ReplayPlan:
    plan_header = msgspec.convert(header, _Header)
    ranks = {
        rank: RankPlan(
            rank, **{name: frames[name].filter(pl.col("rank") == rank) for name in _RANK_FRAMES}
        )
        for rank in sorted(plan_header.ranks)
    }
    if sum(plan.ops.height for plan in ranks.values()) != frames["ops"].height:
        raise ValueError("it has ops of ranks that its header does not name")
    plan = ReplayPlan(
        ranks,
        frames["groups"],
        plan_header.source,
        plan_header.torch,
        plan_header.threads,
        plan_header.level,
        plan_header.only,
        plan_header.world_size,
        plan_header.notices,
    )
    plan.check()
    return plan


class _Header(msgspec.Struct):
    source: str
    torch: str | None
    threads: int | None
    level: str
    only: str | None
    world_size: int
    ranks: list[int]
    notices: tuple[Notice, ...]


# Bytes per element of each PyTorch type, by its name there.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
}

_TEXT = {"op": pl.UInt32, "node": pl.Int64, "text": pl.String}
# `cpu_ns`: of the calling thread only if ops run on one thread, else of the whole process.
OPS = build_schema(
    "op durations_ns cpu_ns gpu_ns",
    {"op": pl.UInt32, "durations_ns": pl.List(pl.Int64), "cpu_ns": pl.List(pl.Int64)},
)
FAILURES = build_schema("op node name text", _TEXT)
REPLACED = build_schema("op node name text", _TEXT)
STAND_INS = build_schema("op node name reason text", _TEXT)
_FRAMES = {"ops": OPS, "failures": FAILURES, "replaced": REPLACED, "stand_ins": STAND_INS}


@dataclass(frozen=True)
class RankReplayResult(Result):
    """The results of one rank.

    Attributes:
        rank: The rank of the recorded job.
        iteration_ns: Time of each pass over the whole plan, without inner timers.
        iteration_cpu_ns: Processor time of the thread that called the ops in each.
        ops: op (row of the plan's `ops`); durations_ns and cpu_ns in passes with a timer around
            each op; gpu_ns, the time of the GPU work that it launched, the median over profiled
            passes, null if there were none.
        failures: Ops that raised: op, node, name, text. Their outputs were replaced.
        replaced: Ops that returned another shape than recorded, which depends on data: the same
            columns.
        stand_ins: Ops that were replaced by stand-ins: op, node, name, reason, text.
        peak_bytes: Peak bytes of live tensors; on an accelerator by its allocator.
        resident_bytes: Peak memory of the process, including libraries.
        notices: Notices about the run.
    """

    rank: int
    iteration_ns: tuple[int, ...]
    iteration_cpu_ns: tuple[int, ...]
    ops: pl.DataFrame
    peak_bytes: int
    resident_bytes: int
    failures: pl.DataFrame = field(default_factory=FAILURES.to_frame)
    replaced: pl.DataFrame = field(default_factory=REPLACED.to_frame)
    stand_ins: pl.DataFrame = field(default_factory=STAND_INS.to_frame)
    notices: tuple[Notice, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the result with its frames by columns, which is shorter; `from_dict` reads it."""
        return {
            **super().to_dict(),
            **{name: getattr(self, name).to_dict(as_series=False) for name in _FRAMES},
            "notices": [asdict(notice) for notice in self.notices],
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RankReplayResult:
        """Restores the result of `to_dict`."""
        frames = {
            name: pl.DataFrame(values[name], schema=columns) for name, columns in _FRAMES.items()
        }
        other_fields = {
            field.name: values[field.name]
            for field in fields(RankReplayResult)
            if field.name not in _FRAMES
        }
        other_fields |= {
            name: tuple(other_fields[name]) for name in ("iteration_ns", "iteration_cpu_ns")
        }
        return RankReplayResult(
            **{
                **other_fields,
                **frames,
                "notices": tuple(Notice(**notice) for notice in values["notices"]),
            }
        )


@dataclass(frozen=True)
class Replayed(Result):
    """The results of a replay.

    Attributes:
        plan_source: The input of the plan.
        device: Device type of the run: `cpu`, `cuda`, ...
        pace: `fast`, or `recorded`: with the host's gaps.
        seed: Random seed of the contents.
        environment: Versions, threads, processors, relevant environment variables, of the first
            rank.
        ranks: Results of the ranks that ran, by recorded rank.
        missing: Recorded ranks that did not run.
        notices: Notices about the whole run.
    """

    plan_source: str
    device: str
    pace: str
    seed: int
    environment: dict[str, Any]
    ranks: dict[int, RankReplayResult]
    missing: tuple[int, ...] = ()
    notices: tuple[Notice, ...] = ()
