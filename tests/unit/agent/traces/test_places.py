"""Where traces lie: what is made, for whom, what is swept away, and that no link leads out."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from traceloom.agent.config import Config
from traceloom.agent.database import RequestStore
from traceloom.agent.kineto import ProfilerRegistry
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.agent.steps import StepCounter
from traceloom.agent.traces import runner
from traceloom.agent.traces.files import TraceDirectories, delete_output
from traceloom.agent.traces.requests import TraceRequest, TraceSpec, TraceTarget
from traceloom.agent.traces.runner import TraceService
from traceloom.errors import OutputError
from traceloom.server.problem import HttpError

UID = os.geteuid()
OLD = time.time() - 7200


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directories_of_a_user_are_its_own(tmp_path: Path) -> None:
    places = TraceDirectories(tmp_path / "traces")
    places.prepare(UID, "r1")
    places.prepare(UID, "r2")
    assert mode(places.of_request(UID, "r1")) == mode(places.incoming(UID)) == 0o700
    assert mode(tmp_path / "traces") & 0o022 == 0
    assert {path.name for path in (tmp_path / "traces" / str(UID)).iterdir()} == {
        "incoming",
        "r1",
        "r2",
    }
    places.remove(UID, "r1")
    places.remove(UID, "r1")  # it is gone already
    assert not places.of_request(UID, "r1").exists()
    assert places.of_request(UID, "r2").exists()


@pytest.mark.skipif(UID != 0, reason="only root makes directories for others")
def test_of_another_user_only_what_is_incoming_is_theirs(tmp_path: Path) -> None:
    places, other = TraceDirectories(tmp_path / "traces"), 4_000_000
    places.prepare(other, "r1")
    assert places.incoming(other).stat().st_uid == other
    assert places.of_request(other, "r1").stat().st_uid == 0
    assert (mode(places.incoming(other)), mode(places.of_request(other, "r1"))) == (0o700, 0o700)
    assert mode(tmp_path / "traces" / str(other)) == 0o711  # to be gone through, not to be listed
    bundle = places.prepare_hang(other, "h1")
    (bundle / "hang.md").write_text("page")
    outside = tmp_path / "outside"
    outside.write_text("root's")
    (bundle / "link").symlink_to(outside)
    assert bundle.stat().st_uid == 0
    places.hand_over(other, bundle)
    assert (bundle.stat().st_uid, (bundle / "hang.md").stat().st_uid) == (other, other)
    assert outside.stat().st_uid == 0  # no link was followed


@pytest.mark.parametrize("what", ["user", "incoming", "request", "file"])
def test_a_link_that_somebody_put_there_is_refused(tmp_path: Path, what: str) -> None:
    root, elsewhere = tmp_path / "traces", tmp_path / "elsewhere"
    elsewhere.mkdir()
    user = root / str(UID)
    if what == "user":
        root.mkdir()
        user.symlink_to(elsewhere)
    else:
        user.mkdir(parents=True)
        if what == "file":
            (user / "r1").write_text("in the way")
        else:
            (user / ("incoming" if what == "incoming" else "r1")).symlink_to(elsewhere)
    with pytest.raises(OutputError) as refused:
        TraceDirectories(root).prepare(UID, "r1")
    assert refused.value.slug == "cannot-write"
    assert list(elsewhere.iterdir()) == []
    assert mode(elsewhere) != 0o700


def test_what_nobody_waits_for_is_swept_after_an_hour(tmp_path: Path) -> None:
    places = TraceDirectories(tmp_path / "traces")
    places.prepare(UID, "r1")
    incoming, outside = places.incoming(UID), tmp_path / "outside"
    outside.write_text("kept")
    for name in ("old.trace", "old.trace.tmp", "new.trace"):
        (incoming / name).write_text("x")
    (incoming / "folder").mkdir()
    (incoming / "link").symlink_to(outside)
    for name in ("old.trace", "old.trace.tmp", "folder", "link"):
        os.utime(incoming / name, (OLD, OLD), follow_symlinks=False)
    kept = places.of_request(UID, "r1") / "rank0.kineto.json.gz"
    kept.write_text("kept")
    os.utime(kept, (OLD, OLD))
    os.utime(outside, (OLD, OLD))
    (tmp_path / "traces" / "stray").write_text("no user's")
    linked = tmp_path / "traces" / "7"
    linked.mkdir()
    (linked / "incoming").symlink_to(tmp_path / "outer")
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "old").write_text("not ours")
    os.utime(tmp_path / "outer" / "old", (OLD, OLD))
    places.sweep()
    assert {path.name for path in incoming.iterdir()} == {"new.trace", "folder"}
    assert outside.read_text() == kept.read_text() == "kept"
    assert (tmp_path / "outer" / "old").exists()
    TraceDirectories(tmp_path / "nowhere").sweep()


def test_dropping_a_file_takes_what_is_not_whole_too(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    folder = tmp_path / "incoming"
    folder.mkdir()
    for name in ("a", "a.tmp", "b"):
        (folder / name).write_text("x")
    (folder / "c").symlink_to(outside)
    for name in ("a", "c", "nothing", "../outside"):
        delete_output(folder, name)
    delete_output(tmp_path / "nowhere", "a")
    assert {path.name for path in folder.iterdir()} == {"b"}
    (tmp_path / "link").symlink_to(folder)
    delete_output(tmp_path / "link", "b")  # the directory itself is a link
    assert (folder / "b").exists()


# Targets of a request.


def build_service(tmp_path: Path, processes: list[Process], **traces: object) -> TraceService:
    proc = tmp_path / "proc"
    for each in processes:
        (proc / str(each.pid)).mkdir(parents=True)
        (proc / str(each.pid) / "stat").write_text(f"{each.pid} (x) S 1 " + "0 " * 17 + "100 0")
    config = msgspec.convert({"host": "node 1/a", "traces": traces}, Config)
    table = {each.key: each for each in processes}
    return TraceService(
        config,
        ProfilerRegistry(str(proc)),
        lambda: table,
        StepCounter(),
        RequestStore(None),
        TraceDirectories(tmp_path / "traces"),
        "b",
    )


def process(pid: int, rank: int | None, uid: int = UID) -> Process:
    return Process(
        key=f"{pid}@100",
        pid=pid,
        start_ticks=100,
        started_ns=1,
        parent_pid=1,
        uid=uid,
        command=f"python {pid}",
        owner=Owner(job="job", rank=rank),
    )


def submitted(
    trace_service: TraceService, spec: TraceSpec, may_trace: Callable[[int], bool] = lambda _: True
) -> TraceRequest:
    async def live() -> TraceRequest:
        try:
            return await trace_service.submit(spec, "test", may_trace)
        finally:
            await trace_service.close()

    return asyncio.run(live())


def test_each_process_has_a_name_of_its_own_and_the_host_one_for_all(tmp_path: Path) -> None:
    processes = [process(41, 1), process(42, 0), process(43, 1), process(44, 0)]
    trace_service = build_service(tmp_path, processes, attach=True)
    spec = TraceSpec(
        job="job", steps=2, attach=True, profilers=("timeline", "telemetry", "dump", "timeline")
    )
    request = submitted(trace_service, spec)
    names = [(target.stem, target.profiler, target.pid) for target in request.targets]
    assert names == [
        ("rank0", "timeline", 42),
        ("node_1_a", "telemetry", 42),
        ("rank0", "dump", 42),
        ("pid44", "timeline", 44),
        ("pid44", "dump", 44),
        ("rank1", "timeline", 41),
        ("rank1", "dump", 41),
        ("pid43", "timeline", 43),
        ("pid43", "dump", 43),
    ]
    assert all("/" not in stem and " " not in stem for stem, _, _ in names)


@pytest.mark.parametrize(
    ("uids", "allowed", "slug"),
    [
        ([UID, UID + 7], None, "several-users"),
        ([UID, UID + 7], [UID], ""),
        ([UID + 7], [UID], "no-such-process"),
        ([], None, "no-such-process"),
    ],
)
def test_a_request_is_about_processes_of_one_user(
    tmp_path: Path, uids: list[int], allowed: list[int] | None, slug: str
) -> None:
    processes = [process(50 + number, number, uid) for number, uid in enumerate(uids)]
    trace_service = build_service(tmp_path, processes, attach=True)
    spec = TraceSpec(job="job", duration_s=1.0, attach=True, profilers=("dump",))
    may_trace: Callable[[int], bool] = (
        (lambda _: True) if allowed is None else (lambda uid: uid in allowed)
    )
    if slug:
        with pytest.raises(HttpError) as refused:
            submitted(trace_service, spec, may_trace)
        assert refused.value.slug == slug
        assert not (tmp_path / "traces").exists()
    else:
        assert [target.uid for target in submitted(trace_service, spec, may_trace).targets] == [UID]


def test_a_user_has_so_many_requests_and_no_more(tmp_path: Path) -> None:
    trace_service = build_service(tmp_path, [process(60, 0)], attach=True, max_requests_per_user=2)
    spec = TraceSpec(job="job", duration_s=5.0, attach=True)

    async def live() -> list[str]:
        made = [await trace_service.submit(spec, "test", lambda _: True) for _ in range(2)]
        with pytest.raises(HttpError) as refused:
            await trace_service.submit(spec, "test", lambda _: True)
        assert (refused.value.slug, refused.value.status) == ("quota", 429)
        trace_service.cancel(made[0])
        async for _ in trace_service.changes(made[0]):
            pass
        made.append(await trace_service.submit(spec, "test", lambda _: True))  # one has ended
        await trace_service.close()
        return [request.id for request in made]

    ids = asyncio.run(live())
    assert len(set(ids)) == 3
    assert [target.state for target in trace_service.requests[ids[0]].targets] == ["cancelled"]


def test_requests_at_once_are_no_more_than_one_after_the_other(tmp_path: Path) -> None:
    trace_service = build_service(tmp_path, [process(60, 0)], attach=True, max_requests_per_user=2)
    spec = TraceSpec(job="job", duration_s=5.0, attach=True)

    async def live() -> list[object]:
        submits = (trace_service.submit(spec, "test", lambda _: True) for _ in range(20))
        answers = await asyncio.gather(*submits, return_exceptions=True)
        await trace_service.close()
        return list(answers)

    assert sum(isinstance(answer, TraceRequest) for answer in asyncio.run(live())) == 2


def test_many_requests_of_one_user_delete_none_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MAX_REQUESTS", 3)
    trace_service = build_service(
        tmp_path, [process(60, 0, UID), process(61, 0, UID + 1)], attach=True
    )
    spec = TraceSpec(host="node 1/a", duration_s=5.0, attach=True)

    async def submit(uid: int) -> str:
        request = await trace_service.submit(spec, "test", lambda user: user == uid)
        await trace_service.end(request, 60)
        return request.id

    async def live() -> tuple[str, list[str]]:
        kept = await submit(UID)
        made = [await submit(UID + 1) for _ in range(10)]
        trace_service.delete_expired()
        await trace_service.close()
        return kept, made

    kept, made = asyncio.run(live())
    assert list(trace_service.requests) == [kept, *made[-4:]]
    names = {path.name for path in (tmp_path / "traces" / str(UID + 1)).iterdir()}
    assert names == {"incoming", *made[-4:]}


def test_old_requests_are_forgotten_with_their_files_and_open_ones_never(tmp_path: Path) -> None:
    trace_service = build_service(tmp_path, [], keep_days=1)
    now_ns = time.time_ns()
    ages_days = {"new": 0.5, "old": 2.0, "open": 9.0}
    for name, days in ages_days.items():
        trace_service.requests[name] = TraceRequest(
            id=name,
            who="test",
            uid=UID,
            asked_ns=now_ns - int(days * 86_400e9),
            boot_id="b",
            spec=TraceSpec(pids=(7,), steps=1),
            targets=[
                TraceTarget(
                    request=name, process="7@1", profiler="dump", pid=7, uid=UID, stem="pid7"
                )
            ],
            done=name != "open",
        )
        trace_service.places.prepare(UID, name)
        (trace_service.places.of_request(UID, name) / "capture.json").write_text("{}")
    trace_service.delete_expired()
    asyncio.run(trace_service.close())  # the disk's thread has done it then
    assert set(trace_service.requests) == {"new", "open"}
    assert not trace_service.places.of_request(UID, "old").exists()
    for name in ("new", "open"):
        assert (trace_service.places.of_request(UID, name) / "capture.json").exists()


@pytest.mark.parametrize(
    ("spec", "slug"),
    [
        (TraceSpec(job="job", steps=11), "too-much"),
        (TraceSpec(job="job", duration_s=5.5), "too-much"),
        (TraceSpec(steps=1), "wrong-request"),
        (TraceSpec(job="job"), "wrong-request"),
        (TraceSpec(job="job", steps=1, duration_s=1.0), "wrong-request"),
        (TraceSpec(job="job", steps=1, at_ns=1), "wrong-request"),
        (TraceSpec(job="job", steps=1, at_ns=2**62), "wrong-request"),
        (TraceSpec(job="job", steps=1, attach=True), "attach-off"),
        (TraceSpec(job="job", steps=1, profilers=("memory",)), "wrong-request"),
        (TraceSpec(job="job", steps=10), ""),
        (TraceSpec(host="node", duration_s=5.0), ""),
    ],
)
def test_what_a_request_may_ask_for(tmp_path: Path, spec: TraceSpec, slug: str) -> None:
    trace_service = build_service(tmp_path, [], attach=False, max_steps=10, max_seconds=5.0)
    if not slug:
        trace_service.check(spec)
        return
    with pytest.raises(HttpError) as refused:
        trace_service.check(spec)
    assert refused.value.slug == slug


# How long a profiler records.


def test_a_window_ends_when_it_is_over() -> None:
    async def live() -> tuple[tuple[int, int], tuple[int, int], int]:
        before_ns = time.time_ns()
        first, later = Window(0, 0.05, None), Window(before_ns + 30_000_000, 0.02, 3)
        return await first.over(), await later.over(), before_ns

    (start_ns, end_ns), later, before_ns = asyncio.run(live())
    assert before_ns <= start_ns
    assert end_ns - start_ns == 50_000_000
    assert end_ns <= time.time_ns()
    assert later[1] - later[0] == 20_000_000
    assert later[0] >= before_ns + 30_000_000


def test_a_window_of_steps_is_as_long_as_the_traces_beside_it() -> None:
    async def live() -> None:
        measured: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

        async def waits() -> tuple[int, int]:
            return await measured

        over = Window(0, None, 3, waits).over()
        await asyncio.sleep(0.01)
        assert not over.done()
        measured.set_result((5, 9))
        assert await over == (5, 9)
        with pytest.raises(ProfilerError) as refused:
            Window(0, None, 3).over()
        assert refused.value.slug == "no-duration"

    asyncio.run(live())


def test_the_window_of_several_ranks_is_from_the_first_to_the_last(tmp_path: Path) -> None:
    trace_service = build_service(tmp_path, [])
    windows = [(100, 200, "kept"), (90, 180, "kept"), (1, 900, "failed"), (None, None, "kept")]
    targets = [
        TraceTarget(
            request="r",
            process=f"{row}@1",
            profiler="timeline",
            pid=row,
            uid=UID,
            stem=f"rank{row}",
            state=state,  # type: ignore[arg-type]
            window_start_ns=start,
            window_end_ns=end,
        )
        for row, (start, end, state) in enumerate(windows)
    ]
    beside = TraceTarget(
        request="r", process="0@1", profiler="telemetry", pid=0, uid=UID, stem="host"
    )
    made = TraceRequest(
        id="r",
        who="test",
        uid=UID,
        asked_ns=1,
        boot_id="",
        spec=TraceSpec(pids=(1,), steps=1),
        targets=[*targets, beside],
    )
    assert asyncio.run(trace_service.traced(made)) == (90, 200)
    made.targets = [*targets[2:], beside]
    with pytest.raises(ProfilerError) as refused:
        asyncio.run(trace_service.traced(made))
    assert refused.value.slug == "no-duration"
