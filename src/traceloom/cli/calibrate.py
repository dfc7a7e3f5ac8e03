"""`traceloom calibrate`: fits a machine to the collectives of recorded runs, or to those measured
here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from traceloom.cli import options as types, outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import UsageError
from traceloom.system.text import encode_utf8

if TYPE_CHECKING:
    from traceloom.workload.simulate.calibrate import Calibration

DESCRIPTION = (
    "Fit latency and bandwidth of a machine's collectives to those of recorded runs, or with --here to those that are "
    "measured on this machine, and write it for `simulate`. Waiting for late ranks is taken out where several ranks "
    "are recorded."
)
EXAMPLES = """\
examples:
  traceloom calibrate run                              only look
  traceloom calibrate run -o machine.toml              then: traceloom simulate run --machine machine.toml
  traceloom calibrate small/ large/ -o machine.toml    several runs on one machine: more sizes and groups
  traceloom calibrate --here -o machine.toml           measure this machine
  torchrun --nnodes 2 --nproc-per-node 8 ... -m traceloom calibrate --here -o machine.toml
"""
_FOR_HERE = ("ranks", "device", "backend", "max_size", "powers", "precision")
_FOR_RUNS = ("inputs", "ranks_per_host", "no_cache")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="recorded runs, directories of traces or trace files; the files of one run together",
    )
    parser.add_argument(
        "--ranks-per-host",
        type=types.parse_count,
        metavar="N",
        help="where the traces name no hosts: N ranks on each",
    )
    parser.add_argument("--json", action="store_true", help="print the fits as JSON")
    outputs.add_output_options(parser, ".toml for `simulate --machine`, .json")
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--here",
        action="store_true",
        help="measure this machine instead of reading runs; needs torch",
    )
    group.add_argument(
        "--ranks",
        type=types.parse_count,
        metavar="N",
        help="processes (default: one for each device, two on processors; under torchrun its own)",
    )
    group.add_argument(
        "--device", metavar="KIND", help="cpu, cuda or xpu (default: the one there is)"
    )
    group.add_argument(
        "--backend", metavar="NAME", help="gloo, nccl ... (default: the usual one of the device)"
    )
    group.add_argument(
        "--max-size",
        type=types.parse_size,
        metavar="SIZE",
        help="the largest message (default: 64MiB on processors, 256MiB on devices)",
    )
    group.add_argument(
        "--powers",
        type=int,
        choices=(2, 4),
        help="from one size to the next times so many (default: 4)",
    )
    group.add_argument(
        "--precision",
        type=types.parse_percentage,
        metavar="PERCENT",
        help="repeat until medians are known so well, or for some tenths of a second (default: 3%%)",
    )
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Fits, shows and writes; returns the exit code."""
    from traceloom.report import calibration as report
    from traceloom.workload.simulate.machine_file import machine_text

    def write_machine(_document: object, handle: BinaryIO) -> None:
        handle.write(encode_utf8(machine_text(answer.machine)))

    _check_options(args)
    targets = outputs.resolve_output_files(
        args, {".toml": write_machine, ".json": outputs.write_json}
    )
    is_first = not args.here or _is_first()
    with Progress(enabled=is_first and not args.quiet) as progress:
        answer = _measure(args, progress) if args.here else _read(args, progress)
        if not is_first:
            return 0
        document = report.build_calibration(answer)
        written = outputs.write_output_files(args, targets, document, progress)
    outputs.print_document(args, document, report.render_calibration)
    outputs.print_outcome(args, written, outputs.format_repeat_command(args, "machine.toml"))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuses a call without runs and without `--here`, and options that do not fit the
    given one.
    """
    if not args.here and not args.inputs:
        raise UsageError(
            "calibrate needs recorded runs, or --here",
            slug="wrong-usage",
            hint="see traceloom calibrate --help",
        )
    for name in _FOR_RUNS if args.here else _FOR_HERE:
        if getattr(args, name):
            option = "a recorded run" if name == "inputs" else "--" + name.replace("_", "-")
            message = (
                f"{option} does not go with --here"
                if args.here
                else f"{option} goes only with --here"
            )
            raise UsageError(
                message,
                slug="wrong-usage",
                hint="leave one of them out" if args.here else "add --here",
            )


def _is_first() -> bool:
    """Whether this process writes: of the processes of a launcher only the first does."""
    from traceloom.workload.replay.measure import launched

    process = launched()
    return process is None or process.rank == 0


def _measure(args: argparse.Namespace, progress: Progress) -> Calibration:
    from traceloom.workload.replay.measure import measure

    progress.show("starting")
    names = {"max_size": "max_bytes", "powers": "factor"}
    options: dict[str, Any] = {
        names.get(name, name): value
        for name in _FOR_HERE
        if (value := getattr(args, name)) is not None
    }
    return measure(**options, on_status=lambda what: progress.show(f"measuring {what}"))


def _read(args: argparse.Namespace, progress: Progress) -> Calibration:
    from traceloom.formats import load
    from traceloom.workload.simulate.calibrate import calibrate

    files = [path for path in args.inputs if not Path(path).is_dir()]
    runs = [[path] for path in args.inputs if path not in files] + ([files] if files else [])
    progress.show("reading")
    sessions = [load(*paths, cache=not args.no_cache) for paths in runs]
    progress.show("fitting")
    return calibrate(sessions, ranks_per_host=args.ranks_per_host)
