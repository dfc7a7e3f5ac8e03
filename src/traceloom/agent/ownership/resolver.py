"""Finds the owner of each process: user, job, rank and container, with the evidence.

files.

dcgm-exporter reads the same directory of job mappings (`--hpc-job-mapping-dir`). A file is named by
the number of a device (`0`), of a partition (`0:1`), or by a uuid.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from traceloom.agent.accelerators.backend import Device
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.collectors.collector import Collector
from traceloom.agent.collectors.processes import Processes, ProcessFacts
from traceloom.agent.config import Config
from traceloom.agent.metrics import METRICS, Reading
from traceloom.agent.ownership.devices import HostDevices, find_assigned_devices
from traceloom.agent.ownership.environment import (
    DTYPE_VARIABLE,
    INPUT_BYTES_VARIABLE,
    LAUNCH_VARIABLES,
    LISTED_VARIABLES,
    MAX_DIGITS,
    PREFIXES,
    Claims,
    build_owner,
    check_variables,
    extract_claims,
    find_rank_variables,
    parse_cgroup_paths,
)
from traceloom.agent.ownership.kubernetes import ContainerLocation, Kubelet, match_containers
from traceloom.agent.ownership.model import (
    JobNames,
    Owner,
    Process,
    Share,
    compute_shares,
    mask_secrets,
)
from traceloom.agent.steps import StepCounter
from traceloom.agent.topline import JobTick, TracedFacts, parse_declared_types

MAX_NAMES = 20_000  # names read of a directory of packages
# Framework -> the package whose library is loaded, and the distributions that contain it.
_PACKAGES = {
    "pytorch": ("torch", "torch"),
    "jax": ("jaxlib", "jaxlib"),
    "tensorflow": ("tensorflow", "tensorflow(?:_cpu|_rocm|_intel)?"),
}


class FrameworkVersions:
    """A collector without series: `versions` has the known versions, by process and library.

    Users' directories are listed as the process sees them, and may be on a disk that hangs, which
    delays nothing else. Only the names of distributions are read.
    """

    name = "frameworks"

    def __init__(self, config: Config) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        self.timeout_s = config.collect.timeouts.get(self.name, config.collect.timeout)
        self.processes: Mapping[str, ProcessFacts] = {}  # by key; set by the caller
        self.versions: Mapping[tuple[str, str], str] = {}  # "": unknown
        self._proc = Path(config.collect.proc)

    def collect(self) -> list[Reading]:
        """Find the versions of new processes."""
        versions = {}
        for process in self.processes.values():
            for framework, library in process.frameworks.items():
                key = (process.key, library)
                versions[key] = (
                    self.versions[key]
                    if key in self.versions
                    else self._version(process, framework)
                )
        self.versions = versions
        return []

    def list_problems(self) -> list[str]:
        """Always empty: an unknown version is absent."""
        return []

    def _version(self, process: ProcessFacts, framework: str) -> str:
        """Returns the version, as in `torch-2.13.0+cpu.dist-info`; "" if there is none or
        several.
        """
        package, distribution = _PACKAGES[framework]
        directory, separator, _ = process.frameworks[framework].rpartition(f"/{package}/")
        if not separator:
            return ""
        pattern = re.compile(rf"{distribution}-(\d[A-Za-z0-9.+!_]{{0,63}})\.dist-info")
        try:
            with os.scandir(f"{self._proc}/{process.pid}/root{directory}") as entries:
                matches = [
                    match[1]
                    for entry in islice(entries, MAX_NAMES)
                    if (match := pattern.fullmatch(entry.name))
                ]
        except OSError:  # it has ended, or access is denied
            return ""
        return matches[0] if len(matches) == 1 else ""


MAX_FILES = 1024
MAX_BYTES = 64 << 10  # per file
MAX_CHARS = 256  # per job name


class JobMapping:
    """A collector without series: `jobs` has the jobs by file name, and is replaced as a whole."""

    name = "job-mapping"

    def __init__(self, config: Config) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        self.timeout_s = config.collect.timeouts.get(self.name, config.collect.timeout)
        self.jobs: Mapping[str, tuple[str, ...]] = {}
        self._directory = Path(config.owners.job_mapping) if config.owners.job_mapping else None
        self._troubles: list[str] = []

    def collect(self) -> list[Reading]:
        """Read the files.

        Raises:
            OSError: The directory cannot be listed.
        """
        if self._directory is None:
            return []
        jobs: dict[str, tuple[str, ...]] = {}
        problems = []
        try:
            paths = sorted(
                path for path in self._directory.iterdir() if not path.name.startswith(".")
            )
        except OSError:
            self.jobs = {}  # the old mapping may be outdated
            raise
        if len(paths) > MAX_FILES:
            problems.append(
                f"{self._directory} has {len(paths)} files: only the first {MAX_FILES} are read"
            )
        for path in paths[:MAX_FILES]:
            try:
                jobs[path.name] = _read_jobs(path)
            except OSError as error:  # noqa: PERF203 - of one file
                problems.append(f"{path}: {error.strerror or error}")
        self.jobs, self._troubles = jobs, problems
        return []

    def list_problems(self) -> list[str]:
        return list(self._troubles)


def _read_jobs(path: Path) -> tuple[str, ...]:
    # Opening a pipe would block.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("is no file")
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise OSError(f"is larger than {MAX_BYTES} bytes")
    lines = (line.strip() for line in text.decode(errors="replace").splitlines())
    return tuple(
        dict.fromkeys(
            line for line in lines if line and len(line) <= MAX_CHARS and line.isprintable()
        )
    )


_JOB_FIELDS = (
    "job",
    "name",
    "scheduler",
    "account",
    "partition",
)  # fields that all processes of a job share
_RANK_FIELDS = ("rank", "local_rank", "world_size")


class OwnerResolver:
    """Finds owners. `owners` may wait for the name service: call it from a thread.

    `kubelet`, `job_mapping` and `framework_versions` are separate collectors, so that their waits
    delay nothing else.

    Raises:
        InputError: `wrong-config`: `owners.variables` names an unknown field of an owner.
    """

    def __init__(self, config: Config) -> None:
        check_variables(config.owners.variables)
        self.kubelet = Kubelet(config)
        self.job_mapping = JobMapping(config)
        self.framework_versions = FrameworkVersions(config)
        self._config = config
        self._proc, self._sys = Path(config.collect.proc), Path(config.collect.sys)
        self._host = config.host_name
        self._names: dict[int, str] = {}
        self._listed: list[Device] = []
        self._names_of_jobs = JobNames(65_536)
        self._impossible: list[int] = []  # processes that say ranks that cannot be
        self._devices = HostDevices([], self._proc, self._sys)

    def owners(
        self,
        processes: Mapping[str, ProcessFacts],
        devices: Sequence[Device] = (),
        used: Mapping[str, Collection[str]] | None = None,
    ) -> dict[str, Owner]:
        """Returns the owner of each process, by its key.

        Args:
            processes: All relevant ones, by key.
            devices: The devices of this host, in order.
            used: The devices (uuids) that each process uses, by key.
        """
        used = used or {}
        if self._listed != devices:
            self._listed, self._devices = list(devices), HostDevices(devices, self._proc, self._sys)
        self.framework_versions.processes = dict(processes)
        self._impossible = [
            facts.pid
            for facts in processes.values()
            if any(len(text) > MAX_DIGITS for text in find_rank_variables(facts.environment)[2:])
        ]
        locations: dict[str, ContainerLocation] = {}
        for key, facts in processes.items():
            cgroup_fields = parse_cgroup_paths(facts.cgroups.values())
            if container := cgroup_fields.get("container", ""):
                pod = (
                    cgroup_fields.get("job", "")
                    if cgroup_fields.get("scheduler") == "kubernetes"
                    else ""
                )
                locations[key] = ContainerLocation(pod, container)
        stated = {key: self._stated(facts, locations.get(key)) for key, facts in processes.items()}
        granted = self._state_pods(processes, locations, used, stated)
        _inherit_jobs(processes, stated)
        self._state_jobs_of_devices(locations, used, stated)
        self._separate_users(processes, stated)
        for key, facts in processes.items():
            root = self._proc / str(facts.pid) / "root" if key in locations else None
            if match := find_assigned_devices(
                facts.environment, self._devices, root=root, kubelet=granted.get(key)
            ):
                stated[key]["devices"] = match
        # Use the devices that mapping files list for a job if no better evidence says what a
        # process was assigned.
        jobs = self._mapped_jobs()
        for process_claims in stated.values():
            job = process_claims.get("job", ("", ""))[0]
            uuids = jobs.get(job) or jobs.get(job.partition("-")[2])
            if uuids and "devices" not in process_claims:
                process_claims["devices"] = (tuple(uuids), "job mapping")
        _deduplicate_ranks(processes, stated, used, locations)
        return {key: build_owner(stated[key]) for key in processes}

    def list_problems(self) -> list[str]:
        """Returns what does not work here: sentences for the doctor."""
        granted = {
            name for container in self.kubelet.answer.containers for name in container.devices
        }
        mapped = set(self.job_mapping.jobs)
        names = {
            name for name in granted if name.startswith(("GPU-", "MIG-"))
        } | mapped  # other devices may be network cards
        unknown = sorted(
            name
            for name in names
            if not (self._devices.named(name) or self._devices.numbered(name))
        )
        troubles = []
        if self._impossible:
            troubles = [
                f"{len(self._impossible)} processes say that they are ranks with numbers that cannot be, as {self._impossible[0]}"
            ]
        if not unknown:
            return troubles
        subject = f"{len(unknown)} devices that the kubelet or job mapping names are not known here, as `{unknown[0]}`"
        return [
            *troubles,
            f"{subject}: no back end of the agent lists them, or several have that name",
        ]

    def _stated(self, facts: ProcessFacts, location: ContainerLocation | None) -> Claims:
        cgroup_fields = parse_cgroup_paths(facts.cgroups.values())
        # A loopback address is ambiguous without the host or container. A pod is better evidence.
        host = "" if "job" in cgroup_fields else location.container if location else self._host
        claims = extract_claims(facts.environment, self._config.owners.variables, host=host)
        if facts.frameworks:
            framework, library = next(iter(facts.frameworks.items()))
            claims["framework"] = (framework, "libraries")
            if version := self.framework_versions.versions.get((facts.key, library)):
                claims["framework_version"] = (version, "packages")
        for field, value in cgroup_fields.items():
            claims.setdefault(field, (value, "cgroup"))
        name = self._user(facts.uid)
        if name and (facts.uid or "user" not in claims):
            claims["user"] = (name, "uid")
        return claims

    def _state_pods(
        self,
        processes: Mapping[str, ProcessFacts],
        locations: Mapping[str, ContainerLocation],
        used: Mapping[str, Collection[str]],
        stated: Mapping[str, Claims],
    ) -> dict[str, frozenset[str]]:
        """Add pods and containers as the kubelet names them; returns the devices that it assigned,
        by process.
        """
        in_pods = {key: location for key, location in locations.items() if location.pod}
        answer = self.kubelet.answer
        self.kubelet.places = frozenset(in_pods.values())
        container_devices = {
            container: self._devices.parts(
                filter(None, map(self._devices.named, container.devices))
            )
            for container in answer.containers
        }
        evidence: dict[ContainerLocation, frozenset[str]] = {}
        hosts: dict[ContainerLocation, str] = {}
        for key, location in in_pods.items():
            if location in answer.places:  # the kubelet reassigns devices of containers that ended
                environment = processes[key].environment
                visible_devices = map(
                    self._devices.named, environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
                )
                evidence[location] = evidence.get(location, frozenset()).union(
                    used.get(key, ()), filter(None, visible_devices)
                )
                hosts.setdefault(location, environment.get("HOSTNAME", ""))
        pods, containers = match_containers(container_devices, evidence, hosts)
        granted = {}
        for key, location in in_pods.items():
            if location in evidence and location.pod in pods:
                namespace, pod = pods[location.pod]
                stated[key] |= {"namespace": (namespace, "kubelet"), "pod": (pod, "kubelet")}
                if name := containers.get(location):
                    stated[key]["container"] = (name, "kubelet")
                    granted[key] = frozenset().union(
                        *(
                            u
                            for c, u in container_devices.items()
                            if (c.namespace, c.pod, c.container) == (namespace, pod, name)
                        )
                    )
        return granted

    def _state_jobs_of_devices(
        self,
        locations: Mapping[str, ContainerLocation],
        used: Mapping[str, Collection[str]],
        stated: Mapping[str, Claims],
    ) -> None:
        """Add the owner of the devices that a process uses, if all of them agree."""
        jobs = self._mapped_jobs()
        scheduled = {
            job.partition("-")[2]: job
            for process_claims in stated.values()
            if (job := process_claims.get("job", ("", ""))[0])
        }
        for key, uuids in used.items():
            if key not in stated or not uuids:
                continue
            claims: list[dict[str, tuple[str, str]]] = []
            for uuid in uuids:
                device = self._devices.by_uuid.get(uuid)
                claim = (
                    {field: (value, "exporter") for field, value in device.owner.items()}
                    if device
                    else {}
                )
                listed = [job for job, job_devices in jobs.items() if uuid in job_devices]
                if len(listed) == 1:
                    claim["job"] = (scheduled.get(listed[0], listed[0]), "job mapping")
                elif listed:  # the job is one of them
                    claim.pop("job", None)
                claims.append(claim)
            in_pod = key in locations and bool(locations[key].pod)
            for field, statement in claims[0].items():
                is_pod_field = field in ("namespace", "pod", "container")
                if all(claim.get(field) == statement for claim in claims) and (
                    in_pod or not is_pod_field
                ):
                    stated[key].setdefault(field, statement)

    def _separate_users(
        self, processes: Mapping[str, ProcessFacts], stated: Mapping[str, Claims]
    ) -> None:
        """Call the job of another user than the first of that name NAME@USER: anybody can state any
        name. A scheduler's group of processes is its job's, whoever is in it.
        """
        jobs = {
            key: parse_cgroup_paths(facts.cgroups.values()).get("job")
            for key, facts in processes.items()
        }
        for facts in sorted(
            (facts for facts in processes.values() if "job" in stated[facts.key]),
            key=lambda facts: (
                jobs[facts.key] != stated[facts.key]["job"][0],  # those of schedulers first
                facts.start_ticks,
                facts.pid,
            ),
        ):
            claims = stated[facts.key]
            job, source = claims["job"]
            owner, suffix = facts.uid, claims.get("user", (facts.uid, ""))[0]
            if claims.get("namespace", ("", ""))[1] == "kubelet":
                owner = suffix = claims["namespace"][0]
            name = self._names_of_jobs.claim(
                job, owner, suffix, is_scheduled=jobs[facts.key] == job
            )
            claims["job"] = (name, source)

    def _mapped_jobs(self) -> dict[str, list[str]]:
        """Returns job as the mapping files name it -> its devices; of a divided one the
        partitions.
        """
        jobs: dict[str, list[str]] = {}
        usable = self._devices.all()
        for name, listed in self.job_mapping.jobs.items():
            parts = self._devices.parts([self._devices.named(name) or self._devices.numbered(name)])
            for job in listed:
                jobs.setdefault(job, []).extend(part for part in usable if part in parts)
        return jobs

    def _user(self, uid: int) -> str:
        """Returns the cached name of a user, "" if there is none."""
        if uid not in self._names:
            try:
                self._names[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._names[uid] = ""
        return self._names[uid]


def _iterate_ancestors(
    facts: ProcessFacts, processes_by_pid: Mapping[int, ProcessFacts]
) -> Iterator[ProcessFacts]:
    """Yields the relevant ancestors of a process, nearest first; stops at a reused pid."""
    passed = {facts.pid}
    ancestor = processes_by_pid.get(facts.parent_pid)
    while ancestor is not None and ancestor.pid not in passed:
        yield ancestor
        passed.add(ancestor.pid)
        ancestor = processes_by_pid.get(ancestor.parent_pid)


def _inherit_jobs(processes: Mapping[str, ProcessFacts], stated: Mapping[str, Claims]) -> None:
    """Give a process without a job that of its nearest ancestor with one: for workers whose
    environment was rewritten.
    """
    processes_by_pid = {facts.pid: facts for facts in processes.values()}
    for key, facts in processes.items():
        if "job" in stated[key]:
            continue
        for ancestor in _iterate_ancestors(facts, processes_by_pid):
            ancestor_claims = stated[ancestor.key]
            if "job" in ancestor_claims:
                for field in _JOB_FIELDS:
                    if field in ancestor_claims:
                        value, source = ancestor_claims[field]
                        inherited = (
                            source if source.startswith("process ") else f"process {ancestor.pid}"
                        )
                        stated[key].setdefault(field, (value, inherited))
                break


def _deduplicate_ranks(
    processes: Mapping[str, ProcessFacts],
    stated: Mapping[str, Claims],
    used: Mapping[str, Collection[str]],
    locations: Mapping[str, ContainerLocation],
) -> None:
    """Leave the rank to one of the processes with the same variables: the others are its wrappers
    or children.

    It is the first one on a device, else the first with a framework, else the first that started.
    If a rank of one launcher starts ranks of another, as a Slurm task that is torchrun does, the
    inner ones are the ranks.
    """
    processes_by_pid = {facts.pid: facts for facts in processes.values()}
    ranks = {key: facts for key, facts in processes.items() if "rank" in stated[key]}

    def alike(facts: ProcessFacts) -> tuple[object, ...]:
        process_claims = stated[facts.key]
        numbers = (
            process_claims[field][0] if field in process_claims else None for field in _RANK_FIELDS
        )
        return (
            find_rank_variables(facts.environment),
            *numbers,
            *map(facts.environment.get, LAUNCH_VARIABLES),
            locations.get(facts.key),
        )

    same: dict[tuple[object, ...], list[ProcessFacts]] = {}
    outer: set[tuple[object, ...]] = set()
    identities: dict[str, tuple[object, ...]] = {}
    for key, facts in sorted(ranks.items(), key=lambda item: (item[1].start_ticks, item[1].pid)):
        ranked_ancestors = [
            ancestor
            for ancestor in _iterate_ancestors(facts, processes_by_pid)
            if ancestor.key in ranks
        ]
        job: object = stated[key].get("job", ("", ""))[0]
        if not job:  # launches without a job may have equal variables
            job = next(
                (other.key for other in reversed(ranked_ancestors) if alike(other) == alike(facts)),
                key,
            )
        identities[key] = (job, *alike(facts))
        same.setdefault(identities[key], []).append(facts)
        launcher = find_rank_variables(facts.environment)[:1]
        outer.update(
            identities[other.key]
            for other in ranked_ancestors
            if find_rank_variables(other.environment)[:1] != launcher
        )
    for identity, members in same.items():
        first = min(members, key=lambda facts: (not used.get(facts.key), not facts.frameworks))
        for facts in members:
            if facts is not first or identity in outer:
                for field in _RANK_FIELDS:
                    stated[facts.key].pop(field, None)


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
