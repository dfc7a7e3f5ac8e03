"""One file of a web server: nothing is fetched from where the user did not point."""

from __future__ import annotations

import base64
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from traceloom.errors import InputError

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
