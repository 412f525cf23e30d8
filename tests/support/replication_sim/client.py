"""The clients of a simulated broker group: one producer and one consumer, which learn the replicas' roles only from the
replicas' answers.

If a test needs other requests of clients, or other reactions of clients to an answer, add them to this module.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from actors.core.replica.orders import ReplicaRole
from tests.support.replication_sim.node import Node

if TYPE_CHECKING:
    from tests.support.replication_sim.world import World

CLIENT = -2
"""The address that the simulated producer and consumer share in the simulated network."""


class Client:
    """A producer and a consumer. The producer resends each message until the message is acknowledged. The consumer
    reads the visible messages of masters."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent = 0
        self.unanswered: dict[int, None] = {}
        """The messages that are not acknowledged yet, in ascending order."""
        self.stopped = False
        self._loop()

    def answered(self, replica: int, message: int) -> None:
        self.world.send((replica, CLIENT), None, self.unanswered.pop, (message, None))

    def _loop(self) -> None:
        if not self.stopped and len(self.unanswered) < 20:
            self.unanswered[self.sent] = None
            self.sent += 1
        world = self.world
        for message in islice(self.unanswered, 5):
            node = world.pick_node()
            world.send((CLIENT, node.name), node.deliver, node.append, (message,))
        node = world.pick_node()
        world.send((CLIENT, node.name), node.deliver, self._read, (node,))
        world.at(0.03, self._loop)

    def _read(self, node: Node) -> None:
        if node.role.role is not ReplicaRole.FENCED:
            start = max(len(self.world.checks.seen) - 5, 0)
            shown = [message for _, message in node.disk.log[start : node.visible]]
            if shown:
                self.world.checks.see(start, shown)
