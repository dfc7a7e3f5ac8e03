"""Input and output files: atomic writes that never replace an input, addresses of remote inputs,
and the cache directory.
"""

import contextlib
import errno
import hashlib
import logging
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

_LOG = logging.getLogger("traceloom.files")


class _Inputs(NamedTuple):
    """The inputs of this process, by (device, inode) and by resolved path."""

    files: set[tuple[int, int]]
    paths: set[str]


_inputs: _Inputs | None = None
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_addresses: dict[str, str] = {}  # local copy -> the address it was fetched from, in this process


def is_address(name: str | os.PathLike[str]) -> bool:
    """Whether a name is an address such as `s3://bucket/run` rather than a local path."""
    return _ADDRESS.match(os.fspath(name)) is not None


def remember_address(copy: Path, address: str) -> None:
    """Remember the address from which a local copy was fetched, so that messages show the address."""
    _addresses[str(copy)] = address


def restore_addresses(text: str) -> str:
    """Returns a text with the paths of local copies replaced by the addresses that the user gave."""
    for copy in sorted(_addresses, key=len, reverse=True):
        text = text.replace(copy, _addresses[copy])
    return text


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; refuses pipes (which would block until there is a writer),
    symbolic links and devices.

    Raises:
        OSError: It is not a regular file, or cannot be read.
    """
    handle = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    )
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(handle, "rb")


def open_own(
    path: str | Path,
    user: int,
    kind: int = stat.S_IFREG,
    access: int = os.O_RDONLY,
    *,
    follow: bool = False,
) -> int:
    """Open what a user has: a file, or another `kind`, of that user alone and with one name.

    It is looked at before it is opened, as the user may put something else there at any time, and to
    open some devices does something. `follow`: if it is a link, open what that leads to.

    Raises:
        OSError: It is something else, or cannot be opened.
    """
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        status = os.fstat(found)
        if (stat.S_IFMT(status.st_mode), status.st_uid, status.st_nlink) != (kind, user, 1):
            raise PermissionError(errno.EPERM, f"it is no file of user {user} with one name")
        return os.open(f"/proc/self/fd/{found}", access | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(found)


def find_foreign_part(path: Path) -> str:
    """Returns why somebody other than root and this user may have put there what lies at a path, or
    may replace it; "" if nobody can. The path itself need not exist.
    """
    for way in dict.fromkeys((path.absolute(), Path(os.path.realpath(path)))):
        for part in (*reversed(way.parents[:-1]), way):
            try:
                status = part.lstat()
            except FileNotFoundError:
                break
            if status.st_uid not in {0, os.geteuid()}:
                return f"{part} belongs to another user"
            is_sticky = status.st_mode & stat.S_ISVTX  # as /tmp: nobody replaces files of others
            if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o022 and not is_sticky:
                return f"others can write in {part}"
    return ""


def prepare_private_file(path: Path) -> None:
    """Make sure that nobody else can use a SQLite file, before anything is written into it.

    Whoever could read it before may hold a lock that stops writers for ever, so the content moves to
    a new file. No other process of its user may have it open then.

    Raises:
        OSError: It cannot be created, or belongs to another user.
    """
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
    for part in (path, Path(f"{path}-wal")):
        if restrict_mode(part):
            Path(f"{path}-shm").unlink(missing_ok=True)  # its locks; it is made anew
            temporary_path = make_temporary_path(part)
            with part.open("rb") as old, temporary_path.open("xb") as new:
                temporary_path.chmod(0o600)
                shutil.copyfileobj(old, new)
            temporary_path.replace(part)


def restrict_mode(path: Path) -> bool:
    """Take all rights of others to a file or directory away; returns whether they had any.

    Raises:
        OSError: It belongs to another user.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode):
        raise PermissionError(errno.EPERM, f"{path} belongs to another user, or is a link")
    if not status.st_mode & 0o077:
        return False
    path.chmod(stat.S_IMODE(status.st_mode) & ~0o077)
    _LOG.warning("others could use %s; now only its user can", path)
    return True


def open_input(path: str | Path) -> BinaryIO:
    """Open a user's input for reading: a file or a pipe. Devices are refused, as they may have no
    end or change state when read.

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
    """Returns the content of a user's file, if it has at most `max_bytes` bytes.

    Raises:
        OSError: It is larger, is a device, or cannot be read.
    """
    with open_input(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes // 10**6:,} MB")
    return content


@contextmanager
def protect_inputs(given_paths: Iterable[str | Path] = ()) -> Iterator[None]:
    """Refuse to overwrite any input within this context.

    Args:
        given_paths: Files and directories given by the user. Readers add the files that they find
            there (`remember_input`).
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
    """Returns a sort key for file names in which numbers are compared by value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", path.name)
    ]


def remember_input(path: str | Path) -> None:
    """Remember that a file is an input, so that nothing overwrites it."""
    if _inputs is not None:
        with suppress(OSError, ValueError):  # a missing file cannot be an input
            _inputs.files.add(_identify_file(Path(path).stat()))
            _inputs.paths.add(os.path.realpath(path))


def check_name(path: Path) -> None:
    """Refuse a file name that the file system does not allow, such as one that is too long.

    Raises:
        OutputError: slug `cannot-write`.
    """
    with report_write_errors(path), suppress(FileNotFoundError, NotADirectoryError, ValueError):
        path.lstat()


def refuse_input(path: Path) -> None:
    """Refuse to overwrite an input, or a directory that contains one.

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
    """Check that a file can be written at a path, before any work is done.

    Raises:
        UsageError: slug `wrong-usage`: it is an input.
        OutputError: slug `file-exists` without `force`; slug `cannot-write` if it is not a regular
            file.
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
    """Returns the type of the entry at a path, without following links; empty if there is none."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):
        return ""  # a path that cannot be inspected cannot be written either
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symbolic link" if stat.S_ISLNK(mode) else "device, pipe or socket"


def write(
    path: Path, produce: Callable[[BinaryIO], object], *, force: bool, private: bool = False
) -> int:
    """Write a file atomically: `produce` writes a temporary file, which is then renamed. A replaced
    file passes on its mode.

    Args:
        path: The file.
        produce: Writes the content.
        force: Replace an existing file.
        private: Make it readable by the owner only.

    Returns:
        The size of the file in bytes.

    Raises:
        UsageError: slug `wrong-usage`: it is an input.
        OutputError: slug `file-exists`; slug `cannot-write` if the disk is full or access is
            denied.
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
    """Returns an unpredictable name in the same folder, for the temporary file that will be renamed
    to `path`.
    """
    return path.with_name(f".{os.urandom(8).hex()}.partial")


def keep_mode(path: Path, temporary_path: Path) -> None:
    """Copy the mode of the existing file to the one that will replace it.

    Raises:
        OSError: It cannot be changed.
    """
    if _describe_file_type(path):
        temporary_path.chmod(stat.S_IMODE(path.stat().st_mode))


@contextmanager
def _remove_on_failure(temporary_path: Path) -> Iterator[None]:
    """Remove the temporary file or directory if it could not be renamed."""

    def remove() -> None:
        with suppress(OSError):  # report the first error, not that of the clean-up
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
    """Convert an OSError of a write into an OutputError with a readable message."""
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
    """Check that a directory of files can be written at a path, before any work is done.

    Args:
        path: The directory.
        own_files_pattern: Regular expression that matches the relative paths of such files; with
            `force`, a directory that holds nothing else may be replaced.
        force: Replace an existing directory.

    Raises:
        UsageError: slug `wrong-usage`: it is an input, or holds one.
        OutputError: slug `file-exists` without `force`; slug `cannot-write` if it is not a
            directory or holds other files.
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
    """Write a directory atomically: `produce` fills a temporary directory, which is then renamed.

    Args:
        path: The directory.
        produce: Writes files into the directory that it is given.
        own_files_pattern: See `check_directory`.
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
    """Rename a complete directory into place. If that fails, the previous directory is restored.

    Raises:
        OSError: It cannot be renamed.
    """
    old = make_temporary_path(path)
    with process.defer_signals():
        try:
            if path.exists():
                path.rename(old)
            temporary_path.rename(path)
        except BaseException:
            with suppress(OSError):  # report the first error, not that of the clean-up
                if old.exists() and not path.exists():
                    old.rename(path)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


def compute_sha256(file: BinaryIO) -> str:
    """Returns the SHA-256 of the rest of an open file, in hexadecimal."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


MAX_CACHE_BYTES = 10 * 10**9


def find_cache_directory() -> Path:
    """Returns `TRACELOOM_CACHE_DIR`, else the user's cache directory."""
    override = os.environ.get("TRACELOOM_CACHE_DIR")
    if override:
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("traceloom", appauthor=False))


def evict(directory: Path, cap_bytes: int) -> None:
    """Delete the least recently used entries of a folder until the rest fits, and leftovers of
    killed processes.
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
    """Delete a file or a directory tree."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()
