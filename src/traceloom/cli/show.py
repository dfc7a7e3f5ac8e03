"""`traceloom show`: summarizes a graph or a set of Chakra files."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from traceloom.cli import options as types, outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import InputError, UsageError
from traceloom.system.text import encode_utf8

if TYPE_CHECKING:
    from traceloom.report.documents.graph import NodeDocument, WorkloadSummaryDocument
    from traceloom.report.workload import NodeNetwork

DESCRIPTION = (
    "Show what a graph or a set of Chakra files is made of: on the terminal, or drawn in a page."
)
EXAMPLES = """\
examples:
  traceloom show workload/                    nodes, communication and dependencies of all ranks
  traceloom show job.graph --node 4209        one node, what it waits for, what waits for it
  traceloom show job.graph -o job.html        a drawing of all of it, nodes of one name as one box
  traceloom show workload/ --node 12 --rank 1 -o node.html
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_inputs(parser, "a .graph file, or .et and .et.gz files, or a directory of them")
    parser.add_argument(
        "--node", type=types.parse_whole_number, metavar="ID", help="one node and its neighbours"
    )
    parser.add_argument(
        "--rank", type=types.parse_whole_number, metavar="N", help="the rank of the node"
    )
    parser.add_argument(
        "--depth",
        type=types.parse_whole_number,
        default=2,
        metavar="N",
        help="how far neighbours are drawn (default: 2)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the summary, or the node, as JSON"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write a drawing: .html")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    types.add_verbosity_options(parser)


def run(args: argparse.Namespace) -> int:
    """Reads and shows; returns the exit code."""
    from traceloom.system import units

    def draw(summary: WorkloadSummaryDocument, handle: BinaryIO) -> None:
        from traceloom.report.workload_drawing import build_neighbourhood, collapse_nodes, render

        picture = (
            collapse_nodes(network)
            if row is None
            else build_neighbourhood(network, row, args.depth)
        )
        handle.write(encode_utf8(render(picture, summary)))

    targets = outputs.resolve_output_files(args, {".html": draw, ".htm": draw})
    with Progress(enabled=not args.quiet) as progress:
        progress.show("reading")
        from traceloom.report.workload import convert_graph, convert_workload

        graphs = [path for path in args.inputs if Path(path).name.lower().endswith(".graph")]
        if graphs and len(args.inputs) > 1:
            raise UsageError(
                "a graph is shown alone",
                slug="wrong-usage",
                hint=f"traceloom show {shlex.quote(graphs[0])}",
            )
        if graphs:
            from traceloom.graph.graph import load

            network = convert_graph(load(graphs[0]))
        else:
            from traceloom.formats.chakra.nodes import find_file_sets, read_workload

            file_sets = find_file_sets(args.inputs)
            if len(file_sets) > 1:
                names = ", ".join(file_set.name for file_set in file_sets[:4])
                raise UsageError(
                    f"there are {len(file_sets)} sets of files: {names}",
                    slug="several-sets",
                    hint="name the files of one of them",
                )
            network = convert_workload(
                read_workload(file_sets[0], lambda path: progress.show(f"reading {path}"))
            )
        row = None if args.node is None else _find_row(network, args.node, args.rank)
        progress.show("counting")
        from traceloom.report.workload import build_node_document, summarise

        document: WorkloadSummaryDocument | NodeDocument
        document = summarise(network) if row is None else build_node_document(network, row)
        written: list[tuple[Path, int]] = []
        if targets:
            summary = (
                document
                if document["format"] == "traceloom-workload-summary"
                else summarise(network)
            )
            written = outputs.write_output_files(args, targets, summary, progress)
    if args.json:
        from traceloom.report.views.files import encode

        sys.stdout.buffer.write(encode(document))
    elif outputs.should_print_document(args):
        from traceloom.report import workload
        from traceloom.report.views.terminal import print_lines

        if document["format"] == "traceloom-node":
            print_lines(partial(workload.render_node, document), sys.stdout)
        else:
            print_lines(partial(workload.render, document), sys.stdout)
    for path, size in written:
        outputs.print_messages(
            args, f"Wrote {path} ({units.format_size(size)}); open it in a browser."
        )
    if not written and row is None:
        outputs.print_outcome(args, [], f"traceloom show {shlex.join(args.inputs)} -o drawing.html")
    return 0


def _find_row(network: NodeNetwork, identity: int, rank: int | None) -> int:
    from traceloom.report.workload import find_rows

    rows = find_rows(network, identity, rank)
    if not rows:
        rank_note = "" if rank is None else f" on rank {rank}"
        raise InputError(
            f"there is no node {identity}{rank_note}",
            slug="no-such-node",
            where=network.name,
            hint="traceloom validate and drawings name the ids of nodes",
        )
    ranks = sorted({network.nodes["rank"][row] for row in rows})
    if len(ranks) > 1:
        raise UsageError(
            f"node {identity} is on {len(ranks)} ranks",
            slug="several-ranks",
            hint=f"add --rank {ranks[0]}",
        )
    return rows[0]
