"""WebhookHosts decides which URLs a gateway may call as web hooks: the setting `gateway.webhook_hosts`, as an object.

A user of the gateway chooses the URL, and the gateway sends the request from inside the network. So the setting names
each host, and a host name alone opens no private address: whoever owns the name could let it point to any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from raymq.common.errors import InvalidArgumentError, NoPermissionError

URL_CHARACTERS_MAX: Final = 2048
WEBHOOK_HOSTS_MAX: Final = 1000
"""Maximum number of entries of the setting."""
PLAIN: Final = "http://"
"""Prefix of an entry that also allows calls without TLS."""
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?:{_LABEL}\.)*(?=[a-z0-9_-]*[a-z]){_LABEL}")
"""A host name in lower case. Its last label has a letter, because many programs take other texts for addresses."""
_URL: Final = re.compile(
    r"""(?P<scheme>https?)://(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<host>[a-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?"""
    r"""(?:[/?][!-"$-~]*)?""",
    re.IGNORECASE,
)
"""An absolute URL without a user and without a fragment."""
_NAT64: Final = IPv6Network("64:ff9b::/96")

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class _HostEntry:
    """One entry of the setting. Exactly one of `name`, `suffix` and `network` is set. `is_plain`: whether calls
    without TLS are allowed."""

    is_plain: bool
    name: str = ""
    suffix: str = ""
    network: IPv4Network | IPv6Network | None = None

    @classmethod
    def parse(cls, text: str) -> _HostEntry:
        is_plain, host = text.startswith(PLAIN), text.removeprefix(PLAIN).lower()
        try:
            return cls(is_plain, network=ip_network(host.strip("[]")))
        except ValueError:
            pass  # the host is a name
        if _NAME.fullmatch(host):
            return cls(is_plain, name=host)
        if host.startswith("*.") and _NAME.fullmatch(host[2:]):
            return cls(is_plain, suffix=host[1:])
        raise ValueError(
            f"{text!r:.100} is no host: write a name such as hooks.example.org or *.example.org, or an address or "
            "network such as 10.0.0.7 or 10.0.0.0/8, each also with http:// before it"
        )

    def matches(self, host: str) -> bool:
        if self.network is not None:
            address = _address(host)
            return address is not None and address in self.network
        return host == self.name if self.name else host.endswith(self.suffix)


@dataclass(frozen=True, slots=True)
class WebhookHosts:
    """The hosts that a gateway may call."""

    entries: tuple[_HostEntry, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> WebhookHosts:
        """Return the hosts that the entries of the setting name. Raises ValueError if an entry is no host.

        >>> WebhookHosts.parse(["hooks.example.org", "*.example.com", "http://10.0.0.0/8"]).check("https://hooks.example.org/a")
        """
        return cls(tuple(map(_HostEntry.parse, texts)))

    def check(self, url: str) -> None:
        """Raise InvalidArgumentError if a text is not the URL of a web hook, and NoPermissionError if the setting does
        not allow its host."""
        match = _URL.fullmatch(url) if len(url) <= URL_CHARACTERS_MAX else None
        host = "" if match is None else (match["v6"] or match["host"]).lower()
        is_host = _address(host) is not None or _NAME.fullmatch(host) is not None
        if match is None or not is_host or not 1 <= int(match["port"] or 443) <= 65_535:
            raise InvalidArgumentError(
                f"the web hook {url!r:.200} must be a URL such as https://hooks.example.org/task, of at most "
                f"{URL_CHARACTERS_MAX} ASCII characters, without a user or a fragment"
            )
        found = [entry for entry in self.entries if entry.matches(host)]
        if not found:
            raise NoPermissionError(
                f"the gateway does not call the host {host!r}: add it to the setting gateway.webhook_hosts"
            )
        if match["scheme"].lower() == "http" and not any(entry.is_plain for entry in found):
            raise NoPermissionError(
                f"the gateway calls the host {host!r} only with https: the setting gateway.webhook_hosts would need "
                f"the entry {PLAIN}{host}"
            )

    def allows_address(self, text: str) -> bool:
        """Return whether the gateway may connect to an IP address. Private, loopback, link-local and other special
        addresses must be in an entry with this address or its network."""
        address = _address(text)
        return address is not None and all(_is_public(one) or self._names(one) for one in _reached(address))

    def _names(self, address: Address) -> bool:
        return any(entry.network is not None and address in entry.network for entry in self.entries)


def _address(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_public(address: Address) -> bool:
    return address.is_global and not address.is_multicast


def _reached(address: Address) -> list[Address]:
    """Return the addresses that a connection to an address may reach: an IPv6 address may have an IPv4 address in
    it."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    translated = IPv4Address(int(address) & 0xFFFF_FFFF) if address in _NAT64 else address.sixtofour
    return [address] if translated is None else [address, translated]
