"""`traceloom fleet query` and `compact`: what is measured now, and the nightly work on the tables by day."""

from __future__ import annotations

import argparse

from traceloom.cli import options as types
from traceloom.cli.verb_actions import VerbAction, VerbOption, declaring
from traceloom.model import units

_NOTHING = """\
Nothing of that is there now.
Next: traceloom fleet hosts"""


def _query(args: argparse.Namespace) -> int:
    from traceloom.cli.fleet import client_of, shown

    wanted = {name: str(value) for name in ("by", "job", "host", "top") if (value := getattr(args, name))}
    answer = client_of(args).get("query", **wanted)
    heads = (args.by, "host" if args.by != "host" else "jobs", "devices", "busy", "power", "memory", "step", "heard")
    rows = []
    for row in answer["rows"]:
        memory = units.written(row["memory_bytes"], "bytes")
        if row["memory_limit_bytes"] is not None:
            memory += f" of {units.written(row['memory_limit_bytes'], 'bytes')}"
        rows.append(
            (
                row[args.by],
                row["host" if args.by != "host" else "job"] or units.NONE,
                str(row["devices"]),
                units.written(row["busy"], "share"),
                units.NONE if row["power_w"] is None else f"{units.number(round(row['power_w']))} W",
                memory,
                units.written(None if row["step_s"] is None else round(row["step_s"] * 1e9), "time"),
                f"{(answer['at_ns'] - row['heard_ns']) / 1e9:.0f} s ago",
            )
        )
    return shown(args, answer, heads, rows, _NOTHING)


def _compact(args: argparse.Namespace) -> int:
    from traceloom.cli.fleet import client_of, shown

    client = client_of(args)
    client.timeout_s = 3600.0  # all tables are read
    answer = client.post("compact")
    if args.json:
        return shown(args, answer, (), ())
    if not args.quiet:
        print(f"The tables are compacted; it took {answer['seconds']:.1f} s.")
    return 0


NOW_ACTIONS = {
    "query": VerbAction(
        "show what jobs, hosts or devices do now",
        "traceloom fleet query --by host --json\nthen: traceloom trace --server URL --job JOB --steps 3",
        declaring(
            VerbOption(
                "--by", choices=("job", "host", "device"), default="job", help="what a row is of (default: job)"
            ),
            *(
                VerbOption(
                    f"--{name}", default="", metavar=name.upper(),
                    help=f"only these {name}s; `*` and `?` stand for any signs",
                )
                for name in ("job", "host")
            ),
            VerbOption("--top", type=types.count, default=50, metavar="N", help="so many rows (default: 50)"),
        ),
        _query,
    ),
    "compact": VerbAction(
        "make large files of the tables' small ones, and remove what was kept long enough; done every night by itself",
        "traceloom fleet compact\nthen: traceloom fleet check", lambda _: None, _compact,
    ),
}  # fmt: skip
