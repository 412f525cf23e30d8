"""CertificateFiles reads a server's TLS certificate again when its files change, so that a renewed certificate needs no
restart."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from raymq.common.errors import ConfigError

SETTLE_READS_MAX: Final = 3
"""Number of times that two files are read again because they changed while they were read."""

logger = logging.getLogger(__name__)


class CertificateFiles:
    """The PEM files of a server's certificate and of its private key. Thread-safe."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self._lock = threading.Lock()
        self._version: tuple[tuple[int, ...], ...] = ()
        """The state of the files at the last read, by which a change is noticed."""
        self._logged = ""

    def read(self) -> ssl.SSLContext:
        """Return a context with the certificate. Raises ConfigError if a file cannot be read, or if the key belongs to
        another certificate."""
        with self._lock:
            return self._read()

    def changed(self) -> ssl.SSLContext | None:
        """Return a context with the new certificate if a file has changed since the last read, else None.

        If the changed files cannot be used, returns None, and logs each reason once: the server goes on with its former
        certificate. A file may be half written, or the other file is still the former one.
        """
        with self._lock:
            try:
                return None if self._state() == self._version else self._read()
            except (OSError, ConfigError) as error:
                if str(error) != self._logged:
                    self._logged = str(error)
                    logger.warning("the gateway goes on with its former certificate: %s", error)
                return None

    def context(self, protocols: Sequence[str] = ()) -> ssl.SSLContext:
        """Return a context for TLS servers that always uses the newest certificate for new connections. `protocols`:
        the protocols that the server offers (ALPN); empty for none. Raises ConfigError as `read` does."""
        newest = [self.read()]

        def offering(context: ssl.SSLContext) -> ssl.SSLContext:
            if protocols:
                context.set_alpn_protocols(list(protocols))
            return context

        def begin(connection: ssl.SSLObject, name: str | None, used: ssl.SSLContext) -> None:
            changed = self.changed()
            if changed is not None:
                newest[0] = offering(changed)
            connection.context = newest[0]

        # OpenSSL calls this function before it sends the certificate, also to a client that names no server
        first = offering(newest[0])
        first.sni_callback = begin
        return first

    def _read(self) -> ssl.SSLContext:
        try:
            for _ in range(SETTLE_READS_MAX):
                self._version = self._state()
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self._certificate, self._key)
                if self._state() == self._version:
                    return context
        # ssl.SSLError is an OSError
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot use the certificate {self._certificate} with the key {self._key}: {error}; "
                "gateway.tls_cert and gateway.tls_key name a certificate and its key without a password, in PEM"
            ) from None
        raise ConfigError(f"the files {self._certificate} and {self._key} change while they are read")

    def _state(self) -> tuple[tuple[int, ...], ...]:
        stats = [file.stat() for file in (self._certificate, self._key)]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in stats)
