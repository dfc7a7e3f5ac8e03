"""Who may see what."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from support.agent_server import ANNA, BERT, full_board
from traceloom.agent.metrics import METRICS
from traceloom.agent.publishers import render_openmetrics
from traceloom.agent.snapshot import VisibleSnapshot
from traceloom.server.access import Caller, authenticate_tcp_caller
from traceloom.server.listener import is_local_name
from traceloom.server.problem import HttpError
from traceloom.server.settings import Token

OWNED = {
    name for name, metric in METRICS.items() if {"process", "job", "cgroup"} & set(metric.labels)
}


def _names(view: VisibleSnapshot) -> set[str]:
    return {name for (name, _), _, _ in view.values()} | {
        histogram.metric for histogram, _ in view.histograms()
    }


def test_a_user_sees_the_host_and_what_is_own() -> None:
    view = VisibleSnapshot(full_board(), Caller(name="anna", uid=ANNA, sees="own"))
    assert set(view.processes) == {"11@100"}
    assert view.processes["11@100"].command
    assert _names(view) == set(METRICS)
    owned = {labels for (name, labels), _, _ in view.values() if name in OWNED}
    assert owned
    for labels in owned:
        assert {"11@100", "slurm-7", "/slurm-7"} & set(labels)
        assert not {"22@100", "slurm-8", "/slurm-8"} & set(labels)
    assert [histogram.labels for histogram, _ in view.histograms()] == [("slurm-7", "0")]


def test_a_stranger_sees_the_host_alone() -> None:
    view = VisibleSnapshot(full_board(), Caller(name="tcp", sees="host"))
    assert view.processes == {}
    assert _names(view) == set(METRICS) - OWNED


def test_kills_of_the_host_are_for_everybody() -> None:
    view = VisibleSnapshot(full_board(), Caller(name="tcp", sees="host"))
    assert view.shows(("oom_kills_total", ("", "")))
    assert not view.shows(("oom_kills_total", ("/slurm-7", "slurm-7")))


def test_a_group_that_users_share_and_kills_in_it_are_for_nobody_in_particular() -> None:
    host_snapshot = full_board()
    for uid, kills in ((ANNA, ["slurm-7"]), (BERT, [])):
        assert [
            kill.job
            for kill in VisibleSnapshot(
                host_snapshot, Caller(name="user", uid=uid, sees="own")
            ).oom_kills
        ] == kills
    assert VisibleSnapshot(host_snapshot, Caller(name="tcp", sees="host")).oom_kills == []
    assert (
        len(VisibleSnapshot(host_snapshot, Caller(name="root", uid=0, sees="all")).oom_kills) == 2
    )
    series = ("cgroup_memory_bytes", ("/slurm-7", ""))  # of no job
    anna = Caller(name="anna", uid=ANNA, sees="own")
    assert VisibleSnapshot(host_snapshot, anna).shows(series)
    bert = next(process for process in host_snapshot.processes.values() if process.uid == BERT)
    host_snapshot.processes[bert.key] = msgspec.structs.replace(bert, cgroup="/slurm-7")
    assert not VisibleSnapshot(host_snapshot, anna).shows(series)


def test_who_only_reads_sees_whose_processes_are_but_no_commands() -> None:
    host_snapshot = full_board()
    reader, root = (
        Caller(name="token", sees="all"),
        Caller(name="root", uid=0, sees="all", commands=True),
    )
    assert {
        process.command for process in VisibleSnapshot(host_snapshot, reader).processes.values()
    } == {""}
    names = METRICS["process_info"].labels

    def infos(peer: Caller) -> list[dict[str, str]]:
        return [
            dict(zip(names, labels, strict=True))
            for (name, labels), _, _ in VisibleSnapshot(host_snapshot, peer).values()
            if name == "process_info"
        ]

    assert [(row["process"], row["command"]) for row in infos(reader)] == [
        ("11@100", ""),
        ("22@100", ""),
    ]
    assert all(row["command"] for row in infos(root))
    from traceloom.agent.config import Config

    assert (
        b"train.py"
        not in render_openmetrics(VisibleSnapshot(host_snapshot, reader), Config(compat=("dcgm",)))[
            0
        ]
    )


def test_labels_of_dcgm_exporter_name_no_job_of_another() -> None:
    from traceloom.agent.config import Config

    text, _ = render_openmetrics(
        VisibleSnapshot(full_board(), Caller(name="bert", uid=BERT, sees="own")),
        Config(compat=("dcgm",)),
    )
    assert b'hpc_job="8"' in text
    assert b'hpc_job="7"' not in text


TOKENS = (
    Token(sha256=hashlib.sha256(b"for-prometheus").hexdigest().upper(), name="prometheus"),
    Token(sha256=hashlib.sha256(b"for-operators").hexdigest(), name="operators", may="all"),
)


@pytest.mark.parametrize("loopback", [True, False])
def test_tokens_say_what_their_bearer_may(loopback: bool) -> None:
    reader = authenticate_tcp_caller(
        "10.0.0.1", "Bearer for-prometheus", TOKENS, loopback=loopback, certified=""
    )
    assert (reader.name, reader.sees, reader.acts, reader.commands) == (
        "token prometheus",
        "all",
        False,
        False,
    )
    operator = authenticate_tcp_caller(
        "10.0.0.1", "bearer  for-operators ", TOKENS, loopback=loopback, certified=""
    )
    assert (operator.name, operator.sees, operator.acts, operator.commands) == (
        "token operators",
        "all",
        True,
        True,
    )
    assert operator.uid is None
    assert not operator.unlimited


@pytest.mark.parametrize("header", ["Bearer guess", "Bearer ", "Bearer " + TOKENS[0].sha256])
def test_another_token_is_refused_even_on_loopback(header: str) -> None:
    with pytest.raises(HttpError) as raised:
        authenticate_tcp_caller("127.0.0.1", header, TOKENS, loopback=True, certified="")
    assert (raised.value.status, raised.value.slug) == (401, "unknown-token")


def test_without_a_token() -> None:
    assert (
        authenticate_tcp_caller("127.0.0.1", "", TOKENS, loopback=True, certified="").sees == "host"
    )
    assert (
        authenticate_tcp_caller("10.0.0.1", "", (), loopback=False, certified="prometheus").sees
        == "all"
    )
    for tokens, certified in (((), ""), (TOKENS, "prometheus"), (TOKENS, "")):
        with pytest.raises(HttpError, match="a token is needed"):
            authenticate_tcp_caller(
                "10.0.0.1", "Basic abc", tokens, loopback=False, certified=certified
            )


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("localhost:9465", True),
        ("127.0.0.1:9465", True),
        ("[::1]:9465", True),
        ("[::1]", True),
        ("evil.example:9465", False),
        ("", False),
    ],
)
def test_names_of_this_host(host: str, local: bool) -> None:
    assert is_local_name(host) == local
