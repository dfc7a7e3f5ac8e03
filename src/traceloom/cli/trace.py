"""`traceloom trace`: traces running processes through the host agent or the fleet's service."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.cli import options as types
from traceloom.cli.upload import FleetClient, create_fleet_client, insert_server_options
from traceloom.errors import CaptureError, InputError, OutputError, PartialError, UsageError
from traceloom.system.sanitize import sanitize

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from rich.text import Text

    from traceloom.server.client import AgentClient


DESCRIPTION = (
    "Trace a job that runs, without stopping or changing it: the host's agent asks PyTorch's own profiler in its "
    'processes, verifies what they write, and hands it over. The job needs `eval "$(traceloom agent env)"` before it '
    "starts, and an agent that runs; one that nobody prepared is traced with `--attach`."
)
EXAMPLES = """\
examples:
  traceloom trace --job slurm-42 --steps 3 -o run        three steps of all its ranks on this host
  traceloom trace --job slurm-42 --rank 0,3 --duration 500ms -o run
  traceloom trace --pid 4711 --steps 3 --shapes -o run   a process, or a launcher's children
  traceloom trace --pid 4711 --duration 1s --attach -o run    a process that was started without preparation
  traceloom trace --pid 4711 --steps 3 --attach --profilers timeline,memory -o run   and CUDA's allocations
  traceloom trace --server https://fleet:9466 --job slurm-42 --steps 3     a job on all of its hosts
  traceloom trace --list                                 requests and how far they are
  traceloom trace --cancel 3f0a9c1be77d
"""
_POLL_S = 0.25
_MAX_AWAY_S = 60.0  # max time for an agent to restart
_REQUEST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_FILE_NAME = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9._@+=-]{0,199}(/[A-Za-z0-9_][A-Za-z0-9._@+=-]{0,199}){0,5}"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_argument_group("of what")
    targets.add_argument(
        "--pid",
        type=types.parse_pids,
        metavar="PIDS",
        help="processes; a launcher's chooses its children",
    )
    targets.add_argument("--job", metavar="JOB", help="a job, as `traceloom agent ps` shows it")
    targets.add_argument(
        "--rank", type=types.parse_ranks, metavar="RANKS", help="of these ranks alone"
    )
    targets.add_argument(
        "--host", metavar="HOST", help="all that can be traced on this host, by its name"
    )
    window = parser.add_argument_group("what")
    window.add_argument(
        "--steps",
        type=types.parse_count,
        metavar="N",
        help="so many steps: all ranks begin with one step where the steps of all are known, else at one instant",
    )
    window.add_argument(
        "--duration", type=types.parse_duration, metavar="T", help="so long, as 500ms or 2s"
    )
    window.add_argument(
        "--at", metavar="TIME", help="begin then, as +30s or 2026-01-31T12:00 (default: at once)"
    )
    window.add_argument(
        "--profilers",
        default="timeline",
        metavar="NAMES",
        help="timeline, stacks, dump, allocations, launches, memory, telemetry; several with commas "
        "(default: timeline)",
    )
    window.add_argument("--shapes", action="store_true", help="shapes of tensors")
    window.add_argument(
        "--stacks", action="store_true", help="Python stacks, which slow the job down meanwhile"
    )
    window.add_argument(
        "--attach",
        action="store_true",
        help="also processes that nobody prepared: each stands still for about a millisecond, and runs a text of the "
        "agent's; the profiler `memory` needs it",
    )
    fleet = parser.add_argument_group("of a fleet")
    fleet.add_argument(
        "--server",
        metavar="URL",
        help="ask this fleet's service instead of the agent of this host: for a job on all of its hosts",
    )
    fleet.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="what says who asks (default: TRACELOOM_TOKEN)",
    )
    fleet.add_argument(
        "--choose",
        choices=("slowest-and-median",),
        help="of a job only the slowest rank and one in the middle",
    )
    parser.add_argument("--list", action="store_true", help="show requests and how far they are")
    parser.add_argument("--cancel", metavar="REQUEST", help="cancel a request")
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="where the capture goes: a new directory"
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="the agent's socket (default: the user's own, else root's)"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="agent.toml, where it says where the socket is"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the request as JSON when it has ended"
    )
    types.add_verbosity_options(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code.

    Raises:
        UsageError: `wrong-usage`, `bad-time`.
        OutputError: `file-exists`: the output exists already.
        CaptureError: `nothing-traced`: nothing was kept.
        PartialError: `partly-traced`: some of it was kept.
    """
    if args.server:
        return run_fleet_trace(
            args,
            create_fleet_client(args),
            {} if args.list or args.cancel else _build_request(args),
        )
    from traceloom.cli.agent import create_agent_client

    client = create_agent_client(args)
    if args.list:
        requests = client.get("requests")["requests"]
        if args.json:
            print(json.dumps(requests, indent=2))
            return 0
        from traceloom.report.views import terminal

        terminal.print_lines(lambda _: _render_requests(requests), sys.stdout)
        return 0
    if args.cancel:
        if not _REQUEST_NAME.fullmatch(args.cancel):
            raise UsageError(
                f"`{args.cancel}` is no request", slug="wrong-usage", hint="traceloom trace --list"
            )
        answer = client.delete(f"requests/{args.cancel}")
        print(
            json.dumps(answer, indent=2) if args.json else f"Request {answer['id']} is cancelled."
        )
        return 0
    return _run_agent_trace(args, client)


def _build_request(args: argparse.Namespace) -> dict[str, Any]:
    if (args.steps is None) == (args.duration is None):
        raise UsageError(
            "a trace needs either --steps N or --duration T",
            slug="wrong-usage",
            hint="see traceloom trace --help; --list shows requests",
        )
    if not (args.pid or args.job or args.rank or args.host):
        raise UsageError(
            "of what: --pid, --job, --rank or --host?",
            slug="wrong-usage",
            hint="traceloom agent ps",
        )
    body: dict[str, Any] = {
        "pids": args.pid or (),
        "job": args.job or "",
        "ranks": args.rank or (),
        "host": args.host or "",
        "profilers": args.profilers.split(","),
        "shapes": args.shapes,
        "stacks": args.stacks,
        "at_ns": _parse_time(args.at) if args.at else 0,
        "attach": args.attach,
    }
    body |= {"steps": args.steps} if args.steps is not None else {"duration_s": args.duration}
    return body


def _run_agent_trace(args: argparse.Namespace, client: AgentClient) -> int:
    body = _build_request(args)
    if args.output is None:
        raise UsageError("where is it to go?", slug="wrong-usage", hint="-o DIR")
    output = Path(args.output)
    if output.exists() or output.is_symlink():
        raise OutputError(
            "there is something already",
            slug="file-exists",
            where=args.output,
            hint="name another -o",
        )
    if not output.parent.is_dir():
        raise OutputError(
            "there is no such directory", slug="cannot-write", where=str(output.parent)
        )
    request = client.post("requests", body)
    try:
        request = _follow_progress(args, client, request)
    except KeyboardInterrupt:
        client.delete(f"requests/{request['id']}")
        raise
    kept_targets = [target for target in request["targets"] if target["state"] == "kept"]
    if args.json:
        print(json.dumps(request, indent=2))
    lost = [target for target in request["targets"] if target["state"] != "kept"]
    reasons = "; ".join(
        dict.fromkeys(
            f"{target['stem']}: {target['detail']} ({target['reason']})" for target in lost
        )
    )
    if not kept_targets:
        raise CaptureError(f"nothing was traced: {reasons}", slug="nothing-traced")
    download(
        output,
        request["files"],
        lambda name, path: client.fetch(f"requests/{request['id']}/files/{name}", path),
        hint=f"the agent keeps it: traceloom trace --list shows request {request['id']}",
    )
    if not args.quiet and not args.json:
        print(
            f"{output}: {sum(target['bytes'] or 0 for target in kept_targets):,} bytes of {len(kept_targets)} profiles"
        )
        for target in kept_targets:
            if target["pause_ns"] is not None:  # the time that attaching cost the process
                line = f"{target['stem']} {target['profiler']}: stopped for {target['pause_ns'] / 1e6:.1f} ms"
                if target["held_ns"]:
                    line += f", and {target['held_ns'] / 1e6:.1f} ms to begin, to end and to write"
                print(line)
        snapshots = [
            output / target["file"] for target in kept_targets if target["profiler"] == "memory"
        ]
        if any(target["profiler"] == "timeline" for target in kept_targets) or not snapshots:
            print(f"Look: traceloom report {shlex.quote(args.output)}")
        if snapshots:
            print(f"Look: traceloom memory {shlex.join(map(str, snapshots))}")
    if lost:
        raise PartialError(f"some of it was not traced: {reasons}", slug="partly-traced")
    return 0


def _follow_progress(
    args: argparse.Namespace, client: AgentClient, request: dict[str, Any]
) -> dict[str, Any]:
    """Follows a request to its end; prints a line for each change of a target."""
    reported: dict[tuple[str, str], tuple[str, str]] = {}
    began = time.monotonic()
    while True:
        for target in request["targets"]:
            key, now = (target["stem"], target["profiler"]), (target["state"], target["reason"])
            if reported.get(key) != now and not args.quiet:
                reported[key] = now
                line = f"{time.monotonic() - began:6.1f} s  {_format_target(target)}"
                print(sanitize(line), file=sys.stderr, flush=True)
        if request["done"]:
            return request
        time.sleep(_POLL_S)
        request = _poll_request(args, client, request["id"])


def _poll_request(args: argparse.Namespace, client: AgentClient, request: str) -> dict[str, Any]:
    """Returns the state of a request; waits while the agent restarts, since it continues with the
    request.
    """
    away_until: float | None = None
    while True:
        try:
            answer: dict[str, Any] = client.get(f"requests/{request}")
        except InputError as error:  # noqa: PERF203  (it is retried)
            if error.slug != "no-agent" or (
                away_until is not None and time.monotonic() > away_until
            ):
                raise
            if away_until is None:
                away_until = time.monotonic() + _MAX_AWAY_S
                if not args.quiet:
                    print(
                        f"The agent is away; request {request} goes on when it is back.",
                        file=sys.stderr,
                        flush=True,
                    )
            time.sleep(_POLL_S)
        else:
            return answer


def _format_target(target: dict[str, Any]) -> str:
    """Formats a target, its state in the terms of the HTTP interface, and the reason: `traceloom
    explain` explains the slug.
    """
    reason = f"  {target['detail']} ({target['reason']})" if target["reason"] else ""
    return f"{target['stem']:<10} {target['profiler']:<11} {target['state']:<9}{reason}".rstrip()


def download(
    output: Path, names: Collection[str], fetch: Callable[[str, Path], object], hint: str = ""
) -> None:
    """Downloads all files of a capture, including those in its folders, next to the output, and
    then moves them there at once.

    Raises:
        OutputError: `cannot-write`; `unsafe-name`: a file of the response would be outside of the
            directory. Nothing is written then.
    """
    for name in names:
        if not _FILE_NAME.fullmatch(name):  # no file of a response leaves the directory
            raise OutputError(f"a file of the capture is called {name[:80]!r}", slug="unsafe-name")
    try:
        directory = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            for name in names:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                fetch(name, directory / name)
            directory.chmod(0o755)
            directory.rename(output)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OutputError(
            f"the capture cannot be written: {reason}",
            slug="cannot-write",
            where=str(output),
            hint=hint,
        ) from error


def _parse_time(text: str) -> int:
    """Parses `+30s` from now, or a date and time (local if it has no zone); returns ns since the
    epoch.
    """
    if text.startswith("+"):
        try:
            return time.time_ns() + round(types.parse_duration(text[1:]) * 1e9)
        except argparse.ArgumentTypeError:
            raise UsageError(f"`{text}` is no time, as +30s", slug="bad-time") from None
    try:
        return int(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1e9)
    except (ValueError, OverflowError):
        raise UsageError(
            f"`{text}` is no time, as +30s or 2026-01-31T12:00", slug="bad-time"
        ) from None


def _render_requests(requests: list[dict[str, Any]]) -> Iterator[Text]:
    from rich.text import Text

    for request in requests:
        spec = request["spec"]
        window = (
            f"{spec['steps']} steps" if spec["steps"] is not None else f"{spec['duration_s']:g} s"
        )
        when = (
            datetime.fromtimestamp(request["asked_ns"] / 1e9)
            .astimezone()
            .strftime("%Y-%m-%d %H:%M:%S")
        )
        yield Text(f"{request['id']}  {when}  {window}, by {request['who']}", "bold")
        if request["trigger"] is not None:
            yield Text(sanitize(f"  as {request['trigger']['what']}"))
        for target in request["targets"]:
            yield Text(f"  {_format_target(target)}")
    if not requests:
        yield Text("No requests.", "dim")


_FLEET_POLL_S = 0.5
_FLEET_GIVE_UP_S = 120.0  # max time for a service to restart


def run_fleet_trace(args: argparse.Namespace, client: FleetClient, spec: dict[str, Any]) -> int:
    """Sends the request, follows it to its end, and downloads the capture to `--output`; returns
    the exit code.

    Raises:
        UsageError: `wrong-usage`.
        CaptureError: `nothing-traced`.
        PartialError: `partly-traced`: some of it is missing.
        OutputError: `file-exists`, `cannot-write`.
    """
    if args.list:
        return _list(args, client)
    if args.cancel:
        answer = client.delete(f"requests/{args.cancel}")
        print(
            json.dumps(answer, indent=2) if args.json else f"Request {answer['id']} is cancelled."
        )
        return 0
    if not args.job:
        raise UsageError(
            "a fleet traces jobs: --job JOB",
            slug="wrong-usage",
            hint="`traceloom fleet jobs` lists them",
        )
    output = Path(args.output) if args.output else None
    if output is not None and (output.exists() or output.is_symlink()):
        raise OutputError(
            "there is something already",
            slug="file-exists",
            where=args.output,
            hint="name another -o",
        )
    start = "step" if args.steps and not args.at else "instant"
    request = client.post("requests", {"spec": spec, "choose": args.choose or "", "start": start})
    try:
        request = _watch_fleet_trace(args, client, request)
    except KeyboardInterrupt:
        client.delete(f"requests/{request['id']}")
        raise
    if args.json:
        print(json.dumps(request, indent=2))
    if start == "step" and not args.quiet:
        step = f"All began with step {request['start_step']}." if request["start_step"] else ""
        print(sanitize(" ".join(filter(None, (step, request["start_detail"])))), file=sys.stderr)
    if request["state"] in {"failed", "cancelled"}:
        detail = request["detail"] or request["reason"] or request["state"]
        hint = "; ".join(
            f"{host['host']}: {host['detail']}" for host in request["hosts"] if host["detail"]
        )[:500]
        raise CaptureError(f"nothing was traced: {detail}", slug="nothing-traced", hint=hint)
    if output is not None:
        route = f"captures/{request['capture']}"

        def fetch(name: str, path: Path) -> None:
            with path.open("xb") as file:
                client.fetch(f"{route}/files/{name}", file)

        download(output, client.get(route)["files"], fetch)
    if not args.quiet and not args.json:
        print(f"Capture {request['capture']} is in the fleet's store, analysed.")
        print(
            insert_server_options(
                args, f"Look: traceloom fleet report {request['capture']} -o report.html"
            )
        )
        if output is not None:
            print(f"Look: traceloom report {shlex.quote(args.output)}")
    if request["state"] == "partial":
        raise PartialError(f"some of it was not traced: {request['detail']}", slug="partly-traced")
    return 0


def _watch_fleet_trace(
    args: argparse.Namespace, client: FleetClient, request: dict[str, Any]
) -> dict[str, Any]:
    """Follows a request to its end; prints a line for each change of it or of a host."""
    reported: dict[str, str] = {}
    began, away_until = time.monotonic(), 0.0
    while True:
        lines = {"": request["state"]}
        for host in request["hosts"]:
            detail = f"  {host['detail']} ({host['reason']})" if host["detail"] else ""
            lines[host["host"]] = f"{host['state']}{detail}"
        for name, line in lines.items():
            if reported.get(name) != line and not args.quiet:
                text = f"{time.monotonic() - began:6.1f} s  {name or 'request':<16} {line}"
                print(sanitize(text), file=sys.stderr, flush=True)
        reported = lines
        if request["state"] in {"done", "partial", "failed", "cancelled"}:
            return request
        time.sleep(_FLEET_POLL_S)
        try:
            request = client.get(f"requests/{request['id']}")
            away_until = 0.0
        except InputError as error:
            if error.slug not in {"no-service", "not-leading"} or (
                away_until and time.monotonic() > away_until
            ):
                raise
            away_until = away_until or time.monotonic() + _FLEET_GIVE_UP_S


def _list(args: argparse.Namespace, client: FleetClient) -> int:
    requests = client.get("requests")["requests"]
    if args.json:
        print(json.dumps(requests, indent=2))
        return 0
    for request in requests:
        requested_at = (
            datetime.fromtimestamp(request["asked_ns"] / 1e9)
            .astimezone()
            .strftime("%Y-%m-%d %H:%M:%S")
        )
        job = request["spec"]["job"]
        print(
            sanitize(
                f"{request['id']}  {requested_at}  {job}, by {request['who']}: {request['state']}  {request['capture']}"
            )
        )
    if not requests:
        print("No requests.")
    return 0
