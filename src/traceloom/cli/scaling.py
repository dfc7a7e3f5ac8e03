"""`traceloom simulate --ranks`: the recorded job with another number of ranks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from traceloom.cli import options as types
from traceloom.cli import outputs
from traceloom.cli.progress import Progress
from traceloom.errors import UsageError

if TYPE_CHECKING:
    from traceloom.simulate.machine import Machine
    from traceloom.simulate.native.inputs import SimulationInput
    from traceloom.simulate.scale import RecordedJob

# Sizes of a job that only another recording, or a generated workload, can have.
_REFUSED = {
    "tensor_parallel": "every kernel of a layer would work on another part of it",
    "pipeline_parallel": "every stage would hold other layers",
    "micro_batches": "stages would wait for each other in another order",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that ask for another scale."""
    scale = parser.add_argument_group("at which scale")
    size = scale.add_mutually_exclusive_group()
    size.add_argument(
        "--ranks", type=types.count, metavar="N", help="the same job with N ranks: more (or fewer) copies"
    )
    size.add_argument("--data-parallel", type=types.count, metavar="N", help="the same with N copies of the model")
    for name in _REFUSED:
        scale.add_argument(f"--{name.replace('_', '-')}", type=types.count, help=argparse.SUPPRESS)
    scale.add_argument(
        "--role", action="append", default=[], metavar="GROUP=ROLE", help="what a group is for, as 9=data, where its "
        "name and calls do not tell",
    )  # fmt: skip
    scale.add_argument("--draws", type=types.count, default=200, metavar="N", help="how many steps are drawn (200)")
    scale.add_argument("--seed", type=types.whole, default=0, metavar="N", help="of chance (0)")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether another scale is asked for.

    Raises:
        UsageError: slug `cannot-scale`: one that cannot be made of what was recorded.
    """
    for name, why in _REFUSED.items():
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} cannot be changed in what was recorded: {why}",
                slug="cannot-scale",
                hint="record a job that has it, or plan with --sweep and `traceloom generate transformer`",
            )
    return args.ranks is not None or args.data_parallel is not None


def recorded_job(args: argparse.Namespace, source: SimulationInput, machine: Machine | None) -> RecordedJob:
    """The recorded job, on the device that is asked for, or that of the machine."""
    from traceloom.simulate.native.running import on_device
    from traceloom.simulate.scale import RecordedJob, roles_of

    if source.only is not None:
        raise UsageError("--only is of the recorded size", slug="cannot-scale", hint="leave --only or the scale out")
    if not source.measured:
        raise UsageError(
            "only recorded runs can be scaled: nothing here was measured, so nothing tells how works vary",
            slug="cannot-scale",
            hint="name the recorded run",
        )
    cases = on_device(source, machine, args.device, args.host_factor, args.recorded_device)
    graph = cases.graphs[0]
    roles = roles_of(source.session) if source.session else {}
    for text in args.role:
        group, equals, role = text.partition("=")
        if not equals:
            raise UsageError(f"`{text}` names no role", slug="wrong-usage", hint="write --role GROUP=data")
        roles[group] = role
    return RecordedJob(
        graph, roles, draws=args.draws, seed=args.seed, measured=graph is source.graph, notices=cases.notices
    )


def machine_of(args: argparse.Namespace) -> Machine | None:
    """The machine, of whatever size it is described; None for the recorded one."""
    from traceloom.simulate.machine import read_machine

    if args.network:
        from traceloom.simulate import astra_sim

        system = astra_sim.read_system(args.system) if args.system else None
        return astra_sim.machine_of(astra_sim.read_network(args.network), system)
    if args.machine is None:
        if args.overrides:
            raise UsageError("--set is of a machine", slug="wrong-usage", hint="name one with --machine")
        return None
    return read_machine(args.machine, args.overrides)


def run(args: argparse.Namespace) -> int:
    """Read, scale and show; returns the exit code."""
    from traceloom.chakra.astra_sim import to_astra_sim
    from traceloom.chakra.group_file import FILES_OF_RANKS
    from traceloom.report import scaled as report
    from traceloom.simulate.native.inputs import open_input
    from traceloom.simulate.scale import on_machine

    chosen = outputs.targets(args, {".json": "document"}, ("workload", FILES_OF_RANKS))
    with Progress(shown=not args.quiet) as progress:
        progress.say("reading")
        source = open_input(args.inputs, groups=args.groups, only=args.only, step=args.step, cache=not args.no_cache)
        progress.say("measuring how works vary")
        described = machine_of(args)
        job = recorded_job(args, source, described)
        size = {"ranks": args.ranks, "data_parallel": args.data_parallel}
        ranks = job.copies(**size) * job.axis.positions
        machine = described.for_ranks(ranks) if described else None
        model = on_machine(machine) if machine else None
        progress.say(f"drawing steps of {ranks:,} ranks")
        answer = job.at(**size, transfers=model)
        document = report.build(
            answer, source.name, (machine.name or str(args.machine or args.network)) if machine else ""
        )
        written = []
        for path, form in chosen:
            progress.say(f"writing {path}")
            if form == "document":
                written += outputs.write(args, [(path, outputs.as_json)], document, progress)
            else:
                progress.say(f"copying the graph for {ranks:,} ranks")
                graph = job.graph_at(ranks=ranks, transfers=model)
                progress.say(f"ordering {graph.nodes.height:,} nodes for {path}")
                workload = to_astra_sim(graph)
                progress.say(f"writing {ranks:,} files to {path}")
                sizes = [file.stat().st_size for file in workload.write(path, force=args.force)]
                written.append((path, sum(sizes)))
    outputs.show(args, document, report.render)
    outputs.close(args, written, outputs.repeated(args, "workload/"))
    return 0
