"""Which files are rewritten, as what, and under which names: told by content, and nothing of the old names stays."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from support.workload import node, write_set
from traceloom.errors import InputError
from traceloom.testing import HostTraceBuilder, TraceBuilder
from traceloom.workload.anonymize.inputs import (
    CHAKRA,
    GROUPS,
    HOST,
    KINETO,
    InputFiles,
    detect_kind,
    find,
    read_json,
)


def kineto(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return TraceBuilder().op("aten::mm", 1, 2).write(path)


def host(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HostTraceBuilder().text(), encoding="utf-8")
    return path


def named(sources: InputFiles, folder: Path) -> dict[str, tuple[str, str]]:
    """Old path -> (kind, new name)."""
    return {
        source.path.relative_to(folder).as_posix(): (source.kind, source.name)
        for source in sources.files
    }


def test_files_of_a_tree_are_told_by_content_and_named_by_rank_and_kind(tmp_path: Path) -> None:
    kineto(tmp_path / "acme_worker3.json")
    kineto(tmp_path / "deep" / "acme-rank_3.json.gz")
    kineto(tmp_path / "acme_rank3_again.json")
    host(tmp_path / "acme.rank3.host.json")
    kineto(tmp_path / "nothing told.json")
    write_set(tmp_path / "et", [node(1)], [node(1)])
    (tmp_path / "et" / "comm_groups.json").write_text('{"1": [0, 1]}')
    (tmp_path / "notes.txt").write_text("secret")
    (tmp_path / ".hidden.json").write_text("{}")
    (tmp_path / "empty.json").write_text("")
    sources = find([tmp_path])
    names = named(sources, tmp_path)
    ets = sorted(path.relative_to(tmp_path).as_posix() for path in (tmp_path / "et").glob("*.et"))
    assert {old: kind for old, (kind, _) in names.items()} == {
        "acme_worker3.json": KINETO,
        "acme_rank3_again.json": KINETO,
        "deep/acme-rank_3.json.gz": KINETO,
        "acme.rank3.host.json": HOST,
        "nothing told.json": KINETO,
        "et/comm_groups.json": GROUPS,
        **dict.fromkeys(ets, CHAKRA),
    }
    new = [name for _, name in names.values()]
    assert len(new) == len(set(new))
    assert not [name for name in new if "acme" in name or "told" in name or "deep" in name]
    of_rank = sorted(name for old, (kind, name) in names.items() if "3" in old and kind == KINETO)
    assert of_rank == ["rank3-2.kineto.json", "rank3.kineto.json", "rank3.kineto.json.gz"]
    assert names["acme.rank3.host.json"][1] == "rank3.host.json"
    assert sorted(names[old][1] for old in ets) == ["workload.0.et", "workload.1.et"]
    assert names["et/comm_groups.json"][1] == "comm_groups.json"
    assert sources.left == {"of no kind that is known": 1, "unreadable or empty": 1}


def test_a_file_that_is_named_twice_or_reached_by_a_link_is_rewritten_once(tmp_path: Path) -> None:
    source = kineto(tmp_path / "runs" / "rank0.json")
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "rank1.json").symlink_to(source)
    sources = find([source, tmp_path / "runs", source])
    assert [entry.path for entry in sources.files] == [source]


def test_directories_are_looked_through_to_a_depth_that_ends(tmp_path: Path) -> None:
    folder = tmp_path
    for depth in range(7):
        kineto(folder / f"rank{depth}.json")
        folder /= "inner"
    assert sorted(source.rank or 0 for source in find([tmp_path]).files) == [0, 1, 2, 3, 4]


def capture(folder: Path, ranks: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"format": "traceloom-capture", "version": 1, "ranks": ranks}
    (folder / "capture.json").write_text(json.dumps(document))
    return folder


def test_of_a_capture_only_the_files_that_it_names_are_rewritten(tmp_path: Path) -> None:
    folder = capture(
        tmp_path / "run",
        [
            {
                "rank": 0,
                "windows": [
                    {"file": "a.json"},
                    {"file": "b.json.gz"},
                    {"file": "../outside.json"},
                    {},
                ],
                "graph_step": {"file": "g.json", "host_file": "h.json"},
            },
            {"rank": 5, "window": {"file": "missing.json"}},
            {"rank": 1, "window": {"file": "c.json"}},
        ],
    )
    for name in ("a.json", "b.json.gz", "g.json", "c.json", "stranger.json"):
        kineto(folder / name)
    kineto(tmp_path / "outside.json")
    host(folder / "h.json")
    (folder / "rank0_resources").mkdir()
    (folder / "0.capture.json").write_text("{}")
    for path in (folder, folder / "capture.json"):
        sources = find([path])
        assert named(sources, folder) == {
            "a.json": (KINETO, "rank0.kineto.json"),
            "b.json.gz": (KINETO, "rank0.kineto.json.gz"),
            "c.json": (KINETO, "rank1.kineto.json"),
            "g.json": (KINETO, "rank0.graph.kineto.json"),
            "h.json": (HOST, "rank0.host.json"),
        }
        assert [source.graph for source in sources.files] == [False, False, False, True, True]
        assert list(sources.captures) == [folder]
        assert sources.left == {
            "of a capture, but of no kind that can be rewritten": 1,
            "sources of compiled kernels and contents of tensors beside a host trace": 1,
        }


def test_several_captures_get_folders_and_what_is_beside_them_does_not(tmp_path: Path) -> None:
    for name in ("acme", "quokka"):
        kineto(capture(tmp_path / name, [{"rank": 0, "window": {"file": "x.json"}}]) / "x.json")
    kineto(tmp_path / "rank0.json")
    names = {old: name for old, (_, name) in named(find([tmp_path]), tmp_path).items()}
    assert names == {
        "acme/x.json": "capture-1/rank0.kineto.json",
        "quokka/x.json": "capture-2/rank0.kineto.json",
        "rank0.json": "rank0.kineto.json",
    }


@pytest.mark.parametrize("rank", [True, "3", 2.5, None, [1]], ids=str)
def test_a_rank_that_is_none_is_not_in_a_name(rank: Any, tmp_path: Path) -> None:
    kineto(capture(tmp_path / "run", [{"rank": rank, "window": {"file": "x.json"}}]) / "x.json")
    (source,) = find([tmp_path]).files
    assert (source.rank, source.name) == (None, "trace-1.kineto.json")


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.json", b'{"traceEvents": [], "nodes": []}', KINETO),
        ("a.json", b'{"schema": "1.0", "nodes": []}', HOST),
        ("a.json", b' \n{"nodes"  : []}', HOST),
        ("a.json", b'[{"ph": "X"}]', KINETO),
        ("a.et", b"\x08\x01\x02", CHAKRA),
        ("a.et.gz", gzip.compress(b"\x08\x01\x02"), CHAKRA),
        ("a.et", b'{"schema": 1}', HOST),
        ("comm_groups.json", b'{"traceEvents": []}', GROUPS),
        ("a.bin", b"\x08\x01", KINETO),
    ],
)
def test_the_kind_of_a_file_is_told_by_its_beginning(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert detect_kind(path) == kind


@pytest.mark.parametrize("content", [b"", b"\0\0\0", gzip.compress(b"")])
def test_an_empty_file_is_refused_as_such(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        find([path])
    assert caught.value.slug == "empty-file"


def test_what_is_not_there_and_what_holds_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for paths, slug in (([tmp_path / "gone.json"], "unreadable"), ([tmp_path], "no-traces")):
        with pytest.raises(InputError) as caught:
            find(paths)
        assert caught.value.slug == slug
        assert str(paths[0]) in caught.value.where


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff\xfe", b"7", b"[" * 100_000])
def test_a_document_that_is_no_object_is_refused_in_a_sentence(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="the file is no JSON object") as caught:
        read_json(path)
    assert caught.value.slug == "unreadable"
