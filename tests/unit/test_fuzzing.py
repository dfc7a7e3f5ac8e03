"""A few of the cases of `make fuzz`: no damage of any format is a defect of any verb."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fuzzing.seeds import FORMATS
from support.fuzzing.trying import LOST, VERBS, Case, attempt, cases

CASES = 60


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(4))
def test_damaged_inputs_are_read_or_refused(seeds, monkeypatch, number):
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(seeds / "cache"))
    quick = [case for case in cases(4 * CASES, seed=7) if not case.verb.startswith("report")]
    for case in quick[number * CASES // 4 : (number + 1) * CASES // 4]:
        outcome = attempt(case, seeds)
        assert not outcome.fault, str(outcome)


def test_cases_cover_every_format_and_verb():
    every = {(case.format, case.verb) for case in cases(400, seed=1)}
    assert every == {(kind, verb) for kind, verbs in VERBS.items() for verb in verbs}
    assert set(VERBS) == set(FORMATS)


def test_a_case_can_be_repeated(seeds):
    case = Case("kineto", LOST, 12345)
    first, again = attempt(case, seeds), attempt(case, seeds)
    assert (first.code, first.fault) == (again.code, again.fault)
    assert cases(10, seed=3) == cases(10, seed=3)
