"""`traceloom simulate`: simulates recorded workloads, also at other scales and in sweeps."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from traceloom.cli import options as types, outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import OutputError, UsageError
from traceloom.system.files import report_write_errors
from traceloom.system.process import clean_up_on_exit

if TYPE_CHECKING:
    from traceloom.report.documents.predictions import SweepDocument
    from traceloom.workload.simulate.inputs import SimulationInput
    from traceloom.workload.simulate.machine import Machine
    from traceloom.workload.simulate.result import Simulation
    from traceloom.workload.simulate.scale import RecordedJob
    from traceloom.workload.simulate.sweep import SweepAxis, SweepPoint, SweepQuestion, SweepRow


# Sizes of a job that only another recording, or a generated workload, can have.
_UNSCALABLE = {
    "tensor_parallel": "every kernel of a layer would work on another part of it",
    "pipeline_parallel": "every stage would hold other layers",
    "micro_batches": "stages would wait for each other in another order",
}


def add_scaling_options(parser: argparse.ArgumentParser) -> None:
    scale = parser.add_argument_group("at which scale")
    size = scale.add_mutually_exclusive_group()
    size.add_argument(
        "--ranks",
        type=types.parse_count,
        metavar="N",
        help="the same job with N ranks: more (or fewer) copies",
    )
    size.add_argument(
        "--data-parallel",
        type=types.parse_count,
        metavar="N",
        help="the same with N copies of the model",
    )
    for name in _UNSCALABLE:
        scale.add_argument(
            f"--{name.replace('_', '-')}", type=types.parse_count, help=argparse.SUPPRESS
        )
    scale.add_argument(
        "--role",
        type=_parse_role,
        action="append",
        default=[],
        metavar="GROUP=ROLE",
        help="what a group is for, as 9=data, where its name and calls do not tell",
    )
    scale.add_argument(
        "--draws",
        type=types.parse_count,
        default=200,
        metavar="N",
        help="how many steps are drawn (200)",
    )
    scale.add_argument(
        "--seed", type=types.parse_whole_number, default=0, metavar="N", help="of chance (0)"
    )


def _parse_role(text: str) -> tuple[str, str]:
    group, _, role = text.partition("=")
    if not group or not role:
        raise argparse.ArgumentTypeError(f"`{text}` names no role: write --role GROUP=data")
    return group, role


def wants_other_scale(args: argparse.Namespace) -> bool:
    """Whether another scale is requested.

    Raises:
        UsageError: slug `cannot-scale`: the size cannot be derived from the recording.
    """
    for name, reason in _UNSCALABLE.items():
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} cannot be changed in what was recorded: {reason}",
                slug="cannot-scale",
                hint="record a job that has it, or plan with --sweep and `traceloom generate transformer`",
            )
    return args.ranks is not None or args.data_parallel is not None


def build_recorded_job(
    args: argparse.Namespace, source: SimulationInput, machine: Machine | None
) -> RecordedJob:
    """Returns the recorded job, on the requested device, or on that of the machine."""
    from traceloom.workload.simulate.native import build_device_cases
    from traceloom.workload.simulate.scale import RecordedJob, find_roles

    if source.only is not None:
        raise UsageError(
            "--only is of the recorded size",
            slug="cannot-scale",
            hint="leave --only or the scale out",
        )
    if not source.measured:
        raise UsageError(
            "only recorded runs can be scaled: nothing here was measured, so nothing tells how works vary",
            slug="cannot-scale",
            hint="name the recorded run; files of a generator, as STAGE or traceloom generate, are made with more ranks there",
        )
    cases = build_device_cases(source, machine, args.device, args.host_factor, args.recorded_device)
    graph = cases.graphs[0]
    roles = find_roles(source.session) if source.session else {}
    roles.update(args.role)
    return RecordedJob(
        graph,
        roles,
        draws=args.draws,
        seed=args.seed,
        measured=graph is source.graph,
        notices=cases.notices,
    )


def load_machine(args: argparse.Namespace) -> Machine | None:
    """Loads the machine, whatever its size; None for the recorded one."""
    from traceloom.workload.simulate.machine_file import read_machine

    if args.network:
        from traceloom.workload.simulate.astra_sim import config

        system = config.read_system(args.system) if args.system else None
        return config.build_machine(config.read_network(args.network), system)
    if args.machine is None:
        if args.overrides:
            raise UsageError(
                "--set is of a machine", slug="wrong-usage", hint="name one with --machine"
            )
        return None
    return read_machine(args.machine, args.overrides)


def run_scaling(args: argparse.Namespace) -> int:
    """Reads, scales and shows; returns the exit code."""
    from traceloom.formats.chakra.files import RANK_FILES_PATTERN
    from traceloom.report import simulation
    from traceloom.workload.chakra.astra_sim import to_astra_sim
    from traceloom.workload.simulate.inputs import open_input
    from traceloom.workload.simulate.scale import make_transfer_model

    targets = outputs.resolve_output_files(
        args, {".json": "document"}, ("workload", RANK_FILES_PATTERN)
    )
    with Progress(enabled=not args.quiet) as progress:
        progress.show("reading")
        source = open_input(
            args.inputs, groups=args.groups, only=args.only, step=args.step, cache=not args.no_cache
        )
        progress.show("measuring how works vary")
        described = load_machine(args)
        job = build_recorded_job(args, source, described)
        size = {"ranks": args.ranks, "data_parallel": args.data_parallel}
        ranks = job.copies(**size) * job.axis.positions
        machine = described.for_ranks(ranks) if described else None
        model = make_transfer_model(machine) if machine else None
        progress.show(f"drawing steps of {ranks:,} ranks")
        document = simulation.build(
            job.at(**size, transfers=model),
            source.name,
            (machine.name or str(args.machine or args.network)) if machine else "",
        )
        written = []
        for path, format_name in targets:
            progress.show(f"writing {path}")
            if format_name == "document":
                written += outputs.write_output_files(
                    args, [(path, outputs.write_json)], document, progress
                )
            else:
                progress.show(f"copying the graph for {ranks:,} ranks")
                graph = job.graph_at(ranks=ranks, transfers=model)
                progress.show(f"ordering {graph.nodes.height:,} nodes for {path}")
                workload = to_astra_sim(graph)
                progress.show(f"writing {ranks:,} files to {path}")
                sizes = [file.stat().st_size for file in workload.write(path, force=args.force)]
                written.append((path, sum(sizes)))
    outputs.print_document(args, document, simulation.render_scaled)
    outputs.print_outcome(args, written, outputs.format_repeat_command(args, "workload/"))
    return 0


_FORMAT = "traceloom-sweep-points"


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    sweep = parser.add_argument_group("at many points")
    sweep.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="at each of these values, as "
        "network.0.bandwidth=50,100 or ranks=8..1024*2; several: at all their combinations",
    )
    sweep.add_argument(
        "--memory-limit",
        type=types.parse_size,
        metavar="BYTES",
        help="leave out points of which a rank needs more, as 80GB",
    )


def run_sweep(args: argparse.Namespace) -> int:
    """Evaluates all points and shows the combined result; returns the exit code."""
    from traceloom.report import sweep as report
    from traceloom.workload.simulate.sweep import SweepQuestion, SweepTable, list_points, parse_axis

    axes = [parse_axis(text) for text in args.sweep]
    points = list(list_points(axes))
    question = SweepQuestion(
        tuple(args.inputs),
        args.machine,
        tuple(args.overrides),
        args.device,
        args.host_factor,
        args.ranks,
        args.data_parallel,
        None if args.groups is None else str(args.groups),
        args.only,
        args.step,
        dict(args.role),
        args.draws,
        args.seed,
        args.memory_limit,
        not args.no_cache,
        args.recorded_device,
    )
    page = outputs.make_lazy_writer("traceloom.report.sweep:render")
    writers: dict[str, Callable[[SweepDocument, BinaryIO], object]] = {
        ".json": outputs.write_json,
        ".csv": lambda _, handle: table.points.write_csv(handle),
        ".parquet": lambda _, handle: table.points.write_parquet(handle),
        ".html": page,
        ".htm": page,
    }
    targets = outputs.resolve_output_files(args, writers)
    saved_points = _SavedPoints(targets[0][0], question) if targets else None
    with Progress(enabled=not args.quiet) as progress:
        table = SweepTable.of(
            axes, _evaluate_missing_points(question, axes, points, saved_points, progress)
        )
        document = report.build(table, " ".join(args.inputs))
        written = outputs.write_output_files(args, targets, document, progress)
    if saved_points is not None:
        saved_points.path.unlink(missing_ok=True)
    outputs.print_document(args, document, report.render_sweep)
    outputs.print_outcome(args, written, outputs.format_repeat_command(args, "sweep.html"))
    return 0


def _evaluate_missing_points(
    question: SweepQuestion,
    axes: list[SweepAxis],
    points: list[SweepPoint],
    saved_points: _SavedPoints | None,
    progress: Progress,
) -> list[SweepRow]:
    """Returns the results of all points, in their order; saved ones are not computed again."""
    from traceloom.workload.simulate.sweep import evaluate_points

    answers = saved_points.read(points) if saved_points else {}
    missing = {number: point for number, point in enumerate(points) if number not in answers}
    done = len(answers)
    progress.show(f"{done:,} of {len(points):,} points" if done else "reading")
    with clean_up_on_exit(saved_points.announce if saved_points else lambda: None):
        for number, row in evaluate_points(question, missing):
            answers[number] = row
            done += 1
            if saved_points is not None:
                saved_points.add(points[number], row)
            progress.show(f"{done:,} of {len(points):,} points")
    if not any(row["time_ns"] is not None for row in answers.values()):
        reasons = sorted({str(row["reason"]) for row in answers.values()})
        keys = ", ".join(axis.key for axis in axes)
        raise UsageError(
            f"no point of {keys} has an answer: {reasons[0]}", slug="sweep-without-answers"
        )
    return [
        {**points[number], **answers[number], **points[number]} for number in range(len(points))
    ]


class _SavedPoints:
    """Results saved beside the output during a sweep: after an interruption the same command
    continues it.

    Args:
        output: The file that will be written.
        question: The question asked at each point.

    Raises:
        OutputError: slug `file-exists`: there is an unrelated file with the name of the saved
            results.
    """

    def __init__(self, output: Path, question: SweepQuestion) -> None:
        from traceloom import __version__

        self.path = output.with_name(f"{output.name}.points")
        stamps = []
        for path in map(Path, filter(None, (*question.inputs, question.machine))):
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            stamps.append(
                [
                    (file.name, file.stat().st_size, file.stat().st_mtime_ns)
                    for file in files
                    if file.is_file()
                ]
            )
        text = json.dumps([asdict(question), stamps, __version__], sort_keys=True)
        self._head = {
            "format": _FORMAT,
            "version": 1,
            "digest": hashlib.sha256(text.encode()).hexdigest(),
        }
        self._begun = False
        self._count = 0
        if self.path.exists() and _read_first_line(self.path).get("format") != _FORMAT:
            raise OutputError(
                "this file is in the way: answers are kept there while the sweep goes on",
                slug="file-exists",
                where=str(self.path),
                hint="move it, or choose another name for the output",
            )

    def read(self, points: list[SweepPoint]) -> dict[int, SweepRow]:
        """Returns results by the index of their point, for the same question only."""
        if not self.path.exists() or _read_first_line(self.path) != self._head:
            return {}
        numbers = {json.dumps(point, sort_keys=True): number for number, point in enumerate(points)}
        answers = {}
        complete_text = self.path.read_text(encoding="utf-8").rpartition("\n")[
            0
        ]  # the last line may have been cut off
        for line in complete_text.splitlines()[1:]:
            point, row = json.loads(line)
            number = numbers.get(json.dumps(point, sort_keys=True))
            if number is not None:
                answers[number] = row
        self._begun, self._count = True, len(answers)
        self.path.write_text(complete_text + "\n", encoding="utf-8")
        return answers

    def add(self, point: SweepPoint, row: SweepRow) -> None:
        lines = [] if self._begun else [json.dumps(self._head)]
        with report_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a" if self._begun else "w", encoding="utf-8") as handle:
                handle.write("".join(f"{line}\n" for line in [*lines, json.dumps([point, row])]))
        self._begun = True
        self._count += 1

    def announce(self) -> None:
        """Prints that a stopped sweep can be continued."""
        text = f"\ntraceloom: the same command goes on after these {self._count:,} answers ({self.path})\n"
        os.write(2, text.encode())


def _read_first_line(path: Path) -> dict[str, Any]:
    """Returns the first line of the file; empty if the file is not a saved sweep."""
    try:
        with path.open(encoding="utf-8") as handle:
            head = json.loads(handle.readline(4096))
    except (OSError, ValueError):
        return {}
    return head if isinstance(head, dict) else {}


_DIRECTORY = "directory"
DESCRIPTION = "Say how long a workload takes on another machine: its graph is evaluated with another network or device."
EXAMPLES = """\
examples:
  traceloom simulate run                                   on the recorded machine: does its time come back?
  traceloom simulate run --machine dgx-h100                on a preset, with as many hosts as are needed
  traceloom simulate run --machine machine.toml --set network.0.bandwidth=100
  traceloom simulate run --machine machine.toml --step 12 -o simulation.json -o tables/
  traceloom simulate run --device 'H100 SXM' --host-factor 0.8
  traceloom simulate job.graph --only communication        as if all else took no time
  traceloom simulate run --ranks 1024 -o workload/         the same job with more ranks, and its .et files
  traceloom simulate run --machine machine.toml --sweep network.0.bandwidth=50,100,200 --sweep ranks=8..1024*2
  traceloom simulate workload/ --groups comm_groups.json --machine machine.toml
  traceloom simulate workload/ --mode astra-sim --network network.yml --system system.json --json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_inputs(
        parser, "recorded run, directory or files of traces, a .graph, or a directory of .et files"
    )
    machine_group = parser.add_argument_group("on which machine")
    machine_group.add_argument(
        "--machine",
        metavar="FILE|PRESET",
        help="a machine.toml, or the name of a preset, as dgx-h100",
    )
    machine_group.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the machine, as network.0.bandwidth=100 (may be repeated)",
    )
    machine_group.add_argument(
        "--device",
        metavar="NAME",
        help="what computes, as `H100 SXM` or bf16=989e12,memory=3.35e12 (default: that of the machine)",
    )
    machine_group.add_argument(
        "--host-factor",
        type=types.parse_positive,
        default=1.0,
        metavar="F",
        help="host work takes so many times as long",
    )
    machine_group.add_argument(
        "--recorded-device",
        metavar="NAME",
        help="what computed in the recording, where the traces do not name a device with known peaks",
    )
    add_scaling_options(parser)
    add_sweep_options(parser)
    content_group = parser.add_argument_group("what is simulated")
    content_group.add_argument(
        "--step",
        type=types.parse_whole_number,
        metavar="N",
        help="one step (default: the whole window)",
    )
    content_group.add_argument(
        "--only", choices=("communication", "compute"), help="as if the other side took no time"
    )
    content_group.add_argument(
        "--groups", type=Path, metavar="FILE", help="which ranks are in which group, of .et files"
    )
    peer = parser.add_argument_group("ASTRA-sim")
    peer.add_argument(
        "--mode",
        choices=("native", "astra-sim"),
        default="native",
        help="native (default): streams, threads and links; astra-sim: what ASTRA-sim computes, to the nanosecond",
    )
    peer.add_argument(
        "--network", type=Path, metavar="FILE", help="its network YAML, in both modes"
    )
    peer.add_argument("--system", type=Path, metavar="FILE", help="its system JSON, in both modes")
    peer.add_argument(
        "--congestion",
        choices=("aware", "unaware"),
        default="unaware",
        help="which of its back ends (default: unaware)",
    )
    peer.add_argument(
        "--collective",
        dest="collectives",
        action="append",
        default=[],
        metavar="KIND=PREFIX",
        help="carry out a kind as the files PREFIX.RANK.et say, as all_reduce=custom/ring (may be repeated)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    outputs.add_output_options(
        parser,
        ".json, .html with the timeline before and after, or the timeline as .perfetto.json.gz; .csv or .parquet for "
        "the table of that name (ranks, nodes, collectives, links, path, became_critical); DIR/ for all tables, with "
        "--ranks for the .et files of all ranks",
    )
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Reads, simulates and shows; returns the exit code."""
    _check(args)
    is_scaled = wants_other_scale(args)
    if args.sweep:
        return run_sweep(args)
    if is_scaled:
        return run_scaling(args)
    from traceloom.report import simulation as report
    from traceloom.report.simulation import SIMULATION
    from traceloom.report.views.files import TABLE_FILE_PATTERN

    targets = outputs.resolve_output_files(
        args, {ending: ending for ending in SIMULATION.endings}, (_DIRECTORY, TABLE_FILE_PATTERN)
    )
    writers = {
        path: SIMULATION.writer(path, extension)
        for path, extension in targets
        if extension != _DIRECTORY
    }
    written = []
    with Progress(enabled=not args.quiet) as progress:
        answer = (
            _run_astra_sim(args, progress)
            if args.mode == "astra-sim"
            else _run_native(args, progress)
        )
        for path, extension in targets:
            if extension == _DIRECTORY:
                written.append((path, SIMULATION.write_directory(answer, path, force=args.force)))
            else:
                written += outputs.write_output_files(
                    args, [(path, writers[path])], answer, progress
                )
    if args.json:
        report.write_json(answer, sys.stdout.buffer)
    elif outputs.should_print_document(args):
        from traceloom.report import simulation
        from traceloom.report.views import terminal

        terminal.print_lines(
            partial(simulation.render_simulation, report.build_simulation(answer)), sys.stdout
        )
    page = "simulation.json" if args.mode == "astra-sim" else "simulation.html"
    outputs.print_outcome(args, written, outputs.format_repeat_command(args, page))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses options that cannot be combined.

    Raises:
        UsageError: slug `wrong-usage`.
    """
    wrong = hint = ""
    if args.mode == "astra-sim":
        options_of_others = {
            "--machine": args.machine,
            "--set": args.overrides,
            "--device": args.device,
            "--step": args.step,
            "--only": args.only,
            "--recorded-device": args.recorded_device,
            "--ranks": args.ranks,
            "--data-parallel": args.data_parallel,
            "--role": args.role,
            "--sweep": args.sweep,
        }
        not_its = [option for option, value in options_of_others.items() if value or value == 0] + [
            "--host-factor"
        ] * (args.host_factor != 1)
        if not args.network or not args.system:
            wrong, hint = (
                "--mode astra-sim needs --network and --system",
                "give ASTRA-sim's own files",
            )
        elif not_its:
            wrong, hint = f"{not_its[0]} is of the mode native", "leave it out, or leave --mode out"
        elif len(args.inputs) > 1:
            wrong, hint = (
                "--mode astra-sim takes one directory of .et files",
                "name that of all ranks",
            )
    elif args.role and not args.sweep and args.ranks is None and args.data_parallel is None:
        wrong, hint = "--role is of another scale", "add --ranks or --data-parallel"
    elif args.collectives or args.congestion == "aware":
        wrong = f"{'--collective' if args.collectives else '--congestion'} is of the mode astra-sim"
        hint = "add --mode astra-sim"
    elif args.machine and args.network:
        wrong, hint = "--machine and --network are two machines", "give one of them"
    elif args.system and not args.network:
        wrong, hint = "--system goes with --network", "add --network network.yml"
    elif args.sweep and args.network:
        wrong, hint = "--sweep is of a machine.toml", "name one with --machine"
    elif args.overrides and args.network:
        wrong, hint = "--set is of a machine.toml", "change the file of --network"
    if wrong:
        raise UsageError(wrong, slug="wrong-usage", hint=hint)


def _run_native(args: argparse.Namespace, progress: Progress) -> Simulation:
    """Simulates by streams, threads and links."""
    from traceloom.workload.simulate import native

    machine: Machine | str | None = args.machine
    if args.network:
        from traceloom.workload.simulate.astra_sim.config import (
            build_machine,
            read_network,
            read_system,
        )

        machine = build_machine(
            read_network(args.network), read_system(args.system) if args.system else None
        )
    return native.run(
        args.inputs,
        machine,
        overrides=args.overrides,
        device=args.device,
        host_factor=args.host_factor,
        recorded_device=args.recorded_device,
        groups=args.groups,
        only=args.only,
        step=args.step,
        cache=not args.no_cache,
        progress=progress.show,
    )


def _run_astra_sim(args: argparse.Namespace, progress: Progress) -> Simulation:
    from traceloom.formats.chakra.nodes import find_file_sets, read_workload
    from traceloom.workload.simulate.astra_sim.config import read_network, read_system
    from traceloom.workload.simulate.astra_sim.run import simulate

    algorithms = {}
    for text in args.collectives:
        kind, equals, prefix = text.partition("=")
        if not equals or not prefix:
            raise UsageError(
                f"`{text}` is no KIND=PREFIX",
                slug="wrong-usage",
                hint="as all_reduce=custom/ring for custom/ring.0.et, ...",
            )
        algorithms[kind] = prefix
    network, system = read_network(args.network), read_system(args.system)
    progress.show("reading")
    sets = find_file_sets(args.inputs, args.groups)
    if len(sets) > 1:
        names = ", ".join(file_set.name for file_set in sets[:4])
        raise UsageError(
            f"`{args.inputs[0]}` holds {len(sets)} sets: {names}",
            slug="several-sets",
            hint="name one",
        )
    workload = read_workload(sets[0])
    progress.show("simulating")
    return simulate(
        workload,
        network,
        system,
        congestion_aware=args.congestion == "aware",
        algorithms=algorithms,
    )
