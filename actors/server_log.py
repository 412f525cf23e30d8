"""The log lines of server processes: each has the time, the level, and the name of the actor.

    2026-11-25T13:14:42.123+00:00 WARNING storage-broker-a-0 actors.replica.replica: broker-a replica 0 leads epoch 7

Ray writes what a process prints to files, and to the terminal of the program that started the cluster, without a time.
"""

from __future__ import annotations

import logging
from datetime import datetime

import ray


class ServerFormatter(logging.Formatter):
    """Formats the lines of one actor. The time is local, with its distance from UTC."""

    def __init__(self, actor: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {actor.replace('%', '%%')} %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # logging's name
        """The time of a record, in ms."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def configure(server_class: str, root: logging.Logger | None = None) -> None:
    """Have the lines of this process say when and by whom. A process whose program has its own handlers keeps those.

    `server_class` names an actor without a name.
    """
    root = logging.getLogger() if root is None else root
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(ServerFormatter(_actor_name() or server_class))
    root.addHandler(handler)


def _actor_name() -> str:
    """The name of this process's actor; empty outside of one."""
    if not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_actor_name() or "")
