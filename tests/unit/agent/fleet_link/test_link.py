"""A host and its fleet: how it comes to belong, what it says of itself, and what becomes of work."""

from __future__ import annotations

import asyncio
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from support.scripted_service import Question, Reply, ScriptedService, refusal, scripted
from support.triggers import Rules, worker
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.config import FleetLink
from traceloom.agent.fleet_link.link import TOKEN_VARIABLE, FleetConnection, Membership
from traceloom.agent.fleet_link.protocol import (
    Enrolment,
    Heartbeat,
    HeartbeatResponse,
    HostCredentials,
    HostReport,
    HostWork,
    ReportResponse,
    UsageRow,
    WorkResponse,
)
from traceloom.agent.topline import JobAccounting
from traceloom.agent.traces.requests import TraceSpec

HOUR_NS = 3600 * 10**9
encode = msgspec.json.encode


class Fleet:
    """What a service that belongs to the test knows and says; its clock is an hour ahead."""

    def __init__(self) -> None:
        self.enrolments: list[Enrolment] = []
        self.beats: list[Heartbeat] = []
        self.reports: dict[str, list[HostReport]] = {}
        self.files: dict[str, bytes] = {}
        self.work: list[HostWork] = []
        self.version = 0
        self.strangers = 0  # questions without the credential
        self.kept = 0  # the last minute of usage

    def __call__(self, question: Question) -> Reply:
        received_ns = time.time_ns() + HOUR_NS
        if question.path.endswith("agents/enrol"):
            self.enrolments.append(msgspec.json.decode(question.body, type=Enrolment))
            if self.enrolments[-1].token != "once":
                return refusal(403, "wrong-token", "that token is none")
            return Reply(
                encode(HostCredentials(host="node1", credential=f"secret{len(self.enrolments)}"))
            )
        if question.credential != f"Bearer secret{len(self.enrolments) or 1}":
            self.strangers += 1
            return refusal(401, "no-credential", "who is that?")
        if question.path.endswith("/heartbeat"):
            self.beats.append(msgspec.json.decode(question.body, type=Heartbeat))
            self.kept = max([self.kept, *(row.minute for row in self.beats[-1].usage)])
            answered_ns = time.time_ns() + HOUR_NS
            return Reply(
                encode(
                    HeartbeatResponse(
                        received_ns=received_ns, answered_ns=answered_ns, usage_through=self.kept
                    )
                )
            )
        if "/work?" in question.path:
            version = re.findall("version=([^&]*)", question.path)[0]
            end = time.monotonic() + 5
            while version == str(self.version) and time.monotonic() < end:
                time.sleep(0.01)
            return Reply(encode(WorkResponse(version=str(self.version), work=self.work)))
        if match := re.search("/requests/([^/]+)$", question.path):
            self.reports.setdefault(match[1], []).append(
                msgspec.json.decode(question.body, type=HostReport)
            )
            return Reply(encode(ReportResponse()))
        return refusal(404, "no-such-route", question.path)

    def offer(self, *work: HostWork) -> None:
        """All work that there is from now on."""
        self.work, self.version = list(work), self.version + 1


class Host:
    """An uplink with the parts of an agent that it needs; `changes`: of its table `fleet`."""

    def __init__(self, folder: Path, service: ScriptedService, **changes: object) -> None:
        self.rules = Rules(folder=folder)
        link = replace(FleetLink(server=service.url, heartbeat=0.05), **changes)
        self.uplink = FleetConnection(
            replace(self.rules.config, fleet=link),
            folder,
            self.rules.host_snapshot,
            self.rules.trace_service,
            JobAccounting("H100"),
            "boot7",
        )

    def until(self, condition: Callable[[], object]) -> None:
        """Belong to the fleet until something is so."""

        async def run() -> None:
            self.uplink.start()
            end = time.monotonic() + 60
            while not condition():
                assert time.monotonic() < end, self.uplink.last_error
                await asyncio.sleep(0.01)
            await self.uplink.close()
            await self.rules.close()

        asyncio.run(run())


def test_a_host_enrols_once_and_keeps_what_it_got_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, " once\n")
    fleet = Fleet()
    with scripted(fleet) as service:
        Host(tmp_path, service).until(lambda: fleet.beats)
        monkeypatch.delenv(TOKEN_VARIABLE)
        before = len(fleet.beats)
        Host(tmp_path, service).until(
            lambda: len(fleet.beats) > before + 1
        )  # it needs no token any more
        (enrolment,) = fleet.enrolments
        assert (enrolment.token, enrolment.host, enrolment.boot_id) == ("once", "node1", "boot7")
        path = tmp_path / "fleet.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        kept = msgspec.json.decode(path.read_bytes(), type=Membership)
        assert kept == Membership(version=1, server=service.url, host="node1", credential="secret1")
        assert list(tmp_path.glob(".fleet*")) == []
    other = Fleet()
    with scripted(other) as service:  # what one service gave says nothing to another one
        monkeypatch.setenv(TOKEN_VARIABLE, "once")
        Host(tmp_path, service).until(lambda: other.beats)
        assert len(other.enrolments) == 1
        assert msgspec.json.decode(path.read_bytes(), type=Membership).server == service.url
    assert (fleet.strangers, other.strangers) == (0, 0)


@pytest.mark.parametrize("token", ["other", b"\xff"], ids=["wrong", "no text"])
def test_a_token_that_comes_later_is_enough(
    tmp_path: Path, token: str | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file wins over the variable, and until there is a good one the agent says what is wrong."""
    monkeypatch.setenv(TOKEN_VARIABLE, "other")
    path, fleet = tmp_path / "token", Fleet()
    path.write_bytes(token.encode() if isinstance(token, str) else token)
    troubles: list[str] = []
    with scripted(fleet) as service:
        host = Host(tmp_path / "state", service, token_file=str(path))

        def belongs() -> bool:
            if host.uplink.last_error and not troubles:
                troubles.append(host.uplink.last_error)
                path.write_text("once")
            return bool(fleet.beats)

        host.until(belongs)
    (last_error,) = troubles
    assert ("that token is none" if token == "other" else str(path)) in last_error
    assert [each.token for each in fleet.enrolments] == [
        *(["other"] if token == "other" else []),
        "once",
    ]
    assert host.uplink.last_error == ""


def test_a_membership_of_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_bytes(
        msgspec.json.encode(Membership(version=2, server="", host="", credential=""))
    )
    fleet = Fleet()
    with scripted(fleet) as service:
        host = Host(tmp_path, service)
        host.until(lambda: host.uplink.last_error)
    assert host.uplink.last_error.startswith(
        "the membership of the fleet has format version 2, this Traceloom reads"
    )
    assert msgspec.json.decode((tmp_path / "fleet.json").read_bytes())["version"] == 2
    assert not fleet.enrolments


def test_without_any_token_it_says_where_one_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    fleet = Fleet()
    with scripted(fleet) as service:
        host = Host(tmp_path, service)
        host.until(lambda: host.uplink.last_error)
    assert host.uplink.last_error.startswith(
        "this host does not belong to the fleet yet, and there is no token"
    )
    assert fleet.enrolments == []


def test_a_heartbeat_says_what_the_board_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "once")
    fleet = Fleet()
    with scripted(fleet) as service:
        host = Host(tmp_path, service)
        host_snapshot = host.rules.host_snapshot
        host_snapshot.devices = {
            "GPU-0": Device(uuid="GPU-0", index="0", vendor="nvidia", model="H100"),
            "GPU-1": Device(
                uuid="GPU-1", index="1", vendor="nvidia", model="H100", stale="lost: " + "x" * 1000
            ),
        }
        host.rules.put(
            "gpu_busy_ratio", {("GPU-0",): 0.75, ("GPU-1",): 0.5, ("GPU-9",): 1.0}, "devices"
        )
        host.rules.put("job_hung", {("stuck",): 1.0, ("fine",): 0.0}, "hangs")
        host.rules.run(worker(0, "stuck", 0, ("GPU-0",)), worker(1, "fine"))
        host.rules.registry.clients.pop(worker(1).key)
        host.until(lambda: any(beat.clock for beat in fleet.beats))
        offset = host.uplink.clock.offset(time.monotonic_ns())
        ahead_ns = host.uplink.now_ns() - time.time_ns()
    first, last = fleet.beats[0], fleet.beats[-1]
    assert (first.boot_id, first.clock) == ("boot7", None)
    assert {device.uuid: device.values for device in last.devices} == {
        "GPU-0": {"gpu_busy_ratio": 0.75},
        "GPU-1": {"gpu_busy_ratio": 0.5},
    }
    assert [len(device.stale) for device in last.devices] == [0, 256]
    assert {
        (process.job, process.rank, process.polls, process.hung) for process in last.processes
    } == {
        ("stuck", 0, True, True),
        ("fine", None, False, False),
    }
    # The service's clock is an hour ahead, and what is said of it holds.
    assert last.clock is not None
    assert offset is not None
    assert abs(offset.offset_ns - HOUR_NS) <= offset.error_ns
    assert abs(ahead_ns - HOUR_NS) <= offset.error_ns + 10**8


def test_minutes_are_sent_until_they_are_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "once")
    fleet, down = Fleet(), [True]

    def answers(question: Question) -> Reply:
        return (
            refusal(503, "busy", "later")
            if down and question.path.endswith("/heartbeat")
            else fleet(question)
        )

    rows = {
        minute: [UsageRow(minute=minute, device="GPU-0", state="unallocated", device_ms=60_000)]
        for minute in range(1000, 1130)
    }
    with scripted(answers) as service:
        host = Host(tmp_path, service)
        host.uplink.backlog.put(rows)
        host.until(lambda: host.uplink.last_error)
        assert (
            host.uplink.backlog.oldest()[0].minute == 1000
        )  # nothing is lost while the service is down
        down.clear()
        again = Host(tmp_path, service)  # nor when the agent starts again
        again.until(lambda: fleet.kept == 1129 and not again.uplink.backlog.oldest())
    sent = [row.minute for beat in fleet.beats for row in beat.usage]
    assert sorted(set(sent)) == sorted(rows)
    assert max(len(beat.usage) for beat in fleet.beats) <= 60


def test_a_host_whose_minutes_are_damaged_is_heard_of_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "once")
    (tmp_path / "usage.db").write_bytes(b"no database" * 1000)
    fleet = Fleet()
    with scripted(fleet) as service:
        Host(tmp_path, service).until(lambda: fleet.beats)
    assert len(list(tmp_path.glob("usage.db.damaged-*"))) == 1


def test_work_is_armed_told_once_and_ends_where_the_service_wants_it_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "once")
    fleet = Fleet()
    work = HostWork(request="r1", step="arm", spec=TraceSpec(job="job", steps=3))
    with scripted(fleet) as service:
        host = Host(tmp_path, service)
        host.rules.run(worker(0, rank=0), worker(1, rank=1), worker(2, "another"))
        host.rules.registry.clients.pop(worker(1).key)
        fleet.offer(work)
        seen: list[int] = []

        def armed_and_dropped() -> bool:
            if "r1" in fleet.reports and not seen:
                seen.append(len(fleet.beats))
            if seen and len(fleet.beats) > seen[0] + 10 and fleet.work:
                fleet.offer()
            reports = fleet.reports.get("r1", [])
            return bool(reports) and reports[-1].state == "cancelled"

        host.until(armed_and_dropped)
    armed, cancelled = fleet.reports["r1"]  # nothing changed meanwhile, so nothing more was said
    assert armed.state == "armed"
    # A process that does not poll cannot be traced; one that has just begun to poll may still import PyTorch.
    assert [(each.job, each.rank, each.ready) for each in armed.processes] == [("job", 0, True)]
    assert (cancelled.state, cancelled.reason) == ("cancelled", "cancelled")
    assert fleet.strangers == 0


def test_what_cannot_be_traced_is_told_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "once")
    fleet = Fleet()
    wanted = TraceSpec(job="job", steps=3)
    fleet.offer(
        HostWork(request="nobody", step="start", spec=replace(wanted, job="no-such-job")),
        HostWork(
            request="odd", step="start", spec=replace(wanted, profilers=("timeline", "memory"))
        ),
        HostWork(request="long", step="start", spec=TraceSpec(job="job", duration_s=1e6)),
    )
    with scripted(fleet) as service:
        host = Host(tmp_path, service)
        host.rules.run(worker(0, rank=0))
        host.until(lambda: len(fleet.reports) == 3)
    assert {
        name: [(each.state, each.reason) for each in reports]
        for name, reports in fleet.reports.items()
    } == {
        "nobody": [("failed", "no-such-process")],
        "odd": [("failed", "wrong-request")],
        "long": [("failed", "too-much")],
    }
    assert all(report.detail for reports in fleet.reports.values() for report in reports)
