"""Ownership from environment variables and cgroup paths, and the variables that prepare jobs for
tracing.

Only the variables listed here are ever kept of an environment. The tables below are ordered rules:
the first launcher whose variables are set gives the rank, the first scheduler the job. Launchers
come before those that they run in (a process that torchrun started inside a Slurm step has its rank
from torchrun), schedulers before those that run in them (its job is Slurm's). Rank, local rank and
world size always come from the same launcher.

Cgroup paths: Slurm's cgroup/v1 and v2 plugins; the kubelet with cgroupfs and systemd drivers;
containerd, CRI-O, Docker and Podman.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from traceloom.agent.config import AgentPaths
from traceloom.agent.kineto import SETTINGS_FILE
from traceloom.agent.ownership.model import Owner
from traceloom.errors import InputError, nearest

MAX_LABELS = 16
MAX_DIGITS = 9  # of a rank or a number of ranks
LABEL_PREFIX = "TRACELOOM_LABEL_"
PREFIXES = (LABEL_PREFIX,)

Claims = dict[str, tuple[Any, str]]
"""Field of `Owner`, or `labels.NAME` -> its value, and its source."""


class Launcher(NamedTuple):
    """The variables that a launcher sets in each of its processes.

    They count only if `mark` is set.
    """

    name: str
    rank: str
    local_rank: str
    world_size: str
    mark: str


# A Slurm batch script has SLURM_PROCID=0 like its tasks, but no SLURM_STEP_ID. RANK alone is
# ambiguous.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE", "WORLD_SIZE"),
    Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", ""
    ),
    Launcher(
        "MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", ""
    ),
    Launcher(
        "MVAPICH", "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_SIZE", ""
    ),
    Launcher("PALS", "PALS_RANKID", "PALS_LOCAL_RANKID", "PMI_SIZE", ""),
    Launcher("PMI", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", ""),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE", ""),
    Launcher("Flux", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE", ""),
    Launcher(
        "Slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS"
    ),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_ID"),
)

MPI_LAUNCHERS = LAUNCHERS[1:7]


class BatchScheduler(NamedTuple):
    """Variables of a scheduler that name the job (the first that is set counts), and its other
    information.
    """

    name: str
    job: tuple[str, ...]
    fields: tuple[tuple[str, str], ...] = ()


# The components of a heterogeneous Slurm job have ids of their own; the first one's is used for
# all.
SCHEDULERS = (
    BatchScheduler(
        "slurm",
        ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID_PACK_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID"),
        (
            ("name", "SLURM_JOB_NAME"),
            ("user", "SLURM_JOB_USER"),
            ("account", "SLURM_JOB_ACCOUNT"),
            ("partition", "SLURM_JOB_PARTITION"),
            ("labels.slurm_cluster", "SLURM_CLUSTER_NAME"),
            ("labels.slurm_array_job", "SLURM_ARRAY_JOB_ID"),
            ("labels.slurm_array_task", "SLURM_ARRAY_TASK_ID"),
            ("labels.slurm_step", "SLURM_STEP_ID"),
        ),
    ),
    BatchScheduler(
        "lsf",
        ("LSB_JOBID",),
        (
            ("name", "LSB_JOBNAME"),
            ("user", "LSFUSER"),
            ("account", "LSB_PROJECT_NAME"),
            ("partition", "LSB_QUEUE"),
            ("labels.lsf_array_task", "LSB_JOBINDEX"),
        ),
    ),
    BatchScheduler(
        "pbs",
        ("PBS_JOBID",),
        (
            ("name", "PBS_JOBNAME"),
            ("user", "PBS_O_LOGNAME"),
            ("account", "PBS_ACCOUNT"),
            ("partition", "PBS_QUEUE"),
        ),
    ),
    BatchScheduler("flux", ("FLUX_JOB_ID",)),
    BatchScheduler("ray", ("RAY_JOB_ID",), (("labels.ray_cluster", "RAY_CLUSTER_NAME"),)),
)

# Usual names of variables set by Kubernetes' downward API, which are up to the user.
_POD_VARIABLES = {
    "pod": ("POD_NAME", "K8S_POD_NAME", "MY_POD_NAME"),
    "namespace": ("POD_NAMESPACE", "K8S_POD_NAMESPACE", "MY_POD_NAMESPACE"),
    "container": ("CONTAINER_NAME", "K8S_CONTAINER_NAME"),
}
_POD_UID_VARIABLES = ("POD_UID", "K8S_POD_UID", "MY_POD_UID")
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
# Address of the first worker of a PyTorchJob (Kubeflow) or JobSet, which all workers get.
_FIRST_WORKER = re.compile(
    r"(?P<job>[a-z0-9.-]+)-master-0|(?P<set>[a-z0-9-]+?)-[a-z0-9-]+-0-0\.(?P=set)(?:\..*)?"
)

_TORCHELASTIC = "TORCHELASTIC_RUN_ID"
_MAIN_ADDRESS = ("MASTER_ADDR", "PET_MASTER_ADDR")
_MAIN_PORT = "MASTER_PORT"
_MPI_JOB = "PMIX_NAMESPACE"
JOB_VARIABLE = "TRACELOOM_JOB"
DTYPE_VARIABLE = "TRACELOOM_DTYPE"
INPUT_BYTES_VARIABLE = "TRACELOOM_INPUT_BYTES_PER_STEP"

DEVICE_VARIABLES = (
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # number of ranks that torchrun started on this host
HOST_VARIABLE = "HOSTNAME"  # in a pod, the pod's name
# Variables by which PyTorch's profiler finds the agent. The first only needs to be set, to any
# value.
POLLS, POLLED_DIRECTORY = "KINETO_USE_DAEMON", "KINETO_IPC_SOCKET_DIR"
# Variables that make PyTorch's flight recorder of collectives accessible.
WORKER_SERVER, DUMP_PIPE = "TORCH_WORKER_SERVER_SOCKET", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

# Variables that distinguish two launches of one job with the same rank numbers.
LAUNCH_VARIABLES = ("SLURM_STEP_ID", *_MAIN_ADDRESS, _MAIN_PORT, _TORCHELASTIC, _MPI_JOB)
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}

LISTED_VARIABLES: frozenset[str] = frozenset(
    {
        *(variable for launcher in LAUNCHERS for variable in launcher[1:] if variable),
        *(variable for scheduler in SCHEDULERS for variable in scheduler.job),
        *(variable for scheduler in SCHEDULERS for _, variable in scheduler.fields),
        *(variable for variables in _POD_VARIABLES.values() for variable in variables),
        *_POD_UID_VARIABLES,
        _IN_KUBERNETES,
        "JOBSET_NAME",
        _TORCHELASTIC,
        *_MAIN_ADDRESS,
        _MAIN_PORT,
        _MPI_JOB,
        JOB_VARIABLE,
        DTYPE_VARIABLE,
        INPUT_BYTES_VARIABLE,
        *DEVICE_VARIABLES,
        LOCAL_WORLD_SIZE,
        HOST_VARIABLE,
        POLLS,
        POLLED_DIRECTORY,
        WORKER_SERVER,
        DUMP_PIPE,
        *DUMP_FILES,
    }
)
"""The variables that are kept, in addition to those with one of `PREFIXES` and configured ones."""

_TEXT_FIELDS = {
    "job",
    "name",
    "scheduler",
    "user",
    "account",
    "partition",
    "namespace",
    "pod",
    "container",
}
_NUMBER_FIELDS = {"rank", "local_rank", "world_size"}


def check_variables(variables: Mapping[str, str]) -> None:
    """Check that `owners.variables` of the configuration names fields of an owner.

    Raises:
        InputError: slug `wrong-config`.
    """
    fields = _TEXT_FIELDS | _NUMBER_FIELDS
    for variable, field in variables.items():
        if field not in fields and not re.fullmatch(r"labels\.[a-z][a-z0-9_]*", field):
            raise InputError(
                f"an owner has no field `{field}`, which is to be `{variable}`",
                slug="wrong-config",
                where="owners.variables",
                hint=nearest(field, fields)
                + f"it has {', '.join(sorted(fields))} and `labels.NAME`",
            )


def find_rank_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what makes a process a rank: the launcher and the values of its variables; () if it
    is none.

    Children inherit these: processes with equal values are the rank and its children.
    """
    for launcher in LAUNCHERS:
        rank, size = environment.get(launcher.rank, ""), environment.get(launcher.world_size, "")
        marked = not launcher.mark or launcher.mark in environment
        if marked and rank.isdecimal() and (size.isdecimal() or not size):
            return (
                launcher.name,
                launcher.rank,
                rank,
                environment.get(launcher.local_rank, ""),
                size,
            )
    return ()


def parse_number(text: str) -> int | str:
    """Returns the number of a rank or of ranks; "" if it is none, or larger than any can be."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else ""


def extract_claims(
    environment: Mapping[str, str], variables: Mapping[str, str], *, host: str = ""
) -> Claims:
    """Returns everything that an environment says about the owner. The user in it is weaker
    evidence than the kernel's.

    Args:
        environment: The listed variables of a process.
        variables: Those of the configuration, which take precedence.
        host: Host of a loopback address, which identifies a job only together with the host; "":
            such an address is ignored.
    """
    claims: Claims = {}

    def state(field: str, variable: str, value: Any) -> None:
        if value != "" and field not in claims:
            claims[field] = (value, variable)

    for variable, field in variables.items():
        value = environment.get(variable, "")
        state(
            field,
            variable,
            parse_number(value) if field in _NUMBER_FIELDS else value,
        )
    ranks = find_rank_variables(environment)
    if ranks:
        for field, value in zip(("rank", "local_rank", "world_size"), ranks[2:], strict=True):
            state(field, ranks[1], parse_number(value))
    state("job", JOB_VARIABLE, environment.get(JOB_VARIABLE, ""))
    for scheduler in SCHEDULERS:
        variable = next((name for name in scheduler.job if environment.get(name)), "")
        if not variable:
            continue
        job = environment[variable]
        if scheduler.name == "lsf" and environment.get("LSB_JOBINDEX", "0") != "0":
            job += f"[{environment['LSB_JOBINDEX']}]"
        state("job", variable, f"{scheduler.name}-{job}")
        if scheduler.name != "ray":  # ray may run inside others
            state("scheduler", variable, scheduler.name)
        for field, name in scheduler.fields:
            state(field, name, environment.get(name, ""))
        break
    for field, names in _POD_VARIABLES.items():
        for name in names:
            state(field, name, environment.get(name, ""))
    _add_other_jobs(environment, host, state)
    labels = [name for name in sorted(environment) if name.startswith(LABEL_PREFIX)]
    for name in labels[:MAX_LABELS]:
        state(
            "labels." + re.sub(r"[^a-z0-9_]", "_", name[len(LABEL_PREFIX) :].lower()),
            name,
            environment[name],
        )
    return claims


def _add_other_jobs(environment: Mapping[str, str], host: str, state: Any) -> None:
    """Add jobs without a batch scheduler: of Kubernetes, torchrun, MPI."""
    in_kubernetes = _IN_KUBERNETES in environment
    address = next((environment[name] for name in _MAIN_ADDRESS if environment.get(name)), "")
    first = _FIRST_WORKER.fullmatch(address)
    name = environment.get("JOBSET_NAME") or (first and (first["job"] or first["set"])) or ""
    if in_kubernetes:
        state("scheduler", _IN_KUBERNETES, "kubernetes")
    if in_kubernetes and name:
        namespace = next(
            (environment[name] for name in _POD_VARIABLES["namespace"] if environment.get(name)), ""
        )
        variable = "JOBSET_NAME" if environment.get("JOBSET_NAME") else "MASTER_ADDR"
        state(
            "job", variable, f"kubernetes-{namespace}/{name}" if namespace else f"kubernetes-{name}"
        )
        state("name", variable, name)
    run = environment.get(_TORCHELASTIC, "")
    port = environment.get(_MAIN_PORT, "")
    if run not in ("", "none"):  # torchrun's default without --rdzv-id
        state("job", _TORCHELASTIC, f"torchelastic-{run}")
    elif (
        (location := host if address in _LOOPBACK else address)
        and port
        and environment.get("WORLD_SIZE")
    ):
        state("job", "MASTER_ADDR", f"torchrun-{location}:{port}")
    if run or port:
        state("scheduler", _TORCHELASTIC if run else _MAIN_PORT, "torchrun")
    if environment.get("RAY_JOB_ID"):
        state("scheduler", "RAY_JOB_ID", "ray")
    state("job", _MPI_JOB, f"mpi-{environment[_MPI_JOB]}" if environment.get(_MPI_JOB) else "")
    for launcher in MPI_LAUNCHERS:
        if environment.get(launcher.rank):
            state("scheduler", launcher.rank, "mpi")
    uid = next((name for name in _POD_UID_VARIABLES if environment.get(name)), "")
    state("job", uid, f"pod-{environment[uid]}" if uid else "")


def build_owner(stated: Claims) -> Owner:
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for field, (value, _) in stated.items():
        if field.startswith("labels."):
            labels[field.removeprefix("labels.")] = value
        else:
            values[field] = value
    return Owner(
        labels=labels, sources={field: source for field, (_, source) in stated.items()}, **values
    )


KINETO_SETTINGS, AGENT_SOCKET = "KINETO_CONFIG", "TRACELOOM_AGENT"


def get_job_variables(locations: AgentPaths, uid: int) -> dict[str, str]:
    """Returns the variables for jobs of a user, name -> value.

    PyTorch's profiler polls a daemon whose socket is in the directory; without a socket, it fails
    at once and costs nothing. The directory is accessible to the user only, so no one else can
    reach the listener. The file in it sets the polling interval.
    """
    directory = locations.kineto / str(uid)
    return {
        POLLS: "1",
        POLLED_DIRECTORY: str(directory),
        KINETO_SETTINGS: str(directory / SETTINGS_FILE),
        AGENT_SOCKET: str(locations.socket),
    }


def create_flight_variables() -> dict[str, str]:
    """Returns the variables for jobs whose flight record of collectives can be read while they run,
    name -> value.

    NCCL's process group creates a pipe per rank, and ends the process if it cannot: therefore in
    `/tmp`, which exists on every host that a launcher propagates these variables to, with an
    unpredictable name.
    """
    stem = f"/tmp/traceloom-{secrets.token_hex(8)}"  # noqa: S108  (a name that nobody knows)
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        DUMP_PIPE: f"{stem}-pipe-",
        DUMP_FILES[0]: f"{stem}-dump-",
    }


_SLURM_CGROUP = re.compile(
    r"/(?:[^/]*slurmstepd\.scope|slurm[^/]*/uid_\d+)/job_(?P<job>\d+)(?:/|$)"
)
# Below these a user may name groups as he likes, also as a scheduler does.
_DELEGATED_CGROUP = re.compile(r"/user\.slice/|\.service/.*/job_")
# `pod1234-...` below kubepods, whose dashes systemd's driver writes as underscores. Seen from a
# pod's own cgroup namespace, the path of another pod starts with `..` and need not contain
# kubepods.
_POD_IN_CGROUP = re.compile(
    r"(?:kubepods[^/]*|^/\.\.)(?:/[^/]+)*?[/-]pod"
    r"(?P<pod>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
)
_CONTAINER_CGROUP = re.compile(
    r"(?:^|/)(?:cri-containerd[-:]|crio-|docker-|libpod-)?(?P<container>[0-9a-f]{64})(?:\.scope)?(?:/|$)"
)


def parse_cgroup_paths(paths: Iterable[str]) -> dict[str, str]:
    """Returns `job`, `scheduler` and `container` as far as the cgroup paths of a process contain
    them.
    """
    facts: dict[str, str] = {}
    for path in paths:
        if _DELEGATED_CGROUP.search(path):
            pass
        elif match := _SLURM_CGROUP.search(path):
            facts.setdefault("job", f"slurm-{match['job']}")
            facts.setdefault("scheduler", "slurm")
        elif match := _POD_IN_CGROUP.search(path):
            facts.setdefault("job", f"pod-{match['pod'].replace('_', '-')}")
            facts.setdefault("scheduler", "kubernetes")
        if match := _CONTAINER_CGROUP.search(path):
            facts.setdefault("container", match["container"][:12])
    return facts
