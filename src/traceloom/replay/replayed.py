"""Replayed: what running a plan gives, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import polars as pl

from traceloom.model.frames import schema
from traceloom.model.notice import Notice
from traceloom.model.result import Result

_TEXT = {"op": pl.UInt32, "node": pl.Int64, "text": pl.String}
# `cpu_ns`: of the calling thread alone where ops run on one thread, else of the whole process.
OPS = schema(
    "op durations_ns cpu_ns gpu_ns", {"op": pl.UInt32, "durations_ns": pl.List(pl.Int64), "cpu_ns": pl.List(pl.Int64)}
)
FAILURES = schema("op node name text", _TEXT)
REPLACED = schema("op node name text", _TEXT)
STAND_INS = schema("op node name reason text", _TEXT)
_FRAMES = {"ops": OPS, "failures": FAILURES, "replaced": REPLACED, "stand_ins": STAND_INS}


@dataclass(frozen=True)
class RankReplayed(Result):
    """What one rank did.

    Attributes:
        rank: The rank of the recorded job.
        iteration_ns: Time of each pass over the whole plan, nothing within it timed.
        iteration_cpu_ns: What the process computed meanwhile.
        ops: op (row of the plan's `ops`); durations_ns and cpu_ns of it in passes with a timer around each op; gpu_ns,
            the time of the GPU work that it launched, the median over passes that were profiled, null where none was.
        failures: Ops that raised: op, node, name, text. Their outputs were replaced.
        replaced: Ops that gave another shape than recorded, which depends on data: the same columns.
        stand_ins: Ops that were not run as they are: op, node, name, reason, text.
        peak_bytes: Most bytes of tensors alive at once; on an accelerator as its allocator says.
        resident_bytes: Most memory of the process, libraries and all.
        notices: What must be known about the run.
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
        """As every result; its frames by columns, which is shorter: `from_dict` reads it."""
        columns = {name: getattr(self, name).to_dict(as_series=False) for name in _FRAMES}
        return {**super().to_dict(), **columns, "notices": [asdict(notice) for notice in self.notices]}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RankReplayed:
        """What `to_dict` gave, after a way through a file."""
        frames = {name: pl.DataFrame(values[name], schema=columns) for name, columns in _FRAMES.items()}
        rest = {field.name: values[field.name] for field in fields(RankReplayed) if field.name not in _FRAMES}
        rest |= {name: tuple(rest[name]) for name in ("iteration_ns", "iteration_cpu_ns")}
        return RankReplayed(**{**rest, **frames, "notices": tuple(Notice(**notice) for notice in values["notices"])})


@dataclass(frozen=True)
class Replayed(Result):
    """What a replay of a plan gave.

    Attributes:
        plan_source: What the plan was made of.
        device: Where it ran: `cpu`, `cuda`, ...
        pace: `fast`, or `recorded`: with the host's gaps.
        seed: Of the contents.
        environment: Versions, threads, processors, variables that matter: of the first rank.
        ranks: By recorded rank, those that ran.
        missing: Recorded ranks that did not run.
        notices: What must be known about the run of all.
    """

    plan_source: str
    device: str
    pace: str
    seed: int
    environment: dict[str, Any]
    ranks: dict[int, RankReplayed]
    missing: tuple[int, ...] = ()
    notices: tuple[Notice, ...] = ()
