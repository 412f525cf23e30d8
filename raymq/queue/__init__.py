"""The interface of `ray.util.queue` on topics, so that items survive the processes that put them.

from raymq.queue import Empty, Full, Queue

queue.py    Queue: the methods of `ray.util.queue.Queue`
link.py     QueueLink: the connection of one process to one queue, which leases and removes items
"""

from __future__ import annotations

from ray.util.queue import Empty, Full

from raymq.queue.queue import Queue

__all__ = ["Empty", "Full", "Queue"]
