"""Chakra messages as JSON: valid, exact, read in pieces; and what other tools write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson

from traceloom.errors import InputError
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, Node, NodeType
from traceloom.workload.chakra.convert import find_rank_files, open_messages, write_messages

METADATA = GlobalMetadata(version="1.0.0")


def some_nodes(count: int) -> list[Node]:
    out = []
    for number in range(count):
        node = Node(
            id=number,
            name=f'n "{number}" \\ ∑',
            type=NodeType.COMP_NODE,
            data_deps=range(number % 4),
        )
        node.attr.add(name="is_cpu_op", bool_val=bool(number % 2))
        node.attr.add(name="rf_id", int64_val=-number)
        out.append(node)
    return out


def read(path: Path, *, strict: bool = False) -> tuple[GlobalMetadata, list[Node], list[str]]:
    with open_messages(path, strict=strict) as reader:
        found = list(reader)
    return reader.metadata, found, [notice.slug for notice in reader.notices]


def refused(path: Path, *, strict: bool = False) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, strict=strict)
    assert str(path) in caught.value.where
    assert "\n" not in caught.value.message
    return caught.value


def test_json_is_one_valid_object(tmp_path: Path) -> None:
    write_messages(tmp_path / "a.json", METADATA, some_nodes(3))
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["metadata"] == {"version": "1.0.0"}
    assert document["nodes"][1] == {
        "id": 1,
        "name": 'n "1" \\ ∑',
        "type": "COMP_NODE",
        "data_deps": [0],
        "attr": [{"name": "is_cpu_op", "bool_val": True}, {"name": "rf_id", "int64_val": -1}],
    }


def test_json_lines_are_the_metadata_and_one_node_per_line(tmp_path: Path) -> None:
    write_messages(tmp_path / "a.jsonl", METADATA, some_nodes(3))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines[0] == {"version": "1.0.0"}
    assert [line.get("id", 0) for line in lines[1:]] == [0, 1, 2]


def test_numbers_that_others_would_round_are_texts(tmp_path: Path) -> None:
    node = Node(id=2**53 + 1, data_deps=[2**53, 2**64 - 1])
    write_messages(tmp_path / "a.jsonl", METADATA, [node])
    line = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[1])
    assert line == {
        "id": "9007199254740993",
        "data_deps": [9007199254740992, "18446744073709551615"],
    }
    assert read(tmp_path / "a.jsonl")[1] == [node]


@pytest.mark.parametrize("indent", [None, 2])
def test_any_layout_of_the_object_is_read(tmp_path: Path, indent: int | None) -> None:
    write_messages(tmp_path / "a.json", METADATA, some_nodes(50))
    document = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "b.json").write_text(
        "\ufeff" + json.dumps(document, indent=indent, ensure_ascii=False), encoding="utf-8"
    )
    assert read(tmp_path / "b.json") == (METADATA, some_nodes(50), [])


def test_nodes_are_read_across_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceloom.system.gzip_stream.GzipStream.PIECE", 7)
    monkeypatch.setattr("traceloom.system.gzip_stream.GzipStream.READ", 7)
    for ending in (".json", ".jsonl"):
        write_messages(tmp_path / f"a{ending}", METADATA, some_nodes(20))
        assert read(tmp_path / f"a{ending}") == (METADATA, some_nodes(20), [])


def test_concatenated_objects_in_camel_case_are_read(tmp_path: Path) -> None:
    """As the jsonizer of the Chakra tools writes them: no array, no commas, 64-bit numbers as texts."""
    metadata = GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="pid", uint64_val=7)
    node = Node(id=9, ctrl_deps=[2**60], start_time_micros=3, type=NodeType.COMM_COLL_NODE)
    node.attr.add(name="sizes").int64_list.values.extend([1, 2**40])
    node.inputs.values = "[1]"
    text = "".join(MessageToJson(message) for message in (metadata, node, Node(id=10)))
    assert '"ctrlDeps"' in text
    (tmp_path / "a.json").write_text(text)
    assert read(tmp_path / "a.json") == (metadata, [node, Node(id=10)], [])


def test_feeder_json_is_read(tmp_path: Path) -> None:
    fed = {
        "workload_name": "w",
        "ngpus": 2,
        "workload_graph": [
            {
                "Id": 1,
                "Name": "c",
                "NodeType": 4,
                "is_cpu_op": 0,
                "runtime": 5,
                "data_deps": [],
                "tensor_size": 8,
                "odd": [1],
            },
            {
                "Id": 2,
                "Name": "r",
                "NodeType": 7,
                "comm_type": "ALL_GATHER",
                "comm_size": 64,
                "data_deps": [1],
            },
        ],
    }
    (tmp_path / "a.json").write_text(json.dumps(fed))
    metadata, (compute, gather), notices = read(tmp_path / "a.json")
    assert notices == []
    assert {a.name: a.string_val for a in metadata.attr} == {
        "schema": "feeder JSON",
        "workload_name": "w",
        "ngpus": "2",
    }
    assert (compute.id, compute.duration_micros, compute.type) == (1, 5, NodeType.COMP_NODE)
    assert {a.name: a.WhichOneof("value") for a in compute.attr} == {
        "is_cpu_op": "bool_val",
        "tensor_size": "uint64_val",
        "odd": "string_val",
    }
    assert {a.name: a.int64_val for a in gather.attr} == {"comm_type": 2, "comm_size": 64}
    assert list(gather.data_deps) == [1]


def test_lines_without_metadata_lose_no_node(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    assert read(tmp_path / "a.jsonl") == (
        GlobalMetadata(),
        [Node(id=1), Node(id=2)],
        ["chakra-no-metadata"],
    )


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
@pytest.mark.parametrize("cut", [*range(5, 90, 3)])
def test_cut_text_gives_the_whole_nodes_and_a_notice(tmp_path: Path, ending: str, cut: int) -> None:
    path = tmp_path / f"a{ending}"
    write_messages(path, METADATA, some_nodes(30))
    path.write_bytes(path.read_bytes()[:-cut])
    _, found, notices = read(path)
    assert found == some_nodes(29)
    assert notices == ["chakra-cut"]
    assert refused(path, strict=True).slug == "chakra-cut"


@pytest.mark.parametrize(
    ("text", "slug", "said"),
    [
        ("", "empty-file", "empty"),
        ("hello", "not-chakra", "neither"),
        ('{"traceEvents": []}', "not-chakra", "traceEvents"),
        ('{"schema": "1.1.1", "pid": 3, "nodes": []}', "not-chakra", "schema"),
        ('{"metadata": {"version": 3}, "nodes": []}', "chakra-json", "expected a text, got 3"),
        ('{"nodes": [{"id": 1}, {"id": -1}]}', "chakra-json", "does not fit"),
        ('{"nodes": [{"id": 18446744073709551616}]}', "chakra-json", "does not fit"),
        ('{"nodes": [{"id": 1.5}]}', "chakra-json", "expected a whole number, got 1.5"),
        ('{"nodes": [{"id": true}]}', "chakra-json", "expected a whole number, got True"),
        ('{"nodes": [{"color": 1}]}', "chakra-json", "`color` is no field"),
        ('{"nodes": [{"data_deps": [1], "dataDeps": [2]}]}', "chakra-json", "twice"),
        ('{"nodes": [{"type": "MAGIC"}]}', "chakra-json", "MAGIC"),
        ('{"nodes": [{"attr": [{"name": "x", "bytes_val": "%%"}]}]}', "chakra-json", "base64"),
        ('{"nodes": [{"attr": [{"name": "x", "bool_val": 1}]}]}', "chakra-json", "true or false"),
        ('{"nodes": [{"name": "\\ud800"}]}', "chakra-json", "does not fit"),
        ('{"nodes": [3]}', "chakra-json", "expected an object"),
        ('{"nodes": [], "metadata": {}}', "chakra-json", "metadata stands before"),
        ('{"nodes": [{"id" 1}]}', "chakra-json", "no JSON"),
        ('{"metadata"', "chakra-cut", "inside a value"),
        ('{"nodes": [' + "[" * 100_000, "chakra-json", "nested"),
        ('{"nodes": [{"id": ' + "1" * 10_000 + "}]}", "chakra-json", ""),
    ],
)
def test_what_is_no_chakra_json_is_refused_in_a_sentence(
    tmp_path: Path, text: str, slug: str, said: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    error = refused(tmp_path / "a.json")
    assert error.slug == slug
    assert said in error.message


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"nodes": [{"name": "\xff\xfe"}]}')
    assert refused(tmp_path / "a.json").slug == "chakra-json"


def test_the_error_says_which_node(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"version": "1"}\n{"id": 1}\n{"id": "x"}\n')
    assert refused(tmp_path / "a.jsonl").where.endswith("a.jsonl, node 1")


def test_a_name_without_ending_is_told_by_content(tmp_path: Path) -> None:
    write_messages(tmp_path / "a.jsonl", METADATA, some_nodes(2))
    write_messages(tmp_path / "b.et.gz", METADATA, some_nodes(2))
    for name in ("a.jsonl", "b.et.gz"):
        (tmp_path / "trace").write_bytes((tmp_path / name).read_bytes())
        assert read(tmp_path / "trace")[1] == some_nodes(2)


def test_files_of_ranks_are_found_by_their_numbers(tmp_path: Path) -> None:
    for name in ("w.10.et", "w.2.et.gz", "w.0.json", "notes.txt", "w.et", "comm_groups.json"):
        (tmp_path / name).touch()
    assert [(rank, path.name) for rank, path in find_rank_files(tmp_path)] == [
        (0, "w.0.json"),
        (2, "w.2.et.gz"),
        (10, "w.10.et"),
    ]
    (tmp_path / "v.2.et").touch()
    with pytest.raises(InputError) as caught:
        find_rank_files(tmp_path)
    assert caught.value.slug == "chakra-mixed"
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        find_rank_files(tmp_path / "empty")
    assert caught.value.slug == "no-traces"
