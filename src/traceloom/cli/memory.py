"""`traceloom memory`: whose memory is it?"""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from typing import BinaryIO

from traceloom.cli import options as types
from traceloom.cli import outputs
from traceloom.cli.outputs import Progress

BY = ("scope", "module", "category", "op", "stack", "dtype")
DESCRIPTION = "Show who holds the memory at an instant, what grows, and every allocation by name."
EXAMPLES = """\
examples:
  traceloom memory run                           who holds what at the peak
  traceloom memory run --by module --depth 3     by part of the model
  traceloom memory run --at "step 4" --by stack  by line of code, in one step
  traceloom memory run -o memory.html            one page: the curve, who holds what at any instant
  traceloom memory snapshot.pickle               a memory snapshot of PyTorch
  traceloom memory run -o allocations.csv --all  every allocation with its name
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    types.add_inputs(parser, "run recorded with --memory, traces, or PyTorch's memory snapshots and timelines")
    what = parser.add_argument_group("what to show")
    what.add_argument("--by", choices=BY, default="scope", help="divide memory by this (default: scope)")
    what.add_argument("--depth", type=types.count, metavar="N", help="levels of a scope's or module's path kept apart")
    what.add_argument(
        "--at", type=types.instant, default="peak", metavar="WHEN",
        help='peak (default), start, end, "step 3" (its highest point), or a time as 12.5ms',
    )  # fmt: skip
    what.add_argument("--rank", type=types.ranks, metavar="N[,N]", help="only these ranks")
    what.add_argument("--full-op-names", action="store_true", help="keep namespaces: aten::relu instead of relu")
    how = parser.add_argument_group("how to show it")
    how.add_argument("--top", type=types.count, default=10, metavar="N", help="rows of a table (default: 10)")
    how.add_argument("--json", action="store_true", help="print the answer as JSON")
    outputs.add_output(how, ".html, .csv (every allocation), .json")
    how.add_argument("--all", action="store_true", help="with .csv: time, lifetime, category, step, stack, ... too")
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Read, explain and show; returns the exit code."""
    from traceloom.report.memory import document_of
    from traceloom.report.memory_sources import MemoryOptions, find

    def write_csv(_document: object, handle: BinaryIO) -> None:
        from traceloom.report import memory_sources

        memory_sources.write(sources, options, handle, whole=args.all)

    page = outputs.lazy_renderer("traceloom.report.views.page:render")
    chosen = outputs.targets(args, {".html": page, ".htm": page, ".csv": write_csv, ".json": outputs.as_json})
    options = MemoryOptions(args.rank, args.by, args.depth, args.at, args.top, args.full_op_names)
    with Progress(shown=not args.quiet) as progress:
        progress.say("reading")
        sources = find(args.inputs, cache=not args.no_cache)
        progress.say("naming allocations")
        document = document_of(sources, options)
        written = outputs.write(args, chosen, document, progress)
    if args.json:
        outputs.as_json(document, sys.stdout.buffer)
    elif outputs.is_printed(args):
        from traceloom.report.views import terminal
        from traceloom.report.views.terminal import render_memory

        terminal.put(partial(render_memory, document, options), sys.stdout)
    following = f"traceloom memory {shlex.join(args.inputs)} -o memory.html"
    outputs.print_outcome(args, written, following if document["ranks"] else None)
    return 0
