"""The address of a lane's server, and the TLS that goes with it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """The address of a lane's server: the `name` of its abstract Unix socket, and the secret that opens it.

    From other nodes it is reached at `host` and `port`, within TLS if `tls`; port 0: not at all.
    """

    name: str
    secret: bytes
    host: str = ""
    port: int = 0
    tls: bool = False


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a certificate, of its key, and of the authority that signs the other side's certificate, as PEM."""

    certificate: str
    key: str
    authority: str

    def server_context(self) -> ssl.SSLContext:
        """The context of a server that demands a certificate of its clients. OSError if a file cannot be read."""
        return self._prepare(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def client_context(self) -> ssl.SSLContext:
        """The context of a client. The server's certificate must be signed by the authority; its host name is not
        compared, because nodes are reached by their IP addresses (as in Ray)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._prepare(context)

    def _prepare(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context


def rays_tls(environment: Mapping[str, str] = os.environ) -> TlsFiles | None:
    """The files of Ray's own TLS, which RAY_USE_TLS=1 switches on for a whole cluster; None where it is off."""
    if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    return TlsFiles(
        environment["RAY_TLS_SERVER_CERT"], environment["RAY_TLS_SERVER_KEY"], environment["RAY_TLS_CA_CERT"]
    )
