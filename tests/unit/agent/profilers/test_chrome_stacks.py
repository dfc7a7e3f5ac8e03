"""From what py-spy writes to the stacks file: against the stacks that a made-up process had at each look."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from traceloom.agent.profilers import py_spy
from traceloom.agent.profilers.py_spy import convert_stacks
from traceloom.errors import InputError

RATE, PERIOD_US = 100, 10_000
Looks = list[
    dict[int, tuple[str, ...]]
]  # at each look: thread -> its stack, outermost first; not there: it has ended
NAMES = {101: "MainThread", 102: "loader", 103: ""}


def looks(seed: int, number: int = 60) -> Looks:
    """Stacks that change now and then; the second thread ends early, the third begins late."""
    chance = random.Random(seed)
    stacks = dict.fromkeys(NAMES, ("run",))
    made = []
    for look in range(number):
        for thread, stack in stacks.items():
            if chance.random() < 0.4:
                kept = stack[: chance.randrange(len(stack) + 1)]
                stacks[thread] = (
                    *kept,
                    *(chance.choice("abcd") for _ in range(chance.randrange(4))),
                ) or ("run",)
        there = {101: stacks[101]}
        if look < 40:
            there[102] = stacks[102]
        if look >= 20:
            there[103] = stacks[103]
        made.append(there)
    return made


def events(made: Looks) -> list[dict[str, Any]]:
    """As py-spy's chrometrace has them: what ended and what began between two looks; at the end all that is open ends."""

    def event(kind: str, name: str, thread: int, at_us: int) -> dict[str, Any]:
        place = (
            {"filename": "", "line": None}
            if name.startswith("thread (")
            else {"filename": f"/job/{name}.py", "line": ord(name[0])}
        )
        return {
            "args": {**place, "line": place["line"] or 0},
            "cat": "py-spy",
            "name": name,
            "ph": kind,
            "pid": 101,
            "tid": thread,
            "ts": at_us,
        }

    written, before = [], dict[int, tuple[str, ...]]()
    for number, stacks in enumerate([*made, {}]):
        at_us = number * PERIOD_US
        for thread in sorted({*before, *stacks}):
            title = f"thread ({thread:#x})" + (f": {NAMES[thread]}" if NAMES[thread] else "")
            old = (title, *before[thread]) if thread in before else ()
            new = (title, *stacks[thread]) if thread in stacks else ()
            common = next(
                (row for row, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
                min(len(old), len(new)),
            )
            written += [event("E", name, thread, at_us) for name in reversed(old[common:])]
            written += [event("B", name, thread, at_us) for name in new[common:]]
        before = stacks
    return written


def converted(folder: Path, rows: object, **more: Any) -> dict[str, Any]:
    source, target = folder / "samples", folder / "stacks"
    source.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    usual: dict[str, Any] = {
        "pid": 101,
        "rank": 3,
        "start_ns": 0,
        "end_ns": 10**18,
        "rate": RATE,
        "began_ns": 0,
        "opened_ns": 0,
        "threads": list(NAMES),
    }
    convert_stacks(str(source), str(target), **usual | more)
    document: dict[str, Any] = json.loads(gzip.decompress(target.read_bytes()))
    return document


def expected(
    made: Looks, base_ns: int, start_ns: int, end_ns: int, alive: list[int]
) -> list[tuple[int, int, int, tuple[str, ...]]]:
    """(when, thread, how long, stack) of each stretch in which a thread had one stack."""
    result = []
    for thread in NAMES:
        stretches: list[tuple[int, int, tuple[str, ...]]] = []
        for number, stacks in enumerate(made):
            if thread not in stacks:
                continue
            stack = stacks[thread]
            if stretches and stretches[-1][2] == stack and stretches[-1][1] == number:
                stretches[-1] = (stretches[-1][0], number + 1, stack)
            else:
                stretches.append((number, number + 1, stack))
        for begin, end, stack in stretches:
            # Of one that is gone nobody knows when it went: its last stack counts for one look.
            last = (
                begin + 1 if thread not in alive and (begin, end, stack) == stretches[-1] else end
            )
            first_ns = max(base_ns + begin * PERIOD_US * 1000, start_ns)
            length_ns = min(base_ns + last * PERIOD_US * 1000, end_ns) - first_ns
            if length_ns > 0:
                result.append((first_ns, thread, length_ns, stack))
    return sorted(result)


def samples_of(document: dict[str, Any]) -> list[tuple[int, int, int, tuple[str, ...]]]:
    names = [frame[0] for frame in document["frames"]]
    threads = [thread["id"] for thread in document["threads"]]
    return sorted(
        (at, threads[thread], length, tuple(names[frame] for frame in frames))
        for at, thread, length, frames in document["samples"]
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "alive", [[101, 102, 103], [101, 103], []], ids=["all", "one-ended", "all-ended"]
)
def test_each_thread_has_the_stacks_that_it_had(
    tmp_path: Path, seed: int, alive: list[int]
) -> None:
    made = looks(seed)
    whole_ns = len(made) * PERIOD_US * 1000
    opened_ns = 1_800_000_000 * 10**9
    base_ns = opened_ns - whole_ns  # the last time of the file is when it was opened
    window = (base_ns + 123_456_789, base_ns + whole_ns - 98_765_432)
    document = converted(
        tmp_path,
        events(made),
        opened_ns=opened_ns,
        start_ns=window[0],
        end_ns=window[1],
        threads=alive,
        began_ns=base_ns - 5,
    )
    assert samples_of(document) == expected(made, base_ns, *window, alive)
    assert (document["format"], document["rank"], document["rate"]) == ("traceloom-stacks", 3, RATE)
    assert {thread["id"]: thread["name"] for thread in document["threads"]} == NAMES
    assert all(
        file == f"/job/{name}.py" and line == ord(name[0])
        for name, file, line in document["frames"]
    )
    assert len({tuple(frame) for frame in document["frames"]}) == len(document["frames"])


def test_its_clock_began_after_it_was_started(tmp_path: Path) -> None:
    made = looks(0, 30)
    document = converted(
        tmp_path, events(made), began_ns=7_000_000_000, opened_ns=1_000_000_000
    )  # a clock that was set
    assert min(at for at, *_ in document["samples"]) == 7_000_000_000


@pytest.mark.parametrize(
    "window", [(0, 1), (10**17, 10**18), (5 * 10**9, 5 * 10**9), (6 * 10**9, 5 * 10**9)]
)
def test_a_window_without_anything_has_no_samples(tmp_path: Path, window: tuple[int, int]) -> None:
    document = converted(
        tmp_path,
        events(looks(1, 20)),
        began_ns=4 * 10**9,
        opened_ns=0,
        start_ns=window[0],
        end_ns=window[1],
    )
    assert document["samples"] == []


def test_a_process_that_was_never_seen_has_none(tmp_path: Path) -> None:
    document = converted(tmp_path, [])
    assert (document["threads"], document["frames"], document["samples"]) == ([], [], [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[",
        "[1]",
        '[{"name": "a"}]',
        '[{"name": 1, "ph": "B", "tid": 1, "ts": 1, "args": {}}]',
        '[{"name": "a", "ph": "B", "tid": "x", "ts": 1, "args": {}}]',
        '[{"name": "a", "ph": "B", "tid": 1, "ts": 1e99, "args": {}}]',
        '[{"name": "\\ud800", "ph": "B", "tid": 1, "ts": 1, "args": {}}]',
    ],
)
def test_what_is_not_understood_is_said(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="not understood") as refused:
        converted(tmp_path, text)
    assert refused.value.slug == "py-spy-failed"
    assert not (tmp_path / "stacks").exists()


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_spy, "_MAX_BYTES", 1000)
    with pytest.raises(InputError, match="larger than anybody reads"):
        converted(tmp_path, events(looks(0)))


@pytest.mark.parametrize(
    "name",
    [
        "thread (007)",
        "thread (12x)",
        "thread (0x65): a: b\nc",
        "thread (101)",
        "thread ()",
        "threads (1)",
        "thread (" + "9" * 5000 + ")",
    ],
)
def test_names_that_look_like_threads(tmp_path: Path, name: str) -> None:
    """A thread of the process may be called anything, and so may a native function, which has no file."""
    rows = [
        {"name": name, "ph": "B", "tid": 101, "ts": 0, "args": {"filename": "", "line": 0}},
        {"name": "f", "ph": "B", "tid": 101, "ts": 0, "args": {"filename": "/a.py", "line": 1}},
        {
            "name": "f",
            "ph": "E",
            "tid": 101,
            "ts": 10_000,
            "args": {"filename": "/a.py", "line": 1},
        },
        {"name": name, "ph": "E", "tid": 101, "ts": 10_000, "args": {"filename": "", "line": 0}},
    ]
    document = converted(tmp_path, rows)
    number = {"thread (0x65): a: b\nc": 101, "thread (101)": 101, "thread (007)": 7}.get(name)
    assert [thread["id"] for thread in document["threads"]] == ([] if number is None else [number])
    if number is not None:
        assert samples_of(document) == [(0, number, 10_000_000, ("f",))]
