"""TCP ports for servers that a test starts on a port that it names in advance.

Such a port must stay free until the server listens. Linux gives ports from 32,768 on to sockets that name no port, and
Ray gives its workers ports below 20,000. So the ports between these two ranges are used, each by one test process.
"""

from __future__ import annotations

import random
import socket
from typing import Final

PORTS: Final = range(20_000, 32_768)
_TRIES: Final = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of `host` on which nothing listens. No other test process gets this port until this process
    ends. Raises RuntimeError if many random ports are all in use.

    The port is reserved by the name of a socket in Linux's abstract namespace. No two processes can own the same name,
    and Linux frees it when the process ends.
    """
    for port in random.SystemRandom().sample(PORTS, _TRIES):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0raymq-test-port-{port}")
            with socket.socket() as free:
                free.bind((host, port))
        except OSError:
            name.close()
            continue  # another test process has reserved the port, or a program uses it
        name.detach()  # keep the name, and with it the port, until the process ends
        return port
    raise RuntimeError(f"{_TRIES} random TCP ports of {host} from {PORTS[0]} to {PORTS[-1]} are all in use")
