"""GroupMember sends a consumer's heartbeats to its group. The group's answers grant, revoke and keep the queues.

    next_heartbeat (wanted topics, queues held) → Rebalance → assigned: AssignedQueues.assignment_received, a new lease
                                                            → unanswered, too long: AssignedQueues.fence

If a Rebalance actor dies, the members keep their queues while their leases last. The next actor rebuilds the group from
the heartbeats of its members. The new actor counts offset resets from 0 again, so the members ask their brokers about
resets. Only `leave` blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Final

from raymq.client.consumer.assignment.assigned_queues import FENCE_AFTER_S, AssignedQueues
from raymq.client.consumer.rebalance_client import Membership, RebalanceClient
from raymq.common.errors import RaymqError, SubscriptionConflictError
from raymq.common.protocol.membership import (
    ALL_MESSAGES,
    MEMBER_HEARTBEAT_INTERVAL_S,
    Allocation,
    GroupAssignment,
    GroupHeartbeat,
)

ALONE_S: Final = 2 * MEMBER_HEARTBEAT_INTERVAL_S
"""Seconds after the start of a heartbeat for which its answer shows that the group has no other member."""

logger = logging.getLogger(__name__)


class GroupMember:
    """The member `name` of the consumer group `group`, and the HeartbeatSource of its heartbeats. Thread-safe.

    `core`, guarded by `lock`, holds the member's queues. `node_id` is the Ray node on which this process runs; it is
    used to allocate queues by machine. `expressions`, called with the lock held, returns the subscription expression of
    each topic. `on_assigned` is called after each answer of the group, which may have changed the queues. `on_reset` is
    called after offsets of the group were reset.
    """

    def __init__(
        self,
        core: AssignedQueues[Any],
        lock: threading.Lock,
        rebalance: RebalanceClient,
        *,
        group: str,
        name: str,
        node_id: str,
        allocation: Allocation,
        on_assigned: Callable[[], None],
        on_reset: Callable[[], None],
        expressions: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._core, self._lock, self._rebalance = core, lock, rebalance
        self._group, self._name, self._node_id, self._allocation = group, name, node_id, allocation
        self._on_assigned, self._on_reset, self._expressions = on_assigned, on_reset, expressions
        self._membership: Membership | None = None
        """The consumer's membership; None before the consumer joins its group."""
        self._failure: RaymqError | None = None
        """The error of the member's last heartbeat; None if that heartbeat succeeded."""
        self._alone_until_s = 0.0
        """Time of `time.monotonic` until which the group is known to have no other member."""
        self.refusal: SubscriptionConflictError | None = None
        """The error with which the group refuses this member; None if the group accepts the member."""

    def check(self, expressions: Mapping[str, str]) -> None:
        """Check this member's subscriptions with the group, in a blocking call. Raises SubscriptionConflictError if
        other members have a different expression for one of the topics.

        Makes no call if the answer to a recent heartbeat states that the group has no other member. If a member has
        joined since, the next heartbeat reports a conflict (`raise_refusal`).
        """
        if time.monotonic() >= self._alone_until_s:
            self._rebalance.check(self._group, self._name, expressions)

    def join(self) -> None:
        """Join the group: start to send heartbeats. Raises the errors of RebalanceClient.join."""
        self._membership = self._rebalance.join(self._group, self)

    def beat_soon(self) -> None:
        """Send the next heartbeat at once, because other members wait for a change of this member."""
        if self._membership is not None:
            self._membership.beat_soon()

    def fence(self) -> None:
        """Give up all queues if the group has not answered a heartbeat for FENCE_AFTER_S. Other members may get the
        queues now."""
        with self._lock:
            lost = self._core.fence(time.monotonic())
        if lost:
            logger.warning(
                "member %s releases its queues: group %s has not answered for %g s",
                self._name,
                self._group,
                FENCE_AFTER_S,
            )

    def release(self) -> None:
        """Release the revoked queues whose messages are finished. The next heartbeat is sent at once, because other
        members wait for these queues."""
        with self._lock:
            released = self._core.leaving and self._core.release(time.monotonic())
        if released:
            self.beat_soon()

    def leave(self) -> None:
        """Give up all queues and leave the group. If the group cannot be reached, it keeps the member until the
        member's session expires. May block for a few seconds."""
        with self._lock:
            self._core.lose_all()
        if self._membership is not None:
            self._membership.leave(self._farewell())

    def raise_failure(self) -> None:
        """Raise the error of the last heartbeat if the group has never answered a heartbeat."""
        with self._lock:
            joined = self._core.joined
        failure = self._failure
        if not joined and failure is not None:
            # Raise a copy: each raise of one error object makes its traceback longer, and polls raise it again and
            # again.
            raise copy(failure) from failure

    def raise_refusal(self) -> None:
        """Raise SubscriptionConflictError if the group refuses this member. The group refuses a member while other
        members subscribe to one of its topics with a different expression."""
        if self.refusal is not None:
            raise SubscriptionConflictError(*self.refusal.args)

    # HeartbeatSource methods, called from the client's threads

    def next_heartbeat(self) -> GroupHeartbeat | None:
        """Return a heartbeat with the queues that this member holds and the topics that it wants. If the member is
        absent (its program does not poll), the first call returns a last heartbeat that gives up all queues, and later
        calls return None."""
        with self._lock:
            if not self._core.is_absent(time.monotonic()):
                return GroupHeartbeat(
                    self._name,
                    self._core.topics,
                    self._core.holding,
                    allocation=self._allocation,
                    node=self._node_id,
                    expressions={t: text for t, text in self._expressions().items() if text != ALL_MESSAGES},
                )
            if not self._core.lose_all():
                return None
        logger.warning("member %s leaves group %s: its program has stopped polling", self._name, self._group)
        return self._farewell()

    def assigned(self, assignment: GroupAssignment, sent_s: float) -> None:
        """Apply the group's answer to a heartbeat. The answer renews the lease on the queues."""
        self.refusal = None
        self._alone_until_s = sent_s + ALONE_S if assignment.members == 1 else 0.0
        with self._lock:
            known_version = self._core.offsets_version
            self._core.assignment_received(assignment, sent_s)
        if known_version not in (None, assignment.offsets_version):
            self._on_reset()
        self.release()
        self._on_assigned()

    def unanswered(self, error: RaymqError) -> None:
        """Record that the group did not answer a heartbeat. The member uses its queues while the lease lasts."""
        logger.info("member %s got no answer from its group: %s", self._name, error)
        self._failure = error
        self.fence()

    def refused(self, error: SubscriptionConflictError) -> None:
        """Record that the group does not accept this member. Heartbeats continue, so that this member gets queues after
        the conflicting members have left. While the lease lasts, the member uses the queues that it holds."""
        if self.refusal is None:
            logger.warning("the group refuses member %s: %s", self._name, error)
        self.refusal, self._alone_until_s = error, 0.0
        self.fence()
        self._on_assigned()

    def _farewell(self) -> GroupHeartbeat:
        return GroupHeartbeat(self._name, frozenset(), frozenset(), leaving=True)
