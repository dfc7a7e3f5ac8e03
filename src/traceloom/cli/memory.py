"""`traceloom memory`: explains what uses the memory."""

import argparse
import shlex
import sys
from functools import partial
from typing import BinaryIO

from traceloom.cli import options as types, outputs
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
    types.add_inputs(
        parser, "run recorded with --memory, traces, or PyTorch's memory snapshots and timelines"
    )
    content_group = parser.add_argument_group("what to show")
    content_group.add_argument(
        "--by", choices=BY, default="scope", help="divide memory by this (default: scope)"
    )
    content_group.add_argument(
        "--depth",
        type=types.parse_count,
        metavar="N",
        help="levels of a scope's or module's path kept apart",
    )
    content_group.add_argument(
        "--at",
        type=types.parse_instant,
        default="peak",
        metavar="WHEN",
        help='peak (default), start, end, "step 3" (its highest point), or a time as 12.5ms',
    )
    content_group.add_argument(
        "--rank", type=types.parse_ranks, metavar="N[,N]", help="only these ranks"
    )
    content_group.add_argument(
        "--full-op-names", action="store_true", help="keep namespaces: aten::relu instead of relu"
    )
    display_group = parser.add_argument_group("how to show it")
    display_group.add_argument(
        "--top",
        type=types.parse_count,
        default=10,
        metavar="N",
        help="rows of a table (default: 10)",
    )
    display_group.add_argument("--json", action="store_true", help="print the answer as JSON")
    outputs.add_output_options(display_group, ".html, .csv (every allocation), .json")
    display_group.add_argument(
        "--all",
        action="store_true",
        help="with .csv: time, lifetime, category, step, stack, ... too",
    )
    types.add_reading(parser.add_argument_group("more"))


def run(args: argparse.Namespace) -> int:
    """Reads, explains and shows; returns the exit code."""
    from traceloom.report.memory import build_document
    from traceloom.report.memory_sources import MemoryOptions, read_memory_sources

    def write_csv(_document: object, handle: BinaryIO) -> None:
        from traceloom.report import memory_sources

        memory_sources.write_allocations_csv(sources, options, handle, all_columns=args.all)

    page = outputs.make_lazy_writer("traceloom.report.views.page:render")
    targets = outputs.resolve_output_files(
        args, {".html": page, ".htm": page, ".csv": write_csv, ".json": outputs.write_json}
    )
    options = MemoryOptions(args.rank, args.by, args.depth, args.at, args.top, args.full_op_names)
    with Progress(enabled=not args.quiet) as progress:
        progress.show("reading")
        sources = read_memory_sources(args.inputs, cache=not args.no_cache)
        progress.show("naming allocations")
        document = build_document(sources, options)
        written = outputs.write_output_files(args, targets, document, progress)
    if args.json:
        outputs.write_json(document, sys.stdout.buffer)
    elif outputs.should_print_document(args):
        from traceloom.report.views import terminal
        from traceloom.report.views.terminal_memory import render_memory

        terminal.print_lines(partial(render_memory, document, options), sys.stdout)
    following = f"traceloom memory {shlex.join(args.inputs)} -o memory.html"
    outputs.print_outcome(args, written, following if document["ranks"] else None)
    return 0
