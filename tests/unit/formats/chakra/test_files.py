"""`.et` files: every message comes back, and what is damaged is said in one sentence, with the byte."""

from __future__ import annotations

import contextlib
import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from traceloom.errors import InputError, OutputError
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, Node, NodeType
from traceloom.formats.chakra.files import EtReader, encode_length, write

METADATA = GlobalMetadata(version="1.0.0")


def nodes(count: int) -> list[Node]:
    return [
        Node(id=n, name=f"node {n}", type=NodeType.COMP_NODE, data_deps=[n - 1] if n else [])
        for n in range(count)
    ]


def read(path: Path, *, strict: bool = False) -> tuple[GlobalMetadata, list[Node], list[str]]:
    with EtReader(path, strict=strict) as reader:
        found = list(reader)
    return reader.metadata, found, [notice.slug for notice in reader.notices]


def refused(path: Path, *, strict: bool = False) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, strict=strict)
    assert caught.value.where == str(path)
    return caught.value


@pytest.mark.parametrize("name", ["a.et", "a.et.gz"])
def test_messages_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert write(path, METADATA, nodes(1000)) == path.stat().st_size
    assert read(path) == (METADATA, nodes(1000), [])
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_gzip_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.et.gz", METADATA, nodes(3))
    (tmp_path / "a.et").write_bytes((tmp_path / "a.et.gz").read_bytes())
    assert read(tmp_path / "a.et")[1] == nodes(3)


def test_gzip_in_several_members_is_read_whole(tmp_path: Path) -> None:
    write(tmp_path / "a.et", METADATA, nodes(500))
    data = (tmp_path / "a.et").read_bytes()
    (tmp_path / "b.et.gz").write_bytes(
        gzip.compress(data[:777]) + gzip.compress(data[777:]) + bytes(100)
    )
    assert read(tmp_path / "b.et.gz") == (METADATA, nodes(500), [])


def test_the_bytes_on_the_wire_are_those_of_the_upstream_schema(tmp_path: Path) -> None:
    """Written by hand from the field numbers: lengths, keys (number << 3 | wire type), values."""
    metadata = (
        bytes.fromhex("0a05")
        + b"1.0.0"
        + bytes.fromhex("1210 0a06")
        + b"schema"
        + bytes.fromhex("ea0105")
        + b"x.y.z"
    )
    deps = bytes.fromhex("2202 ac02 2a03 01ac02")  # ctrl_deps [300], data_deps [1, 300]
    times = bytes.fromhex("3007 3809")  # start_time_micros 7, duration_micros 9
    flag = (
        bytes.fromhex("520e 0a09") + b"is_cpu_op" + bytes.fromhex("d80101")
    )  # bool_val, number 27
    size = bytes.fromhex("520d 0a09") + b"comm_size" + bytes.fromhex("4805")  # int64_val, number 9
    node = (
        bytes.fromhex("0802 1202")
        + b"mm"
        + bytes.fromhex("1804")
        + deps
        + times
        + bytes.fromhex("42030a01 61")
        + flag
        + size
    )
    path = tmp_path / "hand.et"
    path.write_bytes(bytes((len(metadata),)) + metadata + bytes((len(node),)) + node)
    found, (first,), notices = read(path)
    assert notices == []
    assert (found.version, found.attr[0].name, found.attr[0].string_val) == (
        "1.0.0",
        "schema",
        "x.y.z",
    )
    assert (first.id, first.name, first.type) == (2, "mm", NodeType.COMP_NODE)
    assert (list(first.ctrl_deps), list(first.data_deps)) == ([300], [1, 300])
    assert (first.start_time_micros, first.duration_micros, first.inputs.values) == (7, 9, "a")
    assert [(a.name, a.WhichOneof("value")) for a in first.attr] == [
        ("is_cpu_op", "bool_val"),
        ("comm_size", "int64_val"),
    ]
    write(tmp_path / "again.et", found, [first])
    assert (tmp_path / "again.et").read_bytes() == path.read_bytes()


def test_an_empty_message_is_a_node_and_not_the_end(tmp_path: Path) -> None:
    write(tmp_path / "a.et", METADATA, [Node(), Node(id=1)])
    assert read(tmp_path / "a.et")[1] == [Node(), Node(id=1)]


def test_empty_metadata_is_metadata(tmp_path: Path) -> None:
    write(tmp_path / "a.et", GlobalMetadata(), nodes(2))
    assert read(tmp_path / "a.et") == (GlobalMetadata(), nodes(2), [])


def test_unknown_fields_and_types_survive(tmp_path: Path) -> None:
    strange = Node.FromString(
        bytes.fromhex("0805 1809 5a020801")
    )  # type 9, and a field 11 that we do not know
    write(tmp_path / "a.et", METADATA, [strange])
    (found,) = read(tmp_path / "a.et")[1]
    assert found.type == 9
    assert found.SerializeToString() == bytes.fromhex("0805 1809 5a020801")


def test_a_file_without_metadata_loses_no_node(tmp_path: Path) -> None:
    write(tmp_path / "a.et", METADATA, nodes(3)[1:])
    data = (tmp_path / "a.et").read_bytes()
    (tmp_path / "a.et").write_bytes(data[1 + data[0] :])
    assert read(tmp_path / "a.et") == (GlobalMetadata(), nodes(3)[1:], ["chakra-no-metadata"])


def test_windows_hold_so_many_nodes(tmp_path: Path) -> None:
    write(tmp_path / "a.et", METADATA, nodes(10))
    with EtReader(tmp_path / "a.et") as reader:
        assert [len(window) for window in reader.windows(4)] == [4, 4, 2]


def test_a_large_message_spans_pieces(tmp_path: Path) -> None:
    large = Node(id=1, name="x" * 1300_000)
    write(tmp_path / "a.et", METADATA, [Node(id=7), large, Node(id=8)])
    assert [node.id for node in read(tmp_path / "a.et")[1]] == [7, 1, 8]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_file_that_is_cut_gives_all_whole_nodes_and_a_notice(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.et"
    write(path, METADATA, nodes(300))
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    _, found, notices = read(path)
    assert found == nodes(299)
    assert notices == ["chakra-cut"]
    error = refused(path, strict=True)
    assert error.slug == "chakra-cut"
    assert "inside" in error.message


def test_the_notice_of_a_cut_says_message_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.et"
    write(path, METADATA, nodes(3))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-4])
    with EtReader(path) as reader:
        assert len(list(reader)) == 2
    last = 1 + nodes(3)[2].ByteSize()
    assert f"inside message 3, which begins at byte {size - last}" in reader.notices[0].message


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_a_cut_gzip_file_gives_what_can_be_unpacked(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.et.gz"
    write(path, METADATA, nodes(20_000))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    _, found, notices = read(path)
    assert 1000 < len(found) < 20_000
    assert found == nodes(len(found))
    assert notices == ["chakra-cut"]


def test_corrupt_gzip_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.et.gz"
    write(path, METADATA, nodes(20_000))
    data = bytearray(path.read_bytes())
    data[-8] ^= 255  # the checksum
    path.write_bytes(data)
    _, found, notices = read(path)
    assert found == nodes(20_000)
    assert notices == ["chakra-cut"]


def test_what_comes_before_corrupt_gzip_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.et.gz"
    write(path, METADATA, nodes(20_000))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path.write_bytes(data)
    with EtReader(path) as reader:
        found = []
        with contextlib.suppress(
            InputError
        ):  # where the fault is found late, garbage is no message
            for node in reader:
                found.append(node)  # noqa: PERF402
    assert len(found) > 8_000
    assert found[:8_000] == nodes(8_000)


def test_a_claim_of_4_gigabytes_is_refused_with_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.et"
    write(path, METADATA, nodes(2))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes.fromhex("ffffffff0f") + b"x" * 1000)
    error = refused(path)
    assert error.slug == "chakra-damaged"
    assert f"message 3 at byte {size} claims 4,294,967,295 bytes" in error.message


def test_a_length_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.et"
    write(path, METADATA, nodes(1))
    path.write_bytes(path.read_bytes() + b"\xff" * 20)
    assert "no length that a message can have" in refused(path).message


def test_a_message_that_is_no_node_is_refused_with_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.et"
    write(path, METADATA, nodes(2))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\x03\x12\x05a")
    error = refused(path)
    assert error.slug == "chakra-damaged"
    assert f"message 3, bytes {size + 1} to {size + 4}, is no Chakra node" in error.message


@pytest.mark.parametrize(
    ("content", "slug", "said"),
    [
        (b"", "empty-file", "empty"),
        (b'{"traceEvents": [1, 2, 3]}', "not-chakra", "JSON"),
        (b"[1, 2]", "not-chakra", "JSON"),
        (b"PK\x03\x04" + bytes(50), "not-chakra", "zip"),
        (b"\x7fELF" + bytes(100), "not-chakra", "program"),
        (b"hello, this is a text file\n" * 20, "not-chakra", "not a Chakra trace"),
        (bytes(range(1, 255)), "not-chakra", "not a Chakra trace"),
        (b"\x20\x0a\x05", "chakra-cut", "inside message 0"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_other_files_are_refused_in_a_sentence(
    tmp_path: Path, content: bytes, slug: str, said: str, packed: bool
) -> None:
    path = tmp_path / "a.et"
    path.write_bytes(gzip.compress(content) if packed else content)
    error = refused(path)
    assert error.slug == slug
    assert said in error.message


def test_a_missing_file_and_a_directory_are_unreadable(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.et").slug == "unreadable"
    assert refused(tmp_path).slug == "unreadable"


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceloom.system.gzip_stream.GzipStream.BOMB_BYTES", 1 << 22)
    path = tmp_path / "a.et.gz"
    metadata = METADATA.SerializeToString()
    node = encode_length(1 << 24) + bytes(1 << 24)
    path.write_bytes(gzip.compress(encode_length(len(metadata)) + metadata + node))
    assert refused(path).slug == "gzip-bomb"


def test_an_existing_file_is_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "a.et").write_text("mine")
    with pytest.raises(OutputError) as caught:
        write(tmp_path / "a.et", METADATA, nodes(1))
    assert caught.value.slug == "file-exists"
    assert (tmp_path / "a.et").read_text() == "mine"
    write(tmp_path / "a.et", METADATA, nodes(1), force=True)
    assert read(tmp_path / "a.et")[1] == nodes(1)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> object:
        yield from nodes(10)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write(tmp_path / "a.et", METADATA, broken())
    assert list(tmp_path.iterdir()) == []


_MEMORY = """
import sys
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, Node
from traceloom.formats.chakra.files import EtReader, write
write(sys.argv[1], GlobalMetadata(version="1"), (Node(id=n, name="aten::mm " * 8, data_deps=[n]) for n in range(int(sys.argv[2]))))
with EtReader(sys.argv[1]) as reader:
    count = sum(1 for _ in reader)
with open("/proc/self/status") as status:  # not ru_maxrss, which begins with that of the parent
    print(count, next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    used = {}
    for count in (2_000, 300_000):
        command = [sys.executable, "-c", _MEMORY, str(tmp_path / f"{count}.et"), str(count)]
        there, kilobytes = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split()
        assert int(there) == count
        used[count] = int(kilobytes)
    # the file has 27 MB, its nodes as objects 200; what is loaded of the libraries differs by some 30 between runs
    assert used[300_000] - used[2_000] < 80_000


@pytest.mark.data
def test_every_public_file_round_trips_byte_for_byte(shared_data: Path, tmp_path: Path) -> None:
    paths = sorted((shared_data / "chakra").iterdir())
    assert len(paths) >= 9
    for path in paths:
        metadata, found, notices = read(path)
        assert found
        assert notices == []
        write(tmp_path / "again.et", metadata, found, force=True)
        raw = path.read_bytes()
        assert (tmp_path / "again.et").read_bytes() == (
            gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
        )


def test_the_upstream_names_are_not_registered() -> None:
    """A process that imports the upstream package as well would crash on names that are registered twice."""
    from google.protobuf import descriptor_pool

    pool = descriptor_pool.Default()
    assert pool.FindMessageTypeByName("traceloom.chakra.Node").full_name == "traceloom.chakra.Node"
    with pytest.raises(KeyError):
        pool.FindMessageTypeByName("ChakraProtoMsg.Node")
    with pytest.raises(KeyError):
        pool.FindFileByName("et_def.proto")
