"""The address of a lane server, and the server's TLS settings. A lane is a direct socket connection to a server's
process.

Certificates are valid for weeks, and processes run longer. So the process checks, for each new lane, whether the
certificate files have changed (three calls of `stat`, some microseconds), and reads changed files again. Open lanes
keep their certificate. If the files do not match each other, because someone is replacing them, the previous
certificate stays in use.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from raymq.common.closing import in_forked_child

logger = logging.getLogger(__name__)

SAME_LINE_PAUSE_S: Final = 60.0
"""Minimum pause in seconds between two log lines about the same refused connection. Clients retry each second and would
fill the log."""
SAME_LINES_MAX: Final = 64
"""Maximum number of different warnings that are tracked. Further warnings are logged only after a tracked warning has
expired."""
NO_TLS: Final = frozenset({"wrong version number", "http request", "packet length too long", "record layer failure"})
"""OpenSSL's error reasons for a peer that does not use TLS, but sends other bytes."""


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """The address of a server of lanes (direct socket connections): the `name` of its abstract Unix socket, and the
    secret that a client needs to open a lane. Clients on other nodes connect to `host` and `port`, with TLS if `tls` is
    set. If `port` is 0, the server serves only its own node, and `own_node_only` contains the reason."""

    name: str
    secret: bytes
    host: str = ""
    port: int = 0
    tls: bool = False
    own_node_only: str = "the server was started without an address for other nodes"

    @property
    def place(self) -> str:
        """The lane server's address for log and error texts: host and port, or the name of the Unix socket on the
        server's node."""
        return f"{self.host}:{self.port}" if self.port else f"{self.name[1:]} on its own node"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of a certificate, of the certificate's key, and of the authority (CA) that signs the peers'
    certificates."""

    certificate: str
    key: str
    authority: str

    def server_context(self) -> ssl.SSLContext:
        """Build the TLS context of a lane server, which serves direct socket connections. The server requires client
        certificates. Raises OSError if a file cannot be read."""
        return self._prepare(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def client_context(self) -> ssl.SSLContext:
        """Build the TLS context of a client. It accepts server certificates that the authority has signed.

        Host names are not compared, because clients connect to IP addresses, as in Ray. Raises OSError if a file cannot
        be read.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._prepare(context)

    def _prepare(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context

    def stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Return the inode, the size in bytes and the time of the last change in ns of each TLS file. Raises OSError if
        a file does not exist."""
        found = [os.stat(path) for path in (self.certificate, self.key, self.authority)]
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)


class TlsContext:
    """The TLS context for the client's end or the server's end of lanes (direct socket connections). It is built from
    files that may be replaced at any time. Thread-safe."""

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles], ssl.SSLContext]) -> None:
        """`make`: the method of TlsFiles that builds the TLS context from `files`. Raises OSError, or its subclass
        ssl.SSLError, if the files are unreadable or do not match each other."""
        self.files = files
        self._make = make
        self._lock = threading.Lock()
        self._stamps = files.stamps()
        self._context = make(files)

    def current(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection, built from the current files.

        If the files cannot be read or do not match each other, logs a warning and returns the previous context.
        """
        with self._lock:
            try:
                stamps = self.files.stamps()
                if stamps != self._stamps:
                    self._context = self._make(self.files)
                    # Keep the stamps (inodes, sizes and times of change of the TLS files) that were taken before the
                    # files were read. So a file that changed during the read is read again next time.
                    self._stamps = stamps
                    logger.info(
                        "new lanes (raymq's connections for messages) use the new certificate in %s",
                        self.files.certificate,
                    )
            except OSError as error:
                rate_limited_log.warn(
                    ("files", self.files.certificate, failure_text(error)),
                    f"the TLS files do not match each other ({failure_text(error)}): {self.files.certificate}, "
                    f"{self.files.key}, {self.files.authority}. New lanes use the previous files. Unless the files are "
                    "being replaced now, install a certificate, its key and its authority",
                )
            return self._context


@lru_cache(maxsize=8)
def client_tls(files: TlsFiles) -> TlsContext:
    """Return the TLS context with which this process connects lanes (direct socket connections) to servers. Raises
    OSError if the certificate files are unreadable or do not match each other; the next call reads them again."""
    return TlsContext(files, TlsFiles.client_context)


class RateLimitedLog:
    """Logs warnings, but at most one in SAME_LINE_PAUSE_S seconds for each key. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._told_s: dict[tuple[str, ...], float] = {}

    def warn(self, key: tuple[str, ...], line: str) -> None:
        """Log the warning `line`, unless a warning for `key` was logged recently, or too many keys are tracked."""
        now_s = self._clock()
        with self._lock:
            told_s = self._told_s.get(key)
            if told_s is not None and now_s - told_s < SAME_LINE_PAUSE_S:
                return
            if told_s is None and len(self._told_s) >= SAME_LINES_MAX:
                self._told_s = {one: at for one, at in self._told_s.items() if now_s - at < SAME_LINE_PAUSE_S}
                if len(self._told_s) >= SAME_LINES_MAX:
                    return
            self._told_s[key] = now_s
        logger.warning("%s", line)


rate_limited_log: Final = RateLimitedLog()
in_forked_child(rate_limited_log.__init__)  # type: ignore[misc]


def failure_text(error: BaseException) -> str:
    """Return OpenSSL's reason for a TLS failure, without OpenSSL's file and line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    reason = getattr(error, "reason", None)
    return reason.replace("_", " ").lower() if isinstance(reason, str) and reason else str(error)


def refused_by_server(error: ssl.SSLError, peer: str, label: str, files: TlsFiles) -> str:
    """Return the log message for a failed TLS handshake; empty if the client merely disconnected."""
    text = failure_text(error)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ""
    if text in NO_TLS:
        return (
            f"a connection from {peer} to {label} is refused: {peer} does not use TLS. Set RAY_USE_TLS=1 on that node"
        )
    if "alert" in text:
        return (
            f"{peer} refuses the certificate of {label}, {files.certificate} ({text}): let an authority in that "
            "node's RAY_TLS_CA_CERT sign the certificate"
        )
    return (
        f"a connection from {peer} to {label} is refused: {peer} has no certificate that an authority in "
        f"{files.authority} signed ({text}). Give that node such a certificate, in RAY_TLS_SERVER_CERT and "
        "RAY_TLS_SERVER_KEY"
    )


def refused_by_client(error: ssl.SSLError, peer: str, files: TlsFiles) -> str:
    """Return the error text for a client whose TLS handshake with the server at `peer` failed."""
    text = failure_text(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of the server at {peer} is not accepted by this node ({text}): let an authority in "
            f"{files.authority} sign the certificate"
        )
    if text in NO_TLS:
        return f"the server at {peer} does not use TLS. Set RAY_USE_TLS=1 on that node and restart raymq there"
    return (
        f"the server at {peer} refuses this node's certificate, {files.certificate} ({text}): let an authority in "
        "that node's RAY_TLS_CA_CERT sign the certificate"
    )


def rays_tls(environment: Mapping[str, str] = os.environ) -> TlsFiles | None:
    """Return the TLS files that Ray itself uses, or None if RAY_USE_TLS is off. Raises KeyError if RAY_USE_TLS is on,
    but the environment variable of a file is not set."""
    if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    return TlsFiles(
        environment["RAY_TLS_SERVER_CERT"], environment["RAY_TLS_SERVER_KEY"], environment["RAY_TLS_CA_CERT"]
    )
