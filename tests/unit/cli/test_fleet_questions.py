"""The verbs of the fleet's questions, against a service whose tables hold made weeks."""

from __future__ import annotations

import json
import os
import pty
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import DAYS, AnsweringService, answering  # noqa: E402
from traceloom.cli import main  # noqa: E402
from traceloom.testing.fleet_weeks import CHANGES, Weeks, WeeksRecipe, build_weeks  # noqa: E402

TIME = ["--since", DAYS["since"], "--until", DAYS["until"]]


@cache
def weeks() -> Weeks:
    return build_weeks(WeeksRecipe(captures=1))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnsweringService]:
    with answering(tmp_path_factory.mktemp("fleet"), weeks()) as service:
        yield service


@pytest.fixture(autouse=True)
def _asked(fleet: AnsweringService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACELOOM_SERVER", fleet.url)
    monkeypatch.setenv("TRACELOOM_TOKEN", fleet.admin._token)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["fleet", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.thorough
def test_regressions_name_the_planted_kernel_and_what_to_compare(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, "regressions", *TIME).splitlines()
    assert lines[1].startswith(weeks().kernel(CHANGES[0])[:40])
    [compare] = [line for line in lines if line.startswith("Compare: ")]
    words = compare.split()
    jobs = {
        row["capture"]
        for row in weeks().tables["captures"].to_dicts()
        if row["job"].startswith("recommender")
    }
    assert {words[words.index("fetch") + 1]} <= jobs
    assert compare.endswith("&& traceloom diff healthy changed")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "verb", ["kernels", "characterise", "coverage", "topline", "findings", "outliers", "invest"]
)
def test_every_question_is_a_verb_that_says_what_it_looked_at(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    text = printed(capsys, verb, *TIME)
    assert "Looked at 2026-10-05 00:00 to 2026-10-28 00:00 UTC." in text
    answer = json.loads(printed(capsys, verb, *TIME, "--json"))
    assert answer["since_ns"] < answer["until_ns"]


def test_the_tree_of_owners_has_one_sum_on_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "attribution", "--by", "division,product", *TIME).splitlines()
    hours: dict[int, float] = {0: 0.0, 1: 0.0, 2: 0.0}
    for line in lines[1:-1]:
        depth = (len(line) - len(line.lstrip())) // 2
        hours[depth] += _hours(line)
    assert hours[1] == pytest.approx(hours[0], abs=3.0), "each row is rounded"
    assert hours[2] == pytest.approx(hours[0], abs=3.0)
    devices = len(weeks().observed.select("host", "device").unique())
    assert hours[0] == devices * 48


def _hours(line: str) -> float:
    return float(re.split(r"  +", line.strip())[1].replace("\u202f", ""))


def test_rules_are_tried_kept_and_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rules = tmp_path / "owners.toml"
    rules.write_text('[[rule]]\nmatch = {model = "speech"}\nset = {division = "research"}\n')
    assert "Nothing is set." in printed(capsys, "owners")
    tried = printed(capsys, "owners", "set", str(rules), "--dry-run", *TIME)
    held = sum(ms for job, ms in weeks().held_ms.items() if job.startswith("speech"))
    [line] = [line.split() for line in tried.splitlines() if line.startswith("division")]
    assert line[:3] == ["division", "unattributed", "research"]
    assert float(line[-1].replace("\u202f", "")) == pytest.approx(held / 3.6e6, rel=0.005)
    assert "Nothing was kept" in tried
    assert "Nothing is set." in printed(capsys, "owners", "history")
    assert "Version 1 counts now." in printed(capsys, "owners", "set", str(rules), *TIME)
    assert rules.read_text() in printed(capsys, "owners")
    assert "admin" in printed(capsys, "owners", "history")
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "EUR"\n[device_hour]\ndefault = 2\n')
    assert "Version 1 counts now." in printed(capsys, "prices", "set", str(prices), *TIME)
    assert "Cost, EUR" in printed(capsys, "attribution", *TIME)


def test_what_cannot_be_asked_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["fleet", "attribution", "--by", "colour"]) == 3
    assert "no-such-dimension" in capsys.readouterr().err
    assert main(["fleet", "owners", "set"]) == 2
    assert main(["fleet", "kernel-history"]) == 2


@pytest.mark.parametrize("verb", ["attribution", "topline"])
def test_time_of_which_no_host_spoke_is_no_row_of_zeros(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    lines = printed(capsys, verb, "--since", "2026-01-01", "--until", "2026-01-03").splitlines()
    assert lines[0] == "No host has said anything of its devices in this time."
    assert lines[1].startswith("Next: traceloom fleet hosts")
    assert len(lines) == 3


def test_on_a_narrow_terminal_names_give_way_to_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.loads(printed(capsys, "regressions", *TIME, "--top", "2", "--json"))
    master, terminal = pty.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(master, "rb") as seen, os.fdopen(terminal, "w") as screen:
        monkeypatch.setattr("sys.stdout", screen)
        assert main(["fleet", "regressions", *TIME, "--top", "2"]) == 0
        screen.flush()
        lines = [seen.readline().decode().rstrip("\r\n") for _ in range(3)]
    monkeypatch.undo()
    assert lines[0].split()[-4:] == ["Before", "After", "Change", "Costs"]
    assert max(map(len, lines)) <= 80
    for line, change in zip(lines[1:], answer["changes"], strict=True):
        assert f"{change['change'] * 100:+.1f} %" in line
        assert line.startswith(change["kernel"][:9])
        assert "…" in line


def test_rows_beyond_the_last_are_not_called_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "There are no more than 900 rows." in printed(capsys, "kernels", *TIME, "--skip", "900")
