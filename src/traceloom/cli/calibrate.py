"""`traceloom calibrate`: a machine from the collectives of recorded runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import BinaryIO

from traceloom.cli import options as types
from traceloom.cli import outputs
from traceloom.cli.progress import Progress
from traceloom.plain_text import encoded

DESCRIPTION = (
    "Fit latency and bandwidth of a machine's collectives to those of recorded runs, and write it for `simulate`. "
    "Waiting for late ranks is taken out where several ranks are recorded."
)
EXAMPLES = """\
examples:
  traceloom calibrate run                              only look
  traceloom calibrate run -o machine.toml              then: traceloom simulate run --machine machine.toml
  traceloom calibrate small/ large/ -o machine.toml    several runs on one machine: more sizes and groups
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    types.add_inputs(parser, "recorded runs, directories of traces or trace files; the files of one run together")
    parser.add_argument(
        "--ranks-per-host", type=types.count, metavar="N", help="where the traces name no hosts: N ranks on each"
    )
    parser.add_argument("--json", action="store_true", help="print the fits as JSON")
    outputs.add_output(parser, ".toml for `simulate --machine`, .json")
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Read, fit, show and write; returns the exit code."""
    from traceloom.read import load
    from traceloom.report import calibration as report
    from traceloom.simulate.calibrate import calibrate
    from traceloom.simulate.machine import machine_text

    def write_machine(_document: object, handle: BinaryIO) -> None:
        handle.write(encoded(machine_text(answer.machine)))

    chosen = outputs.targets(args, {".toml": write_machine, ".json": outputs.as_json})
    files = [path for path in args.inputs if not Path(path).is_dir()]
    runs = [[path] for path in args.inputs if path not in files] + ([files] if files else [])
    with Progress(shown=not args.quiet) as progress:
        progress.say("reading")
        sessions = [load(*paths, cache=not args.no_cache) for paths in runs]
        progress.say("fitting")
        answer = calibrate(sessions, ranks_per_host=args.ranks_per_host)
        document = report.build(answer)
        written = outputs.write(args, chosen, document, progress)
    outputs.show(args, document, report.render)
    outputs.close(args, written, outputs.repeated(args, "machine.toml"))
    return 0
