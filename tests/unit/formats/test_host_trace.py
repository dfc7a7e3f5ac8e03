"""Host traces of every schema: what is read, what is kept of damaged ones, what is refused."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from traceloom.errors import InputError
from traceloom.formats.host_trace import read_host_trace
from traceloom.testing import HostTraceBuilder, TraceBuilder
from traceloom.testing.host_trace_builder import HOST_SCHEMAS
from traceloom.trace.trace import HOST_OPS, HostTrace

TENSOR = [5, 6, 0, 64, 4, "cuda:0"]


def builder(schema: str = HOST_SCHEMAS[-1], count: int = 20) -> HostTraceBuilder:
    made = HostTraceBuilder(schema, process=77)
    outer = made.op("step", scope=7)
    for number in range(count):
        made.op(
            f"aten::op{number}",
            parent=outer,
            thread=1 + number % 2,
            sequence=number,
            forward_thread=number % 2,
            schema=f"aten::op{number}(Tensor self) -> Tensor",
            inputs=[(TENSOR, [8, 8], "Tensor(float)"), ([1, 2], [[], []], "GenericList[Int,Int]")],
            outputs=[(TENSOR, [8, 8], "Tensor(float)")],
            attributes=[("pg_name", "0"), ("in_msg_nelems", 64)] if number == 3 else [],
        )
    return made


def read(tmp_path: Path, content: str | bytes, name: str = "host.json") -> HostTrace:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    host = read_host_trace(path)
    assert host.ops.schema == HOST_OPS
    assert host.ops["id"].is_sorted()
    return host


def slugs(host: HostTrace) -> dict[str, int]:
    return {notice.slug: notice.count for notice in host.notices}


def row(host: HostTrace, name: str) -> dict[str, Any]:
    found = [one for one in host.ops.to_dicts() if one["name"] == name]
    assert len(found) == 1
    return found[0]


# -- schemas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", HOST_SCHEMAS)
def test_every_schema_gives_the_same_columns(tmp_path, schema):
    host = read(tmp_path, builder(schema).text())
    assert slugs(host) == {}
    assert (host.schema, host.process, host.start_ms, host.finish_ms) == (schema, 77, 1000, 2000)
    assert host.roots().sum() == 3
    op = row(host, "aten::op3")
    outer = row(host, "step")
    assert op["parent"] == outer["id"]
    assert (op["sequence"], op["thread"], op["forward_thread"], op["scope"]) == (3, 2, 1, 0)
    assert json.loads(op["inputs"]) == [TENSOR, [1, 2]]
    assert json.loads(op["input_shapes"]) == [[8, 8], [[], []]]
    assert json.loads(op["input_types"]) == ["Tensor(float)", "GenericList[Int,Int]"]
    assert json.loads(op["output_shapes"]) == [[8, 8]]
    if schema == "1.0.0":
        assert op["record_function_id"] is None
        assert op["schema"] is None
    else:
        assert op["record_function_id"] == 5
        assert op["schema"] == "aten::op3(Tensor self) -> Tensor"


@pytest.mark.parametrize("schema", HOST_SCHEMAS)
def test_what_is_no_column_is_kept_as_json(tmp_path, schema):
    host = read(tmp_path, builder(schema).text())
    kept = row(host, "aten::op3")["attributes"]
    if schema in {"1.0.0", "1.0.1"}:
        assert kept is None
        return
    kept = json.loads(kept)
    assert (kept["pg_name"], kept["in_msg_nelems"]) == ("0", 64)
    assert ("kernel_backend" in kept) == (schema >= "1.0.4")
    if schema.startswith("1.1.1"):
        assert kept["input_strides"] == [[8, 1], [[], []]]
        assert kept["tensor_range"] == ""


def test_numbers_that_say_nothing_are_null(tmp_path):
    made = HostTraceBuilder()
    made.op("plain", record_id=0)
    found = row(read(tmp_path, made.text()), "plain")
    for column in ("record_function_id", "sequence", "forward_parent", "forward_thread", "schema"):
        assert found[column] is None, column
    root = row(read(tmp_path, made.text()), "[pytorch|profiler|execution_trace|process]")
    assert (root["parent"], root["thread"]) == (None, None)


@pytest.mark.parametrize("schema", HOST_SCHEMAS)
def test_keys_and_attributes_may_stand_in_any_order(tmp_path, schema):
    made = builder(schema)
    expected = read(tmp_path, made.text())
    document = json.loads(made.text())
    shuffle = random.Random(1)
    document["nodes"] = [_shuffled(node, shuffle) for node in document["nodes"]]
    for text in (
        json.dumps(document),
        json.dumps(document, indent=4),
        json.dumps(document, separators=(",", ":")),
    ):
        host = read(tmp_path, text)
        texts = [name for name in HOST_OPS if "put" in name or name == "attributes"]
        assert host.ops.drop(texts).equals(expected.ops.drop(texts))
        for name in texts:
            for one, other in zip(host.ops[name], expected.ops[name], strict=True):
                assert (one and json.loads(one)) == (other and json.loads(other))
    alike = read(tmp_path, json.dumps(document, sort_keys=True))
    assert alike.finish_ms == 2000
    assert alike.schema == schema


def _shuffled(value: Any, shuffle: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        shuffle.shuffle(keys)
        return {
            key: shuffle.sample(value[key], len(value[key])) if key == "attrs" else value[key]
            for key in keys
        }
    return value


def test_unknown_keys_of_nodes_are_kept(tmp_path):
    made = builder()
    nodes = made.nodes()
    nodes[5] = nodes[5].replace('{"id"', '{"novelty": {"a": [1, 2]}, "id"', 1)
    host = read(tmp_path, made.text(nodes))
    assert slugs(host) == {}
    kept = [json.loads(text) for text in host.ops["attributes"] if text and "novelty" in text]
    assert [one["novelty"] for one in kept] == [{"a": [1, 2]}]
    assert host.ops.height == len(nodes)


def test_compressed_and_large_files_read_the_same(tmp_path):
    made = builder(count=6000)
    text = made.text()
    assert len(text) > 3 << 20  # several slices
    plain = read(tmp_path, text)
    packed = read(tmp_path, gzip.compress(text.encode(), 1), "host.json.gz")
    assert plain.ops.equals(packed.ops)
    assert plain.ops.height == 6004
    assert slugs(plain) == {}


# -- process groups ---------------------------------------------------------------------------------------------------


def group(name: str, ranks: Any, size: int) -> dict[str, Any]:
    entry = {"pg_name": name, "pg_desc": "all", "backend_config": "cuda:nccl", "ranks": ranks}
    return entry | {"group_size": size, "group_count": 2}


def test_an_empty_list_of_ranks_means_the_whole_world(tmp_path):
    made = HostTraceBuilder()
    made.groups([group("0", [], 4), group("1", [3, 1], 2)])
    made.groups([group("0", [], 4), group("2", [0], 1)])
    host = read(tmp_path, made.text())
    assert host.groups.select("group", "size", "ranks").rows() == [
        ("0", 4, [0, 1, 2, 3]),
        ("1", 2, [1, 3]),
        ("2", 1, [0]),
    ]


def test_groups_before_the_cut_of_their_list_are_kept(tmp_path):
    made = HostTraceBuilder()
    text = json.dumps([group(str(number), [number], 1) for number in range(5)])
    made.op("## process_group:init ##", inputs=[(text[:-60], [], "String")])
    host = read(tmp_path, made.text())
    assert host.groups["group"].to_list() == ["0", "1", "2", "3"]
    assert slugs(host) == {"damaged-groups": 1}


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schema", ["1.0.1", HOST_SCHEMAS[-1]])
def test_a_file_cut_anywhere_keeps_every_whole_node(tmp_path, schema):
    made = builder(schema, count=2)
    text, nodes = made.text(), made.nodes()
    ends, at = [], 0
    for node in nodes:
        at = text.index(node, at) + len(node)
        ends.append(at)
    first = text.index('"nodes"')
    for cut in range(first + 12, len(text.rstrip()) - 1, 11):
        whole = sum(end <= cut for end in ends)
        if not whole:
            with pytest.raises(InputError) as refused:
                read(tmp_path, text[:cut])
            assert refused.value.slug == "empty-host-trace"
            continue
        host = read(tmp_path, text[:cut])
        assert host.ops.height == whole, cut
        closed = text[:cut].rstrip().endswith("]") and whole == len(nodes)
        assert ("cut-file" in slugs(host)) or closed or cut > ends[-1] + 4, cut


def test_a_cut_gzip_file_keeps_what_can_be_decompressed(tmp_path):
    packed = gzip.compress(builder(count=400).text().encode(), 1)
    host = read(tmp_path, packed[: len(packed) // 2], "host.json.gz")
    assert 50 < host.ops.height < 404
    assert {"cut-gzip", "cut-file"} <= set(slugs(host))


@pytest.mark.parametrize("schema", ["1.0.1", HOST_SCHEMAS[-1]])
@pytest.mark.parametrize(
    ("raw", "meant"),
    [
        ('say "hi"', 'say "hi"'),
        ("C:\\data", "C:\\data"),
        ("two\nlines", "two\nlines"),
        ('a "b", c', 'a "b", c'),
        ("tab\there", "tab\there"),
    ],
)
def test_names_that_were_not_escaped_are_repaired(tmp_path, schema, raw, meant):
    made = builder(schema)
    nodes = made.nodes()
    nodes[7] = nodes[7].replace('"name": "aten::', f'"name": "{raw}', 1)
    nodes[9] = nodes[9].replace('"name": "aten::', f'"name": "{raw}', 1)
    host = read(tmp_path, made.text(nodes))
    assert host.ops.height == len(nodes)
    assert slugs(host) == {"repaired-events": 2}
    assert sum(name.startswith(meant) for name in host.ops["name"]) == 2
    said = next(notice for notice in host.notices if notice.slug == "repaired-events")
    assert "2 nodes" in said.message
    assert said.where.startswith("byte ")


@pytest.mark.parametrize("word", ["inf", "-inf", "nan", "Infinity", "NaN", "-nan"])
def test_doubles_that_are_no_json_become_strings(tmp_path, word):
    made = builder()
    nodes = made.nodes()
    nodes[6] = nodes[6].replace("[1, 2]", f"[{word}, 2, {word}]", 1)
    host = read(tmp_path, made.text(nodes))
    assert host.ops.height == len(nodes)
    assert slugs(host) == {"repaired-events": 1}
    values = [json.loads(text) for text in host.ops["inputs"] if word in text]
    assert values[0][1] == [word, 2, word]


def test_a_node_beyond_repair_is_counted_and_the_others_kept(tmp_path):
    made = builder()
    nodes = made.nodes()
    nodes[8] = nodes[8][:40] + "]]}{" + nodes[8][60:]
    host = read(tmp_path, made.text(nodes))
    assert host.ops.height == len(nodes) - 1
    assert slugs(host) == {"lost-events": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            '"name": "seq_id", "type": "int64", "value": 4',
            '"name": "seq_id", "type": "int64", "value": "4"',
        ),
        (
            '"name": "tid", "type": "uint64", "value": 1',
            '"name": "tid", "type": "uint64", "value": {}',
        ),
        (
            '"name": "fw_tid", "type": "uint64", "value": 1',
            '"name": "fw_tid", "type": "uint64", "value": [1]',
        ),
        ('"id": 9', '"id": "9"'),
        ('"ctrl_deps": 3', '"ctrl_deps": "3"'),
        ('"name": "aten::op4"', '"name": 4'),
    ],
)
def test_values_of_wrong_types_are_counted_and_nothing_is_lost(tmp_path, old, new):
    made = builder()
    text = made.text()
    assert old in text
    host = read(tmp_path, text.replace(old, new, 1))
    assert host.ops.height == 24
    assert slugs(host) == {"odd-values": 1}


def test_minus_one_written_as_unsigned_is_minus_one(tmp_path):
    text = (
        builder()
        .text()
        .replace(
            '"seq_id", "type": "int64", "value": 4', f'"seq_id", "type": "", "value": {2**64 - 1}'
        )
    )
    host = read(tmp_path, text)
    assert row(host, "aten::op4")["sequence"] is None


def test_a_list_of_dependencies_is_understood(tmp_path):
    text = builder().text()
    found = read(tmp_path, text.replace('"ctrl_deps": 3', '"ctrl_deps": [3]'))
    assert found.ops["parent"].equals(read(tmp_path, text).ops["parent"])


def test_equal_ids_are_said(tmp_path):
    made = builder()
    nodes = made.nodes()
    host = read(tmp_path, made.text([*nodes, nodes[4]]))
    assert host.ops.height == len(nodes) + 1
    assert slugs(host) == {"duplicate-host-ids": 1}


@pytest.mark.parametrize("bad", ["null", "3", "[]", '"text"', "{}"])
def test_entries_that_are_no_nodes_are_counted(tmp_path, bad):
    made = builder()
    nodes = made.nodes()
    host = read(tmp_path, made.text([*nodes[:5], bad, *nodes[5:]]))
    assert host.ops.height == len(nodes)
    assert slugs(host) == {"lost-events": 1}


def test_a_damaged_envelope_does_not_lose_the_nodes(tmp_path):
    text = (
        builder()
        .text()
        .replace('"pid": 77', '"pid": 77, "host": "a"b"')
        .replace('"finish_ts": 2000', '"finish_ts": ')
    )
    host = read(tmp_path, text)
    assert host.ops.height == 24
    assert host.process == 77
    assert host.finish_ms is None
    assert "damaged-metadata" in slugs(host)


def test_parents_that_go_round_in_circles_do_no_harm(tmp_path):
    document = json.loads(builder().text())
    for node in document["nodes"]:
        node["ctrl_deps"] = 24 - node["id"]
    assert read(tmp_path, json.dumps(document)).ops.height == 24


# -- what is no host trace --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kineto", [TraceBuilder().op("a", 0, 1).text(), '[{"ph": "X", "name": "a", "ts": 1}]']
)
def test_a_kineto_trace_is_said_to_be_swapped(tmp_path, kineto):
    with pytest.raises(InputError, match="swapped") as refused:
        read(tmp_path, kineto)
    assert refused.value.slug == "swapped-traces"


@pytest.mark.parametrize(
    ("content", "slug"),
    [
        (b"", "empty-file"),
        (b"   \n", "empty-file"),
        (b"{}", "not-a-host-trace"),
        (b'{"workload_graph": [], "ngpus": 4}', "not-a-host-trace"),
        (b'{"nodes": [{"id": 1}, {"id": 2}], "edges": []}', "not-a-host-trace"),
        (b'{"schema": "1.0.1", "nodes": []}', "empty-host-trace"),
        (b'{"schema": "1.0.1", "nodes": [1, 2]}', "empty-host-trace"),
        (b"[1, 2, 3]", "not-a-host-trace"),
        (b"PK\x03\x04....", "not-a-trace"),
        (b"\x80\x04K\x01.", "not-a-trace"),
        (b"hello", "not-a-trace"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(tmp_path, content, slug):
    with pytest.raises(InputError) as refused:
        read(tmp_path, content)
    assert refused.value.slug == slug
    assert refused.value.exit_code == 3
    assert "\n" not in str(refused.value)
    assert "Kineto" not in str(refused.value)


def test_the_reader_of_kineto_traces_says_what_a_host_trace_is(tmp_path):
    from traceloom.formats import read_kineto

    path = tmp_path / "host.json"
    path.write_text(builder().text())
    with pytest.raises(InputError, match="host trace"):
        read_kineto(path)


# -- real files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schema", "nodes", "with_ids", "communication"),
    [
        ("host/resnet_1gpu_1.0.3", "1.0.3-chakra.0.0.4", 14_391, 14_388, 27),
        ("host/resnet_2gpu_1.1.0", "1.1.0-chakra.0.0.4", 14_392, 14_389, 27),
        ("host/small_1.0.2", "1.0.2-chakra.0.0.4", 263, 261, 20),
        ("pairs/linear.host", "1.0.1", 931, 928, 0),
        ("pairs/simple_add.host", "1.0.1", 38, 36, 0),
        ("pairs/mismatched_resnet.host", "1.1.0-chakra.0.0.4", 14_392, 14_389, None),
        ("multirank/dlrm_rank0.host", "1.0.1", 1_675, 1_672, None),
    ],
)
def test_public_host_traces_are_read_whole(
    shared_data, name, schema, nodes, with_ids, communication
):
    host = read_host_trace(shared_data / f"{name}.json.gz")
    assert (host.schema, host.ops.height) == (schema, nodes)
    assert host.ops["record_function_id"].drop_nulls().n_unique() == with_ids
    assert host.ops["id"].n_unique() == nodes
    assert host.ops["inputs"].null_count() == 0
    if communication is not None:
        assert (host.ops["name"] == "record_param_comms").sum() == communication
    assert host.notices == ()


def test_ranks_of_a_job_have_their_own_processes(shared_data):
    hosts = [
        read_host_trace(shared_data / f"multirank/dlrm_rank{rank}.host.json.gz")
        for rank in range(8)
    ]
    assert [host.process for host in hosts] == list(range(59811, 59819))
    assert [host.rank for host in hosts] == list(range(8))
