"""Parts of which pages are made: forms and what they hold, addresses, layout, questions, pictures."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import polars as pl
import pytest
from hypothesis import given, strategies as st

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

from support.html_tree import HtmlTree, words
from support.page_contents import EVIL, NOON, SECOND, SPELLED, ContentPage, fragment_tree
from traceloom.fleet.analyses.attribution import match_pattern
from traceloom.fleet.portal import charts, charts as pictures, page
from traceloom.fleet.portal.app import PAGES
from traceloom.fleet.portal.asking import (
    FILTERS,
    RANGES,
    build_filter_form,
    build_name_filter,
    build_select_field,
)
from traceloom.fleet.portal.charts import DAY_NS, HOUR_NS, ChartColumn, ChartDot
from traceloom.fleet.portal.page import (
    MAX_RANKS,
    ContentSection,
    KeyFigure,
    PageContent,
    parse_positive_number,
    parse_ranks,
)
from traceloom.fleet.portal.page_request import PageUrl
from traceloom.fleet.portal.tables import PageColumn, PageTable, render_state, render_time
from traceloom.fleet.questions.declaration import TopKernelsQuery
from traceloom.fleet.store.captures import ROLES, Role, TokenRecord
from traceloom.server.problem import HttpError
from traceloom.system import units

NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)


@given(
    st.sets(st.tuples(st.integers(0, 200), st.integers(0, 12)), max_size=6),
    st.sampled_from([",", ", ", " ,"]),
)
def test_ranks_are_what_the_ranges_hold(spans: set[tuple[int, int]], between: str) -> None:
    text = between.join(f"{first}-{first + more}" if more else f"{first}" for first, more in spans)
    expected = {rank for first, more in spans for rank in range(first, first + more + 1)}
    assert parse_ranks(text) == tuple(sorted(expected))
    assert parse_ranks(text.replace("-", " - ")) == parse_ranks(text)


@pytest.mark.parametrize(
    "text",
    ["-1", "1-", "3-1", "a", "1.5", "1;2", "0x1", "1 2", "9999999999", "<b>", f"0-{MAX_RANKS}"],
)
def test_what_is_no_rank_is_refused_in_words(text: str) -> None:
    with pytest.raises(HttpError) as caught:
        parse_ranks(f"0, {text}")
    assert (caught.value.status, caught.value.slug) == (400, "wrong-request")
    assert text[:40] in caught.value.message


def test_there_may_be_so_many_ranks_and_not_more() -> None:
    assert len(parse_ranks(f"0-{MAX_RANKS - 1}")) == MAX_RANKS
    with pytest.raises(HttpError):
        parse_ranks(f"0-{MAX_RANKS - 1}, {MAX_RANKS}")
    assert parse_ranks("") == parse_ranks(" , ,") == ()


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("", int, None),
        ("3", int, 3),
        (" 7", int, 7),
        ("0.25", float, 0.25),
        ("1e3", float, 1000.0),
        ("1e-9", float, 1e-9),
    ],
)
def test_numbers_of_forms(text: str, kind: type[int | float], number: float | None) -> None:
    assert parse_positive_number(text, "the number", kind) == number


@pytest.mark.parametrize(
    "text", ["0", "-1", "nan", "inf", "-inf", "1e9", "x", "1,5", "٣x", "9" * 5000, "1.5"]
)
def test_what_is_no_number_above_0_is_refused_in_words(text: str) -> None:
    with pytest.raises(HttpError, match="the number of steps is no number above 0") as caught:
        parse_positive_number(text, "the number of steps", int)
    assert len(caught.value.message) < 120


@given(NAMES)
def test_a_link_holds_the_whole_name_and_nothing_behind_it(name: str) -> None:
    for link in (
        page.build_job_url,
        page.build_host_url,
        page.build_request_url,
        page.build_capture_url,
    ):
        href = link(name)
        parts = urlsplit(href)
        assert (parts.scheme, parts.netloc, parts.query, parts.fragment) == ("", "", "", "")
        kind, _, rest = parts.path.removeprefix("/").partition("/")
        assert unquote(rest) == name
        assert kind in {"jobs", "hosts", "requests", "captures"}
        if link is not page.build_job_url:  # whose names have parts themselves
            assert "/" not in rest


@given(
    st.dictionaries(
        NAMES, st.text(st.characters(exclude_categories=("Cs",)), max_size=5), max_size=4
    ),
    NAMES,
    NAMES,
)
def test_an_address_that_is_changed_keeps_all_else(
    query: dict[str, str], name: str, value: str
) -> None:
    address = PageUrl("/p", "")
    address.query = dict(query)
    there = PageUrl("/p", urlsplit(address.changed({name: value})).query)
    assert there.query == {key: of for key, of in {**query, name: value}.items() if of}
    assert name not in PageUrl("/p", urlsplit(there.changed({name: ""})).query).query
    other = PageUrl("/p", "")
    other.query = dict(reversed(query.items()))
    assert other.canonical_url == address.canonical_url


@pytest.mark.parametrize("address", ["/", "/jobs?jobs.q=a", "/jobs/a//b", "/a:b", "/x#y"])
def test_addresses_of_this_service_stay(address: str) -> None:
    assert page.restrict_to_local_path(address) == address


@pytest.mark.parametrize(
    "address",
    ["", "jobs", "//x", "/\\x", "http:/x", "https://x/", "/\x00", "/\u202e", "/a\nb", "\\\\x"],
)
def test_all_others_lead_to_the_start(address: str) -> None:
    assert page.restrict_to_local_path(address) == "/"


def menu_of(role: Role, path: str) -> dict[str, str | None]:
    token = TokenRecord(name=EVIL, role=role, created_ns=0, expires_ns=0, revoked_ns=0)
    tree = HtmlTree(
        page.render_document(title=EVIL, content="inside", token=token, pages=PAGES, path=path)
    )
    assert words(tree.all("title")[0]) == f"{SPELLED} · Traceloom"
    assert [words(of) for of in tree.all("b")] == [SPELLED]
    return {
        of.get("href") or "": of.get("aria-current")
        for of in next(of for of in tree.all("nav")).iter("a")
    }


@pytest.mark.parametrize("role", ROLES)
def test_the_menu_has_the_pages_that_a_role_may_read(role: Role) -> None:
    expected = [
        page.path for page in PAGES if page.menu and ROLES.index(page.role) <= ROLES.index(role)
    ]
    assert sorted(menu_of(role, "/")) == sorted(expected)
    assert menu_of(role, "/hosts/h")["/hosts"] == "page"
    assert menu_of(role, "/hostsandmore")["/hosts"] is None
    assert set(menu_of(role, "/nothing").values()) == {None}


def test_a_page_for_nobody_has_no_menu() -> None:
    tree = HtmlTree(
        page.render_document(
            title="Sign in", content=page.build_sign_in_form(EVIL, None, expired=True)
        )
    )
    assert tree.all("nav") == []
    assert [of.get("value") for of in tree.all("input") if of.get("name") == "next"] == [SPELLED]
    assert "Your session has ended." in words(tree.by_id("main"))
    refused = HttpError(401, "this token does not open anything", slug="unknown-token")
    both = HtmlTree(
        page.render_document(
            title="Sign in", content=page.build_sign_in_form("/", refused, expired=True)
        )
    )
    assert "This token does not open anything." in words(both.by_id("main"))
    assert "Your session has ended." not in words(both.by_id("main")), "what is wrong now counts"


def test_a_refusal_is_a_sentence_with_its_code() -> None:
    error = HttpError(
        404, "there is no `<b>`", slug="no-such-job", hint="see `traceloom jobs`, or ask"
    )
    tree = fragment_tree(page.build_error_page(error))
    assert words(tree.all("h1")[0]) == "There is no <b>."
    assert [words(of) for of in tree.all("code")] == ["<b>", "traceloom jobs"]
    assert words(tree.all("p")[0]) == "404 · no-such-job"
    whole = HttpError(400, "why?", slug="s")
    assert words(fragment_tree(page.build_problem_notice(whole)).all("p")[0]) == "Why?"
    working = fragment_tree(page.build_pending_page(EVIL, 3.4))
    assert words(working.all("h1")[0]) == SPELLED
    assert "3 s so far" in words(working.all("p")[1])


def test_a_page_is_made_of_its_content_alone() -> None:
    content = PageContent(
        EVIL,
        [
            ContentSection(
                "one", EVIL, PageTable("t", EVIL, [PageColumn("a", EVIL)], [{"a": EVIL}]), EVIL
            ),
            ContentSection("two", "Two", "text"),
        ],
        above=[(EVIL, "/x?y=<z>")],
        lead=EVIL,
        numbers=[KeyFigure(EVIL, EVIL, EVIL, "bad", "/n"), KeyFigure("n", "1")],
        ended=True,
    )
    page = ContentPage(content)
    assert page.heading == SPELLED
    assert page.tables()["t"].texts == [[SPELLED]]
    assert [of.get("href") for of in page.all("nav")[0].iter("a")] == ["/x?y=<z>"]
    assert page.numbers()[SPELLED].leads == "/n"
    assert [of.get("class") for of in page.all("b")] == ["long", None], (
        "a long value stands in small letters"
    )
    assert page.by_id("head").get("data-live") is None, "nothing on it changes any more"
    assert [of for of in page.all("span") if of.get("class") == "ended"] != []
    assert ContentPage(PageContent("live")).by_id("head").get("data-live") == "yes"


def selected(tree: HtmlTree) -> dict[str, list[str]]:
    return {
        of.get("name") or "": [
            each.get("value") or "" for each in of.iter("option") if "selected" in each.attrib
        ]
        for of in tree.all("select")
    }


@given(
    st.dictionaries(st.sampled_from(sorted(FILTERS)), NAMES, max_size=3),
    st.sampled_from([*RANGES, "2h", "2026-01-01"]),
)
def test_a_question_shows_what_it_was_asked_and_each_filter_has_a_way_out(
    filters: dict[str, str], since: str
) -> None:
    address = PageUrl("/p", "")
    address.query = {**filters, "since": since, "keep": "k", "drop": "d"}
    tree = fragment_tree(build_filter_form(address, preserved=("keep", "none")))
    assert selected(tree)["since"] == [since]
    chips = [of for of in tree.all("a") if of.get("class") == "chip"]
    assert len(chips) == len(filters)
    for chip, name in zip(chips, [name for name in FILTERS if name in filters], strict=True):
        left = dict(parse_qsl(urlsplit(chip.get("href") or "").query))
        assert left == {key: value for key, value in address.query.items() if key != name}
    sent = {of.get("name"): of.get("value") for of in tree.all("input")}
    assert sent["keep"] == "k"
    assert "drop" not in sent
    assert {name for name, value in sent.items() if value} == {"keep", *filters}


@given(st.text(st.sampled_from("ab*?<, \n\\[é"), max_size=8), st.sampled_from([1, 62, 63, 200]))
def test_a_filter_made_of_a_name_lets_the_name_pass_however_long_it_is(
    piece: str, times: int
) -> None:
    name = piece * times
    pattern = build_name_filter(name)
    msgspec.convert({"kernel": pattern}, TopKernelsQuery)
    names = pl.DataFrame({"name": [name, f"{name}!", "z"]})
    assert names.select(match_pattern(pl.col("name"), pattern))["name"].to_list()[0], (
        "as the question reads filters"
    )
    if len(name) <= 500 and not set(name) & {"*", "?"}:
        assert names.select(match_pattern(pl.col("name"), pattern))["name"].to_list() == [
            True,
            False,
            False,
        ]


def test_a_choice_stands_at_what_the_address_says_or_at_the_usual() -> None:
    values = {"a": "A", "b": EVIL}
    for query, chosen in (("", ["a"]), ("x=b", ["b"]), ("x=%3Cc%3E", [])):
        assert selected(
            fragment_tree(build_select_field(PageUrl("/p", query), "x", values, "a", "Words"))
        ) == {"x": chosen}


@pytest.mark.parametrize("time_ns", [2**63 - 1, -(2**63), 10**30])
def test_the_time_of_a_strange_clock_is_a_number(time_ns: int) -> None:
    shown = words(fragment_tree(render_time(time_ns)).root)
    assert shown == f"{time_ns} ns" or shown.endswith(" UTC")
    assert words(fragment_tree(render_time(NOON + 999_999)).root) == "2026-09-21 14:13:20 UTC"


def test_a_state_that_nobody_knows_has_no_colour() -> None:
    [usual, strange] = [
        fragment_tree(render_state(state)).all("span")[0] for state in ("failed", EVIL)
    ]
    assert (usual.get("class") or "").split() == ["state", "bad"]
    assert (strange.get("class") or "").split() == ["state"]
    assert words(strange) == SPELLED


def test_a_column_that_says_nothing_is_left_out_and_downloaded() -> None:
    columns = (PageColumn("a", "A"), PageColumn("b", "B"), PageColumn("c", "C", "count"))
    table = PageTable(
        "t", "T", columns, [{"a": None, "b": "", "c": 0}, {"a": "", "b": None, "c": None}]
    )
    tree = fragment_tree(table.render(PageUrl("/p", "")))
    assert tree.tables()["t"].heads == ["A", "C"], "the first stays; 0 is a value"
    assert tree.tables()["t"].texts == [["–", "0"], ["–", "–"]]
    assert table.to_csv(PageUrl("/p", "")).splitlines()[0] == "a,b,c"
    alone = fragment_tree(table.render_static())
    assert [words(of) for of in alone.all("th")] == ["A", "C"]
    assert alone.all("a") == [], "it has no address"


@given(
    st.lists(
        st.one_of(
            st.none(), st.integers(-9, 9), st.booleans(), st.sampled_from(["", "b", "A", "a10"])
        ),
        max_size=9,
    )
)
def test_sorting_keeps_all_rows_and_puts_what_is_unknown_last(values: list[object]) -> None:
    rows = [{"n": number, "v": value} for number, value in enumerate(values)]
    table = PageTable("t", "T", (PageColumn("n", "N", "count"), PageColumn("v", "V")), rows)  # type: ignore[arg-type]
    up, down = (table.chosen(PageUrl("/p", f"t.sort={way}v")) for way in ("", "-"))
    assert (
        sorted(row["n"] for row in up) == sorted(row["n"] for row in down) == list(range(len(rows)))
    )  # type: ignore[type-var]
    absent = [row["n"] for row in rows if row["v"] in (None, "")]
    for way in (up, down):
        assert [row["n"] for row in way[len(way) - len(absent) :]] == absent, (
            "in the order in which they were"
        )
    numbers = [row["v"] for row in up if isinstance(row["v"], int | bool)]
    assert numbers == sorted(numbers, key=int)


def test_areas_stand_upon_each_other_and_fill_the_height() -> None:
    minute = 60 * SECOND
    parts = {("Busy", "compute"): {NOON: 30.0, NOON + minute: 10.0}, (EVIL, "idle"): {NOON: 30.0}}
    tree = fragment_tree(pictures.draw_areas([NOON, NOON + minute], minute, parts, EVIL))
    assert [of.get("d") for of in tree.all("path")] == [
        "M0.0 120.0V60.0H500.0V120.0ZM500.0 120.0V100.0H1000.0V120.0Z",
        "M0.0 60.0V0.0H500.0V60.0Z",
    ]
    assert [words(of) for of in tree.all("time")] == [
        "2026-09-21 14:13:20 UTC",
        "2026-09-21 14:15:20 UTC",
    ], "where it ends"
    assert tree.all("svg")[0].get("aria-label") == SPELLED
    nothing = fragment_tree(pictures.draw_areas([], minute, parts, "x"))
    assert words(nothing.root) == "Nothing was measured in this time."
    zero = fragment_tree(pictures.draw_areas([NOON], minute, {("a", "idle"): {}}, "x"))
    assert [of.get("d") for of in zero.all("path")] == [""]


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=6))
def test_a_bar_is_filled_by_its_parts(amounts: list[float]) -> None:
    tree = fragment_tree(
        pictures.draw_bar(
            [(f"p{number}", "compute", amount) for number, amount in enumerate(amounts)]
        )
    )
    widths = [float(of.get("width") or 0) for of in tree.all("rect")]
    whole = sum(amounts)
    assert widths == pytest.approx(
        [1000 * amount / whole if whole else 0 for amount in amounts], abs=0.006
    )
    starts = [float(of.get("x") or 0) for of in tree.all("rect")]
    assert starts == pytest.approx(
        [sum(widths[:number]) for number in range(len(widths))], abs=0.006 * len(widths)
    )
    assert len(tree.all("li")) == len(amounts), "what there is nothing of is named too"


@given(st.floats(1e-6, 1e12))
def test_the_scale_of_a_chart_is_round_and_reaches_over_the_highest(most: float) -> None:
    points = [ChartDot(NOON, most, "compute", "x", "/x")]
    tree = fragment_tree(charts.draw_dots(points, [], [], label="x", write=repr))
    [scale] = [of for of in tree.all("svg") if of.get("class") == "scale"]
    values = [float(words(of)) for of in scale]
    assert values[0] == 0
    assert values[-1] >= most * (1 - 1e-9)
    assert 2 <= len(values) <= 6
    assert values == pytest.approx([values[1] * number for number in range(len(values))])
    digits = f"{values[1]:.6e}".partition("e")[0].rstrip("0").rstrip(".")
    assert digits in {"1", "2", "2.5", "5"}
    assert values[-2] < most, "not a line too many"


@pytest.mark.parametrize("days", [0.1, 1, 3, 9, 31, 100, 364, 2000])
def test_times_below_a_chart_are_whole_hours_or_days_and_not_too_many(days: float) -> None:
    last = NOON + int(days * DAY_NS)
    stretches = [ChartColumn(time, [("compute", 1.0)], "x") for time in (NOON, last)]
    tree = fragment_tree(
        charts.draw_columns(stretches, HOUR_NS, label="x", write=units.format_number)
    )
    [times] = [of for of in tree.all("svg") if of.get("class") == "times"]
    shown = [words(of) for of in times]
    assert 1 <= len(shown) <= 11
    assert all(
        (text.endswith(":00") if ":" in text else text.split()[1].isdecimal()) for text in shown
    )
    places = [float(str(of.get("x")).removesuffix("%")) for of in times]
    assert places == sorted(places)
