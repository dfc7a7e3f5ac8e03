"""S3, gs, http inputs, copied in pieces.

Only what the user named is fetched: one file of a web server, which may redirect within its own host alone; one object,
or the objects below a prefix, of a store. What has not changed since it was fetched is not fetched again.
"""

from __future__ import annotations

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
from traceloom.system.files import CAP_BYTES, cache_directory, evict

MOST_BYTES = CAP_BYTES  # of one input
MOST_FILES = 10_000  # below one prefix
_DEPTH = 5  # levels below a prefix
_PIECE = 1 << 20
_BLOCK = 1 << 24  # bytes that a store is asked for at once
_SERVERS, _STORES = ("http", "https"), ("s3", "gs")
_VERSIONS = "versions.json"
_CHANGES = ("ETag", "Last-Modified")
_CHANGES_OF_OBJECT = ("ETag", "etag", "LastModified", "updated", "generation", "created", "size")

Say = Callable[[int, int | None], object]


class _Remote(NamedTuple):
    """A file that lies elsewhere.

    Attributes:
        name: Where it goes, relative to the copy of the input.
        size: Bytes, where that is known.
        version: Another one for another content; empty where the server does not tell.
        open: Begins to read it.
    """

    name: str
    size: int | None
    version: str
    open: Callable[[], BinaryIO]


def local(paths: Iterable[str | os.PathLike[str]], *, cache: bool = True, say: Say | None = None) -> tuple[str, ...]:
    """The paths with local copies of what lies elsewhere; errors as of `fetched`."""
    return tuple(
        str(fetched(os.fspath(path), cache=cache, say=say)) if files.is_address(path) else os.fspath(path)
        for path in paths
    )


def fetched(url: str, *, cache: bool = True, say: Say | None = None) -> Path:
    """The local copy of a file or directory that lies elsewhere; `files.with_addresses` shows it as it was named.

    Args:
        url: Where it lies.
        cache: Take what was fetched before, where it has not changed.
        say: Called with the bytes so far and those of all that is fetched, where that is known.

    Raises:
        UsageError: `unknown-address` for any other kind of address; `no-fsspec`: the extra `remote` is not installed.
        InputError: `unreadable`; `redirected` to another host; `too-large`; `cut-download`.
    """
    address, shown = urlsplit(url), without_secrets(url)
    if address.scheme not in {*_SERVERS, *_STORES}:
        hint = "give a file, a directory, or an address with s3://, gs://, http:// or https://"
        raise UsageError(f"`{shown}` is no address to read from", slug="unknown-address", hint=hint)
    name = PurePosixPath(unquote(address.path)).name or address.netloc.rpartition("@")[2]
    copy = cache_directory() / "remote" / hashlib.blake2b(url.encode(), digest_size=20).hexdigest()
    path = copy / ("input" if name in {"..", _VERSIONS} else name)
    with ExitStack() as opened:
        with _reported(shown):
            if address.scheme in _SERVERS:
                response = opened.enter_context(begin(url, shown))
                length, changes = response.headers["Content-Length"] or "", [response.headers[key] for key in _CHANGES]
                size = int(length) if length.isdigit() else None
                version = json.dumps([*changes, size]) if any(changes) else ""
                remotes = [_Remote("", size, version, lambda: response)]
            else:
                remotes = [*_in_store(url)]
        versions: Any = {}  # of what was fetched before
        with suppress(OSError, ValueError):
            versions = json.loads((copy / _VERSIONS).read_bytes()) if cache else {}
        versions = versions if isinstance(versions, dict) else {}
        changed = [
            remote
            for remote in remotes
            if not remote.version or versions.get(remote.name) != remote.version or not (path / remote.name).is_file()
        ]
        _download(changed, path, shown, say or (lambda _done, _total: None))
    current = {remote.name: remote.version for remote in remotes}
    for gone in [
        file for file in path.rglob("*") if file.is_file() and file.relative_to(path).as_posix() not in current
    ]:
        gone.unlink()
    files.write(copy / _VERSIONS, lambda out: out.write(json.dumps(current).encode()), force=True)
    with suppress(OSError):
        os.utime(copy)
        evict(copy.parent, CAP_BYTES)
    files.remember_address(path, shown)
    return path


def _download(remotes: list[_Remote], path: Path, shown: str, say: Say) -> None:
    """Write files below `path`, each whole or not at all."""
    sizes = [remote.size for remote in remotes if remote.size is not None]
    total = sum(sizes) if len(sizes) == len(remotes) else None
    _check_size(sum(sizes), shown)
    before = 0
    for remote in remotes:

        def produce(out: BinaryIO, remote: _Remote = remote, before: int = before) -> None:
            size = 0
            with _reported(shown), closing(remote.open()) as stream:
                pieces = iter(lambda: stream.read(_PIECE), b"")
                for piece in pieces:
                    out.write(piece)
                    size += len(piece)
                    _check_size(before + size, shown)
                    say(before + size, total)
            if remote.size not in {None, size}:
                message = f"the connection ended after {size:,} of {remote.size:,} bytes"
                raise InputError(message, slug="cut-download", where=shown, hint="try again")

        before += files.write(path / remote.name, produce, force=True)


def without_secrets(url: str) -> str:
    """An address as it may be shown: without user, password and query, which holds signatures."""
    return re.sub(r"://[^/@]*@", "://", url.partition("?")[0]).rstrip("/")


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it.

    Raises:
        UsageError: `no-fsspec`: fsspec, or what it needs for such addresses, is not installed.
    """
    try:
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        scheme, extra = urlsplit(url).scheme, "the extra `remote` of Traceloom has what s3:// and gs:// need"
        raise UsageError(
            f"{scheme}:// cannot be opened: {error}",
            slug="no-fsspec",
            where=without_secrets(url),
            hint=f"pip install 'traceloom[remote]' ({extra})",
        ) from error
    return file_system, str(path)


def _check_size(size: int, where: str) -> None:
    if size > MOST_BYTES:
        message = f"it has more than {MOST_BYTES // 10**9} GB, and no more is fetched for one input"
        raise InputError(message, slug="too-large", where=where, hint="fetch it yourself, or name fewer files")


@contextmanager
def _reported(where: str) -> Iterator[None]:
    """Say in a sentence what went wrong elsewhere, which may be any exception of a library that we do not know."""
    try:
        yield
    except (TraceloomError, GeneratorExit):
        raise
    except FileNotFoundError as error:
        raise InputError("there is no such file or directory", slug="unreadable", where=where) from error
    except Exception as error:
        message = f"it cannot be fetched: {getattr(error, 'reason', error) or type(error).__name__}"
        raise InputError(message, slug="unreadable", where=where) from error


def _in_store(url: str) -> Iterator[_Remote]:
    store, path = file_system(url)
    store.invalidate_cache()  # what it listed in this process before may have changed
    whole = store.info(path)
    if whole["type"] == "file":
        objects = {"": whole}
    else:
        objects = {}
        for _, _, inside in store.walk(path, maxdepth=_DEPTH, detail=True):
            for each in inside.values():
                name = each["name"].removeprefix(path).strip("/")
                if not name or ".." in PurePosixPath(name).parts:
                    continue
                objects[name] = each
                if len(objects) > MOST_FILES:
                    message = f"there are more than {MOST_FILES:,} files below this prefix"
                    raise InputError(message, slug="too-large", where=without_secrets(url), hint="name a longer prefix")
        if not objects:
            raise FileNotFoundError(url)
    for name, about in objects.items():
        version = json.dumps([about.get(key) for key in _CHANGES_OF_OBJECT], default=str)
        yield _Remote(name, about["size"], version, partial(store.open, about["name"], "rb", block_size=_BLOCK))


_TIMEOUT_S = 60


def begin(url: str, shown: str) -> Any:
    """The response of the server, of which the headers are read.

    Args:
        url: The address; a user and a password in it go into a header.
        shown: The address as it may be shown.

    Raises:
        InputError: `redirected` to another host; `unreadable`: a directory, or the server refuses.
        OSError: The server cannot be reached.
    """
    address = urlsplit(url)
    if address.path.endswith("/") or not address.path:
        hint = "name each file, as in https://host/run/rank0.kineto.json.gz; directories are read from s3:// and gs://"
        raise InputError("web servers do not list directories", slug="unreadable", where=shown, hint=hint)
    headers = {"User-Agent": "traceloom"}
    if address.username is not None:
        pair = f"{unquote(address.username)}:{unquote(address.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    request = Request(address._replace(netloc=address.netloc.rpartition("@")[2]).geturl(), headers=headers)  # noqa: S310  (checked)
    try:
        return build_opener(_SameHost).open(request, timeout=_TIMEOUT_S)
    except HTTPError as error:
        error.close()
        message = f"it cannot be fetched: the server says {error.code} {error.reason}"
        raise InputError(message, slug="unreadable", where=shown) from error


class _SameHost(HTTPRedirectHandler):
    """Follows a server within its own host, and from http to https."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: PLR0917
        """The next request.

        Raises:
            InputError: `redirected`.
        """
        here, there = urlsplit(req.full_url), urlsplit(newurl)
        upgraded = (here.scheme, there.scheme) == ("http", "https") and here.port is None and there.port is None
        if here.hostname != there.hostname or not (upgraded or (here.scheme, here.port) == (there.scheme, there.port)):
            fp.close()
            raise InputError(
                f"the server redirects to another host, {there.scheme}://{there.netloc.rpartition('@')[2]}",
                slug="redirected",
                where=here._replace(query="").geturl(),
                hint="name the address that it redirects to, if you trust that host",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)
