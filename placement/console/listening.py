"""The address on which the console listens: bound before anything else of it starts.

    console.port   socket
    8270           that port
    0              any that is free; Ray's next process of the console takes the same one, which it finds in a file

The file, `raymq-console-port` in the folder of Ray's session, holds the port as text. It ends with the session. A port
that another program has taken meanwhile is given up for any that is free, and that is logged.
"""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path
from typing import Final

from raymq.common.errors import ConfigError

BIND_TIMEOUT_S: Final = 10.0
"""After a kill the port may be held for a moment."""
BIND_INTERVAL_S: Final = 0.2
PORT_FILE: Final = "raymq-console-port"

logger = logging.getLogger(__name__)


def listen(host: str, port: int, folder: Path, *, restarted: bool, timeout_s: float = BIND_TIMEOUT_S) -> socket.socket:
    """A socket that is bound and does not listen yet.

    `host`: an address of this node. `port`: console.port. `folder`: where the chosen port is kept. `restarted`: True in
    a process that Ray started in place of another one, which takes up that one's port. Waits up to `timeout_s` for a
    port that is held. ConfigError if the address is not free then.
    """
    if port:
        return _bind(host, port, timeout_s)
    known = _known_port(folder) if restarted else 0
    if known:
        try:
            return _bind(host, known, timeout_s)
        except ConfigError as error:
            logger.warning("the console moves to another port: %s", error)
    bound = _bind(host, 0, timeout_s)
    try:
        (folder / PORT_FILE).write_text(str(bound.getsockname()[1]))
    except OSError as error:
        logger.warning("the console will have another port after a restart: %s", error)
    return bound


def _known_port(folder: Path) -> int:
    """The port of the process before; 0 if that is not known."""
    try:
        return int((folder / PORT_FILE).read_text())
    except (OSError, ValueError) as error:
        logger.warning("the console's port before its restart is not known: %s", error)
        return 0


def _bind(host: str, port: int, timeout_s: float) -> socket.socket:
    deadline_s = time.monotonic() + timeout_s
    while True:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            return listening
        except OSError as error:
            listening.close()
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"the console cannot listen on {host}:{port}: {error.strerror}; set console.port, 0 for any"
                ) from None
            time.sleep(BIND_INTERVAL_S)
