"""Well-formed files of strangers with values that no writer should write: unknown where they say nothing, never an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from traceloom.errors import InputError
from traceloom.formats import read_kineto
from traceloom.formats.host_trace import read_host_trace
from traceloom.testing import HostTraceBuilder, TraceBuilder
from traceloom.trace.trace import Trace

UNIX_NS = 1_700_000_000 * 10**9
HALF_A_PAIR = "\ud800"


def event(**more: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 1,
        "tid": 1,
        "ts": 5,
        "dur": 2,
        "args": {},
    } | more


def read(
    path: Path,
    *events: dict[str, Any] | str,
    capture: dict[str, Any] | None = None,
    **metadata: Any,
) -> Trace:
    """The trace of a file with these entries (JSON text, or what becomes it) and this metadata before them."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in events or (event(),)]
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)}, " for key, value in metadata.items())
    path.write_text(f'{{{head}"traceEvents": [{", ".join(texts)}]}}')
    trace = read_kineto(path, capture=capture)
    trace.check()
    return trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def slugs(trace: Trace) -> dict[str, int]:
    return {notice.slug: notice.count for notice in trace.notices if notice.slug != "no-steps"}


# -- numbers that no column holds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1e309", "-1e400", "123e4567"])
@pytest.mark.parametrize("beside", ["[]", "{}", "[[1], [2]]"])
def test_a_number_beyond_doubles_beside_a_value_of_another_type_costs_nothing(path, number, beside):
    wild = f'{{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1,"dur":1,"args":{{"External id":{number}}}}}'
    odd = f'{{"ph":"X","cat":"cpu_op","name":"b","pid":1,"tid":1,"ts":3,"dur":1,"args":{{"Sequence number":{beside}}}}}'
    trace = read(path, odd, wild, event(name="c"), odd.replace('"b"', '"d"'))
    assert sorted(trace.events["name"].to_list()) == ["a", "b", "c", "d"]
    assert trace.events["external_id"].null_count() == 4
    assert slugs(trace) == {"odd-values": 2}


@pytest.mark.sampled(30)
@pytest.mark.parametrize("base", [UNIX_NS, 2**61, 3 * 2**60 - 1, 3 * 2**60, 2**62, 2**63, -1])
@pytest.mark.parametrize("start", [0, 2.3e15, 4.6e15, -4.6e15])
@pytest.mark.parametrize("duration", [1.1e15, 1.2e15, 4.6e15, -1.1e15])
def test_no_sum_of_base_start_and_duration_leaves_the_column(path, base, start, duration):
    trace = read(path, event(ts=start, dur=duration), baseTimeNanoseconds=base)
    row = trace.events.row(0, named=True)
    added = base if 0 <= base < 3 * 2**60 else 0
    assert trace.meta.base_ns == added
    assert row["start_ns"] == int(start) * 1000 + added
    assert row["duration_ns"] == (int(duration) * 1000 if abs(duration) < 2**60 / 1000 else 0)
    assert trace.end_ns == row["start_ns"] + max(row["duration_ns"], 0)
    assert ("missing-duration" in slugs(trace)) == (abs(duration) > 2**60 / 1000)


@pytest.mark.parametrize(
    ("key", "value", "column"),
    [
        ("Root", 2**31, "peer"),
        ("Root", 2**63, "peer"),
        ("Root", "2147483648", "peer"),
        ("Root", -3, "peer"),
        ("Group size", 2**31, "group_size"),
        ("Group size", [2], "group_size"),
        ("Group size", "two", "group_size"),
        ("In msg nelems", 2**62, "in_bytes"),
        ("In msg nelems", -1, "in_bytes"),
        ("Out msg nelems", {}, "out_bytes"),
        ("dtype", "Float128x", "in_bytes"),
        ("dtype", 7, "out_bytes"),
        ("Seq", 1e30, "sequence"),
    ],
)
def test_a_collective_with_a_number_that_it_cannot_have_lacks_that_alone(path, key, value, column):
    args = {
        "Collective name": "broadcast",
        "Root": 1,
        "Group size": 4,
        "In msg nelems": 8,
        "Out msg nelems": 8,
        "dtype": "Float",
        "Seq": 5,
    }
    good = {"peer": 1, "group_size": 4, "in_bytes": 32, "out_bytes": 32, "sequence": 5}
    trace = read(path, event(args=args), event(args=args | {key: value}, ts=9))
    whole, odd = (trace.collectives.row(at, named=True) for at in (0, 1))
    assert {name: whole[name] for name in good} == good
    assert odd[column] is None
    assert odd["kind"] == "broadcast"


@pytest.mark.parametrize(
    ("shapes", "elements", "size"),
    [
        ([[2, 3]], 6, 24),
        ([[2, 3], [4]], 10, 40),
        ([[2**31, 2**31]], None, None),
        ([[2**29, 2**29]], 2**58, 2**60),
        ([[2**29, 2**29], [1]], None, None),
        ([[-(2**70)]], None, None),
        ([[-1, 5]], None, None),
        ([[0, 5]], 0, 0),
        ([], None, None),
        ([[]], None, None),
        ("[[2, 3]]", 6, 24),
        ([["x"]], None, None),
        ([[1.5]], None, None),
    ],
)
def test_annotated_collectives_have_the_elements_that_their_shapes_say_or_none(
    path, shapes, elements, size
):
    args = {"Input Dims": shapes, "Input type": ["float"] * 2}
    trace = read(path, event(cat="user_annotation", name="nccl:all_reduce", args=args))
    row = trace.collectives.row(0, named=True)
    assert (row["kind"], row["in_elements"], row["in_bytes"]) == ("all_reduce", elements, size)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "text", ["[[1, NaN]]", "[[1, 2", "[1,", "[", "[N/A]", "[[2, 3]] and more", "[" * 5000]
)
@pytest.mark.parametrize("key", ["Input Dims", "Input type", "Input Strides", "Concrete Inputs"])
def test_a_list_in_quotes_that_is_none_is_absent_and_told(path, key, text):
    args = {"Input Dims": "[[2, 3]]", "Input type": '["float"]', key: text}
    trace = read(path, event(cat="user_annotation", name="nccl:all_reduce", args=args))
    assert slugs(trace) == {"odd-values": 1}
    row = trace.tensors.row(0, named=True)
    column = {"Input Dims": "shapes", "Input type": "types", "Input Strides": "strides"}.get(
        key, "concrete"
    )
    assert row[column] is None
    whole = column not in ("shapes", "types")
    assert trace.collectives["in_bytes"].to_list() == [24 if whole else None]


@pytest.mark.parametrize("peer", [2**31, 2**62, "x", None, [1]])
def test_a_peer_in_a_capture_that_is_no_rank_is_unknown(path, peer):
    calls = {
        "group": [0],
        "groups": ["0"],
        "kind": [0],
        "kinds": ["send"],
        "type": [0],
        "types": ["Float"],
        "sequence": [9],
        "bytes_in": [40],
        "bytes_out": [2**70],
        "peer": [peer],
        "start_ns": [None],
    }
    mark = event(cat="user_annotation", name="nccl:send")
    row = read(path, mark, capture={"collectives": calls}).collectives.row(0, named=True)
    assert (row["sequence"], row["in_bytes"], row["out_bytes"], row["peer"]) == (9, 40, None, None)


# -- metadata --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "kept"),
    [
        ([0, 1], [0, 1]),
        ("[0, 1]", [0, 1]),
        ([2**31, 1], None),
        ([-1, 0], None),
        ([True, False], None),
        ([10**40, 1], None),
        ([0.0, 1.0], None),
        (["0", "1"], None),
        ([], []),
        (None, None),
        (7, None),
        ("{}", None),
        ("[0, 1", None),
        ({"0": 0}, None),
        ([[0], [1]], None),
    ],
)
def test_members_of_groups_are_ranks_or_unknown(path, ranks, kept):
    group = {"pg_name": "0", "pg_desc": 5, "backend_config": [], "pg_size": 2, "ranks": ranks}
    row = read(path, distributedInfo={"rank": 0, "pg_config": [group]}).groups.row(0, named=True)
    assert row == {
        "group": "0",
        "description": None,
        "backend": None,
        "size": 2,
        "ranks": kept or None,
    }


@pytest.mark.parametrize("entry", [None, 5, "x", [], {}, {"pg_name": None}, [{"pg_name": "0"}]])
def test_what_is_no_group_is_left_out(path, entry):
    good = {"pg_name": "1", "pg_size": 1, "ranks": [3]}
    trace = read(path, distributedInfo={"rank": 0, "pg_config": [entry, good]})
    assert trace.groups.select("group", "ranks").rows() == [("1", [3])]
    assert read(path, distributedInfo={"rank": 0, "pg_config": entry}).groups.height == (
        isinstance(entry, list) and len(entry)
    )


@pytest.mark.parametrize("deep", [600, 900, 1500, 50_000])
@pytest.mark.parametrize("where", ["before", "behind", "in a text", "in arguments"])
def test_values_that_nest_without_end_end_nothing(path, deep, where):
    nest = "[" * deep + "]" * deep
    texts = {
        "before": f'{{"x": {nest}, "traceEvents": [%s], "traceName": "t"}}',
        "behind": f'{{"traceEvents": [%s], "x": {nest}, "traceName": "t"}}',
        "in a text": f'{{"distributedInfo": {{"rank": 0, "pg_config": "{nest}"}}, "traceEvents": [%s]}}',
        "in arguments": f'{{"traceEvents": [%s, {json.dumps(event(name="b"))[:-2]}"x": {nest}}}}}, '
        f"{json.dumps(event(name='c'))}]}}",
    }
    path.write_text(texts[where] % json.dumps(event()))
    trace = read_kineto(path)
    trace.check()
    names = trace.events["name"].to_list()
    assert names[0] == "aten::mm"
    if where == "in arguments":  # the one event may be lost, and is counted then
        assert set(names) in ({"aten::mm", "b", "c"}, {"aten::mm", "c"})
        assert slugs(trace).get("lost-events", 0) == 3 - len(names)


@pytest.mark.parametrize(
    "key", ["host_name", "traceName", "schemaVersion", "trace_id", "cuda_runtime_version", "x"]
)
def test_halves_of_surrogate_pairs_in_metadata_are_replaced_and_told(path, key):
    trace = read(path, **{key: f"a{HALF_A_PAIR}b"})
    assert slugs(trace) == {"replaced-text": 1}
    meta = trace.meta
    texts = [meta.host, meta.schema_version, *meta.job.values(), *meta.versions.values()]
    assert [text for text in texts if text is not None] == ([] if key == "x" else ["a\ufffdb"])


@pytest.mark.parametrize(
    ("listed", "devices"),
    [
        ([{"id": 0, "name": "H100"}], [(0, "H100", None, None)]),
        ([{"id": "1", "name": " ", "totalGlobalMem": "80", "numSms": 132}], [(1, None, 80, 132)]),
        ([{"id": 0, "name": 5, "totalGlobalMem": 2**64, "numSms": 2**31}], [(0, None, None, None)]),
        ([{"id": 0, "numSms": -1}, {"id": 0, "numSms": 7}], [(0, None, None, 7)]),
        ([{"id": 2**31}, {"id": None}, {"id": [0]}, {}, 5, None], []),
        ({"id": 0}, []),
        ("x", []),
        (None, []),
    ],
)
def test_devices_are_those_with_a_number(path, listed, devices):
    trace = read(path, deviceProperties=listed)
    assert (
        trace.devices.select("device", "name", "memory_bytes", "multiprocessors").rows() == devices
    )
    assert not trace.devices["used"].any()


@pytest.mark.parametrize(
    ("info", "rank"),
    [
        ({"rank": 3}, 3),
        ({"rank": "3"}, 3),
        ({"rank": 3.0}, 3),
        ({"rank": -1}, None),
        ({"rank": 2**31}, None),
        ({"rank": True}, None),
        ({"rank": [3]}, None),
        ({}, None),
        ([], None),
        ("rank 3", None),
        (None, None),
    ],
)
def test_a_rank_is_a_whole_number(path, info, rank):
    assert read(path, distributedInfo=info).rank == rank


# -- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry", ["5", "null", '"x"', "[]", "[1, 2]", "true", "{}", '{"a": 1}', '{"ph": "X"}']
)
def test_entries_that_are_no_events_cost_no_neighbour(path, entry):
    trace = read(path, event(name="a"), entry, event(name="b", ts=9))
    assert [name for name in trace.events["name"].to_list() if name] == ["a", "b"]


@pytest.mark.parametrize(
    ("address", "kept"),
    [
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (0, 0),
        ("140000000000", 140_000_000_000),
        (2**64, 0),
        ("x", 0),
        ([], 0),
    ],
)
def test_addresses_have_sixty_four_bits(path, address, kept):
    args = {"Bytes": 64, "Addr": address, "Device Type": 1, "Device Id": 0, "Total Allocated": 64}
    trace = read(path, event(ph="i", name="[memory]", args=args))
    assert trace.allocations.select("address", "bytes", "device_type").rows() == [
        (kept, 64, "cuda")
    ]


@pytest.mark.parametrize(
    ("more", "row"),
    [
        ({"Bytes": "many"}, (0, "cuda", 0)),
        ({"Device Type": 99}, (64, "other", 0)),
        ({"Device Type": -1}, (64, "other", 0)),
        ({"Device Type": 20}, (64, "privateuseone", 0)),
        ({"Device Id": 2**31}, (64, "cuda", None)),
        ({"Device Id": -1}, (64, "cuda", -1)),
        ({"Device Type": 0, "Device Id": -1}, (64, "cpu", -1)),
    ],
)
def test_allocations_with_odd_values_are_kept(path, more, row):
    args = {"Bytes": 64, "Addr": 1, "Device Type": 1, "Device Id": 0} | more
    trace = read(path, event(ph="i", name="[memory]", args=args))
    assert trace.allocations.select("bytes", "device_type", "device").rows() == [row]
    assert ("unknown-device-type" in slugs(trace)) == (row[1] == "other")


@pytest.mark.parametrize(
    ("args", "values"),
    [
        ({"": 1.5}, [("", 1.5)]),
        ({"a": 1, "b": "2", "c": None, "d": [3]}, [("a", 1.0)]),
        ({"a": -1e308}, [("a", -1e308)]),
        ([1], []),
        ({"a": 10**400, "b": 2}, [("b", 2.0)]),
        ("x", []),
        (None, []),
        ({}, []),
        ({"日本": 2**70}, [("日本", float(2**70))]),
    ],
)
def test_counters_have_the_values_that_are_numbers(path, args, values):
    trace = read(path, event(ph="C", name="GPU power", args=args), event(name="a"))
    assert trace.counters.select("key", "value").rows() == values
    assert trace.events["name"].to_list() == ["a"]


def test_an_event_with_the_same_key_twice_has_the_last_value(path):
    twice = '{"ph":"X","cat":"cpu_op","name":"a","name":"b","pid":1,"tid":1,"ts":1,"ts":2,"dur":1,"dur":3,"args":{}}'
    assert read(path, twice).events.select("name", "start_ns", "duration_ns").rows() == [
        ("b", 2000, 3000)
    ]


def test_events_that_all_begin_together_nest_by_their_length(path):
    spans = [event(name=f"{length}", ts=0, dur=length) for length in (3, 1, 5, 2, 4)]
    trace = read(path, *spans)
    assert trace.events["name"].to_list() == ["5", "4", "3", "2", "1"]
    assert trace.events["depth"].to_list() == [0, 1, 2, 3, 4]
    assert trace.lanes["busy_ns"].to_list() == [5000]


def test_a_span_without_duration_stands_in_what_is_open(path):
    trace = read(
        path,
        event(name="outer", ts=0, dur=10),
        event(name="point", ts=4, dur=0),
        event(name="end", ts=10, dur=0),
    )
    assert trace.events.select("name", "parent").rows() == [
        ("outer", None),
        ("point", 0),
        ("end", None),
    ]


def test_each_process_of_a_file_has_its_own_lanes(path):
    trace = read(
        path,
        *(event(pid=process, tid=thread, ts=process) for process in (7, 8) for thread in (1, 2)),
    )
    assert trace.lanes.select("process", "thread").rows() == [
        ("7", "1"),
        ("7", "2"),
        ("8", "1"),
        ("8", "2"),
    ]
    assert trace.events["depth"].max() == 0


def test_thread_names_of_strangers_name_their_lanes_and_no_other(path):
    def named(name: Any, thread: int) -> dict[str, Any]:
        return {
            "ph": "M",
            "name": "thread_name",
            "pid": 1,
            "tid": thread,
            "ts": 0,
            "args": {"name": name},
        }

    names = ["loader", 5, None, [1], "x" * 500, "thread 9 (pt_autograd_3)", "\x1b[31mred"]
    trace = read(
        path,
        *(named(name, 10 + at) for at, name in enumerate(names)),
        *(event(tid=10 + at) for at in range(len(names))),
    )
    shown = dict(trace.lanes.select("thread", "name").rows())
    assert shown["10"] == "loader 10"
    assert shown["11"] == "5 11"
    assert shown["12"] == "thread 12"
    assert shown["15"] == "autograd 15"
    assert all(f"1{at}" in shown[f"1{at}"] for at in range(len(names)))


# -- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "kept", "told"),
    [
        (["1", "2", "3"], [1, 2, 3], False),
        (["5", "7", "70"], [5, 7, 70], False),
        (["2", "1", "3"], [0, 1, 2], True),
        (["1", "1", "2"], [0, 1, 2], True),
        (["9" * 30, "2", "3"], [0, 1, 2], True),
        (["0", str(2**31 - 1)], [0, 1], True),
        ([str(2**31 - 2)], [2**31 - 2], False),
        (["007", "08"], [7, 8], False),
    ],
)
def test_steps_are_numbered_as_the_profiler_says_where_that_can_be(path, numbers, kept, told):
    steps = [
        event(cat="user_annotation", name=f"ProfilerStep#{n}", ts=10 * at, dur=8)
        for at, n in enumerate(numbers)
    ]
    trace = read(path, *steps)
    assert trace.steps["step"].to_list() == kept
    assert ("renumbered-steps" in slugs(trace)) == told
    assert trace.steps["end_ns"].to_list() == [
        *trace.steps["start_ns"].to_list()[1:],
        (10 * len(numbers) - 2) * 1000,
    ]


@pytest.mark.parametrize(
    "name",
    ["ProfilerStep#", "ProfilerStep#x", "ProfilerStep#-1", "ProfilerStep#1.5", "ProfilerStep"],
)
def test_what_only_looks_like_a_step_is_none(path, name):
    trace = read(path, event(cat="user_annotation", name=name))
    assert trace.steps.height == 0
    assert trace.events["step"].null_count() == 1


# -- host traces -----------------------------------------------------------------------------------------------------


def host_groups(tmp_path: Path, text: Any) -> tuple[pl.DataFrame, dict[str, int]]:
    made = HostTraceBuilder()
    made.op("## process_group:init ##", inputs=[(text, [], "String")])
    (tmp_path / "host.json").write_text(made.text())
    host = read_host_trace(tmp_path / "host.json")
    return host.groups, {notice.slug: notice.count for notice in host.notices}


def test_groups_of_host_traces_with_halves_of_surrogate_pairs_are_read(tmp_path):
    groups, told = host_groups(
        tmp_path, json.dumps([{"pg_name": f"a{HALF_A_PAIR}", "group_size": 2, "ranks": [0, 1]}])
    )
    assert groups.select("group", "ranks").rows() == [("a\ufffd", [0, 1])]
    assert told == {}
    groups, told = host_groups(
        tmp_path, json.dumps([{"pg_name": f"a{HALF_A_PAIR}", "ranks": []}, {"pg_name": 1}])[:-3]
    )
    assert groups["group"].to_list() == ["a\ufffd"]
    assert told == {"damaged-groups": 1}


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        ({"pg_name": "0", "ranks": [], "group_size": 3}, ("0", 3, [0, 1, 2])),
        ({"pg_name": 7, "ranks": {"4": 0, "2": 1}, "group_size": 2}, ("7", 2, [2, 4])),
        ({"pg_name": "0", "ranks": {"x": 0}, "group_size": 1}, ("0", 1, None)),
        ({"pg_name": "0", "ranks": [0, -1], "group_size": 2}, ("0", 2, None)),
        ({"pg_name": "0", "ranks": [2**31], "group_size": 2**31}, ("0", None, None)),
        ({"pg_name": "0", "ranks": "0,1", "group_size": "2"}, ("0", 2, None)),
        ({"pg_name": "0", "ranks": [3, 1], "group_size": -2}, ("0", None, [1, 3])),
        ({"pg_name": "0", "ranks": [], "group_size": 2**30}, ("0", 2**30, None)),
    ],
)
def test_groups_of_host_traces_have_what_can_be_said(tmp_path, entry, row):
    groups, told = host_groups(tmp_path, json.dumps([entry, 5, None, {"no": "name"}]))
    assert groups.select("group", "size", "ranks").rows() == [row]
    assert told == {}


@pytest.mark.parametrize("text", ["", "5", "{}", "null", "[" * 5000, 7, None, ["[]"]])
def test_a_list_of_groups_that_is_none_is_told(tmp_path, text):
    groups, told = host_groups(tmp_path, text)
    assert groups.height == 0
    assert told == {"damaged-groups": 1}


def test_a_host_trace_with_metadata_that_nests_without_end_is_read(tmp_path):
    for deep in (600, 5000):
        text = (
            HostTraceBuilder()
            .text()
            .replace('"schema"', f'"x": {"[" * deep + "]" * deep}, "schema"', 1)
        )
        (tmp_path / "host.json").write_text(text)
        host = read_host_trace(tmp_path / "host.json")
        assert host.ops.height == 1
        assert host.schema == HostTraceBuilder().schema


def test_an_empty_file_of_blanks_is_empty(path):
    for text in ("", " ", "\n\n", "\ufeff", "\x00" * 3):
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            read_kineto(path)
        assert caught.value.slug in ("empty-file", "not-a-trace"), repr(text)


def test_the_builder_of_these_tests_writes_what_the_builder_of_traces_writes(path):
    trace = read(path, event(args={"External id": 1}), schemaVersion=1)
    built = TraceBuilder(rank=None, device_name=None).op("aten::mm", 5, 2).build()
    assert trace.events.equals(built.events)
