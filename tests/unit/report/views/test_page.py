"""The page: self-contained, strict about what may run, honest about what is missing, safe with any name."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest

from support.pages import islands, tables, words
from traceloom.errors import DOCUMENTATION
from traceloom.report import run as document
from traceloom.report.figure import render_json_script
from traceloom.report.views.page import SCRIPTS, STYLES, render_report_page
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'\"\u2028"
ASSETS = files("traceloom.report.views").joinpath("assets")


class Elements(HTMLParser):
    """All start tags with their attributes, the bodies of scripts and styles, and the visible text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self.texts: list[str] = []
        self._open: tuple[str, dict[str, str | None]] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.raw.append((*self._open, data))
        else:
            self.texts.append(data)


@pytest.fixture
def page(made_document: dict[str, Any], session: Session) -> str:
    return render_report_page(made_document, session)


def running(page: str) -> list[str]:
    """The bodies of the scripts that a browser runs."""
    return [
        body
        for tag, attributes, body in Elements(page).raw
        if tag == "script" and "type" not in attributes
    ]


def test_the_page_asks_nothing_of_the_network(page: str) -> None:
    for tag, attributes in Elements(page).tags:
        for name in ("src", "href", "srcset", "data", "action"):
            value = attributes.get(name)
            leads_out = tag == "a" and str(value).startswith(DOCUMENTATION)
            assert value is None or value.startswith(("#", "data:image/svg+xml")) or leads_out, (
                tag,
                name,
                value,
            )
    style = next(body for tag, _, body in Elements(page).raw if tag == "style")
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(
        r"fetch\(|XMLHttpRequest|WebSocket|sendBeacon|import\(", "".join(running(page))
    )


def test_the_policy_allows_just_the_scripts_and_the_style_of_the_page(page: str) -> None:
    policy = next(a["content"] for t, a in Elements(page).tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    styles = [body for tag, _, body in Elements(page).raw if tag == "style"]
    bodies = running(page) + styles
    assert len(bodies) == 3
    for body in bodies:
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.count("sha256-") == 3


def test_nothing_needs_an_inline_style_or_handler(page: str) -> None:
    for tag, attributes in Elements(page).tags:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], (
            tag,
            attributes,
        )


def test_the_page_without_data_is_small(page: str) -> None:
    assert len(page.encode()) < 335_000


def test_ids_are_unique_and_links_lead_somewhere(page: str) -> None:
    tags = Elements(page).tags
    views = {attributes["data-view"] for _, attributes in tags if "data-view" in attributes}
    ids = Counter(attributes["id"] for _, attributes in tags if "id" in attributes)
    assert [name for name, count in ids.items() if count > 1] == []
    for _, attributes in tags:
        target = (attributes.get("href") or "").partition("&")[0]  # with or without what to show
        places = target[1:].split("/")
        assert (
            not target.startswith("#") or places[-1] in ids or places in [[view] for view in views]
        ), target


def test_the_sentence_is_the_headline_and_the_title_is_short(
    page: str, made_document: dict[str, Any]
) -> None:
    shown = "".join(Elements(page).texts)
    assert made_document["answer"]["sentence"].replace(" %", "\u202f%") in shown
    assert re.search("<title>(.*?)</title>", page)[1] == "small run – Traceloom"  # type: ignore[index]


def test_views_stand_in_templates_and_say_in_short_what_they_are_about(page: str) -> None:
    views = [
        attributes["data-view"] for tag, attributes in Elements(page).tags if tag == "template"
    ]
    assert views == ["timeline", "gpu", "host", "memory", "ranks", "data"]
    first = page[: page.index("<template")]
    assert "What to fix first" in first
    for section in ("gpu/kinds", "gpu/launches", "ranks/collectives"):
        assert re.search(rf'<li><a href="#{section}">[^<]*</a> [A-Z0-9]', first), section


def test_four_key_numbers(page: str) -> None:
    found = re.search(r'<dl class="key">(.*?)</dl>', page, re.DOTALL)
    assert found
    assert re.findall(r"<dt>(.*?)</dt>", found[1])[:3] == [
        "Step",
        "GPU busy",
        "Exposed communication",
    ]
    assert found[1].count("<dt>") == 4


def test_the_numbers_are_of_the_time_that_the_sentence_and_the_bar_are_of(
    page: str, made_document: dict[str, Any]
) -> None:
    parts = made_document["answer"]["parts"]
    whole, idle = (
        sum(part["ns"] for part in parts),
        sum(part["ns"] for part in parts if part["kind"] == "idle"),
    )
    found = re.search(r'<dl class="key">(.*?)</dl>', page, re.DOTALL)
    assert found
    numbers = dict(
        zip(
            re.findall(r"<dt>(.*?)</dt>", found[1]),
            re.findall(r'<b title="(.*?)">', found[1]),
            strict=True,
        )
    )
    assert numbers["GPU busy"] == f"{whole - idle} of {whole} ns"
    exposed = sum(part["ns"] for part in parts if part["kind"] == "communication")
    assert numbers["Exposed communication"] == f"{exposed} of {whole} ns"
    assert (
        numbers["Idle, mostly"]
        == f"{max(part['ns'] for part in parts if part['kind'] == 'idle')} ns"
    )


def test_missing_parts_say_why_in_one_line(page: str, made_document: dict[str, Any]) -> None:
    reasons = {entry["path"]: entry["reason"] for entry in made_document["absent"]}
    shown = "".join(Elements(page).texts)
    for path in ("memory.devices", "data_loading", "graph_launches"):
        assert reasons[path].replace("`", "") in shown
    assert 'href="#memory/memory"' not in page  # a part that is not there has no link
    assert 'data-view="memory" class="empty"' in page


def test_unknown_values_are_dashes_with_the_document_s_reason(
    made_document: dict[str, Any], session: Session
) -> None:
    made_document["communication"]["collectives"] = [
        {
            "kind": "all_reduce",
            "where": "device",
            "count": 2,
            "total_ns": 5,
            "mean_ns": 2,
            "max_ns": 3,
            "bytes": None,
        }
    ]
    made_document["absent"] = [
        {"path": "communication.collectives[*].bytes", "reason": "nobody wrote it down"}
    ]
    row = {
        "kind": "all_reduce",
        "where": "device",
        "count": 2,
        "total_ns": 5,
        "mean_ns": 2,
        "max_ns": 3,
        "bytes": 77,
    }
    made_document["communication"]["collectives"].append(row)
    columns = [
        column
        for island in islands(render_report_page(made_document, session))
        for column in island.get("columns", ())
    ]
    assert [c["why"] for c in columns if c.get("values") == [None, 77]] == ["nobody wrote it down"]


def test_a_run_without_a_gpu_shows_the_host_account(
    session: Session, named_trace: Callable[..., Any]
) -> None:
    from traceloom.testing import TraceBuilder

    trace = TraceBuilder(device_name=None).step(1, 0, 90).op("aten::add", 5, 50).build()
    run = Session((trace,), "cpu")
    page = render_report_page(document.build(run), run)
    assert 'id="main-thread-activity"' in page
    assert 'id="breakdown"' not in page


def test_a_document_of_nothing_gives_a_page() -> None:
    from traceloom.testing import TraceBuilder

    nothing = Session((TraceBuilder().build(),), "nothing")
    page = render_report_page(document.build(nothing), nothing)
    assert "the trace has no events" in page
    assert "timeline-view" not in "".join(re.findall(r'id="([^"]*)"', page))


def hostile(session: Session, named_trace: Callable[..., Any]) -> tuple[dict[str, Any], Session]:
    """A run in which every text that can come from outside is hostile."""
    run = Session(
        (named_trace(EVIL, rank=0, host=EVIL),), EVIL, None, (Notice("evil", "warning", EVIL),)
    )
    made = document.build(run)

    def poisoned(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: poisoned(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [poisoned(v, key) for v in value]
        closed = key in ("cause", "phase", "activity", "epoch_ns", "evidence")
        return EVIL if isinstance(value, str) and not closed else value

    made = poisoned(made)
    made["modules"] = [
        {
            "node": 0,
            "parent": None,
            "depth": 0,
            "path": EVIL,
            "name": EVIL,
            "kind": EVIL,
            "count": 1,
            "rank": 0,
            "host_ns": 5,
            "self_host_ns": 5,
            "device_ns": 3,
            "self_device_ns": 3,
            "kernel_count": 1,
        }
    ]
    made["memory"] = {
        "devices": [
            {
                "rank": 0,
                "device_type": EVIL,
                "device": 0,
                "peak_bytes": 5,
                "peak_time_ns": 1,
                "allocation_count": 1,
                "free_count": 0,
            }
        ],
        "curve": [
            {
                "rank": 0,
                "device_type": EVIL,
                "device": 0,
                "time_ns": [0, 1],
                "allocated_bytes": [1, 5],
                "reserved_bytes": [None, None],
            }
        ],
    }
    made["communication"] = {
        "collectives": [
            {
                "kind": EVIL,
                "where": EVIL,
                "group": EVIL,
                "element_type": EVIL,
                "count": 1,
                "total_ns": 1,
                "mean_ns": 1,
                "max_ns": 1,
            }
        ]
    }
    made["capture"] = {EVIL: {EVIL: EVIL}, "settings": {"steps": EVIL}, "list": [EVIL]}
    made["absent"] = [{"path": "data_loading", "reason": EVIL}]
    return made, run


def test_hostile_names_are_text_everywhere(
    session: Session, named_trace: Callable[..., Any]
) -> None:
    made, run = hostile(session, named_trace)
    calm = render_report_page(document.build(session), session)
    page = render_report_page(made, run)
    elements = Elements(page)
    assert running(page) == running(calm)
    assert not [tag for tag, _ in elements.tags if tag == "img"]
    known = {"meta", "link", "html", "head", "title", "script", "style", "body"}
    assert {tag for tag, _ in elements.tags} - known <= {tag for tag, _ in Elements(calm).tags} | {
        "svg",
        "path",
        "line",
        "text",
        "figcaption",
        "h3",
    }
    shown = "".join(elements.texts) + words(page)
    assert shown.count("</script><script>alert(1)</script>") >= 12
    assert "\u2028" not in page
    assert page.count("<script>") == 2


@pytest.mark.parametrize("times", [1, 100])
def test_islands_keep_hostile_names_inside_json(times: int) -> None:
    made = render_json_script({"name": EVIL * times})
    assert islands(made) == [{"name": EVIL * times}]
    body = made.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert not re.search("[<>&\u2028\u2029]", body)


def test_scripts_import_only_what_stands_before_them() -> None:
    """The page joins the modules in this order in one scope; imports must resolve to exports of earlier files."""
    exported: dict[str, set[str]] = {}
    for name in SCRIPTS:
        source = ASSETS.joinpath(name).read_text(encoding="utf-8")
        for names, module in re.findall(
            r'^import \{ (.*?) \} from "\./(.*?)";$', source, re.MULTILINE
        ):
            assert set(names.split(", ")) <= exported[module], (name, module)
        assert source.count("\nimport ") + source.startswith("import ") == len(
            re.findall(r'^import \{ .*? \} from "\./.*?";$', source, re.MULTILINE)
        )
        exported[name] = set(
            re.findall(
                r"^export (?:async )?(?:function|class|const|let) (\w+)", source, re.MULTILINE
            )
        )


def test_scripts_share_one_scope_without_clashes() -> None:
    declared = Counter(
        name
        for script in SCRIPTS
        for name in re.findall(
            r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)",
            ASSETS.joinpath(script).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    assert [name for name, count in declared.items() if count > 1] == []


def test_scripts_never_write_html() -> None:
    for name in (*SCRIPTS, "theme.js"):
        source = ASSETS.joinpath(name).read_text(encoding="utf-8")
        assert not [line for line in source.splitlines() if line.count("`") % 2], (
            name
        )  # text over several lines
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", source
        ), name


def test_colours_stand_in_one_style_sheet_only() -> None:
    for name in STYLES:
        if name != "colours.css":
            assert not re.search(
                r"#[0-9a-f]{3,8}\b(?!\s*\{)|rgb\(|hsl\(", ASSETS.joinpath(name).read_text("utf-8")
            ), name


def test_light_and_dark_name_the_same_colours() -> None:
    source = ASSETS.joinpath("colours.css").read_text(encoding="utf-8")
    blocks = re.findall(r"\{([^{}]*--paper:[^{}]*)\}", source)
    names = [set(re.findall(r"(--[\w-]+):", block)) for block in blocks]
    assert len(names) == 3
    assert names[0] == names[1] == names[2]
    assert blocks[1].split() == blocks[2].split()


def test_several_runs_are_a_table_with_a_command_each(session: Session) -> None:
    made = document.build_runs(
        [session, session], "folder", ["traceloom report a", "traceloom report '<b>'"]
    )
    page = render_report_page(made, session)
    commands = [row["Report it alone"] for row in tables(page)["run-table"]]
    assert commands == ["traceloom report a", "traceloom report '<b>'"]
    assert 'id="timeline"' not in page


def test_half_surrogates_do_not_break_the_page(
    made_document: dict[str, Any], session: Session
) -> None:
    made_document["capture"] = {"run": {"command": ["python", "\ud800.py"]}, "ranks": []}
    assert "python" in render_report_page(made_document, session).encode("utf-8").decode("utf-8")


def test_a_recording_shows_its_command_cost_and_steps(
    made_document: dict[str, Any], session: Session
) -> None:
    made_document["capture"] = {
        "run": {"command": ["torchrun", "train.py", "--name", "a b"]},
        "ranks": [
            {
                "rank": 0,
                "settings": {"shapes": True, "stacks": False},
                "overhead": {
                    "recorded_median_ns": 120_000_000,
                    "unrecorded_median_ns": 100_000_000,
                    "ratio": 1.2,
                },
                "steps": {
                    "duration_ns": [300, 100, 120, 110],
                    "state": ["early", "recorded", "graph", "unrecorded"],
                },
            },
            "nonsense",
        ],
    }
    page = render_report_page(made_document, session)
    shown = "".join(Elements(page).texts)
    assert "torchrun train.py --name 'a b'" in shown
    assert tables(page)["recording-table"][0]["Overhead"] == "1.20 ×"
    assert [
        page.count(f'<rect class="s-{state}"')
        for state in ("early", "recorded", "graph", "unrecorded")
    ] == [1] * 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "capture", [[], "x", {"run": 3, "ranks": [{"steps": {"duration_ns": 3}}]}, {"ranks": None}]
)
def test_a_strange_capture_is_shown_as_far_as_it_goes(
    made_document: dict[str, Any], session: Session, capture: Any
) -> None:
    made_document["capture"] = capture
    assert "</html>" in render_report_page(made_document, session)


def test_small_parts_of_the_answer_are_listed_as_one(
    made_document: dict[str, Any], session: Session
) -> None:
    parts = [
        ("compute", "compute", 900),
        ("idle: a", "idle", 85),
        ("idle: b", "idle", 8),
        ("idle: c", "idle", 7),
    ]
    made_document["answer"]["parts"] = [
        {"label": label, "kind": kind, "ns": ns} for label, kind, ns in parts
    ]
    page = render_report_page(made_document, session)
    legend = re.search(r'<ul class="legend">(.*?)</ul>', page)
    assert legend
    assert re.findall(r"<span>(.*?)</span>", legend[1]) == [
        "compute",
        "idle: a",
        "2 other causes of idle time",
    ]
    assert re.findall(r"<b>(.*?)</b>", legend[1]) == ["90.0 %", "8.5 %", "1.5 %"]


def test_phases_colour_the_answer_of_a_run_without_a_gpu(
    made_document: dict[str, Any], session: Session
) -> None:
    parts = [
        ("backward: operators", "op", 990),
        ("loading: Python", "python", 5),
        ("loading: operators", "op", 5),
    ]
    made_document["answer"]["parts"] = [
        {"label": label, "kind": kind, "ns": ns} for label, kind, ns in parts
    ]
    legend = re.search(r'<ul class="legend">(.*?)</ul>', render_report_page(made_document, session))
    assert legend
    assert re.findall(r"<span>(.*?)</span>", legend[1]) == ["loading", "backward: operators"]
    assert re.findall(r"b-(\w+)", legend[1]) == ["loading", "backward"]
