"""Processes with their owners, their shares of devices, and the jobs that they form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.collectors.collector import Collector
from traceloom.agent.collectors.processes import Processes
from traceloom.agent.config import Config
from traceloom.agent.flops import parse_declared_types
from traceloom.agent.metrics import METRICS, Reading
from traceloom.agent.ownership.environment import (
    DTYPE_VARIABLE,
    INPUT_BYTES_VARIABLE,
    LISTED_VARIABLES,
    PREFIXES,
)
from traceloom.agent.ownership.model import Process, Share, compute_shares, mask_secrets
from traceloom.agent.ownership.resolver import OwnerResolver
from traceloom.agent.steps import StepCounter
from traceloom.agent.topline import JobTick, TracedFacts

_MAX_COMMAND_CHARS = 200  # characters in the metric's label; /api/v1/processes returns all of it


class OwnedProcessCollector:
    """A collector: `owned` has the relevant processes, `shares` the share of each process in each
    device.

    Args:
        config: The agent's.
        accelerators: Provides the processes on devices, as of its last run.
    """

    name = "processes"

    def __init__(self, config: Config, accelerators: AcceleratorCollector) -> None:
        self.looked_at = Processes(config, LISTED_VARIABLES, PREFIXES)
        self.period_s = self.looked_at.period_s
        self.timeout_s = self.looked_at.timeout_s
        self.finder = OwnerResolver(config)
        self.collectors: list[Collector] = [self, self.finder.framework_versions]
        self.collectors += [self.finder.kubelet] if config.owners.kubelet else []
        self.collectors += [self.finder.job_mapping] if config.owners.job_mapping else []
        self.owned: dict[str, Process] = {}
        self.shares: dict[tuple[str, str], Share] = {}
        self.reporting: set[int] = set()  # pids of processes that report steps: always relevant
        self._accelerators = accelerators

    def collect(self) -> list[Reading]:
        """Read all processes, and find the owners of the relevant ones."""
        on_devices = self._accelerators.device_processes
        self.looked_at.device_pids = frozenset(
            (*(process.pid for process in on_devices), *self.reporting)
        )
        readings = self.looked_at.collect()
        facts = self.looked_at.processes
        # A copy, as the loop adds to it concurrently.
        self.reporting = self.reporting & {process.pid for process in facts.values()}
        keys = {process.pid: key for key, process in facts.items()}
        used: dict[str, list[str]] = {}
        for user in on_devices:
            if user.pid in keys:
                used.setdefault(keys[user.pid], []).append(user.device)
        owners = self.finder.owners(facts, list(self._accelerators.devices.values()), used)
        self.shares = compute_shares(on_devices, keys)
        self.owned = {
            key: Process(
                key=key,
                pid=process_facts.pid,
                start_ticks=process_facts.start_ticks,
                started_ns=process_facts.started_ns,
                parent_pid=process_facts.parent_pid,
                uid=process_facts.uid,
                command=mask_secrets(process_facts.command),
                cgroup=process_facts.cgroup,
                declared=process_facts.environment,
                owner=owners[key],
                state=process_facts.state,
                unreadable=process_facts.unreadable,
                devices=tuple(dict.fromkeys(used.get(key, ()))),
            )
            for key, process_facts in facts.items()
        }
        for process in self.owned.values():
            owner = process.owner
            rank, local_rank, world_size = (
                "" if number is None else str(number)
                for number in (owner.rank, owner.local_rank, owner.world_size)
            )
            values = {
                "process": process.key,
                "pid": str(process.pid),
                "job": owner.job,
                "rank": rank,
                "local_rank": local_rank,
                "world_size": world_size,
                "user": owner.user,
                "account": owner.account,
                "namespace": owner.namespace,
                "pod": owner.pod,
                "container": owner.container,
                "framework": owner.framework,
                "command": process.command[:_MAX_COMMAND_CHARS],
            }
            labels = tuple(values[label] for label in METRICS["process_info"].labels)
            readings.append(Reading("process_info", labels, 1.0))
        readings += (
            Reading(
                "process_gpu_memory_bytes",
                (keys.get(device_process.pid, f"{device_process.pid}@"), device_process.device),
                device_process.memory_bytes,
            )
            for device_process in on_devices
            if device_process.memory_bytes is not None
        )
        readings += (
            Reading("process_gpu_share_ratio", (process, device), share.part)
            for (device, process), share in self.shares.items()
        )
        readings += _build_job_readings(self.owned.values())
        return readings

    def list_problems(self) -> list[str]:
        return self.looked_at.list_problems()


def _build_job_readings(processes: Iterable[Process]) -> Iterator[Reading]:
    members: dict[str, list[Process]] = {}
    for process in processes:
        if process.owner.job:
            members.setdefault(process.owner.job, []).append(process)
    for job, job_processes in members.items():
        # Of a launcher and its ranks, the ranks have the most information.
        owner = max(
            (process.owner for process in job_processes), key=lambda owner: len(owner.sources)
        )
        values = {
            "job": job,
            "name": owner.name,
            "scheduler": owner.scheduler,
            "user": owner.user,
            "account": owner.account,
            "partition": owner.partition,
            "namespace": owner.namespace,
            "framework": owner.framework,
            "world_size": "" if owner.world_size is None else str(owner.world_size),
        }
        yield Reading("job_info", tuple(values[label] for label in METRICS["job_info"].labels), 1.0)
        yield Reading("job_processes", (job,), len(job_processes))


def collect_jobs(
    processes: Iterable[Process], steps: StepCounter, facts: Mapping[str, TracedFacts]
) -> list[JobTick]:
    """Returns the jobs of these processes; processes without a job belong to the job "".

    `facts`: what their traces have shown, by job.
    """
    members: dict[str, list[Process]] = {}
    for process in processes:
        members.setdefault(process.owner.job, []).append(process)
    jobs = []
    for job, job_processes in members.items():
        step_counts = [
            number for process in job_processes if (number := steps.take(process.key)) is not None
        ]
        rates = [
            rate for process in job_processes if (rate := steps.per_second(process.key)) is not None
        ]
        inputs = [
            size
            for process in job_processes
            if (size := _parse_declared_number(process.declared.get(INPUT_BYTES_VARIABLE, "")))
            is not None
        ]
        types = {
            process.declared[DTYPE_VARIABLE]
            for process in job_processes
            if DTYPE_VARIABLE in process.declared
        }
        jobs.append(
            JobTick(
                job=job,
                processes=tuple(process.key for process in job_processes),
                devices=tuple(
                    dict.fromkeys(
                        uuid
                        for process in job_processes
                        for uuid in (*process.devices, *process.owner.devices)
                    )
                ),
                steps=sum(step_counts) if step_counts else None,
                steps_per_second=sum(rates) if rates else None,
                input_bytes_per_step=inputs[0] if inputs else None,
                declared_types=parse_declared_types(types.pop()) if len(types) == 1 else None,
                facts=facts.get(job, TracedFacts()),
            )
        )
    return jobs


def _parse_declared_number(text: str) -> float | None:
    """Parses a number from 0 to 10^18 that a job declares; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= 1e18 else None
