"""What can be converted: files by name and content, ranks by their numbers, directories whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.small_graph import small_graph
from support.workload import METADATA, collective, node, write_set
from traceloom.errors import InputError, OutputError, UsageError
from traceloom.workload.chakra.convert import (
    ConversionInput,
    detect_form,
    find_rank_files,
    open_messages,
    write_messages,
)
from traceloom.workload.chakra.graph_read import read_graph
from traceloom.workload.chakra.validate import validate

NODES = [node(1, us=5), node(2, deps=[1], us=7)]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("w.0.et", 0),
        ("w.7.et.gz", 7),
        ("W.3.ET", 3),
        ("W.3.ET.GZ", 3),
        ("a.b.c.12.et", 12),
        ("w.007.json", 7),
        ("5.et", 5),
        ("w.1.jsonl.gz", 1),
        ("w.9999999.et", 9_999_999),
        ("w.et", None),
        ("w.x.et", None),
        ("w.1.txt", None),
        ("w.-1.et", None),
        ("w.1700000000.et", None),
        ("w.99999999999999999999.et", None),
        ("w.1.et.bak", None),
        ("rank3.et", None),
        ("w.².et", None),
    ],
)
def test_the_rank_of_a_file_is_the_number_before_its_ending(
    tmp_path: Path, name: str, rank: int | None
) -> None:
    form = detect_form(Path(name))
    write_messages(tmp_path / name, METADATA, NODES, file_format=form or "et")
    if rank is None:
        with pytest.raises(InputError) as caught:
            find_rank_files(tmp_path)
        assert caught.value.slug == "no-traces"
    else:
        assert find_rank_files(tmp_path) == [(rank, tmp_path / name)]
        assert ConversionInput(tmp_path / name).ranks == [rank]
    if form is not None:
        with ConversionInput(tmp_path / name) as alone:
            assert alone.graph().nodes["start_ns"].to_list() == [0, 0, 5000]


@pytest.mark.parametrize("name", ["run.1700000000.et", "run.20260102030405.et"])
def test_a_date_or_a_job_id_in_a_name_is_no_rank(tmp_path: Path, name: str) -> None:
    write_messages(tmp_path / name, METADATA, NODES)
    assert validate(tmp_path).problems == ()
    assert read_graph([tmp_path / name]).ranks["rank"].to_list() == [0]


def test_missing_ranks_below_a_large_one_are_counted(tmp_path: Path) -> None:
    for rank in (0, 3, 5000):
        write_messages(tmp_path / f"w.{rank}.et", METADATA, NODES)
    (problem,) = validate(tmp_path).problems
    assert (problem.rule, problem.count) == ("missing-rank", 5001 - 3)
    assert "ranks 1, 2, 4, 5" in str(problem.to_dict())


def test_two_files_of_a_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a.1.et", "b.1.json"):
        write_messages(tmp_path / name, METADATA, NODES)
    with pytest.raises(InputError) as caught:
        ConversionInput(tmp_path)
    assert caught.value.slug == "chakra-mixed"
    assert "a.1.et and b.1.json" in caught.value.message


@pytest.mark.parametrize("ending", ["", ".txt", ".bin"])
@pytest.mark.parametrize("form", ["et", "json", "jsonl"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_file_of_any_name_is_told_by_its_content(
    tmp_path: Path, form: str, ending: str, mark: bytes
) -> None:
    path = tmp_path / f"workload{ending}"
    write_messages(path, METADATA, NODES, file_format=form)  # type: ignore[arg-type]
    if form != "et":
        path.write_bytes(mark + path.read_bytes())
    with open_messages(path) as reader:
        assert [reader.metadata, *reader] == [METADATA, *NODES]


@pytest.mark.parametrize("ending", [".et", ".json", ".jsonl.gz"])
def test_a_directory_of_any_form_becomes_files_of_ranks_with_its_groups(
    tmp_path: Path, ending: str
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    ranks = [[collective(1, pg_name="tp"), node(2, deps=[1])] for _ in range(2)]
    for rank, nodes in enumerate(ranks):
        write_messages(source / f"w.{rank}{ending}", METADATA, nodes)
    (source / "comm_group.json").write_text('{"tp": [0, 1]}')
    with ConversionInput(source) as given:
        written = given.write_directory(tmp_path / "out", None, force=False)
        assert given.nodes == 4
    assert [path.name for path in written] == ["comm_groups.json", "workload.0.et", "workload.1.et"]
    assert json.loads(written[0].read_text()) == {"tp": [0, 1]}
    for path, nodes in zip(written[1:], ranks, strict=True):
        with open_messages(path) as reader:
            assert list(reader) == nodes
    with ConversionInput(source) as again, pytest.raises(OutputError) as caught:
        again.write_directory(tmp_path / "out", None, force=False)
    assert caught.value.slug == "file-exists"


def test_one_file_holds_one_rank(tmp_path: Path) -> None:
    source = write_set(tmp_path / "in", NODES, NODES)
    with ConversionInput(source) as given, pytest.raises(UsageError) as caught:
        given.write_file(tmp_path / "out.json", None, force=False)
    assert caught.value.slug == "several-ranks"
    assert not (tmp_path / "out.json").exists()


def test_a_saved_graph_becomes_files_and_they_become_it(tmp_path: Path) -> None:
    graph = small_graph(2)
    graph.save(tmp_path / "a.graph")
    with ConversionInput(tmp_path / "a.graph") as given:
        assert given.ranks == [0, 1]
        given.write_directory(tmp_path / "out", None, force=False)
    with ConversionInput(tmp_path / "out") as given:
        back = given.graph()
    assert sorted(map(str, back.nodes.rows())) == sorted(map(str, graph.nodes.rows()))
    assert sorted(map(str, back.edges.rows())) == sorted(map(str, graph.edges.rows()))


def test_a_directory_with_a_file_that_is_damaged_leaves_nothing(tmp_path: Path) -> None:
    source = write_set(tmp_path / "in", NODES, NODES)
    (source / "w.1.et").write_bytes(b"\xff" * 40)
    with ConversionInput(source) as given, pytest.raises(InputError):
        given.write_directory(tmp_path / "out", None, force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_cut_file_is_converted_with_a_notice_unless_it_must_be_whole(
    tmp_path: Path, strict: bool
) -> None:
    source = write_set(tmp_path / "in", NODES)
    path = source / "w.0.et"
    path.write_bytes(path.read_bytes()[:-3])
    with ConversionInput(path, strict=strict) as given:
        if strict:
            with pytest.raises(InputError):
                given.write_file(tmp_path / "out.json", None, force=False)
            assert not (tmp_path / "out.json").exists()
            return
        given.write_file(tmp_path / "out.json", None, force=False)
    assert [(notice.severity, notice.count) for notice in given.notices] == [("error", 1)]
    with open_messages(tmp_path / "out.json") as reader:
        assert list(reader) == NODES[:1]


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(UsageError) as caught:
        ConversionInput(Path("no such place"))
    assert caught.value.slug == "no-file"
