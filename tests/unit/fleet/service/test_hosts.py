"""The registry for hosts: who joins, what each is to do, and files that count only whole; it goes on after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from traceloom.agent.fleet_link.protocol import (
    ArmedProcess,
    Enrolment,
    Heartbeat,
    HostFile,
    HostProcess,
    HostReport,
    UsageRow,
)
from traceloom.agent.traces.requests import TraceSpec, TraceTarget
from traceloom.errors import OutputError
from traceloom.fleet.service.requests import (
    HostRegistry,
    LastHeartbeat,
    drop_impossible_rows,
    select_processes,
    select_slowest_and_median,
)
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.database import LEADER
from traceloom.server.problem import HttpError

WANTED = TraceSpec(job="j", steps=3)
CONTENT = b"a trace"
FILE = HostFile(
    name="rank0.kineto.json.gz", bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
)


def beat(*processes: HostProcess, usage: list[UsageRow] | None = None) -> Heartbeat:
    return Heartbeat(
        sent_ns=1, boot_id="b", version="1", processes=list(processes), usage=usage or []
    )


def rank(number: int, steps_per_second: float | None = None, job: str = "j") -> HostProcess:
    return HostProcess(
        key=f"{number}@1",
        pid=number + 1,
        uid=0,
        job=job,
        rank=number,
        user="ada",
        steps_per_second=steps_per_second,
    )


async def sent(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 3):
        yield content[at : at + 3]


def with_registry(tmp_path: Path, test: Callable[[HostRegistry], Awaitable[None]]) -> None:
    async def run() -> None:
        state = ServiceState(str(tmp_path / "state.db"))
        assert state.lead(LEADER, "term", 600) or state.renew_lease(LEADER, "term", 600)
        registry = HostRegistry(state, tmp_path / "from-hosts", "term")
        await registry.start()
        try:
            await test(registry)
        finally:
            await registry.close()
            state.close()

    asyncio.run(run())


async def joined(registry: HostRegistry, host: str) -> str:
    token = registry.state.add_enrolment("", 1)
    return (await registry.enrol(Enrolment(token=token, host=host))).credential


def test_a_host_joins_once_and_shows_its_credential(tmp_path: Path) -> None:
    async def test(registry: HostRegistry) -> None:
        token = registry.state.add_enrolment("", 1)
        credential = (await registry.enrol(Enrolment(token=token, host="a"))).credential
        registry.check_host("a", credential)
        refusals = []
        for of_token, host in (
            (token, "b"),
            (registry.state.add_enrolment("", 1), "a"),
            (registry.state.add_enrolment("c", 1), "b"),
            (registry.state.add_enrolment("", -1), "b"),
            ("nothing", "b"),
        ):
            with pytest.raises(HttpError) as error:
                await registry.enrol(Enrolment(token=of_token, host=host))
            refusals.append(error.value.slug)
        assert refusals == [
            "unknown-token",
            "host-exists",
            "unknown-token",
            "unknown-token",
            "unknown-token",
        ]
        # A token that another host shows is not used up by it.
        for_c = registry.state.add_enrolment("c", 1)
        with pytest.raises(HttpError, match="lets the host `c` join, and not `b`"):
            await registry.enrol(Enrolment(token=for_c, host="b"))
        registry.check_host(
            "c", (await registry.enrol(Enrolment(token=for_c, host="c"))).credential
        )
        with pytest.raises(HttpError, match="was used"):
            await registry.enrol(Enrolment(token=for_c, host="c"))
        # A token for that very host replaces it.
        again = (
            await registry.enrol(Enrolment(token=registry.state.add_enrolment("a", 1), host="a"))
        ).credential
        registry.check_host("a", again)
        for host, secret in (("a", credential), ("a", ""), ("b", again)):
            with pytest.raises(HttpError) as error:
                registry.check_host(host, secret)
            assert error.value.slug == "unknown-host"
        await registry.remove("a")
        with pytest.raises(HttpError):
            registry.check_host("a", again)

    with_registry(tmp_path, test)


def test_a_request_goes_its_way_and_only_whole_files_count(tmp_path: Path) -> None:
    async def test(registry: HostRegistry) -> None:
        joining = []
        registry.on_stitching = lambda request: joining.append(request.id)
        await registry.heartbeat("a", beat(rank(0)))
        with pytest.raises(HttpError) as error:
            await registry.submit(TraceSpec(job="other", steps=3), "ada")
        assert error.value.slug == "no-such-job"
        waiting = asyncio.create_task(
            registry.work("a", (await registry.work("a", "", 0)).version, 30)
        )
        request = (await registry.submit(WANTED, "ada")).id
        offered = await waiting  # it hears of it at once
        assert [(work.request, work.step) for work in offered.work] == [(request, "arm")]
        with pytest.raises(HttpError) as error:
            await registry.report("stranger", request, HostReport(state="armed"))
        assert error.value.slug == "no-such-request"
        armed = HostReport(state="armed", processes=[ArmedProcess(key="0@1", pid=1, rank=0)])
        await registry.report("a", request, armed)
        [work] = (await registry.work("a", offered.version, 5)).work
        assert work.step == "start"
        assert work.at_ns == registry.requests[request].start_ns > 0
        kept = TraceTarget(
            request="r",
            process="0@1",
            profiler="timeline",
            pid=1,
            uid=0,
            rank=0,
            stem="rank0",
            state="kept",
        )
        await registry.report("a", request, HostReport(state="running", targets=[kept]))
        uploaded = HostReport(state="uploaded", targets=[kept], files=[FILE])
        assert (await registry.report("a", request, uploaded)).missing == [FILE.name]
        refusals = []
        for name, content in (
            ("other", CONTENT),
            (FILE.name, b"another"),
            (FILE.name, CONTENT + b"x"),
            (FILE.name, CONTENT[:-1]),
        ):
            with pytest.raises(HttpError) as error:
                await registry.take_file("a", request, name, sent(content))
            refusals.append(error.value.slug)
        assert refusals == ["no-such-file", "wrong-file", "wrong-file", "wrong-file"]
        assert list((registry.incoming / request / "a").iterdir()) == []
        await registry.take_file("a", request, FILE.name, sent(CONTENT))
        assert (await registry.report("a", request, uploaded)).missing == []
        assert registry.requests[request].state == "stitching"
        assert joining == [request]

    with_registry(tmp_path, test)

    async def again(registry: HostRegistry) -> None:
        [request] = registry.requests.values()
        assert request.state == "stitching"

    with_registry(tmp_path, again)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "x" * 201])
def test_names_of_files_stay_in_their_directory(tmp_path: Path, name: str) -> None:
    async def test(registry: HostRegistry) -> None:
        await registry.heartbeat("a", beat(rank(0)))
        request = (await registry.submit(WANTED, "ada")).id
        file = HostFile(name=name, bytes=1, sha256="0" * 64)
        with pytest.raises(HttpError) as error:
            await registry.report("a", request, HostReport(state="uploading", files=[file]))
        assert error.value.slug == "wrong-request"

    with_registry(tmp_path, test)


def test_a_request_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def test(registry: HostRegistry) -> None:
        await registry.heartbeat("a", beat(rank(0)))
        request = (await registry.submit(WANTED, "ada")).id
        (registry.incoming / request / "a").mkdir(parents=True)
        version = (await registry.work("a", "", 0)).version
        waiting = asyncio.create_task(registry.work("a", version, 30))
        await registry.cancel(request)
        assert (await waiting).work == []
        assert [now.state async for now in registry.changes(request)] == ["cancelled"]
        assert not (registry.incoming / request).exists()

    with_registry(tmp_path, test)


@pytest.mark.parametrize("wait_s", [float("nan"), -1.0, float("-inf")])
def test_a_wait_that_is_none_is_no_wait(wait_s: float, tmp_path: Path) -> None:
    """A timer of no number would stand in the way of all other timers of the service."""

    async def test(registry: HostRegistry) -> None:
        version = (await registry.work("a", "", 0)).version
        asked = asyncio.create_task(registry.work("a", version, wait_s))
        await asyncio.wait([asked], timeout=20)
        assert asked.done()
        assert (await asked).version == version

    with_registry(tmp_path, test)


def test_usage_is_acknowledged_and_what_cannot_be_is_counted(tmp_path: Path) -> None:
    async def test(registry: HostRegistry) -> None:
        await joined(registry, "a")
        now = time.time_ns() // 60_000_000_000
        rows = [
            UsageRow(minute=now - 1, device="g", state="busy", device_ms=60_000),
            UsageRow(minute=now, device="g", state="busy", device_ms=40_000),
            UsageRow(minute=now, device="g", state="unallocated", device_ms=40_000),
        ]
        answer = await registry.heartbeat("a", beat(usage=rows))
        assert answer.usage_through == now
        assert registry.refused_rows["a"] == 2
        waiting = registry.state.open_usage(10, "term")
        assert waiting is not None
        assert [(minute.minute, minute.document.count("device_ms")) for minute in waiting[1]] == [
            (now - 1, 1),
            (now, 0),
        ]

    with_registry(tmp_path, test)


def test_a_clock_that_was_ahead_for_a_moment_loses_no_time_after_it(tmp_path: Path) -> None:
    async def test(registry: HostRegistry) -> None:
        await joined(registry, "a")
        now = time.time_ns() // 60_000_000_000
        for minute in (now - 2, now + 60 * 24, now - 1, now):
            row = UsageRow(minute=minute, device="g", state="busy", device_ms=60_000)
            assert (await registry.heartbeat("a", beat(usage=[row]))).usage_through == minute
        assert registry.refused_rows["a"] == 1
        waiting = registry.state.open_usage(10, "term")
        assert waiting is not None
        assert [(row.minute, row.since) for row in waiting[1]] == [
            (now - 2, now - 2),
            (now - 1, now - 1),
            (now, now),
        ]

    with_registry(tmp_path, test)


def test_minutes_that_have_not_been_are_no_usage() -> None:
    row = UsageRow(minute=100, device="g", state="busy", device_ms=1)
    assert drop_impossible_rows([row], 100 * 60_000_000_000) == [row]
    assert drop_impossible_rows([row], 90 * 60_000_000_000) == []
    days = 24 * 60
    assert drop_impossible_rows([row], (100 + 13 * days) * 60_000_000_000) == [row]
    assert drop_impossible_rows([row], (100 + 15 * days) * 60_000_000_000) == []


def test_which_processes_a_request_is_about() -> None:
    hosts = {
        "a": LastHeartbeat(
            heartbeat=beat(rank(0, 5.0), rank(1, 1.0), rank(9, job="other")), received_ns=0
        ),
        "b": LastHeartbeat(heartbeat=beat(rank(2, 3.0), rank(3)), received_ns=0),
    }

    def chosen(matching: dict[str, list[HostProcess]]) -> dict[str, list[int | None]]:
        return {host: [process.rank for process in of] for host, of in matching.items()}

    assert chosen(select_processes(hosts, WANTED)) == {"a": [0, 1], "b": [2, 3]}
    assert chosen(select_processes(hosts, TraceSpec(job="j", ranks=(2,), steps=1))) == {"b": [2]}
    assert chosen(select_processes(hosts, TraceSpec(job="j", host="a", steps=1))) == {"a": [0, 1]}
    assert chosen(select_slowest_and_median(select_processes(hosts, WANTED))) == {
        "a": [1],
        "b": [2],
    }
    assert select_slowest_and_median({"a": [rank(0)]}) == {}


def test_what_a_service_took_that_is_gone_is_sent_to_the_next(tmp_path: Path) -> None:
    async def run() -> None:
        state = ServiceState(str(tmp_path / "state.db"))
        state.lead(LEADER, "first", 0)
        first = HostRegistry(state, tmp_path / "of-first", "first")
        await first.start()
        await first.heartbeat("a", beat(rank(0)))
        name = (await first.submit(WANTED, "ada")).id
        await first.report(
            "a", name, HostReport(state="armed", processes=[ArmedProcess(key="0@1", pid=1, rank=0)])
        )
        await first.report("a", name, HostReport(state="uploading", files=[FILE]))
        await first.take_file("a", name, FILE.name, sent(CONTENT))
        await first.report("a", name, HostReport(state="uploaded", files=[FILE]))
        assert first.requests[name].state == "stitching"

        assert state.lead(LEADER, "second", 600)  # the first one's lease has ended
        second = HostRegistry(state, tmp_path / "of-second", "second")  # on another machine
        joining = []
        second.on_stitching = lambda request: joining.append(request.id)
        await second.start()
        assert second.requests[name].state == "collecting"
        assert [work.step for work in (await second.work("a", "", 0)).work] == ["start"]
        assert (
            await second.report("a", name, HostReport(state="uploading", files=[FILE]))
        ).missing == [FILE.name]
        await second.take_file("a", name, FILE.name, sent(CONTENT))
        await second.report("a", name, HostReport(state="uploaded", files=[FILE]))
        assert joining == [name]

        # The first one was only asleep: what it decides now is not written down.
        with pytest.raises(OutputError) as error:
            await first.cancel(name)
        assert error.value.slug == "not-leading"
        assert '"state":"stitching"' in state.requests()[0]
        await first.close()
        await second.close()
        state.close()

    asyncio.run(run())


def test_while_the_state_does_not_answer_nothing_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceloom.fleet.store.database._BUSY_MS", 20)

    async def test(registry: HostRegistry) -> None:
        await registry.heartbeat("a", beat(rank(0)))
        kept = (await registry.submit(WANTED, "ada")).id
        other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutputError) as error:
            await registry.submit(WANTED, "ada")
        assert error.value.slug == "state-busy"
        assert list(registry.requests) == [kept]  # who asked was refused
        with pytest.raises(OutputError):
            await registry.cancel(kept)
        assert '"state":"announced"' in other.execute("SELECT document FROM requests").fetchone()[0]
        other.execute("ROLLBACK")
        document = ""
        while (
            '"state":"cancelled"' not in document
        ):  # which the registry writes down as soon as it can
            document = other.execute("SELECT document FROM requests").fetchone()[0]
            await asyncio.sleep(0.05)
        other.close()

    with_registry(tmp_path, test)
