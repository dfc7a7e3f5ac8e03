"""Inputs from S3, gs and HTTP, downloaded in chunks and cached.

Only what the user named is fetched: one file of a web server, with redirects within its own host
only; one object, or the objects below a prefix, of a store. What has not changed since it was
fetched is not fetched again.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from traceloom.errors import InputError, TraceloomError, UsageError
from traceloom.system import files
from traceloom.system.files import MAX_CACHE_BYTES, evict, find_cache_directory

MAX_BYTES = MAX_CACHE_BYTES  # per input
MAX_FILES = 10_000  # per prefix
_MAX_DEPTH = 5  # levels below a prefix
_CHUNK_BYTES = 1 << 20
_STORE_CHUNK_BYTES = 1 << 24  # bytes per request to a store
_SERVERS, _STORES = ("http", "https"), ("s3", "gs")
_VERSIONS_FILE = "versions.json"
_VERSION_HEADERS = ("ETag", "Last-Modified")
_VERSION_KEYS = ("ETag", "etag", "LastModified", "updated", "generation", "created", "size")

ProgressCallback = Callable[[int, int | None], object]


class _RemoteFile(NamedTuple):
    """A file of a remote input.

    Attributes:
        name: Its path relative to the copy of the input.
        size: Bytes, if known.
        version: Changes whenever the content does; empty if the server does not provide one.
        open: Opens it for reading.
    """

    name: str
    size: int | None
    version: str
    open: Callable[[], BinaryIO]


def fetch_inputs(
    paths: Iterable[str | os.PathLike[str]],
    *,
    cache: bool = True,
    report_progress: ProgressCallback | None = None,
) -> tuple[str, ...]:
    """Returns the paths, with remote inputs replaced by their local copies; raises the errors of
    `fetch_copy`.
    """
    return tuple(
        str(fetch_copy(os.fspath(path), cache=cache, report_progress=report_progress))
        if files.is_address(path)
        else os.fspath(path)
        for path in paths
    )


def fetch_copy(
    url: str, *, cache: bool = True, report_progress: ProgressCallback | None = None
) -> Path:
    """Returns the local copy of a remote file or directory; `files.restore_addresses` maps it back
    to its address.

    Args:
        url: Its address.
        cache: Reuse an earlier copy that has not changed.
        report_progress: Called with the bytes so far and the total, if known.

    Raises:
        UsageError: `unknown-address` for any other kind of address; `no-fsspec`: the extra `remote`
            is not installed.
        InputError: `unreadable`; `redirected` to another host; `too-large`; `cut-download`.
    """
    address, display_url = urlsplit(url), strip_secrets(url)
    if address.scheme not in {*_SERVERS, *_STORES}:
        raise UsageError(
            f"`{display_url}` is no address to read from",
            slug="unknown-address",
            hint="give a file, a directory, or an address with s3://, gs://, http:// or https://",
        )
    name = PurePosixPath(unquote(address.path)).name or address.netloc.rpartition("@")[2]
    copy = (
        find_cache_directory()
        / "remote"
        / hashlib.blake2b(url.encode(), digest_size=20).hexdigest()
    )
    path = copy / ("input" if name in {"..", _VERSIONS_FILE} else name)
    with ExitStack() as opened:
        with _convert_errors(display_url):
            if address.scheme in _SERVERS:
                response = opened.enter_context(open_remote(url, display_url))
                length, changes = (
                    response.headers["Content-Length"] or "",
                    [response.headers[key] for key in _VERSION_HEADERS],
                )
                size = int(length) if length.isdigit() else None
                version = json.dumps([*changes, size]) if any(changes) else ""
                remotes = [_RemoteFile("", size, version, lambda: response)]
            else:
                remotes = [*_list_store(url)]
        versions: Any = {}  # of the files fetched before
        with suppress(OSError, ValueError):
            versions = json.loads((copy / _VERSIONS_FILE).read_bytes()) if cache else {}
        versions = versions if isinstance(versions, dict) else {}
        changed = [
            remote
            for remote in remotes
            if not remote.version
            or versions.get(remote.name) != remote.version
            or not (path / remote.name).is_file()
        ]
        _download(changed, path, display_url, report_progress or (lambda _done, _total: None))
    current = {remote.name: remote.version for remote in remotes}
    for stale_file in [
        file
        for file in path.rglob("*")
        if file.is_file() and file.relative_to(path).as_posix() not in current
    ]:
        stale_file.unlink()
    files.write(
        copy / _VERSIONS_FILE, lambda out: out.write(json.dumps(current).encode()), force=True
    )
    with suppress(OSError):
        os.utime(copy)
        evict(copy.parent, MAX_CACHE_BYTES)
    files.remember_address(path, display_url)
    return path


def _download(
    remotes: list[_RemoteFile], path: Path, display_url: str, report_progress: ProgressCallback
) -> None:
    """Write files below `path`, each atomically."""
    sizes = [remote.size for remote in remotes if remote.size is not None]
    total = sum(sizes) if len(sizes) == len(remotes) else None
    _check_size(sum(sizes), display_url)
    before = 0
    for remote in remotes:

        def produce(out: BinaryIO, remote: _RemoteFile = remote, before: int = before) -> None:
            size = 0
            with _convert_errors(display_url), closing(remote.open()) as stream:
                for chunk in iter(lambda: stream.read(_CHUNK_BYTES), b""):
                    out.write(chunk)
                    size += len(chunk)
                    _check_size(before + size, display_url)
                    report_progress(before + size, total)
            if remote.size not in {None, size}:
                message = f"the connection ended after {size:,} of {remote.size:,} bytes"
                raise InputError(message, slug="cut-download", where=display_url, hint="try again")

        before += files.write(path / remote.name, produce, force=True)


def strip_secrets(url: str) -> str:
    """Returns an address for display: without user, password and query, which may hold signatures."""
    return re.sub(r"://[^/@]*@", "://", url.partition("?")[0]).rstrip("/")


def open_file_system(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of an address, and the path in it.

    Raises:
        UsageError: `no-fsspec`: fsspec, or a package that it needs for such addresses, is not
            installed.
    """
    try:
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        scheme, extra = (
            urlsplit(url).scheme,
            "the extra `remote` of Traceloom has what s3:// and gs:// need",
        )
        raise UsageError(
            f"{scheme}:// cannot be opened: {error}",
            slug="no-fsspec",
            where=strip_secrets(url),
            hint=f"pip install 'traceloom[remote]' ({extra})",
        ) from error
    return file_system, str(path)


def _check_size(size: int, display_url: str) -> None:
    if size > MAX_BYTES:
        raise InputError(
            f"it has more than {MAX_BYTES // 10**9} GB, and no more is fetched for one input",
            slug="too-large",
            where=display_url,
            hint="fetch it yourself, or name fewer files",
        )


@contextmanager
def _convert_errors(display_url: str) -> Iterator[None]:
    """Convert remote errors, which may be any exception of an unknown library, into readable
    messages.
    """
    try:
        yield
    except (TraceloomError, GeneratorExit):
        raise
    except FileNotFoundError as error:
        raise InputError(
            "there is no such file or directory", slug="unreadable", where=display_url
        ) from error
    except Exception as error:
        raise InputError(
            f"it cannot be fetched: {getattr(error, 'reason', error) or type(error).__name__}",
            slug="unreadable",
            where=display_url,
        ) from error


def _list_store(url: str) -> Iterator[_RemoteFile]:
    store, path = open_file_system(url)
    store.invalidate_cache()  # its cached listings may be outdated
    root_info = store.info(path)
    if root_info["type"] == "file":
        objects = {"": root_info}
    else:
        objects = {}
        for _, _, entries in store.walk(path, maxdepth=_MAX_DEPTH, detail=True):
            for entry in entries.values():
                name = entry["name"].removeprefix(path).strip("/")
                if not name or ".." in PurePosixPath(name).parts:
                    continue
                objects[name] = entry
                if len(objects) > MAX_FILES:
                    raise InputError(
                        f"there are more than {MAX_FILES:,} files below this prefix",
                        slug="too-large",
                        where=strip_secrets(url),
                        hint="name a longer prefix",
                    )
        if not objects:
            raise FileNotFoundError(url)
    for name, info in objects.items():
        yield _RemoteFile(
            name,
            info["size"],
            json.dumps([info.get(key) for key in _VERSION_KEYS], default=str),
            partial(store.open, info["name"], "rb", block_size=_STORE_CHUNK_BYTES),
        )


_TIMEOUT_S = 60


def open_remote(url: str, display_url: str) -> Any:
    """Returns the response of the server after its headers have been read.

    Args:
        url: The address; a user and a password in it are sent in a header.
        display_url: The address for display.

    Raises:
        InputError: `redirected` to another host; `unreadable`: a directory, or the server refuses.
        OSError: The server cannot be reached.
    """
    address = urlsplit(url)
    if address.path.endswith("/") or not address.path:
        raise InputError(
            "web servers do not list directories",
            slug="unreadable",
            where=display_url,
            hint="name each file, as in https://host/run/rank0.kineto.json.gz; directories are read from s3:// and gs://",
        )
    headers = {"User-Agent": "traceloom"}
    if address.username is not None:
        pair = f"{unquote(address.username)}:{unquote(address.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    request = Request(  # noqa: S310
        address._replace(netloc=address.netloc.rpartition("@")[2]).geturl(), headers=headers
    )
    try:
        return build_opener(_SameHostRedirects).open(request, timeout=_TIMEOUT_S)
    except HTTPError as error:
        error.close()
        raise InputError(
            f"it cannot be fetched: the server says {error.code} {error.reason}",
            slug="unreadable",
            where=display_url,
        ) from error


class _SameHostRedirects(HTTPRedirectHandler):
    """Follows redirects within the same host, and from http to https."""

    def redirect_request(  # noqa: PLR0917
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        """Returns the next request.

        Raises:
            InputError: `redirected`.
        """
        current, target = urlsplit(req.full_url), urlsplit(newurl)
        upgraded = (
            (current.scheme, target.scheme) == ("http", "https")
            and current.port is None
            and target.port is None
        )
        if current.hostname != target.hostname or not (
            upgraded or (current.scheme, current.port) == (target.scheme, target.port)
        ):
            fp.close()
            raise InputError(
                f"the server redirects to another host, {target.scheme}://{target.netloc.rpartition('@')[2]}",
                slug="redirected",
                where=current._replace(query="").geturl(),
                hint="name the address that it redirects to, if you trust that host",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)
