"""`traceloom convert`: workloads from one form into another."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from traceloom.cli.progress import Progress
from traceloom.errors import UsageError

if TYPE_CHECKING:
    from traceloom.chakra.conversion import Source
    from traceloom.model import Notice

_PERFETTO = (".perfetto.json", ".perfetto.json.gz")
_CHAKRA = (".et", ".et.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz")
_SHOWN_NOTICES = 10
_EXAMPLES = """\
examples:
  traceloom convert workload.0.et workload.0.jsonl.gz      to text, without loss, and back
  traceloom convert job.graph workload/                    one .et per rank, with their groups
  traceloom convert workload/ job.graph                    files of ranks into one graph
  traceloom convert job.graph job.perfetto.json.gz         for ui.perfetto.dev
  traceloom convert workload/ network/ --only communication
  traceloom convert job.graph sim/ --target astra-sim      what ASTRA-sim accepts
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare the options of the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "convert",
        help="turn workloads into another form",
        description="Turn a graph or Chakra files into another form, told by the ending of the output.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "input",
        type=Path,
        metavar="INPUT",
        help="a .graph, a Chakra file (.et, .json, .jsonl, each also .gz), or a directory of files PREFIX.RANK.et",
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="a .graph, a Chakra file, .perfetto.json[.gz], or a directory (a name without ending), one file per rank",
    )
    parser.add_argument(
        "--only", choices=("communication", "compute"), help="keep one side; what it waits for is kept transitively"
    )
    parser.add_argument("--target", choices=("chakra", "astra-sim"), default="chakra", help="who is to read it")
    parser.add_argument(
        "--gpu-only", action="store_true", help="for astra-sim: no nodes of the host; their time and order stay"
    )
    parser.add_argument(
        "--strict", action="store_true", help="refuse files that are cut, instead of taking what is whole"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the output")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress, no closing line")
    parser.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    return parser


@dataclass
class _Done:
    """What was written."""

    path: Path
    files: list[Path]
    next_step: str
    nodes: int = 0
    notices: list[Notice] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "output": str(self.path),
            "files": [str(file) for file in self.files],
            "bytes": sum(file.stat().st_size for file in self.files),
            "nodes": self.nodes,
            "notices": [notice.to_dict() for notice in self.notices],
        }


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit code."""
    from traceloom import files
    from traceloom.chakra import conversion

    target = Path(args.output)
    kind = _kind(args.output, target)
    _check(args, kind)
    if kind == "directory":
        files.check_directory(target, conversion.DIRECTORY_FILES, force=args.force)
    else:
        files.check_free(target, force=args.force)
    with (
        Progress(shown=not args.quiet) as progress,
        conversion.Source(args.input, args.strict, progress.say) as source,
    ):
        done = _converted(source, target, kind, args)
    _tell(done, args)
    return 0


def _kind(name: str, target: Path) -> str:
    """What the output is: `graph`, `perfetto`, `chakra` or `directory`."""
    lower = target.name.lower()
    if name.endswith("/") or target.is_dir() or not target.suffix:
        return "directory"
    if lower.endswith(".graph"):
        return "graph"
    if lower.endswith(_PERFETTO):
        return "perfetto"
    if lower.endswith(_CHAKRA):
        return "chakra"
    raise UsageError(
        f"`{target}` does not tell which form to write",
        slug="unknown-format",
        hint=f"use one of the endings .graph, {', '.join((*_CHAKRA, *_PERFETTO))}, or a directory",
    )


def _check(args: argparse.Namespace, kind: str) -> None:
    """Refuse options that do not go together."""
    if args.target == "astra-sim" and (kind != "directory" or args.only):
        message = "--target astra-sim writes a directory" if kind != "directory" else "--only does not go with --target"
        raise UsageError(message, slug="wrong-usage", hint="as in: traceloom convert job.graph sim/ --target astra-sim")
    if args.gpu_only and args.target != "astra-sim":
        raise UsageError("--gpu-only goes with --target astra-sim", slug="wrong-usage", hint="add --target astra-sim")
    if args.only and kind not in {"chakra", "directory"}:
        raise UsageError(
            "--only writes Chakra files", slug="wrong-usage", hint="name a directory or an .et file as the output"
        )


def _converted(source: Source, target: Path, kind: str, args: argparse.Namespace) -> _Done:
    if args.target == "astra-sim":
        from traceloom.chakra.astra_sim import to_astra_sim

        result = to_astra_sim(source.graph(), gpu_only=args.gpu_only)
        written = result.write(target, force=args.force)
        nodes = sum(file.nodes.height for file in result.files)
        following = f"traceloom validate {target} --target astra-sim"
        return _Done(target, written, following, nodes, [*source.notices, *result.notices])
    if kind == "graph":
        from traceloom.model import graph_store

        graph = source.graph()
        graph_store.save(graph, target, force=args.force)
        return _Done(target, [target], f"traceloom convert {target} workload/", graph.nodes.height, source.notices)
    if kind == "perfetto":
        return _perfetto(source, target, args)
    if kind == "directory":
        written = source.write_directory(target, args.only, force=args.force)
        return _Done(target, written, f"traceloom validate {target}", source.nodes, source.notices)
    source.write_file(target, args.only, force=args.force)
    step = "validate" if target.name.lower().endswith((".et", ".et.gz")) else "convert"
    return _Done(
        target,
        [target],
        f"traceloom {step} {target}" + (" back.et" if step == "convert" else ""),
        source.nodes,
        source.notices,
    )


def _perfetto(source: Source, target: Path, args: argparse.Namespace) -> _Done:
    from traceloom import files
    from traceloom.chakra.packed import packing
    from traceloom.report.exports.perfetto.graph import write_graph

    graph = source.graph()

    def produce(handle: BinaryIO) -> None:
        if not target.name.lower().endswith(".gz"):
            write_graph(graph, handle)
            return
        with packing(handle) as packed:
            write_graph(graph, packed)

    files.write(target, produce, force=args.force)
    return _Done(target, [target], "open it at ui.perfetto.dev", graph.nodes.height, source.notices)


def _tell(done: _Done, args: argparse.Namespace) -> None:
    """Notices, then what was written and what to try next."""
    from traceloom.model import units
    from traceloom.model.notice import worst_first

    if args.json:
        print(json.dumps(done.to_dict()))
        return
    if args.quiet:
        return
    notices = worst_first(tuple(done.notices))
    for notice in notices[:_SHOWN_NOTICES]:
        rank = "" if notice.rank is None else f"rank {notice.rank}: "
        print(f"{notice.severity}: {rank}{notice.message} [{notice.slug}]", file=sys.stderr)
    if len(notices) > _SHOWN_NOTICES:
        print(f"and {len(notices) - _SHOWN_NOTICES} more notices; --json has them all", file=sys.stderr)
    size = units.size(sum(file.stat().st_size for file in done.files))
    many = f", {len(done.files)} files" if len(done.files) > 1 else ""
    print(f"Wrote {done.path} ({done.nodes:,} nodes{many}, {size}); next: {done.next_step}")
