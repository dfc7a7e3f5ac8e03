"""The cache gives back what the file holds, whatever happens to the file meanwhile or to the cache itself."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path

import polars as pl
import pytest
from isal.isal_zlib import crc32

from traceloom.formats import kineto, load
from traceloom.testing import TraceBuilder
from traceloom.trace import cache as caching, storage
from traceloom.trace.cache import Cache, FileStamp
from traceloom.trace.trace import Trace

LONG_AGO = 1_600_000_000


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(folder))
    return folder


def made(*names: str) -> TraceBuilder:
    builder = TraceBuilder(rank=0, world_size=1)
    for number, name in enumerate(names):
        builder.op(name, number * 10, 5, shapes=[[number + 1, 3]])
    return builder


def old(path: Path) -> Path:
    """The file as if it had been written long ago, as far as that can be told: nothing else is known of it yet."""
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def names(path: Path) -> list[str]:
    return load(path).traces[0].events["name"].cast(pl.String).to_list()


def slugs(path: Path) -> set[str]:
    return {notice.slug for notice in load(path).all_notices()}


def entries(folder: Path) -> list[Path]:
    kept = folder / "traces"
    return sorted(kept.iterdir()) if kept.exists() else []


def replaced(path: Path) -> None:
    other = made("new", "new").write(path.with_suffix(".other"))
    other.replace(path)


def rewritten(path: Path) -> None:
    made("new", "new").write(path)


def rewritten_in_secret(path: Path) -> None:
    """As long as before, and with the same time of change."""
    before = path.stat()
    text = path.read_text().replace('"old"', '"new"')
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def appended(path: Path) -> None:
    with path.open("a") as file:
        file.write(" ")


@pytest.mark.parametrize("change", [replaced, rewritten, rewritten_in_secret])
@pytest.mark.parametrize("when", ["before it is decoded", "after it was decoded"])
def test_what_a_file_was_is_never_kept_as_what_it_is(
    change: object, when: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old(made("old", "old").write(tmp_path / "a.json"))
    read = kineto.read_kineto
    changes = [change]

    def reading(given: Path, **options: object) -> Trace:
        if when.startswith("before"):
            changes.pop()(given)
        trace = read(given, **options)
        if changes:
            changes.pop()(given)
        return trace

    monkeypatch.setattr(kineto, "read_kineto", reading)
    session = load(path)
    monkeypatch.undo()
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(own_cache))
    assert "changed-while-read" in {notice.slug for notice in session.all_notices()}
    assert entries(own_cache) == []
    assert names(path) == ["new", "new"]
    assert names(path) == ["new", "new"]
    assert "changed-while-read" not in slugs(path)


def test_a_file_that_grows_while_its_digest_is_taken_is_read_and_not_kept(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made("old").write(tmp_path / "a.json")
    digest = caching.compute_digest

    def slow(given: Path) -> str:
        found = digest(given)
        appended(given)
        return found

    monkeypatch.setattr(caching, "compute_digest", slow)
    assert names(path) == ["old"]
    assert entries(own_cache) == []


def test_of_a_file_that_was_just_written_the_content_decides_and_not_the_clock_of_its_file_system(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes within one tick leave the same times."""
    path = made("old").write(tmp_path / "a.json")
    frozen = FileStamp.now(path)
    assert not frozen.settled
    monkeypatch.setattr(FileStamp, "now", lambda _: frozen)
    assert names(path) == ["old"]
    made("new").write(path)
    assert names(path) == ["new"]
    read = kineto.read_kineto

    def reading(given: Path, **options: object) -> Trace:
        trace = read(given, **options)
        made("abc").write(given)
        return trace

    made("xyz").write(path)
    monkeypatch.setattr(kineto, "read_kineto", reading)
    assert names(path) == ["xyz"]
    monkeypatch.setattr(kineto, "read_kineto", read)
    assert names(path) == ["abc"]
    assert len(entries(own_cache)) == 3


def test_a_settled_file_is_not_read_to_find_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made("old").write(tmp_path / "a.json")
    now = FileStamp.now(path)
    monkeypatch.setattr(FileStamp, "now", lambda _: now._replace(settled=True))
    assert names(path) == ["old"]
    monkeypatch.setattr(caching, "compute_digest", lambda _: pytest.fail("the file was read"))
    assert names(path) == ["old"]


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = made("old").write(tmp_path / "a.json")
    assert names(path) == ["old"]
    made("new", "new").write(path)
    assert names(path) == ["new", "new"]


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe, source = tmp_path / "pipe", made("old").write(tmp_path / "a.json")
    os.mkfifo(pipe)
    if not os.fork():
        shutil.copyfileobj(source.open("rb"), pipe.open("wb"))
        os._exit(0)
    assert names(pipe) == ["old"]
    os.wait()


def test_any_flipped_bit_of_an_entry_is_noticed_and_the_entry_is_made_again(
    tmp_path: Path, own_cache: Path
) -> None:
    path = made("old", "older").write(tmp_path / "a.json")
    first = load(path).traces[0]
    (entry,) = entries(own_cache)
    for name in sorted(file.name for file in entry.iterdir()):
        size = (entry / name).stat().st_size
        for at in {0, size // 3, size // 2, size - 1}:
            content = bytearray((entry / name).read_bytes())
            content[at] ^= 0x10
            (entry / name).write_bytes(content)
            again = load(path).traces[0]
            assert [n.slug for n in again.notices if n not in first.notices] == ["damaged-cache"], (
                name,
                at,
            )
            assert all(again.frames()[frame].equals(kept) for frame, kept in first.frames().items())
            assert load(path).traces[0].notices == first.notices


def head(entry: Path, **changes: object) -> None:
    """A head that says of itself that it is as it was written."""
    values = json.loads((entry / "trace.json").read_bytes().rpartition(b"\n")[0])
    text = json.dumps({**values, **changes}).encode()
    (entry / "trace.json").write_bytes(text + b"\n%08x" % crc32(text))


def pipe_for(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def no_folder(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("a file")


def link_for(entry: Path) -> None:
    moved = entry.rename(entry.parent.parent / "elsewhere")
    entry.symlink_to(moved)
    (moved / "trace.json").write_text("[]")


def deep(entry: Path) -> None:
    text = b"[" * 200_000 + b"]" * 200_000
    (entry / "trace.json").write_bytes(text + b"\n%08x" % crc32(text))


META = asdict(TraceBuilder().build().meta)


@pytest.mark.parametrize(
    "harm",
    [
        lambda entry: (entry / "trace.json").write_text("[]"),
        lambda entry: (entry / "trace.json").write_bytes(b"[]\n%08x" % crc32(b"[]")),
        lambda entry: (entry / "trace.json").write_bytes(b""),
        lambda entry: (entry / "trace.json").unlink(),
        lambda entry: (entry / "events.arrow").write_bytes(b""),
        lambda entry: (entry / "events.arrow").unlink(),
        lambda entry: pipe_for(entry / "trace.json"),
        lambda entry: pipe_for(entry / "events.arrow"),
        lambda entry: link_to(entry / "events.arrow", "/dev/zero"),
        lambda entry: head(entry, version=1),
        lambda entry: head(entry, meta={**META, "rank": "first"}),
        lambda entry: head(entry, meta=None),
        lambda entry: head(entry, notices=[{"slug": 1}]),
        lambda entry: head(entry, rows={"events": -1}),
        lambda entry: head(entry, rows={"events": 10**30}),
        lambda entry: head(entry, files={}),
        deep,
        no_folder,
        link_for,
    ],
)
def test_an_entry_that_is_none_is_thrown_away_with_a_notice(
    harm: object, tmp_path: Path, own_cache: Path
) -> None:
    path = made("old").write(tmp_path / "a.json")
    load(path)
    (entry,) = entries(own_cache)
    harm(entry)
    session = load(path)
    assert "damaged-cache" in {notice.slug for notice in session.all_notices()}
    assert session.traces[0].events.height == 1
    assert "damaged-cache" not in slugs(path)


def test_columns_on_which_polars_panics_are_a_damaged_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made("old").write(tmp_path / "a.json")
    load(path)

    def panics(*_: object) -> object:
        raise pl.exceptions.PanicException("index out of bounds")

    monkeypatch.setattr(pl, "collect_all", panics)
    assert "damaged-cache" in slugs(path)


def test_an_index_that_cannot_be_read_is_made_again(tmp_path: Path, own_cache: Path) -> None:
    path = made("old").write(tmp_path / "a.json")
    now = FileStamp.now(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStamp, "now", lambda _: now._replace(settled=True))
        load(path)
        (noted,) = (own_cache / "index").iterdir()
        for harm in (
            pipe_for,
            lambda noted: noted.write_bytes(b"\xff" * 40),
            lambda noted: noted.write_text("short"),
        ):
            harm(noted)
            assert names(path) == ["old"]
            assert len(noted.read_text()) == 40


def test_the_cache_stays_below_its_cap(tmp_path: Path, own_cache: Path) -> None:
    paths = [made("old", f"x{number}").write(tmp_path / f"{number}.json") for number in range(4)]
    traces = [load(path, cache=False).traces[0] for path in paths]
    roomy = Cache()
    roomy.entry(paths[0], None).put(partial(storage.save, traces[0]))
    size = sum(file.stat().st_size for file in own_cache.rglob("*.arrow"))
    small = Cache(cap_bytes=int(size * 2.8))
    for trace, path in zip(traces, paths, strict=True):
        small.entry(path, None).put(partial(storage.save, trace))
        small.prune()
    assert len(entries(own_cache)) == 2
    assert small.entry(paths[3], None).get(storage.load_trace) is not None


@pytest.mark.parametrize("part", ["formats", "trace", "system"])
def test_the_version_of_the_reader_covers_all_of_its_files(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / part / "formats" / "more.py"
    deep.parent.mkdir(parents=True)
    deep.write_text("a = 1\n")
    monkeypatch.setattr(caching, "__file__", str(tmp_path / "trace" / "cache.py"))
    before = caching.compute_reader_version.__wrapped__()
    deep.write_text("a = 2\n")
    assert caching.compute_reader_version.__wrapped__() != before
