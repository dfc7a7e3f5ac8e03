"""Laws of questions: ranges that follow each other add up, filters part the whole, pages are its pieces."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import fill  # noqa: E402
from traceloom.errors import UsageError  # noqa: E402
from traceloom.fleet.analyses.attribution import (  # noqa: E402
    build_attribution_tree,
    compute_ownership_periods,
    divide_device_time,
)
from traceloom.fleet.questions.catalogue import QUESTIONS  # noqa: E402
from traceloom.fleet.questions.declaration import (  # noqa: E402
    HOUR_NS,
    PagedQuery,
    Period,
    QuestionFrames,
    TimeQuery,
)
from traceloom.fleet.store.schema import SCHEMAS  # noqa: E402
from traceloom.fleet.store.tables import Tables  # noqa: E402
from traceloom.testing.fleet_weeks import Weeks, WeeksRecipe, build_weeks  # noqa: E402

FIRST = datetime(2026, 10, 5, tzinfo=timezone.utc)
BY_NAME = {question.name: question for question in QUESTIONS}
# Regressions are cut into pages as all others are, and take seconds.
PAGED = [
    q.name for q in QUESTIONS if issubclass(q.parameters, PagedQuery) and q.name != "regressions"
]
ALL = {"since": "2026-10-05", "until": "2026-10-20"}


@cache
def weeks() -> Weeks:
    return build_weeks(WeeksRecipe(days=12, usage_days=3, captures=1))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    made = Tables(str(tmp_path_factory.mktemp("tables")))
    made.create()
    fill(made, weeks())
    return made


def hour(number: int) -> str:
    """The beginning of an hour of the made weeks."""
    return (FIRST + timedelta(hours=number)).strftime("%Y-%m-%dT%H:%M")


def ask(tables: Tables, name: str, **wanted: Any) -> dict[str, Any]:
    """The answer to a question, as JSON."""
    question = BY_NAME[name]
    asked: TimeQuery = msgspec.convert(wanted, question.parameters)
    frames = QuestionFrames(
        tables, asked, Period.of(asked, int(FIRST.timestamp() + 40 * 86_400) * 10**9)
    )
    answer: dict[str, Any] = msgspec.to_builtins(question.ask(frames, asked))
    return answer


def time_of(tables: Tables, by: str, **wanted: Any) -> Counter[str]:
    """Value of a dimension -> device time that was answered."""
    rows = ask(tables, "attribution", by=by, top=100, **wanted)["rows"]
    return Counter({row["values"][0]: row["device_ms"] for row in rows if row["values"]})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PAGED)
def test_the_pages_of_every_question_are_the_pieces_of_its_answer(
    tables: Tables, name: str
) -> None:
    more = {"by": "job"} if name in {"topline", "invest", "characterise"} else {}
    table = next(iter(BY_NAME[name].tables))
    whole = ask(tables, name, top=1000, **ALL, **more)[table]
    assert len(whole) > 3 or name in {"findings", "outliers"}
    rows = []
    size = max(len(whole) // 3, 1)
    for skip in range(0, len(whole) + size, size):
        page = ask(tables, name, top=size, skip=skip, **ALL, **more)
        rows += page[table]
        assert len(page[table]) <= size
        assert page["more"] == (skip + size < len(whole))
    for row, of_whole in zip(rows, whole, strict=True):  # sums of floats may end in other digits
        assert row.keys() == of_whole.keys()
        for key, value in row.items():
            expected = of_whole[key]
            assert value == (pytest.approx(expected) if isinstance(value, float) else expected), key


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("first", "middle", "last"), [(0, 5, 30), (7, 24, 40), (20, 25, 26), (1, 2, 47), (30, 48, 72)]
)
def test_ranges_that_follow_each_other_add_up_to_the_rows_of_a_plain_loop(
    tables: Tables, first: int, middle: int, last: int
) -> None:
    ranges = [(first, middle), (middle, last), (first, last)]
    early, late, whole = (
        time_of(tables, "job", since=hour(low), until=hour(high)) for low, high in ranges
    )
    assert early + late == whole
    begin_ns = int(FIRST.timestamp()) * 10**9
    loop: Counter[str] = Counter()
    for row in tables.scan("usage_hour").collect().iter_rows(named=True):
        if begin_ns + first * HOUR_NS <= row["time_ns"] < begin_ns + last * HOUR_NS:
            loop[row["job"] if row["state"] in {"busy", "idle-allocated"} else row["state"]] += row[
                "device_ms"
            ]
    assert whole == +loop
    kernels = [
        ask(tables, "kernels", since=hour(low), until=hour(high))["total_ns"]
        for low, high in ranges
    ]
    assert kernels[0] + kernels[1] == kernels[2]


@pytest.mark.parametrize("over", ["hour", "day"])
def test_a_curve_adds_up_to_what_it_is_of(tables: Tables, over: str) -> None:
    whole = ask(tables, "attribution", by="division", since=hour(0), until=hour(72))["rows"]
    curve = ask(tables, "attribution", by="division", over=over, since=hour(0), until=hour(72))[
        "rows"
    ]
    for row in whole:
        parts = [part for part in curve if part["values"] == row["values"]]
        assert (
            len({part["time_ns"] for part in parts}) == len(parts) <= (72 if over == "hour" else 3)
        )
        for name in ("device_ms", "busy_ms", "idle_ms", "energy_known_ms"):
            assert sum(part[name] for part in parts) == row[name]
        assert sum(part["energy_mj"] or 0 for part in parts) == (row["energy_mj"] or 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["division", "user", "model"])
def test_filters_by_each_value_part_the_whole(tables: Tables, name: str) -> None:
    days = {"since": hour(0), "until": hour(72)}
    every = time_of(tables, name, **days)
    held = {value: ms for value, ms in every.items() if value not in {"unallocated", "unreachable"}}
    assert len(held) > 2
    for value, ms in held.items():
        assert time_of(tables, name, **days, **{name: value}) == {value: ms}
    anybody = time_of(tables, name, **days, **{name: "*"})
    assert anybody == held  # time that no job held is nobody's
    whole = ask(tables, "kernels", **ALL)["total_ns"]
    values = {row[name] for row in ask(tables, "characterise", by=name, top=1000, **ALL)["rows"]}
    assert (
        sum(ask(tables, "kernels", **ALL, **{name: value})["total_ns"] for value in values)
        == whole
        > 0
    )


def test_filters_by_each_host_part_the_whole(tables: Tables) -> None:
    days = {"since": hour(0), "until": hour(48)}
    every = time_of(tables, "host", **days)
    assert set(every) == set(weeks().observed["host"])
    for host, ms in every.items():
        assert time_of(tables, "host", host=host, **days) == {host: ms}
    captures = tables.scan("captures").collect()
    on_host = tables.scan("devices").collect().select("capture", "rank", "host").unique()
    of_kernels = tables.scan("kernels").collect().join(on_host, on=["capture", "rank"], how="left")
    assert captures.height
    for host, rows in of_kernels.group_by("host"):
        told = ask(tables, "kernels", host=str(host[0]), **ALL)["total_ns"]
        assert told == rows["total_ns"].sum()


def test_two_filters_keep_what_both_keep(tables: Tables) -> None:
    days = {"since": hour(0), "until": hour(72)}
    divisions = time_of(tables, "division", **days).keys() - {"unallocated", "unreachable"}
    for division in divisions:
        jobs = time_of(tables, "job", division=division, **days)
        for job, ms in list(jobs.items())[:4]:
            assert time_of(tables, "job", division=division, job=job, **days) == {job: ms}
            others = divisions - {division}
            assert all(
                not time_of(tables, "job", division=other, job=job, **days)
                for other in list(others)[:1]
            )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "wanted", [{"job": "nobody"}, {"division": "*?*none"}, {"host": "elsewhere"}]
)
def test_what_no_row_fits_has_an_empty_answer_to_every_question(
    tables: Tables, wanted: dict[str, str]
) -> None:
    for question in QUESTIONS:
        needed = {"kernel": "k"} if question.name == "kernel-history" else {}
        answer = ask(tables, question.name, **needed, **wanted, **ALL)
        table = next(iter(question.tables))
        rows = [
            row for row in answer[table] if row.get("values") != []
        ]  # the root of a tree is always there
        known = [row for row in rows if row.get("device_hours")]
        assert not known, question.name
        assert not rows or question.name == "topline", question.name


def test_ranges_that_lie_outside_of_all_days_have_no_rows(tables: Tables) -> None:
    for since, until in (
        ("2020-01-01", "2020-02-01"),
        ("2026-11-01", "2026-11-02"),
        ("1970-01-01", "1970-01-02"),
    ):
        assert ask(tables, "kernels", since=since, until=until)["total_ns"] == 0
        assert not time_of(tables, "job", since=since, until=until)


def test_a_curve_of_too_many_points_is_refused_and_not_cut(tables: Tables) -> None:
    usage = tables.scan("usage_hour").head(1).drop("time_ns").collect()
    points = pl.DataFrame({"time_ns": [number * HOUR_NS for number in range(6_000)]})
    owned = compute_ownership_periods(tables.scan("jobs"), tables.scan("owners"))
    with pytest.raises(UsageError) as refused:
        build_attribution_tree(
            divide_device_time(
                usage.join(points, how="cross").lazy(), owned, ["job"], None, HOUR_NS
            ),
            20,
        )
    assert refused.value.slug == "too-many-rows"


def test_every_question_has_the_same_answer_however_rows_came_into_the_tables(
    tables: Tables, tmp_path: Path
) -> None:
    """Another store of the same uploads: other files, and rows in another order."""
    other = Tables(str(tmp_path))
    other.create()
    for name in SCHEMAS:
        rows = tables.scan(name).collect().sample(fraction=1.0, shuffle=True, seed=5)
        for number in range(2):
            other.commit("shuffled", number + 1, {name: rows[number::2]})
    for question in QUESTIONS:
        if question.name == "regressions":  # seconds each; its order is by time
            continue
        needed = {"kernel": "k"} if question.name == "kernel-history" else {}
        answers = [ask(made, question.name, **needed, **ALL) for made in (tables, other)]
        assert rounded(answers[0]) == rounded(answers[1]), question.name


def rounded(answer: Any) -> Any:
    """An answer whose fractions have nine digits: sums of floats end in others in another order."""
    if isinstance(answer, float):
        return float(f"{answer:.9g}")
    if isinstance(answer, dict):
        return {name: rounded(value) for name, value in answer.items()}
    return [rounded(value) for value in answer] if isinstance(answer, list) else answer
