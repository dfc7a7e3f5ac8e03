"""A rule on hangs fires once for each that is sure and described, and for none that an earlier agent saw."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from traceloom.agent.config import Config, Hangs
from traceloom.agent.hangs.detector import Hang
from traceloom.agent.hangs.service import HangRecord, HangService, State
from traceloom.agent.history import History
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.steps import StepCounter
from traceloom.agent.traces.files import TraceDirectories
from traceloom.agent.triggers.watches import HangWatch


@pytest.fixture
def hangs(tmp_path: Path) -> HangService:
    config = Config()
    return HangService(
        config,
        Snapshot(),
        History(None, config.history),
        StepCounter(),
        places=TraceDirectories(tmp_path),
        path=tmp_path / "hangs.json",
        boot_id="",
        note=lambda _what, _details: None,
    )


def record(
    number: str, sentence: str = "rank 1 is elsewhere", state: State = "hangs"
) -> HangRecord:
    hang = Hang(job="slurm-7", uid=0, processes=(), since_ns=1, seen_ns=2, median_s=0.1)
    return HangRecord(id=number, hang=hang, sentence=sentence, state=state)


def test_each_hang_fires_once_when_it_is_described(hangs: HangService) -> None:
    hangs.records.append(record("before"))
    watch = HangWatch(hangs)
    assert list(watch.check(time.time_ns())) == []
    hangs.records.append(record("new", sentence=""))
    assert list(watch.check(0)) == []  # it is being looked at
    hangs.records[-1] = record("new")
    [firing] = watch.check(0)
    assert (firing.labels, firing.episode, firing.what) == (
        {"job": "slurm-7"},
        "new",
        "rank 1 is elsewhere",
    )
    assert list(watch.check(0)) == []
    hangs.records.append(record("over", state="recovered"))
    assert list(watch.check(0)) == []


def test_where_hangs_are_not_watched_for_it_says_so(hangs: HangService) -> None:
    watch = HangWatch(hangs)
    assert watch.find_problem() == ""
    hangs.config = Config(hangs=Hangs(watch=False))
    assert "hangs.watch" in watch.find_problem()
