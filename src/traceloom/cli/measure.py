"""`traceloom measure`: this machine as `simulate` takes it."""

from __future__ import annotations

import argparse
from typing import BinaryIO

from traceloom.cli import options as types
from traceloom.cli import outputs
from traceloom.cli.progress import Progress
from traceloom.plain_text import encoded

DESCRIPTION = (
    "Measure this machine: its collectives of all sizes between processes of its own, or under torchrun between those "
    "of several hosts, and a few kernels; fit latency and bandwidth, and write the machine for `simulate`. Needs torch."
)
EXAMPLES = """\
examples:
  traceloom measure                                    only look
  traceloom measure -o machine.toml                    then: traceloom simulate run --machine machine.toml
  traceloom measure -o machine.toml -o measure.html    and a page with the curves
  traceloom measure --ranks 4 --device cpu --max 16MiB -o machine.toml
  torchrun --nnodes 2 --nproc-per-node 8 ... -m traceloom measure -o machine.toml
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "--ranks", type=types.count, metavar="N",
        help="processes (default: one for each device, two on processors; under torchrun its own)",
    )  # fmt: skip
    parser.add_argument("--device", metavar="KIND", help="cpu, cuda or xpu (default: the one there is)")
    parser.add_argument(
        "--backend", metavar="NAME", help="what communicates: gloo, nccl ... (default: the usual one of the device)"
    )
    parser.add_argument(
        "--max", "--max-size", dest="most_bytes", type=types.size, metavar="SIZE",
        help="the largest message (default: 64MiB on processors, 256MiB on devices); below torchrun --max-size",
    )  # fmt: skip
    parser.add_argument(
        "--powers", type=int, choices=(2, 4), default=4, help="from one size to the next times so many (default: 4)"
    )
    parser.add_argument(
        "--precision", type=types.share, default=0.03, metavar="PERCENT",
        help="repeat until medians are known so well, or for some tenths of a second (default: 3%%)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=types.positive, default=60.0, metavar="S",
        help="how long a rank waits for the others (default: 60)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    outputs.add_output(parser, ".toml for `simulate --machine`, .html with the curves, .json")
    types.add_silence(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Measure, show and write; returns the exit code. Of the processes of a launcher only the first says anything."""
    from traceloom.replay.measure import measure
    from traceloom.replay.measure.measuring import launched
    from traceloom.report import measurement as report
    from traceloom.simulate.machine import machine_text

    def write_machine(_document: object, handle: BinaryIO) -> None:
        handle.write(encoded(machine_text(answer.machine)))

    page = outputs.rendered("traceloom.report.measurement_page")
    chosen = outputs.targets(args, {".toml": write_machine, ".html": page, ".json": outputs.as_json})
    process = launched()
    is_first = process is None or process.rank == 0
    with Progress(shown=is_first and not args.quiet) as progress:
        progress.say("starting")
        answer = measure(
            ranks=args.ranks, device=args.device, backend=args.backend, most_bytes=args.most_bytes, factor=args.powers,
            precision=args.precision, timeout_s=args.timeout, say=lambda what: progress.say(f"measuring {what}"),
        )  # fmt: skip
        if not is_first:
            return 0
        document = report.build(answer)
        written = outputs.write(args, chosen, document, progress)
    outputs.show(args, document, report.render)
    outputs.close(args, written, outputs.repeated(args, "machine.toml"))
    return 0
