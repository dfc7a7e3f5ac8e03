"""What is measured now, and what hosts say of jobs: from heartbeats to answers and to the table `jobs`."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import AnsweringService, answering  # noqa: E402
from support.fleet import KINDS, Kind, opened, places  # noqa: E402
from traceloom.agent.fleet_link.protocol import Heartbeat, HostDevice, HostProcess  # noqa: E402
from traceloom.cli import main  # noqa: E402
from traceloom.fleet.handlers.now import LiveParameters, build_live_answer  # noqa: E402
from traceloom.fleet.service.committer import collect_capture_facts, collect_job_facts, commit_jobs  # noqa: E402
from traceloom.fleet.service.requests import LastHeartbeat  # noqa: E402
from traceloom.fleet.store.database import LEADER  # noqa: E402
from traceloom.fleet.store.hosts import JobFacts  # noqa: E402
from traceloom.fleet.store.schema import SCHEMAS  # noqa: E402

NOW = 1_790_000_000 * 10**9


def device(
    uuid: str, busy: float | None = None, power: float | None = None, stale: str = ""
) -> HostDevice:
    values = {"gpu_busy_ratio": busy, "gpu_power_watts": power, "gpu_memory_used_bytes": 10e9}
    return HostDevice(
        uuid=uuid, stale=stale, values={name: v for name, v in values.items() if v is not None}
    )


def process(
    job: str, rank: int, devices: tuple[str, ...], rate: float | None = None, **said: Any
) -> HostProcess:
    key = f"{job}{rank}@1"
    return HostProcess(
        key=key, pid=1, uid=0, job=job, rank=rank, devices=devices, steps_per_second=rate, **said
    )


def heard(
    devices: list[HostDevice], processes: list[HostProcess], at_ns: int = NOW
) -> LastHeartbeat:
    beat = Heartbeat(sent_ns=1, boot_id="b", version="1", devices=devices, processes=processes)
    return LastHeartbeat(heartbeat=beat, received_ns=at_ns)


HOSTS = {
    "n1": heard(
        [device("a", 0.5, 100), device("b", 1.0, 300)], [process("j", 0, ("a",), 2.0)], NOW - 5
    ),
    "n2": heard(
        [device("c", 0.1, 200), device("d")],
        [process("j", 1, ("c",), 0.5), process("k[1]", 0, ("d", "c"))],
    ),
}


def test_values_are_those_of_the_devices_of_a_job_and_of_its_slowest_rank() -> None:
    rows = {row.job: row for row in build_live_answer(HOSTS, LiveParameters(), NOW).rows}
    j, k = rows["j"], rows["k[1]"]
    assert (j.host, j.devices, j.busy, j.power_w, j.memory_bytes) == (
        "n1, n2",
        2,
        pytest.approx(0.3),
        300,
        20e9,
    )
    assert (j.steps_per_second, j.step_s, j.heard_ns) == (0.5, 2.0, NOW - 5)
    assert (k.devices, k.busy, k.power_w, k.step_s) == (
        2,
        0.1,
        None,
        None,
    )  # one of its devices measures nothing


def test_hosts_and_devices_are_rows_with_their_jobs() -> None:
    rows = {row.host: row for row in build_live_answer(HOSTS, LiveParameters(by="host"), NOW).rows}
    assert (rows["n1"].devices, rows["n1"].power_w, rows["n2"].job) == (2, 400, "j, k[1]")
    devices = build_live_answer(HOSTS, LiveParameters(by="device", host="n?"), NOW).rows
    assert [(row.device, row.job) for row in devices] == [
        ("a", "j"),
        ("b", ""),
        ("c", "j, k[1]"),
        ("d", "k[1]"),
    ]
    assert [row.job for row in build_live_answer(HOSTS, LiveParameters(job="k[*"), NOW).rows] == [
        "k[1]"
    ]
    assert build_live_answer(HOSTS, LiveParameters(by="device", top=3), NOW).more
    silent = {"n": heard([device("a", 0.5, 100, stale="lost")], [])}
    assert build_live_answer(silent, LiveParameters(by="host"), NOW).rows[0].busy is None


def asked(service: AnsweringService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACELOOM_SERVER", service.url)
    monkeypatch.setenv("TRACELOOM_TOKEN", service.token("operator", "olga"))


def test_heartbeats_are_answered_live_and_make_rows_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(tmp_path) as service:
        asked(service, monkeypatch)
        registry, state, tables = (
            service.service.hosts,
            service.service.state,
            service.service.tables,
        )
        assert registry is not None
        said = {"user": "ana", "scheduler": "slurm", "labels": {"division": "ads"}}
        for framework in ("", "pytorch", "pytorch"):
            rank = process("j", 0, ("a",), 2.0, framework=framework, **said)
            registry.now["n1"] = heard([device("a", 0.5, 100)], [rank], time.time_ns())
            asyncio.run(registry._say_of_jobs())
        assert main(["fleet", "query"]) == 0
        assert "50.0 %" in capsys.readouterr().out
        assert main(["fleet", "query", "--by", "host", "--json"]) == 0
        [row] = json.loads(capsys.readouterr().out)["rows"]
        assert (row["host"], row["power_w"], row["step_s"]) == ("n1", 100, 0.5)
        while commit_jobs(state, tables, service.service.pipeline.term):
            pass
        rows = tables.scan("jobs").sort("valid_from_ns").collect()
        assert rows.select("job", "user", "framework").rows() == [
            ("j", "ana", None),
            ("j", "ana", "pytorch"),
        ]
        time_ns = time.time_ns() // 60_000_000_000 * 60_000_000_000
        minute = {
            "time_ns": [time_ns],
            "host": ["n1"],
            "device": ["a"],
            "job": ["j"],
            "state": ["busy"],
            "device_ms": [60_000],
        }
        day = pl.from_epoch(pl.Series([time_ns]), "ns").dt.date()
        tables.commit(
            "usage",
            1,
            {"usage_hour": SCHEMAS["usage_hour"].complete(pl.DataFrame({"day": day, **minute}))},
        )
        tree = service.admin.get("attribution", by="division,user", since="1h")["rows"]
        assert [(row["values"], row["device_ms"]) for row in tree] == [
            ([], 60_000),
            (["ads"], 60_000),
            (["ads", "ana"], 60_000),
        ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_a_row_once_however_often_it_is_committed(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = opened(places(kind, tmp_path, monkeypatch))
    state, tables = stores.state, stores.tables
    assert state.lead(LEADER, "term", 600)
    try:
        assert (
            state.say_of_jobs({"j": JobFacts(user="ana", labels={"a": "1"}), "k": JobFacts()}, NOW)
            == 2
        )
        assert commit_jobs(state, tables, "term") == 2
        with (
            state._transaction() as connection
        ):  # as if it was killed between the tables and the state
            state._change(connection, "UPDATE job_facts SET batch = 1")
        assert (
            state.say_of_jobs({"j": JobFacts(framework="pytorch", labels={"b": "2"})}, NOW - 10)
            == 1
        )
        assert [commit_jobs(state, tables, "term") for _ in range(3)] == [2, 1, 0]
        assert state.say_of_jobs({"j": JobFacts(user="ana")}, NOW + 10) == 0
        rows = tables.scan("jobs").sort("job", "valid_from_ns").collect()
        assert rows.select("job", "user", "framework", "labels", "valid_from_ns").rows() == [
            ("j", "ana", None, '{"a":"1"}', NOW),
            ("j", "ana", "pytorch", '{"a":"1","b":"2"}', NOW + 1),
            ("k", None, None, None, NOW),
        ]
    finally:
        state.close()


def test_what_is_said_of_a_job_is_the_first_that_somebody_says() -> None:
    processes = {
        "n2": [process("j", 0, (), user="bo", labels={"b": "x" * 900})],
        "n1": [process("j", 1, (), framework="jax", labels={"a": "1"}), process("a\0b", 0, ())],
    }
    assert collect_job_facts(processes) == {
        "j": JobFacts(user="bo", framework="jax", labels={"a": "1", "b": "x" * 500})
    }
    captures = pl.DataFrame(
        {"job": ["j", None, "k"], "torch": ["2.9", "2.9", None], "start_ns": [1, 2, 3]}
    )
    assert collect_capture_facts(captures) == {("j", 1): JobFacts(framework="pytorch")}
