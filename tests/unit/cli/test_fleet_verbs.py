"""The verbs of the fleet as people run them: asked well, asked badly, of a service that is there or not."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import DAYS, AnsweringService, answering  # noqa: E402
from support.prometheus import free_port  # noqa: E402
from traceloom.agent.fleet_link.client import ServiceClient  # noqa: E402
from traceloom.agent.fleet_link.protocol import (  # noqa: E402
    ClockOffset,
    Enrolment,
    Heartbeat,
    HeartbeatResponse,
    HostCredentials,
    HostDevice,
    HostProcess,
)
from traceloom.cli import main  # noqa: E402
from traceloom.cli.fleet import ACTIONS  # noqa: E402
from traceloom.testing.fleet_weeks import Weeks, WeeksRecipe, build_weeks  # noqa: E402

TIME = ["--since", DAYS["since"], "--until", DAYS["until"]]
# What each needs beside its name, so that it asks the service.
NEEDS = {
    "report": ["nothing", "-o", "{folder}/report.html"],
    "fetch": ["nothing", "-o", "{folder}/run"],
    "token": ["list"],
    "kernel-history": ["--kernel", "none"],
}
HAVE_SOMETHING = {"report", "fetch", "token", "backfill", "check", "compact", "triggers"}
"""What does something, or what a service without a leader refuses."""
THIN = "\u202f"


@cache
def weeks() -> Weeks:
    return build_weeks(WeeksRecipe(captures=1))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnsweringService]:
    with answering(tmp_path_factory.mktemp("fleet"), weeks()) as service:
        yield service


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnsweringService]:
    with answering(tmp_path_factory.mktemp("empty")) as service:
        yield service


@pytest.fixture
def token_file(fleet: AnsweringService, tmp_path: Path) -> Path:
    path = tmp_path / "admin.token"
    path.write_text(fleet.admin._token)
    return path


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No service and no token but those that a command names."""
    for name in ("TRACELOOM_SERVER", "TRACELOOM_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def words_of(action: str, folder: Path) -> list[str]:
    return ["fleet", action, *(word.format(folder=folder) for word in NEEDS.get(action, []))]


@pytest.mark.parametrize("action", ACTIONS)
def test_help_says_what_it_is_for_with_an_example(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", action, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"traceloom fleet {action}" in text.partition("examples:")[2]
    assert all(option in text for option in ("--server", "--token-file", "--json", "--quiet"))
    first = text.split("\n\n")[1]
    assert first[0].isupper()
    assert first.rstrip().endswith(".")


@pytest.mark.parametrize("action", ACTIONS)
def test_where_nobody_answers_it_says_what_starts_a_service(
    action: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = f"http://127.0.0.1:{free_port()}"
    assert main([*words_of(action, tmp_path), "--server", server]) == 3
    printed = capsys.readouterr()
    assert not printed.out
    first, hint, more = printed.err.splitlines()
    assert first.startswith(
        f"traceloom: the service does not answer: connection refused ({server}/api/v1/"
    )
    assert "`traceloom serve` starts one" in hint
    assert "traceloom explain no-service" in more
    assert list(tmp_path.iterdir()) == [], "no half a file is left"


@pytest.mark.sampled(9)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_wrong_token_and_none_are_told_apart(
    action: str, fleet: AnsweringService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = [*words_of(action, tmp_path), "--server", fleet.url]
    assert main(asked) == 3
    none = capsys.readouterr().err
    assert none.startswith("traceloom: a token is needed\n")
    assert "--token-file or TRACELOOM_TOKEN" in none
    (tmp_path / "wrong").write_text("tl_wrong")
    assert main([*asked, "--token-file", str(tmp_path / "wrong")]) == 3
    assert capsys.readouterr().err.startswith(
        "traceloom: this token is none of ours, has expired or was revoked\n"
    )
    if action == "hosts":  # it is read before anything is asked
        assert main([*asked, "--token-file", str(tmp_path / "nowhere")]) == 3
        assert "cannot be read: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "server", ["nonsense", "ftp://x", "http://example.org", "http://user:pw@127.0.0.1:9466"]
)
def test_what_is_no_address_is_refused_before_anything_is_sent(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "hosts", "--server", server]) == 3
    assert "explain wrong-address" in capsys.readouterr().err


@pytest.mark.sampled(7)
@pytest.mark.parametrize("action", sorted(set(ACTIONS) - HAVE_SOMETHING))
def test_where_there_is_nothing_it_says_what_to_do_next(
    action: str, empty: AnsweringService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(empty.admin._token)
    asked = [
        *words_of(action, tmp_path),
        "--server",
        empty.url,
        "--token-file",
        str(tmp_path / "token"),
    ]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(".") or action == "query"
    assert not any(f" {line} " in ("-", "–") for line in lines)
    if action not in {"outliers", "regressions"}:
        assert any(line.startswith("Next: ") for line in lines), lines
    assert main([*asked, "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def commands(text: str) -> list[list[str]]:
    """The commands that a text says are to be copied."""
    lines = (
        line.partition(": ")[2]
        for line in text.splitlines()
        if re.match(r"(Next|Compare|Over time|Look): ", line)
    )
    parts = (part for line in lines for part in re.split(r" && |; ", line))
    return [shlex.split(part)[1:] for part in parts if part.startswith("traceloom fleet ")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "action", ["kernels", "regressions", "invest", "findings", "topline", "outliers"]
)
def test_commands_that_are_printed_work_when_they_are_copied(
    action: str, fleet: AnsweringService, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["fleet", action, *TIME, "--server", fleet.url, "--token-file", str(token_file)]
    assert main(asked) == 0
    printed = commands(capsys.readouterr().out)
    assert printed or action in {"topline", "outliers"}
    for words in printed:
        assert words[words.index("--server") + 1] == fleet.url
        assert words[words.index("--token-file") + 1] == str(token_file)
        if words[1] == "kernel-history":
            assert main([*words, *TIME]) == 0
        else:  # the captures of made weeks have no files
            assert (
                main(
                    [
                        *words[: words.index("-o")],
                        "-o",
                        str(token_file.parent / "out"),
                        *words[words.index("-o") + 2 :],
                    ]
                )
                == 3
            )
            assert "explain no-such-capture" in capsys.readouterr().err


def test_the_way_into_the_fleet_names_the_service_that_was_asked(
    empty: AnsweringService, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACELOOM_SERVER", empty.url)
    monkeypatch.setenv("TRACELOOM_TOKEN", empty.admin._token)
    assert main(["fleet", "hosts"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "No host belongs to the fleet yet.",
        "Next: traceloom fleet token enrol > host.token",
        f"on the host: traceloom agent run --server {empty.url} --token-file host.token",
    ]
    assert main(["fleet", "requests"]) == 0
    assert f"traceloom trace --server {empty.url} --job JOB --steps 3" in capsys.readouterr().out


def test_tables_write_numbers_and_what_is_not_known_as_pages_do(
    fleet: AnsweringService, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--server", fleet.url, "--token-file", str(token_file), *TIME]
    for action in ("kernels", "attribution", "topline", "characterise", "coverage", "outliers"):
        assert main(["fleet", action, *asked]) == 0
        lines = capsys.readouterr().out.splitlines()
        rows = [
            re.split(r"  +", line.strip())
            for line in lines
            if not line.startswith(("Next", "Looked", "There"))
        ]
        cells = [cell for row in rows[1:] for cell in row]
        assert not any(cell in {"-", "None", "nan"} for cell in cells), action
        assert not any(re.search(r"\d,\d{3}", cell) for cell in cells if "[" not in cell), action
        assert any(re.match(rf"\d+{THIN}\d{{3}}\b", cell) for cell in cells) or action in {
            "outliers",
            "coverage",
        }, action
    assert main(["fleet", "attribution", "--by", "host", *asked]) == 0
    head, whole, *_ = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head.strip())[:4] == ["Host", "Hours", "Share", "Use"]
    devices = weeks().observed.select("host", "device").unique().height
    assert re.split(r"  +", whole.strip())[1].replace(THIN, "") == str(devices * 48)


def test_numbers_stand_under_each_other_at_their_end(
    fleet: AnsweringService, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["fleet", "kernels", *TIME, "--server", fleet.url, "--token-file", str(token_file)])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    end = lines[0].index("GPU time") + len("GPU time")
    rows = [
        line for line in lines[1:] if line.split()[0] in set(weeks().tables["kernels"]["kernel"])
    ]
    assert len(rows) == 20
    assert all(line[:end].endswith("s") and line[end : end + 2] == "  " for line in rows), (
        "with their unit"
    )


def test_hosts_say_how_far_their_clocks_are_off_and_which_way(
    fleet: AnsweringService, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for host, offset_ns in (("slow", 2_500_000), ("fast", -120_000)):
        secret = fleet.admin.post("agents", {"host": host, "days": 1})["token"]
        link = ServiceClient(fleet.url)
        link.credential = link.post(
            "agents/enrol", Enrolment(token=secret, host=host), HostCredentials
        ).credential
        process = HostProcess(
            key="1@1", pid=1, uid=0, job="run", rank=0, world_size=2, devices=("GPU-0",)
        )
        beat = Heartbeat(
            sent_ns=1,
            boot_id="b",
            version="1",
            processes=[process],
            devices=[HostDevice(uuid="GPU-0", values={})],
            clock=ClockOffset(offset_ns=offset_ns, error_ns=90_000, round_trips=3),
        )
        link.post(f"agents/{host}/heartbeat", beat, HeartbeatResponse)
        link.close()
    asked = ["--server", fleet.url, "--token-file", str(token_file)]
    assert main(["fleet", "hosts", *asked]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["slow"].endswith("2.50 ms behind ± 90.0 µs")
    assert rows["fast"].endswith("120 µs ahead ± 90.0 µs")
    assert main(["fleet", "jobs", *asked]) == 0
    job = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("run "))
    assert re.split(r"  +", job.strip())[1:5] == ["–", "fast, slow", "1/2", "0 of 2"]
    assert main(["fleet", "query", "--by", "host", *asked]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == {
        "fast",
        "slow",
    }
    assert main(["fleet", "hosts", "--remove", "slow", *asked]) == 0
    assert capsys.readouterr().out == "slow belongs to the fleet no more.\n"
    assert main(["fleet", "hosts", "--remove", "slow", *asked]) == 3


def test_a_token_is_made_listed_and_revoked(
    fleet: AnsweringService, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--server", fleet.url, "--token-file", str(token_file)]
    assert main(["fleet", "token", "add", "ci", "--role", "viewer", "--days", "2", *asked]) == 0
    secret = capsys.readouterr().out.strip()
    assert re.fullmatch(r"tl_[\w-]+", secret)
    (token_file.parent / "ci").write_text(secret)
    as_ci = ["--server", fleet.url, "--token-file", str(token_file.parent / "ci")]
    assert main(["fleet", "captures", *as_ci]) == 0
    capsys.readouterr()
    assert main(["fleet", "token", "list", *as_ci]) == 3, "a viewer reads no tokens"
    assert "explain not-allowed" in capsys.readouterr().err
    assert main(["fleet", "token", "list", *asked]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["ci"][1] == "viewer"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", rows["ci"][2])
    assert rows["admin"][1:] == ["admin", "for", "ever"]
    assert main(["fleet", "token", "revoke", "ci", *asked]) == 0
    assert capsys.readouterr().out == "ci opens nothing any more.\n"
    assert main(["fleet", "captures", *as_ci]) == 3
    assert main(["fleet", "token", "revoke", "ci", "--json", *asked]) == 3
    capsys.readouterr()
    for words in (["add"], ["revoke"], ["list", "ci"]):
        assert main(["fleet", "token", *words, *asked]) == 2
    capsys.readouterr()
    assert main(["fleet", "token", "add", "no name", *asked]) == 3
    assert "`name`: expected at most 80 letters" in capsys.readouterr().err


def test_check_says_part_by_part_what_works(
    fleet: AnsweringService, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["fleet", "check", "--server", fleet.url, "--token-file", str(token_file)])
    printed = capsys.readouterr()
    rows = {line.split()[0]: line for line in printed.out.splitlines()}
    assert {"Part", "state", "files", "tables", "tasks"} <= set(rows)
    failed = [name for name, line in rows.items() if "✗" in line]
    assert (code, "explain fleet-not-well" in printed.err) == ((5, True) if failed else (0, False))
