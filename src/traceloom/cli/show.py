"""`traceloom show`: what a graph or a set of Chakra files is made of."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from traceloom.cli import options as types
from traceloom.cli import outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import InputError, UsageError
from traceloom.system.text import encode_utf8

if TYPE_CHECKING:
    from traceloom.report.documents.workload import NodeDocument, WorkloadSummaryDocument
    from traceloom.report.workload import NodeNetwork

DESCRIPTION = "Show what a graph or a set of Chakra files is made of: on the terminal, or drawn in a page."
EXAMPLES = """\
examples:
  traceloom show workload/                    nodes, communication and dependencies of all ranks
  traceloom show job.graph --node 4209        one node, what it waits for, what waits for it
  traceloom show job.graph -o job.html        a drawing of all of it, nodes of one name as one box
  traceloom show workload/ --node 12 --rank 1 -o node.html
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    types.add_inputs(parser, "a .graph file, or .et and .et.gz files, or a directory of them")
    parser.add_argument("--node", type=types.whole, metavar="ID", help="one node and its neighbours")
    parser.add_argument("--rank", type=types.whole, metavar="N", help="the rank of the node")
    parser.add_argument(
        "--depth", type=types.whole, default=2, metavar="N", help="how far neighbours are drawn (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary, or the node, as JSON")
    parser.add_argument("-o", "--output", metavar="FILE", help="write a drawing: .html")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    types.add_silence(parser)


def run(args: argparse.Namespace) -> int:
    """Read and show; returns the exit code."""
    from traceloom.system import units

    def draw(summary: WorkloadSummaryDocument, handle: BinaryIO) -> None:
        from traceloom.report.workload_drawing import collapsed, neighbourhood, render

        picture = collapsed(network) if row is None else neighbourhood(network, row, args.depth)
        handle.write(encode_utf8(render(picture, summary)))

    chosen = outputs.targets(args, {".html": draw, ".htm": draw})
    with Progress(shown=not args.quiet) as progress:
        progress.say("reading")
        from traceloom.report.workload import of_graph, of_workload

        graphs = [path for path in args.inputs if Path(path).name.lower().endswith(".graph")]
        if graphs and len(args.inputs) > 1:
            raise UsageError(
                "a graph is shown alone", slug="wrong-usage", hint=f"traceloom show {shlex.quote(graphs[0])}"
            )
        if graphs:
            from traceloom.graph.graph import load

            network = of_graph(load(graphs[0]))
        else:
            from traceloom.formats.chakra.nodes import places, read_workload

            file_sets = places(args.inputs)
            if len(file_sets) > 1:
                names = ", ".join(file_set.name for file_set in file_sets[:4])
                raise UsageError(
                    f"there are {len(file_sets)} sets of files: {names}",
                    slug="several-sets",
                    hint="name the files of one of them",
                )
            network = of_workload(read_workload(file_sets[0], lambda path: progress.say(f"reading {path}")))
        row = None if args.node is None else _row(network, args.node, args.rank)
        progress.say("counting")
        from traceloom.report.workload import neighbours, summarise

        document: WorkloadSummaryDocument | NodeDocument
        document = summarise(network) if row is None else neighbours(network, row)
        written: list[tuple[Path, int]] = []
        if chosen:
            summary = document if document["format"] == "traceloom-workload-summary" else summarise(network)
            written = outputs.write(args, chosen, summary, progress)
    if args.json:
        from traceloom.report.views.files import encode

        sys.stdout.buffer.write(encode(document))
    elif outputs.is_printed(args):
        from traceloom.report import workload
        from traceloom.report.views.terminal import put

        if document["format"] == "traceloom-node":
            put(partial(workload.render_node, document), sys.stdout)
        else:
            put(partial(workload.render, document), sys.stdout)
    for path, size in written:
        outputs.add_reason(args, f"Wrote {path} ({units.size(size)}); open it in a browser.")
    if not written and row is None:
        outputs.print_outcome(args, [], f"traceloom show {shlex.join(args.inputs)} -o drawing.html")
    return 0


def _row(network: NodeNetwork, identity: int, rank: int | None) -> int:
    from traceloom.report.workload import row_of

    rows = row_of(network, identity, rank)
    if not rows:
        of_rank = "" if rank is None else f" on rank {rank}"
        raise InputError(
            f"there is no node {identity}{of_rank}",
            slug="no-such-node",
            where=network.name,
            hint="traceloom validate and drawings name the ids of nodes",
        )
    ranks = sorted({network.nodes["rank"][row] for row in rows})
    if len(ranks) > 1:
        raise UsageError(
            f"node {identity} is on {len(ranks)} ranks", slug="several-ranks", hint=f"add --rank {ranks[0]}"
        )
    return rows[0]
