"""Pages on which something is set: what is wrong is shown before anything is kept, who may not is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("htpy", "sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.patient_service import patient  # noqa: E402
from support.running_service import RunningService, Seen  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.agent.fleet_link.client import ServiceClient  # noqa: E402
from traceloom.agent.fleet_link.protocol import (  # noqa: E402
    Enrolment,
    Heartbeat,
    HeartbeatResponse,
    HostCredentials,
    HostProcess,
)

RULES = '[[triggers]]\nname = "daily"\non = "cadence"\nshare = 1.0\nwhere = {{job = "{job}"}}\n'
PRICES = 'currency = "EUR"\n[device_hour]\ndefault = 2.5\n'


class Portal:
    """A service, a host that tells of a job that hangs, and an administrator's browser."""

    def __init__(self, folder: Path) -> None:
        self.service = RunningService(folder, command=patient(60))
        until(lambda: self.service.ask("GET", "/api/v1/triggers")[0] == 200)  # it leads
        token = self.service.client().post("agents", {"host": "node1", "days": 1})["token"]
        host = ServiceClient(self.service.url)
        host.credential = host.post(
            "agents/enrol", Enrolment(token=token, host="node1"), HostCredentials
        ).credential
        ranks = [
            HostProcess(key=f"{rank}@1", pid=rank + 1, uid=0, job="stuck", rank=rank, hung=True)
            for rank in (0, 1)
        ]
        beat = Heartbeat(sent_ns=time.time_ns(), boot_id="b", version="1", processes=ranks)
        host.post("agents/node1/heartbeat", beat, HeartbeatResponse)
        host.close()
        self.cookie = self.service.signed_in()

    def see(self, path: str, **form: str) -> Seen:
        return self.service.browse(path, self.cookie, form or None)


@pytest.fixture(scope="module")
def portal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Portal]:
    made = Portal(tmp_path_factory.mktemp("fleet"))
    yield made
    assert made.service.end() == 0, made.service.log.read_text()


def cells(seen: Seen, table: str) -> list[list[str]]:
    """The texts of a table's rows."""
    [body] = re.findall(rf'<figure[^>]* id="{table}">.*?<tbody>(.*?)</tbody>', seen.text, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)]
        for row in rows
    ]


def test_rules_are_checked_before_they_are_set(portal: Portal) -> None:
    seen = portal.see("/triggers")
    assert "There are no rules yet" in seen.text
    wrong = portal.see(
        "/triggers", text='[[triggers]]\nname = "x"\non = "cadence"\nshare = 2\n', do="try"
    )
    assert (wrong.status, 'role="alert"' in wrong.text) == (400, True)
    assert "triggers[0].share" in re.findall(r'role="alert">(.*?)</div>', wrong.text, re.DOTALL)[0]
    assert "share = 2" in wrong.text, "what was written is there still"
    for job, jobs in (("st*", "1"), ("other", "0")):
        right = portal.see("/triggers", text=RULES.format(job=job), do="try")
        assert [row[:3] for row in cells(right, "checked")] == [
            ["daily", "cadence: each day, a share of the jobs", jobs]
        ]
    assert portal.service.client().get("triggers")["rules"] == []
    assert (
        portal.see(
            "/triggers", text=RULES.format(job="other").replace("\n", "\r\n"), do="save"
        ).status
        == 303
    )
    assert portal.service.client().get("triggers")["toml"] == RULES.format(job="other")
    assert [row[0] for row in cells(portal.see("/triggers"), "rules")] == ["daily"]


def test_prices_are_shown_with_what_they_change_and_kept_in_versions(portal: Portal) -> None:
    assert "Nothing has a price yet" in portal.see("/prices").text
    wrong = portal.see("/prices", text="per_kwh = 1", do="try")
    assert (wrong.status, "currency" in wrong.text) == (400, True)
    tried = portal.see("/prices", text=PRICES, do="try")
    assert "Nothing is saved yet." in tried.text
    assert portal.service.client().get("prices")["version"] == 0
    assert portal.see("/prices", text=PRICES, do="save").status == 303
    assert portal.see("/prices", text=PRICES.replace("EUR", "USD"), do="save").status == 303
    assert "Prices in USD" in portal.see("/prices").text
    assert [row[0] for row in cells(portal.see("/prices"), "versions")] == ["2", "1"]
    old = portal.see("/prices?version=1").text
    assert "Prices in EUR" in old
    assert "This is version 1" in old


def test_a_webhook_is_added_tells_its_secret_once_and_is_removed(portal: Portal) -> None:
    assert "Nobody is told of anything." in portal.see("/webhooks").text
    inside = portal.see(
        "/webhooks", do="add", name="chat", url="https://10.0.0.1/hook", events="request.done"
    )
    assert (inside.status, 'role="alert"' in inside.text) == (400, True)
    assert portal.see("/webhooks", do="add", name="a b", url="https://1.1.1.1/hook").status == 400
    assert (
        portal.see(
            "/webhooks", do="add", name="chat", url="https://1.1.1.1/hook", events="all"
        ).status
        == 400
    )
    added = portal.see(
        "/webhooks", do="add", name="chat", url="https://1.1.1.1/hook", events="request.done"
    )
    assert re.search(r"whsec_[\w+/]{40}", added.text)
    listed = portal.see("/webhooks")
    assert "whsec_" not in listed.text
    [row] = cells(listed, "webhooks")
    assert row[:6] == ["chat", "https://1.1.1.1/hook", "request.done", "0", "0", "0"]
    assert portal.see("/webhooks", do="remove", remove="chat").status == 303
    assert portal.service.client().get("webhooks")["webhooks"] == []


def test_who_may_not_change_them_is_shown_no_form_and_refused(portal: Portal) -> None:
    viewer = portal.service.client().post("tokens", {"name": "vi", "role": "viewer"})["token"]
    cookie = portal.service.signed_in(viewer)
    for path, text in (("/triggers", RULES), ("/prices", PRICES)):
        assert "<textarea" not in portal.service.browse(path, cookie).text
        assert portal.service.browse(path, cookie, {"text": text, "do": "save"}).status == 403
    assert portal.service.browse("/webhooks", cookie).status == 403


def test_the_overview_says_what_hangs_and_what_could_not_be_analysed(
    portal: Portal, tmp_path: Path
) -> None:
    (tmp_path / "rank0.json").write_text("no trace at all")
    portal.service.run("upload", str(tmp_path / "rank0.json"), "--job", "broken")
    [capture] = [of["id"] for of in portal.service.client().get("captures")["captures"]]
    until(lambda: f'<a href="/captures/{capture}">' in portal.see("/").text)
    wrong = re.findall(r'<ul class="wrong">(.*?)</ul>', portal.see("/").text, re.DOTALL)[0]
    assert '<a href="/jobs/stuck">stuck</a> hangs' in wrong
    assert "could not be analysed: " in wrong
    assert "it makes no steps any more" in portal.see("/jobs/stuck").text
