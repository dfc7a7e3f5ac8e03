"""What a command of the fleet does, its pages show; and a job whose numbers were worked out by hand has them there."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

for package in ("htpy", "sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.hand_job import COLLECTIVE_US, GEMM_US, NCCL, STEP_US, STEPS, hand_rank  # noqa: E402
from support.html_tree import HtmlTree, words  # noqa: E402
from support.page_contents import EVIL  # noqa: E402
from support.patient_service import patient  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.cli import main  # noqa: E402

RULES = '[[triggers]]\nname = "daily"\non = "cadence"\nshare = 1.0\n'
LONG = f"void cutlass::device_gemm<{'float, ' * 90}int>(int*)"
"""A kernel whose name is longer than filters may be, and holds their signs."""

US = 1_000  # ns


class Office:
    """A service, its administrator's terminal and browser, and a capture of two ranks that it has analysed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.service = RunningService(folder, command=patient(60))
        until(lambda: self.service.ask("GET", "/api/v1/triggers")[0] == 200)  # it leads
        self.cookie = self.service.signed_in()
        self.run_folder = folder / "run"
        self.run_folder.mkdir()
        for rank in range(2):
            hand_rank(rank, LONG).write(self.run_folder / f"rank{rank}.json")

    def command(self, *words: str) -> int:
        """A command; its exit code."""
        return main(
            [*words, "--server", self.service.url, "--token-file", str(self.service.token_file)]
        )

    def page(self, path: str) -> HtmlTree:
        seen = self.service.browse(path, self.cookie)
        assert seen.status == 200, (path, seen.status)
        return HtmlTree(seen.text)

    def rows(self, path: str, table: str) -> list[dict[str, Any]]:
        """A table as it is downloaded: as JSON and as CSV it has the same values."""
        address = f"{path}{'&' if '?' in path else '?'}table={table}&as="
        rows = list(json.loads(self.service.browse(f"{address}json", self.cookie).text))
        lines = list(
            csv.DictReader(io.StringIO(self.service.browse(f"{address}csv", self.cookie).text))
        )
        for row, line in zip(rows, lines, strict=True):
            for name, value in row.items():
                text = "" if value is None else str(value)
                assert line[name].removeprefix("'") == text or float(line[name]) == float(value), (
                    name,
                    value,
                )
        return rows


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    made = Office(tmp_path_factory.mktemp("office"))
    try:
        yield made
    finally:
        code = made.service.end()
    assert code == 0, made.service.log.read_text()


@pytest.fixture(scope="module")
def capture(office: Office) -> str:
    """The capture that was uploaded, once it is analysed."""
    assert (
        office.command("upload", str(office.run_folder), "--job", "by hand", "--wait", "--quiet")
        == 0
    )
    [row] = [row for row in office.rows("/captures", "captures") if row["job"] == "by hand"]
    assert row["state"] == "committed"
    return str(row["id"])


def key_numbers(page: HtmlTree) -> dict[str, str]:
    return {
        words(page.all("dt", of)[0]): words(page.all("b", of)[0])
        for whole in page.all("dl")
        for of in whole
    }


def test_a_capture_has_the_numbers_that_were_worked_out_by_hand(
    office: Office, capture: str
) -> None:
    path = f"/captures/{quote(capture, safe='')}"
    numbers = key_numbers(office.page(path))
    assert (numbers["Ranks"], numbers["Step"]) == ("2", "1.00 ms")
    assert numbers["Device"] == "NVIDIA H100 80GB HBM3"
    sizes = {of.name: of.stat().st_size for of in office.run_folder.iterdir()}
    assert {row["name"]: row["bytes"] for row in office.rows(path, "files")} == sizes
    kernels = {row["kernel"]: row for row in office.rows("/kernels?job=by+hand", "rows")}
    whole = 6 * (GEMM_US + 50) + STEPS * sum(COLLECTIVE_US.values()) + 6 * 50
    assert kernels[LONG]["total_ns"] == 6 * GEMM_US * US
    assert kernels[LONG]["mean_ns"] == GEMM_US * US
    assert kernels[NCCL]["total_ns"] == STEPS * sum(COLLECTIVE_US.values()) * US
    assert sum(row["total_ns"] for row in kernels.values()) == whole * US
    assert kernels[LONG]["fraction"] == pytest.approx(6 * GEMM_US / whole)
    assert (
        words(office.page("/kernels?job=by+hand").all("h1")[0])
        == f"{LONG} takes 52.2 % of the GPU time"
    )
    history = f"/kernels/history?{urlencode({'kernel': LONG})}"
    [job] = office.rows(history, "jobs")
    assert (job["job"], job["mean_ns"], job["count"]) == ("by hand", GEMM_US * US, 6)
    kinds = {row["kind"]: row["total_ns"] for row in office.rows("/gpu-time?job=by+hand", "rows")}
    assert kinds["communication"] == kernels[NCCL]["total_ns"]
    assert sum(kinds.values()) == whole * US
    report = office.service.browse(f"{path}/report", office.cookie)
    assert report.status == 200
    assert "sandbox" in report.headers["Content-Security-Policy"]
    assert f"{STEPS} whole steps" in report.text
    assert STEP_US * STEPS == 3_000


def test_what_commands_fetch_is_what_was_sent(
    office: Office, capture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert office.command("fleet", "fetch", capture, "-o", str(tmp_path / "run")) == 0
    assert f"Wrote {tmp_path / 'run'}" in capsys.readouterr().out
    fetched = {of.name: of.read_bytes() for of in (tmp_path / "run").iterdir()}
    assert fetched == {of.name: of.read_bytes() for of in office.run_folder.iterdir()}
    assert office.command("fleet", "fetch", capture, "-o", str(tmp_path / "run")) == 3
    assert "there is something already" in capsys.readouterr().err
    page = tmp_path / "report.html"
    assert office.command("fleet", "report", capture, "-o", str(page), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "report": str(page),
        "bytes": page.stat().st_size,
    }
    assert office.command("fleet", "report", capture, "-o", str(page)) == 3
    assert "traceloom explain file-exists" in capsys.readouterr().err
    assert office.command("fleet", "report", capture, "-o", str(page), "--force", "--quiet") == 0
    assert capsys.readouterr().out == ""
    assert office.command("fleet", "report", "no-such", "-o", str(tmp_path / "no.html")) == 3
    assert not (tmp_path / "no.html").exists()
    assert office.command("fleet", "captures") == 0
    table = capsys.readouterr().out
    assert capture in table
    assert "by hand" in table


def test_an_upload_that_cannot_be_analysed_says_why_and_ends_with_3(
    office: Office, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.json").write_text("no trace at all")
    assert (
        office.command(
            "upload", str(tmp_path / "rank0.json"), "--job", "broken", "--wait", "--json"
        )
        == 3
    )
    printed = capsys.readouterr()
    [answer] = json.loads(printed.out)
    assert answer["state"] == "quarantined"
    assert "the service could not analyse it" in printed.err
    assert "traceloom explain not-analysed" in printed.err
    [row] = [row for row in office.rows("/captures", "captures") if row["job"] == "broken"]
    assert row["error"] == answer["tasks"][-1]["error"]
    assert office.command("upload", str(tmp_path / "nothing.json")) == 3
    assert capsys.readouterr().out == ""


def test_rules_that_a_command_sets_are_on_the_page(
    office: Office, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    assert office.command("fleet", "triggers") == 0
    assert "There are no rules." in capsys.readouterr().out
    assert office.command("fleet", "triggers", "set", str(file)) == 0
    printed = capsys.readouterr().out
    assert "daily" in printed
    assert "left of 24 hours: 50 of 50 traces" in printed
    assert [row["name"] for row in office.rows("/triggers", "rules")] == ["daily"]
    assert office.command("fleet", "triggers", "show") == 0
    assert capsys.readouterr().out == RULES
    assert office.command("fleet", "triggers", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rules"][0]["on"] == "cadence"
    file.write_text(RULES.replace("1.0", "7.0"))
    for words_, code, slug in (
        (["set", str(file)], 3, "wrong-config"),
        (["set"], 2, "wrong-usage"),
        (["list", str(file)], 2, "wrong-usage"),
        (["set", str(tmp_path / "none.toml")], 3, "unreadable"),
        (["set", str(tmp_path)], 3, "unreadable"),
    ):
        assert office.command("fleet", "triggers", *words_) == code, words_
        printed = capsys.readouterr()
        assert printed.out == ""
        assert f"traceloom explain {slug}" in printed.err
    assert office.service.client().get("triggers")["toml"] == RULES, "those before stay"


def test_webhooks_that_a_command_adds_are_on_the_page(
    office: Office, capsys: pytest.CaptureFixture[str]
) -> None:
    assert office.command("fleet", "webhooks") == 0
    assert "There are no webhooks." in capsys.readouterr().out
    events = ["--events", "request.done,regression.new"]
    assert office.command("fleet", "webhooks", "add", "chat", "https://1.1.1.1/hook", *events) == 0
    secret = capsys.readouterr().out.strip()
    assert secret.startswith("whsec_")
    [row] = office.rows("/webhooks", "webhooks")
    assert (row["name"], row["url"], row["events"]) == (
        "chat",
        "https://1.1.1.1/hook",
        "regression.new, request.done",
    )
    assert secret not in str(row)
    assert office.command("fleet", "webhooks", "list") == 0
    assert "https://1.1.1.1/hook" in capsys.readouterr().out
    for words_, code in (
        (["add", "chat", "https://1.1.1.1/hook"], 3),
        (["add", "inside", "https://127.0.0.1/hook"], 3),
        (["add", "odd", "https://1.1.1.1/", "--events", "all"], 3),
        (["add", "chat"], 2),
        (["remove"], 2),
        (["list", "chat"], 2),
        (["test", "none"], 3),
        (["remove", "none"], 3),
    ):
        assert office.command("fleet", "webhooks", *words_) == code, words_
        printed = capsys.readouterr()
        assert printed.out == "", words_
        assert printed.err.startswith("traceloom: ")
    assert office.command("fleet", "webhooks", "remove", "chat") == 0
    assert capsys.readouterr().out == "chat is told nothing any more.\n"
    assert office.page("/webhooks").tables() == {}


def test_tokens_that_a_command_makes_open_the_pages_until_it_revokes_them(
    office: Office, capsys: pytest.CaptureFixture[str]
) -> None:
    assert office.command("fleet", "token", "add", "vi", "--role", "viewer", "--days", "2") == 0
    secret = capsys.readouterr().out.strip()
    [row] = [row for row in office.rows("/tokens", "tokens") if row["name"] == "vi"]
    assert (row["state"], row["role"]) == ("active", "viewer")
    day = 24 * 3600 * 10**9
    assert row["expires_ns"] - row["created_ns"] == pytest.approx(2 * day, abs=day / 24)
    cookie = office.service.signed_in(secret)
    assert office.service.browse("/jobs", cookie).status == 200
    assert office.service.browse("/tokens", cookie).status == 403
    assert office.command("fleet", "token", "list") == 0
    assert "viewer" in capsys.readouterr().out
    assert office.command("fleet", "token", "add", "vi") == 3, "there is one"
    assert "traceloom explain token-exists" in capsys.readouterr().err
    assert office.command("fleet", "token", "revoke", "vi") == 0
    assert capsys.readouterr().out == "vi opens nothing any more.\n"
    assert office.service.browse("/jobs", cookie).status == 303
    [row] = [row for row in office.rows("/tokens", "tokens") if row["name"] == "vi"]
    assert row["state"] == "revoked"
    for words_, code in (
        (["add"], 2),
        (["list", "vi"], 2),
        (["revoke", "none"], 3),
        (["add", EVIL], 3),
    ):
        assert office.command("fleet", "token", *words_) == code, words_
        assert capsys.readouterr().out == ""
    assert office.command("fleet", "token", "enrol", "node7") == 0
    assert len(capsys.readouterr().out.strip()) > 20


def test_a_fleet_without_hosts_is_told_as_one(
    office: Office, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words_ in (["hosts"], ["jobs"], ["requests"]):
        assert office.command("fleet", *words_) == 0
        assert "Next: " in capsys.readouterr().out
    assert office.command("trace", "--list") == 0
    assert capsys.readouterr().out == "No requests.\n"
    assert office.command("trace", "--list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    for words_, code, slug in (
        (["--steps", "3"], 2, "wrong-usage"),
        (["--job", "a"], 2, "wrong-usage"),
        (["--job", "a", "--steps", "3", "--duration", "5"], 2, "wrong-usage"),
        (["--rank", "0", "--steps", "3"], 2, "wrong-usage"),
        (["--job", "a", "--steps", "3", "--at", "noon"], 2, "bad-time"),
        (["--job", "a", "--steps", "3", "--at", "+x"], 2, "bad-time"),
        (["--job", "a", "--steps", "3", "-o", str(tmp_path)], 3, "file-exists"),
        (["--job", "nobody", "--steps", "3"], 3, "no-such-job"),
        (["--cancel", "none"], 3, "no-such-request"),
    ):
        assert office.command("trace", *words_) == code, words_
        printed = capsys.readouterr()
        assert printed.out == ""
        assert f"traceloom explain {slug}" in printed.err, words_
    assert office.command("fleet", "check") in {0, 5}
    assert "tasks" in capsys.readouterr().out
    assert office.command("fleet", "backfill", "--json") == 0
    assert json.loads(capsys.readouterr().out)["captures"] == 0
    assert office.command("fleet", "hosts", "--remove", "none") == 3


def test_who_did_what_and_who_was_refused_is_in_the_audit(office: Office, tmp_path: Path) -> None:
    secret = office.service.client().post("tokens", {"name": "guest", "role": "viewer"})["token"]
    (tmp_path / "token").write_text(secret)
    asked = [
        "fleet",
        "token",
        "add",
        "mine",
        "--server",
        office.service.url,
        "--token-file",
        str(tmp_path / "token"),
    ]
    assert main(asked) == 3
    assert office.command("fleet", "jobs") == 0
    first, second, *_ = office.rows("/audit", "audit")
    assert (first["who"], first["what"], first["result"]) == (
        "guest",
        "POST /api/v1/tokens",
        "not-allowed",
    )
    assert (second["what"], second["result"]) == ("POST /api/v1/tokens", "done")
    assert "guest" in second["details"]
    assert secret not in str(second)
    filtered = office.rows(f"/audit?{urlencode({'audit.q': 'GUEST not-allowed'})}", "audit")
    assert first in filtered
    assert all("guest" in str(row) and "not-allowed" in str(row) for row in filtered)
