"""The format of the log messages of server processes: each message has the time, the level, and the actor's name.

    2026-11-25T13:14:42.123+00:00 WARNING storage-broker-a-0 actors.replica.replica: broker-a replica 0 leads epoch 7

The time is needed in the message: Ray writes a process's output to files, and to the terminal of the program that
started the cluster, without a time.
"""

from __future__ import annotations

import logging
from datetime import datetime

import ray


class ServerFormatter(logging.Formatter):
    """Formats the log messages of one actor. The time is local, with its offset from UTC."""

    def __init__(self, actor: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {actor.replace('%', '%%')} %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # logging's name
        """Return the time of a log record, with milliseconds."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def configure(server_class: str, root: logging.Logger | None = None) -> None:
    """Add the time and the actor name to the log messages of this process. Does nothing if the program has configured
    log handlers itself."""
    root = logging.getLogger() if root is None else root
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(ServerFormatter(_actor_name() or server_class))
    root.addHandler(handler)


def _actor_name() -> str:
    """Return the name of this process's actor; empty outside of an actor."""
    if not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_actor_name() or "")
