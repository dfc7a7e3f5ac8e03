"""`traceloom generate`: generates small workloads with known results."""

import argparse
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from traceloom.cli import options as types, outputs
from traceloom.errors import UsageError, nearest

DESCRIPTION = "Make a small workload with known answers, one Chakra file per rank."
EXAMPLES = """\
examples:
  traceloom generate collective --collective all_gather --size 4MiB --ranks 16 -o gather/
  traceloom generate collective --algorithm ring --ranks 8 -o ring/
  traceloom generate pipeline --ranks 4 --micro-batches 16 --schedule gpipe -o pipe/
  traceloom generate transformer --tensor-parallel 4 --layers 8 --hidden 4096 -o step/
"""
_KINDS = ("collective", "pipeline", "transformer")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=_KINDS, metavar="KIND", help=", ".join(_KINDS))
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="the directory to write"
    )
    number, real = types.parse_count, types.parse_positive
    shared = parser.add_argument_group("collective and pipeline")
    shared.add_argument(
        "--ranks", type=number, metavar="N", help="how many ranks (collective: 8, pipeline: 4)"
    )
    shared.add_argument(
        "--size",
        type=types.parse_size,
        metavar="BYTES",
        help="bytes of a collective or of activations, as 1MiB or 64kB (1MiB)",
    )
    collective = parser.add_argument_group("collective")
    collective.add_argument(
        "--collective",
        metavar="NAME",
        help="all_reduce, all_gather, reduce_scatter, ... (all_reduce)",
    )
    collective.add_argument(
        "--algorithm",
        metavar="NAME",
        help="one-node, or the messages of ring, direct, halving-doubling, tree, double-tree, two-level (one-node)",
    )
    collective.add_argument(
        "--compute-us",
        type=types.parse_whole_number,
        metavar="US",
        help="computation before it, and per reduction (0)",
    )
    both = parser.add_argument_group("pipeline and transformer")
    both.add_argument(
        "--micro-batches",
        type=number,
        metavar="N",
        help="micro-batches of a step (8; transformer: 4)",
    )
    both.add_argument("--schedule", metavar="NAME", help="1f1b or gpipe (1f1b)")
    model = parser.add_argument_group("transformer")
    for name, description in (
        ("data-parallel", "copies of the model (2)"),
        ("tensor-parallel", "ranks that share every layer (2)"),
        ("pipeline-parallel", "stages (2)"),
        ("layers", "layers (4)"),
        ("hidden", "width (1024)"),
    ):
        model.add_argument(f"--{name}", type=number, metavar="N", help=description)
    model.add_argument(
        "--tflops", type=real, metavar="X", help="operations per second of a rank, in 10^12 (300)"
    )
    model.add_argument(
        "--memory-gbps",
        type=real,
        metavar="X",
        help="bytes per second of its memory, in 10^9 (2000)",
    )
    group = parser.add_argument_group("more")
    group.add_argument(
        "--json", action="store_true", help="print what is known of the workload as JSON"
    )
    group.add_argument("--force", action="store_true", help="overwrite")
    types.add_verbosity_options(group, "no closing line")


def run(args: argparse.Namespace) -> int:
    """Generates and writes; returns the exit code."""
    from traceloom.formats.chakra.files import RANK_FILES_PATTERN
    from traceloom.workload.chakra import generate

    outputs.resolve_output_format(args, {}, RANK_FILES_PATTERN, default_to_directory=True)
    kinds: dict[str, tuple[Any, Any]] = {
        "collective": (generate.CollectiveOptions, generate.generate_collectives),
        "pipeline": (generate.PipelineOptions, generate.generate_pipeline),
        "transformer": (generate.TransformerOptions, generate.generate_transformer),
    }
    options, make = kinds[args.kind]
    accepted = {field.name for field in fields(options)}
    field_names = {field.name for kind, _ in kinds.values() for field in fields(kind)}
    given_options = {
        name: getattr(args, name) for name in field_names if getattr(args, name) is not None
    }
    if unknown_options := sorted(given_options.keys() - accepted):
        option = "--" + unknown_options[0].replace("_", "-")
        raise UsageError(
            f"{option} does not go with {args.kind}", slug="wrong-usage", hint="leave it away"
        )
    for name, names in {
        "collective": generate.KINDS,
        "algorithm": generate.ALGORITHMS,
        "schedule": generate.SCHEDULES,
    }.items():
        if name in given_options and given_options[name] not in names:
            raise UsageError(
                f"`{given_options[name]}` is no {name}",
                slug="wrong-usage",
                hint=nearest(given_options[name], names) + f"there are {', '.join(names)}",
            )
    if given_options.get("ranks", 2) < 2:
        raise UsageError(
            "a single rank has no peer to communicate with",
            slug="wrong-usage",
            hint="give --ranks 2 or more",
        )
    generated: generate.Generated = make(options(**given_options))
    files = generate.write_generated(generated, args.output, force=args.force)
    if args.json:
        import msgspec

        from traceloom.system.text import encode_json

        sys.stdout.buffer.write(
            msgspec.json.format(encode_json(generated.to_dict()), indent=1) + b"\n"
        )
    elif not args.quiet:
        for name, value in generated.totals.items():
            print(f"{name:>18}  {_format_value(value)}")
    nodes = sum(len(program) for program in generated.programs)
    written = f"Wrote {args.output} ({len(files)} files, {nodes:,} nodes)"
    outputs.print_messages(
        args, f"{written}; next: traceloom validate {shlex.quote(str(args.output))}"
    )
    return 0


def _format_value(value: Any) -> str:
    """Formats a value; one that is equal for all ranks appears once."""
    if isinstance(value, list) and value and all(element == value[0] for element in value):
        return f"{_format_value(value[0])} on each of {len(value)} ranks"
    if isinstance(value, list):
        others_note = f" and {len(value) - 8} more" if len(value) > 8 else ""
        return ", ".join(_format_value(element) for element in value[:8]) + others_note
    if isinstance(value, dict):
        return (
            ", ".join(f"{name} {_format_value(element)}" for name, element in value.items())
            or "none"
        )
    return f"{value:,}" if isinstance(value, int) else str(value)
