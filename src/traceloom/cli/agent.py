"""`traceloom agent`: runs the host agent, and asks it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.cli import options as types
from traceloom.errors import InputError, UsageError

if TYPE_CHECKING:
    from traceloom.agent.client import Client
    from traceloom.agent.config import Config, Locations

DESCRIPTION = (
    "The agent of a host: what its devices and processes do, and whose they are. `run` starts it, as root for the "
    "whole host or as a user for the own processes; the others ask it."
)
EXAMPLES = """\
examples:
  traceloom agent run                                    until Ctrl-C; --config agent.toml says more
  traceloom agent status                                 how it fares
  traceloom agent ps                                     processes with owner, rank, devices, step rate
  traceloom agent top                                    a live view
  traceloom agent query gpu_power_watts --by job --since 1h
  traceloom agent query                                  all metrics there are
  traceloom agent learn run1 --job slurm-42              FLOPs per step, types and roofline from a trace of it
  traceloom agent stacks --job slurm-42                  where its ranks are, equal stacks together
  traceloom agent doctor                                 what works here, what not, and what would help
  eval "$(traceloom agent env)"; python train.py         a job that can be asked for traces
"""
ACTIONS = {
    "run": "run the agent",
    "status": "how it fares",
    "ps": "processes with owner, rank, devices and step rate",
    "top": "a live view of devices and processes",
    "query": "what a metric was",
    "learn": "judge a job by a trace of it: FLOPs per step, element types, roofline, bytes copied",
    "stacks": "what all threads of a job or process do now, equal stacks together, ranks that are elsewhere first",
    "doctor": "what works here, what not, why, and what would help",
    "env": "the variables that prepare a job",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "action", choices=tuple(ACTIONS), metavar="|".join(ACTIONS),
        help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()),
    )  # fmt: skip
    parser.add_argument(
        "subject", nargs="?", metavar="METRIC|TRACE",
        help="of query: a metric, with or without traceloom_; none lists them. Of learn: a trace or a capture",
    )  # fmt: skip
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="agent.toml (default: /etc/traceloom/agent.toml or that of the user, where there is one)",
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="the agent's socket (default: that of root's agent, else the user's)"
    )
    running = parser.add_argument_group("run")
    running.add_argument("--tcp", metavar="ADDRESS", help="answer over TCP too, as 127.0.0.1:9465")
    running.add_argument("--simulate", type=types.count, metavar="N", help="make up N devices, to try it without any")
    asking = parser.add_argument_group("query")
    asking.add_argument(
        "--since", default="10m", metavar="TIME", help="as 90s, 10m, 3h, 1d ago, or 2026-01-31T12:00 (default: 10m)"
    )
    asking.add_argument("--until", default="", metavar="TIME", help="likewise (default: now)")
    asking.add_argument(
        "--by",
        default="",
        metavar="LABELS",
        help="sum up by these: job, rank, user, device, process, or labels of the metric",
    )
    asking.add_argument(
        "--where", default="", metavar="LABEL=VALUE", help="only what this holds for; several with commas"
    )
    asking.add_argument("--raw", action="store_true", help="counters as they are, not as rates")
    shown = parser.add_argument_group("ps, top, learn, stacks")
    shown.add_argument(
        "--job", metavar="JOB", help="of this job alone; learn and stacks need it where there are several"
    )
    shown.add_argument("--pid", type=types.count, metavar="PID", help="of stacks: of this process alone")
    shown.add_argument(
        "--native",
        action="store_true",
        help="of stacks: C and C++ too; a process stands still while it is looked at",
    )
    shown.add_argument(
        "--interval",
        type=types.positive,
        default=2.0,
        metavar="S",
        help="of top: seconds between pictures (default: 2)",
    )
    shown.add_argument("--once", action="store_true", help="of top: one picture, then the end")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    types.add_silence(parser)


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    if sys.platform != "linux":
        raise UsageError("the agent looks at Linux hosts; this is none", slug="not-linux")
    if args.subject is not None and args.action not in ("query", "learn"):
        raise UsageError(
            f"`agent {args.action}` takes neither METRIC nor TRACE", slug="wrong-usage",
            hint="see traceloom agent --help",
        )  # fmt: skip
    return {
        "run": _run, "status": _status, "ps": _processes, "top": _top, "query": _query, "learn": _learn,
        "stacks": _stacks, "doctor": _doctor, "env": _env,
    }[args.action](args)  # fmt: skip


def _config(args: argparse.Namespace) -> Config:
    from traceloom.agent import config as configuration

    usual = configuration.usual_path()
    if args.config is not None or usual.exists():
        return configuration.load(args.config or usual)
    return configuration.Config()


def _client(args: argparse.Namespace) -> Client:
    """Asks the agent that is named; else the user's own where it runs, else root's."""
    from traceloom.agent.client import Client
    from traceloom.agent.config import SYSTEM_SOCKET, locations

    own = locations(_config(args)).socket
    return Client(
        Path(args.socket) if args.socket else own if own.exists() or not SYSTEM_SOCKET.exists() else SYSTEM_SOCKET
    )


def _locations(args: argparse.Namespace, config: Config) -> Locations:
    import msgspec

    from traceloom.agent.config import locations

    usual = locations(config)
    return msgspec.structs.replace(usual, socket=Path(args.socket)) if args.socket else usual


def _run(args: argparse.Namespace) -> int:
    import asyncio
    import logging

    import msgspec

    missing = [name for name in ("psutil", "starlette", "uvicorn", "prometheus_client") if not _is_installed(name)]
    if missing:
        raise UsageError(
            f"the agent needs {', '.join(missing)}", slug="missing-packages", hint="pip install 'traceloom[agent]'"
        )
    from traceloom.agent.daemon import Agent, notify_ready

    config = _config(args)
    changes: dict[str, Any] = {}
    if args.tcp:
        changes["tcp"] = msgspec.structs.replace(config.tcp, address=args.tcp)
    if args.simulate:
        changes["accelerators"] = msgspec.structs.replace(
            config.accelerators, simulated=args.simulate, backends=("simulated",)
        )
    config = msgspec.structs.replace(config, **changes)
    where = _locations(args, config)
    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr, level=logging.INFO)

    def ready() -> None:
        notify_ready()
        if not args.quiet:
            lines = [f"The agent of {config.host_name} listens at {where.socket}."]
            if config.tcp.address:
                lines.append(f"Metrics: http://{config.tcp.address}/metrics")
            own = shlex.join(["--socket", args.socket]) + " " if args.socket else ""
            lines.append(
                f"Look: traceloom agent ps {own}".rstrip()
                + f"   What works here: traceloom agent doctor {own}".rstrip()
            )
            print("\n".join(lines), flush=True)

    async def live() -> None:
        await Agent(config, where).run(ready)

    asyncio.run(live())
    return 0


def _is_installed(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def _status(args: argparse.Namespace) -> int:
    from traceloom.cli import agent_views as views

    answer = _client(args).get("status")
    return _shown(args, answer, lambda width: views.status(answer, width))


def _processes(args: argparse.Namespace) -> int:
    from traceloom.cli import agent_views as views

    client = _client(args)
    answer = client.get("processes")
    if args.job:
        answer["processes"] = [process for process in answer["processes"] if process["owner"]["job"] == args.job]
    devices = client.get("devices")["devices"] if not args.json else []
    return _shown(args, answer, lambda width: views.processes(answer, devices, width))


def _top(args: argparse.Namespace) -> int:
    from traceloom.cli import agent_views as views
    from traceloom.harmless import steering
    from traceloom.report.views import terminal

    client = _client(args)
    while True:
        picture = {name: client.get(name) for name in ("status", "devices", "processes")}
        picture["host"] = views.host_values(client)
        if args.job:
            held = [process for process in picture["processes"]["processes"] if process["owner"]["job"] == args.job]
            picture["processes"]["processes"] = held
        if args.json:
            print(json.dumps(picture))
        else:
            if not args.once and sys.stdout.isatty():
                steering(sys.stdout).write("\x1b[H\x1b[2J")
            terminal.put(partial(views.top, picture), sys.stdout)
        sys.stdout.flush()
        if args.once:
            return 0
        time.sleep(args.interval)


def _query(args: argparse.Namespace) -> int:
    from traceloom.agent.query import plain_name
    from traceloom.cli import agent_views as views

    if args.subject is None:
        if args.json:
            print(json.dumps(views.metrics_document(), indent=2))
        else:
            from traceloom.report.views import terminal

            terminal.put(views.metrics, sys.stdout)
        return 0
    parameters = {"metric": plain_name(args.subject), "since": args.since}
    parameters |= {name: getattr(args, name) for name in ("until", "by", "where") if getattr(args, name)}
    if args.raw:
        parameters["raw"] = "true"
    answer = _client(args).get("query", **parameters)
    return _shown(args, answer, lambda width: views.query(answer, width))


def _learn(args: argparse.Namespace) -> int:
    from traceloom.cli import agent_views as views

    if args.subject is None:
        raise UsageError("which trace?", slug="wrong-usage", hint="traceloom agent learn TRACE --job JOB")
    client = _client(args)
    client.timeout_s = 600.0  # it reads the whole trace
    answer = client.post("traces", {"path": str(Path(args.subject).absolute()), "job": _job(args, client)})
    return _shown(args, answer, lambda _: views.learned(answer))


def _job(args: argparse.Namespace, client: Client) -> str:
    """The job that is named, else the only one there is."""
    if args.job is not None:
        return str(args.job)
    jobs = [str(row["job"]) for row in client.get("jobs")["jobs"]]
    if len(jobs) != 1:
        raise UsageError(
            f"which of {len(jobs)} jobs?" if jobs else "no job of yours runs on this host",
            slug="no-such-job", hint="--job JOB; `traceloom agent ps` lists them",
        )  # fmt: skip
    return jobs[0]


def _stacks(args: argparse.Namespace) -> int:
    from traceloom.cli import agent_views as views

    client = _client(args)
    client.timeout_s = 300.0  # symbols of native code are hundreds of MB per process
    which = {"pid": str(args.pid)} if args.pid is not None else {"job": _job(args, client)}
    answer = client.get("stacks", **which, native="true" if args.native else "false")
    return _shown(args, answer, lambda width: views.stacks(answer, width, native=args.native))


def _doctor(args: argparse.Namespace) -> int:
    """Of the agent that runs; where none does, of this host as this user would run one."""
    from traceloom.cli import agent_views as views

    try:
        answer = _client(args).get("doctor")
        running = True
    except InputError as error:
        if error.slug != "no-agent" or args.socket:
            raise
        import msgspec

        from traceloom.agent import doctor

        config = _config(args)
        answer = {"checks": [msgspec.to_builtins(check) for check in doctor.by_hand(config, _locations(args, config))]}
        running = False
    return _shown(args, answer, lambda width: views.doctor(answer, width, running=running))


def _env(args: argparse.Namespace) -> int:
    from traceloom.agent.environment import variables

    values = variables(_locations(args, _config(args)))
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        for name, value in values.items():
            print(f"export {name}={shlex.quote(value)}")
    return 0


def _shown(args: argparse.Namespace, answer: Any, rendered: Any) -> int:
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    from traceloom.report.views import terminal

    terminal.put(rendered, sys.stdout)
    return 0
