"""Evaluating a grid of points on any engine, in a pool of processes.

An axis is written as `KEY=VALUES`: `network.0.bandwidth=50,100,200`, `ranks=8..1024*2`,
`layers=4..32+4`. Values are numbers or words, separated by commas; `a..b` counts up by 1,
`a..b+step` by a step, `a..b*factor` by a factor. The points of a sweep are all combinations of its
axes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

from traceloom.errors import (
    CheckError,
    InputError,
    TraceloomError,
    UsageError,
    nearest,
    other_version,
)
from traceloom.formats.chakra.files import EtReader
from traceloom.system import units
from traceloom.system.process import block_signals
from traceloom.system.processes import ProcessPool, count_cores, start_workers
from traceloom.trace.frames import Result, build_schema
from traceloom.trace.notice import Notice
from traceloom.workload.chakra import generate
from traceloom.workload.simulate.inputs import SimulationInput, open_input
from traceloom.workload.simulate.machine import Machine
from traceloom.workload.simulate.machine_file import read_machine
from traceloom.workload.simulate.native import build_device_cases, run
from traceloom.workload.simulate.scale import RecordedJob, find_roles, make_transfer_model

MAX_POINTS = 100_000
SweptValue = int | float | str
SweepPoint = dict[str, SweptValue]
SweepRow = dict[str, SweptValue | None]
ANSWERS = pl.Schema(
    {
        "ranks": pl.Int64,
        "samples": pl.Float64,
        "time_ns": pl.Int64,
        "p10_ns": pl.Int64,
        "p90_ns": pl.Int64,
        "cost": pl.Float64,
        "memory_bytes": pl.Int64,
        "flags": pl.String,
        "reason": pl.String,
    }
)
SENSITIVITIES = build_schema(
    "parameter median low high pairs",
    {
        "parameter": pl.String,
        "median": pl.Float64,
        "low": pl.Float64,
        "high": pl.Float64,
        "pairs": pl.Int64,
    },
)
_RANGE = re.compile(r"(?P<first>[^.]+(?:\.\d+)?)\.\.(?P<last>[^*+]+)(?:(?P<sign>[*+])(?P<by>.+))?")


@dataclass(frozen=True, slots=True)
class SweepAxis:
    """One parameter and its values.

    Attributes:
        key: A key of the machine (`network.0.bandwidth`), `ranks`, `data_parallel`, `machine`,
            `device`, `host_factor`, or an option of a generated workload.
        values: In the user's order.
    """

    key: str
    values: tuple[SweptValue, ...]


def parse_axis(text: str) -> SweepAxis:
    """Read an axis.

    Raises:
        UsageError: slugs `bad-sweep`; `sweep-too-large`: a range of more than `MAX_POINTS`.

    Example:
        >>> parse_axis("ranks=8..64*2,100").values
        (8, 16, 32, 64, 100)
    """
    key, equals, value_text = text.partition("=")
    if not equals or not key.strip() or not value_text.strip():
        raise _make_sweep_error(text, "write it as KEY=VALUES")
    values: list[SweptValue] = []
    for part in value_text.split(","):
        values += _parse_values(part.strip(), text)
    key = key.strip()
    return SweepAxis(key if "." in key else key.replace("-", "_"), tuple(dict.fromkeys(values)))


def _parse_values(part: str, text: str) -> list[SweptValue]:
    match = _RANGE.fullmatch(part)
    if match is None:
        if not part or ".." in part:
            raise _make_sweep_error(
                text, f"`{part}` is no range" if part else "a value between commas is missing"
            )
        return [_parse_value(part)]
    first, last, increment = (
        _parse_value((match[name] or "1").strip()) for name in ("first", "last", "by")
    )
    if isinstance(first, str) or isinstance(last, str) or isinstance(increment, str):
        raise _make_sweep_error(text, f"`{part}` is no range of numbers")
    grows = match["sign"] == "*"
    if last < first or increment <= 0 or (grows and (increment <= 1 or first <= 0)):
        raise _make_sweep_error(text, f"`{part}` never ends, or has no values")
    steps = math.log(last / first) / math.log(increment) if grows else (last - first) / increment
    if steps >= MAX_POINTS:
        raise _make_size_error(f"`{part}` has {steps + 1:,.0f} values")
    return [
        first * increment**number if grows else first + increment * number
        for number in range(math.floor(steps + 1e-9) + 1)
    ]


def _parse_value(text: str) -> SweptValue:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    return text


def _make_sweep_error(text: str, reason: str) -> UsageError:
    return UsageError(
        f"`{text}` is no sweep: {reason}",
        slug="bad-sweep",
        hint="examples: `network.0.bandwidth=50,100,200`, `ranks=8..1024*2`, `layers=4..32+4`",
    )


def _make_size_error(description: str) -> UsageError:
    return UsageError(
        f"{description}, more than the {MAX_POINTS:,} points that a sweep may have",
        slug="sweep-too-large",
        hint="sweep fewer values at a time: a step (`+4`) or a factor (`*2`) thins a range",
    )


def list_points(axes: Sequence[SweepAxis]) -> Iterator[SweepPoint]:
    """Yields all combinations, the last axis fastest.

    Raises:
        UsageError: slugs `bad-sweep`: a key occurs twice; `sweep-too-large`.
    """
    keys = [axis.key for axis in axes]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _make_sweep_error(f"{twice}=...", "the key stands twice")
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_POINTS:
        raise _make_size_error(f"the sweep has {count:,} points")
    return (
        dict(zip(keys, values, strict=True)) for values in product(*(axis.values for axis in axes))
    )


@dataclass(frozen=True)
class SweepTable(Result):
    """The results of a sweep.

    Attributes:
        keys: The parameters, in the user's order.
        points: One row per point: the parameters; ranks, samples (per step: for a generated
            transformer their number, else relative to the recorded step), time_ns (of a step, or of
            the simulated window), p10_ns and p90_ns (if steps were drawn), cost (of that time on
            all ranks, if the machine has a price), memory_bytes (max over ranks, if known), flags
            (properties outside the measurements), reason (why there is no time), pareto: whether no
            other point is as good in time and cost per sample and in ranks, and better in one of
            them.
        sensitivities: One row per parameter with several numbers: relative change of the time per
            relative change of the parameter, between neighboring values with all else equal:
            median, low and high, and the number of pairs.
    """

    keys: tuple[str, ...]
    points: pl.DataFrame
    sensitivities: pl.DataFrame

    @classmethod
    def of(
        cls, axes: Sequence[SweepAxis], rows: Sequence[Mapping[str, SweptValue | None]]
    ) -> SweepTable:
        """Returns the table of points with their answers (`ANSWERS`), in any order of keys."""
        keys = tuple(axis.key for axis in axes)
        parameters = []
        for key in keys:
            values = [row.get(key) for row in rows]
            strings = any(isinstance(value, str) for value in values)
            parameters.append(
                pl.Series(
                    f"{key}", [str(value) for value in values] if strings else values, strict=False
                )
            )
        answers = [
            pl.Series(name, [row.get(name) for row in rows], dtype=kind, strict=False)
            for name, kind in ANSWERS.items()
            if name not in keys
        ]
        points = pl.DataFrame([*parameters, *answers])
        points = points.with_columns(pl.Series("pareto", find_pareto_front(points)))
        return cls(keys, points, compute_sensitivities(points, keys))


def find_pareto_front(points: pl.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns which points are not dominated in time and cost per sample and in ranks, (points,);
    False for points without a time.
    """
    answered = points["time_ns"].is_not_null().to_numpy()
    samples = pl.col("samples").fill_null(1.0)
    ranks = pl.col("ranks").cast(
        pl.Float64, strict=False
    )  # one word among the values makes all of them words
    table = (
        points.select(pl.col("time_ns") / samples, ranks, pl.col("cost") / samples)
        .fill_null(0.0)
        .to_numpy()
    )
    front = np.zeros(len(table), dtype=np.bool_)
    answered_rows = np.flatnonzero(answered)
    # By time, then ranks, then cost: only earlier points can dominate a point, and then one of the
    # front does.
    order = (
        answered_rows[np.lexsort(table[answered_rows].T[::-1])]
        if answered_rows.size
        else answered_rows
    )
    best = np.zeros((0, table.shape[1]))
    for row in order.tolist():
        if not ((best <= table[row]).all(axis=1) & (best < table[row]).any(axis=1)).any():
            front[row] = True
            best = np.vstack([best, table[row]])
    return front


def compute_sensitivities(points: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Returns per cent of the time per per cent of each numeric parameter; see `SweepTable`."""
    rows = []
    for key in keys:
        if not points[key].dtype.is_numeric():
            continue
        other_keys = [other for other in keys if other != key]
        log = points.filter(pl.col("time_ns") > 0, pl.col(key) > 0).select(
            *other_keys,
            x=pl.col(key).cast(pl.Float64).log(),
            y=pl.col("time_ns").cast(pl.Float64).log(),
        )
        log = log.sort("x")
        slope = pl.col("y").diff() / pl.col("x").diff()
        slopes = (
            log.select(slope.over(other_keys) if other_keys else slope)
            .to_series()
            .drop_nulls()
            .drop_nans()
        )
        if slopes.len():
            rows.append((key, slopes.median(), slopes.min(), slopes.max(), slopes.len()))
    return pl.DataFrame(rows, schema=SENSITIVITIES, orient="row")


_NS_PER_HOUR = 3.6e12
_SIZES = ("ranks", "data_parallel")
_COMMON_KEYS = (*_SIZES, "machine", "device", "host_factor")
_GENERATED: dict[str, tuple[Any, Any]] = {
    "collective": (generate.CollectiveOptions, generate.generate_collectives),
    "pipeline": (generate.PipelineOptions, generate.generate_pipeline),
    "transformer": (generate.TransformerOptions, generate.generate_transformer),
}
_NAMES: dict[str, Sequence[str]] = {
    "collective": generate.KINDS,
    "algorithm": generate.ALGORITHMS,
    "schedule": generate.SCHEDULES,
}
_MAY_BE_0 = ("size", "compute_us")


@dataclass(frozen=True)
class SweepQuestion:
    """The settings of a sweep, except for those that a point sets.

    Attributes:
        inputs: Files or directories of one workload.
        machine: A `machine.toml` or the name of a preset; None for the recorded machine.
        overrides: Changes of the machine.
        device: The device; None for the machine's.
        host_factor: Factor on the durations of host work.
        ranks: Of the job; None for the recorded number.
        data_parallel: Copies of the model; None for the recorded number.
        groups: The file with the ranks of each group, for `.et` files.
        only: The only side that takes time.
        step: One step of a recorded run.
        roles: Roles of groups by name, which override those that are found.
        draws: Number of drawn steps if the number of ranks changes.
        seed: Random seed.
        memory_limit: Bytes of memory per rank; points that need more have no time. For generated
            transformers.
        cache: Whether parsed traces are cached.
        recorded_device: The recorded device, if the traces do not name it.
    """

    inputs: tuple[str, ...]
    machine: str | None = None
    overrides: tuple[str, ...] = ()
    device: str | None = None
    host_factor: float = 1.0
    ranks: int | None = None
    data_parallel: int | None = None
    groups: str | None = None
    only: str | None = None
    step: int | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    draws: int = 200
    seed: int = 0
    memory_limit: int | None = None
    cache: bool = True
    recorded_device: str | None = None


class SweepEvaluator:
    """Evaluates points; the workload is read once.

    Args:
        question: The settings.
    """

    def __init__(self, question: SweepQuestion) -> None:
        self.question = question
        self._jobs: dict[tuple[Any, ...], RecordedJob] = {}

    @cached_property
    def generated(self) -> tuple[str, dict[str, Any]] | None:
        """Kind and options of a workload that `traceloom generate` made; None for any other.

        Raises:
            InputError: `other-version`.
        """
        first = Path(self.question.inputs[0]) / "workload.0.et"
        if not first.is_file():
            return None
        with EtReader(first) as reader:
            stored_options = [
                attr.string_val for attr in reader.metadata.attr if attr.name == "generated"
            ]
        if not stored_options:
            return None
        try:
            document = json.loads(stored_options[0])
        except (ValueError, RecursionError):  # other writers may put any text there
            return None
        if not isinstance(document, dict) or document.get("format") != generate.SCHEMA:
            return None
        if document.get("version") != generate.VERSION:
            raise other_version(
                "generated workload", document.get("version"), generate.VERSION, first
            )
        kind, options = document.get("kind"), document.get("options")
        return (kind, options) if kind in list(_GENERATED) and isinstance(options, dict) else None

    @cached_property
    def source(self) -> SimulationInput:
        query = self.question
        return open_input(
            list(query.inputs),
            groups=query.groups,
            only=query.only,
            step=query.step,
            cache=query.cache,
        )

    def check(self, keys: Sequence[str]) -> None:
        """Rejects keys that do not apply to the workload.

        Raises:
            UsageError: slug `bad-sweep`.
        """
        options = [*self.generated[1], "global_batch"] if self.generated else []
        for key in keys:
            if "." not in key and key not in _COMMON_KEYS and key not in options:
                names = [*_COMMON_KEYS, *options, "network.0.bandwidth"]
                raise UsageError(
                    f"`{key}` is nothing that can be swept here",
                    slug="bad-sweep",
                    hint=nearest(key, names)
                    + f"there are {', '.join(names)} and other keys of the machine",
                )
            if "." in key and self.question.machine is None and "machine" not in keys:
                raise UsageError(
                    f"`{key}` is of a machine", slug="bad-sweep", hint="name one with --machine"
                )
        if self.generated and self.question.machine is None and "machine" not in keys:
            raise UsageError(
                "a generated workload has no network of its own",
                slug="bad-sweep",
                hint="name one with --machine",
            )

    def __call__(self, point: SweepPoint) -> SweepRow:
        """Returns the answer at a point: columns of `ANSWERS`, with a `reason` if there is no
        time.
        """
        row: SweepRow = dict.fromkeys(ANSWERS)
        try:
            row |= self._generated(point) if self.generated else self._recorded(point)
        except (UsageError, CheckError) as error:
            row["reason"] = error.message
        return row

    def _machine(self, point: SweepPoint) -> tuple[str | None, list[str]]:
        overrides = [
            *self.question.overrides,
            *(f"{key}={value}" for key, value in point.items() if "." in key),
        ]
        machine = point.get("machine", self.question.machine)
        return None if machine is None else str(machine), overrides

    def _recorded(self, point: SweepPoint) -> SweepRow:
        """Evaluates a recorded run, a graph or files of another writer."""
        query = self.question
        machine, overrides = self._machine(point)
        device = point.get("device", query.device)
        device = None if device is None else str(device)
        host_factor = float(
            _parse_axis_value("host_factor", point.get("host_factor", query.host_factor), 1.0)
        )
        size = {
            name: _parse_axis_value(name, point[name], 1) if name in point else None
            for name in _SIZES
        }
        if size["ranks"] is None and size["data_parallel"] is None:
            size = {"ranks": query.ranks, "data_parallel": query.data_parallel}
        if size["ranks"] is None and size["data_parallel"] is None:
            workload = self.source.session or (
                self.source.graph if self.source.measured else list(query.inputs)
            )
            answer = run(
                workload,
                machine,
                overrides=overrides,
                device=device,
                host_factor=host_factor,
                groups=None if self.source.measured else query.groups,
                only=query.only,
                step=query.step,
                recorded_device=query.recorded_device,
            )
            ranks = answer.ranks.height
            priced_machine = read_machine(machine, overrides) if machine else None
            return _build_row(ranks, answer.after_ns, priced_machine, answer.notices)
        unsized_machine = read_machine(machine, overrides) if machine else None
        job = self._job(unsized_machine, device, host_factor)
        ranks = job.copies(
            **{name: None if value is None else int(value) for name, value in size.items()}
        )
        described = (
            unsized_machine.for_ranks(ranks * job.axis.positions) if unsized_machine else None
        )
        scaled = job.at(
            data_parallel=ranks, transfers=make_transfer_model(described) if described else None
        )
        interval: SweepRow = {
            "p10_ns": scaled.p10_ns,
            "p90_ns": scaled.p90_ns,
            "samples": scaled.data_parallel / job.axis.copies,
        }
        return _build_row(scaled.ranks, scaled.after_ns, described, scaled.notices) | interval

    def _job(self, machine: Machine | None, device: str | None, host_factor: float) -> RecordedJob:
        """Returns the recorded job on a device; each is prepared once."""
        key = device, host_factor, repr((machine.device, machine.slow)) if machine else ""
        if key not in self._jobs:
            source, query = self.source, self.question
            if not source.measured:
                raise UsageError(
                    "only recorded runs can be scaled",
                    slug="cannot-scale",
                    hint="name a recorded run",
                )
            cases = build_device_cases(source, machine, device, host_factor, query.recorded_device)
            self._jobs[key] = RecordedJob(
                cases.graphs[0],
                {**(find_roles(source.session) if source.session else {}), **query.roles},
                draws=query.draws,
                seed=query.seed,
                notices=cases.notices,
            )
        return self._jobs[key]

    def _generated(self, point: SweepPoint) -> SweepRow:
        assert self.generated is not None
        kind, base = self.generated
        options, make = _GENERATED[kind]
        values = {**base, **point}
        option_values = {
            name: _parse_axis_value(name, values.get(name, default), default)
            for name, default in asdict(options()).items()
        }
        if kind == "transformer":
            option_values = self._planned(option_values, point)
        elif self.question.ranks is not None and "ranks" not in point:
            option_values["ranks"] = self.question.ranks
        workload: generate.Generated = make(options(**option_values))
        ranks = len(workload.programs)
        row: SweepRow = {"ranks": ranks}
        if kind == "transformer":
            memory = generate.estimate_memory(options(**option_values))
            row |= {
                "memory_bytes": memory,
                "samples": float(option_values["data_parallel"] * option_values["micro_batches"]),
            }
            limit = self.question.memory_limit
            if limit is not None and memory > limit:
                reason = f"a rank would need {units.format_size(memory)} of memory, and has {units.format_size(limit)}"
                return row | {"reason": reason}
        machine, overrides = self._machine(point)
        assert machine is not None
        described = read_machine(machine, overrides).for_ranks(ranks)
        with TemporaryDirectory(prefix="traceloom-sweep-") as directory:
            generate.write_generated(workload, Path(directory) / "workload")
            answer = run(Path(directory) / "workload", described, only=self.question.only)
        return row | _build_row(ranks, answer.after_ns, described, answer.notices)

    def _planned(self, option_values: dict[str, Any], point: SweepPoint) -> dict[str, Any]:
        """Returns options of a transformer; those not swept follow from the ranks and the batch of
        the whole job.
        """
        ranks, copies = (
            None if value is None else int(_parse_axis_value(name, value, 1))
            for name, value in (
                (name, point.get(name, getattr(self.question, name))) for name in _SIZES
            )
        )
        ranks_per_copy = option_values["tensor_parallel"] * option_values["pipeline_parallel"]
        if copies is not None:
            option_values["data_parallel"] = copies
        elif ranks is not None:
            option_values["data_parallel"], remainder = divmod(ranks, ranks_per_copy)
            if remainder or not option_values["data_parallel"]:
                raise UsageError(
                    f"{ranks} ranks are no multiple of the {ranks_per_copy} of one copy",
                    slug="cannot-generate",
                )
        if ranks is not None and option_values["data_parallel"] * ranks_per_copy != ranks:
            raise UsageError(
                f"{option_values['data_parallel'] * ranks_per_copy} ranks, not {ranks}",
                slug="cannot-generate",
            )
        if "global_batch" in point:
            global_batch = int(_parse_axis_value("global_batch", point["global_batch"], 1))
            option_values["micro_batches"], remainder = divmod(
                global_batch, option_values["data_parallel"]
            )
            if remainder or not option_values["micro_batches"]:
                raise UsageError(
                    f"a batch of {global_batch} is no multiple of {option_values['data_parallel']} samples that go at once",
                    slug="cannot-generate",
                )
        return option_values


def _parse_axis_value(key: str, value: object, default: float | str) -> Any:
    """Converts a value to the type of its key.

    Raises:
        UsageError: slug `bad-sweep`: it is not of that type.
    """
    if isinstance(default, str):
        if value not in (names := _NAMES[key]):
            raise UsageError(
                f"`{value}` is no {key}",
                slug="bad-sweep",
                hint=nearest(str(value), names) + f"there are {', '.join(names)}",
            )
        return value
    is_whole = isinstance(default, int)
    if (
        isinstance(value, (int, float))
        and math.isfinite(value)
        and (value > 0 or (value == 0 and key in _MAY_BE_0))
    ):
        if not is_whole:
            return float(value)
        if value == int(value):
            return int(value)
    bound_text = "of at least 0" if key in _MAY_BE_0 else "above 0"
    kind = "whole number" if is_whole else "number"
    raise UsageError(f"`{key}` is a {kind} {bound_text}, not {value}", slug="bad-sweep")


def _build_row(
    ranks: int, time_ns: int, machine: Machine | None, notices: Sequence[Notice]
) -> SweepRow:
    price = machine.price_per_hour if machine else None
    cost = None if price is None else price * ranks * time_ns / _NS_PER_HOUR
    flags = "; ".join(notice.message for notice in notices if notice.slug == "transfer-flag")
    return {"ranks": ranks, "time_ns": time_ns, "cost": cost, "flags": flags or None}


def evaluate_points(
    question: SweepQuestion, points: Mapping[int, SweepPoint], *, processes: int | None = None
) -> Iterator[tuple[int, SweepRow]]:
    """Evaluates points, and yields results as they complete.

    Args:
        question: The settings.
        points: By number.
        processes: Number of processes; None for one per core. With 1, it is this process.

    Raises:
        UsageError: slug `bad-sweep`.
        InputError: The workload or the machine is rejected.
    """
    evaluator = SweepEvaluator(question)
    if points:
        evaluator.check(list(next(iter(points.values()))))
    process_count = min(count_cores() if processes is None else processes, len(points))
    if process_count < 2:
        yield from ((number, evaluator(point)) for number, point in points.items())
        return
    with (
        start_workers("traceloom.workload.simulate.sweep_worker") as workers,
        ThreadPoolExecutor(
            process_count, thread_name_prefix="traceloom-sweep", initializer=block_signals
        ) as pool,
    ):
        evaluate_point = partial(_evaluate_in_process, asdict(question), beside=workers)
        jobs = {pool.submit(evaluate_point, point): number for number, point in points.items()}
        try:
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        except BaseException:
            workers.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _evaluate_in_process(
    question: dict[str, Any], point: SweepPoint, *, beside: ProcessPool
) -> SweepRow:
    with beside.idle() as process:
        process.send({"question": question, "point": point})
        for answer in process.answers():
            if "refused" in answer:
                raise InputError(**answer["refused"])
            row: SweepRow = answer["row"]
            return row
        code = process.ended()
    raise TraceloomError(
        f"the process that simulated a point ended with code {code}",
        slug="worker-died",
        hint="it may have run out of memory; sweep fewer ranks at a time"
        if code < 0
        else "please report it",
    )
