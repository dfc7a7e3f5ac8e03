"""Output files: never half-written, never over an input, `-`, addresses; where the cache lies."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from traceloom.errors import OutputError, UsageError
from traceloom.system import process


class _Inputs(NamedTuple):
    """What is read, by where it lies on the disk and by its whole path."""

    files: set[tuple[int, int]]
    paths: set[str]


_inputs: _Inputs | None = None
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_addresses: dict[str, str] = {}  # local copy -> the address it was fetched from, in this process


def is_address(name: str | os.PathLike[str]) -> bool:
    """Whether it says where something lies elsewhere, as `s3://bucket/run` does."""
    return _ADDRESS.match(os.fspath(name)) is not None


def remember_address(copy: Path, address: str) -> None:
    """Remember under which name the local copy of an input is shown."""
    _addresses[str(copy)] = address


def restore_addresses(text: str) -> str:
    """A path, or a text with paths: local copies by the addresses that the user gave."""
    for copy in sorted(_addresses, key=len, reverse=True):
        text = text.replace(copy, _addresses[copy])
    return text


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading that is a file: no pipe that would wait for a writer, no link, no
    device.

    Raises:
        OSError: It is none, or cannot be read.
    """
    handle = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    )
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(handle, "rb")


def open_input(path: str | Path) -> BinaryIO:
    """Open what the user gives for reading: a file or a pipe. A device has no end, or does
    something when it is read.

    Raises:
        OSError: It is a device, or cannot be read.
    """
    file = Path(path).open("rb")  # noqa: SIM115  (whoever asked for it closes it)
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a device")
    return file


def read_small(path: str | Path, max_bytes: int) -> bytes:
    """The content of a file of the user's, if it is no larger than so many bytes.

    Raises:
        OSError: It is larger, a device, or cannot be read.
    """
    with open_input(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes // 10**6:,} MB")
    return content


@contextmanager
def protect_inputs(given_paths: Iterable[str | Path] = ()) -> Iterator[None]:
    """Write over nothing that is read, for what is done inside.

    Args:
        given_paths: What the user gave, files and directories. Readers add the files that they find there (`note_input`).
    """
    global _inputs
    outer = _inputs
    _inputs = outer or _Inputs(set(), set())
    try:
        for path in given_paths:
            remember_input(path)
        yield
    finally:
        _inputs = outer


def build_natural_key(path: Path) -> list[tuple[int, str]]:
    """Sorts files by name, numbers in it by their value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", path.name)
    ]


def remember_input(path: str | Path) -> None:
    """Remember that a file is read, so that nothing is written over it."""
    if _inputs is not None:
        with suppress(OSError, ValueError):  # what is not there is not read
            _inputs.files.add(_identify_file(Path(path).stat()))
            _inputs.paths.add(os.path.realpath(path))


def check_name(path: Path) -> None:
    """Refuse a name that no file can have there, as one that is too long.

    Raises:
        OutputError: slug `cannot-write`.
    """
    with report_write_errors(path), suppress(FileNotFoundError, NotADirectoryError, ValueError):
        path.lstat()


def refuse_input(path: Path) -> None:
    """Refuse to write over what is read: over a file, or over a directory with all that it holds.

    Raises:
        UsageError: slug `wrong-usage`.
    """
    if _inputs is None or not _describe_file_type(path):
        return
    real = os.path.realpath(path)
    problem = ""
    if real in _inputs.paths or _identify_file(path.stat()) in _inputs.files:
        problem = f"`{path}` is an input too"
    elif any(name.startswith(os.path.join(real, "")) for name in _inputs.paths if path.is_dir()):  # noqa: PTH118
        problem = f"`{path}` is where the inputs are"
    if problem:
        raise UsageError(problem, slug="wrong-usage", hint="write to another place")


def _identify_file(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def refuse_existing(path: Path, *, force: bool) -> None:
    """Refuse a place that cannot be written to before any work is done.

    Raises:
        UsageError: slug `wrong-usage`: it is an input.
        OutputError: slug `file-exists` without `force`; slug `cannot-write` for what is no ordinary file.
    """
    kind = _describe_file_type(path)
    if kind == "directory":
        raise OutputError(
            f"`{path}` is a directory", slug="cannot-write", hint="give the name of a file in it"
        )
    if kind not in {"", "file"}:
        raise OutputError(
            f"`{path}` is a {kind}, which is not replaced",
            slug="cannot-write",
            hint="give the name of a file",
        )
    refuse_input(path)
    if kind and not force:
        raise OutputError(
            f"`{path}` exists already", slug="file-exists", hint="use --force to overwrite it"
        )


def _describe_file_type(path: Path) -> str:
    """What lies there itself, not what it leads to; empty where there is nothing."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):
        return ""  # where it cannot be looked at, it cannot be written either
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symbolic link" if stat.S_ISLNK(mode) else "device, pipe or socket"


def write(
    path: Path, produce: Callable[[BinaryIO], object], *, force: bool, private: bool = False
) -> int:
    """Let `produce` write a file: beside its place first, then renamed, so that it is whole or not
    there.

    A file that is replaced hands on who may read and write it.

    Args:
        path: The file.
        produce: Writes it.
        force: Replace a file that is there.
        private: Only the owner may read it.

    Returns:
        The size of the file in bytes.

    Raises:
        UsageError: slug `wrong-usage`: it is an input.
        OutputError: slug `file-exists`; slug `cannot-write`, where the disk is full or the place is forbidden.
    """
    refuse_existing(path, force=force)
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_path = make_temporary_path(path)
        with _remove_on_failure(temporary_path):
            handle = os.open(
                temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666
            )
            with os.fdopen(handle, "wb") as file:
                if not private:
                    keep_mode(path, temporary_path)
                produce(file)
            size = temporary_path.stat().st_size
            temporary_path.replace(path)
    return size


def make_temporary_path(path: Path) -> Path:
    """A name in the same folder that nobody can foresee, for what becomes `path` when it is whole."""
    return path.with_name(f".{os.urandom(8).hex()}.partial")


def keep_mode(path: Path, temporary_path: Path) -> None:
    """Who may read and write what is replaced may do so with what replaces it.

    Raises:
        OSError: It cannot be changed.
    """
    if _describe_file_type(path):
        temporary_path.chmod(stat.S_IMODE(path.stat().st_mode))


@contextmanager
def _remove_on_failure(temporary_path: Path) -> Iterator[None]:
    """Remove what was made beside, when it could not be put into its place."""

    def remove() -> None:
        with suppress(OSError):  # what went wrong first is what counts
            if temporary_path.is_dir():
                shutil.rmtree(temporary_path)
            else:
                temporary_path.unlink()

    with process.clean_up_on_exit(remove):
        try:
            yield
        except BaseException:
            remove()
            raise


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Say in a sentence why something cannot be written."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        hint = (
            "make room there, or write somewhere else with -o"
            if full
            else "choose another place with -o"
        )
        raise OutputError(
            f"`{path}` cannot be written: {reason}", slug="cannot-write", hint=hint
        ) from error


def check_directory(path: Path, own_files_pattern: str, *, force: bool) -> None:
    """Refuse a place where a directory of files cannot go before any work is done.

    Args:
        path: The directory.
        own_files_pattern: Regular expression of the paths of such files below it; with `force`, a directory that holds nothing else
            may be replaced.
        force: Replace.

    Raises:
        UsageError: slug `wrong-usage`: it is an input, or holds one.
        OutputError: slug `file-exists` without `force`; slug `cannot-write`: no directory, or it holds other files.
    """
    kind = _describe_file_type(path)
    if not kind:
        return
    if kind != "directory":
        raise OutputError(
            f"`{path}` is a {kind}, not a directory",
            slug="cannot-write",
            hint="choose another name",
        )
    refuse_input(path)
    entries = sorted(path.iterdir())
    if entries and not force:
        raise OutputError(
            f"`{path}` exists already", slug="file-exists", hint="use --force to overwrite it"
        )
    for entry in (
        descendant
        for top in entries
        for descendant in (top, *(top.rglob("*") if top.is_dir() else ()))
    ):
        name = entry.relative_to(path).as_posix()
        is_directory = entry.is_dir() and not entry.is_symlink()
        if not any(entry.iterdir()) if is_directory else not re.fullmatch(own_files_pattern, name):
            raise OutputError(
                f"`{path}` holds other things, as {name}, and is not replaced",
                slug="cannot-write",
                hint="choose another directory",
            )


def write_directory(
    path: Path, produce: Callable[[Path], None], own_files_pattern: str, *, force: bool
) -> list[Path]:
    """Let `produce` fill a directory: beside its place first, then renamed, so that it is whole or
    not there.

    Args:
        path: The directory.
        produce: Writes files into the directory that it is given.
        own_files_pattern: As for `check_directory`.
        force: Replace a directory that holds nothing but such files.

    Returns:
        The files, sorted by name.

    Raises:
        UsageError: slug `wrong-usage`.
        OutputError: slug `file-exists`; slug `cannot-write`.
    """
    check_directory(path, own_files_pattern, force=force)
    with report_write_errors(path):
        temporary_path = make_temporary_path(path)
        with _remove_on_failure(temporary_path):
            temporary_path.mkdir(parents=True)
            keep_mode(path, temporary_path)
            produce(temporary_path)
            replace_directory(temporary_path, path)
    return sorted(path.iterdir())


def replace_directory(temporary_path: Path, path: Path) -> None:
    """Put a whole directory into its place; what was there before is gone then, or still there.

    Raises:
        OSError: It cannot be put there.
    """
    old = make_temporary_path(path)
    with process.defer_signals():
        try:
            if path.exists():
                path.rename(old)
            temporary_path.rename(path)
        except BaseException:
            with suppress(OSError):  # what went wrong first is what counts
                if old.exists() and not path.exists():
                    old.rename(path)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


def compute_sha256(file: BinaryIO) -> str:
    """SHA-256 of what follows in an open file, in hexadecimal."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


MAX_CACHE_BYTES = 10 * 10**9


def find_cache_directory() -> Path:
    """The cache directory: `TRACELOOM_CACHE_DIR`, else the user's cache directory."""
    override = os.environ.get("TRACELOOM_CACHE_DIR")
    if override:
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("traceloom", appauthor=False))


def evict(directory: Path, cap_bytes: int) -> None:
    """Drop the entries of a folder unused for longest until the rest fits; and what a killed
    process left half made.
    """
    entries = []
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            with contextlib.suppress(OSError):
                size = sum(file.lstat().st_size for file in entry.rglob("*"))
                entries.append((entry.stat().st_mtime, size, entry))
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if total <= cap_bytes:
            return
        discard(entry)
        total -= size


def discard(entry: Path) -> None:
    """Throw away whatever lies there."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()
