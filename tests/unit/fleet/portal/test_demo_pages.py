"""Every page of the demo's fleet: what it shows is what the routes say, and all that it leads to is there."""

from __future__ import annotations

import csv
import http.client
import io
import json
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode, urljoin, urlsplit

import pytest

for package in ("htpy", "sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.demo_store import demo_store  # noqa: E402
from support.html_tree import HtmlTree, words  # noqa: E402
from support.portal_pages import addresses  # noqa: E402
from support.running_service import Seen  # noqa: E402
from support.served_demo import DemoService, served_demo  # noqa: E402
from traceloom.cli.upload import FleetClient  # noqa: E402
from traceloom.fleet.portal.app import PAGES  # noqa: E402
from traceloom.fleet.store.captures import ROLES  # noqa: E402

ASKING = {
    "/regressions",
    "/kernels",
    "/gpu-time",
    "/outliers",
    "/attribution",
    "/topline",
    "/invest",
}
LEAF = 50  # rows that a page shows of a table at once
MADE_THEN = {
    "captures/report",
    "captures/timeline",
    "captures/against",
}  # when it is first asked for
MOST_OF_A_KIND = 2  # addresses of the same page that are alike but for what they name


class Reader:
    """Somebody who is signed in, and reads pages over one connection as a browser does."""

    def __init__(self, demo: DemoService, token: str = "") -> None:
        self.parts = urlsplit(demo.url)
        self.client = FleetClient(demo.url, token or demo.token)
        self.connection = http.client.HTTPConnection(self.parts.netloc, timeout=120)
        seen = self.ask("/sign-in", {"token": token or demo.token, "next": "/"})
        assert seen.status == 303, seen.text
        self.cookie = seen.headers["Set-Cookie"].partition(";")[0]

    cookie = ""

    def close(self) -> None:
        self.connection.close()

    def ask(self, path: str, form: dict[str, str] | None = None) -> Seen:
        headers = {"Cookie": self.cookie}
        if form is not None:
            headers |= {
                "Origin": f"http://{self.parts.netloc}",
                "Content-Type": "application/x-www-form-urlencoded",
            }
        while True:
            self.connection.request(
                "GET" if form is None else "POST", path, form and urlencode(form), headers
            )
            response = self.connection.getresponse()
            seen = Seen(
                response.status, response.headers, response.read().decode("utf-8", "replace")
            )
            if seen.status != 429:
                return seen
            time.sleep(int(seen.headers["Retry-After"]))  # no reader asks as often as a test does

    def page(self, path: str) -> HtmlTree:
        seen = self.ask(path)
        assert seen.status == 200, (path, seen.status, seen.text[-600:])
        return HtmlTree(seen.text)

    def rows(self, path: str, table: str) -> list[dict[str, Any]]:
        """A table of a page, exact and whole."""
        seen = self.ask(f"{path}{'&' if '?' in path else '?'}table={table}&as=json")
        assert seen.status == 200, (path, table, seen.text[-300:])
        return list(json.loads(seen.text))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoService]:
    store, _, _ = demo_store(tmp_path_factory)
    with served_demo(store, tmp_path_factory.mktemp("pages")) as service:
        yield service


@pytest.fixture(scope="module")
def reader(demo: DemoService) -> Iterator[Reader]:
    with closing(Reader(demo)) as somebody:
        yield somebody


@pytest.fixture(scope="module")
def paths(reader: Reader) -> dict[str, str]:
    return addresses(reader.client)


@pytest.fixture(scope="module")
def shown(reader: Reader, paths: dict[str, str]) -> dict[str, HtmlTree]:
    return {pattern: reader.page(path) for pattern, path in paths.items()}


def number(text: str) -> float:
    """A number as pages write it, without its unit."""
    written = re.match(r"[-+<>]?[\d\u202f.]+", text)
    assert written, text
    return float(written[0].lstrip("<>").replace("\u202f", ""))


def key_numbers(page: HtmlTree) -> dict[str, str]:
    [numbers] = [of for of in page.all("dl") if of.get("class") == "key"]
    return {
        words(next(of.iter("dt"))): words(next(of.iter("b"))) for of in numbers if of.tag == "div"
    }


def alike(path: str) -> tuple[str, ...]:
    """What tells an address from others of the same page: not whom it names, nor how its tables are sorted."""
    parts = urlsplit(path)
    pieces = parts.path.split("/")
    place = "/".join(pieces[:2] if len(pieces) < 4 else [pieces[1], *pieces[3:4]])
    names = {name.partition(".")[2] or name for name, _ in parse_qsl(parts.query)}
    return (place, "table") if names & {"table", "sort", "leaf"} else (place, *sorted(names))


@pytest.mark.thorough
def test_every_link_leads_to_something_that_is_there(reader: Reader, paths: dict[str, str]) -> None:
    waiting, seen, kinds = deque(["/"]), {"/"}, Counter[tuple[str, ...]]()
    reached: set[str] = set()
    patterns = {
        re.compile(re.sub(r"\\\{[^}]*\\\}", ".+", re.escape(page.path)) + r"\Z"): page.path
        for page in PAGES
    }
    wrong = []
    while waiting:
        path = waiting.popleft()
        answer = reader.ask(path)
        if answer.status != 200:
            wrong.append((path, answer.status))
            continue
        where = urlsplit(path).path
        reached |= {
            min(names, key=len)
            for names in [[p for of, p in patterns.items() if of.match(where)]]
            if names
        }
        if (
            not answer.headers["Content-Type"].startswith("text/html")
            or where.endswith("/report")
            or "/against/" in where
        ):
            continue  # of a stranger, or a download
        page = HtmlTree(answer.text)
        identities = Counter(of.get("id") for of in page.root.iter() if of.get("id"))
        wrong += [
            (path, f"id {name} stands there twice")
            for name, count in identities.items()
            if count > 1
        ]
        for link in page.links():
            if link.startswith(("data:", "https://")):
                continue
            target, _, part = urljoin(path, link).partition("#")
            if part and target == path and part not in identities:
                wrong.append((path, f"leads to #{part}, which is not there"))
            kind = alike(target)
            if target not in seen and kinds[kind] < (1 if kind[0] in MADE_THEN else MOST_OF_A_KIND):
                kinds[kind] += 1
                seen.add(target)
                waiting.append(target)
    assert wrong == []
    assert reached >= set(paths), f"no link leads to {set(paths) - reached}"
    assert len(seen) > 100


def test_no_page_says_what_a_programmer_would(shown: dict[str, HtmlTree]) -> None:
    for pattern, page in shown.items():
        text = words(page.by_id("main"))
        for odd in (
            "None",
            "nan",
            "NaN",
            "True",
            "False",
            "{",
            "Traceback",
            "&lt;",
            "&amp;",
            "<htpy",
            "object at 0x",
        ):
            assert not re.search(rf"(?<![\w=-]){re.escape(odd)}(?!\w)", text), (pattern, odd)
        assert len(page.all("h1")) == 1, pattern
        assert words(page.all("h1")[0]), pattern
        assert words(page.all("title")[0]).endswith("· Traceloom")


def test_the_menu_marks_where_one_is(shown: dict[str, HtmlTree], paths: dict[str, str]) -> None:
    in_menu = {page.path: page.title for page in PAGES if page.menu}
    for pattern, page in shown.items():
        menu = next(of for of in page.all("nav") if of.get("aria-label") == "Pages")
        entries = {of.get("href"): of for of in menu.iter("a")}
        assert {href: words(of) for href, of in entries.items()} == in_menu
        marked = [href for href, of in entries.items() if of.get("aria-current") == "page"]
        if pattern in in_menu:
            assert marked == [pattern]
        else:
            assert marked == [
                href for href in in_menu if href != "/" and pattern.startswith(f"{href}/")
            ]
            trail = [of for of in page.all("nav") if of.get("aria-label") == "Where this is"]
            assert trail, f"{pattern} has no way back"


def test_times_are_written_for_machines_and_have_utc_on_hover(shown: dict[str, HtmlTree]) -> None:
    count = 0
    for page in shown.values():
        for element in page.all("time"):
            when = datetime.fromisoformat(str(element.get("datetime")))
            assert when.tzinfo == timezone.utc
            assert element.get("title") == f"{when:%Y-%m-%d %H:%M:%S} UTC"
            count += 1
    assert count > 50


def sorting(value: Any) -> tuple[int, float, str]:
    return (
        (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value).casefold())
    )


def every_table(
    shown: dict[str, HtmlTree], paths: dict[str, str]
) -> Iterator[tuple[str, str, Any]]:
    for pattern, page in shown.items():
        for name, table in page.tables().items():
            yield paths[pattern], name, table


def test_every_table_is_downloaded_whole_as_csv_and_as_json(
    reader: Reader, shown: dict[str, HtmlTree], paths: dict[str, str]
) -> None:
    count = 0
    for path, name, table in every_table(shown, paths):
        assert set(table.downloads) == {"csv", "json"}, (path, name)
        rows = json.loads(reader.ask(table.downloads["json"]).text)
        text = reader.ask(table.downloads["csv"])
        assert text.headers["Content-Disposition"] == f'attachment; filename="{name}.csv"'
        spelled = list(csv.reader(io.StringIO(text.text)))
        assert spelled[0] == list(rows[0])
        for line, row in zip(spelled[1:], rows, strict=True):
            for cell, value in zip(line, row.values(), strict=True):
                if isinstance(value, str):
                    assert cell.removeprefix("'") == value
                elif value is None:
                    assert not cell
                else:
                    assert float({"True": "1", "False": "0"}.get(cell, cell)) == float(value)
        if name != "audit":  # which these very questions make longer
            assert len(table.rows) == min(LEAF, len(rows)), (path, name)
        count += 1
    assert count >= 30


def test_every_column_sorts_both_ways_and_not_again(
    reader: Reader, shown: dict[str, HtmlTree], paths: dict[str, str], thorough: bool
) -> None:
    tried = set()
    for path, name, table in every_table(shown, paths):
        if name in tried:
            continue
        tried.add(name)
        for head, href in list(table.sorts.items())[: 2 if thorough else 1]:
            key = parse_qs(urlsplit(href).query)[f"{name}.sort"][0]
            column = key.removeprefix("-")
            whole = {row_key(row): row for row in reader.rows(path, name)}
            ordered = reader.rows(href, name)
            assert {row_key(row) for row in ordered} == set(whole), (path, name, head)
            values = [row[column] for row in ordered]
            known = [value for value in values if value not in (None, "")]
            assert values[: len(known)] == known, "what is not known stands last"
            if all(isinstance(value, int | float) for value in known):
                assert known == sorted(known, key=sorting, reverse=key.startswith("-")), (
                    path,
                    name,
                    head,
                )
            else:
                assert [part for part in known if not re.search(r"\d", part)] == sorted(
                    (part for part in known if not re.search(r"\d", part)),
                    key=str.casefold,
                    reverse=key.startswith("-"),
                )
        if len(table.sorts) > 1 and name != "audit":
            first = next(iter(table.sorts.items()))
            again = reader.page(first[1]).tables()[name].sorts[first[0]]
            back = reader.page(again).tables()[name].sorts[first[0]]
            assert f"{name}.sort" not in parse_qs(urlsplit(back).query), (
                "the third click gives the first order back"
            )
    assert len(tried) >= 20


def row_key(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True)


def test_a_filter_leaves_the_rows_with_all_of_its_words(
    reader: Reader, paths: dict[str, str]
) -> None:
    path = paths["/captures"]
    rows = reader.rows(path, "captures")
    filtered = f"{path}?{urlencode({'captures.q': 'RECOMMENDER committed'})}"
    expected = [
        row for row in rows if "recommender" in json.dumps(row) and row["state"] == "committed"
    ]
    assert reader.rows(filtered, "captures") == expected
    assert 0 < len(expected) < len(rows)
    assert f"{len(expected)} of {len(rows)}" in words(reader.page(filtered).by_id("captures"))
    none = reader.page(f"{path}?captures.q=no-such-word")
    assert "No row has these words." in words(none.by_id("captures"))


def test_leaves_divide_the_rows_of_a_long_table(reader: Reader, paths: dict[str, str]) -> None:
    every = [row["id"] for row in reader.rows(paths["/captures"], "captures")]
    assert len(every) > 2 * LEAF
    path, seen, pages = paths["/captures"], [], 0
    while path:
        page = reader.page(path)
        seen += [row[0] for row in page.tables()["captures"].texts]
        path = next((of.get("href") or "" for of in page.all("a") if words(of) == "Next"), "")
        pages += 1
    assert seen == every
    assert pages == -(-len(every) // LEAF)


def test_the_overview_has_the_numbers_of_the_routes(
    reader: Reader, shown: dict[str, HtmlTree]
) -> None:
    page, client = shown["/"], reader.client
    now, jobs = client.get("now"), client.get("jobs")["jobs"]
    numbers = key_numbers(page)
    assert number(numbers["Device use"]) == pytest.approx(
        100 * now["topline"]["device_use"], abs=0.06
    )
    assert number(numbers["Power"]) == round(now["topline"]["power_w"])
    assert number(numbers["Captures"]) == now["tasks"]["committed"]
    heading = words(page.all("h1")[0])
    devices = sum(now["devices"].values())
    assert (
        heading
        == f"{now['devices']['busy']} of {devices} devices on {now['hosts']} hosts are busy, for {len(jobs)} jobs"
    )
    assert [row[0] for row in page.tables()["jobs"].texts] == [job["job"] for job in jobs]
    wrong = words(next(of for of in page.all("ul") if of.get("class") == "wrong"))
    assert all(host in wrong for host in now["lost"])
    for kernel in {of["kernel"] for of in client.get("problems")["slower"]}:
        assert f"{kernel} takes" in wrong


def test_what_is_wrong_is_what_the_question_about_regressions_says(reader: Reader) -> None:
    changes = reader.client.get("regressions", top="1000")["changes"]
    slower = [of for of in changes if of["change"] > 0 and of["cause"] not in {"shapes", "device"}]
    told = reader.client.get("problems")["slower"]
    assert slower
    assert told == [{name: of[name] for name in told[0]} for of in slower]


def test_hosts_jobs_and_requests_are_those_of_the_routes(reader: Reader) -> None:
    client = reader.client
    hosts = {row["host"]: row for row in reader.rows("/hosts", "hosts")}
    for host in client.get("hosts")["hosts"]:
        assert hosts.pop(host["host"])["devices"] == host["devices"]
    assert hosts == {}
    jobs = {row["job"]: row for row in reader.rows("/jobs", "jobs")}
    for job in client.get("jobs")["jobs"]:
        row = jobs.pop(job["job"])
        assert (row["ranks"], row["steps_per_second"]) == (job["ranks"], job["steps_per_second"])
        assert (
            row["traceable"] == f"{job['traceable']} of {job['processes']}"
            or row["traceable"] == "all"
        )
    assert jobs == {}
    requests = client.get("requests", most="1000")["requests"]
    assert [row["state"] for row in reader.rows("/requests", "requests")] == [
        of["state"] for of in requests
    ]
    numbers = key_numbers(reader.page("/requests"))
    for state in ("Done", "Partial", "Failed"):
        assert number(numbers[state]) == sum(of["state"] == state.lower() for of in requests)


def test_a_page_of_a_host_has_its_devices_and_its_processes(reader: Reader) -> None:
    for host in reader.client.get("hosts")["hosts"][:3]:
        detail = reader.client.get(f"hosts/{host['host']}")
        path = f"/hosts/{host['host']}"
        page = reader.page(path)
        assert words(page.all("h1")[0]) == host["host"]
        assert number(key_numbers(page)["Devices"]) == len(detail["devices"])
        rows = reader.rows(path, "devices")
        assert [(of["uuid"], of["state"]) for of in rows] == [
            (of["device"], of["state"]) for of in detail["devices"]
        ]
        for row, device in zip(rows, detail["devices"], strict=True):
            assert row["busy"] == device["values"].get("gpu_busy_ratio")
        if detail["processes"]:
            assert [of["pid"] for of in reader.rows(path, "processes")] == [
                of["pid"] for of in detail["processes"]
            ]


def test_a_page_of_a_capture_has_its_files_findings_and_facts(
    reader: Reader, paths: dict[str, str]
) -> None:
    path = paths["/captures/{id}"]
    name = unquote(path.rpartition("/")[2])
    capture, page = reader.client.get(f"captures/{name}"), reader.page(path)
    facts = reader.client.get(f"captures/{name}/facts")["facts"]
    assert {row["name"]: row["bytes"] for row in reader.rows(path, "files")} == capture["files"]
    assert number(key_numbers(page)["Ranks"]) == facts["ranks"]
    assert number(key_numbers(page)["MFU"]) == pytest.approx(100 * facts["mfu"], abs=0.06)
    findings = reader.client.get("findings/latest", capture=name)["findings"]
    assert [row["slug"] for row in reader.rows(path, "findings")] == [of["slug"] for of in findings]
    # Another capture is chosen on the page, its own job's first, and the comparison is there.
    [select] = [of for of in page.all("select") if of.get("name") == "base"]
    others = [str(of.get("value")) for of in select.iter("option")]
    assert name not in others
    assert len(others) == len(set(others)) > 0
    compared = reader.page(f"/compare?{urlencode({'base': others[0], 'new': name})}")
    assert capture["job"] in words(compared.all("h1")[0])


QUESTIONS = {
    "/kernels": (
        "kernels",
        "rows",
        "kernels",
        {"kernel": "kernel", "total_ns": "total_ns", "jobs": "jobs"},
    ),
    "/outliers": ("outliers", "hosts", "hosts", {"host": "host", "ratio": "ratio"}),
    "/gpu-time": ("characterise", "rows", "parts", {"total_ns": "total_ns", "count": "count"}),
}


def tables_with(reader: Reader, path: str, columns: set[str]) -> list[list[dict[str, Any]]]:
    names = reader.page(path).tables()
    rows = [reader.rows(path, name) for name in names]
    return [each for each in rows if each and columns <= set(each[0])]


@pytest.mark.parametrize("path", sorted(QUESTIONS))
def test_tables_of_questions_are_the_answers_of_the_routes(reader: Reader, path: str) -> None:
    question, table, _, columns = QUESTIONS[path]
    for query in ("", "since=2d", "job=recommender-*"):
        asked = dict(parse_qsl(query))
        most = {} if question == "outliers" else {"top": "1000"}
        answer = reader.client.get(question, **most, **asked)[table]
        pages = tables_with(reader, f"{path}?{query}" if query else path, set(columns))
        expected = [{name: row[name] for name in columns} for row in answer]
        rows = [{name: row[name] for name in columns} for row in pages[0]] if pages else []
        assert rows == expected[: len(rows)], (path, query)
        assert len(rows) >= min(len(expected), 20), (path, query)


def test_numbers_of_regressions_add_up_to_their_tables(
    reader: Reader, shown: dict[str, HtmlTree]
) -> None:
    changes = reader.client.get("regressions", top="1000")
    slower = reader.rows("/regressions", "slower-changes")
    numbers = key_numbers(shown["/regressions"])
    assert number(numbers["Slower"]) == len({row["kernel"] for row in slower})
    assert number(numbers["Looked at"]) == changes["series"] - changes["short"]
    rows = [
        row
        for name in ("slower-changes", "mixed-changes", "faster-changes")
        for row in reader.rows("/regressions", name)
    ]
    assert sorted(row["extra_ns"] for row in rows) == sorted(
        of["extra_ns"] for of in changes["changes"]
    )


def test_device_time_and_savings_are_sums_of_their_rows(
    reader: Reader, shown: dict[str, HtmlTree]
) -> None:
    whole = next(row for row in reader.client.get("attribution")["rows"] if not row["values"])
    parts = reader.rows("/attribution", "of-part")
    assert sum(row["hours"] for row in parts) * 3.6e6 == pytest.approx(whole["device_ms"])
    numbers = key_numbers(shown["/attribution"])
    assert number(numbers["Busy"]) == pytest.approx(
        100 * whole["busy_ms"] / whole["device_ms"], abs=0.06
    )
    assert number(numbers["Cost"]) == pytest.approx(whole["cost"], rel=0.005)
    invest = reader.client.get("invest", top="1000")
    saved = sum(row["saved_ms"] for row in invest["rows"]) / 3.6e6
    assert number(key_numbers(shown["/invest"])["Could be saved"]) == pytest.approx(
        saved, rel=0.005
    )


def test_the_state_of_a_page_is_its_address(reader: Reader) -> None:
    page = reader.page("/kernels?since=7d&job=recommender-*&sort=cycles")
    chosen = {
        of.get("name"): option.get("value")
        for of in page.all("select")
        for option in of.iter("option")
        if "selected" in option.attrib
    }
    assert chosen["since"] == "7d"
    assert chosen["sort"] == "cycles"
    [chip] = [of for of in page.all("a") if "chip" in (of.get("class") or "")]
    assert words(chip).startswith("Job: recommender-*")
    assert "job" not in dict(parse_qsl(urlsplit(str(chip.get("href"))).query))
    heads = tables_with(reader, "/kernels?since=7d&job=recommender-*&sort=cycles", {"kernel"})[0]
    assert {row["kernel"].partition("_")[0] for row in heads} == {"recommender"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("role", ROLES)
def test_pages_are_shown_to_those_whose_role_may_read_them(
    demo: DemoService, reader: Reader, paths: dict[str, str], role: str
) -> None:
    secret = reader.client.post("tokens", {"name": f"of-{role}", "role": role})["token"]
    with closing(Reader(demo, secret)) as guest:
        menu = {of.get("href") for of in guest.page("/").all("nav")[0].iter("a")}
        for page in PAGES:
            allowed = ROLES.index(role) >= ROLES.index(page.role)
            seen = guest.ask(paths[page.path])
            assert seen.status == (200 if allowed else 403), page.path
            if page.menu:
                assert (page.path in menu) == allowed
            tree = HtmlTree(seen.text)
            if not allowed:
                refusal = words(tree.all("h1")[0])
                assert refusal == f"This needs the role {page.role}, and the token has {role}."
                assert guest.ask(paths[page.path], {"do": "save", "text": "x"}).status == 403
            elif page.act is not None and role == "viewer":
                forms = [of for of in tree.by_id("main").iter("form") if of.get("method") == "post"]
                assert forms == [], f"{page.path} offers a viewer what they may not do"


@pytest.mark.parametrize(
    "name", ["none", "..", "%2e%2e%2f", "a b", "<script>", "\u202e", "x" * 300, "'", "%00", "a/b/c"]
)
def test_a_name_that_nothing_has_is_refused_in_words(reader: Reader, name: str) -> None:
    for page in PAGES:
        if "{" not in page.path:
            continue
        path = re.sub(
            r"\{[^}]*\}", lambda _: urlencode({"": name})[1:].replace("+", "%20"), page.path
        )
        seen = reader.ask(path)
        assert seen.status in {200, 400, 404}, (path, seen.status)
        assert words(HtmlTree(seen.text).all("h1")[0]), path
        assert "<script>" not in seen.text


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "query",
    [
        "since=nonsense",
        "since=2030-01-01",
        "until=1970-01-01",
        "top=-1",
        "top=x",
        "skip=9999999",
        "by=colour",
        "by=" + "a," * 9,
        "at=%5B",
        "at=%5B%22none%22%5D",
        "kernel=",
        "shapes=%00",
        "job=%5B%5D",
        "version=x",
        "version=99999999999999999999",
        "table=none&as=csv",
        "table=jobs&as=exe",
        "jobs.leaf=99999999999999999999999",
        "a" * 3000,
        "sort=sideways",
        "over=year",
    ],
)
def test_an_address_that_is_nonsense_is_never_a_defect(
    reader: Reader, paths: dict[str, str], query: str, thorough: bool
) -> None:
    asked = [
        *sorted(ASKING),
        "/jobs",
        "/captures",
        "/owners",
        "/regressions/change",
        "/kernels/history",
    ]
    # Pages read their addresses alike: each nonsense is tried on every third of them, beginning with another one.
    for pattern in asked if thorough else asked[len(query) % 3 :: 3]:
        path = paths[pattern]
        seen = reader.ask(f"{path}{'&' if '?' in path else '?'}{query}")
        assert seen.status in {200, 400, 404}, (path, query, seen.status)
        if seen.status != 200:
            assert "regex" not in seen.text
            assert words(HtmlTree(seen.text).all("h1")[0]).endswith(".")


def test_every_table_that_has_nothing_says_what_to_do(reader: Reader) -> None:
    long_ago = "since=2000-01-01&until=2000-01-03"
    empty: dict[str, list[str]] = defaultdict(list)
    for page in PAGES:
        if page.path in ASKING:
            shown = reader.page(f"{page.path}?{long_ago}")
            empty[page.path] = [words(of) for of in shown.all("div") if of.get("class") == "empty"]
            assert shown.tables() == {}
    assert len(empty) == 7
    for path, texts in empty.items():
        assert texts, path
        assert any(
            re.search(r"Ask for|drop a filter|traceloom|more time", text) for text in texts
        ), (path, texts)


def test_a_host_that_was_never_heard_of_says_so_and_not_that_it_has_nothing(reader: Reader) -> None:
    [host] = [of["host"] for of in reader.client.get("hosts")["hosts"] if of["heard_ns"] is None]
    page = reader.page(f"/hosts/{host}")
    assert "not heard of since the service started" in words(page.by_id("devices"))
    assert "traceloom agent status" in [words(of) for of in page.by_id("devices").iter("code")]
    assert "Nothing was heard of it yet." in words(page.by_id("processes"))
    assert f"{host} was not heard of since the service started" in words(
        reader.page("/").by_id("main")
    )


def test_a_change_of_a_mix_is_found_where_its_device_is_a_filter_too(reader: Reader) -> None:
    changes = reader.client.get("regressions", top="1000")["changes"]
    [mix, *_] = [of for of in changes if of["cause"] == "shapes"]
    assert mix["device_model"] is None
    where = {"kernel": mix["kernel"], "at": str(mix["since_ns"]), "device_model": "NVIDIA*"}
    for query in (where, {**where, "device_model": ""}):
        page = reader.page(f"/regressions/change?{urlencode(query)}")
        assert words(page.all("h1")[0]).startswith(mix["kernel"])
        assert number(key_numbers(page)["Change"]) == pytest.approx(100 * mix["change"], abs=0.06)
    assert reader.ask(f"/regressions/change?{urlencode({**where, 'at': '1'})}").status == 404
