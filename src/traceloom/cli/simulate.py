"""`traceloom simulate`: how long a workload takes on another machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from traceloom.cli import options as types
from traceloom.cli import outputs, scaling
from traceloom.cli.progress import Progress

DESCRIPTION = "Say how long a workload takes on another machine: its graph is evaluated with another network or device."
EXAMPLES = """\
examples:
  traceloom simulate run                                   on the recorded machine: does its time come back?
  traceloom simulate run --machine dgx-h100                on a preset, with as many hosts as there are ranks for
  traceloom simulate run --machine machine.toml --set network.0.bandwidth=100
  traceloom simulate run --machine machine.toml --step 12 -o simulation.json -o tables/
  traceloom simulate run --device 'H100 SXM' --host-factor 0.8
  traceloom simulate job.graph --only communication        as if all else took no time
  traceloom simulate run --ranks 1024 -o workload/         the same job with more ranks, and its .et files
  traceloom simulate workload/ --groups comm_groups.json --machine machine.toml
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
        "--device", metavar="NAME", help="what computes, as `H100 SXM` or bf16=989e12,memory=3.35e12 "
        "(default: that of the machine)",
    )  # fmt: skip
    where.add_argument(
        "--host-factor", type=types.positive, default=1.0, metavar="F", help="host work takes so many times as long"
    )
    scaling.add_options(parser)
    what = parser.add_argument_group("what is simulated")
    what.add_argument("--step", type=types.whole, metavar="N", help="one step (default: the whole window)")
    what.add_argument("--only", choices=("communication", "compute"), help="as if the other side took no time")
    what.add_argument("--groups", type=Path, metavar="FILE", help="which ranks are in which group, of .et files")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    outputs.add_output(parser, ".json, .html with the timeline before and after, or the timeline as .perfetto.json.gz")
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Read, simulate and show; returns the exit code."""
    from traceloom.report import simulation as report
    from traceloom.simulate import native

    if scaling.is_asked(args):
        return scaling.run(args)

    def write_html(document: dict[str, Any], handle: BinaryIO) -> None:
        from traceloom.plain_text import encoded
        from traceloom.report.before_after import simulated

        handle.write(encoded(simulated.render(document, answer)))

    def write_perfetto(_document: dict[str, Any], handle: BinaryIO) -> None:
        from traceloom.report.exports.perfetto.simulation import write_simulation

        write_simulation(answer, handle)

    def write_perfetto_gz(document: dict[str, Any], handle: BinaryIO) -> None:
        from traceloom.packed import gzipped

        gzipped(partial(write_perfetto, document))(handle)

    formats = {
        ".json": outputs.as_json,
        ".html": write_html,
        ".htm": write_html,
        ".perfetto.json": write_perfetto,
        ".perfetto.json.gz": write_perfetto_gz,
    }
    chosen = outputs.targets(args, formats)
    with Progress(shown=not args.quiet) as progress:
        answer = native.run(
            args.inputs,
            args.machine,
            overrides=args.overrides,
            device=args.device,
            host_factor=args.host_factor,
            groups=args.groups,
            only=args.only,
            step=args.step,
            cache=not args.no_cache,
            progress=progress.say,
        )
        document = report.build(answer)
        written = outputs.write(args, chosen, document, progress)
    if args.json:
        outputs.as_json(document, sys.stdout.buffer)
    elif outputs.printed(args):
        from traceloom.report.views import terminal

        terminal.put(partial(report.render, document), sys.stdout)
    again = [*args.inputs, *(("--machine", args.machine) if args.machine else ())]
    again += [word for text in args.overrides for word in ("--set", text)]
    outputs.close(args, written, f"traceloom simulate {shlex.join(again)} -o simulation.json")
    return 0
