"""`traceloom upload`: sends captures to the fleet's service; also the client of that service."""

import argparse
import http.client
import json
import os
import random
import re
import shlex
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from platformdirs import user_config_path

from traceloom.cli import options as types
from traceloom.cli.outputs import Progress
from traceloom.errors import InputError, unreadable
from traceloom.server.client import decode_answer
from traceloom.system.files import compute_sha256, open_regular
from traceloom.system.service_address import ServiceAddress

DEFAULT_SERVER = "http://127.0.0.1:9466"
TOKEN_VARIABLE, SERVER_VARIABLE = "TRACELOOM_TOKEN", "TRACELOOM_SERVER"
_CHUNK_BYTES = 1 << 20
_TRANSIENT_STATUSES = {429, 500, 502, 503, 504}  # `SlowDown` of S3 is 503
_FIRST_DELAY_S, _MAX_DELAY_S = 0.25, 15.0
_OUTAGE_S, _TAKEOVER_S = 600.0, 10.0
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._@+=-]")


def get_token_path(url: str) -> Path:
    """Returns where this user's service at a URL stores the token for this user's commands."""
    suffix = "" if url == DEFAULT_SERVER else f"-{urlsplit(url).port}"
    return user_config_path("traceloom") / f"fleet-token{suffix}"


class FleetClient:
    """Client of the service; opens one connection per request.

    Args:
        url: Its URL, such as `https://fleet.example.org`; "": from the environment, else of this
            host.
        token: Authenticates the user; "": from the environment, else from the file that a service
            of this host left.
        timeout_s: Max time without a response.
        persistent: Try again where the service or a store is away or busy: for ten seconds, and for
            ten minutes once it has answered. Else only while another service begins to lead.

    Raises:
        InputError: `wrong-address`: the URL is invalid, or leads over a network without TLS.
    """

    def __init__(
        self, url: str = "", token: str = "", timeout_s: float = 60.0, *, persistent: bool = False
    ) -> None:
        self.url = (url or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER).rstrip("/")
        self.timeout_s, self.persistent = timeout_s, persistent
        self._has_answered = False
        ServiceAddress.of(self.url)  # every request carries a token
        self._token = token or os.environ.get(TOKEN_VARIABLE, "")
        if not self._token and self.url.startswith(
            DEFAULT_SERVER.rpartition(":")[0]
        ):  # it is valid for this host's service only
            try:
                self._token = (
                    get_token_path(self.url).read_text(encoding="ascii", errors="replace").strip()
                )
            except OSError:  # the service reports that a token is needed
                self._token = ""

    def get(self, route: str, **parameters: str) -> Any:
        """Returns the response of a route, such as `captures`.

        Raises:
            InputError: `no-service`: there is no response; the service's own slug where it refuses;
                `agent-unclear`.
        """
        return self._ask("GET", route, parameters)

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Sends a POST request; errors as for `get`."""
        return self._ask("POST", route, {}, json.dumps(body or {}).encode())

    def put(self, route: str, body: Mapping[str, Any]) -> Any:
        """Sends a PUT request; errors as for `get`."""
        return self._ask("PUT", route, {}, json.dumps(body).encode())

    def delete(self, route: str) -> Any:
        """Sends a DELETE request; errors as for `get`."""
        return self._ask("DELETE", route, {})

    def fetch(self, route: str, to: BinaryIO) -> None:
        """Writes the response of a route to a file; errors as for `get`.

        Raises:
            OSError: It cannot be written.
        """
        self._ask("GET", route, {}, to=to)

    def send(self, url: str, path: Path) -> None:
        """PUTs a file to a URL from the service; errors as for `get`, and `upload-failed` of an
        object store.
        """
        with open_regular(path) as file:
            if url.startswith("/api/v1/"):
                self._ask("PUT", url.removeprefix("/api/v1/"), {}, file)
                return
            # Azure refuses a file without the second header; others ignore it.
            headers = {"Content-Length": str(path.stat().st_size), "x-ms-blob-type": "BlockBlob"}
            status, text = self._exchange("PUT", url, file, headers)
        if status >= 300:
            raise InputError(
                f"the object store refuses the file with {status}",
                slug="upload-failed",
                where=text[:200].decode("utf-8", "replace"),
            )

    def _ask(
        self,
        method: str,
        route: str,
        parameters: Mapping[str, str],
        body: bytes | BinaryIO | None = None,
        to: BinaryIO | None = None,
    ) -> Any:
        query = f"?{urlencode(parameters)}" if parameters else ""
        headers = {"Content-Type": "application/json"} if isinstance(body, bytes) else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None and not isinstance(body, bytes):
            headers["Content-Length"] = str(os.fstat(body.fileno()).st_size)
        status, text = self._exchange(
            method, f"{self.url}/api/v1/{quote(route)}{query}", body, headers, to
        )
        return (
            decode_answer(status, text, self.url, "service")
            if status >= 400 or to is None
            else None
        )

    def _exchange(
        self,
        method: str,
        url: str,
        body: bytes | BinaryIO | None,
        headers: Mapping[str, str],
        to: BinaryIO | None = None,
    ) -> tuple[int, bytes]:
        """Sends a request until it is answered or patience ends; returns the status and the body."""
        patience_s = 0.0 if to else _OUTAGE_S if self._has_answered else _TAKEOVER_S
        end_s, delay_s = time.monotonic() + patience_s, _FIRST_DELAY_S
        while True:
            is_last = time.monotonic() + delay_s > end_s
            try:
                status, text = self._exchange_once(method, url, body, headers, to)
            except InputError as error:
                if is_last or not self.persistent or isinstance(error.__cause__, ssl.SSLError):
                    raise
            else:
                is_transient = self.persistent or b'"not-leading"' in text
                if is_last or status not in _TRANSIENT_STATUSES or not is_transient:
                    self._has_answered |= self.persistent and status < 400
                    return status, text
            time.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311  (so that clients do not come together)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
            if body is not None and not isinstance(body, bytes):
                body.seek(0)

    def _exchange_once(
        self,
        method: str,
        url: str,
        body: bytes | BinaryIO | None,
        headers: Mapping[str, str],
        to: BinaryIO | None,
    ) -> tuple[int, bytes]:
        parts = urlsplit(url)
        assert parts.hostname is not None
        tls = parts.scheme == "https"
        address = ServiceAddress(parts.hostname, parts.port or (443 if tls else 80), "", tls)
        connection = address.connection(self.timeout_s)
        connection.blocksize = _CHUNK_BYTES
        display_url = parts._replace(query="").geturl()  # the query of a signed URL is a secret
        is_writing = False  # a full local disk is not a fault of the service
        try:
            connection.request(
                method,
                f"{parts.path}{'?' if parts.query else ''}{parts.query}",
                body,
                dict(headers),
            )
            response = connection.getresponse()
            if to is not None and response.status < 400:
                while chunk := response.read(_CHUNK_BYTES):
                    is_writing = True
                    to.write(chunk)
                    is_writing = False
                if response.length:  # reading in pieces does not report a missing end
                    raise http.client.IncompleteRead(b"", response.length)
                return response.status, b""
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            if is_writing:
                raise
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            who = "the service" if url.startswith(self.url) else "the object store"
            message = f"{who} does not answer: {reason.lower()}"
            hint = "`traceloom serve` starts one; --server names its address"
            if isinstance(error, ssl.SSLCertVerificationError):
                message = f"the certificate of {who} is not trusted here: {error.verify_message}"
                hint = "SSL_CERT_FILE names the certificates that are trusted"
            raise InputError(message, slug="no-service", where=display_url, hint=hint) from error
        finally:
            connection.close()


def collect_files(capture: Path) -> dict[str, Path]:
    """Returns the files of a capture by their names in the store: a file, or the files of a folder.

    Characters other than letters, digits and `. _ - @ + =` are removed from names; hidden files and
    nested folders are not included.

    Raises:
        InputError: `no-inputs`: there are none; `unreadable`; `unsafe-name`: two would have the
            same name.
    """
    try:
        if not capture.is_dir():
            return {_clean_name(capture.name): capture}
        paths = [*capture.iterdir()]
        nested = [
            path
            for directory in paths
            if _is_uploaded(directory) and directory.is_dir()
            for path in directory.iterdir()
        ]
        files = [path for path in (*paths, *nested) if _is_uploaded(path) and path.is_file()]
    except OSError as error:
        raise unreadable(capture, error) from error
    if not files:
        raise InputError("there are no files to upload", slug="no-inputs", where=str(capture))
    by_name: dict[str, Path] = {}
    for path in sorted(files):
        name = "/".join(_clean_name(part) for part in path.relative_to(capture).parts)
        if name in by_name:
            raise InputError(
                f"`{by_name[name].relative_to(capture)}` and `{path.relative_to(capture)}` would both be `{name}`",
                slug="unsafe-name",
                where=str(capture),
                hint="rename one of them",
            )
        by_name[name] = path
    return by_name


def upload(
    client: FleetClient,
    capture: Path,
    job: str = "",
    progress: Callable[[int, int], object] = lambda *_: None,
) -> Any:
    """Sends a capture and returns the service's response about it. Files from an earlier, stopped
    upload are not sent again.

    Args:
        client: The service.
        capture: A recorded run's folder, or a trace.
        job: Its job; "" if unknown.
        progress: Called with sent bytes and total bytes.

    Raises:
        InputError: As for `FleetClient.get` and `collect_files`.
    """
    files, announced, sizes = collect_files(capture), [], {}
    for name, path in files.items():
        try:
            with open_regular(path) as file:
                sha256, sizes[name] = compute_sha256(file), file.tell()
        except OSError as error:
            raise unreadable(path, error) from error
        announced.append({"name": name, "size": sizes[name], "sha256": sha256})
    answer = client.post("captures", {"files": announced, "job": job})
    sent = sum(sizes.values()) - sum(sizes[target["name"]] for target in answer["uploads"])
    for target in answer["uploads"]:
        client.send(target["url"], files[target["name"]])
        sent += sizes[target["name"]]
        progress(sent, sum(sizes.values()))
    return client.post(f"captures/{answer['id']}/complete")


def _is_uploaded(path: Path) -> bool:
    return not path.name.startswith(".") and not path.is_symlink()


def _clean_name(text: str) -> str:
    name = _UNSAFE_CHARACTERS.sub("_", text)[-190:]
    return name if name[:1].isalnum() or name.startswith("_") else f"_{name}"


DESCRIPTION = (
    "Send recorded runs or traces to the fleet's service, which analyses and keeps them. An upload that stopped goes "
    "on where it was; the same capture twice is one."
)
EXAMPLES = """\
examples:
  traceloom upload run --job slurm-42
  traceloom upload run --wait                      until it is analysed, or refused
  traceloom upload trace.json.gz --server https://fleet.example.org
then: traceloom fleet captures
"""
_POLL_S = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "captures", nargs="+", metavar="CAPTURE", help="recorded run, or trace; each is one capture"
    )
    parser.add_argument("--job", metavar="JOB", default="", help="the job that was captured")
    parser.add_argument("--wait", action="store_true", help="wait until they are analysed")
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="print the service's answers as JSON")
    types.add_verbosity_options(parser)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the service and the token."""
    parser.add_argument(
        "--server",
        metavar="URL",
        default="",
        help="address of the service (default: TRACELOOM_SERVER, else http://127.0.0.1:9466)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="file with the token (default: TRACELOOM_TOKEN, else that of this user's own service)",
    )


def create_fleet_client(args: argparse.Namespace, *, persistent: bool = False) -> FleetClient:
    """Returns a client for the service that the options name; `persistent` as of `FleetClient`.

    Raises:
        InputError: `unreadable`: the file of the token.
    """
    token = ""
    if args.token_file is not None:
        try:
            token = args.token_file.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise unreadable(args.token_file, error) from error
    return FleetClient(args.server, token, persistent=persistent)


def insert_server_options(args: argparse.Namespace, text: str) -> str:
    """Adds the options of the current service and token to the commands in a text, so that they can
    be copied.
    """
    server = f" --server {shlex.quote(FleetClient(args.server).url)}"
    token = f" --token-file {shlex.quote(str(args.token_file))}" if args.token_file else ""
    same = f"{server if args.server else ''}{token}"
    text = text.replace("trace --server URL", f"trace{server}{token}").replace(
        " --server URL", server
    )
    return re.sub(r"traceloom (fleet [a-z-]+|upload)", lambda command: command[0] + same, text)


def run(args: argparse.Namespace) -> int:
    """Sends them; returns the exit code."""
    client = create_fleet_client(args, persistent=True)
    answers = []
    with Progress(enabled=not args.quiet) as progress:
        for name in args.captures:

            def tell(sent: int, total: int, name: str = name) -> None:
                progress.show(f"{name}: {sent * 100 // max(total, 1)} %")

            answers += [upload(client, Path(name), args.job, tell)]
        for index, answer in enumerate(answers):
            while args.wait and answer["state"] in {"received", "checked", "analysed"}:
                progress.show(f"{args.captures[index]}: {answer['state']}")
                time.sleep(_POLL_S)
                answer = client.get(f"captures/{answer['id']}")  # noqa: PLW2901  (the same upload, later)
            answers[index] = answer
    if args.json:
        print(json.dumps(answers, indent=2))
    elif not args.quiet:
        for name, answer in zip(args.captures, answers, strict=True):
            print(f"{name} is {answer['id']}: {answer['state']}")
        done = [answer["id"] for answer in answers if answer["state"] == "committed"]
        next_action = f"report {done[0]} -o report.html" if done else "captures"
        print(insert_server_options(args, f"Look: traceloom fleet {next_action}"))
    refused = [answer for answer in answers if answer["state"] == "quarantined"]
    if refused:
        raise InputError(
            f"the service could not analyse it: {refused[0]['tasks'][-1]['error']}",
            slug="not-analysed",
            where=refused[0]["id"],
        )
    return 0
