"""`traceloom trace --server`: asks the fleet's service for a trace of a job on all of its hosts."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from traceloom.cli.trace import download
from traceloom.collect.client import FleetClient
from traceloom.errors import CaptureError, InputError, OutputError, PartialError, UsageError
from traceloom.harmless import harmless

_LOOK_S = 0.5
_AWAY_S = 120.0  # that a service may take to be started again


def run(args: argparse.Namespace, client: FleetClient, wanted: dict[str, Any]) -> int:
    """Ask, follow it to its end, and fetch the capture where `--output` says so; returns the exit code.

    Raises:
        UsageError: `wrong-usage`.
        CaptureError: `nothing-traced`.
        PartialError: `partly-traced`: some of it is missing.
        OutputError: `file-exists`, `cannot-write`.
    """
    from traceloom.cli.fleet import follow_up

    if args.list:
        return _list(args, client)
    if args.cancel:
        answer = client.delete(f"requests/{args.cancel}")
        print(json.dumps(answer, indent=2) if args.json else f"Request {answer['id']} is cancelled.")
        return 0
    if not args.job:
        raise UsageError("a fleet traces jobs: --job JOB", slug="wrong-usage", hint="`traceloom fleet jobs` lists them")
    output = Path(args.output) if args.output else None
    if output is not None and (output.exists() or output.is_symlink()):
        raise OutputError("there is something already", slug="file-exists", where=args.output, hint="name another -o")
    start = "step" if args.by_step else "instant"
    request = client.post("requests", {"wanted": wanted, "choose": args.choose or "", "start": start})
    try:
        request = _watched(args, client, request)
    except KeyboardInterrupt:
        client.delete(f"requests/{request['id']}")
        raise
    if args.json:
        print(json.dumps(request, indent=2))
    if args.by_step and not args.quiet:
        step = f"All began with step {request['start_step']}." if request["start_step"] else ""
        print(harmless(" ".join(filter(None, (step, request["start_detail"])))), file=sys.stderr)
    if request["state"] in {"failed", "cancelled"}:
        detail = request["detail"] or request["reason"] or request["state"]
        hint = "; ".join(f"{host['host']}: {host['detail']}" for host in request["hosts"] if host["detail"])[:500]
        raise CaptureError(f"nothing was traced: {detail}", slug="nothing-traced", hint=hint)
    if output is not None:
        route = f"captures/{request['capture']}"

        def fetch(name: str, path: Path) -> None:
            with path.open("xb") as file:
                client.fetch(f"{route}/files/{name}", file)

        download(output, client.get(route)["files"], fetch)
    if not args.quiet and not args.json:
        print(f"Capture {request['capture']} is in the fleet's store, analysed.")
        print(follow_up(args, f"Look: traceloom fleet report {request['capture']} -o report.html"))
        if output is not None:
            print(f"Look: traceloom report {shlex.quote(args.output)}")
    if request["state"] == "partial":
        raise PartialError(f"some of it was not traced: {request['detail']}", slug="partly-traced")
    return 0


def _watched(args: argparse.Namespace, client: FleetClient, request: dict[str, Any]) -> dict[str, Any]:
    """Follow a request to its end; each change of it or of a host is a line."""
    shown: dict[str, str] = {}
    began, away_until = time.monotonic(), 0.0
    while True:
        lines = {"": request["state"]}
        for host in request["hosts"]:
            detail = f"  {host['detail']} ({host['reason']})" if host["detail"] else ""
            lines[host["host"]] = f"{host['state']}{detail}"
        for name, line in lines.items():
            if shown.get(name) != line and not args.quiet:
                text = f"{time.monotonic() - began:6.1f} s  {name or 'request':<16} {line}"
                print(harmless(text), file=sys.stderr, flush=True)
        shown = lines
        if request["state"] in {"done", "partial", "failed", "cancelled"}:
            return request
        time.sleep(_LOOK_S)
        try:
            request = client.get(f"requests/{request['id']}")
            away_until = 0.0
        except InputError as error:
            if error.slug not in {"no-service", "not-leading"} or (away_until and time.monotonic() > away_until):
                raise
            away_until = away_until or time.monotonic() + _AWAY_S


def _list(args: argparse.Namespace, client: FleetClient) -> int:
    requests = client.get("requests")["requests"]
    if args.json:
        print(json.dumps(requests, indent=2))
        return 0
    for request in requests:
        asked = datetime.fromtimestamp(request["asked_ns"] / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        job = request["wanted"]["job"]
        print(
            harmless(f"{request['id']}  {asked}  {job}, by {request['who']}: {request['state']}  {request['capture']}")
        )
    if not requests:
        print("No requests.")
    return 0
