"""What variables of launchers and schedulers say of the owner of a process."""

from __future__ import annotations

from typing import Any

import pytest

from traceloom.agent.ownership.environment import (
    LISTED_VARIABLES,
    PREFIXES,
    build_owner,
    check_variables,
    extract_claims,
    find_rank_variables,
)
from traceloom.errors import InputError


def _owner(**environment: str) -> Any:
    return build_owner(extract_claims(environment, {}))


TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NAME": "llm",
    "SLURM_JOB_USER": "ada",
    "SLURM_JOB_ACCOUNT": "nlp",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_CLUSTER_NAME": "c1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
}

# environment -> fields of the owner that matter
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "torchrun": (
        TORCHRUN,
        {
            "rank": 5,
            "local_rank": 1,
            "world_size": 8,
            "job": "torchrun-n1:29500",
            "scheduler": "torchrun",
        },
    ),
    "torchrun with an id": (
        {**TORCHRUN, "TORCHELASTIC_RUN_ID": "exp7"},
        {"job": "torchelastic-exp7"},
    ),
    "slurm": (
        SLURM,
        {
            "rank": 3,
            "local_rank": 3,
            "world_size": 4,
            "job": "slurm-42",
            "scheduler": "slurm",
            "name": "llm",
            "user": "ada",
            "account": "nlp",
            "partition": "gpu",
        },
    ),
    "slurm before 22: tasks of the job": (
        {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NUM_TASKS"},
        {"rank": 3, "world_size": 16},
    ),
    "a batch script is no rank": (
        {key: value for key, value in SLURM.items() if not key.startswith("SLURM_STEP_")},
        {"rank": None, "world_size": None, "job": "slurm-42"},
    ),
    "torchrun inside slurm": (
        {**SLURM, **TORCHRUN},
        {"rank": 5, "local_rank": 1, "world_size": 8, "job": "slurm-42", "scheduler": "slurm"},
    ),
    "an array": (
        {**SLURM, "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7"},
        {
            "job": "slurm-42",
            "labels": {
                "slurm_cluster": "c1",
                "slurm_array_job": "40",
                "slurm_array_task": "7",
                "slurm_step": "0",
            },
        },
    ),
    "a part of a heterogeneous job": (
        {**SLURM, "SLURM_JOB_ID": "43", "SLURM_JOB_ID_HET_GROUP_0": "42"},
        {"job": "slurm-42"},
    ),
    "Open MPI": (
        {
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "4",
            "PMIX_NAMESPACE": "prterun-a-1@1",
        },
        {
            "rank": 2,
            "local_rank": 0,
            "world_size": 4,
            "job": "mpi-prterun-a-1@1",
            "scheduler": "mpi",
        },
    ),
    "Open MPI inside slurm": (
        {
            **SLURM,
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "4",
        },
        {"rank": 2, "world_size": 4, "job": "slurm-42", "scheduler": "slurm"},
    ),
    "MPICH": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"},
        {"rank": 1, "world_size": 2, "local_rank": 1, "job": "", "scheduler": "mpi"},
    ),
    "MVAPICH2": (
        {
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_LOCAL_RANK": "0",
            "PMI_RANK": "1",
            "PMI_SIZE": "2",
        },
        {"rank": 1, "world_size": 2, "local_rank": 0},
    ),
    "MVAPICH 3": (
        {"MVP_COMM_WORLD_RANK": "1", "MVP_COMM_WORLD_LOCAL_RANK": "0", "MVP_COMM_WORLD_SIZE": "2"},
        {"rank": 1, "local_rank": 0, "world_size": 2},
    ),
    "PALS": (
        {"PALS_RANKID": "9", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "16", "PBS_JOBID": "7.x"},
        {"rank": 9, "local_rank": 1, "world_size": 16, "job": "pbs-7.x"},
    ),
    "Ray": (
        {"RAY_JOB_ID": "01000000", "RAY_CLUSTER_NAME": "rc"},
        {"job": "ray-01000000", "scheduler": "ray", "labels": {"ray_cluster": "rc"}, "rank": None},
    ),
    "Ray inside slurm": (
        {**SLURM, "RAY_JOB_ID": "01000000"},
        {"job": "slurm-42", "scheduler": "slurm"},
    ),
    "LSF, an array, jsrun": (
        {
            "LSB_JOBID": "77",
            "LSB_JOBINDEX": "3",
            "LSB_QUEUE": "q",
            "LSB_JOBNAME": "n",
            "LSB_PROJECT_NAME": "p",
            "LSFUSER": "u",
            "JSM_NAMESPACE_RANK": "6",
            "JSM_NAMESPACE_SIZE": "12",
            "JSM_NAMESPACE_LOCAL_RANK": "0",
        },
        {
            "job": "lsf-77[3]",
            "scheduler": "lsf",
            "partition": "q",
            "name": "n",
            "account": "p",
            "user": "u",
            "rank": 6,
            "world_size": 12,
        },
    ),
    "LSF": ({"LSB_JOBID": "77", "LSB_JOBINDEX": "0"}, {"job": "lsf-77"}),
    "PBS": (
        {
            "PBS_JOBID": "12[3].srv",
            "PBS_QUEUE": "q",
            "PBS_JOBNAME": "n",
            "PBS_ACCOUNT": "a",
            "PBS_O_LOGNAME": "u",
        },
        {
            "job": "pbs-12[3].srv",
            "scheduler": "pbs",
            "partition": "q",
            "name": "n",
            "account": "a",
            "user": "u",
        },
    ),
    "Flux": (
        {
            "FLUX_JOB_ID": "f2Ab",
            "FLUX_TASK_RANK": "1",
            "FLUX_TASK_LOCAL_ID": "1",
            "FLUX_JOB_SIZE": "2",
        },
        {"job": "flux-f2Ab", "scheduler": "flux", "rank": 1, "local_rank": 1, "world_size": 2},
    ),
    "the downward API": (
        {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "POD_NAME": "p-0",
            "MY_POD_NAMESPACE": "ns",
            "POD_UID": "u-1",
            "CONTAINER_NAME": "c",
        },
        {
            "pod": "p-0",
            "namespace": "ns",
            "container": "c",
            "job": "pod-u-1",
            "scheduler": "kubernetes",
        },
    ),
    "a PyTorchJob": (
        {
            **TORCHRUN,
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "MASTER_ADDR": "bert-master-0",
            "POD_NAMESPACE": "ns",
        },
        {"job": "kubernetes-ns/bert", "name": "bert", "scheduler": "kubernetes", "rank": 5},
    ),
    "a JobSet": (
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_MASTER_ADDR": "train-7-node-0-0.train-7"},
        {"job": "kubernetes-train-7", "name": "train-7"},
    ),
    "a JobSet by name": (
        {"KUBERNETES_SERVICE_HOST": "1", "JOBSET_NAME": "js", "POD_NAMESPACE": "n"},
        {"job": "kubernetes-n/js"},
    ),
    "outside Kubernetes an address is no job": (
        {"MASTER_ADDR": "bert-master-0", "MASTER_PORT": "1", "WORLD_SIZE": "2"},
        {"job": "torchrun-bert-master-0:1"},
    ),
    "what the user says": (
        {
            **SLURM,
            "TRACELOOM_JOB": "mine",
            "TRACELOOM_LABEL_TEAM": "vision",
            "TRACELOOM_LABEL_A-B": "1",
        },
        {
            "job": "mine",
            "scheduler": "slurm",
            "labels": {"team": "vision", "a_b": "1", "slurm_cluster": "c1", "slurm_step": "0"},
        },
    ),
    "RANK alone may mean anything": ({"RANK": "3"}, {"rank": None}),
    "no number": ({**TORCHRUN, "RANK": "three"}, {"rank": None}),
    "nothing": ({}, {"job": "", "scheduler": "", "rank": None, "labels": {}, "sources": {}}),
}


@pytest.mark.parametrize("case", CASES)
def test_launchers_and_schedulers(case: str) -> None:
    environment, expected = CASES[case]
    owner = _owner(**environment)
    assert {field: getattr(owner, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("variable", "field", "value"),
    [
        ("SLURM_JOBID", "job", "slurm-x9"),
        ("SLURM_JOB_ID_PACK_GROUP_0", "job", "slurm-x9"),
        ("POD_UID", "job", "pod-x9"),
        ("K8S_POD_UID", "job", "pod-x9"),
        ("MY_POD_UID", "job", "pod-x9"),
        ("POD_NAME", "pod", "x9"),
        ("K8S_POD_NAME", "pod", "x9"),
        ("MY_POD_NAME", "pod", "x9"),
        ("POD_NAMESPACE", "namespace", "x9"),
        ("K8S_POD_NAMESPACE", "namespace", "x9"),
        ("MY_POD_NAMESPACE", "namespace", "x9"),
        ("CONTAINER_NAME", "container", "x9"),
        ("K8S_CONTAINER_NAME", "container", "x9"),
    ],
)
def test_other_names_of_the_same(variable: str, field: str, value: str) -> None:
    assert variable in LISTED_VARIABLES
    owner = _owner(**{variable: "x9"})
    assert (getattr(owner, field), owner.sources[field]) == (value, variable)


def test_every_case_needs_only_what_is_kept() -> None:
    names = {name for environment, _ in CASES.values() for name in environment}
    assert {name for name in names if not name.startswith(PREFIXES)} <= LISTED_VARIABLES
    assert not any(
        "KEY" in name or "TOKEN" in name or "SECRET" in name for name in LISTED_VARIABLES
    )


def test_sources_name_the_variable() -> None:
    sources = _owner(**SLURM).sources
    assert sources["job"] == "SLURM_JOB_ID"
    assert sources["rank"] == sources["world_size"] == "SLURM_PROCID"


def test_the_configuration_outranks_all() -> None:
    variables = {
        "TEAM": "account",
        "SITE_RANK": "rank",
        "EXP": "labels.experiment",
        "ABSENT": "job",
    }
    environment = {**SLURM, "TEAM": "t", "SITE_RANK": "11", "EXP": "e1"}
    owner = build_owner(extract_claims(environment, variables))
    assert (owner.account, owner.rank, owner.labels["experiment"], owner.job) == (
        "t",
        11,
        "e1",
        "slurm-42",
    )


def test_a_field_that_owners_do_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean `account`") as raised:
        check_variables({"TEAM": "acount"})
    assert raised.value.slug == "wrong-config"
    check_variables({"TEAM": "account", "X": "labels.x"})


def test_a_rank_and_what_it_starts_have_the_same_mark() -> None:
    assert (
        find_rank_variables(TORCHRUN)
        == find_rank_variables({**SLURM, **TORCHRUN})
        != find_rank_variables({**TORCHRUN, "RANK": "6"})
    )
    assert find_rank_variables({}) == ()
