"""Files of the service, in a directory or in an object store (S3, Google Cloud Storage or Azure).

Captures are in `captures/DAY/ID/NAME`, their records in `announced/DAY/ID.json`; what clients send
to signed URLs of an object store in `incoming/DAY/ID/NAME`, until it is complete and copied, or old; rows
that wait for their commit in `analysed/TASK.zip`, rendered pages in `reports/`. Objects are written
atomically and never changed afterwards.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal
from urllib.parse import unquote, urlsplit

from traceloom.errors import InputError, OutputError, UsageError, unreadable
from traceloom.system.files import is_address, restrict_mode

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

_NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=-]{0,199}")
_MAX_PARTS = 6
_READ_BYTES = 1 << 20
_PARTIAL_PREFIX = ".incoming-"
_STALE_AFTER_S = 86_400  # partial files older than this have no writer any more
_CLIENT_OPTIONS = {"connect_timeout": "5s", "timeout": "600s"}
_MAX_UPLOAD_BYTES = 5000 << 20
"""Bytes that one PUT to a signed URL can upload on both S3 (max 5 GiB) and Azure (max 5,000
MiB).
"""
_RETRY_OPTIONS = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
_DECORATION = re.compile(r"\x1b\[\d*m|↳")
_STORE_ERRORS = (
    (("NoSuchBucket", "ContainerNotFound"), "there is no such bucket; it has to be made first"),
    (
        ("BadScheme", "URL scheme is not allowed"),
        "its address is http without TLS, which AWS_ALLOW_HTTP=true allows",
    ),
    (
        ("169.254.169.254", "metadata.google.internal", "NoCredentials"),
        "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or those of your store",
    ),
    (
        ("invalid peer certificate", "UnknownIssuer", "InvalidCertificate"),
        "its certificate is not trusted here; SSL_CERT_FILE names those that are",
    ),
    (
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"),
        "the bucket is of another region; AWS_REGION names it",
    ),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "AuthenticationFailed"),
        "it refuses the credentials, or these may not do that",
    ),
    (
        ("kind: Connect", "(Connect)", "dns error"),
        "it cannot be reached; AWS_ENDPOINT_URL is the address of one that is not Amazon's",
    ),
)
_DIRECTORIES = ("captures", "analysed", "reports", "tables", "from-hosts")
SCHEMES = ("s3", "gs", "az", "abfss")


def check_object_name(name: str) -> str:
    """Returns a name of an object or of a capture's file, if it is safe: parts separated by `/`
    that cannot leave the store.

    Raises:
        UsageError: `unsafe-name`.
    """
    parts = name.split("/")
    if len(parts) > _MAX_PARTS or not all(_NAME_PART.fullmatch(part) for part in parts):
        raise UsageError(
            f"{name[:80]!r} cannot be the name of a file here",
            slug="unsafe-name",
            hint="names have letters, digits and . _ - @ + =, and begin with a letter, a digit or _",
        )
    return name


class ObjectStore:
    """Files below a directory or an object-store URL.

    Args:
        url: Directory, or address as `s3://bucket/prefix`, `gs://...`, `az://...`.
        options: Settings of the object store (keys, endpoint) as named by the `object_store`
            library; the others come from the environment, such as `AWS_ACCESS_KEY_ID`.

    Raises:
        InputError: `no-extra`: the extra `fleet` is not installed.
        OutputError: `cannot-write`: the directory cannot be created.
        UsageError: `wrong-usage`: an address of another kind.
    """

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.directory: Path | None = None
        self._store: S3Store | GCSStore | AzureStore | LocalStore
        try:
            from obstore.exceptions import BaseError
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            hint = "pip install 'traceloom[fleet]'"
            raise InputError(
                "the files of a fleet need obstore", slug="no-extra", hint=hint
            ) from error
        if is_address(url) and not url.startswith("file://"):
            if urlsplit(url).scheme not in SCHEMES:
                hint = f"it has {', '.join(SCHEMES)}, and directories"
                raise UsageError(
                    "no object store has such addresses",
                    slug="wrong-usage",
                    where=url[:80],
                    hint=hint,
                )
            config = dict(options or {})
            # Client options take precedence.
            allow_http = config.pop("aws_allow_http", os.environ.get("AWS_ALLOW_HTTP", ""))
            try:
                self._store = from_url(  # type: ignore[call-overload]
                    self.url,
                    config=config,
                    retry_config=_RETRY_OPTIONS,
                    client_options={
                        **_CLIENT_OPTIONS,
                        "allow_http": allow_http.lower() in {"1", "true"},
                    },
                )
            except (BaseError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise UsageError(
                    f"the address cannot be used: {reason}", slug="wrong-usage", where=url[:80]
                ) from error
            return
        self.directory = Path(
            unquote(urlsplit(url).path) if url.startswith("file://") else url
        ).absolute()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in _DIRECTORIES:
                restrict_mode(self.directory / name)
        except OSError as error:
            raise _build_write_error(self.directory, error) from error
        self._store = LocalStore(self.directory)
        for leftover in self.directory.glob(f"{_PARTIAL_PREFIX}*"):  # of a process that was killed
            with suppress(FileNotFoundError):
                if leftover.stat().st_mtime < time.time() - _STALE_AFTER_S:
                    leftover.unlink()

    def put(self, name: str, content: bytes) -> bool:
        """Writes a small object; returns False and changes nothing if it already exists.

        Raises:
            OutputError: `cannot-write`.
            UsageError: `unsafe-name`.
        """
        from obstore.exceptions import AlreadyExistsError

        if self.directory is not None:
            with self.writing(name) as file:
                file.write(content)
            return not file.existed
        with self._explaining(name, writes=True):
            try:
                self._store.put(name, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def put_file(self, name: str, path: Path) -> None:
        """Writes a file of any size under a name; an existing object is left unchanged.

        Errors as for `put`.
        """
        if self.directory is not None:
            with path.open("rb") as source, self.writing(name) as file:
                shutil.copyfileobj(source, file, 1 << 20)
            return
        if self.size(name) is None:
            with self._explaining(name, writes=True):
                self._store.put(name, path)

    @contextmanager
    def writing(self, name: str) -> Iterator[NewFile]:
        """Yields a new file in a directory, which appears under its name once the block ends
        without error.

        Raises:
            OutputError: `cannot-write`.
            UsageError: `unsafe-name`.
        """
        assert self.directory is not None, "object stores take files by `upload_url`"
        path = self.directory / check_object_name(name)
        partial = self.directory / f"{_PARTIAL_PREFIX}{secrets.token_hex(8)}"
        try:
            with partial.open("xb") as handle:
                file = NewFile(handle)
                yield file
                handle.flush()
                os.fsync(handle.fileno())
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(partial, path)  # unlike a rename, a link replaces nothing
            except FileExistsError:
                file.existed = True
        except OSError as error:
            raise _build_write_error(path, error) from error
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()

    @property
    def most_uploaded(self) -> int:
        """Returns the max bytes of a file that a client can upload to this store."""
        return sys.maxsize if self.directory is not None else _MAX_UPLOAD_BYTES

    def upload_url(self, name: str, seconds: int) -> str | None:
        """Returns a URL to which anyone may PUT this object for `seconds`; None for a directory.

        Raises:
            InputError: `unreadable`: there are no credentials to sign with.
            UsageError: `unsafe-name`.
        """
        return None if self.directory is not None else self._signed("PUT", name, seconds)

    def readable_at(self, name: str, seconds: int) -> str | None:
        """Returns where a process without credentials can read this object for `seconds`: a URL
        signed for this object, or the path in a directory; None if a directory has no such file.

        Raises:
            InputError: `unreadable`: there are no credentials to sign with.
            UsageError: `unsafe-name`.
        """
        if self.directory is None:
            return self._signed("GET", name, seconds)
        path = self.directory / check_object_name(name)
        return str(path) if path.is_file() else None

    def _signed(self, method: Literal["GET", "PUT"], name: str, seconds: int) -> str:
        import obstore
        from obstore.store import LocalStore

        assert not isinstance(self._store, LocalStore), "a directory signs nothing"
        with self._explaining(name):
            return obstore.sign(self._store, method, name, timedelta(seconds=seconds))

    def size(self, name: str) -> int | None:
        """Returns the bytes of an object; None if it does not exist.

        Raises:
            InputError: `unreadable`.
        """
        with self._explaining(name):
            try:
                return self._store.head(name)["size"]
            except FileNotFoundError:
                return None

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the content of an object in chunks.

        Raises:
            InputError: `unreadable`: it does not exist, or its store does not respond.
        """
        with self._explaining(name):
            for chunk in self._store.get(name).stream(min_chunk_size=_READ_BYTES):
                yield bytes(chunk)

    def copy(self, name: str, to: str) -> None:
        """Copies an object within an object store, such as one that a signed URL may still change.

        Raises:
            OutputError: `cannot-write`.
        """
        with self._explaining(to, writes=True):
            self._store.copy(name, to)

    def delete(self, name: str) -> None:
        """Deletes an object if it exists.

        Raises:
            OutputError: `cannot-write`.
        """
        with self._explaining(name, writes=True), suppress(FileNotFoundError):
            self._store.delete(name)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Returns the sorted names below a prefix, such as `analysed`, and the bytes of each.

        Raises:
            InputError: `unreadable`.
        """
        with self._explaining(prefix):
            return dict(
                sorted(
                    (entry["path"], entry["size"])
                    for page in self._store.list(prefix)
                    for entry in page
                )
            )

    @contextmanager
    def _explaining(self, name: str, *, writes: bool = False) -> Iterator[None]:
        """Has errors of the store say what cannot be done with an object, and why."""
        from obstore.exceptions import BaseError

        check_object_name(name)
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            if writes:
                raise _build_write_error(f"{self.url}/{name}", error) from error
            reason = ValueError(describe_store_error(error))
            raise unreadable(f"{self.url}/{name}", reason, "object") from error


class NewFile:
    """A file being written.

    `existed` becomes True if the name was already taken; the existing object is kept.
    """

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self.existed = False

    def write(self, chunk: bytes) -> None:
        self._handle.write(chunk)


def describe_store_error(error: Exception) -> str:
    """Returns why a store fails, and where that is known what to set: its libraries only say
    "Generic S3 error", and the cause in lines below.
    """
    text = getattr(error, "strerror", None) or str(error)
    for signs, cause in _STORE_ERRORS:
        if any(sign in text for sign in signs):
            return cause
    lines = text.partition("\n\nDebug source")[0].lower()
    return " ".join(_DECORATION.sub(" ", lines).split())[:500]


def _build_write_error(location: object, error: Exception) -> OutputError:
    reason = describe_store_error(error)
    return OutputError(
        f"the object cannot be written: {reason}", slug="cannot-write", where=str(location)
    )
