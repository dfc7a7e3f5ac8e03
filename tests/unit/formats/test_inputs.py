"""What people point at: directories of every make, links, archives, files of other kinds, ranks of several runs."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceloom.cli import main
from traceloom.errors import InputError, TraceloomError, UsageError
from traceloom.formats import load, load_inputs, load_runs, read_kineto
from traceloom.testing import HostTraceBuilder, TraceBuilder

UNIX_NS = 1_700_000_000 * 10**9


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def rank(
    number: int | None, *, world_size: int = 4, seconds: float = 0, process: int = 10, **more: Any
) -> TraceBuilder:
    made = TraceBuilder(
        number,
        world_size,
        base_ns=UNIX_NS + int(seconds * 1e9),
        process=process + (number or 0),
        **more,
    )
    return made.op("aten::mm", 1, 5).op("aten::add", 8, 2)


def refusal(*paths: Path | str) -> TraceloomError:
    with pytest.raises(TraceloomError) as caught:
        load(*paths)
    return caught.value


# -- places ----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    path = rank(0).write(tmp_path / "rank0.json")
    (tmp_path / "link.json").symlink_to(path)
    (tmp_path / "below").symlink_to(tmp_path)
    for paths in (
        (path, path),
        (path, tmp_path),
        (path, tmp_path / "link.json"),
        (tmp_path / "below" / "rank0.json", path),
    ):
        assert len(load(*paths).traces) == 1, paths
    assert len(load(tmp_path).traces) == 1


def test_directories_that_hold_themselves_end(tmp_path: Path) -> None:
    inner = tmp_path / "run" / "logs"
    inner.mkdir(parents=True)
    rank(0).write(inner / "rank0.json")
    (inner / "again").symlink_to(tmp_path)
    (inner / "here").symlink_to(inner)
    assert len(load(tmp_path).traces) == 1


@pytest.mark.parametrize("depth", range(7))
def test_directories_are_searched_four_levels_down(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*(f"level{at}" for at in range(depth)))
    folder.mkdir(parents=True, exist_ok=True)
    rank(0).write(folder / "rank0.json")
    if depth <= 4:
        assert load(tmp_path).ranks == (0,)
    else:
        assert refusal(tmp_path).slug == "no-traces"


def test_hidden_directories_and_other_endings_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".hidden").mkdir()
    for number, name in enumerate(
        (".hidden/a.json", "b.json.bak", "c.txt", "d", "e.jsonl", "F.JSON", "g.JSON.GZ", "h.json")
    ):
        rank(number, world_size=8).write(tmp_path / name)
    assert load(tmp_path).ranks == (5, 6, 7)


def test_a_directory_whose_name_ends_as_traces_do_is_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "run.json"
    folder.mkdir()
    rank(0).write(folder / "rank0.json")
    for path in (folder, tmp_path):
        assert load(path).ranks == (0,)


@pytest.mark.parametrize(
    "name",
    [
        "名前 rank 3.json",
        "a b\tc.json",
        "-.json",
        "%s.json",
        "'quoted\".json",
        "é.json",
        "[x]*.json",
    ],
)
def test_any_name_is_a_name(tmp_path: Path, name: str) -> None:
    rank(1).write(tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        session = load(path)
        assert session.ranks == (1,)
        assert Path(session.traces[0].meta.path).name == name


@pytest.mark.skipif(os.name != "posix", reason="names of files are bytes on POSIX alone")
def test_a_name_that_is_no_text_is_a_name_too(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/rank\xff2.json"))
    rank(2).write(path)
    assert load(path).ranks == (2,)
    assert load(tmp_path).ranks == (2,)


def test_a_link_that_leads_nowhere_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "gone.json").symlink_to(tmp_path / "nothing")
    (tmp_path / "round.json").symlink_to(tmp_path / "round.json")
    rank(0).write(tmp_path / "rank0.json")
    assert load(tmp_path).ranks == (0,)
    for name in ("gone.json", "round.json", "rank0.json/below"):
        assert refusal(tmp_path / name).slug == "unreadable"


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/dev/urandom"])
def test_a_device_is_refused_and_not_read(path: str) -> None:
    error = refusal(path)
    assert (error.slug, error.where) == ("unreadable", path)


@pytest.mark.parametrize("path", ["no such file.json", "x" * 5000, "a\0b", "nothing/below.json"])
def test_what_is_not_there_is_said_with_its_name(path: str) -> None:
    error = refusal(path)
    assert isinstance(error, InputError)
    assert error.slug == "unreadable"
    assert path in str(error)


def test_of_several_paths_one_that_is_missing_refuses_all(tmp_path: Path) -> None:
    good = rank(0).write(tmp_path / "rank0.json")
    assert refusal(good, tmp_path / "rank1.json").where == str(tmp_path / "rank1.json")


def test_standard_input_stands_alone(tmp_path: Path) -> None:
    good = rank(0).write(tmp_path / "rank0.json")
    assert refusal(good, "-").slug == "stdin-among-files"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_more_files_than_wanted_are_refused_before_they_are_read(tmp_path: Path, most: int) -> None:
    for number in range(3):
        rank(number).write(tmp_path / f"rank{number}.json")
    if most == 3:
        assert len(load_inputs(tmp_path, most=most).runs[0].traces) == 3
        return
    with pytest.raises(UsageError) as caught:
        load_inputs(tmp_path, most=most)
    assert caught.value.slug == "too-many-files"
    assert "3 traces" in caught.value.message
    assert len(load_inputs(tmp_path, ranks=(1,), most=most).runs[0].traces) == 1


# -- files of other kinds --------------------------------------------------------------------------------------------


def tar(*names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name in names:
            data = rank(0).text().encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("rank0.json", rank(0).text())
    return out.getvalue()


def database() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (x)")
    return connection.serialize()


TRACE = rank(0).text().encode()
STRANGERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "zip": (zipped, "zip archive"),
    "bzip2": (lambda: bz2.compress(TRACE), "bzip2"),
    "xz": (lambda: lzma.compress(TRACE), "xz"),
    "zstd": (lambda: b"\x28\xb5\x2f\xfd" + b"\0" * 50, "zstd"),
    "sqlite": (database, "SQLite"),
    "pickle": (lambda: b"\x80\x04}\x94.", "pickle"),
    "html": (lambda: b"<!doctype html><p>404</p>", "HTML"),
    "program": (lambda: b"\x7fELF" + b"\0" * 100, "a program"),
    "parquet": (lambda: b"PAR1" + b"\0" * 100, "Parquet"),
    "text": (lambda: b"step 1: 3.4 ms\n", "no JSON"),
    "number": (lambda: b"17", "no JSON"),
    "json of nobody": (lambda: b'{"a": 1, "b": [1, 2]}', "`a`, `b`"),
    "snapshot": (lambda: b'{"segments": [], "device_traces": []}', "memory snapshot"),
    "timeline": (lambda: b"[[-1, 1, 100, 0], [10, 2, 50, 4]]", "memory timeline"),
    "report": (lambda: b'{"format": "traceloom-report", "version": 1}', "a report file"),
    "host trace": (lambda: HostTraceBuilder().text().encode(), "host trace"),
    "list": (lambda: b"[1, 2, 3]", "a list"),
    "empty list": (lambda: b"[]", "an empty list"),
    "gzip of gzip": (lambda: gzip.compress(gzip.compress(TRACE)), "no JSON"),
    "gzip of zip": (lambda: gzip.compress(zipped()), "zip archive"),
    "speedscope": (lambda: b'{"stringTable": [], "profiles": []}', "speedscope"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_a_file_is_instead_is_said_with_its_name(tmp_path: Path, kind: str) -> None:
    make, words = STRANGERS[kind]
    path = tmp_path / "trace.json"
    path.write_bytes(make())
    with pytest.raises(InputError) as caught:
        read_kineto(path)
    assert caught.value.slug == "not-a-trace"
    assert words in str(caught.value)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_in_a_directory_is_passed_over_and_one_that_is_named_is_told(
    tmp_path: Path, kind: str
) -> None:
    rank(0).write(tmp_path / "rank0.json")
    (tmp_path / "stranger.json").write_bytes(STRANGERS[kind][0]())
    assert load_inputs(tmp_path).refused == ()
    loaded = load_inputs(tmp_path / "rank0.json", tmp_path / "stranger.json")
    assert [(notice.slug, notice.where) for notice in loaded.refused] == [
        ("refused-input", str(tmp_path / "stranger.json"))
    ]
    assert loaded.runs[0].ranks == (0,)


@pytest.mark.parametrize("unpacked", [False, True])
def test_an_archive_of_traces_is_not_taken_for_its_first(tmp_path: Path, unpacked: bool) -> None:
    # The first member of a tar file is plain text behind its header, so that the trace in it could be read.
    data = tar("rank0.json", "rank1.json")
    path = tmp_path / "run.json"
    path.write_bytes(gzip.decompress(data) if unpacked else data)
    error = refusal(path)
    assert error.slug == "not-a-trace"
    assert "tar archive; unpack it" in error.message


# -- runs ------------------------------------------------------------------------------------------------------------


def test_the_order_in_which_files_are_named_does_not_matter(tmp_path: Path) -> None:
    paths = [
        rank(number).write(tmp_path / f"{name}.json")
        for number, name in ((2, "a"), (0, "b"), (1, "c"))
    ]
    for order in itertools.permutations(paths):
        assert load(*order).ranks == (0, 1, 2)


def test_traces_without_a_rank_stand_last(tmp_path: Path) -> None:
    for number in range(2):
        rank(number, world_size=3).write(tmp_path / f"w{number}.json")
    rank(None, world_size=3, process=90).write(tmp_path / "w2.json")
    sessions = load_runs(tmp_path)
    assert sessions[0].ranks[:2] == (0, 1)
    assert sum(len(session.traces) for session in sessions) == 3


@pytest.mark.parametrize(
    ("apart", "runs"),
    [({"world_size": 8}, 2), ({"seconds": 90_000}, 2), ({"seconds": 300}, 1), ({}, 1)],
)
def test_runs_are_told_apart_by_world_size_and_time(
    tmp_path: Path, apart: dict[str, Any], runs: int
) -> None:
    rank(0).write(tmp_path / "a0.json")
    rank(1, **apart).write(tmp_path / "a1.json")
    sessions = load_runs(tmp_path)
    assert len(sessions) == runs
    assert sorted(
        number for session in sessions for number in session.ranks if number is not None
    ) == [0, 1]
    if runs == 2:
        error = refusal(tmp_path)
        assert error.slug == "several-runs"
        assert "2 runs" in error.message


def test_only_the_ranks_that_are_asked_for_are_read(tmp_path: Path) -> None:
    for number in range(4):
        rank(number).write(tmp_path / f"rank{number}.json")
    assert load_inputs(tmp_path, ranks=(3, 1)).runs[0].ranks == (1, 3)
    # A rank that none of the files says at its beginning may be said at the end of any.
    assert load_inputs(tmp_path, ranks=(7,)).runs[0].ranks == (0, 1, 2, 3)


def test_a_notice_about_a_rank_says_which(tmp_path: Path) -> None:
    rank(0).write(tmp_path / "rank0.json")
    text = rank(1).text()
    (tmp_path / "rank1.json").write_text(text[: text.index("aten::add")])
    told = [
        (notice.slug, notice.rank)
        for notice in load(tmp_path).all_notices()
        if notice.slug == "cut-file"
    ]
    assert told == [("cut-file", 1)]


# -- captures --------------------------------------------------------------------------------------------------------


def capture(folder: Path, *entries: Any, **more: Any) -> Path:
    document = {"format": "traceloom-capture", "version": 1, "ranks": list(entries)} | more
    (folder / "capture.json").write_text(json.dumps(document))
    return folder


def window(number: int, file: Any = None, **more: Any) -> dict[str, Any]:
    found = {"file": file or f"rank{number}.kineto.json"}
    return {"rank": number, "world_size": 2, "job": "a job", "window": found} | more


def test_of_a_capture_only_what_its_document_names_is_read(tmp_path: Path) -> None:
    for number in range(3):
        rank(number).write(tmp_path / f"rank{number}.kineto.json")
    capture(tmp_path, window(0), window(2))
    for path in (tmp_path, tmp_path / "capture.json"):
        assert load(path).ranks == (0, 2)


@pytest.mark.parametrize(
    "file",
    [
        "../outside.json",
        "/etc/passwd",
        ".",
        "..",
        "",
        "a/b.json",
        "none.json",
        5,
        None,
        ["x"],
        "rank1.kineto.json/",
    ],
)
def test_windows_that_name_no_file_of_the_capture_are_left_out(tmp_path: Path, file: Any) -> None:
    inside = tmp_path / "run"
    inside.mkdir()
    rank(3).write(tmp_path / "outside.json")
    rank(0).write(inside / "rank0.kineto.json")
    capture(
        inside,
        window(0),
        {"rank": 1, "window": {"file": file}},
        {"rank": 2, "window": file},
        {"rank": 3},
    )
    assert load(inside).ranks == (0,)


def test_the_rank_that_the_capture_says_counts_more_than_that_of_the_file(tmp_path: Path) -> None:
    rank(0).write(tmp_path / "rank0.kineto.json")
    capture(tmp_path, window(5, "rank0.kineto.json"))
    (trace,) = load(tmp_path).traces
    assert (trace.rank, trace.meta.rank_evidence) == (5, "capture")


def test_several_windows_of_a_rank_are_one_rank_in_order(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        rank(0, seconds=number).write(tmp_path / f"rank0.{number}.kineto.json")
    windows = [{"file": f"rank0.{number}.kineto.json"} for number in (1, 2, 0)]
    capture(tmp_path, {"rank": 0, "windows": windows})
    session = load(tmp_path)
    assert session.ranks == (0, 0, 0)
    assert [Path(trace.meta.path).name[6] for trace in session.traces] == ["0", "1", "2"]


def test_a_window_that_is_named_alone_knows_its_capture(tmp_path: Path) -> None:
    for number in range(2):
        rank(number).write(tmp_path / f"rank{number}.kineto.json")
    capture(tmp_path, window(0), window(1, host="box1"))
    session = load(tmp_path / "rank1.kineto.json")
    assert session.ranks == (1,)
    assert session.capture is not None
    assert [entry["host"] for entry in session.capture["ranks"]] == ["box1"]


def test_a_window_beside_a_damaged_document_is_read_without_it(tmp_path: Path) -> None:
    path = rank(0).write(tmp_path / "rank0.kineto.json")
    (tmp_path / "capture.json").write_text("{")
    assert load(path).traces[0].meta.rank_evidence == "distributedInfo"
    assert refusal(tmp_path).slug == "damaged-capture"


def test_a_capture_of_two_jobs_is_two_runs(tmp_path: Path) -> None:
    for number in range(4):
        rank(number % 2).write(tmp_path / f"rank{number % 2}-pid{number}.kineto.json")
    entries = [
        window(n % 2, f"rank{n % 2}-pid{n}.kineto.json", job=f"job {n // 2}") for n in range(4)
    ]
    sessions = load_runs(capture(tmp_path, *entries))
    assert [session.ranks for session in sessions] == [(0, 1), (0, 1)]
    for at, session in enumerate(sessions):
        assert session.capture is not None
        assert {entry["job"] for entry in session.capture["ranks"]} == {f"job {at}"}


@pytest.mark.parametrize("ranks", [(0, 2**31 - 1), (7, 2**30, 2**31 - 2)])
def test_ranks_that_lie_far_apart_are_as_many_as_they_are(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    for number in ranks:
        made = rank(number, world_size=2**40).group("0", [0, 2**31 - 1, 5]).kernel("gemm", 1, 5)
        made.write(tmp_path / f"trace{number}.json")
    session = load(tmp_path)
    assert session.ranks == ranks
    assert main(["report", str(tmp_path), "--no-cache", "-o", str(tmp_path / "out.json")]) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert [one["rank"] for one in document["ranks"]] == list(ranks)
