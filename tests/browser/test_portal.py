"""The pages of the fleet's service in a browser, as people use them: from signing in to the report of a trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

for package in ("htpy", "sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.patient_service import patient  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.simulated_hosts import SimulatedHost  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.agent.fleet_link.protocol import HostDevice, HostProcess  # noqa: E402

pytestmark = pytest.mark.browser

JOB = f"portal-{os.getpid()}"
EVIL = "<script>alert(1)</script>"
EVIL_USER = "javascript:alert(2)\u202e"
WAIT_MS = 120_000


def process(number: int, job: str, user: str, device: str) -> HostProcess:
    return HostProcess(
        key=f"{100 + number}@1",
        pid=100 + number,
        uid=1000,
        job=job,
        rank=number,
        world_size=2,
        user=user,
        framework="torch",
        devices=(device,),
        steps_per_second=2.5,
        polls=True,
    )


class Fleet:
    """A service, two hosts with a rank of a job each, one of them with a hostile job, and who reads."""

    def __init__(self, folder: Path) -> None:
        self.service = RunningService(
            folder, "--store", str(folder / "store"), "--workers", "1", command=patient(60)
        )
        self.hosts: list[SimulatedHost] = []
        until(lambda: self.service.ask("GET", "/api/v1/hosts")[0] == 200)
        self.tokens = {
            name: self.post("tokens", {"name": name, "role": role})["token"]
            for name, role in (("ana", "requester"), ("vi", "viewer"), ("bo", "requester"))
        }
        for number in (0, 1):
            device = HostDevice(
                uuid=f"GPU-{number}",
                index="0",
                model="NVIDIA H100 80GB HBM3",
                values={"gpu_busy_ratio": 0.9},
            )
            processes = [process(number, JOB, "ana", device.uuid)]
            if number:
                processes.append(process(7, EVIL, EVIL_USER, "none"))
            token = self.post("agents", {"host": f"node{number}"})["token"]
            self.hosts.append(
                SimulatedHost(
                    [self.service.url], f"node{number}", token, processes, folder, [device]
                )
            )
            self.hosts[-1].begin()
        until(lambda: len(self.service.ask("GET", "/api/v1/jobs")[1]["jobs"]) == 2)

    def post(self, route: str, body: dict[str, Any]) -> Any:
        code, answer = self.service.ask("POST", f"/api/v1/{route}", body=body)
        assert code == 200, answer
        return answer

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        assert self.service.end() == 0, self.service.log.read_text()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


class Guest:
    """A browser of somebody, and what goes wrong in it. What is refused is in the console too: that alone may be."""

    def __init__(self, browser: Any, fleet: Fleet) -> None:
        self.url = fleet.service.url
        self.context = browser.new_context(viewport={"width": 1440, "height": 900})
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.refused: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "dialog",
            lambda dialog: (self.problems.append(f"dialog {dialog.message}"), dialog.dismiss()),
        )
        self.page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        text = str(message.text)
        (self.refused if text.startswith("Failed to load resource") else self.problems).append(text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.problems.append(f"asked {request.url}")

    def go(self, path: str) -> None:
        self.page.goto(self.url + path)
        self.page.wait_for_selector("html[data-ready=yes]", state="attached")

    def sign_in(self, token: str) -> None:
        self.page.fill("#token", token)
        self.page.click("button.primary")
        self.page.wait_for_selector("html[data-ready=yes]", state="attached")

    def heading(self) -> str:
        return str(self.page.inner_text("h1"))

    def close(self, refused: int = 0, *, maybe: int = 0) -> None:
        """`maybe`: of so many more the console may tell, before or after the browser has gone."""
        self.context.close()
        assert self.problems == []
        assert refused <= len(self.refused) <= refused + maybe, self.refused


def test_from_signing_in_to_the_report_of_a_running_job(browser: Any, fleet: Fleet) -> None:
    ana = Guest(browser, fleet)
    page = ana.page
    ana.go(f"/jobs/{JOB}")
    assert ana.heading() == "Sign in"
    ana.sign_in("tl_nothing")
    assert "This token does not open anything." in page.inner_text("[role=alert]")
    ana.sign_in(fleet.tokens["ana"])
    assert ana.heading() == JOB, "it leads to the page that was asked for"

    page.click("#ask summary")
    page.fill("#length", "many")
    page.click("#ask button[type=submit]")
    assert "the number of steps is no number above 0: many" in page.inner_text("[role=alert]")
    page.fill("#length", "3")
    page.click("#ask button[type=submit]")
    page.wait_for_selector(
        "h1:has-text('The trace is there')", timeout=WAIT_MS
    )  # as the stream of the page says
    assert page.locator("#hosts td:has-text('uploaded')").count() == 2
    assert page.locator("time").first.get_attribute("title").endswith("UTC")
    page.click("a:has-text('Open the report')")
    report = page.frame_locator("iframe.report")
    report.locator("h1").first.wait_for(timeout=WAIT_MS)
    assert "2 GPUs" in report.locator("h1").first.inner_text()
    frame = next(frame for frame in page.frames if frame.url.endswith("/report"))
    assert frame.evaluate("self.origin") == "null", "it has no part in the service"
    with page.expect_download(timeout=WAIT_MS) as download:  # it is made now
        page.click("a:has-text('Timeline for Perfetto')", timeout=WAIT_MS)
    assert download.value.suggested_filename.endswith(".perfetto.json.gz")
    # The same when the report is opened by itself.
    where = page.locator("a:has-text('Open it alone')").get_attribute("href")
    page.goto(ana.url + where)
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert page.evaluate("self.origin") == "null"
    ana.close(refused=2)  # the wrong token and the wrong form


def test_names_of_strangers_are_text_and_roles_hold(browser: Any, fleet: Fleet) -> None:
    viewer = Guest(browser, fleet)
    page = viewer.page
    viewer.go("/jobs")
    viewer.sign_in(fleet.tokens["vi"])
    assert "javascript:alert(2)\\u202e" in page.inner_text("#jobs")
    page.click(f"#jobs a:has-text('{EVIL}')")
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert viewer.heading() == EVIL
    page.click("#ask summary")
    assert "This needs the role requester" in page.inner_text("#ask")
    assert page.locator("#ask form").count() == 0
    assert page.locator("nav a[href='/tokens']").count() == 0
    viewer.go("/tokens")
    assert viewer.heading() == "This needs the role admin, and the token has viewer."
    viewer.close(refused=1)
    bo = Guest(browser, fleet)
    bo.go(f"/jobs/{JOB}")
    bo.sign_in(fleet.tokens["bo"])
    bo.page.click("#ask summary")
    bo.page.click("#ask button[type=submit]")
    assert f"{JOB} is not the job of bo." in bo.page.inner_text("[role=alert]")
    # Once the token is revoked, the next page is the form again.
    assert fleet.service.ask("DELETE", "/api/v1/tokens/bo")[0] == 200
    bo.go("/jobs")
    assert bo.heading() == "Sign in"
    assert "Your session has ended." in bo.page.inner_text("main")
    bo.close(refused=1, maybe=1)


def test_axe_has_nothing_against_a_page_of_each_sort(browser: Any, fleet: Fleet) -> None:
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    answer = fleet.service.ask("GET", "/api/v1/requests")[1]["requests"]
    paths = [
        "/",
        f"/jobs/{JOB}",
        "/tokens",
    ]  # all the others: tests/browser/test_portal_questions.py
    paths += [f"/requests/{answer[0]['id']}", f"/captures/{answer[0]['capture']}"] if answer else []
    options = {"resultTypes": ["violations"], "iframes": False}
    admin = Guest(browser, fleet)
    admin.go("/")
    admin.sign_in(fleet.service.token_file.read_text().strip())
    problems = []
    for path in paths:
        admin.go(path)
        admin.page.evaluate(
            "for (const part of document.querySelectorAll('details')) part.open = true"
        )
        admin.page.evaluate(axe)
        result = admin.page.evaluate("(options) => axe.run(document, options)", options)
        problems += [
            f"{path}: {violation['help']}: {[node['target'] for node in violation['nodes'][:3]]}"
            for violation in result["violations"]
        ]
        for width in (1440, 800):
            admin.page.set_viewport_size({"width": width, "height": 900})
            if admin.page.evaluate("document.documentElement.scrollWidth") > width:
                problems.append(f"{path} is wider than {width}")
    assert problems == []
    admin.close()


@pytest.mark.thorough
def test_a_page_lives_through_a_restart_of_the_service(browser: Any, fleet: Fleet) -> None:
    admin = Guest(browser, fleet)
    admin.go("/hosts")
    admin.sign_in(fleet.service.token_file.read_text().strip())
    fleet.hosts.pop().close()
    fleet.service.end()
    admin.page.wait_for_selector(".live:has-text('Connecting again')", timeout=WAIT_MS)
    fleet.service.start()
    admin.page.wait_for_selector("#hosts tr:has-text('node0') >> text=here", timeout=WAIT_MS)
    admin.page.wait_for_selector("#hosts tr:has-text('node1') >> text=never", timeout=WAIT_MS)
    admin.page.wait_for_selector(".live", state="detached", timeout=WAIT_MS)
    admin.refused = [text for text in admin.refused if "net::ERR_" not in text]
    admin.close()
