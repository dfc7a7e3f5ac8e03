"""`traceloom simulate`: how long a workload takes on another machine."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from traceloom.cli import options as types
from traceloom.cli import outputs, scaling, sweeping
from traceloom.cli.progress import Progress
from traceloom.errors import UsageError

if TYPE_CHECKING:
    from traceloom.simulate.machine import Machine
    from traceloom.simulate.simulation import Simulation

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
    """Declare the options of the verb."""
    types.add_inputs(parser, "recorded run, directory or files of traces, a .graph, or a directory of .et files")
    where = parser.add_argument_group("on which machine")
    where.add_argument("--machine", metavar="FILE|PRESET", help="a machine.toml, or the name of a preset, as dgx-h100")
    where.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help="change the machine, as network.0.bandwidth=100 (may be repeated)",
    )  # fmt: skip
    where.add_argument(
        "--device", metavar="NAME",
        help="what computes, as `H100 SXM` or bf16=989e12,memory=3.35e12 (default: that of the machine)",
    )  # fmt: skip
    where.add_argument(
        "--host-factor", type=types.positive, default=1.0, metavar="F", help="host work takes so many times as long"
    )
    where.add_argument(
        "--recorded-device", metavar="NAME",
        help="what computed in the recording, where the traces do not name a device with known peaks",
    )  # fmt: skip
    scaling.add_options(parser)
    sweeping.add_options(parser)
    what = parser.add_argument_group("what is simulated")
    what.add_argument("--step", type=types.whole, metavar="N", help="one step (default: the whole window)")
    what.add_argument("--only", choices=("communication", "compute"), help="as if the other side took no time")
    what.add_argument("--groups", type=Path, metavar="FILE", help="which ranks are in which group, of .et files")
    peer = parser.add_argument_group("ASTRA-sim")
    peer.add_argument(
        "--mode", choices=("native", "astra-sim"), default="native",
        help="native (default): streams, threads and links; astra-sim: what ASTRA-sim computes, to the nanosecond",
    )  # fmt: skip
    peer.add_argument("--network", type=Path, metavar="FILE", help="its network YAML, in both modes")
    peer.add_argument("--system", type=Path, metavar="FILE", help="its system JSON, in both modes")
    peer.add_argument(
        "--congestion",
        choices=("aware", "unaware"),
        default="unaware",
        help="which of its back ends (default: unaware)",
    )
    peer.add_argument(
        "--collective", dest="collectives", action="append", default=[], metavar="KIND=PREFIX",
        help="carry out a kind as the files PREFIX.RANK.et say, as all_reduce=custom/ring (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    outputs.add_output(
        parser,
        ".json, .html with the timeline before and after, or the timeline as .perfetto.json.gz; .csv or .parquet for "
        "the table of that name (ranks, nodes, collectives, links, path, became_critical); DIR/ for all tables, with "
        "--ranks for the .et files of all ranks",
    )
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Read, simulate and show; returns the exit code."""
    _check(args)
    is_scaled = scaling.is_asked(args)
    if args.sweep:
        return sweeping.run(args)
    if is_scaled:
        return scaling.run(args)
    from traceloom.report import simulation as report
    from traceloom.report.exports.tables import OURS
    from traceloom.report.simulation_files import SIMULATION

    chosen = outputs.targets(args, {ending: ending for ending in SIMULATION.endings}, (_DIRECTORY, OURS))
    writers = {path: SIMULATION.writer(path, form) for path, form in chosen if form != _DIRECTORY}
    written = []
    with Progress(shown=not args.quiet) as progress:
        answer = _as_astra_sim(args, progress) if args.mode == "astra-sim" else _native(args, progress)
        for path, form in chosen:
            if form == _DIRECTORY:
                written.append((path, SIMULATION.write_directory(answer, path, force=args.force)))
            else:
                written += outputs.write(args, [(path, writers[path])], answer, progress)
    if args.json:
        report.write_json(answer, sys.stdout.buffer)
    elif outputs.printed(args):
        from traceloom.report import simulation_terminal
        from traceloom.report.views import terminal

        terminal.put(partial(simulation_terminal.render, report.build(answer)), sys.stdout)
    page = "simulation.json" if args.mode == "astra-sim" else "simulation.html"
    outputs.close(args, written, outputs.repeated(args, page))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: slug `wrong-usage`.
    """
    wrong = hint = ""
    if args.mode == "astra-sim":
        others = {"--machine": args.machine, "--set": args.overrides, "--device": args.device, "--step": args.step,
                  "--only": args.only, "--recorded-device": args.recorded_device, "--ranks": args.ranks,
                  "--data-parallel": args.data_parallel, "--sweep": args.sweep}  # fmt: skip
        not_its = [option for option, value in others.items() if value] + ["--host-factor"] * (args.host_factor != 1)
        if not args.network or not args.system:
            wrong, hint = "--mode astra-sim needs --network and --system", "give ASTRA-sim's own files"
        elif not_its:
            wrong, hint = f"{not_its[0]} is of the mode native", "leave it out, or leave --mode out"
        elif len(args.inputs) > 1:
            wrong, hint = "--mode astra-sim takes one directory of .et files", "name that of all ranks"
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


def _native(args: argparse.Namespace, progress: Progress) -> Simulation:
    """By streams, threads and links."""
    from traceloom.simulate import native

    machine: Machine | str | None = args.machine
    if args.network:
        from traceloom.simulate.astra_sim import machine_of, read_network, read_system

        machine = machine_of(read_network(args.network), read_system(args.system) if args.system else None)
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
        progress=progress.say,
    )


def _as_astra_sim(args: argparse.Namespace, progress: Progress) -> Simulation:
    """As ASTRA-sim does."""
    from traceloom.chakra.workload import places, read_workload
    from traceloom.simulate.astra_sim import read_network, read_system, simulate

    algorithms = {}
    for text in args.collectives:
        kind, equals, prefix = text.partition("=")
        if not equals or not prefix:
            hint = "as all_reduce=custom/ring for custom/ring.0.et, ..."
            raise UsageError(f"`{text}` is no KIND=PREFIX", slug="wrong-usage", hint=hint)
        algorithms[kind] = prefix
    network, system = read_network(args.network), read_system(args.system)
    progress.say("reading")
    sets = places(args.inputs, args.groups)
    if len(sets) > 1:
        names = ", ".join(file_set.name for file_set in sets[:4])
        raise UsageError(f"`{args.inputs[0]}` holds {len(sets)} sets: {names}", slug="several-sets", hint="name one")
    workload = read_workload(sets[0])
    progress.say("simulating")
    return simulate(workload, network, system, aware=args.congestion == "aware", algorithms=algorithms)
