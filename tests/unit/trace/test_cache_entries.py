"""The cache as folders by content: what is kept, for whom, for how long, and what is thrown away."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from traceloom.system.files import evict, find_cache_directory
from traceloom.trace.cache import Cache, CacheEntry, FileStamp, compute_digest

LONG_AGO = 1_600_000_000


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def text_file(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def entry_of(cache: Cache, path: Path, capture: dict[str, object] | None = None) -> CacheEntry:
    entry = cache.entry(path, capture)
    assert entry is not None
    return entry


def keep(cache: Cache, path: Path, text: str) -> None:
    entry_of(cache, path).put(
        lambda folder: (folder / "content").write_text(text, encoding="utf-8")
    )


def kept(cache: Cache, path: Path) -> str | None:
    return entry_of(cache, path).get(
        lambda folder: (folder / "content").read_text(encoding="utf-8")
    )


def test_what_is_kept_comes_back_until_the_file_changes(cache: Cache, tmp_path: Path) -> None:
    path = text_file(tmp_path / "a", "one")
    assert kept(cache, path) is None
    assert not entry_of(cache, path).exists()
    keep(cache, path, "of one")
    assert kept(cache, path) == "of one"
    assert entry_of(cache, path).exists()
    text_file(path, "two")
    assert kept(cache, path) is None
    text_file(path, "one")
    assert kept(cache, path) == "of one"


def test_equal_content_is_one_entry_wherever_it_lies(cache: Cache, tmp_path: Path) -> None:
    first, second = text_file(tmp_path / "a", "same"), text_file(tmp_path / "b", "same")
    keep(cache, first, "kept")
    assert kept(cache, second) == "kept"
    moved = first.rename(tmp_path / "c")
    assert kept(cache, moved) == "kept"
    (tmp_path / "link").symlink_to(moved)
    assert kept(cache, tmp_path / "link") == "kept"
    assert len(list((tmp_path / "cache" / "traces").iterdir())) == 1


def test_parts_of_capture_json_are_told_apart_whatever_the_order_of_their_keys(
    cache: Cache, tmp_path: Path
) -> None:
    path = text_file(tmp_path / "a", "same")
    entry_of(cache, path, {"rank": 0, "world_size": 2}).put(lambda folder: (folder / "x").touch())
    assert entry_of(cache, path, {"world_size": 2, "rank": 0}).exists()
    for other in (
        None,
        {},
        {"rank": 1, "world_size": 2},
        {"rank": 0},
        {"rank": "0", "world_size": 2},
    ):
        assert not entry_of(cache, path, other).exists(), other


@pytest.mark.parametrize("age", ["just written", "long ago"])
def test_one_entry_for_each_content_however_old_the_file(
    age: str, cache: Cache, tmp_path: Path
) -> None:
    path = text_file(tmp_path / "a", "x")
    if age == "long ago":
        os.utime(path, (LONG_AGO, LONG_AGO))
    for text in ("one", "two", "three"):
        text_file(path, text)
        keep(cache, path, f"of {text}")
        assert kept(cache, path) == f"of {text}"
    assert len(list((tmp_path / "cache" / "traces").iterdir())) == 3


def test_a_file_that_was_just_written_is_not_settled(cache: Cache, tmp_path: Path) -> None:
    path = text_file(tmp_path / "a", "x")
    assert not entry_of(cache, path).settled
    assert not FileStamp.now(path).settled
    assert FileStamp.now(path).stamp[2] == 1


def test_what_cannot_be_read_again_has_no_entry(cache: Cache, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    for path in (
        tmp_path / "gone",
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "broken",
        Path("/dev/null"),
    ):
        assert cache.entry(path, None) is None, path
    with pytest.raises(OSError, match="not a regular file"):
        FileStamp.now(tmp_path / "pipe")


def test_nothing_is_kept_of_a_file_that_has_changed_since(cache: Cache, tmp_path: Path) -> None:
    path = text_file(tmp_path / "a", "one")
    entry = entry_of(cache, path)
    assert entry.unchanged()
    text_file(path, "two")
    assert not entry.unchanged()
    entry.put(lambda folder: pytest.fail("the file has changed"))
    path.unlink()
    entry.put(lambda folder: pytest.fail("the file is gone"))
    with pytest.raises(FileNotFoundError):
        entry.unchanged()


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("bad")])
def test_what_cannot_be_written_is_not_kept_and_leaves_nothing(
    error: Exception, cache: Cache, tmp_path: Path
) -> None:
    path = text_file(tmp_path / "a", "one")

    def write(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise error

    entry_of(cache, path).put(write)
    assert kept(cache, path) is None
    assert list((tmp_path / "cache" / "traces").iterdir()) == []


def test_a_mistake_of_ours_is_not_hidden_and_leaves_nothing_either(
    cache: Cache, tmp_path: Path
) -> None:
    path = text_file(tmp_path / "a", "one")

    def write(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        entry_of(cache, path).put(write)
    assert list((tmp_path / "cache" / "traces").iterdir()) == []


def test_who_comes_second_leaves_the_first_entry_as_it_is(cache: Cache, tmp_path: Path) -> None:
    path = text_file(tmp_path / "a", "one")
    keep(cache, path, "first")
    keep(cache, path, "second")
    assert kept(cache, path) == "first"
    assert len(list((tmp_path / "cache" / "traces").iterdir())) == 1


def test_an_entry_that_cannot_be_read_is_thrown_away_and_can_be_made_again(
    cache: Cache, tmp_path: Path
) -> None:
    path = text_file(tmp_path / "a", "one")
    entry_of(cache, path).put(lambda folder: (folder / "other").touch())
    entry = entry_of(cache, path)
    assert not entry.damaged
    assert entry.get(lambda folder: (folder / "content").read_text()) is None
    assert entry.damaged
    assert not entry.exists()
    keep(cache, path, "again")
    assert kept(cache, path) == "again"


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    in_the_way = text_file(tmp_path / "cache", "a file")
    cache, path = Cache(in_the_way), text_file(tmp_path / "a", "one")
    os.utime(path, (LONG_AGO, LONG_AGO))
    keep(cache, path, "x")
    assert kept(cache, path) is None
    cache.prune()
    assert in_the_way.read_text() == "a file"


def sized(folder: Path, **entries: tuple[int, int]) -> None:
    """Entries of so many bytes, last used at so many seconds."""
    for name, (size, used) in entries.items():
        (folder / name / "deep").mkdir(parents=True)
        (folder / name / "deep" / "content").write_bytes(bytes(size))
        (folder / name / "deep").touch()
        os.utime(folder / name, (used, used))


def sizes(folder: Path) -> dict[str, int]:
    return {
        entry.name: sum(file.lstat().st_size for file in entry.rglob("*"))
        for entry in folder.iterdir()
    }


@pytest.mark.parametrize("left", range(5))
def test_the_entries_unused_for_longest_go_first_until_the_rest_fits(
    left: int, tmp_path: Path
) -> None:
    sized(tmp_path, newest=(4000, 400), oldest=(3000, 100), older=(9000, 200), newer=(100, 300))
    by_age = ["oldest", "older", "newer", "newest"]
    remaining = by_age[4 - left :]
    size = sizes(tmp_path)
    evict(tmp_path, sum(size[name] for name in remaining))
    assert sorted(sizes(tmp_path)) == sorted(remaining)


def test_what_fits_stays_and_stray_files_and_links_count_as_entries(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    sized(folder, a=(1000, 300))
    outside = text_file(tmp_path / "outside", "x" * 5000)
    (folder / "link").symlink_to(tmp_path)
    stray = text_file(folder / "stray", "x")
    os.utime(stray, (100, 100))
    evict(folder, 10**6)
    assert len(list(folder.iterdir())) == 3
    evict(folder, 0)
    assert [
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()
    ] == []
    assert outside.exists()  # a link is removed, not what it leads to
    evict(tmp_path / "gone", 0)


def test_what_is_read_counts_as_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", cap_bytes=1)
    first, second = text_file(tmp_path / "a", "one"), text_file(tmp_path / "b", "two")
    for path in (first, second):
        keep(cache, path, "x" * 1000)
    for entry in (tmp_path / "cache" / "traces").iterdir():
        os.utime(entry, (LONG_AGO, LONG_AGO))
    assert kept(cache, first) == "x" * 1000
    Cache(tmp_path / "cache", cap_bytes=1500).prune()
    assert (kept(cache, first), kept(cache, second)) == ("x" * 1000, None)
    cache.prune()
    assert kept(cache, first) is None


@pytest.mark.parametrize("size", [0, 1, (1 << 22) - 1, 1 << 22, (1 << 22) + 1])
def test_the_digest_is_that_of_the_whole_content(size: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "a").write_bytes(content[:size])
    assert (
        compute_digest(tmp_path / "a")
        == hashlib.blake2b(content[:size], digest_size=20).hexdigest()
    )


def test_the_environment_says_where_the_cache_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "chosen"))
    assert find_cache_directory() == tmp_path / "chosen"
    keep(Cache(), text_file(tmp_path / "a", "one"), "x")
    assert (tmp_path / "chosen" / "traces").is_dir()
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert find_cache_directory().name == "traceloom"
