"""Questions over HTTP, against what was planted in made weeks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import DAYS, AnsweringService, answering  # noqa: E402
from traceloom.errors import InputError  # noqa: E402
from traceloom.fleet.questions.catalogue import QUESTIONS  # noqa: E402
from traceloom.fleet.questions.declaration import DAY_NS, HOUR_NS, Period, TimeQuery  # noqa: E402
from traceloom.testing.fleet_weeks import CHANGES, Team, Weeks, WeeksRecipe, build_weeks  # noqa: E402

SLOW = 1
USAGE = {"since": "2026-10-05", "until": "2026-10-07"}


@cache
def weeks() -> Weeks:
    return build_weeks(WeeksRecipe(slow_host=SLOW, captures=1))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnsweringService]:
    with answering(tmp_path_factory.mktemp("fleet"), weeks()) as service:
        yield service


def refused(service: AnsweringService, route: str, **parameters: str) -> str:
    with pytest.raises(InputError) as raised:
        service.admin.get(route, **parameters)
    return raised.value.slug


def test_the_planted_regression_comes_first_with_captures_of_both_sides(
    fleet: AnsweringService,
) -> None:
    answer = fleet.admin.get("regressions", **DAYS)
    first, planted = answer["changes"][0], CHANGES[0]
    assert first["kernel"] == weeks().kernel(planted)
    assert (first["cause"], first["change"]) == ("code", pytest.approx(planted.factor - 1, rel=0.2))
    since = answer["since_ns"] + planted.day * DAY_NS
    assert since <= first["since_ns"] < since + DAY_NS
    starts = {row["capture"]: row["start_ns"] for row in weeks().tables["captures"].to_dicts()}
    assert starts[first["healthy_capture"]] < first["since_ns"] <= starts[first["capture"]]
    assert first["jobs"]

    history = fleet.admin.get(
        "kernels/history", kernel=first["kernel"], shapes=first["shapes"], **DAYS
    )["rows"]
    jobs = {
        row["job"]
        for row in weeks().tables["captures"].to_dicts()
        if row["job"].startswith(planted.model)
    }
    assert {row["job"] for row in history} == jobs
    assert [row["start_ns"] for row in history] == sorted(row["start_ns"] for row in history)
    sides: dict[bool, list[float]] = defaultdict(list)
    for row in history:
        sides[row["start_ns"] >= first["since_ns"]].append(row["mean_ns"])
    assert min(sides[True]) > 4 * max(sides[False])


@pytest.mark.parametrize(
    "by", ["/".join(order) for order in permutations(("division", "user", "job"))]
)
def test_hours_of_owners_are_exact_on_every_level_in_any_order(
    fleet: AnsweringService, by: str
) -> None:
    names = by.split("/")
    answer = fleet.admin.get("attribution", by=",".join(names), top="100", **USAGE)
    rows = {tuple(row["values"]): row for row in answer["rows"]}
    devices = len(weeks().observed.select("host", "device").unique())
    assert rows[()]["device_ms"] == devices * 2 * 24 * 3_600_000
    for depth in range(4):
        level = [row for values, row in rows.items() if len(values) == depth]
        assert sum(row["device_ms"] for row in level) == rows[()]["device_ms"]
    for values, row in rows.items():
        parts = [part for inner, part in rows.items() if inner[:-1] == values and inner]
        assert not parts or sum(part["device_ms"] for part in parts) == row["device_ms"]
    held: dict[str, float] = defaultdict(float)
    divisions = {team.model: team.division or "unattributed" for team in weeks().recipe.teams}
    for job, ms in weeks().held_ms.items():
        held["unattributed" if job.endswith("notebook") else divisions[job.partition("-")[0]]] += ms
    at = names.index("division")
    for division, ms in held.items():
        told = sum(
            row["device_ms"]
            for values, row in rows.items()
            if len(values) == 3 and values[at] == division
        )
        assert told == pytest.approx(ms, abs=700)  # minutes of a shared device have fractions


def test_small_parts_stand_together_and_the_sum_stays(fleet: AnsweringService) -> None:
    rows = fleet.admin.get("attribution", by="division,job", top="1", **USAGE)["rows"]
    assert [row["values"][-1:] for row in rows].count(["(others)"]) == 3
    for depth in (1, 2):
        assert (
            sum(row["device_ms"] for row in rows if len(row["values"]) == depth)
            == rows[0]["device_ms"]
        )
    days = fleet.admin.get("attribution", by="division", over="day", **USAGE)["rows"]
    assert {row["time_ns"] for row in days} == {days[0]["time_ns"], days[0]["time_ns"] + DAY_NS}
    assert sum(row["device_ms"] for row in days if not row["values"]) == rows[0]["device_ms"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("wanted", "jobs"),
    [
        ({"division": "ads"}, ("recommender", "assistant")),
        ({"user": "b?"}, ("assistant",)),
        ({"job": "vision-*", "division": "research"}, ("vision",)),
        ({"job": "speech-*", "division": "unattributed"}, ("speech",)),
        ({"host": "host02"}, ("assistant",)),
    ],
    ids=("division", "user", "job", "nobody", "host"),
)
def test_filters_keep_what_they_say(
    fleet: AnsweringService, wanted: dict[str, str], jobs: tuple[str, ...]
) -> None:
    at_host = [f"{wanted['host'].removeprefix('host0')}"] if "host" in wanted else None
    held = sum(
        ms
        for job, ms in weeks().held_ms.items()
        if job.startswith(jobs)
        and not job.endswith("notebook")
        and at_host in (None, [job.split("-")[1]])
    )
    free = ("unallocated", "unreachable")
    rows = fleet.admin.get("attribution", by="model", **USAGE, **wanted)["rows"]
    told = sum(
        row["device_ms"]
        for row in rows
        if row["values"] and row["values"][0] not in (*free, "unattributed")
    )
    assert told == pytest.approx(held, abs=700)
    kernels = fleet.admin.get("kernels", top="1000", **DAYS, **wanted)["rows"]
    assert {row["kernel"].partition("_")[0] for row in kernels} == set(jobs)
    time_of = {
        row["capture"]: row["job"]
        for row in weeks().tables["captures"].to_dicts()
        if row["job"].startswith(jobs)
    }
    whole = sum(
        row["total_ns"]
        for row in weeks().tables["kernels"].to_dicts()
        if row["capture"] in time_of and at_host in (None, [row["capture"].split("-")[1]])
    )
    assert sum(row["total_ns"] for row in kernels) == whole


def test_pages_follow_each_other_and_say_whether_there_are_more(fleet: AnsweringService) -> None:
    every = fleet.admin.get("kernels", top="1000", **DAYS)
    pages = [
        fleet.admin.get("kernels", top="7", skip=str(skip), **DAYS) for skip in range(0, 161, 7)
    ]
    assert [row for page in pages for row in page["rows"]] == every["rows"]
    assert [page["more"] for page in pages] == [*[True] * (len(pages) - 1), False]
    assert every["total_ns"] == weeks().tables["kernels"]["total_ns"].sum()
    assert fleet.admin.get("kernels", top="1", sort="cycles", **DAYS)["rows"][0]["cycles"]
    assert refused(fleet, "kernels", top="1001") == "wrong-request"


def test_a_part_of_a_day_is_looked_at_exactly(fleet: AnsweringService) -> None:
    answer = fleet.admin.get(
        "kernels", since="2026-10-06T03:00", until="2026-10-06T09:00", top="1000"
    )
    inside = (
        weeks()
        .tables["captures"]
        .filter(
            (weeks().tables["captures"]["start_ns"] >= answer["since_ns"])
            & (weeks().tables["captures"]["start_ns"] < answer["until_ns"])
        )
    )
    of_inside = weeks().tables["kernels"].join(inside, on="capture", how="semi")
    assert inside.height > 1
    assert answer["total_ns"] == of_inside["total_ns"].sum()


def test_the_slow_host_is_the_outlier_among_hosts_that_ran_the_same(tmp_path: Path) -> None:
    team = Team("recommender", "ads", "feed", "ana", "torch 2.9", hosts=6)
    slow = build_weeks(
        WeeksRecipe(days=3, usage_days=0, changes=(), slow_host=2, captures=1, teams=(team,))
    )
    with answering(tmp_path, slow) as service:
        hosts = service.admin.get("outliers", **DAYS)["hosts"]
    assert [row["host"] for row in hosts if row["outlier"]] == [slow.hosts[2]]
    assert hosts[0]["ratio"] == pytest.approx(1.4, rel=0.05)
    assert len(hosts) == 6


def test_the_topline_savings_findings_and_shares_are_what_was_planted(
    fleet: AnsweringService,
) -> None:
    teams = {team.model: team for team in weeks().recipe.teams}
    rows = {row["model"]: row for row in fleet.admin.get("topline", by="model", **USAGE)["rows"]}
    assert {name: rows[name]["device_use"] for name in teams} == {
        name: pytest.approx(team.busy, rel=1e-3) for name, team in teams.items()
    }
    saved = {row["rule"]: row["saved_ms"] for row in fleet.admin.get("invest", **USAGE)["rows"]}
    vision = sum(ms for job, ms in weeks().held_ms.items() if job.startswith("vision"))
    assert saved["python-bound"] == pytest.approx(
        0.5 * vision, rel=0.2
    )  # jobs without a capture in these days
    found = {row["rule"]: row for row in fleet.admin.get("findings", **DAYS)["rows"]}
    rules = weeks().tables["findings"]["slug"].to_list()
    assert {rule: row["captures"] for rule, row in found.items()} == {
        rule: rules.count(rule) for rule in set(rules)
    }
    shares = fleet.admin.get("characterise", by="division,kind", **DAYS)["rows"]
    assert sum(row["fraction"] for row in shares) == pytest.approx(1)
    covered = fleet.admin.get("coverage", top="1000", **DAYS)
    assert covered["rows"][-1]["covered_fraction"] == pytest.approx(1)


def test_tables_without_rows_have_an_answer(tmp_path: Path) -> None:
    with answering(tmp_path) as service:
        for question in QUESTIONS:
            needed = {"kernel": "k"} if question.name == "kernel-history" else {}
            answer = service.admin.get(question.path.removeprefix("/api/v1/"), **needed)
            assert answer["more"] is False
            assert all(len(answer[name]) <= 21 for name in question.tables)


def test_what_cannot_be_asked_is_refused(fleet: AnsweringService) -> None:
    assert refused(fleet, "attribution", by="colour") == "no-such-dimension"
    assert refused(fleet, "attribution", since="yesterday") == "wrong-request"
    assert refused(fleet, "attribution", since="2026-10-07", until="2026-10-06") == "wrong-request"
    assert refused(fleet, "kernels", colour="red") == "wrong-request"
    assert refused(fleet, "kernels/history") == "wrong-request"


def test_ranges_begin_at_full_hours_or_days() -> None:
    now = 20_000 * DAY_NS + 5 * HOUR_NS + 7
    assert Period.of(TimeQuery(since="30d"), now) == (
        19_970 * DAY_NS,
        20_000 * DAY_NS + 6 * HOUR_NS,
        True,
    )
    assert Period.of(TimeQuery(since="6h"), now)[0] == 20_000 * DAY_NS - HOUR_NS


RULES = """
[[rule]]
match = {model = "speech"}
set = {division = "research"}

[[rule]]
match = {job = "vision-*"}
set = {division = "ads"}
"""


def held_by(*models: str) -> float:
    return sum(
        ms
        for job, ms in weeks().held_ms.items()
        if job.startswith(models) and not job.endswith("notebook")
    )


def hours_of_divisions(fleet: AnsweringService) -> dict[tuple[str, ...], int]:
    rows = fleet.admin.get("attribution", by="division", **USAGE)["rows"]
    return {tuple(row["values"]): row["device_ms"] for row in rows}


def test_rules_say_what_they_change_before_they_are_kept(fleet: AnsweringService) -> None:
    operator, viewer = fleet.client("operator", "olga"), fleet.client("viewer", "vera")
    assert operator.get("owners") == {"version": 0, "at_ns": None, "who": "", "text": ""}
    before = hours_of_divisions(fleet)
    body = {"text": RULES, **USAGE, "dry_run": True}
    tried = operator.post("owners", body)
    moved = {
        (row["dimension"], row["before"], row["after"]): row["device_ms"] for row in tried["moves"]
    }
    assert moved == {
        ("division", "unattributed", "research"): pytest.approx(held_by("speech"), abs=700),
        ("division", "research", "ads"): pytest.approx(held_by("vision"), abs=700),
    }
    assert tried["version"] is None
    assert hours_of_divisions(fleet) == before
    with pytest.raises(InputError, match="needs the role operator"):
        viewer.post("owners", body)

    assert operator.post("owners", {**body, "dry_run": False})["version"] == 1
    of = hours_of_divisions(fleet)
    assert of["research",] == pytest.approx(held_by("speech"), abs=700)
    assert of[()] == before[()]
    assert operator.post("owners", {**body, "text": ""})["version"] is None
    assert operator.post("owners", {**body, "text": RULES, "dry_run": False})["moves"] == []
    assert operator.post("owners", {**USAGE, "text": ""})["version"] == 3
    assert hours_of_divisions(fleet) == before
    versions = viewer.get("owners/history")["versions"]
    assert [(each["version"], each["who"]) for each in versions] == [
        (3, "olga"),
        (2, "olga"),
        (1, "olga"),
    ]
    assert viewer.get("owners", version="1")["text"] == RULES
    with pytest.raises(InputError, match="no such version"):
        viewer.get("owners", version="9")
    with pytest.raises(InputError) as raised:
        operator.post("owners", {"text": "[[rule]]\nset = {colour = 'red'}"})
    assert raised.value.slug == "bad-owners"
    did = {
        (entry["who"], entry["what"], entry["result"])
        for entry in fleet.admin.get("audit")["entries"]
    }
    assert {
        ("olga", "POST /api/v1/owners", "done"),
        ("vera", "POST /api/v1/owners", "not-allowed"),
    } <= did


def test_prices_say_what_they_change_and_make_costs(fleet: AnsweringService) -> None:
    operator = fleet.client("operator", "otto")
    hours = (
        sum(row["device_ms"] for row in operator.get("attribution", **USAGE)["rows"][:1]) / 3.6e6
    )
    body = {"text": 'currency = "EUR"\n[device_hour]\ndefault = 2.0', **USAGE}
    [cost] = operator.post("prices", {**body, "dry_run": True})["costs"]
    assert (cost["before"], cost["after"]) == (None, pytest.approx(2 * hours))
    assert operator.get("attribution", **USAGE)["rows"][0]["cost"] is None
    assert operator.post("prices", body)["version"] == 1
    answer = operator.get("attribution", **USAGE)
    assert (answer["currency"], answer["rows"][0]["cost"]) == ("EUR", pytest.approx(2 * hours))
