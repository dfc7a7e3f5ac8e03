"""Webhooks: signs events of the fleet and delivers them to URLs set by an administrator, with
retries.

Deliveries are signed by the Standard Webhooks convention. Pending deliveries are in the state, so
that a restart loses none; a repeated delivery has the same id. The host name is resolved before
each delivery, and the connection uses the address that was checked: nobody can make the service
connect to a network that its operator did not allow (SSRF).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import ssl
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from traceloom import __version__
from traceloom.errors import InputError, TraceloomError
from traceloom.fleet.store.rules import Delivery, FleetEvent, WebhookState

LOG = logging.getLogger("traceloom.collect")
_SECOND_NS = 1_000_000_000
_FIRST_RETRY_NS, _MAX_RETRY_NS = 10 * _SECOND_NS, 3600 * _SECOND_NS
_MAX_DELIVERY_AGE_NS = 86_400 * _SECOND_NS
_REQUEST_TIMEOUT_S = 10.0  # from resolving the name to the first line of the response
_MAX_LINE_BYTES = 4096
_POLL_INTERVAL_S = 1.0
# Though some versions of Python call them global. Of IPv6 only 2000::/3 is assigned to the public:
# other prefixes lead to all of IPv4 (NAT64), or nobody says where.
_NOT_PUBLIC_NETWORKS = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "::/3", "4000::/2", "8000::/1"))
)

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class WebhookTarget(NamedTuple):
    """Resolved target of a webhook: the checked address, and what to request from the server."""

    address: str
    port: int
    host: str
    path: str
    tls: bool


class WebhookAddressPolicy:
    """Decides which addresses webhooks may use.

    Public addresses need TLS; networks that the operator allowed do not.

    Args:
        allowed_networks: As `10.1.0.0/16` or `127.0.0.1`.

    Raises:
        InputError: `wrong-config`: one is not a network.
    """

    def __init__(self, allowed_networks: Iterable[str] = ()) -> None:
        try:
            self._allowed_networks: list[IpNetwork] = [
                ipaddress.ip_network(network) for network in allowed_networks
            ]
        except ValueError as error:
            raise InputError(
                f"that is no network: {error}", slug="wrong-config", hint="as 10.1.0.0/16"
            ) from error

    async def resolve(self, url: str) -> WebhookTarget:
        """Resolves a URL and checks its address.

        Raises:
            InputError: `wrong-webhook`: it is not such a URL, has no address, or one that is not
                allowed.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"`{url}` is no address: {error}", slug="wrong-webhook") from error
        if (
            any(not 33 <= ord(character) <= 126 for character in url)
            or parts.scheme not in {"http", "https"}
            or not parts.hostname
            or "@" in parts.netloc
        ):
            raise InputError(
                f"`{url[:200]}` is no address, as https://chat.example/hook", slug="wrong-webhook"
            )
        tls = parts.scheme == "https"
        port = port or (443 if tls else 80)
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=1)
        except (OSError, UnicodeError) as error:
            raise InputError(
                f"`{parts.hostname}` has no address now", slug="wrong-webhook"
            ) from error
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        for *_, socket_address in answers:
            address = str(socket_address[0]).partition("%")[0]
            ip_address = ipaddress.ip_address(address)
            if isinstance(ip_address, ipaddress.IPv6Address):
                ip_address = ip_address.ipv4_mapped or ip_address.sixtofour or ip_address
            is_public = (
                ip_address.is_global
                and not ip_address.is_multicast
                and not any(ip_address in network for network in _NOT_PUBLIC_NETWORKS)
            )
            if (tls and is_public) or any(
                ip_address in network for network in self._allowed_networks
            ):
                return WebhookTarget(address, port, parts.netloc, path, tls)
        raise InputError(
            f"`{parts.hostname}` is an address that webhooks may not lead to"
            if tls
            else "a webhook needs https://",
            slug="wrong-webhook",
            hint="`traceloom serve --webhooks-to NETWORK` allows addresses within a network, and plain HTTP there",
        )


class WebhookDispatcher:
    """Sends pending deliveries, in parallel across webhooks. Runs in the service's event loop.

    Args:
        state: Holds pending deliveries.
        address_policy: Which addresses are allowed.
        clock: Now, in ns since the epoch.
        tls_context: Trusted certificates; None: those of the system.
    """

    def __init__(
        self,
        state: WebhookState,
        address_policy: WebhookAddressPolicy,
        clock: Callable[[], int] = time.time_ns,
        tls_context: ssl.SSLContext | None = None,
    ) -> None:
        self.state, self.targets, self.clock = state, address_policy, clock
        self._tls_context = tls_context
        # Webhook -> its delivery in progress.
        self._in_flight: dict[str, asyncio.Task[None]] = {}

    async def run_forever(self) -> None:
        """Sends due deliveries until cancelled; the next service repeats those in progress."""
        try:
            while True:
                try:
                    started = await self.start_due_deliveries()
                except TraceloomError as error:
                    LOG.warning("webhooks: %s", error)
                    started = False
                if self._in_flight and started:
                    await asyncio.wait(
                        self._in_flight.values(),
                        timeout=_POLL_INTERVAL_S,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                else:
                    await asyncio.sleep(_POLL_INTERVAL_S)
        finally:
            tasks = list(self._in_flight.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def start_due_deliveries(self) -> bool:
        """Starts the oldest due delivery of each idle webhook; returns whether there was one."""
        due = await asyncio.to_thread(
            self.state.due_deliveries, self.clock(), frozenset(self._in_flight)
        )
        for delivery in due:
            task = asyncio.create_task(
                self._send_and_record(delivery), name=f"webhook {delivery.webhook}"
            )
            self._in_flight[delivery.webhook] = task
            task.add_done_callback(lambda _, name=delivery.webhook: self._in_flight.pop(name, None))  # type: ignore[misc]
        return bool(due)

    async def send(self, delivery: Delivery) -> str:
        """Sends a delivery now; returns the reason why it failed, "" if it succeeded."""
        try:
            return await asyncio.wait_for(self._post(delivery), _REQUEST_TIMEOUT_S)
        except (asyncio.TimeoutError, TimeoutError):
            return f"no answer within {_REQUEST_TIMEOUT_S:g} s"
        except InputError as error:
            return error.message
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:500]

    async def _send_and_record(self, delivery: Delivery) -> None:
        error = await self.send(delivery)
        now_ns = self.clock()
        retry_at_ns = (
            now_ns + min(_FIRST_RETRY_NS << min(delivery.attempts, 16), _MAX_RETRY_NS)
            if error and now_ns - delivery.created_ns < _MAX_DELIVERY_AGE_NS
            else None
        )
        try:
            await asyncio.to_thread(self.state.close_delivery, delivery, error, retry_at_ns)
        except TraceloomError as state_error:  # it is sent again, with the same id
            LOG.warning("webhook %s: %s", delivery.webhook, state_error)

    async def _post(self, delivery: Delivery) -> str:
        target = await self.targets.resolve(delivery.url)
        body = delivery.document.encode()
        timestamp = self.clock() // _SECOND_NS
        head = "".join(
            f"{line}\r\n"
            for line in (
                f"POST {target.path} HTTP/1.1",
                f"Host: {target.host}",
                f"User-Agent: traceloom/{__version__}",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
                "Connection: close",
                f"webhook-id: {delivery.id}",
                f"webhook-timestamp: {timestamp}",
                f"webhook-signature: {sign_body(delivery, timestamp)}",
                "",
            )
        )
        reader, writer = await asyncio.open_connection(
            target.address,
            target.port,
            limit=_MAX_LINE_BYTES,
            ssl=(self._tls_context or ssl.create_default_context()) if target.tls else None,
            server_hostname=urlsplit(delivery.url).hostname if target.tls else None,
        )
        try:
            writer.write(head.encode("ascii") + body)
            await writer.drain()
            status_line = (await reader.readuntil(b"\n")).split(maxsplit=2)
        finally:
            writer.close()
        if (
            len(status_line) < 2
            or not status_line[0].startswith(b"HTTP/")
            or not status_line[1].isdigit()
        ):
            return "what answers there does not speak HTTP"
        status = int(status_line[1])  # a redirect is an error: it could target any address
        return "" if 200 <= status < 300 else f"it answers {status}"


def sign_body(delivery: Delivery, timestamp: int) -> str:
    """Returns the signature of a delivery by the Standard Webhooks convention: HMAC-SHA256 of
    `ID.TIMESTAMP.BODY` by the decoded secret, as `v1,BASE64`.
    """
    key = base64.b64decode(delivery.secret.removeprefix("whsec_"))
    content = f"{delivery.id}.{timestamp}.{delivery.document}".encode()
    return f"v1,{base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()}"


def build_fleet_event(
    name: str, content_key: str, subject: str, content: object, at_ns: int
) -> FleetEvent:
    """Builds an event with its body.

    Args:
        name: As `request.done`.
        content_key: The key of its content, as `request`.
        subject: Identifies it among events of that name.
        content: Content of the event.
        at_ns: When it occurred.
    """
    event_id = f"{name}:{subject}"
    body = {"version": 1, "id": event_id, "event": name, "at_ns": at_ns, content_key: content}
    return FleetEvent(event_id, name, msgspec.json.encode(body).decode())
