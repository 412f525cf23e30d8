"""WebhookSender makes the HTTP requests of web hooks.

A request goes only to hosts and addresses that the setting allows. The addresses are checked after the host name is
resolved, and the connection goes to a checked address, so a name that changes between check and call opens nothing.
Redirects are not followed, and no proxy is used. The answer's body is not read.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from raymq.common.config.webhook_hosts import WebhookHosts
from raymq.common.errors import ConfigError, InvalidArgumentError, NoPermissionError, RaymqError
from raymq.gateway.webhooks.event import WebhookEvent, event_body, event_headers, event_id, parse_keys

WEBHOOK_CALL_S: Final = 10.0
"""Time in seconds that a web hook has for its answer, the connection included."""
WEBHOOK_CONNECT_S: Final = 5.0
SECRET_BYTES_MAX: Final = 4096
"""Maximum size in bytes of the file with the keys."""
USER_AGENT: Final = "raymq-gateway"

REFUSED, TIMEOUT, CONNECTION, STATUS = "refused", "timeout", "connection", "status"


class WebhookFailedError(RaymqError):
    """A web hook did not accept an event. `reason`: one of REFUSED, TIMEOUT, CONNECTION and STATUS. `text`: what
    happened."""

    code: ClassVar[int] = 1

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason, text)
        self.reason, self.text = reason, text

    def __str__(self) -> str:
        return self.text


class AddressRefusedError(OSError):
    """A host has no address that the setting allows."""


class CheckedResolver(AbstractResolver):
    """Resolves host names to the addresses that `hosts` allows. `resolver`: resolves names to all addresses."""

    def __init__(self, hosts: WebhookHosts, resolver: AbstractResolver) -> None:
        self._hosts, self._resolver = hosts, resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the allowed addresses of a host. Raises AddressRefusedError if none is allowed."""
        found = await self._resolver.resolve(host, port, family)
        allowed = [one for one in found if self._hosts.allows_address(one["host"])]
        if not allowed:
            addresses = ", ".join(sorted({one["host"] for one in found})[:4])
            raise AddressRefusedError(
                f"the host {host!r} has only the addresses {addresses}: an address that is not public must be in the "
                "setting gateway.webhook_hosts"
            )
        return allowed

    async def close(self) -> None:
        await self._resolver.close()


class WebhookSender:
    """The requests of one gateway process, in its event loop. Close it.

    `keys`: returns the keys of the signatures; it may block for the time of a small read. `resolver`: resolves host
    names; by default the machine's resolver.
    """

    def __init__(
        self,
        hosts: WebhookHosts,
        keys: Callable[[], Sequence[bytes]],
        *,
        resolver: AbstractResolver | None = None,
        timeout_s: float = WEBHOOK_CALL_S,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._hosts, self._keys, self._now_s = hosts, keys, now_s
        self._resolver = CheckedResolver(hosts, resolver or aiohttp.ThreadedResolver())
        # A connection for each call, and no cache of addresses: each call is checked. The deliveries bound the calls.
        connector = aiohttp.TCPConnector(resolver=self._resolver, use_dns_cache=False, force_close=True, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=WEBHOOK_CONNECT_S),
            headers={"User-Agent": USER_AGENT},
            trust_env=False,
        )

    async def send(self, url: str, event: WebhookEvent) -> None:
        """Call a web hook once. Raises WebhookFailedError unless the answer has a status 2xx. After an error the
        receiver may have got the event all the same."""
        try:
            self._hosts.check(url)
            target = URL(url, encoded=True)
            keys = self._keys()
        except (NoPermissionError, InvalidArgumentError, ConfigError, ValueError) as error:
            raise WebhookFailedError(REFUSED, str(error)) from None
        body = event_body(event)
        headers = event_headers(event_id(event), body, keys, self._now_s())
        try:
            async with self._session.post(target, data=body, headers=headers, allow_redirects=False) as answer:
                status = answer.status
        except TimeoutError:
            raise WebhookFailedError(TIMEOUT, f"{_place(target)} did not answer in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            refused = next((one for one in (error, error.__cause__) if isinstance(one, AddressRefusedError)), None)
            if refused is not None:
                raise WebhookFailedError(REFUSED, str(refused)) from None
            raise WebhookFailedError(CONNECTION, f"{_place(target)} cannot be called: {error}") from None
        if not 200 <= status < 300:
            raise WebhookFailedError(STATUS, f"{_place(target)} answered with the status {status}")

    def key_error(self) -> str:
        """Return why the keys of the signatures cannot be used now; empty if they can. Any thread may call this
        method."""
        try:
            self._keys()
        except ConfigError as error:
            return str(error)
        return ""

    async def close(self) -> None:
        """Close the connections. Calls that run end with an error. Idempotent."""
        await self._session.close()
        await self._resolver.close()


def read_keys(path: Path | None) -> list[bytes]:
    """Return the keys of the secret file; no key if there is no file. Raises ConfigError if the file cannot be
    used."""
    if path is None:
        return []
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(SECRET_BYTES_MAX + 1)
        if len(data) > SECRET_BYTES_MAX:
            raise ConfigError(f"the file of gateway.webhook_secret, {path}, has more than {SECRET_BYTES_MAX} bytes")
        return parse_keys(data.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of gateway.webhook_secret, {path}, cannot be read: {error}") from None


def _place(url: URL) -> str:
    """Return the part of a URL that an error may show: paths and queries of web hooks often have secrets."""
    return f"{url.scheme}://{url.authority}"
