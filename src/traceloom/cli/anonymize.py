"""`traceloom anonymize`: makes traces that can be shared, with a report of what they
still reveal.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.cli import options as types, outputs
from traceloom.cli.outputs import Progress
from traceloom.errors import PartialError
from traceloom.system.sanitize import sanitize
from traceloom.system.units import format_percent

if TYPE_CHECKING:
    from traceloom.workload.anonymize.run import Anonymized

_MAX_FIELDS = 12
DESCRIPTION = (
    "Rewrite traces so that nothing in them tells whose they are; times, dependencies and the order of"
    " sizes stay. What is not understood is left out. Read the leak report before you share anything."
)
EXAMPLES = """\
examples:
  traceloom anonymize run -o shared                        a recorded run, with the defaults, which protect
  traceloom anonymize rank*.json.gz -o shared --map names.json
  traceloom anonymize workload/ -o shared --policy policy.toml --key secret.key
  traceloom anonymize trace.json.gz -o shared.json.gz --structure collapse
  traceloom anonymize run -o shared --for replay           then: traceloom replay shared
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_inputs(
        parser,
        "device traces, host traces, .et files, recorded runs, or directories of them; all ranks together",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="OUT",
        help="a file for one, else a directory",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="what becomes of names, shapes, stacks ... (TOML)",
    )
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="key of the pseudonyms, made where it is not there; default: one for this run",
    )
    parser.add_argument(
        "--map",
        type=Path,
        metavar="FILE",
        help="write what pseudonyms stand for; keep it to yourself",
    )
    parser.add_argument(
        "--structure", choices=("keep", "collapse"), help="collapse: hide how the model is built"
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=("replay",),
        help="replay: keep what operators need to run again (whole numbers, flags, choices, sizes that fit each other)",
    )
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.add_argument(
        "--force", action="store_true", help="replace what was written to OUT before"
    )
    types.add_verbosity_options(parser)


def run(args: argparse.Namespace) -> int:
    """Anonymizes; returns exit code 4 where an input was refused and the rest was done."""
    from traceloom.workload.anonymize.inputs import ENDINGS, OUTPUT_FILES
    from traceloom.workload.anonymize.policy import generate_key, read_key, read_policy
    from traceloom.workload.anonymize.run import anonymize

    outputs.resolve_output_format(
        args, dict.fromkeys(ENDINGS, "file"), OUTPUT_FILES, default_to_directory=True
    )
    policy = read_policy(args.policy).with_structure(args.structure)
    if args.purpose == "replay":
        policy = policy.for_replay()
    key, fresh = (generate_key(), False) if args.key is None else read_key(args.key)
    with Progress(enabled=not args.quiet) as progress:
        inputs = [Path(name) for name in args.inputs]
        outcome = anonymize(
            inputs, args.output, policy, key, args.map, force=args.force, on_status=progress.show
        )
    if args.json:
        import msgspec

        from traceloom.system.text import encode_json

        sys.stdout.buffer.write(msgspec.json.format(encode_json(outcome.report), indent=1) + b"\n")
    elif not args.quiet:
        for line in _render_outcome(outcome):
            print(line)
    if fresh:
        outputs.print_messages(
            args,
            f"Made the key {args.key}: whoever has it can test guesses of names; keep it to yourself.",
        )
    if args.map:
        outputs.print_messages(
            args,
            f"Wrote {args.map}: it undoes all pseudonyms and is not encrypted; keep it to yourself.",
        )
    verb = (
        "validate"
        if all(file["kind"] in ("et", "groups") for file in outcome.report["files"])
        else "report"
    )
    outputs.print_messages(
        args,
        f"Wrote {outcome.report_path}: it names what was hidden; read it, and do not share it.",
        f"Wrote {outcome.output}; look at it: traceloom {verb} {shlex.quote(str(outcome.output))}",
    )
    if outcome.refused:
        others_note = f" (and {len(outcome.refused) - 1} more)" if len(outcome.refused) > 1 else ""
        raise PartialError(f"refused: {outcome.refused[0]}{others_note}", slug="refused-input")
    return 0


def _render_outcome(outcome: Anonymized) -> Iterator[str]:
    """Yields what was left out, the results of the analyses before and after, and which texts the
    output still holds.
    """
    report = outcome.report
    read = sum(file.get("entries_in", 0) for file in report["files"])
    retained = sum(file.get("entries_out", 0) for file in report["files"])
    files = len(report["files"])
    yield f"{files} file{'' if files == 1 else 's'}, {read:,} entries read, {retained:,} written"

    yield "\nLeft out"
    rows = [(f"entries: {reason}", count) for reason, count in report["dropped_entries"].items()]
    rows += [(f"files: {reason}", count) for reason, count in report["omitted"].items()]
    unknown = [field for field in report["dropped"] if field["unknown"]]
    policy_fields = [field for field in report["dropped"] if not field["unknown"]]
    rows += [
        (f"by policy: {field['name']}", field["count"]) for field in policy_fields[:_MAX_FIELDS]
    ]
    rows += [
        (f"not understood: {field['name']}", field["count"]) for field in unknown[:_MAX_FIELDS]
    ]
    for label, count in rows:
        yield f"  {count:>10,}  {sanitize(label)}"
    hidden = max(0, len(policy_fields) - _MAX_FIELDS) + max(0, len(unknown) - _MAX_FIELDS)
    if hidden or not rows:
        yield f"  {'':>10}  and {hidden} more, in the report" if hidden else "  nothing"

    entries = report["utility"]
    yield "\nUtility: what the analyses say, before and after"
    parts: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        for part in entry["parts"]:
            parts.setdefault(part["part"], []).append(part)
    for name, several in parts.items():
        figures, equal = (
            sum(part["figures"] for part in several),
            sum(part["equal"] for part in several),
        )
        if not figures:
            continue
        worst = max(
            (part["verdict"] for part in several),
            key=("equal", "rounded", "given up", "changed").index,
        )
        off = max(part["largest_difference"] for part in several)
        detail = "" if worst == "equal" else f", {equal:,} of them equal, off by at most {off:.1%}"
        yield f"  {worst:<8} {name}: {figures:,} figure{'' if figures == 1 else 's'}{detail}"
    fresh = sorted({slug for entry in entries for slug in entry.get("new_notices", [])})
    if fresh:
        yield f"  new notices of the reader: {', '.join(fresh)}"
    if not entries:
        yield "  nothing to compare: no device trace among the inputs"

    if "replay" in report:
        yield "\nReplay: what runs again, by a dry run"
        for rank in report["replay"]["ranks"]:
            time = (
                ""
                if not rank["duration_ns"]
                else f", {format_percent(rank['run_ns'] / rank['duration_ns'])} % of their time"
            )
            other = f"; {rank['other_shapes']:,} give other shapes" if rank["other_shapes"] else ""
            yield f"  rank {rank['rank']}: {rank['run']:,} of {rank['operators']:,} operators{time}{other}"
        if report["replay"]["reason"]:
            yield f"  not tried: {sanitize(report['replay']['reason'])}"

    leaks = report["leaks"]
    counts, shapes = leaks["counts"], leaks["shapes"]
    yield "\nLeaks: distinct texts in the output"
    yield f"  {counts['pseudonym']:>10,}  pseudonyms"
    yield f"  {counts['public']:>10,}  public vocabulary"
    yield f"  {counts['format']:>10,}  words of the format"
    yield f"  {counts['other']:>10,}  others, all of them here or in the report:"
    other_texts = [leak["text"] for leak in leaks["strings"] if leak["class"] == "other"]
    for text in other_texts[:_MAX_FIELDS]:
        yield f"              {sanitize(text)[:100]}"
    if len(other_texts) > _MAX_FIELDS:
        yield f"              ... and {len(other_texts) - _MAX_FIELDS} more"
    if leaks["echoes"]:
        echoed_words = ", ".join(sanitize(echo["word"]) for echo in leaks["echoes"][:_MAX_FIELDS])
        yield f"  {len(leaks['echoes']):>10,}  words of hidden texts that stand in the output too: {echoed_words}"
    if leaks["arguments"]:
        retained = ", ".join(
            f"{count:,} {name}" for name, count in sorted(leaks["arguments"].items())
        )
        yield f"  arguments of operators: {retained}"
    if shapes["distinct"]:
        yield f"  shapes: {shapes['distinct']:,} distinct, {shapes['distinct_after']:,} after ({shapes['policy']})"
        if shapes["kept_factors"]:
            factors = ", ".join(map(str, shapes["kept_factors"]))
            yield f"  prime factors of sizes that stay, so that all fits: {factors}"
        if shapes["policy"] != "keep":
            yield f"  {len(shapes['given_away']):>10,}  hidden shapes that bytes, operations, grids or names give away"
