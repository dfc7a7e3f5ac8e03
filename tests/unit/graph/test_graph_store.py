"""Saved graphs come back as they were; what is no saved graph, or a hostile one, is refused in a sentence."""

from __future__ import annotations

import io
import json
import random
import zipfile
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from support.small_graph import small_graph
from traceloom.errors import InputError, OutputError
from traceloom.graph.graph import Graph, build_empty_frame, is_graph, load, save


def same(one: Graph, other: Graph) -> None:
    for name, frame in one.frames().items():
        assert_frame_equal(frame, other.frames()[name])
    for name in ("name", "epoch_ns", "world_size", "stage", "notices"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_graph_comes_back_as_it_was(tmp_path: Path, ranks: int) -> None:
    graph = small_graph(ranks)
    graph.check()
    path = tmp_path / "a.graph"
    assert save(graph, path) == path.stat().st_size
    same(graph, load(path))
    assert is_graph(path)


def test_an_empty_graph_comes_back(tmp_path: Path) -> None:
    graph = Graph(build_empty_frame("nodes"), build_empty_frame("edges"))
    save(graph, tmp_path / "a.graph")
    same(graph, load(tmp_path / "a.graph"))


def test_the_same_graph_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(small_graph(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_any_reader_of_parquet_understands_a_part(tmp_path: Path) -> None:
    save(small_graph(), tmp_path / "a.graph")
    with zipfile.ZipFile(tmp_path / "a.graph") as archive:
        nodes = pl.read_parquet(io.BytesIO(archive.read("nodes.parquet")))
    assert nodes.schema["kind"] == pl.String
    assert {"kernel", "rendezvous"} <= set(nodes["kind"])


def test_an_existing_file_stays_without_force(tmp_path: Path) -> None:
    path = tmp_path / "a.graph"
    path.write_text("mine")
    with pytest.raises(OutputError) as caught:
        save(small_graph(), path)
    assert caught.value.slug == "file-exists"
    assert path.read_text() == "mine"
    save(small_graph(), path, force=True)
    assert load(path).nodes.height


def refused(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        load(path)
    assert caught.value.where == str(path)
    assert "\n" not in str(caught.value)
    return caught.value


def parts(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rebuilt(path: Path, contents: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    save(small_graph(), tmp_path / "good.graph")
    return tmp_path / "good.graph"


def test_a_graph_that_was_zipped_anew_is_read(good: Path) -> None:
    same(small_graph(), load(rebuilt(good, parts(good), zipfile.ZIP_DEFLATED)))


@pytest.mark.parametrize(
    ("content", "slug"),
    [(b"", "not-a-graph"), (b'{"a": 1}', "not-a-graph"), (b"PK\x03\x04cut", "graph-damaged")],
)
def test_other_files_are_no_graphs(tmp_path: Path, content: bytes, slug: str) -> None:
    path = tmp_path / "x.graph"
    path.write_bytes(content)
    assert refused(path).slug == slug
    assert not is_graph(path)


def test_a_missing_file_is_unreadable(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.graph").slug == "unreadable"
    assert refused(tmp_path).slug == "unreadable"


def test_another_zip_is_no_graph(tmp_path: Path) -> None:
    assert refused(rebuilt(tmp_path / "x.zip", {"a.txt": b"hello"})).slug == "not-a-graph"
    assert (
        refused(rebuilt(tmp_path / "y.zip", {"header.json": b'{"format": "else"}'})).slug
        == "not-a-graph"
    )


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_half_a_graph_is_refused(good: Path, share: float) -> None:
    data = good.read_bytes()
    good.write_bytes(data[: int(len(data) * share)])
    assert refused(good).slug == "graph-damaged"


def test_another_version_is_refused(good: Path) -> None:
    contents = parts(good)
    contents["header.json"] = contents["header.json"].replace(b'"version": 1', b'"version": 2')
    assert refused(rebuilt(good, contents)).slug == "other-version"


@pytest.mark.parametrize("name", ["../../evil.txt", "/etc/evil", "nodes.parquet/../x"])
def test_parts_with_strange_names_are_refused_and_not_unpacked(good: Path, name: str) -> None:
    error = refused(rebuilt(good, parts(good) | {name: b"evil"}))
    assert error.slug == "graph-damaged"
    assert sorted(path.name for path in good.parent.iterdir()) == ["good.graph"]


def test_a_part_that_unpacks_out_of_proportion_is_refused(good: Path) -> None:
    contents = parts(good) | {"nodes.parquet": bytes(1 << 26)}
    assert (
        "claims 67,108,864 bytes" in refused(rebuilt(good, contents, zipfile.ZIP_DEFLATED)).message
    )


def test_parquet_that_claims_rows_out_of_proportion_is_refused(good: Path) -> None:
    rows = 20_000_000
    contents = parts(good)
    buffer = io.BytesIO()
    pl.DataFrame({"node": pl.zeros(rows, dtype=pl.UInt32, eager=True)}).write_parquet(buffer)
    contents["nodes.parquet"] = buffer.getvalue()
    header = json.loads(contents["header.json"])
    header["rows"]["nodes"] = rows
    contents["header.json"] = json.dumps(header).encode()
    assert "claims 20,000,000 rows" in refused(rebuilt(good, contents)).message


def _changed(good: Path, name: str, frame: pl.DataFrame) -> Path:
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return rebuilt(good, parts(good) | {f"{name}.parquet": buffer.getvalue()})


def _frame(good: Path, name: str) -> pl.DataFrame:
    return pl.read_parquet(io.BytesIO(parts(good)[f"{name}.parquet"]))


def test_wrong_columns_are_named(good: Path) -> None:
    _changed(good, "lanes", _frame(good, "lanes").drop("stream"))
    assert "`lanes` has the columns" in refused(good).message


def test_a_wrong_type_is_named(good: Path) -> None:
    _changed(good, "nodes", _frame(good, "nodes").with_columns(pl.col("start_ns").cast(pl.Float64)))
    assert "column `start_ns` of `nodes` is Float64, expected Int64" in refused(good).message


def test_an_unknown_kind_of_node_is_refused(good: Path) -> None:
    _changed(good, "nodes", _frame(good, "nodes").with_columns(pl.lit("magic").alias("kind")))
    assert refused(good).slug == "graph-damaged"


def test_a_reference_past_the_end_is_refused(good: Path) -> None:
    _changed(
        good,
        "edges",
        _frame(good, "edges").with_columns(pl.lit(4_000_000, pl.UInt32).alias("source")),
    )
    assert "`source` of edges points past the last row" in refused(good).message


def test_missing_values_where_one_must_be_are_refused(good: Path) -> None:
    _changed(
        good, "edges", _frame(good, "edges").with_columns(pl.lit(None, pl.Int64).alias("delay_ns"))
    )
    assert "column `delay_ns` of `edges` has rows without a value" in refused(good).message


def test_other_numbers_of_rows_than_the_header_says_are_refused(good: Path) -> None:
    _changed(good, "edges", _frame(good, "edges").head(3))
    assert "`edges` has 3 rows, its header says" in refused(good).message


def test_garbage_in_place_of_parquet_is_refused(good: Path) -> None:
    assert (
        refused(
            rebuilt(good, parts(good) | {"ranks.parquet": b"PAR1" + b"\xff" * 100 + b"PAR1"})
        ).slug
        == "graph-damaged"
    )


@pytest.mark.parametrize(
    "change",
    [{"stage": "x"}, {"world_size": "8"}, {"notices": 3}, {"rows": []}, {"epoch_ns": None}],
)
def test_a_wrong_header_is_refused(good: Path, change: dict[str, object]) -> None:
    contents = parts(good)
    contents["header.json"] = json.dumps(json.loads(contents["header.json"]) | change).encode()
    assert refused(rebuilt(good, contents)).slug == "graph-damaged"


GOOD_NOTICE = {"slug": "a", "severity": "info", "message": "m"}


@pytest.mark.parametrize(
    "notices",
    [
        {"a": 1},
        [5],
        [None],
        ["text"],
        [{}],
        [{"slug": "a"}],
        [GOOD_NOTICE | {"severity": "bad"}],
        [GOOD_NOTICE | {"slug": 5}],
        [GOOD_NOTICE | {"count": "many"}],
        [GOOD_NOTICE | {"rank": "x"}],
        [GOOD_NOTICE | {"where": 7}],
        [GOOD_NOTICE, GOOD_NOTICE | {"message": None}],
    ],
)
def test_notices_that_somebody_changed_are_damage(good: Path, notices: object) -> None:
    contents = parts(good)
    contents["header.json"] = json.dumps(
        json.loads(contents["header.json"]) | {"notices": notices}
    ).encode()
    assert refused(rebuilt(good, contents)).slug == "graph-damaged"


def test_a_header_of_a_later_writer_with_more_keys_and_broken_texts_is_read(good: Path) -> None:
    contents = parts(good)
    more = {
        "name": "a\ud800b",
        "new": [1],
        "notices": [GOOD_NOTICE | {"new": 1, "message": "\udc00"}],
    }
    contents["header.json"] = json.dumps(json.loads(contents["header.json"]) | more).encode()
    graph = load(rebuilt(good, contents))
    assert graph.name == "a\ufffdb"
    assert [notice.message for notice in graph.notices] == ["\ufffd"]


@pytest.mark.parametrize("nest", [500, 100_000])
def test_a_header_that_nests_without_end_is_refused_or_read(good: Path, nest: int) -> None:
    contents = parts(good)
    contents["header.json"] = contents["header.json"].replace(
        b"{", b'{"x": ' + b"[" * nest + b"]" * nest + b",", 1
    )
    path = rebuilt(good, contents)
    if nest < 1000:
        assert load(path).nodes.height
    else:
        assert refused(path).slug == "graph-damaged"


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(40))
def test_any_flipped_bit_is_noticed(good: Path, seed: int) -> None:
    whole, data = load(good), bytearray(good.read_bytes())
    chance = random.Random(seed)
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    good.write_bytes(data)
    refusal = ""
    try:
        same(load(good), whole)
    except InputError as error:
        refusal = error.slug
    assert refusal in {"", "graph-damaged", "not-a-graph", "other-version"}
