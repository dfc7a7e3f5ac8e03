"""The findings of a large job are worked out by a process of their own, and are those that this one would have."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

import traceloom
from support.jobs import ParallelRecipe, SlowRank, parallel_job
from traceloom.report import ReportOptions, build, findings
from traceloom.report.document import UnknownValues
from traceloom.trace.session import Session

OPTIONS = ReportOptions(only=("core", "findings"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("job")
    parallel_job(ParallelRecipe(tensor=2, steps=3, faults=(SlowRank(1, 2.0),))).run().write(folder)
    return traceloom.load(folder, cache=False)


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(findings, "MIN_PROCESS_EVENTS", 1)
    monkeypatch.setattr(findings, "count_cores", lambda: 2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [OPTIONS, ReportOptions(only=("core", "findings"), steps=(1, 2), ranks=(0, 1))]
)
def test_the_document_is_the_same(job: Session, options: ReportOptions, tmp_path: Path) -> None:
    here, beside = build(job, options), build(job, options, separate_process=True)
    assert here["findings"]
    assert beside == here
    assert list(tmp_path.iterdir()) == []


def test_what_the_process_cannot_do_is_done_here(job: Session, tmp_path: Path) -> None:
    expected, absent = UnknownValues(0), UnknownValues(0)
    with findings.start_findings(job, OPTIONS, 0, separate_process=True) as findings_of:
        [folder] = tmp_path.iterdir()
        shutil.rmtree(folder)  # before it has read anything
        result = findings_of(absent)
    assert result == findings.build_findings(job, OPTIONS, expected)
    assert absent.to_list() == expected.to_list()


def test_no_process_is_started_where_it_would_not_pay(
    job: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(findings, "WorkerProcess", refused)
    alone = job.of_rank(0)
    for session, options in ((alone, OPTIONS), (job, ReportOptions(only=("core",)))):
        with findings.start_findings(session, options, 0, separate_process=True) as findings_of:
            assert findings_of(UnknownValues(0)) == findings.build_findings(
                session, options, UnknownValues(0)
            )
    monkeypatch.setattr(findings, "MIN_PROCESS_EVENTS", 10**9)
    with findings.start_findings(job, OPTIONS, 0, separate_process=True) as findings_of:
        assert findings_of(UnknownValues(0))[0]
