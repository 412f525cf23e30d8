"""Waits until a Ray cluster has the nodes that its stores are on.

Where nodes join one after another, as with `ray up`, placing the stores too early would miss those on the nodes that
are still to come, and start empty ones in their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import ray

from raymq.client.cluster.launcher import ProgressCallback
from raymq.common.errors import ServiceNotAvailableError

POLL_INTERVAL_S: Final = 0.5
"""Time between two looks at Ray's list of nodes."""


def alive_nodes(label: str | None = None) -> list[str]:
    """The addresses of the living nodes of the Ray cluster that this process is connected to; of those that carry
    `label` only, where it is given: others hold no stores."""
    return sorted(
        node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and (label is None or label in (node.get("Labels") or {}))
    )


def await_nodes(
    count: int, timeout_s: float, progress: ProgressCallback, alive: Callable[[], list[str]] = alive_nodes
) -> None:
    """Return when at least `count` nodes are `alive`: all, the head included, if it is not given.

    ServiceNotAvailableError, which names the nodes that are there, when they are fewer after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while len(nodes := alive()) < count:
        if time.monotonic() >= deadline_s:
            raise ServiceNotAvailableError(
                f"{len(nodes)} of {count} nodes joined the Ray cluster within {timeout_s:g} s ({', '.join(nodes)}), "
                f"and no server was started: see why the others did not (`ray status`), and run `raymq up` again, or "
                f"with a smaller --wait-nodes if they stay away for good"
            )
        progress(f"waiting for nodes: {len(nodes)} of {count} joined")
        time.sleep(POLL_INTERVAL_S)
