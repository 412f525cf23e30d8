"""A test program that exits while an interrupted `close` still runs in a helper thread."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import raymq
from tests.component.interrupts.interrupter import InterruptedByTestError
from tests.support.clusters.local_cluster import start_cluster

MARGIN_S = 0.5
"""Time, in seconds, for which the object's slow `close` continues after the program has begun to exit. If the exit did
not wait for `close`, the process would end much earlier."""
ending = threading.Event()


class Slow:
    """An object whose `close` returns only while the process exits; the test's client closes it."""

    def close(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        ending.wait()
        time.sleep(MARGIN_S)
        print("all is closed", flush=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise InterruptedByTestError


if __name__ == "__main__":
    # Register `os._exit` first, so that it runs last. It skips the shutdown of the servers in this process.
    atexit.register(os._exit, 0)
    start_cluster(Path(sys.argv[1]))
    client = raymq.connect()
    client._track(Slow())
    atexit.register(ending.set)
    signal.signal(signal.SIGUSR1, interrupt)
    try:
        client.close()
    except InterruptedByTestError:
        print("close was interrupted", flush=True)
