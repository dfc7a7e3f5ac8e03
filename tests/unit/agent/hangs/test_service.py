"""What the agent keeps of hangs, and what it knows of them when it starts again."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from traceloom.agent.config import Config, Hangs, HistorySettings
from traceloom.agent.hangs import service
from traceloom.agent.hangs.service import HangRecord, HangService
from traceloom.agent.history import History
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.steps import StepCounter
from traceloom.agent.traces.files import TraceDirectories

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is for Linux")
QUICK = Hangs(least=0.05, steps=0.1, every=1e-6)


@pytest.fixture
def sleeping() -> Iterator[Process]:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\ndef nap(): time.sleep(3600)\nprint('up', flush=True)\nnap()",
        ],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    ticks = int(
        Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    )
    yield Process(
        key=f"{child.pid}@{ticks}",
        pid=child.pid,
        start_ticks=ticks,
        started_ns=0,
        parent_pid=1,
        uid=os.geteuid(),
        command="python train.py",
        owner=Owner(job="j", rank=0, world_size=1),
    )
    child.kill()
    child.communicate()


class Desk:
    """A host with one process, in a directory."""

    def __init__(
        self, directory: Path, process: Process, settings: Hangs = QUICK, boot_id: str = "boot"
    ) -> None:
        self.process, self.noted = process, list[tuple[str, dict[str, object]]]()
        self.steps, host_snapshot = StepCounter(), Snapshot()
        host_snapshot.processes = {process.key: process}
        host_snapshot.put("processes", [Reading("process_threads", (process.key,), 1.0)], 1)
        self.hangs = HangService(
            Config(hangs=settings),
            host_snapshot,
            History(None, HistorySettings()),
            self.steps,
            places=TraceDirectories(directory / "traces"),
            path=directory / "hangs.json",
            boot_id=boot_id,
            note=lambda what, details: self.noted.append((what, details)),
        )

    def step(self) -> None:
        self.steps.report(self.process.key, "j", 0, [0.001] * 3)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Look until it is so."""

        async def looking() -> None:
            while not condition():
                self.hangs.check()
                await asyncio.sleep(0.01)

        await asyncio.wait_for(looking(), 120)

    async def hang(self) -> HangRecord:
        """Step, stop, and wait for what is said of that."""
        before = len(self.hangs.records)
        self.step()
        await self.until(lambda: not self.hangs._open)
        await self.until(lambda: len(self.hangs.records) > before and self._is_told())
        return self.hangs.records[-1]

    def _is_told(self) -> bool:
        return not self.hangs._tasks


def run(host: Desk, use: Callable[[], Awaitable[None]]) -> None:
    async def live() -> None:
        await host.hangs.start()
        try:
            await use()
        finally:
            await host.hangs.close()

    asyncio.run(live())


def test_only_the_newest_bundles_stay(sleeping: Process, tmp_path: Path) -> None:
    host = Desk(tmp_path, sleeping, msgspec.structs.replace(QUICK, max_bundles_per_user=1))
    heard: list[str] = []
    host.hangs.listeners.append(lambda record: heard.append(record.state))

    async def use() -> None:
        first = await host.hang()
        handle = os.open(first.directory, os.O_DIRECTORY)
        for _ in range(1500):  # as deep as nothing of Python removes
            os.mkdir("d", dir_fd=handle)
            inner = os.open("d", os.O_DIRECTORY, dir_fd=handle)
            os.close(handle)
            handle = inner
        os.close(handle)
        second = await host.hang()
        assert "rank 0 is in `nap` (<string>:2)" in first.sentence
        assert [
            path.name for path in (tmp_path / "traces" / str(os.geteuid()) / "hangs").iterdir()
        ] == [second.id]
        assert second.directory.endswith(second.id)
        assert heard == ["hangs", "recovered", "hangs"]
        assert {reading[:2]: reading.value for reading in host.hangs.readings()} == {
            ("job_hung", ("j",)): 1.0,
            ("job_hangs_total", ("j",)): 2.0,
        }

    run(host, use)
    assert [what for what, _ in host.noted] == ["hang", "hang-over", "hang"]


@pytest.mark.parametrize(
    "why", ["off", pytest.param("one-an-hour", marks=pytest.mark.thorough), "no-directory"]
)
def test_without_a_bundle_there_is_the_sentence_or_the_reason(
    sleeping: Process, tmp_path: Path, why: str
) -> None:
    changes = {"off": {"bundles": False}, "one-an-hour": {"every": 3600.0}, "no-directory": {}}[why]
    host = Desk(tmp_path, sleeping, msgspec.structs.replace(QUICK, **changes))
    if why == "no-directory":
        (tmp_path / "traces").write_text("a file", encoding="ascii")

    async def use() -> None:
        if why == "one-an-hour":
            assert (await host.hang()).directory
        record = await host.hang()
        assert record.directory == ""
        if why == "no-directory":
            assert "traces cannot be written" in record.no_bundle
        else:
            assert "rank 0 is in `nap`" in record.sentence
            assert {"off": "switched off", "one-an-hour": "one of this job was made 0 min ago"}[
                why
            ] in record.no_bundle

    run(host, use)


def test_a_host_that_was_started_again_has_no_hang(sleeping: Process, tmp_path: Path) -> None:
    host = Desk(tmp_path, sleeping, msgspec.structs.replace(QUICK, bundles=False))

    async def hangs() -> None:
        await host.hang()

    run(host, hangs)
    same, other = Desk(tmp_path, sleeping), Desk(tmp_path, sleeping, boot_id="another")

    async def is_known() -> None:
        assert [record.state for record in same.hangs.records] == ["hangs"]
        assert same.hangs.hung_since_ns(sleeping.key) == same.hangs.records[0].hang.since_ns
        same.hangs.check()
        assert same.steps.pace(sleeping.key) is not None  # as it was before

    async def is_over() -> None:
        assert [record.state for record in other.hangs.records] == ["unknown"]
        assert other.hangs.hung_since_ns(sleeping.key) is None

    run(same, is_known)
    run(other, is_over)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"version": 99, "boot_id": "boot", "paces": {}, "records": []}'],
    ids=["empty", "cut", "list", "later"],
)
def test_a_file_that_cannot_be_read_is_begun_anew(
    sleeping: Process, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "hangs.json").write_bytes(content)
    host = Desk(tmp_path, sleeping)

    async def use() -> None:
        assert host.hangs.records == []
        host.step()
        host.hangs.check()

    run(host, use)
    assert json.loads((tmp_path / "hangs.json").read_bytes())["paces"] != {}


def test_a_file_of_another_version_is_said(
    sleeping: Process, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hangs.json").write_bytes(
        b'{"version": 99, "boot_id": "boot", "paces": {}, "records": []}'
    )

    async def use() -> None:
        return

    run(Desk(tmp_path, sleeping), use)
    assert "the file of hangs has format version 99, this Traceloom reads version 1" in caplog.text


def test_a_disk_that_cannot_be_written_stops_nothing(sleeping: Process, tmp_path: Path) -> None:
    (tmp_path / "hangs.json").mkdir()
    host = Desk(tmp_path, sleeping)

    async def use() -> None:
        host.step()
        host.hangs.check()

    run(host, use)
    assert "hangs.json" in host.hangs.last_error


def test_switched_off_it_looks_at_nothing(sleeping: Process, tmp_path: Path) -> None:
    host = Desk(tmp_path, sleeping, msgspec.structs.replace(QUICK, watch=False))

    async def use() -> None:
        host.step()
        await asyncio.sleep(0.1)
        host.hangs.check()
        assert host.hangs.watch.stepping == set()

    run(host, use)
    assert not (tmp_path / "hangs.json").exists()


def test_many_jobs_that_hang_push_out_no_open_hang_and_nothing_of_another_user(
    sleeping: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_MAX_RECORDS", 2)
    host = Desk(tmp_path, sleeping, msgspec.structs.replace(QUICK, bundles=False))

    async def use() -> None:
        record = await host.hang()
        others = [
            msgspec.structs.replace(record.hang, job=f"job{number}", uid=uid)
            for number, uid in enumerate((7, *(8,) * 6))
        ]
        monkeypatch.setattr(host.hangs, "_describe", nothing)
        monkeypatch.setattr(host.hangs, "_works", nothing)
        for hang in others:
            host.hangs.watch.hangs[hang.key] = hang
        await asyncio.gather(*map(host.hangs._take_in_turn, others))
        assert len(host.hangs.records) == 8, "all of them are open"
        for hang in others:  # their processes have ended
            host.hangs.watch.hangs[hang.key] = msgspec.structs.replace(hang, processes=())
        host.hangs.check()
        states = [row.state for row in host.hangs.records]
        assert states == ["hangs", *["ended"] * 7], states
        again = msgspec.structs.replace(others[-1], job="again")
        host.hangs.watch.hangs[again.key] = again
        await host.hangs._take_in_turn(again)
        kept = [(row.hang.uid, row.hang.job) for row in host.hangs.records]
        assert kept == [(os.geteuid(), "j"), (7, "job0"), (8, "job5"), (8, "job6"), (8, "again")]

    async def nothing(*_: object) -> None:
        return None

    run(host, use)
