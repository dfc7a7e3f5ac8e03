"""Where entries stand in a text, whatever stands inside of them: against the texts they were put together from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traceloom.formats import read_kineto
from traceloom.formats.text_stream import BraceIndex, locate_entries

BLANKS = ["", " ", "\n", "\r\n\t ", " " * 70]
ODD = ["", "}", "},{", "}, {", '"},{"', "\\", "é}{", "}\n,\n{", "\u2028},", "{}"]


def joined(entries: list[str], blank: str) -> tuple[bytes, list[bytes]]:
    return f"{blank},{blank}".join(entries).encode() + blank.encode(), [
        entry.encode() for entry in entries
    ]


def cut(text: bytes, count: int) -> list[bytes]:
    """The entries by what `places` says."""
    braces = BraceIndex()
    braces.scan(text)
    begins, lengths = locate_entries(text, count, braces.between(0, len(text)))
    return [
        text[begin : begin + length]
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)
    ]


@pytest.mark.parametrize("blank", BLANKS)
def test_plain_entries_stand_where_they_were_put(blank: str) -> None:
    text, expected = joined(
        [json.dumps({"name": f"op{number}", "n": number}) for number in range(20)], blank
    )
    assert cut(text, 20) == expected


@pytest.mark.parametrize("blank", BLANKS)
@pytest.mark.parametrize("odd", ODD)
def test_texts_that_look_like_the_end_of_an_entry_are_none(odd: str, blank: str) -> None:
    entries = [
        json.dumps({"name": odd, "args": {"k": {"v": odd}}}, ensure_ascii=False) for _ in range(4)
    ]
    text, expected = joined(entries, blank)
    assert cut(text, 4) == expected


@pytest.mark.parametrize("value", [[{"a": 1}, {"b": 2}], [{}, {}, {}], {"x": [{}, {"y": {}}]}])
def test_lists_of_objects_inside_an_entry_are_no_entries(value: Any) -> None:
    text, expected = joined([json.dumps({"args": value}) for _ in range(3)], " ")
    assert cut(text, 3) == expected


@pytest.mark.parametrize(
    "odd", ['"},{"', "null", "7", "[{},{}]", '{"ph":1}', '{"args":"},{"}', '"x},{y},{z"', "{}", '"']
)
def test_every_event_has_its_own_text_beside_entries_that_are_none(
    odd: str, tmp_path: Path
) -> None:
    entries = [
        json.dumps(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": f"op{n}",
                "pid": 1,
                "tid": 1,
                "ts": n,
                "dur": 1,
                "args": {},
            }
        )
        for n in range(4)
    ]
    path = tmp_path / "a.json"
    path.write_text(
        f'{{"schemaVersion":1,"traceEvents":[{", ".join([*entries[:2], odd, *entries[2:]])}]}}'
    )
    trace, text = read_kineto(path), path.read_bytes()
    sources = trace.sources.join(trace.events.select("event", "name"), on="event").sort("offset")
    texts = {
        name: text[at : at + size].decode()
        for name, at, size in sources.select("name", "offset", "length").rows()
    }
    lost = (
        {"op2", "op3"} if odd == '"' else set()
    )  # an open quote takes what follows with it, up to where it ends
    assert texts.keys() >= {f"op{n}" for n in range(4)} - lost
    assert all(
        shown == entries[int(name.removeprefix("op"))] for name, shown in texts.items() if name
    )


def test_equal_entries_one_after_the_other_are_each_where_they_stand() -> None:
    text, expected = joined(["[{},{}]"] * 4, " ")
    assert cut(text, 4) == expected
    braces = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("}"))
    begins, lengths = locate_entries(text, 4, braces)
    assert begins.tolist() == [0, 10, 20, 30]
    assert lengths.tolist() == [7] * 4


def test_a_single_entry_and_none() -> None:
    assert cut(b'{"a": {"b": 1}} \n', 1) == [b'{"a": {"b": 1}}']
    assert [column.tolist() for column in locate_entries(b"", 0, np.zeros(0, dtype=np.int64))] == [
        [],
        [],
    ]


@pytest.mark.parametrize("seed", range(6))
def test_random_entries_come_apart_as_they_were_put_together(seed: int) -> None:
    chance = random.Random(seed)

    def value(depth: int) -> Any:
        kind = chance.randrange(6 if depth < 3 else 3)
        if kind == 0:
            return chance.randrange(100)
        if kind < 3:
            return "".join(chance.choice('}{,"\\: aé\n') for _ in range(chance.randrange(8)))
        if kind == 3:
            return [value(depth + 1) for _ in range(chance.randrange(4))]
        return {str(number): value(depth + 1) for number in range(chance.randrange(4))}

    entries = [json.dumps({"v": value(0)}, indent=chance.choice([None, 1])) for _ in range(30)]
    text, expected = joined(entries, chance.choice(BLANKS))
    assert cut(text, 30) == expected


@pytest.mark.parametrize("size", [1, 3, 16, 1000])
@pytest.mark.parametrize("begin", [0, 5, 90])
def test_braces_are_those_of_the_text_however_it_arrives(size: int, begin: int) -> None:
    text = json.dumps([{"a": {"b": number}} for number in range(12)]).encode()
    expected = [at for at, sign in enumerate(text) if sign == ord("}")]
    braces = BraceIndex(begin)
    for low in range(0, len(text), size):
        braces.scan(text[low : low + size])
    for low, high in ((begin, begin + 20), (begin + 20, 120), (120, 120), (120, len(text))):
        assert braces.between(low, high).tolist() == [
            at - low for at in expected if low <= at < high
        ]


def test_braces_of_the_same_stretch_may_be_asked_for_again_and_of_none_there_are_none() -> None:
    braces = BraceIndex()
    assert braces.between(0, 10).tolist() == []
    braces.scan(b"")
    braces.scan(b"ab}c}")
    assert [braces.between(1, 5).tolist() for _ in range(2)] == [[1, 3]] * 2
    assert braces.between(3, 4).tolist() == []
    assert braces.between(5, 99).tolist() == []
