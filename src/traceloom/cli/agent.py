"""`traceloom agent`: runs the host agent and sends requests to it."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from traceloom.cli import options as types
from traceloom.cli.options import VerbAction, VerbOption, add_actions, declare_options
from traceloom.errors import InputError, UsageError

if TYPE_CHECKING:
    from rich.text import Text

    from traceloom.agent.config import AgentPaths, Config
    from traceloom.server.client import AgentClient

T = TypeVar("T")
DESCRIPTION = (
    "The agent of a host: what its devices and processes do, and whose they are. `run` starts it, as root for the "
    "whole host, or as a user for that user's processes; the other actions ask it."
)
EXAMPLES = """\
examples:
  traceloom agent run                    with the devices of this host
  traceloom agent run --simulate 8       with eight that are made up
  traceloom agent top                    in another terminal

What each can do: traceloom agent query --help.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, subparser in add_actions(parser, ACTIONS):
        subparser.add_argument(
            "--config",
            metavar="FILE",
            help="agent.toml (default: root's in /etc/traceloom, a user's in ~/.config/traceloom, if there is one)",
        )
        subparser.add_argument(
            "--socket",
            metavar="PATH",
            help="the agent's socket (default: that of your own agent if it runs, else root's)",
        )
        if name != "run":
            subparser.add_argument("--json", action="store_true", help="print the answer as JSON")
        types.add_verbosity_options(subparser)


JOB_OPTION = VerbOption("--job", metavar="JOB", help="only this job")
SINCE_OPTION = VerbOption(
    "--since",
    default="10m",
    metavar="TIME",
    help="how far back, as 90s, 10m or 1d; or from when, as 2026-01-31T12:00 (default: 10m)",
)
RUN_OPTIONS = (
    VerbOption("--tcp", metavar="ADDRESS", help="answer over TCP too, as 127.0.0.1:9465"),
    VerbOption(
        "--server",
        metavar="URL",
        help="belong to this fleet (https://HOST:PORT): report there, trace what it asks for",
    ),
    VerbOption(
        "--token-file",
        metavar="FILE",
        help="the token of enrolment, needed the first time (default: TRACELOOM_FLEET_TOKEN)",
    ),
    VerbOption(
        "--simulate",
        type=types.parse_count,
        metavar="N",
        help="make up N devices, to try it without any",
    ),
    VerbOption(
        "--compat",
        choices=("dcgm",),
        action="append",
        help="publish under the names of dcgm-exporter too",
    ),
)
QUERY_OPTIONS = (
    VerbOption(
        "metric",
        nargs="?",
        metavar="METRIC",
        help="with or without traceloom_; without any, all metrics are listed",
    ),
    SINCE_OPTION,
    VerbOption(
        "--until", default="", metavar="TIME", help="the end, written likewise (default: now)"
    ),
    VerbOption(
        "--by",
        default="",
        metavar="LABELS",
        help="sum up by these, with commas: job, rank, user, device, process, or labels of the metric",
    ),
    VerbOption(
        "--where",
        default="",
        metavar="LABEL=VALUE",
        help="only where this holds, as device=0; several with commas",
    ),
    VerbOption("--raw", action="store_true", help="counters as they are, not as rates"),
)
STACKS_OPTIONS = (
    VerbOption("--job", metavar="JOB", help="this job; needed if there are several"),
    VerbOption("--pid", type=types.parse_count, metavar="PID", help="only this process"),
    VerbOption(
        "--native",
        action="store_true",
        help="calls of C and C++ too; a process stands still while it is looked at",
    ),
)
LEARN_OPTIONS = (
    VerbOption("trace", metavar="TRACE", help="a trace or a recorded run"),
    VerbOption("--job", metavar="JOB", help="the job that was traced; needed if there are several"),
)
TOP_OPTIONS = (
    JOB_OPTION,
    VerbOption(
        "--interval",
        type=types.parse_positive,
        default=2.0,
        metavar="S",
        help="seconds between pictures (default: 2)",
    ),
    VerbOption("--once", action="store_true", help="print one picture and end"),
)
FLIGHT_RECORDER_OPTION = VerbOption(
    "--flight-recorder",
    action="store_true",
    help="also those by which NCCL tells its collectives when the job hangs; it makes a pipe per rank in /tmp",
)


def run(args: argparse.Namespace) -> int:
    """Runs the action and returns the exit code."""
    if sys.platform != "linux":
        raise UsageError("the agent looks at Linux hosts; this is none", slug="not-linux")
    return ACTIONS[args.action].run(args)


def _load_config(args: argparse.Namespace) -> Config:
    from traceloom.agent import config as configuration

    default_path = configuration.get_default_path()
    if args.config is not None or default_path.exists():
        return configuration.load(args.config or default_path)
    return configuration.Config()


def _find_socket(args: argparse.Namespace) -> Path:
    """Returns the socket of the named agent; else of the user's own where it runs, else of root's
    where that runs.
    """
    from traceloom.agent.config import SYSTEM_SOCKET, resolve_paths
    from traceloom.system.files import find_foreign_part

    own_socket = resolve_paths(_load_config(args)).socket
    if args.socket:
        return Path(args.socket)
    # Not `Path.exists`, which raises where a parent directory is not accessible.
    return (
        own_socket
        if not os.path.exists(SYSTEM_SOCKET)  # noqa: PTH110
        or (os.path.exists(own_socket) and not find_foreign_part(own_socket))  # noqa: PTH110
        else SYSTEM_SOCKET
    )


def create_agent_client(args: argparse.Namespace) -> AgentClient:
    """Returns a client for the named agent, else for the user's own or root's."""
    from traceloom.server.client import AgentClient

    return AgentClient(_find_socket(args))


def _resolve_paths(args: argparse.Namespace, config: Config) -> AgentPaths:
    import msgspec

    from traceloom.agent.config import resolve_paths

    paths = msgspec.structs.replace(config.paths, socket=args.socket or config.paths.socket)
    return resolve_paths(msgspec.structs.replace(config, paths=paths))


def _run(args: argparse.Namespace) -> int:
    import asyncio
    import logging
    from importlib.util import find_spec

    import msgspec

    missing = [
        name
        for name in ("psutil", "starlette", "uvicorn", "prometheus_client")
        if find_spec(name) is None
    ]
    if missing:
        raise UsageError(
            f"the agent needs {', '.join(missing)}",
            slug="missing-packages",
            hint="pip install 'traceloom[agent]'",
        )
    from traceloom.agent.daemon import Agent, notify_ready

    config = _load_config(args)
    changes: dict[str, Any] = {}
    if args.tcp:
        changes["tcp"] = msgspec.structs.replace(config.tcp, address=args.tcp)
    if args.server or args.token_file:
        changes["fleet"] = msgspec.structs.replace(
            config.fleet,
            server=args.server or config.fleet.server,
            token_file=args.token_file or config.fleet.token_file,
        )
    if args.compat:
        changes["compat"] = tuple(dict.fromkeys([*config.compat, *args.compat]))
    if args.simulate:
        changes["accelerators"] = msgspec.structs.replace(
            config.accelerators, simulated=args.simulate, backends=("simulated",)
        )
    config = msgspec.structs.replace(config, **changes)
    agent_paths = _resolve_paths(args, config)
    os.umask(os.umask(0o077) | 0o022)  # nobody else writes where the agent does
    logging.basicConfig(
        format="%(levelname)s %(message)s",
        stream=sys.stderr,
        level=logging.INFO if args.quiet else logging.WARNING,
    )

    def ready() -> None:
        notify_ready()
        if not args.quiet:
            socket_options = shlex.join(["--socket", args.socket]) if args.socket else ""
            lines = [
                f"The agent of {config.host_name} listens at {agent_paths.socket}. Ctrl-C ends it."
            ]
            if os.geteuid():
                lines.append("It sees the processes of this user; as root it would see all.")
            if config.tcp.address:
                scheme = "https" if config.tcp.certificate else "http"
                lines.append(f"Metrics: {scheme}://{config.tcp.address}/metrics")
            if config.fleet.server:
                lines.append(f"It reports to the fleet at {config.fleet.server}.")
            lines += [
                f"next, elsewhere: {f'traceloom agent {action} {socket_options}'.rstrip()}"
                for action in ("top", "doctor")
            ]
            print("\n".join(lines), flush=True)

    async def live() -> None:
        await Agent(config, agent_paths).run(ready)

    asyncio.run(live())
    return 0


def _show_answer(args: argparse.Namespace) -> int:
    """Shows the agent's response, where route, action and view have the same name."""
    from traceloom.agent.api import HangsResponse, StatusResponse, TriggersResponse
    from traceloom.cli import agent_views as views
    from traceloom.server.problem import HttpResponseBody

    rendered: dict[str, tuple[type[HttpResponseBody], Callable[[Any, int], Iterator[Text]]]] = {
        "status": (StatusResponse, views.status),
        "hangs": (HangsResponse, views.hangs),
        "triggers": (TriggersResponse, views.triggers),
    }
    answer = create_agent_client(args).get(
        args.action, **({"job": args.job} if "job" in args and args.job else {})
    )
    kind, render = rendered[args.action]
    read = _read(answer, kind)
    return _print_answer(args, answer, lambda width: render(read, width))


def _read(answer: Any, kind: type[T]) -> T:
    """Converts the agent's response to its structure.

    Raises:
        InputError: `agent-unclear`.
    """
    import msgspec

    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise InputError(
            f"what listens there answers as no agent does: {error}", slug="agent-unclear"
        ) from error


def _show_processes(args: argparse.Namespace) -> int:
    from traceloom.agent import api as forms
    from traceloom.cli import agent_views as views

    client = create_agent_client(args)
    answer = client.get("processes")
    if args.job:
        answer["processes"] = [
            process for process in answer["processes"] if process["owner"]["job"] == args.job
        ]
    if args.json:
        return _print_answer(args, answer, None)
    processes = _read(answer, forms.ProcessesResponse)
    host = _read(client.get("devices"), forms.DevicesResponse)
    kills = _read(_fetch_events(client, args, "1h", "oom-kill"), list[forms.EventResponse])

    def rendered(width: int) -> Iterator[Text]:
        yield from views.render_processes(processes, host.devices, width)
        if kills:
            yield from views.render_events(kills, width)

    return _print_answer(args, answer, rendered)


def _show_top(args: argparse.Namespace) -> int:
    import msgspec
    from rich.text import Text

    from traceloom.cli import agent_views as views
    from traceloom.report.views import terminal
    from traceloom.system.sanitize import unwrap_stream

    client = create_agent_client(args)
    live = not (args.once or args.json) and sys.stdout.isatty()

    def drawn(width: int) -> Iterator[Text]:
        lines, height = list(views.render_top(read, width)), shutil.get_terminal_size().lines - 1
        yield from lines[: height - 1] if live and len(lines) > height else lines
        if live and len(lines) > height:
            yield Text(f" … {len(lines) - height + 1} more lines; all: traceloom agent top --once")

    while True:
        picture = {
            "status": client.get("status"),
            "devices": client.get("devices"),
            "processes": client.get("processes"),
            "host": msgspec.to_builtins(views.fetch_host_values(client)),
        }
        if args.job:
            processes = picture["processes"]
            processes["processes"] = [
                process for process in processes["processes"] if process["owner"]["job"] == args.job
            ]
        if args.json:
            print(json.dumps(picture))
        else:
            read = _read(picture, views.HostSnapshot)
            if live:
                unwrap_stream(sys.stdout).write("\x1b[H\x1b[2J")
            terminal.print_lines(drawn, sys.stdout)
        sys.stdout.flush()
        if args.once:
            return 0
        time.sleep(args.interval)


def _run_query(args: argparse.Namespace) -> int:
    from traceloom.agent import api as forms
    from traceloom.agent.history import resolve_metric_name
    from traceloom.cli import agent_views as views

    if args.metric is None:
        if args.json:
            print(json.dumps(views.build_metrics_document(), indent=2))
        else:
            from traceloom.report.views import terminal

            terminal.print_lines(views.render_metrics, sys.stdout)
        return 0
    metric, client = resolve_metric_name(args.metric), create_agent_client(args)
    index = {device["uuid"]: device["index"] for device in client.get("devices")["devices"]}
    labels_by_number = {f"device={number}": f"device={uuid}" for uuid, number in index.items()}
    parameters = {
        "metric": metric,
        "since": _add_time_zone(args.since),
        "until": _add_time_zone(args.until),
        "by": args.by,
        "where": ",".join(labels_by_number.get(part, part) for part in args.where.split(",")),
        "raw": "true" if args.raw else "",
    }
    answer = client.get("query", **{name: value for name, value in parameters.items() if value})
    read = _read(answer, forms.QueryResponse)
    return _print_answer(args, answer, lambda width: views.render_query(read, index, width))


def _add_time_zone(text: str) -> str:
    """Adds the local zone to a date and time without one, which the agent would take for UTC."""
    try:
        return dt.datetime.fromisoformat(text).astimezone().isoformat() if "-" in text else text
    except ValueError:
        return text


def _show_events(args: argparse.Namespace) -> int:
    from traceloom.agent import api as forms
    from traceloom.cli import agent_views as views

    happened = _fetch_events(create_agent_client(args), args, _add_time_zone(args.since))
    read = _read(happened, list[forms.EventResponse])
    return _print_answer(args, {"events": happened}, lambda width: views.render_events(read, width))


def _fetch_events(
    client: AgentClient, args: argparse.Namespace, since: str, kind: str = ""
) -> list[Any]:
    return [
        event
        for event in client.get("events", since=since)["events"]
        if (not kind or event["kind"] == kind) and (not args.job or event["job"] == args.job)
    ]


def _learn(args: argparse.Namespace) -> int:
    from traceloom.agent import api as forms
    from traceloom.cli import agent_views as views

    client = create_agent_client(args)
    client.timeout_s = 600.0  # the agent reads the whole trace
    answer = client.post(
        "traces", {"path": str(Path(args.trace).absolute()), "job": _find_job(args, client)}
    )
    read = _read(answer, forms.TraceResponse)
    return _print_answer(args, answer, lambda _: views.render_job_facts(read))


def _find_job(args: argparse.Namespace, client: AgentClient) -> str:
    """Returns the requested job, else the only one."""
    if args.job is not None:
        return str(args.job)
    jobs = [str(row["job"]) for row in client.get("jobs")["jobs"]]
    if len(jobs) != 1:
        raise UsageError(
            f"which of {len(jobs)} jobs?" if jobs else "no job of yours runs on this host",
            slug="no-such-job",
            hint="--job JOB; `traceloom agent ps` lists them",
        )
    return jobs[0]


def _show_stacks(args: argparse.Namespace) -> int:
    from traceloom.agent import api as forms
    from traceloom.cli import agent_views as views

    client = create_agent_client(args)
    client.timeout_s = 300.0  # symbols of native code are hundreds of MB per process
    which = {"pid": str(args.pid)} if args.pid is not None else {"job": _find_job(args, client)}
    answer = client.get("stacks", **which, native="true" if args.native else "false")
    read = _read(answer, forms.StacksResponse)
    return _print_answer(
        args, answer, lambda width: views.render_stacks(read, width, native=args.native)
    )


def _run_doctor(args: argparse.Namespace) -> int:
    """Checks the running agent; if none runs, checks this host for an agent of this user."""
    from traceloom.agent import api as forms
    from traceloom.cli import agent_views as views

    try:
        answer = create_agent_client(args).get("doctor")
        running = True
    except InputError as error:
        if error.slug != "no-agent" or args.socket:
            raise
        import msgspec

        from traceloom.agent import doctor

        config = _load_config(args)
        answer = {
            "checks": [
                msgspec.to_builtins(check)
                for check in doctor.examine_without_agent(config, _resolve_paths(args, config))
            ]
        }
        running = False
    read = _read(answer, forms.DoctorResponse)
    return _print_answer(
        args, answer, lambda width: views.render_doctor(read, width, running=running)
    )


def _print_environment(args: argparse.Namespace) -> int:
    """Prints the environment from the running agent, which creates the directory; if none runs,
    that of the user's own agent.
    """
    from traceloom.agent.api import EnvironmentResponse
    from traceloom.agent.config import SYSTEM_SOCKET
    from traceloom.agent.ownership.environment import get_job_variables
    from traceloom.server.client import make_untrusted_error
    from traceloom.system.files import find_foreign_part, report_write_errors

    agent_paths = _resolve_paths(args, _load_config(args))
    known = get_job_variables(agent_paths, os.geteuid())
    try:
        answer = create_agent_client(args).get("environment")
        # A shell runs what is printed here.
        values = {
            name: value
            for name, value in _read(answer, EnvironmentResponse).variables.items()
            if name in known
        }
    except InputError as error:
        if error.slug != "no-agent":
            raise
        import msgspec

        if (
            _find_socket(args) == SYSTEM_SOCKET
        ):  # root's agent has its sockets in the same directory
            agent_paths = msgspec.structs.replace(
                agent_paths, socket=SYSTEM_SOCKET, kineto=SYSTEM_SOCKET.with_name("kineto")
            )
        ways = (agent_paths.kineto, *agent_paths.kineto.parents)
        if next(way for way in ways if os.path.exists(way)).stat().st_mode & 0o022:  # noqa: PTH110
            # Before the job looks for sockets there, so that nobody else makes it.
            with report_write_errors(agent_paths.kineto):
                agent_paths.kineto.mkdir(mode=0o755, parents=True, exist_ok=True)
        if reason := find_foreign_part(agent_paths.kineto):
            raise make_untrusted_error(agent_paths.kineto, reason) from error
        values = get_job_variables(agent_paths, os.geteuid())
    if args.flight_recorder:
        from traceloom.agent.ownership.environment import create_flight_variables

        values = values | create_flight_variables()
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        for name, value in values.items():
            print(f"export {name}={shlex.quote(value)}")
    return 0


def _print_answer(args: argparse.Namespace, answer: Any, rendered: Any) -> int:
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    from traceloom.report.views import terminal

    terminal.print_lines(rendered, sys.stdout)
    return 0


ACTIONS = {
    "run": VerbAction(
        "run the agent until Ctrl-C",
        "traceloom agent run\n"
        "traceloom agent run --simulate 8 --tcp 127.0.0.1:9465    for Prometheus too\n"
        "then: traceloom agent ps",
        declare_options(*RUN_OPTIONS),
        _run,
    ),
    "status": VerbAction(
        "show how the agent itself is doing",
        "traceloom agent status\nthen: traceloom agent doctor, where something fails",
        declare_options(),
        _show_answer,
    ),
    "ps": VerbAction(
        "list processes with owner, rank, devices and step rate",
        "traceloom agent ps --job slurm-42\nthen: traceloom agent query process_memory_bytes --by job",
        declare_options(JOB_OPTION),
        _show_processes,
    ),
    "top": VerbAction(
        "show devices and processes as they are now, again and again",
        "traceloom agent top\ntraceloom agent top --once --json    for programs\n"
        "then: traceloom agent query gpu_busy_ratio --since 1h",
        declare_options(*TOP_OPTIONS),
        _show_top,
    ),
    "query": VerbAction(
        "show what a metric was: over time, by job, rank, user or device",
        "traceloom agent query                                all metrics there are\n"
        "traceloom agent query gpu_power_watts --by job --since 1h\n"
        "traceloom agent query host_network_bytes_total --where direction=receive --json\n"
        "then: traceloom report TRACE, for why it was so",
        declare_options(*QUERY_OPTIONS),
        _run_query,
    ),
    "events": VerbAction(
        "list errors of devices, and processes killed for want of memory",
        "traceloom agent events --since 1d\nthen: traceloom agent ps",
        declare_options(JOB_OPTION, SINCE_OPTION),
        _show_events,
    ),
    "learn": VerbAction(
        "judge a job by a trace of it: FLOPs, element types, roofline",
        "traceloom agent learn run1 --job slurm-42\n"
        "then: traceloom agent query job_flops_error_ratio --where job=slurm-42",
        declare_options(*LEARN_OPTIONS),
        _learn,
    ),
    "stacks": VerbAction(
        "show what all threads of a job or process do now, equal stacks together",
        "traceloom agent stacks --job slurm-42    ranks that are elsewhere than the others first\n"
        "traceloom agent stacks --pid 4711 --native\n"
        "then: traceloom trace --job slurm-42 --steps 3",
        declare_options(*STACKS_OPTIONS),
        _show_stacks,
    ),
    "hangs": VerbAction(
        "list jobs that hang, with the rank that the others wait for",
        "traceloom agent hangs --job slurm-42\n"
        "then: traceloom agent stacks --job slurm-42, for what they do now",
        declare_options(JOB_OPTION),
        _show_answer,
    ),
    "triggers": VerbAction(
        "list rules that trace unasked: what they did, why not, what they may still",
        "traceloom agent triggers\nthen: traceloom trace --list",
        declare_options(),
        _show_answer,
    ),
    "doctor": VerbAction(
        "say what works here, what does not, why, and what would help",
        "traceloom agent doctor    for the agent that runs, or for one that you would run\n"
        "then: traceloom agent run",
        declare_options(),
        _run_doctor,
    ),
    "env": VerbAction(
        "print the variables that prepare a job",
        'eval "$(traceloom agent env)"; python train.py    a job that can be asked for traces\n'
        "then: traceloom agent ps",
        declare_options(FLIGHT_RECORDER_OPTION),
        _print_environment,
    ),
}
