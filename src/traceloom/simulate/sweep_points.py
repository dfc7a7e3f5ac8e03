"""What a sweep asks at each of its points, in this process or in others beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from traceloom.chakra import generate
from traceloom.chakra.stream import EtReader
from traceloom.errors import CheckError, InputError, TraceloomError, UsageError, nearest, other_version
from traceloom.leaving import block
from traceloom.model import units
from traceloom.model.notice import Notice
from traceloom.simulate.machine import Machine, read_machine
from traceloom.simulate.native.inputs import SimulationInput, open_input
from traceloom.simulate.native.running import on_device, run
from traceloom.simulate.scale import RecordedJob, on_machine, roles_of
from traceloom.simulate.sweeps import ANSWERS, SweepPoint, SweepRow
from traceloom.workers import Workers, cores, workers

_NS_PER_HOUR = 3.6e12
_SIZES = ("ranks", "data_parallel")
_OWN = (*_SIZES, "machine", "device", "host_factor")
_GENERATED: dict[str, tuple[Any, Any]] = {
    "collective": (generate.CollectiveOptions, generate.collectives),
    "pipeline": (generate.PipelineOptions, generate.pipeline),
    "transformer": (generate.TransformerOptions, generate.transformer),
}
_NAMES: dict[str, Sequence[str]] = {
    "collective": generate.KINDS, "algorithm": generate.ALGORITHMS, "schedule": generate.SCHEDULES,
}  # fmt: skip
_MAY_BE_0 = ("size", "compute_us")


@dataclass(frozen=True)
class SweepQuestion:
    """What is asked at every point, but for what the point says.

    Attributes:
        inputs: Files or directories of one workload.
        machine: A `machine.toml` or the name of a preset; None for the recorded machine.
        overrides: Changes of the machine.
        device: What computes; None for the machine's.
        host_factor: How many times as long host work takes.
        ranks: Of the job; None for the recorded number.
        data_parallel: Copies of the model; None for the recorded number.
        groups: Who is in which group, of `.et` files.
        only: One side alone.
        step: One step of a recorded run.
        roles: Of groups, by name, before those that are found.
        draws: Steps to draw where the number of ranks changes.
        seed: Of chance.
        memory_limit: Bytes that a rank has; points that need more have no time. Of generated transformers.
        cache: Whether read traces are kept.
        recorded_device: What computed in the recording, where the traces do not say.
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


class PointEvaluator:
    """Answers points; the workload is read once.

    Args:
        question: What is asked.
    """

    def __init__(self, question: SweepQuestion) -> None:
        self.question = question
        self._jobs: dict[tuple[Any, ...], RecordedJob] = {}

    @cached_property
    def generated(self) -> tuple[str, dict[str, Any]] | None:
        """Kind and options of a workload that `traceloom generate` made; None of any other.

        Raises:
            InputError: `other-version`.
        """
        folder = Path(self.question.inputs[0])
        first = folder / "workload.0.et"
        if not first.is_file():
            return None
        with EtReader(first) as reader:
            about = [attr.string_val for attr in reader.metadata.attr if attr.name == "generated"]
        if not about:
            return None
        try:
            document = json.loads(about[0])
        except (ValueError, RecursionError):  # another writer may say anything there
            return None
        if not isinstance(document, dict) or document.get("format") != generate.SCHEMA:
            return None
        if document.get("version") != generate.VERSION:
            raise other_version("generated workload", document.get("version"), generate.VERSION, first)
        kind, options = document.get("kind"), document.get("options")
        return (kind, options) if kind in list(_GENERATED) and isinstance(options, dict) else None

    @cached_property
    def source(self) -> SimulationInput:
        """The workload."""
        asked = self.question
        return open_input(list(asked.inputs), groups=asked.groups, only=asked.only, step=asked.step, cache=asked.cache)

    def check(self, keys: Sequence[str]) -> None:
        """Refuse keys that mean nothing here.

        Raises:
            UsageError: slug `bad-sweep`.
        """
        options = [*self.generated[1], "global_batch"] if self.generated else []
        for key in keys:
            if "." not in key and key not in _OWN and key not in options:
                names = [*_OWN, *options, "network.0.bandwidth"]
                raise UsageError(
                    f"`{key}` is nothing that can be swept here",
                    slug="bad-sweep",
                    hint=nearest(key, names) + f"there are {', '.join(names)} and other keys of the machine",
                )
            if "." in key and self.question.machine is None and "machine" not in keys:
                raise UsageError(f"`{key}` is of a machine", slug="bad-sweep", hint="name one with --machine")
        if self.generated and self.question.machine is None and "machine" not in keys:
            raise UsageError(
                "a generated workload has no network of its own", slug="bad-sweep", hint="name one with --machine"
            )

    def __call__(self, point: SweepPoint) -> SweepRow:
        """The answer at a point: columns of `ANSWERS`; a `reason` instead of a time where there is none."""
        row: SweepRow = dict.fromkeys(ANSWERS)
        try:
            row |= self._generated(point) if self.generated else self._recorded(point)
        except (UsageError, CheckError) as error:
            row["reason"] = error.message
        return row

    def _machine(self, point: SweepPoint) -> tuple[str | None, list[str]]:
        overrides = [*self.question.overrides, *(f"{key}={value}" for key, value in point.items() if "." in key)]
        machine = point.get("machine", self.question.machine)
        return None if machine is None else str(machine), overrides

    def _recorded(self, point: SweepPoint) -> SweepRow:
        """A recorded run, a graph or files of another writer."""
        asked = self.question
        machine, overrides = self._machine(point)
        device = point.get("device", asked.device)
        device = None if device is None else str(device)
        host_factor = float(_understood("host_factor", point.get("host_factor", asked.host_factor), 1.0))
        size = {name: _understood(name, point[name], 1) if name in point else None for name in _SIZES}
        if size["ranks"] is None and size["data_parallel"] is None:
            size = {"ranks": asked.ranks, "data_parallel": asked.data_parallel}
        if size["ranks"] is None and size["data_parallel"] is None:
            workload = self.source.session or (self.source.graph if self.source.measured else list(asked.inputs))
            answer = run(
                workload, machine, overrides=overrides, device=device, host_factor=host_factor,
                groups=None if self.source.measured else asked.groups, only=asked.only, step=asked.step,
                recorded_device=asked.recorded_device,
            )  # fmt: skip
            ranks = answer.ranks.height
            priced = read_machine(machine, overrides) if machine else None
            return _answer(ranks, answer.after_ns, priced, answer.notices)
        of_any_size = read_machine(machine, overrides) if machine else None
        job = self._job(of_any_size, device, host_factor)
        ranks = job.copies(**{name: None if value is None else int(value) for name, value in size.items()})
        described = of_any_size.for_ranks(ranks * job.axis.positions) if of_any_size else None
        scaled = job.at(data_parallel=ranks, transfers=on_machine(described) if described else None)
        interval: SweepRow = {
            "p10_ns": scaled.p10_ns, "p90_ns": scaled.p90_ns, "samples": scaled.data_parallel / job.axis.copies,
        }  # fmt: skip
        return _answer(scaled.ranks, scaled.after_ns, described, scaled.notices) | interval

    def _job(self, machine: Machine | None, device: str | None, host_factor: float) -> RecordedJob:
        """The recorded job on a device; each is made ready once."""
        key = device, host_factor, repr((machine.device, machine.slow)) if machine else ""
        if key not in self._jobs:
            source, asked = self.source, self.question
            if not source.measured:
                raise UsageError("only recorded runs can be scaled", slug="cannot-scale", hint="name a recorded run")
            cases = on_device(source, machine, device, host_factor, asked.recorded_device)
            roles = roles_of(source.session) if source.session else {}
            self._jobs[key] = RecordedJob(
                cases.graphs[0], {**roles, **asked.roles}, draws=asked.draws, seed=asked.seed, notices=cases.notices
            )
        return self._jobs[key]

    def _generated(self, point: SweepPoint) -> SweepRow:
        """A workload made anew with the options of the point."""
        assert self.generated is not None
        kind, base = self.generated
        options, make = _GENERATED[kind]
        values = {**base, **point}
        chosen = {name: _understood(name, values.get(name, usual), usual) for name, usual in asdict(options()).items()}
        if kind == "transformer":
            chosen = self._planned(chosen, point)
        elif self.question.ranks is not None and "ranks" not in point:
            chosen["ranks"] = self.question.ranks
        made: generate.Generated = make(options(**chosen))
        ranks = len(made.programs)
        row: SweepRow = {"ranks": ranks}
        if kind == "transformer":
            memory = generate.memory_bytes(options(**chosen))
            row |= {"memory_bytes": memory, "samples": float(chosen["data_parallel"] * chosen["micro_batches"])}
            limit = self.question.memory_limit
            if limit is not None and memory > limit:
                words = f"a rank would need {units.size(memory)} of memory, and has {units.size(limit)}"
                return row | {"reason": words}
        machine, overrides = self._machine(point)
        assert machine is not None
        described = read_machine(machine, overrides).for_ranks(ranks)
        with TemporaryDirectory(prefix="traceloom-sweep-") as folder:
            generate.write_generated(made, Path(folder) / "workload")
            answer = run(Path(folder) / "workload", described, only=self.question.only)
        return row | _answer(ranks, answer.after_ns, described, answer.notices)

    def _planned(self, chosen: dict[str, Any], point: SweepPoint) -> dict[str, Any]:
        """Options of a transformer: what is not swept follows from the ranks and the batch of the whole job."""
        ranks, copies = (
            None if value is None else int(_understood(name, value, 1))
            for name, value in ((name, point.get(name, getattr(self.question, name))) for name in _SIZES)
        )
        of_copy = chosen["tensor_parallel"] * chosen["pipeline_parallel"]
        if copies is not None:
            chosen["data_parallel"] = copies
        elif ranks is not None:
            chosen["data_parallel"], rest = divmod(ranks, of_copy)
            if rest or not chosen["data_parallel"]:
                raise UsageError(f"{ranks} ranks are no multiple of the {of_copy} of one copy", slug="cannot-generate")
        if ranks is not None and chosen["data_parallel"] * of_copy != ranks:
            raise UsageError(f"{chosen['data_parallel'] * of_copy} ranks, not {ranks}", slug="cannot-generate")
        if "global_batch" in point:
            whole = int(_understood("global_batch", point["global_batch"], 1))
            chosen["micro_batches"], rest = divmod(whole, chosen["data_parallel"])
            if rest or not chosen["micro_batches"]:
                text = f"a batch of {whole} is no multiple of {chosen['data_parallel']} samples that go at once"
                raise UsageError(text, slug="cannot-generate")
        return chosen


def _understood(key: str, value: object, usual: float | str) -> Any:
    """A value of the type that is usual for its key.

    Raises:
        UsageError: slug `bad-sweep`: it is none.
    """
    if isinstance(usual, str):
        if value not in (names := _NAMES[key]):
            hint = nearest(str(value), names) + f"there are {', '.join(names)}"
            raise UsageError(f"`{value}` is no {key}", slug="bad-sweep", hint=hint)
        return value
    is_whole = isinstance(usual, int)
    if isinstance(value, (int, float)) and math.isfinite(value) and (value > 0 or (value == 0 and key in _MAY_BE_0)):
        if not is_whole:
            return float(value)
        if value == int(value):
            return int(value)
    least = "of at least 0" if key in _MAY_BE_0 else "above 0"
    kind = "whole number" if is_whole else "number"
    raise UsageError(f"`{key}` is a {kind} {least}, not {value}", slug="bad-sweep")


def _answer(ranks: int, time_ns: int, machine: Machine | None, notices: Sequence[Notice]) -> SweepRow:
    price = machine.price_per_hour if machine else None
    cost = None if price is None else price * ranks * time_ns / _NS_PER_HOUR
    flags = "; ".join(notice.message for notice in notices if notice.slug == "transfer-flag")
    return {"ranks": ranks, "time_ns": time_ns, "cost": cost, "flags": flags or None}


def evaluate_points(
    question: SweepQuestion, points: Mapping[int, SweepPoint], *, processes: int | None = None
) -> Iterator[tuple[int, SweepRow]]:
    """Answer points, in the order in which answers come.

    Args:
        question: What is asked.
        points: By number.
        processes: That work at once; as many as there are cores where None. With one, it is this one.

    Raises:
        UsageError: slug `bad-sweep`.
        InputError: The workload or the machine is refused.
    """
    evaluator = PointEvaluator(question)
    if points:
        evaluator.check(list(next(iter(points.values()))))
    at_once = min(cores() if processes is None else processes, len(points))
    if at_once < 2:
        yield from ((number, evaluator(point)) for number, point in points.items())
        return
    with (
        workers("traceloom.simulate.sweep_worker") as beside,
        ThreadPoolExecutor(at_once, thread_name_prefix="traceloom-sweep", initializer=block) as pool,
    ):
        each = partial(_in_process, asdict(question), beside=beside)
        jobs = {pool.submit(each, point): number for number, point in points.items()}
        try:
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        except BaseException:
            beside.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _in_process(question: dict[str, Any], point: SweepPoint, *, beside: Workers) -> SweepRow:
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
        hint="it may have run out of memory; sweep fewer ranks at a time" if code < 0 else "please report it",
    )
