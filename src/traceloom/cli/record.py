"""`traceloom record -- COMMAND`: records a run without changes to its code."""

import argparse
import datetime as dt
import os
import re
import sys
from itertools import chain, count
from pathlib import Path

from traceloom.capture.launch import Launch
from traceloom.capture.settings import Settings, check_times, parse_steps, print_message
from traceloom.cli.options import parse_size
from traceloom.errors import CheckError, UsageError

DESCRIPTION = """\
Run a command and record what PyTorch does in it, on every rank. The program needs no change.

Recording begins with the first call of a module and ends after the 8th step; the last 5 of these are kept (with --memory
and no --stacks all). A run without so many steps keeps what there is."""

EXAMPLES = """\
examples:
  traceloom record -- python train.py --epochs 1
  traceloom record -o run1 --steps 20..25 --stacks -- torchrun --nproc-per-node 2 train.py
  traceloom record --after 30 --duration 5 -- python serve.py"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "traceloom record [options] -- COMMAND ..."
    add = parser.add_argument
    add("-o", "--output", metavar="DIR", help="capture directory (default: traceloom-SCRIPT-TIME)")
    add(
        "--steps",
        metavar="A..B",
        help="record steps A to B-1, counted from 0; or N steps after 3 of warm-up",
    )
    add(
        "--after",
        type=float,
        metavar="SECONDS",
        help="record by time: begin so long after torch was imported",
    )
    add(
        "--duration",
        type=float,
        metavar="SECONDS",
        help="record by time: for so long (default: 10)",
    )
    add("--stacks", action="store_true", help="record Python call stacks and modules (slow)")
    add(
        "--memory",
        action="store_true",
        help="record allocations, with the modules that make them: from the import of torch on, "
        "with --steps or --stacks in the window",
    )
    add(
        "--module-names",
        choices=("path", "class", "off"),
        default="path",
        help="how modules are named (default: path)",
    )
    add(
        "--graph",
        dest="graph_step",
        action="store_true",
        help="record one more step with PyTorch's execution trace, for link and replay: which tensors are the same",
    )
    add(
        "--max-memory",
        type=parse_size,
        metavar="BYTES",
        help="what recording may take, as 512MB (default: that, or 5 %% of what is free)",
    )
    add(
        "--no-sources",
        dest="sources",
        action="store_false",
        help="leave out the sources of compiled kernels, which come with --graph",
    )
    add(
        "--force",
        action="store_true",
        help="replace an earlier capture in DIR, when the new one is whole",
    )
    add(
        "--fail-without-capture",
        action="store_true",
        help="exit with 5 when nothing was recorded",
    )
    add("-q", "--quiet", action="store_true", help="print errors only")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command to run, after --")


def run(args: argparse.Namespace) -> int:
    """Runs the command and records it.

    Returns:
        The command's own exit code; with `--fail-without-capture` 5 where nothing was recorded;
        where a signal ended the command, this process ends by the same one.

    Raises:
        UsageError: slugs `no-command`, `bad-steps`, `bad-time`, `command-not-found`.
        OutputError: slugs `capture-exists`, `being-recorded`, `not-writable`.
    """
    command = list(args.command)
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise UsageError(
            "there is no command to record",
            slug="no-command",
            hint="write it behind two dashes: `traceloom record -- python train.py`",
        )
    check_times(args.after, args.duration, args.steps)
    first, count = parse_steps(args.steps)
    directory = Path(args.output or choose_output_name(command)).absolute()
    settings = Settings(
        str(directory),
        first_step=first,
        step_count=count,
        after=args.after,
        duration=args.duration,
        stacks=args.stacks,
        memory=args.memory,
        module_names=args.module_names,
        graph_step=args.graph_step,
        max_memory=args.max_memory,
        sources=args.sources,
        quiet=args.quiet,
    )
    launch = Launch(settings, command, force=args.force)
    status = launch.run()
    relative = os.path.relpath(directory) if sys.platform != "win32" else str(directory)
    for line in launch.summary(relative if not relative.startswith("..") else str(directory)):
        print_message(line)
    if status < 0:
        launch.die_alike(-status)
        return 128 - status
    return CheckError.exit_code if args.fail_without_capture and not launch.recorded else status


def choose_output_name(command: list[str]) -> str:
    """Returns a name such as `traceloom-train-20260131-120000`, after the first argument that looks
    like a script.
    """
    scripts = [word for word in command if word.endswith(".py")]
    script = Path(scripts[0]).stem if scripts else Path(command[0]).stem
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", script)[:60] or "run"
    now = dt.datetime.now().astimezone()
    first = f"traceloom-{name}-{now:%Y%m%d-%H%M%S}"
    names = chain([first], (f"{first}-{number}" for number in count(2)))
    return next(name for name in names if not Path(name).exists())  # two may start within a second
