"""`traceloom simulate`: how long a workload takes on another machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from traceloom.cli import options as types
from traceloom.cli import outputs
from traceloom.cli.progress import Progress

DESCRIPTION = "Say how long a workload takes on another machine: its graph is evaluated with another network."
EXAMPLES = """\
examples:
  traceloom simulate run                                   on the recorded machine: does its time come back?
  traceloom simulate run --step 12 -o simulation.json      one step
  traceloom simulate job.graph --only communication        as if all else took no time
  traceloom simulate workload/ --groups comm_groups.json   a directory of .et files
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    types.add_inputs(parser, "recorded run, directory or files of traces, a .graph, or a directory of .et files")
    what = parser.add_argument_group("what is simulated")
    what.add_argument("--step", type=types.whole, metavar="N", help="one step (default: the whole window)")
    what.add_argument("--only", choices=("communication", "compute"), help="as if the other side took no time")
    what.add_argument("--groups", type=Path, metavar="FILE", help="which ranks are in which group, of .et files")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    outputs.add_output(parser, ".json")
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Read, simulate and show; returns the exit code."""
    from traceloom.report import simulation as report
    from traceloom.simulate import native

    chosen = outputs.targets(args, {".json": outputs.as_json})
    with Progress(shown=not args.quiet) as progress:
        answer = native.run(
            args.inputs,
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
    outputs.close(args, written, f"traceloom simulate {shlex.join(args.inputs)} -o simulation.json")
    return 0
