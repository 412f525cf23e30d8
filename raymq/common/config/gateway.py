"""The settings of the gateway, which serves clients of RocketMQ 5 outside Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from raymq.common.config.metrics import MetricsSettings
from raymq.common.config.section import SettingsSection
from raymq.common.config.values import is_loopback
from raymq.common.config.webhook_hosts import WEBHOOK_HOSTS_MAX, WebhookHosts
from raymq.common.names import GatewayName

PROCESSES_MAX: Final = 64
"""Maximum number of gateway processes on one node."""
_ADDRESS: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]/]{1,253})):([0-9]{1,5})")


class GatewayOptions(SettingsSection):
    """The section `gateway` of raymq.yaml: where gateways run, and the address at which clients reach them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable: bool = False
    """`true`: `raymq up` starts the gateway."""
    nodes: Literal["head", "all"] = "head"
    """The nodes on which gateways run: `head`, or `all` nodes of the Ray cluster."""
    host: str = "127.0.0.1"
    """The address on which each gateway listens, on its node. An address other than loopback needs a TLS certificate,
    or `insecure`. With `access.enable`, it needs the certificate."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 8081
    """The TCP port on which each gateway listens. The port is the same on all nodes."""
    http_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """The TCP port on which each gateway also answers HTTP, with the same host and TLS; `0`: no HTTP."""
    processes: Annotated[int, Field(ge=1, le=PROCESSES_MAX)] = 1
    """Number of gateway processes on each node. They share the ports, so that a gateway uses several cores."""
    advertise: str | None = None
    """The address `HOST:PORT` that clients use after their first call. By default they stay at the address that they
    used first."""
    tls_cert: Path | None = None
    """The PEM file of the gateway's TLS certificate, on each of its nodes. A changed file is used for new
    connections."""
    tls_key: Path | None = None
    """The file of the TLS certificate's private key."""
    insecure: bool = False
    """`true`: allow connections without TLS from other machines, if `access.enable` is off."""
    webhook_hosts: Annotated[tuple[str, ...], Field(max_length=WEBHOOK_HOSTS_MAX)] = ()
    """The hosts that web hooks at the end of tasks may call: `hooks.example.org`, `*.example.org`, and addresses or
    networks such as `10.0.0.0/8`. `http://` before an entry also allows calls without TLS. Private addresses must be
    named as addresses. Without an entry, web hooks are refused."""
    webhook_secret: Path | None = None
    """The file, on each of the gateway's nodes, with the key that signs the calls of web hooks. A changed file is used
    for the next call."""

    @field_validator("advertise")
    @classmethod
    def _is_address(cls, text: str | None) -> str | None:
        if text is not None:
            parse_address(text)
        return text

    @field_validator("webhook_hosts")
    @classmethod
    def _are_hosts(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        WebhookHosts.parse(entries)
        return entries

    @field_validator("tls_cert", "tls_key", "webhook_secret")
    @classmethod
    def _is_absolute(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_absolute() and path.parts[:1] != ("~",):
            raise ValueError("must be an absolute path, because the file is on each node that runs a gateway")
        return path

    @model_validator(mode="after")
    def _is_safe(self) -> GatewayOptions:
        if self.http_port == self.port:
            raise ValueError(f"http_port and port are both {self.port}: set different ports")
        if self.webhook_hosts and not self.http_port:
            raise ValueError("webhook_hosts needs http_port, because tasks with web hooks are sent over HTTP")
        if self.webhook_secret is not None and not self.webhook_hosts:
            raise ValueError("webhook_secret has no effect without webhook_hosts: name the hosts of web hooks")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together: set both, or neither")
        if self.tls_cert is None and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} lets other machines connect, so everybody could read their messages on the way: "
                "set tls_cert and tls_key, or `insecure: true`"
            )
        return self

    @property
    def advertised(self) -> tuple[str, int] | None:
        """The host and the port that clients use after their first call; None for the address that they used first."""
        return None if self.advertise is None else parse_address(self.advertise)


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address ``HOST:PORT``. An IPv6 host has brackets. Raises ValueError.

    >>> parse_address("mq.example.org:443")
    ('mq.example.org', 443)
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match[3]) <= 65_535:
        raise ValueError("must be HOST:PORT, such as mq.example.org:8081 or [2001:db8::7]:8081")
    return match[1] or match[2], int(match[3])


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The settings with which one gateway process starts. `node`: the address of its node."""

    name: GatewayName
    node: str
    options: GatewayOptions = field(default_factory=GatewayOptions)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
