"""Memory snapshots, memory timelines and reports of memory that ran out: read, or refused, and never run."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from support.snapshots import SnapshotBuilder
from traceloom.errors import InputError
from traceloom.formats.memory_files import (
    CATEGORIES,
    detect_kind,
    parse_snapshot,
    read_out_of_memory,
    read_snapshot,
    read_timeline,
)
from traceloom.formats.pickles import load_bytes

STEP = ("/u/train.py", 10, "step")
SMALL = st.integers(-(2**31), 2**31 - 1)
INTEGERS = st.integers(-(2**100), 2**100)
PLAIN = st.recursive(
    st.tuples(SMALL)
    | st.tuples(SMALL, SMALL)
    | st.tuples(SMALL, SMALL, SMALL)
    | st.none()
    | st.booleans()
    | INTEGERS
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | INTEGERS, inner),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_data_comes_back_as_it_was(value: Any, protocol: int) -> None:
    assert load_bytes(pickle.dumps(value, protocol))[0] == value


def test_objects_that_many_share_come_back() -> None:
    frames = [{"filename": "a.py", "line": k, "name": "f"} for k in range(700)]
    value = [frames, frames[::-1], frames * 3]
    assert load_bytes(pickle.dumps(value, 4))[0] == value


class _Runs:
    """What an attacker would write."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/traceloom-was-here",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_Runs()),
        pickle.dumps(_Runs(), 2),
        pickle.dumps({"segments": [], "device_traces": [[_Runs()]]}),
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02(ios\nsystem\n.",
        b"\x80\x02Pid\n.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_a_pickle_that_asks_for_code_is_refused_and_runs_nothing(data: bytes) -> None:
    ran = Path("/tmp/traceloom-was-here")
    assert not ran.exists()
    with pytest.raises(InputError) as caught:
        load_bytes(data, "x.pickle")
    assert caught.value.slug == "pickle-with-code"
    assert not ran.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        b"\x80\x04",
        b"\x80\x04.",
        b"\x80\x09N.",
        b"\x80\x04e.",
        b"\x80\x04]u.",
        b"\x80\x04h\x07.",
        b"\x80\x04]K\x01K\x02s.",
        b"\x80\x04\x8d" + b"\xff" * 8 + b".",  # text of 2^64 bytes
        b"\x80\x04\x8b\xff\xff\xff\x7f.",  # an integer of 2 GB
        b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        b"\x80\x04" + b"}" * 200_000 + b".",  # objects out of nothing
        b"\x80\x04]" + b"\x94" * 200_000 + b".",
        b"\x80\x02I5\n.",
    ],
)
def test_damaged_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(InputError) as caught:
        load_bytes(data)
    assert caught.value.slug == "pickle-damaged"


@pytest.mark.parametrize("data", [b"\x80\x04}r\xff\xff\xff\xff.", b"\x80\x04}r\0\x10\0\0."])
def test_a_memo_number_beyond_the_file_takes_no_memory(data: bytes) -> None:
    with pytest.raises(InputError) as caught:
        load_bytes(data)
    assert caught.value.slug == "pickle-damaged"


def test_halves_of_surrogate_pairs_are_replaced_and_counted() -> None:
    value = {"a\ud800b": "\udfff", "whole": "\U0001f600 \ud7ff"}
    assert load_bytes(pickle.dumps(value)) == (
        {"a\ufffdb": "\ufffd", "whole": "\U0001f600 \ud7ff"},
        2,
    )


def test_tuples_in_a_list_of_numbers_come_back() -> None:
    for value in ([5, (0, 0), 6, 7], [*range(999), (1, 2), (3,)], [(1, 2, 3)] * 3, [()]):
        assert load_bytes(pickle.dumps(value, 4))[0] == value


def test_pairs_of_texts_come_back_however_often_they_are_shared() -> None:
    shared = ("0", "default_pg")
    groups = [("1", "data"), ("2", "data"), shared, shared, ("0", "1"), ("".join("12"), "data")]
    value = [{"group": group, "name": group[0]} for group in groups * 200]
    for protocol in (2, 3, 4, 5):
        assert load_bytes(pickle.dumps(value, protocol))[0] == value


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(
            ((("a", "b"), "c"), "d"), 4
        ),  # would take 2^n steps to hash, if shared n times
        b"\x80\x04\x8c\x01a\x94\x8c\x01b\x94\x86\x94h\x02h\x02\x86\x94.",
        b"\x80\x02X\x01\0\0\0aq\0X\x01\0\0\0bq\x01\x86q\x02h\x00h\x02\x86q\x03.",
        b"\x80\x02X\x01\0\0\0aq\0h\0h\0\x86q\0h\0h\0\x86q\x01.",  # a number used again
    ],
)
def test_pairs_of_pairs_are_refused(data: bytes) -> None:
    pickle.loads(data)  # as far as Python goes it is a pickle
    with pytest.raises(InputError) as caught:
        load_bytes(data)
    assert caught.value.slug == "pickle-damaged"


def _snapshot() -> SnapshotBuilder:
    builder = SnapshotBuilder()
    kept = builder.alloc(1000, STEP)
    builder.free(builder.alloc(5000, STEP))
    builder.alloc(700, STEP)
    return builder.free(kept, completed=False).out_of_memory(1 << 40, 100, STEP)


def test_every_cut_of_a_snapshot_is_refused(tmp_path: Path) -> None:
    whole = _snapshot().write(tmp_path / "whole.pickle").read_bytes()
    for size in range(0, len(whole) - 1, 7):
        with pytest.raises(InputError) as caught:
            load_bytes(whole[:size])
        assert caught.value.slug == "pickle-damaged"


def test_a_snapshot_is_read_into_columns(tmp_path: Path) -> None:
    found = read_snapshot(_snapshot().write(tmp_path / "s.pickle", devices=3))
    assert found.entries["action"].to_list() == [
        "segment_alloc",
        "alloc",
        "alloc",
        "free_requested",
        "free_completed",
        "alloc",
        "free_requested",
        "oom",
    ]
    assert found.blocks.filter(state="active_allocated")["requested_bytes"].to_list() == [700]
    assert found.segments["bytes"].to_list() == [1 << 21]
    assert found.stacks == ((), (STEP,))
    assert found.notices == ()


@pytest.mark.parametrize("form", ["a list of segments", "blocks with a history", "without times"])
def test_snapshots_of_other_versions_are_read(form: str) -> None:
    builder = SnapshotBuilder(start_us=None if form == "without times" else 1)
    builder.alloc(1000, STEP)
    document: Any = builder.build()
    if form == "a list of segments":
        document = document["segments"]
    if form == "blocks with a history":
        for block in document["segments"][0]["blocks"]:
            block["history"] = [
                {"addr": 1, "real_size": block.pop("requested_size"), "frames": block.pop("frames")}
            ]
            del block["address"]
    found = parse_snapshot(document, "x")
    active = found.blocks.filter(state="active_allocated")
    assert active.select("address", "bytes", "requested_bytes", "stack").rows() == [
        (0x7F0000000000, 1024, 1000, 1)
    ]
    assert found.entries.height == (0 if form == "a list of segments" else 2)


def test_odd_entries_are_counted_and_left_out() -> None:
    document = _snapshot().build()
    whole = parse_snapshot(document, "x").entries.height
    odd = [
        {"action": "?"},
        7,
        {"action": "alloc", "addr": "no", "size": 1},
        {"action": "alloc", "addr": -1, "size": 1},
    ]
    document["device_traces"][0] += odd
    document["segments"] += [
        None,
        {"address": 1},
        {"address": 1, "total_size": 5, "blocks": [{}, 3]},
    ]
    found = parse_snapshot(document, "x")
    assert found.entries.height == whole
    assert [(notice.slug, notice.count) for notice in found.notices] == [
        ("odd-snapshot-entries", 8)
    ]


@pytest.mark.parametrize(
    "document", [{}, [], 5, None, {"segments": 5}, {"device_traces": {}}, {"other": []}]
)
def test_pickles_that_are_no_snapshot_are_refused(document: Any) -> None:
    with pytest.raises(InputError) as caught:
        parse_snapshot(document, "x")
    assert caught.value.slug == "not-a-snapshot"


ROWS = [[-1, 1, 100, 0], [10, 2, 50, 4], [12, 3, -50, 4], [12, 3, 50, 5], [15, 4, -50, 5]]


def test_a_raw_timeline_adds_up_by_category(tmp_path: Path) -> None:
    path = tmp_path / "t.raw.json.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    found = read_timeline(path)
    assert detect_kind(path) == "timeline"
    assert found.time_ns.tolist() == [10, 10, 12, 12, 15]
    assert found.levels.sum(axis=0).tolist() == [100, 150, 100, 150, 100]
    assert found.levels[CATEGORIES.index("gradient")].tolist() == [0, 0, 0, 50, 0]
    assert (found.created, found.destroyed, found.before) == (1, 1, 1)


def test_a_timeline_of_levels(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps([[1, 2], [[0, 5, 0, 0, 0, 0, 0, 0, 0], [0, 5, 0, 0, 0, 7, 0, 0, 0]]])
    )
    found = read_timeline(path)
    assert detect_kind(path) == "timeline"
    assert (found.time_ns.tolist(), found.levels.sum(axis=0).tolist()) == ([1000, 2000], [5, 12])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[]",
        "{}",
        "[[1,2,3]]",
        "[[1,2,3,99]]",
        "[[1,9,3,0]]",
        "[[1,2,3.5,0]]",
        "[[1,2,true,0]]",
        "[[1,2],[[0]]]",
        "[[],[]]",
        "[[1],[]]",
        f"[[1,2,{2**61},0],[1,2,{2**61},0]]",
        f"[[1,2,{2**70},0]]",
    ],
)
def test_bad_timelines_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_timeline(path)
    assert caught.value.slug == "not-a-memory-timeline"


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ('{"format": "traceloom-out-of-memory", "version": 1', "damaged-memory-report"),
        ("[]", "damaged-memory-report"),
        ('{"format": "other", "version": 1}', "damaged-memory-report"),
        ('{"format": "traceloom-out-of-memory", "version": 2}', "other-version"),
    ],
)
def test_bad_reports_of_memory_that_ran_out_are_refused(
    text: str, slug: str, tmp_path: Path
) -> None:
    path = tmp_path / "rank0.oom.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_out_of_memory(path)
    assert caught.value.slug == slug
