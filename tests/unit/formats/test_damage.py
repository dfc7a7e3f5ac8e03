"""Each kind of damage: what is kept, what is said, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from support import damage
from traceloom.errors import InputError
from traceloom.formats import arguments, read_kineto
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


def builder(count: int = 50) -> TraceBuilder:
    made = TraceBuilder()
    for number in range(count):
        made.op(f"aten::op{number}", number * 10, 5, shapes=[[number, 3]])
    return made


def read(tmp_path: Path, content: str | bytes, name: str = "trace.json") -> Trace:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    trace = read_kineto(path)
    trace.check()
    return trace


def slugs(trace: Trace) -> dict[str, int]:
    return {notice.slug: notice.count for notice in trace.notices if notice.slug != "no-steps"}


def test_a_whole_file_has_no_notice(tmp_path):
    assert slugs(read(tmp_path, builder().text())) == {}


def test_a_truncated_file_keeps_what_is_whole_and_says_where_it_ends(tmp_path):
    text = builder().text()
    cut = text.index("aten::op30") + 4
    trace = read(tmp_path, damage.truncated(text, cut))
    assert trace.events.height == 30
    notice = next(n for n in trace.notices if n.slug == "cut-file")
    assert notice.severity == "error"
    assert "byte" in notice.where


def test_a_cut_gzip_keeps_all_that_can_be_decompressed(tmp_path):
    made = builder(5000)
    trace = read(tmp_path, damage.cut_gzip(made.text(), 0.5), "trace.json.gz")
    assert 1000 < trace.events.height < 5000
    assert set(slugs(trace)) == {"cut-gzip", "cut-file"}


def test_a_corrupt_gzip_keeps_all_before_the_fault(tmp_path):
    made = builder(5000)
    trace = read(tmp_path, damage.corrupt_gzip(made.text(), 0.5), "trace.json.gz")
    assert 1000 < trace.events.height < 5000
    assert "corrupt-gzip" in slugs(trace)


def test_gzip_of_several_members_is_one_text(tmp_path):
    text = builder().text().encode()
    trace = read(tmp_path, gzip.compress(text[:999]) + gzip.compress(text[999:]))
    assert trace.events.height == 50
    assert slugs(trace) == {}


def test_bytes_behind_a_gzip_are_left_out_and_said(tmp_path):
    trace = read(tmp_path, gzip.compress(builder().text().encode()) + b"garbage")
    assert trace.events.height == 50
    assert slugs(trace) == {"trailing-bytes": 1}


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ('the "best" op', 'the "best" op'),
        ("C:\\qath\\zeta", "C:\\qath\\zeta"),
        ("C:\\qath\\xback\\\\slash", "C:\\qath\\xback\\slash"),
        ("tab\there", "tab\there"),
        ("bell\x07", "bell\x07"),
        ('f("a", "b")', 'f("a", "b")'),
    ],
)
def test_an_unescaped_name_is_mended(tmp_path, raw, name):
    made = TraceBuilder().op("", 0, 5).op("aten::mm", 10, 5)
    trace = read(tmp_path, damage.in_name(made, 0, raw))
    assert trace.events["name"].to_list() == [name, "aten::mm"]
    assert slugs(trace) == {"repaired-events": 1}


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "N/A", "nan", "-inf"])
def test_a_bare_word_becomes_null(tmp_path, word):
    made = builder(3)
    trace = read(tmp_path, damage.with_argument(made, 1, word))
    assert trace.events.height == 3
    assert slugs(trace) == {"repaired-events": 1}
    assert arguments(trace, 1)["blocks per SM"] is None


def test_damage_in_every_event_is_linear_work(tmp_path):
    made = TraceBuilder()
    for number in range(3000):
        made.op(f"name{number}", number, 1)
    text = made.text().replace('"name": "name', '"name": "C:\\qame')
    trace = read(tmp_path, text)
    assert trace.events.height == 3000
    assert slugs(trace) == {"repaired-events": 3000}


def test_one_event_beyond_repair_costs_one_event(tmp_path):
    made = builder(10)
    events = made.events()
    events[4] = '{"ph": "X", "name" "aten::op4" 12 }{'
    trace = read(tmp_path, damage.assembled(made, events))
    assert trace.events.height == 9
    assert slugs(trace) == {"lost-events": 1}


def test_the_last_of_duplicate_keys_counts(tmp_path):
    trace = read(tmp_path, damage.with_duplicate_key(builder(2), 0))
    assert trace.events["name"].to_list() == ["aten::op0", "aten::op1"]


def test_invalid_utf8_is_replaced(tmp_path):
    text = builder(3).text().encode().replace(b"aten::op1", b"aten::\xff\xfe1")
    trace = read(tmp_path, text)
    assert trace.events["name"][1].startswith("aten::\ufffd")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_does_no_harm(tmp_path, encoding):
    trace = read(tmp_path, builder(3).text().encode(encoding))
    assert trace.events.height == 3


def test_negative_and_absurd_durations_are_kept_and_said(tmp_path):
    week = 7 * 86_400 * 1e6
    made = TraceBuilder().op("back", 10, -5).op("long", 20, week).op("aten::mm", 30, 1)
    trace = read(tmp_path, made.text())
    assert trace.events["duration_ns"].to_list() == [-5_000, int(week) * 1000, 1_000]
    assert trace.events["nested_end_ns"][0] == trace.events["start_ns"][0]
    assert slugs(trace) == {"negative-duration": 1, "absurd-duration": 1}


def test_events_without_a_usable_time_are_counted(tmp_path):
    made = builder(4)
    events = made.events()
    events[1] = events[1].replace('"ts": 10.000', '"ts": null')
    events[2] = events[2].replace('"dur": 5.000', '"dur": "soon"')
    trace = read(tmp_path, damage.assembled(made, events))
    assert trace.events["name"].to_list() == ["aten::op0", "aten::op2", "aten::op3"]
    assert trace.events["duration_ns"].to_list() == [5_000, 0, 5_000]
    assert {"missing-time", "missing-duration"} <= set(slugs(trace))


def test_ids_and_times_may_be_strings(tmp_path):
    made = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 1, 1, correlation=7)
        .kernel("gemm", 3, 2, correlation=7)
    )
    text = (
        made.text()
        .replace('"correlation": 7', '"correlation": "7"')
        .replace('"ts": 3.000', '"ts": "3.000"')
    )
    trace = read(tmp_path, text)
    assert trace.events["launch"].to_list() == [None, 0]
    assert trace.events["start_ns"].to_list() == [1_000, 3_000]


def test_lists_of_objects_behind_the_events_lose_no_event(tmp_path):
    made = builder(2000)
    made.metadata(deviceProperties=[{"id": number, "name": "H100"} for number in range(8)])
    trace = read(tmp_path, damage.metadata_after(made))
    assert trace.events.height == 2000
    assert trace.devices.height == 8
    assert slugs(trace) == {}


def test_distributed_info_again_behind_the_events_is_joined(tmp_path):
    text = TraceBuilder(rank=3, world_size=8).op("aten::mm", 0, 1).text()
    again = {
        "rank": 3,
        "world_size": 8,
        "pg_config": [{"pg_name": "0", "pg_size": 2, "ranks": "[0, 1]"}],
    }
    end = text.rindex("}")
    trace = read(tmp_path, text[:end].rstrip() + f', "distributedInfo": {json.dumps(again)}\n}}')
    assert trace.meta.rank == 3
    assert trace.meta.backend == "nccl"
    assert trace.groups["ranks"].to_list() == [[0, 1]]


def test_malformed_metadata_costs_no_event(tmp_path):
    text = (
        builder(5).text().replace('"host_name"', '"INFO": ["C:\\quux", "said "no""], "host_name"')
    )
    trace = read(tmp_path, text)
    assert trace.events.height == 5
    assert trace.meta.rank == 0
    assert "damaged-metadata" in slugs(trace)


def test_nested_lists_of_objects_are_no_events(tmp_path):
    inner = [{"name": f"n{number}", "ph": "X"} for number in range(200)]
    made = TraceBuilder()
    for number in range(300):
        made.op("aten::mm", number * 10, 5, nested=inner)
    trace = read(tmp_path, made.text())
    assert trace.events.height == 300
    assert slugs(trace) == {}
    assert arguments(trace, 150)["nested"] == inner


@pytest.mark.parametrize(
    ("content", "slug", "words"),
    [
        (b"", "empty-file", "empty"),
        (b"  \n", "empty-file", "empty"),
        (b"hello", "not-a-trace", "no JSON object"),
        (b"[]", "not-a-trace", "empty list"),
        (b"[1, 2]", "not-a-trace", "list of something"),
        (b"{}", "not-a-trace", "without `traceEvents`"),
        (b'{"a": 1, "b": 2}', "not-a-trace", "`a`, `b`"),
        (b'{"schema": "1.1.1", "pid": 1, "nodes": []}', "not-a-trace", "host trace"),
        (b'{"segments": [], "device_traces": []}', "not-a-trace", "memory snapshot"),
        (b'{"format": "traceloom-report", "version": 1}', "not-a-trace", "report"),
        (b"\x80\x04\x95abc", "not-a-trace", "pickle"),
        (b"PK\x03\x04abc", "not-a-trace", "zip"),
        (b"\x5e\x12\x10\n\x06schema\xea\x01\x051.0.1", "not-a-trace", "Chakra"),
        (b"<html></html>", "not-a-trace", "HTML"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path, content, slug, words):
    with pytest.raises(InputError) as caught:
        read(tmp_path, content)
    assert caught.value.slug == slug
    assert words in str(caught.value)
    assert "trace.json" in str(caught.value)


def test_a_gzip_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("traceloom.formats.text_stream._TraceFile.BOMB_BYTES", 1 << 24)
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * (20 << 20), 9)
    with pytest.raises(InputError) as caught:
        read(tmp_path, bomb)
    assert caught.value.slug == "gzip-bomb"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError) as caught:
        read_kineto(tmp_path / "none.json")
    assert caught.value.slug == "unreadable"


def test_the_content_decides_not_the_ending(tmp_path):
    packed = gzip.compress(builder(3).text().encode())
    assert read(tmp_path, packed, "trace.json").events.height == 3
    assert read(tmp_path, builder(3).text(), "trace.json.gz").events.height == 3


@pytest.mark.parametrize("arguments", ["", ', "args": null', ', "args": {}', ', "args": [1]'])
@pytest.mark.parametrize("category", ["gpu_memcpy", "gpu_memset", "cuda_sync", "kernel", "cpu_op"])
def test_an_event_without_usable_arguments_is_kept(tmp_path, category, arguments):
    event = f'{{"ph": "X", "cat": "{category}", "name": "x", "pid": 0, "tid": 7, "ts": 1, "dur": 2{arguments}}}'
    trace = read(tmp_path, f'{{"traceEvents": [{event}]}}')
    assert trace.events.height == 1
    assert slugs(trace).get("odd-values", 0) == ("[" in arguments)


@pytest.mark.parametrize(
    ("category", "key"), [("gpu_memcpy", "bytes"), ("cuda_sync", "wait_on_stream")]
)
def test_an_odd_value_among_the_rare_arguments_is_counted_too(tmp_path, category, key):
    event = f'{{"ph": "X", "cat": "{category}", "name": "x", "pid": 0, "tid": 7, "ts": 1, "dur": 2, "args": {{"{key}": {{}}}}}}'
    assert slugs(read(tmp_path, f'{{"traceEvents": [{event}]}}'))["odd-values"] == 1


def test_a_name_that_looks_like_the_end_of_an_event_moves_no_event(tmp_path):
    made = TraceBuilder().op("}, {", 0, 5, shapes=[[1, 3]]).op("aten::mm", 10, 5, shapes=[[2, 3]])
    trace = read(tmp_path, made.text())
    assert [arguments(trace, row)["Input Dims"] for row in range(2)] == [[[1, 3]], [[2, 3]]]
    spread = made.text().replace("},\n", "}" + "\n" * 200 + ",")
    trace = read(tmp_path, spread)
    assert [arguments(trace, row)["Input Dims"] for row in range(2)] == [[[1, 3]], [[2, 3]]]
