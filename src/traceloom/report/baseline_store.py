"""Stores baselines in a directory, or in any place that fsspec can write to."""

import errno
import os
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from traceloom import __version__
from traceloom.analyze.gate_summary import FORMAT, VERSION, Baseline, RunSummary, decode, encode
from traceloom.errors import InputError, OutputError, UsageError
from traceloom.system import files
from traceloom.system.remote import open_file_system, strip_secrets

DEFAULT_DIRECTORY = ".traceloom/baselines"
_SUFFIX = ".baseline.json.gz"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_BYTES = 1 << 28


class BaselineStore:
    """Baselines by name.

    Args:
        where: A directory, or a URL of a file system that fsspec knows (`s3://bucket/baselines`).

    Raises:
        UsageError: `no-fsspec`: a URL, and fsspec or the package that it needs for such URLs is not
            installed.
    """

    def __init__(self, where: str = DEFAULT_DIRECTORY) -> None:
        self.where = where
        self._place: _LocalDirectory | _RemoteDirectory = (
            _RemoteDirectory(where) if "://" in where else _LocalDirectory(Path(where))
        )

    def names(self) -> list[str]:
        names = (
            name.removesuffix(_SUFFIX) for name in self._place.names() if name.endswith(_SUFFIX)
        )
        return [name for name in names if _NAME.fullmatch(name)]

    def save(self, name: str, runs: Sequence[RunSummary], saved_unix_s: int, *, force: bool) -> str:
        """Saves the summaries of runs under a name; returns the path.

        Raises:
            UsageError: `bad-baseline-name`.
            OutputError: `file-exists` without `force`; `cannot-write`.
        """
        check_baseline_name(name)
        data = encode(Baseline(FORMAT, VERSION, __version__, name, saved_unix_s, list(runs)))
        return self._place.write(f"{name}{_SUFFIX}", data, force=force)

    def load(self, name: str) -> Baseline:
        """Loads a baseline.

        Raises:
            UsageError: `bad-baseline-name`; `no-such-baseline`.
            InputError: `damaged-baseline`; `unreadable`.
        """
        check_baseline_name(name)
        data = self._place.read(f"{name}{_SUFFIX}")
        if data is None:
            names = self.names()
            raise UsageError(
                f"there is no baseline `{name}`",
                slug="no-such-baseline",
                where=self.where,
                hint=(
                    f"it has {', '.join(names[:10])}"
                    if names
                    else "it has none; see traceloom baseline save --help"
                ),
            )
        return decode(data, f"{self.where}: {name}")


def check_baseline_name(name: str) -> str:
    """Returns the name if it is valid and stays in its folder.

    Raises:
        UsageError: `bad-baseline-name`.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"`{name[:100]}` is no name of a baseline",
            slug="bad-baseline-name",
            hint="up to 100 letters, digits, `.`, `-` and `_`, the first a letter or digit, as in main or release-1.2",
        )
    return name


class _LocalDirectory:
    """A folder of this host. A write is atomic; of a file that does not exist, None is read."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory

    def names(self) -> list[str]:
        try:
            return sorted(path.name for path in self._folder.iterdir() if path.is_file())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _make_read_error(error, str(self._folder)) from error

    def read(self, name: str) -> bytes | None:
        path = self._folder / name
        files.remember_input(path)
        try:
            return files.read_small(path, _MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.EFBIG:
                return b""
            raise _make_read_error(error, str(path)) from error

    def write(self, name: str, data: bytes, *, force: bool) -> str:
        path = self._folder / name

        def produce(handle: BinaryIO) -> None:
            handle.write(data)

        files.write(path, produce, force=force)
        return str(path)


class _RemoteDirectory:
    """A folder of any fsspec file system.

    Errors may be any exception of an unknown library.
    """

    def __init__(self, url: str) -> None:
        self._url = strip_secrets(url)
        self._fs, self._root = open_file_system(url)

    def names(self) -> list[str]:
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _make_read_error(error, self._url) from error
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def read(self, name: str) -> bytes | None:
        try:
            path = f"{self._root}/{name}"
            return b"" if self._fs.size(path) > _MAX_BYTES else bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _make_read_error(error, f"{self._url}/{name}") from error

    def write(self, name: str, data: bytes, *, force: bool) -> str:
        path, location = f"{self._root}/{name}", f"{self._url}/{name}"
        temporary_path = f"{self._root}/.{name}.{uuid.uuid4().hex}.partial"
        if not force and name in self.names():
            raise OutputError(
                f"`{location}` exists already",
                slug="file-exists",
                hint="use --force to overwrite it",
            )
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            try:
                self._fs.pipe_file(temporary_path, data)
                self._fs.mv(temporary_path, path)
            except BaseException:
                with suppress(Exception):  # the first error is the relevant one
                    self._fs.rm_file(temporary_path)
                raise
        except Exception as error:
            raise OutputError(
                f"`{location}` cannot be written: {error or type(error).__name__}",
                slug="cannot-write",
                hint="choose another place with --store",
            ) from error
        return location


def _make_read_error(error: Exception, location: str) -> InputError:
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return InputError(
        f"baselines cannot be read: {reason or type(error).__name__}",
        slug="unreadable",
        where=location,
    )
