"""Figures and tables of a capture against plain counting: cost of recording, steps, places in a job, collectives."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traceloom.capture import distributed, manifest, writing
from traceloom.capture.distributed import KINDS, _count_bytes, _parse_recorded_kind
from traceloom.capture.output import _cut_columns
from traceloom.capture.scope import MAXIMUM_LENGTH, scope
from traceloom.capture.settings import (
    Settings,
    check_times,
    parse_settings,
    parse_steps,
    print_message,
    print_once,
)
from traceloom.capture.steps import Instant, Mark, StepLog
from traceloom.errors import UsageError

SEEDS = range(12)


def logged(seed: int, marks: list[Mark] | None = None) -> tuple[StepLog, list[dict[str, Any]]]:
    """A log of random steps, and the same as rows; a step that ends on another thread has no processor time."""
    draw = random.Random(seed)
    now = Instant(10**18, 5_000, 1, 70)
    log, rows = StepLog(now), []
    for number in range(draw.randint(1, 40)):
        took, ran = draw.randint(1, 10**6), draw.randint(0, 900)
        thread = draw.choice([1, 1, 1, 2])
        mark = marks[number % len(marks)] if marks else draw.choice(list(Mark))
        after = Instant(now.unix_ns + took, now.steady_ns + took, thread, now.ran_ns + ran)
        log.end(after, mark)
        known = ran if thread == now.thread else None
        rows.append({"start": now.unix_ns, "took": took, "ran": known, "mark": mark})
        pause = draw.randint(0, 50)  # what the recorder does between two steps belongs to none
        now = Instant(after.unix_ns + pause, after.steady_ns + pause, thread, after.ran_ns)
        log.begin(now)
    return log, rows


@pytest.mark.parametrize("seed", SEEDS)
def test_the_table_of_steps_is_what_happened(seed: int) -> None:
    log, rows = logged(seed)
    table = log.to_dict()
    assert log.number == len(rows)
    assert table["start_ns"] == [row["start"] for row in rows]
    assert table["duration_ns"] == [row["took"] for row in rows]
    assert table["cpu_ns"] == [row["ran"] for row in rows]
    assert table["state"] == [row["mark"].value for row in rows]
    for mark in Mark:
        for skip in (0, 3):
            of = [
                number for number, row in enumerate(rows) if row["mark"] is mark and number >= skip
            ]
            assert log.numbers(mark, skip=skip) == of
            assert log.durations(of) == [rows[number]["took"] for number in of]
            known = [rows[number]["ran"] for number in of]
            assert log.processor_times(of) == [ran for ran in known if ran is not None]


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_are_marked_anew_in_their_span_alone(seed: int) -> None:
    log, rows = logged(seed)
    first, end = 2, 2 * len(rows) // 3
    log.relabel(first, end, Mark.EARLY, Mark.RECORDED)
    for number, row in enumerate(rows):
        if first <= number < end and row["mark"] is Mark.EARLY:
            row["mark"] = Mark.RECORDED
    assert log.to_dict()["state"] == [row["mark"].value for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_recording_cost_is_the_ratio_of_medians_of_near_steps(seed: int) -> None:
    marks = [Mark.PLAIN] * 9 + [Mark.RECORDED] * 4 + [Mark.GRAPH, Mark.DISTURBED]
    log, rows = logged(seed, marks)
    figures = manifest.compute_overhead(log, 3)
    recorded = [number for number, row in enumerate(rows) if row["mark"] is Mark.RECORDED]
    plain = [number for number, row in enumerate(rows) if row["mark"] is Mark.PLAIN and number >= 3]
    if recorded:
        plain.sort(key=lambda number: max(recorded[0] - number, number - recorded[-1]))
        plain = sorted(plain[: max(10, 2 * len(recorded))])
    assert (figures["recorded_steps"], figures["unrecorded_steps"]) == (len(recorded), len(plain))
    times = {
        "recorded": [rows[number]["took"] for number in recorded],
        "plain": [rows[number]["took"] for number in plain],
    }
    graph = [row["took"] for row in rows if row["mark"] is Mark.GRAPH]
    clocks = [rows[number]["ran"] for number in [*recorded, *plain]] + [
        row["ran"] for row in rows if row["mark"] is Mark.GRAPH
    ]
    by_processor = all(ran is not None for ran in clocks)
    assert figures["ratio_of"] == ("cpu" if by_processor else "wall")
    if times["recorded"]:
        assert figures["recorded_median_ns"] == int(np.median(times["recorded"]))
    if by_processor:
        times = {
            "recorded": [rows[n]["ran"] for n in recorded],
            "plain": [rows[n]["ran"] for n in plain],
        }
        graph = [row["ran"] for row in rows if row["mark"] is Mark.GRAPH]
    enough = len(recorded) >= 3 and len(plain) >= 3
    for name, share, other in (
        ("ratio", 0.5, 0.5),
        ("ratio_low", 0.25, 0.75),
        ("ratio_high", 0.75, 0.25),
    ):
        if not enough:
            assert figures[name] is None
            continue
        value, base = np.quantile(times["recorded"], share), np.quantile(times["plain"], other)
        assert figures[name] == (pytest.approx(value / base, abs=1e-4) if value and base else None)
    if graph and len(plain) >= 3 and np.median(graph) and np.median(times["plain"]):
        assert figures["graph_step_ratio"] == pytest.approx(
            np.median(graph) / np.median(times["plain"]), abs=1e-4
        )


# -- choices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [2.5, [1, 2], b"3", {"first": 1}, -3, range(5, 5), range(-2, 3), "1e3", "3..", "..3", True],
)
def test_what_is_no_choice_of_steps_is_refused_in_words(given: Any) -> None:
    with pytest.raises(UsageError) as refused:
        parse_steps(given)
    assert refused.value.slug == "bad-steps"
    assert "20..25" in str(refused.value.hint)


def test_a_choice_of_steps_is_the_same_in_every_spelling() -> None:
    draw = random.Random(0)
    for _ in range(50):
        first = draw.randint(0, 10**6)
        count = draw.randint(1, 10**6)
        assert (
            parse_steps(f"{first}..{first + count}")
            == parse_steps(range(first, first + count))
            == (first, count)
        )
        assert parse_steps(str(count)) == parse_steps(count) == (3, count)


def test_settings_come_back_from_the_environment_whatever_they_are() -> None:
    draw = random.Random(1)
    for _ in range(40):
        settings = Settings(
            draw.choice(["run", "/tmp/ä ü/漢字", 'quote"back\\slash', "new\nline"]),
            first_step=draw.choice([None, 0, 7]),
            step_count=draw.choice([None, 1, 5]),
            after=draw.choice([None, 0.5]),
            duration=draw.choice([None, 1e-3, 3.0]),
            stacks=draw.random() < 0.5,
            memory=draw.random() < 0.5,
            module_names=draw.choice(["path", "class", "off"]),
            graph_step=draw.random() < 0.5,
            max_memory=draw.choice([None, 0, 10**9]),
            whole=draw.random() < 0.5,
            replaces=draw.choice(["", "old"]),
        )
        assert parse_settings(settings.to_json()) == settings
        assert settings.early == (
            settings.first_step is None and not settings.by_time and not settings.whole
        )
        assert settings.by_time == (settings.after is not None or settings.duration is not None)
        told = settings.to_dict()
        by_steps = not settings.by_time and not settings.whole
        assert (told["first_step"], told["step_count"]) == (
            settings.window if by_steps else (None, None)
        )
        assert (told["module_names"] is not None) == settings.memory
        assert "directory" not in told
        assert told["shapes"] is True
        json.dumps(told)


def test_the_window_is_that_of_the_defaults_where_nothing_is_chosen() -> None:
    settings = Settings("run")
    assert settings.window == (3, 5)
    assert replace(settings, first_step=0).window == (0, 5)
    assert replace(settings, step_count=9).window == (3, 9)
    assert not replace(settings, memory=True, module_names="off").names_modules
    assert replace(settings, memory=True).from_the_start
    assert not replace(settings, memory=True, stacks=True).from_the_start
    assert not settings.graph_step
    check_times(0.0, 0.5, None)


# -- scopes -------------------------------------------------------------------------------------------------------------


def test_scopes_of_functions_generators_and_coroutines_are_open_while_they_run_alone() -> None:
    seen: list[str] = []

    def look() -> None:
        inner = scope("now")
        with inner:
            seen.append(inner.path)

    @scope("function")
    def function(value: int) -> int:
        look()
        return value + 1

    @scope("generator")
    def generator() -> Iterator[int]:
        got = yield 1
        look()
        try:
            yield got
        except KeyError:
            look()
        return 7

    @scope("coroutine")
    async def coroutine() -> int:
        look()
        return function(40)

    assert function(1) == 2
    with scope("outer"):
        running = generator()
        assert next(running) == 1
        look()  # suspended: its scope is closed
        assert running.send(5) == 5
        with pytest.raises(StopIteration) as end:
            running.throw(KeyError())
        assert end.value.value == 7
        with pytest.raises(StopIteration) as returned:
            coroutine().send(None)
        assert returned.value.value == 41
    look()
    assert seen == [
        "function.now",
        "outer.now",
        "outer.generator.now",
        "outer.generator.now",
        "outer.coroutine.now",
        "outer.coroutine.function.now",
        "now",
    ]


def test_a_scope_that_ends_by_an_error_is_closed_and_may_be_entered_again() -> None:
    region = scope("loss")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), region:
            raise ZeroDivisionError
    with region, scope("inner") as inner:
        assert inner.path == "loss.inner"
    assert scope("alone").path == "alone"


@pytest.mark.parametrize("name", [None, 3, b"x", ["a"]])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(UsageError) as refused:
        scope(name)
    assert refused.value.slug == "bad-scope"


def test_an_asynchronous_generator_takes_no_scope() -> None:
    async def numbers() -> Any:
        yield 1

    with pytest.raises(UsageError) as refused:
        scope("numbers")(numbers)
    assert refused.value.slug == "bad-scope"


@pytest.mark.parametrize(
    "name",
    ['say "hi"', "back\\slash", "new\nline", "\x1b[31mred", "\u202egnp", "漢字", "x" * 1000, ""],
)
def test_a_name_is_safe_in_json_and_never_long(name: str) -> None:
    path = scope(name).path
    assert not set(path) & set('"\\\n\x1b\u202e')
    assert json.loads(f'"{path}"') == path
    assert len(re.sub(r"%[0-9A-F]{2,}", "x", path)) <= MAXIMUM_LENGTH
    if name.isprintable() and not set(name) & set('"\\'):
        assert path == name[:MAXIMUM_LENGTH]


# -- the place in a job ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which no launcher has said anything."""
    for names in (*distributed._RANK_VARIABLES, distributed._JOB_VARIABLES):
        for name in names:
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("rank", "size", "local"), distributed._RANK_VARIABLES)
def test_every_launcher_tells_the_place_by_its_variables(
    rank: str, size: str, local: str, alone: pytest.MonkeyPatch
) -> None:
    assert distributed.read_rank_and_world() == (None, None, None)
    alone.setenv(rank, "3")
    assert distributed.read_rank_and_world() == (None, None, None), (
        "one of the two alone says nothing"
    )
    alone.setenv(size, "8")
    assert distributed.read_rank_and_world() == (3, 8, None)
    alone.setenv(local, "1")
    assert distributed.read_rank_and_world() == (3, 8, 1)


@pytest.mark.parametrize("text", ["", "-1", "x", "1.0", " 2", "٣"])
def test_what_is_no_number_is_no_place(text: str, alone: pytest.MonkeyPatch) -> None:
    alone.setenv("RANK", text)
    alone.setenv("WORLD_SIZE", "2")
    assert distributed.read_rank_and_world() == (None, None, None)


def test_ranks_of_one_job_have_one_name_and_others_another(alone: pytest.MonkeyPatch) -> None:
    assert distributed.identify_job() is None
    names = []
    for rank, port in (("0", "29500"), ("1", "29500"), ("0", "29501")):
        for variable, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_PORT", port)):
            alone.setenv(variable, value)
        names.append(distributed.identify_job())
    assert names[0] == names[1] != names[2]
    alone.setenv("WORLD_SIZE", "1")
    assert distributed.identify_job() is None, "a process on its own"
    alone.setenv("TORCHELASTIC_RUN_ID", "none")
    assert distributed.identify_job() is not None, "a launcher of one"


# -- collectives as they were recorded ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "peer"),
    [
        ("gloo:all_reduce", "all_reduce", None),
        ("nccl:_all_gather_base", "all_gather", None),
        ("nccl:_reduce_scatter_base", "reduce_scatter", None),
        ("nccl:reduce", "reduce", None),
        ("nccl:send 0->1", "send", 1),
        ("nccl:recv 1<-0", "recv", 0),
        ("gloo:allgather", "all_gather", None),
        ("nccl:allreduce_coalesced", "all_reduce", None),
        ("ALLTOALL_BASE", "all_to_all", None),
        ("nccl:barrier", "barrier", None),
        ("something:else", "else", None),
        ("", "", None),
        ("nccl:gather", "gather", None),
        ("nccl:broadcast", "broadcast", None),
    ],
)
def test_the_kind_is_in_the_name_that_the_flight_recorder_gives(
    name: str, kind: str, peer: int | None
) -> None:
    assert _parse_recorded_kind(name) == (kind, peer)


def test_every_method_of_a_group_has_a_kind_that_its_own_name_gives() -> None:
    for method, kind in KINDS.items():
        assert _parse_recorded_kind(f"gloo:{method}")[0] == kind, method


@pytest.mark.parametrize(
    ("sizes", "types", "size"),
    [
        ([[2, 3]], ["Float"], 24),
        ([[2, 3], [4]], ["Half", "Long"], 44),
        ([], [], 0),
        (None, None, 0),
        ([[]], ["Byte"], 1),
        ([[0, 5]], ["Float"], 0),
        ([["7", 2]], ["BFloat16"], 28),
        ([[2]], ["Quaternion"], None),
    ],
)
def test_bytes_are_elements_times_their_size_and_unknown_where_a_type_is(
    sizes: Any, types: Any, size: int | None
) -> None:
    assert _count_bytes(sizes, types) == size


# -- files ----------------------------------------------------------------------------------------------------------------


def test_what_workers_beside_a_job_recorded_goes_with_all_of_their_files(tmp_path: Path) -> None:
    for stem, incidental in (("rank0", False), ("pid71", True), ("pid72", True)):
        writing.write_json(
            tmp_path / f"{stem}.capture.json", manifest.document([{"incidental": incidental}], {})
        )
        (tmp_path / f"{stem}.kineto.json.gz").write_bytes(b"")
    (tmp_path / "pid71.txt").write_text("mine")
    manifest.drop_incidental(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "rank0.capture.json",
        "rank0.kineto.json.gz",
        "pid71.txt",
    }


def test_where_only_workers_recorded_they_stay(tmp_path: Path) -> None:
    writing.write_json(
        tmp_path / "pid71.capture.json", manifest.document([{"incidental": True}], {})
    )
    manifest.drop_incidental(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pid71.capture.json"]


def test_what_is_not_whole_is_put_beside_under_the_next_free_number(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    for number in (1, 2):
        made = directory / writing.NOTES / "new"
        (made / writing.NOTES).mkdir(parents=True)
        (made / "rank0.capture.json").write_text("{}")
        kept = manifest.set_aside_incomplete(made, directory)
        assert kept == tmp_path / f"run-unfinished-{number}"
        assert [path.name for path in kept.iterdir()] == ["rank0.capture.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 3}', '{"ranks": []}', "null"])
def test_a_damaged_capture_is_merged_anew_from_its_parts(tmp_path: Path, text: str) -> None:
    writing.write_json(tmp_path / "rank0.capture.json", manifest.document([{"rank": 0}], {}))
    (tmp_path / "capture.json").write_text(text)
    assert manifest.merge(tmp_path)["run"] == {}
    assert [
        part["rank"] for part in json.loads((tmp_path / "capture.json").read_text())["ranks"]
    ] == [0]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        writing.write_json(path, {"not": object()})
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


# -- lines ----------------------------------------------------------------------------------------------------------------


def test_a_line_is_said_once_with_its_slug_and_cannot_move_the_cursor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_message("a\x1b[2Jb\nc")
    for _ in range(3):
        print_once("only-in-this-test", "once")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "traceloom: once [only-in-this-test]"
    assert len(lines) == 2
    assert "\x1b" not in lines[0]
    assert lines[0].startswith("traceloom: a")


def test_calls_outside_of_the_window_are_cut_out_of_their_table_and_legends_stay() -> None:
    table = {
        "start_ns": [1, 5, 6, 9],
        "kind": [0, 1, 0, 0],
        "bytes_in": [10, 20, 30, 40],
        "kinds": ["all_reduce", "send", "recv", "gather"],
        "groups": ["0"],
    }
    assert _cut_columns(table, 5, 9) == {
        "start_ns": [5, 6],
        "kind": [1, 0],
        "bytes_in": [20, 30],
        "kinds": ["all_reduce", "send", "recv", "gather"],
        "groups": ["0"],
    }
    assert _cut_columns(None, 5, 9) is None
