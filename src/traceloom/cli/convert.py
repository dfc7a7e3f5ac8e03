"""`traceloom convert`: converts workloads between formats."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.cli import options as types, outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import TraceloomError, UsageError

if TYPE_CHECKING:
    from traceloom.trace.notice import Notice
    from traceloom.workload.chakra.convert import ConversionInput

_FORMATS = {
    ".graph": "graph",
    **dict.fromkeys((".et", ".et.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz"), "chakra"),
    **dict.fromkeys((".perfetto.json", ".perfetto.json.gz"), "perfetto"),
}
_SHOWN_NOTICES = 10
DESCRIPTION = "Turn a graph or Chakra files into another form, told by the ending of the output."
EXAMPLES = """\
examples:
  traceloom convert workload.0.et workload.0.jsonl.gz      to text, without loss, and back
  traceloom convert job.graph workload/                    one .et per rank, with their groups
  traceloom convert workload/ job.graph                    files of ranks into one graph
  traceloom convert job.graph job.perfetto.json.gz         for ui.perfetto.dev
  traceloom convert workload/ network/ --only communication
  traceloom convert job.graph sim/ --target astra-sim      what ASTRA-sim accepts
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        metavar="INPUT",
        help="a .graph, a Chakra file (.et, .json, .jsonl, each also .gz), or a directory of files PREFIX.RANK.et",
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="a .graph, a Chakra file, .perfetto.json[.gz], or a directory (a name without ending), one file per rank",
    )
    parser.add_argument(
        "--only",
        choices=("communication", "compute"),
        help="keep one side; what it waits for is kept transitively",
    )
    parser.add_argument(
        "--target", choices=("chakra", "astra-sim"), default="chakra", help="who is to read it"
    )
    parser.add_argument(
        "--gpu-only",
        action="store_true",
        help="for astra-sim: no nodes of the host; their time and order stay",
    )
    parser.add_argument(
        "--groups",
        type=Path,
        metavar="FILE",
        help="the group file, where it is not beside the files",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse files that are cut, instead of taking what is whole",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the output")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    types.add_verbosity_options(parser)


def run(args: argparse.Namespace) -> int:
    """Converts; returns the exit code."""
    from traceloom.system import units
    from traceloom.trace.notice import sort_by_severity
    from traceloom.workload.chakra import convert

    format_name = outputs.resolve_output_format(args, _FORMATS, convert.DIRECTORY_FILES)
    wrong = hint = ""
    if args.target == "astra-sim" and (format_name != "directory" or args.only):
        wrong = (
            "--target astra-sim writes a directory"
            if format_name != "directory"
            else "--only does not go with --target"
        )
        hint = "as in: traceloom convert job.graph sim/ --target astra-sim"
    elif args.gpu_only and args.target != "astra-sim":
        wrong, hint = "--gpu-only goes with --target astra-sim", "add --target astra-sim"
    elif args.only and format_name not in {"chakra", "directory"}:
        wrong, hint = "--only writes Chakra files", "name a directory or an .et file as the output"
    if wrong:
        raise UsageError(wrong, slug="wrong-usage", hint=hint)
    target = Path(args.output)
    with (
        Progress(enabled=not args.quiet) as progress,
        convert.ConversionInput(
            Path(args.input), args.groups, args.strict, progress.show
        ) as source,
    ):
        files, nodes, notices, following = _write_converted(source, target, format_name, args)
        rank_ends = (
            _compare_rank_ends(source, target, notices, progress)
            if args.target == "astra-sim"
            else []
        )
    size = sum(file.stat().st_size for file in files)
    notices = list(sort_by_severity(tuple(notices))) if not args.json else notices
    if args.json:
        document = {
            "output": str(target),
            "files": [str(file) for file in files],
            "bytes": size,
            "nodes": nodes,
            "notices": [notice.to_dict() for notice in notices],
            **({"ends": rank_ends} if rank_ends else {}),
        }
        print(json.dumps(document))
    elif not args.quiet:
        for notice in notices[:_SHOWN_NOTICES]:
            rank = "" if notice.rank is None else f"rank {notice.rank}: "
            print(f"{notice.severity}: {rank}{notice.message} [{notice.slug}]", file=sys.stderr)
        if len(notices) > _SHOWN_NOTICES:
            print(
                f"and {len(notices) - _SHOWN_NOTICES} more notices; --json has them all",
                file=sys.stderr,
            )
        if rank_ends:
            low, high = (f(end["difference"] for end in rank_ends) for f in (min, max))
            ranks = f"its {len(rank_ends)} ranks end" if len(rank_ends) > 1 else "it ends"
            span = f"{low:+.1%}" if len(rank_ends) == 1 else f"{low:+.1%} to {high:+.1%}"
            print(f"With recorded transfers {ranks} {span} off the measurement in ASTRA-sim.")
        file_count = f", {len(files)} files" if len(files) > 1 else ""
        print(
            f"Wrote {target} ({nodes:,} nodes{file_count}, {units.format_size(size)}); next: {following}"
        )
    return 0


def _compare_rank_ends(
    source: ConversionInput, target: Path, notices: list[Notice], progress: Progress
) -> list[dict[str, Any]]:
    """Compares the end of each rank in the output with the measurement, and adds a notice where
    they differ much; for files of other writers, with the files as they were.
    """
    from traceloom.formats.chakra.nodes import find_file_sets, read_workload
    from traceloom.system import units
    from traceloom.trace.notice import Notice
    from traceloom.workload.simulate.astra_sim import run

    graph = source.graph()
    if graph.foreign.height and source.path.is_dir():
        progress.show("comparing with the files")
        try:
            ends = [
                max(run.simulate_on_plain_network(read_workload(place)))
                for path, groups in ((source.path, source.groups), (target, None))
                for place in find_file_sets([path], groups)
            ]
        except TraceloomError:  # ASTRA-sim does not take the one or the other
            return []
        if ends[0] != ends[1]:
            message = (
                f"on a ring of 50 GB/s what was written ends after {units.format_duration(ends[1])}, the files "
                f"as they were after {units.format_duration(ends[0])} ({ends[1] / max(ends[0], 1) - 1:+.1%})"
            )
            notices.append(Notice("target-times-differ", "warning", message))
        return []
    measured = run.find_measured_end_times(graph)
    if not graph.delays.height or not measured:  # nothing was measured
        return []
    progress.show("comparing with the measurement")
    try:
        (files,) = find_file_sets([target])
        simulated = run.simulate_with_recorded_transfers(read_workload(files))
    except TraceloomError as error:
        notices.append(
            Notice(
                "target-does-not-run", "error", f"what was written does not run: {error.message}"
            )
        )
        return []
    ranks = sorted(graph.nodes["rank"].drop_nulls().unique().to_list())  # one file each
    rank_ends = [
        {
            "rank": rank,
            "measured_ns": (measured_ns := measured[rank]),
            "simulated_ns": simulated_ns,
            "difference": simulated_ns / max(measured_ns, 1) - 1,
        }
        for rank, simulated_ns in zip(ranks, simulated, strict=True)
        if rank in measured
    ]
    worst = max(rank_ends, key=lambda end: abs(end["difference"]))
    if abs(worst["difference"]) > run.MAX_END_DEVIATION:
        message = (
            f"with recorded transfers rank {worst['rank']} ends {worst['difference']:+.0%} off the measurement: a rank "
            "there runs one CPU operation, one GPU operation and one communication at a time"
        )
        notices.append(Notice("target-times-differ", "warning", message))
    return rank_ends


def _write_converted(
    source: ConversionInput, target: Path, format_name: str, args: argparse.Namespace
) -> tuple[list[Path], int, list[Notice], str]:
    """Writes the output; returns the files, the number of nodes, the notices, and the next useful
    command.
    """
    quoted = shlex.quote(str(target))
    if args.target == "astra-sim":
        from traceloom.workload.chakra.astra_sim import to_astra_sim

        result = to_astra_sim(source.graph(), gpu_only=args.gpu_only)
        written = result.write(target, force=args.force)
        return (
            written,
            sum(file.nodes.height for file in result.files),
            [*source.notices, *result.notices],
            f"traceloom validate {quoted} --target astra-sim",
        )
    if format_name == "directory":
        written = source.write_directory(target, args.only, force=args.force)
        return written, source.nodes, source.notices, f"traceloom validate {quoted}"
    if format_name == "chakra":
        source.write_file(target, args.only, force=args.force)
        binary = target.name.lower().endswith((".et", ".et.gz"))
        following = (
            f"traceloom validate {quoted}" if binary else f"traceloom convert {quoted} back.et"
        )
        return [target], source.nodes, source.notices, following
    graph = source.graph()
    if format_name == "graph":
        from traceloom.graph import graph as graph_store

        graph_store.save(graph, target, force=args.force)
        return [target], graph.nodes.height, source.notices, f"traceloom convert {quoted} workload/"
    from traceloom.report.exports.perfetto import write_graph
    from traceloom.system.gzip_stream import write_gzip

    write_gzip(target, lambda handle: write_graph(graph, handle), force=args.force)
    return [target], graph.nodes.height, source.notices, "open it at ui.perfetto.dev"
