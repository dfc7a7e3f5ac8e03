"""Checks of what works on this host, what does not, why, and what would help.

The checks change nothing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.api import Check
from traceloom.agent.attach.injection import explain_attach_refusal
from traceloom.agent.collectors.collector import Collector, read
from traceloom.agent.config import AgentPaths, Config
from traceloom.agent.kineto import ABSTRACT_SOCKET, SOCKET_NAME
from traceloom.agent.ownership.environment import POLLED_DIRECTORY, POLLS
from traceloom.agent.ownership.model import Process
from traceloom.agent.ownership.resolver import OwnedProcessCollector
from traceloom.agent.probes.calls import can_trace_others, explain_unsupported
from traceloom.agent.profilers import py_spy
from traceloom.agent.steps import ProbedStepClock
from traceloom.system.units import format_quantity

_ABSTRACT_SHOWN = ABSTRACT_SOCKET.decode().replace("\0", "@")  # as in /proc/net/unix
_MAX_SOCKETS_BYTES = 16 << 20  # bytes read of that file
_EXTRAS = (
    ("otlp", "opentelemetry.sdk", "metrics by OTLP"),
    ("kubernetes", "grpc", "pods of devices, from the kubelet"),
)


def examine_parts(
    config: Config,
    locations: AgentPaths,
    collectors: Sequence[Collector],
    owned: OwnedProcessCollector,
    *,
    errors: Mapping[str, str],
    empty: Collection[str],
    unwritten: Mapping[str, str],
) -> list[Check]:
    """Run all checks; may block for as long as a kernel file does.

    Args:
        config: The agent's.
        locations: Locations of its files.
        collectors: All collectors.
        owned: Has the running processes, and their owners.
        errors: Collector -> why its last run failed; "" if it did not.
        empty: Collectors that work and have nothing to read.
        unwritten: `history`, `audit` -> why the last write failed.
    """
    is_root, sees_whole_host = os.geteuid() == 0, config.collect.proc == "/proc"
    result = [
        Check(
            area="rights",
            name="user",
            works="yes" if is_root else "partly",
            why="root: sees the processes of all users"
            if is_root
            else "sees the environment of your own processes alone",
            help="run it as root for the whole host" if sees_whole_host and not is_root else "",
        )
    ]
    for collector in collectors:
        result += _check_devices(collector) if isinstance(collector, AcceleratorCollector) else ()
        sentences = (
            []
            if isinstance(collector, AcceleratorCollector)
            else list(dict.fromkeys(collector.list_problems()))
        )
        broken = errors.get(collector.name, "")
        if collector.name in config.collect.off:
            result.append(
                Check(
                    area="collect",
                    name=collector.name,
                    works="no",
                    why="it is switched off",
                    help="collect.off",
                )
            )
        elif broken or sentences:
            if broken:
                result.append(Check(area="collect", name=collector.name, works="no", why=broken))
            # Paths of processes' libraries are visible to their users only, as is everything about
            # single processes.
            area = "jobs" if isinstance(collector, ProbedStepClock) else "collect"
            result += [
                Check(area=area, name=collector.name, works="partly", why=problem)
                for problem in sentences
            ]
        else:
            reason = "there is nothing of it here" if collector.name in empty else ""
            result.append(Check(area="collect", name=collector.name, works="yes", why=reason))
    owner_problems = owned.finder.list_problems()
    result += [
        Check(area="owners", name="owners", works="partly", why=problem)
        for problem in owner_problems
    ]
    if not owner_problems:
        result.append(Check(area="owners", name="owners", works="yes"))
    result += _check_files(locations, unwritten)
    result += _check_extras(config)
    result += _check_jobs(owned.owned.values(), Path(config.collect.proc))
    reason, helps = explain_attach_refusal()
    if not config.traces.attach:
        off = "it is switched off: processes that nobody prepared are not traced"
        reason, helps = (f"{off}; and {reason}", helps) if reason else (off, "traces.attach")
    attaching = Check(
        area="traces", name="attach", works="no" if reason else "yes", why=reason, help=helps
    )
    result += [*_check_probes(config), _check_py_spy(), attaching]
    return result


def _check_devices(accelerators: AcceleratorCollector) -> Iterator[Check]:
    """Check the devices, by back end, metric or device."""
    answering = sum(not device.stale for device in accelerators.devices.values())
    yield Check(
        area="devices",
        name="devices",
        works="yes" if answering else "no",
        why=f"{format_quantity(answering, 'device')} answering"
        if answering
        else "no device answers here",
        help="" if answering else "to try it without any: traceloom agent run --simulate 8",
    )
    for problem in dict.fromkeys(accelerators.list_problems()):
        name, colon, reason = problem.partition(": ")
        yield Check(
            area="devices",
            name=name if colon else "devices",
            works="partly" if answering else "no",
            why=reason if colon else problem,
        )


def _check_files(locations: AgentPaths, unwritten: Mapping[str, str]) -> Iterator[Check]:
    for name, path in (
        ("socket", locations.socket),
        ("history", locations.history),
        ("audit", locations.audit),
    ):
        directory = path.parent
        # Not `Path.exists`, which raises if the parent directory is not accessible.
        while not os.path.exists(directory) and directory != directory.parent:  # noqa: PTH110
            directory = directory.parent
        works = os.access(directory, os.W_OK | os.X_OK)
        if works and unwritten.get(name):
            yield Check(
                area="files", name=name, works="no", why=unwritten[name], help="it is tried again"
            )
            continue
        yield Check(
            area="files",
            name=name,
            works="yes" if works else "no",
            why=str(path) if works else f"{directory} cannot be written",
            help="" if works else f"`paths.{name}` of agent.toml names another one",
        )


def _check_extras(config: Config) -> Iterator[Check]:
    for extra, module, feature in _EXTRAS:
        try:
            installed = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # its parent package is missing
            installed = False
        if (
            installed
            or (extra == "otlp" and bool(config.otlp.endpoint))
            or (
                extra == "kubernetes" and os.path.exists(config.owners.kubelet)  # noqa: PTH110  (may be root's alone)
            )
        ):
            yield Check(
                area="extras",
                name=extra,
                works="yes" if installed else "no",
                why=feature if installed else f"without it no {feature}",
                help="" if installed else f"pip install 'traceloom[{extra}]'",
            )


def _check_jobs(processes: Iterable[Process], proc: Path) -> Iterator[Check]:
    """Find processes whose PyTorch polls for traces where no agent listens, by the directory that
    they poll.

    The kernel's list of sockets is read rather than their files, which a user may have replaced.
    """
    host_sockets = _read_socket_names(proc / "net/unix") if (proc / "net/unix").exists() else set()
    pids_by_directory: dict[str, list[int]] = {}
    for process in sorted(processes, key=lambda process: process.pid):
        if POLLS not in process.declared:
            continue
        directory = process.declared.get(POLLED_DIRECTORY, "")
        try:
            names = _read_socket_names(proc / str(process.pid) / "net/unix")
        except OSError:  # it has ended, or its container is not accessible
            continue
        # Abstract names are local to a network namespace.
        if not (
            f"{directory}/{SOCKET_NAME}" in names | host_sockets
            if directory
            else _ABSTRACT_SHOWN in names
        ):
            pids_by_directory.setdefault(directory, []).append(process.pid)
    for directory, pids in pids_by_directory.items():
        name = f"process {pids[0]}" + (f" and {len(pids) - 1} more" if len(pids) > 1 else "")
        if directory:
            yield Check(
                area="jobs",
                name=name,
                works="no",
                why=f"no agent listens in {directory}: it cannot be traced, and where a socket was left behind there "
                "it ends some 5 s later than it could",
                help="run an agent whose `paths.kineto` has that directory, "
                "or start the job again with what `traceloom agent env` prints",
            )
        else:
            yield Check(
                area="jobs",
                name=name,
                works="no",
                why=f"{POLLS} is set and no daemon listens: it cannot be traced, and ends some 8 s later than it could",
                help=f"set {POLLED_DIRECTORY} too, as `traceloom agent env` prints, or unset {POLLS} (0 counts as set)",
            )


def _read_socket_names(path: Path) -> set[str]:
    """Returns the names of open unix sockets in a network namespace, with NUL as `@`: the last
    column of the list.
    """
    lines = read(path, _MAX_SOCKETS_BYTES).decode(errors="replace").splitlines()[1:]
    return {columns[7] for line in lines if len(columns := line.split(maxsplit=7)) == 8}


def _check_probes(config: Config) -> Iterator[Check]:
    """Check whether functions of processes can be probed, and what is used instead if not."""
    reason, helps = explain_unsupported()
    instead = (
        ("steps", "steps count where processes report them"),
        (
            "launches",
            "launches are in the traces of prepared jobs alone (trace --profilers timeline)",
        ),
        ("allocations", "allocations are seen where the job is recorded alone (record --memory)"),
    )
    if reason:
        for name, without in instead:
            yield Check(
                area="probes", name=name, works="no", why=f"{reason}: {without}", help=helps
            )
        return
    for name, _ in instead:
        if name == "steps" and not config.probes.steps:
            yield Check(
                area="probes",
                name=name,
                works="partly",
                why="steps are not counted: it is switched off",
                help="probes.steps",
            )
        elif not can_trace_others():
            yield Check(
                area="probes",
                name=name,
                works="partly",
                why="of your own processes alone: others do not show their files",
                help="run the agent as root, or with CAP_SYS_PTRACE",
            )
        else:
            yield Check(area="probes", name=name, works="yes")


def _check_py_spy() -> Check:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    restricted = (
        not can_trace_others()
        and scope.exists()
        and scope.read_text(encoding="ascii").strip() not in {"", "0"}
    )
    if not py_spy.find_py_spy():
        return Check(
            area="stacks",
            name="py-spy",
            works="no",
            why="it is not installed",
            help="pip install 'traceloom[agent]'",
        )
    if restricted:
        return Check(
            area="stacks",
            name="py-spy",
            works="partly",
            why="the kernel lets a process be looked into by its parent or root alone",
            help="run the agent as root, or set kernel.yama.ptrace_scope to 0",
        )
    if not can_trace_others():
        return Check(
            area="stacks",
            name="py-spy",
            works="partly",
            why="sees the stacks of your own processes alone",
            help="run the agent as root, or with CAP_SYS_PTRACE",
        )
    return Check(area="stacks", name="py-spy", works="yes")


def examine_without_agent(config: Config, locations: AgentPaths) -> list[Check]:
    """Run the checks without a running agent: collectors are created, run once and closed."""
    from traceloom.agent.collectors.host import Cgroups, create_host_collectors

    accelerators = AcceleratorCollector(config)
    owned = OwnedProcessCollector(config, accelerators)
    collectors: list[Collector] = [
        *create_host_collectors(config),
        accelerators,
        *owned.collectors,
        Cgroups(config, lambda: owned.owned),
    ]
    errors, empty = {}, set()
    try:
        for collector in collectors:
            try:
                if not collector.collect():
                    empty.add(collector.name)
            except OSError as error:  # noqa: PERF203  (each is a check of its own)
                errors[collector.name] = str(error)
        return examine_parts(
            config, locations, collectors, owned, errors=errors, empty=empty, unwritten={}
        )
    finally:
        accelerators.close()


def examine_agent(agent: Any, idle: Mapping[str, str]) -> list[Check]:
    """Run the checks of a running agent; `idle`: triggers that cannot fire, and why."""
    errors = {state.name: state.last_error for state in agent.host_snapshot.collectors.values()}
    checks = examine_parts(
        agent.config,
        agent.locations,
        agent.scheduler.collectors,
        agent.processes,
        errors=errors,
        empty={
            name
            for name, result in agent.host_snapshot.results.items()
            if not result.values and not result.histograms
        },
        unwritten={"history": agent.history.last_error, "audit": agent.audit.last_error},
    )
    for name, reason, key in (
        (
            "sockets",
            agent.kineto.last_error if agent.kineto is not None else "they are not open yet",
            "kineto",
        ),
        ("requests", agent.trace_service.store.last_error, "requests"),
        ("hangs", agent.hangs.last_error, "hangs"),
    ):
        checks.append(
            Check(
                area="traces",
                name=name,
                works="no" if reason else "yes",
                why=reason,
                help=f"`paths.{key}` of agent.toml names another place" if reason else "",
            )
        )
    if agent.uplink is not None:
        checks += [
            Check(
                area="fleet",
                name="heartbeat",
                works="partly",
                why=f"the fleet is not told of {count:,} rows: {reason}",
                help="programs say this of themselves, in their environment",
            )
            for reason, count in (agent.uplink.refused + agent.uplink.refused_usage).items()
        ] or [Check(area="fleet", name="heartbeat", works="yes", why=agent.uplink.last_error)]
    for name in agent.triggers.rules:
        reason = idle.get(name, "")
        checks.append(
            Check(
                area="triggers",
                name=name,
                works="partly" if reason else "yes",
                why=f"as things are it cannot fire: {reason}" if reason else "",
                help="where that is not as it should be: `[[triggers]]` of agent.toml"
                if reason
                else "",
            )
        )
    if agent.triggers.store.last_error:
        checks.append(
            Check(
                area="triggers", name="budget", works="partly", why=agent.triggers.store.last_error
            )
        )
    return checks
