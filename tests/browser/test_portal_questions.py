"""The pages that ask questions, in a real browser, over the store of the demo, whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "htpy"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.demo_store import demo_store  # noqa: E402
from support.portal_pages import addresses  # noqa: E402
from support.served_demo import served_demo  # noqa: E402
from traceloom.cli.upload import FleetClient  # noqa: E402
from traceloom.testing.fleet_weeks import Weeks  # noqa: E402

EVIL = "<img src=x onerror=alert(1)>\u202e'\"&"


class Served:
    """The demo, as it is served, and a browser that is signed in."""

    def __init__(self, url: str, token: str, weeks: Weeks, context: Any) -> None:
        self.url, self.weeks, self.context = url, weeks, context
        self.client = FleetClient(url, token)
        self.problems: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._asked)
        self.page.on(
            "dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss())
        )
        self.page.goto(f"{url}/sign-in")
        self.page.fill("#token", token)
        self.page.click("button[type=submit]")
        self.page.wait_for_selector("#parts")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.problems.append(f"asked {request.url}")

    def open(self, path: str) -> Any:
        """A page, when it is ready."""
        response = self.page.goto(f"{self.url}{path}")
        assert response.status == 200, (path, self.page.inner_text("body"))
        self.page.wait_for_selector("html[data-ready=yes]", state="attached")
        return self.page


@pytest.fixture(scope="module")
def served(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store, made, _ = demo_store(tmp_path_factory)
    with served_demo(store, tmp_path_factory.mktemp("served")) as demo:
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        try:
            yield Served(demo.url, demo.token, Weeks(made), context)
        finally:
            context.close()


def test_a_regression_leads_to_its_jobs_and_to_the_line_of_its_kernel(served: Served) -> None:
    kernel = served.weeks.kernel(served.weeks.recipe.changes[0])
    page = served.open("/regressions")
    assert kernel in page.inner_text("h1")
    page.click(f"#slower-changes tbody tr:first-child a:text-is('{kernel}')")
    page.wait_for_selector("#jobs tbody tr")
    assert "as long" in page.inner_text("h1")
    assert len(page.query_selector_all(".plot circle")) > 20
    job = page.inner_text("#jobs tbody tr:first-child td:first-child")
    assert job.startswith(served.weeks.recipe.changes[0].model)
    page.click("text=Compare slow and healthy")
    frame = page.frame_locator("iframe.report")
    # the first line is the largest part of the difference
    work = frame.locator("section", has_text="Kernels, copies and fills")
    assert kernel in work.locator("tbody tr").first.inner_text(timeout=60_000)
    assert page.get_attribute("iframe.report", "sandbox") == "allow-scripts allow-downloads"
    page = served.open(f"/jobs/{job}")
    assert job in page.inner_text("h1")


def test_the_overview_leads_to_the_kernels_that_became_slower(served: Served) -> None:
    page = served.open("/")
    slower = [
        item for item in page.query_selector_all(".wrong li") if " takes " in item.inner_text()
    ]
    changes = [
        change
        for change in served.weeks.recipe.changes
        if change.factor > 1 and change.cause != "shapes"
    ]
    assert {item.inner_text().split()[0] for item in slower} == {
        served.weeks.kernel(change) for change in changes
    }
    slower[0].query_selector("a").click()
    page.wait_for_selector(".plot circle", state="attached")
    assert served.weeks.kernel(changes[0]) in page.inner_text("h1")


def test_every_level_of_device_time_has_the_sums_of_the_api(served: Served) -> None:
    by = "product,division,job"  # in another order than it stands there
    answer = served.client.get("attribution", by=by, top="20")
    tree = {tuple(row["values"]): row for row in answer["rows"]}
    page, path = served.open(f"/attribution?by={by}"), ()
    for _ in by.split(","):
        rows = page.evaluate(
            "() => fetch(location.href + '&table=of-part&as=json').then((answer) => answer.json())"
        )
        shown = {row["part"]: round(row["hours"] * 3.6e6) for row in rows}
        expected = {
            key[-1]: row["device_ms"] for key, row in tree.items() if key[:-1] == path and key
        }
        assert shown == expected
        assert sum(shown.values()) == tree[path]["device_ms"]
        largest = max((part for part in shown if part != "(others)"), key=shown.__getitem__)
        path = (*path, largest)
        before = page.inner_text("h1")
        page.click(f"#of-part tbody a:text-is('{largest}')")
        page.wait_for_function(
            "(before) => document.querySelector('h1')?.innerText !== before", arg=before
        )
    assert largest in page.inner_text("h1")
    page.click(".trail a:text-is('All devices')")
    page.wait_for_function("() => !document.querySelector('.trail')")


@pytest.mark.thorough
def test_rules_show_what_they_move_before_they_are_saved_and_change_the_past_then(
    served: Served,
) -> None:
    page = served.open("/owners")
    rule = '[[rule]]\nmatch = {model = "speech"}\nset = {division = "voice"}\n'
    page.click("#change summary")
    page.fill("#text", rule)
    page.click("text=Show what would change")
    page.wait_for_selector("#moves")
    moves = [row.inner_text().split("\t") for row in page.query_selector_all("#moves tbody tr")]
    assert ["division", "unattributed", "voice"] in [move[:3] for move in moves]
    assert page.input_value("#text") == rule
    assert served.client.get("owners")["version"] == 1
    page.click("#controls button.primary")
    page.wait_for_selector("#rules tbody tr:has-text('voice')")
    assert page.input_value("#text") == rule
    page = served.open("/attribution?by=division")
    assert "voice" in page.inner_text("#of-part")
    page.goto(f"{served.url}/owners?version=1")
    assert "segmentation" in page.inner_text("#rules")


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_nothing_against_any_page(served: Served, scheme: str) -> None:
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    # in the dark only colours differ
    rules = {"runOnly": ["color-contrast", "link-in-text-block"]} if scheme == "dark" else {}
    options = {"resultTypes": ["violations"], "iframes": False, **rules}
    page, wrong, before = served.page, [], len(served.problems)
    page.emulate_media(color_scheme=scheme)
    for path in [
        *addresses(served.client).values(),
        "/sign-in",
        "/sign-in?ended=yes",
        "/nothing",
        "/compare",
    ]:
        page.goto(f"{served.url}{path}")
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
        page.evaluate(axe)
        result = page.evaluate("(options) => axe.run(document, options)", options)
        wrong += [
            f"{path}: {violation['help']}: {[node['target'] for node in violation['nodes'][:3]]}"
            for violation in result["violations"]
        ]
        for width in (800, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wrong.append(f"{path} is wider than {width}")
    page.emulate_media(color_scheme="light")
    assert wrong == []
    said = served.problems[before:]
    assert [text for text in said if "404" not in text] == []
    assert len(said) == 2, "of the two pages that are not there"
    del served.problems[before:]


@pytest.mark.thorough
def test_hostile_names_are_text_and_every_page_is_small_and_quiet(served: Served) -> None:
    rule = f'[[rule]]\nmatch = {{model = "vision"}}\nset = {{division = {json.dumps(EVIL)}}}\n'
    served.client.post("owners", {"text": rule})
    page = served.open("/attribution?by=division,job")
    assert "<img src=x onerror=alert(1)>" in page.inner_text("#of-part")
    assert "<img src=x" in (page.text_content(".tree-picture") or "")
    page.click("#of-part tbody a:has-text('<img src=x')")
    page.wait_for_function("() => document.querySelector('h1').innerText.includes('<img src=x')")
    kernel = quote(served.weeks.kernel(served.weeks.recipe.changes[0]))
    for path in (
        "/regressions",
        "/kernels",
        f"/kernels/history?kernel={kernel}",
        "/gpu-time?by=division,kind",
        "/outliers",
        "/attribution",
        "/topline?by=division",
        "/invest?by=division",
        "/owners",
    ):
        page = served.open(path)
        assert page.query_selector("img") is None
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        assert len(page.content()) < 300_000, path
        if path != "/owners":  # where there is nothing, they say what to do
            served.open(f"{path}{'&' if '?' in path else '?'}since=2000-01-01&until=2000-01-03")
            assert page.query_selector(".empty") is not None, path
    assert served.open("/kernels/history?kernel=" + quote(EVIL)).query_selector("img") is None
    assert served.page.goto(f"{served.url}/attribution?at=%5B1%5D").status == 400
    for path in (
        "regressions/change?kernel=none",
        "compare?base=none&new=none",
        "captures/none/against/none",
    ):
        assert served.page.goto(f"{served.url}/{path}").status == 404
    assert [text for text in served.problems if "400" not in text and "404" not in text] == []
