"""Pages over HTTP: who is let in, what every answer forbids, what may not be sent, and how pages refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("htpy", "sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.html_tree import HtmlTree, words  # noqa: E402
from support.patient_service import patient  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.fleet.portal.app import PAGES  # noqa: E402
from traceloom.fleet.store.captures import ServiceState  # noqa: E402


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("fleet")
    running = RunningService(
        folder,
        "--store",
        str(folder / "store"),
        "--workers",
        "1",
        "--proxy-user-header",
        "X-User",
        "--proxy-from",
        "127.0.0.1",
        command=patient(60),
    )
    try:
        cookie = running.signed_in()
        until(lambda: running.browse("/", cookie).status == 200)  # it leads
        yield running
    finally:
        code = running.end()
    assert code == 0, running.log.read_text()


@pytest.fixture(scope="module")
def cookie(service: RunningService) -> str:
    """Of its own user: who signs in often has to wait."""
    return service.signed_in()


def token(service: RunningService, name: str, role: str, days: float = 0) -> str:
    code, answer = service.ask(
        "POST", "/api/v1/tokens", body={"name": name, "role": role, "days": days}
    )
    assert code == 200, answer
    return str(answer["token"])


def test_a_token_opens_a_session_whose_cookie_no_script_reads(service: RunningService) -> None:
    seen = service.browse("/jobs?jobs.q=a")
    assert (seen.status, seen.headers["Location"]) == (303, "/sign-in?next=%2Fjobs%3Fjobs.q%3Da")
    secret = token(service, "vi", "viewer")
    seen = service.browse("/sign-in", form={"token": secret, "next": "/jobs?jobs.q=a"})
    assert (seen.status, seen.headers["Location"]) == (303, "/jobs?jobs.q=a")
    cookie = seen.headers["Set-Cookie"]
    assert re.fullmatch(
        r"traceloom=tls_[\w-]{43}; HttpOnly; Max-Age=43200; Path=/; SameSite=strict", cookie
    )
    kept = b"".join(path.read_bytes() for path in (service.folder / "store").glob("state.db*"))
    assert cookie.split("=")[1].partition(";")[0].encode() not in kept
    assert service.browse("/", cookie.partition(";")[0]).status == 200
    # A session is not believed by the routes, nor a token by the pages.
    assert service.ask("GET", "/api/v1/jobs", "x", Cookie=cookie.partition(";")[0])[0] == 401
    assert service.browse("/", Authorization=f"Bearer {secret}").status == 303
    out = service.browse("/sign-out", cookie.partition(";")[0], form={})
    assert "Max-Age=0" in out.headers["Set-Cookie"]
    assert service.browse("/", cookie.partition(";")[0]).headers["Location"] == "/sign-in?ended=yes"


def test_who_follows_a_link_of_another_site_comes_again_with_the_cookie(
    service: RunningService,
) -> None:
    seen = service.browse("/jobs?a=b", Sec_Fetch_Site="cross-site")
    assert (seen.status, seen.headers["Refresh"]) == (200, "0; url=/jobs?a=b")
    assert seen.headers["X-Frame-Options"] == "DENY"
    assert service.browse("/jobs?a=b", Sec_Fetch_Site="same-origin").status == 303


def test_a_wrong_an_expired_and_a_revoked_token_are_refused_alike(service: RunningService) -> None:
    state = ServiceState(str(service.folder / "store" / "state.db"))
    expired = state.add_token("late", "admin", days=-1)
    state.close()
    revoked = token(service, "gone", "admin")
    open_before = service.signed_in(revoked)
    assert service.browse("/", open_before).status == 200
    assert service.ask("DELETE", "/api/v1/tokens/gone")[0] == 200
    assert service.browse("/", open_before).status == 303, "its sessions end with it"
    answers = {
        service.browse("/sign-in", form={"token": secret}).text
        for secret in ("tl_wrong", "", expired, revoked)
    }
    assert len(answers) == 1
    assert "This token does not open anything." in answers.pop()


@pytest.mark.parametrize(
    "where",
    ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "\t/x"],
)
def test_signing_in_leads_nowhere_else(service: RunningService, where: str) -> None:
    form = {"token": service.token_file.read_text().strip(), "next": where}
    assert service.browse("/sign-in", form=form).headers["Location"] == "/"


def test_every_answer_says_what_a_browser_may_not(service: RunningService) -> None:
    cookie = service.signed_in()
    for path, code in (
        ("/", 200),
        ("/sign-in", 200),
        ("/nothing", 404),
        ("/captures/none/report", 404),
    ):
        seen = service.browse(path, cookie)
        assert seen.status == code
        policy = dict(
            part.strip().partition(" ")[::2]
            for part in seen.headers["Content-Security-Policy"].split(";")
        )
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert "unsafe-inline" not in str(policy)
        assert seen.headers["X-Content-Type-Options"] == "nosniff"
        assert seen.headers["Referrer-Policy"] == "same-origin"
        assert seen.headers["Cache-Control"] == "no-store"
        assert not re.search(r" style=| on\w+=|<script>", seen.text)
        assert len(seen.text) < 300_000
    linked = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', service.browse("/", cookie).text))
    assert {path.rpartition("/")[2] for path in linked} == {"portal.css", "portal.js", "theme.js"}
    assert sum(len(service.browse(path).text) for path in linked) < 300_000
    assert "immutable" in service.browse(linked.pop()).headers["Cache-Control"]


def test_what_another_page_sends_is_refused(service: RunningService) -> None:
    cookie = service.signed_in()
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Sec_Fetch_Site": "cross-site"},
    ):
        seen = service.browse("/sign-out", cookie, form={}, **headers)
        assert seen.status == 403
        assert "wrong-origin" in seen.text
    assert service.browse("/", cookie).status == 200


def test_a_proxy_says_who_reads_and_nobody_else(service: RunningService) -> None:
    seen = service.browse("/", X_User="ana")
    assert seen.status == 200
    assert re.search(r"<b>ana</b><span[^>]*>requester<", seen.text)
    token(service, "boss", "admin")
    assert re.search(r"<b>boss</b><span[^>]*>admin<", service.browse("/", X_User="boss").text)
    assert service.browse("/", X_User="<script>").status == 303


def test_a_proxy_gives_nobody_the_role_of_a_token_that_holds_no_more(
    service: RunningService,
) -> None:
    token(service, "guest", "admin", days=1e-9)
    until(lambda: "requester" in service.browse("/", X_User="guest").text)
    assert service.browse("/audit", X_User="guest").status == 403


def test_a_proxy_lets_nobody_in_whose_token_was_revoked(service: RunningService) -> None:
    token(service, "gone", "viewer")
    assert service.browse("/", X_User="gone").status == 200
    assert service.ask("DELETE", "/api/v1/tokens/gone")[0] == 200
    assert service.browse("/", X_User="gone").status == 303


def test_a_page_that_is_not_there_leads_on_by_the_menu(service: RunningService) -> None:
    seen = service.browse("/nothing", service.signed_in())
    assert seen.status == 404
    assert "the menu leads on" in seen.text
    assert 'href="/captures"' in seen.text
    stranger = service.browse("/nothing")
    assert (stranger.status, "menu" in stranger.text, 'href="/captures"' in stranger.text) == (
        404,
        False,
        False,
    )


NEED_NAMES = {"/regressions/change", "/kernels/history", "/compare"}


@pytest.mark.parametrize(
    "path", [page.path for page in PAGES if "{" not in page.path and page.path not in NEED_NAMES]
)
def test_a_page_of_an_empty_fleet_says_what_there_is_not_and_what_to_do(
    service: RunningService, cookie: str, path: str
) -> None:
    seen = service.browse(path, cookie)
    assert seen.status == 200
    page = HtmlTree(seen.text)
    assert len(page.all("h1")) == 1
    main = page.by_id("main")
    nothing = [
        words(of) for of in main.iter() if (of.get("class") or "") in {"empty", "quiet", "lead"}
    ]
    steps = [of for tag in ("a", "form", "code") for of in main.iter(tag)]
    assert steps, "it leads on"
    if path not in {"/tokens", "/audit"}:  # somebody is signed in
        assert not [of for of in page.tables() if page.tables()[of].rows]
        assert nothing, path


def test_tables_are_downloaded(service: RunningService) -> None:
    cookie = service.signed_in()
    seen = service.browse("/jobs?table=jobs&as=csv", cookie)
    assert seen.headers["Content-Disposition"] == 'attachment; filename="jobs.csv"'
    assert seen.text.startswith("job,user,hosts")
    assert service.browse("/jobs?table=jobs&as=json", cookie).text == "[]"
    assert service.browse("/jobs?table=nothing&as=csv", cookie).status == 404


def test_who_tries_often_has_to_wait(service: RunningService) -> None:
    codes = [
        service.browse("/sign-in", form={"token": "x"}, address="127.0.0.2").status
        for _ in range(40)
    ]
    assert codes[0] == 401
    assert 429 in codes
    assert service.signed_in(), "another address need not wait"


@pytest.mark.thorough
def test_a_page_whose_answer_takes_long_says_so_and_asks_again(tmp_path: Path) -> None:
    service = RunningService(tmp_path, command=patient(0))
    try:
        cookie = service.signed_in()
        until(lambda: service.browse("/hosts", cookie).status == 200)  # it asks the tables nothing
        first = service.browse("/gpu-time", cookie)
        assert (first.status, first.headers["Refresh"]) == (202, "2")
        assert "being worked out" in first.text
        until(
            lambda: service.browse("/gpu-time", cookie).status == 200
        )  # it asks two questions, one after the other
        assert service.browse("/gpu-time?table=nothing", cookie).status == 404, "a download waits"
    finally:
        code = service.end()
    assert code == 0, service.log.read_text()
