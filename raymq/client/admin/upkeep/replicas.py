"""Administration: changes the number of a broker group's replicas while the group works, and replaces one of them.

The Controller executes a change step by step (placement.membership), and continues it after a restart. So a call only
orders the change, and `wait_for_replicas` waits for its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from raymq.client.admin.base import AdminBase, unknown_broker
from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.names import CONTROLLER, REPLICAS_OF_GROUP_MAX
from raymq.common.numbers import NOT_NEGATIVE, TIME_S, NumberRange, bounded
from raymq.common.protocol.status import ReplicaGroupReport
from raymq.remoting.actor_ref import ActorRef, find_actor

CONTROLLER_CALL_TIMEOUT_S: Final = 10.0
REPLICAS_POLL_S: Final = 0.3
REPLICAS_WAIT_S: Final = 240.0


class ReplicaAdmin(AdminBase):
    """Administration calls about the replicas of broker groups. Only super users may change replicas."""

    def replicas(self, broker_name: str) -> ReplicaGroupReport:
        """Return the replicas of a broker group, as the Controller sees them. `change` has the current change of the
        replicas and what it waits for.

        Raises InvalidArgumentError if the broker group does not exist, or has no Controller.
        """
        groups = {one.broker: one for one in msgspec.convert(_controller("status")["groups"], list[ReplicaGroupReport])}
        if broker_name not in groups:
            raise unknown_broker(broker_name, groups)
        return groups[broker_name]

    @bounded(count=NumberRange(1, REPLICAS_OF_GROUP_MAX), replace=NOT_NEGATIVE)
    def change_replicas(self, broker_name: str, count: int | None = None, *, replace: int | None = None) -> None:
        """Change a broker group to `count` replicas, or replace the replica `replace` by a new replica on another node.

        The order is durable on return; the Controller executes it while messages are sent and read. New replicas copy
        the log first, and count as copies when they have every confirmed message. Only then other replicas leave; a
        master hands over first. The directories of removed replicas stay on their disks.

        Raises InvalidArgumentError if another change has not ended, or if the change is not possible: the error has the
        reason. Raises RequestTimeoutError if it is unknown whether the Controller has the order: `replicas` shows it.
        """
        if count is None and replace is None:
            raise InvalidArgumentError("name the number of replicas, or the replica to replace")
        _controller("change_replicas", broker_name, count, replace)

    @bounded(least=NumberRange(1, REPLICAS_OF_GROUP_MAX))
    def change_min_in_sync_replicas(self, broker_name: str, least: int) -> None:
        """Change the minimum number of replicas in sync with which a broker group accepts messages.

        From then on `min_in_sync_replicas` in raymq.yaml no longer counts for this broker group. The order is durable
        on return, and the master follows it within a second. Raises InvalidArgumentError if the replicas are being
        changed, or if fewer replicas are in sync, so that the group would refuse messages.
        """
        _controller("change_min_in_sync", broker_name, least)

    def cancel_replica_change(self, broker_name: str) -> None:
        """Cancel the current change of a broker group's replicas: the replicas that it has added leave again.

        The order is durable on return. Raises InvalidArgumentError if there is no change, or if a replica has already
        left.
        """
        _controller("cancel_change", broker_name)

    @bounded(timeout_s=TIME_S)
    def wait_for_replicas(
        self,
        broker_name: str,
        timeout_s: float = REPLICAS_WAIT_S,
        progress: Callable[[str], None] = lambda step: None,
    ) -> ReplicaGroupReport:
        """Wait until the current change of a broker group's replicas has ended, at most `timeout_s` seconds, also while
        the Controller restarts. Returns the replicas then: `change` is empty if the change has ended.

        `progress` gets what the change waits for. Raises the errors of `replicas`, except while the Controller does not
        answer.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                group = self.replicas(broker_name)
            except InvalidArgumentError:
                raise
            except RaymqError as error:
                if time.monotonic() >= deadline_s:
                    raise
                progress(f"waiting for the Controller: {error}")
            else:
                if not group.change or time.monotonic() >= deadline_s:
                    return group
                progress(group.change)
            time.sleep(REPLICAS_POLL_S)


def _controller(method: str, *args: Any) -> Any:
    """Call a method of the Controller. Raises InvalidArgumentError if this raymq has no Controller."""
    if find_actor(CONTROLLER) is None:
        raise InvalidArgumentError(
            "this raymq has no Controller, so its replicas cannot be changed: set `replication: "
            "{enable_controller_mode: true}` in raymq.yaml, then raymq down and raymq up"
        )
    return ActorRef(CONTROLLER).call(method, *args, timeout_s=CONTROLLER_CALL_TIMEOUT_S)
